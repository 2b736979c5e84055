// The digest of a model file's content, remembered from one start to the next, so that a large file is read whole only
// once.
#pragma once

#include <sys/stat.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace kvcell {

// Below this size a file is digested every time: that takes a hundredth of a second.
inline constexpr uint64_t kRememberedFileBytes = uint64_t{32} << 20;

struct WeightsDigest {
  std::string text;         // XXH3-128 of all bytes, in hexadecimal
  bool remembered = false;  // from the folder, after a look at samples
};

// `info` is the file's own, taken when it was opened. A digest is remembered in `folder` ("": not at all) under the
// file's device and inode; it holds while size, times of change (mtime and ctime, to the nanosecond) and 64 pages
// spread over the file are the same. What can't be read or written there costs a digest, nothing else.
WeightsDigest DigestWeights(std::span<const std::byte> bytes, const struct stat& info, const std::string& folder,
                            uint64_t least_bytes = kRememberedFileBytes);

}  // namespace kvcell
