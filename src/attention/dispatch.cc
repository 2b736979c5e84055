// Chooses the kernels at run time: best instruction set first, KVCELL_ISA or UseAttentionIsa to force one.
#include "attention/dispatch.h"

#include <fmt/format.h>

#include <atomic>
#include <cstdlib>
#include <string>

#include "attention/attention.h"

namespace kvcell {
namespace attention_internal {

std::span<const KernelSet* const> CompiledKernels() {
  static const KernelSet* const compiled[] = {
#if defined(__x86_64__)
    &Avx512VnniKernels(),
    &Avx512Kernels(),
    &Avx2Kernels(),
#endif
#if defined(KVCELL_NEON)
    &NeonKernels(),
#endif
    &ScalarKernels(),
  };
  return compiled;
}

namespace {

const KernelSet* Find(std::string_view name) {
  for (const KernelSet* kernels : CompiledKernels()) {
    if (kernels->name == name && kernels->available()) return kernels;
  }
  return nullptr;
}

const KernelSet* Best() {
  for (const KernelSet* kernels : CompiledKernels()) {
    if (kernels->available()) return kernels;
  }
  return &ScalarKernels();
}

const char* Forced() { return std::getenv("KVCELL_ISA"); }

const KernelSet* Choose() {
  const char* forced = Forced();
  const KernelSet* kernels = forced != nullptr ? Find(forced) : nullptr;
  return kernels != nullptr ? kernels : Best();
}

std::atomic<const KernelSet*>& Active() {
  static std::atomic<const KernelSet*> active = Choose();
  return active;
}

Status Lacking(std::string_view what, std::string_view isa) {
  std::string found;
  for (const std::string_view name : AttentionIsasFound()) found.append(found.empty() ? "" : ", ").append(name);
  return Status(StatusCode::kUnsupported,
                fmt::format("{}: instruction set '{}' is not available here; this machine has {}", what, isa, found));
}

}  // namespace

const KernelSet& ActiveKernels() { return *Active().load(std::memory_order_acquire); }

}  // namespace attention_internal

using namespace attention_internal;

std::string_view AttentionIsa() { return ActiveKernels().name; }

std::vector<std::string_view> AttentionIsasFound() {
  std::vector<std::string_view> found;
  for (const KernelSet* kernels : CompiledKernels()) {
    if (kernels->available()) found.push_back(kernels->name);
  }
  return found;
}

Status CheckForcedIsa() {
  const char* forced = Forced();
  if (forced == nullptr || Find(forced) != nullptr) return OkStatus();
  return Lacking("KVCELL_ISA", forced);
}

Status UseAttentionIsa(std::string_view isa) {
  const KernelSet* kernels = Find(isa);
  if (kernels == nullptr) return Lacking("attention", isa);
  Active().store(kernels, std::memory_order_release);
  return OkStatus();
}

}  // namespace kvcell
