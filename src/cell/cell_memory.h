// Cells in RAM and file under one budget: creates blocks, codes' slots, writes back, drops and fetches, each move a
// transition of the rules in force that is complete only when the bytes have moved.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <thread>
#include <utility>
#include <vector>

#include "base/memory_probe.h"
#include "cell/arena.h"
#include "cell/block.h"
#include "cell/cell_map.h"
#include "cell/pressure.h"
#include "cell/rules.h"
#include "cell/state_machine.h"
#include "cell/trace.h"
#include "store/store.h"

namespace kvcell {

// How RAM is laid out for a map: what a chunk is, and what is set aside before the first coded cell.
struct MemoryShape {
  uint64_t coded_chunk = 0;   // bytes, as MakeChunkShape takes them: of the pools of coded cells
  uint64_t exact_chunk = 0;   // of exact cells and sinks
  uint64_t exact_blocks = 0;  // blocks with exact cells at once, most, but for those that rules leave exact
  uint64_t sink_blocks = 0;
  uint64_t fixed_bytes = 0;    // of exact cells and sinks: taken at the start, for the most sequences allowed
  uint64_t minimum_coded = 0;  // coded cells that one step and the windows need in RAM at once
};
MemoryShape MakeMemoryShape(const CellMap& map, uint64_t budget, int32_t max_sequences, int32_t recent_blocks,
                            int32_t max_step_tokens, int32_t prefix_roots, bool elastic = false);
// Bytes the coded pools commit for n blocks of the full layers and n_window blocks of the sliding-window layers.
uint64_t CodedBytes(const CellMap& map, uint64_t chunk_target, uint64_t n_blocks, uint64_t n_window_blocks);

// Blocks per background write: runs by layer are long enough to stream, and a batch ends soon enough to be waited for.
inline constexpr size_t kWriteBatch = 16;
// Blocks coded at a time: their coded slots are taken before the exact ones go.
inline constexpr size_t kCodeBatch = 4;

// Sealed cells may stay exact, or come to be exact again: exact slots beyond those set aside count against the budget.
inline bool IsElastic(const Rules& rules) { return !rules.codes_on_seal || rules.replicates_on_read; }

// Not thread-safe, but for the work off the token path that it runs itself.
class CellMemory {
 public:
  struct Options {
    uint64_t budget = 0;         // of all cells in RAM; never 0 here
    uint64_t scratch_bytes = 0;  // counted against the budget, allocated by the caller
    MemoryShape shape;
    CellTier* tier = nullptr;            // null: nothing can leave RAM
    uint64_t tier_bytes = 0;             // of cells that lie there already, for the rules' file budget
    uint64_t generation = 1;             // written into every cell coded here, unless its block has another
    bool mapped = false;                 // cells that are not in RAM are attended in the mapped file, where it can be
    std::shared_ptr<const Rules> rules;  // null: the profile `balanced`
    MemoryProbe probe;                   // what the machine has free; empty: the real one
  };
  static Result<std::unique_ptr<CellMemory>> Create(CellMap map, const Options& options);
  ~CellMemory();
  CellMemory(const CellMemory&) = delete;
  CellMemory& operator=(const CellMemory&) = delete;

  const CellMap& map() const { return map_; }
  uint64_t generation() const { return options_.generation; }
  const Rules& rules() const { return *rules_; }
  // The next transition goes by these. Work under way ends as it began.
  void SetRules(std::shared_ptr<const Rules> rules);

  // A new empty block, owned through its references.
  Block* NewBlock(int64_t position, const BlockKey& parent);
  static void AddRef(Block* block) { ++block->refs; }
  // Drops one reference; the last one evicts the cells and frees the block.
  void Release(Block* block);

  // Makes room for the coded cells of n more blocks and the exact ones of n_exact beyond those set aside, by what the
  // rules allow. kOutOfBudget or kNoSpace leave everything as it was (but perhaps more cells written back or coded).
  // Waits for work under way, at most the rules' `wait_ms`.
  Status ReserveCoded(uint64_t n_blocks, uint64_t n_exact = 0);
  // Whether the coded cells of n more blocks, and the exact ones of n_exact beyond those set aside, fit as things are.
  bool Fits(uint64_t n_blocks, uint64_t n_exact = 0) const;
  // How many more blocks fit as things are, were `n_going` of those in RAM to go. Exact up to whole chunks.
  uint64_t FreeBlocks(uint64_t n_going) const;
  // How many of n more blocks fit into RAM beside what one step needs, nothing being moved.
  uint64_t RoomForBlocks(uint64_t n_blocks) const;

