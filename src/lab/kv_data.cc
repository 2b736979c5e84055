#include "lab/kv_data.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <utility>

#include "base/checksum.h"
#include "base/text_file.h"
#include "codec/f16.h"
#include "kvcell/cache.h"
#include "lab/forwarding_cache.h"
#include "lab/npy.h"
#include "model/model.h"

namespace kvcell {
namespace {

using Json = nlohmann::ordered_json;
namespace fs = std::filesystem;

constexpr const char* kKeysAre =
    "after RoPE, in the model's own basis; times the layer's key_factors where it has them, "
    "by which queries are divided";

// A cache that writes down what each layer's attention was given, and lets another do the work.
class CapturingCache final : public ForwardingCache {
 public:
  CapturingCache(Cache* cache, KvData* data) : ForwardingCache(cache), data_(data) {}

  Status Begin(std::span<const StepItem> items) override {
    n_rows_ = 0;
    for (const StepItem& item : items) n_rows_ += item.tokens.size();
    return ForwardingCache::Begin(items);
  }
  void Compute(int layer, const float* k, const float* v, const float* q, float* out, int part,
               int n_parts) noexcept override {
    if (part == 0) Keep(layer, k, v, q);
    ForwardingCache::Compute(layer, k, v, q, out, part, n_parts);
  }

 private:
  // The vectors were reserved whole, so that nothing is allocated within a step.
  void Keep(int layer, const float* k, const float* v, const float* q) noexcept {
    const LayerGeometry& g = data_->geometry[static_cast<size_t>(layer)];
    LayerValues& out = data_->layers[static_cast<size_t>(layer)];
    const auto add = [&](const float* from, int heads, int dim, bool as_f16, std::vector<float>* to) {
      const size_t n = n_rows_ * static_cast<size_t>(heads) * static_cast<size_t>(dim);
      for (size_t i = 0; i < n; ++i) to->push_back(as_f16 ? F16ToF32(F32ToF16(from[i])) : from[i]);
    };
    add(k, g.n_kv_heads, g.head_dim_k, true, &out.k);
    add(v, g.n_kv_heads, g.head_dim_v, true, &out.v);
    add(q, g.n_heads, g.head_dim_k, false, &out.q);
  }

  KvData* data_;
  size_t n_rows_ = 0;
};

// Queries of the last tokens alone are kept.
void KeepLastQueries(int64_t queries, KvData* data) {
  data->n_queries = std::min(queries, data->n_tokens);
  for (size_t l = 0; l < data->layers.size(); ++l) {
    std::vector<float>& q = data->layers[l].q;
    const LayerGeometry& g = data->geometry[l];
    const auto keep = data->n_queries * g.n_heads * g.head_dim_k;
    q.erase(q.begin(), q.end() - keep);
    q.shrink_to_fit();
  }
}

// Bell-shaped, the same on every machine: the sum of four uniform values, variance 1.
class Bell {
 public:
  explicit Bell(uint64_t seed) : state_(seed * 0x9e3779b97f4a7c15u + 1) {}
  float Next() {
    int32_t sum = 0;
    for (int i = 0; i < 4; ++i) {
      state_ = state_ * 6364136223846793005u + 1442695040888963407u;
      sum += static_cast<int32_t>(state_ >> 48) - 0x8000;
    }
    return static_cast<float>(sum) * (1.7320508f / 65536.0f);
  }

