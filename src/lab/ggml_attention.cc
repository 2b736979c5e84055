#include "lab/ggml_attention.h"

#include <fmt/format.h>
#include <ggml.h>

#include <cmath>
#include <limits>

#include "lab/made_values.h"

namespace kvcell {
namespace {

ggml_type TypeOf(std::string_view type) {
  return type == "q4_0" ? GGML_TYPE_Q4_0 : type == "q8_0" ? GGML_TYPE_Q8_0 : GGML_TYPE_F16;
}

// Codes the made-up values of every head and token into a tensor [head_dim, tokens, kv_heads].
void Fill(MadeKind kind, const AttentionShape& shape, GgmlThreads* threads, ggml_tensor* tensor) {
  threads->Run([&](int part, int n_parts) {
    std::vector<float> row(static_cast<size_t>(shape.head_dim));
    for (int head = 0; head < shape.kv_heads; ++head) {
      auto* plane = static_cast<char*>(tensor->data) + static_cast<size_t>(head) * tensor->nb[2];
      for (int64_t t = part; t < shape.tokens; t += n_parts) {
        MakeValues(kind, t, head, row);
        ggml_quantize_chunk(tensor->type, row.data(), plane + static_cast<size_t>(t) * tensor->nb[1], 0, 1,
                            shape.head_dim, nullptr);
      }
    }
  });
}

// Causal: query i sees tokens up to its own, tokens - queries + i.
void FillMask(const AttentionShape& shape, ggml_tensor* mask) {
  const ggml_fp16_t zero = ggml_fp32_to_fp16(0.0f);
  const ggml_fp16_t none = ggml_fp32_to_fp16(-std::numeric_limits<float>::infinity());
  for (int64_t i = 0; i < mask->ne[1]; ++i) {
    auto* row = reinterpret_cast<ggml_fp16_t*>(static_cast<char*>(mask->data) + static_cast<size_t>(i) * mask->nb[1]);
    for (int64_t t = 0; t < shape.tokens; ++t) row[t] = t <= shape.tokens - shape.queries + i ? zero : none;
  }
}

}  // namespace

Result<std::unique_ptr<GgmlAttention>> GgmlAttention::Make(const AttentionShape& shape, std::string_view type,
                                                           GgmlThreads* threads) {
  const ggml_type kv_type = TypeOf(type);
  const size_t row_bytes = ggml_row_size(kv_type, shape.head_dim);
  const auto tokens = static_cast<size_t>(shape.tokens), queries = static_cast<size_t>(shape.queries);
  const size_t heads = static_cast<size_t>(shape.heads()), dim = static_cast<size_t>(shape.head_dim);
  std::unique_ptr<GgmlAttention> attention(new GgmlAttention);
  attention->threads_ = threads;
  attention->kv_bytes_ = 2 * static_cast<uint64_t>(shape.kv_heads) * tokens * row_bytes;
  const size_t rest = 2 * queries * heads * dim * sizeof(float) + (queries + 64) * tokens * sizeof(ggml_fp16_t);
  attention->memory_ = std::make_unique<HugeBuffer>(attention->kv_bytes_ + rest + (size_t{4} << 20));
  if (attention->memory_->data() == nullptr) {
    return Fail(StatusCode::kOutOfBudget,
                fmt::format("not enough memory for {} tokens in ggml's {}; measure fewer tokens", shape.tokens, type));
  }
  attention->context_.reset(
      ggml_init({.mem_size = attention->memory_->size(), .mem_buffer = attention->memory_->data(), .no_alloc = false}));
  ggml_context* context = attention->context_.get();
  ggml_tensor* q = ggml_new_tensor_3d(context, GGML_TYPE_F32, shape.head_dim, shape.queries, shape.heads());
  ggml_tensor* k = ggml_new_tensor_3d(context, kv_type, shape.head_dim, shape.tokens, shape.kv_heads);
  ggml_tensor* v = ggml_new_tensor_3d(context, kv_type, shape.head_dim, shape.tokens, shape.kv_heads);
  ggml_tensor* mask = nullptr;
  if (shape.queries > 1) mask = ggml_new_tensor_2d(context, GGML_TYPE_F16, shape.tokens, shape.queries);
  if (mask != nullptr) FillMask(shape, mask);
  Fill(MadeKind::kKey, shape, threads, k);
  Fill(MadeKind::kValue, shape, threads, v);
  for (int head = 0; head < shape.heads(); ++head) {
    for (int32_t i = 0; i < shape.queries; ++i) {
      auto* row = static_cast<float*>(q->data) + (static_cast<size_t>(head) * queries + static_cast<size_t>(i)) * dim;
      MakeValues(MadeKind::kQuery, shape.tokens - shape.queries + i, head, {row, dim});
    }
  }
  ggml_tensor* out =
      ggml_flash_attn_ext(context, q, k, v, mask, 1.0f / std::sqrt(static_cast<float>(shape.head_dim)), 0.0f, 0.0f);
  ggml_flash_attn_ext_set_prec(out, GGML_PREC_F32);  // as libllama asks for it
  attention->graph_ = ggml_new_graph(context);
  ggml_build_forward_expand(attention->graph_, out);
  attention->out_ = static_cast<const float*>(out->data);
  attention->n_out_ = queries * heads * dim;
  return attention;
}

std::span<const float> GgmlAttention::out() const { return {out_, n_out_}; }

}  // namespace kvcell
