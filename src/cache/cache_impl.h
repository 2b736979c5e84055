// The Cache behind include/kvcell/cache.h: sequences over shared blocks, one step at a time, sessions in the store.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "attention/attention.h"
#include "cache/barrier.h"
#include "cache/plan.h"
#include "cache/prefix_tree.h"
#include "cell/cell_memory.h"
#include "codec/cell_codec.h"
#include "kvcell/cache.h"
#include "store/store.h"

namespace kvcell {

// A conversation: its block table and tokens. Blocks are shared with forks; the open block until one of them writes.
struct Sequence {
  std::vector<Block*> blocks;  // [ceil(tokens / 64)]; the last one is open unless the length is a multiple of 64
  std::vector<Token> tokens;
  size_t window_floor = 0;           // blocks before it are behind every sliding window of this sequence
  size_t replica_floor = 0;          // sealed blocks before it are no longer read exactly by this sequence
  std::vector<size_t> evict_floors;  // by window of the rules: blocks before it have been given up for its layers
  uint64_t generation = 0;           // of its blocks, where results depend on memory: nobody else's have it
  size_t n_shared = 0;               // leading blocks that are in the prefix tree
  int64_t draft_from = -1;           // tokens from here on are a guess that nobody else is given; -1: none
  // Read a coded cell where recent_blocks promised an exact one, or not all of its past: what follows is its own alone.
  bool approximate = false;
  bool pinned = false;         // its cells stay in RAM, those to come too
  std::vector<bool> left_out;  // layers that none of its steps appended; empty: none
  std::unique_ptr<Store::SessionLock> lock;
  std::string locked_name;
};

// How one block takes part in a step.
struct StepBlock {
  Block* block = nullptr;
  int32_t begin = 0, end = 0;  // tokens [begin, end) of the block come with this step
  int32_t first_row = 0;       // row of token `begin`
  int32_t scratch = -1;        // index of its exact cells in the step's scratch; -1: they are slots of the block's own
  bool seals = false;
  bool is_new = false;
};

struct StepSequence {
  Sequence* sequence = nullptr;
  bool draft = false;
  bool approximate = false;   // reads coded cells where recent_blocks promised exact ones
  std::vector<Token> tokens;  // that this step appends
  size_t first_block = 0;     // index in the sequence of blocks[0]
  std::vector<StepBlock> blocks;
};

// Query rows of one step block: all its new tokens, one KV head at a time.
struct Tile {
  const StepSequence* owner = nullptr;
  size_t index = 0;          // into owner->blocks
  int32_t n_segments = 0;    // of coded blocks before it; one more with the exact cells follows
  size_t n_coded = 0;        // blocks before it that are read as their codes
  size_t first_segment = 0;  // where these begin: those before it are behind the windows of all layers
  bool split = false;  // few rows: its segments are attended on their own, with those of other tiles that are equal
};

// Tiles whose segment `segment` begins with the same block: its cells are read once for all of them as far as they
// agree.
struct SegmentGroup {
  int32_t segment = 0;
  std::vector<uint32_t> tiles;
};

// Query rows of several tiles that go through the same cells, and how far they have come.
struct SharedRows {
  Partial state;
  std::vector<uint32_t> tiles;
};

// Query rows of one KV head of the layer at hand, prepared once for all segments that a thread attends with them.
struct KeptRows {
  uint16_t head = 0;
  std::vector<uint32_t> tiles;  // whose rows they are; empty: nobody's
  PreparedQueries queries;
  std::vector<const float*> q;
  std::vector<float*> out;
  std::vector<int64_t> begin, end;
};

// Cells that were not in RAM.
struct CellReads {
  uint64_t ring = 0;
  uint64_t mapped = 0;
  uint64_t away = 0;  // attended by their tier
};

// What one thread works with; grows once.
struct Worker {
  std::vector<KeptRows> kept;                       // many rows; few rows of head 0, 1 ...
  std::vector<std::unique_ptr<SharedRows>> shared;  // by how often the tiles have parted
  PreparedQueries queries;
  Partial running;
  Partial segment;
  std::vector<std::byte> ring;  // cells on their way from the store
  std::vector<const float*> q;
  std::vector<float*> out;
  std::vector<int64_t> begin, end;
  std::vector<CellRef> cells;
  std::vector<TierQuery::Cell> away;  // cells that their tier attends to
  std::vector<float> away_q;          // [n_rows][dk]
  TierPartial answer;
  Partial answered;
  bool weighs = false;              // this step measures attention mass
  std::vector<CellWeight> weights;  // [cells weighed][n_rows]
  std::vector<int64_t> weighed;     // positions of the cells; -1: the sinks
  std::vector<float> mass;
  PreparedQueries sink_queries;        // turned to where a window's renumbering puts them
  std::vector<float> turned;           // [n_rows][dk]
  std::vector<const float*> turned_q;  // [n_rows]
};

// A session on its way into the store.
struct SessionSave {
  SessionRecord record;
  std::vector<Block*> blocks;        // of the record; referred to while a thread commits it
  std::vector<BlockPlace> given_up;  // that they had where the store has these blocks elsewhere
  Status status;
  std::atomic<bool> done{false};
  std::thread thread;
};

class CacheImpl final : public Cache {
 public:
  static Result<std::unique_ptr<Cache>> Create(const CacheOptions& options);
  ~CacheImpl() override;

