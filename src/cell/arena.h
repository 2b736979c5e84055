// RAM for cells: fixed-size slots in pools, under one hard limit that is checked before anything is allocated.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "kvcell/status.h"

namespace kvcell {

using Slot = uint32_t;
inline constexpr Slot kNoSlot = 0xffffffffu;

// How a pool takes memory: `slots` slots of a size at a time. PlanMemory computes with the same function as the pools.
struct ChunkShape {
  uint32_t slots = 0;
  uint64_t bytes = 0;  // a multiple of the page size, at least slots * slot_bytes
};
// Chunks are about `target` bytes, and never less than one slot.
ChunkShape MakeChunkShape(uint32_t slot_bytes, uint64_t target);
// Bytes that n slots take, chunks being whole.
uint64_t BytesForSlots(const ChunkShape& chunk, uint64_t n_slots);

// A slot that is given back is filled with NaN patterns, so that a read after that shows up as garbage at once: in
// debug builds and under AddressSanitizer.
#if !defined(NDEBUG) || defined(__SANITIZE_ADDRESS__)
inline constexpr bool kPoisonsFreedSlots = true;
#else
inline constexpr bool kPoisonsFreedSlots = false;
#endif

// Slots of one size in a reserved range of addresses. Pages are taken chunk by chunk and given back when a chunk
// empties, so what is accounted is what the kernel can see resident. Not thread-safe.
class SlotPool {
 public:
  // Reserves addresses for max_bytes. kIoError where the system refuses the range.
  static Result<std::unique_ptr<SlotPool>> Create(uint32_t slot_bytes, uint64_t chunk_target, uint64_t max_bytes);
  ~SlotPool();
  SlotPool(const SlotPool&) = delete;
  SlotPool& operator=(const SlotPool&) = delete;

  // Takes the pages of n slots now and keeps them: a part of memory that is set aside from the start.
  void SetAside(uint64_t n_slots);

  // The caller has made sure that the growth is within its limit; kNoSlot only past the reserved range.
  Slot Take();
  void Give(Slot slot);

  std::byte* at(Slot slot) { return base_ + Offset(slot); }
  const std::byte* at(Slot slot) const { return base_ + Offset(slot); }

  uint32_t slot_bytes() const { return slot_bytes_; }
  uint64_t committed() const { return committed_; }  // bytes of the chunks in use
  uint64_t used_slots() const { return used_; }
  uint64_t free_slots() const { return free_; }  // within the chunks in use
  // Bytes by which committed() would grow if n more slots were taken.
  uint64_t GrowthFor(uint64_t n) const;

 private:
  struct Chunk {
    std::vector<uint64_t> free;  // bit set: slot is free; empty: the chunk holds no pages
    uint32_t n_free = 0;
  };
  SlotPool(uint32_t slot_bytes, ChunkShape chunk, std::byte* base, uint64_t reserved);
  uint64_t Offset(Slot slot) const {
    return static_cast<uint64_t>(slot / chunk_.slots) * chunk_.bytes +
           static_cast<uint64_t>(slot % chunk_.slots) * slot_bytes_;
  }
  void Commit(Chunk* chunk);

  uint32_t slot_bytes_;
  ChunkShape chunk_;
  std::byte* base_;
  uint64_t reserved_;
  std::vector<Chunk> chunks_;
  size_t set_aside_ = 0;   // chunks that keep their pages
  size_t first_open_ = 0;  // no chunk before this one has a free slot
  uint64_t committed_ = 0;
  uint64_t used_ = 0;
  uint64_t free_ = 0;  // free slots in committed chunks
};

}  // namespace kvcell