 private:
  uint64_t state_;
};

std::string HeadFile(size_t layer, int head, char what) {
  return fmt::format("layer_{:03d}_head_{:03d}_{}.npy", layer, head, what);
}
std::string QueryFile(size_t layer) { return fmt::format("layer_{:03d}_q.npy", layer); }

// One head of [n_tokens, n_heads, dim], and back.
std::vector<float> HeadOf(const std::vector<float>& values, int64_t n_tokens, int n_heads, int head, int dim) {
  std::vector<float> out;
  out.reserve(static_cast<size_t>(n_tokens * dim));
  for (int64_t t = 0; t < n_tokens; ++t) {
    const auto from = values.begin() + (t * n_heads + head) * dim;
    out.insert(out.end(), from, from + dim);
  }
  return out;
}

void SetHead(const std::vector<float>& head_values, int64_t n_tokens, int n_heads, int head, int dim,
             std::vector<float>* values) {
  values->resize(static_cast<size_t>(n_tokens * n_heads * dim));
  for (int64_t t = 0; t < n_tokens; ++t) {
    std::copy_n(head_values.begin() + t * dim, dim, values->begin() + (t * n_heads + head) * dim);
  }
}

Json LayerJson(const LayerGeometry& g) {
  return {{"n_heads", g.n_heads},       {"n_kv_heads", g.n_kv_heads}, {"head_dim_k", g.head_dim_k},
          {"head_dim_v", g.head_dim_v}, {"window", g.window},         {"scale", g.scale},
          {"softcap", g.softcap}};
}

Result<NpyArray> ReadShaped(const std::string& path, const std::vector<int64_t>& shape) {
  auto array = ReadNpy(path);
  if (array && array->shape != shape) {
    return Fail(StatusCode::kCorruption, fmt::format("{}: its shape is not what the manifest says", path));
  }
  return array;
}

}  // namespace

Result<std::string> F32CopyOf(const std::string& model) {
  const char* home = std::getenv("HOME");
  const char* cache = std::getenv("XDG_CACHE_HOME");
  const fs::path directory =
      fs::path(cache != nullptr && *cache != '\0' ? cache : fmt::format("{}/.cache", home == nullptr ? "/tmp" : home)) /
      "kvcell";
  std::error_code error;
  const auto size = fs::file_size(model, error);
  if (error) return Fail(StatusCode::kNotFound, fmt::format("can't read {}: {}", model, error.message()));
  const auto written = fs::last_write_time(model, error).time_since_epoch().count();
  fs::create_directories(directory, error);
  const std::string key = fmt::format("{}:{}:{}", fs::absolute(model).string(), size, written);
  const auto copy = directory / fmt::format("{:016x}.f32.gguf", Checksum64(std::as_bytes(std::span(key))));
  if (!fs::exists(copy)) KVCELL_FAIL_IF_ERROR(WriteF32Copy(model, copy.string()));
  return copy.string();
}

Result<KvData> CaptureKv(const CaptureOptions& options) {
  constexpr int64_t kChunk = 64;
  std::string path = options.model;
  if (options.weights_f32) {
    auto copy = F32CopyOf(path);
    if (!copy) return Fail(copy.error());
    path = *copy;
  }
  auto model = Model::Load(path, {.n_threads = options.n_threads, .max_batch = static_cast<int32_t>(kChunk)});
  if (!model) return Fail(model.error());
  auto tokens = (*model)->Tokenize(options.text, /*special=*/true, /*parse=*/false);
  if (!tokens) return Fail(tokens.error());
  const int64_t n = options.tokens;
  if (static_cast<int64_t>(tokens->size()) < n) {
    return Fail(StatusCode::kInvalidArgument,
                fmt::format("the text has {} tokens, {} are wanted: give a longer text or a smaller --context",
                            tokens->size(), n));
  }
  KvData data;
  data.geometry = (*model)->facts().geometry;
  data.n_tokens = n;
  data.source = fmt::format("{}, {} tokens of a text", (*model)->facts().name, n);
  data.key_factors = (*model)->facts().key_factors;
  data.layers.resize(data.geometry.size());
  for (size_t l = 0; l < data.layers.size(); ++l) {
    const LayerGeometry& g = data.geometry[l];
    data.layers[l].k.reserve(static_cast<size_t>(n * g.n_kv_heads * g.head_dim_k));
    data.layers[l].v.reserve(static_cast<size_t>(n * g.n_kv_heads * g.head_dim_v));
    data.layers[l].q.reserve(static_cast<size_t>(n * g.n_heads * g.head_dim_k));
  }
  CacheOptions cache_options;
  cache_options.codec = *ParseCodec("f16");
  cache_options.geometry = data.geometry;
  cache_options.max_step_tokens = kChunk;
  auto cache = Cache::Open(cache_options);
  if (!cache) return Fail(cache.error());
  CapturingCache capturing(cache->get(), &data);
  auto sequence = capturing.Create();
  if (!sequence) return Fail(sequence.error());
  std::vector<float> logits;
  for (int64_t at = 0; at < n; at += kChunk) {
    if (options.on_progress) options.on_progress(at, n);
    if (options.should_stop && options.should_stop()) {
      return Fail(StatusCode::kCancelled, fmt::format("stopped after {} of {} tokens", at, n));
    }
    const auto count = static_cast<size_t>(std::min(kChunk, n - at));
    const ModelStep step{.sequence = *sequence, .tokens = std::span(*tokens).subspan(static_cast<size_t>(at), count)};
    KVCELL_FAIL_IF_ERROR((*model)->Forward(&capturing, {&step, 1}, &logits));
  }
  KeepLastQueries(options.queries, &data);
  return data;
}

KvData MakeKv(const Geometry& geometry, int64_t tokens, int64_t queries, uint64_t seed) {
  KvData data;
  data.source = fmt::format("made values, seed {}", seed);
  data.geometry = geometry;
  data.n_tokens = tokens;
  data.n_queries = std::min(queries, tokens);
  data.layers.resize(geometry.size());
  for (size_t l = 0; l < geometry.size(); ++l) {
    const LayerGeometry& g = geometry[l];
    Bell bell(seed + l);
    const int keys = g.n_kv_heads * g.head_dim_k;
    std::vector<float> mean(static_cast<size_t>(keys)), spread(static_cast<size_t>(keys));
    for (float& x : mean) x = bell.Next();
    for (float& x : spread) x = std::exp2(bell.Next());
    LayerValues& out = data.layers[l];
    for (int64_t i = 0; i < tokens * keys; ++i) {
      const auto c = static_cast<size_t>(i % keys);
      out.k.push_back(F16ToF32(F32ToF16(mean[c] + spread[c] * bell.Next())));
    }
    for (int64_t i = 0; i < tokens * g.n_kv_heads * g.head_dim_v; ++i) {
      out.v.push_back(F16ToF32(F32ToF16(bell.Next())));
    }
    for (int64_t i = 0; i < data.n_queries * g.n_heads * g.head_dim_k; ++i) out.q.push_back(bell.Next());
  }
  return data;
}

Status ExportKv(const KvData& data, const std::string& directory) {
  std::error_code error;
  fs::create_directories(directory, error);
  if (error) return Status(StatusCode::kIoError, fmt::format("can't make {}: {}", directory, error.message()));
  const fs::path base(directory);
  fs::remove(base / "manifest.json", error);
  Json layers = Json::array();
  for (size_t l = 0; l < data.layers.size(); ++l) {
    const LayerGeometry& g = data.geometry[l];
    const LayerValues& values = data.layers[l];
    Json files = Json::array();
    for (int h = 0; h < g.n_kv_heads; ++h) {
      for (const char what : {'k', 'v'}) {
        const int dim = what == 'k' ? g.head_dim_k : g.head_dim_v;
        const std::string file = HeadFile(l, h, what);
        KVCELL_RETURN_IF_ERROR(
            WriteNpy((base / file).string(), "<f2", {data.n_tokens, dim},
                     HeadOf(what == 'k' ? values.k : values.v, data.n_tokens, g.n_kv_heads, h, dim)));
        files.push_back(file);
      }
    }
    KVCELL_RETURN_IF_ERROR(
        WriteNpy((base / QueryFile(l)).string(), "<f4", {data.n_queries, g.n_heads, g.head_dim_k}, values.q));
    files.push_back(QueryFile(l));
    Json layer = LayerJson(g);
    layer["files"] = files;
    if (!data.key_factors.empty()) layer["key_factors"] = data.key_factors[l];
    layers.push_back(layer);
  }
  std::vector<int64_t> positions(static_cast<size_t>(data.n_tokens));
  for (size_t i = 0; i < positions.size(); ++i) positions[i] = static_cast<int64_t>(i);
  KVCELL_RETURN_IF_ERROR(WriteNpy((base / "positions.npy").string(), {data.n_tokens}, positions));
  const Json manifest{
      {"format", "kvcell-kv"},     {"version", 1},     {"source", data.source}, {"tokens", data.n_tokens},
      {"queries", data.n_queries}, {"keys", kKeysAre}, {"layers", layers}};
  return ReplaceTextFile((base / "manifest.json").string(), manifest.dump(1) + "\n");
}

Result<KvData> ImportKv(const std::string& directory) {
  const fs::path base(directory);
  std::ifstream file(base / "manifest.json");
  if (!file) {
    return Fail(StatusCode::kNotFound,
                fmt::format("{} has no manifest.json; `kvcell lab export -o {}` writes one", directory, directory));
  }
  const Json manifest = Json::parse(file, nullptr, /*allow_exceptions=*/false);
  KvData data;
  try {
    if (manifest.is_discarded() || manifest.at("format") != "kvcell-kv" || manifest.at("version") != 1) {
      return Fail(StatusCode::kCorruption,
                  fmt::format("{}/manifest.json is no manifest of version 1 of kvcell-kv", directory));
    }
    data.source = manifest.at("source").get<std::string>();
    data.n_tokens = manifest.at("tokens").get<int64_t>();
    data.n_queries = manifest.at("queries").get<int64_t>();
    for (const Json& layer : manifest.at("layers")) {
      data.geometry.push_back({.n_heads = layer.at("n_heads").get<int32_t>(),
                               .n_kv_heads = layer.at("n_kv_heads").get<int32_t>(),
                               .head_dim_k = layer.at("head_dim_k").get<int32_t>(),
                               .head_dim_v = layer.at("head_dim_v").get<int32_t>(),
                               .window = layer.at("window").get<int32_t>(),
                               .scale = layer.at("scale").get<float>(),
                               .softcap = layer.at("softcap").get<float>()});
    }
  } catch (const Json::exception& e) {
    return Fail(StatusCode::kCorruption, fmt::format("{}/manifest.json: {}", directory, e.what()));
  }
  constexpr int64_t kMost = int64_t{1} << 31;
  for (const LayerGeometry& g : data.geometry) {
    if (g.n_kv_heads < 1 || g.n_heads < g.n_kv_heads || g.n_heads % g.n_kv_heads != 0 || g.n_heads > 4096 ||
        g.head_dim_k < 1 || g.head_dim_k > 1024 || g.head_dim_v < 1 || g.head_dim_v > 1024) {
      return Fail(StatusCode::kCorruption, fmt::format("{}/manifest.json: heads that can't be", directory));
    }
  }
  if (data.n_tokens < 1 || data.n_tokens > kMost || data.n_queries < 0 || data.n_queries > data.n_tokens) {
    return Fail(StatusCode::kCorruption, fmt::format("{}/manifest.json: tokens or queries that can't be", directory));
  }
  for (size_t l = 0; l < data.geometry.size(); ++l) {
    const LayerGeometry& g = data.geometry[l];
    LayerValues& values = data.layers.emplace_back();
    for (int h = 0; h < g.n_kv_heads; ++h) {
      auto k = ReadShaped((base / HeadFile(l, h, 'k')).string(), {data.n_tokens, g.head_dim_k});
      if (!k) return Fail(k.error());
      auto v = ReadShaped((base / HeadFile(l, h, 'v')).string(), {data.n_tokens, g.head_dim_v});
      if (!v) return Fail(v.error());
      SetHead(k->values, data.n_tokens, g.n_kv_heads, h, g.head_dim_k, &values.k);
      SetHead(v->values, data.n_tokens, g.n_kv_heads, h, g.head_dim_v, &values.v);
    }
    if (data.n_queries == 0) continue;
    auto q = ReadShaped((base / QueryFile(l)).string(), {data.n_queries, g.n_heads, g.head_dim_k});
    if (!q) return Fail(q.error());
    values.q = std::move(q->values);
  }
  return data;
}

}  // namespace kvcell
