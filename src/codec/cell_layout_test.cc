// Layouts: planes that neither overlap nor leave their cell, places that fill them, and codebooks that are optimal.
#include "codec/cell_layout.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace kvcell {
namespace {

using ::testing::HasSubstr;

constexpr int kDims[] = {1, 7, 16, 40, 64, 65, 80, 96, 112, 128, 192, 256, 1024};

TEST(CellLayout, PlanesFollowEachOtherAligned) {
  for (const char* text :
       {"f16", "i8", "i4", "k=int4:g128:off,v=f16", "k=f16,v=int4:g32", "k=int8:off,v=int4:g128", "i5", "i43", "i3",
        "k=int6:g16,v=int2:g128", "k=int2:t32:asym,v=int3:g64:two", "k=tq4:qjl,v=nf4", "k=bf16,v=fp8e4m3"}) {
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
          EXPECT_EQ(side->codes_high % 64, 0u);
          EXPECT_LE(side->codes, side->codes_high);
          EXPECT_LE(side->codes_high, side->scales);
          EXPECT_LE(side->scales, side->channel_offset);
          EXPECT_LE(side->channel_offset, side->end);
          EXPECT_EQ(side->dim_padded % 16, 0);
          EXPECT_EQ(kBlockTokens % side->rows_per_scale, 0);
          if (side->spec.type == SideSpec::Type::kF16 || !side->in_place) continue;
          const uint32_t scales = uint32_t(side->n_groups * (kBlockTokens / side->rows_per_scale));
          EXPECT_LE(side->scales + 2 * scales, side->channel_offset);
          EXPECT_LT(ScaleIndex(*side, kBlockTokens - 1, side->dim - 1), scales);
          EXPECT_LE(side->rows_per_scale * side->dim, std::max<int>(side->spec.group, side->dim));
        }
      }
    }
  }
}

