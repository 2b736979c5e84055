// What two rows of logits say about the next token: log-probabilities, and how far one row is from the other.
#pragma once

#include <span>
#include <vector>

#include "kvcell/geometry.h"

namespace kvcell {

// log(sum(exp(x))) of a row of logits.
double LogSumExp(std::span<const float> logits);

// log p(token), in nats.
double LogProbability(std::span<const float> logits, Token token);

// KL(reference || other) in nats, for one reference and any number of others. Keeps a view of `reference`.
class DivergenceFrom {
 public:
  explicit DivergenceFrom(std::span<const float> reference);
  // `log_sum` is LogSumExp(other); exactly 0 for the reference itself.
  double To(std::span<const float> other, double log_sum) const;
  double To(std::span<const float> other) const { return To(other, LogSumExp(other)); }
  double log_sum() const { return log_sum_; }

 private:
  std::span<const float> reference_;
  double log_sum_;
  double mass_ = 0;             // what the probabilities add up to: 1 but for rounding
  std::vector<double> p_ = {};  // [n_vocab]
};

// Mean over rows [n_rows, n_vocab] of KL(reference || other); 0 where there are none.
double MeanDivergence(std::span<const float> reference, std::span<const float> other, size_t n_vocab);

}  // namespace kvcell
