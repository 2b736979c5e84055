// Kernels for NEON with dot products: 4 tokens (scores) or 4 dimensions (values) a register, codes multiplied as bytes.
#include "attention/kernels.h"

#if defined(KVCELL_NEON)

#include <arm_neon.h>
#include <sys/auxv.h>

#include <cstring>

#include "codec/f16.h"

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("dotprod"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("arch=armv8.2-a+dotprod")
#endif

namespace kvcell::attention_internal {
namespace {

constexpr int kLanes = 4;
constexpr int kTile = 16;  // tokens or dims of a 64-byte line

KVCELL_INLINE int8x16_t Load8(const void* p) { return vld1q_s8(static_cast<const int8_t*>(p)); }
KVCELL_INLINE float32x4_t LoadHalf4(const std::byte* p) {
  return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(reinterpret_cast<const uint16_t*>(p))));
}
KVCELL_INLINE void Prefetch(const std::byte* p) { __builtin_prefetch(p); }

// 2^x for x <= 0; NaN stays NaN. Adding `round` leaves round(x) + 127, the exponent of the result, in the low bits.
KVCELL_INLINE float32x4_t Exp2(float32x4_t x) {
  const float32x4_t round = vdupq_n_f32(12582912.0f + 127.0f);  // 1.5 * 2^23 + 127
  x = vmaxq_f32(x, vdupq_n_f32(kExp2Min));
  const float32x4_t n = vaddq_f32(x, round);
  const float32x4_t f = vsubq_f32(x, vsubq_f32(n, round));
  float32x4_t p = vdupq_n_f32(kExp2[5]);
  for (int i = 4; i >= 0; --i) p = vfmaq_f32(vdupq_n_f32(kExp2[i]), p, f);
  return vmulq_f32(p, vreinterpretq_f32_s32(vshlq_n_s32(vreinterpretq_s32_f32(n), 23)));
}

// tanh through 2^x: absolute error below 3e-7.
KVCELL_INLINE float32x4_t Tanh(float32x4_t x) {
  const float32x4_t e = Exp2(vmulq_f32(vabsq_f32(x), vdupq_n_f32(-2.0f * kLog2E)));
  const float32x4_t one = vdupq_n_f32(1.0f);
  const float32x4_t t = vdivq_f32(vsubq_f32(one, e), vaddq_f32(one, e));
  return vbslq_f32(vdupq_n_u32(0x80000000u), x, t);
}

float ExpandScales(const std::byte* scales, int n_groups, int rows_per_scale, int begin, int end, float* out) {
  const int n = kBlockTokens / rows_per_scale;
  float32x4_t largest = vdupq_n_f32(0.0f);
  for (int g = 0; g < n_groups; ++g) {
    const std::byte* in = scales + static_cast<ptrdiff_t>(g) * n * 2;
    float* row = out + g * kBlockTokens;
    alignas(16) float small[kBlockTokens];
    float* to = rows_per_scale == 1 ? row : small;
    if (n >= kLanes) {
      for (int i = 0; i < n; i += kLanes) vst1q_f32(to + i, LoadHalf4(in + i * 2));
    } else {
      uint16_t halves[kLanes] = {};
      std::memcpy(halves, in, static_cast<size_t>(n) * 2);
      vst1q_f32(to, vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(halves))));
    }
    if (rows_per_scale != 1) {
      for (int t = 0; t < kBlockTokens; ++t) row[t] = small[t / rows_per_scale];
    }
    for (int t = 0; t < begin; ++t) row[t] = 0.0f;
    for (int t = end; t < kBlockTokens; ++t) row[t] = 0.0f;
    for (int t = 0; t < kBlockTokens; t += kLanes) largest = vmaxnmq_f32(largest, vabsq_f32(vld1q_f32(row + t)));
  }
  return vmaxnmvq_f32(largest);
}

