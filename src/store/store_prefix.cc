// The store's prefix tree: publishing chains of blocks, finding the longest one that a prompt begins with, and giving
// them up.
#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <map>
#include <set>
#include <utility>

#include "base/checksum.h"
#include "base/clock.h"
#include "store/prefix_index.h"
#include "store/store_impl.h"

namespace kvcell {
namespace {

// Neighbours that are compared to tell where a prompt leaves what is stored.
constexpr int kNeighbours = 64;

Status NoPrefix(const std::string& path, int64_t id) {
  return Status(StatusCode::kNotFound,
                fmt::format("store {} has no prefix {}: `kvcell prefix ls` shows them", path, id));
}

// Chains that must not know of each other: identities of another namespace are never named.
std::string NamespaceOf(const Identity& identity) {
  std::string all;
  for (const auto& [field, value] : identity) {
    if (field == "namespace") all += value + '/';
  }
  return all;
}

bool SamePlaces(const BlockRecord& a, const BlockRecord& b) {
  for (size_t i = 0; i < a.places.size(); ++i) {
    const auto& one = a.places[i];
    const auto& other = b.places[i];
    if (one.has_value() != other.has_value()) return false;
    if (one && (KeyOf(*one) != KeyOf(*other) || one->index != other->index)) return false;
  }
  return true;
}

}  // namespace

Identity StoreImpl::WithNamespace(const Identity& identity) const {
  if (options_.name_space.empty()) return identity;
  Identity with = {{"namespace", options_.name_space}};
  with.insert(with.end(), identity.begin(), identity.end());
  return with;
}

// From the end: a block that another kept chain or session goes on from was not this session's alone.
Status StoreImpl::UnholdPrefixes(std::span<const Link> links) {
  PrefixIndex prefixes = index_->prefixes();
  for (size_t i = links.size(); i-- > 0;) {
    auto node = prefixes.Find(links[i].block);
    if (!node) return node.error();
    const auto sessions = prefixes.CountSessions(links[i].block);
    if (!sessions) return sessions.error();
    const auto children = prefixes.CountHeldChildren(links[i].block);
    if (!children) return children.error();
    if (!*node || !(*node)->held || (*node)->pinned || *sessions > 0 || *children > 0) continue;
    (*node)->held = false;
    KVCELL_RETURN_IF_ERROR(prefixes.Write(**node));
  }
  return OkStatus();
}

Status StoreImpl::LinkBlock(int64_t block, size_t depth, int64_t space, bool held, Pending* pending) {
  PrefixIndex prefixes = index_->prefixes();
  auto found = prefixes.Find(block);
  if (!found) return found.error();
  const BlockRow& row = pending->rows[depth];
  PrefixRow node;
  if (*found) node = **found;
  const PrefixRow before = node;
  node.block = block;
  node.space = space;
  node.parent = depth == 0 ? 0 : pending->rows[depth - 1].id;
  node.depth = static_cast<int64_t>(depth);
  node.held = node.held || held;
  node.content = depth == 0 ? prefixes.ContentOf(row.record.tokens) : 0;
  node.last_used = UnixSeconds();
  if (*found && before.held == node.held && before.last_used == node.last_used) return OkStatus();
  if (!*found) KVCELL_RETURN_IF_ERROR(prefixes.ForgetEvicted(row.stored_key));
  return prefixes.Write(node);
}

// The stored row of a block that continues the chain so far, compared in full: identity, the block before it, all
// tokens. A row from before there was a tree has no place in it yet, and takes this one.
Result<bool> StoreImpl::Continues(const BlockRow& row, const BlockRecord& block, int64_t parent, int64_t space) {
  if (row.record.key != block.key || row.record.tokens != block.tokens) return false;
  const auto node = index_->prefixes().Find(row.id);
  if (!node) return Fail(node.error());
  const auto& mine = block.places[0];
  const auto& theirs = row.record.places[0];
  if (space == kOwnSpace && !(mine && theirs && KeyOf(*mine) == KeyOf(*theirs) && mine->index == theirs->index))
    return false;
  return !*node || ((*node)->space == space && (*node)->parent == parent);
}

Status StoreImpl::Publish(PrefixRecord* record, const CellSetShape shapes[2]) {
  if (options_.read_only)
    return Status(StatusCode::kPermission, fmt::format("store {} is open for inspection only", path_));
  if (record->blocks.empty()) return OkStatus();
  if (record->tokens.size() != record->blocks.size() * kBlockTokens) {
    return Status(StatusCode::kInvalidArgument, "a prefix has 64 tokens for each of its blocks: it can't be published");
  }
  for (size_t i = 0; i < record->blocks.size(); ++i) {
    if (!std::ranges::equal(record->blocks[i].tokens,
                            std::span(record->tokens).subspan(i * kBlockTokens, kBlockTokens))) {
      return Status(StatusCode::kInvalidArgument, fmt::format("the tokens of block {} are not the prefix's", i));
    }
  }
  const std::lock_guard lock(mutex_);
  if (options_.durability == Durability::kPower) KVCELL_RETURN_IF_ERROR(segments_->SyncAppended());
  KVCELL_RETURN_IF_ERROR(index_->SetDurability(options_.durability));
  Pending pending;
  return Settle(PublishRows(record, shapes, &pending), &pending, &record->blocks);
}

Status StoreImpl::PublishRows(PrefixRecord* record, const CellSetShape shapes[2], Pending* pending) {
  Transaction transaction(index_->database());
  KVCELL_RETURN_IF_ERROR(transaction.Begin(Transaction::Kind::kWrite));
  PrefixIndex prefixes = index_->prefixes();
  const auto space = prefixes.MakeSpace(WithNamespace(record->identity), record->model);
  if (!space) return space.error();
  for (const auto& block : record->blocks)
    KVCELL_RETURN_IF_ERROR(CommitBlock(block, shapes, *space, /*held=*/true, pending));
  KVCELL_RETURN_IF_ERROR(WriteSinks(pending->rows.front().id, record->sinks));
  if (!record->replicas.empty()) {
    KVCELL_RETURN_IF_ERROR(prefixes.WriteBytes(pending->rows.back().id, PrefixBytes::kReplicas, record->replicas));
  }
  return EndRows(&transaction, pending);
}

// Once for each first block: every chain that begins with it reads the same ones.
Status StoreImpl::WriteSinks(int64_t root, std::span<const std::byte> sinks) {
  if (sinks.empty()) return OkStatus();
  PrefixIndex prefixes = index_->prefixes();
  const auto there = prefixes.ReadBytes(root, PrefixBytes::kSinks);
  if (!there) return there.error();
  return *there ? OkStatus() : prefixes.WriteBytes(root, PrefixBytes::kSinks, sinks);
}

Result<PrefixFound> StoreImpl::FindPrefix(const PrefixQuery& asked) {
  PrefixQuery query = asked;
  query.identity = WithNamespace(asked.identity);
  const std::lock_guard lock(mutex_);
  PrefixFound found;
  PrefixIndex prefixes = index_->prefixes();
  const auto there = prefixes.IsThere();
  if (!there) return Fail(there.error());
  if (!*there) return found;
  const auto space = prefixes.FindSpace(query.identity);
  if (!space) return Fail(space.error());
  std::vector<BlockRow> rows;
  if (*space) KVCELL_FAIL_IF_ERROR(WalkChain(query, **space, &rows, &found));
  KVCELL_FAIL_IF_ERROR(CutToWhatIsNeeded(query, &rows, &found));
  const bool told = found.end == PrefixEnd::kDamaged || found.end == PrefixEnd::kReplicas;
  if (rows.size() < query.keys.size() && !told) {
    KVCELL_FAIL_IF_ERROR(TellWhyItEnds(query, space->value_or(0), rows, &found));
  }
  if (rows.empty()) return found;
  if (!options_.read_only) {
    std::vector<int64_t> ids;
    for (const auto& row : rows) ids.push_back(row.id);
    Transaction transaction(index_->database());
    // A use that can't be noted is no reason not to have it.
    if (transaction.Begin(Transaction::Kind::kWrite).ok() && prefixes.Touch(ids, UnixSeconds()).ok())
      (void)transaction.Commit();
  }
  for (auto& row : rows) found.blocks.push_back(std::move(row.record));
  return found;
}

// Rows of the chain as far as it is stored, whole and held.
Status StoreImpl::WalkChain(const PrefixQuery& query, int64_t space, std::vector<BlockRow>* rows, PrefixFound* found) {
  found->end = PrefixEnd::kWhole;
  for (size_t b = 0; b < query.keys.size(); ++b) {
    BlockRecord wanted;
    wanted.key = query.keys[b];
    std::copy_n(query.tokens.begin() + static_cast<std::ptrdiff_t>(b * kBlockTokens), kBlockTokens,
                wanted.tokens.begin());
    std::vector<int64_t> damaged;
    auto candidates = index_->FindBlocks(wanted.key, &damaged);
    if (!candidates) return candidates.error();
    std::optional<BlockRow> next;
    bool known_damaged = !damaged.empty();
    for (auto& row : *candidates) {
      const auto node = index_->prefixes().Find(row.id);
      if (!node) return node.error();
      if (!*node || (*node)->space != space || (*node)->parent != (b == 0 ? 0 : rows->back().id)) continue;
      if (row.record.tokens != wanted.tokens) continue;
      if (std::ranges::any_of(row.record.places, [&](const auto& place) { return place && IsDamaged(*place); })) {
        known_damaged = true;
        continue;
      }
      next = std::move(row);
      break;
    }
    if (next && !HoldBlock(next->record).ok()) next.reset();
    if (!next) {
      found->end = known_damaged ? PrefixEnd::kDamaged : PrefixEnd::kEnds;
      if (known_damaged) found->detail = fmt::format("block {} is damaged; `kvcell store verify` says where", b);
      break;
    }
    rows->push_back(*std::move(next));
  }
  // Held now; those whose rows still say the same were neither freed nor moved in between.
  for (size_t i = 0; i < rows->size(); ++i) {
    const auto still = index_->FindBlock((*rows)[i].id);
    if (still && *still && SamePlaces((*still)->record, (*rows)[i].record)) continue;
    DropRows(rows, i);
    found->end = PrefixEnd::kEvicted;
  }
  return OkStatus();
}

void StoreImpl::DropRows(std::vector<BlockRow>* rows, size_t from) {
  for (size_t i = from; i < rows->size(); ++i) Release((*rows)[i].record);
  rows->resize(std::min(from, rows->size()));
}

// Sinks go with every chain; where exact cells are asked for, it ends at the last block that was published with them.
Status StoreImpl::CutToWhatIsNeeded(const PrefixQuery& query, std::vector<BlockRow>* rows, PrefixFound* found) {
  if (rows->empty()) return OkStatus();
  PrefixIndex prefixes = index_->prefixes();
  auto sinks = prefixes.ReadBytes(rows->front().id, PrefixBytes::kSinks);
  if (!sinks) return sinks.error();
  if (!*sinks) {
    DropRows(rows, 0);
    found->end = PrefixEnd::kDamaged;
    found->detail = "the first tokens' exact cells are missing or damaged";
    return OkStatus();
  }
  found->sinks = *std::move(*sinks);
  found->n_matched = rows->size();
  if (!query.needs_replicas) return OkStatus();
  while (!rows->empty()) {
    auto replicas = prefixes.ReadBytes(rows->back().id, PrefixBytes::kReplicas);
    if (!replicas) return replicas.error();
    if (*replicas) {
      found->replicas = *std::move(*replicas);
      return OkStatus();
    }
    DropRows(rows, rows->size() - 1);
    found->end = PrefixEnd::kReplicas;
    found->detail = "exact cells of recent blocks are stored at published ends only";
  }
  return OkStatus();
}

Status StoreImpl::TellWhyItEnds(const PrefixQuery& query, int64_t space, const std::vector<BlockRow>& rows,
                                PrefixFound* found) {
  PrefixIndex prefixes = index_->prefixes();
  const size_t b = rows.size();
  const auto evicted = prefixes.WasEvicted(index_->StoredKey(query.keys[b]));
  if (!evicted) return evicted.error();
  if (*evicted || found->end == PrefixEnd::kEvicted) {
    found->end = PrefixEnd::kEvicted;
    return OkStatus();
  }
  if (b == 0) {
    const auto first = query.tokens.first(kBlockTokens);
    const auto roots = prefixes.Roots(prefixes.ContentOf(first), kNeighbours);
    if (!roots) return roots.error();
    for (const PrefixRow& root : *roots) {
      const auto other = prefixes.ReadSpace(root.space);
      if (!other) return other.error();
      const auto block = index_->FindBlock(root.block);
      if (!block) return block.error();
      if (root.space == space || !*other || !*block || !std::ranges::equal((*block)->record.tokens, first)) continue;
      if (NamespaceOf((*other)->identity) != NamespaceOf(query.identity)) continue;
      found->end = PrefixEnd::kOtherIdentity;
      found->detail = IdentityDifference((*other)->identity, query.identity).value_or("identity");
      return OkStatus();
    }
  }
  found->end = b == 0 ? PrefixEnd::kNothingStored : PrefixEnd::kEnds;
  const auto children = prefixes.Children(space, b == 0 ? 0 : rows.back().id, kNeighbours);
  if (!children) return children.error();
  const auto rest = query.tokens.subspan(b * kBlockTokens);
  for (const int64_t child : *children) {
    const auto block = index_->FindBlock(child);
    if (!block) return block.error();
    if (!*block) continue;
    const auto& tokens = (*block)->record.tokens;
    const auto [mine, theirs] = std::ranges::mismatch(rest.first(std::min<size_t>(rest.size(), kBlockTokens)), tokens);
    const auto position = static_cast<int64_t>(b * kBlockTokens) + (theirs - tokens.begin());
    if (found->end != PrefixEnd::kDiffers || position > found->differs_at) found->differs_at = position;
    found->end = PrefixEnd::kDiffers;
  }
  return OkStatus();
}

Result<std::vector<PrefixSummary>> StoreImpl::ListPrefixes() {
  const std::lock_guard lock(mutex_);
  PrefixIndex prefixes = index_->prefixes();
  const auto there = prefixes.IsThere();
  if (!there) return Fail(there.error());
  std::vector<PrefixSummary> list;
  if (!*there) return list;
  Transaction transaction(index_->database());
  KVCELL_FAIL_IF_ERROR(transaction.Begin(Transaction::Kind::kRead));
  int64_t damaged = 0;
  const auto nodes = prefixes.List(&damaged);
  if (!nodes) return Fail(nodes.error());
  std::map<int64_t, int64_t> children;
  for (const PrefixRow& node : *nodes) ++children[node.parent];
  for (const PrefixRow& node : *nodes) {
    const auto sessions = prefixes.CountSessions(node.block);
    if (!sessions) return Fail(sessions.error());
    const auto next = children.find(node.block);
    const int64_t n_next = next == children.end() ? 0 : next->second;
    if (n_next == 1 && !node.pinned) continue;
    const auto block = index_->FindBlock(node.block);
    if (!block) return Fail(block.error());
    if (*block && !index_->IsOfOwnSpace(**block)) continue;  // another tenant's
    const auto space = prefixes.ReadSpace(node.space);
    if (!space) return Fail(space.error());
    list.push_back({.id = node.block,
                    .tokens = (node.depth + 1) * kBlockTokens,
                    .refs = *sessions + n_next,
                    .sessions = *sessions,
                    .pinned = node.pinned,
                    .published = node.held,
                    .last_used = node.last_used,
                    .model = *space ? (*space)->model : ""});
  }
  return list;
}

Status StoreImpl::PinPrefix(int64_t id, bool pinned) {
  if (options_.read_only)
    return Status(StatusCode::kPermission, fmt::format("store {} is open for inspection only", path_));
  const std::lock_guard lock(mutex_);
  Transaction transaction(index_->database());
  KVCELL_RETURN_IF_ERROR(transaction.Begin(Transaction::Kind::kWrite));
  PrefixIndex prefixes = index_->prefixes();
  const auto own = index_->FindBlock(id);
  if (!own) return own.error();
  if (*own && !index_->IsOfOwnSpace(**own)) return NoPrefix(path_, id);
  for (int64_t block = id; block != 0;) {
    auto node = prefixes.Find(block);
    if (!node) return node.error();
    if (!*node) return NoPrefix(path_, id);
    if (block == id) (*node)->pinned = pinned;
    (*node)->held = (*node)->held || pinned;
    KVCELL_RETURN_IF_ERROR(prefixes.Write(**node));
    if (!pinned) break;
    block = (*node)->parent;
  }
  return transaction.Commit();
}

Status StoreImpl::RemovePrefix(int64_t id) {
  if (options_.read_only)
    return Status(StatusCode::kPermission, fmt::format("store {} is open for inspection only", path_));
  const std::lock_guard lock(mutex_);
  Transaction transaction(index_->database());
  KVCELL_RETURN_IF_ERROR(transaction.Begin(Transaction::Kind::kWrite));
  PrefixIndex prefixes = index_->prefixes();
  int64_t damaged = 0;
  const auto nodes = prefixes.List(&damaged);
  if (!nodes) return nodes.error();
  std::map<int64_t, PrefixRow> by_block;
  std::map<int64_t, std::vector<int64_t>> children;
  for (const PrefixRow& node : *nodes) {
    by_block[node.block] = node;
    children[node.parent].push_back(node.block);
  }
  const auto own = index_->FindBlock(id);
  if (!own) return own.error();
  if (!by_block.contains(id) || (*own && !index_->IsOfOwnSpace(**own))) return NoPrefix(path_, id);
  std::vector<int64_t> going = {id};
  for (size_t i = 0; i < going.size(); ++i) {
    const auto& next = children[going[i]];
    going.insert(going.end(), next.begin(), next.end());
  }
  for (int64_t up = by_block[id].parent; up != 0 && children[up].size() == 1 && !by_block[up].pinned;
       up = by_block[up].parent) {
    going.push_back(up);
  }
  for (const int64_t block : going) {
    if (by_block[block].pinned) {
      return Status(StatusCode::kBusy,
                    fmt::format("prefix {} is pinned: `kvcell prefix pin --off {}` first", block, block));
    }
  }
  for (const int64_t block : going) {
    by_block[block].held = false;
    KVCELL_RETURN_IF_ERROR(prefixes.Write(by_block[block]));
  }
  const auto emptied = index_->DeleteUnusedBlocks(going);
  if (!emptied) return emptied.error();
  const auto commits = index_->CountCommit();
  if (!commits) return commits.error();
  KVCELL_RETURN_IF_ERROR(transaction.Commit());
  head_.Write(*commits, std::exchange(lost_commits_, 0) != 0);
  for (const auto& key : *emptied) (void)CollectExtent(key, false);
  return OkStatus();
}

Result<uint64_t> StoreImpl::EvictPrefixes(uint64_t bytes) {
  if (options_.read_only)
    return Fail(StatusCode::kPermission, fmt::format("store {} is open for inspection only", path_));
  const std::lock_guard lock(mutex_);
  return TakePrefixes(bytes, std::numeric_limits<int64_t>::max());
}

Result<uint64_t> StoreImpl::TakePrefixes(uint64_t bytes, int64_t before) {
  constexpr int64_t kAtOnce = 64;
  KVCELL_FAIL_IF_ERROR(index_->SetDurability(options_.durability));
  uint64_t freed = 0;
  std::vector<ExtentKey> emptied;
  std::set<int64_t> in_use;
  bool changed = false;
  Transaction transaction(index_->database());
  KVCELL_FAIL_IF_ERROR(transaction.Begin(Transaction::Kind::kWrite));
  for (bool more = true; more && freed < bytes;) {
    const auto ends = index_->prefixes().Evictable(before, kAtOnce + static_cast<int64_t>(in_use.size()));
    if (!ends) return Fail(ends.error());
    more = false;
    for (const int64_t end : *ends) {
      if (freed >= bytes) break;
      if (in_use.contains(end)) continue;
      const auto row = index_->FindBlock(end);
      if (!row) return Fail(row.error());
      if (*row) {
        const auto held = IsHeldByAnyone((*row)->record);
        if (!held) return Fail(held.error());
        if (*held) {
          in_use.insert(end);
          continue;
        }
      }
      const auto taken = TakePrefix(end, &emptied);
      if (!taken) return Fail(taken.error());
      freed += *taken;
      more = changed = true;
    }
  }
  if (!changed) return 0;
  const auto commits = index_->CountCommit();
  if (!commits) return Fail(commits.error());
  KVCELL_FAIL_IF_ERROR(transaction.Commit());
  head_.Write(*commits, std::exchange(lost_commits_, 0) != 0);
  std::ranges::sort(emptied);
  emptied.erase(std::unique(emptied.begin(), emptied.end()), emptied.end());
  for (const auto& key : emptied) (void)CollectExtent(key, false);
  return freed;
}

Result<bool> StoreImpl::IsHeldByAnyone(const BlockRecord& block) const {
  for (const auto& place : block.places) {
    if (!place) continue;
    const auto free = segments_->CanFree(KeyOf(*place), {place->index});
    if (!free) return Fail(free.error());
    if (!*free) return true;
  }
  return false;
}

// The bytes that this frees: none where a session goes on using the block.
Result<uint64_t> StoreImpl::TakePrefix(int64_t block, std::vector<ExtentKey>* emptied) {
  PrefixIndex prefixes = index_->prefixes();
  auto node = prefixes.Find(block);
  if (!node) return Fail(node.error());
  const auto row = index_->FindBlock(block);
  if (!row) return Fail(row.error());
  if (*node && *row) {
    (*node)->held = false;
    KVCELL_FAIL_IF_ERROR(prefixes.Write(**node));
  } else {
    KVCELL_FAIL_IF_ERROR(prefixes.Forget(block));  // damaged
  }
  const auto gone = index_->DeleteUnusedBlocks({&block, 1});
  if (!gone) return Fail(gone.error());
  emptied->insert(emptied->end(), gone->begin(), gone->end());
  if (gone->empty() || !*row) return 0;
  KVCELL_FAIL_IF_ERROR(prefixes.NoteEvicted((*row)->stored_key));
  ++evicted_of_prefixes_;
  uint64_t freed = 0;
  for (const auto& place : (*row)->record.places) {
    const auto extent = place ? index_->FindExtent(KeyOf(*place)) : Result<std::optional<ExtentRow>>(std::nullopt);
    if (extent && *extent) freed += (*extent)->block_bytes();
  }
  return freed;
}

}  // namespace kvcell
