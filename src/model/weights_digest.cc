#include "model/weights_digest.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <fstream>
#include <iterator>

#include "base/checksum.h"
#include "base/file.h"

namespace kvcell {
namespace {

constexpr uint64_t kSamples = 64;
constexpr uint64_t kSampleBytes = 4096;
constexpr size_t kMostBytes = 4096;  // of a remembered digest: a line

std::string Hex(const Digest128& digest) { return fmt::format("{:02x}", fmt::join(digest, "")); }

std::string SampleDigest(std::span<const std::byte> bytes) {
  Checksum128Stream digest;
  const uint64_t last = bytes.size() - std::min<uint64_t>(bytes.size(), kSampleBytes);
  for (uint64_t i = 0; i < kSamples; ++i) {
    // Not i * last / (kSamples - 1): that product may pass 64 bits.
    const uint64_t at = i + 1 == kSamples ? last : last / (kSamples - 1) * i;
    digest.Update(bytes.subspan(at, std::min<uint64_t>(kSampleBytes, bytes.size() - at)));
  }
  return Hex(digest.Digest());
}

// All that must be as it was, then the digest, then a checksum over both.
std::string Line(const struct stat& info, std::string_view sample, std::string_view digest) {
  std::string line =
      fmt::format("kvcell-weights 1 {} {} {} {}.{} {}.{} {} {} ", info.st_dev, info.st_ino, info.st_size,
                  info.st_mtim.tv_sec, info.st_mtim.tv_nsec, info.st_ctim.tv_sec, info.st_ctim.tv_nsec, sample, digest);
  line += fmt::format("{:016x}\n", Checksum64(std::as_bytes(std::span(line))));
  return line;
}

void Remember(const std::string& folder, const std::string& name, const std::string& line) {
  SystemCalls& calls = SystemCalls::Real();
  if (!MakeDirectories(calls, folder).ok()) return;
  const std::string path = folder + "/" + name;
  const std::string temporary = fmt::format("{}.{}.tmp", path, ::getpid());
  {
    const auto file = File::Open(calls, AT_FDCWD, temporary, O_WRONLY | O_CREAT | O_EXCL, 0600, temporary);
    if (!file || !file->WriteAt(0, std::as_bytes(std::span(line))).ok()) {
      (void)calls.UnlinkAt(AT_FDCWD, temporary.c_str());
      return;
    }
  }
  if (calls.RenameAt(AT_FDCWD, temporary.c_str(), path.c_str()) < 0) (void)calls.UnlinkAt(AT_FDCWD, temporary.c_str());
}

std::string ReadLine(const std::string& path) {
  const auto file = File::Open(SystemCalls::Real(), AT_FDCWD, path, O_RDONLY, 0, path);
  std::array<std::byte, kMostBytes> bytes{};
  const auto n = file ? file->ReadAt(0, bytes) : Result<size_t>(0);
  return {reinterpret_cast<const char*>(bytes.data()), n.value_or(0)};
}

}  // namespace

WeightsDigest DigestWeights(std::span<const std::byte> bytes, const struct stat& info, const std::string& folder,
                            uint64_t least_bytes) {
  const bool remembers = !folder.empty() && bytes.size() >= least_bytes && !bytes.empty();
  if (!remembers) return {Hex(Checksum128(bytes)), false};
  const std::string name = fmt::format("weights-{}-{}", info.st_dev, info.st_ino);
  const std::string sample = SampleDigest(bytes);
  const std::string line = ReadLine(folder + "/" + name);
  constexpr size_t kDigestText = 2 * sizeof(Digest128);
  constexpr size_t kChecksumText = 16 + 2;  // and the space before and the newline behind it
  if (line.size() > kDigestText + kChecksumText) {
    const std::string digest = line.substr(line.size() - kChecksumText - kDigestText, kDigestText);
    if (line == Line(info, sample, digest)) return {digest, true};
  }
  std::string digest = Hex(Checksum128(bytes));
  Remember(folder, name, Line(info, sample, digest));
  return {std::move(digest), false};
}

}  // namespace kvcell
