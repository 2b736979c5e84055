// GPU memory as NVIDIA's management library tells it. The library is loaded when first asked; a machine without it has
// no GPU as far as kvcell is concerned.
#pragma once

#include <cstdint>
#include <optional>

namespace kvcell {

struct GpuMemory {
  uint64_t total = 0;
  uint64_t free = 0;
  uint64_t used = 0;
};
// Of the device that has least free. Thread-safe.
std::optional<GpuMemory> ProbeGpuMemory();

}  // namespace kvcell