template <int R>
void OffsetBias(const std::byte* offset, float scale, int dim_padded, const float* q, int q_stride, float* bias) {
  float32x4_t s[R];
  for (int r = 0; r < R; ++r) s[r] = vdupq_n_f32(0.0f);
  for (int c = 0; c < dim_padded; c += 8) {
    const int16x8_t wide = vmovl_s8(vld1_s8(reinterpret_cast<const int8_t*>(offset + c)));
    const float32x4_t low = vcvtq_f32_s32(vmovl_s16(vget_low_s16(wide)));
    const float32x4_t high = vcvtq_f32_s32(vmovl_s16(vget_high_s16(wide)));
    for (int r = 0; r < R; ++r) {
      const float* row = q + static_cast<ptrdiff_t>(r) * q_stride + c;
      s[r] = vfmaq_f32(vfmaq_f32(s[r], low, vld1q_f32(row)), high, vld1q_f32(row + 4));
    }
  }
  for (int r = 0; r < R; ++r) bias[r] = vaddvq_f32(s[r]) * scale;
}

// The planes of one tile's codes as a kernel walks them, chunk after chunk: a chunk is 8 values a lane.
struct CodeLines {
  const std::byte* codes;
  const std::byte* high;
};
template <int kBits>
KVCELL_INLINE CodeLines LinesAt(CodeLines lines, ptrdiff_t chunk) {
  constexpr int kHigh = HighBits(kBits);
  lines.codes += chunk * 16 * LowBits(kBits);
  if (kHigh > 0) lines.high += chunk * 16 * kHigh;
  return lines;
}

KVCELL_INLINE uint8x16_t LoadU8(const std::byte* p) { return vld1q_u8(reinterpret_cast<const uint8_t*>(p)); }

// All-ones in the bytes whose bit of the 16 is set.
KVCELL_INLINE uint8x16_t BitsToBytes(const std::byte* p) {
  const uint8x16_t bit = vcombine_u8(vcreate_u8(0x8040201008040201ull), vcreate_u8(0x8040201008040201ull));
  const uint8x16_t bytes = vcombine_u8(vdup_n_u8(static_cast<uint8_t>(p[0])), vdup_n_u8(static_cast<uint8_t>(p[1])));
  return vtstq_u8(bytes, bit);
}

// Levels of four lanes (quarter `i` of a tile) of two chunks: 4 registers of 4 values a lane. The table has 16 or 32
// levels; int6 codes are their biased levels.
template <int kBits>
KVCELL_INLINE void DecodeChunks(CodeLines lines, int i, const uint8_t* levels, int8x16_t level[4]) {
  uint8x16_t code[4];
  if (LowBits(kBits) == 4) {
    for (int c = 0; c < 2; ++c) {
      const uint8x16_t x = LoadU8(lines.codes + c * 64 + i * 16);
      code[2 * c] = vandq_u8(x, vdupq_n_u8(15));
      code[2 * c + 1] = vshrq_n_u8(x, 4);
    }
  } else {
    const uint8x16_t x = LoadU8(lines.codes + i * 16), three = vdupq_n_u8(3);
    code[0] = vandq_u8(x, three);
    code[1] = vandq_u8(vshrq_n_u8(x, 2), three);
    code[2] = vandq_u8(vshrq_n_u8(x, 4), three);
    code[3] = vshrq_n_u8(x, 6);
  }
  if (kBits == 6) {
    const uint8x16_t x = LoadU8(lines.high + i * 16), high = vdupq_n_u8(48);
    code[0] = vorrq_u8(code[0], vandq_u8(vshlq_n_u8(x, 4), high));
    code[1] = vorrq_u8(code[1], vandq_u8(vshlq_n_u8(x, 2), high));
    code[2] = vorrq_u8(code[2], vandq_u8(x, high));
    code[3] = vorrq_u8(code[3], vandq_u8(vshrq_n_u8(x, 2), high));
    for (int j = 0; j < 4; ++j) level[j] = vreinterpretq_s8_u8(code[j]);
    return;
  }
  for (int j = 0; j < 4; ++j) {
    const std::byte* bits = lines.high + j * 8 + i * 2;
    if (kBits == 3) code[j] = vorrq_u8(code[j], vandq_u8(BitsToBytes(bits), vdupq_n_u8(4)));
    if (kBits == 5) {
      const uint8x16x2_t table = {{vld1q_u8(levels), vld1q_u8(levels + 16)}};
      code[j] = vorrq_u8(code[j], vandq_u8(BitsToBytes(bits), vdupq_n_u8(16)));
      level[j] = vreinterpretq_s8_u8(vqtbl2q_u8(table, code[j]));
    } else {
      level[j] = vreinterpretq_s8_u8(vqtbl1q_u8(vld1q_u8(levels), code[j]));
    }
  }
}

