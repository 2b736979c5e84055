// The kernels that each instruction set provides, as a table of plain functions over raw planes of one cell.
//
// Rows come in blocks of 1 to kMaxRows that share the decoding of codes; what a row gets never depends on its
// neighbours. Integer sums are exact, so instruction sets differ only in the rounding of float sums.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "codec/cell_layout.h"

namespace kvcell::attention_internal {

inline constexpr int kMaxRows = 4;
inline constexpr int kMaxGroups = kMaxHeadDim / 16;     // of one token along the head
inline constexpr int kWeightStride = kBlockTokens * 8;  // bytes of one row's weights of one group, copies included

enum Code : size_t { kCodeF16, kCodeInt8, kCodeInt4, kCodeInt2, kCodeInt3, kCodeInt5, kCodeInt6, kCodes };

// Scores of the cell's tokens for a block of rows: scores[r][t] = bias[r] + q[r] . k[t], and of int2 to int6 codes what
// noise takes from their weight (PreparedQueries): + sum over groups of q_noise[r] * q_scale[r] * k_scale[t]^2.
//
// int2 to int6 codes: levels are made unsigned (level + bias) and multiplied as u8 * s8 with q; `q_start` takes the
// bias off again. int8 codes are widened and multiplied with a 16-bit q: exact to the codes' own precision.
//
// Kernels for x86 copy their arguments first: vector stores there may alias all that a reference leads to, so that each
// field would be loaded anew after one.
struct ScoreArgs {
  const std::byte* codes = nullptr;       // f16: [dim][n_tokens]; integers: tiles as docs/format.md lays them
  const std::byte* codes_high = nullptr;  // int3, int5, int6: the plane of their high bits
  const std::byte* prefetch = nullptr;  // the same planes of the next cell (or this one), the high one behind the other
  int dim = 0;
  int dim_padded = 0;
  int n_tokens = 0;        // f16: tokens per row of the plane, a multiple of 16
  int begin = 0, end = 0;  // f16: tokens that are wanted; others may be left out
  int group = 0;           // dims per scale
  int n_groups = 0;
  const float* k_scale = nullptr;   // [n_groups][64]
  const uint8_t* levels = nullptr;  // int2 to int6: [2^bits], at least 16, biased; int6 codes are their biased levels
  const void* q = nullptr;          // [rows][q_stride]: f16: float; int8: int16; others: int8 as KernelSet::copies says
  int q_stride = 0;                 // in elements, copies included
  const float* q_scale = nullptr;   // [rows][scale_stride]: [n_groups][copies]
  const int32_t* q_start = nullptr;  // the same: int2 to int6: what a group's sum starts from: see sums16
  const float* q_noise = nullptr;    // the same: int2 to int6: half the variance of scores, in units of q_scale
  int scale_stride = 0;
  const float* bias = nullptr;  // [rows]
  float* scores = nullptr;      // [rows][64]
};

// acc[r][c] += sum over tokens of w[r][t] * v[t][c].
struct ValueArgs {
  const std::byte* codes = nullptr;  // f16: [n_tokens][dim_padded]; integers: tiles
  const std::byte* codes_high = nullptr;
  const std::byte* prefetch = nullptr;
  int dim_padded = 0;
  int begin = 0, end = 0;  // f16: tokens that may have weight
  int group = 0;
  int n_groups = 0;
  const uint8_t* levels = nullptr;  // as in ScoreArgs
  const void* w = nullptr;          // f16: float [rows][64]; int8: int16 [rows][n_groups][64]; others: int8
                                    // [rows][n_groups][64 * copies]
  const float* w_scale = nullptr;   // [rows][n_groups]
  const int32_t* w_start =
      nullptr;           // [rows][n_groups][copies] int2 to int6: what a group's sum starts from: see sums16
  float* acc = nullptr;  // [rows][acc_stride]
  int acc_stride = 0;
  // The end of scale group g's dims, for loops over groups: finding each tile's group by a division costs as much as a
  // quarter of its products.
  int GroupEnd(int g) const { return (g + 1) * group < dim_padded ? (g + 1) * group : dim_padded; }
};

// What turns one row's products into scores where that takes more than the products themselves.
struct AdjustArgs {
  float* scores = nullptr;  // [64]; tokens outside [begin, end) become -inf
  int begin = 0, end = 0;   // tokens that the row sees
  float softcap = 0.0f;     // > 0: scores are softcap * tanh(score), in units of log2
  float slope = 0.0f;       // with `has_slope`: score += slope * (first_distance + token), in units of log2
  float first_distance = 0.0f;
  bool has_slope = false;
};

// A level table as the integer kernels use it.
struct Levels {
  std::array<uint8_t, kMaxLevels> biased{};  // level + bias, the smallest being 0
  int32_t bias = 0;
  int32_t half_limit = 0;  // sums16: most that |q| or w of one half of a group may add up to, rounding included
  float noise = 0;         // LevelNoise
};
inline constexpr int kTop8 = 127;  // largest |q| or w in 8 bits
Levels MakeLevels(const SideSpec& side);

struct KernelSet {
  std::string_view name;
  bool (*available)();
  // How often each group of four int8 values of q and of the weights is repeated, so that a kernel without cheap
  // broadcasts reads a whole register.
  int copies;
  // True where a group's products are added in 16 bits: the two 16-bit halves of a lane take the first and the last two
  // of each four values, and neither may pass 32767 once the bias is off (Levels::half_limit; what is on the way may
  // wrap). A start is then the pair -bias * (sum of the half's q or w), modulo 2^16, in place of the 32-bit sum of
  // both.
  bool sums16;
  // f16 [n_groups][64 / rows_per_scale] to [n_groups][64], zero outside [begin, end). Returns the largest magnitude.
  float (*expand_scales)(const std::byte* scales, int n_groups, int rows_per_scale, int begin, int end, float* out);
  void (*adjust)(const AdjustArgs&);
  // x[0, n) *= factor, n a multiple of 16.
  void (*scale)(float* x, int n, float factor);

