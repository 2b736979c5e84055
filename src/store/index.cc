#include "store/index.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
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

// Added by format 2, with the prefix tree's tables: a checksum for each part of a session's data, so that one that is
// damaged doesn't take the others with it.
constexpr const char* kPartsSchema = R"(
  CREATE TABLE session_parts(session INTEGER PRIMARY KEY, tokens INTEGER NOT NULL, exact INTEGER NOT NULL,
    logits INTEGER NOT NULL, extras INTEGER NOT NULL, checksum INTEGER NOT NULL);
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

// The columns of a session's row as they stand in the file: names in the clear or sealed.
struct StoredSession {
  std::string name;
  std::string model;
  std::vector<std::byte> identity;
};

uint64_t SessionChecksum(const SessionRow& row, const StoredSession& stored) {
  ByteWriter out;
  out.Put(row.id)
      .Sized(stored.name)
      .Sized(stored.model)
      .Sized(stored.identity)
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

uint64_t PartsChecksum(int64_t session, uint64_t revision, std::span<const uint64_t> parts) {
  ByteWriter out;
  out.Put(session).Put(revision);
  for (const uint64_t part : parts) out.Put(part);
  return RowChecksum("session_parts", std::move(out));
}

void PutPlace(ByteWriter* out, const std::optional<BlockPlace>& place) {
  const BlockPlace p = place.value_or(BlockPlace{});
  out->Put(uint8_t{place.has_value()}).Put(p.segment).Put(p.offset).Put(p.n_blocks).Put(p.index);
}

uint64_t BlockChecksum(const BlockRow& row, std::span<const std::byte> stored_tokens) {
  ByteWriter out;
  out.Put(row.id).Raw(row.stored_key).Put(row.record.generation).Raw(stored_tokens);
  for (const auto& place : row.record.places) PutPlace(&out, place);
  return RowChecksum("blocks", std::move(out));
}

uint64_t LinkChecksum(int64_t session, int64_t position, int64_t block, std::span<const std::byte> stored_key) {
  ByteWriter out;
  out.Put(session).Put(position).Put(block).Raw(stored_key);
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

#define KVCELL_SESSION_COLUMNS \
  "id,name,model,identity,n_tokens,n_blocks,data_bytes,last_used,revision,data_checksum,checksum"
#define KVCELL_BLOCK_COLUMNS                                                                              \
  "blocks.id,blocks.key,blocks.generation,blocks.tokens,blocks.segment0,blocks.offset0,blocks.n_blocks0," \
  "blocks.index0,blocks.segment1,blocks.offset1,blocks.n_blocks1,blocks.index1,blocks.checksum"

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

// Columns of session_data; each is sealed for its own.
enum DataColumn : uint64_t { kTokens, kExact, kLogits, kExtras, kDataColumns };
constexpr uint64_t kNamesColumn = 0;

std::string HexText(std::span<const uint8_t> bytes) { return fmt::format("{:02x}", fmt::join(bytes, "")); }

}  // namespace

PrefixIndex Index::prefixes() { return {*database_, store_id_, cipher_.get()}; }

std::string Index::RowName(std::string_view space, std::string_view name) const {
  // A name holds no '/', so that no two pairs give one text.
  std::string text = space.empty() ? std::string(name) : fmt::format("{}/{}", space, name);
  return cipher_ == nullptr ? text : HexText(cipher_->Name(std::as_bytes(std::span(text))));
}

SealedFor Index::About(std::string_view table, int64_t row, uint64_t column) const {
  SealedFor about;
  about.Raw(std::as_bytes(std::span(store_id_))).Sized(table).Put(row).Put(column);
  return about;
}

// Columns in the order of KVCELL_SESSION_COLUMNS; nothing where they fail their checks.
std::optional<SessionRow> Index::GetSession(const Query& query) const {
  SessionRow row;
  StoredSession stored;
  row.id = query.GetInt(0);
  stored.name = query.GetText(1);
  stored.model = query.GetText(2);
  const auto identity_bytes = query.GetBlob(3);
  stored.identity.assign(identity_bytes.begin(), identity_bytes.end());
  row.n_tokens = query.GetInt(4);
  row.n_blocks = query.GetInt(5);
  row.data_bytes = query.GetInt(6);
  row.last_used = query.GetInt(7);
  row.revision = query.GetUint(8);
  row.data_checksum = query.GetUint(9);
  if (SessionChecksum(row, stored) != query.GetUint(10)) return std::nullopt;
  if (row.n_tokens < 0 || row.n_blocks < 0 || row.n_blocks > row.n_tokens / kBlockTokens) return std::nullopt;
  if (cipher_ != nullptr) {
    const auto names = cipher_->Unseal(stored.identity, About("sessions", row.id, kNamesColumn));
    if (!names) return std::nullopt;
    ByteReader in(*names);
    row.space = in.Text();
    row.name = in.Text();
    row.model = in.Text();
    const auto identity = in.Sized();
    stored.identity.assign(identity.begin(), identity.end());
    if (!in.at_end() || RowName(row.space, row.name) != stored.name) return std::nullopt;
  } else {
    const size_t slash = stored.name.find('/');
    if (slash != std::string::npos) row.space = stored.name.substr(0, slash);
    row.name = slash == std::string::npos ? stored.name : stored.name.substr(slash + 1);
    row.model = std::move(stored.model);
  }
  auto identity = ParseIdentityBytes(stored.identity);
  if (!identity) return std::nullopt;
  row.identity = std::move(*identity);
  return row;
}

std::vector<std::byte> Index::StoredKey(const BlockKey& key) const {
  ByteWriter out;
  out.Raw(std::as_bytes(std::span(key))).Raw(std::as_bytes(std::span(space_)));
  if (cipher_ == nullptr) return std::move(out.bytes());
  const auto name = cipher_->Name(out.bytes());
  const auto bytes = std::as_bytes(std::span(name));
  return {bytes.begin(), bytes.end()};
}

// Columns from `first` on in the order of KVCELL_BLOCK_COLUMNS.
std::optional<BlockRow> Index::GetBlock(const Query& query, int first) const {
  BlockRow row;
  row.id = query.GetInt(first);
  const auto key = query.GetBlob(first + 1);
  row.stored_key.assign(key.begin(), key.end());
  row.record.generation = query.GetUint(first + 2);
  const auto stored_tokens = query.GetBlob(first + 3);
  for (int i = 0; i < 2; ++i) {
    const int at = first + 4 + 4 * i;
    if (query.IsNull(at)) continue;
    const auto place = MakePlace(query.GetInt(at), query.GetInt(at + 1), query.GetInt(at + 2), query.GetInt(at + 3));
    if (!place) return std::nullopt;
    row.record.places[static_cast<size_t>(i)] = place;
  }
  if (BlockChecksum(row, stored_tokens) != query.GetUint(first + 12)) return std::nullopt;
  ByteWriter clear;  // key and tokens
  if (cipher_ != nullptr) {
    auto opened = cipher_->Unseal(stored_tokens, About("blocks", row.id, 0));
    if (!opened) return std::nullopt;
    clear.bytes() = std::move(*opened);
  } else {
    clear.Raw(key.first(std::min(key.size(), row.record.key.size()))).Raw(stored_tokens);
  }
  if (clear.bytes().size() != row.record.key.size() + kTokenBytes) return std::nullopt;
  std::memcpy(row.record.key.data(), clear.bytes().data(), row.record.key.size());
  std::memcpy(row.record.tokens.data(), clear.bytes().data() + row.record.key.size(), kTokenBytes);
  return row;
}

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

static Status CheckVersion(const std::string& path, int64_t version) {
  if (version >= kOldestIndexFormat && version <= kIndexFormat) return OkStatus();
  return Status(StatusCode::kMismatch,
                fmt::format("index {} has format {}, this program reads {} to {}: use the program that wrote it", path,
                            version, kOldestIndexFormat, kIndexFormat));
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
  KVCELL_FAIL_IF_ERROR(CheckVersion(file.path(), big_endian(60)));
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
  std::unique_ptr<Index> index(new Index(std::move(*database), options));
  index->open_ = std::move(*open);
  if (writes) {
    KVCELL_FAIL_IF_ERROR(index->SetDurability(options.durability));
    if (!founded) KVCELL_FAIL_IF_ERROR(index->Found(options));
    KVCELL_FAIL_IF_ERROR(
        index->database_->Run("PRAGMA journal_mode=WAL; PRAGMA secure_delete=ON; PRAGMA temp_store=MEMORY;"));
  }
  KVCELL_FAIL_IF_ERROR(index->Recognise(options));
  return index;
}

Status Index::CheckIsStore(SystemCalls& calls, const File& directory) {
  const std::string path = directory.path() + "/store.db";
  struct stat info = {};
  if (const int result = calls.StatAt(directory.fd(), "store.db", &info); result < 0) {
    return Status(StatusCode::kNotFound, fmt::format("there is no store at {}: check the path", directory.path()));
  }
  bool opened = false;
  const auto open = OpenIndex::Enter(info, [&]() -> Status {
    opened = true;
    const auto file = File::Open(calls, directory.fd(), "store.db", O_RDONLY, 0, path);
    if (!file) return file.error();
    const auto found = IsFounded(*file);
    return found ? OkStatus() : found.error();
  });
  if (!open) return open.error();
  return opened ? OkStatus()
                : Status(StatusCode::kBusy, fmt::format("store {} is open in this process", directory.path()));
}

// One transaction in the file itself, before it has a write-ahead log: its header says whose it is from the first
// moment.
Status Index::Found(const StoreOptions& options) {
  StoreId id{};
  if (::getrandom(id.data(), id.size(), 0) != static_cast<ssize_t>(id.size())) {
    return ErrnoStatus(errno, "get random numbers for", path());
  }
  if (options.index_page_bytes != 0) {
    KVCELL_RETURN_IF_ERROR(database_->Run(fmt::format("PRAGMA page_size={}", options.index_page_bytes).c_str()));
  }
  Transaction transaction(*database_);
  KVCELL_RETURN_IF_ERROR(transaction.Begin(Transaction::Kind::kWrite));
  const std::string marks =
      fmt::format("PRAGMA application_id={}; PRAGMA user_version={};", kIndexApplicationId, kIndexFormat);
  KVCELL_RETURN_IF_ERROR(database_->Run(marks.c_str()));
  for (const char* schema : {kSchema, kPartsSchema, kPrefixSchema}) KVCELL_RETURN_IF_ERROR(database_->Run(schema));
  KVCELL_RETURN_IF_ERROR(PutMeta("store_id", std::as_bytes(std::span(id))));
  KVCELL_RETURN_IF_ERROR(PutCount("next_generation", 1));
  KVCELL_RETURN_IF_ERROR(PutCount("commits", 0));
  KVCELL_RETURN_IF_ERROR(PutCount("moves", 0));
  if (!options.key.empty()) {
    std::vector<std::byte> box;
    const auto cipher = Cipher::Make(options.key, id, &box);
    if (!cipher) return cipher.error();
    KVCELL_RETURN_IF_ERROR(PutMeta("key_box", box));
  }
  return transaction.Commit();
}

Status Index::Recognise(const StoreOptions& options) {
  int64_t found = 0;
  {
    Query version(*database_, "PRAGMA user_version");
    const auto row = version.Step();
    if (!row) return row.error();
    found = *row ? version.GetInt(0) : 0;
  }
  KVCELL_RETURN_IF_ERROR(CheckVersion(path(), found));
  KVCELL_RETURN_IF_ERROR(CheckSchema(found));
  const auto id = GetMeta("store_id");
  if (!id) return id.error();
  if (id->size() != store_id_.size()) return RowDamaged(path(), "the store's number");
  std::memcpy(store_id_.data(), id->data(), store_id_.size());
  if (found < kIndexFormat && !options.read_only) KVCELL_RETURN_IF_ERROR(Upgrade());
  return OpenCipher(options);
}

// Format 1 had neither counts of commits and moves, nor checksums of a session's parts, nor namespaces, nor encryption,
// nor, at first, a prefix tree; all of its rows stay as they are.
Status Index::Upgrade() {
  Transaction transaction(*database_);
  KVCELL_RETURN_IF_ERROR(transaction.Begin(Transaction::Kind::kWrite));
  for (const char* key : {"commits", "moves"}) {
    const auto there = FindMeta(key);  // another process may have been first
    if (!there) return there.error();
    if (!*there) KVCELL_RETURN_IF_ERROR(PutCount(key, 0));
  }
  const auto parts = Query(*database_, "SELECT 1 FROM sqlite_master WHERE name='session_parts'").Step();
  if (!parts) return parts.error();
  if (!*parts) KVCELL_RETURN_IF_ERROR(database_->Run(kPartsSchema));
  KVCELL_RETURN_IF_ERROR(prefixes().Found());
  KVCELL_RETURN_IF_ERROR(database_->Run(fmt::format("PRAGMA user_version={}", kIndexFormat).c_str()));
  return transaction.Commit();
}

Status Index::OpenCipher(const StoreOptions& options) {
  // Every row of `meta`: one whose key is damaged would be missed, not found wrong.
  Query query(*database_, "SELECT key, value, checksum FROM meta");
  std::optional<std::vector<std::byte>> box;
  for (;;) {
    const auto more = query.Step();
    if (!more) return more.error();
    if (!*more) break;
    const std::string key = query.GetText(0);
    const auto value = query.GetBlob(1);
    ByteWriter fields;
    fields.Sized(key).Sized(value);
    if (RowChecksum("meta", std::move(fields)) != query.GetUint(2)) return RowDamaged(path(), key);
    if (key == "key_box") box.emplace(value.begin(), value.end());
  }
  if (!box && options.key.empty()) return OkStatus();
  if (!box) {
    return Status(StatusCode::kInvalidArgument,
                  fmt::format("index {} is not encrypted although a key is given: leave the key away, or name a new "
                              "directory to make an encrypted store",
                              path()));
  }
  if (options.key.empty()) {
    return Status(
        StatusCode::kPermission,
        fmt::format("index {} is encrypted: give its key with --key-file, --key-command or KVCELL_KEY", path()));
  }
  auto cipher = Cipher::Open(options.key, store_id_, *box, "index " + path());
  if (!cipher) return cipher.error();
  cipher_ = std::move(*cipher);
  return OkStatus();
}

// The statements that made the tables must stand in the file as they were: a changed one would change what queries
// mean.
Status Index::CheckSchema(int64_t format) {
  std::set<std::string> statements;
  Query query(*database_, "SELECT sql FROM sqlite_schema WHERE sql IS NOT NULL");
  for (;;) {
    const auto more = query.Step();
    if (!more) return more.error();
    if (!*more) break;
    statements.insert(query.GetText(0));
  }
  const std::string all = format < 2 ? std::string(kSchema) : std::string(kSchema) + kPartsSchema + kPrefixSchema;
  for (std::string_view rest = all;;) {
    const size_t begin = rest.find("CREATE");
    if (begin == std::string_view::npos) return OkStatus();
    const size_t end = rest.find(';');
    if (!statements.contains(std::string(rest.substr(begin, end - begin)))) {
      return Status(
          StatusCode::kCorruption,
          fmt::format("index {}: the table definitions are damaged, the file is left as it is: move the store "
                      "away and start a new one",
                      path()));
    }
    rest.remove_prefix(end + 1);
  }
}

Result<std::optional<std::vector<std::byte>>> Index::FindMeta(const char* key) {
  Query query(*database_, "SELECT value, checksum FROM meta WHERE key=?");
  const auto row = query.Text(key).Step();
  if (!row) return Fail(row.error());
  if (!*row) return std::nullopt;
  const auto value = query.GetBlob(0);
  ByteWriter fields;
  fields.Sized(key).Sized(value);
  if (RowChecksum("meta", std::move(fields)) != query.GetUint(1)) return Fail(RowDamaged(path(), key));
  return std::vector<std::byte>(value.begin(), value.end());
}

Result<std::vector<std::byte>> Index::GetMeta(const char* key) {
  auto value = FindMeta(key);
  if (!value) return Fail(value.error());
  if (!*value) return Fail(RowDamaged(path(), key));
  return std::move(**value);
}

// A count that a read-only store of format 1 lacks is zero.
Result<uint64_t> Index::GetCount(const char* key) {
  const auto value = FindMeta(key);
  if (!value) return Fail(value.error());
  if (!*value) return 0;
  ByteReader in(**value);
  const auto count = in.Take<uint64_t>();
  if (!in.at_end()) return Fail(RowDamaged(path(), key));
  return count;
}

Status Index::PutCount(const char* key, uint64_t value) { return PutMeta(key, std::as_bytes(std::span(&value, 1))); }

Result<uint64_t> Index::Commits() { return GetCount("commits"); }

Result<uint64_t> Index::CountCommit() {
  const auto commits = GetCount("commits");
  if (!commits) return commits;
  KVCELL_FAIL_IF_ERROR(PutCount("commits", *commits + 1));
  return *commits + 1;
}

Result<uint64_t> Index::Moves() { return GetCount("moves"); }

Status Index::CountMove() {
  const auto moves = GetCount("moves");
  return moves ? PutCount("moves", *moves + 1) : moves.error();
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
  const auto first = GetCount("next_generation");
  if (!first) return first;
  const auto next = CheckedAdd(*first, n);
  if (*first == 0 || !next) return Fail(RowDamaged(path(), "next_generation"));
  KVCELL_FAIL_IF_ERROR(PutCount("next_generation", *next));
  KVCELL_FAIL_IF_ERROR(transaction.Commit());
  return *first;
}

Result<std::optional<SessionRow>> Index::FindSession(const std::string& name) {
  const std::string row_name = RowName(name);
  {
    Query query(*database_, "SELECT " KVCELL_SESSION_COLUMNS " FROM sessions WHERE name=?");
    const auto found = query.Text(row_name).Step();
    if (!found) return Fail(found.error());
    if (*found) {
      auto row = GetSession(query);
      if (!row) return Fail(RowDamaged(path(), fmt::format("session '{}'", name)));
      return row;
    }
  }
  // Not there, or not found any more because the table or its index is damaged? Every row is looked at.
  Query query(*database_, "SELECT " KVCELL_SESSION_COLUMNS " FROM sessions NOT INDEXED");
  for (;;) {
    const auto more = query.Step();
    if (!more) return Fail(more.error());
    if (!*more) return std::nullopt;
    if (!GetSession(query) || query.GetText(1) == row_name) {
      return Fail(StatusCode::kCorruption,
                  fmt::format("index {}: session '{}' is not found, and a damaged row may be the reason; run `kvcell "
                              "store verify`, and remove what it names",
                              path(), name));
    }
  }
}

Result<std::optional<SessionRow>> Index::FindSession(int64_t id) {
  Query query(*database_, "SELECT " KVCELL_SESSION_COLUMNS " FROM sessions WHERE id=?");
  const auto found = query.Int(id).Step();
  if (!found) return Fail(found.error());
  if (!*found) return std::nullopt;
  auto row = GetSession(query);
  if (!row) return Fail(RowDamaged(path(), fmt::format("session number {}", id)));
  return row;
}

Result<std::optional<int64_t>> Index::SessionId(const std::string& name) {
  const std::string row_name = RowName(name);
  Query query(*database_, "SELECT id FROM sessions WHERE name=?");
  const auto found = query.Text(row_name).Step();
  if (!found) return Fail(found.error());
  if (!*found) return std::nullopt;
  return query.GetInt(0);
}

Result<std::vector<SessionRow>> Index::ListSessions(Spaces spaces, std::vector<std::string>* damaged) {
  Query query(*database_, "SELECT " KVCELL_SESSION_COLUMNS " FROM sessions ORDER BY name");
  std::vector<SessionRow> rows;
  for (;;) {
    const auto more = query.Step();
    if (!more) return Fail(more.error());
    if (!*more) break;
    if (auto row = GetSession(query)) {
      if (spaces == Spaces::kAll || row->space == space_) rows.push_back(std::move(*row));
    } else {
      damaged->push_back(query.GetText(1));
    }
  }
  if (cipher_ != nullptr) std::ranges::sort(rows, {}, &SessionRow::name);
  return rows;
}

Status Index::ReadSessionData(const SessionRow& row, SessionRecord* record, SessionDamage* damage) {
  Query query(*database_, "SELECT tokens, exact, logits, extras FROM session_data WHERE session=?");
  const auto found = query.Int(row.id).Step();
  *damage = {true, true, true, true};
  if (!found) return found.error().code() == StatusCode::kCorruption ? OkStatus() : found.error();
  if (!*found) return OkStatus();
  const std::array<std::span<const std::byte>, kDataColumns> columns = {query.GetBlob(kTokens), query.GetBlob(kExact),
                                                                        query.GetBlob(kLogits), query.GetBlob(kExtras)};
  const bool whole =
      DataChecksum(row.id, columns[kTokens], columns[kExact], columns[kLogits], columns[kExtras]) == row.data_checksum;
  std::array<bool, kDataColumns> sound{whole, whole, whole, whole};
  if (!whole) KVCELL_RETURN_IF_ERROR(CheckParts(row, columns, sound));
  const auto copy = [&](DataColumn column, auto* to) {
    using Value = typename std::remove_pointer_t<decltype(to)>::value_type;
    if (!sound[column]) return false;
    auto bytes = columns[column];
    std::optional<std::vector<std::byte>> opened;
    if (cipher_ != nullptr) {
      opened = cipher_->Unseal(bytes, About("session_data", row.id, row.revision * kDataColumns + column));
      if (!opened) return false;
      bytes = *opened;
    }
    if (bytes.size() % sizeof(Value) != 0) return false;
    to->resize(bytes.size() / sizeof(Value));
    if (!bytes.empty()) std::memcpy(to->data(), bytes.data(), bytes.size());
    return true;
  };
  damage->tokens = !copy(kTokens, &record->tokens) || static_cast<int64_t>(record->tokens.size()) != row.n_tokens;
  damage->exact = !copy(kExact, &record->exact);
  damage->logits = !copy(kLogits, &record->logits);
  damage->extras = !copy(kExtras, &record->extras);
  if (damage->tokens) record->tokens.clear();
  return OkStatus();
}

Status Index::CheckParts(const SessionRow& row, std::span<const std::span<const std::byte>> columns,
                         std::span<bool> sound) {
  Query there(*database_, "SELECT 1 FROM sqlite_master WHERE name='session_parts'");
  const auto has = there.Step();
  if (!has) return has.error();
  if (!*has) return OkStatus();
  Query query(*database_, "SELECT tokens, exact, logits, extras, checksum FROM session_parts WHERE session=?");
  const auto found = query.Int(row.id).Step();
  if (!found) return found.error().code() == StatusCode::kCorruption ? OkStatus() : found.error();
  if (!*found) return OkStatus();
  std::array<uint64_t, kDataColumns> parts{};
  for (size_t i = 0; i < parts.size(); ++i) parts[i] = query.GetUint(static_cast<int>(i));
  if (PartsChecksum(row.id, row.revision, parts) != query.GetUint(kDataColumns)) return OkStatus();
  for (size_t i = 0; i < parts.size(); ++i) sound[i] = Checksum64(columns[i]) == parts[i];
  return OkStatus();
}

Status Index::WriteSessionRow(const SessionRow& row) {
  StoredSession stored;
  stored.name = RowName(row.space, row.name);
  stored.identity = MakeIdentityBytes(row.identity);
  if (cipher_ == nullptr) {
    stored.model = row.model;
  } else {
    ByteWriter names;
    names.Sized(row.space).Sized(row.name).Sized(row.model).Sized(stored.identity);
    stored.identity = cipher_->Seal(names.bytes(), About("sessions", row.id, kNamesColumn));
  }
  return Query(*database_,
               "UPDATE sessions SET model=?,identity=?,n_tokens=?,n_blocks=?,data_bytes=?,last_used=?,"
               "revision=?,data_checksum=?,checksum=? WHERE id=?")
      .Text(stored.model)
      .Blob(stored.identity)
      .Int(row.n_tokens)
      .Int(row.n_blocks)
      .Int(row.data_bytes)
      .Int(row.last_used)
      .Int(row.revision)
      .Int(row.data_checksum)
      .Int(SessionChecksum(row, stored))
      .Int(row.id)
      .Run();
}

Status Index::TouchSession(SessionRow row, int64_t now) {
  row.last_used = now;
  return WriteSessionRow(row);
}

Status Index::WriteSession(SessionRow* row, const SessionRecord& record) {
  row->space = space_;
  if (row->id == 0) {
    const std::string row_name = RowName(row->name);
    Query insert(*database_,
                 "INSERT INTO sessions(name,model,identity,n_tokens,n_blocks,data_bytes,last_used,revision,"
                 "data_checksum,checksum) VALUES(?,'',x'',0,0,0,0,0,0,0)");
    KVCELL_RETURN_IF_ERROR(insert.Text(row_name).Run());
    row->id = sqlite3_last_insert_rowid(database_->handle());
  }
  std::array<std::span<const std::byte>, kDataColumns> columns = {
      std::as_bytes(std::span(record.tokens)), std::span(record.exact), std::as_bytes(std::span(record.logits)),
      std::as_bytes(std::span(record.extras))};
  row->data_bytes = static_cast<int64_t>(columns[kExact].size() + columns[kLogits].size());
  std::array<std::vector<std::byte>, kDataColumns> sealed;
  for (size_t i = 0; cipher_ != nullptr && i < columns.size(); ++i) {
    sealed[i] = cipher_->Seal(columns[i], About("session_data", row->id, row->revision * kDataColumns + i));
    columns[i] = sealed[i];
  }
  row->data_checksum = DataChecksum(row->id, columns[kTokens], columns[kExact], columns[kLogits], columns[kExtras]);
  KVCELL_RETURN_IF_ERROR(WriteSessionRow(*row));
  std::array<uint64_t, kDataColumns> parts{};
  for (size_t i = 0; i < parts.size(); ++i) parts[i] = Checksum64(columns[i]);
  Query write_parts(*database_, "INSERT OR REPLACE INTO session_parts VALUES(?,?,?,?,?,?)");
  write_parts.Int(row->id);
  for (const uint64_t part : parts) write_parts.Int(part);
  KVCELL_RETURN_IF_ERROR(write_parts.Int(PartsChecksum(row->id, row->revision, parts)).Run());
  return Query(*database_,
               "INSERT INTO session_data VALUES(?,?,?,?,?) ON CONFLICT(session) DO UPDATE SET tokens=excluded.tokens,"
               "exact=excluded.exact, logits=excluded.logits, extras=excluded.extras")
      .Int(row->id)
      .Blob(columns[kTokens])
      .Blob(columns[kExact])
      .Blob(columns[kLogits])
      .Blob(columns[kExtras])
      .Run();
}

Status Index::DeleteSession(int64_t id) {
  KVCELL_RETURN_IF_ERROR(DeleteLinksFrom(id, 0));
  KVCELL_RETURN_IF_ERROR(Query(*database_, "DELETE FROM session_data WHERE session=?").Int(id).Run());
  KVCELL_RETURN_IF_ERROR(Query(*database_, "DELETE FROM session_parts WHERE session=?").Int(id).Run());
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
        LinkChecksum(row.id, position, block->id, block->stored_key) != query.GetUint(2)) {
      continue;
    }
    // Where the session's own tokens are damaged, those of its blocks stand for them.
    const auto begin = static_cast<size_t>(position) * kBlockTokens;
    if (tokens.empty() || std::ranges::equal(block->record.tokens, tokens.subspan(begin, kBlockTokens)))
      blocks[static_cast<size_t>(position)] = std::move(block);
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
    const uint64_t checksum = LinkChecksum(session, position, blocks[i].id, blocks[i].stored_key);
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
  const auto stored_key = StoredKey(key);
  query.Blob(stored_key);
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

// Where a session has a block, or else where the prefix tree has it.
#define KVCELL_BLOCK_POSITION                                                     \
  "COALESCE((SELECT position FROM session_blocks WHERE block=blocks.id LIMIT 1)," \
  "(SELECT depth FROM prefix_nodes WHERE block=blocks.id))"

Result<std::optional<std::pair<BlockRow, int64_t>>> Index::NextBlock(int64_t id) {
  Query query(*database_, "SELECT " KVCELL_BLOCK_COLUMNS "," KVCELL_BLOCK_POSITION
                          " FROM blocks WHERE blocks.id>? ORDER BY blocks.id");
  query.Int(id);
  for (;;) {
    const auto more = query.Step();
    if (!more) return Fail(more.error());
    if (!*more) return std::nullopt;
    if (query.IsNull(13)) continue;
    if (auto row = GetBlock(query, 0)) return std::pair(std::move(*row), query.GetInt(13));
  }
}

Result<std::optional<int64_t>> Index::BlockPosition(int64_t block) {
  Query query(*database_, "SELECT " KVCELL_BLOCK_POSITION " FROM blocks WHERE blocks.id=?");
  const auto found = query.Int(block).Step();
  if (!found) return Fail(found.error());
  if (!*found || query.IsNull(0)) return std::nullopt;
  return query.GetInt(0) * kBlockTokens;
}

Status Index::WriteBlock(BlockRow* row) {
  if (row->stored_key.empty()) row->stored_key = StoredKey(row->record.key);
  if (row->id == 0) {
    Query insert(*database_, "INSERT INTO blocks(key,generation,tokens,checksum) VALUES(?,0,x'',0)");
    KVCELL_RETURN_IF_ERROR(insert.Blob(row->stored_key).Run());
    row->id = sqlite3_last_insert_rowid(database_->handle());
  }
  std::vector<std::byte> sealed;
  std::span<const std::byte> tokens = std::as_bytes(std::span(row->record.tokens));
  if (cipher_ != nullptr) {
    ByteWriter clear;
    clear.Raw(std::as_bytes(std::span(row->record.key))).Raw(tokens);
    sealed = cipher_->Seal(clear.bytes(), About("blocks", row->id, 0));
    tokens = sealed;
  }
  Query update(*database_,
               "UPDATE blocks SET key=?,generation=?,tokens=?,segment0=?,offset0=?,n_blocks0=?,index0=?,segment1=?,"
               "offset1=?,n_blocks1=?,index1=?,checksum=? WHERE id=?");
  update.Blob(row->stored_key).Int(row->record.generation).Blob(tokens);
  for (const auto& place : row->record.places) {
    if (place) {
      update.Int(place->segment).Int(place->offset).Int(int64_t{place->n_blocks}).Int(int64_t{place->index});
    } else {
      update.Null().Null().Null().Null();
    }
  }
  return update.Int(BlockChecksum(*row, tokens)).Int(row->id).Run();
}

Result<std::vector<int64_t>> Index::CutSession(SessionRow row, int64_t n_blocks) {
  Query query(*database_, "SELECT block FROM session_blocks WHERE session=? AND position>=?");
  query.Int(row.id).Int(n_blocks);
  std::vector<int64_t> blocks;
  for (;;) {
    const auto more = query.Step();
    if (!more) return Fail(more.error());
    if (!*more) break;
    blocks.push_back(query.GetInt(0));
  }
  KVCELL_FAIL_IF_ERROR(DeleteLinksFrom(row.id, n_blocks));
  row.n_blocks = n_blocks;
  KVCELL_FAIL_IF_ERROR(WriteSessionRow(row));
  return blocks;
}

Result<std::vector<BlockRow>> Index::BlocksInSegment(uint64_t segment) {
  // A session's blocks lie side by side, in order: ids grow with positions, and what a session shares came first.
  Query query(*database_, "SELECT " KVCELL_BLOCK_COLUMNS " FROM blocks WHERE segment0=?1 OR segment1=?1 ORDER BY id");
  query.Int(segment);
  std::vector<BlockRow> rows;
  for (;;) {
    const auto more = query.Step();
    if (!more) return Fail(more.error());
    if (!*more) return rows;
    if (auto row = GetBlock(query, 0)) rows.push_back(std::move(*row));
  }
}

Result<int64_t> Index::CountUsers(int64_t block) {
  Query query(*database_,
              "SELECT (SELECT count(*) FROM session_blocks WHERE block=?1) + "
              "(SELECT count(*) FROM prefix_nodes WHERE block=?1 AND held<>0)");
  const auto row = query.Int(block).Step();
  if (!row) return Fail(row.error());
  return *row ? query.GetInt(0) : 0;
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
      KVCELL_FAIL_IF_ERROR(prefixes().Forget(id));
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

Status Index::SetDurability(Durability durability) {
  if (durability_ == durability) return OkStatus();
  constexpr std::array<const char*, 3> kSynchronous = {"PRAGMA synchronous=OFF", "PRAGMA synchronous=NORMAL",
                                                       "PRAGMA synchronous=FULL"};
  KVCELL_RETURN_IF_ERROR(database_->Run(kSynchronous.at(static_cast<size_t>(durability))));
  durability_ = durability;
  return OkStatus();
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
