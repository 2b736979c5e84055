// The index of a store: the rows of its SQLite file and their checksums, one class method per statement. Says nothing
// about locks or segment bytes. Every row that comes back has passed its checksum and its fields their bounds.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/file.h"
#include "kvcell/status.h"
#include "store/cipher.h"
#include "store/segment_format.h"
#include "store/segments.h"
#include "store/sqlite.h"
#include "store/store.h"

namespace kvcell {

inline constexpr uint32_t kIndexFormat = 2;                  // PRAGMA user_version
inline constexpr uint32_t kOldestIndexFormat = 1;            // read, and raised to kIndexFormat by who writes
inline constexpr uint32_t kIndexApplicationId = 0x4b56434c;  // "KVCL", PRAGMA application_id

class PrefixIndex;

// A session's row but for its bulk, which lies in a row of its own so that listing stays cheap.
struct SessionRow {
  int64_t id = 0;
  std::string space;  // namespace
  std::string name;
  std::string model;
  Identity identity;
  int64_t n_tokens = 0;
  int64_t n_blocks = 0;
  int64_t data_bytes = 0;  // of exact part and logits
  int64_t last_used = 0;
  uint64_t revision = 0;  // a new one with every save
  uint64_t data_checksum = 0;
};

struct BlockRow {
  int64_t id = 0;
  BlockRecord record;
  std::vector<std::byte> stored_key;  // the column it is found by; empty in a new row
};

// Which rows: of the namespace that the store was opened for, or of all.
enum class Spaces { kOwn, kAll };

struct ExtentRow {
  ExtentKey key;
  uint32_t n_blocks = 0;
  CellSetShape shape;
  std::vector<bool> freed;  // [n_blocks] blocks whose bytes are given back already

  uint64_t block_bytes() const { return BlockBytes(shape).value_or(0); }
  ExtentRange range() const { return {key.offset - ExtentHeaderBytes(shape), key.offset + block_bytes() * n_blocks}; }
};

// Which parts of a session's data fail their checksums. Without a sound row of checksums that is all of them.
struct SessionDamage {
  bool tokens = false, exact = false, logits = false, extras = false;
  bool any() const { return tokens || exact || logits || extras; }
};

// Which block a session has at a position, as its row says it, unchecked.
struct Link {
  int64_t block = 0;
  uint64_t checksum = 0;
};

// That this process has an index file open by way of SQLite, whose locks on it belong to the process: closing any other
// descriptor of the same file would drop them, and another process could then take the log away. So the file is opened
// besides SQLite only while no OpenIndex of it lives.
class OpenIndex {
 public:
  OpenIndex() = default;
  OpenIndex(OpenIndex&& other) noexcept : file_(std::exchange(other.file_, std::nullopt)) {}
  OpenIndex& operator=(OpenIndex&& other) noexcept {
    std::swap(file_, other.file_);
    return *this;
  }
  ~OpenIndex();

  // `first`, which may open and close the file, runs if nobody in this process has it open; nobody opens it meanwhile.
  static Result<OpenIndex> Enter(const struct stat& file, const std::function<Status()>& first);

 private:
  std::optional<std::pair<dev_t, ino_t>> file_;
};

// Thread-compatible. Methods run inside the caller's transaction unless stated.
class Index {
 public:
  // Opens or, where there is none, founds the index of a store: store.db in `directory`. Callers that write hold the
  // store's open lock.
  static Result<std::unique_ptr<Index>> Open(SystemCalls& calls, const File& directory, const StoreOptions& options);

  // kNotFound or kCorruption where the directory has no index of ours. Nobody in this process has it open.
  static Status CheckIsStore(SystemCalls& calls, const File& directory);

  const std::string& path() const { return database_->path(); }
  const StoreId& store_id() const { return store_id_; }
  Database& database() { return *database_; }
  // Null where the store is not encrypted.
  const Cipher* cipher() const { return cipher_.get(); }
  // The prefix tree's tables; not to outlive this.
  PrefixIndex prefixes();
  // What a block's row is found by.
  std::vector<std::byte> StoredKey(const BlockKey& key) const;
  // Whether a block was stored under the namespace that the store was opened for.
  bool IsOfOwnSpace(const BlockRow& row) const { return StoredKey(row.record.key) == row.stored_key; }
  // What a session is found by, in rows and lock files: its namespace and name, or their keyed digest.
  std::string RowName(std::string_view space, std::string_view name) const;
  std::string RowName(std::string_view name) const { return RowName(space_, name); }

  // The first of `n` numbers that nobody had before; a transaction of its own.
  Result<uint64_t> ReserveGenerations(uint64_t n);

  // Counts one more transaction that changes what is stored; what it returns is the head's once that has committed.
  Result<uint64_t> CountCommit();
  Result<uint64_t> Commits();
  // How often blocks have been moved: places read before and used after are checked against it.
  Result<uint64_t> Moves();
  Status CountMove();

