#include "lab/ggml_threads.h"

#include <ggml-cpu.h>
#include <ggml.h>
#include <sys/mman.h>

namespace kvcell {
namespace {

constexpr size_t kHugePage = size_t{2} << 20;

void CallPart(ggml_tensor*, int part, int n_parts, void* user_data) noexcept {
  (**static_cast<const std::function<void(int, int)>**>(user_data))(part, n_parts);
}

}  // namespace

HugeBuffer::HugeBuffer(size_t bytes) : bytes_((bytes + kHugePage - 1) / kHugePage * kHugePage) {
  void* range = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (range == MAP_FAILED) return;
  madvise(range, bytes_, MADV_HUGEPAGE);
  data_ = static_cast<std::byte*>(range);
}

HugeBuffer::~HugeBuffer() {
  if (data_ != nullptr) munmap(data_, bytes_);
}

void GgmlContextDeleter::operator()(ggml_context* context) const { ggml_free(context); }

GgmlThreads::GgmlThreads(int n_threads) : n_threads_(n_threads) {
  context_.reset(ggml_init({.mem_size = size_t{1} << 20, .mem_buffer = nullptr, .no_alloc = false}));
  ggml_tensor* argument = ggml_new_tensor_1d(context_.get(), GGML_TYPE_F32, 1);
  ggml_tensor* node =
      ggml_custom_4d(context_.get(), GGML_TYPE_F32, 1, 1, 1, 1, &argument, 1, CallPart, GGML_N_TASKS_MAX, &part_);
  graph_ = ggml_new_graph(context_.get());
  ggml_build_forward_expand(graph_, node);
}

void GgmlThreads::Run(const std::function<void(int, int)>& part) {
  part_ = &part;
  Compute(graph_);
}

void GgmlThreads::Compute(ggml_cgraph* graph) {
  ggml_cplan plan = ggml_graph_plan(graph, n_threads_, nullptr);
  if (work_.size() < plan.work_size) work_.resize(plan.work_size);
  plan.work_data = work_.data();
  ggml_graph_compute(graph, &plan);
}

}  // namespace kvcell
