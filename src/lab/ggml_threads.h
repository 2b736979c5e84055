// ggml's own threads for whatever is measured beside ggml, so that both sides pay the same for starting and meeting.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

struct ggml_cgraph;
struct ggml_context;

namespace kvcell {

// Zeroed memory in huge pages where the kernel has them, 64-byte aligned.
class HugeBuffer {
 public:
  explicit HugeBuffer(size_t bytes);
  ~HugeBuffer();
  HugeBuffer(const HugeBuffer&) = delete;
  HugeBuffer& operator=(const HugeBuffer&) = delete;
  std::byte* data() const { return data_; }  // null where there is not enough memory
  size_t size() const { return bytes_; }

 private:
  std::byte* data_ = nullptr;
  size_t bytes_ = 0;
};

struct GgmlContextDeleter {
  void operator()(ggml_context* context) const;
};
using GgmlContext = std::unique_ptr<ggml_context, GgmlContextDeleter>;

// Runs graphs and functions on a fixed number of threads. One thread drives it.
class GgmlThreads {
 public:
  explicit GgmlThreads(int n_threads);
  int n_threads() const { return n_threads_; }
  // Calls part(0, n) ... part(n - 1, n) at the same time and returns when all have.
  void Run(const std::function<void(int part, int n_parts)>& part);
  void Compute(ggml_cgraph* graph);

 private:
  int n_threads_;
  std::vector<uint8_t> work_;
  const std::function<void(int, int)>* part_ = nullptr;
  GgmlContext context_;
  ggml_cgraph* graph_ = nullptr;  // one node that calls part_
};

}  // namespace kvcell
