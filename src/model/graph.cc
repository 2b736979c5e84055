// Graph nodes shared by the architectures, and the custom node that hands attention to the cache.
#include "model/graph.h"

#include <fmt/format.h>

#include <array>
#include <vector>

namespace kvcell {
namespace {

// Runs on all of ggml's threads at once: GGML_N_TASKS_MAX gives nth = the graph's threads, each of which calls this
// with its own ith and then waits at the node's barrier, so that Compute's parts may meet at a barrier of their own.
void AttentionNode(ggml_tensor* dst, int ith, int nth, void* userdata) noexcept {
  const auto* hook = static_cast<const AttentionHook*>(userdata);
  const auto* q = static_cast<const float*>(dst->src[0]->data);
  const auto* k = static_cast<const float*>(dst->src[1]->data);
  const auto* v = static_cast<const float*>(dst->src[2]->data);
  (*hook->cache)->Compute(hook->layer, k, v, q, static_cast<float*>(dst->data), ith, nth);
}

}  // namespace

std::string LayerName(int layer, std::string_view tensor) { return fmt::format("blk.{}.{}", layer, tensor); }

namespace {

Projection TakeProjection(Weights* weights, int layer, std::string_view name, int64_t in, int64_t out, Biases biases) {
  Projection p;
  p.weight = weights->Matrix(LayerName(layer, fmt::format("{}.weight", name)), in, out);
  if (biases == Biases::kOptional)
    p.bias = weights->OptionalVector(LayerName(layer, fmt::format("{}.bias", name)), out);
  return p;
}

}  // namespace

AttentionWeights TakeAttention(Weights* weights, const Hparams& h, int layer, Biases biases) {
  const LayerGeometry& g = h.geometry[static_cast<size_t>(layer)];
  const int64_t q_dim = int64_t{g.n_heads} * h.head_dim;
  const int64_t kv_dim = int64_t{g.n_kv_heads} * h.head_dim;
  AttentionWeights w;
  w.q = TakeProjection(weights, layer, "attn_q", h.n_embd, q_dim, biases);
  w.k = TakeProjection(weights, layer, "attn_k", h.n_embd, kv_dim, biases);
  w.v = TakeProjection(weights, layer, "attn_v", h.n_embd, kv_dim, biases);
  w.out = TakeProjection(weights, layer, "attn_output", q_dim, h.n_embd, biases);
  return w;
}

AttentionWeights TakeNormedAttention(Weights* weights, const Hparams& h, int layer, Biases biases) {
  AttentionWeights w = TakeAttention(weights, h, layer, biases);
  w.q_norm = weights->Vector(LayerName(layer, "attn_q_norm.weight"), h.head_dim);
  w.k_norm = weights->Vector(LayerName(layer, "attn_k_norm.weight"), h.head_dim);
  if (h.key_factors.empty()) return w;  // a norm that `weights` does not take
  std::vector<float> factors = h.key_factors[static_cast<size_t>(layer)];
  weights->Multiply(w.k_norm, factors);
  for (float& factor : factors) factor = 1.0f / factor;
  weights->Multiply(w.q_norm, factors);
  return w;
}

FeedForwardWeights TakeFeedForward(Weights* weights, const Hparams& h, int layer, Biases biases) {
  const int64_t n_ff = h.n_ff[static_cast<size_t>(layer)];
  FeedForwardWeights w;
  w.gate = TakeProjection(weights, layer, "ffn_gate", h.n_embd, n_ff, biases);
  w.up = TakeProjection(weights, layer, "ffn_up", h.n_embd, n_ff, biases);
  w.down = TakeProjection(weights, layer, "ffn_down", n_ff, h.n_embd, biases);
  return w;
}

ggml_tensor* TakeOutput(Weights* weights, const Hparams& h, ggml_tensor* embedding) {
  ggml_tensor* output = weights->OptionalMatrix("output.weight", h.n_embd, h.n_vocab);
  return output != nullptr ? output : embedding;
}

GraphBuilder::GraphBuilder(ggml_context* context, const Hparams& h, std::span<AttentionHook> hooks, int64_t n_rows,
                           int64_t n_wanted)
    : context_(context), h_(h), hooks_(hooks), n_rows_(n_rows), n_wanted_(n_wanted) {
  tokens_ = ggml_new_tensor_1d(context_, GGML_TYPE_I32, n_rows);
  positions_ = ggml_new_tensor_1d(context_, GGML_TYPE_I32, n_rows);
  ggml_set_input(tokens_);
  ggml_set_input(positions_);
  if (n_wanted > 0 && n_wanted < n_rows) {
    wanted_ = ggml_new_tensor_1d(context_, GGML_TYPE_I32, n_wanted);
    ggml_set_input(wanted_);
  }
}

ggml_tensor* GraphBuilder::Embed(ggml_tensor* embedding) { return ggml_get_rows(context_, embedding, tokens_); }

ggml_tensor* GraphBuilder::RmsNorm(ggml_tensor* x, ggml_tensor* weight) {
  return ggml_mul(context_, ggml_rms_norm(context_, x, h_.rms_epsilon), weight);
}

ggml_tensor* GraphBuilder::Linear(const Projection& p, ggml_tensor* x) {
  ggml_tensor* y = ggml_mul_mat(context_, p.weight, x);
  return p.bias == nullptr ? y : ggml_add(context_, y, p.bias);
}

ggml_tensor* GraphBuilder::Heads(ggml_tensor* x, int n_heads) {
  return ggml_reshape_3d(context_, x, h_.head_dim, n_heads, n_rows_);
}

ggml_tensor* GraphBuilder::Rope(ggml_tensor* x, int mode, const RopeParameters& rope, ggml_tensor* factors) {
  // The YaRN arguments (original context, extension factor, betas) do nothing at an extension factor of 0.
  return ggml_rope_ext(context_, x, positions_, factors, h_.head_dim, mode, 0, rope.base, rope.scale, 0.0f,
                       rope.magnitude, 32.0f, 1.0f);
}

ggml_tensor* GraphBuilder::Attention(int layer, const AttentionWeights& w, ggml_tensor* x, int mode,
                                     const RopeParameters& rope, ggml_tensor* rope_factors) {
  const LayerGeometry& g = h_.geometry[static_cast<size_t>(layer)];
  ggml_tensor* q = Heads(Linear(w.q, x), g.n_heads);
  ggml_tensor* k = Heads(Linear(w.k, x), g.n_kv_heads);
  ggml_tensor* v = Heads(Linear(w.v, x), g.n_kv_heads);
  if (w.q_norm != nullptr) q = RmsNorm(q, w.q_norm);
  if (w.k_norm != nullptr) k = RmsNorm(k, w.k_norm);
  q = Rope(q, mode, rope, rope_factors);
  k = Rope(k, mode, rope, rope_factors);
  std::array<ggml_tensor*, 3> args{q, k, v};
  ggml_tensor* out = ggml_custom_4d(context_, GGML_TYPE_F32, int64_t{g.n_heads} * h_.head_dim, n_rows_, 1, 1,
                                    args.data(), static_cast<int>(args.size()), AttentionNode, GGML_N_TASKS_MAX,
                                    &hooks_[static_cast<size_t>(layer)]);
  return out;
}

ggml_tensor* GraphBuilder::SwiGlu(const FeedForwardWeights& w, ggml_tensor* x) {
  ggml_tensor* up = Linear(w.up, x);
  return Linear(w.down, ggml_swiglu_split(context_, Linear(w.gate, x), up));
}

ggml_tensor* GraphBuilder::GeGlu(const FeedForwardWeights& w, ggml_tensor* x) {
  ggml_tensor* up = Linear(w.up, x);
  return Linear(w.down, ggml_geglu_split(context_, Linear(w.gate, x), up));
}

ggml_tensor* GraphBuilder::Add(ggml_tensor* a, ggml_tensor* b) { return ggml_add(context_, a, b); }

ggml_tensor* GraphBuilder::Scale(ggml_tensor* x, float factor) { return ggml_scale(context_, x, factor); }

ggml_tensor* GraphBuilder::SoftCap(ggml_tensor* x, float cap) {
  return cap > 0.0f ? Scale(ggml_tanh(context_, Scale(x, 1.0f / cap)), cap) : x;
}

ggml_tensor* GraphBuilder::OnlyWanted(int layer, ggml_tensor* x) {
  return layer == h_.n_layers - 1 && wanted_ != nullptr ? ggml_get_rows(context_, x, wanted_) : x;
}

}  // namespace kvcell
