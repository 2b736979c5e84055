// The store itself: the index, the segments and the locks put together. Private to this layer.
#pragma once

#include <atomic>
#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "store/head.h"
#include "store/index.h"
#include "store/segments.h"
#include "store/session_lock.h"
#include "store/store.h"

namespace kvcell {

// A byte of open.lock that every user of the store holds shared; who destroys the store takes it alone.
inline constexpr uint64_t kUseLockByte = 1;

class StoreImpl final : public Store {
 public:
  static Result<std::unique_ptr<Store>> Open(const std::string& directory, const StoreOptions& options);
  ~StoreImpl() override;

  const std::string& directory() const override { return path_; }

  Result<std::vector<BlockPlace>> CreateCells(const CellSetShape& shape, uint32_t n_blocks,
                                              const CellSource& cell) override;
  void DestroyCells(const BlockPlace& place) override { segments_->Release(place); }
  void Release(const BlockRecord& block) override;
  void ReportDamage(const BlockPlace& place) override;
  Result<std::optional<BlockRecord>> FindBlock(const BlockKey& key,
                                               std::span<const Token, kBlockTokens> tokens) override;
  Status ReadCells(const CellSetShape& shape, const BlockPlace& place, size_t layer_slot, uint16_t head_begin,
                   uint16_t n, std::byte* dst) override;
  Status ReadRun(const CellSetShape& shape, const BlockPlace& place, size_t layer_slot, uint32_t n_blocks,
                 std::byte* dst) override;
  void Prefetch(const CellSetShape& shape, const BlockPlace& place, size_t layer_slot, uint32_t n_blocks) override;
  const std::byte* MapExtent(const CellSetShape& shape, const BlockPlace& place) override;
  Result<uint64_t> MappedVersion() override { return segments_->MappedVersion(); }
  std::pair<std::string, uint64_t> Locate(const CellSetShape& shape, const BlockPlace& place, size_t layer_slot,
                                          uint16_t head) const override;
  Result<uint64_t> NextGeneration() override;

  using Store::Commit;
  Status Commit(SessionRecord* record, const CellSetShape shapes[2], std::vector<BlockPlace>* given_up) override;
  Result<SessionRecord> Load(const std::string& name) override;
  Result<std::vector<SessionSummary>> List() override;
  Status Remove(const std::string& name, bool erase) override;
  Result<std::unique_ptr<SessionLock>> LockSession(const std::string& name) override;

  Status Publish(PrefixRecord* record, const CellSetShape shapes[2]) override;
  Result<PrefixFound> FindPrefix(const PrefixQuery& query) override;
  Result<std::vector<PrefixSummary>> ListPrefixes() override;
  Status PinPrefix(int64_t id, bool pinned) override;
  Status RemovePrefix(int64_t id) override;
  Result<uint64_t> EvictPrefixes(uint64_t bytes) override;

  Status Export(const std::string& name, const std::string& path) override;
  Result<std::string> Import(const std::string& path, const std::string& as) override;

  Result<CompactReport> Compact() override;
  void StartScrub(CellVerifier verifier, uint64_t bytes_per_second,
                  std::function<void(const DamagedCell&)> found) override;

  Result<StoreStats> Stats() override;
  StoreEvictions Evictions() const override { return {evicted_sessions_, evicted_of_sessions_}; }
  Result<std::vector<DamagedCell>> Verify(const CellVerifier& verifier) override;

 private:
  // What a Commit has changed so far, taken over or undone as a whole.
  struct Pending {
    std::vector<BlockRow> rows;         // what `record`'s blocks become
    std::vector<ExtentKey> registered;  // extents that the index names now
    std::vector<BlockPlace> held;       // holds taken on stored places
    std::vector<BlockPlace> given_up;   // places of `record` that another one replaces
    std::vector<int64_t> old_blocks;    // of the session's older version, and damaged rows
    std::vector<ExtentKey> emptied;
    bool in_doubt = false;  // the last step failed: the log may or may not have taken it
    uint64_t commits = 0;   // that the index counts with this one
  };

  StoreImpl(std::string path, StoreOptions options, SystemCalls& calls)
      : path_(std::move(path)), options_(options), calls_(calls) {}

