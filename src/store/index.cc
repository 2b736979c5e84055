#include "store/index.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/random.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <limits>
#include <map>
#include <mutex>
#include <set>

#include "base/checksum.h"
#include "store/prefix_index.h"

namespace kvcell {
namespace {

constexpr const char* kSchema = R"(
  CREATE TABLE meta(key TEXT PRIMARY KEY, value BLOB NOT NULL, checksum INTEGER NOT NULL) WITHOUT ROWID;
  CREATE TABLE sessions(id INTEGER PRIMARY KEY AUTOINCREMENT, name TEXT NOT NULL UNIQUE, model TEXT NOT NULL,
    identity BLOB NOT NULL, n_tokens INTEGER NOT NULL, n_blocks INTEGER NOT NULL, data_bytes INTEGER NOT NULL,
    last_used INTEGER NOT NULL, revision INTEGER NOT NULL, data_checksum INTEGER NOT NULL, checksum INTEGER NOT NULL);
  CREATE TABLE session_data(session INTEGER PRIMARY KEY REFERENCES sessions(id), tokens BLOB NOT NULL, exact BLOB NOT NULL,
    logits BLOB NOT NULL, extras BLOB NOT NULL);
  CREATE TABLE blocks(id INTEGER PRIMARY KEY AUTOINCREMENT, key BLOB NOT NULL, generation INTEGER NOT NULL,
    tokens BLOB NOT NULL, segment0 INTEGER, offset0 INTEGER, n_blocks0 INTEGER, index0 INTEGER, segment1 INTEGER,
    offset1 INTEGER, n_blocks1 INTEGER, index1 INTEGER, checksum INTEGER NOT NULL);
  CREATE INDEX blocks_by_key ON blocks(key);
  CREATE INDEX blocks_by_place0 ON blocks(segment0, offset0);
  CREATE INDEX blocks_by_place1 ON blocks(segment1, offset1);
  CREATE TABLE session_blocks(session INTEGER NOT NULL REFERENCES sessions(id), position INTEGER NOT NULL,
    block INTEGER NOT NULL REFERENCES blocks(id), checksum INTEGER NOT NULL, PRIMARY KEY(session, position)) WITHOUT ROWID;
  CREATE INDEX session_blocks_by_block ON session_blocks(block);
  CREATE TABLE extents(segment INTEGER NOT NULL, offset INTEGER NOT NULL, n_blocks INTEGER NOT NULL, shape BLOB NOT NULL,
    freed BLOB NOT NULL, checksum INTEGER NOT NULL, PRIMARY KEY(segment, offset)) WITHOUT ROWID;
)";

constexpr size_t kTokenBytes = kBlockTokens * sizeof(Token);

Status RowDamaged(const std::string& path, std::string_view row) {
  return Status(
      StatusCode::kCorruption,
      fmt::format("index {}: the row of {} fails its checksum; run `kvcell store verify` to see what else does", path,
                  row));
}

// A row's checksum covers its table's tag and every field; the tag keeps a row from passing for one of another table.
uint64_t RowChecksum(std::string_view table, ByteWriter fields) {
  fields.Sized(table);
  return Checksum64(fields.bytes());
}

uint64_t SessionChecksum(const SessionRow& row, std::span<const std::byte> identity) {
  ByteWriter out;
  out.Put(row.id)
      .Sized(row.name)
      .Sized(row.model)
      .Sized(identity)
      .Put(row.n_tokens)
      .Put(row.n_blocks)
      .Put(row.data_bytes);
  out.Put(row.last_used).Put(row.revision).Put(row.data_checksum);
  return RowChecksum("sessions", std::move(out));
}

uint64_t DataChecksum(int64_t session, std::span<const std::byte> tokens, std::span<const std::byte> exact,
                      std::span<const std::byte> logits, std::span<const std::byte> extras) {
  ByteWriter out;
  out.Put(session);
  for (const auto& part : {tokens, exact, logits, extras}) out.Put(uint64_t{part.size()}).Put(Checksum64(part));
  return RowChecksum("session_data", std::move(out));
}

void PutPlace(ByteWriter* out, const std::optional<BlockPlace>& place) {
  const BlockPlace p = place.value_or(BlockPlace{});
  out->Put(uint8_t{place.has_value()}).Put(p.segment).Put(p.offset).Put(p.n_blocks).Put(p.index);
}

uint64_t BlockChecksum(const BlockRow& row) {
  ByteWriter out;
  out.Put(row.id).Raw(std::as_bytes(std::span(row.record.key))).Put(row.record.generation);
  out.Raw(std::as_bytes(std::span(row.record.tokens)));
  for (const auto& place : row.record.places) PutPlace(&out, place);
  return RowChecksum("blocks", std::move(out));
}

uint64_t LinkChecksum(int64_t session, int64_t position, int64_t block, const BlockKey& key) {
  ByteWriter out;
  out.Put(session).Put(position).Put(block).Raw(std::as_bytes(std::span(key)));
  return RowChecksum("session_blocks", std::move(out));
}

std::vector<std::byte> MakeBits(const std::vector<bool>& bits) {
  std::vector<std::byte> bytes((bits.size() + 7) / 8);
  for (size_t i = 0; i < bits.size(); ++i) {
    if (bits[i]) bytes[i / 8] |= std::byte(1u << (i % 8));
  }
  return bytes;
}

uint64_t ExtentChecksum(const ExtentKey& key, uint64_t n_blocks, std::span<const std::byte> shape,
                        std::span<const std::byte> freed) {
  ByteWriter out;
  out.Put(key.segment).Put(key.offset).Put(n_blocks).Sized(shape).Sized(freed);
  return RowChecksum("extents", std::move(out));
}

// Columns of `sessions` in the order of kSessionColumns; nothing where they fail their checks.
#define KVCELL_SESSION_COLUMNS \
  "id,name,model,identity,n_tokens,n_blocks,data_bytes,last_used,revision,data_checksum,checksum"
std::optional<SessionRow> GetSession(const Query& query) {
  SessionRow row;
  row.id = query.GetInt(0);
  row.name = query.GetText(1);
  row.model = query.GetText(2);
  const auto identity_bytes = query.GetBlob(3);
  const auto identity = ParseIdentityBytes(identity_bytes);
  row.n_tokens = query.GetInt(4);
  row.n_blocks = query.GetInt(5);
  row.data_bytes = query.GetInt(6);
  row.last_used = query.GetInt(7);
  row.revision = query.GetUint(8);
  row.data_checksum = query.GetUint(9);
  if (!identity || SessionChecksum(row, identity_bytes) != query.GetUint(10)) return std::nullopt;
  if (row.n_tokens < 0 || row.n_blocks < 0 || row.n_blocks > row.n_tokens / kBlockTokens) return std::nullopt;
  row.identity = *identity;
  return row;
}

// Columns of `blocks` from `first` on in the order of KVCELL_BLOCK_COLUMNS.
#define KVCELL_BLOCK_COLUMNS                                                                              \
  "blocks.id,blocks.key,blocks.generation,blocks.tokens,blocks.segment0,blocks.offset0,blocks.n_blocks0," \
  "blocks.index0,blocks.segment1,blocks.offset1,blocks.n_blocks1,blocks.index1,blocks.checksum"
std::optional<BlockRow> GetBlock(const Query& query, int first) {
  BlockRow row;
  row.id = query.GetInt(first);
  const auto key = query.GetBlob(first + 1);
  row.record.generation = query.GetUint(first + 2);
  if (key.size() != row.record.key.size()) return std::nullopt;
  std::memcpy(row.record.key.data(), key.data(), key.size());
  const auto tokens = query.GetBlob(first + 3);
  if (tokens.size() != kTokenBytes) return std::nullopt;
  std::memcpy(row.record.tokens.data(), tokens.data(), kTokenBytes);
  for (int i = 0; i < 2; ++i) {
    const int at = first + 4 + 4 * i;
    if (query.IsNull(at)) continue;
    const auto place = MakePlace(query.GetInt(at), query.GetInt(at + 1), query.GetInt(at + 2), query.GetInt(at + 3));
    if (!place) return std::nullopt;
    row.record.places[static_cast<size_t>(i)] = place;
  }
  if (BlockChecksum(row) != query.GetUint(first + 12)) return std::nullopt;
  return row;
}

// Columns segment, offset, n_blocks, shape, freed, checksum.
std::optional<ExtentRow> GetExtent(const Query& query) {
  const auto shape_bytes = query.GetBlob(3);
  const std::vector<std::byte> shape_copy(shape_bytes.begin(), shape_bytes.end());
  const auto freed = query.GetBlob(4);
  const ExtentKey key{query.GetUint(0), query.GetUint(1)};
  const uint64_t n_blocks = query.GetUint(2);
  if (ExtentChecksum(key, n_blocks, shape_copy, freed) != query.GetUint(5)) return std::nullopt;
  const auto shape = ParseShapeBytes(shape_copy);
  if (!shape || n_blocks == 0 || n_blocks > std::numeric_limits<uint32_t>::max() ||
      freed.size() != (n_blocks + 7) / 8) {
    return std::nullopt;
  }
  const auto bytes = CheckedMul(*BlockBytes(*shape), n_blocks);
  if (!bytes || *bytes > kMaxOffset || key.offset > kMaxOffset || key.offset % 64 != 0 ||
      key.offset < kPageBytes + ExtentHeaderBytes(*shape)) {
    return std::nullopt;
  }
  ExtentRow row{key, static_cast<uint32_t>(n_blocks), *shape, std::vector<bool>(n_blocks)};
  for (size_t i = 0; i < n_blocks; ++i) row.freed[i] = (freed[i / 8] & std::byte(1u << (i % 8))) != std::byte{0};
  return row;
}

}  // namespace

