// Kernels for AVX2, FMA and F16C: 8 tokens (scores) or 8 dimensions (values) a register, codes multiplied as bytes.
#if defined(__x86_64__)

#include <cpuid.h>
#include <immintrin.h>

#include <cstring>

#include "attention/kernels.h"
#include "codec/f16.h"

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#endif

namespace kvcell::attention_internal {
namespace {

KVCELL_INLINE __m256i Load(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
KVCELL_INLINE __m128i Load128(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
KVCELL_INLINE __m256 LoadHalf8(const std::byte* p) { return _mm256_cvtph_ps(Load128(p)); }
KVCELL_INLINE __m256i Broadcast4(const void* p) {
  int32_t x;
  std::memcpy(&x, p, sizeof(x));
  return _mm256_set1_epi32(x);
}
KVCELL_INLINE __m256i Broadcast8(const void* p) {
  int64_t x;
  std::memcpy(&x, p, sizeof(x));
  return _mm256_set1_epi64x(x);
}
KVCELL_INLINE void Prefetch(const std::byte* p) { _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T0); }

// The sums or largest lanes of up to four rows, side by side: (row 0, row 1, row 2, row 3).
template <int R, typename Op>
KVCELL_INLINE __m128 Reduce(const __m256 x[R], Op op) {
  const __m256 a = x[0], b = x[R > 1 ? 1 : 0], c = x[R > 2 ? 2 : 0], d = x[R > 3 ? 3 : 0];
  const __m256 ab = op(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
  const __m256 cd = op(_mm256_unpacklo_ps(c, d), _mm256_unpackhi_ps(c, d));
  const __m256 y = op(_mm256_shuffle_ps(ab, cd, 0x44), _mm256_shuffle_ps(ab, cd, 0xEE));
  return op(_mm256_castps256_ps128(y), _mm256_extractf128_ps(y, 1));
}

struct AddOp {
  KVCELL_INLINE __m256 operator()(__m256 a, __m256 b) const { return _mm256_add_ps(a, b); }
  KVCELL_INLINE __m128 operator()(__m128 a, __m128 b) const { return _mm_add_ps(a, b); }
};
struct MaxOp {
  KVCELL_INLINE __m256 operator()(__m256 a, __m256 b) const { return _mm256_max_ps(a, b); }
  KVCELL_INLINE __m128 operator()(__m128 a, __m128 b) const { return _mm_max_ps(a, b); }
};

// Stores the first R lanes.
template <int R>
KVCELL_INLINE void StoreRows(float* p, __m128 x) {
  if (R == 4) {
    _mm_storeu_ps(p, x);
  } else {
    alignas(16) float lanes[4];
    _mm_store_ps(lanes, x);
    for (int r = 0; r < R; ++r) p[r] = lanes[r];
  }
}

template <int R>
KVCELL_INLINE __m128 LoadRows(const float* p) {
  if (R == 4) return _mm_loadu_ps(p);
  alignas(16) float lanes[4] = {};
  for (int r = 0; r < R; ++r) lanes[r] = p[r];
  return _mm_load_ps(lanes);
}

// 2^x for x <= 0; NaN stays NaN. Adding `round` leaves round(x) + 127, the exponent of the result, in the low bits.
KVCELL_INLINE __m256 Exp2(__m256 x) {
  const __m256 round = _mm256_set1_ps(12582912.0f + 127.0f);  // 1.5 * 2^23 + 127
  x = _mm256_max_ps(_mm256_set1_ps(kExp2Min), x);
  const __m256 n = _mm256_add_ps(x, round);
  const __m256 f = _mm256_sub_ps(x, _mm256_sub_ps(n, round));
  __m256 p = _mm256_fmadd_ps(_mm256_set1_ps(kExp2[5]), f, _mm256_set1_ps(kExp2[4]));
  p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(kExp2[3]));
  p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(kExp2[2]));
  p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(kExp2[1]));
  p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(kExp2[0]));
  return _mm256_mul_ps(p, _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(n), 23)));
}

// tanh through 2^x: absolute error below 3e-7.
KVCELL_INLINE __m256 Tanh(__m256 x) {
  const __m256 sign_bit = _mm256_set1_ps(-0.0f);
  const __m256 e = Exp2(_mm256_mul_ps(_mm256_andnot_ps(sign_bit, x), _mm256_set1_ps(-2.0f * kLog2E)));
  const __m256 one = _mm256_set1_ps(1.0f);
  const __m256 t = _mm256_div_ps(_mm256_sub_ps(one, e), _mm256_add_ps(one, e));
  return _mm256_or_ps(t, _mm256_and_ps(sign_bit, x));
}

