// Embeds kvcell's cache in a program that has no model: made keys and values of a small transformer are appended and
// attended, the sequence is forked, saved, and brought back by a second cache, as a second process would.
//
//   embed_cache STORE_DIRECTORY
#include <kvcell/cache.h>

#include <cmath>
#include <cstdio>
#include <memory>
#include <random>
#include <span>
#include <string>
#include <vector>

namespace {

constexpr int kLayers = 4;
constexpr kvcell::LayerGeometry kLayer = {
    .n_heads = 8, .n_kv_heads = 2, .head_dim_k = 64, .head_dim_v = 64, .window = 0, .scale = 0.125f, .softcap = 0.0f};
constexpr int kTokens = 500;
constexpr int kChunk = 100;

// Stands in for a model: K, V and q of a token are drawn from its id, so that the same tokens always give the same
// values.
struct MadeModel {
  std::vector<float> k, v, q;  // [rows, heads, head_dim]

  static void Fill(std::span<const kvcell::Token> tokens, int layer, int width, unsigned salt,
                   std::vector<float>* out) {
    out->clear();
    for (const kvcell::Token token : tokens) {
      std::mt19937 random(static_cast<unsigned>(token) * 2654435761u + static_cast<unsigned>(layer) * 97u + salt);
      std::normal_distribution<float> normal;
      for (int i = 0; i < width; ++i) out->push_back(normal(random));
    }
  }
  void Run(std::span<const kvcell::Token> tokens, int layer) {
    Fill(tokens, layer, kLayer.n_kv_heads * kLayer.head_dim_k, 1, &k);
    Fill(tokens, layer, kLayer.n_kv_heads * kLayer.head_dim_v, 2, &v);
    Fill(tokens, layer, kLayer.n_heads * kLayer.head_dim_k, 3, &q);
  }
};

// One step: the tokens become part of the sequence; `out` gets the last layer's attention, [rows, heads, head_dim].
kvcell::Status Step(kvcell::Cache* cache, kvcell::SequenceId sequence, std::span<const kvcell::Token> tokens,
                    std::vector<float>* out) {
  const kvcell::StepItem item{.sequence = sequence, .tokens = tokens};
  KVCELL_RETURN_IF_ERROR(cache->Begin({&item, 1}));
  MadeModel model;
  out->resize(tokens.size() * static_cast<size_t>(kLayer.n_heads * kLayer.head_dim_v));
  for (int layer = 0; layer < kLayers; ++layer) {
    model.Run(tokens, layer);
    cache->Compute(layer, model.k.data(), model.v.data(), model.q.data(), out->data());
  }
  return cache->Commit();
}

kvcell::CacheOptions Options(const std::string& store) {
  kvcell::CacheOptions options;
  options.geometry.assign(kLayers, kLayer);
  if (const auto codec = kvcell::ParseCodec("i4")) options.codec = *codec;
  options.max_step_tokens = kChunk;
  options.max_sequences = 2;
  options.store = store;
  options.identity = {{"weights", "made by examples/embed_cache"}};  // all that decides what K and V mean
  options.model_name = "made";
  return options;
}

void PrintStats(const char* when, const kvcell::Cache& cache) {
  const kvcell::CacheStats stats = cache.Stats();
  std::printf("%s: %llu bytes of KV where f16 takes %llu, %.2f bits per element;", when,
              static_cast<unsigned long long>(stats.kv_bytes), static_cast<unsigned long long>(stats.f16_bytes),
              stats.bits_per_element);
  for (int state = 0; state < kvcell::kCellStates; ++state) {
    const auto n = stats.cells.by_state[static_cast<size_t>(state)];
    const std::string name(kvcell::CellStateName(static_cast<kvcell::CellState>(state)));
    if (n > 0) std::printf(" %llu %s", static_cast<unsigned long long>(n), name.c_str());
  }
  std::printf("\n");
}

// Appends kTokens tokens, forks, saves under "example"; `next` gets what one more token would give.
kvcell::Status FirstProcess(const std::string& store, std::vector<float>* next) {
  auto cache = kvcell::Cache::Open(Options(store));
  if (!cache) return cache.error();
  const auto sequence = (*cache)->Create();
  if (!sequence) return sequence.error();

  std::vector<kvcell::Token> tokens;
  for (int i = 0; i < kTokens; ++i) tokens.push_back(i);
  std::vector<float> out;
  for (int at = 0; at < kTokens; at += kChunk) {
    KVCELL_RETURN_IF_ERROR(
        Step(cache->get(), *sequence, std::span(tokens).subspan(static_cast<size_t>(at), kChunk), &out));
  }
  PrintStats("after appending", **cache);
  KVCELL_RETURN_IF_ERROR((*cache)->Save(*sequence, "example", {}, "{}"));

  const auto fork = (*cache)->Fork(*sequence);  // shares every block; only the open one is copied when it is written
  if (!fork) return fork.error();
  const kvcell::Token one_more = kTokens;
  KVCELL_RETURN_IF_ERROR(Step(cache->get(), *fork, {&one_more, 1}, next));
  PrintStats("after forking", **cache);
  return kvcell::OkStatus();
}

// Brings the session back and goes on with it; `next` gets the same token's output.
kvcell::Status SecondProcess(const std::string& store, std::vector<float>* next) {
  auto cache = kvcell::Cache::Open(Options(store));
  if (!cache) return cache.error();
  const auto opened = (*cache)->OpenSession("example");
  if (!opened) return opened.error();
  std::printf("brought back: %lld of %zu tokens\n", static_cast<long long>(opened->usable), opened->tokens.size());
  const kvcell::Token one_more = kTokens;
  KVCELL_RETURN_IF_ERROR(Step(cache->get(), opened->sequence, {&one_more, 1}, next));
  PrintStats("after going on", **cache);
  return kvcell::OkStatus();
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: embed_cache STORE_DIRECTORY\n");
    return 2;
  }
  std::vector<float> forked, resumed;
  kvcell::Status status = FirstProcess(argv[1], &forked);
  if (status.ok()) status = SecondProcess(argv[1], &resumed);
  if (!status.ok()) {
    std::fprintf(stderr, "embed_cache: %s\n", status.message().c_str());
    return 1;
  }
  const bool same = forked == resumed;
  std::printf("forked and resumed sequences give %s output\n", same ? "the same" : "DIFFERENT");
  return same ? 0 : 1;
}
