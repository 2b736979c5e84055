// The words in which an architecture is written down: each call adds nodes to the ggml graph of one step.
#pragma once

#include <ggml.h>

#include <cstdint>
#include <span>
#include <string>

#include "kvcell/cache.h"
#include "model/hparams.h"
#include "model/weights.h"

namespace kvcell {

// The cache that a step attends through; what an attention node finds behind its user data.
struct AttentionHook {
  Cache** cache = nullptr;
  int layer = 0;
};

// Weights of one layer's projections; null where a model has no such bias.
struct Projection {
  ggml_tensor* weight = nullptr;
  ggml_tensor* bias = nullptr;
};
struct AttentionWeights {
  Projection q, k, v, out;
  ggml_tensor* q_norm = nullptr;  // [head_dim]; null where a model has none
  ggml_tensor* k_norm = nullptr;
};
struct FeedForwardWeights {
  Projection gate, up, down;
};
enum class Biases { kNone, kOptional };

// Tensors of layer `layer` under their GGUF names (blk.N.attn_q.weight ...).
std::string LayerName(int layer, std::string_view tensor);
AttentionWeights TakeAttention(Weights* weights, const Hparams& h, int layer, Biases biases);
// The same with norms of the heads of Q and K, into which h.key_factors go.
AttentionWeights TakeNormedAttention(Weights* weights, const Hparams& h, int layer, Biases biases);
FeedForwardWeights TakeFeedForward(Weights* weights, const Hparams& h, int layer, Biases biases);
// output.weight, or the embedding where the file ties them.
ggml_tensor* TakeOutput(Weights* weights, const Hparams& h, ggml_tensor* embedding);

// Builds one step of n_rows tokens of which n_wanted want logits. Activations are [n_embd, n_rows] in ggml's order,
// which is [n_rows, n_embd] in the order of the rest of kvcell.
class GraphBuilder {
 public:
  // `hooks` [n_layers] must outlive the graph.
  GraphBuilder(ggml_context* context, const Hparams& h, std::span<AttentionHook> hooks, int64_t n_rows,
               int64_t n_wanted);

  // Rows of the embedding matrix for the step's tokens.
  ggml_tensor* Embed(ggml_tensor* embedding);
  ggml_tensor* RmsNorm(ggml_tensor* x, ggml_tensor* weight);
  ggml_tensor* Linear(const Projection& p, ggml_tensor* x);
  // Self-attention of layer `layer` up to and without the output projection: q, k, v from x (already normed), norms of
  // q and k where the model has them, RoPE (`mode` is ggml's), the cache's attention. [n_heads * head_dim, n_rows]
  ggml_tensor* Attention(int layer, const AttentionWeights& w, ggml_tensor* x, int mode, const RopeParameters& rope,
                         ggml_tensor* rope_factors = nullptr);
  // down(silu(gate(x)) * up(x)); GeGlu: the same with gelu.
  ggml_tensor* SwiGlu(const FeedForwardWeights& w, ggml_tensor* x);
  ggml_tensor* GeGlu(const FeedForwardWeights& w, ggml_tensor* x);
  ggml_tensor* Add(ggml_tensor* a, ggml_tensor* b);
  ggml_tensor* Scale(ggml_tensor* x, float factor);
  ggml_tensor* SoftCap(ggml_tensor* x, float cap);

  // After the last layer's attention only rows whose logits are wanted go on; where there are none, the graph ends
  // there.
  bool EndsAfter(int layer) const { return n_wanted_ == 0 && layer == h_.n_layers - 1; }
  ggml_tensor* OnlyWanted(int layer, ggml_tensor* x);

  ggml_tensor* tokens() const { return tokens_; }        // i32 [n_rows]
  ggml_tensor* positions() const { return positions_; }  // i32 [n_rows]
  ggml_tensor* wanted() const { return wanted_; }        // i32 [n_wanted]; null where all rows or none are wanted

 private:
  ggml_tensor* Heads(ggml_tensor* x, int n_heads);
  ggml_tensor* Rope(ggml_tensor* x, int mode, const RopeParameters& rope, ggml_tensor* factors);

  ggml_context* context_;
  const Hparams& h_;
  std::span<AttentionHook> hooks_;
  int64_t n_rows_;
  int64_t n_wanted_;
  ggml_tensor* tokens_ = nullptr;
  ggml_tensor* positions_ = nullptr;
  ggml_tensor* wanted_ = nullptr;
};

}  // namespace kvcell
