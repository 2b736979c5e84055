// What persistence costs and gains, measured on one session: saving, resuming in a cold process, saving while decoding
// and decoding beyond RAM, beside libllama's state file in the same run.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "kvcell/status.h"
#include "lab/bench_row.h"

namespace kvcell {

struct BenchStoreOptions {
  std::string model;      // GGUF file
  std::string text;       // prompt; repeated until it fills the context
  std::string directory;  // on the disk to be measured; what the benchmark makes there is removed at the end
  std::string codec = "i4";
  int64_t context = 8192;  // tokens of the session
  int32_t n_threads = 0;
  int32_t rounds = 3;  // of each alternating pair
  bool peer = true;    // libllama too: takes a prefill more
  std::function<void(const std::string& what)> on_stage;
};

struct BenchStoreResult {
  std::vector<BenchRow> rows;
};

// Must be called before the process has other threads: a child is forked that resumes the session in a cold process.
Result<BenchStoreResult> BenchStore(const BenchStoreOptions& options);

}  // namespace kvcell
