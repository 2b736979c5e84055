// Cells in RAM and file under one budget: creates blocks, codes' slots, writes back, drops and fetches, each move a
// transition of the state machine that is complete only when the bytes have moved.
#pragma once

#include <array>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <span>
#include <thread>
#include <vector>

#include "cell/arena.h"
#include "cell/block.h"
#include "cell/cell_map.h"
#include "cell/state_machine.h"
#include "store/store.h"

namespace kvcell {

// How RAM is laid out for a map: what a chunk is, and what is set aside before the first coded cell.
struct MemoryShape {
  uint64_t chunk_target = 0;
  uint64_t exact_blocks = 0;  // blocks with exact cells at once, most
  uint64_t sink_blocks = 0;
  uint64_t fixed_bytes = 0;    // of exact cells and sinks: taken at the start, for the most sequences allowed
  uint64_t minimum_coded = 0;  // coded cells that one step and the windows need in RAM at once
};
MemoryShape MakeMemoryShape(const CellMap& map, uint64_t budget, int32_t max_sequences, int32_t recent_blocks,
                            int32_t max_step_tokens, int32_t prefix_roots);
// Bytes the coded pools commit for n blocks of the full layers and n_window blocks of the sliding-window layers.
uint64_t CodedBytes(const CellMap& map, uint64_t chunk_target, uint64_t n_blocks, uint64_t n_window_blocks);

// Not thread-safe, but for the write-back that it runs itself.
class CellMemory {
 public:
  struct Options {
    uint64_t budget = 0;         // of all cells in RAM; never 0 here
    uint64_t scratch_bytes = 0;  // counted against the budget, allocated by the caller
    MemoryShape shape;
    Store* store = nullptr;   // null: nothing can leave RAM
    uint64_t generation = 1;  // written into every cell coded here
  };
  static Result<std::unique_ptr<CellMemory>> Create(CellMap map, const Options& options);
  ~CellMemory();
  CellMemory(const CellMemory&) = delete;
  CellMemory& operator=(const CellMemory&) = delete;

  const CellMap& map() const { return map_; }
  uint64_t generation() const { return options_.generation; }

  // A new empty block, owned through its references.
  Block* NewBlock(int64_t position, const BlockKey& parent);
  static void AddRef(Block* block) { ++block->refs; }
  // Drops one reference; the last one evicts the cells and frees the block.
  void Release(Block* block);

  // Makes room for the coded cells of n more blocks, moving the oldest to the store if need be. kOutOfBudget or
  // kNoSpace leave everything as it was (but perhaps more cells written back).
  Status ReserveCoded(uint64_t n_blocks);
  // Whether the coded cells of n more blocks fit as things are.
  bool Fits(uint64_t n_blocks) const { return coded_committed() + CodedGrowth(n_blocks) <= coded_limit(); }
  // How many more blocks fit as things are, were `n_going` of those in RAM to go. Exact up to whole chunks.
  uint64_t FreeBlocks(uint64_t n_going) const;
  // How many of n more blocks fit into RAM beside what one step needs, nothing being moved.
  uint64_t RoomForBlocks(uint64_t n_blocks) const;

  // TOKEN_APPEND on every cell that does not exist yet: exact slots in RAM (and sinks' at position 0).
  Status CreateExact(Block* block);
  void CreateSinks(Block* block);
  // Coded slots for all cells of a block that will seal in this step; room has been reserved.
  void TakeCoded(Block* block);
  // Undoes TakeCoded for a step that was aborted.
  void UndoCoded(Block* block);
  // TOKEN_APPEND with the block full: its cells' coded bytes are complete.
  void Sealed(Block* block);
  // Gives up the exact slots of a sealed block (replicas); the coded bytes are the truth.
  void DropExact(Block* block);
  // Exact slots for a sealed block, to be filled by the caller: replicas.
  void CreateReplicas(Block* block);
  // Makes a new block one that the store holds: sealed, its cells PERSISTED where the group has a place.
  void StoredBlock(Block* block, const std::array<std::optional<BlockPlace>, kCellGroups>& places, uint64_t generation);
  // The store keeps an equal block already: from now on its copy is the one in the file.
  void AdoptPlaces(Block* block, const std::array<std::optional<BlockPlace>, kCellGroups>& places, uint64_t generation);
  // EVICT of one group's cells: the window has passed.
  void EvictGroup(Block* block, CellGroup group);
  // A private copy of an open block (copy-on-write). Room for exact cells is set aside per sequence.
  Result<Block*> CopyOpen(const Block& block, int n_tokens);

