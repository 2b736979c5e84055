// Attention against a float64 oracle over the values that cells decode to, on every instruction set this machine has.
#include "attention/attention.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "attention/kernels.h"
#include "codec/cell_codec.h"
#include "codec/f16.h"

namespace kvcell {
namespace {

using Floats = std::vector<float>;
using Bytes = std::vector<std::byte>;
constexpr int64_t kAll = std::numeric_limits<int64_t>::max();

// 64-byte aligned, as cells are.
class CellBytes {
 public:
  explicit CellBytes(size_t n) : storage_(n + 64), n_(n) {}
  std::byte* data() { return storage_.data() + (64 - reinterpret_cast<uintptr_t>(storage_.data()) % 64) % 64; }
  size_t size() const { return n_; }

 private:
  Bytes storage_;
  size_t n_;
};

// What fills every byte that nobody wrote.
struct Poison {
  int byte = 0;  // -1: random
  void Fill(std::byte* p, size_t n, std::mt19937* rng) const {
    for (size_t i = 0; i < n; ++i) p[i] = static_cast<std::byte>(byte >= 0 ? byte : static_cast<int>((*rng)() & 255));
  }
};

struct Shape {
  std::string codec = "i4";
  int dk = 64, dv = 64;
  int n_tokens = 100;
  int sinks = 4;
  float scale = 0.0f;  // 0: 1 / sqrt(dk)
  float softcap = 0.0f;
  Poison poison = {};
  uint32_t seed = 1;
};

// A sequence as the cache lays it out: sinks in an exact cell, full blocks coded, the open block exact.
class Sequence {
 public:
  explicit Sequence(const Shape& shape)
      : Sequence(shape, RandomValues(shape, shape.dk, 0), RandomValues(shape, shape.dv, 1)) {}

  Sequence(const Shape& shape, const Floats& k, const Floats& v) : shape_(shape), rng_(shape.seed + 77) {
    head_.dk = shape.dk;
    head_.dv = shape.dv;
    head_.scale = shape.scale != 0.0f ? shape.scale : 1.0f / std::sqrt(static_cast<float>(shape.dk));
    head_.softcap = shape.softcap;
    auto spec = ParseCodec(shape.codec);
    EXPECT_TRUE(spec.has_value()) << shape.codec;
    auto layout = MakeCellLayout(*spec, shape.dk, shape.dv);
    EXPECT_TRUE(layout.has_value()) << (layout ? "" : layout.error().message());
    head_.coded = *layout;
    sink_layout_ = MakeExactLayout(16, shape.dk, shape.dv);
    open_layout_ = MakeExactLayout(kBlockTokens, shape.dk, shape.dv);
    k_.resize(k.size());
    v_.resize(v.size());
    original_k_ = k;
    original_v_ = v;
    Build();
  }

  const HeadContext& head() const { return head_; }
  const std::vector<CellRef>& cells() const { return refs_; }
  const Shape& shape() const { return shape_; }

  // Attention of one row in float64 over the decoded values (or over the original ones).
  std::vector<double> Oracle(const float* q, int64_t begin, int64_t end, float slope = 0.0f, bool original = false,
                             double sink = -std::numeric_limits<double>::infinity()) const {
    const Floats& k = original ? original_k_ : k_;
    const Floats& v = original ? original_v_ : v_;
    const auto dk = static_cast<size_t>(shape_.dk), dv = static_cast<size_t>(shape_.dv);
    const std::vector<double> noise = original ? std::vector<double>(size_t(shape_.n_tokens)) : Noise(q);
    std::vector<double> score;
    double max = sink;
    for (int64_t t = 0; t < shape_.n_tokens; ++t) {
      double s = 0;
      for (size_t d = 0; d < dk; ++d)
        s += static_cast<double>(q[d]) * static_cast<double>(k[static_cast<size_t>(t) * dk + d]);
      s = s * static_cast<double>(head_.scale) + noise[static_cast<size_t>(t)];
      if (head_.softcap > 0) s = static_cast<double>(head_.softcap) * std::tanh(s / static_cast<double>(head_.softcap));
      s += static_cast<double>(slope) * static_cast<double>(t - (end - 1));
      if (t < begin || t >= end) s = -std::numeric_limits<double>::infinity();
      score.push_back(s);
      max = std::max(max, s);
    }
    std::vector<double> out(dv, 0.0);
    if (std::isinf(max)) return out;
    double sum = std::exp(sink - max);
    for (size_t t = 0; t < score.size(); ++t) {
      const double p = std::exp(score[t] - max);
      sum += p;
      for (size_t c = 0; c < dv; ++c) out[c] += p * static_cast<double>(v[t * dv + c]);
    }
    for (double& x : out) x /= sum;
    return out;
  }

  // What each token's score gets for the noise of its codes: half the variance, at most kMostNoise a cell.
  std::vector<double> Noise(const float* q) const {
    std::vector<double> noise(static_cast<size_t>(shape_.n_tokens), 0.0);
    const SideLayout& side = head_.coded.k;
    const int bits = LevelBits(side.spec.type);
    if (bits == 0 || !side.in_place) return noise;
    Floats rotated(q, q + shape_.dk);
    RotateInPlace(side, rotated.data());
    const int group = side.n_groups == 1 ? side.dim : side.spec.group;
    const auto level_noise = static_cast<double>(LevelNoise(bits, side.spec.levels));
    for (const CellRef& cell : refs_) {
      if (cell.kind != CellRef::Kind::kCoded) continue;
      double norms = 0, largest = 0;
      for (int g = 0; g < side.n_groups; ++g) {
        double norm = 0;
        for (int d = g * group; d < std::min((g + 1) * group, side.dim); ++d) {
          norm += std::pow(static_cast<double>(rotated[static_cast<size_t>(d)] * head_.scale), 2);
        }
        for (int t = cell.first; t < cell.last; ++t) {
          uint16_t half;
          std::memcpy(&half, cell.bytes + side.scales + ScaleIndex(side, t, g * group) * 2, sizeof(half));
          const double scale = static_cast<double>(F16ToF32(half));
          noise[static_cast<size_t>(cell.position + t)] += level_noise / 2 * norm * scale * scale;
          largest = std::max(largest, std::abs(scale));
        }
        norms += norm;
      }
      const double most = level_noise / 2 * norms * largest * largest;
      const double limit = static_cast<double>(attention_internal::kMostNoise);
      if (most <= limit) continue;
      for (int t = cell.first; t < cell.last; ++t) noise[static_cast<size_t>(cell.position + t)] *= limit / most;
    }
    return noise;
  }

