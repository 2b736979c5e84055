// Reads and bounds the numbers that define a model: what passes here can't make ggml assert later.
#include "model/hparams.h"

#include <fmt/format.h>

#include <cmath>

#include "model/key_balance.h"

namespace kvcell {
namespace {

constexpr int64_t kMaxLayers = 512;  // as many as libllama takes
constexpr int64_t kMaxEmbedding = 1 << 20;
constexpr int64_t kMaxHeads = 4096;
constexpr int64_t kMaxHeadDim = 1024;
constexpr int64_t kMaxContext = (int64_t{1} << 31) - 1;  // positions are 32-bit in ggml

Status Unsupported(const GgufHeader& header, std::string_view what) {
  return {StatusCode::kUnsupported, fmt::format("{}: {}; choose another model", header.path(), what)};
}

// Reads keys under the architecture's prefix.
class Keys {
 public:
  Keys(const GgufHeader& header, const std::string& architecture) : header_(header), prefix_(architecture + ".") {}

  Status Int(std::string_view key, int64_t low, int64_t high, GgufNeed need, int32_t* out) const {
    int64_t value = *out;
    KVCELL_RETURN_IF_ERROR(header_.Int(Name(key), low, high, need, &value));
    *out = static_cast<int32_t>(value);
    return OkStatus();
  }
  Status Float(std::string_view key, float low, float high, GgufNeed need, float* out) const {
    return header_.Float(Name(key), low, high, need, out);
  }
  Status PerLayer(std::string_view key, int64_t n_layers, int64_t high, GgufNeed need,
                  std::vector<int32_t>* out) const {
    return header_.IntPerLayer(Name(key), n_layers, 1, high, need, out);
  }
  std::string Name(std::string_view key) const { return prefix_ + std::string(key); }

