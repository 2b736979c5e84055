// The Model that callers get: facts, identity, tokenizer and the step that runs a batch through the graph.
#include "model/model.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sched.h>

#include <algorithm>
#include <map>
#include <thread>

#include "base/checksum.h"
#include "model/architecture.h"
#include "model/gguf_check.h"
#include "model/hparams.h"
#include "model/key_balance.h"
#include "model/step_graph.h"
#include "model/tokenizer.h"
#include "model/weights.h"
#include "model/weights_digest.h"

namespace kvcell {
namespace {

constexpr int kMaxThreads = 512;  // ggml's own limit

std::string Hex(const Digest128& digest) { return fmt::format("{:02x}", fmt::join(digest, "")); }

// The first of `keys` that the file has as a non-empty string.
std::string FirstString(const GgufHeader& header, std::initializer_list<std::string_view> keys) {
  for (const std::string_view key : keys) {
    std::string value;
    if (header.String(key, GgufNeed::kOptional, &value).ok() && !value.empty()) return value;
  }
  return {};
}

std::string License(const GgufHeader& header) {
  std::string license = FirstString(header, {"general.license", "general.license.name"});
  const std::string link = FirstString(header, {"general.license.link"});
  if (link.empty()) return license;
  return license.empty() ? link : fmt::format("{} ({})", license, link);
}

std::string Source(const GgufHeader& header) {
  return FirstString(header, {"general.source.url", "general.source.repo_url", "general.source.huggingface.repository",
                              "general.url", "general.repo_url", "general.base_model.0.repo_url",
                              "general.base_model.0.name", "general.organization"});
}

std::string WeightTypes(const GgufHeader& header) {
  std::map<std::string, int> counts;
  for (const GgufTensor& tensor : header.tensors()) ++counts[ggml_type_name(tensor.type)];
  std::vector<std::pair<std::string, int>> sorted(counts.begin(), counts.end());
  std::stable_sort(sorted.begin(), sorted.end(), [](const auto& a, const auto& b) { return a.second > b.second; });
  std::string out;
  for (const auto& [type, n] : sorted) out += fmt::format("{}{} x{}", out.empty() ? "" : ", ", type, n);
  return out;
}

// How each layer turns positions, as the graph builders do it: over neighbouring pairs for Llama, over the two halves
// of a head for all others.
std::vector<RopeSpec> RopeOf(const GgufHeader& header, const Hparams& h) {
  const std::vector<float> factors = header.F32Values("rope_freqs.weight", static_cast<size_t>(h.head_dim / 2));
  std::vector<RopeSpec> specs;
  for (const LayerGeometry& layer : h.geometry) {
    const RopeParameters& rope = layer.window > 0 ? h.rope_local : h.rope;
    specs.push_back({.halves = RopeOverHalves(h), .base = rope.base, .scale = rope.scale, .factors = factors});
  }
  return specs;
}

ModelFacts Facts(const GgufHeader& header, const Hparams& h, uint64_t file_bytes) {
  ModelFacts facts;
  facts.path = header.path();
  facts.architecture = h.architecture;
  facts.name = FirstString(header, {"general.name", "general.basename"});
  facts.license = License(header);
  facts.source = Source(header);
  facts.weight_types = WeightTypes(header);
  facts.n_layers = h.n_layers;
  facts.n_embd = h.n_embd;
  facts.n_vocab = h.n_vocab;
  facts.context_train = h.context_train;
  for (const GgufTensor& tensor : header.tensors()) {
    facts.n_parameters += static_cast<uint64_t>(tensor.elements());
    facts.weights_bytes += tensor.data.size();
  }
  facts.file_bytes = file_bytes;
  facts.geometry = h.geometry;
  facts.rope = RopeOf(header, h);
  facts.key_factors = h.key_factors;
  return facts;
}

// All that decides how text becomes tokens. The chat template is left out: it changes the text, not what tokens mean.
std::string TokenizerDigest(const GgufHeader& header) {
  Checksum128Stream digest;
  for (const std::string& key : header.keys())
    if (key.starts_with("tokenizer.") && !key.starts_with("tokenizer.chat_template"))
      digest.Update(header.Find(key)->entry);
  return Hex(digest.Digest());
}

std::string RopeText(const GgufHeader& header, const Hparams& h) {
  std::string text =
      fmt::format("dims={} base={} scale={} magnitude={}", h.head_dim, h.rope.base, h.rope.scale, h.rope.magnitude);
  const bool windows =
      std::any_of(h.geometry.begin(), h.geometry.end(), [](const auto& layer) { return layer.window > 0; });
  if (windows) text += fmt::format(" local_base={} local_scale={}", h.rope_local.base, h.rope_local.scale);
  if (const GgufTensor* factors = header.FindTensor("rope_freqs.weight"); factors != nullptr)
    text += fmt::format(" factors={}", Hex(Checksum128(factors->data)));
  return text;
}

int Processors() {
  cpu_set_t set;
  CPU_ZERO(&set);
  const int n = sched_getaffinity(0, sizeof(set), &set) == 0 ? CPU_COUNT(&set)
                                                             : static_cast<int>(std::thread::hardware_concurrency());
  return std::clamp(n, 1, kMaxThreads);
}

class GgufModel final : public Model {
 public:
  GgufModel(WeightsFile file, GgufHeader header, Hparams h)
      : file_(std::move(file)), header_(std::move(header)), h_(std::move(h)), weights_(header_) {
    facts_ = Facts(header_, h_, file_.bytes().size());
  }

