// The codecs that exist to be compared with: coded and decoded plainly, value by value, in one order on every machine.
//
// Planes of such a side (cell_layout.h places them):
//   codes    [64] rows of ceil(dim * bits / 8) bytes: code d takes bits [d * bits, (d + 1) * bits), lowest first; the
//   rest
//            of the last byte is zero
//   scales   f16: scale [64][n_groups], or [64 / group][dim] where groups run along tokens; then, with asymmetric
//   levels,
//            as many zero points; then, with `two`, [dim] factors of the channels. tq: norm [64]; then, with qjl, the
//            residuals' norms [64]. f32, bf16 and fp8 have none
//   channel offsets as in a side that is attended in place
#pragma once

#include <cstddef>
#include <cstdint>

#include "codec/cell_layout.h"

namespace kvcell {

struct StudyPlanes {
  int bits = 0;              // of one value's code
  uint32_t row_bytes = 0;    // of one token's codes
  uint32_t code_bytes = 0;   // of all
  uint32_t n_scales = 0;     // f16 values of the first kind: scales, norms
  uint32_t scale_bytes = 0;  // of all kinds
};
StudyPlanes MakeStudyPlanes(const SideSpec& spec, int dim);

// Codes a side's exact plane ([dim][64] for K, [64][dim_padded] for V; infinities and NaN read as 0) into its planes
// within `cell`, zeroed before. Returns the scale of the channel offsets, 0 where the side has none. Any input is
// defined; the bytes depend on values alone.
float EncodeStudySide(const SideLayout& side, bool is_key, const uint16_t* exact, int first_token, std::byte* cell);

// Decodes tokens [begin, end) to out [end - begin][dim], in the original basis; zeros before first_token.
void DecodeStudyTokens(const SideLayout& side, const std::byte* cell, int first_token, float offset_scale, int begin,
                       int end, float* out);

}  // namespace kvcell
