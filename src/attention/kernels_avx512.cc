// The instance of kernels_avx512.inc for machines without VNNI.
#if defined(__x86_64__)

#include <immintrin.h>

#include <cstring>

#include "attention/kernels.h"
#include "codec/f16.h"

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl"))), \
                             apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")
// The compiler's own header passes undefined registers (GCC bug 105593).
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif

#define KVCELL_VNNI 0
#include "attention/kernels_avx512.inc"

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#include "attention/kernel_table.inc"

namespace kvcell::attention_internal {

static bool Avx512Available() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

const KernelSet& Avx512Kernels() {
  static const KernelSet kernels = MakeKernels("avx512", Avx512Available, 1, true);
  return kernels;
}

}  // namespace kvcell::attention_internal

#endif  // __x86_64__