// All-ones in the lanes of tokens [begin, end) of the 8 that start at `first`.
KVCELL_INLINE __m256 LaneMask(int first, int begin, int end) {
  const __m256i t = _mm256_add_epi32(_mm256_set1_epi32(first), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  return _mm256_castsi256_ps(_mm256_and_si256(_mm256_cmpgt_epi32(t, _mm256_set1_epi32(begin - 1)),
                                              _mm256_cmpgt_epi32(_mm256_set1_epi32(end), t)));
}

KVCELL_INLINE __m256 LoadMagnitudes(const float* x) {
  return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), _mm256_loadu_ps(x));
}

float ExpandScales(const std::byte* scales, int n_groups, int rows_per_scale, int begin, int end, float* out) {
  const int n = kBlockTokens / rows_per_scale;
  __m256 largest = _mm256_setzero_ps();
  for (int g = 0; g < n_groups; ++g) {
    const std::byte* in = scales + static_cast<ptrdiff_t>(g) * n * 2;
    float* row = out + g * kBlockTokens;
    if (rows_per_scale == 1) {
      for (int t = 0; t < kBlockTokens; t += 8) _mm256_storeu_ps(row + t, LoadHalf8(in + t * 2));
    } else {
      for (int t = 0; t < kBlockTokens; ++t) {
        uint16_t half;
        std::memcpy(&half, in + t / rows_per_scale * 2, sizeof(half));
        row[t] = F16ToF32(half);
      }
    }
    for (int t = 0; t < begin; ++t) row[t] = 0.0f;
    for (int t = end; t < kBlockTokens; ++t) row[t] = 0.0f;
    for (int t = 0; t < kBlockTokens; t += 8) largest = _mm256_max_ps(LoadMagnitudes(row + t), largest);
  }
  return _mm_cvtss_f32(Reduce<1>(&largest, MaxOp()));
}

KVCELL_INLINE __m256 LoadInt8(const std::byte* p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}

template <int R>
void OffsetBias(const std::byte* offset, float scale, int dim_padded, const float* q, int q_stride, float* bias) {
  __m256 s[R];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) s[r] = _mm256_setzero_ps();
  for (int c = 0; c < dim_padded; c += 8) {
    const __m256 o = LoadInt8(offset + c);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r)
      s[r] = _mm256_fmadd_ps(o, _mm256_loadu_ps(q + static_cast<ptrdiff_t>(r) * q_stride + c), s[r]);
  }
  StoreRows<R>(bias, _mm_mul_ps(Reduce<R>(s, AddOp()), _mm_set1_ps(scale)));
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
  __m256i low, high;
  KVCELL_INLINE explicit LevelTables(const uint8_t* levels)
      : low(_mm256_broadcastsi128_si256(Load128(levels))),
        high(kBits == 5 ? _mm256_broadcastsi128_si256(Load128(levels + 16)) : low) {}
};

// All-ones in the bytes whose bit of the 32 is set.
KVCELL_INLINE __m256i BitsToBytes(const std::byte* p) {
  const __m256i spread = _mm256_setr_epi8(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1,  //
                                          2, 2, 2, 2, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3, 3, 3);
  const __m256i bit = _mm256_set1_epi64x(static_cast<int64_t>(0x8040201008040201ull));
  const __m256i bytes = _mm256_shuffle_epi8(Broadcast4(p), spread);
  return _mm256_cmpeq_epi8(_mm256_and_si256(bytes, bit), bit);
}

template <int kShift>
KVCELL_INLINE __m256i Crumbs(__m256i x) {
  return _mm256_and_si256(kShift == 0 ? x : _mm256_srli_epi16(x, kShift), _mm256_set1_epi8(3));
}