std::vector<std::byte> MakeIdentityBytes(const Identity& identity) {
  ByteWriter out;
  for (const auto& [name, value] : identity) out.Sized(name).Sized(value);
  return std::move(out.bytes());
}

std::optional<Identity> ParseIdentityBytes(std::span<const std::byte> bytes) {
  Identity identity;
  ByteReader in(bytes);
  while (in.ok() && !in.at_end()) {
    std::string name = in.Text();
    identity.emplace_back(std::move(name), in.Text());
  }
  if (!in.ok()) return std::nullopt;
  return identity;
}

std::optional<BlockPlace> MakePlace(int64_t segment, int64_t offset, int64_t n_blocks, int64_t index) {
  if (segment < 0 || offset < static_cast<int64_t>(kPageBytes) || offset > static_cast<int64_t>(kMaxOffset) ||
      offset % 64 != 0 || n_blocks < 1 || n_blocks > std::numeric_limits<uint32_t>::max() || index < 0 ||
      index >= n_blocks) {
    return std::nullopt;
  }
  return BlockPlace{static_cast<uint64_t>(segment), static_cast<uint64_t>(offset), static_cast<uint32_t>(n_blocks),
                    static_cast<uint32_t>(index)};
}

// Looks at the file itself before SQLite does, so that a file that isn't ours or is newer is not even opened for
// writing.
static Result<bool> IsFounded(const File& file) {
  std::array<std::byte, 100> header{};
  const auto n = file.ReadAt(0, header);
  if (!n) return Fail(n.error());
  if (*n == 0) return false;
  const auto big_endian = [&](size_t at) {
    uint32_t value = 0;
    std::memcpy(&value, header.data() + at, sizeof(value));
    return __builtin_bswap32(value);
  };
  constexpr std::string_view kSqliteMagic("SQLite format 3\0", 16);
  if (*n < header.size() || std::memcmp(header.data(), kSqliteMagic.data(), kSqliteMagic.size()) != 0 ||
      big_endian(68) != kIndexApplicationId) {
    return Fail(
        StatusCode::kCorruption,
        fmt::format("{} is not a kvcell index or is damaged, and is left as it is: move it away and start a new store",
                    file.path()));
  }
  if (const uint32_t version = big_endian(60); version != kIndexFormat) {
    return Fail(StatusCode::kMismatch,
                fmt::format("index {} has format {}, this program reads {}: use the program that wrote it", file.path(),
                            version, kIndexFormat));
  }
  return true;
}

