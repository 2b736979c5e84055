#include "cell/state_machine.h"

namespace kvcell {
namespace {

using enum CellEvent;
using enum CellState;

constexpr CellRule kDefaultRules[] = {
    {kTokenAppend, std::nullopt, kActive, CellGuard::kAlways, CellAction::kCreate},
    {kTokenAppend, kActive, kQuantized, CellGuard::kSealed, CellAction::kCode},
    {kWriteBack, kQuantized, kQuantized, CellGuard::kNotDurable, CellAction::kMarkStored},
    {kMemoryPressure, kQuantized, kPersisted, CellGuard::kDurable, CellAction::kDropRam},
    {kCacheMiss, kPersisted, kRecovering, CellGuard::kAlways, CellAction::kFetch},
    {kWriteBack, kRecovering, kQuantized, CellGuard::kAlways, CellAction::kAdmit},
    {kEvict, kActive, kEvicted, CellGuard::kAlways, CellAction::kDrop},
    {kEvict, kQuantized, kEvicted, CellGuard::kAlways, CellAction::kDrop},
    {kEvict, kPersisted, kEvicted, CellGuard::kAlways, CellAction::kDrop},
    {kEvict, kRecovering, kEvicted, CellGuard::kAlways, CellAction::kDrop},
};

bool Holds(CellGuard guard, const CellFacts& facts) {
  switch (guard) {
    case CellGuard::kAlways:
      return true;
    case CellGuard::kSealed:
      return facts.sealed;
    case CellGuard::kDurable:
      return facts.durable;
    case CellGuard::kNotDurable:
      return !facts.durable;
  }
  return false;
}

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

const CellRules& CellRules::Default() {
  static const CellRules rules{kDefaultRules};
  return rules;
}

const CellRule* CellRules::Find(CellEvent event, std::optional<CellState> from, const CellFacts& facts) const {
  for (const CellRule& rule : rules_) {
    if (rule.event == event && rule.from == from && Holds(rule.guard, facts)) return &rule;
  }
  return nullptr;
}

}  // namespace kvcell
