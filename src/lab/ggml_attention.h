// ggml's flash attention over a made-up context: the peer that our kernels are measured beside.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "kvcell/status.h"
#include "lab/ggml_threads.h"

namespace kvcell {

// What is attended to by whom. Queries see all tokens before them and themselves; they are the last of the tokens.
struct AttentionShape {
  int64_t tokens = 0;  // queries included
  int32_t queries = 1;
  int32_t kv_heads = 8;
  int32_t group = 4;  // query heads per KV head
  int32_t head_dim = 128;
  bool in_file = false;  // our cells: attended where they lie in a mapped file, whose pages are at hand
  int32_t heads() const { return kv_heads * group; }
};

// K and V of one type, contiguous per KV head (faster for ggml than libllama's own order, which interleaves the heads).
class GgmlAttention {
 public:
  // `type`: "f16", "q8_0", "q4_0". kOutOfBudget without the memory for it.
  static Result<std::unique_ptr<GgmlAttention>> Make(const AttentionShape& shape, std::string_view type,
                                                     GgmlThreads* threads);
  void Run() { threads_->Compute(graph_); }
  // [queries, heads, head_dim] of the last Run.
  std::span<const float> out() const;
  uint64_t kv_bytes() const { return kv_bytes_; }

 private:
  GgmlAttention() = default;

  GgmlThreads* threads_ = nullptr;
  std::unique_ptr<HugeBuffer> memory_;
  GgmlContext context_;
  ggml_cgraph* graph_ = nullptr;
  const float* out_ = nullptr;
  size_t n_out_ = 0;
  uint64_t kv_bytes_ = 0;
};

}  // namespace kvcell
