// Comparing two engines' logits, and running our model over a text in chunks.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <span>
#include <vector>

#include "kvcell/cache.h"
#include "model/model.h"

namespace kvcell {

// Kullback-Leibler divergence KL(p || q) of each row of n_vocab logits, in nats.
inline std::vector<double> RowKlds(std::span<const float> p, std::span<const float> q, size_t n_vocab) {
  EXPECT_EQ(p.size(), q.size());
  EXPECT_FALSE(p.empty());
  const auto log_sum = [n_vocab](const float* x) {
    const double max = *std::max_element(x, x + n_vocab);
    double sum = 0;
    for (size_t i = 0; i < n_vocab; ++i) sum += std::exp(double{x[i]} - max);
    return max + std::log(sum);
  };
  std::vector<double> klds;
  for (size_t row = 0; row < p.size(); row += n_vocab) {
    const double lp = log_sum(&p[row]), lq = log_sum(&q[row]);
    double kld = 0;
    for (size_t i = row; i < row + n_vocab; ++i)
      kld += std::exp(double{p[i]} - lp) * ((double{p[i]} - lp) - (double{q[i]} - lq));
    klds.push_back(kld);
  }
  return klds;
}

inline double Mean(const std::vector<double>& x) {
  return std::accumulate(x.begin(), x.end(), 0.0) / static_cast<double>(x.size());
}

inline double MeanKld(std::span<const float> p, std::span<const float> q, size_t n_vocab) {
  return Mean(RowKlds(p, q, n_vocab));
}

// Logits of every token [n_tokens, n_vocab] of a new sequence that is fed in chunks; the last size repeats.
inline std::vector<float> ChunkedLogits(Model* model, Cache* cache, std::span<const Token> tokens,
                                        const std::vector<size_t>& chunks) {
  std::vector<float> all, logits;
  const Result<SequenceId> sequence = cache->Create();
  EXPECT_TRUE(sequence.has_value());
  size_t done = 0;
  for (size_t i = 0; done < tokens.size(); ++i) {
    const size_t n = std::min(chunks[std::min(i, chunks.size() - 1)], tokens.size() - done);
    const ModelStep step{
        .sequence = *sequence, .tokens = tokens.subspan(done, n), .want_logits = true, .want_all_logits = true};
    const Status status = model->Forward(cache, {&step, 1}, &logits);
    EXPECT_TRUE(status.ok()) << status.message();
    if (!status.ok()) return {};
    all.insert(all.end(), logits.begin(), logits.end());
    done += n;
  }
  EXPECT_TRUE(cache->Free(*sequence).ok());
  return all;
}

}  // namespace kvcell
