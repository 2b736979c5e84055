// The rotation along a head: an orthonormal block-diagonal Hadamard matrix, its own inverse, for any head size.
#pragma once

#include "codec/f16.h"

namespace kvcell {

// The largest power of two that is at most n (n >= 1): the size of the next block.
KVCELL_INLINE constexpr int HadamardBlock(int n) {
  int size = 1;
  while (size * 2 <= n) size *= 2;
  return size;
}

// 1/sqrt(size) for a power of two.
KVCELL_INLINE constexpr float HadamardScale(int size) {
  float scale = 1.0f;
  for (; size >= 4; size /= 4) scale *= 0.5f;
  return size == 2 ? scale * 0.70710678118654752f : scale;
}

// Rotates x [dim] in place: blocks of descending powers of two (80 = 64 + 16; a trailing block of one value is left as
// it is), Sylvester order, butterflies with strides 1, 2, 4 ... and one multiplication at the end. T is float or a
// vector of floats that are rotated side by side. Elementwise in a fixed order, so the bits don't depend on how it is
// vectorised.
template <typename T>
KVCELL_INLINE void HadamardRotate(T* x, int dim) {
  for (int start = 0; start < dim;) {
    const int size = HadamardBlock(dim - start);
    T* block = x + start;
    for (int stride = 1; stride < size; stride *= 2) {
      for (int i = 0; i < size; i += 2 * stride) {
        for (int j = i; j < i + stride; ++j) {
          const T a = block[j];
          const T b = block[j + stride];
          block[j] = a + b;
          block[j + stride] = a - b;
        }
      }
    }
    const float scale = HadamardScale(size);
    for (int i = 0; i < size; ++i) block[i] = block[i] * scale;
    start += size;
  }
}

}  // namespace kvcell
