#include "store/prefix_index.h"

#include <cstring>

#include "base/checksum.h"
#include "store/bytes.h"
#include "store/index.h"

namespace kvcell {

const char* const kPrefixSchema = R"(
  CREATE TABLE prefix_spaces(id INTEGER PRIMARY KEY AUTOINCREMENT, identity BLOB NOT NULL UNIQUE,
    model TEXT NOT NULL, checksum INTEGER NOT NULL);
  CREATE TABLE prefix_nodes(block INTEGER PRIMARY KEY, space INTEGER NOT NULL, parent INTEGER NOT NULL,
    depth INTEGER NOT NULL, held INTEGER NOT NULL, pinned INTEGER NOT NULL, content INTEGER NOT NULL,
    last_used INTEGER NOT NULL, checksum INTEGER NOT NULL);
  CREATE INDEX prefix_nodes_by_parent ON prefix_nodes(parent, space);
  CREATE INDEX prefix_nodes_by_content ON prefix_nodes(content) WHERE parent=0;
  CREATE INDEX prefix_nodes_by_use ON prefix_nodes(last_used, block) WHERE held<>0;
  CREATE TABLE prefix_bytes(block INTEGER NOT NULL, kind INTEGER NOT NULL, bytes BLOB NOT NULL,
    checksum INTEGER NOT NULL, PRIMARY KEY(block, kind)) WITHOUT ROWID;
  CREATE TABLE prefix_evicted(id INTEGER PRIMARY KEY AUTOINCREMENT, key BLOB NOT NULL UNIQUE);
)";

namespace {

// As many evictions as are remembered.
constexpr int64_t kEvictedKept = 4096;

#define KVCELL_NODE_COLUMNS "block,space,parent,depth,held,pinned,content,last_used,checksum"

uint64_t TableChecksum(std::string_view table, ByteWriter fields) {
  fields.Sized(table);
  return Checksum64(fields.bytes());
}

uint64_t NodeChecksum(const PrefixRow& node) {
  ByteWriter out;
  out.Put(node.block).Put(node.space).Put(node.parent).Put(node.depth);
  out.Put(int64_t{node.held} * 2 + int64_t{node.pinned}).Put(node.content);
  return TableChecksum("prefix_nodes", std::move(out));
}

uint64_t SpaceChecksum(int64_t id, std::span<const std::byte> identity, std::span<const std::byte> model) {
  ByteWriter out;
  out.Put(id).Sized(identity).Sized(model);
  return TableChecksum("prefix_spaces", std::move(out));
}

uint64_t BytesChecksum(int64_t block, PrefixBytes kind, std::span<const std::byte> bytes) {
  ByteWriter out;
  out.Put(block).Put(static_cast<int64_t>(kind)).Put(uint64_t{bytes.size()}).Put(Checksum64(bytes));
  return TableChecksum("prefix_bytes", std::move(out));
}

std::optional<PrefixRow> GetNode(const Query& query) {
  PrefixRow node;
  node.block = query.GetInt(0);
  node.space = query.GetInt(1);
  node.parent = query.GetInt(2);
  node.depth = query.GetInt(3);
  node.held = query.GetInt(4) != 0;
  node.pinned = query.GetInt(5) != 0;
  node.content = query.GetUint(6);
  node.last_used = query.GetInt(7);
  if (NodeChecksum(node) != query.GetUint(8) || node.depth < 0 || (node.depth == 0) != (node.parent == 0)) {
    return std::nullopt;
  }
  return node;
}

Result<std::vector<int64_t>> Ids(Query* query) {
  std::vector<int64_t> ids;
  for (;;) {
    const auto more = query->Step();
    if (!more) return Fail(more.error());
    if (!*more) return ids;
    ids.push_back(query->GetInt(0));
  }
}

}  // namespace

SealedFor PrefixIndex::About(std::string_view table, int64_t row, uint64_t column) const {
  SealedFor about;
  about.Raw(std::as_bytes(std::span(store_id_))).Sized(table).Put(row).Put(column);
  return about;
}