  const CacheOptions& options() const override { return options_; }
  Result<SequenceId> Create() override;
  Result<SequenceId> Fork(SequenceId parent) override;
  Status Free(SequenceId sequence) override;
  Result<int64_t> Trim(SequenceId sequence, int64_t length) override;
  Result<int64_t> CutToSound(SequenceId sequence, std::string* note) override;
  int64_t Length(SequenceId sequence) const override;
  std::span<const Token> Tokens(SequenceId sequence) const override;

  Result<PrefixUse> Reuse(SequenceId sequence, std::span<const Token> tokens) override;
  Status Publish(SequenceId sequence) override;
  int64_t Room() const override;

  Status Begin(std::span<const StepItem> items) override;
  void Compute(int layer, const float* k, const float* v, const float* q, float* out, int part,
               int n_parts) noexcept override;
  Status Append(int layer, const float* k, const float* v) override;
  Status Attend(int layer, const float* q, float* out) override;
  Status Commit() override;
  void Abort() override;

  using Cache::Save;
  Status Save(SequenceId sequence, const std::string& name, std::span<const float> logits, const std::string& extras,
              std::optional<uint8_t> durability) override;
  Status BeginSave(SequenceId sequence, const std::string& name, std::span<const float> logits,
                   const std::string& extras, std::optional<uint8_t> durability) override;
  Status FinishSave() override;
  using Cache::OpenSession;
  Result<OpenedSession> OpenSession(const std::string& name, bool create) override;

  Status SetRules(std::shared_ptr<const Rules> rules) override;
  Status Pin(SequenceId sequence, bool pinned) override;
  Status Persist(SequenceId sequence) override;
  Status Evict(SequenceId sequence, int64_t begin, int64_t end) override;
  Status Settle() override { return memory_->Settle(); }

  CacheStats Stats() const override;
  std::vector<TransitionCount> Transitions() const override;
  std::string Trace() const override;
  std::vector<CellInfo> Inspect(SequenceId sequence) const override;

 private:
  explicit CacheImpl(const CacheOptions& options) : options_(options) {}

  // cache.cc: sequences and the frame of a step
  Sequence* Find(SequenceId id) const;
  Status CheckItems(std::span<const StepItem> items) const;
  Status CheckLayer(std::string_view call, int layer) const;
  // Which layers the step has left out; empty: none.
  Status CheckLayersOf(std::vector<bool>* left_out) const;
  Status PlanSequence(const StepItem& item, int32_t first_row, int32_t* scratch, StepSequence* planned);
  Status MakeWritable(Sequence* sequence);
  void NoteReads(const StepSequence& item);
  void PlanTiles();
  void PlanGroups();
  void ReleaseFrom(Sequence* sequence, size_t first_block);
  bool WindowsThere(const Sequence& sequence, int64_t length) const;
  void DropPassed(Sequence* sequence);
  void DropUnwanted(Block* block, size_t index);
  Status SettleRoom(uint64_t n_blocks, uint64_t n_exact);
  void EvictPassed(Sequence* sequence);
  size_t FirstVisible(const LayerCells& layer, size_t own_block) const;
  size_t FirstVisible(size_t own_block) const;
  void SetIdentity();
  BlockKey KeyOf(const Block& block) const;
  BlockKey KeyOf(const BlockKey& parent, std::span<const Token, kBlockTokens> tokens, uint64_t generation = 0) const;
  std::vector<Block*> LiveBlocks() const;

