#include "lab/divergence.h"

#include <algorithm>
#include <cmath>

namespace kvcell {

double LogSumExp(std::span<const float> logits) {
  const float highest = *std::max_element(logits.begin(), logits.end());
  double sum = 0;
  for (const float x : logits) sum += static_cast<double>(std::exp(x - highest));
  return static_cast<double>(highest) + std::log(sum);
}

double LogProbability(std::span<const float> logits, Token token) {
  return static_cast<double>(logits[static_cast<size_t>(token)]) - LogSumExp(logits);
}

DivergenceFrom::DivergenceFrom(std::span<const float> reference)
    : reference_(reference), log_sum_(LogSumExp(reference)), p_(reference.size()) {
  for (size_t i = 0; i < reference.size(); ++i) {
    const double log_p = static_cast<double>(reference[i]) - log_sum_;
    if (log_p < -40.0) continue;  // weighs less than 1e-17
    p_[i] = std::exp(log_p);
    mass_ += p_[i];
  }
}

double DivergenceFrom::To(std::span<const float> other, double log_sum) const {
  double sum = 0;
  for (size_t i = 0; i < p_.size(); ++i) {
    sum += p_[i] * (static_cast<double>(reference_[i]) - static_cast<double>(other[i]));
  }
  return sum + mass_ * (log_sum - log_sum_);
}

double MeanDivergence(std::span<const float> reference, std::span<const float> other, size_t n_vocab) {
  double sum = 0;
  size_t rows = 0;
  for (size_t at = 0; at + n_vocab <= std::min(reference.size(), other.size()); at += n_vocab, ++rows) {
    sum += DivergenceFrom(reference.subspan(at, n_vocab)).To(other.subspan(at, n_vocab));
  }
  return rows == 0 ? 0.0 : sum / static_cast<double>(rows);
}

}  // namespace kvcell
