// The store itself: the index, the segments and the locks put together. Private to this layer.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "store/index.h"
#include "store/segments.h"
#include "store/session_lock.h"
#include "store/store.h"

namespace kvcell {

class StoreImpl final : public Store {
 public:
  static Result<std::unique_ptr<Store>> Open(const std::string& directory, const StoreOptions& options);
  ~StoreImpl() override;

  const std::string& directory() const override { return path_; }

  Result<std::vector<BlockPlace>> AppendExtent(
      const CellSetShape& shape, uint32_t n_blocks,
      const std::function<const std::byte*(size_t layer_slot, uint32_t block, uint16_t head)>& cell) override;
  void Release(const BlockRecord& block) override;
  void ReportDamage(const BlockPlace& place) override;
  Result<std::optional<BlockRecord>> FindBlock(const BlockKey& key,
                                               std::span<const Token, kBlockTokens> tokens) override;
  Status ReadCells(const CellSetShape& shape, const BlockPlace& place, size_t layer_slot, uint16_t head_begin,
                   uint16_t n, std::byte* dst) override;
  Status ReadRun(const CellSetShape& shape, const BlockPlace& place, size_t layer_slot, uint32_t n_blocks,
                 std::byte* dst) override;
  std::pair<std::string, uint64_t> Locate(const CellSetShape& shape, const BlockPlace& place, size_t layer_slot,
                                          uint16_t head) const override;
  Result<uint64_t> NextGeneration() override;

  Status Commit(SessionRecord* record, const CellSetShape shapes[2]) override;
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

  Result<StoreStats> Stats() override;
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
  };

  StoreImpl(std::string path, StoreOptions options, SystemCalls& calls)
      : path_(std::move(path)), options_(options), calls_(calls) {}

  Status OpenFiles();
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

  Result<std::unique_ptr<SessionLock>> LockUnlessHeld(const std::string& name);
  Status CheckRecord(const SessionRecord& record) const;
  Status CommitRows(SessionRecord* record, const CellSetShape shapes[2], uint64_t revision, Pending* pending);
  // Shares the stored block that has the same tokens, past and identity, or stores this one; either way it becomes the
  // next of pending->rows and has its place in the prefix tree.
  Status CommitBlock(const BlockRecord& block, const CellSetShape shapes[2], int64_t space, bool held,
                     Pending* pending);
  Status RegisterPlace(const BlockPlace& place, const CellSetShape& shape, Pending* pending);
  // Sets (*stored)[i] to block's place where the stored one is missing or known to be damaged.
  Status CompletePlaces(const BlockRecord& block, const CellSetShape shapes[2], BlockRow* stored, Pending* pending);
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
};

}  // namespace kvcell
