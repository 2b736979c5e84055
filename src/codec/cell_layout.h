// Where each byte of a cell lies: the one layout that RAM, the store's files and the kernels share (docs/format.md).
//
// A sealed cell is, in this order, each plane 64-byte aligned:
//
//   header | K codes | K high codes | K scales | K channel offsets | V codes | V high codes | V scales
//
// Value of a side that is attended in place, in the rotated basis where the side rotates:
//   scale[group][token] * level(code) + (k_offset_scale * offset[dim] for a K side with channel offsets)
//
// Codes lie in the order that 8-bit dot products with 32-bit sums (VNNI, maddubs) read them: sixteen 32-bit lanes of
// four values each. Lanes are tokens for K (so q.k of 16 tokens comes out side by side) and dims for V (so p.v of 16
// dims does). What runs along a lane's values is the other index: `along` is dim for K and token for V.
//
//   4 bits  [lane / 16][along / 8][64]:   byte (lane % 16) * 4 + along % 4, low nibble for along % 8 < 4, else high
//   2 bits  [lane / 16][along / 16][64]:  byte (lane % 16) * 4 + along % 4, bits 2 * (along % 16 / 4) and the next
//   1 bit   [lane / 16][along / 8][16]:   bit (lane % 16) * 4 + along % 4 of the first 8 bytes for along % 8 < 4, else
//                                         of the second
//   int8    [lane / 16][along / 4][64]:   byte (lane % 16) * 4 + along % 4, signed
//   f16     as in an exact cell: K transposed, [dk][64]; V as rows, [64][dim_padded]
//
// int2 and int4 have one plane. int3 is a plane of 2 bits and a high one of 1 bit, int5 4 + 1, int6 4 + 2: a kernel's
// inner step differs in how it loads a vector of codes and in nothing else.
//
// dim runs to dim_padded. Padding dims, tokens before first_token and groups of zeros have the code ZeroCode(bits), or
// 0 (int8, f16, and of uniform levels what has scale 0). It stands for no value: a kernel puts zeros on the query's
// side, or leaves such lanes out.
//
// Sides for study (AttendedInPlace is false) lie in study_codec.h's order within the same planes.
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

inline constexpr int kMaxLevel = 32;  // |level| <= 32: two u8 * s8 products then add up in 16 bits without saturating
inline constexpr int kMaxLevels = 64;
inline constexpr int kMaxHeadDim = 1024;

// Bits of a code of an integer side whose codes are looked up as levels; 0 for all others.
constexpr int LevelBits(SideSpec::Type type) {
  switch (type) {
    case SideSpec::Type::kInt2:
      return 2;
    case SideSpec::Type::kInt3:
      return 3;
    case SideSpec::Type::kInt4:
      return 4;
    case SideSpec::Type::kInt5:
      return 5;
    case SideSpec::Type::kInt6:
      return 6;
    default:
      return 0;
  }
}
// How a code is cut: its low bits lie in the plane `codes`, its high bits in `codes_high`.
constexpr int LowBits(int bits) { return bits >= 4 ? 4 : 2; }
constexpr int HighBits(int bits) { return bits - LowBits(bits); }
// Of what holds no value.
constexpr int ZeroCode(int bits) { return 1 << (bits - 1); }

// The integer values of a side's codes, ascending.
// uniform: -2^(b-1) .. 2^(b-1)-1. Lloyd-Max: the Lloyd-Max quantizer of the unit Gaussian (Max 1960, Lloyd 1982),
// scaled so that rounding its levels to integers of at most 6 bits costs the least mean squared error; for 5 bits the
// integers themselves are searched, since no scaling of the ideal levels rounds well. It has no level 0 (symmetric,
// even count). Skewed: reaches further up than down; a negative scale turns it round, so a group has the better of the
// two. Integers searched on groups of 32 and 64 Gaussian values as the encoder codes them.
inline constexpr std::array<int8_t, 4> kLloydMax2 = {-10, -3, 3, 10};
inline constexpr std::array<int8_t, 8> kLloydMax3 = {-26, -16, -9, -3, 3, 9, 16, 26};
inline constexpr std::array<int8_t, 16> kLloydMax4 = {-20, -15, -12, -9, -7, -5, -3, -1, 1, 3, 5, 7, 9, 12, 15, 20};
inline constexpr std::array<int8_t, 32> kLloydMax5 = {-26, -21, -18, -16, -14, -12, -10, -9, -8, -7, -6,
                                                      -5,  -4,  -3,  -2,  -1,  1,   2,   3,  4,  5,  6,
                                                      7,   8,   9,   10,  12,  14,  16,  18, 21, 26};
