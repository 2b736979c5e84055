// Where sealed cells live beyond RAM: a cache creates them there, reads them, destroys them, and may let the tier
// attend to them by itself, so that their bytes never travel. The store is one such tier.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "kvcell/status.h"

namespace kvcell {

// Sizes of one block's cells by layer: what an extent is made of.
struct CellSetShape {
  struct Layer {
    uint16_t layer = 0;       // its number in the model
    uint16_t n_cells = 0;     // KV heads
    uint32_t cell_bytes = 0;  // a multiple of 64
  };
  std::vector<Layer> layers;
};

// Where one block's cells of one shape lie: block `index` of an extent of `n_blocks` blocks. What `segment` and
// `offset` mean is the tier's affair. In the store cells are layer-major, so that one layer of the extent's blocks is
// one run: cell (l, block, head) is at
//   offset + n_blocks * (bytes of the layers before l) + (index * n_cells(l) + head) * cell_bytes(l).
struct BlockPlace {
  uint64_t segment = 0;
  uint64_t offset = 0;  // of the extent's first cell, 64-byte aligned
  uint32_t n_blocks = 0;
  uint32_t index = 0;
};

// Query rows of one KV head and the tier's cells that they attend to: cell (layer_slot, head) of each block.
// Scores of keys in 2 to 6 bits that are attended in place count as they do in the cache: half the variance of their
// codes' noise is added, before the softcap (docs/codecs.md, "What codes lack in weight"), or such a cell gets another
// weight there than here. `Attend` of the library (attention/attention.h) does so.
struct TierQuery {
  struct Cell {
    BlockPlace place;
    int64_t position = 0;  // of the block's token 0
    int32_t first = 0;     // tokens [first, 64) count: the exact sinks before it are attended elsewhere
  };
  const CellSetShape* shape = nullptr;
  size_t layer_slot = 0;    // index into shape->layers
  uint16_t head = 0;        // among the cells of this slot
  uint16_t model_head = 0;  // KV head of the model's layer
  std::span<const Cell> cells;
  int32_t n_rows = 0;
  int32_t head_dim_k = 0, head_dim_v = 0;
  float scale = 0.0f;              // multiplies q.k
  float softcap = 0.0f;            // > 0: softcap * tanh(score / softcap), before the mask
  const float* q = nullptr;        // [n_rows][head_dim_k], as the model gives them
  const int64_t* begin = nullptr;  // [n_rows] row r sees positions [begin[r], end[r])
  const int64_t* end = nullptr;
};

// A tier's answer, by row, to be merged with what other cells give (as in Flash-Decoding): the softmax weights are
// 2^(score * log2(e) - max).
struct TierPartial {
  std::vector<float> max;     // [n_rows], of score * log2(e); -inf: no token seen
  std::vector<float> sum;     // [n_rows] of weights
  std::vector<float> values;  // [n_rows][head_dim_v] of weight * value, not rotated
};

// A tier is asked from several threads at once. What goes wrong is a Status; a cell that comes back wrong is found by
// the caller's check and reported, never attended.
class CellTier {
 public:
  // The bytes of a cell that is being created, asked for in file order; layer_slot indexes shape.layers.
  using CellSource = std::function<const std::byte*(size_t layer_slot, uint32_t block, uint16_t head)>;

  virtual ~CellTier() = default;

  // What `inspect` calls it: "file", "remote".
  virtual std::string_view TierName() const = 0;

  // Creates the cells of n_blocks blocks. Creating and writing are one call: a sealed cell is written once and never
  // again, and a tier that is full says so (kNoSpace) before anything is taken.
  virtual Result<std::vector<BlockPlace>> CreateCells(const CellSetShape& shape, uint32_t n_blocks,
                                                      const CellSource& cell) = 0;
  // The caller has no more use of a block's cells.
  virtual void DestroyCells(const BlockPlace& place) = 0;

  // Reads cells [head_begin, head_begin + n) of one layer of one block into dst [n * cell_bytes]. No check but for
  // length: the caller verifies. kIoError or kCorruption (gone or too short).
  virtual Status ReadCells(const CellSetShape& shape, const BlockPlace& place, size_t layer_slot, uint16_t head_begin,
                           uint16_t n, std::byte* dst) = 0;
  // Reads one layer (all heads) of blocks that lie side by side in one extent: indexes [place.index, place.index +
  // n_blocks).
  virtual Status ReadRun(const CellSetShape& shape, const BlockPlace& place, size_t layer_slot, uint32_t n_blocks,
                         std::byte* dst) = 0;

  // Says that ReadRun, or reads of the mapped extent, will want the same soon: the disk may begin.
  virtual void Prefetch(const CellSetShape& /*shape*/, const BlockPlace& /*place*/, size_t /*layer_slot*/,
                        uint32_t /*n_blocks*/) {}
  // The extent of a place as it lies in a file, mapped for reading: cells are where BlockPlace says for the store,
  // unchecked. They stay readable while the place is held, but somebody may change the file or cut it off at any time:
  // whoever has read them asks MappedVersion, and from then on for the extent again. Null where it can't be mapped, as
  // in an encrypted store: ReadCells gives the cells, or says why not.
  virtual const std::byte* MapExtent(const CellSetShape& /*shape*/, const BlockPlace& /*place*/) { return nullptr; }
  // Another number, never 0, whenever the files that are mapped have changed since the last call, as their sizes and
  // times tell. kCorruption, once, where bytes went away that MapExtent had given since the last call; they read as
  // zeros, and MapExtent gives nothing of such a file any more.
  virtual Result<uint64_t> MappedVersion() { return 1; }

  // Says that the caller found a block's cells damaged: they are not handed out again.
  virtual void ReportDamage(const BlockPlace& place) = 0;
  // Path and byte offset of a cell, for people.
  virtual std::pair<std::string, uint64_t> Locate(const CellSetShape& shape, const BlockPlace& place, size_t layer_slot,
                                                  uint16_t head) const = 0;

  // Whether it attends to its cells itself, which spares reading them. It then answers for their soundness.
  virtual bool Attends() const { return false; }
  virtual Status Attend(const TierQuery& /*query*/, TierPartial* /*partial*/) {
    return Status(StatusCode::kUnsupported, "this tier does not attend to its cells; read them");
  }
};

}  // namespace kvcell
