// Kernels for AVX-512 with VNNI: 16 tokens (scores) or 16 dimensions (values) a register, one line of codes at a time.
#if defined(__x86_64__)

#include <immintrin.h>

#include <cstring>

#include "attention/kernels.h"
#include "codec/f16.h"

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni"))), \
                             apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")
// The compiler's own header passes undefined registers (GCC bug 105593).
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif

namespace kvcell::attention_internal {
namespace {

KVCELL_INLINE __m512i Load(const void* p) { return _mm512_loadu_si512(p); }
KVCELL_INLINE __m256i Load256(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
KVCELL_INLINE __m128i Load128(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
KVCELL_INLINE __m512 LoadHalf16(const std::byte* p) { return _mm512_cvtph_ps(Load256(p)); }
KVCELL_INLINE __m512i Broadcast4(const void* p) {
  int32_t x;
  std::memcpy(&x, p, sizeof(x));
  return _mm512_set1_epi32(x);
}
KVCELL_INLINE __m512i Broadcast8(const void* p) {
  int64_t x;
  std::memcpy(&x, p, sizeof(x));
  return _mm512_set1_epi64(x);
}
KVCELL_INLINE void Prefetch(const std::byte* p) { _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T0); }
// Into L2 alone: an f16 cell is as large as L1.
KVCELL_INLINE void PrefetchFar(const std::byte* p) { _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T1); }

// 2^x for x <= 0; NaN stays NaN. Adding `round` leaves round(x) + 127, the exponent of the result, in the low bits.
KVCELL_INLINE __m512 Exp2(__m512 x) {
  const __m512 round = _mm512_set1_ps(12582912.0f + 127.0f);  // 1.5 * 2^23 + 127
  x = _mm512_max_ps(_mm512_set1_ps(kExp2Min), x);
  const __m512 n = _mm512_add_ps(x, round);
  const __m512 f = _mm512_sub_ps(x, _mm512_sub_ps(n, round));
  __m512 p = _mm512_fmadd_ps(_mm512_set1_ps(kExp2[5]), f, _mm512_set1_ps(kExp2[4]));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(kExp2[3]));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(kExp2[2]));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(kExp2[1]));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(kExp2[0]));
  return _mm512_mul_ps(p, _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(n), 23)));
}

// tanh through 2^x: absolute error below 3e-7.
KVCELL_INLINE __m512 Tanh(__m512 x) {
  const __m512i sign_bit = _mm512_set1_epi32(static_cast<int32_t>(0x80000000u));
  const __m512i bits = _mm512_castps_si512(x);
  const __m512 magnitude = _mm512_castsi512_ps(_mm512_andnot_si512(sign_bit, bits));
  const __m512 e = Exp2(_mm512_mul_ps(magnitude, _mm512_set1_ps(-2.0f * kLog2E)));
  const __m512 one = _mm512_set1_ps(1.0f);
  const __m512 t = _mm512_div_ps(_mm512_sub_ps(one, e), _mm512_add_ps(one, e));
  return _mm512_castsi512_ps(_mm512_or_si512(_mm512_castps_si512(t), _mm512_and_si512(sign_bit, bits)));
}

void ExpandScales(const std::byte* scales, int n_groups, int rows_per_scale, int begin, int end, float* out) {
  const int n = kBlockTokens / rows_per_scale;
  for (int g = 0; g < n_groups; ++g) {
    const std::byte* in = scales + static_cast<ptrdiff_t>(g) * n * 2;
    float* row = out + g * kBlockTokens;
    if (rows_per_scale == 1) {
      for (int t = 0; t < kBlockTokens; t += 16) _mm512_storeu_ps(row + t, LoadHalf16(in + t * 2));
    } else {
      for (int t = 0; t < kBlockTokens; ++t) {
        uint16_t half;
        std::memcpy(&half, in + t / rows_per_scale * 2, sizeof(half));
        row[t] = F16ToF32(half);
      }
    }
    for (int t = 0; t < begin; ++t) row[t] = 0.0f;
    for (int t = end; t < kBlockTokens; ++t) row[t] = 0.0f;
  }
}