  Status Init(const ModelOptions& options) {
    if (options.n_threads < 0 || options.n_threads > kMaxThreads)
      return {StatusCode::kInvalidArgument,
              fmt::format("{} threads; ask for 1 to {}, or 0 for all processors", options.n_threads, kMaxThreads)};
    if (options.max_batch < 1 || options.max_batch > (1 << 16))
      return {StatusCode::kInvalidArgument,
              fmt::format("a batch of {} rows; ask for 1 to {}", options.max_batch, 1 << 16)};
    max_batch_ = options.max_batch;
    digest_folder_ = options.digest_folder;
    architecture_ = MakeArchitecture(h_, &weights_);
    KVCELL_RETURN_IF_ERROR(weights_.Finish());
    Result<std::unique_ptr<Tokenizer>> tokenizer = Tokenizer::Load(header_, h_.n_vocab);
    if (!tokenizer) return tokenizer.error();
    tokenizer_ = std::move(*tokenizer);
    const int n_threads = options.n_threads == 0 ? Processors() : options.n_threads;
    Result<std::unique_ptr<StepRunner>> runner = StepRunner::Create(h_, *architecture_, n_threads, max_batch_);
    if (!runner) return runner.error();
    runner_ = std::move(*runner);
    return OkStatus();
  }

  const ModelFacts& facts() const override { return facts_; }

  const std::vector<std::pair<std::string, std::string>>& identity() const override {
    // Digested when first asked for, since it reads the whole file where its digest is not remembered.
    if (identity_.empty()) {
      identity_ = {{"weights", DigestWeights(file_.bytes(), file_.info(), digest_folder_).text},
                   {"architecture", h_.architecture},
                   {"tokenizer", TokenizerDigest(header_)},
                   {"rope", RopeText(header_, h_)},
                   {"adapters", "none"}};  // none can be loaded; who adds them names them here
      if (!h_.key_factors.empty()) identity_.emplace_back("keys", kBalancedKeys);
    }
    return identity_;
  }

  uint64_t WorkingBytes(int rows) const override { return runner_->BufferBytes(std::max(rows, 1)); }

  Result<std::vector<Token>> Tokenize(const std::string& text, bool special, bool parse) const override {
    return tokenizer_->Tokenize(text, special, parse);
  }
  std::string Piece(Token token) const override { return tokenizer_->Piece(token); }
  bool IsEndOfGeneration(Token token) const override { return tokenizer_->IsEndOfGeneration(token); }
  bool SpellsControlTokens(std::string_view text) const override { return tokenizer_->SpellsControlTokens(text); }
  size_t LongestPiece() const override { return tokenizer_->LongestPiece(); }
  Result<std::string> ApplyChatTemplate(std::span<const ChatMessage> messages, bool add_assistant) const override {
    return tokenizer_->ApplyChatTemplate(messages, add_assistant);
  }

  Status Forward(Cache* cache, std::span<const ModelStep> steps, std::vector<float>* logits) override {
    KVCELL_RETURN_IF_ERROR(CheckSteps(*cache, steps));
    const Rows rows = MakeRows(*cache, steps);
    const Result<StepGraph*> graph =
        runner_->Graph(static_cast<int64_t>(rows.tokens.size()), static_cast<int64_t>(rows.wanted.size()));
    if (!graph) return graph.error();
    std::vector<StepItem> items;
    items.reserve(steps.size());
    for (const ModelStep& step : steps) items.push_back({step.sequence, step.tokens, step.draft});

    KVCELL_RETURN_IF_ERROR(cache->Begin(items));
    Fill((*graph)->tokens, rows.tokens);
    Fill((*graph)->positions, rows.positions);
    if ((*graph)->wanted != nullptr) Fill((*graph)->wanted, rows.wanted);
    if (Status status = runner_->Run(*graph, cache); !status.ok()) {
      cache->Abort();
      return status;
    }
    KVCELL_RETURN_IF_ERROR(cache->Commit());
    if (logits != nullptr) {
      const auto* out = (*graph)->logits == nullptr ? nullptr : static_cast<const float*>((*graph)->logits->data);
      logits->assign(out, out + rows.wanted.size() * static_cast<size_t>(h_.n_vocab));
    }
    return OkStatus();
  }

