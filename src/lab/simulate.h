// Replays a trace of events against rules without a model: the real cache, fed made-up keys and values.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "kvcell/cache.h"
#include "kvcell/rules.h"
#include "kvcell/status.h"

namespace kvcell {

struct SimulateOptions {
  std::shared_ptr<const Rules> rules;
  int32_t layers = 4, kv_heads = 2, head_dim = 64;
  uint64_t ram_budget = 0;  // 0: the rules' own, else a quarter of what the trace's longest context takes coded
  // One event a line: `append N` (tokens, in steps of 64), `step N` (N tokens, one at a time), `trim N`, `save`,
  // `persist`, `pin`, `unpin`, `evict BEGIN END`, `settle`; `#` begins a comment. "": append 4096, step 64.
  std::string trace;
};

struct SimulateRow {
  int line = 0;
  std::string what;  // the event
  int64_t tokens = 0;
  CacheStats stats;
  std::string note;  // what the cache said no to; "" where it did as asked
};

// One row an event. kInvalidArgument names the line of the trace.
Result<std::vector<SimulateRow>> SimulateRules(const SimulateOptions& options);

}  // namespace kvcell
