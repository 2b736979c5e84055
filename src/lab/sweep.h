// How error, locality and reading times change with what the cache's design fixes: the values that share a scale, the
// tokens that stay exact, where attention looks, and where cells lie.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "kvcell/status.h"
#include "lab/kv_data.h"

namespace kvcell {

struct SweepOptions {
  std::string codec = "i4";
  std::string store = {};  // directory for the reading times; made, filled and emptied again; "": none are measured
  std::function<void(int64_t done, int64_t total)> on_part = {};
  std::function<bool()> should_stop = {};
};

// A scale for more and more values: 4-bit uniform levels, scales from absmax, no rotation, nothing else.
struct GranularityRow {
  std::string scope = {};  // "tensor", "layer", "head", "token", "group 128", "group 64", "group 32"
  double scale_bits = 0;   // per element
  double k_relative = 0, v_relative = 0;
};

// Attention-output error by what stays exact.
struct ExactRow {
  int32_t sinks = 0, recent_blocks = 0;
  double output = 0;
  double exact_share = 0;  // of the tokens
};

// Where the attention of the last queries goes: the share of its mass on the newest blocks and on the first tokens.
struct LocalityRow {
  int64_t newest_blocks = 0;
  double mass = 0;  // with the first 4 tokens left out of the count
};

// Reading a block's cells back from files.
struct ReadRow {
  std::string from = {};  // "page cache", "disk"
  double us_per_mib = 0;
  double gb_s = 0;
  double missed = 0;  // share of the bytes that had to come from a disk
};

struct SweepResult {
  std::vector<GranularityRow> granularity = {};
  std::vector<ExactRow> exact = {};
  std::vector<LocalityRow> locality = {};
  double first_tokens_mass = 0;  // on the first 4 tokens
  std::vector<ReadRow> reads = {};
};
// kInvalidArgument, kIoError, kCancelled.
Result<SweepResult> MeasureSweep(const KvData& data, const SweepOptions& options);

}  // namespace kvcell