namespace {

// How many indexes this process has open, by file.
struct OpenIndexes {
  std::mutex mutex;
  std::map<std::pair<dev_t, ino_t>, int> counts;
  static OpenIndexes& Instance() {
    static OpenIndexes instance;
    return instance;
  }
};

}  // namespace

OpenIndex::~OpenIndex() {
  if (!file_) return;
  auto& open = OpenIndexes::Instance();
  const std::lock_guard lock(open.mutex);
  if (--open.counts[*file_] == 0) open.counts.erase(*file_);
}

Result<OpenIndex> OpenIndex::Enter(const struct stat& file, const std::function<Status()>& first) {
  auto& open = OpenIndexes::Instance();
  const std::lock_guard lock(open.mutex);
  const std::pair key{file.st_dev, file.st_ino};
  if (!open.counts.contains(key)) KVCELL_FAIL_IF_ERROR(first());
  ++open.counts[key];
  OpenIndex entered;
  entered.file_ = key;
  return entered;
}

Result<std::unique_ptr<Index>> Index::Open(SystemCalls& calls, const File& directory, const StoreOptions& options) {
  const std::string path = directory.path() + "/store.db";
  const bool writes = !options.read_only;
  struct stat info = {};
  int result = calls.StatAt(directory.fd(), "store.db", &info);
  if (result == -ENOENT && writes && options.create) {
    const auto made = File::Open(calls, directory.fd(), "store.db", O_RDWR | O_CREAT | O_EXCL, 0600, path);
    if (!made) return Fail(made.error());
    result = calls.StatAt(directory.fd(), "store.db", &info);
  }
  if (result < 0) return Fail(ErrnoStatus(-result, "open", path));
  bool founded = true;
  auto open = OpenIndex::Enter(info, [&]() -> Status {
    const auto file = File::Open(calls, directory.fd(), "store.db", writes ? O_RDWR : O_RDONLY, 0, path);
    if (!file) return file.error();
    const auto found = IsFounded(*file);
    if (!found) return found.error();
    founded = *found;
    return OkStatus();
  });
  if (!open) return Fail(open.error());
  if (!founded && !writes) {
    return Fail(StatusCode::kNotFound, fmt::format("index {} is empty: there is no store yet", path));
  }
  auto database = Database::Open(path, options.read_only);
  if (!database) return Fail(database.error());
  std::unique_ptr<Index> index(new Index(std::move(*database)));
  index->open_ = std::move(*open);
  if (writes) {
    constexpr std::array<const char*, 3> kSynchronous = {"PRAGMA synchronous=OFF", "PRAGMA synchronous=NORMAL",
                                                         "PRAGMA synchronous=FULL"};
    KVCELL_FAIL_IF_ERROR(index->database_->Run(kSynchronous.at(static_cast<size_t>(options.durability))));
    if (!founded) KVCELL_FAIL_IF_ERROR(index->Found());
    KVCELL_FAIL_IF_ERROR(PrefixIndex(*index->database_).Found());
    KVCELL_FAIL_IF_ERROR(
        index->database_->Run("PRAGMA journal_mode=WAL; PRAGMA secure_delete=ON; PRAGMA temp_store=MEMORY;"));
  }
  KVCELL_FAIL_IF_ERROR(index->Recognise());
  return index;
}

