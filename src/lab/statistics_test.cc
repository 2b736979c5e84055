#include "lab/statistics.h"

#include <gtest/gtest.h>

namespace kvcell {
namespace {

TEST(Statistics, OfNothingIsNothing) {
  EXPECT_EQ(Mean({}), 0.0);
  EXPECT_EQ(Median({}), 0.0);
  EXPECT_EQ(StandardError({}), 0.0);
  EXPECT_EQ(StandardError(std::vector{3.0}), 0.0);
}

TEST(Statistics, OrderDoesNotMatter) {
  EXPECT_EQ(Median({9.0, 1.0, 5.0}), 5.0);
  EXPECT_EQ(Quantile({4.0, 2.0, 3.0, 1.0, 0.0}, 1.0), 4.0);
  EXPECT_EQ(Quantile({4.0, 2.0, 3.0, 1.0, 0.0}, 0.25), 1.0);
}

// 2, 4, 4, 4, 5, 5, 7, 9: mean 5, sum of squares 32.
TEST(Statistics, StandardErrorOfTheMean) {
  const std::vector values{2.0, 4.0, 4.0, 4.0, 5.0, 5.0, 7.0, 9.0};
  EXPECT_DOUBLE_EQ(Mean(values), 5.0);
  EXPECT_DOUBLE_EQ(StandardError(values), 0.75592894601845440);  // sqrt(32 / 7 / 8)
}

}  // namespace
}  // namespace kvcell
