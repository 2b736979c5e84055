// The durable tier: a directory of append-only segment files with cells, and an SQLite index (WAL) whose commit is what
// makes sessions and blocks exist. Knows bytes and keys, not attention. Formats: docs/format.md; guarantees:
// docs/durability.md.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/file.h"
#include "kvcell/geometry.h"
#include "kvcell/status.h"
#include "kvcell/tier.h"

namespace kvcell {

// What a commit survives (docs/durability.md).
enum class Durability : uint8_t {
  kNone = 0,     // nothing promised: fastest; a crash of the process may lose the save
  kProcess = 1,  // survives kill -9 of every process; the default
  kPower = 2,    // survives power loss: segments are synced before the commit, the index by the commit
};

// Digest that names a block: of identity, parent block and its token ids. Tokens are compared on every hit all the
// same.
using BlockKey = std::array<uint8_t, 16>;

// All that decides whether stored cells may be read, as named fields, so that a mismatch can be named:
// {"weights", "3f…"}, {"codec", "k=…,v=…"}, … in a fixed order.
using Identity = std::vector<std::pair<std::string, std::string>>;
// The first field that differs as `field: stored A, now B`; nothing where they are equal.
std::optional<std::string> IdentityDifference(const Identity& stored, const Identity& now);

// One block of a session as the index keeps it. `places[0]` holds its full-attention layers, `places[1]` its
// sliding-window layers, absent where a window has already passed the block (or the model has no such layers).
struct BlockRecord {
  BlockKey key{};
  uint64_t generation = 0;
  std::array<Token, kBlockTokens> tokens{};
  std::array<std::optional<BlockPlace>, 2> places;
};

// A session as stored: everything to go on with, but for the cells.
struct SessionRecord {
  std::string name;
  std::string model;  // for people: the model's name
  Identity identity;
  std::vector<Token> tokens;  // all of them; blocks.size() * 64 of these are sealed, the rest are the open tail
  std::vector<BlockRecord> blocks;
  std::vector<std::byte> exact;  // sinks and the open tail's exact cells, as `cache` lays them out
  std::vector<float> logits;     // of the last token; may be empty
  std::string extras;            // JSON of the layers above (sampler, chat state)
  // What others need to begin with this session's first blocks (the sinks exactly, as `cache` lays them out); "" where
  // it has no block. Written by Commit; read back by Load only where `exact` is damaged: see PrefixRecord::sinks.
  std::vector<std::byte> sinks;
  // Blocks from this one on are this session's alone: they are neither found nor shared by others, however equal their
  // tokens. Set by Load, where some are, to their first.
  size_t n_shared = std::numeric_limits<size_t>::max();
  int64_t last_used = 0;  // unix seconds; set by Commit
  std::string damage;     // by Load: why `blocks` ends early (which block, what is wrong); "" where all is sound
  std::string notice;     // by Load: what the user should know of the store; "" where all is well
  std::optional<Durability> durability;  // of this save; nothing: the store's
};

struct SessionSummary {
  std::string name;
  std::string model;
  int64_t tokens = 0;
  int64_t bytes = 0;      // cells (each block once) + exact part + logits
  int64_t last_used = 0;  // unix seconds
};

// Blocks to be found by whoever has the same tokens to compute: a chain from position 0 in the store's prefix tree.
struct PrefixRecord {
  Identity identity;  // all that decides whether the cells may be read, the namespace too: chains of two never meet
  std::string model = {};                // for people
  std::vector<Token> tokens;             // [blocks.size() * 64]
  std::vector<BlockRecord> blocks;       // complete, their places held
  std::vector<std::byte> sinks = {};     // what every reader needs beside block 0
  std::vector<std::byte> replicas = {};  // exact cells of the last blocks, where the identity asks for them; else ""
};

// What to look for: whole blocks of a prompt. `keys` only say where to look; tokens are compared one by one, block
// after block from position 0 on.
struct PrefixQuery {
  Identity identity;
  std::span<const Token> tokens;   // [keys.size() * 64] or more; those beyond say where a stored block differs
  std::span<const BlockKey> keys;  // of the whole blocks, in order
  bool needs_replicas = false;     // only ends that were published with `replicas` will do
};

// Why a stored prefix ends where it does.
enum class PrefixEnd : uint8_t {
  kWhole,          // all blocks that were asked for are there
  kNothingStored,  // nothing begins like this
  kEnds,           // what is stored ends here
  kDiffers,        // the nearest stored one has another token at `differs_at`
  kEvicted,        // the next block was there and has been given up for space
  kOtherIdentity,  // the same tokens are stored for another model or codec: `detail` names the field
  kReplicas,       // more agreed, but no end of it was published with the exact cells that were asked for
  kDamaged,        // the next block's row or file fails its checks
};

struct PrefixFound {
  std::vector<BlockRecord> blocks;  // the longest stored prefix, held
  size_t n_matched = 0;             // blocks that agreed; more than there are in `blocks` with kReplicas
  std::vector<std::byte> sinks;     // "" where blocks is empty
  std::vector<std::byte> replicas;  // with needs_replicas
  PrefixEnd end = PrefixEnd::kNothingStored;
  int64_t differs_at = 0;  // position, with kDiffers
  std::string detail;
};

// An end of the prefix tree: a leaf, a place where chains part, or a pinned one.
struct PrefixSummary {
  int64_t id = 0;
  int64_t tokens = 0;    // from position 0
  int64_t refs = 0;      // sessions that hold its last block, and longer prefixes that go on from it
  int64_t sessions = 0;  // of these, sessions
  bool pinned = false;
  bool published = false;  // kept in its own right; else it goes with the sessions
  int64_t last_used = 0;   // unix seconds
  std::string model;
};

// Checks one cell's bytes; the store is told how, since it knows bytes and keys only.
using CellVerifier = std::function<Status(std::span<const std::byte> cell, uint16_t layer, uint16_t head,
                                          int64_t position, const BlockKey& key)>;

struct StoreOptions {
  Durability durability = Durability::kProcess;
  bool create = true;      // make the directory (0700) when it is missing
  bool read_only = false;  // for inspection; nothing is written, locks are shared
  // A segment file is ended, and a new one begun, past this many bytes. Larger: fewer files; smaller: removed sessions
  // give whole files back sooner. An extent larger than this has a segment of its own.
  uint64_t segment_bytes = uint64_t{1} << 30;
  // Secret of an encrypted store, 32 bytes and more; "" where it is none. A store that is founded with one is encrypted
  // for ever: cells, tokens, names, exact parts, logits (docs/format.md). It costs 64 bytes a cell and a pass over
  // them.
  std::string key;
  // The tenant: sessions and blocks of another one are neither seen nor shared. A name as of a session, or "".
  std::string name_space;
  // Most bytes of the store's files, what was there before counts; 0: no cap. Before more is written, sessions that
  // were not used for the longest lose their last blocks, then all; what is in use stays.
  uint64_t disk_cap = 0;
  // Sessions that were not used for this many seconds are removed when the store is opened and at saves; 0: never.
  int64_t ttl_seconds = 0;
  // Stored cells are read and checked by this before fresh ones with the same key are given up for them, so that
  // whoever computes a damaged block again heals it. Null: they are taken for sound unless ReportDamage named them.
  CellVerifier cell_check = nullptr;
  uint32_t index_page_bytes = 0;  // of an index that is founded now: a power of two, 512..65536; 0: SQLite's choice
  SystemCalls* system_calls = nullptr;  // what the kernel is asked through; null: the real calls. Outlives the store.
};

// What Compact did.
struct CompactReport {
  int64_t segments_before = 0, segments_after = 0;
  int64_t bytes_before = 0, bytes_after = 0;  // of segments and index, as the file system counts
  int64_t blocks_moved = 0;
  int64_t segments_in_use = 0;  // left as they are: a running process appends to them
};

struct DamagedCell {
  std::string session;  // one that uses it, "" where none does
  uint16_t layer = 0;
  uint16_t head = 0;
  int64_t position = 0;
  std::string path;  // segment file
  uint64_t offset = 0;
  std::string what;
};

struct StoreEvictions {
  int64_t sessions = 0;  // removed whole
  int64_t blocks = 0;    // of these and, from their end, of others
};

struct StoreStats {
  int64_t sessions = 0, blocks = 0, cells = 0;
  int64_t segment_bytes = 0;                         // of the segment files
  int64_t live_bytes = 0;                            // of cells that a session refers to
  int64_t index_bytes = 0;                           // SQLite's files
  int64_t evicted_sessions = 0, evicted_blocks = 0;  // by this object, for its cap or time to live
  bool encrypted = false;
};

// Thread-safe unless stated. One object per process and directory; any number of processes.
class Store : public CellTier {
 public:
  // kNotFound (create = false), kPermission, kIoError, kMismatch (a newer format), kCorruption (the index is damaged
  // beyond reading; its file is left as it is and named).
  static Result<std::unique_ptr<Store>> Open(const std::string& directory, const StoreOptions& options);
  ~Store() override = default;

