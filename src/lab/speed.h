// What a codec gives in time and room: attention three ways, and how much context and how many sequences a given memory
// really holds.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "kvcell/geometry.h"
#include "kvcell/status.h"

namespace kvcell {

struct LatencyOptions {
  LayerGeometry shape = {.n_heads = 32, .n_kv_heads = 8, .head_dim_k = 128, .head_dim_v = 128, .scale = 0.088388348f};
  std::vector<int64_t> contexts = {2048, 8192, 32768};
  std::vector<std::string> codecs = {"i4"};
  int32_t n_threads = 0;
  double seconds = 0.5;  // of measuring for each way and context, all ways alternating
  std::function<void(int64_t done, int64_t total)> on_context = {};
  std::function<bool()> should_stop = {};
};

struct LatencyRow {
  std::string codec = {};  // "f16" for the reference
  std::string way = {};    // "f16", "dequantized" (decoded to f16 cells, then attended), "in place"
  int64_t context = 0;
  double ms = 0;       // median of one decode step's attention over one layer
  uint64_t bytes = 0;  // of K and V read from memory per step
  double ratio = 0;    // f16's ms over this
};
// Decode attention of one layer over made values, one query. kInvalidArgument, kOutOfBudget, kCancelled.
Result<std::vector<LatencyRow>> MeasureLatency(const LatencyOptions& options);

struct CapacityOptions {
  Geometry geometry = {};
  std::string shape = {};  // for people: "Llama-2-7B"
  std::string model = {};  // with a model: real decode steps; "": made K and V through the cache alone
  uint64_t budget = uint64_t{1} << 30;
  std::vector<std::string> codecs = {"f16", "i8", "i4"};
  int64_t sequence_tokens = 1024;  // of each sequence when the largest batch is looked for
  int64_t max_context = 0;         // stop there all the same; 0: never
  int32_t n_threads = 0;
  std::function<void(int64_t done, int64_t total)> on_codec = {};
  std::function<bool()> should_stop = {};
};

struct CapacityRow {
  std::string shape = {}, codec = {};
  double bits = 0;
  int64_t context = 0;         // tokens of one sequence when the budget was hit
  uint64_t context_bytes = 0;  // that were in use then
  int64_t batch = 0;           // sequences of `sequence_tokens` when the budget was hit
  uint64_t batch_bytes = 0;
  double tokens_per_s = 0;  // of all sequences of that batch together, decoding
  std::string limit = {};   // what ended the context: "budget" or "max_context"
};
// Appends until the cache refuses, for one sequence and for as many as fit. Same errors.
Result<std::vector<CapacityRow>> MeasureCapacity(const CapacityOptions& options);

// The shapes that capacity is told for besides the model's own.
Geometry Llama2Shape7B();  // 32 layers x 32 KV heads x 128
Geometry Llama3Shape8B();  // 32 layers x 8 KV heads x 128

}  // namespace kvcell
