// What persistence costs and gains, measured on one session: saving, resuming in a cold process, saving while decoding
// and decoding beyond RAM, beside libllama's state file in the same run.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "kvcell/status.h"

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

struct BenchRow {
  std::string name;
  double value = 0;
  std::string unit;
  double peer = 0;   // the same of libllama, or what the value is held against; 0: nothing
  double ratio = 0;  // value over peer; 0 where there is none
};

struct BenchStoreResult {
  std::vector<BenchRow> rows;
};

// Must be called before the process has other threads: a child is forked that resumes the session in a cold process.
Result<BenchStoreResult> BenchStore(const BenchStoreOptions& options);

}  // namespace kvcell
