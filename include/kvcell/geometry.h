// The shape of attention in a model, as far as a KV cache has to know it.
#pragma once

#include <cstdint>
#include <vector>

namespace kvcell {

using Token = int32_t;

// Positions per block: the unit of sharing, storing and prefix matching. Part of every stored format.
inline constexpr int kBlockTokens = 64;

// One layer's attention. head_dim is dk for keys and dv for values; query heads share KV heads in groups of
// n_heads / n_kv_heads (GQA), query head h reading KV head h / (n_heads / n_kv_heads).
struct LayerGeometry {
  int32_t n_heads = 0;     // query heads
  int32_t n_kv_heads = 0;  // KV heads; divides n_heads
  int32_t head_dim_k = 0;  // dk
  int32_t head_dim_v = 0;  // dv
  int32_t window = 0;      // sliding window: position p sees [p - window + 1, p]; 0: all of the past
  float scale = 0.0f;      // multiplies q.k
  float softcap = 0.0f;    // > 0: scores become softcap * tanh(score / softcap), before the mask

  bool operator==(const LayerGeometry&) const = default;
  int32_t group() const { return n_heads / n_kv_heads; }
};

using Geometry = std::vector<LayerGeometry>;  // [n_layers]

}  // namespace kvcell