  virtual const std::string& directory() const = 0;

  std::string_view TierName() const override { return "file"; }

  // Appends an extent of n_blocks blocks to this process's own segment; space is allocated before it is written, so
  // that a full disk is kNoSpace with nothing changed. The cells stay invisible to others until a Commit names them;
  // if the process ends without one, their space is reclaimed.
  Result<std::vector<BlockPlace>> CreateCells(const CellSetShape& shape, uint32_t n_blocks,
                                              const CellSource& cell) override = 0;

  // The places that CreateCells, Load, FindBlock and Commit hand out are held: their bytes stay although other
  // processes remove every session that uses them. Release gives one hold back, once for each time a block was handed
  // out; a place that was never committed loses its space with the last hold. All holds end with this object or its
  // process. DestroyCells is the same for one place.
  virtual void Release(const BlockRecord& block) = 0;
  // Says that the caller found a block's cells damaged: later Commits of the same key put their own cells in its place
  // instead of sharing it.
  void ReportDamage(const BlockPlace& place) override = 0;
  // A committed block with this key and these tokens, held; nothing where there is none. Spares writing cells twice.
  virtual Result<std::optional<BlockRecord>> FindBlock(const BlockKey& key,
                                                       std::span<const Token, kBlockTokens> tokens) = 0;

