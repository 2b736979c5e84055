// Moves size from keys to queries, channel by channel, where a model's weights let it: the model stays the same, its
// keys become easier to quantize.
#pragma once

#include <span>
#include <vector>

namespace kvcell {

inline constexpr double kMostBalance = 16.0;  // of a factor and of its inverse
// In the identity of models whose keys have factors, and in what is kept of measurements on keys: another word where
// the factors become others.
inline constexpr const char* kBalancedKeys = "balanced1";

// For a layer that norms the heads of Q and K before RoPE: factors [head_dim] by which k's norm weight is to be
// multiplied and q's divided, so that each q.k is what it was. q_norm, k_norm: the norms' weights [head_dim]; `halves`:
// RoPE turns channel i with i + head_dim / 2, else neighbours are turned together. Channels that are turned together
// share a factor, since the factor must hold after RoPE.
//
// Why: a rotation spreads what rounding loses evenly over the channels, so the noise of a score is the sum of k's
// energies times the sum of q's. What channels have in both stays; a channel large in k alone pays in every other one.
// With factors s_i^2 = |q_i| / |k_i| both sides have the energy |q_i||k_i|, for which the product of the sums is least
// (Cauchy-Schwarz). A norm's outputs are about its weights in size. The idea of moving size between two factors of a
// product is SmoothQuant's (arXiv 2211.10438).
//
// As a whole keys stay as large as they were. All 1 where weights are zero or not finite. The same bits on every
// machine.
std::vector<float> BalanceKeys(std::span<const float> q_norm, std::span<const float> k_norm, bool halves);

}  // namespace kvcell
