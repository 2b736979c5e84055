// Fuzzes every reader of the store's stored bytes: segment and extent headers, rows' blobs, and whole export files. The
// first byte chooses; for export files the checksums are set right first, so that what lies behind them is reached.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "base/checksum.h"
#include "base/file.h"
#include "store/bytes.h"
#include "store/envelope.h"
#include "store/head.h"
#include "store/index.h"
#include "store/portable.h"
#include "store/segment_format.h"

namespace kvcell {
namespace {

// A header as MakeSegmentHeader seals it: the checksum over all before it, in the last eight bytes of the first 64.
void SealFirst64(std::vector<std::byte>* bytes) {
  if (bytes->size() < 64) return;
  const uint64_t checksum = Checksum64(std::span(*bytes).first(56));
  std::memcpy(bytes->data() + 56, &checksum, sizeof(checksum));
}

// The envelope's checksum, so that what lies behind it is reached.
void SealEnvelope(std::vector<std::byte>* bytes) {
  if (bytes->size() < kEnvelopeHeaderBytes || std::memcmp(bytes->data(), "VSSEALED", 8) != 0) return;
  const uint64_t checksum = Checksum64(std::span(*bytes).first(kEnvelopeHeaderBytes - sizeof(uint64_t)));
  std::memcpy(bytes->data() + kEnvelopeHeaderBytes - sizeof(checksum), &checksum, sizeof(checksum));
}

void ReadAsExport(std::vector<std::byte> bytes, bool seal) {
  if (seal && bytes.size() >= 64) {
    uint64_t offset = 0;
    std::memcpy(&offset, bytes.data() + 16, sizeof(offset));
    if (offset <= bytes.size()) {
      const uint64_t length = bytes.size() - offset;
      const auto digest = Checksum128(std::span(bytes).subspan(static_cast<size_t>(offset)));
      std::memcpy(bytes.data() + 24, &length, sizeof(length));
      std::memcpy(bytes.data() + 32, digest.data(), digest.size());
    }
    SealFirst64(&bytes);
  }
  SealEnvelope(&bytes);
  static const int memory = ::memfd_create("export", MFD_CLOEXEC);
  if (::ftruncate(memory, 0) != 0 ||
      ::pwrite(memory, bytes.data(), bytes.size(), 0) != static_cast<ssize_t>(bytes.size()))
    return;
  class OneFile : public SystemCalls {  // whatever is opened, it is the memory
    int OpenAt(int, const char*, int, mode_t) override { return ::dup(memory); }
  } calls;
  const auto file = File::Open(calls, AT_FDCWD, "export", O_RDONLY, 0, "export");
  if (!file) return;
  static const std::string key(40, 'k');
  const auto source = OpenSource(*file, key);
  if (!source) return;
  const auto session = ReadExport(**source);
  if (!session) return;
  for (size_t kind = 0; kind < 2; ++kind) {
    for (const uint32_t block : session->with_cells[kind]) {
      if (block >= session->record.blocks.size()) __builtin_trap();
    }
    const uint64_t there = (*source)->Bytes().value_or(0);
    if (session->cells[kind].offset > there || session->cells[kind].bytes > there - session->cells[kind].offset) {
      __builtin_trap();
    }
  }
}

void ReadAsPlace(std::span<const std::byte> bytes) {
  ByteReader in(bytes);
  const auto segment = in.Take<int64_t>();
  const auto offset = in.Take<int64_t>();
  const auto n_blocks = in.Take<int64_t>();
  const auto place = MakePlace(segment, offset, n_blocks, in.Take<int64_t>());
  const auto slot = in.Take<uint8_t>();
  const auto head = in.Take<uint16_t>();
  const auto shape = ParseShapeBytes(in.Raw(in.left()));
  if (!place || !shape) return;
  const auto at = CellOffset(*shape, *place, slot, head);
  if (at && (*at < place->offset || *at > kMaxOffset)) __builtin_trap();
}

}  // namespace
}  // namespace kvcell

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace kvcell;
  if (size == 0) return 0;
  const auto input = std::as_bytes(std::span(data, size)).subspan(1);
  std::vector<std::byte> bytes(input.begin(), input.end());
  switch (data[0] % 8) {
    case 0:
      if (data[0] >= 128) SealFirst64(&bytes);
      (void)ParseSegmentHeader(bytes, "fuzz");
      break;
    case 1:
      if (const auto header = ParseExtentHeader(bytes, 4096, "fuzz")) {
        if (MakeExtentHeader(*header).size() > bytes.size()) __builtin_trap();
      }
      break;
    case 2:
      if (const auto identity = ParseIdentityBytes(bytes)) {
        if (MakeIdentityBytes(*identity) != bytes) __builtin_trap();
      }
      break;
    case 3:
      ReadAsPlace(bytes);
      break;
    case 4:
      (void)ParseHead(bytes, StoreId{});
      break;
    default:
      ReadAsExport(std::move(bytes), data[0] % 8 >= 6);
      break;
  }
  return 0;
}