  // Publishes blocks as a prefix in one transaction: from then on FindPrefix gives them to everyone of the same
  // identity, and they stay until they are removed or evicted, whatever becomes of sessions. As in Commit, blocks that
  // are there already are shared. Sessions that are saved are found too, but go with the session.
  virtual Status Publish(PrefixRecord* record, const CellSetShape shapes[2]) = 0;
  // The longest stored prefix, held, and why it is no longer. Counts as a use.
  virtual Result<PrefixFound> FindPrefix(const PrefixQuery& query) = 0;
  virtual Result<std::vector<PrefixSummary>> ListPrefixes() = 0;
  // A pinned prefix is never evicted, nor is what it begins with. kNotFound.
  virtual Status PinPrefix(int64_t id, bool pinned) = 0;
  // Gives up a prefix, all longer ones that go on from it, and what before it no other goes on from. Blocks that
  // sessions use stay with these. kNotFound; kBusy where one of them is pinned.
  virtual Status RemovePrefix(int64_t id) = 0;
  // Gives up the ends of chains, longest unused first, until `bytes` of cells are free or nothing that may go is left;
  // returns the bytes freed. Pinned ones and blocks of sessions stay.
  virtual Result<uint64_t> EvictPrefixes(uint64_t bytes) = 0;

  // A generation number that no other write of this store has (monotonic).
  virtual Result<uint64_t> NextGeneration() = 0;

