#include "lab/quality.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <nlohmann/json.hpp>
#include <numeric>
#include <optional>
#include <thread>

#include "base/checksum.h"
#include "kvcell/cache.h"
#include "kvcell/rules.h"
#include "lab/divergence.h"
#include "lab/kv_data.h"
#include "lab/peer.h"
#include "lab/progress_state.h"
#include "lab/statistics.h"
#include "model/model.h"

namespace kvcell {
namespace {

using Json = nlohmann::json;

// One way of keeping K and V. Windows are fed from empty, chunk by chunk.
class Candidate {
 public:
  virtual ~Candidate() = default;
  virtual Status Reset() = 0;
  // logits [n_tokens, n_vocab]; null where none are wanted.
  virtual Status Feed(std::span<const Token> tokens, std::vector<float>* logits) = 0;
  // Of all that is kept now, per element.
  virtual double BitsAllIn() const = 0;

  std::string engine, codec;
  double bits = 0;
  size_t reference = 0;  // index of the candidate it is compared with: its own engine's f16
};

class CellCandidate final : public Candidate {
 public:
  static Result<std::unique_ptr<Candidate>> Make(Model* model, const std::string& codec,
                                                 const QualityOptions& options) {
    CacheOptions cache;
    auto spec = ParseCodec(codec);
    if (!spec) return Fail(spec.error());
    cache.codec = *spec;
    cache.sinks = options.sinks;
    cache.recent_blocks = options.recent_blocks;
    return Make(model, codec, std::move(cache), options);
  }

  static Result<std::unique_ptr<Candidate>> Make(Model* model, const QualityOptions::RulesFile& rules,
                                                 const QualityOptions& options) {
    auto parsed = ParseRules(rules.text, rules.name);
    if (!parsed) return Fail(parsed.error());
    CacheOptions cache;
    cache.codec = *ParseCodec("i4");
    cache.rules = *std::move(parsed);
    cache.rope = model->facts().rope;
    return Make(model, rules.name, std::move(cache), options);
  }

  Status Reset() override {
    if (sequence_ >= 0) KVCELL_RETURN_IF_ERROR(cache_->Free(sequence_));
    auto created = cache_->Create();
    if (!created) return created.error();
    sequence_ = *created;
    return OkStatus();
  }

  Status Feed(std::span<const Token> tokens, std::vector<float>* logits) override {
    std::vector<float> unused;
    const ModelStep step{.sequence = sequence_, .tokens = tokens, .want_all_logits = logits != nullptr};
    return model_->Forward(cache_.get(), {&step, 1}, logits != nullptr ? logits : &unused);
  }

  double BitsAllIn() const override {
    const CacheStats stats = cache_->Stats();
    return 16.0 * static_cast<double>(stats.kv_bytes) / static_cast<double>(std::max<uint64_t>(1, stats.f16_bytes));
  }

 private:
  static Result<std::unique_ptr<Candidate>> Make(Model* model, const std::string& name, CacheOptions cache,
                                                 const QualityOptions& options) {
    cache.geometry = model->facts().geometry;
    cache.max_step_tokens = static_cast<int32_t>(options.chunk);
    auto opened = Cache::Open(cache);
    if (!opened) return Fail(opened.error());
    auto candidate = std::make_unique<CellCandidate>();
    candidate->model_ = model;
    candidate->cache_ = std::move(*opened);
    candidate->engine = "kvcell";
    candidate->codec = name;
    candidate->bits = candidate->cache_->Stats().bits_per_element;
    return candidate;
  }

  Model* model_ = nullptr;
  std::unique_ptr<Cache> cache_;
  SequenceId sequence_ = -1;
};

class PeerCandidate final : public Candidate {
 public:
  static Result<std::unique_ptr<Candidate>> Make(const std::string& path, PeerKvType type,
                                                 const QualityOptions& options) {
    auto candidate = std::make_unique<PeerCandidate>();
    const bool quantized = type != PeerKvType::kF16;
    auto peer = Peer::Load(path, {.type_k = type,
                                  .type_v = type,
                                  .flash_attention = quantized,  // libllama has no other way to read a quantized V
                                  .n_threads = options.n_threads,
                                  .n_ubatch = static_cast<int32_t>(options.chunk),
                                  .context = options.context});
    if (!peer) return Fail(peer.error());
    candidate->peer_ = std::move(*peer);
    candidate->engine = "libllama";
    candidate->codec = type == PeerKvType::kF16 ? "f16" : type == PeerKvType::kQ8_0 ? "q8_0" : "q4_0";
    // 32 values and an f16 scale per ggml block.
    candidate->bits = type == PeerKvType::kF16 ? 16.0 : type == PeerKvType::kQ8_0 ? 8.5 : 4.5;
    return candidate;
  }

