#include "codec/study_codec.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <vector>

#include "codec/f16.h"
#include "codec/hadamard.h"

namespace kvcell {
namespace {

using Type = SideSpec::Type;
using Levels = SideSpec::Levels;

// --- The bits of a value that is a small float
// -------------------------------------------------------------------------

struct MiniFloat {
  int mantissa_bits;
  int bias;
  float max;
};
constexpr MiniFloat kE4M3 = {3, 7, 448.0f};
constexpr MiniFloat kE5M2 = {2, 15, 57344.0f};

// 2^e for normal exponents.
float PowerOfTwo(int e) { return std::bit_cast<float>(uint32_t(e + 127) << 23); }

// The nearest integer of 0 <= x < 2^22, ties to even.
float RoundSmall(float x) { return (x + 8388608.0f) - 8388608.0f; }

uint32_t EncodeMini(const MiniFloat& format, float value) {
  const uint32_t sign = std::bit_cast<uint32_t>(value) >> 31 << 7;
  const float magnitude = std::min(std::fabs(value), format.max);
  const int exponent = std::max(int(std::bit_cast<uint32_t>(magnitude) >> 23) - 127, 1 - format.bias);
  // In units of the last place; a carry into the next exponent is what the sum below does by itself.
  const auto units = uint32_t(RoundSmall(magnitude * PowerOfTwo(format.mantissa_bits - exponent)));
  return sign | ((uint32_t(exponent + format.bias - 1) << format.mantissa_bits) + units);
}

float DecodeMini(const MiniFloat& format, uint32_t code) {
  const uint32_t mantissa = code & ((1u << format.mantissa_bits) - 1);
  const auto exponent = int((code & 127) >> format.mantissa_bits);
  const uint32_t units = exponent == 0 ? mantissa : mantissa | 1u << format.mantissa_bits;
  const float magnitude = float(units) * PowerOfTwo(std::max(exponent, 1) - format.bias - format.mantissa_bits);
  return (code & 128) != 0 ? -magnitude : magnitude;
}

uint32_t EncodeFloat(Type type, float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if (type == Type::kF32) return bits;
  if (type == Type::kBf16) return (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return EncodeMini(type == Type::kFp8E4M3 ? kE4M3 : kE5M2, value);
}

float DecodeFloat(Type type, uint32_t code) {
  if (type == Type::kF32) return std::bit_cast<float>(code);
  if (type == Type::kBf16) return std::bit_cast<float>(code << 16);
  return DecodeMini(type == Type::kFp8E4M3 ? kE4M3 : kE5M2, code);
}

// --- Codebooks
// -----------------------------------------------------------------------------------------------------------

// Ascending levels; a value gets the nearest, on a tie the lower one.
struct Codebook {
  int count = 0;
  float level[kMaxLevels] = {};
  float highest = 0.0f;  // what the largest magnitude of a group is scaled to without a search

  int Nearest(float x) const {
    int code = 0;
    while (code + 1 < count && x > 0.5f * (level[code] + level[code + 1])) ++code;
    return code;
  }
};

// NormalFloat 4: quantiles of the Gaussian with an exact zero, normalised to -1..1 (arXiv 2305.14314, appendix E).
constexpr float kNf4[16] = {-1.0f,        -0.69619280f, -0.52507305f, -0.39491749f, -0.28444138f, -0.18477343f,
                            -0.09105004f, 0.0f,         0.07958030f,  0.16093020f,  0.24611230f,  0.33791524f,
                            0.44070983f,  0.56261700f,  0.72295684f,  1.0f};
// E2M1; the two zeros are one level, so the last code is not used.
constexpr float kFp4[15] = {-6, -4, -3, -2, -1.5f, -1, -0.5f, 0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
// The Lloyd-Max quantizers of the unit Gaussian with 2, 4, 8 and 16 levels: the positive halves.
constexpr float kGauss1[1] = {0.79788456f};
constexpr float kGauss2[2] = {0.45278003f, 1.51041752f};
constexpr float kGauss3[4] = {0.24509416f, 0.75600531f, 1.34390931f, 2.15194582f};
constexpr float kGauss4[8] = {0.12839525f, 0.38804835f, 0.65675889f, 0.94234040f,
                              1.25623110f, 1.61803639f, 2.06900606f, 2.73259058f};

Codebook Symmetric(const float* half, int n) {
  Codebook book;
  book.count = 2 * n;
  for (int i = 0; i < n; ++i) {
    book.level[n + i] = half[i];
    book.level[n - 1 - i] = -half[i];
  }
  book.highest = half[n - 1];
  return book;
}

Codebook Plain(const float* levels, int n) {
  Codebook book;
  book.count = n;
  std::copy_n(levels, n, book.level);
  book.highest = levels[n - 1];
  return book;
}

int TurboBits(const SideSpec& spec) {
  return (spec.type == Type::kTq2   ? 2
          : spec.type == Type::kTq3 ? 3
          : spec.type == Type::kTq4 ? 4
                                    : 0) -
         (spec.qjl ? 1 : 0);
}
bool IsTurbo(Type type) { return type >= Type::kTq2; }
bool IsFloat(Type type) { return type >= Type::kF32 && type <= Type::kFp8E5M2; }

Codebook MakeCodebook(const SideSpec& spec) {
  if (spec.type == Type::kNf4) return Plain(kNf4, 16);
  if (spec.type == Type::kFp4) return Plain(kFp4, 15);
  if (IsTurbo(spec.type)) {
    const int bits = TurboBits(spec);
    return Symmetric(bits == 1 ? kGauss1 : bits == 2 ? kGauss2 : bits == 3 ? kGauss3 : kGauss4, 1 << (bits - 1));
  }
  const LevelTable table = MakeLevelTable(LevelBits(spec.type), spec.levels);
  Codebook book;
  book.count = table.count;
  for (int i = 0; i < table.count; ++i) book.level[i] = float(table.level[size_t(i)]);
  book.highest = book.level[table.count - 1];  // of uniform levels: both signs fit
  return book;
}

// --- One group of values ---------------------------------------------------------------------------------------------

constexpr int kMaxGroup = 1024;  // a head's whole row

struct Group {
  int n = 0;
  float x[kMaxGroup];
  uint8_t code[kMaxGroup];
  uint16_t scale = 0, zero = 0;  // f16
};

// f16 of a scale, kept away from 0 and infinity.
uint16_t RoundScale(float scale) { return F32ToF16(std::clamp(scale, kF16Min, kF16Max)); }

struct Fit {
  float xl = 0.0f, ll = 0.0f;
  float Gain() const { return ll > 0.0f ? xl * xl / ll : 0.0f; }  // squared error = |x|^2 - gain
};

Fit FitAt(const Group& group, const Codebook& book, float scale) {
  Fit fit;
  for (int i = 0; i < group.n; ++i) {
    const float level = book.level[book.Nearest(group.x[i] / scale)];
    fit.xl += group.x[i] * level;
    fit.ll += level * level;
  }
  return fit;
}

// Candidate scales as multiples of absmax / highest, the best one refitted: as in-place codes are searched.
float SearchScale(const Group& group, const Codebook& book, float start) {
  Fit best;
  for (int step = 0; step < 12; ++step) {
    const Fit fit = FitAt(group, book, start * (0.55f + 0.1f * float(step)));
    if (fit.Gain() > best.Gain()) best = fit;
  }
  for (int refit = 0; refit < 2 && best.ll > 0.0f; ++refit) {
    const float scale = best.xl / best.ll;
    if (!(scale >= kF16Min)) break;
    const Fit fit = FitAt(group, book, scale);
    if (fit.Gain() > best.Gain()) best = fit;
  }
  const float scale = best.ll > 0.0f ? best.xl / best.ll : start;
  return scale > 0.0f ? scale : start;
}

void CodeSymmetric(const Codebook& book, bool search, Group* group) {
  float absmax = 0.0f;
  for (int i = 0; i < group->n; ++i) absmax = std::max(absmax, std::fabs(group->x[i]));
  const auto zero_code = uint8_t(book.Nearest(0.0f));
  if (absmax < kF16Min) {
    group->scale = 0;
    std::fill_n(group->code, group->n, zero_code);
    return;
  }
  const float start = absmax / book.highest;
  group->scale = RoundScale(search ? SearchScale(*group, book, start) : start);
  const float scale = F16ToF32(group->scale);
  for (int i = 0; i < group->n; ++i) group->code[i] = uint8_t(book.Nearest(group->x[i] / scale));
}

// Sets codes by the rounded scale and zero point; returns the squared error.
float CodeWith(float scale, float zero, int top, Group* group) {
  group->scale = scale < kF16Min ? uint16_t(0) : RoundScale(scale);
  group->zero = F32ToF16(std::clamp(zero, -kF16Max, kF16Max));
  const float s = F16ToF32(group->scale), z = F16ToF32(group->zero);
  float error = 0.0f;
  for (int i = 0; i < group->n; ++i) {
    const float level = s > 0.0f ? std::clamp((group->x[i] - z) / s, 0.0f, float(top)) : 0.0f;
    group->code[i] = uint8_t(RoundSmall(level));
    const float difference = group->x[i] - (z + s * float(group->code[i]));
    error += difference * difference;
  }
  return error;
}

// Smallest value and range; with `refit` scale and zero point by least squares to the codes chosen so, where better.
void CodeAsymmetric(int top, bool refit, Group* group) {
  const auto [low, high] = std::minmax_element(group->x, group->x + group->n);
  const float error = CodeWith((*high - *low) / float(top), *low, top, group);
  if (!refit || group->scale == 0) return;
  float q = 0.0f, qq = 0.0f, x = 0.0f, xq = 0.0f;
  for (int i = 0; i < group->n; ++i) {
    const auto code = float(group->code[i]);
    q += code;
    qq += code * code;
    x += group->x[i];
    xq += group->x[i] * code;
  }
  const auto n = float(group->n);
  const float spread = n * qq - q * q;
  if (spread <= 0.0f) return;
  const float scale = (n * xq - q * x) / spread;
  const Group before = *group;
  if (CodeWith(scale, (x - scale * q) / n, top, group) >= error) *group = before;
}

// --- Bits and halves in their planes -------------------------------------------------------------------------------

void PutCode(uint8_t* row, int index, int bits, uint32_t code) {
  for (int done = 0; done < bits; done += 8) {
    const int at = index * bits + done;
    const uint32_t part = code >> done & (bits - done >= 8 ? 255u : (1u << (bits - done)) - 1u);
    row[at / 8] |= uint8_t(part << (at % 8));
    if (at % 8 + std::min(bits - done, 8) > 8) row[at / 8 + 1] |= uint8_t(part >> (8 - at % 8));
  }
}

uint32_t GetCode(const uint8_t* row, int index, int bits) {
  uint32_t code = 0;
  for (int i = 0; i < bits; ++i) {
    const int at = index * bits + i;
    code |= uint32_t(row[at / 8] >> (at % 8) & 1) << i;
  }
  return code;
}

void StoreHalf(std::byte* plane, size_t index, uint16_t half) { std::memcpy(plane + index * 2, &half, 2); }
float LoadHalf(const std::byte* plane, size_t index) {
  uint16_t half;
  std::memcpy(&half, plane + index * 2, 2);
  return F16ToF32(half);
}

// --- A side
// ------------------------------------------------------------------------------------------------------------

// Random bits that are the same everywhere: splitmix64 of a counter.
uint64_t RandomBits(uint64_t counter) {
  uint64_t z = (counter + 1) * 0x9e3779b97f4a7c15u;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}
bool RandomSign(uint64_t row, int index) {
  return (RandomBits(row * 16 + uint64_t(index) / 64) >> (index % 64) & 1) != 0;
}
constexpr uint64_t kTurboSigns = 0x7471000000000000u;  // which row of random signs the rotation takes

void FlipSigns(float* x, int dim) {
  for (int d = 0; d < dim; ++d) x[d] = RandomSign(kTurboSigns, d) ? -x[d] : x[d];
}

// y[i] = sum over j of S[i][j] * x[j], S of random signs; transposed: y[j] = sum over i.
void Project(const float* x, int dim, bool transposed, float* y) {
  std::fill_n(y, dim, 0.0f);
  for (int i = 0; i < dim; ++i) {
    for (int j = 0; j < dim; ++j) {
      const float value = x[transposed ? i : j];
      y[transposed ? j : i] += RandomSign(uint64_t(i), j) ? -value : value;
    }
  }
}

constexpr float kHalfPiRoot = 1.25331414f;  // sqrt(pi / 2)

float Norm(const float* x, int dim) {
  float sum = 0.0f;
  for (int d = 0; d < dim; ++d) sum += x[d] * x[d];
  return std::sqrt(sum);
}

// Where a side's values and codes are while it is coded.
struct Work {
  const SideLayout& side;
  StudyPlanes planes;
  int first_token;
  std::vector<float> x;  // [64][dim]
  uint8_t* codes;
  std::byte* scales;

  float* row(int t) { return x.data() + size_t(t) * size_t(side.dim); }
  uint8_t* code_row(int t) const { return codes + size_t(t) * planes.row_bytes; }
};

// The mean of each channel is taken off, rounded to 8 bits; returns what the rounded means are multiples of.
float TakeOffsets(Work* work, int8_t* offsets) {
  const int dim = work->side.dim, n = kBlockTokens - work->first_token;
  std::vector<float> mean(static_cast<size_t>(dim));
  float absmax = 0.0f;
  for (int d = 0; d < dim; ++d) {
    float sum = 0.0f;
    for (int t = work->first_token; t < kBlockTokens; ++t) sum += work->row(t)[d];
    mean[size_t(d)] = n > 0 ? sum / float(n) : 0.0f;
    absmax = std::max(absmax, std::fabs(mean[size_t(d)]));
  }
  if (absmax < kF16Min) return 0.0f;
  const float scale = absmax / 127.0f;
  for (int d = 0; d < dim; ++d) {
    const float level = mean[size_t(d)] / scale;
    offsets[d] = int8_t(level < 0.0f ? int(level - 0.5f) : int(level + 0.5f));
    for (int t = work->first_token; t < kBlockTokens; ++t) work->row(t)[d] -= scale * float(offsets[d]);
  }
  return scale;
}

// Moves values beyond the 99.9 % quantile of all magnitudes to it.
void Clip(Work* work) {
  const auto begin = work->x.begin() + std::ptrdiff_t(work->first_token) * work->side.dim;
  std::vector<float> magnitude(begin, work->x.end());
  if (magnitude.empty()) return;
  for (float& m : magnitude) m = std::fabs(m);
  const auto at = magnitude.begin() + std::ptrdiff_t(double(magnitude.size() - 1) * 0.999);
  std::nth_element(magnitude.begin(), at, magnitude.end());
  for (auto x = begin; x != work->x.end(); ++x) *x = std::clamp(*x, -*at, *at);
}

// Divides channels by their root mean square, which goes to `factors` as f16 (1 where the channel is zero).
void DivideChannels(Work* work, std::byte* factors) {
  const int n = std::max(1, kBlockTokens - work->first_token);
  for (int d = 0; d < work->side.dim; ++d) {
    float sum = 0.0f;
    for (int t = work->first_token; t < kBlockTokens; ++t) sum += work->row(t)[d] * work->row(t)[d];
    const float rms = std::sqrt(sum / float(n));
    const uint16_t half = rms < kF16Min ? F32ToF16(1.0f) : RoundScale(rms);
    StoreHalf(factors, size_t(d), half);
    for (int t = work->first_token; t < kBlockTokens; ++t) work->row(t)[d] /= F16ToF32(half);
  }
}

int GroupsAlongHead(const SideSpec& spec, int dim) { return (dim + spec.group - 1) / spec.group; }

void CodeGroup(const SideSpec& spec, const Codebook& book, Group* group) {
  if (spec.levels == Levels::kAsymmetric) return CodeAsymmetric(book.count - 1, !spec.plain_scale, group);
  // Of nf4 and fp4, absmax scales are part of the definition.
  CodeSymmetric(book, LevelBits(spec.type) > 0 && !spec.plain_scale, group);
}

void CodeGroups(Work* work) {
  const SideLayout& side = work->side;
  const SideSpec& spec = side.spec;
  const Codebook book = MakeCodebook(spec);
  Group group;
  const auto store = [&](size_t index) {
    StoreHalf(work->scales, index, group.scale);
    if (spec.levels == Levels::kAsymmetric) StoreHalf(work->scales, work->planes.n_scales + index, group.zero);
  };
  if (spec.along_tokens) {
    for (int begin = 0; begin < kBlockTokens; begin += spec.group) {
      const int first = std::max(begin, work->first_token);
      group.n = begin + spec.group - first;
      if (group.n <= 0) continue;
      for (int d = 0; d < side.dim; ++d) {
        for (int i = 0; i < group.n; ++i) group.x[i] = work->row(first + i)[d];
        CodeGroup(spec, book, &group);
        for (int i = 0; i < group.n; ++i) PutCode(work->code_row(first + i), d, work->planes.bits, group.code[i]);
        store(size_t(begin / spec.group) * size_t(side.dim) + size_t(d));
      }
    }
    return;
  }
  const int n_groups = GroupsAlongHead(spec, side.dim);
  for (int t = work->first_token; t < kBlockTokens; ++t) {
    for (int g = 0; g < n_groups; ++g) {
      const int begin = g * spec.group;
      group.n = std::min<int>(spec.group, side.dim - begin);
      std::copy_n(work->row(t) + begin, group.n, group.x);
      CodeGroup(spec, book, &group);
      for (int i = 0; i < group.n; ++i) PutCode(work->code_row(t), begin + i, work->planes.bits, group.code[i]);
      store(size_t(t) * size_t(n_groups) + size_t(g));
    }
  }
}

// TurboQuant: the vector on the unit sphere, turned at random, each coordinate times sqrt(dim) rounded to the Lloyd-Max
// levels of the Gaussian. With qjl one bit less, and the signs of random projections of what is left.
void CodeTurbo(Work* work) {
  const int dim = work->side.dim, bits = TurboBits(work->side.spec);
  const Codebook book = MakeCodebook(work->side.spec);
  const float root = std::sqrt(float(dim));
  std::vector<float> projected(static_cast<size_t>(dim));
  for (int t = work->first_token; t < kBlockTokens; ++t) {
    float* x = work->row(t);
    FlipSigns(x, dim);
    HadamardRotate(x, dim);
    const float norm = Norm(x, dim);
    const uint16_t half = norm < kF16Min ? uint16_t(0) : RoundScale(norm);
    StoreHalf(work->scales, size_t(t), half);
    const float stored = F16ToF32(half);
    for (int d = 0; d < dim; ++d) {
      const int code = book.Nearest(half == 0 ? 0.0f : x[d] / norm * root);
      PutCode(work->code_row(t), d, work->planes.bits, uint32_t(code));
      x[d] -= stored * book.level[code] / root;
    }
    if (!work->side.spec.qjl) continue;
    const float residual = Norm(x, dim);
    StoreHalf(work->scales, work->planes.n_scales + size_t(t),
              half == 0 || residual < kF16Min ? uint16_t(0) : RoundScale(residual));
    Project(x, dim, false, projected.data());
    for (int d = 0; d < dim; ++d) {
      if (projected[size_t(d)] > 0.0f) PutCode(work->code_row(t), d, work->planes.bits, 1u << bits);
    }
  }
}

void DecodeTurbo(const SideLayout& side, const StudyPlanes& planes, const uint8_t* codes, const std::byte* scales,
                 int t, float* out) {
  const Codebook book = MakeCodebook(side.spec);
  const int dim = side.dim, bits = TurboBits(side.spec);
  const float root = std::sqrt(float(dim));
  const float norm = LoadHalf(scales, size_t(t));
  std::vector<float> signs(static_cast<size_t>(dim)), residual(static_cast<size_t>(dim));
  for (int d = 0; d < dim; ++d) {
    const uint32_t code = GetCode(codes, d, planes.bits);
    out[d] = norm * book.level[code & ((1u << bits) - 1u)] / root;
    signs[size_t(d)] = (code >> bits & 1u) != 0 ? 1.0f : -1.0f;
  }
  if (side.spec.qjl) {
    const float left = LoadHalf(scales, planes.n_scales + size_t(t)) * kHalfPiRoot / float(dim);
    Project(signs.data(), dim, true, residual.data());
    for (int d = 0; d < dim; ++d) out[d] += left * residual[size_t(d)];
  }
  HadamardRotate(out, dim);
  FlipSigns(out, dim);
}

void DecodeGroups(const SideLayout& side, const StudyPlanes& planes, const Codebook& book, const uint8_t* codes,
                  const std::byte* scales, int t, float* out) {
  const SideSpec& spec = side.spec;
  const bool asymmetric = spec.levels == Levels::kAsymmetric;
  const auto n_groups = size_t(GroupsAlongHead(spec, side.dim));
  const std::byte* factors = scales + size_t(planes.n_scales) * (asymmetric ? 4 : 2);
  for (int d = 0; d < side.dim; ++d) {
    const size_t index = spec.along_tokens ? size_t(t / spec.group) * size_t(side.dim) + size_t(d)
                                           : size_t(t) * n_groups + size_t(d / spec.group);
    const uint32_t code = GetCode(codes, d, planes.bits);
    const float scale = LoadHalf(scales, index);
    out[d] = asymmetric ? scale * float(code) + LoadHalf(scales, planes.n_scales + index) : scale * book.level[code];
    if (spec.two_axis) out[d] *= LoadHalf(factors, size_t(d));
  }
}

}  // namespace

StudyPlanes MakeStudyPlanes(const SideSpec& spec, int dim) {
  StudyPlanes planes;
  const auto d = uint32_t(dim);
  if (IsTurbo(spec.type)) {
    planes.bits = TurboBits(spec) + (spec.qjl ? 1 : 0);
    planes.n_scales = kBlockTokens;
    planes.scale_bytes = planes.n_scales * (spec.qjl ? 4 : 2);
  } else if (IsFloat(spec.type)) {
    planes.bits = spec.type == Type::kF32 ? 32 : spec.type == Type::kBf16 ? 16 : 8;
  } else {
    planes.bits = LevelBits(spec.type) > 0 ? LevelBits(spec.type) : 4;
    planes.n_scales = spec.along_tokens ? uint32_t(kBlockTokens / spec.group) * d
                                        : uint32_t(kBlockTokens * GroupsAlongHead(spec, dim));
    planes.scale_bytes = planes.n_scales * (spec.levels == Levels::kAsymmetric ? 4 : 2) + (spec.two_axis ? d * 2 : 0);
  }
  planes.row_bytes = (d * uint32_t(planes.bits) + 7) / 8;
  planes.code_bytes = planes.row_bytes * kBlockTokens;
  return planes;
}

float EncodeStudySide(const SideLayout& side, bool is_key, const uint16_t* exact, int first_token, std::byte* cell) {
  const SideSpec& spec = side.spec;
  const int dim = side.dim;
  Work work{side,
            MakeStudyPlanes(spec, dim),
            first_token,
            std::vector<float>(size_t(kBlockTokens) * size_t(dim)),
            reinterpret_cast<uint8_t*>(cell + side.codes),
            cell + side.scales};
  for (int t = first_token; t < kBlockTokens; ++t) {
    float* x = work.row(t);
    for (int d = 0; d < dim; ++d) {
      const uint16_t half = exact[is_key ? d * kBlockTokens + t : t * side.dim_padded + d];
      x[d] = (half & 0x7c00) == 0x7c00 ? 0.0f : F16ToF32(half);
    }
    if (spec.rotate) HadamardRotate(x, dim);
  }
  if (IsTurbo(spec.type)) {
    CodeTurbo(&work);
    return 0.0f;
  }
  if (IsFloat(spec.type)) {
    for (int t = first_token; t < kBlockTokens; ++t) {
      for (int d = 0; d < dim; ++d) {
        PutCode(work.code_row(t), d, work.planes.bits, EncodeFloat(spec.type, work.row(t)[d]));
      }
    }
    return 0.0f;
  }
  const float offset_scale =
      spec.channel_offset ? TakeOffsets(&work, reinterpret_cast<int8_t*>(cell + side.channel_offset)) : 0.0f;
  if (spec.clip) Clip(&work);
  if (spec.two_axis) {
    const size_t at = size_t(work.planes.n_scales) * (spec.levels == Levels::kAsymmetric ? 4 : 2);
    DivideChannels(&work, work.scales + at);
  }
  CodeGroups(&work);
  return offset_scale;
}

void DecodeStudyTokens(const SideLayout& side, const std::byte* cell, int first_token, float offset_scale, int begin,
                       int end, float* out) {
  const SideSpec& spec = side.spec;
  const StudyPlanes planes = MakeStudyPlanes(spec, side.dim);
  const std::byte* scales = cell + side.scales;
  const Codebook book = IsFloat(spec.type) ? Codebook{} : MakeCodebook(spec);
  for (int t = begin; t < end; ++t, out += side.dim) {
    if (t < first_token) {
      std::fill_n(out, side.dim, 0.0f);
      continue;
    }
    const auto* codes = reinterpret_cast<const uint8_t*>(cell + side.codes) + size_t(t) * planes.row_bytes;
    if (IsTurbo(spec.type)) {
      DecodeTurbo(side, planes, codes, scales, t, out);
      continue;
    }
    if (IsFloat(spec.type)) {
      for (int d = 0; d < side.dim; ++d) out[d] = DecodeFloat(spec.type, GetCode(codes, d, planes.bits));
      continue;
    }
    DecodeGroups(side, planes, book, codes, scales, t, out);
    if (spec.channel_offset) {
      const auto* offsets = reinterpret_cast<const int8_t*>(cell + side.channel_offset);
      for (int d = 0; d < side.dim; ++d) out[d] += offset_scale * float(offsets[d]);
    }
    if (spec.rotate) HadamardRotate(out, side.dim);
  }
}

}  // namespace kvcell
