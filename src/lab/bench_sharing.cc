#include "lab/bench_sharing.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <memory>
#include <random>
#include <span>
#include <thread>
#include <utility>

#include "cache/prefix_tree.h"
#include "kvcell/cache.h"
#include "lab/ggml_threads.h"
#include "lab/peer.h"
#include "lab/statistics.h"
#include "model/model.h"

namespace kvcell {
namespace {

double NowMs() {
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

template <typename F>
Result<double> TimeMs(F f) {
  const double start = NowMs();
  if (Status status = f(); !status.ok()) return Fail(std::move(status));
  return NowMs() - start;
}

std::vector<Token> SomeTokens(int64_t n, int32_t n_vocab, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<Token> tokens;
  for (int64_t i = 0; i < n; ++i)
    tokens.push_back(static_cast<Token>(random() % static_cast<uint32_t>(n_vocab - 300)) + 200);
  return tokens;
}

// Fills a sequence with K and V that look like a model's, without running one: what is timed depends on their number
// alone.
Status FillMade(Cache* cache, SequenceId sequence, int64_t n, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  const CacheOptions& options = cache->options();
  std::vector<float> values(1 << 16);
  for (float& x : values) x = normal(random);
  while (n > 0) {
    const auto rows = static_cast<size_t>(std::min<int64_t>(n, options.max_step_tokens));
    const std::vector<Token> tokens = SomeTokens(static_cast<int64_t>(rows), 30000, static_cast<uint32_t>(random()));
    const StepItem item{sequence, tokens};
    KVCELL_RETURN_IF_ERROR(cache->Begin({&item, 1}));
    for (size_t layer = 0; layer < options.geometry.size(); ++layer) {
      const LayerGeometry& g = options.geometry[layer];
      const auto made = [&](int32_t heads, int32_t dim) {
        std::vector<float> rows_of(rows * static_cast<size_t>(heads * dim));
        const size_t start = random() % values.size();
        for (size_t i = 0; i < rows_of.size(); ++i) rows_of[i] = values[(start + i) % values.size()];
        return rows_of;
      };
      KVCELL_RETURN_IF_ERROR(cache->Append(static_cast<int>(layer), made(g.n_kv_heads, g.head_dim_k).data(),
                                           made(g.n_kv_heads, g.head_dim_v).data()));
    }
    KVCELL_RETURN_IF_ERROR(cache->Commit());
    n -= static_cast<int64_t>(rows);
  }
  return OkStatus();
}

class SharingBench {
 public:
  explicit SharingBench(const SharingBenchOptions& options) : options_(options) {
    if (options_.n_threads == 0)
      options_.n_threads = static_cast<int32_t>(std::max(1u, std::thread::hardware_concurrency()));
  }

  Result<std::vector<BenchRow>> Run() {
    KVCELL_FAIL_IF_ERROR(Part("sequences with a common prefix", [&] { return CommonPrefix(options_.model, ""); }));
    if (options_.q4) {
      const std::string copy = options_.folder + "/bench-sharing.q4_0.gguf";
      KVCELL_FAIL_IF_ERROR(Part("a q4_0 copy of the model", [&] {
        return std::filesystem::exists(copy) ? OkStatus() : WriteQ4Copy(options_.model, copy);
      }));
      KVCELL_FAIL_IF_ERROR(Part("sequences with a common prefix, q4_0", [&] { return CommonPrefix(copy, "q4_0 "); }));
    }
    KVCELL_FAIL_IF_ERROR(Part("forks", [&] { return Forks(); }));
    KVCELL_FAIL_IF_ERROR(Part("lookup", [&] { return Lookup(); }));
    KVCELL_FAIL_IF_ERROR(Part("attention over shared blocks", [&] { return SharedAttention(); }));
    KVCELL_FAIL_IF_ERROR(Part("batches at a fixed budget", [&] { return FixedBudget(); }));
    return std::move(rows_);
  }

 private:
  template <typename F>
  Status Part(const std::string& what, F f) {
    if (options_.should_stop && options_.should_stop()) return Status(StatusCode::kCancelled, "stopped");
    if (options_.on_part) options_.on_part(what);
    return f();
  }

  // Higher is better unless `less`.
  void Add(const std::string& name, double value, const std::string& unit, double peer = 0.0, bool less = false,
           const std::string& versus = "libllama, f16 KV") {
    BenchRow row{.name = name, .value = value, .unit = unit, .peer = peer};
    if (peer > 0.0 && value > 0.0) {
      row.ratio = less ? peer / value : value / peer;
      row.versus = versus;
    }
    if (options_.on_row) options_.on_row(row);
    rows_.push_back(std::move(row));
  }

  CacheOptions Options(const Model& model, int32_t n_sequences) const {
    CacheOptions options;
    options.geometry = model.facts().geometry;
    options.codec = ParseCodec("i4").value();
    options.max_sequences = n_sequences;
    options.max_threads = options_.n_threads;
    options.identity = model.identity();
    return options;
  }

  static Status Feed(Model* model, Cache* cache, SequenceId sequence, std::span<const Token> tokens) {
    std::vector<float> logits;
    while (!tokens.empty()) {
      const size_t n = std::min<size_t>(tokens.size(), 512);
      const ModelStep step{.sequence = sequence, .tokens = tokens.first(n), .want_logits = n == tokens.size()};
      KVCELL_RETURN_IF_ERROR(model->Forward(cache, {&step, 1}, &logits));
      tokens = tokens.subspan(n);
    }
    return OkStatus();
  }

  struct Sides {
    std::unique_ptr<Model> model;
    std::unique_ptr<Cache> cache;
    std::unique_ptr<Peer> peer;
    std::vector<SequenceId> ids;
    std::vector<std::vector<Token>> prompts;
  };

  Status CommonPrefix(const std::string& path, const std::string& label) {
    Sides sides;
    auto model = Model::Load(path, {.n_threads = options_.n_threads});
    if (!model) return model.error();
    sides.model = *std::move(model);
    auto cache = Cache::Open(Options(*sides.model, options_.n_sequences));
    if (!cache) return cache.error();
    sides.cache = *std::move(cache);
    const int64_t own = options_.question_tokens + 2 * options_.decode_steps + 8;
    auto peer = Peer::Load(path, {.flash_attention = true,
                                  .n_threads = options_.n_threads,
                                  .context = (options_.prefix_tokens + options_.n_sequences * own + 511) / 256 * 256,
                                  .n_sequences = options_.n_sequences});
    if (!peer) return peer.error();
    sides.peer = *std::move(peer);
    const int32_t n_vocab = sides.model->facts().n_vocab;
    const auto prefix = SomeTokens(options_.prefix_tokens, n_vocab, 1);
    for (int32_t i = 0; i < options_.n_sequences; ++i) {
      auto prompt = prefix;
      const auto question = SomeTokens(options_.question_tokens, n_vocab, static_cast<uint32_t>(i) + 2);
      prompt.insert(prompt.end(), question.begin(), question.end());
      sides.prompts.push_back(std::move(prompt));
    }
    KVCELL_RETURN_IF_ERROR(FirstTokens(label, &sides));
    return Decode(label, &sides);
  }

  Status FirstTokens(const std::string& label, Sides* sides) {
    std::vector<double> ours, theirs;
    uint64_t one = 0;
    for (int32_t i = 0; i < options_.n_sequences; ++i) {
      const std::span<const Token> prompt(sides->prompts[static_cast<size_t>(i)]);
      const auto ms = TimeMs([&]() -> Status {
        const auto id = sides->cache->Create();
        if (!id) return id.error();
        sides->ids.push_back(*id);
        const auto use = sides->cache->Reuse(*id, prompt);
        if (!use) return use.error();
        return Feed(sides->model.get(), sides->cache.get(), *id, prompt.subspan(static_cast<size_t>(use->tokens)));
      });
      if (!ms) return ms.error();
      ours.push_back(*ms);
      if (i == 0) one = sides->cache->Stats().kv_bytes;
      const auto peer_ms = TimeMs([&]() -> Status {
        std::vector<float> logits;
        if (i == 0) {
          KVCELL_RETURN_IF_ERROR(
              sides->peer->DecodeTo(0, prompt.first(static_cast<size_t>(options_.prefix_tokens)), nullptr));
          for (int32_t to = 1; to < options_.n_sequences; ++to) sides->peer->ShareWith(to);
        }
        return sides->peer->DecodeTo(i, prompt.subspan(static_cast<size_t>(options_.prefix_tokens)), &logits);
      });
      if (!peer_ms) return peer_ms.error();
      theirs.push_back(*peer_ms);
    }
    const std::vector<double> rest(ours.begin() + 1, ours.end()), peer_rest(theirs.begin() + 1, theirs.end());
    Add(label + "first token, 1st sequence", ours[0], "ms", theirs[0], true);
    Add(label + "first token, 2nd to last", Median(rest), "ms", Median(peer_rest), true,
        "libllama, prefix copied by hand");
    Add(label + "first token, 2nd to last against the 1st", Median(rest), "ms", ours[0], true,
        "our own first sequence");

    uint64_t own = 0;
    const int64_t shared = options_.prefix_tokens / kBlockTokens * kBlockTokens;
    for (size_t i = 1; i < sides->ids.size(); ++i) {
      for (const CellInfo& cell : sides->cache->Inspect(sides->ids[i])) {
        if (cell.token_start >= shared) own += cell.length;
      }
    }
    const CacheStats stats = sides->cache->Stats();
    const auto bytes_per_token =
        static_cast<double>(stats.f16_bytes) /
        (static_cast<double>(options_.prefix_tokens + options_.question_tokens) * options_.n_sequences);
    Add(label + "KV memory of all sequences", static_cast<double>(stats.kv_bytes), "bytes",
        bytes_per_token * static_cast<double>(options_.prefix_tokens + options_.question_tokens * options_.n_sequences),
        true, "the same tokens in f16, prefix once");
    Add(label + "KV memory against one sequence's and the others' tails",
        static_cast<double>(stats.kv_bytes) / static_cast<double>(one + own), "x");
    return OkStatus();
  }

  // Ours together, ours one by one, libllama together: in turns, so that the machine's moods fall on all alike.
  Status Decode(const std::string& label, Sides* sides) {
    const auto n = static_cast<size_t>(options_.n_sequences);
    std::vector<double> together, alone, peer;
    std::vector<float> logits;
    for (int64_t step = -2; step < options_.decode_steps; ++step) {
      const auto tokens =
          SomeTokens(options_.n_sequences * 2, sides->model->facts().n_vocab, static_cast<uint32_t>(step + 1000));
      std::vector<ModelStep> steps;
      for (size_t i = 0; i < n; ++i)
        steps.push_back({.sequence = sides->ids[i], .tokens = std::span(tokens).subspan(i, 1), .want_logits = true});
      const auto a = TimeMs([&] { return sides->model->Forward(sides->cache.get(), steps, &logits); });
      if (!a) return a.error();
      const auto b = TimeMs([&]() -> Status {
        for (size_t i = 0; i < n; ++i) {
          steps[i].tokens = std::span(tokens).subspan(n + i, 1);
          KVCELL_RETURN_IF_ERROR(sides->model->Forward(sides->cache.get(), {&steps[i], 1}, &logits));
        }
        return OkStatus();
      });
      if (!b) return b.error();
      const auto c = TimeMs([&] { return sides->peer->DecodeEach(std::span(tokens).first(n), &logits); });
      if (!c) return c.error();
      if (step < 0) continue;  // warm up
      together.push_back(*a);
      alone.push_back(*b);
      peer.push_back(*c);
    }
    const auto rate = [&](const std::vector<double>& ms) { return 1000.0 * static_cast<double>(n) / Median(ms); };
    Add(label + "decode, all at once", rate(together), "tokens/s", rate(peer));
    Add(label + "decode, all at once against one by one", rate(together), "tokens/s", rate(alone), false,
        "our own one by one");
    return OkStatus();
  }

  static CacheOptions MadeOptions(const std::string& codec, int32_t n_sequences, Geometry geometry) {
    CacheOptions options;
    options.geometry = std::move(geometry);
    options.codec = ParseCodec(codec).value();
    options.max_sequences = n_sequences;
    options.identity = {{"weights", "made"}};
    return options;
  }

  static Geometry MadeGeometry(int32_t layers, int32_t heads, int32_t kv_heads, int32_t dim) {
    return Geometry(static_cast<size_t>(layers), {.n_heads = heads,
                                                  .n_kv_heads = kv_heads,
                                                  .head_dim_k = dim,
                                                  .head_dim_v = dim,
                                                  .scale = 1.0f / std::sqrt(static_cast<float>(dim))});
  }

  Status Forks() {
    auto cache = Cache::Open(MadeOptions("i4", 17, MadeGeometry(30, 9, 3, 64)));
    if (!cache) return cache.error();
    const SequenceId parent = (*cache)->Create().value();
    KVCELL_RETURN_IF_ERROR(FillMade(cache->get(), parent, 6000, 1));
    double longest = 0.0;
    for (int i = 0; i < 16; ++i) {
      const auto ms = TimeMs([&]() -> Status {
        const auto fork = (*cache)->Fork(parent);
        return fork ? OkStatus() : fork.error();
      });
      if (!ms) return ms.error();
      longest = std::max(longest, *ms);
    }
    Add("fork of 6,000 tokens, the slowest of 16", longest, "ms");
    return OkStatus();
  }

  // Chains of about 4,000 tokens that part one after another, and a prompt that follows one of them to its end.
  Status Lookup() {
    constexpr size_t kChain = 62;
    PrefixTree tree;
    std::vector<std::unique_ptr<Block>> blocks;
    std::vector<std::vector<Token>> prompts;
    std::mt19937 random(1);
    while (blocks.size() < static_cast<size_t>(options_.stored_blocks)) {
      // Half of a chain is what an earlier one has.
      std::vector<Token> tokens = SomeTokens(kChain * kBlockTokens + 1, 30000, static_cast<uint32_t>(random()));
      if (!prompts.empty()) {
        const auto& other = prompts[random() % prompts.size()];
        std::copy_n(other.begin(), kChain / 2 * kBlockTokens, tokens.begin());
      }
      auto chain = tree.Find(tokens, kChain);
      PrefixNode* parent = chain.empty() ? nullptr : chain.back();
      for (size_t b = chain.size(); b < kChain; ++b) {
        auto block = std::make_unique<Block>();
        std::copy_n(tokens.begin() + static_cast<std::ptrdiff_t>(b * kBlockTokens), kBlockTokens,
                    block->tokens.begin());
        parent = tree.Insert(parent, block.get());
        blocks.push_back(std::move(block));
      }
      prompts.push_back(std::move(tokens));
    }
    std::vector<double> us;
    for (int i = 0; i < 2000; ++i) {
      const auto& prompt = prompts[random() % prompts.size()];
      const double start = NowMs();
      const size_t found = tree.Find(prompt, kChain).size();
      us.push_back((NowMs() - start) * 1000.0);
      if (found != kChain) return Status(StatusCode::kInternal, "the lookup found another chain than it was to find");
    }
    Add(fmt::format("lookup of a {}-token prompt among {} blocks", kChain * kBlockTokens, blocks.size()), Median(us),
        "us");
    return OkStatus();
  }

  // One layer of a larger model, over one common past against over as many separate ones. Even the common one is larger
  // than most last-level caches. With one query head a KV head a cell of the separate ones is read for a single row: of
  // f16, reading is then the limit. With four it is computing.
  Status SharedAttention() {
    for (const int32_t group : {1, 4}) {
      for (const char* codec : {"f16", "i4"}) KVCELL_RETURN_IF_ERROR(SharedAttention(group, codec));
    }
    return OkStatus();
  }

  Status SharedAttention(int32_t group, const std::string& codec) {
    constexpr int64_t kTokens = 32768;
    const auto n = static_cast<size_t>(options_.n_sequences);
    CacheOptions options = MadeOptions(codec, 2 * options_.n_sequences, MadeGeometry(1, 8 * group, 8, 128));
    options.max_threads = options_.n_threads;
    auto cache = Cache::Open(options);
    if (!cache) return cache.error();
    std::vector<SequenceId> shared, apart;
    for (size_t i = 0; i < n; ++i) {
      const auto id = i == 0 ? (*cache)->Create() : (*cache)->Fork(shared[0]);
      if (!id) return id.error();
      shared.push_back(*id);
      if (i == 0) KVCELL_RETURN_IF_ERROR(FillMade(cache->get(), *id, kTokens, 1));
    }
    for (size_t i = 0; i < n; ++i) {
      apart.push_back((*cache)->Create().value());
      KVCELL_RETURN_IF_ERROR(FillMade(cache->get(), apart.back(), kTokens, static_cast<uint32_t>(i) + 2));
    }
    GgmlThreads threads(options_.n_threads);
    std::vector<double> together, separate;
    for (int round = 0; round < 22; ++round) {
      const auto a = AttendOnce(cache->get(), shared, &threads);
      if (!a) return a.error();
      const auto b = AttendOnce(cache->get(), apart, &threads);
      if (!b) return b.error();
      if (round < 2) continue;
      together.push_back(*a);
      separate.push_back(*b);
    }
    Add(fmt::format("attention of {} sequences over {} shared tokens, {}, {} query head{} a KV head", n, kTokens, codec,
                    group, group == 1 ? "" : "s"),
        Median(together), "ms", Median(separate), true, "as many separate pasts");
    return OkStatus();
  }

  static Result<double> AttendOnce(Cache* cache, std::span<const SequenceId> sequences, GgmlThreads* threads) {
    const LayerGeometry& g = cache->options().geometry[0];
    const size_t n = sequences.size();
    const std::vector<Token> tokens(n, 7);
    std::vector<StepItem> items;
    for (size_t i = 0; i < n; ++i) items.push_back({sequences[i], std::span(tokens).subspan(i, 1)});
    std::mt19937 random(1);
    std::normal_distribution<float> normal;
    const auto made = [&](int32_t width) {
      std::vector<float> values(n * static_cast<size_t>(width));
      for (float& x : values) x = normal(random);
      return values;
    };
    const std::vector<float> k = made(g.n_kv_heads * g.head_dim_k), v = made(g.n_kv_heads * g.head_dim_v),
                             q = made(g.n_heads * g.head_dim_k);
    std::vector<float> out(n * static_cast<size_t>(g.n_heads * g.head_dim_v));
    KVCELL_FAIL_IF_ERROR(cache->Begin(items));
    const double start = NowMs();
    threads->Run(
        [&](int part, int n_parts) { cache->Compute(0, k.data(), v.data(), q.data(), out.data(), part, n_parts); });
    const double ms = NowMs() - start;
    cache->Abort();
    return ms;
  }

  // As many 2,000-token sequences as a budget holds, and what they give together.
  Status FixedBudget() {
    constexpr int64_t kTokens = 2000;
    auto model = Model::Load(options_.model, {.n_threads = options_.n_threads});
    if (!model) return model.error();
    std::vector<double> batch(2), rate(2);
    uint64_t budget = 0;
    const char* const codecs[] = {"f16", "i4"};
    for (size_t c = 0; c < 2; ++c) {
      CacheOptions options = Options(**model, 1);
      options.codec = ParseCodec(codecs[c]).value();
      const auto total = [&](int32_t n) { return PlanMemory(options, kTokens + 16, n).value().total; };
      if (budget == 0) budget = total(4);
      options.ram_budget = budget;
      int32_t n = 1;
      while (total(n + 1) <= budget) ++n;
      options.max_sequences = n;
      auto cache = Cache::Open(options);
      if (!cache) return cache.error();
      std::vector<SequenceId> ids;
      for (int32_t i = 0; i < n; ++i) {
        ids.push_back((*cache)->Create().value());
        KVCELL_RETURN_IF_ERROR(FillMade(cache->get(), ids.back(), kTokens, static_cast<uint32_t>(i) + 1));
      }
      std::vector<double> ms;
      std::vector<float> logits;
      for (int step = 0; step < 12; ++step) {
        const auto tokens = SomeTokens(n, (*model)->facts().n_vocab, static_cast<uint32_t>(step));
        std::vector<ModelStep> steps;
        for (size_t i = 0; i < ids.size(); ++i)
          steps.push_back({.sequence = ids[i], .tokens = std::span(tokens).subspan(i, 1), .want_logits = true});
        const auto one = TimeMs([&] { return (*model)->Forward(cache->get(), steps, &logits); });
        if (!one) return one.error();
        if (step >= 2) ms.push_back(*one);
      }
      batch[c] = n;
      rate[c] = 1000.0 * n / Median(ms);
    }
    const auto mib = static_cast<double>(budget) / (1024.0 * 1024.0);
    Add(fmt::format("most 2,000-token sequences in {:.0f} MiB, i4", mib), batch[1], "sequences", batch[0], false,
        "our f16");
    Add(fmt::format("tokens of all of them in {:.0f} MiB, i4", mib), rate[1], "tokens/s", rate[0], false, "our f16");
    return OkStatus();
  }

  SharingBenchOptions options_;
  std::vector<BenchRow> rows_;
};

}  // namespace

Result<std::vector<BenchRow>> BenchSharing(const SharingBenchOptions& options) {
  if (options.n_sequences < 2 || options.prefix_tokens < kBlockTokens || options.question_tokens < 1 ||
      options.decode_steps < 1) {
    return Fail(StatusCode::kInvalidArgument,
                "the bench needs two sequences, a prefix of 64 tokens and one step at least");
  }
  return SharingBench(options).Run();
}

}  // namespace kvcell