  // TOKEN_APPEND on every cell that does not exist yet: exact slots in RAM (and sinks' at position 0).
  Status CreateExact(Block* block);
  void CreateSinks(Block* block);
  // Whether every cell of a block is coded when it seals, as the rules and the pressure stand now.
  bool SealCodesAll() const;
  // Coded slots for those cells of a block sealing in this step that the rules have coded at once; room has been
  // reserved.
  void TakeCoded(Block* block);
  // Undoes TakeCoded for a step that was aborted.
  void UndoCoded(Block* block);
  // TOKEN_APPEND with the block full: cells with a coded slot have their bytes in it, the others stay ACTIVE.
  void Sealed(Block* block);
  // Gives up the exact slots of a sealed block's coded cells (replicas); the coded bytes are the truth.
  void DropExact(Block* block);
  // Exact slots for a sealed block, to be filled by the caller: replicas.
  void CreateReplicas(Block* block);
  // Makes a new block one that the store holds: sealed, its cells PERSISTED where the group has a place.
  void StoredBlock(Block* block, const std::array<std::optional<BlockPlace>, kCellGroups>& places, uint64_t generation);
  // The store keeps an equal block already: from now on its copy is the one in the file.
  void AdoptPlaces(Block* block, const std::array<std::optional<BlockPlace>, kCellGroups>& places, uint64_t generation);
  // EVICT of one group's cells: the window has passed.
  void EvictGroup(Block* block, CellGroup group);
  // EVICT of the full-attention cells of some layers, by the rules; false where the block is busy and must be asked
  // again. `age_tokens` is what the guard sees. Cells that a rule keeps (PERSISTED) are written first.
  bool EvictLayers(Block* block, const Range<int64_t>& layers, int64_t age_tokens);
  // A private copy of an open block (copy-on-write). Room for exact cells is set aside per sequence.
  Result<Block*> CopyOpen(const Block& block, int n_tokens);

  // Writes the blocks' cells (those that are not in the store yet) now, in runs by layer; WRITE_BACK marks them
  // durable.
  Status WriteNow(std::span<Block* const> blocks);
  // Asked from outside: hard MEMORY_PRESSURE on these blocks alone. kInvalidArgument where the rules move none of them,
  // or what writing gives.
  Status Persist(std::span<Block* const> blocks);
  // What MEMORY_PRESSURE, CACHE_MISS and the like have to do after a step, started off the token path; takes in what
  // has been done. `moved_on`: blocks were sealed or released since the last call.
  void BalanceInBackground(bool moved_on = true);
  // READ_REQUEST and CACHE_MISS of blocks that the last step attended: what the rules want in RAM or exactly is
  // started off the token path.
  void Touched(std::span<Block* const> blocks, uint64_t step);
  // Waits until no work is under way and takes it in; for tests, saves and orderly ends.
  Status Settle() { return TakeIn(std::chrono::hours(1)); }
  // Reads one group's cells of blocks from the store, layer by layer in long runs, verifies them, and keeps them in RAM
  // if `keep` (room has been reserved) and a rule fetches them: CACHE_MISS, then WRITE_BACK. A damaged cell ends the
  // sound prefix: `n_sound` counts the blocks before it, and `damage` names it.
  struct Recovered {
    size_t n_sound = 0;
    Status damage;
  };
  // Whether the store alone has coded bytes of some full-attention cell of the block.
  bool InStoreOnly(const Block& block) const;
  Recovered Recover(std::span<Block* const> blocks, CellGroup group, bool keep);

  // --- cells that are not in RAM. BeginReads before a step; of each block that it reads, MapBlock; then CodedForRead
  // on any thread; EndReads once all is read, with the same blocks.
  void BeginReads();
  void MapBlock(Block* block);
  // Lets the disk begin with a layer's cells of those blocks, where the step before had to wait for it. Thread-safe.
  void PrefetchLayer(const LayerCells& layer) const;
  // kCorruption where mapped bytes went away or changed while they were read and are wrong: what was computed means
  // nothing.
  Status EndReads(std::span<Block* const> blocks);

  enum class ReadFrom : uint8_t { kRam, kRing, kMapped };
  struct CodedBytes {
    const std::byte* bytes = nullptr;
    ReadFrom from = ReadFrom::kRam;
  };
  // A cell's coded bytes: in RAM; or in the mapped file, checked when its step is the first to read it since the file
  // changed; or read from the store into `ring` and checked each time. Thread-safe between BalanceInBackground calls.
  // kCorruption, kIoError.
  Result<CodedBytes> CodedForRead(const Block& block, const LayerCells& layer, uint16_t head, std::byte* ring) const;