  static Floats RandomValues(const Shape& shape, int dim, uint32_t stream) {
    std::mt19937 rng(shape.seed * 2 + stream);
    std::normal_distribution<float> normal;
    Floats x(static_cast<size_t>(shape.n_tokens) * static_cast<size_t>(dim));
    for (float& value : x) value = normal(rng);
    return x;
  }

 private:
  void Build() {
    const int n_blocks = (shape_.n_tokens + kBlockTokens - 1) / kBlockTokens;
    bytes_.reserve(static_cast<size_t>(n_blocks) + 1);
    const int sinks = shape_.n_tokens >= kBlockTokens ? std::min(shape_.sinks, 16) : 0;
    if (sinks > 0) AddExact(sink_layout_, 0, sinks);
    for (int b = 0; b < n_blocks; ++b) {
      const int begin = b * kBlockTokens;
      if (begin + kBlockTokens <= shape_.n_tokens) {
        AddCoded(begin, b == 0 ? sinks : 0);
      } else {
        AddExact(open_layout_, begin, shape_.n_tokens - begin);
      }
    }
  }

  std::byte* NewCell(size_t n) {
    bytes_.emplace_back(n);
    shape_.poison.Fill(bytes_.back().data(), n, &rng_);
    return bytes_.back().data();
  }

  void WriteTokens(const ExactLayout& layout, std::byte* cell, int begin, int n) {
    SanitizeCounts counts;
    for (int t = 0; t < n; ++t) {
      WriteExactToken(layout, cell, t, &original_k_[At(begin + t, shape_.dk)], &original_v_[At(begin + t, shape_.dv)],
                      &counts);
    }
  }

  void AddExact(const ExactLayout& layout, int begin, int n) {
    std::byte* cell = NewCell(layout.bytes);
    WriteTokens(layout, cell, begin, n);
    DecodeExact(layout, cell, n, &k_[At(begin, shape_.dk)], &v_[At(begin, shape_.dv)]);
    refs_.push_back({cell, &layout, begin, 0, static_cast<int16_t>(n), CellRef::Kind::kExact});
  }

  void AddCoded(int begin, int first) {
    Bytes exact(open_layout_.bytes);
    WriteTokens(open_layout_, exact.data(), begin, kBlockTokens);
    std::byte* cell = NewCell(head_.coded.bytes);
    EncodeCell(head_.coded, open_layout_, exact.data(), first, cell);
    Floats k(At(kBlockTokens, shape_.dk)), v(At(kBlockTokens, shape_.dv));
    DecodeCell(head_.coded, cell, k.data(), v.data());
    std::copy(k.begin() + Offset(first, shape_.dk), k.end(), k_.begin() + Offset(begin + first, shape_.dk));
    std::copy(v.begin() + Offset(first, shape_.dv), v.end(), v_.begin() + Offset(begin + first, shape_.dv));
    PoisonSide(head_.coded.k, true, first, cell);
    PoisonSide(head_.coded.v, false, first, cell);
    refs_.push_back({cell, nullptr, begin, static_cast<int16_t>(first), kBlockTokens, CellRef::Kind::kCoded});
  }

  // Overwrites codes and scales of tokens before `first`, and codes of padding dims.
  void PoisonSide(const SideLayout& side, bool is_k, int first, std::byte* cell) {
    if (!side.in_place) return;  // decoding leaves such tokens out by itself
    for (int t = 0; t < kBlockTokens; ++t) {
      for (int d = 0; d < side.dim_padded; ++d) {
        if (t >= first && d < side.dim) continue;
        std::byte b{};
        shape_.poison.Fill(&b, 1, &rng_);
        std::byte* codes = cell + side.codes;
        if (const int bits = LevelBits(side.spec.type); bits > 0) {
          for (const auto& [plane, width] :
               {std::pair(codes, LowBits(bits)), {cell + side.codes_high, HighBits(bits)}}) {
            if (width == 0) continue;
            const CodePlace place = is_k ? KeyPlace(side, width, t, d) : ValuePlace(width, t, d);
            const auto mask = static_cast<std::byte>(((1 << width) - 1) << place.shift);
            plane[place.byte] = (plane[place.byte] & ~mask) | (b & mask);
          }
        } else if (side.spec.type == SideSpec::Type::kInt8) {
          codes[is_k ? Int8KByte(side, t, d) : Int8VByte(side, t, d)] = b;
        } else if (!is_k || d < side.dim) {
          shape_.poison.Fill(codes + (is_k ? (d * kBlockTokens + t) : (t * side.dim_padded + d)) * 2, 2, &rng_);
        }
      }
      if (t >= first || t % side.rows_per_scale != 0 || t + side.rows_per_scale > first) continue;
      for (int g = 0; g < side.n_groups; ++g) {
        shape_.poison.Fill(cell + side.scales + ScaleIndex(side, t, g * side.spec.group) * 2, 2, &rng_);
      }
    }
  }

  static size_t At(int t, int dim) { return static_cast<size_t>(t) * static_cast<size_t>(dim); }
  static ptrdiff_t Offset(int t, int dim) { return static_cast<ptrdiff_t>(t) * dim; }

  Shape shape_;
  std::mt19937 rng_;
  HeadContext head_;
  ExactLayout sink_layout_, open_layout_;
  Floats original_k_, original_v_, k_, v_;
  std::vector<CellBytes> bytes_;
  std::vector<CellRef> refs_;
};

struct Rows {
  Floats q;
  std::vector<int64_t> begin, end;
  Floats slope;
  int n = 0;

