// A tier in the memory of this process that can be made slow, failing and lying.
#pragma once

#include <atomic>
#include <chrono>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "kvcell/tier.h"

namespace kvcell {

class MemoryTier : public CellTier {
 public:
  // What goes wrong from now on.
  struct Faults {
    std::chrono::microseconds delay{0};  // of every call
    StatusCode create = StatusCode::kOk;
    StatusCode read = StatusCode::kOk;
    bool corrupt = false;  // one bit of every cell that is read
  };

  void Set(const Faults& faults) {
    const std::lock_guard lock(mutex_);
    faults_ = faults;
  }
  size_t blocks() const {
    const std::lock_guard lock(mutex_);
    return cells_.size();
  }
  int64_t reads() const { return reads_; }
  int64_t damage_reports() const { return damage_reports_; }

  std::string_view TierName() const override { return "test"; }

  Result<std::vector<BlockPlace>> CreateCells(const CellSetShape& shape, uint32_t n_blocks,
                                              const CellSource& cell) override {
    const Faults faults = Wait();
    if (faults.create != StatusCode::kOk) return Fail(faults.create, "the test tier creates nothing");
    std::vector<std::vector<std::vector<std::byte>>> made(n_blocks);  // [block][slot] cells of all heads
    for (size_t slot = 0; slot < shape.layers.size(); ++slot) {
      for (uint32_t b = 0; b < n_blocks; ++b) {
        std::vector<std::byte> bytes;
        for (uint16_t h = 0; h < shape.layers[slot].n_cells; ++h) {
          const std::byte* from = cell(slot, b, h);
          bytes.insert(bytes.end(), from, from + shape.layers[slot].cell_bytes);
        }
        made[b].push_back(std::move(bytes));
      }
    }
    const std::lock_guard lock(mutex_);
    std::vector<BlockPlace> places;
    const uint64_t extent = ++last_extent_;
    for (uint32_t b = 0; b < n_blocks; ++b) {
      places.push_back({.segment = 0, .offset = extent, .n_blocks = n_blocks, .index = b});
      cells_[{extent, b}] = std::move(made[b]);
    }
    return places;
  }

  void DestroyCells(const BlockPlace& place) override {
    const std::lock_guard lock(mutex_);
    cells_.erase({place.offset, place.index});
  }

  Status ReadCells(const CellSetShape& shape, const BlockPlace& place, size_t layer_slot, uint16_t head_begin,
                   uint16_t n, std::byte* dst) override {
    const Faults faults = Wait();
    ++reads_;
    if (faults.read != StatusCode::kOk) return Status(faults.read, "the test tier reads nothing");
    const std::lock_guard lock(mutex_);
    const auto found = cells_.find({place.offset, place.index});
    if (found == cells_.end()) return Status(StatusCode::kCorruption, "the test tier has no such block");
    const size_t bytes = shape.layers[layer_slot].cell_bytes;
    std::memcpy(dst, found->second[layer_slot].data() + head_begin * bytes, n * bytes);
    if (faults.corrupt) dst[bytes / 2] ^= std::byte{1};
    return OkStatus();
  }

  Status ReadRun(const CellSetShape& shape, const BlockPlace& place, size_t layer_slot, uint32_t n_blocks,
                 std::byte* dst) override {
    const auto& layer = shape.layers[layer_slot];
    for (uint32_t b = 0; b < n_blocks; ++b) {
      BlockPlace at = place;
      at.index += b;
      KVCELL_RETURN_IF_ERROR(ReadCells(shape, at, layer_slot, 0, layer.n_cells,
                                       dst + static_cast<size_t>(b) * layer.n_cells * layer.cell_bytes));
    }
    return OkStatus();
  }

  void ReportDamage(const BlockPlace&) override { ++damage_reports_; }

  std::pair<std::string, uint64_t> Locate(const CellSetShape&, const BlockPlace& place, size_t,
                                          uint16_t) const override {
    return {"test tier", place.offset};
  }

 private:
  Faults Wait() const {
    Faults faults;
    {
      const std::lock_guard lock(mutex_);
      faults = faults_;
    }
    if (faults.delay.count() > 0) std::this_thread::sleep_for(faults.delay);
    return faults;
  }

  mutable std::mutex mutex_;
  Faults faults_;
  uint64_t last_extent_ = 0;
  std::map<std::pair<uint64_t, uint32_t>, std::vector<std::vector<std::byte>>> cells_;
  std::atomic<int64_t> reads_{0}, damage_reports_{0};
};

}  // namespace kvcell