  Status Reset() override {
    peer_->Reset();
    return OkStatus();
  }
  Status Feed(std::span<const Token> tokens, std::vector<float>* logits) override {
    return peer_->Decode(tokens, /*all_logits=*/true, logits);
  }
  double BitsAllIn() const override { return bits; }

 private:
  std::unique_ptr<Peer> peer_;
};

// What is known of one candidate's scored positions.
struct Scores {
  std::vector<double> nll, kld;  // [positions]
  std::vector<char> same_top;
  std::vector<double> window_kld;  // means
  double bits_all_in = 0;
};

std::ptrdiff_t Top(std::span<const float> logits) {
  return std::max_element(logits.begin(), logits.end()) - logits.begin();
}

class Run {
 public:
  static Result<QualityResult> Measure(const QualityOptions& options) {
    Run run(options);
    KVCELL_FAIL_IF_ERROR(run.Load());
    KVCELL_FAIL_IF_ERROR(run.MakeCandidates());
    run.ReadState();
    for (int64_t w = run.done_; w < run.n_windows_; ++w) {
      if (options.on_window) options.on_window(w, run.n_windows_);
      KVCELL_FAIL_IF_ERROR(run.Window(w));
      KVCELL_FAIL_IF_ERROR(run.WriteState(w + 1));
    }
    if (options.on_window) options.on_window(run.n_windows_, run.n_windows_);
    return run.Summary();
  }

 private:
  explicit Run(const QualityOptions& options) : options_(options), path_(options.model) {}

  Status Load() {
    if (options_.context < 4 || options_.windows < 1 || options_.chunk < 1) {
      return Status(
          StatusCode::kInvalidArgument,
          fmt::format("windows of {} tokens leave nothing to score; give --context 4 or more, and more than {} "
                      "for sealed blocks to be read at all",
                      options_.context, 2 * kBlockTokens));
    }
    if (options_.weights_f32) {
      auto copy = F32CopyOf(path_);
      if (!copy) return copy.error();
      path_ = *copy;
    }
    auto model =
        Model::Load(path_, {.n_threads = options_.n_threads, .max_batch = static_cast<int32_t>(options_.chunk)});
    if (!model) return model.error();
    model_ = std::move(*model);
    if (options_.context > model_->facts().context_train) {
      return Status(StatusCode::kInvalidArgument,
                    fmt::format("a context of {} is beyond the {} the model was trained for", options_.context,
                                model_->facts().context_train));
    }
    auto tokens = model_->Tokenize(options_.text, /*special=*/true, /*parse=*/false);
    if (!tokens) return tokens.error();
    tokens_ = std::move(*tokens);
    n_windows_ = std::min<int64_t>(options_.windows, static_cast<int64_t>(tokens_.size()) / options_.context);
    if (n_windows_ < 1) {
      return Status(StatusCode::kInvalidArgument,
                    fmt::format("the text has {} tokens, but one window takes {}", tokens_.size(), options_.context));
    }
    return OkStatus();
  }

  Status Add(Result<std::unique_ptr<Candidate>> made, size_t reference) {
    if (!made) return made.error();
    (*made)->reference = reference;
    candidates_.push_back(std::move(*made));
    return OkStatus();
  }

  Status MakeCandidates() {
    KVCELL_RETURN_IF_ERROR(Add(CellCandidate::Make(model_.get(), "f16", options_), 0));
    for (const std::string& codec : options_.codecs) {
      if (codec != "f16") KVCELL_RETURN_IF_ERROR(Add(CellCandidate::Make(model_.get(), codec, options_), 0));
    }
    for (const QualityOptions::RulesFile& rules : options_.rules) {
      KVCELL_RETURN_IF_ERROR(Add(CellCandidate::Make(model_.get(), rules, options_), 0));
    }
    if (options_.peer) {
      peer_f16_ = candidates_.size();
      for (const PeerKvType type : {PeerKvType::kF16, PeerKvType::kQ8_0, PeerKvType::kQ4_0}) {
        KVCELL_RETURN_IF_ERROR(Add(PeerCandidate::Make(path_, type, options_), peer_f16_));
      }
    }
    scores_.resize(candidates_.size());
    return OkStatus();
  }