// Decodes two chunks of one half of a tile: 8 lanes of 16 values, as 4 registers of 4 values a lane.
template <int kBits, int kHalf>
KVCELL_INLINE void DecodeChunks(CodeLines lines, const LevelTables<kBits>& tables, __m256i level[4]) {
  const std::byte* codes = lines.codes + kHalf * 32;
  if (LowBits(kBits) == 4) {
    const __m256i nibble = _mm256_set1_epi8(15);
#pragma GCC unroll 2
    for (int c = 0; c < 2; ++c) {
      const __m256i x = Load(codes + c * 64);
      level[2 * c] = _mm256_and_si256(x, nibble);
      level[2 * c + 1] = _mm256_and_si256(_mm256_srli_epi16(x, 4), nibble);
    }
  } else {
    const __m256i x = Load(codes);
    level[0] = Crumbs<0>(x);
    level[1] = Crumbs<2>(x);
    level[2] = Crumbs<4>(x);
    level[3] = Crumbs<6>(x);
  }
  if (kBits == 6) {
    const __m256i x = Load(lines.high + kHalf * 32);
    level[0] = _mm256_or_si256(level[0], _mm256_slli_epi16(Crumbs<0>(x), 4));
    level[1] = _mm256_or_si256(level[1], _mm256_slli_epi16(Crumbs<2>(x), 4));
    level[2] = _mm256_or_si256(level[2], _mm256_slli_epi16(Crumbs<4>(x), 4));
    level[3] = _mm256_or_si256(level[3], _mm256_slli_epi16(Crumbs<6>(x), 4));
    return;
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const std::byte* bits = lines.high + i * 8 + kHalf * 4;
    if (kBits == 3) level[i] = _mm256_or_si256(level[i], _mm256_and_si256(BitsToBytes(bits), _mm256_set1_epi8(4)));
    const __m256i low = _mm256_shuffle_epi8(tables.low, level[i]);
    level[i] =
        kBits == 5 ? _mm256_blendv_epi8(low, _mm256_shuffle_epi8(tables.high, level[i]), BitsToBytes(bits)) : low;
  }
}

// Tells the compiler that x may have changed, so that g++ does not regroup sums over many steps, which takes more
// registers than there are.
KVCELL_INLINE void Pin(__m256i* x) { asm("" : "+x"(*x)); }
// The same for a pointer that fixed offsets follow, so that each of these is no address to be computed and kept.
template <typename T>
KVCELL_INLINE void Pin(const T** p) {
  asm("" : "+r"(*p));
}

constexpr int kCopies = 8;  // of each four bytes of q or weights: 32 bytes, the multiplication's memory operand

// acc[r] += levels . x[r] over `n_chunks` (even) chunks of one half line: 8 lanes of 8 values per chunk, added in 16
// bits, which Levels::half_limit makes room for. The two halves fetch every other line each, evenly spread in time.
template <int kBits, int R, int kHalf>
KVCELL_INLINE void DotLevels(CodeLines lines, const std::byte* prefetch, int n_chunks, const LevelTables<kBits>& tables,
                             const int8_t* x, ptrdiff_t x_stride, __m256i acc[R]) {
  const int8_t* rows[R];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
    rows[r] = x + r * x_stride;
    Pin(&rows[r]);
  }
  Pin(&lines.codes);
  if (HighBits(kBits) > 0) Pin(&lines.high);
  Pin(&prefetch);
#pragma GCC unroll 4
  for (int c = 0; c < n_chunks; c += 2) {
    __m256i level[4];
    DecodeChunks<kBits, kHalf>(LinesAt<kBits>(lines, c), tables, level);
    // A pair of chunks is kBits * 32 bytes of a cell.
    Prefetch(prefetch + c * 16 * kBits + kHalf * 64);
    if (kBits > 4 && kHalf == 0) Prefetch(prefetch + c * 16 * kBits + 128);
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        const int8_t* xc = rows[r] + (c + half) * 8 * kCopies;
        const __m256i products = _mm256_add_epi16(_mm256_maddubs_epi16(level[2 * half], Load(xc)),
                                                  _mm256_maddubs_epi16(level[2 * half + 1], Load(xc + 32)));
        acc[r] = _mm256_add_epi16(acc[r], products);
        Pin(&acc[r]);
      }
    }
  }
}

KVCELL_INLINE __m256 SumHalves(__m256i acc) { return _mm256_cvtepi32_ps(_mm256_madd_epi16(acc, _mm256_set1_epi16(1))); }