  Rows(const Sequence& sequence, int n_rows, float size = 1.0f, uint32_t seed = 5) : n(n_rows) {
    std::mt19937 rng(seed);
    std::normal_distribution<float> normal;
    q.resize(static_cast<size_t>(n_rows) * static_cast<size_t>(sequence.shape().dk));
    for (float& x : q) x = size * normal(rng);
    begin.assign(static_cast<size_t>(n_rows), 0);
    end.assign(static_cast<size_t>(n_rows), sequence.shape().n_tokens);
  }
  const float* Row(int r, int dk) const { return q.data() + static_cast<ptrdiff_t>(r) * dk; }
};

// Attends rows [from, to) in one call and gives their outputs, [to - from][dv].
Floats AttendRows(const Sequence& sequence, const Rows& rows, int from, int to, const float* sinks = nullptr) {
  std::vector<const float*> q;
  for (int r = from; r < to; ++r) q.push_back(rows.Row(r, sequence.shape().dk));
  QueryRows query{to - from, q.data(), rows.begin.data() + from, rows.end.data() + from,
                  rows.slope.empty() ? nullptr : rows.slope.data() + from};
  PreparedQueries prepared;
  prepared.Prepare(sequence.head(), query);
  Partial state;
  state.Reset(sequence.head(), to - from);
  Attend(prepared, sequence.cells(), &state);
  Floats out(static_cast<size_t>(to - from) * static_cast<size_t>(sequence.shape().dv),
             std::numeric_limits<float>::quiet_NaN());
  std::vector<float*> out_rows;
  for (int r = 0; r < to - from; ++r) out_rows.push_back(out.data() + static_cast<ptrdiff_t>(r) * sequence.shape().dv);
  Finish(sequence.head(), state, out_rows.data(), sinks == nullptr ? nullptr : sinks + from);
  return out;
}

Floats AttendAll(const Sequence& sequence, const Rows& rows) { return AttendRows(sequence, rows, 0, rows.n); }

struct Error {
  double rms = 0;    // root mean square of the difference
  double worst = 0;  // largest difference
  bool finite = true;
};

Error ErrorAgainstOracle(const Sequence& sequence, const Rows& rows, const Floats& out, bool original = false) {
  Error error;
  size_t i = 0;
  for (int r = 0; r < rows.n; ++r) {
    const auto index = static_cast<size_t>(r);
    const auto expected = sequence.Oracle(rows.Row(r, sequence.shape().dk), rows.begin[index], rows.end[index],
                                          rows.slope.empty() ? 0.0f : rows.slope[index], original);
    for (const double x : expected) {
      const double difference = static_cast<double>(out[i++]) - x;
      error.finite = error.finite && std::isfinite(difference);
      error.rms += difference * difference;
      error.worst = std::max(error.worst, std::fabs(difference));
    }
  }
  error.rms = std::sqrt(error.rms / static_cast<double>(std::max<size_t>(i, 1)));
  return error;
}

// What q and weights rounded to 8 bits (int4 codes) or 16 bits (int8 codes) may cost, of values of size 1.
double Tolerance(const std::string& codec) {
  const CodecSpec spec = *ParseCodec(codec);
  double tolerance = 2e-5;
  for (const SideSpec& side : {spec.k, spec.v}) {
    if (!AttendedInPlace(side)) continue;
    if (LevelBits(side.type) > 0) tolerance = std::max(tolerance, 0.03);
    if (side.type == SideSpec::Type::kInt8) tolerance = std::max(tolerance, 3e-4);
  }
  return tolerance;
}

std::string Describe(const Shape& s) {
  return fmt::format("{} dk={} dv={} tokens={} sinks={} softcap={} poison={}", s.codec, s.dk, s.dv, s.n_tokens, s.sinks,
                     static_cast<double>(s.softcap), s.poison.byte);
}

void ExpectRight(const Sequence& sequence, const Rows& rows, double tolerance) {
  const Error error = ErrorAgainstOracle(sequence, rows, AttendAll(sequence, rows));
  EXPECT_TRUE(error.finite) << Describe(sequence.shape());
  EXPECT_LT(error.worst, tolerance) << Describe(sequence.shape()) << " rows=" << rows.n << " rms=" << error.rms;
}

// Every test runs once per instruction set that is compiled in; one that the machine lacks is skipped by name.
class AttentionTest : public testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    if (const Status status = UseAttentionIsa(GetParam()); !status.ok()) GTEST_SKIP() << status.message();
  }
};

std::vector<std::string> CompiledIsas() {
  std::vector<std::string> names;
  for (const auto* kernels : attention_internal::CompiledKernels()) names.emplace_back(kernels->name);
  return names;
}

INSTANTIATE_TEST_SUITE_P(Isa, AttentionTest, testing::ValuesIn(CompiledIsas()),
                         [](const auto& isa) { return isa.param; });

const char* const kCodecs[] = {
    "f16", "i8", "i4", "k=int4:g32:sym,v=int4:g32:sym", "k=int4:g64:lloyd:rot:off,v=int4:g64:lloyd:rot",
    "k=int4:g128:sym:rot,v=int4:g128:lloyd", "k=int8:g64:sym:rot:off,v=int4:g64:lloyd:rot",
    "k=int4:g64:lloyd:rot,v=f16", "k=f16,v=int8:g128:sym:rot", "k=int8:g32:sym,v=int8:g32:sym:rot", "i5", "i43", "i3",
    "k=int6:g32:rot:off,v=int5:g64:lloyd:rot", "k=int2:g32:lloyd:rot:off,v=int2:g16:lloyd:rot",
    "k=int4:g32:skew:rot:off,v=int3:g32:skew:rot", "k=int3:g64:skew,v=int4:g128:skew", "k=int5:g16:sym,v=int6:g128:sym",
    "k=int3:g128:sym:rot,v=int3:g16:sym", "k=int2:g64:sym,v=int5:g32:sym:rot",
    // Decoded, then attended: for study.
    "k=int2:t32:asym:plain,v=int2:g32:asym:plain", "k=int4:g64:lloyd:rot:off,v=int4:t64:sym:two:rot",
    "k=nf4:g64:rot,v=f16", "k=fp8e4m3,v=fp8e5m2", "k=f16,v=fp4:g32", "k=tq4:qjl,v=tq3", "k=bf16,v=f32"};

