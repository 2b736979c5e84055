// Writes exact cells, codes full ones into sealed bytes, reads both back, names and verifies sealed cells.
#include "codec/cell_codec.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cstring>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "codec/encode_kernels.h"
#include "codec/f16.h"
#include "codec/study_codec.h"

namespace kvcell {
namespace {

uint16_t LoadU16(const std::byte* at) {
  uint16_t value;
  std::memcpy(&value, at, sizeof(value));
  return value;
}

void StoreU16(std::byte* at, uint16_t value) { std::memcpy(at, &value, sizeof(value)); }

CellHeader LoadHeader(const std::byte* cell) {
  CellHeader header;
  std::memcpy(&header, cell, sizeof(header));
  return header;
}

// XXH3-64 over the header's fields before the checksum and everything after the header.
uint64_t CellChecksum(const std::byte* cell, size_t bytes) {
  XXH3_state_t state;
  XXH3_64bits_reset(&state);
  XXH3_64bits_update(&state, cell, offsetof(CellHeader, checksum));
  XXH3_64bits_update(&state, cell + sizeof(CellHeader), bytes - sizeof(CellHeader));
  return XXH3_64bits_digest(&state);
}

uint32_t PlaneBits(const std::byte* plane, const CodePlace& place, int bits) {
  return uint32_t(plane[place.byte]) >> place.shift & ((1u << bits) - 1u);
}

// The code of one value of an in-place integer side.
uint32_t CodeAt(const SideLayout& side, const std::byte* cell, int token, int dim, bool is_key) {
  const int bits = LevelBits(side.spec.type), low = LowBits(bits), high = HighBits(bits);
  const auto place = [&](int width) {
    return is_key ? KeyPlace(side, width, token, dim) : ValuePlace(width, token, dim);
  };
  uint32_t code = PlaneBits(cell + side.codes, place(low), low);
  if (high > 0) code |= PlaneBits(cell + side.codes_high, place(high), high) << low;
  return code;
}

// Decodes tokens [begin, end) to out [end - begin][dim].
void DecodeSide(const SideLayout& side, const std::byte* cell, bool is_key, int first_token, float offset_scale,
                int begin, int end, float* out) {
  if (!side.in_place) return DecodeStudyTokens(side, cell, first_token, offset_scale, begin, end, out);
  const int bits = LevelBits(side.spec.type);
  const LevelTable table = MakeLevelTable(bits, side.spec.levels);
  std::fill(out, out + size_t(end - begin) * size_t(side.dim), 0.0f);
  for (int t = std::max(begin, first_token); t < end; ++t) {
    float* row = out + size_t(t - begin) * size_t(side.dim);
    for (int d = 0; d < side.dim; ++d) {
      if (side.spec.type == SideSpec::Type::kF16) {
        const size_t index =
            is_key ? size_t(d) * kBlockTokens + size_t(t) : size_t(t) * size_t(side.dim_padded) + size_t(d);
        row[d] = F16ToF32(LoadU16(cell + side.codes + index * 2));
        continue;
      }
      const float scale = F16ToF32(LoadU16(cell + side.scales + size_t(ScaleIndex(side, t, d)) * 2));
      if (bits > 0) {
        row[d] = scale * float(table.level[CodeAt(side, cell, t, d, is_key)]);
      } else {
        const uint32_t byte = is_key ? Int8KByte(side, t, d) : Int8VByte(side, t, d);
        row[d] = scale * float(int8_t(cell[side.codes + byte]));
      }
      if (side.spec.channel_offset) row[d] += offset_scale * float(int8_t(cell[side.channel_offset + uint32_t(d)]));
    }
    RotateInPlace(side, row);
  }
}

}  // namespace

void WriteExactToken(const ExactLayout& layout, std::byte* cell, int t, const float* k, const float* v,
                     SanitizeCounts* counts) {
  static const EncodeKernels& kernels = BestEncodeKernels();
  uint16_t half[kMaxHeadDim];
  kernels.round_to_f16(k, layout.dk, half, counts);
  for (int d = 0; d < layout.dk; ++d) StoreU16(cell + (size_t(d) * size_t(layout.n_tokens) + size_t(t)) * 2, half[d]);
  kernels.round_to_f16(v, layout.dv, half, counts);
  std::fill(half + layout.dv, half + layout.dv_padded, uint16_t(0));
  std::memcpy(cell + layout.v + size_t(t) * size_t(layout.dv_padded) * 2, half, size_t(layout.dv_padded) * 2);
}

void CopyExactTokens(const ExactLayout& from_layout, const std::byte* from, int begin, int end,
                     const ExactLayout& to_layout, std::byte* to, int at) {
  const size_t n = size_t(end - begin);
  for (int d = 0; d < from_layout.dk; ++d) {
    std::memcpy(to + (size_t(d) * size_t(to_layout.n_tokens) + size_t(at)) * 2,
                from + (size_t(d) * size_t(from_layout.n_tokens) + size_t(begin)) * 2, n * 2);
  }
  const size_t row = size_t(from_layout.dv_padded) * 2;
  std::memcpy(to + to_layout.v + size_t(at) * row, from + from_layout.v + size_t(begin) * row, n * row);
}

void EncodeCell(const CellLayout& layout, const ExactLayout& exact_layout, const std::byte* exact, int first_token,
                std::byte* out) {
  static const EncodeKernels& kernels = BestEncodeKernels();
  EncodeCellWith(kernels, layout, exact_layout, exact, first_token, out);
}

void EncodeCellWith(const EncodeKernels& kernels, const CellLayout& layout, const ExactLayout& exact_layout,
                    const std::byte* exact, int first_token, std::byte* out) {
  std::memset(out, 0, layout.bytes);
  // Cells are 64-byte aligned, so their planes can be read as what they hold.
  const auto* k = reinterpret_cast<const uint16_t*>(exact);
  const auto* v = reinterpret_cast<const uint16_t*>(exact + exact_layout.v);
  CellHeader header = {};
  header.magic = kCellMagic;
  header.version = kCellVersion;
  header.first_token = uint16_t(first_token);
  header.bytes = layout.bytes;
  if (layout.k.in_place) {
    header.k_offset_scale = kernels.encode_k(layout.k, k, first_token, reinterpret_cast<uint8_t*>(out + layout.k.codes),
                                             reinterpret_cast<uint8_t*>(out + layout.k.codes_high),
                                             reinterpret_cast<uint16_t*>(out + layout.k.scales),
                                             reinterpret_cast<int8_t*>(out + layout.k.channel_offset));
  } else {
    header.k_offset_scale = EncodeStudySide(layout.k, true, k, first_token, out);
  }
  if (layout.v.in_place) {
    kernels.encode_v(layout.v, v, first_token, reinterpret_cast<uint8_t*>(out + layout.v.codes),
                     reinterpret_cast<uint8_t*>(out + layout.v.codes_high),
                     reinterpret_cast<uint16_t*>(out + layout.v.scales));
  } else {
    EncodeStudySide(layout.v, false, v, first_token, out);
  }
  std::memcpy(out, &header, sizeof(header));
}

void DecodeCell(const CellLayout& layout, const std::byte* cell, float* k, float* v) {
  DecodeKeys(layout, cell, 0, kBlockTokens, k);
  DecodeValues(layout, cell, 0, kBlockTokens, v);
}

void DecodeKeys(const CellLayout& layout, const std::byte* cell, int begin, int end, float* k) {
  const CellHeader header = LoadHeader(cell);
  DecodeSide(layout.k, cell, true, std::min<int>(header.first_token, kBlockTokens), header.k_offset_scale, begin, end,
             k);
}

void DecodeValues(const CellLayout& layout, const std::byte* cell, int begin, int end, float* v) {
  const CellHeader header = LoadHeader(cell);
  DecodeSide(layout.v, cell, false, std::min<int>(header.first_token, kBlockTokens), 0.0f, begin, end, v);
}

void DecodeExact(const ExactLayout& layout, const std::byte* cell, int n, float* k, float* v) {
  for (int t = 0; t < n; ++t) {
    for (int d = 0; d < layout.dk; ++d) {
      *k++ = F16ToF32(LoadU16(cell + (size_t(d) * size_t(layout.n_tokens) + size_t(t)) * 2));
    }
    for (int d = 0; d < layout.dv; ++d) {
      *v++ = F16ToF32(LoadU16(cell + layout.v + (size_t(t) * size_t(layout.dv_padded) + size_t(d)) * 2));
    }
  }
}

void SealHeader(std::byte* cell, uint16_t layer, uint16_t head, uint64_t position, const uint8_t block_key[16],
                uint64_t generation) {
  CellHeader header = LoadHeader(cell);
  header.layer = layer;
  header.head = head;
  header.position = position;
  std::memcpy(header.block_key, block_key, sizeof(header.block_key));
  header.generation = generation;
  std::memcpy(cell, &header, sizeof(header));
  header.checksum = CellChecksum(cell, header.bytes);
  std::memcpy(cell, &header, sizeof(header));
}

Status VerifyCell(std::span<const std::byte> cell, uint16_t layer, uint16_t head, int64_t position,
                  const std::array<uint8_t, 16>& block_key) {
  const auto damaged = [&](const std::string& what) {
    return Status(
        StatusCode::kCorruption,
        fmt::format("cell (layer {}, head {}, position {}): {}; it will not be used, its tokens must be computed again",
                    layer, head, position, what));
  };
  if (cell.size() < sizeof(CellHeader)) return damaged(fmt::format("only {} bytes, less than a header", cell.size()));
  const CellHeader header = LoadHeader(cell.data());
  if (header.magic == __builtin_bswap32(kCellMagic)) return damaged("magic is in the wrong byte order");
  if (header.magic != kCellMagic) return damaged(fmt::format("magic is {:08x}, not {:08x}", header.magic, kCellMagic));
  if (header.version != kCellVersion) {
    return damaged(fmt::format("version is {}, this build reads {}", header.version, kCellVersion));
  }
  if (header.bytes != cell.size()) return damaged(fmt::format("bytes is {}, not {}", header.bytes, cell.size()));
  if (header.checksum != CellChecksum(cell.data(), cell.size())) return damaged("checksum differs from the bytes");
  if (header.layer != layer) return damaged(fmt::format("layer is {}", header.layer));
  if (header.head != head) return damaged(fmt::format("head is {}", header.head));
  if (header.position != static_cast<uint64_t>(position))
    return damaged(fmt::format("position is {}", header.position));
  if (std::memcmp(header.block_key, block_key.data(), sizeof(header.block_key)) != 0)
    return damaged("block_key is another block's");
  if (header.first_token > kBlockTokens) return damaged(fmt::format("first_token is {}", header.first_token));
  if (header.reserved != 0) return damaged("reserved is not zero");
  return OkStatus();
}

void RotateInPlace(const SideLayout& side, float* x) {
  static const EncodeKernels& kernels = BestEncodeKernels();
  if (side.rotated()) kernels.rotate(x, side.dim);
}

}  // namespace kvcell