template <int R>
void OffsetBias(const std::byte* offset, float scale, int dim_padded, const float* q, int q_stride, float* bias) {
  __m512 s[R];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) s[r] = _mm512_setzero_ps();
  for (int c = 0; c < dim_padded; c += 16) {
    const __m512 o = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(Load128(offset + c)));
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r)
      s[r] = _mm512_fmadd_ps(o, _mm512_loadu_ps(q + static_cast<ptrdiff_t>(r) * q_stride + c), s[r]);
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) bias[r] = _mm512_reduce_add_ps(s[r]) * scale;
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

// Levels of codes, looked up in tables of 16; int6 codes are their biased levels.
template <int kBits>
struct LevelTables {
  __m512i low, high;
  KVCELL_INLINE explicit LevelTables(const uint8_t* levels)
      : low(_mm512_broadcast_i32x4(Load128(levels))),
        high(kBits == 5 ? _mm512_broadcast_i32x4(Load128(levels + 16)) : low) {}
};

template <int kShift>
KVCELL_INLINE __m512i Crumbs(__m512i x) {
  return _mm512_and_si512(kShift == 0 ? x : _mm512_srli_epi16(x, kShift), _mm512_set1_epi8(3));
}

// Decodes two chunks: 16 lanes of 16 values, as 4 registers of 4 values a lane.
template <int kBits>
KVCELL_INLINE void DecodeChunks(CodeLines lines, const LevelTables<kBits>& tables, __m512i level[4]) {
  if (LowBits(kBits) == 4) {
    const __m512i nibble = _mm512_set1_epi8(15);
#pragma GCC unroll 2
    for (int c = 0; c < 2; ++c) {
      const __m512i x = Load(lines.codes + c * 64);
      level[2 * c] = _mm512_and_si512(x, nibble);
      level[2 * c + 1] = _mm512_and_si512(_mm512_srli_epi16(x, 4), nibble);
    }
  } else {
    const __m512i x = Load(lines.codes);
    level[0] = Crumbs<0>(x);
    level[1] = Crumbs<2>(x);
    level[2] = Crumbs<4>(x);
    level[3] = Crumbs<6>(x);
  }
  if (kBits == 6) {
    const __m512i x = Load(lines.high);
    level[0] = _mm512_or_si512(level[0], _mm512_slli_epi16(Crumbs<0>(x), 4));
    level[1] = _mm512_or_si512(level[1], _mm512_slli_epi16(Crumbs<2>(x), 4));
    level[2] = _mm512_or_si512(level[2], _mm512_slli_epi16(Crumbs<4>(x), 4));
    level[3] = _mm512_or_si512(level[3], _mm512_slli_epi16(Crumbs<6>(x), 4));
    return;
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    __mmask64 bits = 0;
    if (HighBits(kBits) == 1) std::memcpy(&bits, lines.high + i * 8, sizeof(bits));
    if (kBits == 3) level[i] = _mm512_mask_add_epi8(level[i], bits, level[i], _mm512_set1_epi8(4));
    const __m512i low = _mm512_shuffle_epi8(tables.low, level[i]);
    level[i] = kBits == 5 ? _mm512_mask_shuffle_epi8(low, bits, tables.high, level[i]) : low;
  }
}

// sums[r] = start[r] + levels . x[r] over `n_chunks` (even) chunks: 16 lanes of 8 values each. The two halves of a
// chunk have sums of their own, so that one row is not a chain of waiting multiplications.
template <int kBits, int R>
KVCELL_INLINE void DotLevels(CodeLines lines, const std::byte* prefetch, int n_chunks, const LevelTables<kBits>& tables,
                             const int8_t* x, ptrdiff_t x_stride, __m512i sums[R]) {
  __m512i high[R];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) high[r] = _mm512_setzero_si512();
  for (int c = 0; c < n_chunks; c += 2) {
    __m512i level[4];
    DecodeChunks<kBits>(LinesAt<kBits>(lines, c), tables, level);
    Prefetch(prefetch + c * 16 * kBits);
    Prefetch(prefetch + c * 16 * kBits + 64);
    if (kBits > 4) Prefetch(prefetch + c * 16 * kBits + 128);
    const int8_t* xc = x + c * 8;
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r, xc += x_stride) {
      sums[r] = _mm512_dpbusd_epi32(sums[r], level[0], Broadcast4(xc));
      high[r] = _mm512_dpbusd_epi32(high[r], level[1], Broadcast4(xc + 4));
      sums[r] = _mm512_dpbusd_epi32(sums[r], level[2], Broadcast4(xc + 8));
      high[r] = _mm512_dpbusd_epi32(high[r], level[3], Broadcast4(xc + 12));
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) sums[r] = _mm512_add_epi32(sums[r], high[r]);
}