  // compute.cc: one layer of a step
  void AppendPart(int layer, const float* k, const float* v, int part, int n_parts);
  // `appended` as Barrier::Arrive gave it; none where one thread has appended all.
  void AttendPart(int layer, const float* q, float* out, int part, std::optional<uint32_t> appended);
  void AppendBlock(const LayerCells& layer, int layer_index, const StepBlock& step, uint16_t head, const float* k,
                   const float* v, SanitizeCounts* counts);
  const std::byte* ExactCell(const LayerCells& layer, const StepBlock& step, uint16_t head) const;
  void SetRows(const LayerCells& layer, const Tile& tile, uint16_t head, const float* q, float* out,
               Worker* worker) const;
  const KeptRows& PreparedRows(int layer, std::span<const uint32_t> tiles, uint16_t head, const float* q, float* out,
                               Worker* worker) const;
  Status AttendSegment(const LayerCells& layer, const Tile& tile, uint16_t head, int32_t segment,
                       const PreparedQueries& queries, Worker* worker, Partial* state);
  Status AttendTurnedSinks(const LayerCells& layer, uint16_t head, size_t gap_tokens, const PreparedQueries& queries,
                           const CellRef& sinks, Worker* worker, Partial* state);
  Status ExactCells(const LayerCells& layer, const Tile& tile, uint16_t head, Worker* worker);
  void NoteMass(const LayerCells& layer, const Tile& tile, uint16_t head, Worker* worker);
  void AttendWhole(int layer, const Tile& tile, uint16_t head, const float* q, float* out, Worker* worker);
  void AttendGroup(int layer, const SegmentGroup& group, uint16_t head, const float* q, float* out, Worker* worker);
  void AttendShared(int layer, const SegmentGroup& group, uint16_t head, size_t from, size_t depth, const float* q,
                    float* out, Worker* worker);
  void FinishSplit(int layer, uint32_t tile, uint16_t head, const float* q, float* out, Worker* worker);
  Status AttendAway(const LayerCells& layer, uint16_t head, const PreparedQueries& queries, Worker* worker,
                    Partial* state);
  Status CodedCells(const LayerCells& layer, const Tile& tile, uint16_t head, size_t begin, size_t end,
                    int64_t first_seen, Worker* worker, CellReads* reads);
  const Block& BlockAt(const Tile& tile, size_t index) const {
    return index >= tile.owner->first_block ? *tile.owner->blocks[index - tile.owner->first_block].block
                                            : *tile.owner->sequence->blocks[index];
  }
  void AddRows(const LayerCells& layer, const Tile& tile, uint16_t head, const float* q, float* out,
               std::vector<const float*>* rows_q, std::vector<float*>* rows_out, std::vector<int64_t>* begin,
               std::vector<int64_t>* end) const;
  int RowsOf(const LayerCells& layer, const Tile& tile) const {
    const StepBlock& step = tile.owner->blocks[tile.index];
    return (step.end - step.begin) * layer.geometry.group();
  }
  void KeepError(Status status);
  void CountReads(const CellReads& reads, uint64_t n_cells, size_t n_tiles);

  // prefix.cc: blocks shared by what they hold
  bool Shares() const { return options_.rules->MayShare(); }
  void Share(Sequence* sequence);
  void Withdraw();
  void WithdrawFrom(Sequence* sequence, size_t first_block);
  Block* SharedInstead(Block* mine, PrefixNode* theirs);
  void AfterRelease(Block* block, size_t index);
  void GiveUpIdle(PrefixNode* node);
  void KeepWithinLimits();
  size_t ReplicaEnd(std::span<PrefixNode* const> chain) const;
  size_t WindowEnd(const Sequence& sequence) const;
  Result<PrefixFound> FindStored(std::span<const Token> tokens, size_t n_blocks, size_t n_there) const;
  size_t TakeStored(PrefixFound* found, size_t n_there, Sequence* sequence, PrefixUse* use);
  void TellEnd(std::span<const Token> tokens, size_t n_most, const PrefixFound& found, PrefixUse* use) const;
  std::vector<std::byte> PackShared(const Sequence& sequence, size_t n_blocks, bool sinks) const;
  bool UnpackSinks(std::span<const std::byte> bytes, Block* root);
  bool UnpackReplicas(std::span<const std::byte> bytes, std::span<Block* const> blocks);

