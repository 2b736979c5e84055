// Where each byte of a cell lies: the one layout that RAM, the store's files and the kernels share (docs/format.md).
//
// A sealed cell is, in this order, each plane 64-byte aligned:
//
//   header | K codes | K scales | K channel offsets | V codes | V scales
//
// Value of a coded side, in the rotated basis where the side rotates:
//   scale[group][token] * level(code) + (k_offset_scale * offset[dim] for a K side with channel offsets)
//
// Codes lie in the order that 8-bit dot products with 32-bit sums (VNNI, maddubs) read them: sixteen 32-bit lanes of
// four values each. Lanes are tokens for K (so q.k of 16 tokens comes out side by side) and dims for V (so p.v of 16
// dims does).
//
//   int4 K [token / 16][dim / 8][64]:  byte (token % 16) * 4 + dim % 4,   low nibble for dim % 8 < 4, else high
//   int4 V [dim / 16][token / 8][64]:  byte (dim % 16) * 4 + token % 4,   low nibble for token % 8 < 4, else high
//   int8 K [token / 16][dim / 4][64]:  byte (token % 16) * 4 + dim % 4,   signed
//   int8 V [dim / 16][token / 4][64]:  byte (dim % 16) * 4 + token % 4,   signed
//   f16    as in an exact cell: K transposed, [dk][64]; V as rows, [64][dim_padded]
//
// dim runs to dim_padded. Padding dims, and tokens before first_token, have the code kZeroCode (int4) or 0 (int8, f16):
// a level that is 0 or the smallest one, so a kernel must put zeros on the query's side, or leave such lanes out.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "kvcell/codec.h"
#include "kvcell/geometry.h"
#include "kvcell/status.h"