std::vector<std::byte> PrefixIndex::FoundBy(std::span<const std::byte> identity) const {
  if (cipher_ == nullptr) return {identity.begin(), identity.end()};
  ByteWriter named;
  named.Sized("prefix identity").Raw(identity);
  const auto name = cipher_->Name(named.bytes());
  const auto bytes = std::as_bytes(std::span(name));
  return {bytes.begin(), bytes.end()};
}

uint64_t PrefixIndex::ContentOf(std::span<const Token> first_block) const {
  const auto bytes = std::as_bytes(first_block);
  if (cipher_ == nullptr) return Address64(bytes);
  ByteWriter named;
  named.Sized("prefix content").Raw(bytes);
  const auto name = cipher_->Name(named.bytes());
  uint64_t content = 0;
  std::memcpy(&content, name.data(), sizeof(content));
  return content;
}

Status PrefixIndex::Found() {
  const auto there = IsThere();
  if (!there) return there.error();
  return *there ? OkStatus() : database_.Run(kPrefixSchema);
}

Result<bool> PrefixIndex::IsThere() {
  return Query(database_, "SELECT 1 FROM sqlite_master WHERE type='table' AND name='prefix_evicted'").Step();
}

Result<std::optional<int64_t>> PrefixIndex::FindSpace(const Identity& identity) {
  const auto found_by = FoundBy(MakeIdentityBytes(identity));
  Query query(database_, "SELECT id, model, checksum FROM prefix_spaces WHERE identity=?");
  const auto found = query.Blob(found_by).Step();
  if (!found) return Fail(found.error());
  if (!*found || SpaceChecksum(query.GetInt(0), found_by, query.GetBlob(1)) != query.GetUint(2)) return std::nullopt;
  return query.GetInt(0);
}

Result<int64_t> PrefixIndex::MakeSpace(const Identity& identity, const std::string& model) {
  const auto found = FindSpace(identity);
  if (!found) return Fail(found.error());
  if (*found) return **found;
  const auto bytes = MakeIdentityBytes(identity);
  const auto found_by = FoundBy(bytes);
  // A damaged row of the same identity is replaced: what stood under it can't be trusted.
  KVCELL_FAIL_IF_ERROR(Query(database_, "DELETE FROM prefix_spaces WHERE identity=?").Blob(found_by).Run());
  KVCELL_FAIL_IF_ERROR(
      Query(database_, "INSERT INTO prefix_spaces(identity,model,checksum) VALUES(?,'',0)").Blob(found_by).Run());
  const int64_t id = sqlite3_last_insert_rowid(database_.handle());
  // Sealed, the identity stands beside the model: both are only read back, never searched for.
  const auto model_bytes = std::as_bytes(std::span(model));
  std::vector<std::byte> sealed;
  if (cipher_ != nullptr) {
    ByteWriter clear;
    clear.Sized(bytes).Sized(model);
    sealed = cipher_->Seal(clear.bytes(), About("prefix_spaces", id, 0));
  }
  Query update(database_, "UPDATE prefix_spaces SET model=?, checksum=? WHERE id=?");
  if (cipher_ == nullptr) {
    update.Text(model);
  } else {
    update.Blob(sealed);
  }
  KVCELL_FAIL_IF_ERROR(
      update.Int(SpaceChecksum(id, found_by, cipher_ == nullptr ? model_bytes : sealed)).Int(id).Run());
  return id;
}