// kChunks: of a group, where it is known at compile time; else 0.
template <int kBits, int R, int kHalf, int kChunks>
KVCELL_INLINE void ScoreLevelsHalfTile(const ScoreArgs& a, int t, const LevelTables<kBits>& tables) {
  const int n_chunks = a.dim_padded / 8;
  const int group_chunks = kChunks != 0 ? kChunks : a.group / 8;
  const ptrdiff_t tile = static_cast<ptrdiff_t>(t / 16) * n_chunks;
  const CodeLines lines = LinesAt<kBits>({a.codes, a.codes_high}, tile);
  const std::byte* prefetch = a.prefetch + tile * 16 * kBits;
  const int8_t* q = static_cast<const int8_t*>(a.q);
  __m256 s[R];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) s[r] = _mm256_set1_ps(a.bias[r]);
  for (int g = 0; g < a.n_groups; ++g) {
    const int c = g * group_chunks;
    const int n = kChunks != 0 ? kChunks : n_chunks - c < group_chunks ? n_chunks - c : group_chunks;
    __m256i acc[R];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) acc[r] = Load(a.q_start + r * a.scale_stride + g * kCopies);
    DotLevels<kBits, R, kHalf>(LinesAt<kBits>(lines, c), prefetch + c * 16 * kBits, n, tables, q + c * 8 * kCopies,
                               a.q_stride, acc);
    const __m256 scale = _mm256_loadu_ps(a.k_scale + g * kBlockTokens + t);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const int at = r * a.scale_stride + g * kCopies;
      const __m256 row_scale = _mm256_mul_ps(scale, _mm256_loadu_ps(a.q_scale + at));
      const __m256 sum = _mm256_fmadd_ps(scale, _mm256_loadu_ps(a.q_noise + at), SumHalves(acc[r]));
      s[r] = _mm256_fmadd_ps(sum, row_scale, s[r]);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) _mm256_storeu_ps(a.scores + r * kBlockTokens + t, s[r]);
}

template <int kBits, int R, int kChunks>
KVCELL_INLINE void ScoreLevelsTiles(const ScoreArgs& args) {
  const ScoreArgs a = args;
  const LevelTables<kBits> tables(a.levels);
  for (int t = 0; t < kBlockTokens; t += 16) {
    ScoreLevelsHalfTile<kBits, R, 0, kChunks>(a, t, tables);
    ScoreLevelsHalfTile<kBits, R, 1, kChunks>(a, t + 8, tables);
  }
}

template <int kBits, int R>
void ScoreLevels(const ScoreArgs& a) {
  if (a.group == 32 && a.dim_padded % 32 == 0) return ScoreLevelsTiles<kBits, R, 4>(a);
  if (a.group == 64 && a.dim_padded % 64 == 0) return ScoreLevelsTiles<kBits, R, 8>(a);
  ScoreLevelsTiles<kBits, R, 0>(a);
}

template <int kBits, int R, int kHalf>
KVCELL_INLINE void ValueLevelsHalfTile(const ValueArgs& a, int d, int g, const LevelTables<kBits>& tables) {
  constexpr int kChunks = kBlockTokens / 8;
  const ptrdiff_t tile = static_cast<ptrdiff_t>(d / 16) * kChunks;
  const int8_t* w = static_cast<const int8_t*>(a.w) + g * kWeightStride;
  __m256i acc[R];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) acc[r] = Load(a.w_start + (r * a.n_groups + g) * kCopies);
  DotLevels<kBits, R, kHalf>(LinesAt<kBits>({a.codes, a.codes_high}, tile), a.prefetch + tile * 16 * kBits, kChunks,
                             tables, w, static_cast<ptrdiff_t>(a.n_groups) * kWeightStride, acc);
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
    float* out = a.acc + static_cast<ptrdiff_t>(r) * a.acc_stride + d;
    const __m256 scale = _mm256_broadcast_ss(a.w_scale + r * a.n_groups + g);
    _mm256_storeu_ps(out, _mm256_fmadd_ps(SumHalves(acc[r]), scale, _mm256_loadu_ps(out)));
  }
}

template <int kBits, int R>
void ValueLevels(const ValueArgs& args) {
  const ValueArgs a = args;
  const LevelTables<kBits> tables(a.levels);
  for (int g = 0, d = 0; g < a.n_groups; ++g) {
    for (; d < a.GroupEnd(g); d += 16) {
      ValueLevelsHalfTile<kBits, R, 0>(a, d, g, tables);
      ValueLevelsHalfTile<kBits, R, 1>(a, d + 8, g, tables);
    }
  }
}

// Sums of two int32 pairs per lane group, in token order: x holds (t0 t0 t1 t1 | t2 t2 t3 t3), y the next four.
KVCELL_INLINE __m256i SumPairs(__m256i x, __m256i y) { return _mm256_permute4x64_epi64(_mm256_hadd_epi32(x, y), 0xD8); }