TEST_P(AttentionTest, EveryCodecAtEveryHeadSize) {
  const std::pair<int, int> sizes[] = {{40, 40},   {64, 64},   {80, 80},   {96, 96}, {112, 112}, {128, 128},
                                       {192, 192}, {256, 256}, {192, 128}, {65, 33}, {1, 1},     {1024, 16}};
  for (const char* codec : kCodecs) {
    for (const auto& [dk, dv] : sizes) {
      const Shape shape{.codec = codec, .dk = dk, .dv = dv, .n_tokens = 200, .poison = {-1}};
      const Sequence sequence(shape);
      ExpectRight(sequence, Rows(sequence, 3), Tolerance(codec));
    }
  }
}

TEST_P(AttentionTest, EveryLengthAroundBlockEdgesWhateverLiesWhereNothingWasWritten) {
  for (const char* codec : {"f16", "i8", "i4"}) {
    for (const int n_tokens : {0, 1, 4, 7, 8, 63, 64, 65, 127, 128, 129}) {
      std::vector<Floats> outputs;
      for (const int byte : {0x00, 0xFF, 0x7F, -1}) {
        const Shape shape{.codec = codec, .dk = 80, .dv = 80, .n_tokens = n_tokens, .poison = {byte}};
        const Sequence sequence(shape);
        const Rows rows(sequence, 5);
        ExpectRight(sequence, rows, Tolerance(codec));
        outputs.push_back(AttendAll(sequence, rows));
      }
      for (const Floats& out : outputs) EXPECT_EQ(out, outputs[0]) << codec << " " << n_tokens;
    }
  }
}

TEST_P(AttentionTest, RowsAreTheSameBitsAloneAndTogether) {
  for (const char* codec : kCodecs) {
    const Shape shape{.codec = codec, .dk = 96, .dv = 96, .n_tokens = 330, .poison = {0xFF}};
    const Sequence sequence(shape);
    for (const int n : {1, 2, 3, 5, 6, 7, 8, 12, 71}) {
      Rows rows(sequence, n, 2.0f);
      // Some rows see less than their neighbours, or nothing of some cells.
      for (int r = 0; r < n; ++r) {
        const auto i = static_cast<size_t>(r);
        if (r % 3 == 1) rows.end[i] = 330 - 13 * (r % 21);
        if (r % 5 == 2) rows.begin[i] = 70 + r;
      }
      const Floats together = AttendAll(sequence, rows);
      Floats alone;
      for (int r = 0; r < n; ++r) {
        const Floats one = AttendRows(sequence, rows, r, r + 1);
        alone.insert(alone.end(), one.begin(), one.end());
      }
      EXPECT_EQ(together, alone) << codec << " rows " << n;
      ExpectRight(sequence, rows, 2 * Tolerance(codec));
    }
  }
}

TEST_P(AttentionTest, WindowsAndCausalEndsInsideACell) {
  for (const char* codec : {"f16", "i8", "i4"}) {
    for (const int window : {0, 1, 63, 64, 65, 100}) {
      const Shape shape{.codec = codec, .dk = 64, .dv = 64, .n_tokens = 150, .poison = {0xFF}};
      const Sequence sequence(shape);
      Rows rows(sequence, 71);
      for (int r = 0; r < rows.n; ++r) {
        const auto i = static_cast<size_t>(r);
        rows.end[i] = 150 - 70 + r;
        rows.begin[i] = window > 0 ? std::max<int64_t>(0, rows.end[i] - window) : 0;
      }
      ExpectRight(sequence, rows, 2 * Tolerance(codec));
    }
  }
}

// The last visible token of a window decides: with a window of one token the output is that token's value.
TEST_P(AttentionTest, WindowOfOneTokenGivesThatTokensValue) {
  const Shape shape{.codec = "f16", .dk = 64, .dv = 64, .n_tokens = 130};
  const Floats v = Sequence::RandomValues(shape, 64, 1);
  const Sequence sequence(shape);
  for (const int64_t t : {0, 3, 4, 63, 64, 127, 128, 129}) {
    Rows rows(sequence, 1);
    rows.begin[0] = t;
    rows.end[0] = t + 1;
    const Floats out = AttendAll(sequence, rows);
    for (size_t c = 0; c < 64; ++c) EXPECT_NEAR(out[c], v[static_cast<size_t>(t) * 64 + c], 2e-3) << t;
  }
}

TEST_P(AttentionTest, B1SoftcapWithoutMaskJustAboveATileEdge) {
  for (const char* codec : {"f16", "i8", "i4"}) {
    for (const int n_tokens : {63, 64, 65, 127, 129}) {
      const Shape shape{.codec = codec, .dk = 64, .dv = 64, .n_tokens = n_tokens, .softcap = 30.0f, .poison = {0xFF}};
      const Sequence sequence(shape);
      const Rows rows(sequence, 4, 10.0f);
      ExpectRight(sequence, rows, 5 * Tolerance(codec));
    }
  }
}

// Softcap comes before the mask, ALiBi after the softcap, sink logits into the denominator; K and V of their own sizes,
// queries of a prefill tile, poison wherever nothing was written.
TEST_P(AttentionTest, SoftcapMaskAlibiAndSinkLogitsTogether) {
  for (const char* codec : kCodecs) {
    for (const int byte : {0xFF, 0x7F, -1}) {
      const Shape shape{
          .codec = codec, .dk = 192, .dv = 128, .n_tokens = 211, .softcap = 15.0f, .poison = {byte}, .seed = 9};
      const Sequence sequence(shape);
      Rows rows(sequence, 12, 4.0f);
      Floats sinks;
      for (size_t r = 0; r < 12; ++r) {
        rows.end[r] = 211 - static_cast<int64_t>(r) * 7;
        rows.begin[r] = r % 2 == 0 ? 0 : rows.end[r] - 70;
        rows.slope.push_back(0.03f * static_cast<float>(r));
        sinks.push_back(static_cast<float>(r) - 4.0f);
      }
      const Floats out = AttendRows(sequence, rows, 0, 12, sinks.data());
      for (size_t r = 0; r < 12; ++r) {
        const auto expected = sequence.Oracle(rows.Row(static_cast<int>(r), 192), rows.begin[r], rows.end[r],
                                              rows.slope[r], false, static_cast<double>(sinks[r]));
        for (size_t c = 0; c < 128; ++c) {
          ASSERT_NEAR(out[r * 128 + c], expected[c], 3 * Tolerance(codec)) << Describe(shape) << " row " << r;
        }
      }
    }
  }
}

