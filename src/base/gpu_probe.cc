#include "base/gpu_probe.h"

#include <dlfcn.h>

namespace kvcell {
namespace {

// The few entry points of NVML that are needed, with the ABI that its header has had since version 2.
struct NvmlMemory {
  unsigned long long total, free, used;
};
using Device = void*;

class Nvml {
 public:
  Nvml() {
    library_ = dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);
    if (library_ == nullptr) return;
    Load("nvmlInit_v2", &init_);
    Load("nvmlDeviceGetCount_v2", &count_);
    Load("nvmlDeviceGetHandleByIndex_v2", &handle_);
    Load("nvmlDeviceGetMemoryInfo", &memory_);
    ready_ = init_ != nullptr && count_ != nullptr && handle_ != nullptr && memory_ != nullptr && init_() == 0;
  }

  std::optional<GpuMemory> Least() const {
    unsigned devices = 0;
    if (!ready_ || count_(&devices) != 0) return std::nullopt;
    std::optional<GpuMemory> least;
    for (unsigned i = 0; i < devices; ++i) {
      Device device = nullptr;
      NvmlMemory memory{};
      if (handle_(i, &device) != 0 || memory_(device, &memory) != 0) continue;
      if (!least || memory.free < least->free) least = GpuMemory{memory.total, memory.free, memory.used};
    }
    return least;
  }

 private:
  template <typename F>
  void Load(const char* name, F* function) {
    *function = reinterpret_cast<F>(dlsym(library_, name));
  }

  void* library_ = nullptr;
  bool ready_ = false;
  int (*init_)() = nullptr;
  int (*count_)(unsigned*) = nullptr;
  int (*handle_)(unsigned, Device*) = nullptr;
  int (*memory_)(Device, NvmlMemory*) = nullptr;
};

}  // namespace

std::optional<GpuMemory> ProbeGpuMemory() {
  static const Nvml nvml;  // never unloaded: the driver keeps threads of its own
  return nvml.Least();
}

}  // namespace kvcell
