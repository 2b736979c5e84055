// Coding cells: error contracts, field cases, and bytes that depend on values alone.
#include "codec/cell_codec.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <functional>
#include <iterator>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "codec/encode_kernels.h"
#include "codec/f16.h"
#include "codec/flush_mode_test.h"

namespace kvcell {
namespace {

using ::testing::HasSubstr;

constexpr int kDims[] = {1, 7, 40, 64, 65, 80, 96, 112, 128, 192, 256};
// Attended in place.
const char* const kPlaceSpecs[] = {"f16",
                                   "i8",
                                   "i4",
                                   "i5",
                                   "i43",
                                   "i3",
                                   "k=int4:g32:sym,v=int4:g64:sym",
                                   "k=int4:g64:sym:rot:off,v=int4:g128:lloyd:rot",
                                   "k=int4:g128:lloyd,v=int8:g128",
                                   "k=int8:g32:rot,v=int4:g32:sym:rot",
                                   "k=f16,v=int4:g64:lloyd:rot",
                                   "k=int4:g32:lloyd:rot:off,v=f16",
                                   "k=int6:g32:rot:off,v=int6:g128",
                                   "k=int5:g16:sym,v=int5:g64:lloyd:rot",
                                   "k=int3:g64:sym:rot:off,v=int3:g16:sym",
                                   "k=int2:g32:lloyd:rot:off,v=int2:g64:sym",
                                   "k=int4:g32:skew:rot:off,v=int3:g32:skew:rot",
                                   "k=int3:g128:skew,v=int4:g64:skew"};
// For study.
const char* const kStudySpecs[] = {"k=int2:t32:asym:plain,v=int2:g32:asym:plain",
                                   "k=int4:t16:lloyd:rot:off,v=int4:g128:asym:rot",
                                   "k=int3:g64:sym:plain,v=int3:t64:sym:two",
                                   "k=int4:g128:sym:clip:two,v=int2:g16:lloyd:two",
                                   "k=nf4:g64:rot:off,v=nf4:g16",
                                   "k=fp4:g32,v=fp4:g128:rot",
                                   "k=fp8e4m3,v=fp8e5m2",
                                   "k=bf16,v=f32",
                                   "k=tq4,v=tq2:qjl",
                                   "k=tq3:qjl,v=tq3"};
const std::vector<const char*> kSpecs = [] {
  std::vector<const char*> specs(std::begin(kPlaceSpecs), std::end(kPlaceSpecs));
  specs.insert(specs.end(), std::begin(kStudySpecs), std::end(kStudySpecs));
  return specs;
}();

// 64-byte aligned bytes, as the arena gives them.
class CellBytes {
 public:
  explicit CellBytes(size_t bytes, int fill = 0) : lines_((bytes + 63) / 64), bytes_(bytes) {
    std::memset(static_cast<void*>(lines_.data()), fill, lines_.size() * 64);
  }
  std::byte* data() { return reinterpret_cast<std::byte*>(lines_.data()); }
  const std::byte* data() const { return reinterpret_cast<const std::byte*>(lines_.data()); }
  std::span<const std::byte> span() const { return {data(), bytes_}; }
  bool operator==(const CellBytes& other) const {
    return bytes_ == other.bytes_ && std::memcmp(data(), other.data(), bytes_) == 0;
  }