// One transaction in the file itself, before it has a write-ahead log: its header says whose it is from the first
// moment.
Status Index::Found() {
  StoreId id{};
  if (::getrandom(id.data(), id.size(), 0) != static_cast<ssize_t>(id.size())) {
    return ErrnoStatus(errno, "get random numbers for", path());
  }
  Transaction transaction(*database_);
  KVCELL_RETURN_IF_ERROR(transaction.Begin(Transaction::Kind::kWrite));
  const std::string marks =
      fmt::format("PRAGMA application_id={}; PRAGMA user_version={};", kIndexApplicationId, kIndexFormat);
  KVCELL_RETURN_IF_ERROR(database_->Run(marks.c_str()));
  KVCELL_RETURN_IF_ERROR(database_->Run(kSchema));
  KVCELL_RETURN_IF_ERROR(PutMeta("store_id", std::as_bytes(std::span(id))));
  const uint64_t first_generation = 1;
  KVCELL_RETURN_IF_ERROR(PutMeta("next_generation", std::as_bytes(std::span(&first_generation, 1))));
  return transaction.Commit();
}

Status Index::Recognise() {
  Query version(*database_, "PRAGMA user_version");
  const auto row = version.Step();
  if (!row) return row.error();
  if (!*row || version.GetInt(0) != kIndexFormat) {
    return Status(StatusCode::kMismatch,
                  fmt::format("index {} has format {}, this program reads {}: use the program that wrote it", path(),
                              *row ? version.GetInt(0) : 0, kIndexFormat));
  }
  const auto id = GetMeta("store_id");
  if (!id) return id.error();
  if (id->size() != store_id_.size()) return RowDamaged(path(), "the store's number");
  std::memcpy(store_id_.data(), id->data(), store_id_.size());
  return OkStatus();
}

Result<std::vector<std::byte>> Index::GetMeta(const char* key) {
  Query query(*database_, "SELECT value, checksum FROM meta WHERE key=?");
  const auto row = query.Text(key).Step();
  if (!row) return Fail(row.error());
  if (!*row) return Fail(RowDamaged(path(), key));
  const auto value = query.GetBlob(0);
  ByteWriter fields;
  fields.Sized(key).Sized(value);
  if (RowChecksum("meta", std::move(fields)) != query.GetUint(1)) return Fail(RowDamaged(path(), key));
  return std::vector<std::byte>(value.begin(), value.end());
}

