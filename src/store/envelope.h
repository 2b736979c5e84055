// Files read and written through an optional envelope: encrypted in chunks, each bound to its place (docs/format.md).
// An export of an encrypted store leaves it in one.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/file.h"
#include "kvcell/status.h"
#include "store/cipher.h"

namespace kvcell {

inline constexpr size_t kEnvelopeHeaderBytes = 192;
inline constexpr size_t kEnvelopeChunkBytes = 65536;

// Bytes at any offset. Thread-compatible.
class ByteSource {
 public:
  virtual ~ByteSource() = default;
  // How many bytes were there: fewer than asked for only at the end.
  virtual Result<size_t> ReadAt(uint64_t offset, std::span<std::byte> to) const = 0;
  virtual Result<uint64_t> Bytes() const = 0;
  virtual const std::string& path() const = 0;
};

// Bytes one after the other, the first 64 once more at the end.
class ByteSink {
 public:
  virtual ~ByteSink() = default;
  virtual Status WriteAt(uint64_t offset, std::span<const std::byte> bytes) = 0;
  virtual Status Finish() = 0;
  virtual const std::string& path() const = 0;
};

// A file as it lies, or what is in its envelope: kPermission where `key` is missing or another, kMismatch (a newer
// version, wrong byte order), kCorruption. The file outlives the source.
Result<std::unique_ptr<ByteSource>> OpenSource(const File& file, const std::string& key);
// The start of an empty file; in an envelope where a key is given.
Result<std::unique_ptr<ByteSink>> OpenSink(const File& file, const std::string& key);

}  // namespace kvcell
