// What sharing saves, measured: memory, time to first token and speed of sequences with a common past, beside libllama
// on the same model, prompts and run.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "kvcell/status.h"
#include "lab/bench_row.h"

namespace kvcell {

struct SharingBenchOptions {
  std::string model;
  int32_t n_threads = 0;  // 0: all processors
  int32_t n_sequences = 8;
  int64_t prefix_tokens = 4000;                          // common to all
  int64_t question_tokens = 24;                          // each one's own
  int64_t decode_steps = 20;                             // measured, alternating with the peer's
  int64_t stored_blocks = 100000;                        // for the lookup
  bool q4 = true;                                        // measures a q4_0 copy of the model too
  std::string folder;                                    // where the copy and a store are made; must exist
  std::function<void(const std::string& what)> on_part;  // told before each part
  std::function<void(const BenchRow& row)> on_row;       // told each figure as it is there
  std::function<bool()> should_stop;
};

// A row's `ratio` is how many times better ours is. kInvalidArgument, kCancelled, or what model and cache give.
Result<std::vector<BenchRow>> BenchSharing(const SharingBenchOptions& options);

}  // namespace kvcell
