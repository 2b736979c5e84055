#include "store/envelope.h"

#include <fmt/format.h>
#include <sys/random.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/checksum.h"
#include "store/bytes.h"
#include "store/segment_format.h"

namespace kvcell {
namespace {

constexpr uint64_t kMagic = 0x44454c4145535356;  // "VSSEALED"
constexpr uint32_t kVersion = 1;
constexpr size_t kSaltBytes = 16;
constexpr size_t kBoxBytes = 32 + kSealBytes;
constexpr size_t kSizeBytes = sizeof(uint64_t) + kSealBytes;
constexpr size_t kSealedChunkBytes = kEnvelopeChunkBytes + kSealBytes;
constexpr uint64_t kSizeIndex = ~uint64_t{0};  // what the size is sealed for, as chunks are for their number

using Salt = std::array<uint8_t, kSaltBytes>;

SealedFor About(const Salt& salt, uint64_t index) {
  SealedFor about;
  about.Raw(std::as_bytes(std::span(salt))).Put(index);
  return about;
}

tl::unexpected<Status> Damaged(const File& file, std::string_view what) {
  return Fail(StatusCode::kCorruption, fmt::format("{}: {}; export the session again", file.path(), what));
}

class PlainSource : public ByteSource {
 public:
  explicit PlainSource(const File& file) : file_(file) {}
  Result<size_t> ReadAt(uint64_t offset, std::span<std::byte> to) const override { return file_.ReadAt(offset, to); }
  Result<uint64_t> Bytes() const override {
    const auto info = file_.Stat();
    if (!info) return Fail(info.error());
    return static_cast<uint64_t>(info->st_size);
  }
  const std::string& path() const override { return file_.path(); }

 private:
  const File& file_;
};

class SealedSource : public ByteSource {
 public:
  SealedSource(const File& file, std::unique_ptr<Cipher> cipher, const Salt& salt, uint64_t bytes)
      : file_(file), cipher_(std::move(cipher)), salt_(salt), bytes_(bytes) {}

  Result<size_t> ReadAt(uint64_t offset, std::span<std::byte> to) const override {
    size_t done = 0;
    while (done < to.size() && offset + done < bytes_) {
      const uint64_t index = (offset + done) / kEnvelopeChunkBytes;
      if (index != chunk_index_) KVCELL_FAIL_IF_ERROR(Load(index));
      const auto from = static_cast<size_t>((offset + done) % kEnvelopeChunkBytes);
      const size_t n = std::min(to.size() - done, chunk_.size() - from);
      std::memcpy(to.data() + done, chunk_.data() + from, n);
      done += n;
    }
    return done;
  }
  Result<uint64_t> Bytes() const override { return bytes_; }
  const std::string& path() const override { return file_.path(); }

 private:
  Status Load(uint64_t index) const {
    const uint64_t begin = index * kEnvelopeChunkBytes;
    std::vector<std::byte> sealed(static_cast<size_t>(std::min<uint64_t>(kEnvelopeChunkBytes, bytes_ - begin)) +
                                  kSealBytes);
    const auto n = file_.ReadAt(kEnvelopeHeaderBytes + index * kSealedChunkBytes, sealed);
    if (!n) return n.error();
    auto opened = *n == sealed.size() ? cipher_->Unseal(sealed, About(salt_, index)) : std::nullopt;
    if (!opened) return Damaged(file_, fmt::format("the encrypted bytes from {} on were changed", begin)).value();
    chunk_ = std::move(*opened);
    chunk_index_ = index;
    return OkStatus();
  }

  const File& file_;
  const std::unique_ptr<Cipher> cipher_;
  const Salt salt_;
  const uint64_t bytes_;
  mutable std::vector<std::byte> chunk_;
  mutable uint64_t chunk_index_ = kSizeIndex;
};

class PlainSink : public ByteSink {
 public:
  explicit PlainSink(const File& file) : file_(file) {}
  Status WriteAt(uint64_t offset, std::span<const std::byte> bytes) override { return file_.WriteAt(offset, bytes); }
  Status Finish() override { return OkStatus(); }
  const std::string& path() const override { return file_.path(); }

 private:
  const File& file_;
};

// The first chunk waits for the end: its first bytes are written last.
class SealedSink : public ByteSink {
 public:
  SealedSink(const File& file, std::unique_ptr<Cipher> cipher, const Salt& salt, std::vector<std::byte> box)
      : file_(file), cipher_(std::move(cipher)), salt_(salt), box_(std::move(box)) {}

  Status WriteAt(uint64_t offset, std::span<const std::byte> bytes) override {
    if (offset + bytes.size() <= first_.size()) {
      std::ranges::copy(bytes, first_.begin() + static_cast<ptrdiff_t>(offset));
      return OkStatus();
    }
    if (offset != bytes_ && !(bytes_ == 0 && offset <= kEnvelopeChunkBytes)) {
      return Status(StatusCode::kInternal, "an encrypted file is written out of order: please report this");
    }
    if (bytes_ == 0) first_.resize(static_cast<size_t>(offset));
    bytes_ = offset;
    while (!bytes.empty()) {
      std::vector<std::byte>& chunk = bytes_ < kEnvelopeChunkBytes ? first_ : chunk_;
      const size_t n = std::min(bytes.size(), kEnvelopeChunkBytes - chunk.size());
      chunk.insert(chunk.end(), bytes.begin(), bytes.begin() + static_cast<ptrdiff_t>(n));
      bytes = bytes.subspan(n);
      bytes_ += n;
      if (chunk_.size() == kEnvelopeChunkBytes) KVCELL_RETURN_IF_ERROR(Flush());
    }
    return OkStatus();
  }

