// The life cycle of a cell as data: which event moves it from which state to which, on what conditions, and what has to
// happen to its bytes. cell/rules.h reads such tables from files; cell/cell_memory.h carries them out.
#pragma once

#include <array>
#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "kvcell/cache.h"

namespace kvcell {

enum class CellEvent : uint8_t {
  kTokenAppend = 0,     // a token came to the cell's block; with `sealed`, the last one
  kReadRequest = 1,     // a query needs the cell
  kCacheMiss = 2,       // its bytes are wanted in RAM, or exactly, and are not there
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
  kCode,        // exact values become the coded cell; where that exists already, the exact replica is dropped
  kDropRam,     // written to the store where it does not hold the same bytes yet; then the RAM copy goes
  kFetch,       // bytes start on their way from the store to RAM
  kReplicate,   // an exact replica is made of the coded bytes, which stay the truth
  kAdmit,       // what was fetched has been verified, what was replicated is there
  kMarkStored,  // the store holds the same bytes now
  kDrop,        // all bytes go
};
std::string_view CellActionName(CellAction action);  // "create", "code" ...

enum class Pressure : uint8_t { kNone = 0, kSoft = 1, kHard = 2 };
std::string_view PressureName(Pressure pressure);

// Values low..high, both included.
template <typename T>
struct Range {
  T low = std::numeric_limits<T>::lowest();
  T high = std::numeric_limits<T>::max();
  bool holds(T value) const { return value >= low && value <= high; }
  bool any() const { return low == std::numeric_limits<T>::lowest() && high == std::numeric_limits<T>::max(); }
  bool covers(const Range& other) const { return low <= other.low && high >= other.high; }
  bool operator==(const Range&) const = default;
};

// What a rule may ask of the cell beyond its state.
struct CellGuard {
  std::optional<bool> sealed{};  // its block has all of its tokens
  std::optional<bool> stored{};  // the store holds the same bytes
  Range<int64_t> pressure{};     // of Pressure's numbers
  Range<int64_t> age_tokens{};   // from the end of its block to the end of the sequence
  Range<int64_t> reads{};        // steps that read it, among the last `within_steps`
  int64_t within_steps = 64;     // 1..64
  Range<double> mass{};          // its share of attention, 0..1, smoothed over the steps that measured it
  Range<int64_t> layers{};
  Range<int64_t> heads{};     // KV heads
  Range<double> idle_s{};     // seconds since its sequence last took a step
  Range<double> ram_fill{};   // of the RAM budget, 0..1
  Range<double> file_fill{};  // of the file budget, 0..1

  bool operator==(const CellGuard&) const = default;
  // True where every cell that `other` fits is one that this fits.
  bool Covers(const CellGuard& other) const;
  // True where it asks for nothing but layer, head, sealed and stored: what positions alone decide.
  bool PlaceOnly() const;
};

struct CellRule {
  CellEvent event = CellEvent::kTokenAppend;
  std::optional<CellState> from{};  // nothing: before the cell exists
  CellState to = CellState::kActive;
  CellGuard guard{};
  CellAction action = CellAction::kNone;
  int line = 0;  // in its file; 0: one that always holds, written down nowhere
};

// The action of a transition; nothing where no such transition exists.
std::optional<CellAction> ActionOf(CellEvent event, std::optional<CellState> from, CellState to);
// The transitions that exist for an event, as text for messages: "none -> ACTIVE, ACTIVE -> QUANTIZED".
std::string TransitionsText(CellEvent event);

// What a guard looks at.
struct CellFacts {
  bool sealed = false;
  bool durable = false;
  Pressure pressure = Pressure::kNone;
  int64_t age_tokens = 0;
  uint64_t read_steps = 0;  // bit i: read i steps ago
  double mass = 0.0;
  int32_t layer = 0;
  int32_t head = 0;
  double idle_s = 0.0;
  double ram_fill = 0.0;
  double file_fill = 0.0;
};
bool Holds(const CellGuard& guard, const CellFacts& facts);

// A table of rules, searched in order. Lookups touch only the rules of one event and state.
class CellRules {
 public:
  CellRules() = default;
  explicit CellRules(std::vector<CellRule> rules);

  // The first rule for the event whose guard holds; null: the event changes nothing.
  const CellRule* Find(CellEvent event, std::optional<CellState> from, const CellFacts& facts) const;
  // All rules of an event and state, in order, whatever their guards.
  std::vector<const CellRule*> Of(CellEvent event, std::optional<CellState> from) const;
  std::span<const CellRule> rules() const { return rules_; }

 private:
  static size_t Index(CellEvent event, std::optional<CellState> from) {
    return static_cast<size_t>(event) * (kCellStates + 1) + (from ? static_cast<size_t>(*from) + 1 : 0);
  }
  std::vector<CellRule> rules_;
  std::array<std::vector<uint16_t>, kCellEvents*(kCellStates + 1)> by_key_;
};

// Transitions counted by event, state before (kCellStates: none) and after.
class TransitionCounts {
 public:
  void Add(const CellRule& rule, uint64_t n = 1) {
    const size_t from = rule.from ? static_cast<size_t>(*rule.from) : kCellStates;
    counts_[static_cast<size_t>(rule.event)][from][static_cast<size_t>(rule.to)] += n;
    total_ += n;
  }
  uint64_t of(CellEvent event, CellState to) const {
    uint64_t n = 0;
    for (const auto& row : counts_[static_cast<size_t>(event)]) n += row[static_cast<size_t>(to)];
    return n;
  }
  uint64_t of(CellEvent event, std::optional<CellState> from, CellState to) const {
    return counts_[static_cast<size_t>(event)][from ? static_cast<size_t>(*from) : kCellStates]
                  [static_cast<size_t>(to)];
  }
  uint64_t total() const { return total_; }

 private:
  std::array<std::array<std::array<uint64_t, kCellStates>, kCellStates + 1>, kCellEvents> counts_{};
  uint64_t total_ = 0;
};

}  // namespace kvcell
