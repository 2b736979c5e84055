#include "store/segment_format.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <limits>

#include "base/checksum.h"

namespace kvcell {
namespace {

constexpr uint64_t kExtentFixedBytes = 64;
constexpr uint64_t kLayerBytes = 8;
constexpr uint32_t kMaxLayers = 65536;

tl::unexpected<Status> Damaged(const std::string& path, uint64_t offset, std::string_view what) {
  return Fail(StatusCode::kCorruption,
              fmt::format("{} at byte {}: {}; sessions that use it are computed again", path, offset, what));
}

// The magic as read: right, turned around, or something else.
Status CheckMagic(uint64_t magic, uint64_t expected, const std::string& path, uint64_t offset, std::string_view what) {
  if (magic == expected) return OkStatus();
  if (magic == __builtin_bswap64(expected)) {
    return Status(
        StatusCode::kMismatch,
        fmt::format("{} has the wrong byte order: it comes from a big-endian machine and can't be read here", path));
  }
  return Damaged(path, offset, fmt::format("no {} stands there", what)).value();
}

}  // namespace

std::vector<std::byte> MakeSegmentHeader(const SegmentHeader& header) {
  ByteWriter out;
  out.Put(kSegmentMagic)
      .Put(header.sealed ? kSealedSegmentVersion : kSegmentVersion)
      .Put(kByteOrderMark)
      .Raw(std::as_bytes(std::span(header.store)));
  out.Put(header.segment).Put(header.created).Put(uint64_t{0});
  out.Put(Checksum64(out.bytes()));
  return std::move(out.bytes());
}

Result<SegmentHeader> ParseSegmentHeader(std::span<const std::byte> bytes, const std::string& path) {
  ByteReader in(bytes);
  const auto magic = in.Take<uint64_t>();
  const auto version = in.Take<uint32_t>();
  const auto order = in.Take<uint32_t>();
  SegmentHeader header;
  if (const auto store = in.Raw(header.store.size()); in.ok())
    std::memcpy(header.store.data(), store.data(), store.size());
  header.segment = in.Take<uint64_t>();
  header.created = in.Take<int64_t>();
  const auto reserved = in.Take<uint64_t>();
  const auto checksum = in.Take<uint64_t>();
  if (!in.ok()) return Damaged(path, 0, "the file is shorter than its header");
  KVCELL_FAIL_IF_ERROR(CheckMagic(magic, kSegmentMagic, path, 0, "segment header"));
  if (order == __builtin_bswap32(kByteOrderMark)) {
    return Fail(StatusCode::kMismatch, fmt::format("{} has the wrong byte order: it can't be read here", path));
  }
  if (version != kSegmentVersion && version != kSealedSegmentVersion) {
    return Fail(StatusCode::kMismatch,
                fmt::format("{} has segment format {}, this program reads {} and {}: use the program that wrote it",
                            path, version, kSegmentVersion, kSealedSegmentVersion));
  }
  header.sealed = version == kSealedSegmentVersion;
  if (checksum != Checksum64(bytes.first(kSegmentHeaderBytes - sizeof(uint64_t))) || order != kByteOrderMark ||
      reserved != 0) {
    return Damaged(path, 0, "the segment header fails its checksum");
  }
  return header;
}

std::vector<std::byte> MakeExtentHeader(const ExtentHeader& header) {
  const uint64_t header_bytes = ExtentHeaderBytes(header.shape);
  const uint64_t cell_bytes = BlockBytes(header.shape).value_or(0) * header.n_blocks;
  const auto make = [&](uint64_t checksum) {
    ByteWriter out;
    out.Put(kExtentMagic)
        .Put(static_cast<uint32_t>(header_bytes))
        .Put(static_cast<uint32_t>(header.shape.layers.size()));
    out.Put(header.n_blocks).Put(uint32_t{0}).Put(cell_bytes).Put(header.generation).Put(header.cells_offset);
    out.Put(uint64_t{0}).Put(checksum).Raw(MakeShapeBytes(header.shape)).PadTo(64);
    return std::move(out.bytes());
  };
  return make(Checksum64(make(0)));
}

Result<ExtentHeader> ParseExtentHeader(std::span<const std::byte> bytes, uint64_t offset, const std::string& path) {
  ByteReader in(bytes);
  const auto magic = in.Take<uint64_t>();
  const auto header_bytes = in.Take<uint32_t>();
  const auto n_layers = in.Take<uint32_t>();
  ExtentHeader header;
  header.n_blocks = in.Take<uint32_t>();
  in.Take<uint32_t>();
  const auto cell_bytes = in.Take<uint64_t>();
  header.generation = in.Take<uint64_t>();
  header.cells_offset = in.Take<uint64_t>();
  in.Take<uint64_t>();
  in.Take<uint64_t>();  // the checksum: the header is made again below and must be the same bytes, this one included
  if (!in.ok()) return Damaged(path, offset, "the file ends inside an extent's header");
  KVCELL_FAIL_IF_ERROR(CheckMagic(magic, kExtentMagic, path, offset, "extent header"));
  if (n_layers == 0 || n_layers > kMaxLayers || header_bytes > bytes.size() ||
      header_bytes != RoundUp(kExtentFixedBytes + n_layers * kLayerBytes, 64)) {
    return Damaged(path, offset, "the extent header's layer count is wrong");
  }
  const auto shape = ParseShapeBytes(in.Raw(n_layers * kLayerBytes));
  const auto block_bytes = shape ? BlockBytes(*shape) : std::nullopt;
  const auto total = block_bytes ? CheckedMul(*block_bytes, header.n_blocks) : std::nullopt;
  if (!total || *total != cell_bytes || header.n_blocks == 0 || *total > kMaxOffset || offset > kMaxOffset ||
      header.cells_offset != offset + header_bytes) {
    return Damaged(path, offset, "the extent header's sizes are wrong");
  }
  header.shape = *shape;
  const auto again = MakeExtentHeader(header);
  if (!std::ranges::equal(again, bytes.first(header_bytes)))
    return Damaged(path, offset, "the extent header fails its checksum");
  return header;
}

uint64_t ExtentHeaderBytes(const CellSetShape& shape) {
  return RoundUp(kExtentFixedBytes + shape.layers.size() * kLayerBytes, 64);
}

std::optional<uint64_t> BlockBytes(const CellSetShape& shape) {
  if (shape.layers.empty() || shape.layers.size() > kMaxLayers) return std::nullopt;
  uint64_t total = 0;
  for (const auto& layer : shape.layers) {
    if (layer.n_cells == 0 || layer.cell_bytes == 0 || layer.cell_bytes % 64 != 0) return std::nullopt;
    total += uint64_t{layer.n_cells} * layer.cell_bytes;  // < 2^48 each, 2^16 of them at most: never wraps
    if (total > kMaxOffset) return std::nullopt;
  }
  return total;
}

std::optional<uint64_t> CellOffset(const CellSetShape& shape, const BlockPlace& place, size_t slot, uint16_t head) {
  if (slot >= shape.layers.size() || head > shape.layers[slot].n_cells || place.n_blocks == 0 ||
      place.index >= place.n_blocks || place.offset > kMaxOffset) {
    return std::nullopt;
  }
  uint64_t before = 0;
  for (size_t i = 0; i < slot; ++i) before += uint64_t{shape.layers[i].n_cells} * shape.layers[i].cell_bytes;
  const auto& layer = shape.layers[slot];
  const auto run = CheckedMul(before, place.n_blocks);
  const auto cells = CheckedMul(uint64_t{place.index} * layer.n_cells + head, layer.cell_bytes);
  const auto inside = run && cells ? CheckedAdd(*run, *cells) : std::nullopt;
  const auto offset = inside ? CheckedAdd(*inside, place.offset) : std::nullopt;
  if (!offset || *offset > kMaxOffset) return std::nullopt;
  return offset;
}

std::vector<std::byte> MakeShapeBytes(const CellSetShape& shape) {
  ByteWriter out;
  for (const auto& layer : shape.layers) out.Put(layer.layer).Put(layer.n_cells).Put(layer.cell_bytes);
  return std::move(out.bytes());
}

std::optional<CellSetShape> ParseShapeBytes(std::span<const std::byte> bytes) {
  if (bytes.empty() || bytes.size() % kLayerBytes != 0 || bytes.size() / kLayerBytes > kMaxLayers) return std::nullopt;
  CellSetShape shape;
  for (ByteReader in(bytes); !in.at_end();) {
    CellSetShape::Layer layer;
    layer.layer = in.Take<uint16_t>();
    layer.n_cells = in.Take<uint16_t>();
    layer.cell_bytes = in.Take<uint32_t>();
    shape.layers.push_back(layer);
  }
  if (!BlockBytes(shape)) return std::nullopt;
  return shape;
}

bool SameShape(const CellSetShape& a, const CellSetShape& b) {
  return std::ranges::equal(a.layers, b.layers, [](const auto& x, const auto& y) {
    return x.layer == y.layer && x.n_cells == y.n_cells && x.cell_bytes == y.cell_bytes;
  });
}

std::string SegmentName(uint64_t segment) { return fmt::format("{:016x}.kvs", segment); }

std::optional<uint64_t> ParseSegmentName(const std::string& name) {
  if (name.size() != 20 || !name.ends_with(".kvs")) return std::nullopt;
  uint64_t segment = 0;
  const auto [end, error] = std::from_chars(name.data(), name.data() + 16, segment, 16);
  if (error != std::errc() || end != name.data() + 16 || SegmentName(segment) != name) return std::nullopt;
  if (segment > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) return std::nullopt;
  return segment;
}

}  // namespace kvcell