// acc[r] += levels . x[r] over an even number of chunks of 8 values; x holds bytes as they follow each other.
template <int kBits, int R>
KVCELL_INLINE void DotLevels(CodeLines lines, const std::byte* prefetch, int n_chunks, const uint8_t* levels,
                             const int8_t* x, ptrdiff_t x_stride, int32x4_t acc[R][4]) {
  for (int c = 0; c < n_chunks; c += 2) {
    int8x16_t factors[R];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) factors[r] = Load8(x + r * x_stride + c * 8);
    for (int line = 0; line < kBits * 32; line += 64) Prefetch(prefetch + c * 16 * kBits + line);
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      int8x16_t level[4];
      DecodeChunks<kBits>(LinesAt<kBits>(lines, c), i, levels, level);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        acc[r][i] = vdotq_laneq_s32(acc[r][i], level[0], factors[r], 0);
        acc[r][i] = vdotq_laneq_s32(acc[r][i], level[1], factors[r], 1);
        acc[r][i] = vdotq_laneq_s32(acc[r][i], level[2], factors[r], 2);
        acc[r][i] = vdotq_laneq_s32(acc[r][i], level[3], factors[r], 3);
      }
    }
  }
}

template <int kBits, int R>
void ScoreLevels(const ScoreArgs& a) {
  const int n_chunks = a.dim_padded / 8;
  const int group_chunks = a.group / 8;
  const int8_t* q = static_cast<const int8_t*>(a.q);
  for (int t = 0; t < kBlockTokens; t += kTile) {
    const ptrdiff_t tile = static_cast<ptrdiff_t>(t / kTile) * n_chunks;
    const CodeLines lines = LinesAt<kBits>({a.codes, a.codes_high}, tile);
    float32x4_t s[R][4];
    for (int r = 0; r < R; ++r) {
      for (int i = 0; i < 4; ++i) s[r][i] = vdupq_n_f32(a.bias[r]);
    }
    for (int g = 0; g < a.n_groups; ++g) {
      const int c = g * group_chunks;
      const int n = n_chunks - c < group_chunks ? n_chunks - c : group_chunks;
      int32x4_t acc[R][4];
      for (int r = 0; r < R; ++r) {
        for (int i = 0; i < 4; ++i) acc[r][i] = vdupq_n_s32(a.q_start[r * a.scale_stride + g]);
      }
      DotLevels<kBits, R>(LinesAt<kBits>(lines, c), a.prefetch + (tile + c) * 16 * kBits, n, a.levels, q + c * 8,
                          a.q_stride, acc);
      for (int r = 0; r < R; ++r) {
        const float q_scale = a.q_scale[r * a.scale_stride + g], q_noise = a.q_noise[r * a.scale_stride + g];
        for (int i = 0; i < 4; ++i) {
          const float32x4_t scale = vld1q_f32(a.k_scale + g * kBlockTokens + t + i * kLanes);
          const float32x4_t sum = vfmaq_n_f32(vcvtq_f32_s32(acc[r][i]), scale, q_noise);
          s[r][i] = vfmaq_f32(s[r][i], sum, vmulq_n_f32(scale, q_scale));
        }
      }
    }
    for (int r = 0; r < R; ++r) {
      for (int i = 0; i < 4; ++i) vst1q_f32(a.scores + r * kBlockTokens + t + i * kLanes, s[r][i]);
    }
  }
}