TEST_P(AttentionTest, B2PoisonedArenaNeverReachesTheFirstRequests) {
  for (const char* codec : kCodecs) {
    for (const int n_tokens : {1, 2, 63, 65, 70}) {
      std::vector<Floats> outputs;
      for (const int byte : {0x00, 0xFF, 0x7F, 0x7E, -1}) {
        const Sequence sequence({.codec = codec, .dk = 40, .dv = 48, .n_tokens = n_tokens, .poison = {byte}});
        outputs.push_back(AttendAll(sequence, Rows(sequence, 3)));
        for (const float x : outputs.back()) ASSERT_TRUE(std::isfinite(x)) << codec << " " << n_tokens << " " << byte;
      }
      for (const Floats& out : outputs) EXPECT_EQ(out, outputs[0]) << codec << " " << n_tokens;
    }
  }
}

TEST_P(AttentionTest, B16HugeScoresStayFinite) {
  for (const char* codec : {"f16", "i8", "i4"}) {
    const Shape shape{.codec = codec, .dk = 128, .dv = 128, .n_tokens = 200, .scale = 1.0f};
    Floats k = Sequence::RandomValues(shape, 128, 0);
    for (float& x : k) x = x > 0 ? 30.0f : -30.0f;
    const Sequence sequence(shape, k, Sequence::RandomValues(shape, 128, 1));
    Rows rows(sequence, 2);
    // q parallel to token 100 and antiparallel to token 7: q.k is +-1.2e5 there.
    for (size_t d = 0; d < 128; ++d) {
      rows.q[d] = k[100 * 128 + d] * 1.05f;
      rows.q[128 + d] = -k[7 * 128 + d] * 1.05f;
    }
    const Floats out = AttendAll(sequence, rows);
    for (const float x : out) ASSERT_TRUE(std::isfinite(x));
    const auto expected = sequence.Oracle(rows.q.data(), 0, 200);
    for (size_t c = 0; c < 128; ++c) EXPECT_NEAR(out[c], expected[c], 0.03);
  }
}

TEST_P(AttentionTest, B17AlibiOverPoisonedCells) {
  for (const char* codec : {"f16", "i8", "i4"}) {
    std::vector<Floats> outputs;
    for (const int byte : {0x00, 0xFF, 0x7F, -1}) {
      const Sequence sequence({.codec = codec, .dk = 64, .dv = 64, .n_tokens = 150, .poison = {byte}});
      Rows rows(sequence, 8);
      for (int r = 0; r < 8; ++r) rows.slope.push_back(std::exp2(-static_cast<float>(r + 1)));
      for (size_t r = 0; r < 8; ++r) rows.end[r] = 150 - static_cast<int64_t>(r) * 11;
      ExpectRight(sequence, rows, 2 * Tolerance(codec));
      outputs.push_back(AttendAll(sequence, rows));
    }
    for (const Floats& out : outputs) EXPECT_EQ(out, outputs[0]) << codec;
  }
}

TEST_P(AttentionTest, A5LargeEqualValuesDoNotOverflowIntegerSums) {
  for (const char* codec : kCodecs) {
    const Shape shape{.codec = codec, .dk = 128, .dv = 128, .n_tokens = 192, .scale = 1e-6f};
    const Floats k(192 * 128, 4000.0f), v(192 * 128, 4000.0f);
    const Sequence sequence(shape, k, v);
    Rows rows(sequence, 4);
    std::fill(rows.q.begin(), rows.q.end(), 4000.0f);
    const Error error = ErrorAgainstOracle(sequence, rows, AttendAll(sequence, rows));
    EXPECT_TRUE(error.finite) << codec;
    EXPECT_LT(error.worst, 4000.0 * std::max(Tolerance(codec), 1e-4)) << codec;
  }
}