inline constexpr std::array<int8_t, 8> kSkewed3 = {-16, -10, -5, -1, 3, 7, 12, 20};
inline constexpr std::array<int8_t, 16> kSkewed4 = {-18, -14, -11, -8, -6, -4, -2, 0, 2, 4, 6, 8, 11, 13, 17, 22};

struct LevelTable {
  int count = 0;
  std::array<int8_t, kMaxLevels> level{};
};
constexpr LevelTable MakeLevelTable(int bits, SideSpec::Levels levels) {
  LevelTable table;
  table.count = 1 << bits;
  for (int i = 0; i < table.count; ++i) {
    const auto at = static_cast<size_t>(i);
    if (levels == SideSpec::Levels::kLloydMax) {
      table.level[at] = bits == 2   ? kLloydMax2[at]
                        : bits == 3 ? kLloydMax3[at]
                        : bits == 4 ? kLloydMax4[at]
                                    : kLloydMax5[at];
    } else if (levels == SideSpec::Levels::kSkewed) {
      table.level[at] = bits == 3 ? kSkewed3[at] : kSkewed4[at];
    } else {
      table.level[at] = static_cast<int8_t>(i - table.count / 2);
    }
  }
  return table;
}

// Mean squared rounding error of a value of a group of 64 Gaussian ones, in units of its squared scale (test
// CellCodec.LevelNoiseIsWhatCodingLeaves; groups of 16 to 128 differ by up to a fifth).
constexpr float LevelNoise(int bits, SideSpec::Levels levels) {
  constexpr std::array<float, 4> kLloydNoise = {4.5f, 4.2f, 0.455f, 0.173f};
  constexpr std::array<float, 2> kSkewedNoise = {1.96f, 0.466f};  // of 3 and 4 bits
  constexpr std::array<float, 5> kUniformNoise = {0.128f, 0.097f, 0.083f, 0.082f, 0.077f};
  const auto at = static_cast<size_t>(bits - 2);
  if (levels == SideSpec::Levels::kSkewed) return kSkewedNoise.at(at - 1);
  return levels == SideSpec::Levels::kLloydMax ? kLloydNoise.at(at) : kUniformNoise.at(at);
}

// Byte offsets of one side within its cell; every plane starts 64-byte aligned.
struct SideLayout {
  SideSpec spec;
  int32_t dim = 0;         // head_dim
  int32_t dim_padded = 0;  // a multiple of 16
  int32_t n_groups = 0;    // scales per token along the head (1 where a group covers whole rows); 0 for f16
  int32_t rows_per_scale =
      1;                 // consecutive tokens that share a scale: a power of two, more than 1 only where n_groups is 1
  bool in_place = true;  // AttendedInPlace(spec)
  uint32_t codes = 0;
  uint32_t codes_high = 0;  // bits of a code above its plane's own; no plane where there are none
  uint32_t scales = 0;      // f16 [n_groups][kBlockTokens / rows_per_scale]; no plane for f16
  uint32_t channel_offset =
      0;  // int8 [dim_padded], times the header's k_offset_scale; no plane where the spec has none
  uint32_t end = 0;

  // The basis that values are coded, and by in-place kernels attended, in.
  bool rotated() const { return in_place && spec.rotate; }
};

struct CellLayout {
  SideLayout k;
  SideLayout v;
  uint32_t bytes = 0;  // of the whole cell, a multiple of 64
};

// Of a layer that has the spec's own v: CodecFor first where early layers may differ. kInvalidArgument where a side
// can't be coded at this head_dim (< 1 or > 1024) or the spec contradicts itself.
Result<CellLayout> MakeCellLayout(const CodecSpec& spec, int head_dim_k, int head_dim_v);

// Where the bits of a code lie within a plane of 1, 2 or 4 bits a code.
struct CodePlace {
  uint32_t byte = 0;
  int shift = 0;
};
constexpr CodePlace PlaceOf(int bits, int lane, int along, int n_along) {
  const int in_lane = lane % 16 * 4 + along % 4;
  if (bits == 4) return {uint32_t((lane / 16 * (n_along / 8) + along / 8) * 64 + in_lane), along % 8 / 4 * 4};
  if (bits == 2) return {uint32_t((lane / 16 * (n_along / 16) + along / 16) * 64 + in_lane), along % 16 / 4 * 2};
  return {uint32_t((lane / 16 * (n_along / 8) + along / 8) * 16 + along % 8 / 4 * 8 + in_lane / 8), in_lane % 8};
}
constexpr CodePlace KeyPlace(const SideLayout& side, int bits, int token, int dim) {
  return PlaceOf(bits, token, dim, side.dim_padded);
}
constexpr CodePlace ValuePlace(int bits, int token, int dim) { return PlaceOf(bits, dim, token, kBlockTokens); }
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
