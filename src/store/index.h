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
#include "store/segment_format.h"
#include "store/segments.h"
#include "store/sqlite.h"
#include "store/store.h"

namespace kvcell {

inline constexpr uint32_t kIndexFormat = 1;                  // PRAGMA user_version
inline constexpr uint32_t kIndexApplicationId = 0x4b56434c;  // "KVCL", PRAGMA application_id

// A session's row but for its bulk, which lies in a row of its own so that listing stays cheap.
struct SessionRow {
  int64_t id = 0;
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
};

struct ExtentRow {
  ExtentKey key;
  uint32_t n_blocks = 0;
  CellSetShape shape;
  std::vector<bool> freed;  // [n_blocks] blocks whose bytes are given back already

  uint64_t block_bytes() const { return BlockBytes(shape).value_or(0); }
  ExtentRange range() const { return {key.offset - ExtentHeaderBytes(shape), key.offset + block_bytes() * n_blocks}; }
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

  const std::string& path() const { return database_->path(); }
  const StoreId& store_id() const { return store_id_; }
  Database& database() { return *database_; }

  // The first of `n` numbers that nobody had before; a transaction of its own.
  Result<uint64_t> ReserveGenerations(uint64_t n);

  Result<std::optional<SessionRow>> FindSession(const std::string& name);
  Result<std::vector<SessionRow>> ListSessions(std::vector<std::string>* damaged);
  // Fills tokens, exact part, logits and extras.
  Status ReadSessionData(const SessionRow& row, SessionRecord* record);
  // Inserts (row->id 0) or updates a session with its data; sets id, data_bytes and data_checksum.
  Status WriteSession(SessionRow* row, const SessionRecord& record);
  // Deletes a session, its data and links.
  Status DeleteSession(int64_t id);
  // The id of a session's row whatever its state, so that a damaged one can be replaced or removed.
  Result<std::optional<int64_t>> SessionId(const std::string& name);

  // The session's blocks by position; nothing in the place of one whose rows are missing, damaged or of other tokens.
  Result<std::vector<std::optional<BlockRow>>> ReadSessionBlocks(const SessionRow& row, std::span<const Token> tokens);
  // What such a place means, for people.
  std::string BlockDamage(const SessionRow& row, size_t position) const;
  Result<std::vector<Link>> ReadLinks(int64_t session);  // by position
  // Makes `blocks` the session's; `old` is what it had.
  Status WriteLinks(int64_t session, std::span<const Link> old, std::span<const BlockRow> blocks);

  // Sound blocks of this key; those that fail their checksum are given by id alone in `damaged`.
  Result<std::vector<BlockRow>> FindBlocks(const BlockKey& key, std::vector<int64_t>* damaged);
  // The block of a row; nothing where it is gone or damaged.
  Result<std::optional<BlockRow>> FindBlock(int64_t id);
  // Inserts (id 0, set then) or updates.
  Status WriteBlock(BlockRow* row);
  // Deletes those of the blocks that no session uses; returns the extents they had cells in.
  Result<std::vector<ExtentKey>> DeleteUnusedBlocks(std::span<const int64_t> ids);

  Result<std::optional<ExtentRow>> FindExtent(const ExtentKey& key);
  Status WriteExtent(const ExtentRow& row);
  Status DeleteExtent(const ExtentKey& key);
  // All of a segment's, by offset.
  Result<std::vector<ExtentRow>> ListExtents(uint64_t segment);
  Result<std::vector<ExtentKey>> ListExtentKeys();
  // Bytes of the cells of a session's blocks.
  Result<int64_t> SessionCellBytes(int64_t session);
  // Blocks of an extent that rows name.
  Result<std::vector<bool>> UsedBlocks(const ExtentRow& extent);

  Result<int64_t> CountRows(const char* count_sql);
  Result<std::vector<std::string>> CheckStructure();  // what SQLite's own check finds

 private:
  explicit Index(std::unique_ptr<Database> database) : database_(std::move(database)) {}
  Status Found();
  Status Recognise();
  Result<std::vector<std::byte>> GetMeta(const char* key);
  Status PutMeta(const char* key, std::span<const std::byte> value);
  Status DeleteLinksFrom(int64_t session, int64_t position);

  OpenIndex open_;  // ends after the connection
  std::unique_ptr<Database> database_;
  StoreId store_id_{};
};

std::vector<std::byte> MakeIdentityBytes(const Identity& identity);
std::optional<Identity> ParseIdentityBytes(std::span<const std::byte> bytes);
// A place from stored numbers; nothing where they can't be one.
std::optional<BlockPlace> MakePlace(int64_t segment, int64_t offset, int64_t n_blocks, int64_t index);

}  // namespace kvcell
