// How many transactions the index has committed, told a second time outside of it: an index that has fewer has lost the
// end of its log, which SQLite takes for a log that ended there.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "base/file.h"
#include "kvcell/status.h"
#include "store/segment_format.h"

namespace kvcell {

inline constexpr const char* kHeadName = "store.head";
inline constexpr size_t kHeadBytes = 64;

std::vector<std::byte> MakeHead(const StoreId& store, uint64_t commits);
// Nothing where the bytes are no head of this store.
std::optional<uint64_t> ParseHead(std::span<const std::byte> bytes, const StoreId& store);

// Thread-compatible. A head that can't be read or written costs this check alone, never a save.
class Head {
 public:
  // Opens it, or makes it where `writes`.
  static Head Open(SystemCalls& calls, const File& directory, const StoreId& store, bool writes);

  // The number that stands there; nothing where there is no sound one.
  std::optional<uint64_t> Read() const;
  // A file is there whose content fails its check.
  bool IsDamaged() const;
  // Raises the number; sets it even to a lower one where `force`.
  void Write(uint64_t commits, bool force) const;

 private:
  File file_;
  StoreId store_{};
};

}  // namespace kvcell
