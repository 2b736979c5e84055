// A cache that lets another one do everything: what caches of the lab that look at a step, or deal it out, are made of.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "kvcell/cache.h"

namespace kvcell {

class ForwardingCache : public Cache {
 public:
  // `cache` must live as long as this.
  explicit ForwardingCache(Cache* cache) : cache_(cache) {}

  const CacheOptions& options() const override { return cache_->options(); }
  Result<SequenceId> Create() override { return cache_->Create(); }
  Result<SequenceId> Fork(SequenceId parent) override { return cache_->Fork(parent); }
  Status Free(SequenceId sequence) override { return cache_->Free(sequence); }
  Result<int64_t> Trim(SequenceId sequence, int64_t length) override { return cache_->Trim(sequence, length); }
  Result<int64_t> CutToSound(SequenceId sequence, std::string* note) override {
    return cache_->CutToSound(sequence, note);
  }
  int64_t Length(SequenceId sequence) const override { return cache_->Length(sequence); }
  std::span<const Token> Tokens(SequenceId sequence) const override { return cache_->Tokens(sequence); }
  Result<PrefixUse> Reuse(SequenceId sequence, std::span<const Token> tokens) override {
    return cache_->Reuse(sequence, tokens);
  }
  Status Publish(SequenceId sequence) override { return cache_->Publish(sequence); }
  int64_t Room() const override { return cache_->Room(); }
  Status Begin(std::span<const StepItem> items) override { return cache_->Begin(items); }
  void Compute(int layer, const float* k, const float* v, const float* q, float* out, int part,
               int n_parts) noexcept override {
    cache_->Compute(layer, k, v, q, out, part, n_parts);
  }
  Status Append(int layer, const float* k, const float* v) override { return cache_->Append(layer, k, v); }
  Status Attend(int layer, const float* q, float* out) override { return cache_->Attend(layer, q, out); }
  Status Commit() override { return cache_->Commit(); }
  void Abort() override { cache_->Abort(); }
  using Cache::Save;
  Status Save(SequenceId sequence, const std::string& name, std::span<const float> logits, const std::string& extras,
              std::optional<uint8_t> durability) override {
    return cache_->Save(sequence, name, logits, extras, durability);
  }
  Status BeginSave(SequenceId sequence, const std::string& name, std::span<const float> logits,
                   const std::string& extras, std::optional<uint8_t> durability) override {
    return cache_->BeginSave(sequence, name, logits, extras, durability);
  }
  Status FinishSave() override { return cache_->FinishSave(); }
  Result<OpenedSession> OpenSession(const std::string& name, bool create) override {
    return cache_->OpenSession(name, create);
  }
  Status SetRules(std::shared_ptr<const Rules> rules) override { return cache_->SetRules(std::move(rules)); }
  Status Pin(SequenceId sequence, bool pinned) override { return cache_->Pin(sequence, pinned); }
  Status Persist(SequenceId sequence) override { return cache_->Persist(sequence); }
  Status Evict(SequenceId sequence, int64_t begin, int64_t end) override { return cache_->Evict(sequence, begin, end); }
  Status Settle() override { return cache_->Settle(); }
  CacheStats Stats() const override { return cache_->Stats(); }
  std::vector<TransitionCount> Transitions() const override { return cache_->Transitions(); }
  std::string Trace() const override { return cache_->Trace(); }
  std::vector<CellInfo> Inspect(SequenceId sequence) const override { return cache_->Inspect(sequence); }

 private:
  Cache* cache_;
};

}  // namespace kvcell