template <int kBits, int R>
void ScoreLevels(const ScoreArgs& a) {
  const LevelTables<kBits> tables(a.levels);
  const int n_chunks = a.dim_padded / 8;
  const int group_chunks = a.group / 8;
  const int8_t* q = static_cast<const int8_t*>(a.q);
  for (int t = 0; t < kBlockTokens; t += 16) {
    const ptrdiff_t tile = static_cast<ptrdiff_t>(t / 16) * n_chunks;
    const CodeLines lines = LinesAt<kBits>({a.codes, a.codes_high}, tile);
    const std::byte* prefetch = a.prefetch + tile * 16 * kBits;
    __m512 s[R];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) s[r] = _mm512_set1_ps(a.bias[r]);
    for (int g = 0; g < a.n_groups; ++g) {
      const int c = g * group_chunks;
      const int n = n_chunks - c < group_chunks ? n_chunks - c : group_chunks;
      __m512i acc[R];
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) acc[r] = _mm512_set1_epi32(a.q_start[r * a.scale_stride + g]);
      DotLevels<kBits, R>(LinesAt<kBits>(lines, c), prefetch + c * 16 * kBits, n, tables, q + c * 8, a.q_stride, acc);
      const __m512 scale = _mm512_loadu_ps(a.k_scale + g * kBlockTokens + t);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        const int at = r * a.scale_stride + g;
        const __m512 row_scale = _mm512_mul_ps(scale, _mm512_set1_ps(a.q_scale[at]));
        const __m512 sum = _mm512_fmadd_ps(scale, _mm512_set1_ps(a.q_noise[at]), _mm512_cvtepi32_ps(acc[r]));
        s[r] = _mm512_fmadd_ps(sum, row_scale, s[r]);
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) _mm512_storeu_ps(a.scores + r * kBlockTokens + t, s[r]);
  }
}

template <int kBits, int R>
void ValueLevels(const ValueArgs& a) {
  constexpr int kChunks = kBlockTokens / 8;
  const LevelTables<kBits> tables(a.levels);
  for (int d = 0; d < a.dim_padded; d += 16) {
    const ptrdiff_t tile = static_cast<ptrdiff_t>(d / 16) * kChunks;
    const int g = d / a.group;
    __m512i acc[R];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) acc[r] = _mm512_set1_epi32(a.w_start[r * a.n_groups + g]);
    DotLevels<kBits, R>(LinesAt<kBits>({a.codes, a.codes_high}, tile), a.prefetch + tile * 16 * kBits, kChunks, tables,
                        static_cast<const int8_t*>(a.w) + static_cast<ptrdiff_t>(g) * kWeightStride,
                        static_cast<ptrdiff_t>(a.n_groups) * kWeightStride, acc);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      float* out = a.acc + static_cast<ptrdiff_t>(r) * a.acc_stride + d;
      const __m512 scale = _mm512_set1_ps(a.w_scale[r * a.n_groups + g]);
      _mm512_storeu_ps(out, _mm512_fmadd_ps(_mm512_cvtepi32_ps(acc[r]), scale, _mm512_loadu_ps(out)));
    }
  }
}

