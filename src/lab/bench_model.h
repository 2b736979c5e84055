// A whole model's decode and prefill speed at several depths, our caches beside libllama's, alternating in one run, the
// logits of all of them compared.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "kvcell/status.h"

namespace kvcell {

struct ModelBenchOptions {
  std::string model;                                     // GGUF file
  std::vector<int64_t> depths = {0, 8064};               // tokens in the cache before what is measured
  std::vector<std::string> types = {"f16", "i8", "i4"};  // ours; libllama's f16, q8_0 and q4_0 go beside them
  int32_t n_threads = 0;                                 // 0: as many as there are processors
  int32_t rounds = 3;                                    // alternations per depth
  int32_t decode_tokens = 16;                            // one after the other
  int32_t prefill_tokens = 512;                          // at once
  std::function<void(int64_t done, int64_t total)> on_progress;
  std::function<bool()> should_stop;
};

struct ModelBenchRow {
  std::string engine;   // "kvcell" or "libllama"
  std::string kv_type;  // "i4", "q4_0", "f16", "f16 without flash attention"
  int64_t depth = 0;
  std::string phase;        // "decode" or "prefill"
  double tokens_per_s = 0;  // median
  double ratio = 0;         // to libllama's f16, the faster of its two
  double kld = 0;           // of the decoded tokens' logits against libllama's f16 without flash attention, mean
};

struct ModelBenchResult {
  std::vector<ModelBenchRow> rows;
};

// kInternal where logits are further from libllama's than the type can explain; kCancelled; or what loading gives.
Result<ModelBenchResult> BenchModel(const ModelBenchOptions& options);

}  // namespace kvcell
