// IEEE half precision in portable integer code: the same bits as F16C on every machine, with FTZ/DAZ on or off, and
// written branch-free so that a loop over it vectorises.
#pragma once

#include <bit>
#include <cstdint>

namespace kvcell {

inline constexpr float kF16Max = 65504.0f;
inline constexpr float kF16Min = 0x1p-24f;  // the smallest positive (subnormal) value

// Always inlined, so that a caller inside a target-attribute region gets that region's instructions.
#define KVCELL_INLINE [[gnu::always_inline]] inline

// Exact for every f16, infinities and NaN payloads included. Subnormals go through a subtraction of normal numbers,
// never through an f32 subnormal, which DAZ would read as zero.
KVCELL_INLINE float F16ToF32(uint16_t half) {
  const uint32_t shifted = uint32_t(half & 0x7fffu) << 13;
  const uint32_t exponent = shifted & 0x0f800000u;
  const uint32_t normal = shifted + (112u << 23) + (exponent == 0x0f800000u ? (112u << 23) : 0u);
  const float subnormal = std::bit_cast<float>(shifted + (113u << 23)) - 0x1p-14f;
  const uint32_t magnitude = exponent == 0 ? std::bit_cast<uint32_t>(subnormal) : normal;
  return std::bit_cast<float>(magnitude | (uint32_t(half & 0x8000u) << 16));
}

// Rounds to nearest, ties to even; beyond the range becomes infinite and a NaN stays a quiet NaN, as in hardware.
KVCELL_INLINE uint16_t F32ToF16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t magnitude = bits & 0x7fffffffu;
  // Normal result: rebias the exponent and add half of the last place, less one where the kept part is even.
  const uint32_t rounded = (magnitude - (112u << 23) + 0x0fffu + ((magnitude >> 13) & 1u)) >> 13;
  // Subnormal result: adding 0.5 puts the f16 unit in the last place of the f32 sum, so the addition itself rounds.
  const uint32_t subnormal = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + 0.5f) - (126u << 23);
  const uint32_t special = magnitude > 0x7f800000u ? 0x7e00u | ((magnitude >> 13) & 0x1ffu) : 0x7c00u;
  uint32_t half = magnitude < (113u << 23) ? subnormal : rounded;
  half = magnitude >= 0x47800000u ? special : half;
  return uint16_t(half | ((bits >> 16) & 0x8000u));
}

}  // namespace kvcell