// Sums of neighbouring int32, in order: x gives lanes 0-7, y lanes 8-15.
KVCELL_INLINE __m512i SumPairs(__m512i x, __m512i y) {
  const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  const __m512i odd = _mm512_setr_epi32(1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
  return _mm512_add_epi32(_mm512_permutex2var_epi32(x, even, y), _mm512_permutex2var_epi32(x, odd, y));
}

// sums[r] = codes . x[r] over `n_chunks` lines: 16 lanes of 4 values each, widened to 16 bits.
template <int R>
KVCELL_INLINE void DotInt8(const std::byte* codes, const std::byte* prefetch, int n_chunks, const int16_t* x,
                           ptrdiff_t x_stride, __m512i sums[R]) {
  __m512i low[R], high[R];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) low[r] = high[r] = _mm512_setzero_si512();
  for (int c = 0; c < n_chunks; ++c) {
    const __m512i a = _mm512_cvtepi8_epi16(Load256(codes + c * 64));
    const __m512i b = _mm512_cvtepi8_epi16(Load256(codes + c * 64 + 32));
    Prefetch(prefetch + c * 64);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const __m512i xc = Broadcast8(x + r * x_stride + c * 4);
      low[r] = _mm512_dpwssd_epi32(low[r], a, xc);
      high[r] = _mm512_dpwssd_epi32(high[r], b, xc);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) sums[r] = SumPairs(low[r], high[r]);
}

template <int R>
void ScoreInt8(const ScoreArgs& a) {
  const int n_chunks = a.dim_padded / 4;
  const int group_chunks = a.group / 4;
  const int16_t* q = static_cast<const int16_t*>(a.q);
  for (int t = 0; t < kBlockTokens; t += 16) {
    const ptrdiff_t tile = static_cast<ptrdiff_t>(t / 16) * n_chunks * 64;
    __m512 s[R];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) s[r] = _mm512_set1_ps(a.bias[r]);
    for (int g = 0; g < a.n_groups; ++g) {
      const int c = g * group_chunks;
      const int n = n_chunks - c < group_chunks ? n_chunks - c : group_chunks;
      __m512i acc[R];
      DotInt8<R>(a.codes + tile + c * 64, a.prefetch + tile + c * 64, n, q + c * 4, a.q_stride, acc);
      const __m512 scale = _mm512_loadu_ps(a.k_scale + g * kBlockTokens + t);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        const __m512 row_scale = _mm512_mul_ps(scale, _mm512_set1_ps(a.q_scale[r * a.scale_stride + g]));
        s[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(acc[r]), row_scale, s[r]);
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) _mm512_storeu_ps(a.scores + r * kBlockTokens + t, s[r]);
  }
}

template <int R>
void ValueInt8(const ValueArgs& a) {
  constexpr int kChunks = kBlockTokens / 4;
  for (int d = 0; d < a.dim_padded; d += 16) {
    const ptrdiff_t tile = static_cast<ptrdiff_t>(d / 16) * kChunks * 64;
    const int g = d / a.group;
    __m512i acc[R];
    DotInt8<R>(a.codes + tile, a.prefetch + tile, kChunks, static_cast<const int16_t*>(a.w) + g * kBlockTokens,
               static_cast<ptrdiff_t>(a.n_groups) * kBlockTokens, acc);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      float* out = a.acc + static_cast<ptrdiff_t>(r) * a.acc_stride + d;
      const __m512 scale = _mm512_set1_ps(a.w_scale[r * a.n_groups + g]);
      _mm512_storeu_ps(out, _mm512_fmadd_ps(_mm512_cvtepi32_ps(acc[r]), scale, _mm512_loadu_ps(out)));
    }
  }
}

// sums[r][i] += x[r][n] * plane[n][i] over n < n_steps, 16 * kLanes elements i of rows that lie `row_bytes` apart:
// tokens of K over dims, or dims of V over tokens. Each step fetches half a line's worth per register at `prefetch`, so
// that the passes over a plane spread its successor's lines evenly.
template <int R, int kLanes>
KVCELL_INLINE void DotF16(const std::byte* plane, ptrdiff_t row_bytes, int n_steps, const float* x, int x_stride,
                          const std::byte* prefetch, __m512 sums[R][kLanes]) {
  for (int n = 0; n < n_steps; ++n, plane += row_bytes) {
    if (kLanes > 1 || n % 2 == 0) PrefetchFar(prefetch + n * 32 * kLanes);
    __m512 values[kLanes];
#pragma GCC unroll 4
    for (int i = 0; i < kLanes; ++i) values[i] = LoadHalf16(plane + i * 32);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const __m512 factor = _mm512_set1_ps(x[r * x_stride + n]);
#pragma GCC unroll 4
      for (int i = 0; i < kLanes; ++i) sums[r][i] = _mm512_fmadd_ps(values[i], factor, sums[r][i]);
    }
  }
}

