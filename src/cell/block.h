// A block of a sequence and the table of its cells: state and place of each.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <vector>

#include "cell/arena.h"
#include "cell/cell_map.h"
#include "kvcell/cache.h"
#include "store/store.h"

namespace kvcell {

// One cell's row in the table: where its bytes are in RAM and what state it is in. Its place in the file follows from
// its block's.
struct CellEntry {
  Slot coded = kNoSlot;
  Slot exact = kNoSlot;  // open block, or a replica: then the coded bytes stay the truth
  CellState state = CellState::kEvicted;
  bool durable = false;  // the store holds the same bytes
};
static_assert(sizeof(CellEntry) <= 32, "RAM metadata per cell is bounded by the design");

struct PrefixNode;

// 64 consecutive positions, shared by all sequences whose past they are (refs counts them, and work under way).
struct Block {
  int32_t refs = 1;
  int32_t n_tokens = 0;
  bool sealed = false;
  bool writing = false;     // queued for, or in, the write-back
  int64_t position = 0;     // of its first token
  BlockKey key{};           // set when sealed
  BlockKey parent{};        // key of the block before; zero at position 0
  uint64_t generation = 0;  // of the write that made its cells
  std::array<Token, kBlockTokens> tokens{};
  std::array<std::optional<BlockPlace>, kCellGroups> places;  // in the store
  std::vector<CellEntry> cells;                               // [n_cells], layer-major
  std::vector<Slot> sinks;       // [n_cells] exact slots of the first tokens; only at position 0
  PrefixNode* prefix = nullptr;  // its place in the cache's prefix tree, which then holds one of the refs
  uint64_t reads = 0;            // steps that attended to it
  uint64_t last_access = 0;      // step number
};

}  // namespace kvcell
