// Endless text through a window of rules: perplexity beside recomputing each window from scratch, memory and speed.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "kvcell/rules.h"
#include "kvcell/status.h"

namespace kvcell {

struct StreamOptions {
  std::string model;                   // GGUF file
  std::string text;                    // begins again where it ends
  std::shared_ptr<const Rules> rules;  // with a window
  int64_t tokens = 8192;               // fed, in blocks of 64
  int64_t every = 8;                   // of the blocks behind the first window, one in so many is recomputed
  int32_t n_threads = 0;
  std::function<void(int64_t done, int64_t total)> on_block;
  std::function<bool()> should_stop;
};

struct StreamPart {
  int64_t tokens = 0;  // up to here
  uint64_t ram_bytes = 0;
  double tokens_per_s = 0;  // of this part, recomputing left out
};

struct StreamResult {
  int64_t tokens = 0, scored = 0;
  int64_t window = 0;                         // tokens before a query's own block
  double ppl_stream = 0, ppl_recomputed = 0;  // over the same tokens
  double ratio_se = 0;                        // standard error of their ratio, over blocks in pairs
  std::vector<StreamPart> parts;              // eighths
};

// kInvalidArgument (no window in the rules), kCancelled, or what loading the model gives.
Result<StreamResult> MeasureStream(const StreamOptions& options);

}  // namespace kvcell
