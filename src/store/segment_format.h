// What stands in a segment file, byte by byte: its header and the header of each extent (docs/format.md). Parsers of
// these are the only door for such bytes and trust none of them.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "kvcell/status.h"
#include "store/bytes.h"
#include "store/store.h"

namespace kvcell {

using StoreId = std::array<uint8_t, 16>;

inline constexpr uint32_t kSegmentVersion = 1;
inline constexpr uint32_t kSealedSegmentVersion = 2;  // the same, its cells sealed
inline constexpr uint32_t kByteOrderMark = 0x01020304;
inline constexpr uint64_t kSegmentMagic = 0x544e454d47455356;  // "VSEGMENT"
inline constexpr uint64_t kExtentMagic = 0x544e455458455356;   // "VSEXTENT"
// The segment's header has a page of its own and every extent starts on a page: holes and mappings come in pages.
inline constexpr uint64_t kPageBytes = 4096;
inline constexpr uint64_t kSegmentHeaderBytes = 64;
inline constexpr uint64_t kMaxOffset = uint64_t{1} << 62;  // of any byte in a file: sums of two never wrap

struct SegmentHeader {
  StoreId store{};
  uint64_t segment = 0;
  int64_t created = 0;  // unix seconds
  bool sealed = false;  // its cells are encrypted
};
std::vector<std::byte> MakeSegmentHeader(const SegmentHeader& header);
// kCorruption (magic, checksum), kMismatch (a newer version, other byte order). `path` names the file in messages.
Result<SegmentHeader> ParseSegmentHeader(std::span<const std::byte> bytes, const std::string& path);

struct ExtentHeader {
  CellSetShape shape;
  uint32_t n_blocks = 0;
  uint64_t cells_offset = 0;  // in the file, of the first cell: right behind this header
  uint64_t generation = 0;    // of the append
};
std::vector<std::byte> MakeExtentHeader(const ExtentHeader& header);
// `bytes` starts at file offset `offset` and may be longer than the header.
Result<ExtentHeader> ParseExtentHeader(std::span<const std::byte> bytes, uint64_t offset, const std::string& path);

// Header bytes for a shape: what stands before the first cell. A multiple of 64.
uint64_t ExtentHeaderBytes(const CellSetShape& shape);
// Bytes of one block's cells; nothing where a layer is malformed (no cells, cell size 0 or not a multiple of 64) or the
// numbers are absurd (2^62 and more).
std::optional<uint64_t> BlockBytes(const CellSetShape& shape);
// Where cell (slot, place.index, head) lies; nothing where the place or the shape is malformed or passes kMaxOffset.
std::optional<uint64_t> CellOffset(const CellSetShape& shape, const BlockPlace& place, size_t slot, uint16_t head);

// A shape as stored bytes, and back (kCorruption).
std::vector<std::byte> MakeShapeBytes(const CellSetShape& shape);
std::optional<CellSetShape> ParseShapeBytes(std::span<const std::byte> bytes);
bool SameShape(const CellSetShape& a, const CellSetShape& b);

std::string SegmentName(uint64_t segment);  // "00a1….kvs"
std::optional<uint64_t> ParseSegmentName(const std::string& name);

}  // namespace kvcell