  // kCorruption where there is none but a damaged row may have been it.
  Result<std::optional<SessionRow>> FindSession(const std::string& name);
  Result<std::optional<SessionRow>> FindSession(int64_t id);
  Result<std::vector<SessionRow>> ListSessions(Spaces spaces, std::vector<std::string>* damaged);
  // Notes that a session was used now.
  Status TouchSession(SessionRow row, int64_t now);
  // Fills tokens, exact part, logits and extras; those that fail their checksums stay empty and are told in `damage`.
  Status ReadSessionData(const SessionRow& row, SessionRecord* record, SessionDamage* damage);
  // Inserts (row->id 0) or updates a session with its data; sets id, data_bytes and data_checksum.
  Status WriteSession(SessionRow* row, const SessionRecord& record);
  // Deletes a session, its data and links.
  Status DeleteSession(int64_t id);
  // The id of a session's row whatever its state, so that a damaged one can be replaced or removed.
  Result<std::optional<int64_t>> SessionId(const std::string& name);

  // The session's blocks by position; nothing in the place of one whose rows are missing, damaged or of other
  // tokens; `tokens` may be empty: unknown.
  Result<std::vector<std::optional<BlockRow>>> ReadSessionBlocks(const SessionRow& row, std::span<const Token> tokens);
  // What such a place means, for people.
  std::string BlockDamage(const SessionRow& row, size_t position) const;
  Result<std::vector<Link>> ReadLinks(int64_t session);  // by position
  // Makes `blocks` the session's; `old` is what it had.
  Status WriteLinks(int64_t session, std::span<const Link> old, std::span<const BlockRow> blocks);
  // Takes the blocks from position `n_blocks` on away from a session; returns the blocks that it had there.
  Result<std::vector<int64_t>> CutSession(SessionRow row, int64_t n_blocks);

  // Sound blocks of this key; those that fail their checksum are given by id alone in `damaged`.
  Result<std::vector<BlockRow>> FindBlocks(const BlockKey& key, std::vector<int64_t>* damaged);
  // The block of a row; nothing where it is gone or damaged.
  Result<std::optional<BlockRow>> FindBlock(int64_t id);
  // The first sound block with a greater id, and the position that a session or prefix has it at; nothing at the end.
  Result<std::optional<std::pair<BlockRow, int64_t>>> NextBlock(int64_t id);
  // Inserts (id 0, set then) or updates.
  Status WriteBlock(BlockRow* row);
  // The position of a block's first token, as a session or the prefix tree has it.
  Result<std::optional<int64_t>> BlockPosition(int64_t block);
  // Sessions that use a block, once for each position, and the prefix tree where it keeps it.
  Result<int64_t> CountUsers(int64_t block);
  // Deletes those of the blocks that neither sessions nor kept prefixes use; returns the extents they had cells in.
  Result<std::vector<ExtentKey>> DeleteUnusedBlocks(std::span<const int64_t> ids);

  Result<std::optional<ExtentRow>> FindExtent(const ExtentKey& key);
  Status WriteExtent(const ExtentRow& row);
  Status DeleteExtent(const ExtentKey& key);
  // All of a segment's, by offset.
  Result<std::vector<ExtentRow>> ListExtents(uint64_t segment);
  Result<std::vector<ExtentKey>> ListExtentKeys();
  // Blocks that have cells in a segment, with the sessions' order where they have one.
  Result<std::vector<BlockRow>> BlocksInSegment(uint64_t segment);
  // Bytes of the cells of a session's blocks.
  Result<int64_t> SessionCellBytes(int64_t session);
  // Blocks of an extent that rows name.
  Result<std::vector<bool>> UsedBlocks(const ExtentRow& extent);

  // What the next commit survives; outside of transactions.
  Status SetDurability(Durability durability);
  Result<int64_t> CountRows(const char* count_sql);
  Result<std::vector<std::string>> CheckStructure();  // what SQLite's own check finds

 private:
  Index(std::unique_ptr<Database> database, const StoreOptions& options)
      : database_(std::move(database)), space_(options.name_space) {}
  Status Found(const StoreOptions& options);
  Status Recognise(const StoreOptions& options);
  Status CheckSchema(int64_t format);
  Status OpenCipher(const StoreOptions& options);
  Status Upgrade();
  Result<std::optional<std::vector<std::byte>>> FindMeta(const char* key);
  Result<std::vector<std::byte>> GetMeta(const char* key);
  Status PutMeta(const char* key, std::span<const std::byte> value);
  Result<uint64_t> GetCount(const char* key);
  Status PutCount(const char* key, uint64_t value);
  Status DeleteLinksFrom(int64_t session, int64_t position);

  // What a value is sealed for: its table, row and column.
  SealedFor About(std::string_view table, int64_t row, uint64_t column) const;
  std::optional<SessionRow> GetSession(const Query& query) const;
  std::optional<BlockRow> GetBlock(const Query& query, int first) const;
  Status WriteSessionRow(const SessionRow& row);
  // Which of a session's data columns are what its row of checksums says.
  Status CheckParts(const SessionRow& row, std::span<const std::span<const std::byte>> columns, std::span<bool> sound);

  OpenIndex open_;  // ends after the connection
  std::unique_ptr<Database> database_;
  StoreId store_id_{};
  std::unique_ptr<Cipher> cipher_;
  std::string space_;
  std::optional<Durability> durability_;  // in force
};

std::vector<std::byte> MakeIdentityBytes(const Identity& identity);
std::optional<Identity> ParseIdentityBytes(std::span<const std::byte> bytes);
// A place from stored numbers; nothing where they can't be one.
std::optional<BlockPlace> MakePlace(int64_t segment, int64_t offset, int64_t n_blocks, int64_t index);

}  // namespace kvcell
