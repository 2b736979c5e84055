// Slots: never two owners for one address, memory taken and given back as accounted, poison after free.
#include "cell/arena.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <map>
#include <random>
#include <set>
#include <vector>

namespace kvcell {
namespace {

TEST(SlotPool, SlotsDoNotOverlapAndStayInsideTheirChunks) {
  for (const uint32_t slot_bytes : {64u, 4544u, 9216u, 65600u, 300000u}) {
    auto pool = SlotPool::Create(slot_bytes, 128 << 10, 32 << 20).value();
    std::map<std::byte*, Slot> taken;
    for (int i = 0; i < 100; ++i) {
      const Slot slot = pool->Take();
      ASSERT_NE(slot, kNoSlot);
      ASSERT_EQ(reinterpret_cast<uintptr_t>(pool->at(slot)) % 64, 0u);
      ASSERT_TRUE(taken.emplace(pool->at(slot), slot).second);
    }
    const std::byte* previous = nullptr;
    for (const auto& [address, slot] : taken) {
      if (previous != nullptr) {
        ASSERT_GE(address - previous, static_cast<std::ptrdiff_t>(slot_bytes));
      }
      previous = address;
    }
  }
}

TEST(SlotPool, WhatIsGivenBackHoldsNoNumbersAnyMore) {
  if (!kPoisonsFreedSlots) GTEST_SKIP() << "in debug and AddressSanitizer builds";
  auto pool = SlotPool::Create(4544, 128 << 10, 32 << 20).value();
  const Slot kept = pool->Take(), freed = pool->Take();
  std::memset(pool->at(kept), 0, 4544);
  std::memset(pool->at(freed), 0, 4544);
  pool->Give(freed);
  const std::vector<std::byte> nans(4544, std::byte{0xff}), zeros(4544, std::byte{0});
  EXPECT_EQ(std::memcmp(pool->at(freed), nans.data(), nans.size()), 0);
  EXPECT_EQ(std::memcmp(pool->at(kept), zeros.data(), zeros.size()), 0);
}

TEST(SlotPool, GrowthIsWhatTakingWouldCommit) {
  auto pool = SlotPool::Create(4544, 128 << 10, 512 << 20).value();
  std::mt19937 random(7);
  std::vector<Slot> slots;
  for (int i = 0; i < 2000; ++i) {
    if (random() % 3 != 0 || slots.empty()) {
      const uint64_t n = random() % 40;
      const uint64_t expected = pool->committed() + pool->GrowthFor(n);
      for (uint64_t j = 0; j < n; ++j) slots.push_back(pool->Take());
      ASSERT_EQ(pool->committed(), expected);
    } else {
      const size_t pick = random() % slots.size();
      pool->Give(slots[pick]);
      slots.erase(slots.begin() + static_cast<std::ptrdiff_t>(pick));
    }
    ASSERT_EQ(pool->used_slots(), slots.size());
  }
  ASSERT_EQ(std::set<Slot>(slots.begin(), slots.end()).size(), slots.size());
  for (const Slot slot : slots) pool->Give(slot);
  EXPECT_EQ(pool->committed(), 0u);
}

// Resident pages of a range, as the kernel sees them.
size_t ResidentBytes(std::byte* begin, size_t bytes) {
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  std::vector<unsigned char> in_core((bytes + page - 1) / page);
  if (mincore(begin, bytes, in_core.data()) != 0) return SIZE_MAX;
  size_t resident = 0;
  for (const unsigned char c : in_core) resident += (c & 1) * page;
  return resident;
}

TEST(SlotPool, PagesGoBackToTheSystem) {
  auto pool = SlotPool::Create(4096, 128 << 10, 8 << 20).value();
  std::vector<Slot> slots;
  for (int i = 0; i < 256; ++i) slots.push_back(pool->Take());
  std::byte* base = pool->at(slots[0]);
  for (const Slot slot : slots) std::memset(pool->at(slot), 1, 4096);
  EXPECT_EQ(ResidentBytes(base, 1 << 20), size_t{1} << 20);
  for (const Slot slot : slots) pool->Give(slot);
  EXPECT_EQ(ResidentBytes(base, 1 << 20), 0u);
}

TEST(SlotPool, WhatIsSetAsideStays) {
  auto pool = SlotPool::Create(4096, 128 << 10, 8 << 20).value();
  pool->SetAside(40);
  const uint64_t set_aside = pool->committed();
  EXPECT_EQ(set_aside, BytesForSlots(MakeChunkShape(4096, 128 << 10), 40));
  const Slot slot = pool->Take();
  EXPECT_EQ(pool->committed(), set_aside);
  pool->Give(slot);
  EXPECT_EQ(pool->committed(), set_aside);
}

TEST(SlotPool, PastTheReservedRangeThereIsNoSlot) {
  auto pool = SlotPool::Create(4096, 64 << 10, 64 << 10).value();
  for (int i = 0; i < 16; ++i) EXPECT_NE(pool->Take(), kNoSlot);
  EXPECT_EQ(pool->Take(), kNoSlot);
}

TEST(SlotPool, AnImpossibleRangeIsAnError) {
  auto pool = SlotPool::Create(4096, 64 << 10, uint64_t{1} << 62);
  ASSERT_FALSE(pool);
  EXPECT_EQ(pool.error().code(), StatusCode::kIoError);
}

}  // namespace
}  // namespace kvcell