template <int R, int kLanes>
KVCELL_INLINE void ScoreF16Tile(const ScoreArgs& a, int t) {
  __m512 s[R][kLanes];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int i = 0; i < kLanes; ++i) s[r][i] = _mm512_set1_ps(a.bias[r]);
  }
  DotF16<R, kLanes>(a.codes + t * 2, static_cast<ptrdiff_t>(a.n_tokens) * 2, a.dim, static_cast<const float*>(a.q),
                    a.q_stride, a.prefetch + t * 2 * static_cast<ptrdiff_t>(a.dim), s);
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int i = 0; i < kLanes; ++i) _mm512_storeu_ps(a.scores + r * kBlockTokens + t + i * 16, s[r][i]);
  }
}

template <int R>
void ScoreF16(const ScoreArgs& a) {
  int t = a.begin / 16 * 16;
  for (; t + 16 < a.end; t += 32) ScoreF16Tile<R, 2>(a, t);
  for (; t < a.end; t += 16) ScoreF16Tile<R, 1>(a, t);
}

template <int R, int kLanes>
KVCELL_INLINE void ValueF16Tile(const ValueArgs& a, int d) {
  __m512 s[R][kLanes];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int i = 0; i < kLanes; ++i) s[r][i] = _mm512_setzero_ps();
  }
  const ptrdiff_t row_bytes = static_cast<ptrdiff_t>(a.dim_padded) * 2;
  DotF16<R, kLanes>(a.codes + d * 2 + a.begin * row_bytes, row_bytes, a.end - a.begin,
                    static_cast<const float*>(a.w) + a.begin, kBlockTokens,
                    a.prefetch + d * 2 * static_cast<ptrdiff_t>(a.end - a.begin), s);
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
    float* out = a.acc + static_cast<ptrdiff_t>(r) * a.acc_stride + d;
#pragma GCC unroll 4
    for (int i = 0; i < kLanes; ++i) {
      _mm512_storeu_ps(out + i * 16, _mm512_add_ps(_mm512_loadu_ps(out + i * 16), s[r][i]));
    }
  }
}

template <int R>
void ValueF16(const ValueArgs& a) {
  int d = 0;
  for (; d + 32 <= a.dim_padded; d += 32) ValueF16Tile<R, 2>(a, d);
  for (; d < a.dim_padded; d += 16) ValueF16Tile<R, 1>(a, d);
}

void Adjust(const AdjustArgs& a) {
  const __m512 lane = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  for (int t = 0; t < kBlockTokens; t += 16) {
    __m512 s = _mm512_loadu_ps(a.scores + t);
    if (a.softcap > 0.0f) s = _mm512_mul_ps(Tanh(s), _mm512_set1_ps(a.softcap));
    if (a.has_slope) {
      const __m512 distance = _mm512_add_ps(_mm512_set1_ps(a.first_distance + static_cast<float>(t)), lane);
      s = _mm512_fmadd_ps(distance, _mm512_set1_ps(a.slope), s);
    }
    const __m512 token = _mm512_add_ps(_mm512_set1_ps(static_cast<float>(t)), lane);
    const __mmask16 seen = _mm512_cmp_ps_mask(token, _mm512_set1_ps(static_cast<float>(a.begin)), _CMP_GE_OQ) &
                           _mm512_cmp_ps_mask(token, _mm512_set1_ps(static_cast<float>(a.end)), _CMP_LT_OQ);
    _mm512_storeu_ps(a.scores + t, _mm512_mask_blend_ps(seen, _mm512_set1_ps(-__builtin_inff()), s));
  }
}