// int8 codes are widened to 16 bits and multiplied with 16-bit q or weights: exact to the codes' own precision.
template <int R>
void ScoreInt8(const ScoreArgs& args) {
  const ScoreArgs a = args;
  const int n_chunks = a.dim_padded / 4;
  const int group_chunks = a.group / 4;
  const int16_t* q = static_cast<const int16_t*>(a.q);
  for (int t = 0; t < kBlockTokens; t += 8) {
    const ptrdiff_t tile = static_cast<ptrdiff_t>(t / 16) * n_chunks * 64 + (t & 8) * 4;
    const std::byte* codes = a.codes + tile;
    const std::byte* prefetch = a.prefetch + tile;
    __m256 s[R];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) s[r] = _mm256_set1_ps(a.bias[r]);
    for (int g = 0, c = 0; g < a.n_groups; ++g) {
      const int c_end = c + group_chunks < n_chunks ? c + group_chunks : n_chunks;
      __m256i acc0[R], acc1[R];
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) acc0[r] = acc1[r] = _mm256_setzero_si256();
      for (; c < c_end; ++c) {
        const __m256i x0 = _mm256_cvtepi8_epi16(Load128(codes + c * 64));
        const __m256i x1 = _mm256_cvtepi8_epi16(Load128(codes + c * 64 + 16));
        Prefetch(prefetch + c * 64);
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
          const __m256i qc = Broadcast8(q + r * a.q_stride + c * 4);
          acc0[r] = _mm256_add_epi32(acc0[r], _mm256_madd_epi16(x0, qc));
          acc1[r] = _mm256_add_epi32(acc1[r], _mm256_madd_epi16(x1, qc));
          Pin(&acc0[r]);
          Pin(&acc1[r]);
        }
      }
      const __m256 scale = _mm256_loadu_ps(a.k_scale + g * kBlockTokens + t);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        const __m256 row_scale = _mm256_mul_ps(scale, _mm256_loadu_ps(a.q_scale + r * a.scale_stride + g * kCopies));
        s[r] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(SumPairs(acc0[r], acc1[r])), row_scale, s[r]);
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) _mm256_storeu_ps(a.scores + r * kBlockTokens + t, s[r]);
  }
}

template <int R>
void ValueInt8(const ValueArgs& args) {
  const ValueArgs a = args;
  const int16_t* w = static_cast<const int16_t*>(a.w);
  const int w_stride = a.n_groups * kBlockTokens;
  for (int g = 0, d = 0; g < a.n_groups; ++g) {
    for (; d < a.GroupEnd(g); d += 8) {
      const ptrdiff_t tile = static_cast<ptrdiff_t>(d / 16) * (kBlockTokens / 4) * 64 + (d & 8) * 4;
      const std::byte* codes = a.codes + tile;
      const std::byte* prefetch = a.prefetch + tile;
      const int16_t* wg = w + g * kBlockTokens;
      __m256i acc0[R], acc1[R];
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) acc0[r] = acc1[r] = _mm256_setzero_si256();
      for (int c = 0; c < kBlockTokens / 4; ++c) {
        const __m256i x0 = _mm256_cvtepi8_epi16(Load128(codes + c * 64));
        const __m256i x1 = _mm256_cvtepi8_epi16(Load128(codes + c * 64 + 16));
        Prefetch(prefetch + c * 64);
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
          const __m256i wc = Broadcast8(wg + r * w_stride + c * 4);
          acc0[r] = _mm256_add_epi32(acc0[r], _mm256_madd_epi16(x0, wc));
          acc1[r] = _mm256_add_epi32(acc1[r], _mm256_madd_epi16(x1, wc));
          Pin(&acc0[r]);
          Pin(&acc1[r]);
        }
      }
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        float* out = a.acc + static_cast<ptrdiff_t>(r) * a.acc_stride + d;
        const __m256 scale = _mm256_set1_ps(a.w_scale[r * a.n_groups + g]);
        const __m256 sum = _mm256_cvtepi32_ps(SumPairs(acc0[r], acc1[r]));
        _mm256_storeu_ps(out, _mm256_fmadd_ps(sum, scale, _mm256_loadu_ps(out)));
      }
    }
  }
}

// Into L2 alone: an f16 cell is as large as L1.
KVCELL_INLINE void PrefetchFar(const std::byte* p) { _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T1); }