// Cells of arbitrary bytes with sane scales: every code meets every lane, and extremes meet the largest q.
TEST_P(AttentionTest, A15EveryCodeInEveryLane) {
  for (const char* codec :
       {"i4", "i8", "k=int4:g32:sym,v=int4:g32:sym", "k=int4:g64:lloyd,v=int4:g64:lloyd",
        "k=int2:g32:lloyd,v=int2:g64:sym", "k=int3:g64:sym,v=int3:g32:lloyd:rot", "k=int5:g32:lloyd:rot,v=int5:g16:sym",
        "k=int6:g64,v=int6:g32", "k=int3:g32:skew:rot,v=int4:g32:skew", "k=int4:g64:skew,v=int3:g64:skew"}) {
    auto layout = MakeCellLayout(*ParseCodec(codec), 64, 64);
    ASSERT_TRUE(layout.has_value());
    HeadContext head{64, 64, 0.05f, 0.0f, *layout};
    for (int pattern = -5; pattern < 256; ++pattern) {
      CellBytes cell(layout->bytes);
      std::mt19937 rng(static_cast<uint32_t>(pattern + 100));
      for (const SideLayout* side : {&layout->k, &layout->v}) {
        for (uint32_t i = side->codes; i < side->scales; ++i) {
          cell.data()[i] = static_cast<std::byte>(pattern >= 0 ? static_cast<uint32_t>(pattern) : rng() & 255u);
        }
        const int n = side->n_groups * (kBlockTokens / side->rows_per_scale);
        for (int i = 0; i < n; ++i) {
          const uint16_t scale = i % 3 == 0 ? 0xA800 : 0x2800;  // -1/32 and 1/32
          std::memcpy(cell.data() + side->scales + i * 2, &scale, 2);
        }
        // All tokens alike, and V's codes the outermost ones on the side of their scale: no products cancel.
        const int bits = LevelBits(side->spec.type);
        if (pattern != -5 || bits == 0) continue;
        std::fill_n(cell.data() + side->codes, side->scales - side->codes, std::byte{0});
        if (side == &layout->k) {
          for (int i = 0; i < n; ++i) std::memset(cell.data() + side->scales + i * 2 + 1, 0x28, 1);
          continue;
        }
        for (int t = 0; t < kBlockTokens; ++t) {
          for (int d = 0; d < 64; ++d) {
            uint16_t scale;
            std::memcpy(&scale, cell.data() + side->scales + ScaleIndex(*side, t, d) * 2, 2);
            if (scale >> 15 != 0) continue;
            for (const auto& [plane, width] :
                 {std::pair(side->codes, LowBits(bits)), std::pair(side->codes_high, HighBits(bits))}) {
              if (width == 0) continue;
              const CodePlace place = ValuePlace(width, t, d);
              cell.data()[plane + place.byte] |= static_cast<std::byte>(((1 << width) - 1) << place.shift);
            }
          }
        }
      }
      Floats k(64 * 64), v(64 * 64);
      DecodeCell(*layout, cell.data(), k.data(), v.data());
      const CellRef ref{cell.data(), nullptr, 0, 0, kBlockTokens, CellRef::Kind::kCoded};
      Floats q(64, pattern % 2 == 0 ? 1.0f : -1.0f), out(64);
      for (size_t d = 0; d < 64; d += 3) q[d] *= 0.5f;
      const float* q_row = q.data();
      float* out_row = out.data();
      const int64_t begin = 0, end = 64;
      PreparedQueries prepared;
      prepared.Prepare(head, {1, &q_row, &begin, &end, nullptr});
      Partial state;
      state.Reset(head, 1);
      Attend(prepared, {&ref, 1}, &state);
      Finish(head, state, &out_row);
      std::vector<double> score(64), expected(64);
      double sum = 0;
      for (size_t t = 0; t < 64; ++t) {
        for (size_t d = 0; d < 64; ++d)
          score[t] += static_cast<double>(q[d]) * static_cast<double>(k[t * 64 + d]) * 0.05;
      }
      const double max = *std::max_element(score.begin(), score.end());
      double largest = 0;
      for (size_t t = 0; t < 64; ++t) {
        const double p = std::exp(score[t] - max);
        sum += p;
        for (size_t c = 0; c < 64; ++c) expected[c] += p * static_cast<double>(v[t * 64 + c]);
      }
      for (const float x : v) largest = std::max(largest, std::fabs(static_cast<double>(x)));
      for (size_t c = 0; c < 64; ++c) {
        ASSERT_NEAR(out[c], expected[c] / sum, 0.02 * largest + 1e-5)
            << codec << " pattern " << pattern << " dim " << c;
      }
    }
  }
}

// Groups that are all zero, constant, one outlier, denormal, at the f16 limit.
TEST_P(AttentionTest, OddGroups) {
  for (const char* codec : kCodecs) {
    const Shape shape{.codec = codec, .dk = 128, .dv = 128, .n_tokens = 192};
    Floats k = Sequence::RandomValues(shape, 128, 0), v = Sequence::RandomValues(shape, 128, 1);
    for (size_t t = 0; t < 192; ++t) {
      for (size_t d = 0; d < 128; ++d) {
        float* pair[] = {&k[t * 128 + d], &v[t * 128 + d]};
        for (float* x : pair) {
          if (t % 7 == 1) *x = -0.0f;
          if (t % 7 == 2) *x = 0.75f;
          if (t % 7 == 3) *x = d == 77 ? 12.0f : 0.01f * *x;
          if (t % 7 == 4) *x = 1e-7f * *x;
          if (t % 7 == 5 && t > 100 && d < 64) *x = 0.0f;
        }
      }
    }
    const Sequence sequence(shape, k, v);
    ExpectRight(sequence, Rows(sequence, 4), 2 * Tolerance(codec));
    // The f16 limit in V alone: weights stay what they were, values are 65504.
    std::fill(v.begin() + 64 * 128, v.begin() + 65 * 128, 65504.0f);
    const Sequence limit(shape, k, v);
    const Rows rows(limit, 4);
    const Error error = ErrorAgainstOracle(limit, rows, AttendAll(limit, rows));
    EXPECT_TRUE(error.finite);
    EXPECT_LT(error.worst, 65504 * Tolerance(codec)) << codec;
  }
}

// Rounding q and the weights must stay below a tenth, in power, of what 4-bit codes cost.
TEST_P(AttentionTest, RoundingOfQueriesAndWeightsIsSmallBesideTheCodes) {
  for (const char* codec : {"i4", "k=int4:g64:lloyd:rot:off,v=int4:g64:lloyd:rot", "k=int4:g32:sym,v=int4:g32:sym",
                            "k=int4:g64:skew:rot:off,v=int3:g32:skew:rot"}) {
    for (const float size : {0.5f, 1.0f, 3.0f, 6.0f}) {
      double rounding = 0, codes = 0;
      for (uint32_t seed = 1; seed <= 4; ++seed) {
        const Sequence sequence({.codec = codec, .dk = 128, .dv = 128, .n_tokens = 1024, .seed = seed});
        const Rows rows(sequence, 8, size, seed + 50);
        const double error = ErrorAgainstOracle(sequence, rows, AttendAll(sequence, rows)).rms;
        rounding += error * error;
        for (int r = 0; r < rows.n; ++r) {
          const auto decoded = sequence.Oracle(rows.Row(r, 128), 0, 1024);
          const auto original = sequence.Oracle(rows.Row(r, 128), 0, 1024, 0.0f, true);
          for (size_t c = 0; c < 128; ++c)
            codes += (decoded[c] - original[c]) * (decoded[c] - original[c]) / (128.0 * rows.n);
        }
      }
      fmt::print("{:8} {:48} |q| {:3}: rounding / code error (power) {:.4f}\n", GetParam(), codec,
                 static_cast<double>(size), rounding / codes);
      EXPECT_LT(rounding, 0.1 * codes) << codec << " " << static_cast<double>(size);
    }
  }
}

