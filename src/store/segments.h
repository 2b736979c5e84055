// The segment files of a store: appending extents to this process's own, reading from any, and the locks that say which
// bytes are in use. Knows nothing of the index: whoever calls says what is committed.
//
// Locks are ranges of a segment file, owned by the open file, so that the kernel drops them with the process:
//   byte 0                          exclusive: this process appends to the segment (its owner)
//   byte offset + index of an extent  shared: the block's bytes are held by someone; who frees them takes it
//   exclusively
#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <shared_mutex>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/file.h"
#include "base/mapped_file.h"
#include "kvcell/status.h"
#include "store/cipher.h"
#include "store/segment_format.h"
#include "store/store.h"

namespace kvcell {

// An extent's name: its segment and the offset of its first cell.
struct ExtentKey {
  uint64_t segment = 0;
  uint64_t offset = 0;
  auto operator<=>(const ExtentKey&) const = default;
};
inline ExtentKey KeyOf(const BlockPlace& place) { return {place.segment, place.offset}; }

// Where an extent's bytes begin and end in its file, header included.
struct ExtentRange {
  uint64_t begin = 0;
  uint64_t end = 0;
};

// Gives each cell's bytes in file order; a null pointer stops the append.
using CellSource = CellTier::CellSource;

// Thread-safe.
class Segments {
 public:
  struct Options {
    StoreId store{};
    uint64_t segment_bytes = 0;
    bool sync = false;  // saves sync: a new file's name before the file is used, cells begin to go out as they come
    const Cipher* cipher = nullptr;  // of an encrypted store; outlives this object
  };
  // An extent that this process appended and nobody committed yet.
  struct Appended {
    CellSetShape shape;
    uint32_t n_blocks = 0;
  };

  Segments(SystemCalls& calls, File directory, Options options)
      : calls_(calls), directory_(std::move(directory)), options_(options) {}

  // A shape as it lies in the file, and back: sealed cells are longer. Nothing where they are too short to be sealed.
  CellSetShape Stored(CellSetShape shape) const;
  std::optional<CellSetShape> Clear(CellSetShape stored) const;

  // Appends an extent to this process's segment and holds all its blocks. Nothing is left of a failed one. `shape` is
  // as stored; `cell` gives the cells in the clear.
  Result<std::vector<BlockPlace>> Append(const CellSetShape& shape, uint32_t n_blocks, uint64_t generation,
                                         const CellSource& cell);
  std::optional<Appended> FindAppended(const ExtentKey& key) const;
  // The index names the extents now: they are no longer this process's to drop.
  void MarkCommitted(std::span<const ExtentKey> keys);
  // Makes what was appended survive power loss.
  Status SyncAppended();

  // The next extent goes to a new segment.
  void StartSegment();

  // Cells that lie side by side, each of `stored_bytes` in the file, in the clear. kCorruption as Read, or where one
  // doesn't open.
  Status ReadCells(uint64_t segment, uint64_t offset, uint32_t stored_bytes, std::span<std::byte> to);
  // kCorruption where the file is missing, foreign or ends too early.
  Status Read(uint64_t segment, uint64_t offset, std::span<std::byte> to);
  // Lets the system begin to read what is asked for soon, and nothing more of that file until the next ReadRun: what it
  // would read ahead beyond the named bytes pushes out others that are needed before.
  void Prefetch(uint64_t segment, uint64_t offset, uint64_t bytes);
  // ReadCells for a reader that goes through the file in order: the system reads ahead.
  Status ReadRun(uint64_t segment, uint64_t offset, uint32_t stored_bytes, std::span<std::byte> to);
  Result<uint64_t> FileBytes(uint64_t segment);
  // The file's bytes [0, end) mapped for reading, there until this object goes; null where they can't be: encrypted,
  // ending too early, cut off once, no address space. A read then says what is wrong, if anything is.
  const std::byte* Map(uint64_t segment, uint64_t end);
  // See Store::MappedVersion.
  Result<uint64_t> MappedVersion();
  std::string PathOf(uint64_t segment) const { return directory_.path() + "/" + SegmentName(segment); }