// sums[r][i] += x[r][n] * plane[n][i] over n < n_steps, 8 * kLanes elements i of rows that lie `row_bytes` apart:
// tokens of K over dims, or dims of V over tokens. Each step fetches as many bytes at `prefetch` as it reads, so that
// the passes over a plane spread its successor's lines evenly.
template <int R, int kLanes>
KVCELL_INLINE void DotF16(const std::byte* plane, ptrdiff_t row_bytes, int n_steps, const float* x, int x_stride,
                          const std::byte* prefetch, __m256 sums[R][kLanes]) {
  for (int n = 0; n < n_steps; ++n, plane += row_bytes) {
    if (kLanes >= 4 || n % 2 == 0) PrefetchFar(prefetch + n * 16 * kLanes);
    if (kLanes == 8) PrefetchFar(prefetch + n * 128 + 64);
    __m256 values[kLanes];
#pragma GCC unroll 8
    for (int i = 0; i < kLanes; ++i) values[i] = LoadHalf8(plane + i * 16);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const __m256 factor = _mm256_broadcast_ss(x + r * x_stride + n);
#pragma GCC unroll 8
      for (int i = 0; i < kLanes; ++i) sums[r][i] = _mm256_fmadd_ps(values[i], factor, sums[r][i]);
    }
  }
}

// Registers of sums per row: as many for few rows as for four, so that the sums are not a chain of waiting additions.
template <int R>
constexpr int kF16Lanes = R == 1   ? 8
                          : R == 2 ? 4
                                   : 2;

template <int R, int kLanes>
KVCELL_INLINE void ScoreF16Tile(const ScoreArgs& a, int t) {
  __m256 s[R][kLanes];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int i = 0; i < kLanes; ++i) s[r][i] = _mm256_set1_ps(a.bias[r]);
  }
  const ptrdiff_t row_bytes = static_cast<ptrdiff_t>(a.n_tokens) * 2;
  DotF16<R, kLanes>(a.codes + t * 2, row_bytes, a.dim, static_cast<const float*>(a.q), a.q_stride,
                    a.prefetch + t * 2 * static_cast<ptrdiff_t>(a.dim), s);
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int i = 0; i < kLanes; ++i) _mm256_storeu_ps(a.scores + r * kBlockTokens + t + i * 8, s[r][i]);
  }
}

template <int R>
void ScoreF16(const ScoreArgs& a) {
  constexpr int kLanes = kF16Lanes<R>;
  int t = a.begin / 16 * 16;
  for (; a.end - t > (kLanes - 2) * 8; t += kLanes * 8) ScoreF16Tile<R, kLanes>(a, t);
  for (; t < a.end; t += 16) ScoreF16Tile<R, 2>(a, t);
}

template <int R, int kLanes>
KVCELL_INLINE void ValueF16Tile(const ValueArgs& a, int d) {
  __m256 s[R][kLanes];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int i = 0; i < kLanes; ++i) s[r][i] = _mm256_setzero_ps();
  }
  const ptrdiff_t row_bytes = static_cast<ptrdiff_t>(a.dim_padded) * 2;
  DotF16<R, kLanes>(a.codes + d * 2 + a.begin * row_bytes, row_bytes, a.end - a.begin,
                    static_cast<const float*>(a.w) + a.begin, kBlockTokens,
                    a.prefetch + d * 2 * static_cast<ptrdiff_t>(a.end - a.begin), s);
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
    float* out = a.acc + static_cast<ptrdiff_t>(r) * a.acc_stride + d;
#pragma GCC unroll 8
    for (int i = 0; i < kLanes; ++i) {
      _mm256_storeu_ps(out + i * 8, _mm256_add_ps(_mm256_loadu_ps(out + i * 8), s[r][i]));
    }
  }
}

template <int R>
void ValueF16(const ValueArgs& a) {
  constexpr int kLanes = kF16Lanes<R>;
  int d = 0;
  for (; d + kLanes * 8 <= a.dim_padded; d += kLanes * 8) ValueF16Tile<R, kLanes>(a, d);
  for (; d < a.dim_padded; d += 16) ValueF16Tile<R, 2>(a, d);
}

void Adjust(const AdjustArgs& a) {
  const __m256 none = _mm256_set1_ps(-__builtin_inff());
  const __m256 lane = _mm256_setr_ps(0, 1, 2, 3, 4, 5, 6, 7);
  for (int t = 0; t < kBlockTokens; t += 8) {
    __m256 s = _mm256_loadu_ps(a.scores + t);
    if (a.softcap > 0.0f) s = _mm256_mul_ps(Tanh(s), _mm256_set1_ps(a.softcap));
    if (a.has_slope) {
      const __m256 distance = _mm256_add_ps(_mm256_set1_ps(a.first_distance + static_cast<float>(t)), lane);
      s = _mm256_fmadd_ps(distance, _mm256_set1_ps(a.slope), s);
    }
    _mm256_storeu_ps(a.scores + t, _mm256_blendv_ps(none, s, LaneMask(t, a.begin, a.end)));
  }
}