Result<std::optional<PrefixIndex::Space>> PrefixIndex::ReadSpace(int64_t space) {
  Query query(database_, "SELECT identity, model, checksum FROM prefix_spaces WHERE id=?");
  const auto found = query.Int(space).Step();
  if (!found) return Fail(found.error());
  if (!*found) return std::nullopt;
  const auto model = query.GetBlob(1);
  const std::vector<std::byte> stored_model(model.begin(), model.end());
  const auto found_by = query.GetBlob(0);
  if (SpaceChecksum(space, found_by, stored_model) != query.GetUint(2)) return std::nullopt;
  std::optional<Identity> identity;
  std::string name;
  if (cipher_ != nullptr) {
    const auto clear = cipher_->Unseal(stored_model, About("prefix_spaces", space, 0));
    if (!clear) return std::nullopt;
    ByteReader in(*clear);
    identity = ParseIdentityBytes(in.Sized());
    name = in.Text();
    if (!in.at_end()) return std::nullopt;
  } else {
    identity = ParseIdentityBytes(found_by);
    name.assign(reinterpret_cast<const char*>(stored_model.data()), stored_model.size());
  }
  if (!identity) return std::nullopt;
  return Space{*std::move(identity), std::move(name)};
}

Result<std::optional<PrefixRow>> PrefixIndex::Find(int64_t block) {
  Query query(database_, "SELECT " KVCELL_NODE_COLUMNS " FROM prefix_nodes WHERE block=?");
  const auto found = query.Int(block).Step();
  if (!found) return Fail(found.error());
  return *found ? GetNode(query) : std::nullopt;
}

Status PrefixIndex::Write(const PrefixRow& node) {
  return Query(database_, "INSERT OR REPLACE INTO prefix_nodes(" KVCELL_NODE_COLUMNS ") VALUES(?,?,?,?,?,?,?,?,?)")
      .Int(node.block)
      .Int(node.space)
      .Int(node.parent)
      .Int(node.depth)
      .Int(int64_t{node.held})
      .Int(int64_t{node.pinned})
      .Int(node.content)
      .Int(node.last_used)
      .Int(NodeChecksum(node))
      .Run();
}

Result<std::vector<PrefixRow>> PrefixIndex::List(int64_t* damaged) {
  Query query(database_, "SELECT " KVCELL_NODE_COLUMNS
                         " FROM prefix_nodes WHERE block IN (SELECT id FROM blocks) ORDER BY depth, block");
  std::vector<PrefixRow> nodes;
  for (;;) {
    const auto more = query.Step();
    if (!more) return Fail(more.error());
    if (!*more) return nodes;
    if (auto node = GetNode(query)) {
      nodes.push_back(*node);
    } else {
      ++*damaged;
    }
  }
}

Result<std::vector<int64_t>> PrefixIndex::Children(int64_t space, int64_t parent, int most) {
  Query query(database_, "SELECT block FROM prefix_nodes WHERE parent=? AND space=? ORDER BY last_used DESC LIMIT ?");
  query.Int(parent).Int(space).Int(int64_t{most});
  return Ids(&query);
}

Result<std::vector<PrefixRow>> PrefixIndex::Roots(uint64_t content, int most) {
  Query query(database_, "SELECT " KVCELL_NODE_COLUMNS " FROM prefix_nodes WHERE parent=0 AND content=? LIMIT ?");
  query.Int(content).Int(int64_t{most});
  std::vector<PrefixRow> nodes;
  for (;;) {
    const auto more = query.Step();
    if (!more) return Fail(more.error());
    if (!*more) return nodes;
    if (auto node = GetNode(query)) nodes.push_back(*node);
  }
}

Status PrefixIndex::Touch(std::span<const int64_t> blocks, int64_t now) {
  Query query(database_, "UPDATE prefix_nodes SET last_used=? WHERE block=? AND last_used<>?1");
  for (const int64_t block : blocks) KVCELL_RETURN_IF_ERROR(query.Int(now).Int(block).Run());
  return OkStatus();
}

Result<int64_t> PrefixIndex::CountSessions(int64_t block) {
  Query query(database_, "SELECT count(*) FROM session_blocks WHERE block=?");
  const auto row = query.Int(block).Step();
  if (!row) return Fail(row.error());
  return *row ? query.GetInt(0) : 0;
}