  Status OpenFiles();
  // Makes known that this object uses the store, so that nobody destroys it.
  Status MarkInUse();
  // Compares the index with what was counted outside of it.
  Status CheckHead();
  std::string LostCommits() const;
  Status Reclaim();
  Status ReclaimSegment(const File& owned, uint64_t segment);
  // Gives back the bytes of an extent's blocks that no row names; false where someone holds one of them.
  Result<bool> CollectExtent(const ExtentKey& key, bool erase);
  // What Remove does to a session's rows: delete them; the same if nobody holds the cells that then go; or keep them
  // and free the cells beforehand. `emptied` becomes the extents that lose blocks.
  enum class Removal { kPlain, kErase, kCellsAlone };
  Status RemoveRows(const std::string& name, Removal removal, std::vector<ExtentKey>* emptied);
  Status EraseIndexLog();
  // After a commit that failed the log may still hold it, and a recovery might bring it back. Another write over it
  // settles that it never was; false where that fails too.
  bool SettleIndex();

  // --- room (evict.cc); all with mutex_ held
  // As the file system counts them, holes left out.
  uint64_t SegmentFileBytes() const;
  uint64_t IndexFileBytes() const;
  // Evicts until the store and `bytes` more are within the cap; kNoSpace where what is left is in use.
  Status MakeRoom(uint64_t bytes);
  Status EvictBytes(uint64_t bytes);
  // Takes blocks from the session's end until `bytes` are free, the session itself with the last one. False where it is
  // in use.
  Result<bool> EvictTail(const SessionRow& row, uint64_t bytes, uint64_t* freed);
  // Gives up ends of prefixes that nobody holds, the longest unused first, of those last used at `before` or earlier.
  Result<uint64_t> TakePrefixes(uint64_t bytes, int64_t before);
  Result<uint64_t> TakePrefix(int64_t block, std::vector<ExtentKey>* emptied);
  Result<bool> IsHeldByAnyone(const BlockRecord& block) const;
  void RemoveExpired();
  void TrimIndex();
  // Writes the index's log back once it has grown long, so that it doesn't take the disk's last space.
  void TrimLog();
  void TruncateLog();

  // --- moving blocks (compact.cc)
  struct Move {
    BlockRow row;
    size_t kind = 0;
    BlockPlace to;
  };
  Result<int64_t> CompactSegment(uint64_t segment);
  Status MoveBlocks(size_t kind, std::span<const BlockRow> rows, const CellSetShape& stored, std::vector<Move>* moved);
  Result<int64_t> CommitMoves(std::span<const Move> moves);

  // --- the scrub (scrub.cc)
  void ScrubLoop(const CellVerifier& verifier, uint64_t bytes_per_second,
                 const std::function<void(const DamagedCell&)>& found);
  // The next block after `id` and where a session has it; nothing at the end.
  std::optional<std::pair<BlockRow, int64_t>> NextToScrub(int64_t id);
  bool SleepOrStop(double seconds);
  // The first cell of a block that is damaged.
  std::optional<DamagedCell> CheckBlock(const CellVerifier& verifier, const CellSetShape& shape,
                                        const BlockRecord& block, const BlockPlace& place, int64_t position);