Status Index::PutMeta(const char* key, std::span<const std::byte> value) {
  ByteWriter fields;
  fields.Sized(key).Sized(value);
  return Query(*database_,
               "INSERT INTO meta VALUES(?,?,?) ON CONFLICT(key) DO UPDATE SET value=excluded.value, "
               "checksum=excluded.checksum")
      .Text(key)
      .Blob(value)
      .Int(RowChecksum("meta", std::move(fields)))
      .Run();
}

Result<uint64_t> Index::ReserveGenerations(uint64_t n) {
  Transaction transaction(*database_);
  KVCELL_FAIL_IF_ERROR(transaction.Begin(Transaction::Kind::kWrite));
  const auto value = GetMeta("next_generation");
  if (!value) return Fail(value.error());
  ByteReader in(*value);
  const auto first = in.Take<uint64_t>();
  const auto next = CheckedAdd(first, n);
  if (!in.at_end() || !next) return Fail(RowDamaged(path(), "next_generation"));
  KVCELL_FAIL_IF_ERROR(PutMeta("next_generation", std::as_bytes(std::span(&*next, 1))));
  KVCELL_FAIL_IF_ERROR(transaction.Commit());
  return first;
}

Result<std::optional<SessionRow>> Index::FindSession(const std::string& name) {
  Query query(*database_, "SELECT " KVCELL_SESSION_COLUMNS " FROM sessions WHERE name=?");
  const auto found = query.Text(name).Step();
  if (!found) return Fail(found.error());
  if (!*found) return std::nullopt;
  auto row = GetSession(query);
  if (!row) return Fail(RowDamaged(path(), fmt::format("session '{}'", name)));
  return row;
}

Result<std::optional<int64_t>> Index::SessionId(const std::string& name) {
  Query query(*database_, "SELECT id FROM sessions WHERE name=?");
  const auto found = query.Text(name).Step();
  if (!found) return Fail(found.error());
  if (!*found) return std::nullopt;
  return query.GetInt(0);
}

Result<std::vector<SessionRow>> Index::ListSessions(std::vector<std::string>* damaged) {
  Query query(*database_, "SELECT " KVCELL_SESSION_COLUMNS " FROM sessions ORDER BY name");
  std::vector<SessionRow> rows;
  for (;;) {
    const auto more = query.Step();
    if (!more) return Fail(more.error());
    if (!*more) return rows;
    if (auto row = GetSession(query)) {
      rows.push_back(std::move(*row));
    } else {
      damaged->push_back(query.GetText(1));
    }
  }
}

Status Index::ReadSessionData(const SessionRow& row, SessionRecord* record) {
  Query query(*database_, "SELECT tokens, exact, logits, extras FROM session_data WHERE session=?");
  const auto found = query.Int(row.id).Step();
  if (!found) return found.error();
  const Status damaged = RowDamaged(path(), fmt::format("the data of session '{}'", row.name));
  if (!*found) return damaged;
  const auto copy = [&](int column, auto* to) {
    using Value = typename std::remove_pointer_t<decltype(to)>::value_type;
    const auto bytes = query.GetBlob(column);
    if (bytes.size() % sizeof(Value) != 0) return false;
    to->resize(bytes.size() / sizeof(Value));
    if (!bytes.empty()) std::memcpy(to->data(), bytes.data(), bytes.size());
    return true;
  };
  if (!copy(0, &record->tokens) || !copy(1, &record->exact) || !copy(2, &record->logits) || !copy(3, &record->extras))
    return damaged;
  const uint64_t checksum =
      DataChecksum(row.id, std::as_bytes(std::span(record->tokens)), record->exact,
                   std::as_bytes(std::span(record->logits)), std::as_bytes(std::span(record->extras)));
  if (checksum != row.data_checksum || static_cast<int64_t>(record->tokens.size()) != row.n_tokens) return damaged;
  return OkStatus();
}

