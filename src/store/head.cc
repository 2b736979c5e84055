#include "store/head.h"

#include <fcntl.h>

#include <algorithm>
#include <array>

#include "base/checksum.h"
#include "store/bytes.h"

namespace kvcell {
namespace {

constexpr uint64_t kHeadMagic = 0x3144414548435356;  // "VSCHEAD1"

}  // namespace

std::vector<std::byte> MakeHead(const StoreId& store, uint64_t commits) {
  ByteWriter out;
  out.Put(kHeadMagic).Raw(std::as_bytes(std::span(store))).Put(commits);
  out.bytes().resize(kHeadBytes - sizeof(uint64_t));
  out.Put(Checksum64(out.bytes()));
  return std::move(out.bytes());
}

std::optional<uint64_t> ParseHead(std::span<const std::byte> bytes, const StoreId& store) {
  ByteReader in(bytes);
  in.Raw(sizeof(kHeadMagic) + store.size());
  const auto commits = in.Take<uint64_t>();
  const auto again = MakeHead(store, commits);
  if (!in.ok() || !std::ranges::equal(again, bytes)) return std::nullopt;
  return commits;
}

Head Head::Open(SystemCalls& calls, const File& directory, const StoreId& store, bool writes) {
  Head head;
  head.store_ = store;
  auto file = File::Open(calls, directory.fd(), kHeadName, writes ? O_RDWR | O_CREAT : O_RDONLY, 0600,
                         directory.path() + "/" + kHeadName);
  if (file) head.file_ = std::move(*file);
  return head;
}

std::optional<uint64_t> Head::Read() const {
  if (!file_.is_open()) return std::nullopt;
  std::array<std::byte, kHeadBytes> bytes{};
  const auto n = file_.ReadAt(0, bytes);
  return n ? ParseHead(std::span(bytes).first(*n), store_) : std::nullopt;
}

bool Head::IsDamaged() const {
  if (!file_.is_open() || Read()) return false;
  const auto info = file_.Stat();
  return !info || info->st_size != 0;  // an empty one was made and not yet written
}

void Head::Write(uint64_t commits, bool force) const {
  if (!file_.is_open()) return;
  // Processes write one after the other, so that the number never falls; who doesn't get the lock leaves it to who has.
  const auto locked = file_.TryLock(0, 1, LockKind::kExclusive);
  if (!locked || !*locked) return;
  const auto there = Read();
  if (force || !there || *there < commits) (void)file_.WriteAt(0, MakeHead(store_, commits));
  file_.Unlock(0, 1);
}

}  // namespace kvcell
