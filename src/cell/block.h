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
  Slot exact = kNoSlot;  // open block, sealed but not coded yet, or a replica: then the coded bytes stay the truth
  CellState state = CellState::kEvicted;
  bool durable = false;        // the store holds the same bytes
  uint16_t mass_f16 = 0x3c00;  // smoothed share of attention, where the rules look at it; 1 until it was measured
  // The version of the mapped files (Store::MappedVersion) in which its bytes were checked; 0: not yet. Written by
  // whoever reads the cell first, so by way of atomic_ref only.
  mutable uint32_t checked = 0;
};
static_assert(sizeof(CellEntry) <= 32, "RAM metadata per cell is bounded by the design");

struct PrefixNode;

// 64 consecutive positions, shared by all sequences whose past they are (refs counts them, and work under way).
struct Block {
  int32_t refs = 1;
  int32_t n_tokens = 0;
  bool sealed = false;
  bool busy = false;          // queued for, or in, work off the token path: its slots stay as they are
  bool abandoned = false;     // its cells in the store, or those of a block before it, are damaged: for nobody else
  bool pinned = false;        // does not leave RAM, whatever the rules say
  bool stays_out = false;     // somebody sent it to the store: reads don't bring it back
  bool write_wanted = false;  // a rule or a person wants its cells in the store and out of RAM
  int64_t position = 0;       // of its first token
  BlockKey key{};             // set when sealed
  BlockKey parent{};          // key of the block before; zero at position 0
  uint64_t generation = 0;    // of the write that made its cells
  std::array<Token, kBlockTokens> tokens{};
  std::array<std::optional<BlockPlace>, kCellGroups> places;  // in the store
  const std::byte* mapped = nullptr;  // its full-attention layers' extent, for the step under way
  std::vector<CellEntry> cells;       // [n_cells], layer-major
  std::vector<Slot> sinks;            // [n_cells] exact slots of the first tokens; only at position 0
  PrefixNode* prefix = nullptr;       // its place in the cache's prefix tree, which then holds one of the refs
  uint64_t reads = 0;                 // steps that attended to it
  uint64_t last_access = 0;           // step number

  // What guards look at.
  uint64_t read_steps = 0;           // bit i: attended i steps before the last one that did
  int64_t sequence_end = 0;          // of the shortest sequence that read it last
  int64_t last_read_s = 0;           // steady seconds
  size_t resident_index = SIZE_MAX;  // in CellMemory's list; SIZE_MAX: not there
  // QUANTIZED -> ACTIVE -> QUANTIZED, counted to find thrash.
  uint32_t replica_moves = 0;
  uint64_t first_move_step = 0;
  uint64_t rests_until = 0;  // step before which it is left QUANTIZED
};

}  // namespace kvcell