  // Holds a block's bytes; false where they are being freed this moment.
  Result<bool> Hold(const BlockPlace& place);
  bool IsHeld(const BlockPlace& place) const;
  // The last hold on the last block of an extent that was never committed gives its space back.
  void Release(const BlockPlace& place);

  // Frees blocks that the index no longer names, but for those that someone holds; returns the freed ones. The whole
  // extent goes, header included, where `all` says that no other block of it is left. Erasing overwrites the bytes on
  // the disk first.
  Result<std::vector<uint32_t>> Free(const ExtentKey& key, const CellSetShape& shape, uint32_t n_blocks,
                                     const std::vector<uint32_t>& indexes, bool all, bool erase);

  // Whether nobody holds any of these blocks of an extent.
  Result<bool> CanFree(const ExtentKey& key, const std::vector<uint32_t>& indexes) const;

  // Segment files that are there, by number.
  Result<std::vector<uint64_t>> List() const;
  // Becomes the owner of a segment that nobody owns; nothing where someone does or it isn't this store's.
  Result<std::optional<File>> TryOwn(uint64_t segment) const;
  // The owner gives back what no committed extent (in order of offset) takes; the file itself where there is none.
  Status Reclaim(const File& owned, uint64_t segment, std::span<const ExtentRange> committed);
  // The segments that this process owns. It gives them up, after which anyone may reclaim them.
  std::vector<std::pair<uint64_t, File>> TakeOwned();

 private:
  struct Owned {
    uint64_t segment = 0;
    File file;
    uint64_t tail = 0;     // where the next extent may start
    bool dirty = false;    // bytes that are not synced
    bool unnamed = false;  // its name in the directory is not synced
  };

  // A file that is mapped, and what was last seen of it. Mappings are as long as they may ever have to be; the last is
  // the longest, earlier ones stay for those who read them.
  struct Mapped {
    std::shared_ptr<File> file;
    std::vector<std::unique_ptr<MappedFile>> mappings;
    uint64_t asked = 0;  // end of what Map gave since the last MappedVersion
    struct stat seen = {};
    bool settled = false;  // a change after `seen` would show in the file's times
    bool cut_off = false;
  };
  bool Look(Mapped* mapped);

  Result<std::shared_ptr<File>> OpenForRead(uint64_t segment);
  void ReadAhead(uint64_t segment, bool on);
  Result<Owned> Create() const;
  Result<std::optional<Owned>> Adopt(uint64_t bytes);
  Status FindRoom(uint64_t bytes);
  Status WriteExtent(const Owned& owned, const ExtentHeader& header, uint64_t block_bytes, const CellSource& cell);
  SealedFor About(uint64_t segment, uint64_t offset) const;
  Status FreeSpace(const File& file, const ExtentRange& range) const;
  void DropAppended(const ExtentKey& key, const Appended& appended);

  SystemCalls& calls_;
  const File directory_;
  const Options options_;

  std::mutex append_mutex_;     // before hold_mutex_
  std::set<uint64_t> cut_off_;  // segments that end before what was committed in them: nothing is appended there
  std::vector<Owned> owned_;    // extents go to the last
  bool start_segment_ = false;
  std::vector<std::byte> staging_;

  mutable std::mutex hold_mutex_;
  std::map<std::pair<uint64_t, uint64_t>, uint32_t> holds_;  // segment, lock byte -> how often
  std::map<ExtentKey, Appended> appended_;

  struct ReadFile {
    std::shared_ptr<File> file;
    bool reads_ahead = true;
  };
  std::shared_mutex files_mutex_;
  std::map<uint64_t, ReadFile> files_;

  std::mutex mapped_mutex_;  // the last of all
  std::map<uint64_t, Mapped> mapped_;
  uint64_t mapped_version_ = 1;
};

}  // namespace kvcell
