// Room within the disk cap: which sessions give up blocks for others, and what has outlived its time.
#include <fcntl.h>
#include <fmt/format.h>

#include <algorithm>
#include <limits>

#include "base/clock.h"
#include "store/store_impl.h"

namespace kvcell {
namespace {

constexpr uint64_t kStatBlock = 512;  // what st_blocks counts in: space really taken, holes left out
constexpr int64_t kExpiryPeriodSeconds = 60;
// SQLite writes its log back after about as much of its own accord, but leaves the file as long as it ever was.
constexpr int64_t kMostLogBytes = int64_t{4} << 20;

}  // namespace

uint64_t StoreImpl::SegmentFileBytes() const {
  const auto segments = segments_->List();
  uint64_t bytes = 0;
  for (const uint64_t segment : segments.value_or(std::vector<uint64_t>{})) {
    struct stat info = {};
    if (calls_.StatAt(AT_FDCWD, segments_->PathOf(segment).c_str(), &info) == 0)
      bytes += static_cast<uint64_t>(info.st_blocks) * kStatBlock;
  }
  return bytes;
}

uint64_t StoreImpl::IndexFileBytes() const {
  uint64_t bytes = 0;
  for (const char* name : {"store.db", "store.db-wal", "store.db-shm", kHeadName, "open.lock"}) {
    struct stat info = {};
    if (calls_.StatAt(directory_.fd(), name, &info) < 0) continue;
    // Some file systems count blocks only once they are written out.
    bytes += std::max(static_cast<uint64_t>(info.st_size), static_cast<uint64_t>(info.st_blocks) * kStatBlock);
  }
  return bytes;
}

Status StoreImpl::MakeRoom(uint64_t bytes) {
  const uint64_t cap = options_.disk_cap;
  if (cap == 0) return OkStatus();
  const auto over = [&]() -> uint64_t {
    const uint64_t used = SegmentFileBytes() + IndexFileBytes();
    return used + bytes > cap ? used + bytes - cap : 0;
  };
  if (over() == 0) return OkStatus();
  TrimIndex();
  // Freeing a session's blocks gives back whole pages only, so it may take another round.
  for (uint64_t left = over(); left != 0;) {
    const Status status = EvictBytes(left);
    TrimIndex();
    left = over();
    if (status.ok() || left == 0) continue;
    return Status(StatusCode::kNoSpace,
                  fmt::format("store {} is at its cap of {} bytes and all that it holds is in use: raise --disk-cap or "
                              "remove sessions",
                              path_, cap));
  }
  return OkStatus();
}

// Prefixes that were published go first: whoever misses one computes it again and nothing more is lost. Then sessions,
// those that were not used for the longest, each from its end: a prefix stays of use, blocks behind a gap are none.
// kNoSpace where nothing could be taken any more.
Status StoreImpl::EvictBytes(uint64_t bytes) {
  std::vector<std::string> damaged;
  auto rows = index_->ListSessions(Spaces::kAll, &damaged);
  if (!rows) return rows.error();
  std::ranges::sort(*rows, [](const SessionRow& a, const SessionRow& b) {
    return a.last_used != b.last_used ? a.last_used < b.last_used : a.revision < b.revision;
  });
  const auto of_prefixes = TakePrefixes(bytes, std::numeric_limits<int64_t>::max());
  if (!of_prefixes) return of_prefixes.error();
  uint64_t freed = *of_prefixes;
  bool any = freed > 0;
  for (const auto& row : *rows) {
    if (freed >= bytes) break;
    // Its lock says that a process has it open, be it this one.
    const auto lock = locks_->LockRow(index_->RowName(row.space, row.name), row.name);
    if (!lock) continue;
    const auto cut = EvictTail(row, bytes - freed, &freed);
    if (!cut) return cut.error();
    any |= *cut;
  }
  return any ? OkStatus() : Status(StatusCode::kNoSpace, "nothing in the store can be evicted");
}

Result<bool> StoreImpl::EvictTail(const SessionRow& listed, uint64_t bytes, uint64_t* freed) {
  KVCELL_FAIL_IF_ERROR(index_->SetDurability(options_.durability));
  Transaction transaction(index_->database());
  KVCELL_FAIL_IF_ERROR(transaction.Begin(Transaction::Kind::kWrite));
  const auto row = index_->FindSession(listed.id);
  if (!row) return Fail(row.error());
  if (!*row || (*row)->revision != listed.revision) return false;
  const auto links = index_->ReadLinks(listed.id);
  if (!links) return Fail(links.error());
  size_t keep = links->size();
  uint64_t gained = 0;
  while (keep > 0 && gained < bytes) {
    const auto block = index_->FindBlock((*links)[keep - 1].block);
    if (!block) return Fail(block.error());
    const auto shared = index_->CountUsers((*links)[keep - 1].block);
    if (!shared) return Fail(shared.error());
    if (*block && *shared <= 1) {
      for (const auto& place : (*block)->record.places) {
        if (!place) continue;
        const auto free = segments_->CanFree(KeyOf(*place), {place->index});
        if (!free || !*free) return false;  // someone attends to it
        const auto extent = index_->FindExtent(KeyOf(*place));
        if (extent && *extent) gained += (*extent)->block_bytes();
      }
    }
    --keep;
  }
  std::vector<int64_t> blocks;
  if (keep == 0) {
    for (const auto& link : *links) blocks.push_back(link.block);
    KVCELL_FAIL_IF_ERROR(index_->DeleteSession(listed.id));
    gained += static_cast<uint64_t>((*row)->data_bytes);
  } else {
    auto cut = index_->CutSession(**row, static_cast<int64_t>(keep));
    if (!cut) return Fail(cut.error());
    blocks = std::move(*cut);
  }
  const auto emptied = index_->DeleteUnusedBlocks(blocks);
  if (!emptied) return Fail(emptied.error());
  const auto commits = index_->CountCommit();
  if (!commits) return Fail(commits.error());
  KVCELL_FAIL_IF_ERROR(transaction.Commit());
  head_.Write(*commits, false);
  for (const auto& key : *emptied) (void)CollectExtent(key, false);
  evicted_of_sessions_ += static_cast<int64_t>(links->size() - keep);
  if (keep == 0) ++evicted_sessions_;
  *freed += gained;
  return true;
}

void StoreImpl::RemoveExpired() {
  const int64_t now = UnixSeconds();
  if (options_.ttl_seconds == 0 || now < next_expiry_) return;
  next_expiry_ = now + std::min(options_.ttl_seconds, kExpiryPeriodSeconds);
  (void)TakePrefixes(kMaxOffset, now - options_.ttl_seconds);
  std::vector<std::string> damaged;
  const auto rows = index_->ListSessions(Spaces::kAll, &damaged);
  if (!rows) return;  // told by whoever asks for a session
  for (const auto& row : *rows) {
    if (row.last_used > now - options_.ttl_seconds) continue;
    const auto lock = locks_->LockRow(index_->RowName(row.space, row.name), row.name);
    if (!lock) continue;
    uint64_t freed = 0;
    (void)EvictTail(row, kMaxOffset, &freed);
  }
}

// The index's own slack: the log, and pages of rows that are gone. Others that read at the moment are not waited for.
void StoreImpl::TrimIndex() {
  Database& database = index_->database();
  sqlite3_busy_timeout(database.handle(), 0);
  const auto free_pages = index_->CountRows("PRAGMA freelist_count");
  const auto pages = index_->CountRows("PRAGMA page_count");
  if (free_pages && pages && *free_pages * 4 > *pages) (void)database.Run("VACUUM");
  (void)sqlite3_wal_checkpoint_v2(database.handle(), nullptr, SQLITE_CHECKPOINT_TRUNCATE, nullptr, nullptr);
  sqlite3_busy_timeout(database.handle(), kBusyMilliseconds);
}

void StoreImpl::TruncateLog() {
  sqlite3* const handle = index_->database().handle();
  sqlite3_busy_timeout(handle, 0);
  (void)sqlite3_wal_checkpoint_v2(handle, nullptr, SQLITE_CHECKPOINT_TRUNCATE, nullptr, nullptr);
  sqlite3_busy_timeout(handle, kBusyMilliseconds);
}

void StoreImpl::TrimLog() {
  struct stat info = {};
  if (calls_.StatAt(directory_.fd(), "store.db-wal", &info) == 0 && info.st_size > kMostLogBytes) TruncateLog();
}

}  // namespace kvcell
