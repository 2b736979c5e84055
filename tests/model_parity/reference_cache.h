// The oracle: a Cache that keeps K and V as plain rows, exactly (f32) or rounded once (f16), and attends by the
// definition.
#pragma once

#include <ggml.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "kvcell/cache.h"

namespace kvcell {

class ReferenceCache final : public Cache {
 public:
  enum class Precision { kF32, kF16 };

  ReferenceCache(Geometry geometry, Precision precision) : precision_(precision) {
    options_.geometry = std::move(geometry);
    options_.max_sequences = 1 << 20;
  }

  const CacheOptions& options() const override { return options_; }

  Result<SequenceId> Create() override {
    const SequenceId id = next_++;
    sequences_[id].layers.resize(options_.geometry.size());
    return id;
  }
  Result<SequenceId> Fork(SequenceId parent) override {
    const SequenceId id = next_++;
    sequences_[id] = sequences_.at(parent);
    return id;
  }
  Status Free(SequenceId sequence) override {
    sequences_.erase(sequence);
    return OkStatus();
  }
  Result<int64_t> Trim(SequenceId sequence, int64_t length) override {
    Sequence& s = sequences_.at(sequence);
    Cut(&s, static_cast<size_t>(length));
    return length;
  }
  int64_t Length(SequenceId sequence) const override {
    return static_cast<int64_t>(sequences_.at(sequence).tokens.size());
  }
  std::span<const Token> Tokens(SequenceId sequence) const override { return sequences_.at(sequence).tokens; }

  Status Begin(std::span<const StepItem> items) override {
    if (fail_begin) return {StatusCode::kOutOfBudget, "the test wants Begin to fail"};
    step_.clear();
    for (const StepItem& item : items) {
      Sequence& s = sequences_.at(item.sequence);
      step_.push_back({&s, s.tokens.size(), item.tokens});
      for (size_t i = 0; i < s.layers.size(); ++i) {
        const LayerGeometry& g = options_.geometry[i];
        const size_t length = s.tokens.size() + item.tokens.size();
        s.layers[i].k.resize(length * static_cast<size_t>(g.n_kv_heads * g.head_dim_k));
        s.layers[i].v.resize(length * static_cast<size_t>(g.n_kv_heads * g.head_dim_v));
      }
    }
    return OkStatus();
  }

  // KV heads are dealt to the parts, each with its query heads: no part waits for another.
  void Compute(int layer, const float* k, const float* v, const float* q, float* out, int part,
               int n_parts) noexcept override {
    const LayerGeometry& g = options_.geometry[static_cast<size_t>(layer)];
    for (int h = part; h < g.n_kv_heads; h += n_parts) {
      AppendHead(layer, h, k, v);
      AttendHead(layer, h, q, out);
    }
  }
  Status Append(int layer, const float* k, const float* v) override {
    for (int h = 0; h < options_.geometry[static_cast<size_t>(layer)].n_kv_heads; ++h) AppendHead(layer, h, k, v);
    return OkStatus();
  }
  Status Attend(int layer, const float* q, float* out) override {
    for (int h = 0; h < options_.geometry[static_cast<size_t>(layer)].n_kv_heads; ++h) AttendHead(layer, h, q, out);
    return OkStatus();
  }
  Status Commit() override {
    if (fail_commit) {
      Abort();
      return {StatusCode::kIoError, "the test wants Commit to fail"};
    }
    for (const Item& item : step_)
      item.sequence->tokens.insert(item.sequence->tokens.end(), item.tokens.begin(), item.tokens.end());
    step_.clear();
    return OkStatus();
  }
  void Abort() override {
    for (const Item& item : step_) Cut(item.sequence, item.first);
    step_.clear();
  }

  Result<PrefixUse> Reuse(SequenceId, std::span<const Token>) override { return PrefixUse{}; }
  Status Publish(SequenceId) override { return {StatusCode::kUnsupported, "the reference cache has no store"}; }
  int64_t Room() const override { return std::numeric_limits<int64_t>::max(); }

  Result<int64_t> CutToSound(SequenceId sequence, std::string*) override { return Length(sequence); }
  Status Save(SequenceId, const std::string&, std::span<const float>, const std::string&,
              std::optional<uint8_t>) override {
    return {StatusCode::kUnsupported, "the reference cache has no store"};
  }
  Status BeginSave(SequenceId, const std::string&, std::span<const float>, const std::string&,
                   std::optional<uint8_t>) override {
    return {StatusCode::kUnsupported, "the reference cache has no store"};
  }
  Status FinishSave() override { return OkStatus(); }
  Result<OpenedSession> OpenSession(const std::string&, bool) override {
    return kvcell::Fail(StatusCode::kUnsupported, "the reference cache has no store");
  }
  Status SetRules(std::shared_ptr<const Rules>) override { return NoStates(); }
  Status Pin(SequenceId, bool) override { return NoStates(); }
  Status Persist(SequenceId) override { return NoStates(); }
  Status Evict(SequenceId, int64_t, int64_t) override { return NoStates(); }
  Status Settle() override { return OkStatus(); }
  CacheStats Stats() const override { return {}; }
  std::vector<TransitionCount> Transitions() const override { return {}; }
  std::string Trace() const override { return {}; }
  std::vector<CellInfo> Inspect(SequenceId) const override { return {}; }