  Status Window(int64_t w) {
    const auto window = std::span<const Token>(tokens_).subspan(static_cast<size_t>(w * options_.context),
                                                                static_cast<size_t>(options_.context));
    const int64_t first_scored = options_.context / 2;
    for (auto& candidate : candidates_) KVCELL_RETURN_IF_ERROR(candidate->Reset());
    std::vector<std::vector<float>> logits(candidates_.size());
    const size_t before = scores_[0].kld.size();
    for (int64_t at = 0; at < options_.context; at += options_.chunk) {
      if (options_.should_stop && options_.should_stop()) {
        return Status(StatusCode::kCancelled, fmt::format("stopped after {} of {} windows", w, n_windows_));
      }
      const int64_t n = std::min(options_.chunk, options_.context - at);
      // The last token of a window has no next one in it.
      const int64_t begin = std::max(at, first_scored), end = std::min(at + n, options_.context - 1);
      const bool scored = begin < end;
      for (size_t c = 0; c < candidates_.size(); ++c) {
        KVCELL_RETURN_IF_ERROR(candidates_[c]->Feed(window.subspan(static_cast<size_t>(at), static_cast<size_t>(n)),
                                                    scored ? &logits[c] : nullptr));
      }
      if (scored) Score(logits, window, at, begin, end);
    }
    for (size_t c = 0; c < candidates_.size(); ++c) {
      Scores& s = scores_[c];
      s.window_kld.push_back(std::accumulate(s.kld.begin() + static_cast<std::ptrdiff_t>(before), s.kld.end(), 0.0) /
                             static_cast<double>(s.kld.size() - before));
      s.bits_all_in = candidates_[c]->BitsAllIn();
    }
    return OkStatus();
  }

  void Score(const std::vector<std::vector<float>>& logits, std::span<const Token> window, int64_t at, int64_t begin,
             int64_t end) {
    const auto n_vocab = static_cast<size_t>(model_->facts().n_vocab);
    const auto n = static_cast<size_t>(end - begin);
    const size_t first = scores_[0].kld.size();
    for (Scores& s : scores_) {
      s.nll.resize(first + n);
      s.kld.resize(first + n);
      s.same_top.resize(first + n);
    }
    floor_.resize(first + n);
    const auto row = [&](size_t c, size_t i) {
      return std::span<const float>(logits[c]).subspan((static_cast<size_t>(begin - at) + i) * n_vocab, n_vocab);
    };
    const auto part = [&](size_t from, size_t step) {
      for (size_t i = from; i < n; i += step) {
        const Token next = window[static_cast<size_t>(begin) + i + 1];
        const DivergenceFrom own(row(0, i));
        std::optional<DivergenceFrom> peer;
        if (options_.peer) peer.emplace(row(peer_f16_, i));
        for (size_t c = 0; c < candidates_.size(); ++c) {
          const std::span<const float> at_c = row(c, i), reference = row(candidates_[c]->reference, i);
          const double log_sum = LogSumExp(at_c);
          scores_[c].nll[first + i] = log_sum - static_cast<double>(at_c[static_cast<size_t>(next)]);
          scores_[c].kld[first + i] = (candidates_[c]->reference == 0 ? own : *peer).To(at_c, log_sum);
          scores_[c].same_top[first + i] = Top(reference) == Top(at_c) ? 1 : 0;
        }
        if (peer) floor_[first + i] = peer->To(row(0, i), own.log_sum());
      }
    };
    const size_t n_threads = options_.n_threads > 0 ? static_cast<size_t>(options_.n_threads)
                                                    : std::max(1u, std::thread::hardware_concurrency());
    std::vector<std::thread> threads;
    for (size_t t = 1; t < n_threads; ++t) threads.emplace_back(part, t, n_threads);
    part(0, n_threads);
    for (std::thread& thread : threads) thread.join();
  }

