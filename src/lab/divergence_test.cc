#include "lab/divergence.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

namespace kvcell {
namespace {

TEST(Divergence, IsTheSumOverTheVocabulary) {
  const std::vector<float> a = {0.5f, -1.0f, 2.0f, -60.0f}, b = {1.0f, -0.5f, 1.0f, 3.0f};
  double sum_a = 0, sum_b = 0, kld = 0;
  for (const float x : a) sum_a += std::exp(static_cast<double>(x));
  for (const float x : b) sum_b += std::exp(static_cast<double>(x));
  for (size_t i = 0; i < a.size(); ++i) {
    const double p = std::exp(static_cast<double>(a[i])) / sum_a, q = std::exp(static_cast<double>(b[i])) / sum_b;
    kld += p * std::log(p / q);
  }
  EXPECT_NEAR(LogSumExp(a), std::log(sum_a), 1e-6);
  EXPECT_NEAR(LogProbability(b, 3), 3.0 - std::log(sum_b), 1e-6);
  EXPECT_NEAR(DivergenceFrom(a).To(b), kld, 1e-6);
}

TEST(Divergence, OfARowFromItselfIsNothing) {
  const std::vector<float> a = {3.0f, 88.0f, -90.0f, 87.5f};
  EXPECT_EQ(DivergenceFrom(a).To(a), 0.0);
}

TEST(Divergence, ShiftedLogitsAreTheSameDistribution) {
  const std::vector<float> a = {1.0f, 2.0f, 3.0f}, b = {101.0f, 102.0f, 103.0f};
  EXPECT_NEAR(DivergenceFrom(a).To(b), 0.0, 1e-7);
}

TEST(Divergence, IsAveragedOverRows) {
  const std::vector<float> a = {0.0f, 0.0f, 1.0f, 3.0f}, b = {0.0f, 1.0f, 1.0f, 3.0f};
  const double first = DivergenceFrom(std::span(a).first(2)).To(std::span(b).first(2));
  EXPECT_GT(first, 0.0);
  EXPECT_DOUBLE_EQ(MeanDivergence(a, b, 2), first / 2);
  EXPECT_EQ(MeanDivergence({}, b, 2), 0.0);
}

}  // namespace
}  // namespace kvcell