  std::byte* coded(const LayerCells& layer, uint16_t head, const CellEntry& cell) {
    return coded_[layer.run(head).pool]->at(cell.coded);
  }
  const std::byte* coded(const LayerCells& layer, uint16_t head, const CellEntry& cell) const {
    return coded_[layer.run(head).pool]->at(cell.coded);
  }
  std::byte* exact(const LayerCells& layer, const CellEntry& cell) { return exact_[layer.exact_pool]->at(cell.exact); }
  const std::byte* exact(const LayerCells& layer, const CellEntry& cell) const {
    return exact_[layer.exact_pool]->at(cell.exact);
  }
  std::byte* sink(const LayerCells& layer, Slot slot) { return sinks_[layer.sink_pool]->at(slot); }

  // Bytes of all pools' chunks and of the scratch: what the budget bounds.
  uint64_t committed() const;
  uint64_t peak_committed() const { return peak_; }
  uint64_t budget() const { return options_.budget; }
  const TransitionCounts& transitions() const { return transitions_; }
  // The pressure that rules see now: of the budget's fill and of what the machine has free, whichever is more.
  Pressure pressure() const;
  // Share of the room for cells that is in use, 0..1.
  double ram_fill() const;
  TransitionTrace& trace() { return trace_; }

  struct Counters {
    uint64_t misses_streamed = 0;    // reads of cells that had to come from the store: PERSISTED
    uint64_t misses_recovering = 0;  // the same, while a fetch was under way
    uint64_t thrashed = 0;           // blocks put to rest
    uint64_t damped = 0;             // replicas that were not made because their block rests
    uint64_t waits = 0;              // steps that waited for work under way
    double longest_wait_ms = 0;
    uint64_t failed_jobs = 0;
    uint64_t jobs = 0;
  };
  const Counters& counters() const { return counters_; }
  void NoteMiss(const CellEntry& cell, uint64_t n) const {
    (cell.state == CellState::kRecovering ? recovering_reads_ : streamed_reads_)
        .fetch_add(n, std::memory_order_relaxed);
  }
  uint64_t streamed_reads() const { return streamed_reads_.load(std::memory_order_relaxed); }
  uint64_t recovering_reads() const { return recovering_reads_.load(std::memory_order_relaxed); }

 private:
  enum class JobKind : uint8_t { kWrite, kCode, kFetch, kReplicate };
  static constexpr size_t kJobKinds = 4;
  // Work off the token path. Slots that it fills belong to it until it is taken in: the cells' own rows change then.
  struct Job {
    JobKind kind = JobKind::kWrite;
    std::vector<Block*> blocks;
    std::vector<Slot> slots;  // [blocks][n_cells]; kNoSlot where a cell takes no part. Not for kWrite.
    Result<std::vector<BlockPlace>> places;
    Status status;
  };

  CellMemory(CellMap map, const Options& options) : map_(std::move(map)), options_(options) {}

  // Applies the rule for `event` to one cell; null where no rule fits.
  const CellRule* Apply(const Block& block, CellEntry* cell, CellEvent event, const CellFacts& facts);
  CellFacts FactsOf(const Block& block) const;
  using CellRun = std::pair<const LayerCells*, const HeadRun*>;  // cells of a layer that lie side by side in a tier
  template <typename F>
  void ForEachCell(Block* block, CellGroup group, F f) {
    for (const LayerCells& layer : map_.layers) {
      if (layer.group != group) continue;
      for (uint16_t h = 0; h < layer.n_heads; ++h) f(layer, h, &block->cells[layer.first_cell + h]);
    }
  }
  uint64_t CodedGrowth(uint64_t n_blocks) const;
  uint64_t ExactGrowth(uint64_t n_blocks) const;
  uint64_t used() const;  // of coded_limit(): coded cells, and exact ones beyond those set aside
  uint64_t coded_limit() const;
  Status NoRoom() const;
  void GiveCoded(const LayerCells& layer, uint16_t head, CellEntry* cell);
  void GiveExact(const LayerCells& layer, CellEntry* cell);

  // cell_sweep.cc: what pressure moves
  struct Sweep {
    size_t moved = 0;           // blocks that gave RAM back at once
    std::vector<Block*> write;  // blocks whose cells must be written before they can leave
    std::vector<Block*> code;   // blocks with exact cells to be coded
  };
  std::vector<Block*> Victims(size_t most) const;
  template <typename F>
  void SweepBlocks(std::span<Block* const> victims, Pressure pressure, size_t most, const F& enough, Sweep* sweep);
  void EvictByPolicy();
  void MakeRoom(uint64_t n_blocks, uint64_t n_exact, Sweep* sweep);
  void WriteAhead(std::span<Block* const> victims, Sweep* sweep) const;
  bool SweepBlock(Block* block, const CellFacts& facts, Sweep* sweep);
  bool Start(JobKind kind, std::vector<Block*> blocks);
  bool TakeJobSlots(Job* job);
  void GiveJobSlots(const Job& job);
  bool MayReplicate(Block* block, uint64_t step);
  void NoteThrash(Block* block);