  Status Finish() override {
    KVCELL_RETURN_IF_ERROR(Flush());
    KVCELL_RETURN_IF_ERROR(file_.WriteAt(kEnvelopeHeaderBytes, cipher_->Seal(first_, About(salt_, 0))));
    ByteWriter size;
    size.Put(bytes_);
    ByteWriter out;
    out.Put(kMagic).Put(kVersion).Put(kByteOrderMark).Raw(std::as_bytes(std::span(salt_))).Raw(box_);
    out.Raw(cipher_->Seal(size.bytes(), About(salt_, kSizeIndex)));
    out.bytes().resize(kEnvelopeHeaderBytes - sizeof(uint64_t));
    out.Put(Checksum64(out.bytes()));
    return file_.WriteAt(0, out.bytes());
  }
  const std::string& path() const override { return file_.path(); }

 private:
  Status Flush() {
    if (chunk_.empty()) return OkStatus();
    const uint64_t index = (bytes_ - 1) / kEnvelopeChunkBytes;
    const Status status =
        file_.WriteAt(kEnvelopeHeaderBytes + index * kSealedChunkBytes, cipher_->Seal(chunk_, About(salt_, index)));
    chunk_.clear();
    return status;
  }

  const File& file_;
  const std::unique_ptr<Cipher> cipher_;
  const Salt salt_;
  const std::vector<std::byte> box_;
  std::vector<std::byte> first_;  // the first chunk
  std::vector<std::byte> chunk_;  // the last one, where it is another
  uint64_t bytes_ = 0;
};

}  // namespace

Result<std::unique_ptr<ByteSource>> OpenSource(const File& file, const std::string& key) {
  std::array<std::byte, kEnvelopeHeaderBytes> bytes{};
  const auto n = file.ReadAt(0, bytes);
  if (!n) return Fail(n.error());
  ByteReader in{std::span(bytes).first(*n)};
  const auto magic = in.Take<uint64_t>();
  if (magic == __builtin_bswap64(kMagic)) {
    return Fail(StatusCode::kMismatch,
                fmt::format("{} has the wrong byte order: it comes from another kind of machine", file.path()));
  }
  if (magic != kMagic) return std::make_unique<PlainSource>(file);
  if (*n < bytes.size()) return Damaged(file, "the file is shorter than its header");
  if (const auto version = in.Take<uint32_t>(); version != kVersion) {
    return Fail(StatusCode::kMismatch,
                fmt::format("{} has envelope format {}, this program reads {}: use the program that wrote it",
                            file.path(), version, kVersion));
  }
  uint64_t checksum = 0;
  std::memcpy(&checksum, bytes.data() + bytes.size() - sizeof(checksum), sizeof(checksum));
  if (checksum != Checksum64(std::span(bytes).first(bytes.size() - sizeof(checksum)))) {
    return Damaged(file, "the header fails its checksum");
  }
  if (key.empty()) {
    return Fail(StatusCode::kPermission,
                fmt::format("{} is encrypted: import it into a store with the key that it was made with", file.path()));
  }
  in.Take<uint32_t>();  // byte order: under the checksum
  Salt salt{};
  std::memcpy(salt.data(), in.Raw(salt.size()).data(), salt.size());
  const auto box = in.Raw(kBoxBytes);
  const auto sealed_size = in.Raw(kSizeBytes);
  auto cipher = Cipher::Open(key, salt, box, file.path());
  if (!cipher) return Fail(cipher.error());
  const auto size = (*cipher)->Unseal(sealed_size, About(salt, kSizeIndex));
  uint64_t plain_bytes = 0;
  if (size && size->size() == sizeof(plain_bytes)) std::memcpy(&plain_bytes, size->data(), sizeof(plain_bytes));
  const auto info = file.Stat();
  if (!info) return Fail(info.error());
  const uint64_t chunks = plain_bytes / kEnvelopeChunkBytes + (plain_bytes % kEnvelopeChunkBytes != 0 ? 1 : 0);
  if (!size || plain_bytes > kMaxOffset / 2 ||
      static_cast<uint64_t>(info->st_size) != kEnvelopeHeaderBytes + plain_bytes + chunks * kSealBytes) {
    return Damaged(file, "the file has another size than it was written with");
  }
  return std::make_unique<SealedSource>(file, std::move(*cipher), salt, plain_bytes);
}

Result<std::unique_ptr<ByteSink>> OpenSink(const File& file, const std::string& key) {
  if (key.empty()) return std::make_unique<PlainSink>(file);
  Salt salt{};
  if (::getrandom(salt.data(), salt.size(), 0) != static_cast<ssize_t>(salt.size())) {
    return Fail(ErrnoStatus(errno, "get random numbers for", file.path()));
  }
  std::vector<std::byte> box;
  auto cipher = Cipher::Make(key, salt, &box);
  if (!cipher) return Fail(cipher.error());
  return std::make_unique<SealedSink>(file, std::move(*cipher), salt, std::move(box));
}

}  // namespace kvcell