// A row whose scores are noisier than kMostNoise, beside rows that are not, in cells with sinks before them and whole
// ones.
TEST_P(AttentionTest, NoiseOfOneRowIsCutOffAndNoOthers) {
  for (const char* codec : {"k=int3:g32:lloyd:rot:off,v=f16", "k=int2:g64:sym,v=f16", "k=int2:g128:lloyd:rot,v=f16",
                            "k=int3:g64:skew:rot:off,v=f16"}) {
    for (const float softcap : {0.0f, 50.0f}) {
      const Sequence sequence({.codec = codec, .n_tokens = 200, .softcap = softcap, .poison = {-1}});
      Rows rows(sequence, 4, 1.0f);
      for (int d = 0; d < 64; ++d) rows.q[static_cast<size_t>(64 + d)] *= 12.0f;
      const auto most = [&](int r) {
        const auto noise = sequence.Noise(rows.Row(r, 64));
        return *std::max_element(noise.begin(), noise.end());
      };
      EXPECT_GT(most(1), 0.4 * static_cast<double>(attention_internal::kMostNoise)) << codec;
      EXPECT_LE(most(1), static_cast<double>(attention_internal::kMostNoise)) << codec;
      EXPECT_LT(most(2), 0.9 * static_cast<double>(attention_internal::kMostNoise)) << codec;
      ExpectRight(sequence, rows, 0.06);
      const Floats together = AttendAll(sequence, rows);
      for (int r = 0; r < rows.n; ++r) {
        const Floats alone = AttendRows(sequence, rows, r, r + 1);
        EXPECT_TRUE(std::equal(alone.begin(), alone.end(), together.begin() + r * 64)) << codec << " row " << r;
      }
    }
  }
}

// Coded tokens beside exact ones get the share of attention that they would have uncoded: V tells which is which.
TEST_P(AttentionTest, WhatCodesLackInWeightIsMadeUp) {
  constexpr int kCoded = 4 * kBlockTokens;
  for (const char* codec :
       {"k=int3:g64:lloyd:rot,v=f16", "k=int3:g32:sym,v=f16", "k=int2:g32:lloyd,v=f16", "k=int3:g64:skew:rot,v=f16"}) {
    double lacking = 0, off = 0;
    int n = 0;
    for (uint32_t seed = 1; seed <= 6; ++seed) {
      const Shape shape{.codec = codec, .n_tokens = kCoded + 32, .sinks = 0, .seed = seed};
      Floats k = Sequence::RandomValues(shape, shape.dk, 0), v(k.size(), 0.0f);
      std::fill(v.begin() + kCoded * shape.dv, v.end(), 1.0f);  // the open block
      const Sequence sequence(shape, k, v);
      const Rows rows(sequence, 32, 1.5f, seed);  // many tokens count
      const Floats out = AttendAll(sequence, rows);
      for (int r = 0; r < rows.n; ++r, ++n) {
        const auto logit = [](double share) { return std::log(share / (1 - share)); };
        const float* const q = rows.Row(r, shape.dk);
        off += logit(static_cast<double>(out[static_cast<size_t>(r * shape.dv)])) -
               logit(sequence.Oracle(q, 0, kAll, 0.0f, true)[0]);
        double noise = 0;
        for (const double x : sequence.Noise(q)) noise += x / kCoded;
        lacking += noise;
      }
    }
    EXPECT_GT(lacking / n, 0.02) << codec << ": too little to tell";
    EXPECT_LT(std::fabs(off), 0.4 * lacking) << codec << " " << off / n << " " << lacking / n;
  }
}

TEST_P(AttentionTest, SplitAndMergedIsTheSameUpToRounding) {
  for (const char* codec : {"f16", "i8", "i4"}) {
    const Sequence sequence({.codec = codec, .dk = 128, .dv = 96, .n_tokens = 700});
    const Rows rows(sequence, 6, 2.0f);
    const Floats whole = AttendAll(sequence, rows);
    std::vector<const float*> q;
    for (int r = 0; r < rows.n; ++r) q.push_back(rows.Row(r, 128));
    PreparedQueries prepared;
    prepared.Prepare(sequence.head(), {rows.n, q.data(), rows.begin.data(), rows.end.data(), nullptr});
    const std::span<const CellRef> cells = sequence.cells();
    for (const size_t cut : {size_t{0}, size_t{1}, size_t{5}, cells.size()}) {
      Partial a, b;
      a.Reset(sequence.head(), rows.n);
      b.Reset(sequence.head(), rows.n);
      Attend(prepared, cells.first(cut), &a);
      Attend(prepared, cells.subspan(cut), &b);
      Merge(sequence.head(), b, &a);
      Floats out(whole.size());
      std::vector<float*> out_rows;
      for (int r = 0; r < rows.n; ++r) out_rows.push_back(out.data() + r * 96);
      Finish(sequence.head(), a, out_rows.data());
      for (size_t i = 0; i < out.size(); ++i) ASSERT_NEAR(out[i], whole[i], 2e-6) << codec << " cut " << cut;
    }
  }
}

