// Kernels in plain C++, for machines without a vector implementation and as the reading aid for the others.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "attention/kernels.h"
#include "codec/f16.h"

namespace kvcell::attention_internal {
namespace {

float LoadHalf(const std::byte* p) {
  uint16_t half;
  std::memcpy(&half, p, sizeof(half));
  return F16ToF32(half);
}

int8_t LoadInt8(const std::byte* p) { return static_cast<int8_t>(*p); }

// 2^x for x <= 0; NaN stays NaN.
float Exp2(float x) {
  if (!(x > kExp2Min)) return std::isnan(x) ? x : 0.0f;
  const float n = std::nearbyint(x);
  const float f = x - n;
  float p = kExp2[5];
  for (int i = 4; i >= 0; --i) p = p * f + kExp2[i];
  return p * std::bit_cast<float>((static_cast<int32_t>(n) + 127) << 23);
}

float Tanh(float x) {
  const float e = Exp2(std::fabs(x) * (-2.0f * kLog2E));
  return std::copysign((1.0f - e) / (1.0f + e), x);
}

float ExpandScales(const std::byte* scales, int n_groups, int rows_per_scale, int begin, int end, float* out) {
  const int n = kBlockTokens / rows_per_scale;
  float largest = 0.0f;
  for (int g = 0; g < n_groups; ++g) {
    for (int t = 0; t < kBlockTokens; ++t) {
      const bool holds = t >= begin && t < end;
      const float scale = holds ? LoadHalf(scales + (g * n + t / rows_per_scale) * 2) : 0.0f;
      out[g * kBlockTokens + t] = scale;
      largest = std::max(largest, std::fabs(scale));
    }
  }
  return largest;
}

template <int R>
void OffsetBias(const std::byte* offset, float scale, int dim_padded, const float* q, int q_stride, float* bias) {
  for (int r = 0; r < R; ++r) {
    float sum = 0.0f;
    for (int c = 0; c < dim_padded; ++c) sum += LoadInt8(offset + c) * q[r * q_stride + c];
    bias[r] = sum * scale;
  }
}

// The code at one lane and place along it: see cell_layout.h.
template <int kBits>
int CodeAt(const std::byte* codes, const std::byte* high, int lane, int along, int n_along) {
  constexpr int kLow = LowBits(kBits), kHigh = HighBits(kBits);
  const CodePlace place = PlaceOf(kLow, lane, along, n_along);
  int code = static_cast<int>(codes[place.byte]) >> place.shift & ((1 << kLow) - 1);
  if (kHigh > 0) {
    const CodePlace at = PlaceOf(kHigh, lane, along, n_along);
    code |= (static_cast<int>(high[at.byte]) >> at.shift & ((1 << kHigh) - 1)) << kLow;
  }
  return code;
}

template <int kBits, int R>
void ScoreLevels(const ScoreArgs& a) {
  const int8_t* q = static_cast<const int8_t*>(a.q);
  for (int t = 0; t < kBlockTokens; ++t) {
    float s[R];
    for (int r = 0; r < R; ++r) s[r] = a.bias[r];
    for (int g = 0; g < a.n_groups; ++g) {
      const int end = std::min((g + 1) * a.group, a.dim_padded);
      int32_t acc[R];
      for (int r = 0; r < R; ++r) acc[r] = a.q_start[r * a.scale_stride + g];
      for (int d = g * a.group; d < end; ++d) {
        const int level = a.levels[CodeAt<kBits>(a.codes, a.codes_high, t, d, a.dim_padded)];
        for (int r = 0; r < R; ++r) acc[r] += level * q[r * a.q_stride + d];
      }
      const float scale = a.k_scale[g * kBlockTokens + t];
      for (int r = 0; r < R; ++r) {
        const int at = r * a.scale_stride + g;
        s[r] += (static_cast<float>(acc[r]) + a.q_noise[at] * scale) * (scale * a.q_scale[at]);
      }
    }
    for (int r = 0; r < R; ++r) a.scores[r * kBlockTokens + t] = s[r];
  }
}

template <int R>
void ScoreInt8(const ScoreArgs& a) {
  const int16_t* q = static_cast<const int16_t*>(a.q);
  const int n_chunks = a.dim_padded / 4;
  for (int t = 0; t < kBlockTokens; ++t) {
    float s[R];
    for (int r = 0; r < R; ++r) s[r] = a.bias[r];
    for (int g = 0; g < a.n_groups; ++g) {
      const int end = std::min((g + 1) * a.group, a.dim_padded);
      int32_t acc[R] = {};
      for (int d = g * a.group; d < end; ++d) {
        const int code = LoadInt8(a.codes + (t / 16 * n_chunks + d / 4) * 64 + t % 16 * 4 + d % 4);
        for (int r = 0; r < R; ++r) acc[r] += code * q[r * a.q_stride + d];
      }
      const float scale = a.k_scale[g * kBlockTokens + t];
      for (int r = 0; r < R; ++r) s[r] += static_cast<float>(acc[r]) * (scale * a.q_scale[r * a.scale_stride + g]);
    }
    for (int r = 0; r < R; ++r) a.scores[r * kBlockTokens + t] = s[r];
  }
}

template <int R>
void ScoreF16(const ScoreArgs& a) {
  const float* q = static_cast<const float*>(a.q);
  for (int t = a.begin; t < a.end; ++t) {
    float s[R];
    for (int r = 0; r < R; ++r) s[r] = a.bias[r];
    for (int d = 0; d < a.dim; ++d) {
      const float k = LoadHalf(a.codes + (d * a.n_tokens + t) * 2);
      for (int r = 0; r < R; ++r) s[r] += k * q[r * a.q_stride + d];
    }
    for (int r = 0; r < R; ++r) a.scores[r * kBlockTokens + t] = s[r];
  }
}

template <int kBits, int R>
void ValueLevels(const ValueArgs& a) {
  const int8_t* w = static_cast<const int8_t*>(a.w);
  for (int d = 0; d < a.dim_padded; ++d) {
    const int g = d / a.group;
    int32_t acc[R];
    for (int r = 0; r < R; ++r) acc[r] = a.w_start[r * a.n_groups + g];
    for (int t = 0; t < kBlockTokens; ++t) {
      const int level = a.levels[CodeAt<kBits>(a.codes, a.codes_high, d, t, kBlockTokens)];
      for (int r = 0; r < R; ++r) acc[r] += level * w[(r * a.n_groups + g) * kWeightStride + t];
    }
    for (int r = 0; r < R; ++r) {
      a.acc[r * a.acc_stride + d] += static_cast<float>(acc[r]) * a.w_scale[r * a.n_groups + g];
    }
  }
}

template <int R>
void ValueInt8(const ValueArgs& a) {
  const int16_t* w = static_cast<const int16_t*>(a.w);
  for (int d = 0; d < a.dim_padded; ++d) {
    const int g = d / a.group;
    int32_t acc[R] = {};
    for (int t = 0; t < kBlockTokens; ++t) {
      const int code = LoadInt8(a.codes + (d / 16 * (kBlockTokens / 4) + t / 4) * 64 + d % 16 * 4 + t % 4);
      for (int r = 0; r < R; ++r) acc[r] += code * w[(r * a.n_groups + g) * kBlockTokens + t];
    }
    for (int r = 0; r < R; ++r) {
      a.acc[r * a.acc_stride + d] += static_cast<float>(acc[r]) * a.w_scale[r * a.n_groups + g];
    }
  }
}

template <int R>
void ValueF16(const ValueArgs& a) {
  const float* w = static_cast<const float*>(a.w);
  for (int d = 0; d < a.dim_padded; ++d) {
    float acc[R] = {};
    for (int t = a.begin; t < a.end; ++t) {
      const float v = LoadHalf(a.codes + (t * a.dim_padded + d) * 2);
      for (int r = 0; r < R; ++r) acc[r] += w[r * kBlockTokens + t] * v;
    }
    for (int r = 0; r < R; ++r) a.acc[r * a.acc_stride + d] += acc[r];
  }
}

void Adjust(const AdjustArgs& a) {
  for (int t = 0; t < kBlockTokens; ++t) {
    float s = a.scores[t];
    if (a.softcap > 0.0f) s = Tanh(s) * a.softcap;
    if (a.has_slope) s += (a.first_distance + static_cast<float>(t)) * a.slope;
    a.scores[t] = t >= a.begin && t < a.end ? s : -std::numeric_limits<float>::infinity();
  }
}

template <int R>
void Softmax(float* scores, float* max, float* sum) {
  for (int r = 0; r < R; ++r, scores += kBlockTokens) {
    for (int t = 0; t < kBlockTokens; ++t) max[r] = std::max(max[r], scores[t]);
    sum[r] = 0.0f;
    for (int t = 0; t < kBlockTokens; ++t) {
      scores[t] = Exp2(scores[t] - max[r]);
      sum[r] += scores[t];
    }
  }
}

// The factor that takes the largest magnitude of the products p * v_scale of a group to `top`, 0 where they are too
// small to count.
float InverseScale(const float* p, const float* v_scale, float top, float* w_scale) {
  float largest = 0.0f;
  for (int t = 0; t < kBlockTokens; ++t) largest = std::max(largest, std::fabs(p[t] * v_scale[t]));
  const bool counts = largest > kMinWeight;
  *w_scale = counts ? largest / top : 0.0f;
  return counts ? top / largest : 0.0f;
}

// A NaN becomes 0 here: the sum of weights tells it.
template <typename Weight>
Weight RoundWeight(float x) {
  constexpr float kMost = std::numeric_limits<Weight>::max();
  return !std::isnan(x) ? static_cast<Weight>(std::nearbyint(std::clamp(x, -kMost, kMost))) : Weight{0};
}

template <int R>
void Weights8(const float* p, const float* v_scale, int n_groups, const Levels& levels, int8_t* w, float* w_scale,
              int32_t* w_start) {
  for (int r = 0; r < R; ++r, p += kBlockTokens) {
    for (int g = 0; g < n_groups; ++g, w += kWeightStride) {
      const float* scale = v_scale + g * kBlockTokens;
      const float inverse = InverseScale(p, scale, static_cast<float>(kTop8), w_scale++);
      int32_t sum = 0;
      for (int t = 0; t < kBlockTokens; ++t) {
        w[t] = RoundWeight<int8_t>(p[t] * scale[t] * inverse);
        sum += w[t];
      }
      *w_start++ = -levels.bias * sum;
    }
  }
}

template <int R>
void Weights16(const float* p, const float* v_scale, int n_groups, int16_t* w, float* w_scale) {
  for (int r = 0; r < R; ++r, p += kBlockTokens) {
    for (int g = 0; g < n_groups; ++g, w += kBlockTokens) {
      const float* scale = v_scale + g * kBlockTokens;
      const float inverse = InverseScale(p, scale, 32767.0f, w_scale++);
      for (int t = 0; t < kBlockTokens; ++t) w[t] = RoundWeight<int16_t>(p[t] * scale[t] * inverse);
    }
  }
}

void Scale(float* x, int n, float factor) {
  for (int i = 0; i < n; ++i) x[i] *= factor;
}

bool Available() { return true; }

}  // namespace
}  // namespace kvcell::attention_internal

#include "attention/kernel_table.inc"

namespace kvcell::attention_internal {

const KernelSet& ScalarKernels() {
  static const KernelSet kernels = MakeKernels("scalar", Available, 1, false);
  return kernels;
}

}  // namespace kvcell::attention_internal