namespace kvcell {

// The first 64 bytes of every sealed cell. Little-endian. `checksum` is XXH3-64 over the cell's other bytes (header
// fields before it, and everything after the header), so it covers payload, key, place and generation.
struct CellHeader {
  uint32_t magic;    // kCellMagic
  uint16_t version;  // kCellVersion
  uint16_t layer;
  uint16_t head;          // KV head
  uint16_t first_token;   // tokens [0, first_token) hold no codes: they are sinks, kept exactly elsewhere
  uint32_t bytes;         // of the whole cell, header included
  uint8_t block_key[16];  // the block's key (digest of identity, parent block and token ids); zero until it has one
  uint64_t position;      // of the block's first token
  uint64_t generation;    // of the write that made these bytes; zero until stored
  float k_offset_scale;   // multiplies K's int8 channel offsets; 0 where the side has none
  uint32_t reserved;      // zero
  uint64_t checksum;      // zero until sealed with a key
};
static_assert(sizeof(CellHeader) == 64);
static_assert(offsetof(CellHeader, block_key) == 16 && offsetof(CellHeader, position) == 32);
static_assert(offsetof(CellHeader, k_offset_scale) == 48 && offsetof(CellHeader, checksum) == 56);
inline constexpr uint32_t kCellMagic = 0x4c43564b;  // "KVCL"
inline constexpr uint16_t kCellVersion = 1;

inline constexpr int kLevelCount = 16;
inline constexpr int kMaxLevel = 31;  // |level| <= 31: AVX2 adds two u8 * s8 products in 16 bits without saturating
inline constexpr int kZeroCode = 8;   // of padding and of groups whose scale is 0
inline constexpr int kMaxHeadDim = 1024;

// The integer values of an int4 side's codes 0..15, ascending.
// uniform: -8..7. Lloyd-Max: the Lloyd-Max quantizer of the unit Gaussian (Max 1960, Lloyd 1982), scaled so that
// rounding its levels to integers of at most 6 bits costs the least mean squared error. It has no level 0 (symmetric,
// even count).
inline constexpr std::array<int8_t, kLevelCount> kUniformLevels = {-8, -7, -6, -5, -4, -3, -2, -1,
                                                                   0,  1,  2,  3,  4,  5,  6,  7};
inline constexpr std::array<int8_t, kLevelCount> kLloydMaxLevels = {-20, -15, -12, -9, -7, -5, -3, -1,
                                                                    1,   3,   5,   7,  9,  12, 15, 20};
constexpr const std::array<int8_t, kLevelCount>& LevelTable(SideSpec::Levels levels) {
  return levels == SideSpec::Levels::kLloydMax ? kLloydMaxLevels : kUniformLevels;
}

// Byte offsets of one side within its cell; every plane starts 64-byte aligned.
struct SideLayout {
  SideSpec spec;
  int32_t dim = 0;         // head_dim
  int32_t dim_padded = 0;  // a multiple of 16
  int32_t n_groups = 0;    // scales per token along the head (1 where a group covers whole rows); 0 for f16
  int32_t rows_per_scale =
      1;  // consecutive tokens that share a scale: a power of two, more than 1 only where n_groups is 1
  uint32_t codes = 0;
  uint32_t scales = 0;  // f16 [n_groups][kBlockTokens / rows_per_scale]; no plane for f16
  uint32_t channel_offset =
      0;  // int8 [dim_padded], times the header's k_offset_scale; no plane where the spec has none
  uint32_t end = 0;
};

struct CellLayout {
  SideLayout k;
  SideLayout v;
  uint32_t bytes = 0;  // of the whole cell, a multiple of 64
};

// kInvalidArgument where a side can't be coded at this head_dim (< 1 or > 1024) or the spec contradicts itself.
Result<CellLayout> MakeCellLayout(const CodecSpec& spec, int head_dim_k, int head_dim_v);

// Where a code lies within its plane; for int4, `high` tells the nibble.
struct CodePlace {
  uint32_t byte = 0;
  bool high = false;
};
constexpr CodePlace Int4KPlace(const SideLayout& side, int token, int dim) {
  const int tile = (token / 16) * (side.dim_padded / 8) + dim / 8;
  return {uint32_t(tile * 64 + (token % 16) * 4 + dim % 4), dim % 8 >= 4};
}
constexpr CodePlace Int4VPlace(const SideLayout&, int token, int dim) {
  const int tile = (dim / 16) * (kBlockTokens / 8) + token / 8;
  return {uint32_t(tile * 64 + (dim % 16) * 4 + token % 4), token % 8 >= 4};
}
constexpr uint32_t Int8KByte(const SideLayout& side, int token, int dim) {
  return uint32_t(((token / 16) * (side.dim_padded / 4) + dim / 4) * 64 + (token % 16) * 4 + dim % 4);
}
constexpr uint32_t Int8VByte(const SideLayout&, int token, int dim) {
  return uint32_t(((dim / 16) * (kBlockTokens / 4) + token / 4) * 64 + (dim % 16) * 4 + token % 4);
}
// Index into the scale plane, in f16 values.
constexpr uint32_t ScaleIndex(const SideLayout& side, int token, int dim) {
  const int group = side.n_groups == 1 ? 0 : dim / side.spec.group;
  return uint32_t(group * (kBlockTokens / side.rows_per_scale) + token / side.rows_per_scale);
}

// An exact (f16) cell: K transposed, [dk][n_tokens], so that tokens lie along the vector lanes; V as rows,
// [n_tokens][dv]. Open blocks (n_tokens = 64), sinks (16) and replicas have it; it carries no header.
struct ExactLayout {
  int32_t n_tokens = 0;  // a multiple of 16
  int32_t dk = 0;
  int32_t dv = 0;  // rows of V are padded to a multiple of 16: dv_padded
  int32_t dv_padded = 0;
  uint32_t v = 0;      // byte offset of V, 64-byte aligned
  uint32_t bytes = 0;  // a multiple of 64
};
ExactLayout MakeExactLayout(int n_tokens, int head_dim_k, int head_dim_v);

}  // namespace kvcell
