// The numbers that define a model, read from a checked GGUF header.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "kvcell/geometry.h"
#include "kvcell/status.h"
#include "model/gguf_check.h"

namespace kvcell {

// One rotary position embedding. Frequencies are base^(-2i/dims) * scale, divided by `rope_freqs.weight` where a file
// has it (Llama 3's scaling).
struct RopeParameters {
  float base = 10000.0f;
  float scale = 1.0f;      // 1 / the linear scaling factor
  float magnitude = 1.0f;  // multiplies the rotated vector
};

struct Hparams {
  std::string architecture;
  int32_t n_layers = 0;
  int32_t n_embd = 0;
  int32_t n_vocab = 0;
  std::vector<int32_t> n_ff;  // [n_layers]
  int64_t context_train = 0;
  float rms_epsilon = 0;
  int32_t head_dim = 0;  // of queries, keys and values, all of it rotated
  RopeParameters rope;
  RopeParameters rope_local;  // of sliding-window layers
  float final_softcap = 0;    // > 0: logits become softcap * tanh(logit / softcap)
  Geometry geometry;          // [n_layers]
  // [n_layers][head_dim] where the heads of Q and K are normed, else empty: what k is multiplied and q divided by
  // (key_balance.h).
  std::vector<std::vector<float>> key_factors;
};

// Whether RoPE turns channel i together with i + head_dim / 2; else with its neighbour.
inline bool RopeOverHalves(const Hparams& h) { return h.architecture != "llama"; }

// What all architectures share. kCorruption naming the key, kUnsupported (experts, partial rotation, RoPE kinds other
// than plain, linear and llama3). The scale of attention is 1/sqrt(head_dim) and no layer has a window; an architecture
// changes that.
Result<Hparams> ReadCommonHparams(const GgufHeader& header, const std::string& architecture);

}  // namespace kvcell
