// What memory this process and this machine really have, and what was read from disks, as the kernel tells it: for
// budgets, stats and tests.
#pragma once

#include <cstdint>
#include <optional>

#include "kvcell/status.h"

namespace kvcell {

struct ProcessMemory {
  uint64_t resident = 0;       // Rss: all pages in RAM, file pages included
  uint64_t anonymous = 0;      // its part that no file backs: heap, stacks, arenas
  uint64_t peak_resident = 0;  // VmHWM
};
// From /proc/self; kIoError where that can't be read.
Result<ProcessMemory> ProbeProcessMemory();

struct SystemMemory {
  uint64_t total = 0;
  uint64_t available = 0;  // what a new allocation could get without swapping
};
Result<SystemMemory> ProbeSystemMemory();

// What this process has had to wait for a disk for, so far.
struct DiskReads {
  int64_t major_faults = 0;  // pages of mapped files
  uint64_t bytes = 0;
};
DiskReads ProbeDiskReads();

struct CgroupMemory {
  uint64_t limit = 0;  // the smallest of this group's and its parents'
  uint64_t used = 0;   // of the group that has this limit
};
// The memory cgroup's limit (v2, else v1); nothing where there is none.
std::optional<CgroupMemory> ProbeCgroupMemory();

}  // namespace kvcell
