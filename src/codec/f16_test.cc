// Half precision: every f16, and the roundings of f32 to it, against the hardware and with subnormals flushed.
#include "codec/f16.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <vector>

#include "codec/encode_kernels.h"
#include "codec/flush_mode_test.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace kvcell {
namespace {

bool IsNan(uint16_t half) { return (half & 0x7fff) > 0x7c00; }

TEST(F16, EveryValueIsExact) {
  for (uint32_t h = 0; h < 0x10000; ++h) {
    const auto half = uint16_t(h);
    const int exponent = (half >> 10) & 31;
    const int mantissa = half & 1023;
    const double sign = half & 0x8000 ? -1.0 : 1.0;
    const double magnitude = exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(1024 + mantissa, exponent - 25);
    if (exponent < 31) {
      ASSERT_EQ(double(F16ToF32(half)), sign * magnitude) << h;
      ASSERT_EQ(std::signbit(F16ToF32(half)), sign < 0) << h;
    } else {
      ASSERT_EQ(std::isinf(F16ToF32(half)), mantissa == 0) << h;
      ASSERT_EQ(std::isnan(F16ToF32(half)), mantissa != 0) << h;
    }
  }
}

TEST(F16, RoundTripsEveryValueWithSubnormalsFlushedOrNot) {
  for (const bool flush : {false, true}) {
    const FlushMode mode(flush);
    for (uint32_t h = 0; h < 0x10000; ++h) {
      if (IsNan(uint16_t(h))) continue;
      ASSERT_EQ(F32ToF16(F16ToF32(uint16_t(h))), h);
    }
  }
}

TEST(F16, RoundsToNearestEven) {
  EXPECT_EQ(F32ToF16(65504.0f), 0x7bff);
  EXPECT_EQ(F32ToF16(65519.996f), 0x7bff);
  EXPECT_EQ(F32ToF16(65520.0f), 0x7c00);
  EXPECT_EQ(F32ToF16(1.0f + 0x1p-11f), 0x3c00);      // tie, down to even
  EXPECT_EQ(F32ToF16(1.0f + 3 * 0x1p-11f), 0x3c02);  // tie, up to even
  EXPECT_EQ(F32ToF16(0x1p-25f), 0x0000);             // tie between 0 and the smallest
  EXPECT_EQ(F32ToF16(std::nextafter(0x1p-25f, 1.0f)), 0x0001);
  EXPECT_EQ(F32ToF16(3 * 0x1p-25f), 0x0002);
  EXPECT_EQ(F32ToF16(-0.0f), 0x8000);
  EXPECT_EQ(F32ToF16(1e-41f), 0x0000);
  EXPECT_TRUE(IsNan(F32ToF16(std::nanf(""))));
}

#if defined(__x86_64__)
[[gnu::target("f16c")]] uint16_t HardwareRound(float value) {
  return uint16_t(_mm_extract_epi16(_mm_cvtps_ph(_mm_set_ss(value), _MM_FROUND_TO_NEAREST_INT), 0));
}

TEST(F16, AgreesWithHardware) {
  if (Avx2EncodeKernels() == nullptr) GTEST_SKIP() << "no F16C here";
  std::mt19937 random(7);
  for (int i = 0; i < 2'000'000; ++i) {
    // Every second one within the range where f16 has values, which few random bit patterns are.
    uint32_t bits = uint32_t(random());
    if (i % 2 == 0) bits = (bits & 0x80ffffffu) | ((100u + (bits >> 24) % 44u) << 23);
    const float value = std::bit_cast<float>(bits);
    if (std::isnan(value)) continue;
    ASSERT_EQ(F32ToF16(value), HardwareRound(value)) << bits;
  }
}
#endif

}  // namespace
}  // namespace kvcell