  Result<std::unique_ptr<SessionLock>> LockUnlessHeld(const std::string& name);
  Status CheckRecord(const SessionRecord& record) const;
  Status CommitRows(SessionRecord* record, const CellSetShape shapes[2], uint64_t revision, Pending* pending);
  // The end of every write of rows: blocks that nothing uses any more go, the commit is counted and made.
  Status EndRows(Transaction* transaction, Pending* pending);
  // What follows it: `blocks` become those of the store and space comes back, or all that was held is let go. Gives
  // `status` back.
  Status Settle(const Status& status, Pending* pending, std::vector<BlockRecord>* blocks);
  // Shares the stored block that has the same tokens, past and identity, or stores this one; either way it becomes the
  // next of pending->rows and has its place in the prefix tree.
  Status CommitBlock(const BlockRecord& block, const CellSetShape shapes[2], int64_t space, bool held,
                     Pending* pending);
  Status RegisterPlace(const BlockPlace& place, const CellSetShape& shape, Pending* pending);
  // Keeps the stored places and gives the block's up, once the stored cells have been found sound; else the block's
  // own take their place.
  Status CompletePlaces(const BlockRecord& block, const CellSetShape shapes[2], BlockRow* stored, Pending* pending);
  // Whether the cells of a held place are what they must be; mutex_ is held.
  bool CellsAreSound(const BlockRecord& block, const BlockPlace& place, int64_t position);
  // The same for all places of a block that FindBlock found; mutex_ is not held.
  bool FoundIsSound(const BlockRecord& block, int64_t position);
  // Identities of prefixes have the namespace among their fields.
  Identity WithNamespace(const Identity& identity) const;
  // Takes what only an erased session kept out of the prefix tree.
  Status UnholdPrefixes(std::span<const Link> links);
  bool IsDamaged(const BlockPlace& place) const {
    return damaged_.contains({place.segment, place.offset + place.index});
  }

  // verify.cc
  struct Findings;
  void VerifyBlock(const CellVerifier& verifier, const CellSetShape& shape, const BlockRecord& block,
                   const BlockPlace& place, const std::string& session, int64_t position, Findings* findings);
  void VerifyHeld(const CellVerifier& verifier, const BlockRecord& block, const std::string& session, int64_t position,
                  Findings* findings);
  Status VerifyPrefixes(const CellVerifier& verifier, Findings* findings);

  // store_prefix.cc
  Status LinkBlock(int64_t block, size_t depth, int64_t space, bool held, Pending* pending);
  Result<bool> Continues(const BlockRow& row, const BlockRecord& block, int64_t parent, int64_t space);
  Status PublishRows(PrefixRecord* record, const CellSetShape shapes[2], Pending* pending);
  Status WriteSinks(int64_t root, std::span<const std::byte> sinks);
  Status WalkChain(const PrefixQuery& query, int64_t space, std::vector<BlockRow>* rows, PrefixFound* found);
  void DropRows(std::vector<BlockRow>* rows, size_t from);
  Status CutToWhatIsNeeded(const PrefixQuery& query, std::vector<BlockRow>* rows, PrefixFound* found);
  Status TellWhyItEnds(const PrefixQuery& query, int64_t space, const std::vector<BlockRow>& rows, PrefixFound* found);

  Result<SessionRecord> LoadHeld(const SessionRow& row);
  // Makes of damaged parts of a session what can be made of them.
  Status MendData(const SessionRow& row, const SessionDamage& damage, std::span<const std::optional<BlockRow>> blocks,
                  SessionRecord* record);
  void NoteUse(const SessionRow& row);
  // The extent of a place, checked against it; kCorruption where they don't fit.
  Result<ExtentRow> ExtentOf(const BlockPlace& place);
  Status HoldBlock(const BlockRecord& block);
  Result<uint64_t> NextGenerationLocked();
  Status CheckOutside(const std::string& path) const;

  const std::string path_;
  const StoreOptions options_;
  SystemCalls& calls_;
  File directory_;

  std::mutex mutex_;  // over the index and what follows; before the locks of segments_
  std::unique_ptr<Index> index_;
  std::unique_ptr<Segments> segments_;
  std::unique_ptr<SessionLocks> locks_;
  uint64_t next_generation_ = 0;
  uint64_t end_generation_ = 0;
  bool in_doubt_ = false;  // see SettleIndex: until then nothing that such a commit named is given back
  std::set<std::pair<uint64_t, uint64_t>> damaged_;  // segment and lock byte of blocks reported damaged

  File in_use_;
  Head head_;
  uint64_t lost_commits_ = 0;  // that the head knows and the index doesn't
  std::atomic<int64_t> evicted_sessions_ = 0;
  std::atomic<int64_t> evicted_of_sessions_ = 0;  // blocks
  int64_t evicted_of_prefixes_ = 0;               // blocks
  int64_t next_expiry_ = 0;                       // unix seconds: when to look for expired sessions again

  std::mutex scrub_mutex_;
  std::condition_variable scrub_wake_;
  bool scrub_stops_ = false;
  std::thread scrub_;
};

}  // namespace kvcell
