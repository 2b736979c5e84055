// Values to bytes and back: writes exact cells token by token and codes a full one into its sealed bytes.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "codec/cell_layout.h"

namespace kvcell {

// How many values appends had to change because no f16 can hold them (field cases A4, A8).
struct SanitizeCounts {
  uint64_t saturated = 0;   // beyond +-65504
  uint64_t not_finite = 0;  // NaN or infinite; stored as 0
};

// Rounds k [dk] and v [dv] to f16 (nearest even) into token `t` of an exact cell. Values that f16 can't hold are
// saturated or zeroed and counted; neighbours are never affected.
void WriteExactToken(const ExactLayout& layout, std::byte* cell, int t, const float* k, const float* v,
                     SanitizeCounts* counts);

// Copies tokens [from, to) of one exact cell to another whose token count may differ, starting at token `at`.
void CopyExactTokens(const ExactLayout& from_layout, const std::byte* from, int begin, int end,
                     const ExactLayout& to_layout, std::byte* to, int at);

// Codes all 64 tokens of an exact cell (n_tokens = 64) into `out` [layout.bytes], header included but for key,
// generation and checksum, which are zero (SealHeader sets them). Tokens [0, first_token) take no part and code as
// zero. The bytes depend on the values alone: not on instruction set, thread or how they were appended. Never fails;
// any f16 input is defined.
void EncodeCell(const CellLayout& layout, const ExactLayout& exact_layout, const std::byte* exact, int first_token,
                std::byte* out);

// Decodes a sealed cell to k [64, dk] and v [64, dv] in the original basis (rotation and offsets undone). For tests,
// lab and oracles; attention never calls it.
void DecodeCell(const CellLayout& layout, const std::byte* cell, float* k, float* v);

// One side's tokens [begin, end) alone: [end - begin, dim]. What attention does, sixteen tokens at a time, for sides
// that no kernel attends in place.
void DecodeKeys(const CellLayout& layout, const std::byte* cell, int begin, int end, float* k);
void DecodeValues(const CellLayout& layout, const std::byte* cell, int begin, int end, float* v);

// The same for an exact cell's tokens [0, n): k [n, dk], v [n, dv].
void DecodeExact(const ExactLayout& layout, const std::byte* cell, int n, float* k, float* v);

// Names the cell and sets its checksum; the last thing that happens to a cell's bytes.
void SealHeader(std::byte* cell, uint16_t layer, uint16_t head, uint64_t position, const uint8_t block_key[16],
                uint64_t generation);

// What a cell read from outside must be: a store's CellVerifier. kCorruption names the field that differs.
Status VerifyCell(std::span<const std::byte> cell, uint16_t layer, uint16_t head, int64_t position,
                  const std::array<uint8_t, 16>& block_key);

// Rotates x [dim] in place by the orthonormal block-diagonal Hadamard matrix of a side (its own inverse); a no-op where
// the side is not attended in a rotated basis.
void RotateInPlace(const SideLayout& side, float* x);

}  // namespace kvcell
