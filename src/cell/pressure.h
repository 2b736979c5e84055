// What the machine still has free, sampled off the token path: host memory, this process's cgroup (v1, v2), and the GPU
// where there is one.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>
#include <thread>

#include "cell/state_machine.h"

namespace kvcell {

struct MemorySample {
  uint64_t host_free = 0;
  std::optional<uint64_t> cgroup_free;
  std::optional<uint64_t> gpu_free;
  uint64_t least() const;
};
using MemoryProbe = std::function<MemorySample()>;

// The real one. Where something can't be read, it counts as plenty.
MemorySample ProbeFreeMemory();

// Samples four times a second on a thread of its own. Thread-safe.
class PressureSampler {
 public:
  // Below min_free bytes pressure is hard, below twice as much soft.
  PressureSampler(MemoryProbe probe, uint64_t min_free, std::chrono::milliseconds interval);
  ~PressureSampler();
  PressureSampler(const PressureSampler&) = delete;
  PressureSampler& operator=(const PressureSampler&) = delete;

  Pressure pressure() const { return static_cast<Pressure>(level_.load(std::memory_order_relaxed)); }
  uint64_t samples() const { return samples_.load(std::memory_order_relaxed); }

 private:
  void Sample();
  void Loop();

  MemoryProbe probe_;
  uint64_t min_free_;
  std::chrono::milliseconds interval_;
  std::atomic<int> level_{0};
  std::atomic<uint64_t> samples_{0};
  std::mutex mutex_;
  std::condition_variable wake_;
  bool stop_ = false;
  std::thread thread_;
};

}  // namespace kvcell
