// Which cells a block has and how each lies: the geometry of a cache turned into layouts, indexes and sizes.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "codec/cell_layout.h"
#include "kvcell/codec.h"
#include "kvcell/geometry.h"
#include "store/store.h"

namespace kvcell {

// Cells that leave RAM and files together: those of full-attention layers, and those of sliding-window layers, whose
// bytes go when the window has passed.
enum CellGroup : uint8_t { kFullLayers = 0, kWindowLayers = 1 };
inline constexpr int kCellGroups = 2;

// One layer of the map. Its cells are [first_cell, first_cell + n_heads) of every block.
struct LayerCells {
  LayerGeometry geometry;
  CellLayout coded;
  ExactLayout open;  // 64 tokens
  ExactLayout sink;  // the first `sinks` tokens, rounded up to 16
  uint32_t first_cell = 0;
  uint16_t n_heads = 0;  // KV heads
  CellGroup group = kFullLayers;
  uint16_t group_slot = 0;                                 // index of the layer within shapes[group].layers
  uint16_t coded_pool = 0, exact_pool = 0, sink_pool = 0;  // indexes into the size lists below
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
Result<CellMap> MakeCellMap(const Geometry& geometry, const CodecSpec& codec, int32_t sinks);

}  // namespace kvcell