TEST_P(AttentionTest, CellMassesAreTheOraclesAndSumToOnePerRow) {
  const Sequence sequence({.codec = "f16", .dk = 64, .dv = 64, .n_tokens = 300});
  const Rows rows(sequence, 5, 2.0f);
  std::vector<const float*> q;
  for (int r = 0; r < rows.n; ++r) q.push_back(rows.Row(r, 64));
  PreparedQueries prepared;
  prepared.Prepare(sequence.head(), {rows.n, q.data(), rows.begin.data(), rows.end.data(), nullptr});
  const std::span<const CellRef> cells = sequence.cells();
  Partial a, b;
  a.Reset(sequence.head(), rows.n);
  b.Reset(sequence.head(), rows.n);
  std::vector<CellWeight> weights(cells.size() * 5);
  Attend(prepared, cells.first(2), &a, weights.data());
  Attend(prepared, cells.subspan(2), &b, weights.data() + 10);
  Merge(sequence.head(), b, &a);
  Floats mass(cells.size(), 0.0f);
  CellMasses(a, weights, mass);
  float total = 0.0f;
  for (const float m : mass) total += m;
  EXPECT_NEAR(total, 5.0f, 1e-4f);
  // With values of one in one cell and zero elsewhere, that cell's mass is the output.
  for (size_t c = 0; c < cells.size(); ++c) {
    Floats v(300 * 64, 0.0f);
    for (int t = cells[c].first; t < cells[c].last; ++t) {
      std::fill_n(v.begin() + (cells[c].position + t) * 64, 64, 1.0f);
    }
    const Sequence probe(sequence.shape(), Sequence::RandomValues(sequence.shape(), 64, 0), v);
    double expected = 0;
    for (int r = 0; r < rows.n; ++r) expected += probe.Oracle(rows.Row(r, 64), 0, 300)[0];
    EXPECT_NEAR(mass[c], expected, 1e-4) << c;
  }
}

TEST_P(AttentionTest, SinkLogitsJoinTheDenominator) {
  const Sequence sequence({.codec = "f16", .dk = 64, .dv = 64, .n_tokens = 130});
  const Rows rows(sequence, 3);
  const float sinks[] = {-50.0f, 1.5f, 80.0f};
  const Floats out = AttendRows(sequence, rows, 0, 3, sinks);
  for (int r = 0; r < 3; ++r) {
    const auto expected = sequence.Oracle(rows.Row(r, 64), 0, kAll, 0.0f, false, static_cast<double>(sinks[r]));
    for (size_t c = 0; c < 64; ++c) EXPECT_NEAR(out[static_cast<size_t>(r) * 64 + c], expected[c], 1e-5);
  }
}

TEST_P(AttentionTest, RowThatSeesNothingGivesZerosAndABadRowHarmsNoOther) {
  for (const char* codec : {"f16", "i8", "i4"}) {
    const Sequence sequence({.codec = codec, .dk = 64, .dv = 64, .n_tokens = 200});
    Rows rows(sequence, 6);
    const Floats before = AttendAll(sequence, rows);
    rows.end[2] = 0;
    rows.q[3 * 64 + 5] = std::numeric_limits<float>::quiet_NaN();
    rows.q[5 * 64 + 9] = std::numeric_limits<float>::infinity();
    const Floats after = AttendAll(sequence, rows);
    for (size_t i = 0; i < after.size(); ++i) {
      const size_t r = i / 64;
      if (r == 2) {
        EXPECT_EQ(after[i], 0.0f);
      } else if (r == 3 || r == 5) {
        EXPECT_TRUE(std::isnan(after[i])) << codec << " row " << r;
      } else {
        EXPECT_EQ(after[i], before[i]);
      }
    }
  }
}

// Positions far beyond 32 bits change nothing.
TEST_P(AttentionTest, FarPositionsGiveTheSameOutput) {
  const Sequence sequence({.codec = "i4", .dk = 64, .dv = 64, .n_tokens = 200});
  Rows rows(sequence, 3);
  const Floats near = AttendAll(sequence, rows);
  constexpr int64_t kFar = int64_t{1} << 40;
  std::vector<CellRef> cells = sequence.cells();
  for (CellRef& cell : cells) cell.position += kFar;
  std::vector<const float*> q;
  for (int r = 0; r < 3; ++r) q.push_back(rows.Row(r, 64));
  for (int64_t& end : rows.end) end += kFar;
  PreparedQueries prepared;
  prepared.Prepare(sequence.head(), {3, q.data(), rows.begin.data(), rows.end.data(), nullptr});
  Partial state;
  state.Reset(sequence.head(), 3);
  Attend(prepared, cells, &state);
  Floats out(near.size());
  float* out_rows[] = {out.data(), out.data() + 64, out.data() + 128};
  Finish(sequence.head(), state, out_rows);
  EXPECT_EQ(out, near);
}

// docs/kernels.md: instruction sets agree within 5e-3 (int4) or 1e-4 (int8, f16) of values of size 1.
TEST(AttentionIsas, AgreeOnEveryCodec) {
  for (const char* codec : kCodecs) {
    for (const int dim : {40, 64, 128, 192}) {
      const Sequence sequence(
          {.codec = codec, .dk = dim, .dv = dim, .n_tokens = 333, .softcap = dim == 64 ? 20.0f : 0.0f});
      const Rows rows(sequence, 7, 2.0f);
      Floats first;
      for (const std::string_view isa : AttentionIsasFound()) {
        ASSERT_TRUE(UseAttentionIsa(isa).ok());
        const Floats out = AttendAll(sequence, rows);
        if (first.empty()) first = out;
        float worst = 0.0f;
        for (size_t i = 0; i < out.size(); ++i) worst = std::max(worst, std::fabs(out[i] - first[i]));
        // A weight on a rounding edge may go either way: one step of an 8-bit or a 16-bit weight.
        EXPECT_LT(worst, Tolerance(codec) > 1e-2 ? 5e-3f : 1e-4f) << isa << " " << codec << " " << dim;
      }
    }
  }
}

TEST(AttentionIsas, UnknownOnesAreRefusedByName) {
  const std::string_view before = AttentionIsa();
  const Status status = UseAttentionIsa("sse9");
  EXPECT_EQ(status.code(), StatusCode::kUnsupported);
  EXPECT_THAT(status.message(), testing::HasSubstr("sse9"));
  EXPECT_THAT(status.message(), testing::HasSubstr("scalar"));
  EXPECT_EQ(AttentionIsa(), before);
  setenv("KVCELL_ISA", "sse9", 1);
  EXPECT_EQ(CheckForcedIsa().code(), StatusCode::kUnsupported);
  setenv("KVCELL_ISA", "scalar", 1);
  EXPECT_TRUE(CheckForcedIsa().ok());
  unsetenv("KVCELL_ISA");
}

}  // namespace
}  // namespace kvcell
