#include <fcntl.h>
#include <fmt/format.h>
#include <stdlib.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <set>
#include <thread>

#include "base/clock.h"
#include "store/prefix_index.h"
#include "store/store_impl.h"

namespace kvcell {
namespace {

constexpr uint64_t kGenerationsAtOnce = 1024;
constexpr auto kOpenTimeout = std::chrono::seconds(20);
constexpr int kLoadAttempts = 20;
constexpr int64_t kUseGranularitySeconds = 60;

Status ReadOnly(const std::string& path) {
  return Status(StatusCode::kPermission,
                fmt::format("store {} is open for inspection only: open it for writing", path));
}

Status NoSession(const std::string& path, const std::string& name) {
  return Status(StatusCode::kNotFound,
                fmt::format("store {} has no session '{}': `kvcell sessions ls` shows them", path, name));
}

// Waits while another process opens the store; whoever holds this founds or tidies it.
Status WaitForLock(const File& file, const std::string& what) {
  const auto end = SteadyNow() + kOpenTimeout;
  for (;;) {
    const Status status = LockWithPid(file, what);
    if (status.code() != StatusCode::kBusy || SteadyNow() > end) return status;
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
}

std::vector<uint32_t> UnusedBlocks(const ExtentRow& extent, const std::vector<bool>& used) {
  std::vector<uint32_t> unused;
  for (uint32_t i = 0; i < extent.n_blocks; ++i) {
    if (!used[i] && !extent.freed[i]) unused.push_back(i);
  }
  return unused;
}

bool SamePlace(const std::optional<BlockPlace>& a, const std::optional<BlockPlace>& b) {
  return a && b && a->segment == b->segment && a->offset == b->offset && a->index == b->index;
}

// What a session takes in the index, about: its data, which is by far the most.
uint64_t RowBytes(const SessionRecord& record) {
  return record.tokens.size() * sizeof(Token) + record.exact.size() + record.logits.size() * sizeof(float) +
         record.extras.size() + record.sinks.size();
}

}  // namespace

Result<std::unique_ptr<Store>> Store::Open(const std::string& directory, const StoreOptions& options) {
  return StoreImpl::Open(directory, options);
}

// The directory's own path, symbolic links above it resolved, so that a later change of the working directory doesn't
// matter.
static Result<std::string> RealPath(const std::string& path) {
  const std::unique_ptr<char, decltype(&::free)> real(::realpath(path.c_str(), nullptr), ::free);
  if (real == nullptr) return Fail(ErrnoStatus(errno, "find", path));
  return std::string(real.get());
}

Result<std::unique_ptr<Store>> StoreImpl::Open(const std::string& directory, const StoreOptions& options) {
  SystemCalls& calls = options.system_calls != nullptr ? *options.system_calls : SystemCalls::Real();
  std::string path = directory;
  while (path.size() > 1 && path.ends_with('/')) path.pop_back();
  if (path.empty()) return Fail(StatusCode::kInvalidArgument, "the store has no directory: give one");
  if (!options.name_space.empty()) {
    if (const Status status = CheckSessionName(options.name_space); !status.ok()) {
      return Fail(StatusCode::kInvalidArgument, fmt::format("the namespace is no name: {}", status.message()));
    }
  }
  if (!options.key.empty()) KVCELL_FAIL_IF_ERROR(Cipher::CheckSecret(options.key));
  struct stat info = {};
  if (const int result = calls.StatAt(AT_FDCWD, path.c_str(), &info); result < 0) {
    if (result != -ENOENT) return Fail(ErrnoStatus(-result, "open store", path));
    if (!options.create || options.read_only) {
      return Fail(StatusCode::kNotFound, fmt::format("there is no store at {}: check the path", path));
    }
    KVCELL_FAIL_IF_ERROR(MakeDirectories(calls, path));
  } else if (S_ISLNK(info.st_mode)) {
    return Fail(StatusCode::kInvalidArgument,
                fmt::format("store {} is a symbolic link: give the directory that it points to", path));
  } else if (!S_ISDIR(info.st_mode)) {
    return Fail(StatusCode::kInvalidArgument, fmt::format("store {} is not a directory: choose another path", path));
  }
  const auto real = RealPath(path);
  if (!real) return Fail(real.error());
  std::unique_ptr<StoreImpl> store(new StoreImpl(*real, options, calls));
  KVCELL_FAIL_IF_ERROR(store->OpenFiles());
  return store;
}

Status StoreImpl::OpenFiles() {
  auto directory = File::Open(calls_, AT_FDCWD, path_, O_RDONLY | O_DIRECTORY, 0, path_);
  if (!directory) return directory.error();
  directory_ = std::move(*directory);
  const bool writes = !options_.read_only;
  File open_lock;
  if (writes) {
    struct stat info = {};
    if (!options_.create && calls_.StatAt(directory_.fd(), "store.db", &info) < 0) {
      return Status(StatusCode::kNotFound, fmt::format("there is no store at {}: check the path", path_));
    }
    auto lock = File::Open(calls_, directory_.fd(), "open.lock", O_RDWR | O_CREAT, 0600, path_ + "/open.lock");
    if (!lock) return lock.error();
    KVCELL_RETURN_IF_ERROR(WaitForLock(*lock, fmt::format("store {}", path_)));
    open_lock = std::move(*lock);
  }
  KVCELL_RETURN_IF_ERROR(MarkInUse());
  std::array<File, 2> folders;  // segments, locks
  constexpr std::array<const char*, 2> kNames = {"segments", "locks"};
  auto index = Index::Open(calls_, directory_, options_);
  if (!index) return index.error();
  index_ = std::move(*index);
  for (size_t i = 0; i < folders.size(); ++i) {
    const std::string folder_path = path_ + "/" + kNames.at(i);
    if (writes) {
      const int result = calls_.MkdirAt(directory_.fd(), kNames.at(i), 0700);
      if (result < 0 && result != -EEXIST) return ErrnoStatus(-result, "make directory", folder_path);
    }
    auto folder = File::Open(calls_, directory_.fd(), kNames.at(i), O_RDONLY | O_DIRECTORY, 0, folder_path);
    if (!folder && folder.error().code() == StatusCode::kNotFound) {
      return Status(StatusCode::kCorruption,
                    fmt::format("store {} has no folder '{}': put it back from a copy, or open the store for writing, "
                                "which makes an empty one",
                                path_, kNames.at(i)));
    }
    if (!folder) return folder.error();
    folders.at(i) = std::move(*folder);
  }
  const bool power = options_.durability == Durability::kPower;
  if (writes && power) KVCELL_RETURN_IF_ERROR(directory_.Sync());
  segments_ = std::make_unique<Segments>(
      calls_, std::move(folders[0]),
      Segments::Options{index_->store_id(), options_.segment_bytes, power, index_->cipher()});
  locks_ = std::make_unique<SessionLocks>(calls_, std::move(folders[1]), index_->store_id(),
                                          [this](const std::string& name) { return index_->RowName(name); });
  KVCELL_RETURN_IF_ERROR(CheckHead());
  if (!writes) return OkStatus();
  KVCELL_RETURN_IF_ERROR(Reclaim());
  const std::lock_guard lock(mutex_);
  RemoveExpired();
  (void)MakeRoom(0);  // what is in use may be more than the cap; saves will say so
  return OkStatus();
}

Status StoreImpl::MarkInUse() {
  auto file = File::Open(calls_, directory_.fd(), "open.lock", O_RDONLY, 0, path_ + "/open.lock");
  if (!file) {
    // Who only looks may look at a store that was never opened for writing, or may not read the file.
    return options_.read_only ? OkStatus() : file.error();
  }
  const auto locked = file->TryLock(kUseLockByte, 1, LockKind::kShared);
  if (!locked) return options_.read_only ? OkStatus() : locked.error();
  const auto info = file->Stat();
  if (!info) return info.error();
  if (!*locked || info->st_nlink == 0) {
    return Status(StatusCode::kBusy, fmt::format("store {} is being removed: try again", path_));
  }
  in_use_ = std::move(*file);
  return OkStatus();
}

// The head is read first: what others commit in between only makes the index's number larger.
Status StoreImpl::CheckHead() {
  head_ = Head::Open(calls_, directory_, index_->store_id(), !options_.read_only);
  const auto counted = head_.Read();
  const auto commits = index_->Commits();
  if (!commits) return commits.error();
  if (counted && *counted > *commits) lost_commits_ = *counted - *commits;
  return OkStatus();
}

std::string StoreImpl::LostCommits() const {
  if (lost_commits_ == 0) return "";
  return fmt::format(
      "the last {} change{} of store {} {} lost, an older state is served: the log of its index was damaged, or the "
      "machine lost power",
      lost_commits_, lost_commits_ == 1 ? "" : "s", path_, lost_commits_ == 1 ? "is" : "are");
}

StoreImpl::~StoreImpl() {
  {
    const std::lock_guard lock(scrub_mutex_);
    scrub_stops_ = true;
  }
  scrub_wake_.notify_all();
  if (scrub_.joinable()) scrub_.join();
  if (segments_ == nullptr || index_ == nullptr || options_.read_only) return;
  if (in_doubt_ && !SettleIndex()) return;
  // What was never committed goes now; if that fails, the next one to open the store does it.
  for (const auto& [segment, file] : segments_->TakeOwned()) (void)ReclaimSegment(file, segment);
}

// Space that processes which have ended left behind: blocks without a row and what lies between and behind the extents
// of segments that nobody owns. Damage found on the way is for Verify to name; what is in doubt stays.
Status StoreImpl::Reclaim() {
  const auto keys = index_->ListExtentKeys();
  if (!keys) return keys.error().code() == StatusCode::kCorruption ? OkStatus() : keys.error();
  for (const auto& key : *keys) {
    const auto extent = index_->FindExtent(key);
    if (!extent || !*extent) continue;
    const auto used = index_->UsedBlocks(**extent);
    if (used && !UnusedBlocks(**extent, *used).empty()) (void)CollectExtent(key, false);
  }
  const auto segments = segments_->List();
  if (!segments) return segments.error();
  for (const uint64_t segment : *segments) {
    const auto owned = segments_->TryOwn(segment);
    if (owned && *owned) (void)ReclaimSegment(**owned, segment);
  }
  return OkStatus();
}

// The rows are read after the segment is owned: what they name then is all that was ever committed in it.
Status StoreImpl::ReclaimSegment(const File& owned, uint64_t segment) {
  const auto extents = index_->ListExtents(segment);
  if (!extents) return extents.error();
  std::vector<ExtentRange> ranges;
  for (const auto& extent : *extents) ranges.push_back(extent.range());
  return segments_->Reclaim(owned, segment, ranges);
}

Result<bool> StoreImpl::CollectExtent(const ExtentKey& key, bool erase) {
  Transaction transaction(index_->database());
  KVCELL_FAIL_IF_ERROR(transaction.Begin(Transaction::Kind::kWrite));
  auto found = index_->FindExtent(key);
  if (!found) return Fail(found.error());
  if (!*found) return true;
  ExtentRow& extent = **found;
  const auto used = index_->UsedBlocks(extent);
  if (!used) return Fail(used.error());
  // Those that are free already too: the pages between two of them come back only now.
  std::vector<uint32_t> unused;
  for (uint32_t i = 0; i < extent.n_blocks; ++i) {
    if (!(*used)[i]) unused.push_back(i);
  }
  const bool none_used = std::ranges::none_of(*used, [](bool is_used) { return is_used; });
  // Where a segment was cut from outside and has grown again, a newer extent may lie in this one's place: its bytes
  // stay, and the space comes back with the segment (ReclaimSegment).
  const auto neighbours = index_->ListExtents(key.segment);
  if (!neighbours) return Fail(neighbours.error());
  const bool overlapped = std::ranges::any_of(*neighbours, [&](const ExtentRow& other) {
    return other.key != key && other.range().begin < extent.range().end && extent.range().begin < other.range().end;
  });
  const auto freed = overlapped ? Result<std::vector<uint32_t>>(unused)
                                : segments_->Free(key, extent.shape, extent.n_blocks, unused, none_used, erase);
  if (!freed) return Fail(freed.error());
  for (const uint32_t index : *freed) extent.freed[index] = true;
  const bool all_freed = std::ranges::all_of(extent.freed, [](bool is_freed) { return is_freed; });
  KVCELL_FAIL_IF_ERROR(none_used && all_freed ? index_->DeleteExtent(key) : index_->WriteExtent(extent));
  KVCELL_FAIL_IF_ERROR(transaction.Commit());
  return freed->size() == unused.size();
}

Result<std::vector<BlockPlace>> StoreImpl::CreateCells(const CellSetShape& shape, uint32_t n_blocks,
                                                       const CellSource& cell) {
  if (options_.read_only) return Fail(ReadOnly(path_));
  const auto generation = NextGeneration();
  if (!generation) return Fail(generation.error());
  const CellSetShape stored = segments_->Stored(shape);
  const uint64_t bytes = BlockBytes(stored).value_or(0) * n_blocks + ExtentHeaderBytes(stored) + 2 * kPageBytes;
  {
    const std::lock_guard lock(mutex_);
    KVCELL_FAIL_IF_ERROR(MakeRoom(bytes));
  }
  auto places = segments_->Append(stored, n_blocks, *generation, cell);
  const bool may_evict = options_.disk_cap != 0 || options_.ttl_seconds != 0;
  if (places || places.error().code() != StatusCode::kNoSpace || !may_evict) return places;
  // The disk is fuller than the cap knows of: once more with what the oldest sessions take.
  {
    const std::lock_guard lock(mutex_);
    if (!EvictBytes(bytes).ok()) return places;
  }
  return segments_->Append(stored, n_blocks, *generation, cell);
}

void StoreImpl::Release(const BlockRecord& block) {
  for (const auto& place : block.places) {
    if (place) segments_->Release(*place);
  }
}

void StoreImpl::ReportDamage(const BlockPlace& place) {
  const std::lock_guard lock(mutex_);
  damaged_.insert({place.segment, place.offset + place.index});
}

Result<std::optional<BlockRecord>> StoreImpl::FindBlock(const BlockKey& key,
                                                        std::span<const Token, kBlockTokens> tokens) {
  std::unique_lock lock(mutex_);
  std::vector<int64_t> damaged;
  const auto find = [&]() -> Result<std::optional<BlockRow>> {
    auto rows = index_->FindBlocks(key, &damaged);
    if (!rows) return Fail(rows.error());
    for (auto& row : *rows) {
      const auto& places = row.record.places;
      const bool sound = std::ranges::none_of(places, [&](const auto& place) { return place && IsDamaged(*place); });
      if (sound && std::ranges::equal(row.record.tokens, tokens)) return std::move(row);
    }
    return std::nullopt;
  };
  auto row = find();
  if (!row) return Fail(row.error());
  if (!*row || !HoldBlock((*row)->record).ok()) return std::nullopt;
  // Held now; if its row is still there, it was never freed in between.
  const auto again = find();
  const auto same_places = [&] {
    for (size_t i = 0; i < (*row)->record.places.size(); ++i) {
      const auto& before = (*row)->record.places[i];
      const auto& now = (*again)->record.places[i];
      if (before.has_value() != now.has_value() || (before && !SamePlace(before, now))) return false;
    }
    return true;
  };
  if (!again || !*again || (*again)->id != (*row)->id || !same_places()) {
    Release((*row)->record);
    if (!again) return Fail(again.error());
    return std::nullopt;
  }
  const auto position = index_->BlockPosition((*row)->id);
  if (!position || !*position) {
    Release((*row)->record);
    if (!position) return Fail(position.error());
    return std::nullopt;
  }
  lock.unlock();
  if (FoundIsSound((*row)->record, **position)) return (*row)->record;
  Release((*row)->record);
  return std::nullopt;
}

bool StoreImpl::CellsAreSound(const BlockRecord& block, const BlockPlace& place, int64_t position) {
  if (options_.cell_check == nullptr) return true;
  const auto extent = ExtentOf(place);
  const auto shape = extent ? segments_->Clear(extent->shape) : std::nullopt;
  if (shape && !CheckBlock(options_.cell_check, *shape, block, place, position)) return true;
  damaged_.insert({place.segment, place.offset + place.index});
  return false;
}

bool StoreImpl::FoundIsSound(const BlockRecord& block, int64_t position) {
  if (options_.cell_check == nullptr) return true;
  for (const auto& place : block.places) {
    if (!place) continue;
    std::optional<CellSetShape> shape;
    {
      const std::lock_guard lock(mutex_);
      const auto extent = ExtentOf(*place);
      if (extent) shape = segments_->Clear(extent->shape);
    }
    if (shape && !CheckBlock(options_.cell_check, *shape, block, *place, position)) continue;
    ReportDamage(*place);
    return false;
  }
  return true;
}

Status StoreImpl::HoldBlock(const BlockRecord& block) {
  std::vector<BlockPlace> held;
  for (const auto& place : block.places) {
    if (!place) continue;
    const auto hold = segments_->Hold(*place);
    if (hold && *hold) {
      held.push_back(*place);
      continue;
    }
    for (const auto& one : held) segments_->Release(one);
    return hold ? Status(StatusCode::kBusy, "the block is being removed: try again") : hold.error();
  }
  return OkStatus();
}

Status StoreImpl::ReadCells(const CellSetShape& shape, const BlockPlace& place, size_t layer_slot, uint16_t head_begin,
                            uint16_t n, std::byte* dst) {
  const CellSetShape stored = segments_->Stored(shape);
  const auto offset = CellOffset(stored, place, layer_slot, head_begin);
  if (!offset || n > shape.layers[layer_slot].n_cells - head_begin) {
    return Status(StatusCode::kInvalidArgument, "a block's place doesn't fit its shape: the cells can't be read");
  }
  return segments_->ReadCells(place.segment, *offset, stored.layers[layer_slot].cell_bytes,
                              std::span(dst, size_t{n} * shape.layers[layer_slot].cell_bytes));
}

Status StoreImpl::ReadRun(const CellSetShape& shape, const BlockPlace& place, size_t layer_slot, uint32_t n_blocks,
                          std::byte* dst) {
  const CellSetShape stored = segments_->Stored(shape);
  const auto offset = CellOffset(stored, place, layer_slot, 0);
  if (!offset || n_blocks > place.n_blocks - place.index) {
    return Status(StatusCode::kInvalidArgument, "a block's place doesn't fit its shape: the cells can't be read");
  }
  const auto& layer = shape.layers[layer_slot];
  return segments_->ReadRun(place.segment, *offset, stored.layers[layer_slot].cell_bytes,
                            std::span(dst, size_t{n_blocks} * layer.n_cells * layer.cell_bytes));
}

void StoreImpl::Prefetch(const CellSetShape& shape, const BlockPlace& place, size_t layer_slot, uint32_t n_blocks) {
  const CellSetShape stored = segments_->Stored(shape);
  const auto offset = CellOffset(stored, place, layer_slot, 0);
  if (!offset || n_blocks > place.n_blocks - place.index) return;
  const auto& layer = stored.layers[layer_slot];
  segments_->Prefetch(place.segment, *offset, uint64_t{n_blocks} * layer.n_cells * layer.cell_bytes);
}

const std::byte* StoreImpl::MapExtent(const CellSetShape& shape, const BlockPlace& place) {
  const auto block_bytes = BlockBytes(shape);
  const auto cells = block_bytes ? CheckedMul(*block_bytes, place.n_blocks) : std::nullopt;
  const auto end = cells ? CheckedAdd(place.offset, *cells) : std::nullopt;
  if (!end || place.index >= place.n_blocks) return nullptr;
  const std::byte* const file = segments_->Map(place.segment, *end);
  return file == nullptr ? nullptr : file + place.offset;
}

std::pair<std::string, uint64_t> StoreImpl::Locate(const CellSetShape& shape, const BlockPlace& place,
                                                   size_t layer_slot, uint16_t head) const {
  return {segments_->PathOf(place.segment), CellOffset(segments_->Stored(shape), place, layer_slot, head).value_or(0)};
}

Result<uint64_t> StoreImpl::NextGeneration() {
  const std::lock_guard lock(mutex_);
  return NextGenerationLocked();
}

Result<uint64_t> StoreImpl::NextGenerationLocked() {
  if (options_.read_only) return Fail(ReadOnly(path_));
  if (next_generation_ == end_generation_) {
    const auto first = index_->ReserveGenerations(kGenerationsAtOnce);
    if (!first) return Fail(first.error());
    next_generation_ = *first;
    end_generation_ = *first + kGenerationsAtOnce;
  }
  return next_generation_++;
}

Result<std::unique_ptr<Store::SessionLock>> StoreImpl::LockSession(const std::string& name) {
  KVCELL_FAIL_IF_ERROR(CheckSessionName(name));
  if (options_.read_only) return Fail(ReadOnly(path_));
  return locks_->Lock(name);
}

Result<std::unique_ptr<Store::SessionLock>> StoreImpl::LockUnlessHeld(const std::string& name) {
  if (locks_->Holds(name)) return std::unique_ptr<SessionLock>();
  return locks_->Lock(name);
}

Status StoreImpl::CheckRecord(const SessionRecord& record) const {
  KVCELL_RETURN_IF_ERROR(CheckSessionName(record.name));
  if (options_.read_only) return ReadOnly(path_);
  if (record.blocks.size() > record.tokens.size() / kBlockTokens) {
    return Status(StatusCode::kInvalidArgument,
                  fmt::format("session '{}' has {} blocks but only {} tokens: it can't be saved", record.name,
                              record.blocks.size(), record.tokens.size()));
  }
  for (size_t i = 0; i < record.blocks.size(); ++i) {
    const auto part = std::span(record.tokens).subspan(i * kBlockTokens, kBlockTokens);
    if (!std::ranges::equal(record.blocks[i].tokens, part)) {
      return Status(
          StatusCode::kInvalidArgument,
          fmt::format("session '{}': the tokens of block {} are not the session's: it can't be saved", record.name, i));
    }
  }
  return OkStatus();
}

Status StoreImpl::Commit(SessionRecord* record, const CellSetShape shapes[2], std::vector<BlockPlace>* given_up) {
  KVCELL_RETURN_IF_ERROR(CheckRecord(*record));
  const auto session_lock = LockUnlessHeld(record->name);
  if (!session_lock) return session_lock.error();
  const std::lock_guard lock(mutex_);
  const auto revision = NextGenerationLocked();
  if (!revision) return revision.error();
  KVCELL_RETURN_IF_ERROR(MakeRoom(RowBytes(*record)));
  const Durability durability = record->durability.value_or(options_.durability);
  if (durability == Durability::kPower) KVCELL_RETURN_IF_ERROR(segments_->SyncAppended());
  KVCELL_RETURN_IF_ERROR(index_->SetDurability(durability));
  const int64_t now = UnixSeconds();
  Pending pending;
  const int64_t before = std::exchange(record->last_used, now);
  const Status status = CommitRows(record, shapes, *revision, &pending);
  if (!status.ok()) record->last_used = before;
  if (given_up != nullptr && status.ok()) *given_up = std::exchange(pending.given_up, {});
  return Settle(status, &pending, &record->blocks);
}

Status StoreImpl::CommitRows(SessionRecord* record, const CellSetShape shapes[2], uint64_t revision, Pending* pending) {
  Transaction transaction(index_->database());
  KVCELL_RETURN_IF_ERROR(transaction.Begin(Transaction::Kind::kWrite));
  const auto space = index_->prefixes().MakeSpace(WithNamespace(record->identity), record->model);
  if (!space) return space.error();
  for (size_t i = 0; i < record->blocks.size(); ++i) {
    const int64_t block_space = i < record->n_shared ? *space : kOwnSpace;
    KVCELL_RETURN_IF_ERROR(CommitBlock(record->blocks[i], shapes, block_space, /*held=*/false, pending));
  }
  if (!record->blocks.empty()) KVCELL_RETURN_IF_ERROR(WriteSinks(pending->rows.front().id, record->sinks));
  const auto id = index_->SessionId(record->name);
  if (!id) return id.error();
  SessionRow row;
  row.id = id->value_or(0);
  row.name = record->name;
  row.model = record->model;
  row.identity = record->identity;
  row.n_tokens = static_cast<int64_t>(record->tokens.size());
  row.n_blocks = static_cast<int64_t>(record->blocks.size());
  row.last_used = record->last_used;
  row.revision = revision;
  KVCELL_RETURN_IF_ERROR(index_->WriteSession(&row, *record));
  const auto links = index_->ReadLinks(row.id);
  if (!links) return links.error();
  KVCELL_RETURN_IF_ERROR(index_->WriteLinks(row.id, *links, pending->rows));
  for (const auto& link : *links) pending->old_blocks.push_back(link.block);
  return EndRows(&transaction, pending);
}

Status StoreImpl::EndRows(Transaction* transaction, Pending* pending) {
  auto emptied = index_->DeleteUnusedBlocks(pending->old_blocks);
  if (!emptied) return emptied.error();
  pending->emptied.insert(pending->emptied.end(), emptied->begin(), emptied->end());
  const auto commits = index_->CountCommit();
  if (!commits) return commits.error();
  pending->commits = *commits;
  const Status status = transaction->Commit();
  pending->in_doubt = !status.ok();
  return status;
}

Status StoreImpl::Settle(const Status& status, Pending* pending, std::vector<BlockRecord>* blocks) {
  if (!status.ok()) {
    if (pending->in_doubt && !SettleIndex()) segments_->MarkCommitted(pending->registered);
    for (const auto& place : pending->held) segments_->Release(place);
    return status;
  }
  head_.Write(pending->commits, std::exchange(lost_commits_, 0) != 0);
  segments_->MarkCommitted(pending->registered);
  for (size_t i = 0; i < pending->rows.size(); ++i) (*blocks)[i] = pending->rows[i].record;
  for (const auto& place : pending->given_up) segments_->Release(place);
  // Stored; space that this frees is found by the next one to open the store where it can't be given back now.
  for (const auto& key : pending->emptied) (void)CollectExtent(key, false);
  RemoveExpired();
  (void)MakeRoom(0);
  TrimLog();
  return OkStatus();
}

bool StoreImpl::SettleIndex() {
  in_doubt_ = !index_->ReserveGenerations(1);
  return !in_doubt_;
}

Status StoreImpl::CommitBlock(const BlockRecord& block, const CellSetShape shapes[2], int64_t space, bool held,
                              Pending* pending) {
  const size_t depth = pending->rows.size();
  auto rows = index_->FindBlocks(block.key, &pending->old_blocks);
  if (!rows) return rows.error();
  for (BlockRow& row : *rows) {
    const auto continues = Continues(row, block, depth == 0 ? 0 : pending->rows.back().id, space);
    if (!continues) return continues.error();
    if (!*continues) continue;
    KVCELL_RETURN_IF_ERROR(CompletePlaces(block, shapes, &row, pending));
    pending->rows.push_back(std::move(row));
    return LinkBlock(pending->rows.back().id, depth, space, held, pending);
  }
  for (size_t i = 0; i < block.places.size(); ++i) {
    if (block.places[i]) KVCELL_RETURN_IF_ERROR(RegisterPlace(*block.places[i], shapes[i], pending));
  }
  BlockRow row;
  row.record = block;
  KVCELL_RETURN_IF_ERROR(index_->WriteBlock(&row));
  pending->rows.push_back(std::move(row));
  return LinkBlock(pending->rows.back().id, depth, space, held, pending);
}

Status StoreImpl::CompletePlaces(const BlockRecord& block, const CellSetShape shapes[2], BlockRow* stored,
                                 Pending* pending) {
  const auto position = static_cast<int64_t>(pending->rows.size() * kBlockTokens);
  std::vector<BlockPlace> held;
  std::array<bool, 2> keeps{};  // theirs
  bool replaces = false;
  for (size_t i = 0; i < block.places.size(); ++i) {
    const auto& mine = block.places[i];
    const auto& theirs = stored->record.places[i];
    if (!theirs || SamePlace(mine, theirs)) {
      replaces |= mine && !theirs;
      continue;
    }
    const auto hold = mine && IsDamaged(*theirs) ? Result<bool>(false) : segments_->Hold(*theirs);
    if (hold && *hold) held.push_back(*theirs);
    keeps[i] = hold && *hold && (!mine || CellsAreSound(stored->record, *theirs, position));
    replaces |= !keeps[i];
  }
  if (!replaces) {
    for (size_t i = 0; i < block.places.size(); ++i) {
      const auto& mine = block.places[i];
      if (mine && keeps[i]) pending->given_up.push_back(*mine);
      if (mine && !keeps[i]) KVCELL_RETURN_IF_ERROR(RegisterPlace(*mine, shapes[i], pending));
    }
    pending->held.insert(pending->held.end(), held.begin(), held.end());
    return OkStatus();
  }
  // All cells of a block are of one generation: where one place is replaced the others are too.
  for (const auto& place : held) segments_->Release(place);
  for (size_t i = 0; i < block.places.size(); ++i) {
    const auto& mine = block.places[i];
    auto& theirs = stored->record.places[i];
    if (mine) KVCELL_RETURN_IF_ERROR(RegisterPlace(*mine, shapes[i], pending));
    if (SamePlace(mine, theirs)) continue;
    if (theirs) pending->emptied.push_back(KeyOf(*theirs));
    theirs = mine;
  }
  stored->record.generation = block.generation;
  return index_->WriteBlock(stored);
}

Status StoreImpl::RegisterPlace(const BlockPlace& place, const CellSetShape& clear_shape, Pending* pending) {
  const CellSetShape shape = segments_->Stored(clear_shape);
  const auto refuse = [&](std::string_view what) {
    return Status(StatusCode::kInvalidArgument,
                  fmt::format("cells at byte {} of {} {}: the session can't be saved with them", place.offset,
                              segments_->PathOf(place.segment), what));
  };
  const ExtentKey key = KeyOf(place);
  if (!segments_->IsHeld(place)) return refuse("are not held");
  if (auto appended = segments_->FindAppended(key)) {
    if (!SameShape(appended->shape, shape) || appended->n_blocks != place.n_blocks) return refuse("have another shape");
    if (std::ranges::find(pending->registered, key) != pending->registered.end()) return OkStatus();
    KVCELL_RETURN_IF_ERROR(
        index_->WriteExtent({key, place.n_blocks, std::move(appended->shape), std::vector<bool>(place.n_blocks)}));
    pending->registered.push_back(key);
    return OkStatus();
  }
  const auto extent = ExtentOf(place);
  if (!extent) return extent.error();
  return SameShape(extent->shape, shape) ? OkStatus() : refuse("have another shape");
}

Result<ExtentRow> StoreImpl::ExtentOf(const BlockPlace& place) {
  const auto damaged = [&](std::string_view what) {
    return Fail(StatusCode::kCorruption, fmt::format("index {}: the extent at byte {} of {} {}", index_->path(),
                                                     place.offset, segments_->PathOf(place.segment), what));
  };
  auto extent = index_->FindExtent(KeyOf(place));
  if (!extent) return Fail(extent.error());
  if (!*extent) return damaged("is missing");
  if ((*extent)->n_blocks != place.n_blocks || place.index >= place.n_blocks)
    return damaged("has another size than its block says");
  if ((*extent)->freed[place.index]) return damaged("has lost this block's cells");
  return std::move(**extent);
}

Result<SessionRecord> StoreImpl::Load(const std::string& name) {
  KVCELL_FAIL_IF_ERROR(CheckSessionName(name));
  const std::lock_guard lock(mutex_);
  for (int attempt = 0; attempt < kLoadAttempts; ++attempt) {
    const auto moves = index_->Moves();
    if (!moves) return Fail(moves.error());
    const auto row = index_->FindSession(name);
    if (!row) return Fail(row.error());
    if (!*row && lost_commits_ != 0) {
      return Fail(StatusCode::kCorruption,
                  fmt::format("session '{}' is not there: {}; `kvcell store compact` goes on with what there is", name,
                              LostCommits()));
    }
    if (!*row) return Fail(NoSession(path_, name));
    auto record = LoadHeld(**row);
    // What was read belongs together only if nobody saved, cut, moved or removed the session meanwhile; held since, its
    // cells stay.
    const auto again = index_->FindSession(name);
    const auto moves_now = index_->Moves();
    if (again && *again && (*again)->id == (*row)->id && (*again)->revision == (*row)->revision &&
        (*again)->n_blocks == (*row)->n_blocks && moves_now && *moves_now == *moves) {
      if (record) NoteUse(**again);
      return record;
    }
    if (record) {
      for (const auto& block : record->blocks) Release(block);
    }
    if (!again) return Fail(again.error());
  }
  return Fail(StatusCode::kBusy, fmt::format("session '{}' is being saved all the time: try again", name));
}

// So that it isn't the first to be evicted. Whoever writes at this moment is not waited for.
void StoreImpl::NoteUse(const SessionRow& row) {
  const int64_t now = UnixSeconds();
  const bool exact = options_.disk_cap != 0 || options_.ttl_seconds != 0;
  if (options_.read_only || now - row.last_used < (exact ? 1 : kUseGranularitySeconds)) return;
  sqlite3* const handle = index_->database().handle();
  sqlite3_busy_timeout(handle, 0);
  const auto touch = [&]() -> Status {
    KVCELL_RETURN_IF_ERROR(index_->SetDurability(std::min(options_.durability, Durability::kProcess)));
    Transaction transaction(index_->database());
    KVCELL_RETURN_IF_ERROR(transaction.Begin(Transaction::Kind::kWrite));
    const auto found = index_->FindSession(row.id);
    if (!found) return found.error();
    if (!*found || (*found)->revision != row.revision) return OkStatus();
    KVCELL_RETURN_IF_ERROR(index_->TouchSession(**found, now));
    return transaction.Commit();
  };
  (void)touch();
  sqlite3_busy_timeout(handle, kBusyMilliseconds);
}

Result<SessionRecord> StoreImpl::LoadHeld(const SessionRow& row) {
  SessionRecord record;
  record.notice = LostCommits();
  record.name = row.name;
  record.model = row.model;
  record.identity = row.identity;
  record.last_used = row.last_used;
  Transaction transaction(index_->database());
  KVCELL_FAIL_IF_ERROR(transaction.Begin(Transaction::Kind::kRead));
  SessionDamage damage;
  KVCELL_FAIL_IF_ERROR(index_->ReadSessionData(row, &record, &damage));
  auto blocks = index_->ReadSessionBlocks(row, record.tokens);
  if (!blocks) return Fail(blocks.error());
  const auto hold = [&](const BlockRecord& block) -> Status {
    for (const auto& place : block.places) {
      if (!place) continue;
      if (IsDamaged(*place)) {
        return Status(StatusCode::kCorruption, fmt::format("{} at byte {}: its cells were found damaged",
                                                           segments_->PathOf(place->segment), place->offset));
      }
      const auto extent = ExtentOf(*place);
      if (!extent) return extent.error();
      const auto bytes = segments_->FileBytes(place->segment);
      if (!bytes) return bytes.error();
      if (*bytes < extent->range().end) {
        return Status(StatusCode::kCorruption,
                      fmt::format("{} has {} bytes, {} are needed", segments_->PathOf(place->segment), *bytes,
                                  extent->range().end));
      }
    }
    return HoldBlock(block);
  };
  for (size_t i = 0; i < blocks->size(); ++i) {
    const auto& block = (*blocks)[i];
    if (!block) {
      record.damage = index_->BlockDamage(row, i);
      break;
    }
    if (const Status status = hold(block->record); !status.ok()) {
      record.damage = fmt::format("block {} of session '{}': {}", i, row.name, status.message());
      break;
    }
    const auto node = index_->prefixes().Find(block->id);
    if (node && *node && (*node)->space == kOwnSpace) record.n_shared = std::min(record.n_shared, i);
    record.blocks.push_back(block->record);
  }
  if (damage.any()) KVCELL_FAIL_IF_ERROR(MendData(row, damage, *blocks, &record));
  const size_t whole = record.tokens.size() / kBlockTokens;
  if (record.damage.empty() && blocks->size() < whole) {
    record.damage =
        fmt::format("the cells of its last {} blocks were given up to keep the disk cap", whole - blocks->size());
  }
  return record;
}

Status StoreImpl::MendData(const SessionRow& row, const SessionDamage& damage,
                           std::span<const std::optional<BlockRow>> blocks, SessionRecord* record) {
  const auto note = [&](std::string* to, std::string what) {
    *to += fmt::format("{}{} of session '{}' {}", to->empty() ? "" : "; ", "stored data", row.name, what);
  };
  if (damage.tokens) {
    // Each block has its own: the session goes as far as they are sound.
    for (const BlockRecord& block : record->blocks)
      record->tokens.insert(record->tokens.end(), block.tokens.begin(), block.tokens.end());
    const int64_t lost = row.n_tokens - static_cast<int64_t>(record->tokens.size());
    if (record->tokens.empty()) {
      return Status(
          StatusCode::kCorruption,
          fmt::format("index {}: the tokens of session '{}' are damaged, and no sound block has them: `kvcell "
                      "sessions rm` removes it",
                      index_->path(), row.name));
    }
    note(&record->notice, "is damaged: its tokens are taken from its blocks");
    if (lost > 0) {
      note(&record->damage, fmt::format("is damaged: the last {} of its {} tokens are lost", lost, row.n_tokens));
      // What was kept of the state after the last token belongs to a text that is gone.
      record->logits.clear();
      record->extras.clear();
      record->exact.clear();
    }
  }
  if (damage.logits) note(&record->notice, "is damaged: the last token's logits are computed again");
  if (damage.extras) note(&record->notice, "is damaged: its settings are the defaults");
  if (damage.exact) note(&record->damage, "is damaged: the exact cells of its last tokens are computed again");
  if (record->exact.empty() && !blocks.empty() && blocks.front()) {
    auto sinks = index_->prefixes().ReadBytes(blocks.front()->id, PrefixBytes::kSinks);
    if (sinks && *sinks) record->sinks = *std::move(*sinks);
  }
  return OkStatus();
}

Result<std::vector<SessionSummary>> StoreImpl::List() {
  const std::lock_guard lock(mutex_);
  Transaction transaction(index_->database());
  KVCELL_FAIL_IF_ERROR(transaction.Begin(Transaction::Kind::kRead));
  std::vector<std::string> damaged;  // Load and Verify say what is wrong with them
  const auto rows = index_->ListSessions(Spaces::kOwn, &damaged);
  if (!rows) return Fail(rows.error());
  std::vector<SessionSummary> list;
  for (const auto& row : *rows) {
    const auto cells = index_->SessionCellBytes(row.id);
    if (!cells) return Fail(cells.error());
    list.push_back({row.name, row.model, row.n_tokens, *cells + row.data_bytes, row.last_used});
  }
  return list;
}

Status StoreImpl::Remove(const std::string& name, bool erase) {
  KVCELL_RETURN_IF_ERROR(CheckSessionName(name));
  if (options_.read_only) return ReadOnly(path_);
  const auto session_lock = LockUnlessHeld(name);
  if (!session_lock) return session_lock.error();
  const std::lock_guard lock(mutex_);
  std::vector<ExtentKey> emptied;
  Status status = RemoveRows(name, erase ? Removal::kErase : Removal::kPlain, &emptied);
  if (status.code() == StatusCode::kNoSpace) {
    // A full disk has no room to write even that less is used: the cells, which nobody is to read again, make some.
    (void)RemoveRows(name, Removal::kCellsAlone, &emptied);
    TruncateLog();
    status = RemoveRows(name, erase ? Removal::kErase : Removal::kPlain, &emptied);
  }
  if (status.code() == StatusCode::kNoSpace && !erase) {
    // Zeroing the session's rows takes as much of the log as they are long; leaving their pages as they are takes
    // little.
    (void)index_->database().Run("PRAGMA secure_delete=OFF");
    status = RemoveRows(name, Removal::kPlain, &emptied);
    (void)index_->database().Run("PRAGMA secure_delete=ON");
  }
  if (!status.ok()) return status;
  for (const auto& key : emptied) {
    const auto freed = CollectExtent(key, erase);
    if (erase && !freed) return freed.error();
  }
  return erase ? EraseIndexLog() : OkStatus();
}

Status StoreImpl::RemoveRows(const std::string& name, Removal removal, std::vector<ExtentKey>* emptied) {
  KVCELL_RETURN_IF_ERROR(index_->SetDurability(options_.durability));
  Transaction transaction(index_->database());
  KVCELL_RETURN_IF_ERROR(transaction.Begin(Transaction::Kind::kWrite));
  const auto id = index_->SessionId(name);
  if (!id) return id.error();
  if (!*id) return NoSession(path_, name);
  const auto links = index_->ReadLinks(**id);
  if (!links) return links.error();
  KVCELL_RETURN_IF_ERROR(index_->DeleteSession(**id));
  if (removal == Removal::kErase) KVCELL_RETURN_IF_ERROR(UnholdPrefixes(*links));
  std::vector<int64_t> blocks;
  for (const auto& link : *links) blocks.push_back(link.block);
  auto extents = index_->DeleteUnusedBlocks(blocks);
  if (!extents) return extents.error();
  *emptied = std::move(*extents);
  for (const auto& key : *emptied) {
    if (removal == Removal::kPlain) break;
    const auto extent = index_->FindExtent(key);
    if (!extent || !*extent) continue;
    const auto used = index_->UsedBlocks(**extent);
    if (!used) return used.error();
    const auto unused = UnusedBlocks(**extent, *used);
    if (removal == Removal::kCellsAlone) {
      (void)segments_->Free(key, (*extent)->shape, (*extent)->n_blocks, unused, false, false);
      continue;
    }
    const auto free = segments_->CanFree(key, unused);
    if (!free) return free.error();
    if (!*free) {
      return Status(StatusCode::kBusy,
                    fmt::format("cells of session '{}' are in use by a running process: end it, then erase", name));
    }
  }
  if (removal == Removal::kCellsAlone) return OkStatus();
  const auto commits = index_->CountCommit();
  if (!commits) return commits.error();
  KVCELL_RETURN_IF_ERROR(transaction.Commit());
  head_.Write(*commits, std::exchange(lost_commits_, 0) != 0);
  return OkStatus();
}

// Deleted rows are zeroed as they go (secure_delete), but pages that were rebalanced may keep copies: the whole file is
// written anew, and the log, which has older pages, cut to nothing.
Status StoreImpl::EraseIndexLog() {
  Database& database = index_->database();
  KVCELL_RETURN_IF_ERROR(database.Run("VACUUM"));
  const int code = sqlite3_wal_checkpoint_v2(database.handle(), nullptr, SQLITE_CHECKPOINT_TRUNCATE, nullptr, nullptr);
  return code == SQLITE_OK ? OkStatus() : database.Failed(code);
}

Result<StoreStats> StoreImpl::Stats() {
  const std::lock_guard lock(mutex_);
  StoreStats stats;
  Transaction transaction(index_->database());
  KVCELL_FAIL_IF_ERROR(transaction.Begin(Transaction::Kind::kRead));
  const auto sessions = index_->CountRows("SELECT count(*) FROM sessions");
  const auto blocks = index_->CountRows("SELECT count(*) FROM blocks");
  const auto keys = index_->ListExtentKeys();
  if (!sessions || !blocks || !keys)
    return Fail(!sessions ? sessions.error() : !blocks ? blocks.error() : keys.error());
  stats.sessions = *sessions;
  stats.blocks = *blocks;
  for (const auto& key : *keys) {
    const auto extent = index_->FindExtent(key);
    if (!extent || !*extent) continue;  // damaged ones are for Verify to name
    const auto used = index_->UsedBlocks(**extent);
    if (!used) return Fail(used.error());
    const auto n_used = std::ranges::count(*used, true);
    for (const auto& layer : (*extent)->shape.layers) stats.cells += n_used * layer.n_cells;
    stats.live_bytes += n_used * static_cast<int64_t>((*extent)->block_bytes());
  }
  stats.segment_bytes = static_cast<int64_t>(SegmentFileBytes());
  stats.index_bytes = static_cast<int64_t>(IndexFileBytes());
  stats.evicted_sessions = evicted_sessions_;
  stats.evicted_blocks = evicted_of_sessions_ + evicted_of_prefixes_;
  stats.encrypted = index_->cipher() != nullptr;
  return stats;
}

}  // namespace kvcell