template <int R>
void Softmax(float* scores, float* max, float* sum) {
  __m512 x[R];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) x[r] = _mm512_loadu_ps(scores + r * kBlockTokens);
  for (int t = 16; t < kBlockTokens; t += 16) {
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) x[r] = _mm512_max_ps(x[r], _mm512_loadu_ps(scores + r * kBlockTokens + t));
  }
  __m512 top[R];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
    const float most = _mm512_reduce_max_ps(x[r]);
    if (most > max[r]) max[r] = most;
    top[r] = _mm512_set1_ps(max[r]);
    x[r] = _mm512_setzero_ps();
  }
  for (int t = 0; t < kBlockTokens; t += 16) {
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const __m512 p = Exp2(_mm512_sub_ps(_mm512_loadu_ps(scores + r * kBlockTokens + t), top[r]));
      _mm512_storeu_ps(scores + r * kBlockTokens + t, p);
      x[r] = _mm512_add_ps(x[r], p);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) sum[r] = _mm512_reduce_add_ps(x[r]);
}

// The products of one row's weights with one group's scales, and what takes the largest to `top` (0 where it is too
// small to count); the inverse of that goes to `w_scale`.
KVCELL_INLINE __m512 ScaledWeights(const float* p, const float* v_scale, float top, __m512 x[4], float* w_scale) {
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) x[i] = _mm512_mul_ps(_mm512_loadu_ps(p + i * 16), _mm512_loadu_ps(v_scale + i * 16));
  const float most = _mm512_reduce_max_ps(_mm512_max_ps(_mm512_max_ps(x[0], x[1]), _mm512_max_ps(x[2], x[3])));
  const bool counts = most > kMinWeight;
  *w_scale = counts ? most / top : 0.0f;
  return _mm512_set1_ps(counts ? top / most : 0.0f);
}

template <int R>
void Weights8(const float* p, const float* v_scale, int n_groups, const Levels& levels, int8_t* w, float* w_scale,
              int32_t* w_start) {
  for (int g = 0; g < n_groups; ++g, v_scale += kBlockTokens) {
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      __m512 x[4];
      const int at = r * n_groups + g;
      const __m512 inverse = ScaledWeights(p + r * kBlockTokens, v_scale, static_cast<float>(kTop8), x, w_scale + at);
      __m512i sum = _mm512_setzero_si512();
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        const __m512i y = _mm512_cvtps_epi32(_mm512_mul_ps(x[i], inverse));
        sum = _mm512_add_epi32(sum, y);
        _mm_storeu_si128(reinterpret_cast<__m128i*>(w + static_cast<ptrdiff_t>(at) * kWeightStride + i * 16),
                         _mm512_cvtepi32_epi8(y));
      }
      w_start[at] = -levels.bias * _mm512_reduce_add_epi32(sum);
    }
  }
}

template <int R>
void Weights16(const float* p, const float* v_scale, int n_groups, int16_t* w, float* w_scale) {
  for (int g = 0; g < n_groups; ++g, v_scale += kBlockTokens) {
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      __m512 x[4];
      const int at = r * n_groups + g;
      const __m512 inverse = ScaledWeights(p + r * kBlockTokens, v_scale, 32767.0f, x, w_scale + at);
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(w + static_cast<ptrdiff_t>(at) * kBlockTokens + i * 16),
                            _mm512_cvtsepi32_epi16(_mm512_cvtps_epi32(_mm512_mul_ps(x[i], inverse))));
      }
    }
  }
}

void Scale(float* x, int n, float factor) {
  for (int i = 0; i < n; i += 16)
    _mm512_storeu_ps(x + i, _mm512_mul_ps(_mm512_loadu_ps(x + i), _mm512_set1_ps(factor)));
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

static bool Avx512Available() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512vnni");
}

const KernelSet& Avx512Kernels() {
  static const KernelSet kernels = MakeKernels("avx512", Avx512Available, 1, false);
  return kernels;
}

}  // namespace kvcell::attention_internal

#endif  // __x86_64__
