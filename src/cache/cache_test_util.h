// A made-up model for cache tests: q, k and v are a fixed function of token, position, layer and head, so that any way
// of feeding the same tokens must give the same answers.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "cell/rules.h"
#include "kvcell/cache.h"

namespace kvcell {

inline Geometry MadeGeometry(int n_layers = 2, int n_heads = 4, int n_kv_heads = 2, int dim = 64, int window = 0) {
  LayerGeometry layer{.n_heads = n_heads,
                      .n_kv_heads = n_kv_heads,
                      .head_dim_k = dim,
                      .head_dim_v = dim,
                      .window = window,
                      .scale = 1.0f / std::sqrt(static_cast<float>(dim))};
  return Geometry(static_cast<size_t>(n_layers), layer);
}

inline CacheOptions MadeOptions(const std::string& codec = "i4", Geometry geometry = MadeGeometry()) {
  CacheOptions options;
  options.geometry = std::move(geometry);
  options.codec = ParseCodec(codec).value();
  options.max_sequences = 4;
  options.max_threads = 4;
  options.identity = {{"weights", "made"}};
  options.model_name = "made";
  return options;
}

// With 256 MiB where neither options nor rules say how much: each pool of a cache reserves addresses for the whole
// budget, and the emulator that the oldcpu part runs these tests on keeps its own memory for every page of them.
inline std::unique_ptr<Cache> OpenOrDie(CacheOptions options) {
  const bool said = options.ram_budget != 0 || (options.rules != nullptr && options.rules->ram_budget);
  if (!said) options.ram_budget = uint64_t{256} << 20;
  auto cache = Cache::Open(std::move(options));
  if (!cache) {
    ADD_FAILURE() << cache.error().message();
    std::abort();
  }
  return std::move(*cache);
}

inline std::vector<Token> MadeTokens(int64_t n, uint32_t seed = 1) {
  std::vector<Token> tokens;
  for (int64_t i = 0; i < n; ++i) {
    seed = seed * 1664525u + 1013904223u;
    tokens.push_back(static_cast<Token>(seed >> 20));
  }
  return tokens;
}

// About normal, from a hash of what it belongs to.
inline float MadeValue(Token token, int64_t position, int layer, int kind, int index) {
  uint64_t x = static_cast<uint64_t>(token) * 0x9e3779b97f4a7c15u +
               static_cast<uint64_t>(position) * 0xbf58476d1ce4e5b9u +
               static_cast<uint64_t>(layer * 4 + kind) * 0x94d049bb133111ebu +
               static_cast<uint64_t>(index) * 0x2545f4914f6cdd1du;
  float sum = 0.0f;
  for (int i = 0; i < 4; ++i) {
    x ^= x >> 31;
    x *= 0x7fb5d329728ea185u;
    x ^= x >> 27;
    sum += static_cast<float>(x >> 40) / 16777216.0f - 0.5f;
  }
  return sum * 1.7f;
}

inline std::vector<float> MadeRows(std::span<const Token> tokens, int64_t start, int layer, int kind, int n_heads,
                                   int dim) {
  std::vector<float> rows;
  for (size_t t = 0; t < tokens.size(); ++t) {
    for (int i = 0; i < n_heads * dim; ++i)
      rows.push_back(MadeValue(tokens[t], start + static_cast<int64_t>(t), layer, kind, i));
  }
  return rows;
}

// One step of several sequences; returns each row's output over all layers, [n_rows][n_layers * n_heads * dv], in step
// order.
inline Result<std::vector<std::vector<float>>> RunStep(Cache* cache, std::span<const StepItem> items) {
  const Geometry& geometry = cache->options().geometry;
  std::vector<int64_t> starts;
  for (const StepItem& item : items) starts.push_back(cache->Length(item.sequence));
  KVCELL_FAIL_IF_ERROR(cache->Begin(items));
  std::vector<std::vector<float>> rows;
  for (const StepItem& item : items) rows.resize(rows.size() + item.tokens.size());
  for (size_t l = 0; l < geometry.size(); ++l) {
    const LayerGeometry& g = geometry[l];
    std::vector<float> k, v, q;
    for (size_t i = 0; i < items.size(); ++i) {
      const auto add = [&](std::vector<float>* to, int kind, int heads, int dim) {
        const auto made = MadeRows(items[i].tokens, starts[i], static_cast<int>(l), kind, heads, dim);
        to->insert(to->end(), made.begin(), made.end());
      };
      add(&k, 0, g.n_kv_heads, g.head_dim_k);
      add(&v, 1, g.n_kv_heads, g.head_dim_v);
      add(&q, 2, g.n_heads, g.head_dim_k);
    }
    std::vector<float> out(rows.size() * static_cast<size_t>(g.n_heads * g.head_dim_v), std::nanf(""));
    cache->Compute(static_cast<int>(l), k.data(), v.data(), q.data(), out.data());
    const size_t width = out.size() / rows.size();
    for (size_t r = 0; r < rows.size(); ++r) {
      rows[r].insert(rows[r].end(), out.begin() + static_cast<std::ptrdiff_t>(r * width),
                     out.begin() + static_cast<std::ptrdiff_t>((r + 1) * width));
    }
  }
  KVCELL_FAIL_IF_ERROR(cache->Commit());
  return rows;
}

// Feeds `tokens` in chunks (the last size repeats; never more than a step may have) and returns every row's output.
inline std::vector<std::vector<float>> Feed(Cache* cache, SequenceId sequence, std::span<const Token> tokens,
                                            const std::vector<size_t>& chunks = {512}) {
  std::vector<std::vector<float>> all;
  size_t at = 0;
  for (size_t i = 0; at < tokens.size(); ++i) {
    const size_t most =
        std::min(chunks[std::min(i, chunks.size() - 1)], static_cast<size_t>(cache->options().max_step_tokens));
    const size_t n = std::min(most, tokens.size() - at);
    const StepItem item{sequence, tokens.subspan(at, n)};
    auto rows = RunStep(cache, {&item, 1});
    if (!rows) {
      ADD_FAILURE() << rows.error().message();
      return all;
    }
    all.insert(all.end(), rows->begin(), rows->end());
    at += n;
  }
  return all;
}

// A directory that goes with the test.
class TempDir {
 public:
  TempDir() {
    std::string pattern = (std::filesystem::temp_directory_path() / "kvcell_test_XXXXXX").string();
    path_ = mkdtemp(pattern.data());
  }
  ~TempDir() { std::filesystem::remove_all(path_); }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

}  // namespace kvcell