  // session.cc: to the store and back
  // What is to be stored of a sequence, its cells written and its name locked.
  Result<std::unique_ptr<SessionSave>> PackSession(SequenceId id, const std::string& name,
                                                   std::span<const float> logits, const std::string& extras,
                                                   std::optional<uint8_t> durability);
  // The cells of a save that has been committed are the store's from now on.
  void Adopt(SessionSave* save);
  void EndSave();
  std::vector<std::byte> PackExact(const Sequence& sequence);
  Status UnpackExact(std::span<const std::byte> bytes, size_t n_stored, Sequence* sequence);
  // Reads stored blocks [first, blocks.size()) in and verifies them, the newest into RAM as far as there is room.
  // Returns how many blocks from 0 on are sound.
  size_t RecoverFrom(Sequence* sequence, size_t first, int64_t windows_from, std::string* note);
  Result<size_t> BringBack(const SessionRecord& record, Sequence* sequence, std::string* note);

  CacheOptions options_;
  Identity identity_;  // options_.identity and what the cache adds
  BlockKey identity_digest_{};
  std::unique_ptr<Store> store_;
  CellTier* tier_ = nullptr;  // where cells go beyond RAM: the store, the caller's, or nowhere
  std::unique_ptr<CellMemory> memory_;
  std::vector<HeadContext> heads_;                    // [n_cells]: one for each layer and KV head
  std::vector<std::unique_ptr<Sequence>> sequences_;  // by id; null: free
  PrefixTree tree_;
  std::unique_ptr<SessionSave> save_;  // that a thread commits, or has committed; null: none
  Status save_error_;                  // of the last one, until somebody has been told
  std::string save_error_name_;        // the session's
  uint64_t block_bytes_ = 0;           // of a sealed block's cells

  // The step under way.
  bool in_step_ = false;
  std::vector<StepSequence> step_;
  std::vector<Tile> tiles_;
  std::vector<uint32_t> whole_tiles_;  // those not split, last first
  std::vector<SegmentGroup> groups_;   // of the split ones, the largest first, exact segments last
  size_t n_past_groups_ = 0;           // leading ones that read nothing of what the step appends
  int32_t step_rows_ = 0;
  int64_t n_steps_ = 0;
  std::vector<std::byte> scratch_;  // exact cells of blocks that begin and end within the step, one layer at a time
  std::unique_ptr<std::atomic<uint32_t>[]> n_appended_;  // [n_layers] heads of the step's blocks
  std::unique_ptr<std::atomic<uint32_t>[]> next_unit_;   // [n_layers] work handed out in AttendPart
  Barrier barrier_;
  std::vector<Worker> workers_;  // [max_threads]
  std::mutex error_mutex_;
  Status error_;  // first error of the step
  std::atomic<uint64_t> evicted_skips_{0};
  std::atomic<uint64_t> reads_ram_{0}, reads_file_{0}, reads_mapped_{0}, reads_shared_{0}, approximate_reads_{0};
  std::atomic<uint64_t> saturated_{0}, not_finite_{0};

  // Split mode, for few rows: segments of one tile and head are attended by several threads, and the last to finish
  // merges.
  struct SplitUnit {
    std::vector<Partial> partials;  // [n_segments + 1] at least
    std::atomic<int32_t> left{0};   // segments not yet attended
  };
  bool weighs_ = false;                                  // this step measures attention mass
  size_t split_heads_ = 0;                               // of the layer that has most
  std::vector<std::unique_ptr<SplitUnit>> split_units_;  // [tiles][split_heads], reused
};

}  // namespace kvcell