// Every code has a place of its own in each plane, and together they fill it.
TEST(CellLayout, PlacesFillThePlanes) {
  for (const int dim : kDims) {
    for (const char* type : {"int2", "int3", "int4", "int5", "int6"}) {
      const CellLayout layout =
          *MakeCellLayout(*ParseCodec(std::string("k=") + type + ":g128,v=" + type + ":g128"), dim, dim);
      const int bits = LevelBits(layout.k.spec.type);
      ASSERT_EQ(LowBits(bits) + HighBits(bits), bits);
      const uint32_t n = uint32_t(kBlockTokens * layout.k.dim_padded);
      EXPECT_EQ(layout.k.codes_high - layout.k.codes, n * uint32_t(LowBits(bits)) / 8);
      EXPECT_EQ(layout.k.scales - layout.k.codes, n * uint32_t(bits) / 8);
      for (const int width : {LowBits(bits), HighBits(bits)}) {
        if (width == 0) continue;
        std::set<std::pair<uint32_t, int>> k, v;
        for (int t = 0; t < kBlockTokens; ++t) {
          for (int d = 0; d < layout.k.dim_padded; ++d) {
            const CodePlace key = KeyPlace(layout.k, width, t, d), value = ValuePlace(width, t, d);
            EXPECT_EQ(key.shift % width, 0);
            k.insert({key.byte, key.shift});
            v.insert({value.byte, value.shift});
          }
        }
        EXPECT_EQ(k.size(), n);
        EXPECT_EQ(v.size(), n);
        EXPECT_EQ(k.rbegin()->first + 1, n * uint32_t(width) / 8);
        EXPECT_EQ(v.rbegin()->first + 1, n * uint32_t(width) / 8);
      }
    }
    const CellLayout int8 = *MakeCellLayout(*ParseCodec("i8"), dim, dim);
    std::set<uint32_t> k8, v8;
    for (int t = 0; t < kBlockTokens; ++t) {
      for (int d = 0; d < int8.k.dim_padded; ++d) {
        k8.insert(Int8KByte(int8.k, t, d));
        v8.insert(Int8VByte(int8.v, t, d));
      }
    }
    const size_t n = size_t(kBlockTokens) * size_t(int8.k.dim_padded);
    EXPECT_EQ(k8.size(), n);
    EXPECT_EQ(v8.size(), n);
    EXPECT_EQ(*k8.rbegin() + 1, n);
    EXPECT_EQ(*v8.rbegin() + 1, n);
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

using HalfTable = std::vector<double>;  // the positive levels

double Density(double x) { return std::exp(-0.5 * x * x) / std::sqrt(2.0 * M_PI); }
double Tail(double x) { return 0.5 * std::erfc(x / std::sqrt(2.0)); }

// Mean squared error of the unit Gaussian rounded to the nearest of +-scale * level.
double GaussianError(const HalfTable& level, double scale) {
  double error = 0.0;
  for (size_t i = 0; i < level.size(); ++i) {
    const double r = scale * level[i];
    const double a = i == 0 ? 0.0 : 0.5 * scale * (level[i - 1] + level[i]);
    const double b = i + 1 == level.size() ? 40.0 : 0.5 * scale * (level[i] + level[i + 1]);
    const double mass = Tail(a) - Tail(b);
    const double first = Density(a) - Density(b);
    const double second = mass + a * Density(a) - b * Density(b);
    error += second - 2.0 * r * first + r * r * mass;
  }
  return 2.0 * error;
}

// The smallest error over all scales (golden section; the error has one minimum there).
double BestGaussianError(const HalfTable& level) {
  double low = 1.2 / level.back(), high = 6.0 / level.back();
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

HalfTable LloydMax(int bits) {
  HalfTable level(size_t(1) << (bits - 1));
  for (size_t i = 0; i < level.size(); ++i) level[i] = 2.8 / double(level.size()) * (double(i) + 0.5);
  for (int round = 0; round < 5000; ++round) {
    HalfTable next = level;
    for (size_t i = 0; i < level.size(); ++i) {
      const double a = i == 0 ? 0.0 : 0.5 * (level[i - 1] + level[i]);
      const double b = i + 1 == level.size() ? 40.0 : 0.5 * (level[i] + level[i + 1]);
      next[i] = (Density(a) - Density(b)) / (Tail(a) - Tail(b));
    }
    level = next;
  }
  return level;
}

HalfTable PositiveLevels(int bits) {
  const LevelTable table = MakeLevelTable(bits, SideSpec::Levels::kLloydMax);
  HalfTable half;
  for (int i = table.count / 2; i < table.count; ++i) half.push_back(table.level[size_t(i)]);
  return half;
}

// 2 bits have a coarser table than 6-bit levels allow, for the sake of finer queries: its loss is as small.
TEST(LevelTables, LloydMaxIsTheBestRoundedScaling) {
  const double optimum[] = {0.117482, 0.034548, 0.009501};  // the known ones for 4, 8 and 16 levels
  for (const int bits : {2, 3, 4}) {
    const HalfTable ideal = LloydMax(bits);
    EXPECT_NEAR(GaussianError(ideal, 1.0), optimum[bits - 2], 1e-6);
    HalfTable best;
    double best_error = 1.0;
    for (double scale = 1.0; scale * ideal.back() < 31.5; scale += 0.002) {
      HalfTable rounded;
      for (const double level : ideal) rounded.push_back(std::floor(scale * level + 0.5));
      if (std::set<double>(rounded.begin(), rounded.end()).size() != ideal.size() || rounded[0] < 1.0) continue;
      const double error = BestGaussianError(rounded);
      if (error < best_error) {
        best_error = error;
        best = rounded;
      }
    }
    EXPECT_LT(best_error, 1.02 * GaussianError(ideal, 1.0));
    if (bits > 2) {
      EXPECT_EQ(PositiveLevels(bits), best);
    }
    EXPECT_LT(BestGaussianError(PositiveLevels(bits)), 1.0001 * best_error) << bits;
  }
}

// Of 5 bits no scaling rounds well: no single level moved by one or two is better, and uniform levels are worse.
TEST(LevelTables, FiveBitLevelsAreTheBestOfTheirNeighbourhood) {
  const HalfTable table = PositiveLevels(5);
  const double error = BestGaussianError(table);
  EXPECT_LT(error, 1.18 * GaussianError(LloydMax(5), 1.0));
  HalfTable uniform;
  for (int i = 0; i < 16; ++i) uniform.push_back(2.0 * i + 1.0);
  EXPECT_LT(error, 0.85 * BestGaussianError(uniform));
  for (size_t i = 0; i < table.size(); ++i) {
    for (const double step : {-2.0, -1.0, 1.0, 2.0}) {
      HalfTable moved = table;
      moved[i] += step;
      const bool ascends = moved[0] >= 1.0 && std::adjacent_find(moved.begin(), moved.end(), [](double a, double b) {
                                                return a >= b;
                                              }) == moved.end();
      if (ascends && moved.back() < kMaxLevel) {
        EXPECT_GE(BestGaussianError(moved), error) << i << " " << step;
      }
    }
  }
}

TEST(LevelTables, AscendMirrorAndFitSixBits) {
  for (const int bits : {2, 3, 4, 5, 6}) {
    for (const auto levels : {SideSpec::Levels::kUniform, SideSpec::Levels::kLloydMax, SideSpec::Levels::kSkewed}) {
      if (bits == 6 && levels == SideSpec::Levels::kLloydMax) continue;
      if (bits != 3 && bits != 4 && levels == SideSpec::Levels::kSkewed) continue;
      const LevelTable table = MakeLevelTable(bits, levels);
      ASSERT_EQ(table.count, 1 << bits);
      const auto count = size_t(table.count);
      for (size_t i = 0; i < count; ++i) {
        EXPECT_LE(std::abs(table.level[i]), kMaxLevel);
        EXPECT_TRUE(i == 0 || table.level[i - 1] < table.level[i]);
        if (levels == SideSpec::Levels::kLloydMax) {
          EXPECT_EQ(table.level[i], -table.level[count - 1 - i]);
        }
      }
      EXPECT_GE(table.level[size_t(ZeroCode(bits))], 0);
    }
  }
}

}  // namespace
}  // namespace kvcell
