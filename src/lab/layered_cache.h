// Caches that attend different layers: how a probe gives every layer a codec of its own, another one for each trial.
#pragma once

#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "lab/forwarding_cache.h"

namespace kvcell {

// Several caches of one geometry that are driven as one: layer l is appended to and attended in cache choice[l] alone.
// Sequences are created, fed and freed in all of them; nothing else is asked of it. Memory for all layers is set aside
// in each.
class LayeredCache final : public ForwardingCache {
 public:
  LayeredCache(std::vector<std::unique_ptr<Cache>> caches, std::vector<size_t> choice)
      : ForwardingCache(caches.front().get()), caches_(std::move(caches)), choice_(std::move(choice)) {}

  // For sequences created from now on.
  void SetChoice(std::vector<size_t> choice) { choice_ = std::move(choice); }

  Result<SequenceId> Create() override {
    Result<SequenceId> first = caches_.front()->Create();
    for (size_t c = 1; first && c < caches_.size(); ++c) {
      const auto other = caches_[c]->Create();
      if (!other) return Fail(other.error());
      if (*other != *first) return Fail(StatusCode::kInternal, "layered caches number their sequences differently");
    }
    return first;
  }
  Status Free(SequenceId sequence) override {
    for (auto& cache : caches_) KVCELL_RETURN_IF_ERROR(cache->Free(sequence));
    return OkStatus();
  }
  Status Begin(std::span<const StepItem> items) override {
    for (size_t c = 0; c < caches_.size(); ++c) {
      if (Status status = caches_[c]->Begin(items); !status.ok()) {
        while (c-- > 0) caches_[c]->Abort();
        return status;
      }
    }
    return OkStatus();
  }
  void Compute(int layer, const float* k, const float* v, const float* q, float* out, int part,
               int n_parts) noexcept override {
    caches_[choice_[static_cast<size_t>(layer)]]->Compute(layer, k, v, q, out, part, n_parts);
  }
  Status Commit() override {
    for (auto& cache : caches_) KVCELL_RETURN_IF_ERROR(cache->Commit());
    return OkStatus();
  }
  void Abort() override {
    for (auto& cache : caches_) cache->Abort();
  }

 private:
  std::vector<std::unique_ptr<Cache>> caches_;
  std::vector<size_t> choice_;
};

}  // namespace kvcell