Status Index::WriteSession(SessionRow* row, const SessionRecord& record) {
  if (row->id == 0) {
    Query insert(*database_,
                 "INSERT INTO sessions(name,model,identity,n_tokens,n_blocks,data_bytes,last_used,revision,"
                 "data_checksum,checksum) VALUES(?,'',x'',0,0,0,0,0,0,0)");
    KVCELL_RETURN_IF_ERROR(insert.Text(row->name).Run());
    row->id = sqlite3_last_insert_rowid(database_->handle());
  }
  const auto tokens = std::as_bytes(std::span(record.tokens));
  const auto logits = std::as_bytes(std::span(record.logits));
  const auto extras = std::as_bytes(std::span(record.extras));
  row->data_bytes = static_cast<int64_t>(record.exact.size() + logits.size());
  row->data_checksum = DataChecksum(row->id, tokens, record.exact, logits, extras);
  const auto identity = MakeIdentityBytes(row->identity);
  KVCELL_RETURN_IF_ERROR(Query(*database_,
                               "UPDATE sessions SET model=?,identity=?,n_tokens=?,n_blocks=?,data_bytes=?,last_used=?,"
                               "revision=?,data_checksum=?,checksum=? WHERE id=?")
                             .Text(row->model)
                             .Blob(identity)
                             .Int(row->n_tokens)
                             .Int(row->n_blocks)
                             .Int(row->data_bytes)
                             .Int(row->last_used)
                             .Int(row->revision)
                             .Int(row->data_checksum)
                             .Int(SessionChecksum(*row, identity))
                             .Int(row->id)
                             .Run());
  return Query(*database_,
               "INSERT INTO session_data VALUES(?,?,?,?,?) ON CONFLICT(session) DO UPDATE SET tokens=excluded.tokens,"
               "exact=excluded.exact, logits=excluded.logits, extras=excluded.extras")
      .Int(row->id)
      .Blob(tokens)
      .Blob(record.exact)
      .Blob(logits)
      .Blob(extras)
      .Run();
}

Status Index::DeleteSession(int64_t id) {
  KVCELL_RETURN_IF_ERROR(DeleteLinksFrom(id, 0));
  KVCELL_RETURN_IF_ERROR(Query(*database_, "DELETE FROM session_data WHERE session=?").Int(id).Run());
  return Query(*database_, "DELETE FROM sessions WHERE id=?").Int(id).Run();
}

std::string Index::BlockDamage(const SessionRow& row, size_t position) const {
  const size_t first = position * kBlockTokens;
  return RowDamaged(path(), fmt::format("block {} of session '{}' (tokens {} to {})", position, row.name, first,
                                        first + kBlockTokens - 1))
      .message();
}

Result<std::vector<std::optional<BlockRow>>> Index::ReadSessionBlocks(const SessionRow& row,
                                                                      std::span<const Token> tokens) {
  Query query(*database_,
              "SELECT session_blocks.position, session_blocks.block, session_blocks.checksum, " KVCELL_BLOCK_COLUMNS
              " FROM session_blocks LEFT JOIN blocks ON blocks.id=session_blocks.block"
              " WHERE session_blocks.session=? ORDER BY session_blocks.position");
  query.Int(row.id);
  std::vector<std::optional<BlockRow>> blocks(static_cast<size_t>(row.n_blocks));
  for (;;) {
    const auto more = query.Step();
    if (!more && more.error().code() != StatusCode::kCorruption) return Fail(more.error());
    if (!more || !*more) return blocks;
    const int64_t position = query.GetInt(0);
    if (position < 0 || position >= row.n_blocks) continue;
    auto block = GetBlock(query, 3);
    if (!block || block->id != query.GetInt(1) ||
        LinkChecksum(row.id, position, block->id, block->record.key) != query.GetUint(2)) {
      continue;
    }
    const auto part = tokens.subspan(static_cast<size_t>(position) * kBlockTokens, kBlockTokens);
    if (std::ranges::equal(block->record.tokens, part)) blocks[static_cast<size_t>(position)] = std::move(block);
  }
}

Result<std::vector<Link>> Index::ReadLinks(int64_t session) {
  Query query(*database_, "SELECT block, checksum FROM session_blocks WHERE session=? ORDER BY position");
  query.Int(session);
  std::vector<Link> links;
  for (;;) {
    const auto more = query.Step();
    if (!more) return Fail(more.error());
    if (!*more) return links;
    links.push_back({query.GetInt(0), query.GetUint(1)});
  }
}

Status Index::WriteLinks(int64_t session, std::span<const Link> old, std::span<const BlockRow> blocks) {
  Query write(*database_,
              "INSERT INTO session_blocks VALUES(?,?,?,?) ON CONFLICT(session,position) DO UPDATE SET "
              "block=excluded.block, checksum=excluded.checksum");
  for (size_t i = 0; i < blocks.size(); ++i) {
    const auto position = static_cast<int64_t>(i);
    const uint64_t checksum = LinkChecksum(session, position, blocks[i].id, blocks[i].record.key);
    if (i < old.size() && old[i].block == blocks[i].id && old[i].checksum == checksum) continue;
    KVCELL_RETURN_IF_ERROR(write.Int(session).Int(position).Int(blocks[i].id).Int(checksum).Run());
  }
  return DeleteLinksFrom(session, static_cast<int64_t>(blocks.size()));
}