 private:
  struct Rows {
    std::vector<int32_t> tokens, positions;  // [n_rows]
    std::vector<int32_t> wanted;             // [n_wanted] row numbers
  };

  static void Fill(ggml_tensor* tensor, const std::vector<int32_t>& values) {
    std::copy(values.begin(), values.end(), static_cast<int32_t*>(tensor->data));
  }

  Status CheckSteps(const Cache& cache, std::span<const ModelStep> steps) const {
    if (cache.options().geometry != h_.geometry)
      return {StatusCode::kInvalidArgument,
              "the cache was opened for another model's geometry; open it with this model's facts"};
    size_t n_rows = 0;
    for (size_t i = 0; i < steps.size(); ++i) {
      n_rows += steps[i].tokens.size();
      if (steps[i].tokens.empty())
        return {StatusCode::kInvalidArgument, "a step without tokens; leave the sequence out"};
      for (size_t j = 0; j < i; ++j)
        if (steps[i].sequence == steps[j].sequence)
          return {StatusCode::kInvalidArgument,
                  fmt::format("sequence {} is in one batch twice; join its tokens", steps[i].sequence)};
      for (const Token token : steps[i].tokens)
        if (token < 0 || token >= h_.n_vocab)
          return {StatusCode::kInvalidArgument, fmt::format("token {} is none of the model's {}", token, h_.n_vocab)};
    }
    if (n_rows == 0 || n_rows > static_cast<size_t>(max_batch_))
      return {StatusCode::kInvalidArgument,
              fmt::format("a batch of {} rows; this model was loaded for 1 to {}", n_rows, max_batch_)};
    return OkStatus();
  }

  Rows MakeRows(const Cache& cache, std::span<const ModelStep> steps) const {
    Rows rows;
    for (const ModelStep& step : steps) {
      const int64_t first = cache.Length(step.sequence);
      for (size_t i = 0; i < step.tokens.size(); ++i) {
        const bool last = i + 1 == step.tokens.size();
        if (step.want_all_logits || (last && step.want_logits))
          rows.wanted.push_back(static_cast<int32_t>(rows.tokens.size()));
        rows.tokens.push_back(step.tokens[i]);
        rows.positions.push_back(static_cast<int32_t>(first + static_cast<int64_t>(i)));
      }
    }
    return rows;
  }

  WeightsFile file_;
  GgufHeader header_;
  Hparams h_;
  Weights weights_;
  ModelFacts facts_;
  int32_t max_batch_ = 0;
  std::string digest_folder_;
  mutable std::vector<std::pair<std::string, std::string>> identity_;
  std::unique_ptr<Architecture> architecture_;
  std::unique_ptr<Tokenizer> tokenizer_;
  std::unique_ptr<StepRunner> runner_;
};

struct Opened {
  WeightsFile file;
  GgufHeader header;
  Hparams h;
};

Result<Opened> OpenModelFile(const std::string& path) {
  Result<WeightsFile> file = WeightsFile::Open(path);
  if (!file) return Fail(file.error());
  Result<GgufHeader> header = GgufHeader::Read(file->bytes(), path);
  if (!header) return Fail(header.error());
  Result<Hparams> h = ReadHparams(*header);
  if (!h) return Fail(h.error());
  return Opened{std::move(*file), std::move(*header), std::move(*h)};
}

}  // namespace

Result<std::unique_ptr<Model>> Model::Load(const std::string& path, const ModelOptions& options) {
  SilenceLlama();
  Result<Opened> opened = OpenModelFile(path);
  if (!opened) return Fail(opened.error());
  auto model = std::make_unique<GgufModel>(std::move(opened->file), std::move(opened->header), std::move(opened->h));
  KVCELL_FAIL_IF_ERROR(model->Init(options));
  return std::unique_ptr<Model>(std::move(model));
}

Result<ModelFacts> Model::ReadFacts(const std::string& path) {
  SilenceLlama();
  const Result<Opened> opened = OpenModelFile(path);
  if (!opened) return Fail(opened.error());
  return Facts(opened->header, opened->h, opened->file.bytes().size());
}

}  // namespace kvcell
