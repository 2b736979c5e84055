// One session as one portable file: checksummed sections, a JSON manifest that lists them, and a header
// (docs/format.md).
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "base/checksum.h"
#include "kvcell/status.h"
#include "store/envelope.h"
#include "store/store.h"

namespace kvcell {

struct ExportSection {
  uint64_t offset = 0;
  uint64_t bytes = 0;
  Digest128 digest{};
};

// What an export file holds, its cells apart: `record` has no places.
struct ExportedSession {
  SessionRecord record;
  std::array<CellSetShape, 2> shapes;               // empty where there are no such cells
  std::array<std::vector<uint32_t>, 2> with_cells;  // blocks that have cells of each shape, in order
  std::array<ExportSection, 2> cells;               // laid out as an extent of those blocks
};

// Reads and checks everything but the cells' bytes, whose size is checked. kCorruption, kMismatch (newer, other byte
// order).
Result<ExportedSession> ReadExport(const ByteSource& file);

// Gives block `index`'s cells of a layer slot, all heads.
using RunReader = std::function<Status(size_t kind, uint32_t block, size_t layer_slot, std::span<std::byte> to)>;
// Writes the whole file at the start of an empty one.
Status WriteExport(ByteSink& file, const ExportedSession& session, const RunReader& read);

}  // namespace kvcell
