// Layouts: planes that neither overlap nor leave their cell, places that fill them, and codebooks that are optimal.
#include "codec/cell_layout.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <set>
#include <utility>

namespace kvcell {
namespace {

using ::testing::HasSubstr;

constexpr int kDims[] = {1, 7, 16, 40, 64, 65, 80, 96, 112, 128, 192, 256, 1024};

TEST(CellLayout, PlanesFollowEachOtherAligned) {
  for (const char* text : {"f16", "i8", "i4", "k=int4:g128:off,v=f16", "k=f16,v=int4:g32", "k=int8:off,v=int4:g128"}) {
    const CodecSpec spec = *ParseCodec(text);
    for (const int dk : kDims) {
      for (const int dv : kDims) {
        const CellLayout layout = *MakeCellLayout(spec, dk, dv);
        EXPECT_EQ(layout.k.codes, sizeof(CellHeader));
        EXPECT_EQ(layout.v.codes, layout.k.end);
        EXPECT_EQ(layout.v.end, layout.bytes);
        EXPECT_EQ(layout.bytes % 64, 0u);
        for (const SideLayout* side : {&layout.k, &layout.v}) {
          EXPECT_EQ(side->codes % 64, 0u);
          EXPECT_EQ(side->scales % 64, 0u);
          EXPECT_EQ(side->channel_offset % 64, 0u);
          EXPECT_LE(side->codes, side->scales);
          EXPECT_LE(side->scales, side->channel_offset);
          EXPECT_LE(side->channel_offset, side->end);
          EXPECT_EQ(side->dim_padded % 16, 0);
          EXPECT_EQ(kBlockTokens % side->rows_per_scale, 0);
          if (side->spec.type == SideSpec::Type::kF16) continue;
          const uint32_t scales = uint32_t(side->n_groups * (kBlockTokens / side->rows_per_scale));
          EXPECT_LE(side->scales + 2 * scales, side->channel_offset);
          EXPECT_LT(ScaleIndex(*side, kBlockTokens - 1, side->dim - 1), scales);
          EXPECT_LE(side->rows_per_scale * side->dim, std::max<int>(side->spec.group, side->dim));
        }
      }
    }
  }
}

// Every code has a place of its own, and together they fill the plane.
TEST(CellLayout, PlacesFillThePlane) {
  for (const int dim : kDims) {
    const CellLayout int4 = *MakeCellLayout(*ParseCodec("k=int4:g128,v=int4:g128"), dim, dim);
    const CellLayout int8 = *MakeCellLayout(*ParseCodec("i8"), dim, dim);
    std::set<std::pair<uint32_t, bool>> k4, v4;
    std::set<uint32_t> k8, v8;
    for (int t = 0; t < kBlockTokens; ++t) {
      for (int d = 0; d < int4.k.dim_padded; ++d) {
        const CodePlace k = Int4KPlace(int4.k, t, d);
        const CodePlace v = Int4VPlace(int4.v, t, d);
        k4.insert({k.byte, k.high});
        v4.insert({v.byte, v.high});
        k8.insert(Int8KByte(int8.k, t, d));
        v8.insert(Int8VByte(int8.v, t, d));
      }
    }
    const size_t n = size_t(kBlockTokens) * size_t(int4.k.dim_padded);
    EXPECT_EQ(k4.size(), n);
    EXPECT_EQ(v4.size(), n);
    EXPECT_EQ(k8.size(), n);
    EXPECT_EQ(v8.size(), n);
    EXPECT_EQ(k4.rbegin()->first + 1, n / 2);
    EXPECT_EQ(v4.rbegin()->first + 1, n / 2);
    EXPECT_EQ(*k8.rbegin() + 1, n);
    EXPECT_EQ(*v8.rbegin() + 1, n);
    EXPECT_EQ(int4.k.scales - int4.k.codes, n / 2);
    EXPECT_EQ(int8.k.scales - int8.k.codes, n);
  }
}

TEST(CellLayout, GroupsLargerThanTheHeadCoverRows) {
  const CodecSpec spec = *ParseCodec("k=int4:g128,v=int4:g32");
  const CellLayout layout = *MakeCellLayout(spec, 40, 1);
  EXPECT_EQ(layout.k.n_groups, 1);
  EXPECT_EQ(layout.k.rows_per_scale, 2);  // 128 / 40 = 3, but rows must divide the block
  EXPECT_EQ(layout.v.rows_per_scale, 32);
  EXPECT_EQ(MakeCellLayout(spec, 1, 1)->k.rows_per_scale, 64);
  EXPECT_EQ(MakeCellLayout(spec, 64, 64)->k.rows_per_scale, 2);
  EXPECT_EQ(MakeCellLayout(spec, 80, 80)->v.n_groups, 3);
}

TEST(CellLayout, RefusesWhatCannotBeCoded) {
  const CodecSpec i4 = *ParseCodec("i4");
  for (const int dim : {-1, 0, 1025, 1 << 30}) {
    const Result<CellLayout> k = MakeCellLayout(i4, dim, 64);
    const Result<CellLayout> v = MakeCellLayout(i4, 64, dim);
    ASSERT_FALSE(k);
    ASSERT_FALSE(v);
    EXPECT_EQ(k.error().code(), StatusCode::kInvalidArgument);
    EXPECT_THAT(k.error().message(), HasSubstr("head_dim_k"));
    EXPECT_THAT(v.error().message(), HasSubstr("head_dim_v"));
  }
  CodecSpec spec = i4;
  spec.v.group = 0;
  EXPECT_FALSE(MakeCellLayout(spec, 64, 64));
  spec = i4;
  spec.v.channel_offset = true;
  EXPECT_FALSE(MakeCellLayout(spec, 64, 64));
  spec = i4;
  spec.k.type = SideSpec::Type(9);
  EXPECT_FALSE(MakeCellLayout(spec, 64, 64));
  spec = i4;
  spec.k.type = SideSpec::Type::kInt8;  // still has lloyd levels
  EXPECT_FALSE(MakeCellLayout(spec, 64, 64));
}

TEST(ExactLayout, PlanesAreAligned) {
  for (const int dim : kDims) {
    const ExactLayout layout = MakeExactLayout(16, dim, 65);
    EXPECT_EQ(layout.v % 64, 0u);
    EXPECT_EQ(layout.bytes % 64, 0u);
    EXPECT_GE(layout.v, uint32_t(dim) * 32u);
    EXPECT_EQ(layout.dv_padded, 80);
    EXPECT_EQ(layout.bytes, layout.v + 80u * 32u);
  }
}

// --- The Lloyd-Max codebook, computed again
// --------------------------------------------------------------------------------

constexpr int kHalf = kLevelCount / 2;
using HalfTable = std::array<double, kHalf>;  // the positive levels

double Density(double x) { return std::exp(-0.5 * x * x) / std::sqrt(2.0 * M_PI); }
double Tail(double x) { return 0.5 * std::erfc(x / std::sqrt(2.0)); }

// Mean squared error of the unit Gaussian rounded to the nearest of +-scale * level.
double GaussianError(const HalfTable& level, double scale) {
  double error = 0.0;
  for (int i = 0; i < kHalf; ++i) {
    const double r = scale * level[size_t(i)];
    const double a = i == 0 ? 0.0 : 0.5 * scale * (level[size_t(i - 1)] + level[size_t(i)]);
    const double b = i == kHalf - 1 ? 40.0 : 0.5 * scale * (level[size_t(i)] + level[size_t(i + 1)]);
    const double mass = Tail(a) - Tail(b);
    const double first = Density(a) - Density(b);
    const double second = mass + a * Density(a) - b * Density(b);
    error += second - 2.0 * r * first + r * r * mass;
  }
  return 2.0 * error;
}

// The smallest error over all scales (golden section; the error has one minimum there).
double BestGaussianError(const HalfTable& level) {
  double low = 1.5 / level.back(), high = 4.0 / level.back();
  for (int i = 0; i < 60; ++i) {
    const double a = low + (high - low) * 0.382, b = low + (high - low) * 0.618;
    if (GaussianError(level, a) < GaussianError(level, b)) {
      high = b;
    } else {
      low = a;
    }
  }
  return GaussianError(level, 0.5 * (low + high));
}

HalfTable LloydMax() {
  HalfTable level;
  for (int i = 0; i < kHalf; ++i) level[size_t(i)] = 0.35 * (i + 0.5);
  for (int round = 0; round < 5000; ++round) {
    HalfTable next = level;
    for (size_t i = 0; i < kHalf; ++i) {
      const double a = i == 0 ? 0.0 : 0.5 * (level[i - 1] + level[i]);
      const double b = i == kHalf - 1 ? 40.0 : 0.5 * (level[i] + level[i + 1]);
      next[i] = (Density(a) - Density(b)) / (Tail(a) - Tail(b));
    }
    level = next;
  }
  return level;
}

TEST(LevelTables, LloydMaxIsTheBestRoundedScaling) {
  const HalfTable ideal = LloydMax();
  EXPECT_NEAR(GaussianError(ideal, 1.0), 0.009501, 1e-6);  // the known optimum for 16 levels
  HalfTable best{};
  double best_error = 1.0;
  for (double scale = 3.0; scale * ideal.back() < kMaxLevel + 0.5; scale += 0.002) {
    HalfTable rounded;
    for (size_t i = 0; i < kHalf; ++i) rounded[i] = std::floor(scale * ideal[i] + 0.5);
    if (std::set<double>(rounded.begin(), rounded.end()).size() != kHalf || rounded[0] < 1.0) continue;
    const double error = BestGaussianError(rounded);
    if (error < best_error) {
      best_error = error;
      best = rounded;
    }
  }
  for (size_t i = 0; i < kHalf; ++i) {
    EXPECT_EQ(double(kLloydMaxLevels[kHalf + i]), best[i]);
    EXPECT_EQ(kLloydMaxLevels[kHalf - 1 - i], -kLloydMaxLevels[kHalf + i]);
  }
  EXPECT_LT(best_error, 1.02 * GaussianError(ideal, 1.0));
}

TEST(LevelTables, AscendAndFitSixBits) {
  for (const auto levels : {SideSpec::Levels::kUniform, SideSpec::Levels::kLloydMax}) {
    const auto& table = LevelTable(levels);
    for (size_t i = 0; i < table.size(); ++i) {
      EXPECT_LE(std::abs(table[i]), kMaxLevel);
      EXPECT_TRUE(i == 0 || table[i - 1] < table[i]);
    }
  }
  EXPECT_EQ(kUniformLevels[kZeroCode], 0);
}

}  // namespace
}  // namespace kvcell
