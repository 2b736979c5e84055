// A model with its cache, set up from options: everything that can be refused is refused before the model loads.
#pragma once

#include <cstdint>
#include <memory>

#include "cli/control.h"
#include "cli/options.h"
#include "kvcell/cache.h"
#include "kvcell/status.h"
#include "model/model.h"

namespace kvcell::cli {

struct Engine {
  std::unique_ptr<Model> model;
  std::unique_ptr<Cache> cache;
  std::unique_ptr<Control> control;  // before the cache goes; null: nobody sees this process
  int64_t context = 0;               // most tokens of a sequence
  double load_ms = 0.0;              // of the model
  bool shares_prefixes = false;      // with other runs, through the store
};

// Most rows per step: prompts are fed in chunks of this many tokens.
inline constexpr int32_t kChunkTokens = 512;
// Context where nothing is asked for and the rules' windows never let the model see more than it was trained for.
inline constexpr int64_t kEndlessContext = int64_t{1} << 20;

Result<Engine> OpenEngine(const Options& options);

// Opens the process to others (`kvcell top`, `ctl`) and starts what options ask to be written while it runs. A socket
// that can't be had is a warning.
Status OpenToOthers(const Options& options, SequenceId sequence, Engine* engine);
// Warns of what the store took from sessions for its cap or time to live.
void TellRemoved(const Options& options, const Engine& engine);
// What options ask to be written at the end: metrics, `tokens` of them computed, and trace.
Status WriteObservations(const Options& options, const Engine& engine, int64_t tokens);

// The checks of OpenEngine alone: cache options for this model without its identity, or what is wrong with the request.
struct EnginePlan {
  CacheOptions cache;
  int64_t context = 0;
  MemoryPlan memory;
  uint64_t budget_floor = 0;
};
// `budget_floor` is the smallest --ram-budget that works: with room for the whole context, or with a store to move
// cells to.
Result<EnginePlan> PlanEngine(const Options& options, const ModelFacts& facts);

// The smallest budget for `n_sequences` of `context` tokens, with a store at hand.
Result<uint64_t> BudgetFloor(CacheOptions cache, int64_t context, int32_t n_sequences);

}  // namespace kvcell::cli