Status Index::DeleteLinksFrom(int64_t session, int64_t position) {
  return Query(*database_, "DELETE FROM session_blocks WHERE session=? AND position>=?")
      .Int(session)
      .Int(position)
      .Run();
}

Result<std::vector<BlockRow>> Index::FindBlocks(const BlockKey& key, std::vector<int64_t>* damaged) {
  Query query(*database_, "SELECT " KVCELL_BLOCK_COLUMNS " FROM blocks WHERE key=? ORDER BY id");
  query.Blob(std::as_bytes(std::span(key)));
  std::vector<BlockRow> rows;
  for (;;) {
    const auto more = query.Step();
    if (!more) return Fail(more.error());
    if (!*more) return rows;
    if (auto row = GetBlock(query, 0)) {
      rows.push_back(std::move(*row));
    } else {
      damaged->push_back(query.GetInt(0));
    }
  }
}

Result<std::optional<BlockRow>> Index::FindBlock(int64_t id) {
  Query query(*database_, "SELECT " KVCELL_BLOCK_COLUMNS " FROM blocks WHERE id=?");
  const auto found = query.Int(id).Step();
  if (!found) return Fail(found.error());
  return *found ? GetBlock(query, 0) : std::nullopt;
}

Status Index::WriteBlock(BlockRow* row) {
  if (row->id == 0) {
    Query insert(*database_, "INSERT INTO blocks(key,generation,tokens,checksum) VALUES(?,0,x'',0)");
    KVCELL_RETURN_IF_ERROR(insert.Blob(std::as_bytes(std::span(row->record.key))).Run());
    row->id = sqlite3_last_insert_rowid(database_->handle());
  }
  Query update(*database_,
               "UPDATE blocks SET key=?,generation=?,tokens=?,segment0=?,offset0=?,n_blocks0=?,index0=?,segment1=?,"
               "offset1=?,n_blocks1=?,index1=?,checksum=? WHERE id=?");
  update.Blob(std::as_bytes(std::span(row->record.key))).Int(row->record.generation);
  update.Blob(std::as_bytes(std::span(row->record.tokens)));
  for (const auto& place : row->record.places) {
    if (place) {
      update.Int(place->segment).Int(place->offset).Int(int64_t{place->n_blocks}).Int(int64_t{place->index});
    } else {
      update.Null().Null().Null().Null();
    }
  }
  return update.Int(BlockChecksum(*row)).Int(row->id).Run();
}

Result<std::vector<ExtentKey>> Index::DeleteUnusedBlocks(std::span<const int64_t> ids) {
  std::set<ExtentKey> extents;
  Query find(*database_,
             "SELECT segment0,offset0,segment1,offset1 FROM blocks WHERE id=? AND NOT EXISTS("
             "SELECT 1 FROM session_blocks WHERE block=blocks.id) AND NOT EXISTS("
             "SELECT 1 FROM prefix_nodes WHERE block=blocks.id AND held<>0)");
  Query remove(*database_, "DELETE FROM blocks WHERE id=?");
  for (const int64_t id : ids) {
    const auto unused = find.Int(id).Step();
    if (!unused) return Fail(unused.error());
    if (*unused) {
      if (!find.IsNull(0)) extents.insert({find.GetUint(0), find.GetUint(1)});
      if (!find.IsNull(2)) extents.insert({find.GetUint(2), find.GetUint(3)});
      KVCELL_FAIL_IF_ERROR(remove.Int(id).Run());
      KVCELL_FAIL_IF_ERROR(PrefixIndex(*database_).Forget(id));
    }
    find.Reset();
  }
  return std::vector<ExtentKey>(extents.begin(), extents.end());
}

Result<std::optional<ExtentRow>> Index::FindExtent(const ExtentKey& key) {
  Query query(*database_,
              "SELECT segment,offset,n_blocks,shape,freed,checksum FROM extents WHERE segment=? AND offset=?");
  const auto found = query.Int(key.segment).Int(key.offset).Step();
  if (!found) return Fail(found.error());
  if (!*found) return std::nullopt;
  auto row = GetExtent(query);
  if (!row) {
    return Fail(
        RowDamaged(path(), fmt::format("the extent at byte {} of segment {}", key.offset, SegmentName(key.segment))));
  }
  return row;
}

