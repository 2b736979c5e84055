// Codec specs: how the values of sealed cells become bytes, K and V apart.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "kvcell/status.h"

namespace kvcell {

// How one side (K or V) of a cell is coded.
//
// Attended in place, by kernels that multiply the codes as they lie: f16, int8, and int2 to int6 with `sym`, `lloyd` or
// `skew` levels, groups along the head. All the rest is for study: attention decodes sixteen tokens at a time to f32
// and attends those, which is slower (AttendedInPlace tells; `kvcell info --codecs` and stats say so).
struct SideSpec {
  enum class Type : uint8_t {
    kF16 = 1,
    kInt8 = 2,
    kInt4 = 3,
    kInt2 = 4,
    kInt3 = 5,
    kInt5 = 6,
    kInt6 = 7,
    kF32 = 16,      // f16 values as f32: what 32 bits would give
    kBf16 = 17,     // nearest even
    kFp8E4M3 = 18,  // OCP FP8 (arXiv 2209.05433), saturating at 448, no scale
    kFp8E5M2 = 19,  // the same, saturating at 57344
    kNf4 = 20,      // NormalFloat of QLoRA (arXiv 2305.14314), absmax scale per group
    kFp4 = 21,      // E2M1 of the OCP microscaling formats, f16 scale per group
    kTq2 = 22,      // TurboQuant (arXiv 2504.19874): random signs, Hadamard, Lloyd-Max on the unit vector, stored norm
    kTq3 = 23,
    kTq4 = 24,
  };
  // Levels of an integer side. Uniform: symmetric, -2^(b-1) .. 2^(b-1)-1 times the scale. Lloyd-Max: of the Gaussian.
  // Asymmetric: 0 .. 2^b-1 times the scale plus a zero point (KIVI, arXiv 2402.02750). Skewed: a table that reaches
  // further on one side, which the sign of the group's scale chooses.
  enum class Levels : uint8_t { kUniform = 0, kLloydMax = 1, kAsymmetric = 2, kSkewed = 3 };

  Type type = Type::kF16;
  Levels levels = Levels::kUniform;
  bool rotate = false;          // Hadamard rotation along the head before coding (QuaRot, arXiv 2404.00456)
  bool channel_offset = false;  // the mean of each channel over the block is taken off and stored (K biases)
  bool along_tokens = false;    // a group is `group` tokens of one channel (KIVI's K), not `group` channels of a token
  bool plain_scale = false;     // scale from the group's range alone: neither searched nor refitted
  bool clip = false;            // values beyond the 99.9 % quantile of the cell's magnitudes are moved to it first
  bool two_axis = false;        // channels are divided by their root mean square first, which is stored (as KVarN does)
  bool qjl = false;             // tq only: the last bit codes the residual's sign projections (QJL, arXiv 2406.03482)
  uint16_t group = 64;          // values per scale: 16, 32, 64 or 128 along the head (16, 32 or 64 along tokens). In
                        // place, a group larger than the head covers rows of consecutive tokens, never another head;
                        // the last group may be short.

  bool operator==(const SideSpec&) const = default;
};

// True where the kernels multiply the side's codes as they lie.
bool AttendedInPlace(const SideSpec& side);

// "f16", "int4", "fp8e4m3": the side's type as specs name it.
std::string_view TypeName(SideSpec::Type type);

// A whole recipe. `name` is what the user asked for (a preset such as "i4", or the spec's own text).
struct CodecSpec {
  SideSpec k;
  SideSpec v;
  std::string name;
  // V of the first quarter of a model's layers (rounded down), where it differs: what is lost there goes through all
  // the layers behind it. CodecFor (kvcell/codec_plan.h) tells what a layer has.
  std::optional<SideSpec> early_v = std::nullopt;

  bool operator==(const CodecSpec& other) const {
    return k == other.k && v == other.v && early_v.value_or(v) == other.early_v.value_or(other.v);
  }
};

// Reads a preset (`f16`, `i8`, `i5`, `i4`, `i43`, `i3`) or `k=SIDE,v=SIDE`, with `,early-v=SIDE` behind it where the
// first layers differ, SIDE being a codec's name followed by `:` parts: `f16`, `int8:g64`, `int4:g64:lloyd:rot:off`,
// `int2:t32:asym`, `tq4`. An unknown word is kInvalidArgument, and the message names it and what is allowed.
Result<CodecSpec> ParseCodec(std::string_view text);

// The canonical `k=...,v=...` text: ParseCodec(CodecText(s)) == s. It is part of a stored cell's identity.
std::string CodecText(const CodecSpec& spec);

struct CodecPreset {
  std::string name;
  std::string idea;  // one line for people
  CodecSpec spec;
};
const std::vector<CodecPreset>& CodecPresets();

// The single codecs by their plain names, each with one line for people: what `kvcell info --codecs` lists below the
// presets.
struct CodecFamily {
  std::string name;   // "int4", "fp8e4m3"
  std::string parts;  // that it takes, "" where none
  std::string idea;
  std::string example;  // a whole spec
};
const std::vector<CodecFamily>& CodecFamilies();

// True where every layer's cells are attended as they lie.
bool AttendedInPlace(const CodecSpec& spec);

// Bits per element of a sealed cell, all bytes counted (codes, scales, offsets, header with checksum). With `early_v`
// the mean over a model of 4n layers; one of another number has less of `early_v`.
Result<double> CodecBitsPerElement(const CodecSpec& spec, int head_dim_k, int head_dim_v);

}  // namespace kvcell