// Adds the weighted sums of a tile's dims, the first being d, of scale group g.
template <int R>
KVCELL_INLINE void AddTile(const ValueArgs& a, int d, int g, const int32x4_t sums[R][4]) {
  for (int r = 0; r < R; ++r) {
    float* out = a.acc + static_cast<ptrdiff_t>(r) * a.acc_stride + d;
    const float scale = a.w_scale[r * a.n_groups + g];
    for (int i = 0; i < 4; ++i) {
      vst1q_f32(out + i * kLanes, vfmaq_n_f32(vld1q_f32(out + i * kLanes), vcvtq_f32_s32(sums[r][i]), scale));
    }
  }
}

template <int kBits, int R>
void ValueLevels(const ValueArgs& a) {
  constexpr int kChunks = kBlockTokens / 8;
  for (int g = 0, d = 0; g < a.n_groups; ++g) {
    for (; d < a.GroupEnd(g); d += kTile) {
      const ptrdiff_t tile = static_cast<ptrdiff_t>(d / kTile) * kChunks;
      int32x4_t acc[R][4];
      for (int r = 0; r < R; ++r) {
        for (int i = 0; i < 4; ++i) acc[r][i] = vdupq_n_s32(a.w_start[r * a.n_groups + g]);
      }
      DotLevels<kBits, R>(LinesAt<kBits>({a.codes, a.codes_high}, tile), a.prefetch + tile * 16 * kBits, kChunks,
                          a.levels, static_cast<const int8_t*>(a.w) + static_cast<ptrdiff_t>(g) * kWeightStride,
                          static_cast<ptrdiff_t>(a.n_groups) * kWeightStride, acc);
      AddTile<R>(a, d, g, acc);
    }
  }
}

// 16-bit factors as 256 * high + (low + 128), both signed bytes: the 128 is made good by the sum of the codes.
struct Split {
  int8x16_t high, low;
};
KVCELL_INLINE Split SplitFactors(const int16_t* x) {
  const int16x8_t a = vld1q_s16(x), b = vld1q_s16(x + 8);
  const int8x16_t low = vcombine_s8(vmovn_s16(a), vmovn_s16(b));
  return {vcombine_s8(vshrn_n_s16(a, 8), vshrn_n_s16(b, 8)), veorq_s8(low, vdupq_n_s8(-128))};
}

template <int R>
struct Sums8 {
  int32x4_t high[R][4], low[R][4], codes[4];
};

template <int kLane, int R>
KVCELL_INLINE void DotInt8Chunk(const std::byte* line, const Split factors[R], Sums8<R>* sums) {
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const int8x16_t x = Load8(line + i * 16);
    sums->codes[i] = vdotq_s32(sums->codes[i], x, vdupq_n_s8(1));
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      sums->high[r][i] = vdotq_laneq_s32(sums->high[r][i], x, factors[r].high, kLane);
      sums->low[r][i] = vdotq_laneq_s32(sums->low[r][i], x, factors[r].low, kLane);
    }
  }
}

// Sums of codes times 16-bit factors over chunks of 4 values, four at a time (16 factors a load).
template <int R>
KVCELL_INLINE void DotInt8(const std::byte* codes, const std::byte* prefetch, int n_chunks, const int16_t* x,
                           ptrdiff_t x_stride, int32x4_t out[R][4]) {
  Sums8<R> sums;
  for (int i = 0; i < 4; ++i) {
    sums.codes[i] = vdupq_n_s32(0);
    for (int r = 0; r < R; ++r) sums.high[r][i] = sums.low[r][i] = vdupq_n_s32(0);
  }
  for (int c = 0; c < n_chunks; c += 4) {
    Split factors[R];
    for (int r = 0; r < R; ++r) factors[r] = SplitFactors(x + r * x_stride + c * 4);
    for (int i = 0; i < 4; ++i) Prefetch(prefetch + (c + i) * 64);
    DotInt8Chunk<0, R>(codes + c * 64, factors, &sums);
    DotInt8Chunk<1, R>(codes + c * 64 + 64, factors, &sums);
    DotInt8Chunk<2, R>(codes + c * 64 + 128, factors, &sums);
    DotInt8Chunk<3, R>(codes + c * 64 + 192, factors, &sums);
  }
  for (int i = 0; i < 4; ++i) {
    const int32x4_t offset = vshlq_n_s32(sums.codes[i], 7);
    for (int r = 0; r < R; ++r) {
      out[r][i] = vaddq_s32(vaddq_s32(vshlq_n_s32(sums.high[r][i], 8), sums.low[r][i]), offset);
    }
  }
}

