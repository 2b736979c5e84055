// One growing text under one RAM budget, kept in several ways until each fails: how far it came, what memory the kernel
// says that took, how fast it was, and what the model answered on the way.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "kvcell/rules.h"
#include "kvcell/status.h"

namespace kvcell {

struct GrowthOptions {
  std::string model = {};                     // GGUF file
  std::string text = {};                      // begins again where it ends
  std::string codec = "i4";                   // what f16 is compared with
  std::shared_ptr<const Rules> rules = {};    // of the way with files; null: the profile `long-context`
  std::string directory = {};                 // for its store: a new folder, removed afterwards
  uint64_t ram_budget = uint64_t{256} << 20;  // of KV memory
  uint64_t file_budget = uint64_t{1} << 30;   // of the store's cells
  std::vector<int64_t> stages = {4096, 8192, 16384, 32768, 65536};  // tokens; the last one ends a run
  int64_t answer_tokens = 16;                                       // generated greedily at each stage, and taken back
  int32_t n_threads = 0;
  std::function<void(const std::string& way, int64_t tokens)> on_progress = {};
  std::function<bool()> should_stop = {};
};

struct GrowthStage {
  int64_t tokens = 0;
  uint64_t kv_ram_bytes = 0;   // as the cache counts it
  uint64_t process_bytes = 0;  // anonymous memory by which the process grew since before the cache, from the kernel
  uint64_t file_bytes = 0;
  double prefill_tokens_per_s = 0;  // since the stage before
  double decode_tokens_per_s = 0;
  std::string answer = {};
  int64_t same_as_f16 = -1;  // leading answer tokens that f16 gave at this stage; -1: it did not come so far
};

struct GrowthRow {
  std::string way = {};    // "f16 in RAM", "i4 in RAM", "i4 with rules and files"
  int64_t longest = 0;     // tokens
  std::string limit = {};  // what ended it: the cache's own words, or "the last stage"
  std::vector<GrowthStage> stages = {};
};

// kInvalidArgument, kCancelled, or what loading the model gives.
Result<std::vector<GrowthRow>> MeasureGrowth(const GrowthOptions& options);

}  // namespace kvcell
