// Qwen 3: as Llama, with RMS norms on each head of Q and K before RoPE, which goes over the two halves of a head.
#include <vector>

#include "model/architecture.h"

namespace kvcell {
namespace {

struct Layer {
  ggml_tensor* attention_norm;
  AttentionWeights attention;
  ggml_tensor* feed_forward_norm;
  FeedForwardWeights feed_forward;
};

class Qwen3 final : public Architecture {
 public:
  Qwen3(const Hparams& h, Weights* w) : h_(h) {
    embedding_ = w->Matrix("token_embd.weight", h.n_embd, h.n_vocab);
    output_norm_ = w->Vector("output_norm.weight", h.n_embd);
    output_ = TakeOutput(w, h, embedding_);
    for (int i = 0; i < h.n_layers; ++i) {
      layers_.push_back({.attention_norm = w->Vector(LayerName(i, "attn_norm.weight"), h.n_embd),
                         .attention = TakeNormedAttention(w, h, i, Biases::kOptional),
                         .feed_forward_norm = w->Vector(LayerName(i, "ffn_norm.weight"), h.n_embd),
                         .feed_forward = TakeFeedForward(w, h, i, Biases::kNone)});
    }
  }

  ggml_tensor* Build(GraphBuilder* g) const override {
    ggml_tensor* x = g->Embed(embedding_);
    for (int i = 0; i < h_.n_layers; ++i) {
      const Layer& layer = layers_[static_cast<size_t>(i)];
      ggml_tensor* a =
          g->Attention(i, layer.attention, g->RmsNorm(x, layer.attention_norm), GGML_ROPE_TYPE_NEOX, h_.rope);
      if (g->EndsAfter(i)) return a;
      x = g->Add(g->Linear(layer.attention.out, g->OnlyWanted(i, a)), g->OnlyWanted(i, x));
      x = g->Add(g->SwiGlu(layer.feed_forward, g->RmsNorm(x, layer.feed_forward_norm)), x);
    }
    return g->Linear({.weight = output_}, g->RmsNorm(x, output_norm_));
  }

 private:
  const Hparams& h_;
  ggml_tensor* embedding_;
  ggml_tensor* output_norm_;
  ggml_tensor* output_;
  std::vector<Layer> layers_;
};

}  // namespace

std::unique_ptr<Architecture> MakeQwen3(const Hparams& h, Weights* weights) {
  return std::make_unique<Qwen3>(h, weights);
}

}  // namespace kvcell