template <int R>
void ScoreInt8(const ScoreArgs& a) {
  const int n_chunks = a.dim_padded / 4;
  const int group_chunks = a.group / 4;
  const int16_t* q = static_cast<const int16_t*>(a.q);
  for (int t = 0; t < kBlockTokens; t += kTile) {
    const ptrdiff_t tile = static_cast<ptrdiff_t>(t / kTile) * n_chunks * 64;
    float32x4_t s[R][4];
    for (int r = 0; r < R; ++r) {
      for (int i = 0; i < 4; ++i) s[r][i] = vdupq_n_f32(a.bias[r]);
    }
    for (int g = 0; g < a.n_groups; ++g) {
      const int c = g * group_chunks;
      const int n = n_chunks - c < group_chunks ? n_chunks - c : group_chunks;
      int32x4_t sum[R][4];
      DotInt8<R>(a.codes + tile + c * 64, a.prefetch + tile + c * 64, n, q + c * 4, a.q_stride, sum);
      for (int r = 0; r < R; ++r) {
        const float q_scale = a.q_scale[r * a.scale_stride + g];
        for (int i = 0; i < 4; ++i) {
          const float32x4_t scale = vmulq_n_f32(vld1q_f32(a.k_scale + g * kBlockTokens + t + i * kLanes), q_scale);
          s[r][i] = vfmaq_f32(s[r][i], vcvtq_f32_s32(sum[r][i]), scale);
        }
      }
    }
    for (int r = 0; r < R; ++r) {
      for (int i = 0; i < 4; ++i) vst1q_f32(a.scores + r * kBlockTokens + t + i * kLanes, s[r][i]);
    }
  }
}

template <int R>
void ValueInt8(const ValueArgs& a) {
  constexpr int kChunks = kBlockTokens / 4;
  const int16_t* w = static_cast<const int16_t*>(a.w);
  for (int g = 0, d = 0; g < a.n_groups; ++g) {
    for (; d < a.GroupEnd(g); d += kTile) {
      const ptrdiff_t tile = static_cast<ptrdiff_t>(d / kTile) * kChunks * 64;
      int32x4_t sum[R][4];
      DotInt8<R>(a.codes + tile, a.prefetch + tile, kChunks, w + g * kBlockTokens,
                 static_cast<ptrdiff_t>(a.n_groups) * kBlockTokens, sum);
      AddTile<R>(a, d, g, sum);
    }
  }
}

// sums[r][i] += x[r][n] * plane[n][i] over n < n_steps, 16 elements i of rows that lie `row_bytes` apart.
template <int R>
KVCELL_INLINE void DotF16(const std::byte* plane, ptrdiff_t row_bytes, int n_steps, const float* x, int x_stride,
                          const std::byte* prefetch, float32x4_t sums[R][4]) {
  for (int n = 0; n < n_steps; ++n, plane += row_bytes) {
    if (n % 2 == 0) Prefetch(prefetch + n * 32);
    float32x4_t values[4];
    for (int i = 0; i < 4; ++i) values[i] = LoadHalf4(plane + i * 8);
    for (int r = 0; r < R; ++r) {
      for (int i = 0; i < 4; ++i) sums[r][i] = vfmaq_n_f32(sums[r][i], values[i], x[r * x_stride + n]);
    }
  }
}

