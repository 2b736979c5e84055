#include "lab/bench_model.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <memory>
#include <numeric>

#include "kvcell/cache.h"
#include "lab/divergence.h"
#include "lab/peer.h"
#include "lab/statistics.h"
#include "model/model.h"

namespace kvcell {
namespace {

constexpr int32_t kChunk = 512;  // tokens per step on the way to a depth

double Now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

// Prose with changing numbers: as many tokens as are wanted, none of it worth reading.
std::string MadeText(int64_t n_tokens) {
  std::string text;
  for (int64_t i = 1; static_cast<int64_t>(text.size()) < n_tokens * 6; ++i) {
    text += fmt::format(
        "In the {}th report of the harbour board, {} ships were counted between the old lighthouse and the bridge; {} "
        "of "
        "them carried grain, and the keeper wrote that the winter of {} had been mild. ",
        i, (i * 7919) % 311 + 2, (i * 104729) % 97 + 1, 1800 + i % 200);
  }
  return text;
}

// One way of keeping K and V in a whole model, one sequence of it.
class Contestant {
 public:
  virtual ~Contestant() = default;
  // Appends tokens; logits of the last one.
  virtual Status Feed(std::span<const Token> tokens, std::vector<float>* logits) = 0;
  virtual Status TrimTo(int64_t length) = 0;

  std::string engine, type;
  std::vector<double> decode, prefill;            // tokens per second by round, of one depth
  std::vector<std::vector<float>> decode_logits;  // of the last round
};

class CellContestant final : public Contestant {
 public:
  static Result<std::unique_ptr<Contestant>> Make(Model* model, const std::string& codec) {
    auto contestant = std::make_unique<CellContestant>();
    CacheOptions options;
    auto spec = ParseCodec(codec);
    if (!spec) return Fail(spec.error());
    options.codec = *spec;
    options.geometry = model->facts().geometry;
    options.max_step_tokens = kChunk;
    auto cache = Cache::Open(options);
    if (!cache) return Fail(cache.error());
    contestant->model_ = model;
    contestant->cache_ = std::move(*cache);
    auto sequence = contestant->cache_->Create();
    if (!sequence) return Fail(sequence.error());
    contestant->sequence_ = *sequence;
    contestant->engine = "kvcell";
    contestant->type = codec;
    return contestant;
  }
  Status Feed(std::span<const Token> tokens, std::vector<float>* logits) override {
    for (size_t at = 0; at < tokens.size(); at += kChunk) {
      const auto part = tokens.subspan(at, std::min<size_t>(kChunk, tokens.size() - at));
      const ModelStep step{.sequence = sequence_, .tokens = part, .want_logits = at + part.size() == tokens.size()};
      KVCELL_RETURN_IF_ERROR(model_->Forward(cache_.get(), {&step, 1}, logits));
    }
    return OkStatus();
  }
  Status TrimTo(int64_t length) override {
    auto from = cache_->Trim(sequence_, length);
    return from ? OkStatus() : from.error();
  }

 private:
  Model* model_ = nullptr;
  std::unique_ptr<Cache> cache_;
  SequenceId sequence_ = -1;
};

class PeerContestant final : public Contestant {
 public:
  static Result<std::unique_ptr<Contestant>> Make(const ModelBenchOptions& options, PeerKvType type, bool flash,
                                                  std::string name, int64_t context) {
    auto peer = Peer::Load(options.model, {.type_k = type,
                                           .type_v = type,
                                           .flash_attention = flash,
                                           .n_threads = options.n_threads,
                                           .n_ubatch = kChunk,
                                           .context = context});
    if (!peer) return Fail(peer.error());
    auto contestant = std::make_unique<PeerContestant>();
    contestant->engine = "libllama";
    contestant->type = std::move(name);
    contestant->peer_ = std::move(*peer);
    return contestant;
  }
  Status Feed(std::span<const Token> tokens, std::vector<float>* logits) override {
    return peer_->Decode(tokens, /*all_logits=*/false, logits);
  }
  Status TrimTo(int64_t length) override { return peer_->Trim(length); }

 private:
  std::unique_ptr<Peer> peer_;
};

// Mean divergence beyond which the answer is another one. Weights of 4 bits alone make exact attentions differ.
double WorstDivergence(const std::string& type) { return type == "i4" || type == "q4_0" ? 1.0 : 0.2; }

class Bench {
 public:
  explicit Bench(const ModelBenchOptions& options) : options_(options) {}

  Result<ModelBenchResult> Run() {
    KVCELL_FAIL_IF_ERROR(Load());
    std::vector<int64_t> depths = options_.depths;
    std::sort(depths.begin(), depths.end());
    total_ = static_cast<int64_t>(depths.size()) * (1 + options_.rounds) * static_cast<int64_t>(all_.size());
    int64_t at = 0;
    for (const int64_t depth : depths) {
      for (auto& contestant : all_) {
        KVCELL_FAIL_IF_ERROR(Progress());
        if (depth > at) KVCELL_FAIL_IF_ERROR(contestant->Feed(Tokens(at, depth), nullptr));
        contestant->decode.clear();
        contestant->prefill.clear();
      }
      at = depth;
      for (int32_t round = 0; round < options_.rounds; ++round) {
        for (auto& contestant : all_) {
          KVCELL_FAIL_IF_ERROR(Progress());
          KVCELL_FAIL_IF_ERROR(Round(depth, contestant.get()));
        }
      }
      KVCELL_FAIL_IF_ERROR(AddRows(depth));
    }
    if (options_.on_progress) options_.on_progress(total_, total_);
    return std::move(result_);
  }