  // cell_recover.cc
  struct Unsound {  // a cell that its check refused
    size_t block = 0;
    uint16_t slot = 0, cell = 0;   // as a tier counts them
    uint16_t layer = 0, head = 0;  // as the model counts them
    Status what;
  };
  size_t RecoverExtent(std::span<Block* const> blocks, CellGroup group, bool keep, Status* damage);
  void BeginRecovery(std::span<Block* const> blocks, CellGroup group);
  std::optional<Unsound> TakeInRun(std::span<Block* const> blocks, const CellRun& which,
                                   std::span<const std::byte> bytes);
  void EndRecovery(std::span<Block* const> blocks, CellGroup group, size_t sound);

  void AddResident(Block* block);
  void Forget(Block* block);
  void PlaceAt(Block* block, CellGroup group, const std::optional<BlockPlace>& place);
  // Where a cell lies in its block's mapped extent.
  const std::byte* MappedCell(const Block& block, const LayerCells& layer, uint16_t head) const;
  Status CheckRead(const Block& block, const LayerCells& layer, uint16_t head, const std::byte* bytes) const;
  Result<std::vector<BlockPlace>> WriteExtent(std::span<Block* const> blocks, CellGroup group) const;
  Status CheckFileBudget(uint64_t bytes) const;
  void MarkWritten(std::span<Block* const> blocks, CellGroup group, const std::vector<BlockPlace>& places);
  void Encode(const Block& block, const LayerCells& layer, uint16_t head, std::byte* out) const;

  // cell_jobs.cc: the worker
  void Enqueue(Job job);
  Status TakeIn(std::chrono::steady_clock::duration wait);
  void Complete(Job* job);
  void Run(Job* job) const;
  template <typename F>
  Status ForEachSlot(const Job& job, const F& f) const;
  void WorkerLoop();
  void NotePeak();
  void MoveTo(const Block& block, CellEntry* cell, CellEvent event, CellState to, CellAction action);
  void StartSampler();
  bool NeedsWrite(const Block& block, CellGroup group) const;
  std::vector<CellRun> Runs(CellGroup group) const;
  void Admit(const Block& block, const LayerCells& layer, uint16_t head, CellEntry* cell, const CellFacts& facts);
  void Decode(const LayerCells& layer, uint16_t head, const std::byte* from, std::byte* to) const;
  Status ReadVerified(const Block& block, const LayerCells& layer, uint16_t head, std::byte* to) const;

  CellMap map_;
  Options options_;
  std::shared_ptr<const Rules> rules_;
  TransitionCounts transitions_;
  TransitionTrace trace_;
  Counters counters_;
  mutable std::atomic<uint64_t> streamed_reads_{0}, recovering_reads_{0};
  std::vector<std::unique_ptr<SlotPool>> coded_, exact_, sinks_;
  std::vector<Block*> resident_;  // sealed blocks with full-layer cells in RAM, in no order
  uint64_t exact_set_aside_ = 0;  // bytes of exact pools that were taken at the start
  uint64_t peak_ = 0;
  uint64_t step_ = 0;
  bool moved_on_ = false;
  uint32_t mapped_version_ = 0;  // of the mapped files; 0: nothing is mapped
  struct FileRun {
    BlockPlace first;
    uint32_t n_blocks = 0;
  };
  std::vector<FileRun> file_runs_;  // of blocks that the step reads from the store, where they are to be prefetched
  // Of this process when the step began: faults that waited for a disk, and blocks that it had read.
  DiskReads disk_reads_;
  bool disk_was_read_ = false;                   // in the step before
  bool was_mapped_ = true;                       // that step
  mutable std::atomic<uint64_t> file_bytes_{0};  // in the store when it was opened, and appended since
  std::unique_ptr<PressureSampler> sampler_;

  // One worker, at most one job of each kind at a time; results wait until the owner takes them in.
  std::thread worker_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::condition_variable done_;
  std::deque<Job> queue_;
  std::vector<Job> finished_;
  size_t jobs_under_way_ = 0;
  std::array<size_t, kJobKinds> under_way_{};  // by kind
  bool stop_ = false;
};

}  // namespace kvcell