 private:
  const GgufHeader& header_;
  std::string prefix_;
};

Status ReadSizes(const GgufHeader& header, const Keys& keys, Hparams* h) {
  KVCELL_RETURN_IF_ERROR(keys.Int("block_count", 1, kMaxLayers, GgufNeed::kRequired, &h->n_layers));
  KVCELL_RETURN_IF_ERROR(keys.Int("embedding_length", 1, kMaxEmbedding, GgufNeed::kRequired, &h->n_embd));
  KVCELL_RETURN_IF_ERROR(
      header.Int(keys.Name("context_length"), 1, kMaxContext, GgufNeed::kRequired, &h->context_train));
  KVCELL_RETURN_IF_ERROR(
      keys.PerLayer("feed_forward_length", h->n_layers, int64_t{1} << 24, GgufNeed::kRequired, &h->n_ff));
  KVCELL_RETURN_IF_ERROR(
      keys.Float("attention.layer_norm_rms_epsilon", 0.0f, 1.0f, GgufNeed::kRequired, &h->rms_epsilon));
  int32_t n_experts = 0;
  KVCELL_RETURN_IF_ERROR(keys.Int("expert_count", 0, 1 << 20, GgufNeed::kOptional, &n_experts));
  if (n_experts > 0) return Unsupported(header, "it is a mixture of experts, which kvcell has not");

  const GgufTensor* embedding = header.FindTensor("token_embd.weight");
  if (embedding == nullptr) return header.Bad("tensor token_embd.weight is missing");
  if (embedding->n_dims != 2 || embedding->ne[0] != h->n_embd || embedding->ne[1] > (1 << 24))
    return header.Bad(fmt::format("tensor token_embd.weight is {} x {}, not {} x the vocabulary", embedding->ne[0],
                                  embedding->ne[1], h->n_embd));
  h->n_vocab = static_cast<int32_t>(embedding->ne[1]);
  return OkStatus();
}

Status ReadHeads(const GgufHeader& header, const Keys& keys, Hparams* h) {
  std::vector<int32_t> heads;
  KVCELL_RETURN_IF_ERROR(keys.PerLayer("attention.head_count", h->n_layers, kMaxHeads, GgufNeed::kRequired, &heads));
  std::vector<int32_t> kv_heads = heads;
  KVCELL_RETURN_IF_ERROR(
      keys.PerLayer("attention.head_count_kv", h->n_layers, kMaxHeads, GgufNeed::kOptional, &kv_heads));

  if (header.Find(keys.Name("attention.key_length")) == nullptr && h->n_embd % heads[0] != 0)
    return header.Bad(fmt::format("{} is {}, not a multiple of {} = {}", keys.Name("embedding_length"), h->n_embd,
                                  keys.Name("attention.head_count"), heads[0]));
  int32_t dk = h->n_embd / heads[0];
  KVCELL_RETURN_IF_ERROR(keys.Int("attention.key_length", 1, kMaxHeadDim, GgufNeed::kOptional, &dk));
  int32_t dv = header.Find(keys.Name("attention.value_length")) == nullptr ? dk : 0;
  KVCELL_RETURN_IF_ERROR(keys.Int("attention.value_length", 1, kMaxHeadDim, GgufNeed::kOptional, &dv));
  if (dk < 1 || dk > kMaxHeadDim || dk % 2 != 0)
    return header.Bad(fmt::format("heads of {} dimensions are not an even number in 2..{}", dk, kMaxHeadDim));
  if (dv != dk)
    return Unsupported(
        header,
        fmt::format("keys have {} dimensions and values {}, which kvcell has not for this architecture", dk, dv));
  int32_t rotated = dk;
  KVCELL_RETURN_IF_ERROR(keys.Int("rope.dimension_count", 1, kMaxHeadDim, GgufNeed::kOptional, &rotated));
  if (rotated != dk)
    return Unsupported(header, fmt::format("RoPE turns {} of {} dimensions, where kvcell turns all", rotated, dk));
  h->head_dim = dk;

  for (size_t i = 0; i < heads.size(); ++i) {
    if (heads[i] % kv_heads[i] != 0)
      return header.Bad(
          fmt::format("layer {} has {} query heads, not a multiple of its {} KV heads", i, heads[i], kv_heads[i]));
    LayerGeometry layer;
    layer.n_heads = heads[i];
    layer.n_kv_heads = kv_heads[i];
    layer.head_dim_k = dk;
    layer.head_dim_v = dv;
    layer.scale = 1.0f / std::sqrt(static_cast<float>(dk));
    h->geometry.push_back(layer);
  }
  return OkStatus();
}

Status ReadRope(const GgufHeader& header, const Keys& keys, Hparams* h) {
  KVCELL_RETURN_IF_ERROR(keys.Float("rope.freq_base", 1e-3f, 1e12f, GgufNeed::kOptional, &h->rope.base));
  std::string kind = "linear";  // with the factor 1 that is plain RoPE
  KVCELL_RETURN_IF_ERROR(header.String(keys.Name("rope.scaling.type"), GgufNeed::kOptional, &kind));
  if (kind != "linear" && kind != "none" && kind != "llama3")
    return Unsupported(header,
                       fmt::format("RoPE scaling `{}`, where kvcell has plain, linear and llama3", kind.substr(0, 40)));
  if (kind == "llama3" && header.FindTensor("rope_freqs.weight") == nullptr)
    return header.Bad("RoPE scaling is llama3, but tensor rope_freqs.weight is missing");
  float factor = 0.0f;
  KVCELL_RETURN_IF_ERROR(keys.Float("rope.scale_linear", 0.0f, 1e6f, GgufNeed::kOptional, &factor));
  KVCELL_RETURN_IF_ERROR(keys.Float("rope.scaling.factor", 0.0f, 1e6f, GgufNeed::kOptional, &factor));
  if (kind == "linear" && factor > 0.0f) h->rope.scale = 1.0f / factor;
  KVCELL_RETURN_IF_ERROR(keys.Float("rope.scaling.attn_factor", 1e-3f, 1e3f, GgufNeed::kOptional, &h->rope.magnitude));
  h->rope_local.magnitude = h->rope.magnitude;
  if (!std::isfinite(h->rope.scale))
    return header.Bad(fmt::format("{} is too small", keys.Name("rope.scaling.factor")));
  return OkStatus();
}

// What the file lacks or has in another shape leaves no factors; Weights complains of it.
void ReadKeyFactors(const GgufHeader& header, Hparams* h) {
  const auto norm = [&](size_t layer, std::string_view side) {
    return header.F32Values(fmt::format("blk.{}.attn_{}_norm.weight", layer, side), static_cast<size_t>(h->head_dim));
  };
  for (size_t i = 0; i < h->geometry.size(); ++i) {
    const std::vector<float> q = norm(i, "q"), k = norm(i, "k");
    if (q.empty() || k.empty()) {
      h->key_factors.clear();
      return;
    }
    h->key_factors.push_back(BalanceKeys(q, k, RopeOverHalves(*h)));
  }
}

}  // namespace

Result<Hparams> ReadCommonHparams(const GgufHeader& header, const std::string& architecture) {
  Hparams h;
  h.architecture = architecture;
  const Keys keys(header, architecture);
  KVCELL_FAIL_IF_ERROR(ReadSizes(header, keys, &h));
  KVCELL_FAIL_IF_ERROR(ReadHeads(header, keys, &h));
  KVCELL_FAIL_IF_ERROR(ReadRope(header, keys, &h));
  ReadKeyFactors(header, &h);
  return h;
}

}  // namespace kvcell