template <int R>
void ScoreF16(const ScoreArgs& a) {
  for (int t = a.begin / kTile * kTile; t < a.end; t += kTile) {
    float32x4_t s[R][4];
    for (int r = 0; r < R; ++r) {
      for (int i = 0; i < 4; ++i) s[r][i] = vdupq_n_f32(a.bias[r]);
    }
    DotF16<R>(a.codes + t * 2, static_cast<ptrdiff_t>(a.n_tokens) * 2, a.dim, static_cast<const float*>(a.q),
              a.q_stride, a.prefetch + t * 2 * static_cast<ptrdiff_t>(a.dim), s);
    for (int r = 0; r < R; ++r) {
      for (int i = 0; i < 4; ++i) vst1q_f32(a.scores + r * kBlockTokens + t + i * kLanes, s[r][i]);
    }
  }
}

template <int R>
void ValueF16(const ValueArgs& a) {
  const ptrdiff_t row_bytes = static_cast<ptrdiff_t>(a.dim_padded) * 2;
  for (int d = 0; d < a.dim_padded; d += kTile) {
    float32x4_t s[R][4];
    for (int r = 0; r < R; ++r) {
      for (int i = 0; i < 4; ++i) s[r][i] = vdupq_n_f32(0.0f);
    }
    DotF16<R>(a.codes + d * 2 + a.begin * row_bytes, row_bytes, a.end - a.begin,
              static_cast<const float*>(a.w) + a.begin, kBlockTokens,
              a.prefetch + d * 2 * static_cast<ptrdiff_t>(a.end - a.begin), s);
    for (int r = 0; r < R; ++r) {
      float* out = a.acc + static_cast<ptrdiff_t>(r) * a.acc_stride + d;
      for (int i = 0; i < 4; ++i) {
        vst1q_f32(out + i * kLanes, vaddq_f32(vld1q_f32(out + i * kLanes), s[r][i]));
      }
    }
  }
}

void Adjust(const AdjustArgs& a) {
  const float32x4_t none = vdupq_n_f32(-__builtin_inff());
  const int32_t first_lanes[kLanes] = {0, 1, 2, 3};
  const int32x4_t lane = vld1q_s32(first_lanes);
  for (int t = 0; t < kBlockTokens; t += kLanes) {
    float32x4_t s = vld1q_f32(a.scores + t);
    if (a.softcap > 0.0f) s = vmulq_n_f32(Tanh(s), a.softcap);
    const int32x4_t token = vaddq_s32(vdupq_n_s32(t), lane);
    if (a.has_slope) {
      const float32x4_t distance = vaddq_f32(vdupq_n_f32(a.first_distance), vcvtq_f32_s32(token));
      s = vfmaq_n_f32(s, distance, a.slope);
    }
    const uint32x4_t sees = vandq_u32(vcgeq_s32(token, vdupq_n_s32(a.begin)), vcltq_s32(token, vdupq_n_s32(a.end)));
    vst1q_f32(a.scores + t, vbslq_f32(sees, s, none));
  }
}

template <int R>
void Softmax(float* scores, float* max, float* sum) {
  for (int r = 0; r < R; ++r, scores += kBlockTokens) {
    float32x4_t x[4];
    for (int i = 0; i < 4; ++i) x[i] = vld1q_f32(scores + i * kLanes);
    for (int t = kTile; t < kBlockTokens; t += kTile) {
      for (int i = 0; i < 4; ++i) x[i] = vmaxnmq_f32(x[i], vld1q_f32(scores + t + i * kLanes));
    }
    const float most = vmaxnmvq_f32(vmaxnmq_f32(vmaxnmq_f32(x[0], x[1]), vmaxnmq_f32(x[2], x[3])));
    max[r] = most > max[r] ? most : max[r];
    const float32x4_t top = vdupq_n_f32(max[r]);
    for (int i = 0; i < 4; ++i) x[i] = vdupq_n_f32(0.0f);
    for (int t = 0; t < kBlockTokens; t += kTile) {
      for (int i = 0; i < 4; ++i) {
        const float32x4_t p = Exp2(vsubq_f32(vld1q_f32(scores + t + i * kLanes), top));
        vst1q_f32(scores + t + i * kLanes, p);
        x[i] = vaddq_f32(x[i], p);
      }
    }
    sum[r] = vaddvq_f32(vaddq_f32(vaddq_f32(x[0], x[1]), vaddq_f32(x[2], x[3])));
  }
}