  bool fail_begin = false;
  bool fail_commit = false;

 private:
  static Status NoStates() { return {StatusCode::kUnsupported, "the reference cache has no states"}; }

  struct Layer {
    std::vector<float> k, v;  // [n_tokens, n_kv_heads, dim]
  };
  struct Sequence {
    std::vector<Token> tokens;
    std::vector<Layer> layers;
  };
  struct Item {
    Sequence* sequence;
    size_t first;  // position of the step's first token
    std::span<const Token> tokens;
  };

  void Cut(Sequence* s, size_t length) {
    s->tokens.resize(std::min(s->tokens.size(), length));
    for (size_t i = 0; i < s->layers.size(); ++i) {
      const LayerGeometry& g = options_.geometry[i];
      s->layers[i].k.resize(length * static_cast<size_t>(g.n_kv_heads * g.head_dim_k));
      s->layers[i].v.resize(length * static_cast<size_t>(g.n_kv_heads * g.head_dim_v));
    }
  }

  float Stored(float value) const {
    return precision_ == Precision::kF32 ? value : ggml_fp16_to_fp32(ggml_fp32_to_fp16(value));
  }

  void AppendHead(int layer, int head, const float* k, const float* v) {
    const LayerGeometry& g = options_.geometry[static_cast<size_t>(layer)];
    size_t row = 0;
    for (const Item& item : step_) {
      Layer& l = item.sequence->layers[static_cast<size_t>(layer)];
      for (size_t i = 0; i < item.tokens.size(); ++i, ++row) {
        const auto copy = [&](const float* from, std::vector<float>* to, int dim) {
          const auto width = static_cast<size_t>(dim);
          const size_t heads = static_cast<size_t>(g.n_kv_heads);
          const float* source = from + (row * heads + static_cast<size_t>(head)) * width;
          float* target = to->data() + ((item.first + i) * heads + static_cast<size_t>(head)) * width;
          for (size_t d = 0; d < width; ++d) target[d] = Stored(source[d]);
        };
        copy(k, &l.k, g.head_dim_k);
        copy(v, &l.v, g.head_dim_v);
      }
    }
  }

  void AttendHead(int layer, int kv_head, const float* q, float* out) {
    const LayerGeometry& g = options_.geometry[static_cast<size_t>(layer)];
    size_t row = 0;
    for (const Item& item : step_) {
      const Layer& l = item.sequence->layers[static_cast<size_t>(layer)];
      for (size_t i = 0; i < item.tokens.size(); ++i, ++row) {
        for (int h = kv_head * g.group(); h < (kv_head + 1) * g.group(); ++h) {
          const size_t at = row * static_cast<size_t>(g.n_heads) + static_cast<size_t>(h);
          AttendRow(g, l, kv_head, item.first + i, q + at * static_cast<size_t>(g.head_dim_k),
                    out + at * static_cast<size_t>(g.head_dim_v));
        }
      }
    }
  }

  // In eight sums, which the compiler turns into vectors.
  static double Dot(const float* a, const float* b, size_t n) {
    std::array<double, 8> sums{};
    size_t d = 0;
    for (; d + sums.size() <= n; d += sums.size())
      for (size_t i = 0; i < sums.size(); ++i) sums[i] += double{a[d + i]} * double{b[d + i]};
    for (; d < n; ++d) sums[0] += double{a[d]} * double{b[d]};
    double sum = 0;
    for (const double s : sums) sum += s;
    return sum;
  }

  static void AttendRow(const LayerGeometry& g, const Layer& l, int kv_head, size_t position, const float* q,
                        float* out) {
    const auto dk = static_cast<size_t>(g.head_dim_k), dv = static_cast<size_t>(g.head_dim_v);
    const auto heads = static_cast<size_t>(g.n_kv_heads), head = static_cast<size_t>(kv_head);
    const auto window = static_cast<size_t>(g.window);
    const size_t first = window > 0 && position + 1 > window ? position + 1 - window : 0;
    std::vector<double> score(position + 1 - first);
    double max = -std::numeric_limits<double>::infinity();
    for (size_t t = first; t <= position; ++t) {
      const float* key = l.k.data() + (t * heads + head) * dk;
      double dot = Dot(q, key, dk) * double{g.scale};
      if (g.softcap > 0) dot = g.softcap * std::tanh(dot / g.softcap);
      score[t - first] = dot;
      max = std::max(max, dot);
    }
    std::vector<double> sum(dv, 0.0);
    double total = 0;
    for (size_t t = first; t <= position; ++t) {
      const double weight = std::exp(score[t - first] - max);
      total += weight;
      const float* value = l.v.data() + (t * heads + head) * dv;
      for (size_t d = 0; d < dv; ++d) sum[d] += weight * double{value[d]};
    }
    for (size_t d = 0; d < dv; ++d) out[d] = static_cast<float>(sum[d] / total);
  }

  CacheOptions options_;
  Precision precision_;
  SequenceId next_ = 0;
  std::map<SequenceId, Sequence> sequences_;
  std::vector<Item> step_;
};

}  // namespace kvcell