 private:
  Status Load() {
    auto model = Model::Load(options_.model, {.n_threads = options_.n_threads, .max_batch = kChunk});
    if (!model) return model.error();
    model_ = std::move(*model);
    const int64_t deepest = *std::max_element(options_.depths.begin(), options_.depths.end());
    const int64_t context = deepest + std::max(options_.prefill_tokens, options_.decode_tokens) + 64;
    auto tokens = model_->Tokenize(MadeText(context), /*special=*/true, /*parse=*/false);
    if (!tokens) return tokens.error();
    if (static_cast<int64_t>(tokens->size()) < context) {
      return {StatusCode::kInternal, fmt::format("the made-up text has only {} tokens", tokens->size())};
    }
    tokens_ = std::move(*tokens);
    const auto add = [&](Result<std::unique_ptr<Contestant>> made) {
      if (!made) return made.error();
      all_.push_back(std::move(*made));
      return OkStatus();
    };
    KVCELL_RETURN_IF_ERROR(
        add(PeerContestant::Make(options_, PeerKvType::kF16, false, "f16 without flash attention", context)));
    KVCELL_RETURN_IF_ERROR(add(PeerContestant::Make(options_, PeerKvType::kF16, true, "f16", context)));
    for (const std::string& type : options_.types) {
      KVCELL_RETURN_IF_ERROR(add(CellContestant::Make(model_.get(), type)));
      if (type == "i8") {
        KVCELL_RETURN_IF_ERROR(add(PeerContestant::Make(options_, PeerKvType::kQ8_0, true, "q8_0", context)));
      } else if (type == "i4") {
        KVCELL_RETURN_IF_ERROR(add(PeerContestant::Make(options_, PeerKvType::kQ4_0, true, "q4_0", context)));
      }
    }
    return OkStatus();
  }

  std::span<const Token> Tokens(int64_t begin, int64_t end) const {
    return std::span(tokens_).subspan(static_cast<size_t>(begin), static_cast<size_t>(end - begin));
  }

  Status Progress() {
    if (options_.should_stop && options_.should_stop()) return {StatusCode::kCancelled, "stopped"};
    if (options_.on_progress) options_.on_progress(done_++, total_);
    return OkStatus();
  }

  Status Round(int64_t depth, Contestant* contestant) {
    contestant->decode_logits.resize(static_cast<size_t>(options_.decode_tokens));
    // One step more first, so that graphs and memory are there.
    KVCELL_RETURN_IF_ERROR(contestant->Feed(Tokens(depth, depth + 1), &contestant->decode_logits[0]));
    KVCELL_RETURN_IF_ERROR(contestant->TrimTo(depth));
    double start = Now();
    for (int32_t i = 0; i < options_.decode_tokens; ++i) {
      KVCELL_RETURN_IF_ERROR(
          contestant->Feed(Tokens(depth + i, depth + i + 1), &contestant->decode_logits[static_cast<size_t>(i)]));
    }
    contestant->decode.push_back(options_.decode_tokens / (Now() - start));
    KVCELL_RETURN_IF_ERROR(contestant->TrimTo(depth));
    std::vector<float> logits;
    start = Now();
    KVCELL_RETURN_IF_ERROR(contestant->Feed(Tokens(depth, depth + options_.prefill_tokens), &logits));
    contestant->prefill.push_back(options_.prefill_tokens / (Now() - start));
    return contestant->TrimTo(depth);
  }

  Status AddRows(int64_t depth) {
    const double peer_decode = std::max(Median(all_[0]->decode), Median(all_[1]->decode));
    const double peer_prefill = std::max(Median(all_[0]->prefill), Median(all_[1]->prefill));
    for (const auto& contestant : all_) {
      double kld = 0.0;
      for (size_t i = 0; i < contestant->decode_logits.size(); ++i) {
        kld += DivergenceFrom(all_[0]->decode_logits[i]).To(contestant->decode_logits[i]) /
               static_cast<double>(contestant->decode_logits.size());
      }
      if (!(kld < WorstDivergence(contestant->type))) {
        return {StatusCode::kInternal,
                fmt::format(
                    "{} {} at depth {} gives other logits than libllama's f16 (KLD {:.3f}); its speed means nothing",
                    contestant->engine, contestant->type, depth, kld)};
      }
      ModelBenchRow row;
      row.engine = contestant->engine;
      row.kv_type = contestant->type;
      row.depth = depth;
      row.kld = kld;
      row.phase = "decode";
      row.tokens_per_s = Median(contestant->decode);
      row.ratio = row.tokens_per_s / peer_decode;
      result_.rows.push_back(row);
      row.phase = "prefill";
      row.tokens_per_s = Median(contestant->prefill);
      row.ratio = row.tokens_per_s / peer_prefill;
      result_.rows.push_back(row);
    }
    return OkStatus();
  }

  const ModelBenchOptions& options_;
  std::unique_ptr<Model> model_;
  std::vector<Token> tokens_;
  std::vector<std::unique_ptr<Contestant>> all_;  // libllama's f16 first
  int64_t done_ = 0, total_ = 1;
  ModelBenchResult result_;
};

}  // namespace

Result<ModelBenchResult> BenchModel(const ModelBenchOptions& options) {
  if (options.depths.empty() || options.rounds < 1) {
    return Fail(StatusCode::kInvalidArgument, "bench model needs a depth and at least one round");
  }
  return Bench(options).Run();
}

}  // namespace kvcell
