// Instantiates the coding arithmetic once plainly and once for AVX2, and picks at first use.
#include "codec/encode_kernels.h"

#include <algorithm>
#include <bit>
#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "codec/f16.h"
#include "codec/hadamard.h"

// The instances are target-attribute regions over one text, not files with flags of their own: nothing outside the
// regions can be compiled for an instruction set that the machine lacks.
namespace kvcell::encode_baseline {
constexpr char kName[] = "baseline";
#if defined(__x86_64__)
#define KVCELL_VECTOR_SSE2
#elif defined(__aarch64__)
#define KVCELL_VECTOR_NEON
#endif
#include "codec/encode_vector.inc"
#undef KVCELL_VECTOR_SSE2
#undef KVCELL_VECTOR_NEON
#include "codec/encode_kernels.inc"
}  // namespace kvcell::encode_baseline

#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,f16c")
#endif
namespace kvcell::encode_avx2 {
constexpr char kName[] = "avx2";
#define KVCELL_VECTOR_AVX2
#include "codec/encode_vector.inc"
#undef KVCELL_VECTOR_AVX2
#include "codec/encode_kernels.inc"
}  // namespace kvcell::encode_avx2
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif

namespace kvcell {
namespace {

#if defined(__x86_64__)
// By CPUID itself, since clang's __builtin_cpu_supports doesn't know F16C.
bool HasAvx2AndF16c() {
  unsigned a, b, c, d;
  return __builtin_cpu_supports("avx2") && __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0;
}
#endif

}  // namespace

const EncodeKernels& BaselineEncodeKernels() { return encode_baseline::kKernels; }

const EncodeKernels* Avx2EncodeKernels() {
#if defined(__x86_64__)
  static const bool has = HasAvx2AndF16c();
  return has ? &encode_avx2::kKernels : nullptr;
#else
  return nullptr;
#endif
}

const EncodeKernels& BestEncodeKernels() {
  const EncodeKernels* avx2 = Avx2EncodeKernels();
  return avx2 != nullptr ? *avx2 : BaselineEncodeKernels();
}

}  // namespace kvcell
