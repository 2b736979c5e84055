// Caches that attend different layers: how a probe gives every layer a codec of its own, another one for each trial.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "kvcell/cache.h"

namespace kvcell {

// Several caches of one geometry that are driven as one: layer l is appended to and attended in cache choice[l] alone.
// One sequence, created in all of them at once. Memory for all layers is set aside in each.
class LayeredCache final : public Cache {
 public:
  LayeredCache(std::vector<std::unique_ptr<Cache>> caches, std::vector<size_t> choice)
      : caches_(std::move(caches)), choice_(std::move(choice)) {}

  // Takes effect for sequences created from now on.
  void SetChoice(std::vector<size_t> choice) { choice_ = std::move(choice); }

  const CacheOptions& options() const override { return caches_.front()->options(); }
  Result<SequenceId> Create() override {
    Result<SequenceId> first = caches_.front()->Create();
    for (size_t c = 1; first && c < caches_.size(); ++c) {
      const auto other = caches_[c]->Create();
      if (!other) return Fail(other.error());
      if (*other != *first) return Fail(StatusCode::kInternal, "layered caches number their sequences differently");
    }
    return first;
  }
  Result<SequenceId> Fork(SequenceId) override { return Fail(StatusCode::kUnsupported, "layered caches do not fork"); }
  Status Free(SequenceId sequence) override {
    return All([&](Cache* cache) { return cache->Free(sequence); });
  }
  Result<int64_t> Trim(SequenceId, int64_t) override {
    return Fail(StatusCode::kUnsupported, "layered caches do not trim");
  }
  int64_t Length(SequenceId sequence) const override { return caches_.front()->Length(sequence); }
  std::span<const Token> Tokens(SequenceId sequence) const override { return caches_.front()->Tokens(sequence); }
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
  Status Append(int layer, const float* k, const float* v) override {
    return caches_[choice_[static_cast<size_t>(layer)]]->Append(layer, k, v);
  }
  Status Attend(int layer, const float* q, float* out) override {
    return caches_[choice_[static_cast<size_t>(layer)]]->Attend(layer, q, out);
  }
  Status Commit() override {
    return All([](Cache* cache) { return cache->Commit(); });
  }
  void Abort() override {
    for (auto& cache : caches_) cache->Abort();
  }
  Status Save(SequenceId, const std::string&, std::span<const float>, const std::string&) override {
    return Status(StatusCode::kUnsupported, "layered caches are not saved");
  }
  Result<OpenedSession> OpenSession(const std::string&) override {
    return Fail(StatusCode::kUnsupported, "layered caches are not saved");
  }
  CacheStats Stats() const override { return caches_.front()->Stats(); }
  std::vector<CellInfo> Inspect(SequenceId sequence) const override { return caches_.front()->Inspect(sequence); }

 private:
  template <typename Function>
  Status All(const Function& function) {
    for (auto& cache : caches_) KVCELL_RETURN_IF_ERROR(function(cache.get()));
    return OkStatus();
  }

  std::vector<std::unique_ptr<Cache>> caches_;
  std::vector<size_t> choice_;
};

}  // namespace kvcell
