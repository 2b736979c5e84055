#include "base/mapped_file.h"

#include <fmt/format.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <mutex>

namespace kvcell {
namespace {

constexpr size_t kMostMappings = 4096;

// What the handler may look at: nothing but these atomics. `begin` is 0 where the slot is free, and written last.
struct MappedRange {
  std::atomic<uintptr_t> begin{0};
  std::atomic<uintptr_t> end{0};
  std::atomic<bool> lost{false};
};
std::array<MappedRange, kMostMappings> ranges;
static_assert(std::atomic<uintptr_t>::is_always_lock_free && std::atomic<bool>::is_always_lock_free);

std::mutex slots_mutex;
struct sigaction previous = {};

bool ReplaceByZeros(uintptr_t address) noexcept {
  for (MappedRange& range : ranges) {
    const uintptr_t begin = range.begin.load(std::memory_order_acquire);
    const uintptr_t end = range.end.load(std::memory_order_acquire);
    if (begin == 0 || address < begin || address >= end) continue;
    // Known before the first zero can be read.
    range.lost.store(true, std::memory_order_seq_cst);
    return ::mmap(reinterpret_cast<void*>(begin), end - begin, PROT_READ,
                  MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0) != MAP_FAILED;
  }
  return false;
}

void OnBusError(int signal, siginfo_t* info, void* context) noexcept {
  const int saved = errno;
  const bool from_kernel = info->si_code > 0;  // else another process sent it, and si_addr means nothing
  if (from_kernel && ReplaceByZeros(reinterpret_cast<uintptr_t>(info->si_addr))) {
    errno = saved;
    return;
  }
  if ((previous.sa_flags & SA_SIGINFO) != 0) {
    previous.sa_sigaction(signal, info, context);
  } else if (previous.sa_handler != SIG_DFL && previous.sa_handler != SIG_IGN) {
    previous.sa_handler(signal);
  } else if (from_kernel || previous.sa_handler == SIG_DFL) {
    // The read is tried again, or the signal comes again, and nobody is there to catch it.
    ::signal(signal, SIG_DFL);
    if (!from_kernel) (void)::raise(signal);
  }
  errno = saved;
}

void InstallHandler() {
  struct sigaction action = {};
  action.sa_sigaction = OnBusError;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_RESTART;
  ::sigemptyset(&action.sa_mask);
  (void)::sigaction(SIGBUS, nullptr, &previous);  // before the handler can run
  (void)::sigaction(SIGBUS, &action, nullptr);
}

}  // namespace

Result<std::unique_ptr<MappedFile>> MappedFile::Map(const File& file, uint64_t bytes) {
  static std::once_flag installed;
  std::call_once(installed, InstallHandler);
  if (bytes == 0) return Fail(StatusCode::kInvalidArgument, fmt::format("{} can't be mapped: no bytes", file.path()));
  const std::lock_guard lock(slots_mutex);
  size_t slot = 0;
  while (slot < ranges.size() && ranges[slot].begin.load(std::memory_order_relaxed) != 0) ++slot;
  if (slot == ranges.size()) {
    return Fail(StatusCode::kUnsupported,
                fmt::format("{} can't be mapped: {} files are; read it instead", file.path(), kMostMappings));
  }
  void* start = ::mmap(nullptr, bytes, PROT_READ, MAP_SHARED, file.fd(), 0);
  if (start == MAP_FAILED) return Fail(ErrnoStatus(errno, "map", file.path()));
  const auto begin = reinterpret_cast<uintptr_t>(start);
  ranges[slot].lost.store(false, std::memory_order_relaxed);
  ranges[slot].end.store(begin + bytes, std::memory_order_relaxed);
  ranges[slot].begin.store(begin, std::memory_order_release);
  return std::unique_ptr<MappedFile>(new MappedFile({static_cast<const std::byte*>(start), bytes}, slot));
}

MappedFile::~MappedFile() {
  const std::lock_guard lock(slots_mutex);
  ranges[slot_].begin.store(0, std::memory_order_release);
  (void)::munmap(const_cast<std::byte*>(bytes_.data()), bytes_.size());
}

bool MappedFile::lost() const {
  // Behind the reads that the caller asks about: the handler ran in their thread, before what follows them.
  std::atomic_signal_fence(std::memory_order_seq_cst);
  return ranges[slot_].lost.load(std::memory_order_seq_cst);
}

}  // namespace kvcell