template <int R>
void Softmax(float* scores, float* max, float* sum) {
  __m256 x[R];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) x[r] = _mm256_loadu_ps(scores + r * kBlockTokens);
  for (int t = 8; t < kBlockTokens; t += 8) {
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) x[r] = _mm256_max_ps(x[r], _mm256_loadu_ps(scores + r * kBlockTokens + t));
  }
  StoreRows<R>(max, _mm_max_ps(Reduce<R>(x, MaxOp()), LoadRows<R>(max)));
  __m256 top[R];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
    top[r] = _mm256_broadcast_ss(max + r);
    x[r] = _mm256_setzero_ps();
  }
  for (int t = 0; t < kBlockTokens; t += 8) {
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const __m256 p = Exp2(_mm256_sub_ps(_mm256_loadu_ps(scores + r * kBlockTokens + t), top[r]));
      _mm256_storeu_ps(scores + r * kBlockTokens + t, p);
      x[r] = _mm256_add_ps(x[r], p);
    }
  }
  StoreRows<R>(sum, Reduce<R>(x, AddOp()));
}

// What takes the largest of each row's products to `top`, 0 where it is too small to count, goes to `inverse`; its
// inverse to `w_scale` [rows][n_groups].
template <int R>
KVCELL_INLINE void StoreWeightScales(__m128 inverse, __m128 most, int n_groups, float* inverses, float* w_scale) {
  const __m128 counts = _mm_cmpgt_ps(most, _mm_set1_ps(kMinWeight));
  _mm_store_ps(inverses, _mm_and_ps(counts, inverse));
  alignas(16) float scales[4];
  _mm_store_ps(scales, _mm_and_ps(counts, _mm_div_ps(_mm_set1_ps(1.0f), inverse)));
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) w_scale[r * n_groups] = scales[r];
}

// For each row the largest magnitude of the products p * v_scale of one group: p is not negative, so it is p times the
// scale's magnitude.
template <int R>
KVCELL_INLINE __m128 LargestWeights(const float* p, const float* v_scale) {
  __m256 largest[R];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) largest[r] = _mm256_setzero_ps();
  for (int t = 0; t < kBlockTokens; t += 8) {
    const __m256 scale = LoadMagnitudes(v_scale + t);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      largest[r] = _mm256_max_ps(largest[r], _mm256_mul_ps(scale, _mm256_loadu_ps(p + r * kBlockTokens + t)));
    }
  }
  return Reduce<R>(largest, MaxOp());
}

// The scales of weights of 8 bits: as large as these allow, unless a half of the group would add up to more than fits.
template <int R>
KVCELL_INLINE void WeightScales8(const float* p, const float* v_scale, int32_t half_limit, int n_groups,
                                 float* inverses, float* w_scale) {
  __m256 largest[R], sum[R];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) largest[r] = sum[r] = _mm256_setzero_ps();
  for (int t = 0; t < kBlockTokens; t += 8) {
    const __m256 scale = LoadMagnitudes(v_scale + t);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const __m256 product = _mm256_mul_ps(scale, _mm256_loadu_ps(p + r * kBlockTokens + t));
      largest[r] = _mm256_max_ps(largest[r], product);
      sum[r] = _mm256_add_ps(sum[r], product);
    }
  }
  const __m128 most = Reduce<R>(largest, MaxOp());
  const __m256 ab = _mm256_hadd_ps(sum[0], sum[R > 1 ? 1 : 0]),
               cd = _mm256_hadd_ps(sum[R > 2 ? 2 : 0], sum[R > 3 ? 3 : 0]);
  const __m128 ab4 = _mm_add_ps(_mm256_castps256_ps128(ab), _mm256_extractf128_ps(ab, 1));
  const __m128 cd4 = _mm_add_ps(_mm256_castps256_ps128(cd), _mm256_extractf128_ps(cd, 1));
  const __m128 half = _mm_max_ps(_mm_shuffle_ps(ab4, cd4, 0x88), _mm_shuffle_ps(ab4, cd4, 0xDD));
  // Rounding may add a half to each of the 32 weights of a half.
  const __m128 room = _mm_set1_ps(static_cast<float>(half_limit - kBlockTokens / 4 - 1));
  const __m128 inverse = _mm_min_ps(_mm_div_ps(_mm_set1_ps(kTop8), most), _mm_div_ps(room, half));
  StoreWeightScales<R>(inverse, most, n_groups, inverses, w_scale);
}

