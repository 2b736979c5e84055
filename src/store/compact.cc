// Segments with holes written anew while others read, and whole stores removed.
#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <map>

#include "store/store_impl.h"

namespace kvcell {
namespace {

// Blocks per extent that is written: runs of a layer are long enough to stream.
constexpr size_t kMovedAtOnce = 256;
// A segment is worth writing anew when this share of it is unused.
constexpr uint64_t kLeastWaste = 16;

}  // namespace

Result<CompactReport> StoreImpl::Compact() {
  if (options_.read_only) {
    return Fail(StatusCode::kPermission,
                fmt::format("store {} is open for inspection only: open it for writing", path_));
  }
  CompactReport report;
  const auto segments = segments_->List();
  if (!segments) return Fail(segments.error());
  report.segments_before = static_cast<int64_t>(segments->size());
  report.bytes_before = static_cast<int64_t>(SegmentFileBytes() + IndexFileBytes());
  {
    const std::lock_guard lock(mutex_);
    KVCELL_FAIL_IF_ERROR(Reclaim());  // what was held when its session went, and isn't any more
  }
  segments_->StartSegment();
  for (const uint64_t segment : *segments) {
    // Owned until its blocks have moved, so that nobody appends to what is about to go.
    const auto owned = segments_->TryOwn(segment);
    if (!owned) return Fail(owned.error());
    if (!*owned) {
      ++report.segments_in_use;
      continue;
    }
    const auto moved = CompactSegment(segment);
    if (!moved) return Fail(moved.error());
    report.blocks_moved += *moved;
    const std::lock_guard lock(mutex_);
    (void)ReclaimSegment(**owned, segment);  // damage in its rows is for Verify to name
  }
  const std::lock_guard lock(mutex_);
  (void)index_->database().Run("VACUUM");
  TrimIndex();
  if (lost_commits_ != 0) {
    const auto commits = index_->Commits();
    if (commits) head_.Write(*commits, true);
    lost_commits_ = 0;
  }
  const auto after = segments_->List();
  report.segments_after = after ? static_cast<int64_t>(after->size()) : 0;
  report.bytes_after = static_cast<int64_t>(SegmentFileBytes() + IndexFileBytes());
  return report;
}

Result<int64_t> StoreImpl::CompactSegment(uint64_t segment) {
  std::vector<BlockRow> rows;
  std::array<std::map<ExtentKey, CellSetShape>, 2> shapes;  // as stored, of the extents that have live blocks
  {
    const std::lock_guard lock(mutex_);
    const auto extents = index_->ListExtents(segment);
    if (!extents) return extents.error().code() == StatusCode::kCorruption ? Result<int64_t>(0) : Fail(extents.error());
    uint64_t live = kPageBytes;
    std::map<ExtentKey, CellSetShape> all;
    for (const auto& extent : *extents) {
      const auto used = index_->UsedBlocks(extent);
      if (!used) return Fail(used.error());
      const auto n_used = static_cast<uint64_t>(std::ranges::count(*used, true));
      const uint64_t header_bytes = extent.key.offset - extent.range().begin;
      if (n_used != 0) live += RoundUp(header_bytes + n_used * extent.block_bytes(), kPageBytes);
      all.emplace(extent.key, extent.shape);
    }
    const auto bytes = segments_->FileBytes(segment);
    if (!bytes || *bytes - std::min(*bytes, live) <= *bytes / kLeastWaste) return 0;
    auto found = index_->BlocksInSegment(segment);
    if (!found) return Fail(found.error());
    rows = std::move(*found);
    for (const auto& row : rows) {
      for (size_t kind = 0; kind < 2; ++kind) {
        const auto& place = row.record.places[kind];
        if (!place || place->segment != segment) continue;
        const auto shape = all.find(KeyOf(*place));
        if (shape != all.end()) shapes[kind].insert(*shape);
      }
    }
  }
  int64_t total = 0;
  for (size_t kind = 0; kind < 2; ++kind) {
    std::vector<BlockRow> batch;
    const CellSetShape* shape = nullptr;
    const auto flush = [&]() -> Status {
      if (batch.empty()) return OkStatus();
      std::vector<Move> moves;
      KVCELL_RETURN_IF_ERROR(MoveBlocks(kind, batch, *shape, &moves));
      batch.clear();
      const auto moved = CommitMoves(moves);
      if (!moved) return moved.error();
      total += *moved;
      return OkStatus();
    };
    for (const auto& row : rows) {
      const auto& place = row.record.places[kind];
      if (!place || place->segment != segment) continue;
      const auto found = shapes[kind].find(KeyOf(*place));
      if (found == shapes[kind].end()) continue;
      if (shape == nullptr || !SameShape(*shape, found->second) || batch.size() == kMovedAtOnce) {
        KVCELL_FAIL_IF_ERROR(flush());
        shape = &found->second;
      }
      batch.push_back(row);
    }
    KVCELL_FAIL_IF_ERROR(flush());
  }
  return total;
}

// Copies the blocks' cells into one new extent. One that can't be read (or, encrypted, doesn't open) stays where it is,
// for Verify to name.
Status StoreImpl::MoveBlocks(size_t kind, std::span<const BlockRow> rows, const CellSetShape& stored,
                             std::vector<Move>* moved) {
  const auto clear = segments_->Clear(stored);
  if (!clear) return OkStatus();
  std::vector<BlockRow> left(rows.begin(), rows.end());
  while (!left.empty()) {
    const auto generation = NextGeneration();
    if (!generation) return generation.error();
    std::vector<std::byte> run;
    std::optional<size_t> unreadable;
    const auto places =
        segments_->Append(stored, static_cast<uint32_t>(left.size()), *generation,
                          [&](size_t slot, uint32_t block, uint16_t head) -> const std::byte* {
                            const auto& layer = clear->layers[slot];
                            if (head == 0) {
                              run.resize(size_t{layer.n_cells} * layer.cell_bytes);
                              if (!ReadRun(*clear, *left[block].record.places[kind], slot, 1, run.data()).ok()) {
                                unreadable = block;
                                return nullptr;
                              }
                            }
                            return run.data() + size_t{head} * layer.cell_bytes;
                          });
    if (!places && !unreadable) return places.error();
    if (unreadable) {
      left.erase(left.begin() + static_cast<ptrdiff_t>(*unreadable));
      continue;
    }
    for (size_t i = 0; i < left.size(); ++i) moved->push_back({left[i], kind, (*places)[i]});
    return OkStatus();
  }
  return OkStatus();
}

// One transaction: the rows name the new places. Synced first, whatever the store's durability: what is moved may have
// been stored to survive power loss.
Result<int64_t> StoreImpl::CommitMoves(std::span<const Move> moves) {
  if (moves.empty()) return 0;
  const std::lock_guard lock(mutex_);
  std::vector<ExtentKey> registered, emptied;
  bool in_doubt = false;
  uint64_t commits = 0;
  int64_t moved = 0;
  const auto commit = [&]() -> Status {
    KVCELL_RETURN_IF_ERROR(segments_->SyncAppended());
    KVCELL_RETURN_IF_ERROR(index_->SetDurability(Durability::kPower));
    Transaction transaction(index_->database());
    KVCELL_RETURN_IF_ERROR(transaction.Begin(Transaction::Kind::kWrite));
    std::vector<bool> unused(moves.size());
    for (size_t i = 0; i < moves.size(); ++i) {
      const Move& move = moves[i];
      auto row = index_->FindBlock(move.row.id);
      if (!row) return row.error();
      const auto& before = *move.row.record.places[move.kind];
      const bool same = *row && (*row)->record.places[move.kind] &&
                        KeyOf(*(*row)->record.places[move.kind]) == KeyOf(before) &&
                        (*row)->record.places[move.kind]->index == before.index;
      unused[i] = !same;
      if (!same) continue;  // removed or replaced meanwhile
      (*row)->record.places[move.kind] = move.to;
      KVCELL_RETURN_IF_ERROR(index_->WriteBlock(&**row));
      if (std::ranges::find(emptied, KeyOf(before)) == emptied.end()) emptied.push_back(KeyOf(before));
      ++moved;
    }
    const ExtentKey key = KeyOf(moves.front().to);
    auto appended = segments_->FindAppended(key);
    if (!appended) return Status(StatusCode::kInternal, "cells that were moved are gone: please report this");
    KVCELL_RETURN_IF_ERROR(
        index_->WriteExtent({key, appended->n_blocks, std::move(appended->shape), std::vector<bool>(moves.size())}));
    registered.push_back(key);
    if (std::ranges::find(unused, true) != unused.end()) emptied.push_back(key);
    KVCELL_RETURN_IF_ERROR(index_->CountMove());
    const auto counted = index_->CountCommit();
    if (!counted) return counted.error();
    commits = *counted;
    const Status status = transaction.Commit();
    in_doubt = !status.ok();
    return status;
  };
  const Status status = commit();
  if (status.ok() || (in_doubt && !SettleIndex())) segments_->MarkCommitted(registered);
  for (const Move& move : moves) segments_->Release(move.to);
  if (!status.ok()) return Fail(status);
  head_.Write(commits, std::exchange(lost_commits_, 0) != 0);
  for (const auto& key : emptied) (void)CollectExtent(key, false);
  return moved;
}

// Only files that a store makes are touched, by name, below the open directory.
Status Store::Destroy(const std::string& path, bool erase) {
  SystemCalls& calls = SystemCalls::Real();
  const auto directory = File::Open(calls, AT_FDCWD, path, O_RDONLY | O_DIRECTORY, 0, path);
  if (!directory) return directory.error();
  KVCELL_RETURN_IF_ERROR(Index::CheckIsStore(calls, *directory));
  const auto lock = File::Open(calls, directory->fd(), "open.lock", O_RDWR | O_CREAT, 0600, path + "/open.lock");
  if (!lock) return lock.error();
  const auto alone = lock->TryLock(0, kUseLockByte + 1, LockKind::kExclusive);
  if (!alone) return alone.error();
  if (!*alone) {
    return Status(StatusCode::kBusy, fmt::format("store {} is in use by a running process: end it first", path));
  }
  const auto remove = [&](const File& folder, const std::string& name) -> Status {
    if (erase) {
      const auto file = File::Open(calls, folder.fd(), name, O_RDWR, 0, folder.path() + "/" + name);
      if (!file) return file.error();
      const auto info = file->Stat();
      if (!info) return info.error();
      KVCELL_RETURN_IF_ERROR(file->WriteZeros(0, static_cast<uint64_t>(info->st_size)));
      KVCELL_RETURN_IF_ERROR(file->SyncData());
    }
    const int result = calls.UnlinkAt(folder.fd(), name.c_str());
    return result < 0 ? ErrnoStatus(-result, "remove", folder.path() + "/" + name) : OkStatus();
  };
  // The index last but for the lock: until it is gone this is a store that can be destroyed again.
  for (const char* name : {"segments", "locks"}) {
    const auto folder = File::Open(calls, directory->fd(), name, O_RDONLY | O_DIRECTORY, 0, path + "/" + name);
    if (!folder && folder.error().code() == StatusCode::kNotFound) continue;
    if (!folder) return folder.error();
    const auto names = ListDirectory(*folder);
    if (!names) return names.error();
    for (const auto& file : *names) {
      const bool ours = std::string_view(name) == "locks" || ParseSegmentName(file);
      if (ours) KVCELL_RETURN_IF_ERROR(remove(*folder, file));
    }
    if (::unlinkat(directory->fd(), name, AT_REMOVEDIR) != 0) return ErrnoStatus(errno, "remove", path + "/" + name);
  }
  for (const char* name : {"store.db-shm", "store.db-wal", kHeadName, "store.db", "open.lock"}) {
    const Status status = remove(*directory, name);
    if (!status.ok() && status.code() != StatusCode::kNotFound) return status;
  }
  if (::rmdir(path.c_str()) != 0) return ErrnoStatus(errno, "remove", path);
  return OkStatus();
}

}  // namespace kvcell
