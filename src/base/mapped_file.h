// A file mapped for reading whose pages may become unreadable at any moment: a file that somebody cuts off, or a disk
// that fails, is an error which the reader asks for afterwards, never a signal that ends the process.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "base/file.h"
#include "kvcell/status.h"

namespace kvcell {

// Where a page can't be read, the kernel sends SIGBUS. The handler that the first Map installs puts zeros in the place
// of the whole mapping and lets the read go on, so no stack is unwound and any thread may be in any code; the reader
// then finds `lost`. A SIGBUS that belongs to none of these mappings goes to the handler that was there before, or ends
// the process as it would have without. Thread-safe but for the destructor.
class MappedFile {
 public:
  // Maps bytes [0, bytes) of an open file, which may end earlier: what lies behind its end is lost when it is read.
  // kIoError where there is no address space, kUnsupported where more than 4,096 are mapped.
  static Result<std::unique_ptr<MappedFile>> Map(const File& file, uint64_t bytes);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  std::span<const std::byte> bytes() const { return bytes_; }
  // Whether reads may have given zeros instead of the file's bytes: ask after reading. Never becomes false again.
  bool lost() const;

 private:
  MappedFile(std::span<const std::byte> bytes, size_t slot) : bytes_(bytes), slot_(slot) {}

  std::span<const std::byte> bytes_;
  size_t slot_;  // in the list that the handler searches
};

}  // namespace kvcell
