// What the state machine costs: its share of a decode step, a sweep under pressure over a million cells, and metadata.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "kvcell/status.h"
#include "lab/bench_row.h"

namespace kvcell {

struct OverheadOptions {
  std::string model;        // GGUF file; "": the sweep and metadata only
  int64_t context = 2048;   // tokens before the measured steps
  int64_t pairs = 64;       // of decode steps, one of each kind, alternating
  int64_t cells = 1000000;  // in the table of the sweep
  int64_t moved = 10000;    // of them leave
  int32_t n_threads = 0;
};

// `peer` is what a value is compared with, `ratio` value / peer.
Result<std::vector<BenchRow>> BenchOverhead(const OverheadOptions& options);

}  // namespace kvcell