// 16 rounded weights as int16, in the order 0-3, 8-11 | 4-7, 12-15 of packs.
KVCELL_INLINE __m256i RoundPair(const float* p, const float* v_scale, __m256 inverse) {
  const __m256 x = _mm256_mul_ps(_mm256_loadu_ps(p), _mm256_loadu_ps(v_scale));
  const __m256 y = _mm256_mul_ps(_mm256_loadu_ps(p + 8), _mm256_loadu_ps(v_scale + 8));
  return _mm256_packs_epi32(_mm256_cvtps_epi32(_mm256_mul_ps(x, inverse)),
                            _mm256_cvtps_epi32(_mm256_mul_ps(y, inverse)));
}

// The two 16-bit sums over the lanes' low and high halves, in every lane.
KVCELL_INLINE __m256i SumLanes16(__m256i x) {
  x = _mm256_add_epi16(x, _mm256_permute4x64_epi64(x, 0x4E));
  x = _mm256_add_epi16(x, _mm256_shuffle_epi32(x, 0x4E));
  return _mm256_add_epi16(x, _mm256_shuffle_epi32(x, 0xB1));
}

template <int R>
void Weights8(const float* p, const float* v_scale, int n_groups, const Levels& levels, int8_t* w, float* w_scale,
              int32_t* w_start) {
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  const __m256i ones8 = _mm256_set1_epi8(1), bias = _mm256_set1_epi16(static_cast<int16_t>(-levels.bias));
  alignas(32) int8_t packed[R][kBlockTokens];
  alignas(16) float inverse[4];
  for (int g = 0; g < n_groups; ++g, v_scale += kBlockTokens) {
    WeightScales8<R>(p, v_scale, levels.half_limit, n_groups, inverse, w_scale + g);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const __m256 factor = _mm256_broadcast_ss(inverse + r);
      const float* row = p + r * kBlockTokens;
      __m256i sum = _mm256_setzero_si256();
#pragma GCC unroll 2
      for (int t = 0; t < kBlockTokens; t += 32) {
        const __m256i bytes = _mm256_packs_epi16(RoundPair(row + t, v_scale + t, factor),
                                                 RoundPair(row + t + 16, v_scale + t + 16, factor));
        sum = _mm256_add_epi16(sum, _mm256_maddubs_epi16(ones8, bytes));
        _mm256_store_si256(reinterpret_cast<__m256i*>(packed[r] + t), _mm256_permutevar8x32_epi32(bytes, order));
      }
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(w_start + (r * n_groups + g) * kCopies),
                          _mm256_mullo_epi16(SumLanes16(sum), bias));
    }
    for (int r = 0; r < R; ++r) {
      int8_t* out = w + static_cast<ptrdiff_t>(r * n_groups + g) * kWeightStride;
#pragma GCC unroll 16
      for (int i = 0; i < kBlockTokens / 4; ++i) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + i * 4 * kCopies), Broadcast4(packed[r] + i * 4));
      }
    }
  }
}

template <int R>
void Weights16(const float* p, const float* v_scale, int n_groups, int16_t* w, float* w_scale) {
  alignas(16) float inverse[4];
  for (int g = 0; g < n_groups; ++g, v_scale += kBlockTokens) {
    const __m128 most = LargestWeights<R>(p, v_scale);
    StoreWeightScales<R>(_mm_div_ps(_mm_set1_ps(32767.0f), most), most, n_groups, inverse, w_scale + g);
    for (int r = 0; r < R; ++r) {
      const __m256 factor = _mm256_broadcast_ss(inverse + r);
      int16_t* out = w + static_cast<ptrdiff_t>(r * n_groups + g) * kBlockTokens;
#pragma GCC unroll 4
      for (int t = 0; t < kBlockTokens; t += 16) {
        const __m256i words = _mm256_permute4x64_epi64(RoundPair(p + r * kBlockTokens + t, v_scale + t, factor), 0xD8);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + t), words);
      }
    }
  }
}

void Scale(float* x, int n, float factor) {
  const __m256 f = _mm256_set1_ps(factor);
  for (int i = 0; i < n; i += 8) _mm256_storeu_ps(x + i, _mm256_mul_ps(_mm256_loadu_ps(x + i), f));
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

static bool Avx2Available() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0 && __builtin_cpu_supports("avx2") &&
         __builtin_cpu_supports("fma");
}

const KernelSet& Avx2Kernels() {
  static const KernelSet kernels = MakeKernels("avx2", Avx2Available, kCopies, true);
  return kernels;
}

}  // namespace kvcell::attention_internal

#endif  // __x86_64__