Status Index::WriteExtent(const ExtentRow& row) {
  const auto shape = MakeShapeBytes(row.shape);
  const auto freed = MakeBits(row.freed);
  return Query(*database_,
               "INSERT INTO extents VALUES(?,?,?,?,?,?) ON CONFLICT(segment,offset) DO UPDATE SET "
               "n_blocks=excluded.n_blocks, shape=excluded.shape, freed=excluded.freed, checksum=excluded.checksum")
      .Int(row.key.segment)
      .Int(row.key.offset)
      .Int(int64_t{row.n_blocks})
      .Blob(shape)
      .Blob(freed)
      .Int(ExtentChecksum(row.key, row.n_blocks, shape, freed))
      .Run();
}

Status Index::DeleteExtent(const ExtentKey& key) {
  return Query(*database_, "DELETE FROM extents WHERE segment=? AND offset=?").Int(key.segment).Int(key.offset).Run();
}

Result<std::vector<ExtentRow>> Index::ListExtents(uint64_t segment) {
  Query query(*database_,
              "SELECT segment,offset,n_blocks,shape,freed,checksum FROM extents WHERE segment=? ORDER BY offset");
  query.Int(segment);
  std::vector<ExtentRow> rows;
  for (;;) {
    const auto more = query.Step();
    if (!more) return Fail(more.error());
    if (!*more) return rows;
    auto row = GetExtent(query);
    if (!row) return Fail(RowDamaged(path(), fmt::format("an extent of segment {}", SegmentName(segment))));
    rows.push_back(std::move(*row));
  }
}

Result<std::vector<ExtentKey>> Index::ListExtentKeys() {
  Query query(*database_, "SELECT segment,offset FROM extents ORDER BY segment,offset");
  std::vector<ExtentKey> keys;
  for (;;) {
    const auto more = query.Step();
    if (!more) return Fail(more.error());
    if (!*more) return keys;
    keys.push_back({query.GetUint(0), query.GetUint(1)});
  }
}

Result<std::vector<bool>> Index::UsedBlocks(const ExtentRow& extent) {
  Query query(*database_,
              "SELECT index0 FROM blocks WHERE segment0=?1 AND offset0=?2 UNION ALL "
              "SELECT index1 FROM blocks WHERE segment1=?1 AND offset1=?2");
  query.Int(extent.key.segment).Int(extent.key.offset);
  std::vector<bool> used(extent.n_blocks);
  for (;;) {
    const auto more = query.Step();
    if (!more) return Fail(more.error());
    if (!*more) return used;
    const uint64_t index = query.GetUint(0);
    if (index < used.size()) used[index] = true;
  }
}

Result<int64_t> Index::SessionCellBytes(int64_t session) {
  Query query(*database_,
              "SELECT extents.shape, count(*) FROM session_blocks JOIN blocks ON blocks.id=session_blocks.block "
              "JOIN extents ON (extents.segment=blocks.segment0 AND extents.offset=blocks.offset0) OR "
              "(extents.segment=blocks.segment1 AND extents.offset=blocks.offset1) "
              "WHERE session_blocks.session=? GROUP BY extents.shape");
  query.Int(session);
  uint64_t total = 0;
  for (;;) {
    const auto more = query.Step();
    if (!more) return Fail(more.error());
    if (!*more) return static_cast<int64_t>(total);
    const auto shape = ParseShapeBytes(query.GetBlob(0));
    const auto bytes = shape ? CheckedMul(*BlockBytes(*shape), query.GetUint(1)) : std::nullopt;
    const auto sum = bytes ? CheckedAdd(total, *bytes) : std::nullopt;
    if (sum && *sum <= kMaxOffset) total = *sum;
  }
}

Result<int64_t> Index::CountRows(const char* count_sql) {
  Query query(*database_, count_sql);
  const auto row = query.Step();
  if (!row) return Fail(row.error());
  return *row ? query.GetInt(0) : 0;
}

Result<std::vector<std::string>> Index::CheckStructure() {
  Query query(*database_, "PRAGMA integrity_check");
  std::vector<std::string> found;
  for (;;) {
    const auto more = query.Step();
    if (!more) {
      if (more.error().code() != StatusCode::kCorruption) return Fail(more.error());
      found.push_back(more.error().message());
      return found;
    }
    if (!*more) return found;
    if (const auto line = query.GetText(0); line != "ok") found.push_back(line);
  }
}

}  // namespace kvcell
