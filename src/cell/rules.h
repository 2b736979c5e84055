// Rule files: what they hold once read, what is wrong or odd about one, and what follows from it for a cache.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "cell/state_machine.h"
#include "kvcell/codec_plan.h"
#include "kvcell/rules.h"

namespace kvcell {

// Which blocks leave first under pressure: those farthest from their sequence's end, those read least lately, those
// that got least attention.
enum class VictimOrder : uint8_t { kDistance, kFrequency, kMass };

struct PressureLimits {
  double soft = 0.5;      // of the room for cells: blocks are written ahead, rules with `pressure: ">= soft"` hold
  double hard = 1.0;      // of the same; a step that finds no room is hard pressure in any case
  uint64_t min_free = 0;  // free memory of the machine or cgroup (and GPU) below which pressure is hard; soft below
                          // twice as much. 0: not looked at
  VictimOrder order = VictimOrder::kDistance;
  int32_t blocks_per_step = 64;  // most blocks that one step moves beyond what it needs itself
  int32_t wait_ms = 2000;        // a step waits at most this long for work under way before it gives up
};

// A block that goes QUANTIZED -> ACTIVE -> QUANTIZED `moves` times within `within_steps` steps is left QUANTIZED for
// `rest_steps`.
struct ThrashLimits {
  int32_t moves = 2;
  int32_t within_steps = 256;
  int32_t rest_steps = 1024;
};

// An EVICT rule that asks for a distance: queries see the sinks and this many tokens before their own block, counted in
// whole blocks.
struct EvictWindow {
  Range<int64_t> layers;
  int64_t tokens = 0;
  bool keep = false;  // to PERSISTED: not attended, but kept in the store
  int line = 0;
};

struct RuleMessage {
  int line = 0;
  std::string message;
};

struct Rules {
  std::string name;  // "balanced", or the file
  std::optional<CodecSpec> codec;
  std::vector<CodecRange> codec_ranges;
  std::optional<int32_t> sinks, recent_blocks;
  std::optional<uint64_t> ram_budget, file_budget;
  PressureLimits pressure;
  ThrashLimits thrash;
  CellRules table;  // as written, in order, then those that always hold
  size_t n_written = 0;
  std::vector<EvictWindow> windows;

  // What follows from the table.
  bool codes_on_seal = true;  // every sealed cell is coded at once, whatever memory says
  bool replicates_on_read = false;
  bool fetches = false;            // a rule brings PERSISTED cells back into RAM
  bool evicts_by_policy = false;   // a rule gives cells up by mass, reads, idle time or pressure
  bool measures_mass = false;      // a guard or the order looks at attention mass
  bool depends_on_memory = false;  // what a query reads depends on pressure, reads or mass, not on positions alone
  std::vector<std::string> dependencies;  // why
  std::vector<RuleMessage> warnings;

  // The tokens a query of this layer sees before its own block; 0: all of them.
  int64_t WindowOf(int32_t layer) const;
  bool KeepsEvicted(int32_t layer) const;
  // Whether sequences that begin alike may use the same cells: not where what is computed depends on what memory
  // allowed, or on where a window began.
  bool MayShare() const { return windows.empty() && !depends_on_memory; }
  // What of the rules is part of a stored cell's identity: "" where positions alone decide and all of the past is seen.
  std::string IdentityText() const;
};

// All that is wrong with a text, not only the first; `rules` is null where there are errors.
struct RulesCheck {
  std::shared_ptr<const Rules> rules;
  std::vector<RuleMessage> errors;
  std::vector<RuleMessage> warnings;
};
RulesCheck CheckRules(std::string_view text, const std::string& name);

// The profile that holds where nothing else is asked for: `balanced`.
const std::shared_ptr<const Rules>& DefaultRules();

// An EVICT rule that is asked of its own accord, after steps: one with conditions that are no window. Others wait until
// something raises the event.
bool RaisesEvict(const CellRule& rule);

// Pictures of the table, for docs and people: Mermaid's stateDiagram-v2, or Graphviz.
std::string RulesMermaid(const Rules& rules);
std::string RulesDot(const Rules& rules);
// A guard as text: "sealed, pressure >= soft"; "" where it asks for nothing.
std::string GuardText(const CellGuard& guard);

}  // namespace kvcell