 private:
  struct alignas(64) Line {
    std::byte bytes[64];
  };
  std::vector<Line> lines_;
  size_t bytes_;
};

// K and V of one block, [64, dk] and [64, dv].
struct Values {
  int dk, dv;
  std::vector<float> k, v;
  Values(int dim_k, int dim_v) : dk(dim_k), dv(dim_v), k(size_t(64 * dim_k)), v(size_t(64 * dim_v)) {}
};

Values Gaussian(int dk, int dv, uint32_t seed, float scale = 1.0f) {
  Values values(dk, dv);
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0.0f, scale);
  for (float& x : values.k) x = normal(random);
  for (float& x : values.v) x = normal(random);
  return values;
}

struct Exact {
  ExactLayout layout;
  CellBytes bytes;
  SanitizeCounts counts;
};

// Appends all tokens one by one to a cell filled with `poison` before.
Exact Append(const Values& values, int poison = 0xff) {
  const ExactLayout layout = MakeExactLayout(kBlockTokens, values.dk, values.dv);
  Exact exact = {layout, CellBytes(layout.bytes, poison), {}};
  for (int t = 0; t < kBlockTokens; ++t) {
    WriteExactToken(layout, exact.bytes.data(), t, &values.k[size_t(t * values.dk)], &values.v[size_t(t * values.dv)],
                    &exact.counts);
  }
  return exact;
}

struct Coded {
  CellLayout layout;
  CellBytes bytes;
  Values decoded;
};

Coded Code(const std::string& spec, const Exact& exact, int first_token = 0) {
  const CellLayout layout = *MakeCellLayout(*ParseCodec(spec), exact.layout.dk, exact.layout.dv);
  Coded coded = {layout, CellBytes(layout.bytes, 0xff), Values(exact.layout.dk, exact.layout.dv)};
  EncodeCell(layout, exact.layout, exact.bytes.data(), first_token, coded.bytes.data());
  DecodeCell(layout, coded.bytes.data(), coded.decoded.k.data(), coded.decoded.v.data());
  return coded;
}

Coded Code(const std::string& spec, const Values& values) { return Code(spec, Append(values)); }

double RelativeError(const std::vector<float>& want, const std::vector<float>& got) {
  double error = 0, norm = 0;
  for (size_t i = 0; i < want.size(); ++i) {
    error += std::pow(double(want[i]) - double(got[i]), 2);
    norm += std::pow(double(want[i]), 2);
  }
  return norm > 0 ? error / norm : error;
}

bool AllFinite(const Values& values) {
  const auto finite = [](float x) { return std::isfinite(x); };
  return std::all_of(values.k.begin(), values.k.end(), finite) && std::all_of(values.v.begin(), values.v.end(), finite);
}

float Scale(const Coded& coded, const SideLayout& side, int t, int d) {
  uint16_t bits;
  std::memcpy(&bits, coded.bytes.data() + side.scales + ScaleIndex(side, t, d) * 2, 2);
  return F16ToF32(bits);
}

// --- Error contracts
// -------------------------------------------------------------------------------------------------------

TEST(CellCodec, GaussianErrorStaysWithinEachPresetsBound) {
  for (const int dk : kDims) {
    for (const int dv : {dk, 64}) {
      const Values values = Gaussian(dk, dv, uint32_t(dk * 1000 + dv));
      const Coded f16 = Code("f16", values), i8 = Code("i8", values), i4 = Code("i4", values);
      EXPECT_LT(RelativeError(values.k, f16.decoded.k), 1e-7) << dk;
      EXPECT_LT(RelativeError(values.v, f16.decoded.v), 1e-7) << dv;
      EXPECT_LT(RelativeError(values.k, i8.decoded.k), 6e-5) << dk;
      EXPECT_LT(RelativeError(values.v, i8.decoded.v), 6e-5) << dv;
      // Heads that don't fill their groups evenly have fewer or more values a scale.
      EXPECT_LT(RelativeError(values.k, i4.decoded.k), dk >= 64 ? 0.0065 : 0.0080) << dk;
      EXPECT_LT(RelativeError(values.v, i4.decoded.v), dv >= 64 ? 0.0077 : 0.0090) << dv;
    }
  }
}

TEST(CellCodec, LevelNoiseIsWhatCodingLeaves) {
  const auto check = [](int bits, const char* levels, int group) {
    const std::string name = fmt::format("int{}:g{}:{}", bits, group, levels);
    double noise = 0, n = 0;
    for (uint32_t seed = 1; seed <= 8; ++seed) {
      const Values values = Gaussian(128, 128, seed);
      const Coded coded = Code(fmt::format("k={},v={}", name, name), values);
      for (int t = 0; t < kBlockTokens; ++t) {
        for (int d = 0; d < 128; ++d, ++n) {
          const auto i = size_t(t * 128 + d);
          const double error = double(values.k[i] - coded.decoded.k[i]) / double(Scale(coded, coded.layout.k, t, d));
          noise += error * error;
        }
      }
    }
    const double said = double(LevelNoise(bits, ParseCodec(fmt::format("k={},v=f16", name))->k.levels));
    EXPECT_NEAR(noise / n / said, 1.0, group == 64 ? 0.05 : 0.22) << name << " " << noise / n;
  };
  for (const int group : {16, 32, 64, 128}) {
    for (const int bits : {2, 3, 4, 5}) check(bits, "lloyd", group);
    for (const int bits : {2, 3, 4, 5, 6}) check(bits, "sym", group);
    for (const int bits : {3, 4}) check(bits, "skew", group);
  }
}

// What Gaussian values lose, of their energy: each codec's contract, as docs/codecs.md states it.
TEST(CellCodec, GaussianErrorStaysWithinEachCodecsBound) {
  struct Contract {
    const char* side;
    double bound;
  };
  const Contract contracts[] = {{"int6:g32", 0.0005},
                                {"int5:g32:lloyd", 0.0018},
                                {"int5:g32", 0.0020},
                                {"int3:g32:lloyd", 0.028},
                                {"int3:g32:skew", 0.025},
                                {"int4:g64:skew", 0.0075},
                                {"int3:g64:lloyd", 0.031},
                                {"int2:g32:lloyd", 0.112},
                                {"int2:g64", 0.16},
                                {"int4:g32:asym", 0.0085},
                                {"int4:g32:asym:plain", 0.0095},
                                {"int2:g32:asym:plain", 0.25},
                                {"int2:t32:asym", 0.15},
                                {"int4:g64:sym:plain", 0.016},
                                {"int4:t64:sym", 0.0095},
                                {"int4:g64:lloyd:clip", 0.0085},
                                {"int4:g64:lloyd:two", 0.0080},
                                {"nf4:g64", 0.0095},
                                {"fp4:g32", 0.0160},
                                {"fp8e4m3", 0.0008},
                                {"fp8e5m2", 0.0030},
                                {"bf16", 4e-6},
                                {"f32", 1e-12},
                                {"tq4", 0.0105},
                                {"tq3", 0.0370},
                                {"tq2", 0.1250}};
  for (const Contract& c : contracts) {
    const Exact exact = Append(Gaussian(128, 128, 23));
    Values values(128, 128);
    DecodeExact(exact.layout, exact.bytes.data(), kBlockTokens, values.k.data(), values.v.data());
    const Coded coded = Code(std::string("k=") + c.side + ",v=" + c.side, exact);
    for (const double error : {RelativeError(values.k, coded.decoded.k), RelativeError(values.v, coded.decoded.v)}) {
      EXPECT_LT(error, c.bound) << c.side;
      EXPECT_GE(error, 0.5 * c.bound * (std::string(c.side) == "f32" ? 0 : 1))
          << c.side << ": the bound says too little";
    }
  }
}

// QJL trades a bit of the mean squared error for inner products without bias: over many queries the mean of
// <q, decoded k> / <q, k> is 1, where Lloyd-Max alone shrinks it.
TEST(CellCodec, QjlTakesTheBiasOffInnerProducts) {
  const Values values = Gaussian(128, 128, 24);
  const auto slope = [&](const char* side) {
    const Coded coded = Code(std::string("k=") + side + ",v=f16", values);
    double product = 0, energy = 0;
    for (size_t i = 0; i < values.k.size(); ++i) {
      product += double(values.k[i]) * double(coded.decoded.k[i]);
      energy += double(values.k[i]) * double(values.k[i]);
    }
    return product / energy;
  };
  EXPECT_NEAR(slope("tq2"), 1.0 - 0.117, 0.01);
  EXPECT_NEAR(slope("tq2:qjl"), 1.0, 0.02);
}

// Without a rotation each value stands alone: half the widest gap between levels, or what lies beyond the outermost
// one.
TEST(CellCodec, WorstErrorIsHalfAGapOrTheClippedPart) {
  struct Contract {
    const char* spec;
    float gap, low, high;  // of the levels, of V's where K's differ
  };
  for (const Contract& c : {Contract{"k=int4:g32:lloyd,v=int4:g64:lloyd", 5.0f, -20.0f, 20.0f},
                            Contract{"k=int4:g64:sym,v=int4:g128:sym", 1.0f, -8.0f, 7.0f},
                            Contract{"k=int3:g32:skew,v=int3:g64:skew", 8.0f, -16.0f, 20.0f},
                            Contract{"k=int4:g32:skew,v=int4:g64:skew", 5.0f, -18.0f, 22.0f},
                            Contract{"k=int8:g32,v=int8:g128", 1.0f, -127.0f, 127.0f}}) {
    for (const int dim : kDims) {
      Values values = Gaussian(dim, dim, uint32_t(dim));
      for (size_t i = 0; i < values.k.size(); i += 37) values.k[i] *= 50.0f;  // outliers
      const Exact exact = Append(values);
      DecodeExact(exact.layout, exact.bytes.data(), kBlockTokens, values.k.data(), values.v.data());
      const Coded coded = Code(c.spec, exact);
      const auto check = [&](const SideLayout& side, const std::vector<float>& want, const std::vector<float>& got) {
        for (int i = 0; i < kBlockTokens * dim; ++i) {
          const float signed_scale = Scale(coded, side, i / dim, i % dim), scale = std::abs(signed_scale);
          const float turned = signed_scale < 0.0f ? -1.0f : 1.0f, x = turned * want[size_t(i)];
          const float clipped = std::max({x - c.high * scale, c.low * scale - x, 0.0f});
          // Thresholds are chosen on values in units of absmax / 16384.
          const float slack = 1e-3f * c.high * scale + 1e-3f * clipped;
          ASSERT_LE(std::abs(x - turned * got[size_t(i)]), std::max(0.5f * c.gap * scale, clipped) + slack)
              << c.spec << " " << i;
        }
      };
      check(coded.layout.k, values.k, coded.decoded.k);
      check(coded.layout.v, values.v, coded.decoded.v);
    }
  }
}

TEST(CellCodec, RotationAndOffsetsPayOnKeysWithBiasAndOutliers) {
  Values values = Gaussian(128, 128, 3);
  for (size_t i = 0; i < values.k.size(); ++i) {
    if (i % 128 == 17) values.k[i] += 40.0f;  // a channel with a large mean, as key biases make them
    if (i % 128 == 90) values.k[i] *= 12.0f;  // a channel that is large
  }
  const auto error = [&](const char* k) {
    return RelativeError(values.k, Code(std::string("k=") + k + ",v=f16", values).decoded.k);
  };
  const double plain = error("int4:g64:sym");
  const double rotated = error("int4:g64:sym:rot");
  const double both = error("int4:g64:sym:rot:off");
  EXPECT_LT(rotated, plain);
  EXPECT_LT(both, 0.5 * rotated);
}

// --- Each option wins on the values that it is made for
// ------------------------------------------------------------

double KeyError(const Values& values, const std::string& side) {
  return RelativeError(values.k, Code("k=" + side + ",v=f16", values).decoded.k);
}

// Keys whose channels have their own means and spreads, as real ones do.
Values ChannelKeys(uint32_t seed) {
  Values values = Gaussian(64, 64, seed);
  std::mt19937 random(seed + 1);
  std::normal_distribution<float> normal;
  for (size_t d = 0; d < 64; ++d) {
    const float mean = 3.0f * normal(random), spread = std::exp(normal(random));
    for (size_t t = 0; t < 64; ++t) values.k[t * 64 + d] = values.k[t * 64 + d] * spread + mean;
  }
  return values;
}

TEST(Options, GroupsAlongTokensWinOnKeysWithUnequalChannels) {
  const Values values = ChannelKeys(31);
  EXPECT_LT(KeyError(values, "int2:t32:asym:plain"), 0.5 * KeyError(values, "int2:g32:asym:plain"));
}

TEST(Options, ZeroPointsWinOnValuesOfOneSign) {
  Values values = Gaussian(64, 64, 32);
  for (float& x : values.k) x = std::abs(x) + 2.0f;
  EXPECT_LT(KeyError(values, "int4:g32:asym"), 0.3 * KeyError(values, "int4:g32:sym"));
}

TEST(Options, OffsetsWinOnBiasedKeysAndRotationOnOutlyingChannels) {
  const Values biased = ChannelKeys(33);
  EXPECT_LT(KeyError(biased, "int4:g32:lloyd:rot:off"), 0.4 * KeyError(biased, "int4:g32:lloyd:rot"));
  Values outlying = Gaussian(64, 64, 34);
  for (size_t t = 0; t < 64; ++t) outlying.k[t * 64 + 9] *= 30.0f;
  EXPECT_LT(KeyError(outlying, "nf4:g64:rot"), 0.9 * KeyError(outlying, "nf4:g64"));
}

TEST(Options, SearchedAndRefittedScalesBeatTheRange) {
  const Values values = Gaussian(64, 64, 35);
  for (const char* side : {"int4:g64:sym", "int3:g64:sym", "int2:g32:asym"}) {
    EXPECT_LT(KeyError(values, side), 0.85 * KeyError(values, std::string(side) + ":plain")) << side;
  }
}

TEST(Options, TwoAxisScalingWinsOnUnequalChannels) {
  Values values = Gaussian(64, 64, 36);
  for (size_t d = 0; d < 64; ++d) {
    for (size_t t = 0; t < 64; ++t) values.k[t * 64 + d] *= d % 2 ? 8.0f : 0.5f;
  }
  // The small channels are what a scale shared with large ones loses.
  const auto small_error = [&](const char* side) {
    const Coded coded = Code(std::string("k=") + side + ",v=f16", values);
    double error = 0, energy = 0;
    for (size_t i = 0; i < values.k.size(); i += 2) {
      error += std::pow(double(values.k[i]) - double(coded.decoded.k[i]), 2);
      energy += std::pow(double(values.k[i]), 2);
    }
    return error / energy;
  };
  EXPECT_LT(small_error("int4:g64:sym:two"), 0.1 * small_error("int4:g64:sym"));
  EXPECT_LT(KeyError(values, "int4:g64:sym:two"), KeyError(values, "int4:g64:sym"));
}

// A few wild values a cell, scales from the range: clipping them saves all others.
TEST(Options, ClippingSavesTheRestFromAFewWildValues) {
  Values values = Gaussian(64, 64, 37);
  for (const size_t at : {size_t(70), size_t(1500), size_t(3999)}) values.k[at] = 300.0f;
  const auto rest = [&](const char* side) {
    const Coded coded = Code(std::string("k=") + side + ",v=f16", values);
    double error = 0;
    for (size_t i = 0; i < values.k.size(); ++i) {
      if (values.k[i] < 300.0f) error += std::pow(double(values.k[i]) - double(coded.decoded.k[i]), 2);
    }
    return error;
  };
  EXPECT_LT(rest("int4:g128:sym:plain:clip"), 0.5 * rest("int4:g128:sym:plain"));
}

TEST(Options, LloydMaxLevelsBeatUniformOnesOnGaussianValues) {
  const Values values = Gaussian(64, 64, 38);
  for (const char* bits : {"int2:g64", "int3:g64", "int4:g64", "int5:g64"}) {
    EXPECT_LT(KeyError(values, std::string(bits) + ":lloyd"), 0.97 * KeyError(values, bits)) << bits;
  }
}

// Whatever its sign: values that lean to either side, and those that lean to none, of which each group still does.
TEST(Options, SkewedLevelsBeatLloydMaxOnes) {
  for (const float lean : {0.0f, 0.3f, -0.3f}) {
    Values values = Gaussian(64, 64, 39);
    for (float& x : values.k) x += lean * (x * x - 1);
    for (const char* bits : {"int3:g32", "int3:g64", "int4:g32", "int4:g64"}) {
      const double bound = bits[3] == '3' ? 0.94 : 0.98;
      EXPECT_LT(KeyError(values, std::string(bits) + ":skew"), bound * KeyError(values, std::string(bits) + ":lloyd"))
          << bits << lean;
    }
  }
}

// Values turned round have the same codes and the other sign of every scale.
TEST(CellCodec, SkewedCodesOfMirroredValuesDifferInTheirScalesSigns) {
  const Values values = Gaussian(64, 64, 40);
  Values mirrored = values;
  for (std::vector<float>* side : {&mirrored.k, &mirrored.v}) {
    for (float& x : *side) x = -x;
  }
  const Coded coded = Code("k=int3:g32:skew,v=int4:g64:skew:rot", values);
  const Coded other = Code("k=int3:g32:skew,v=int4:g64:skew:rot", mirrored);
  int negative = 0, n = 0;
  for (const SideLayout* side : {&coded.layout.k, &coded.layout.v}) {
    EXPECT_EQ(
        std::memcmp(coded.bytes.data() + side->codes, other.bytes.data() + side->codes, side->scales - side->codes), 0);
    for (uint32_t at = side->scales; at < side->channel_offset; at += 2, ++n) {
      uint16_t a, b;
      std::memcpy(&a, coded.bytes.data() + at, 2);
      std::memcpy(&b, other.bytes.data() + at, 2);
      ASSERT_EQ(a ^ 0x8000, b);
      negative += a >> 15;
    }
  }
  EXPECT_GT(negative, n / 4);
  EXPECT_LT(negative, n * 3 / 4);
}

// The quantizer's search finds what a plain search over a fine grid of scales finds, within a percent.
TEST(CellCodec, ScaleSearchIsNearTheBestScale) {
  // The least squared error of n values at any scale of either sign.
  const auto best_error = [](const float* x, int n, const LevelTable& table) {
    float absmax = 0;
    for (int i = 0; i < n; ++i) absmax = std::max(absmax, std::abs(x[i]));
    double best = 1e9;
    for (int step = -1500; step < 1500; ++step) {
      const double scale = double(absmax) * (step + 0.5) / 500.0 / table.level[size_t(table.count) - 1];
      double error = 0;
      for (int i = 0; i < n; ++i) {
        double nearest = 1e9;
        for (int l = 0; l < table.count; ++l) {
          const double off = double(x[i]) - scale * table.level[size_t(l)];
          nearest = std::min(nearest, off * off);
        }
        error += nearest;
      }
      best = std::min(best, error);
    }
    return best;
  };
  const Values values = Gaussian(64, 64, 11);
  for (const char* spec :
       {"k=int4:g32:lloyd,v=int4:g64:lloyd", "k=int3:g32:skew,v=int3:g64:skew", "k=int4:g32:skew,v=int4:g64:skew"}) {
    const Coded coded = Code(spec, values);
    const SideSpec& side = coded.layout.k.spec;
    const LevelTable table = MakeLevelTable(LevelBits(side.type), side.levels);
    double best = 0, got = 0;
    for (size_t i = 0; i < 64 * 64; i += 32) best += best_error(&values.k[i], 32, table);
    for (size_t i = 0; i < 64 * 64; i += 64) best += best_error(&values.v[i], 64, table);
    for (size_t i = 0; i < 64 * 64; ++i) {
      got += std::pow(double(values.k[i]) - double(coded.decoded.k[i]), 2);
      got += std::pow(double(values.v[i]) - double(coded.decoded.v[i]), 2);
    }
    EXPECT_LT(got, 1.02 * best) << spec;
  }
}

// --- Field cases
// -----------------------------------------------------------------------------------------------------------

TEST(FieldCases, A1ZeroRowsAndGroupsDecodeToExactlyZero) {
  for (const char* spec : kSpecs) {
    Values values = Gaussian(128, 128, 5);
    for (int d = 0; d < 128; ++d) values.v[size_t(3 * 128 + d)] = d % 2 ? -0.0f : 0.0f;
    std::fill(values.k.begin(), values.k.end(), -0.0f);
    const Coded coded = Code(spec, values);
    EXPECT_TRUE(AllFinite(coded.decoded)) << spec;
    for (const float x : coded.decoded.k) ASSERT_EQ(x, 0.0f) << spec;
    // A scale of its own, or one that is shared with a row that isn't zero.
    if (coded.layout.v.rows_per_scale == 1) {
      for (int d = 0; d < 128; ++d) ASSERT_EQ(coded.decoded.v[size_t(3 * 128 + d)], 0.0f) << spec;
    }
  }
  Values values = Gaussian(128, 128, 6);
  for (int d = 32; d < 64; ++d) values.k[size_t(9 * 128 + d)] = 0.0f;  // group 2 of 4
  const Coded coded = Code("k=int4:g32:lloyd,v=f16", values);
  for (int d = 0; d < 128; ++d) EXPECT_EQ(coded.decoded.k[size_t(9 * 128 + d)] == 0.0f, d >= 32 && d < 64) << d;
}

TEST(FieldCases, A4OutliersSaturateAndAreCounted) {
  Values values = Gaussian(128, 128, 7);
  std::fill(values.k.begin(), values.k.begin() + 128, 1.0f);
  values.k[0] = -70000.0f;
  values.v[5] = 3e38f;
  const Exact exact = Append(values);
  EXPECT_EQ(exact.counts.saturated, 2u);
  EXPECT_EQ(exact.counts.not_finite, 0u);
  for (const char* spec : kSpecs) {
    const Coded coded = Code(spec, exact);
    EXPECT_TRUE(AllFinite(coded.decoded)) << spec;
    // Where 127 small values share its scale, clipping it is the smaller error: Lloyd-Max levels have no zero for the
    // others. What is made to clip, or ends at 448, does.
    const std::string text = spec;
    if (text.find("clip") == std::string::npos && text.find("fp8") == std::string::npos) {
      EXPECT_NEAR(coded.decoded.k[0], -65504.0f, 0.25f * 65504.0f) << spec;
    }
  }
}

// The largest values that f16 holds, aligned so that the rotation adds them all up.
TEST(FieldCases, A4LargestValuesStayFiniteUnderRotation) {
  for (const int dim : {64, 128, 256, 1024}) {
    Values values(dim, dim);
    std::fill(values.k.begin(), values.k.end(), 65504.0f);
    std::fill(values.v.begin(), values.v.end(), -65504.0f);
    for (const char* spec : kSpecs) EXPECT_TRUE(AllFinite(Code(spec, values).decoded)) << spec << dim;
  }
}

TEST(FieldCases, A7TinyValuesGiveTheSameBytesWithSubnormalsFlushedOrNot) {
  for (const char* spec : kSpecs) {
    for (const float magnitude : {1e-41f, 1e-39f, 0x1p-26f, 0x1p-24f, 0x1p-20f, 1e-5f, 1.0f}) {
      Values values = Gaussian(80, 64, 8, magnitude);
      for (size_t i = 0; i < 80; ++i) values.k[i] = 1e-41f * float(i);
      const auto coded_with = [&](bool flush) {
        const FlushMode mode(flush);
        return Code(spec, values);
      };
      const Coded plain = coded_with(false), flushed = coded_with(true);
      EXPECT_EQ(plain.bytes, flushed.bytes) << spec << magnitude;
      EXPECT_TRUE(AllFinite(plain.decoded));
      if (magnitude < 1e-30f) {
        for (const float x : plain.decoded.k) ASSERT_EQ(x, 0.0f);
      }
    }
  }
}

TEST(FieldCases, A8NonFiniteValuesAreZeroedCountedAndTouchNothingElse) {
  const Values clean = [] {
    Values values = Gaussian(64, 64, 9);
    for (const size_t d : std::initializer_list<size_t>{3, 20, 63}) values.k[5 * 64 + d] = values.v[5 * 64 + d] = 0.0f;
    return values;
  }();
  Values values = clean;
  const float bad[] = {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(),
                       -std::numeric_limits<float>::infinity()};
  for (size_t i = 0; i < 3; ++i) {
    const size_t d[] = {3, 20, 63};
    values.k[5 * 64 + d[i]] = values.v[5 * 64 + d[i]] = bad[i];
  }
  const Exact exact = Append(values);
  EXPECT_EQ(exact.counts.not_finite, 6u);
  EXPECT_EQ(exact.counts.saturated, 0u);
  for (const char* spec : kSpecs) EXPECT_EQ(Code(spec, exact).bytes, Code(spec, clean).bytes) << spec;
}

// An exact cell that holds infinities or NaN all the same (it never should) reads them as zeros.
TEST(FieldCases, A8NonFiniteHalvesInAnExactCellAreDefined) {
  Exact exact = Append(Gaussian(64, 64, 10));
  for (size_t i = 0; i < exact.layout.bytes; i += 2) {
    const auto bits = uint16_t(i * 40503u);
    std::memcpy(exact.bytes.data() + i, &bits, 2);
  }
  for (const char* spec : kSpecs) EXPECT_TRUE(AllFinite(Code(spec, exact).decoded)) << spec;
}

TEST(FieldCases, A14OddHeadsHaveTheZeroCodeInTheirPadding) {
  for (const int dim : {1, 7, 65, 40}) {
    for (const char* spec : {"k=int4:g32:lloyd:rot:off,v=int4:g64:sym", "k=int5:g32:lloyd,v=int2:g64:sym",
                             "k=int3:g32:sym,v=int6:g64:sym:rot", "k=int3:g32:skew,v=int4:g64:skew:rot"}) {
      const Coded coded = Code(spec, Gaussian(dim, dim, 12));
      const auto bits_at = [&](uint32_t plane, const CodePlace& place, int width) {
        return int(coded.bytes.data()[plane + place.byte]) >> place.shift & ((1 << width) - 1);
      };
      for (const bool is_key : {true, false}) {
        const SideLayout& side = is_key ? coded.layout.k : coded.layout.v;
        const int bits = LevelBits(side.spec.type), low = LowBits(bits), high = HighBits(bits);
        for (int t = 0; t < kBlockTokens; ++t) {
          for (int d = dim; d < side.dim_padded; ++d) {
            const auto place = [&](int width) {
              return is_key ? KeyPlace(side, width, t, d) : ValuePlace(width, t, d);
            };
            int code = bits_at(side.codes, place(low), low);
            if (high > 0) code |= bits_at(side.codes_high, place(high), high) << low;
            ASSERT_EQ(code, ZeroCode(bits)) << spec;
          }
        }
      }
    }
  }
}

// Rows of ceil(d * bits / 8) bytes; what is left of the last byte is zero.
TEST(FieldCases, A14StudyRowsAreAsLongAsTheirBits) {
  for (const int dim : {1, 7, 65}) {
    const Coded coded = Code("k=int4:g32:asym,v=int3:t64:sym", Gaussian(dim, dim, 12));
    for (const SideLayout* side : {&coded.layout.k, &coded.layout.v}) {
      const int bits = LevelBits(side->spec.type), row = (dim * bits + 7) / 8;
      for (int t = 0; t < kBlockTokens; ++t) {
        const auto last = uint32_t(coded.bytes.data()[side->codes + uint32_t(t * row + row - 1)]);
        if (dim * bits % 8 != 0) {
          ASSERT_EQ(last >> (dim * bits % 8), 0u) << dim;
        }
      }
      EXPECT_LT(side->scales - side->codes, uint32_t(kBlockTokens * row) + 64u);
    }
  }
}

// Each code in each lane, at the byte that the format document names.
TEST(FieldCases, A15EveryCodeAtEveryPlace) {
  for (int bits = 2; bits <= 6; ++bits) {
    const int count = 1 << bits;
    for (int shift = 0; shift < count; ++shift) {
      for (const auto& [part, which] :
           {std::pair("", SideSpec::Levels::kUniform), std::pair(":lloyd", SideSpec::Levels::kLloydMax),
            std::pair(":skew", SideSpec::Levels::kSkewed)}) {
        if (bits == 6 && which != SideSpec::Levels::kUniform) continue;
        if (bits != 3 && bits != 4 && which == SideSpec::Levels::kSkewed) continue;
        const LevelTable levels = MakeLevelTable(bits, which);
        Values values(64, 64);
        // Every 32 values have every code, the outermost ones by force where there are more codes than that.
        const auto code = [&](int t, int d) {
          if (bits == 6 && d % 32 < 2) return d % 32 == 0 ? 0 : count - 1;
          return (t * 5 + d + shift) % count;
        };
        for (int t = 0; t < 64; ++t) {
          for (int d = 0; d < 64; ++d) {
            values.k[size_t(t * 64 + d)] = values.v[size_t(t * 64 + d)] =
                0.25f * float(levels.level[size_t(code(t, d))]);
          }
        }
        const std::string type = "int" + std::to_string(bits);
        const Coded coded = Code("k=" + type + ":g32" + part + ",v=" + type + ":g64" + part, values);
        ASSERT_EQ(coded.decoded.k, values.k) << bits << part << shift;
        ASSERT_EQ(coded.decoded.v, values.v) << bits << part << shift;
        const auto* bytes = reinterpret_cast<const uint8_t*>(coded.bytes.data());
        // The document's own words: a unit is 16 lanes of 4 values.
        const auto plane_bits = [&](uint32_t plane, int width, int lane, int along) {
          const int in_lane = lane % 16 * 4 + along % 4;
          if (width == 1) {
            const int at = (lane / 16 * 8 + along / 8) * 16 + along % 8 / 4 * 8 + in_lane / 8;
            return bytes[plane + uint32_t(at)] >> (in_lane % 8) & 1;
          }
          const int per_line = 32 / width;
          const int at = (lane / 16 * (64 / per_line) + along / per_line) * 64 + in_lane;
          return bytes[plane + uint32_t(at)] >> (along % per_line / 4 * width) & ((1 << width) - 1);
        };
        const int low = bits >= 4 ? 4 : 2;
        for (int t = 0; t < 64; ++t) {
          for (int d = 0; d < 64; ++d) {
            int k = plane_bits(coded.layout.k.codes, low, t, d), v = plane_bits(coded.layout.v.codes, low, d, t);
            if (bits > low) {
              k |= plane_bits(coded.layout.k.codes_high, bits - low, t, d) << low;
              v |= plane_bits(coded.layout.v.codes_high, bits - low, d, t) << low;
            }
            ASSERT_EQ(k, code(t, d)) << bits;
            ASSERT_EQ(v, code(t, d)) << bits;
          }
        }
      }
    }
  }
  Values values(64, 64);
  for (int i = 0; i < 64 * 64; ++i) values.k[size_t(i)] = values.v[size_t(i)] = float((i * 37 + i / 64) % 255 - 127);
  for (int t = 0; t < 64; ++t) values.k[size_t(t * 64)] = values.v[size_t(t * 64)] = 127.0f;
  const Coded coded = Code("k=int8:g64,v=int8:g64", values);
  const auto* bytes = reinterpret_cast<const int8_t*>(coded.bytes.data());
  for (int t = 0; t < 64; ++t) {
    for (int d = 0; d < 64; ++d) {
      const auto want = int8_t(values.k[size_t(t * 64 + d)]);
      ASSERT_EQ(bytes[coded.layout.k.codes + uint32_t((t / 16 * 16 + d / 4) * 64 + t % 16 * 4 + d % 4)], want);
      ASSERT_EQ(bytes[coded.layout.v.codes + uint32_t((d / 16 * 16 + t / 4) * 64 + d % 16 * 4 + t % 4)], want);
    }
  }
}

TEST(FieldCases, A16SealedBytesAreFourBitsHoweverTheTokensCame) {
  const Values values = Gaussian(64, 64, 13);
  const Coded coded = Code("i4", values);
  EXPECT_LT(coded.layout.bytes * 8, 4.6 * 64 * 128);
  EXPECT_GT(RelativeError(values.k, coded.decoded.k), 1e-4);
  EXPECT_GT(RelativeError(values.v, coded.decoded.v), 1e-4);
}

TEST(FieldCases, A17BytesDoNotDependOnHowTokensWereSplit) {
  const Values values = Gaussian(80, 65, 14);
  const Exact at_once = Append(values, 0x00);
  const ExactLayout step_layout = MakeExactLayout(128, 80, 65);
  for (const std::vector<int>& split : {std::vector<int>(64, 1), {7, 33, 24}, {32, 8, 24}, {64}, {63, 1}}) {
    Exact joined = {at_once.layout, CellBytes(at_once.layout.bytes, 0x7f), {}};
    int done = 0;
    for (const int n : split) {
      // A step's tokens lie in a scratch cell of another size, at another place, with other bytes around them.
      CellBytes step(step_layout.bytes, 0xff);
      SanitizeCounts counts;
      for (int i = 0; i < n; ++i) {
        WriteExactToken(step_layout, step.data(), 11 + i, &values.k[size_t((done + i) * 80)],
                        &values.v[size_t((done + i) * 65)], &counts);
      }
      CopyExactTokens(step_layout, step.data(), 11, 11 + n, joined.layout, joined.bytes.data(), done);
      done += n;
    }
    ASSERT_EQ(done, 64);
    for (const char* spec : kSpecs) EXPECT_EQ(Code(spec, joined).bytes, Code(spec, at_once).bytes) << spec;
  }
}

TEST(FieldCases, A20OneCellsValuesNeverReachAnother) {
  const Exact a = Append(Gaussian(64, 64, 15)), b = Append(Gaussian(64, 64, 16, 100.0f));
  for (const char* spec : kSpecs) {
    const Coded alone = Code(spec, a);
    (void)Code(spec, b);
    EXPECT_EQ(Code(spec, a).bytes, alone.bytes) << spec;
  }
}

// A token a thousand times larger moves nothing but tokens that share its scale by the format's rule (without channel
// offsets, which a block's tokens share).
TEST(FieldCases, A24GroupsCoverRowsOfConsecutiveTokens) {
  for (const int dim : {64, 96, 40}) {
    for (const char* spec :
         {"k=int8:g64:rot,v=int8:g64", "k=int4:g128:lloyd:rot,v=int4:g128:sym", "k=int8:g128,v=int8:g128:rot"}) {
      const Values values = Gaussian(dim, dim, 17);
      Values changed = values;
      for (int d = 0; d < dim; ++d) {
        changed.k[size_t(21 * dim + d)] *= 1000.0f;
        changed.v[size_t(21 * dim + d)] *= 1000.0f;
      }
      const Coded before = Code(spec, values), after = Code(spec, changed);
      const auto check = [&](const SideLayout& side, const std::vector<float>& x, const std::vector<float>& y) {
        for (int t = 0; t < kBlockTokens; ++t) {
          const bool same = std::equal(&x[size_t(t * dim)], &x[size_t(t * dim)] + dim, &y[size_t(t * dim)]);
          EXPECT_EQ(same, t / side.rows_per_scale != 21 / side.rows_per_scale) << spec << " token " << t;
        }
      };
      check(before.layout.k, before.decoded.k, after.decoded.k);
      check(before.layout.v, before.decoded.v, after.decoded.v);
    }
  }
}

TEST(FieldCases, A25TiesConstantsAndLoneOutliers) {
  Values values(32, 32);
  const auto row = [&](int t) { return &values.k[size_t(t * 32)]; };
  for (int d = 0; d < 32; ++d) {
    row(0)[d] = 0.5f * float(d % 16 - 8);  // -8..7 times a scale: exact
    row(1)[d] = d % 2 ? 7.5f : -7.5f;
    row(2)[d] = d == 0 ? 1e4f : -1e-4f;
    row(3)[d] = 3.25f;                                   // smallest = largest
    row(4)[d] = d == 0 ? -8.0f : d < 16 ? 0.5f : -0.5f;  // on the middle between two levels, should the scale be 1
  }
  const Coded uniform = Code("k=int4:g32:sym,v=f16", values);
  const Coded lloyd = Code("k=int4:g32:lloyd,v=f16", values);
  for (int d = 0; d < 32; ++d) {
    EXPECT_EQ(uniform.decoded.k[size_t(d)], row(0)[d]);
    EXPECT_NEAR(uniform.decoded.k[size_t(32 + d)], row(1)[d], 0.004f * 7.5f);
    EXPECT_NEAR(lloyd.decoded.k[size_t(32 + d)], row(1)[d], 0.004f * 7.5f);
    EXPECT_NEAR(uniform.decoded.k[size_t(96 + d)], 3.25f, 0.004f * 3.25f);
    EXPECT_NEAR(lloyd.decoded.k[size_t(96 + d)], 3.25f, 0.004f * 3.25f);
  }
  EXPECT_NEAR(uniform.decoded.k[64], 1e4f, 10.0f);
  EXPECT_EQ(uniform.decoded.k[65], 0.0f);
  EXPECT_TRUE(AllFinite(lloyd.decoded));
}

// --- Bytes depend on values alone
// ------------------------------------------------------------------------------------------

// Values from integer arithmetic, so that they are the same everywhere: bell-shaped, a few outliers, some channels off
// zero.
Values Synthetic(int dk, int dv, uint64_t seed) {
  Values values(dk, dv);
  uint64_t state = seed * 0x9e3779b97f4a7c15u + 1;
  const auto next = [&] { return state = state * 6364136223846793005u + 1442695040888963407u, uint32_t(state >> 33); };
  const auto fill = [&](std::vector<float>& out, int dim) {
    for (size_t i = 0; i < out.size(); ++i) {
      int32_t sum = 0;
      for (int j = 0; j < 4; ++j) sum += int32_t(next() & 0xffff) - 0x8000;
      if (next() % 97 == 0) sum *= 16;
      out[i] = float(sum) * 0x1p-15f + (i % size_t(dim) % 13 == 5 ? 3.0f : 0.0f);
    }
  };
  fill(values.k, dk);
  fill(values.v, dv);
  return values;
}

TEST(Determinism, EveryInstanceGivesTheSameBytes) {
  const EncodeKernels* avx2 = Avx2EncodeKernels();
  if (avx2 == nullptr) GTEST_SKIP() << "no AVX2 here";
  for (const char* spec : kPlaceSpecs) {
    for (const int dk : kDims) {
      for (const auto& [dv, first_token, scale] :
           {std::tuple{dk, 0, 1.0f}, {64, 4, 1e-6f}, {7, 64, 1.0f}, {80, 37, 3e4f}}) {
        Values values = Synthetic(dk, dv, uint64_t(dk));
        for (float& x : values.k) x *= scale;
        const Exact exact = Append(values);
        const CellLayout layout = *MakeCellLayout(*ParseCodec(spec), dk, dv);
        CellBytes a(layout.bytes, 0xff), b(layout.bytes, 0x7f);
        EncodeCellWith(BaselineEncodeKernels(), layout, exact.layout, exact.bytes.data(), first_token, a.data());
        EncodeCellWith(*avx2, layout, exact.layout, exact.bytes.data(), first_token, b.data());
        ASSERT_EQ(a, b) << spec << " " << dk << " " << dv << " " << first_token;
      }
    }
  }
}

TEST(Determinism, EveryInstanceRoundsAndRotatesAlike) {
  const EncodeKernels* avx2 = Avx2EncodeKernels();
  if (avx2 == nullptr) GTEST_SKIP() << "no AVX2 here";
  std::mt19937 random(1);
  for (int n = 1; n < 70; ++n) {
    std::vector<float> values(static_cast<size_t>(n));
    for (float& x : values) x = std::bit_cast<float>(uint32_t(random()));
    std::vector<uint16_t> a(values.size()), b(values.size());
    SanitizeCounts a_counts, b_counts;
    BaselineEncodeKernels().round_to_f16(values.data(), n, a.data(), &a_counts);
    avx2->round_to_f16(values.data(), n, b.data(), &b_counts);
    EXPECT_EQ(a, b);
    EXPECT_EQ(a_counts.saturated, b_counts.saturated);
    EXPECT_EQ(a_counts.not_finite, b_counts.not_finite);
    for (float& x : values) x = float(int32_t(random())) * 1e-8f;
    std::vector<float> rotated = values;
    BaselineEncodeKernels().rotate(values.data(), n);
    avx2->rotate(rotated.data(), n);
    EXPECT_EQ(values, rotated);
  }
}

// The bytes of format version 1, pinned: another compiler, optimisation level or instruction set must give the same,
// and a change to the quantizer is a change of the codec's identity.
TEST(Determinism, BytesArePinned) {
  const auto digest = [](const char* spec, int dk, int dv, int first_token) {
    Coded coded = Code(spec, Append(Synthetic(dk, dv, 42)), first_token);
    const uint8_t key[16] = {1, 2, 3};
    SealHeader(coded.bytes.data(), 1, 2, 64, key, 7);
    CellHeader header;
    std::memcpy(&header, coded.bytes.data(), sizeof(header));
    return header.checksum;
  };
  EXPECT_EQ(digest("f16", 64, 64, 0), 3533689451716451723u);
  EXPECT_EQ(digest("i8", 64, 64, 0), 18209002558479108130u);
  EXPECT_EQ(digest("i4", 64, 64, 0), 5772817427147776852u);
  EXPECT_EQ(digest("i4", 80, 65, 4), 125792940029720603u);
  EXPECT_EQ(digest("i4", 256, 128, 0), 1028414255382568762u);
  EXPECT_EQ(digest("k=int4:g128:sym,v=int4:g128:sym:rot", 64, 7, 3), 578355200692330950u);
  EXPECT_EQ(digest("i5", 64, 64, 4), 9288891779864414685u);
  EXPECT_EQ(digest("i43", 64, 64, 4), 10419149006514365670u);
  EXPECT_EQ(digest("i3", 64, 64, 4), 7255350154671499697u);
  EXPECT_EQ(digest("i3", 128, 256, 0), 15499334906991779181u);
  EXPECT_EQ(digest("k=int4:g32:skew:rot:off,v=int3:g128:skew", 80, 65, 4), 3858564610885271156u);
  EXPECT_EQ(digest("k=int3:g128:skew,v=int4:g128:skew:rot", 40, 7, 3), 16703677515299213546u);
}

TEST(CellCodec, TokensBeforeTheFirstAreNeitherReadNorCoded) {
  const Values values = Gaussian(64, 80, 18);
  for (const int first_token : {1, 4, 15, 63, 64}) {
    for (const char* spec : kSpecs) {
      Exact zero = Append(values), poison = Append(values);
      for (int t = 0; t < first_token; ++t) {
        for (int d = 0; d < 64; ++d) {
          std::memset(zero.bytes.data() + (d * 64 + t) * 2, 0, 2);
          std::memset(poison.bytes.data() + (d * 64 + t) * 2, 0xff, 2);
        }
        std::memset(zero.bytes.data() + zero.layout.v + uint32_t(t) * 160, 0x11, 160);
        std::memset(poison.bytes.data() + poison.layout.v + uint32_t(t) * 160, 0xff, 160);
      }
      const Coded coded = Code(spec, poison, first_token);
      EXPECT_EQ(coded.bytes, Code(spec, zero, first_token).bytes) << spec << first_token;
      for (int i = 0; i < first_token * 64; ++i) ASSERT_EQ(coded.decoded.k[size_t(i)], 0.0f);
      for (int i = 0; i < first_token * 80; ++i) ASSERT_EQ(coded.decoded.v[size_t(i)], 0.0f);
      if (first_token < 60) {
        const std::vector<float> want(values.k.begin() + first_token * 64, values.k.end());
        EXPECT_LT(RelativeError(want, {coded.decoded.k.begin() + first_token * 64, coded.decoded.k.end()}), 0.3)
            << spec;
      }
    }
  }
}

// --- Exact cells, rotation, headers
// ----------------------------------------------------------------------------------------

TEST(ExactCells, ReadBackRoundedValuesAndCopyBetweenSizes) {
  const Values values = Gaussian(65, 7, 19);
  const Exact exact = Append(values);
  Values read(65, 7);
  DecodeExact(exact.layout, exact.bytes.data(), kBlockTokens, read.k.data(), read.v.data());
  for (size_t i = 0; i < values.k.size(); ++i) ASSERT_EQ(read.k[i], F16ToF32(F32ToF16(values.k[i])));
  for (size_t i = 0; i < values.v.size(); ++i) ASSERT_EQ(read.v[i], F16ToF32(F32ToF16(values.v[i])));

  const ExactLayout sinks = MakeExactLayout(16, 65, 7);
  CellBytes copy(sinks.bytes, 0xff);
  CopyExactTokens(exact.layout, exact.bytes.data(), 30, 46, sinks, copy.data(), 0);
  std::vector<float> k(16 * 65), v(16 * 7);
  DecodeExact(sinks, copy.data(), 16, k.data(), v.data());
  EXPECT_TRUE(std::equal(k.begin(), k.end(), read.k.begin() + 30 * 65));
  EXPECT_TRUE(std::equal(v.begin(), v.end(), read.v.begin() + 30 * 7));
}

TEST(Rotation, IsTheBlockDiagonalHadamardMatrixAndItsOwnInverse) {
  for (const int dim : kDims) {
    const CellLayout layout = *MakeCellLayout(*ParseCodec("i4"), dim, dim);
    std::mt19937 random(static_cast<uint32_t>(dim));
    std::normal_distribution<float> normal;
    std::vector<float> x(static_cast<size_t>(dim));
    for (float& value : x) value = normal(random);
    std::vector<float> rotated = x;
    RotateInPlace(layout.k, rotated.data());
    for (int start = 0, size = 1; start < dim; start += size) {
      for (size = 1; size * 2 <= dim - start;) size *= 2;
      for (int i = 0; i < size; ++i) {
        double want = 0;
        for (int j = 0; j < size; ++j)
          want += (__builtin_popcount(unsigned(i & j)) % 2 ? -1.0 : 1.0) * double(x[size_t(start + j)]);
        EXPECT_NEAR(rotated[size_t(start + i)], want / std::sqrt(double(size)), 2e-6) << dim;
      }
    }
    RotateInPlace(layout.k, rotated.data());
    for (size_t i = 0; i < x.size(); ++i) EXPECT_NEAR(rotated[i], x[i], 2e-6) << dim;
  }
  std::vector<float> x = {1, 2, 3};
  RotateInPlace(MakeCellLayout(*ParseCodec("f16"), 3, 3)->k, x.data());
  EXPECT_THAT(x, ::testing::ElementsAre(1, 2, 3));
}

constexpr std::array<uint8_t, 16> kKey = {9, 8, 7, 6, 5, 4, 3, 2, 1, 0, 1, 2, 3, 4, 5, 6};

TEST(VerifyCell, EverySingleBitFlipIsCaught) {
  Coded coded = Code("i4", Gaussian(16, 16, 20));
  SealHeader(coded.bytes.data(), 3, 1, 640, kKey.data(), 12);
  const size_t bytes = coded.layout.bytes;
  ASSERT_TRUE(VerifyCell(coded.bytes.span(), 3, 1, 640, kKey).ok());
  for (size_t bit = 0; bit < bytes * 8; ++bit) {
    coded.bytes.data()[bit / 8] ^= std::byte(1 << (bit % 8));
    ASSERT_EQ(VerifyCell(coded.bytes.span(), 3, 1, 640, kKey).code(), StatusCode::kCorruption) << bit;
    coded.bytes.data()[bit / 8] ^= std::byte(1 << (bit % 8));
  }
  EXPECT_TRUE(VerifyCell(coded.bytes.span(), 3, 1, 640, kKey).ok());
}

TEST(VerifyCell, NamesTheFieldThatDiffers) {
  Coded coded = Code("i8", Gaussian(64, 64, 21));
  const auto message = [&](uint16_t layer, uint16_t head, int64_t position, const std::array<uint8_t, 16>& key) {
    const Status status = VerifyCell(coded.bytes.span(), layer, head, position, key);
    EXPECT_EQ(status.code(), StatusCode::kCorruption);
    return status.message();
  };
  EXPECT_THAT(message(3, 1, 640, kKey), HasSubstr("checksum"));  // not sealed yet
  SealHeader(coded.bytes.data(), 3, 1, 640, kKey.data(), 12);
  ASSERT_TRUE(VerifyCell(coded.bytes.span(), 3, 1, 640, kKey).ok());
  const std::array<uint8_t, 16> other = {1};
  EXPECT_THAT(message(4, 1, 640, kKey), HasSubstr("layer is 3"));
  EXPECT_THAT(message(3, 0, 640, kKey), HasSubstr("head is 1"));
  EXPECT_THAT(message(3, 1, 0, kKey), HasSubstr("position is 640"));
  EXPECT_THAT(message(3, 1, 640, other), HasSubstr("block_key"));
  // The same bytes under another generation are another cell.
  Coded again = Code("i8", Gaussian(64, 64, 21));
  SealHeader(again.bytes.data(), 3, 1, 640, kKey.data(), 13);
  EXPECT_NE(again.bytes, coded.bytes);
}

TEST(VerifyCell, ShortLongAndForeignBytesAreRefused) {
  Coded coded = Code("i4", Gaussian(64, 64, 22));
  SealHeader(coded.bytes.data(), 0, 0, 0, kKey.data(), 1);
  const std::span<const std::byte> whole = coded.bytes.span();
  for (const size_t size : {size_t(0), size_t(7), size_t(63), size_t(64), size_t(128), whole.size() - 1}) {
    EXPECT_EQ(VerifyCell(whole.first(size), 0, 0, 0, kKey).code(), StatusCode::kCorruption) << size;
  }
  std::reverse(coded.bytes.data(), coded.bytes.data() + 4);
  EXPECT_THAT(VerifyCell(whole, 0, 0, 0, kKey).message(), HasSubstr("byte order"));
}

}  // namespace
}  // namespace kvcell
