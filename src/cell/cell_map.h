// Which cells a block has and how each lies: the geometry of a cache turned into layouts, indexes and sizes.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <vector>

#include "codec/cell_layout.h"
#include "kvcell/codec_plan.h"
#include "kvcell/geometry.h"
#include "store/store.h"

namespace kvcell {

// Cells that leave RAM and files together: those of full-attention layers, and those of sliding-window layers, whose
// bytes go when the window has passed.
enum CellGroup : uint8_t { kFullLayers = 0, kWindowLayers = 1 };
inline constexpr int kCellGroups = 2;

// KV heads [first_head, first_head + n_heads) of a layer, which share a codec and so lie side by side in files.
struct HeadRun {
  uint16_t first_head = 0;
  uint16_t n_heads = 0;
  CellLayout layout;
  uint16_t pool = 0;    // index into coded_pools
  uint16_t slot = 0;    // index within shapes[group].layers
  uint64_t before = 0;  // bytes of the group's slots before it, per block
};

// One layer of the map. Its cells are [first_cell, first_cell + n_heads) of every block.
struct LayerCells {
  LayerGeometry geometry;
  std::vector<HeadRun> runs;  // by codec, in order of heads; one where all heads have the same
  ExactLayout open;           // 64 tokens
  ExactLayout sink;           // the first `sinks` tokens, rounded up to 16
  uint32_t first_cell = 0;
  uint16_t n_heads = 0;  // KV heads
  CellGroup group = kFullLayers;
  uint16_t number = 0;                     // of the layer in the model
  uint16_t exact_pool = 0, sink_pool = 0;  // indexes into the size lists below

  const HeadRun& run(uint16_t head) const {
    size_t i = 0;
    while (head >= runs[i].first_head + runs[i].n_heads) ++i;
    return runs[i];
  }
  const CellLayout& coded(uint16_t head) const { return run(head).layout; }
  // Where ReadCells and Locate find a head: the slot in the shape, and the head's index within it.
  uint16_t slot(uint16_t head) const { return run(head).slot; }
  uint16_t head_in_slot(uint16_t head) const { return static_cast<uint16_t>(head - run(head).first_head); }
  uint32_t widest_coded() const {
    uint32_t bytes = 0;
    for (const HeadRun& r : runs) bytes = std::max(bytes, r.layout.bytes);
    return bytes;
  }
};

struct CellMap {
  std::vector<LayerCells> layers;
  uint32_t n_cells = 0;  // per block
  int32_t sinks = 0;
  std::array<CellSetShape, kCellGroups> shapes;
  // Slot sizes in use, and how many slots of each one block takes, by group.
  struct PoolUse {
    uint32_t slot_bytes = 0;
    std::array<uint32_t, kCellGroups> slots_per_block{};
    uint32_t slots() const { return slots_per_block[0] + slots_per_block[1]; }
  };
  std::vector<PoolUse> coded_pools, exact_pools, sink_pools;

  uint64_t CodedBytesPerBlock(CellGroup group) const;
  uint64_t ExactBytesPerBlock() const;
};

// kInvalidArgument names the layer and field that can't be.
Result<CellMap> MakeCellMap(const Geometry& geometry, const CodecSpec& codec, int32_t sinks,
                            const std::vector<CodecRange>& ranges = {});

}  // namespace kvcell
