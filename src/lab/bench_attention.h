// How fast attention over cells is beside ggml's flash attention and the machine's read bandwidth, alternating in one
// run, with the error of both.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "kvcell/status.h"
#include "lab/ggml_attention.h"

namespace kvcell {

struct AttentionBenchOptions {
  std::vector<AttentionShape> shapes;                    // empty: DefaultAttentionShapes()
  std::vector<std::string> types = {"f16", "i8", "i4"};  // presets of ours; ggml's f16, q8_0 and q4_0 go beside them
  int32_t n_threads = 0;                                 // 0: as many as there are processors
  int32_t rounds = 15;                                   // alternations per shape; fewer where they take over 4 seconds
  std::function<void(int64_t done, int64_t total)> on_shape;
  std::function<bool()> should_stop;
  // For tests: changes an output before it is compared.
  std::function<void(const std::string& engine, const std::string& type, std::span<float> out)> tamper = {};
};

struct AttentionBenchRow {
  std::string engine;  // "kvcell" or "ggml"
  std::string type;
  AttentionShape shape;
  int32_t threads = 0;
  std::string isa;     // of our kernels
  double ms = 0;       // median
  uint64_t bytes = 0;  // of K and V: sealed cells with all their metadata, sinks, open block
  double gb_s = 0;
  double of_bandwidth = 0;  // of what the same threads read in the same rounds
  double gmac_s = 0;        // multiplications of visible pairs, both products
  double rel_error = 0;     // against float64 over the values before any rounding, root mean square
  // Ours alone. Against float64 over the values that the cells decode to: what q, weights and sums cost, and what
  // scores get for the noise of keys (attention/attention.h).
  double rounding_error = 0;
  double rounding_share = 0;  // its power over that of the codes' own error
  double ratio = 0;           // ggml's time over ours, same shape: f16 of ggml
  double ratio_same = 0;      // the same to ggml's type of the same width
};

// How much faster `threads` threads are than one.
struct ScalingRow {
  std::string name;  // "fma loop", "i4 decode, 8 KV heads" ...
  double gain = 0;
};

struct AttentionBenchResult {
  double read_bandwidth_gb_s = 0;  // median of all rounds
  std::vector<AttentionBenchRow> rows;
  std::vector<ScalingRow> scaling;
  double seal_share = 0;  // of the time of 64 decode steps at the first decode shape: coding the block that they fill
};

// What the project's targets are named for.
std::vector<AttentionShape> DefaultAttentionShapes();

// kInternal where an output is further from float64 than its type can explain: a fast wrong kernel has no figures.
// kOutOfBudget without the memory; kCancelled.
Result<AttentionBenchResult> BenchAttention(const AttentionBenchOptions& options);

}  // namespace kvcell
