// The balance of two norms' weights.
#include "model/key_balance.h"

#include <algorithm>
#include <cmath>
#include <cstddef>

namespace kvcell {
namespace {

// A channel smaller than this beside the largest counts as so large: nobody hears it on either side.
constexpr double kLeastEnergy = 1e-6;

// Mean squares of the channels that RoPE turns together, [head_dim / 2].
std::vector<double> PairEnergies(std::span<const float> norm, bool halves) {
  std::vector<double> energies(norm.size() / 2);
  for (size_t i = 0; i < energies.size(); ++i) {
    const double a = norm[halves ? i : 2 * i], b = norm[halves ? i + energies.size() : 2 * i + 1];
    energies[i] = 0.5 * (a * a + b * b);
  }
  const double least = kLeastEnergy * std::ranges::max(energies);
  for (double& energy : energies) energy = std::max(energy, least);
  return energies;
}

}  // namespace

std::vector<float> BalanceKeys(std::span<const float> q_norm, std::span<const float> k_norm, bool halves) {
  std::vector<float> factors(k_norm.size(), 1.0f);
  const std::vector<double> q = PairEnergies(q_norm, halves), k = PairEnergies(k_norm, halves);
  std::vector<double> squares(k.size());
  double before = 0, after = 0;
  for (size_t i = 0; i < k.size(); ++i) {
    squares[i] = std::sqrt(q[i] / k[i]);
    before += k[i];
    after += k[i] * squares[i];
  }
  const double keep = before / after;  // what leaves the keys' energy as it was
  if (!std::isfinite(keep) || keep == 0) return factors;
  for (size_t i = 0; i < k.size(); ++i) {
    const double factor = std::clamp(std::sqrt(squares[i] * keep), 1 / kMostBalance, kMostBalance);
    factors[halves ? i : 2 * i] = factors[halves ? i + k.size() : 2 * i + 1] = static_cast<float>(factor);
  }
  return factors;
}

}  // namespace kvcell