Result<std::vector<int64_t>> PrefixIndex::Evictable(int64_t before, int64_t most) {
  Query query(database_,
              "SELECT block FROM prefix_nodes AS node WHERE held<>0 AND pinned=0 AND last_used<=? AND NOT EXISTS("
              "SELECT 1 FROM prefix_nodes WHERE parent=node.block AND space=node.space AND held<>0) "
              "ORDER BY last_used, block DESC LIMIT ?");
  query.Int(before).Int(most);
  return Ids(&query);
}

Result<int64_t> PrefixIndex::CountHeldChildren(int64_t parent) {
  Query query(database_, "SELECT count(*) FROM prefix_nodes WHERE parent=? AND held<>0");
  const auto row = query.Int(parent).Step();
  if (!row) return Fail(row.error());
  return *row ? query.GetInt(0) : 0;
}

Status PrefixIndex::Forget(int64_t block) {
  KVCELL_RETURN_IF_ERROR(Query(database_, "DELETE FROM prefix_bytes WHERE block=?").Int(block).Run());
  return Query(database_, "DELETE FROM prefix_nodes WHERE block=?").Int(block).Run();
}

Result<std::optional<std::vector<std::byte>>> PrefixIndex::ReadBytes(int64_t block, PrefixBytes kind) {
  Query query(database_, "SELECT bytes, checksum FROM prefix_bytes WHERE block=? AND kind=?");
  const auto found = query.Int(block).Int(static_cast<int64_t>(kind)).Step();
  if (!found) return Fail(found.error());
  if (!*found) return std::nullopt;
  const auto bytes = query.GetBlob(0);
  if (BytesChecksum(block, kind, bytes) != query.GetUint(1)) return std::nullopt;
  if (cipher_ != nullptr) return cipher_->Unseal(bytes, About("prefix_bytes", block, static_cast<uint64_t>(kind)));
  return std::vector<std::byte>(bytes.begin(), bytes.end());
}

Result<bool> PrefixIndex::CheckBytes(int64_t block, PrefixBytes kind) {
  Query query(database_, "SELECT 1 FROM prefix_bytes WHERE block=? AND kind=?");
  const auto found = query.Int(block).Int(static_cast<int64_t>(kind)).Step();
  if (!found) return Fail(found.error());
  if (!*found) return true;
  const auto bytes = ReadBytes(block, kind);
  if (!bytes) return Fail(bytes.error());
  return bytes->has_value();
}

Status PrefixIndex::WriteBytes(int64_t block, PrefixBytes kind, std::span<const std::byte> bytes) {
  std::vector<std::byte> sealed;
  if (cipher_ != nullptr) {
    sealed = cipher_->Seal(bytes, About("prefix_bytes", block, static_cast<uint64_t>(kind)));
    bytes = sealed;
  }
  return Query(database_, "INSERT OR REPLACE INTO prefix_bytes(block,kind,bytes,checksum) VALUES(?,?,?,?)")
      .Int(block)
      .Int(static_cast<int64_t>(kind))
      .Blob(bytes)
      .Int(BytesChecksum(block, kind, bytes))
      .Run();
}

Status PrefixIndex::NoteEvicted(std::span<const std::byte> stored_key) {
  KVCELL_RETURN_IF_ERROR(
      Query(database_, "INSERT OR REPLACE INTO prefix_evicted(key) VALUES(?)").Blob(stored_key).Run());
  const int64_t last = sqlite3_last_insert_rowid(database_.handle());
  return Query(database_, "DELETE FROM prefix_evicted WHERE id<=?").Int(last - kEvictedKept).Run();
}

Status PrefixIndex::ForgetEvicted(std::span<const std::byte> stored_key) {
  return Query(database_, "DELETE FROM prefix_evicted WHERE key=?").Blob(stored_key).Run();
}

Result<bool> PrefixIndex::WasEvicted(std::span<const std::byte> stored_key) {
  return Query(database_, "SELECT 1 FROM prefix_evicted WHERE key=?").Blob(stored_key).Step();
}

}  // namespace kvcell