  // Saves a session under record.name in one transaction, replacing an older one of that name. Its blocks' places must
  // be held (appended, loaded or found). A block whose key and tokens are there already is shared: its record in
  // `record` becomes the stored one, and the hold moves with it; the places that it had are released, or go to
  // `given_up` for the caller to destroy when nobody reads there any more. kInvalidArgument (name; tokens of a block
  // are not the session's), kBusy (another process holds the session), kNoSpace, kIoError: the older session and
  // `record` are intact.
  virtual Status Commit(SessionRecord* record, const CellSetShape shapes[2], std::vector<BlockPlace>* given_up) = 0;
  Status Commit(SessionRecord* record, const CellSetShape shapes[2]) { return Commit(record, shapes, nullptr); }

  // kNotFound; kCorruption where the session's own row fails its checksum. Damage of a block's row, extent or segment
  // file ends `blocks` before it and is told in `damage`. The cells themselves are not read. Damaged logits and extras
  // come back empty and are told in `notice`; a damaged exact part comes back empty, with `sinks` where the prefix tree
  // has them, and is told in `damage`; for damaged tokens those of the blocks stand, and what followed them is lost.
  virtual Result<SessionRecord> Load(const std::string& name) = 0;
  virtual Result<std::vector<SessionSummary>> List() = 0;
  // Removes the session; blocks that no other one uses lose their space, held ones as soon as they are released (at the
  // next Remove or Open). `erase` overwrites their bytes and the index's: no byte of them is left in the store's files.
  // kNotFound, kBusy (someone holds the session or, to be erased, its cells).
  virtual Status Remove(const std::string& name, bool erase) = 0;

  // One writer per session name over all processes: kBusy names the holder's process. Released by destroying the lock
  // or when the process dies.
  class SessionLock {
   public:
    virtual ~SessionLock() = default;
  };
  virtual Result<std::unique_ptr<SessionLock>> LockSession(const std::string& name) = 0;

  // One portable file (0600) with a manifest, put in place by a rename. Import refuses what fails its checks
  // (kCorruption, kMismatch for a newer version) and an existing name (kInvalidArgument); `as` gives another name, ""
  // the stored one. It returns the name.
  virtual Status Export(const std::string& name, const std::string& path) = 0;
  virtual Result<std::string> Import(const std::string& path, const std::string& as) = 0;

  // Writes the blocks of segments that have holes anew, one after the other, and the index; gives back what that frees.
  // Other processes read and write meanwhile; a crash leaves the blocks where they were. What they hold is freed later.
  virtual Result<CompactReport> Compact() = 0;
  // Reads all blocks again and again in a thread of the lowest priority, this many bytes a second, and reports damage
  // as ReportDamage does, so that readers of this process miss what it finds; `found` is told, on that thread. Ends
  // with the store.
  virtual void StartScrub(CellVerifier verifier, uint64_t bytes_per_second,
                          std::function<void(const DamagedCell&)> found) = 0;
  // Removes a whole store, its directory included; `erase` overwrites its files first. kNotFound, kInvalidArgument
  // where it is no store, kBusy while a process has it open.
  static Status Destroy(const std::string& directory, bool erase);

  virtual Result<StoreStats> Stats() = 0;
  // What this object has taken from sessions for its cap or time to live.
  virtual StoreEvictions Evictions() const = 0;
  // Checks every row, header and cell; never changes anything.
  virtual Result<std::vector<DamagedCell>> Verify(const CellVerifier& verifier) = 0;
};

// A session name is 1..128 bytes of UTF-8 without control characters, '/' or '\\', and not "." or "..".
// kInvalidArgument says which rule it breaks.
Status CheckSessionName(const std::string& name);

}  // namespace kvcell
