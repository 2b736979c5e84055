// Built ggml graphs, kept by shape: a decode step finds its graph ready and its buffers allocated.
#pragma once

#include <ggml-alloc.h>
#include <ggml-cpu.h>
#include <ggml.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "kvcell/cache.h"
#include "model/architecture.h"
#include "model/graph.h"

namespace kvcell {

// Frees a ggml object that C++ owns.
template <auto Free>
struct GgmlDeleter {
  template <typename T>
  void operator()(T* object) const {
    Free(object);
  }
};

// A graph of one shape. Tensors point into the compute buffer that all graphs of a runner share.
struct StepGraph {
  int64_t n_rows = 0;
  int64_t n_wanted = 0;
  uint64_t last_used = 0;
  std::unique_ptr<ggml_context, GgmlDeleter<ggml_free>> context;
  ggml_cgraph* graph = nullptr;
  ggml_tensor* tokens = nullptr;
  ggml_tensor* positions = nullptr;
  ggml_tensor* wanted = nullptr;  // null: every row or none
  ggml_tensor* logits = nullptr;  // null: none are wanted
  ggml_cplan plan{};
};

// Runs steps of one model on a pool of threads that lives as long as the runner. Thread-compatible.
class StepRunner {
 public:
  // `h` and `architecture` must outlive the runner. Reserves the compute buffer for max_rows rows and one row of
  // logits.
  static Result<std::unique_ptr<StepRunner>> Create(const Hparams& h, const Architecture& architecture, int n_threads,
                                                    int max_rows);
  ~StepRunner();
  StepRunner(const StepRunner&) = delete;
  StepRunner& operator=(const StepRunner&) = delete;

  // The graph of a shape, built and allocated. kOutOfBudget when its buffer can't be allocated.
  Result<StepGraph*> Graph(int64_t n_rows, int64_t n_wanted);
  // Computes it with attention through `cache`.
  Status Run(StepGraph* graph, Cache* cache);

  // Bytes of buffers for a step of n_rows rows with one row of logits; what the runner of that size allocates.
  uint64_t BufferBytes(int64_t n_rows) const;

 private:
  StepRunner(const Hparams& h, const Architecture& architecture, int n_threads);
  std::unique_ptr<StepGraph> Build(int64_t n_rows, int64_t n_wanted) const;

  const Hparams& h_;
  const Architecture& architecture_;
  int n_threads_;
  Cache* cache_ = nullptr;                    // of the step that runs
  mutable std::vector<AttentionHook> hooks_;  // [n_layers]; graphs point here
  std::unique_ptr<ggml_gallocr, GgmlDeleter<ggml_gallocr_free>> allocator_;
  std::unique_ptr<ggml_threadpool, GgmlDeleter<ggml_threadpool_free>> threads_;
  std::vector<std::unique_ptr<StepGraph>> graphs_;
  std::vector<uint8_t> work_;  // ggml's scratch, shared by all graphs
  uint64_t clock_ = 0;
};

}  // namespace kvcell
