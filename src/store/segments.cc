#include "store/segments.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/random.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

#include "base/clock.h"

namespace kvcell {
namespace {

constexpr size_t kStagingBytes = size_t{1} << 20;
constexpr int kCreateAttempts = 100;
constexpr int64_t kClockTickMs = 50;  // file times may stand still for so long: several ticks of the slowest kernel

uint64_t LockByte(const BlockPlace& place) { return place.offset + place.index; }

// Numbers that sort by time and that no two processes choose at once; the files' O_EXCL settles the rest. They are
// never used again, so that an open descriptor can't be taken for another file.
uint64_t NewSegmentNumber() {
  uint32_t random = 0;
  if (::getrandom(&random, sizeof(random), 0) != sizeof(random)) random = static_cast<uint32_t>(::getpid());
  return (static_cast<uint64_t>(UnixSeconds()) << 30 | (random & 0x3fffffff)) & 0x7fffffffffffffff;
}

Status Missing(const std::string& path, uint64_t offset, std::string_view what) {
  return Status(StatusCode::kCorruption,
                fmt::format("{} at byte {}: {}; sessions that use it are computed again", path, offset, what));
}

}  // namespace

CellSetShape Segments::Stored(CellSetShape shape) const {
  if (options_.cipher != nullptr) {
    for (auto& layer : shape.layers) layer.cell_bytes += kCellSealBytes;
  }
  return shape;
}

std::optional<CellSetShape> Segments::Clear(CellSetShape stored) const {
  if (options_.cipher == nullptr) return stored;
  for (auto& layer : stored.layers) {
    if (layer.cell_bytes <= kCellSealBytes) return std::nullopt;
    layer.cell_bytes -= kCellSealBytes;
  }
  return stored;
}

SealedFor Segments::About(uint64_t segment, uint64_t offset) const {
  SealedFor about;
  about.Raw(std::as_bytes(std::span(options_.store))).Put(segment).Put(offset);
  return about;
}

void Segments::StartSegment() {
  const std::lock_guard lock(append_mutex_);
  start_segment_ = true;
}

Result<Segments::Owned> Segments::Create() const {
  for (int attempt = 0; attempt < kCreateAttempts; ++attempt) {
    Owned owned;
    owned.segment = NewSegmentNumber();
    const std::string name = SegmentName(owned.segment);
    auto file = File::Open(calls_, directory_.fd(), name, O_RDWR | O_CREAT | O_EXCL, 0600, PathOf(owned.segment));
    if (!file) {
      struct stat info = {};
      if (calls_.StatAt(directory_.fd(), name.c_str(), &info) == 0 &&
          file.error().code() == StatusCode::kInvalidArgument)
        continue;
      return Fail(file.error());
    }
    // Another process may have taken the new file, not locked yet, for a dead one's and unlinked it.
    const auto locked = file->TryLock(0, 1, LockKind::kExclusive);
    const auto info = file->Stat();
    if (!locked || !info) return Fail(locked ? info.error() : locked.error());
    if (!*locked || info->st_nlink == 0) continue;
    const auto header = MakeSegmentHeader({options_.store, owned.segment, UnixSeconds(), options_.cipher != nullptr});
    Status status = file->Allocate(0, kPageBytes);
    if (status.ok()) status = file->WriteAt(0, header);
    if (status.ok() && options_.sync) status = file->Sync();
    if (status.ok() && options_.sync) status = directory_.Sync();
    if (!status.ok()) {
      (void)calls_.UnlinkAt(directory_.fd(), name.c_str());
      return Fail(std::move(status));
    }
    owned.file = std::move(*file);
    owned.tail = kPageBytes;
    owned.unnamed = !options_.sync;
    return owned;
  }
  return Fail(StatusCode::kIoError,
              fmt::format("cannot create a segment file in {}: every name is taken", directory_.path()));
}

// Goes on with a segment whose owner has ended, so that short-lived processes don't leave a file each.
Result<std::optional<Segments::Owned>> Segments::Adopt(uint64_t bytes) {
  auto segments = List();
  if (!segments) return Fail(segments.error());
  std::ranges::sort(*segments, std::greater<>());
  for (const uint64_t segment : *segments) {
    const bool mine = std::ranges::any_of(owned_, [&](const Owned& owned) { return owned.segment == segment; });
    if (mine || cut_off_.contains(segment)) continue;
    auto file = TryOwn(segment);
    if (!file || !*file || !OpenForRead(segment)) continue;  // unreadable ones are for Verify to name
    const auto info = (*file)->Stat();
    if (!info || info->st_size < 0) continue;
    const uint64_t tail = RoundUp(static_cast<uint64_t>(info->st_size), kPageBytes);
    if (tail > options_.segment_bytes || bytes > options_.segment_bytes - tail) continue;
    return Owned{segment, std::move(**file), std::max(tail, kPageBytes), true, true};
  }
  return std::nullopt;
}

Status Segments::FindRoom(uint64_t bytes) {
  if (start_segment_) {
    start_segment_ = false;
  } else if (!owned_.empty()) {
    Owned& last = owned_.back();
    const auto info = last.file.Stat();
    if (!info) return info.error();
    // Whatever else has grown the file is never written over.
    last.tail = RoundUp(std::max(last.tail, static_cast<uint64_t>(info->st_size)), kPageBytes);
    const bool fits = last.tail <= options_.segment_bytes && bytes <= options_.segment_bytes - last.tail;
    if (fits || last.tail == kPageBytes) return OkStatus();
  } else {
    auto adopted = Adopt(bytes);
    if (!adopted) return adopted.error();
    if (*adopted) {
      owned_.push_back(std::move(**adopted));
      return OkStatus();
    }
  }
  auto created = Create();
  if (!created) return created.error();
  owned_.push_back(std::move(*created));
  return OkStatus();
}

// Cells first and the header last: a header stands only before an extent that was written whole.
Status Segments::WriteExtent(const Owned& owned, const ExtentHeader& header, uint64_t block_bytes,
                             const CellSource& cell) {
  const File& file = owned.file;
  const auto header_bytes = MakeExtentHeader(header);
  const uint64_t begin = header.cells_offset - header_bytes.size();
  KVCELL_RETURN_IF_ERROR(file.Allocate(begin, header_bytes.size() + block_bytes * header.n_blocks));
  staging_.reserve(kStagingBytes);
  staging_.clear();
  uint64_t at = header.cells_offset;
  const auto flush = [&]() {
    const Status status = file.WriteAt(at, staging_);
    if (options_.sync) file.WillSync(at, staging_.size());
    at += staging_.size();
    staging_.clear();
    return status;
  };
  for (size_t slot = 0; slot < header.shape.layers.size(); ++slot) {
    const auto& layer = header.shape.layers[slot];
    for (uint32_t block = 0; block < header.n_blocks; ++block) {
      for (uint16_t head = 0; head < layer.n_cells; ++head) {
        const std::byte* bytes = cell(slot, block, head);
        if (bytes == nullptr) return Status(StatusCode::kCancelled, fmt::format("writing {} was stopped", file.path()));
        if (staging_.size() + layer.cell_bytes > kStagingBytes) KVCELL_RETURN_IF_ERROR(flush());
        if (options_.cipher == nullptr) {
          staging_.insert(staging_.end(), bytes, bytes + layer.cell_bytes);
        } else {
          const size_t begin_in_staging = staging_.size();
          staging_.resize(begin_in_staging + layer.cell_bytes);
          options_.cipher->SealCell(std::span(bytes, layer.cell_bytes - kCellSealBytes),
                                    About(owned.segment, at + begin_in_staging), staging_.data() + begin_in_staging);
        }
      }
    }
  }
  KVCELL_RETURN_IF_ERROR(flush());
  return file.WriteAt(begin, header_bytes);
}

Result<std::vector<BlockPlace>> Segments::Append(const CellSetShape& shape, uint32_t n_blocks, uint64_t generation,
                                                 const CellSource& cell) {
  const auto block_bytes = BlockBytes(shape);
  const auto cells = block_bytes ? CheckedMul(*block_bytes, n_blocks) : std::nullopt;
  if (!cells || *cells == 0 || *cells > kMaxOffset / 2) {
    return Fail(StatusCode::kInvalidArgument,
                "cannot store cells of this shape: give each layer cells of a multiple of 64 bytes");
  }
  const std::lock_guard lock(append_mutex_);
  const uint64_t header_bytes = ExtentHeaderBytes(shape);
  KVCELL_FAIL_IF_ERROR(FindRoom(header_bytes + *cells));
  Owned& owned = owned_.back();
  ExtentHeader header{shape, n_blocks, owned.tail + header_bytes, generation};
  BlockPlace place{owned.segment, header.cells_offset, n_blocks, 0};
  Status status = WriteExtent(owned, header, *block_bytes, cell);
  std::shared_ptr<File> reader;
  if (status.ok()) {
    if (auto opened = OpenForRead(owned.segment)) {
      reader = std::move(*opened);
      const auto locked = reader->TryLock(place.offset, n_blocks, LockKind::kShared);
      if (!locked)
        status = locked.error();
      else if (!*locked)
        status = Status(StatusCode::kInternal, "new cells are locked: please report this");
    } else {
      status = opened.error();
    }
  }
  if (!status.ok()) {
    (void)owned.file.Truncate(owned.tail);
    return Fail(std::move(status));
  }
  owned.tail = header.cells_offset + *cells;
  owned.dirty = true;
  const std::lock_guard hold_lock(hold_mutex_);
  std::vector<BlockPlace> places;
  places.reserve(n_blocks);
  for (; place.index < n_blocks; ++place.index) {
    places.push_back(place);
    ++holds_[{place.segment, LockByte(place)}];
  }
  appended_.emplace(KeyOf(place), Appended{std::move(header.shape), n_blocks});
  return places;
}

std::optional<Segments::Appended> Segments::FindAppended(const ExtentKey& key) const {
  const std::lock_guard lock(hold_mutex_);
  const auto found = appended_.find(key);
  if (found == appended_.end()) return std::nullopt;
  return found->second;
}

void Segments::MarkCommitted(std::span<const ExtentKey> keys) {
  const std::lock_guard lock(hold_mutex_);
  for (const auto& key : keys) appended_.erase(key);
}

Status Segments::SyncAppended() {
  const std::lock_guard lock(append_mutex_);
  for (Owned& owned : owned_) {
    if (owned.unnamed) {
      KVCELL_RETURN_IF_ERROR(owned.file.Sync());
      KVCELL_RETURN_IF_ERROR(directory_.Sync());
    } else if (owned.dirty) {
      KVCELL_RETURN_IF_ERROR(owned.file.SyncData());
    }
    owned.unnamed = owned.dirty = false;
  }
  return OkStatus();
}

Result<std::shared_ptr<File>> Segments::OpenForRead(uint64_t segment) {
  {
    const std::shared_lock lock(files_mutex_);
    if (const auto found = files_.find(segment); found != files_.end()) return found->second.file;
  }
  auto file = File::Open(calls_, directory_.fd(), SegmentName(segment), O_RDONLY, 0, PathOf(segment));
  if (!file) {
    if (file.error().code() != StatusCode::kNotFound) return Fail(file.error());
    return Fail(Missing(PathOf(segment), 0, "the segment file is missing"));
  }
  std::array<std::byte, kSegmentHeaderBytes> bytes{};
  const auto n = file->ReadAt(0, bytes);
  if (!n) return Fail(n.error());
  const auto header = ParseSegmentHeader(std::span(bytes).first(*n), file->path());
  if (!header) return Fail(header.error());
  if (header->store != options_.store || header->segment != segment || header->sealed != (options_.cipher != nullptr)) {
    return Fail(Missing(file->path(), 0, "the file belongs to another store or segment"));
  }
  const std::unique_lock lock(files_mutex_);
  ReadFile& opened = files_[segment];
  if (opened.file == nullptr) opened.file = std::make_shared<File>(std::move(*file));
  return opened.file;
}

void Segments::ReadAhead(uint64_t segment, bool on) {
  const auto differs = [&](const auto& found) { return found != files_.end() && found->second.reads_ahead != on; };
  {
    const std::shared_lock lock(files_mutex_);
    if (!differs(files_.find(segment))) return;
  }
  const std::unique_lock lock(files_mutex_);
  const auto found = files_.find(segment);
  if (!differs(found)) return;
  found->second.reads_ahead = on;
  found->second.file->ReadAhead(on);
}

Status Segments::Read(uint64_t segment, uint64_t offset, std::span<std::byte> to) {
  const auto file = OpenForRead(segment);
  if (!file) return file.error();
  const auto n = (*file)->ReadAt(offset, to);
  if (!n) return n.error();
  return *n == to.size() ? OkStatus() : Missing((*file)->path(), offset + *n, "the segment file ends too early");
}

Status Segments::ReadCells(uint64_t segment, uint64_t offset, uint32_t stored_bytes, std::span<std::byte> to) {
  if (options_.cipher == nullptr) return Read(segment, offset, to);
  const size_t clear_bytes = stored_bytes - kCellSealBytes;
  std::vector<std::byte> sealed(to.size() / clear_bytes * stored_bytes);
  KVCELL_RETURN_IF_ERROR(Read(segment, offset, sealed));
  for (size_t i = 0; i * stored_bytes < sealed.size(); ++i) {
    const uint64_t at = offset + i * stored_bytes;
    if (!options_.cipher->UnsealCell(std::span(sealed).subspan(i * stored_bytes, stored_bytes), About(segment, at),
                                     to.data() + i * clear_bytes)) {
      return Missing(PathOf(segment), at, "the encrypted cell was changed");
    }
  }
  return OkStatus();
}

Status Segments::ReadRun(uint64_t segment, uint64_t offset, uint32_t stored_bytes, std::span<std::byte> to) {
  ReadAhead(segment, true);
  return ReadCells(segment, offset, stored_bytes, to);
}

void Segments::Prefetch(uint64_t segment, uint64_t offset, uint64_t bytes) {
  const auto file = OpenForRead(segment);
  if (!file) return;
  ReadAhead(segment, false);
  (*file)->WillRead(offset, bytes);
}

Result<uint64_t> Segments::FileBytes(uint64_t segment) {
  const auto file = OpenForRead(segment);
  if (!file) return Fail(file.error());
  const auto info = (*file)->Stat();
  if (!info) return Fail(info.error());
  return static_cast<uint64_t>(info->st_size);
}

const std::byte* Segments::Map(uint64_t segment, uint64_t end) {
  if (options_.cipher != nullptr) return nullptr;
  const auto file = OpenForRead(segment);
  if (!file) return nullptr;
  const std::lock_guard lock(mapped_mutex_);
  Mapped& mapped = mapped_[segment];
  if (mapped.cut_off) return nullptr;
  if (mapped.file == nullptr || static_cast<uint64_t>(mapped.seen.st_size) < end) {
    mapped.file = *file;
    if (!Look(&mapped) || static_cast<uint64_t>(mapped.seen.st_size) < end) return nullptr;
  }
  if (mapped.mappings.empty() || mapped.mappings.back()->bytes().size() < end) {
    auto mapping =
        MappedFile::Map(**file, std::max(static_cast<uint64_t>(mapped.seen.st_size), options_.segment_bytes));
    if (!mapping) return nullptr;
    mapped.mappings.push_back(std::move(*mapping));
  }
  mapped.asked = std::max(mapped.asked, end);
  return mapped.mappings.back()->bytes().data();
}

// A change is seen by the file's size and times. The kernel's clock ticks in milliseconds, and what is changed twice
// within a tick has one time: a file that was changed just now counts as changed the next time too.
bool Segments::Look(Mapped* mapped) {
  const auto info = mapped->file->Stat();
  if (!info) return false;
  const auto differs = [](const timespec& a, const timespec& b) {
    return a.tv_sec != b.tv_sec || a.tv_nsec != b.tv_nsec;
  };
  if (!mapped->settled || info->st_size != mapped->seen.st_size || differs(info->st_mtim, mapped->seen.st_mtim) ||
      differs(info->st_ctim, mapped->seen.st_ctim)) {
    ++mapped_version_;
  }
  mapped->seen = *info;
  const int64_t changed = int64_t{info->st_ctim.tv_sec} * 1000 + info->st_ctim.tv_nsec / 1'000'000;
  mapped->settled = changed + kClockTickMs < UnixMilliseconds();
  return true;
}

Result<uint64_t> Segments::MappedVersion() {
  const std::lock_guard lock(mapped_mutex_);
  Status status;
  for (auto& [segment, mapped] : mapped_) {
    if (mapped.cut_off || mapped.mappings.empty()) continue;
    const bool looked = Look(&mapped);
    const uint64_t asked = std::exchange(mapped.asked, 0);
    const bool lost = std::ranges::any_of(mapped.mappings, [](const auto& mapping) { return mapping->lost(); });
    const auto size = static_cast<uint64_t>(mapped.seen.st_size);
    if (looked && !lost && size >= asked) continue;
    mapped.cut_off = true;
    ++mapped_version_;
    status = Missing(PathOf(segment), size, "the segment file was cut off, or could not be read, while it was in use");
  }
  if (!status.ok()) return Fail(std::move(status));
  return mapped_version_;
}

Result<bool> Segments::Hold(const BlockPlace& place) {
  const auto file = OpenForRead(place.segment);
  if (!file) return Fail(file.error());
  const std::lock_guard lock(hold_mutex_);
  const std::pair key{place.segment, LockByte(place)};
  if (const auto found = holds_.find(key); found != holds_.end()) {
    ++found->second;
    return true;
  }
  const auto locked = (*file)->TryLock(key.second, 1, LockKind::kShared);
  if (!locked) return Fail(locked.error());
  if (*locked) holds_.emplace(key, 1);
  return *locked;
}

bool Segments::IsHeld(const BlockPlace& place) const {
  const std::lock_guard lock(hold_mutex_);
  return holds_.contains({place.segment, LockByte(place)});
}

void Segments::Release(const BlockPlace& place) {
  const auto file = OpenForRead(place.segment);
  const std::lock_guard append_lock(append_mutex_);
  const std::lock_guard lock(hold_mutex_);
  const auto found = holds_.find({place.segment, LockByte(place)});
  if (found == holds_.end() || --found->second > 0) return;
  holds_.erase(found);
  if (file) (*file)->Unlock(LockByte(place), 1);
  const auto appended = appended_.find(KeyOf(place));
  if (appended == appended_.end()) return;
  const auto next = holds_.lower_bound({place.segment, place.offset});
  const uint64_t end = place.offset + appended->second.n_blocks;
  if (next != holds_.end() && next->first.first == place.segment && next->first.second < end) return;
  DropAppended(appended->first, appended->second);
  appended_.erase(appended);
}

void Segments::DropAppended(const ExtentKey& key, const Appended& appended) {
  for (Owned& owned : owned_) {
    if (owned.segment != key.segment) continue;
    const uint64_t bytes = BlockBytes(appended.shape).value_or(0) * appended.n_blocks;
    const uint64_t begin = key.offset - ExtentHeaderBytes(appended.shape);
    if (owned.tail == key.offset + bytes && owned.file.Truncate(begin).ok()) {
      owned.tail = begin;
    } else {
      (void)FreeSpace(owned.file, {begin, key.offset + bytes});  // else the next one to open the store does it
    }
  }
}

Result<std::vector<uint32_t>> Segments::Free(const ExtentKey& key, const CellSetShape& shape, uint32_t n_blocks,
                                             const std::vector<uint32_t>& indexes, bool all, bool erase) {
  auto file = File::Open(calls_, directory_.fd(), SegmentName(key.segment), O_RDWR, 0, PathOf(key.segment));
  if (!file) {
    if (file.error().code() == StatusCode::kNotFound) return indexes;
    return Fail(file.error());
  }
  std::vector<uint32_t> freed;
  for (const uint32_t index : indexes) {
    const auto locked = file->TryLock(key.offset + index, 1, LockKind::kExclusive);
    if (!locked) return Fail(locked.error());
    if (*locked) freed.push_back(index);
  }
  std::vector<ExtentRange> ranges;
  if (all && freed.size() == indexes.size()) {
    const uint64_t bytes = BlockBytes(shape).value_or(0) * n_blocks;
    ranges.push_back({key.offset - ExtentHeaderBytes(shape), key.offset + bytes});
  } else {
    for (size_t i = 0; i < freed.size();) {
      size_t end = i + 1;
      while (end < freed.size() && freed[end] == freed[end - 1] + 1) ++end;
      for (size_t slot = 0; slot < shape.layers.size(); ++slot) {
        const auto begin = CellOffset(shape, {key.segment, key.offset, n_blocks, freed[i]}, slot, 0);
        const auto& layer = shape.layers[slot];
        if (begin) ranges.push_back({*begin, *begin + (end - i) * layer.n_cells * uint64_t{layer.cell_bytes}});
      }
      i = end;
    }
  }
  if (erase) {
    for (const auto& range : ranges) KVCELL_FAIL_IF_ERROR(file->WriteZeros(range.begin, range.end - range.begin));
    KVCELL_FAIL_IF_ERROR(file->SyncData());
  }
  for (const auto& range : ranges) KVCELL_FAIL_IF_ERROR(FreeSpace(*file, range));
  return freed;
}

// Freed bytes read as zeros, also where the file system can't take the space back: nobody finds what was there.
Status Segments::FreeSpace(const File& file, const ExtentRange& range) const {
  const Status status = file.PunchHole(range.begin, range.end - range.begin);
  return status.code() == StatusCode::kUnsupported ? file.WriteZeros(range.begin, range.end - range.begin) : status;
}

Result<bool> Segments::CanFree(const ExtentKey& key, const std::vector<uint32_t>& indexes) const {
  const auto file = File::Open(calls_, directory_.fd(), SegmentName(key.segment), O_RDWR, 0, PathOf(key.segment));
  if (!file) {
    if (file.error().code() == StatusCode::kNotFound) return true;
    return Fail(file.error());
  }
  for (const uint32_t index : indexes) {
    const auto locked = file->TryLock(key.offset + index, 1, LockKind::kExclusive);
    if (!locked) return Fail(locked.error());
    if (!*locked) return false;
  }
  return true;
}

Result<std::vector<uint64_t>> Segments::List() const {
  const auto names = ListDirectory(directory_);
  if (!names) return Fail(names.error());
  std::vector<uint64_t> segments;
  for (const auto& name : *names) {
    if (const auto segment = ParseSegmentName(name)) segments.push_back(*segment);
  }
  std::ranges::sort(segments);
  return segments;
}

Result<std::optional<File>> Segments::TryOwn(uint64_t segment) const {
  auto file = File::Open(calls_, directory_.fd(), SegmentName(segment), O_RDWR, 0, PathOf(segment));
  if (!file) {
    if (file.error().code() == StatusCode::kNotFound) return std::nullopt;
    return Fail(file.error());
  }
  const auto locked = file->TryLock(0, 1, LockKind::kExclusive);
  if (!locked) return Fail(locked.error());
  const auto info = file->Stat();
  if (!info) return Fail(info.error());
  if (!*locked || info->st_nlink == 0) return std::nullopt;
  std::array<std::byte, kSegmentHeaderBytes> bytes{};
  const auto n = file->ReadAt(0, bytes);
  if (!n) return Fail(n.error());
  if (std::ranges::all_of(std::span(bytes).first(*n), [](std::byte b) { return b == std::byte{0}; })) {
    return std::optional<File>(std::move(*file));  // its owner ended before the header was written
  }
  const auto header = ParseSegmentHeader(std::span(bytes).first(*n), file->path());
  const bool sealed = options_.cipher != nullptr;
  if (!header || header->store != options_.store || header->segment != segment || header->sealed != sealed) {
    return std::nullopt;
  }
  return std::optional<File>(std::move(*file));
}

Status Segments::Reclaim(const File& owned, uint64_t segment, std::span<const ExtentRange> committed) {
  if (committed.empty()) {
    const int result = calls_.UnlinkAt(directory_.fd(), SegmentName(segment).c_str());
    return result < 0 && result != -ENOENT ? ErrnoStatus(-result, "remove", owned.path()) : OkStatus();
  }
  const auto info = owned.Stat();
  if (!info) return info.error();
  const uint64_t end = std::ranges::max(committed, {}, &ExtentRange::end).end;
  if (static_cast<uint64_t>(info->st_size) > end) KVCELL_RETURN_IF_ERROR(owned.Truncate(end));
  if (static_cast<uint64_t>(info->st_size) < end) {
    const std::lock_guard lock(append_mutex_);
    cut_off_.insert(segment);
  }
  uint64_t at = kPageBytes;
  for (const auto& range : committed) {
    if (range.begin > at && range.begin - at >= kPageBytes) {
      KVCELL_RETURN_IF_ERROR(FreeSpace(owned, {at, range.begin}));
    }
    at = std::max(at, range.end);
  }
  return OkStatus();
}

std::vector<std::pair<uint64_t, File>> Segments::TakeOwned() {
  const std::lock_guard lock(append_mutex_);
  std::vector<std::pair<uint64_t, File>> taken;
  for (Owned& owned : owned_) taken.emplace_back(owned.segment, std::move(owned.file));
  owned_.clear();
  return taken;
}

}  // namespace kvcell
