// Codec specs: how the values of sealed cells become bytes, K and V apart.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "kvcell/status.h"

namespace kvcell {

// How one side (K or V) of a cell is coded.
struct SideSpec {
  enum class Type : uint8_t { kF16 = 1, kInt8 = 2, kInt4 = 3 };
  enum class Levels : uint8_t { kUniform = 0, kLloydMax = 1 };

  Type type = Type::kF16;
  Levels levels = Levels::kUniform;  // codebook of an int4 side; uniform is symmetric, -8..7 times the scale
  bool rotate = false;               // Hadamard rotation along the head before coding (QuaRot, arXiv 2404.00456)
  bool channel_offset = false;       // the mean of each channel over the block is taken off and stored (K biases)
  uint16_t group = 64;  // values per scale: 32, 64 or 128 along the head; a group larger than the head covers
                        // rows of consecutive tokens, never another head; the last group may be short

  bool operator==(const SideSpec&) const = default;
};

// A whole recipe. `name` is what the user asked for (a preset such as "i4", or the spec's own text).
struct CodecSpec {
  SideSpec k;
  SideSpec v;
  std::string name;

  bool operator==(const CodecSpec& other) const { return k == other.k && v == other.v; }
};

// Reads a preset (`f16`, `i8`, `i4`) or `k=SIDE,v=SIDE`, SIDE being a codec's name followed by `:` parts:
// `f16`, `int8:g64`, `int4:g64:lloyd:rot:off`, `int4:g128:sym`. An unknown word is kInvalidArgument, and the message
// names it and what is allowed.
Result<CodecSpec> ParseCodec(std::string_view text);

// The canonical `k=...,v=...` text: ParseCodec(CodecText(s)) == s. It is part of a stored cell's identity.
std::string CodecText(const CodecSpec& spec);

struct CodecPreset {
  std::string name;
  std::string idea;  // one line for people
  CodecSpec spec;
};
const std::vector<CodecPreset>& CodecPresets();

// Bits per element of a sealed cell, all bytes counted (codes, scales, offsets, header with checksum).
Result<double> CodecBitsPerElement(const CodecSpec& spec, int head_dim_k, int head_dim_v);

}  // namespace kvcell
