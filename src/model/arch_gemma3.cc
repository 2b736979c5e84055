// Gemma 3: norms before and after attention and feed-forward, five sliding-window layers to each global one, GeGLU.
#include <fmt/format.h>

#include <cmath>
#include <vector>

#include "model/architecture.h"

namespace kvcell {
namespace {

constexpr int kLayersOf27B = 62;  // the one size whose scale is 1/sqrt(n_embd / n_heads) instead of 1/sqrt(head_dim)

struct Layer {
  ggml_tensor* attention_norm;
  AttentionWeights attention;
  ggml_tensor* attention_post_norm;
  ggml_tensor* feed_forward_norm;
  FeedForwardWeights feed_forward;
  ggml_tensor* feed_forward_post_norm;
};

class Gemma3 final : public Architecture {
 public:
  Gemma3(const Hparams& h, Weights* w) : h_(h) {
    embedding_ = w->Matrix("token_embd.weight", h.n_embd, h.n_vocab);
    output_norm_ = w->Vector("output_norm.weight", h.n_embd);
    output_ = TakeOutput(w, h, embedding_);
    for (int i = 0; i < h.n_layers; ++i) {
      layers_.push_back({.attention_norm = w->Vector(LayerName(i, "attn_norm.weight"), h.n_embd),
                         .attention = TakeNormedAttention(w, h, i, Biases::kNone),
                         .attention_post_norm = w->Vector(LayerName(i, "post_attention_norm.weight"), h.n_embd),
                         .feed_forward_norm = w->Vector(LayerName(i, "ffn_norm.weight"), h.n_embd),
                         .feed_forward = TakeFeedForward(w, h, i, Biases::kNone),
                         .feed_forward_post_norm = w->Vector(LayerName(i, "post_ffw_norm.weight"), h.n_embd)});
    }
  }

  // Norm weights are stored as 1 + w, so a plain RMS norm applies them.
  ggml_tensor* Build(GraphBuilder* g) const override {
    ggml_tensor* x = g->Scale(g->Embed(embedding_), std::sqrt(static_cast<float>(h_.n_embd)));
    for (int i = 0; i < h_.n_layers; ++i) {
      const Layer& layer = layers_[static_cast<size_t>(i)];
      const bool local = h_.geometry[static_cast<size_t>(i)].window > 0;
      ggml_tensor* a = g->Attention(i, layer.attention, g->RmsNorm(x, layer.attention_norm), GGML_ROPE_TYPE_NEOX,
                                    local ? h_.rope_local : h_.rope);
      if (g->EndsAfter(i)) return a;
      a = g->Linear(layer.attention.out, g->OnlyWanted(i, a));
      x = g->Add(g->RmsNorm(a, layer.attention_post_norm), g->OnlyWanted(i, x));
      ggml_tensor* f = g->GeGlu(layer.feed_forward, g->RmsNorm(x, layer.feed_forward_norm));
      x = g->Add(g->RmsNorm(f, layer.feed_forward_post_norm), x);
    }
    return g->SoftCap(g->Linear({.weight = output_}, g->RmsNorm(x, output_norm_)), h_.final_softcap);
  }

 private:
  const Hparams& h_;
  ggml_tensor* embedding_;
  ggml_tensor* output_norm_;
  ggml_tensor* output_;
  std::vector<Layer> layers_;
};

}  // namespace

Status ReadGemma3Hparams(const GgufHeader& header, Hparams* h) {
  KVCELL_RETURN_IF_ERROR(
      header.Float("gemma3.final_logit_softcapping", 0.0f, 1e6f, GgufNeed::kOptional, &h->final_softcap));
  KVCELL_RETURN_IF_ERROR(
      header.Float("gemma3.rope.freq_base_swa", 1e-3f, 1e12f, GgufNeed::kOptional, &h->rope_local.base));
  int64_t window = 0;
  KVCELL_RETURN_IF_ERROR(
      header.Int("gemma3.attention.sliding_window", 0, int64_t{1} << 30, GgufNeed::kOptional, &window));
  // A pattern of n makes every n-th layer global; 0 makes all of them local.
  int64_t pattern = 6;
  constexpr std::string_view kPattern = "gemma3.attention.sliding_window_pattern";
  const GgufValue* value = header.Find(kPattern);
  if (value != nullptr && value->type == GgufType::kArray)
    return {StatusCode::kUnsupported,
            fmt::format("{}: {} is a list, where kvcell takes a number; choose another model file", header.path(),
                        kPattern)};
  KVCELL_RETURN_IF_ERROR(header.Int(kPattern, 0, 1 << 20, GgufNeed::kOptional, &pattern));
  for (int i = 0; i < h->n_layers; ++i) {
    LayerGeometry& layer = h->geometry[static_cast<size_t>(i)];
    if (pattern == 0 || i % pattern < pattern - 1) layer.window = static_cast<int32_t>(window);
    if (h->n_layers == kLayersOf27B)
      layer.scale = 1.0f / std::sqrt(static_cast<float>(h->n_embd / h->geometry[0].n_heads));
  }
  return OkStatus();
}

std::unique_ptr<Architecture> MakeGemma3(const Hparams& h, Weights* weights) {
  return std::make_unique<Gemma3>(h, weights);
}

}  // namespace kvcell
