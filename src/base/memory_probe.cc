#include "base/memory_probe.h"

#include <fmt/format.h>
#include <sys/resource.h>

#include <algorithm>
#include <charconv>
#include <fstream>
#include <limits>
#include <sstream>
#include <string>
#include <string_view>

namespace kvcell {
namespace {

std::optional<std::string> ReadSmallFile(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  if (!in) return std::nullopt;
  std::ostringstream text;
  text << in.rdbuf();
  if (in.bad()) return std::nullopt;
  return std::move(text).str();
}

std::optional<uint64_t> Number(std::string_view text) {
  const size_t start = text.find_first_not_of(" \t");
  if (start == std::string_view::npos) return std::nullopt;
  uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data() + start, text.data() + text.size(), value);
  if (error != std::errc()) return std::nullopt;
  return value;
}

// The value of a line `Name:   123 kB`, in bytes.
std::optional<uint64_t> KilobyteField(std::string_view text, std::string_view name) {
  for (size_t at = 0; at < text.size();) {
    const size_t end = std::min(text.find('\n', at), text.size());
    const std::string_view line = text.substr(at, end - at);
    if (line.size() > name.size() && line.starts_with(name) && line[name.size()] == ':') {
      const auto value = Number(line.substr(name.size() + 1));
      if (!value || *value > std::numeric_limits<uint64_t>::max() / 1024) return std::nullopt;
      return *value * 1024;
    }
    at = end + 1;
  }
  return std::nullopt;
}

// The smallest limit from `path` up to the mount at `root`; "max" (v2) and absurd numbers (v1) stand for none.
std::optional<CgroupMemory> SmallestLimit(const std::string& root, std::string path, const char* limit_name,
                                          const char* used_name) {
  std::optional<CgroupMemory> best;
  for (;;) {
    const std::string folder = root + path;
    const auto limit_text = ReadSmallFile(folder + "/" + limit_name);
    const auto used_text = ReadSmallFile(folder + "/" + used_name);
    const auto limit = limit_text ? Number(*limit_text) : std::nullopt;
    const auto used = used_text ? Number(*used_text) : std::nullopt;
    if (limit && used && *limit < (uint64_t{1} << 60) && (!best || *limit < best->limit))
      best = CgroupMemory{*limit, *used};
    if (path.empty() || path == "/") return best;
    const size_t slash = path.rfind('/');
    path.resize(slash == std::string::npos ? 0 : slash);
  }
}

// This process's group in a hierarchy: the path of the line `N:<controllers>:<path>` that has the controller ("" for
// v2).
std::optional<std::string> GroupPath(std::string_view groups, std::string_view controller) {
  std::istringstream lines{std::string(groups)};
  for (std::string line; std::getline(lines, line);) {
    const size_t first = line.find(':');
    const size_t second = first == std::string::npos ? first : line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = fmt::format(",{},", line.substr(first + 1, second - first - 1));
    if (controllers == fmt::format(",{},", controller) ||
        (!controller.empty() && controllers.find(fmt::format(",{},", controller)) != std::string::npos)) {
      return line.substr(second + 1);
    }
  }
  return std::nullopt;
}

}  // namespace

Result<ProcessMemory> ProbeProcessMemory() {
  const auto status = ReadSmallFile("/proc/self/status");
  if (!status)
    return Fail(StatusCode::kIoError, "cannot read /proc/self/status: mount /proc to see this process's memory");
  ProcessMemory memory;
  memory.resident = KilobyteField(*status, "VmRSS").value_or(0);
  memory.anonymous = KilobyteField(*status, "RssAnon").value_or(0);
  memory.peak_resident = KilobyteField(*status, "VmHWM").value_or(0);
  // The roll-up is exact where the counters above may lag by some pages per thread.
  if (const auto rollup = ReadSmallFile("/proc/self/smaps_rollup")) {
    memory.resident = KilobyteField(*rollup, "Rss").value_or(memory.resident);
    memory.anonymous = KilobyteField(*rollup, "Anonymous").value_or(memory.anonymous);
  }
  return memory;
}

Result<SystemMemory> ProbeSystemMemory() {
  const auto info = ReadSmallFile("/proc/meminfo");
  const auto total = info ? KilobyteField(*info, "MemTotal") : std::nullopt;
  const auto available = info ? KilobyteField(*info, "MemAvailable") : std::nullopt;
  if (!total || !available) {
    return Fail(StatusCode::kIoError, "cannot read /proc/meminfo: mount /proc to see the machine's memory");
  }
  return SystemMemory{*total, *available};
}

DiskReads ProbeDiskReads() {
  constexpr uint64_t kBlock = 512;  // of ru_inblock, whatever the disk has
  struct rusage usage = {};
  (void)::getrusage(RUSAGE_SELF, &usage);
  return {usage.ru_majflt, static_cast<uint64_t>(usage.ru_inblock) * kBlock};
}

std::optional<CgroupMemory> ProbeCgroupMemory() {
  const auto groups = ReadSmallFile("/proc/self/cgroup");
  if (!groups) return std::nullopt;
  if (const auto path = GroupPath(*groups, "")) {
    for (const char* root : {"/sys/fs/cgroup", "/sys/fs/cgroup/unified"}) {
      if (auto found = SmallestLimit(root, *path, "memory.max", "memory.current")) return found;
      if (auto found = SmallestLimit(root, "", "memory.max", "memory.current")) return found;  // inside a container
    }
  }
  if (const auto path = GroupPath(*groups, "memory")) {
    const char* root = "/sys/fs/cgroup/memory";
    if (auto found = SmallestLimit(root, *path, "memory.limit_in_bytes", "memory.usage_in_bytes")) return found;
    if (auto found = SmallestLimit(root, "", "memory.limit_in_bytes", "memory.usage_in_bytes")) return found;
  }
  return std::nullopt;
}

}  // namespace kvcell
