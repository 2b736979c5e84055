// What the state machine costs: its share of a decode step, a sweep under pressure over a million cells, and metadata.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "kvcell/status.h"

namespace kvcell {

struct OverheadOptions {
  std::string model;        // GGUF file; "": the sweep and metadata only
  int64_t context = 2048;   // tokens before the measured steps
  int64_t pairs = 64;       // of decode steps, one of each kind, alternating
  int64_t cells = 1000000;  // in the table of the sweep
  int64_t moved = 10000;    // of them leave
  int32_t n_threads = 0;
};

// `peer` is what the value is compared with, `ratio` value / peer; 0 where there is none.
struct BenchRow {
  std::string name;
  double value = 0;
  std::string unit;
  double peer = 0, ratio = 0;
};

Result<std::vector<BenchRow>> BenchOverhead(const OverheadOptions& options);

}  // namespace kvcell