// What takes the largest magnitude of the products p * v_scale of a group to `top`, 0 where they are too small to count
// (or hold a NaN, which the sum of weights tells).
KVCELL_INLINE float InverseScale(const float* p, const float* v_scale, float top, float* w_scale) {
  float32x4_t largest = vdupq_n_f32(0.0f);
  for (int t = 0; t < kBlockTokens; t += kLanes) {
    largest = vmaxnmq_f32(largest, vabsq_f32(vmulq_f32(vld1q_f32(p + t), vld1q_f32(v_scale + t))));
  }
  const float most = vmaxnmvq_f32(largest);
  const bool counts = most > kMinWeight;
  *w_scale = counts ? most / top : 0.0f;
  return counts ? top / most : 0.0f;
}

// 8 rounded weights; a NaN becomes 0.
KVCELL_INLINE int16x8_t Round8(const float* p, const float* v_scale, float inverse) {
  const float32x4_t a = vmulq_n_f32(vmulq_f32(vld1q_f32(p), vld1q_f32(v_scale)), inverse);
  const float32x4_t b = vmulq_n_f32(vmulq_f32(vld1q_f32(p + 4), vld1q_f32(v_scale + 4)), inverse);
  return vcombine_s16(vqmovn_s32(vcvtnq_s32_f32(a)), vqmovn_s32(vcvtnq_s32_f32(b)));
}

template <int R>
void Weights8(const float* p, const float* v_scale, int n_groups, const Levels& levels, int8_t* w, float* w_scale,
              int32_t* w_start) {
  for (int r = 0; r < R; ++r, p += kBlockTokens) {
    for (int g = 0; g < n_groups; ++g, w += kWeightStride) {
      const float* scale = v_scale + g * kBlockTokens;
      const float inverse = InverseScale(p, scale, static_cast<float>(kTop8), w_scale++);
      int32x4_t sum = vdupq_n_s32(0);
      for (int t = 0; t < kBlockTokens; t += kTile) {
        const int8x16_t bytes = vcombine_s8(vqmovn_s16(Round8(p + t, scale + t, inverse)),
                                            vqmovn_s16(Round8(p + t + 8, scale + t + 8, inverse)));
        vst1q_s8(w + t, bytes);
        sum = vdotq_s32(sum, bytes, vdupq_n_s8(1));
      }
      *w_start++ = -levels.bias * vaddvq_s32(sum);
    }
  }
}

template <int R>
void Weights16(const float* p, const float* v_scale, int n_groups, int16_t* w, float* w_scale) {
  for (int r = 0; r < R; ++r, p += kBlockTokens) {
    for (int g = 0; g < n_groups; ++g, w += kBlockTokens) {
      const float* scale = v_scale + g * kBlockTokens;
      const float inverse = InverseScale(p, scale, 32767.0f, w_scale++);
      for (int t = 0; t < kBlockTokens; t += 8) vst1q_s16(w + t, Round8(p + t, scale + t, inverse));
    }
  }
}

void Scale(float* x, int n, float factor) {
  for (int i = 0; i < n; i += kLanes) vst1q_f32(x + i, vmulq_n_f32(vld1q_f32(x + i), factor));
}

}  // namespace
}  // namespace kvcell::attention_internal

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#include "attention/kernel_table.inc"

namespace kvcell::attention_internal {

static bool NeonAvailable() {
  constexpr unsigned long kDotProducts = 1ul << 20;  // HWCAP_ASIMDDP
  return (getauxval(AT_HWCAP) & kDotProducts) != 0;
}

const KernelSet& NeonKernels() {
  static const KernelSet kernels = MakeKernels("neon", NeonAvailable, 1, false);
  return kernels;
}

}  // namespace kvcell::attention_internal

#endif  // KVCELL_NEON
