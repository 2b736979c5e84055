// K, V and the last queries of a text, layer by layer, as attention sees them: taken from a model while it runs, made
// at random, or read from what `lab export` wrote.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "kvcell/geometry.h"
#include "kvcell/status.h"

namespace kvcell {

struct LayerValues {
  std::vector<float> k = {};  // [n_tokens, n_kv_heads, dk], after RoPE, as appended (f16 values)
  std::vector<float> v = {};  // [n_tokens, n_kv_heads, dv]
  std::vector<float> q = {};  // [n_queries, n_heads, dk], of the last n_queries tokens, f32
};

struct KvData {
  std::string source = {};  // for people: the model and text, or how the values were made
  Geometry geometry = {};   // [n_layers]
  int64_t n_tokens = 0;
  int64_t n_queries = 0;
  std::vector<LayerValues> layers = {};
  std::vector<std::vector<float>> key_factors = {};  // as in ModelFacts; k and q have them
};

struct CaptureOptions {
  std::string model = {};
  std::string text = {};
  int64_t tokens = 1024;     // from the text's start; kInvalidArgument where the text is shorter
  int64_t queries = 64;      // of the last tokens
  bool weights_f32 = false;  // on a copy of the model with all weights in f32
  int32_t n_threads = 0;
  std::function<void(int64_t done, int64_t total)> on_progress = {};
  std::function<bool()> should_stop = {};
};

// Runs the text through the model with f16 KV and keeps what its attention was given.
Result<KvData> CaptureKv(const CaptureOptions& options);

// Bell-shaped values without a model: K with channels of unequal mean and spread as real keys have, V without. The same
// for the same seed on every machine.
KvData MakeKv(const Geometry& geometry, int64_t tokens, int64_t queries, uint64_t seed);

// Writes DIR/manifest.json and, per layer and KV head, `layer_LLL_head_HHH_{k,v}.npy` (f16, [n_tokens, head_dim]), per
// layer `layer_LLL_q.npy` (f32, [n_queries, n_heads, dk]), and `positions.npy` (int64, [n_tokens]). The manifest is
// written last, so a directory without one was not finished. kIoError names the file.
Status ExportKv(const KvData& data, const std::string& directory);

// Reads such a directory. kNotFound, kCorruption naming file and field.
Result<KvData> ImportKv(const std::string& directory);

// Path of a copy of the model file with all weights in f32, made once in the user's cache directory.
Result<std::string> F32CopyOf(const std::string& model);

}  // namespace kvcell
