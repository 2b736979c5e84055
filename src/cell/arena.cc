#include "cell/arena.h"

#include <fmt/format.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <utility>

namespace kvcell {
namespace {

constexpr uint64_t kHugePage = uint64_t{2} << 20;
constexpr uint64_t kMostHugePages = 8;

uint64_t RoundUp(uint64_t value, uint64_t unit) { return (value + unit - 1) / unit * unit; }

uint64_t PageSize() {
  static const uint64_t size = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  return size;
}

}  // namespace

ChunkShape MakeChunkShape(uint32_t slot_bytes, uint64_t target) {
  const auto shape = [&](uint64_t wanted, uint64_t unit) {
    ChunkShape chunk;
    chunk.slots = static_cast<uint32_t>(std::max<uint64_t>(1, wanted / slot_bytes));
    chunk.bytes = RoundUp(static_cast<uint64_t>(chunk.slots) * slot_bytes, unit);
    return chunk;
  };
  if (target < kHugePage) return shape(target, PageSize());
  // Whole huge pages: the fewest that leave less than a fiftieth unused.
  ChunkShape chunk;
  for (uint64_t n = 1; n <= kMostHugePages; ++n) {
    chunk = shape(n * kHugePage, kHugePage);
    if ((chunk.bytes - static_cast<uint64_t>(chunk.slots) * slot_bytes) * 50 < chunk.bytes) break;
  }
  return chunk;
}

uint64_t BytesForSlots(const ChunkShape& chunk, uint64_t n_slots) {
  return (n_slots + chunk.slots - 1) / chunk.slots * chunk.bytes;
}

Result<std::unique_ptr<SlotPool>> SlotPool::Create(uint32_t slot_bytes, uint64_t chunk_target, uint64_t max_bytes) {
  const ChunkShape chunk = MakeChunkShape(slot_bytes, chunk_target);
  // One huge page more than asked for, so that the range can start on a huge page's edge.
  const uint64_t reserved = RoundUp(std::max(max_bytes, chunk.bytes), chunk.bytes);
  void* range =
      mmap(nullptr, reserved + kHugePage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (range == MAP_FAILED) {
    return Fail(StatusCode::kIoError,
                fmt::format("can't reserve {} bytes of address space for KV cells: {}; lower the RAM budget", reserved,
                            std::strerror(errno)));
  }
  const uint64_t start = reinterpret_cast<uint64_t>(range);
  const uint64_t aligned = RoundUp(start, kHugePage);
  if (aligned > start) munmap(range, aligned - start);
  if (start + kHugePage > aligned) munmap(reinterpret_cast<void*>(aligned + reserved), start + kHugePage - aligned);
  auto* base = reinterpret_cast<std::byte*>(aligned);
  // Huge pages only where chunks are whole ones: a partly used huge page would be resident beyond what is accounted.
  if (chunk.bytes % kHugePage == 0) madvise(base, reserved, MADV_HUGEPAGE);
  return std::unique_ptr<SlotPool>(new SlotPool(slot_bytes, chunk, base, reserved));
}

SlotPool::SlotPool(uint32_t slot_bytes, ChunkShape chunk, std::byte* base, uint64_t reserved)
    : slot_bytes_(slot_bytes), chunk_(chunk), base_(base), reserved_(reserved) {}

SlotPool::~SlotPool() { munmap(base_, reserved_); }

void SlotPool::Commit(Chunk* chunk) {
  chunk->free.assign((chunk_.slots + 63) / 64, ~uint64_t{0});
  if (chunk_.slots % 64 != 0) chunk->free.back() = (uint64_t{1} << (chunk_.slots % 64)) - 1;
  chunk->n_free = chunk_.slots;
  committed_ += chunk_.bytes;
  free_ += chunk_.slots;
}

void SlotPool::SetAside(uint64_t n_slots) {
  set_aside_ = static_cast<size_t>(BytesForSlots(chunk_, n_slots) / chunk_.bytes);
  while (chunks_.size() < set_aside_) {
    std::memset(base_ + chunks_.size() * chunk_.bytes, 0, chunk_.bytes);
    Commit(&chunks_.emplace_back());
  }
}

Slot SlotPool::Take() {
  while (first_open_ < chunks_.size() && chunks_[first_open_].n_free == 0 && !chunks_[first_open_].free.empty())
    ++first_open_;
  if (first_open_ == chunks_.size()) {
    if ((chunks_.size() + 1) * chunk_.bytes > reserved_) return kNoSlot;
    chunks_.emplace_back();
  }
  Chunk& chunk = chunks_[first_open_];
  if (chunk.free.empty()) Commit(&chunk);
  size_t word = 0;
  while (chunk.free[word] == 0) ++word;
  const int bit = std::countr_zero(chunk.free[word]);
  chunk.free[word] &= chunk.free[word] - 1;
  --chunk.n_free;
  --free_;
  ++used_;
  return static_cast<Slot>(first_open_ * chunk_.slots + word * 64 + static_cast<size_t>(bit));
}

void SlotPool::Give(Slot slot) {
  if (kPoisonsFreedSlots) std::memset(at(slot), 0xff, slot_bytes_);
  const size_t index = slot / chunk_.slots;
  const uint32_t within = slot % chunk_.slots;
  Chunk& chunk = chunks_[index];
  chunk.free[within / 64] |= uint64_t{1} << (within % 64);
  ++chunk.n_free;
  ++free_;
  --used_;
  first_open_ = std::min(first_open_, index);
  if (chunk.n_free == chunk_.slots && index >= set_aside_) {
    madvise(base_ + index * chunk_.bytes, chunk_.bytes, MADV_DONTNEED);
    chunk = Chunk{};
    committed_ -= chunk_.bytes;
    free_ -= chunk_.slots;
  }
}

uint64_t SlotPool::GrowthFor(uint64_t n) const { return n <= free_ ? 0 : BytesForSlots(chunk_, n - free_); }

}  // namespace kvcell
