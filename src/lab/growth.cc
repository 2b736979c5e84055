#include "lab/growth.h"

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <map>
#include <optional>
#include <span>
#include <system_error>
#include <utility>

#include "base/memory_probe.h"
#include "cell/rules.h"
#include "kvcell/cache.h"
#include "model/model.h"

namespace kvcell {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int64_t kStep = 512;

double SecondsSince(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

uint64_t AnonymousBytes() {
  const auto memory = ProbeProcessMemory();
  return memory ? memory->anonymous : 0;
}

bool IsFull(const Status& status) {
  return status.code() == StatusCode::kOutOfBudget || status.code() == StatusCode::kNoSpace;
}

class GrowthRun {
 public:
  GrowthRun(const GrowthOptions& options, Model* model, std::span<const Token> text)
      : options_(options), model_(model), text_(text) {}

  // `cache` says how cells are kept. The answers of the first run are what later ones are compared with.
  Result<GrowthRow> Run(const std::string& way, CacheOptions cache) {
    GrowthRow row{.way = way};
    cache.geometry = model_->facts().geometry;
    cache.rope = model_->facts().rope;
    cache.identity = model_->identity();
    cache.max_step_tokens = static_cast<int32_t>(kStep);
    cache.max_threads = options_.n_threads;
    cache.ram_budget = options_.ram_budget;
    const uint64_t before = AnonymousBytes();
    auto opened = Cache::Open(cache);
    if (!opened) return Fail(opened.error());
    cache_ = std::move(*opened);
    auto sequence = cache_->Create();
    if (!sequence) return Fail(sequence.error());
    sequence_ = *sequence;
    for (const int64_t stage : options_.stages) {
      const int64_t from = cache_->Length(sequence_);
      const auto start = Clock::now();
      const auto full = FeedUntil(stage, way);
      if (!full) return Fail(full.error());
      const double seconds = SecondsSince(start);
      const int64_t fed = cache_->Length(sequence_) - from;
      auto reached = Look(before);
      if (!reached) return Fail(reached.error());
      reached->prefill_tokens_per_s = seconds > 0 ? static_cast<double>(fed) / seconds : 0.0;
      row.stages.push_back(*std::move(reached));
      if (full->has_value()) {
        row.limit = **full;
        break;
      }
    }
    is_reference_ = false;
    row.longest = cache_->Length(sequence_);
    if (row.limit.empty()) row.limit = "the last stage";
    cache_.reset();
    return row;
  }

 private:
  Token At(int64_t i) const { return text_[static_cast<size_t>(i) % text_.size()]; }

  // Feeds until `stage` tokens are there, or the cache refuses even one block: then its words.
  Result<std::optional<std::string>> FeedUntil(int64_t stage, const std::string& way) {
    int64_t most = kStep;
    while (cache_->Length(sequence_) < stage) {
      if (options_.should_stop && options_.should_stop()) return Fail(StatusCode::kCancelled, "stopped");
      const int64_t at = cache_->Length(sequence_);
      std::vector<Token> tokens;
      for (int64_t i = at; i < std::min(stage, at + most); ++i) tokens.push_back(At(i));
      const ModelStep step{.sequence = sequence_, .tokens = tokens, .want_logits = true};
      const Status status = model_->Forward(cache_.get(), {&step, 1}, &logits_);
      if (IsFull(status)) {
        if (most == kBlockTokens) return std::optional<std::string>(status.message());
        most = kBlockTokens;
        continue;
      }
      KVCELL_FAIL_IF_ERROR(status);
      if (options_.on_progress) options_.on_progress(way, cache_->Length(sequence_));
    }
    return std::optional<std::string>();
  }

  // Memory as it is, and some tokens decoded from here, which are taken back.
  Result<GrowthStage> Look(uint64_t before) {
    GrowthStage stage{.tokens = cache_->Length(sequence_)};
    const CacheStats stats = cache_->Stats();
    stage.kv_ram_bytes = stats.ram_bytes;
    stage.file_bytes = stats.file_bytes;
    const uint64_t now = AnonymousBytes();
    stage.process_bytes = now > before ? now - before : 0;
    std::vector<Token> answer;
    const Sampler greedy({});
    const auto start = Clock::now();
    while (static_cast<int64_t>(answer.size()) < options_.answer_tokens) {
      const Token token = greedy.Sample(logits_, cache_->Length(sequence_));
      answer.push_back(token);
      stage.answer += model_->Piece(token);
      const ModelStep step{.sequence = sequence_, .tokens = {&token, 1}, .want_logits = true};
      const Status status = model_->Forward(cache_.get(), {&step, 1}, &logits_);
      if (IsFull(status)) break;  // it is the end of this run
      KVCELL_FAIL_IF_ERROR(status);
    }
    const double seconds = SecondsSince(start);
    if (seconds > 0) stage.decode_tokens_per_s = static_cast<double>(answer.size()) / seconds;
    auto trimmed = cache_->Trim(sequence_, stage.tokens);
    if (!trimmed) return Fail(trimmed.error());
    if (is_reference_) answers_[stage.tokens] = answer;
    if (const auto f16 = answers_.find(stage.tokens); f16 != answers_.end()) {
      stage.same_as_f16 = std::ranges::mismatch(answer, f16->second).in1 - answer.begin();
    }
    return stage;
  }

  const GrowthOptions& options_;
  Model* model_;
  std::span<const Token> text_;
  std::unique_ptr<Cache> cache_;
  SequenceId sequence_ = 0;
  std::vector<float> logits_;
  bool is_reference_ = true;
  std::map<int64_t, std::vector<Token>> answers_;  // of f16, by stage
};

}  // namespace

Result<std::vector<GrowthRow>> MeasureGrowth(const GrowthOptions& options) {
  const auto f16 = ParseCodec("f16"), coded = ParseCodec(options.codec);
  if (!coded) return Fail(coded.error());
  auto model = Model::Load(options.model, {.n_threads = options.n_threads, .max_batch = static_cast<int32_t>(kStep)});
  if (!model) return Fail(model.error());
  const auto text = (*model)->Tokenize(options.text, true, false);
  if (!text) return Fail(text.error());
  if (text->empty()) return Fail(StatusCode::kInvalidArgument, "the text is empty");

  GrowthRun run(options, model->get(), *text);
  std::vector<GrowthRow> rows;
  const auto add = [&](const std::string& way, const CacheOptions& cache) -> Status {
    auto row = run.Run(way, cache);
    if (!row) return row.error();
    rows.push_back(*std::move(row));
    return OkStatus();
  };
  CacheOptions cache;
  cache.codec = *f16;
  KVCELL_FAIL_IF_ERROR(add("f16 in RAM", cache));
  cache.codec = *coded;
  KVCELL_FAIL_IF_ERROR(add(options.codec + " in RAM", cache));
  if (options.directory.empty()) return rows;
  auto rules = std::make_shared<Rules>(options.rules != nullptr ? *options.rules : **ProfileRules("long-context"));
  rules->codec = *coded;
  rules->file_budget = options.file_budget;
  rules->ram_budget.reset();
  cache.rules = std::move(rules);
  cache.store = options.directory;
  const Status status = add(options.codec + " with rules and files", cache);
  std::error_code ignored;
  std::filesystem::remove_all(options.directory, ignored);
  KVCELL_FAIL_IF_ERROR(status);
  return rows;
}

}  // namespace kvcell
