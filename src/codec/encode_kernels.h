// The arithmetic of coding a side, one instance per instruction set; all instances give the same bytes.
#pragma once

#include <cstddef>
#include <cstdint>

#include "codec/cell_codec.h"
#include "codec/cell_layout.h"

namespace kvcell {

// One instance of encode_kernels.inc. `codes`, `high`, `scales` and `offsets` are the planes of `side`, which is
// attended in place, within the cell that is being written, zeroed before; `exact` is the exact cell's plane of that
// side, [dim][64] for K and [64][dim_padded] for V.
struct EncodeKernels {
  const char* name;
  // Returns the scale of the channel offsets, 0 where the side has none.
  float (*encode_k)(const SideLayout& side, const uint16_t* exact, int first_token, uint8_t* codes, uint8_t* high,
                    uint16_t* scales, int8_t* offsets);
  void (*encode_v)(const SideLayout& side, const uint16_t* exact, int first_token, uint8_t* codes, uint8_t* high,
                   uint16_t* scales);
  // Rounds n values to f16, those that f16 can't hold saturated or zeroed and counted.
  void (*round_to_f16)(const float* values, int n, uint16_t* out, SanitizeCounts* counts);
  // Rotates x [dim] in place: HadamardRotate's bits.
  void (*rotate)(float* x, int dim);
};

const EncodeKernels& BaselineEncodeKernels();
// Null where this machine or build has no AVX2.
const EncodeKernels* Avx2EncodeKernels();
// The best that this machine runs.
const EncodeKernels& BestEncodeKernels();

// EncodeCell with chosen kernels.
void EncodeCellWith(const EncodeKernels& kernels, const CellLayout& layout, const ExactLayout& exact_layout,
                    const std::byte* exact, int first_token, std::byte* out);

}  // namespace kvcell