  // Writes the blocks' cells (those that are not in the store yet) now, in runs by layer; WRITE_BACK marks them
  // durable.
  Status WriteNow(std::span<Block* const> blocks);
  // Starts writing old cells in the background when RAM fills up; takes in what has been written.
  void BalanceInBackground();
  // Reads one group's cells of blocks from the store, layer by layer in long runs, verifies them, and keeps them in RAM
  // if `keep` (room has been reserved): CACHE_MISS, then WRITE_BACK. A damaged cell ends the sound prefix: `n_sound`
  // counts the blocks before it, and `damage` names it.
  struct Recovered {
    size_t n_sound = 0;
    Status damage;
  };
  Recovered Recover(std::span<Block* const> blocks, CellGroup group, bool keep);

  // A cell's coded bytes: in RAM, or read from the store into `ring` and verified as they pass. Thread-safe between
  // BalanceInBackground calls. kCorruption, kIoError.
  Result<const std::byte*> CodedForRead(const Block& block, const LayerCells& layer, uint16_t head,
                                        std::byte* ring) const;

  std::byte* coded(const LayerCells& layer, const CellEntry& cell) { return coded_[layer.coded_pool]->at(cell.coded); }
  const std::byte* coded(const LayerCells& layer, const CellEntry& cell) const {
    return coded_[layer.coded_pool]->at(cell.coded);
  }
  std::byte* exact(const LayerCells& layer, const CellEntry& cell) { return exact_[layer.exact_pool]->at(cell.exact); }
  std::byte* sink(const LayerCells& layer, Slot slot) { return sinks_[layer.sink_pool]->at(slot); }

  // Bytes of all pools' chunks and of the scratch: what the budget bounds.
  uint64_t committed() const;
  uint64_t peak_committed() const { return peak_; }
  uint64_t budget() const { return options_.budget; }
  const TransitionCounts& transitions() const { return transitions_; }
  const std::deque<Block*>& resident() const { return resident_; }

 private:
  CellMemory(CellMap map, const Options& options) : map_(std::move(map)), options_(options) {}

  struct Written {
    std::vector<Block*> blocks;
    CellGroup group = kFullLayers;
    Result<std::vector<BlockPlace>> places;
  };

  // Applies the rule for `event` to one cell; false where no rule fits.
  bool Transition(CellEntry* cell, CellEvent event, const CellFacts& facts);
  template <typename F>
  void ForEachCell(Block* block, CellGroup group, F f);
  uint64_t CodedGrowth(uint64_t n_blocks) const;
  uint64_t coded_committed() const;
  uint64_t coded_limit() const;
  bool DropOldestDurable();
  size_t RecoverRun(std::span<Block* const> blocks, CellGroup group, bool keep, Status* damage);
  void Forget(Block* block);
  Result<std::vector<BlockPlace>> WriteExtent(std::span<Block* const> blocks, CellGroup group) const;
  void MarkWritten(std::span<Block* const> blocks, CellGroup group, const std::vector<BlockPlace>& places);
  void Enqueue(std::vector<Block*> blocks);
  Status TakeIn(bool wait);
  void WriterLoop();
  void NotePeak();

  CellMap map_;
  Options options_;
  const CellRules& rules_ = CellRules::Default();
  TransitionCounts transitions_;
  std::vector<std::unique_ptr<SlotPool>> coded_, exact_, sinks_;
  std::deque<Block*> resident_;  // sealed blocks with coded full-layer cells in RAM, oldest first
  uint64_t peak_ = 0;

  // The write-back: one thread, one batch at a time; results wait until the owner takes them in.
  std::thread writer_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::condition_variable done_;
  std::deque<std::vector<Block*>> queue_;
  std::vector<Written> written_;
  size_t batches_under_way_ = 0;
  bool stop_ = false;
};

}  // namespace kvcell
