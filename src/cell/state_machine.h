// The life cycle of a cell as data: which event moves it from which state to which, and what has to happen to its
// bytes.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>

#include "kvcell/cache.h"

namespace kvcell {

enum class CellEvent : uint8_t {
  kTokenAppend = 0,     // a token came to the cell's block; with `sealed`, the last one
  kReadRequest = 1,     // a query needs the cell
  kCacheMiss = 2,       // its bytes are wanted in RAM and are not there
  kMemoryPressure = 3,  // RAM is wanted for newer cells
  kWriteBack = 4,       // a copy that was under way has arrived (in the store, or in RAM)
  kEvict = 5,           // nothing will attend to it again
};
inline constexpr int kCellEvents = 6;
std::string_view CellEventName(CellEvent event);  // "TOKEN_APPEND" ...

// What a transition does to the bytes; it is complete only when they have moved.
enum class CellAction : uint8_t {
  kNone,        // bookkeeping only
  kCreate,      // an exact slot in RAM
  kCode,        // exact values become the coded cell
  kDropRam,     // the RAM copy goes; the store holds the same bytes
  kFetch,       // bytes start on their way from the store to RAM
  kAdmit,       // the fetched bytes have been verified
  kMarkStored,  // the store holds the same bytes now
  kDrop,        // all bytes go
};

// What a rule may ask of the cell beyond its state.
enum class CellGuard : uint8_t { kAlways, kSealed, kDurable, kNotDurable };

struct CellRule {
  CellEvent event;
  std::optional<CellState> from;  // nothing: before the cell exists
  CellState to;
  CellGuard guard;
  CellAction action;
};

// What a guard looks at.
struct CellFacts {
  bool sealed = false;
  bool durable = false;
};

// A set of rules, searched in order; a handful, so a lookup is a few compares.
class CellRules {
 public:
  // The rules that hold when a user gives none (docs/state_machine.md prints them).
  static const CellRules& Default();
  explicit CellRules(std::span<const CellRule> rules) : rules_(rules) {}

  // The first rule for the event whose guard holds; null: the event changes nothing.
  const CellRule* Find(CellEvent event, std::optional<CellState> from, const CellFacts& facts) const;
  std::span<const CellRule> rules() const { return rules_; }

 private:
  std::span<const CellRule> rules_;
};

// Transitions counted by event and target state.
class TransitionCounts {
 public:
  void Add(const CellRule& rule, uint64_t n = 1) {
    counts_[static_cast<size_t>(rule.event)][static_cast<size_t>(rule.to)] += n;
    total_ += n;
  }
  uint64_t of(CellEvent event, CellState to) const {
    return counts_[static_cast<size_t>(event)][static_cast<size_t>(to)];
  }
  uint64_t total() const { return total_; }

 private:
  std::array<std::array<uint64_t, kCellStates>, kCellEvents> counts_{};
  uint64_t total_ = 0;
};

}  // namespace kvcell