  // What the finished windows are worth nothing for, if it changes.
  std::string StateKey() const {
    std::string key =
        fmt::format("{}|{}|{}|{}|{}|{}|{}", path_, options_.context, options_.chunk, options_.sinks,
                    options_.recent_blocks, options_.peer, Checksum64(std::as_bytes(std::span(options_.text))));
    for (const auto& candidate : candidates_) key += "|" + candidate->codec;
    for (const auto& rules : options_.rules) {
      key += fmt::format("|{}", Checksum64(std::as_bytes(std::span(rules.text))));
    }
    return key;
  }

  void ReadState() {
    state_ = ProgressState(options_.state, StateKey());
    const Json& kept = state_.values();
    try {
      if (kept.empty()) return;
      std::vector<Scores> scores(candidates_.size());
      for (size_t c = 0; c < scores.size(); ++c) {
        const Json& row = kept.at("rows").at(c);
        scores[c] = {row.at("nll"), row.at("kld"), row.at("same_top"), row.at("window_kld"), row.at("bits_all_in")};
      }
      floor_ = kept.at("floor").get<std::vector<double>>();
      done_ = std::min(kept.at("windows").get<int64_t>(), n_windows_);
      // Of more windows than are asked for now the first ones.
      const auto n_scored = static_cast<size_t>(done_ * (options_.context - 1 - options_.context / 2));
      const auto holds = [&](const Scores& s) {
        return s.nll.size() >= n_scored && s.kld.size() >= n_scored && s.same_top.size() >= n_scored &&
               s.window_kld.size() >= static_cast<size_t>(done_);
      };
      if (floor_.size() < n_scored || !std::ranges::all_of(scores, holds)) {
        done_ = 0;  // cut short: measure again
        floor_.clear();
        return;
      }
      for (Scores& s : scores) {
        s.nll.resize(n_scored);
        s.kld.resize(n_scored);
        s.same_top.resize(n_scored);
        s.window_kld.resize(static_cast<size_t>(done_));
      }
      floor_.resize(n_scored);
      scores_ = std::move(scores);
    } catch (const Json::exception&) {
      done_ = 0;  // not a state of ours: measure again
    }
  }

  Status WriteState(int64_t windows) {
    if (options_.state.empty()) return OkStatus();
    Json rows = Json::array();
    for (const Scores& s : scores_) {
      rows.push_back({{"nll", s.nll},
                      {"kld", s.kld},
                      {"same_top", s.same_top},
                      {"window_kld", s.window_kld},
                      {"bits_all_in", s.bits_all_in}});
    }
    state_.values() = {{"windows", windows}, {"floor", floor_}, {"rows", rows}};
    return state_.Write();
  }

  QualityResult Summary() const {
    QualityResult result;
    result.context = options_.context;
    result.windows = n_windows_;
    result.positions = static_cast<int64_t>(scores_[0].kld.size());
    if (options_.peer) {
      result.floor_kld = Mean(floor_);
      result.ppl_difference = std::abs(std::exp(Mean(scores_[0].nll) - Mean(scores_[peer_f16_].nll)) - 1.0);
    }
    for (size_t c = 0; c < candidates_.size(); ++c) {
      const Scores& s = scores_[c];
      QualityRow row;
      row.engine = candidates_[c]->engine;
      row.codec = candidates_[c]->codec;
      row.bits = candidates_[c]->bits;
      row.bits_all_in = s.bits_all_in;
      row.ppl = std::exp(Mean(s.nll));
      row.kld_mean = Mean(s.kld);
      row.kld_se = StandardError(s.window_kld);
      row.kld_median = Quantile(s.kld, 0.5);
      row.kld_p999 = Quantile(s.kld, 0.999);
      row.top1 = static_cast<double>(std::count(s.same_top.begin(), s.same_top.end(), 1)) /
                 static_cast<double>(s.same_top.size());
      result.rows.push_back(row);
    }
    return result;
  }

  const QualityOptions& options_;
  std::string path_;
  std::unique_ptr<Model> model_;
  std::vector<Token> tokens_;
  int64_t n_windows_ = 0, done_ = 0;
  std::vector<std::unique_ptr<Candidate>> candidates_;
  size_t peer_f16_ = 0;
  std::vector<Scores> scores_;
  std::vector<double> floor_;
  ProgressState state_{"", ""};
};

}  // namespace

Result<QualityResult> MeasureQuality(const QualityOptions& options) { return Run::Measure(options); }

}  // namespace kvcell
