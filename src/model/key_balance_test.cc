// What balancing promises: q.k unchanged, less noise, and no harm from weights that make no sense.
#include "model/key_balance.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>

namespace kvcell {
namespace {

std::vector<float> Spread(uint32_t seed, size_t n) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0.0f, 1.0f);
  std::vector<float> norm(n);
  for (float& weight : norm) weight = std::copysign(std::exp(0.8f * normal(random)), normal(random));
  return norm;
}

double Energy(const std::vector<float>& norm) {
  double sum = 0;
  for (const float weight : norm) sum += static_cast<double>(weight) * static_cast<double>(weight);
  return sum;
}

std::vector<float> Times(std::vector<float> norm, const std::vector<float>& factors, bool divide) {
  for (size_t i = 0; i < norm.size(); ++i) norm[i] = divide ? norm[i] / factors[i] : norm[i] * factors[i];
  return norm;
}

// The noise of a score after a rotation, as key_balance.h has it.
double Noise(const std::vector<float>& q, const std::vector<float>& k) { return Energy(q) * Energy(k); }

TEST(KeyBalance, ChannelsThatRopeTurnsTogetherShareAFactor) {
  const std::vector<float> q = Spread(1, 64), k = Spread(2, 64);
  const std::vector<float> halves = BalanceKeys(q, k, true), neighbours = BalanceKeys(q, k, false);
  for (size_t i = 0; i < 32; ++i) {
    EXPECT_EQ(halves[i], halves[i + 32]);
    EXPECT_EQ(neighbours[2 * i], neighbours[2 * i + 1]);
  }
}

TEST(KeyBalance, LowersTheNoiseOfScoresAndLeavesKeysAsLargeAsTheyWere) {
  for (uint32_t seed = 0; seed < 20; ++seed) {
    // Pairs alike, so that what sharing a factor costs is out of the picture.
    std::vector<float> q = Spread(2 * seed, 128), k = Spread(2 * seed + 1, 128);
    for (size_t i = 0; i < 64; ++i) q[i + 64] = q[i], k[i + 64] = k[i];
    const std::vector<float> factors = BalanceKeys(q, k, true);
    const std::vector<float> q2 = Times(q, factors, true), k2 = Times(k, factors, false);
    EXPECT_LT(Noise(q2, k2), 0.9 * Noise(q, k));
    EXPECT_NEAR(Energy(k2) / Energy(k), 1.0, 1e-5);
    // The best there is: (sum |q||k|)^2.
    double best = 0;
    for (size_t i = 0; i < q.size(); ++i) best += std::abs(static_cast<double>(q[i]) * static_cast<double>(k[i]));
    EXPECT_LT(Noise(q2, k2), 1.00001 * best * best);
  }
}

TEST(KeyBalance, EqualNormsStayAsTheyAre) {
  const std::vector<float> norm = Spread(3, 80);
  for (const float factor : BalanceKeys(norm, norm, true)) EXPECT_FLOAT_EQ(factor, 1.0f);
}

TEST(KeyBalance, WeightsThatMakeNoSenseChangeNothing) {
  const std::vector<float> good = Spread(4, 64), zero(64, 0.0f);
  for (const float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
    std::vector<float> norm = good;
    norm[5] = bad;
    EXPECT_EQ(BalanceKeys(norm, good, true), std::vector<float>(64, 1.0f));
    EXPECT_EQ(BalanceKeys(good, norm, true), std::vector<float>(64, 1.0f));
  }
  EXPECT_EQ(BalanceKeys(zero, good, true), std::vector<float>(64, 1.0f));
  EXPECT_EQ(BalanceKeys(good, zero, true), std::vector<float>(64, 1.0f));
}

TEST(KeyBalance, NoFactorIsBeyondItsLimit) {
  std::vector<float> q(64, 1.0f), k(64, 1.0f);
  for (size_t i = 0; i < 64; i += 2) q[i] = 1e30f, k[i + 1] = 1e-30f;
  for (const bool halves : {false, true}) {
    for (const float factor : BalanceKeys(q, k, halves)) {
      EXPECT_GE(factor, static_cast<float>(1 / kMostBalance));
      EXPECT_LE(factor, static_cast<float>(kMostBalance));
    }
  }
}

}  // namespace
}  // namespace kvcell
