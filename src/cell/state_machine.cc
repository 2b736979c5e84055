#include "cell/state_machine.h"

#include <fmt/format.h>

#include <bit>
#include <utility>

namespace kvcell {
namespace {

using enum CellEvent;
using enum CellState;

struct Transition {
  CellEvent event;
  std::optional<CellState> from;
  CellState to;
  CellAction action;
};

// Every transition that there is. A rule file chooses among these; it can't make up one whose bytes nobody could move.
constexpr Transition kTransitions[] = {
    {kTokenAppend, std::nullopt, kActive, CellAction::kCreate},
    {kTokenAppend, kActive, kQuantized, CellAction::kCode},
    {kReadRequest, kPersisted, kRecovering, CellAction::kFetch},
    {kReadRequest, kQuantized, kRecovering, CellAction::kReplicate},
    {kCacheMiss, kPersisted, kRecovering, CellAction::kFetch},
    {kCacheMiss, kQuantized, kRecovering, CellAction::kReplicate},
    {kMemoryPressure, kActive, kQuantized, CellAction::kCode},
    {kMemoryPressure, kQuantized, kPersisted, CellAction::kDropRam},
    {kMemoryPressure, kQuantized, kEvicted, CellAction::kDrop},
    {kMemoryPressure, kActive, kEvicted, CellAction::kDrop},
    {kWriteBack, kQuantized, kQuantized, CellAction::kMarkStored},
    {kWriteBack, kQuantized, kPersisted, CellAction::kDropRam},
    {kWriteBack, kRecovering, kQuantized, CellAction::kAdmit},
    {kWriteBack, kRecovering, kActive, CellAction::kAdmit},
    {kEvict, kActive, kEvicted, CellAction::kDrop},
    {kEvict, kQuantized, kEvicted, CellAction::kDrop},
    {kEvict, kQuantized, kPersisted, CellAction::kDropRam},
    {kEvict, kPersisted, kEvicted, CellAction::kDrop},
    {kEvict, kRecovering, kEvicted, CellAction::kDrop},
};

std::string_view FromName(std::optional<CellState> from) { return from ? CellStateName(*from) : "none"; }

}  // namespace

std::string_view CellStateName(CellState state) {
  switch (state) {
    case kActive:
      return "ACTIVE";
    case kQuantized:
      return "QUANTIZED";
    case kPersisted:
      return "PERSISTED";
    case kRecovering:
      return "RECOVERING";
    case kEvicted:
      return "EVICTED";
  }
  return "?";
}

std::string_view CellEventName(CellEvent event) {
  switch (event) {
    case kTokenAppend:
      return "TOKEN_APPEND";
    case kReadRequest:
      return "READ_REQUEST";
    case kCacheMiss:
      return "CACHE_MISS";
    case kMemoryPressure:
      return "MEMORY_PRESSURE";
    case kWriteBack:
      return "WRITE_BACK";
    case kEvict:
      return "EVICT";
  }
  return "?";
}

std::string_view CellActionName(CellAction action) {
  switch (action) {
    case CellAction::kNone:
      return "none";
    case CellAction::kCreate:
      return "create";
    case CellAction::kCode:
      return "code";
    case CellAction::kDropRam:
      return "write and drop RAM";
    case CellAction::kFetch:
      return "fetch";
    case CellAction::kReplicate:
      return "replicate exactly";
    case CellAction::kAdmit:
      return "verify and admit";
    case CellAction::kMarkStored:
      return "mark stored";
    case CellAction::kDrop:
      return "drop";
  }
  return "?";
}

std::string_view PressureName(Pressure pressure) {
  switch (pressure) {
    case Pressure::kNone:
      return "none";
    case Pressure::kSoft:
      return "soft";
    case Pressure::kHard:
      return "hard";
  }
  return "?";
}

std::optional<CellAction> ActionOf(CellEvent event, std::optional<CellState> from, CellState to) {
  for (const Transition& t : kTransitions) {
    if (t.event == event && t.from == from && t.to == to) return t.action;
  }
  return std::nullopt;
}

std::string TransitionsText(CellEvent event) {
  std::string text;
  for (const Transition& t : kTransitions) {
    if (t.event != event) continue;
    text += fmt::format("{}{} -> {}", text.empty() ? "" : ", ", FromName(t.from), CellStateName(t.to));
  }
  return text;
}

bool CellGuard::Covers(const CellGuard& other) const {
  const auto flag = [](const std::optional<bool>& mine, const std::optional<bool>& theirs) {
    return !mine || mine == theirs;
  };
  return flag(sealed, other.sealed) && flag(stored, other.stored) && pressure.covers(other.pressure) &&
         age_tokens.covers(other.age_tokens) &&
         (reads.any() || (reads.covers(other.reads) && within_steps == other.within_steps)) &&
         mass.covers(other.mass) && layers.covers(other.layers) && heads.covers(other.heads) &&
         idle_s.covers(other.idle_s) && ram_fill.covers(other.ram_fill) && file_fill.covers(other.file_fill);
}

bool CellGuard::PlaceOnly() const {
  return pressure.any() && age_tokens.any() && reads.any() && mass.any() && idle_s.any() && ram_fill.any() &&
         file_fill.any();
}

bool Holds(const CellGuard& guard, const CellFacts& facts) {
  if (guard.sealed && *guard.sealed != facts.sealed) return false;
  if (guard.stored && *guard.stored != facts.durable) return false;
  if (!guard.pressure.holds(static_cast<int64_t>(facts.pressure))) return false;
  if (!guard.age_tokens.holds(facts.age_tokens)) return false;
  if (!guard.layers.holds(facts.layer) || !guard.heads.holds(facts.head)) return false;
  if (!guard.reads.any()) {
    const uint64_t steps = guard.within_steps >= 64 ? ~uint64_t{0} : (uint64_t{1} << guard.within_steps) - 1;
    if (!guard.reads.holds(std::popcount(facts.read_steps & steps))) return false;
  }
  return guard.mass.holds(facts.mass) && guard.idle_s.holds(facts.idle_s) && guard.ram_fill.holds(facts.ram_fill) &&
         guard.file_fill.holds(facts.file_fill);
}

CellRules::CellRules(std::vector<CellRule> rules) : rules_(std::move(rules)) {
  for (size_t i = 0; i < rules_.size(); ++i) {
    by_key_[Index(rules_[i].event, rules_[i].from)].push_back(static_cast<uint16_t>(i));
  }
}

const CellRule* CellRules::Find(CellEvent event, std::optional<CellState> from, const CellFacts& facts) const {
  for (const uint16_t i : by_key_[Index(event, from)]) {
    if (Holds(rules_[i].guard, facts)) return &rules_[i];
  }
  return nullptr;
}

std::vector<const CellRule*> CellRules::Of(CellEvent event, std::optional<CellState> from) const {
  std::vector<const CellRule*> found;
  for (const uint16_t i : by_key_[Index(event, from)]) found.push_back(&rules_[i]);
  return found;
}

}  // namespace kvcell
