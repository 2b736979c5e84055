#include "cell/pressure.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "base/gpu_probe.h"
#include "base/memory_probe.h"

namespace kvcell {

uint64_t MemorySample::least() const {
  return std::min({host_free, cgroup_free.value_or(std::numeric_limits<uint64_t>::max()),
                   gpu_free.value_or(std::numeric_limits<uint64_t>::max())});
}

MemorySample ProbeFreeMemory() {
  MemorySample sample;
  const auto host = ProbeSystemMemory();
  sample.host_free = host ? host->available : std::numeric_limits<uint64_t>::max();
  if (const auto group = ProbeCgroupMemory()) {
    sample.cgroup_free = group->limit > group->used ? group->limit - group->used : 0;
  }
  if (const auto gpu = ProbeGpuMemory()) sample.gpu_free = gpu->free;
  return sample;
}

PressureSampler::PressureSampler(MemoryProbe probe, uint64_t min_free, std::chrono::milliseconds interval)
    : probe_(std::move(probe)), min_free_(min_free), interval_(interval) {
  Sample();
  thread_ = std::thread([this] { Loop(); });
}

PressureSampler::~PressureSampler() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  wake_.notify_all();
  thread_.join();
}

void PressureSampler::Sample() {
  const uint64_t free = probe_().least();
  const Pressure level = free < min_free_ ? Pressure::kHard : free / 2 < min_free_ ? Pressure::kSoft : Pressure::kNone;
  level_.store(static_cast<int>(level), std::memory_order_relaxed);
  samples_.fetch_add(1, std::memory_order_relaxed);
}

void PressureSampler::Loop() {
  std::unique_lock lock(mutex_);
  while (!wake_.wait_for(lock, interval_, [&] { return stop_; })) {
    lock.unlock();
    Sample();
    lock.lock();
  }
}

}  // namespace kvcell