  // The rest for 1 to kMaxRows rows: [rows - 1].
  template <typename Function>
  using PerRows = std::array<Function*, kMaxRows>;
  // bias[r] = scale * (q[r] . offset), both [dim_padded], offset int8.
  PerRows<void(const std::byte* offset, float scale, int dim_padded, const float* q, int q_stride, float* bias)>
      offset_bias;
  std::array<PerRows<void(const ScoreArgs&)>, kCodes> score;  // [Code]
  std::array<PerRows<void(const ValueArgs&)>, kCodes> value;
  // Scores [rows][64] to weights 2^(score - max), `max` [rows] being raised to the rows' largest scores first, and
  // `sum` [rows] the sums of the weights.
  PerRows<void(float* scores, float* max, float* sum)> softmax;
  // w[r][g][t] = round(p[r][t] * v_scale[g][t] / w_scale[r][g]), w_scale chosen so that the largest magnitude is kTop8
  // (less where sums16 asks for it; 32767 for int16). p: [rows][64], none negative; scales may be (SideSpec::Levels).
  PerRows<void(const float* p, const float* v_scale, int n_groups, const Levels& levels, int8_t* w, float* w_scale,
               int32_t* w_start)>
      weights8;
  PerRows<void(const float* p, const float* v_scale, int n_groups, int16_t* w, float* w_scale)> weights16;
};

// 2^f for f in [-0.5, 0.5], relative error below 1.6e-7 before rounding (minimax of degree 5, the constant term set to
// 1 so that 2^0 is exact). With its argument reduction, 2^x has a relative error below 3e-7 for x in [-126, 0]; below
// that it is 0.
inline constexpr float kExp2[6] = {1.0f,
                                   0.6931469670647331f,
                                   0.24022119723848476f,
                                   0.05550713273542586f,
                                   0.00967554133421605f,
                                   0.0013276471979478776f};
inline constexpr float kExp2Min = -127.0f;  // 2^kExp2Min counts as 0
inline constexpr float kLog2E = 1.44269504088896341f;
inline constexpr float kMostNoise = 0.25f;   // that a score gets for it (PreparedQueries), as a natural logarithm
inline constexpr float kMinWeight = 1e-30f;  // a cell whose weights are all below it adds nothing

const KernelSet& ScalarKernels();
#if defined(__x86_64__)
const KernelSet& Avx512VnniKernels();
const KernelSet& Avx512Kernels();  // without VNNI
const KernelSet& Avx2Kernels();
#endif
// clang before 16 knows the dot product intrinsics only where the whole file is compiled for them.
#if defined(__aarch64__) && (!defined(__clang__) || __clang_major__ >= 16 || defined(__ARM_FEATURE_DOTPROD))
#define KVCELL_NEON
const KernelSet& NeonKernels();  // with dot products
#endif

// Every instruction set compiled in, best first, whether this machine has it or not.
std::span<const KernelSet* const> CompiledKernels();

}  // namespace kvcell::attention_internal
