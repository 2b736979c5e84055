// Building, allocating and running step graphs.
#include "model/step_graph.h"

#include <fmt/format.h>
#include <ggml-backend.h>

#include <algorithm>

namespace kvcell {
namespace {

constexpr size_t kMaxGraphs = 8;       // decode of one or a few sequences, a full prefill chunk and some odd ends
constexpr size_t kNodesPerLayer = 48;  // Gemma 3 takes 34
constexpr size_t kNodesBeside = 32;

}  // namespace

StepRunner::StepRunner(const Hparams& h, const Architecture& architecture, int n_threads)
    : h_(h), architecture_(architecture), n_threads_(n_threads) {
  hooks_.resize(static_cast<size_t>(h.n_layers));
  for (int i = 0; i < h.n_layers; ++i) hooks_[static_cast<size_t>(i)] = {&cache_, i};
}

StepRunner::~StepRunner() = default;

Result<std::unique_ptr<StepRunner>> StepRunner::Create(const Hparams& h, const Architecture& architecture,
                                                       int n_threads, int max_rows) {
  std::unique_ptr<StepRunner> runner(new StepRunner(h, architecture, n_threads));
  ggml_cpu_init();
  ggml_threadpool_params params = ggml_threadpool_params_default(n_threads);
  runner->threads_.reset(ggml_threadpool_new(&params));
  if (runner->threads_ == nullptr)
    return Fail(StatusCode::kInternal, fmt::format("can't start {} threads; ask for fewer (--threads)", n_threads));
  runner->allocator_.reset(ggml_gallocr_new(ggml_backend_cpu_buffer_type()));
  Result<StepGraph*> largest = runner->Graph(max_rows, 1);
  if (!largest) return Fail(largest.error());
  return runner;
}

std::unique_ptr<StepGraph> StepRunner::Build(int64_t n_rows, int64_t n_wanted) const {
  const size_t n_nodes = kNodesPerLayer * static_cast<size_t>(h_.n_layers) + kNodesBeside;
  ggml_init_params params{};
  params.mem_size = ggml_tensor_overhead() * n_nodes + ggml_graph_overhead_custom(n_nodes, false);
  params.no_alloc = true;
  auto step = std::make_unique<StepGraph>();
  step->n_rows = n_rows;
  step->n_wanted = n_wanted;
  step->context.reset(ggml_init(params));
  if (step->context == nullptr) return nullptr;
  step->graph = ggml_new_graph_custom(step->context.get(), n_nodes, false);
  GraphBuilder builder(step->context.get(), h_, hooks_, n_rows, n_wanted);
  ggml_tensor* end = architecture_.Build(&builder);
  ggml_set_output(end);
  ggml_build_forward_expand(step->graph, end);
  step->tokens = builder.tokens();
  step->positions = builder.positions();
  step->wanted = builder.wanted();
  step->logits = n_wanted > 0 ? end : nullptr;
  step->plan = ggml_graph_plan(step->graph, n_threads_, threads_.get());
  return step;
}

Result<StepGraph*> StepRunner::Graph(int64_t n_rows, int64_t n_wanted) {
  for (const auto& step : graphs_) {
    if (step->n_rows == n_rows && step->n_wanted == n_wanted) {
      step->last_used = ++clock_;
      return step.get();
    }
  }
  std::unique_ptr<StepGraph> step = Build(n_rows, n_wanted);
  const size_t before = ggml_gallocr_get_buffer_size(allocator_.get(), 0);
  if (step == nullptr || !ggml_gallocr_alloc_graph(allocator_.get(), step->graph)) {
    graphs_.clear();  // the allocator may have freed the buffer that they point into
    return Fail(StatusCode::kOutOfBudget,
                fmt::format("no memory for the work buffers of {} rows; use a smaller batch", n_rows));
  }
  // A buffer that grew has moved.
  if (ggml_gallocr_get_buffer_size(allocator_.get(), 0) != before) graphs_.clear();
  if (step->plan.work_size > work_.size()) work_.resize(step->plan.work_size);
  if (graphs_.size() >= kMaxGraphs) {
    graphs_.erase(std::min_element(graphs_.begin(), graphs_.end(),
                                   [](const auto& a, const auto& b) { return a->last_used < b->last_used; }));
  }
  step->last_used = ++clock_;
  graphs_.push_back(std::move(step));
  return graphs_.back().get();
}

Status StepRunner::Run(StepGraph* graph, Cache* cache) {
  cache_ = cache;
  graph->plan.work_data = work_.data();
  const ggml_status status = ggml_graph_compute(graph->graph, &graph->plan);
  cache_ = nullptr;
  if (status != GGML_STATUS_SUCCESS)
    return {StatusCode::kInternal, fmt::format("ggml could not compute the step ({})", ggml_status_to_string(status))};
  return OkStatus();
}

uint64_t StepRunner::BufferBytes(int64_t n_rows) const {
  const std::unique_ptr<StepGraph> step = Build(n_rows, 1);
  if (step == nullptr) return 0;
  const std::unique_ptr<ggml_gallocr, GgmlDeleter<ggml_gallocr_free>> measure(
      ggml_gallocr_new(ggml_backend_cpu_buffer_type()));
  size_t bytes = 0;
  ggml_gallocr_reserve_n_size(measure.get(), step->graph, nullptr, nullptr, &bytes);
  return bytes + step->plan.work_size;
}

}  // namespace kvcell
