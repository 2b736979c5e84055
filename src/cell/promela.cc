#include "cell/promela.h"

#include <fmt/format.h>

namespace kvcell {
namespace {

// The frame around the table: what the store, a save, a crash and a reader do, whatever the rules are. `held` is the
// lock that a process has on bytes in the store; bytes exist while they are committed or held.
constexpr std::string_view kHead = R"(
mtype = { NONE, ACTIVE, QUANTIZED, PERSISTED, RECOVERING, EVICTED };

bool committed;      /* a session's commit names the bytes */
bool damaged;        /* the bytes in the store are not what was written */
bool held[2];        /* the process holds the bytes in the store */
mtype state[2];
bool exact[2], coded[2], verified[2];  /* bytes in RAM; whether the coded ones were made here or checked */
byte crashes;

#define me _pid

inline forget() { exact[me] = false; coded[me] = false; verified[me] = false }

active [2] proctype owner() {
  state[me] = NONE;
  do
)";

constexpr std::string_view kTail = R"(
  /* A save writes what is not in the store yet, then commits: one transaction. */
  :: atomic { state[me] == QUANTIZED && coded[me] && !held[me] -> held[me] = true }
  :: atomic { (state[me] == QUANTIZED || state[me] == PERSISTED) && held[me] && !committed -> committed = true }
  /* The other process removes the session: bytes stay while they are held. */
  :: atomic { committed && state[me] == EVICTED -> committed = false; held[me] = false }
  /* A crash at any moment: RAM and locks go. Who starts again finds what is committed, or nothing. */
  :: atomic { crashes < 2 -> crashes++;
       forget();
       held[me] = committed;
       state[me] = (committed -> PERSISTED : NONE) }
  :: atomic { !damaged && (committed || held[0] || held[1]) && state[me] == PERSISTED -> damaged = true }
  /* A reader. RECOVERING is waited for; what the store gives is verified as it passes. */
  :: atomic { state[me] == ACTIVE -> assert(exact[me]) }
  :: atomic { state[me] == QUANTIZED -> assert(coded[me] && verified[me]) }
  :: atomic { state[me] == PERSISTED -> assert(committed || held[me]) }
  od
}

ltl never_stuck { [] (state[0] == RECOVERING -> <> (state[0] != RECOVERING)) }
)";

std::string_view Name(std::optional<CellState> state) { return state ? CellStateName(*state) : "NONE"; }

// What must be so before the bytes can move, and what is so afterwards. The conditions are those of the code; where it
// has one too few, spin finds the state in which that shows.
std::string Body(const CellRule& rule) {
  const std::string to = fmt::format("state[me] = {}", CellStateName(rule.to));
  switch (rule.action) {
    case CellAction::kCreate:
      return "-> exact[me] = true; " + to;
    case CellAction::kCode:
      return "-> coded[me] = true; verified[me] = true; exact[me] = false; " + to;
    case CellAction::kDropRam:
      return "&& held[me] -> forget(); " + to;
    case CellAction::kFetch:
      return "&& held[me] -> " + to;
    case CellAction::kReplicate:
      return "&& coded[me] -> " + to;
    case CellAction::kAdmit: {
      // A fetched cell that fails its check is not admitted: it stays in the store, and the read that needs it is told.
      const std::string arrived = rule.to == CellState::kActive ? "exact[me] = true; " : "";
      return fmt::format(
          "-> if :: !coded[me] && damaged -> state[me] = PERSISTED "
          ":: else -> coded[me] = true; verified[me] = (verified[me] || !damaged); {}{} fi",
          arrived, to);
    }
    case CellAction::kMarkStored:
      return "&& coded[me] && !held[me] -> held[me] = true; " + to;
    case CellAction::kDrop:
      return "-> forget(); " + to;
    case CellAction::kNone:
      return "-> " + to;
  }
  return "";
}

}  // namespace

std::string PromelaModel(const Rules& rules) {
  std::string text =
      fmt::format("/* The life of a cell under the rules `{}`: made by `kvcell rules promela`. */\n", rules.name);
  text += kHead;
  for (const CellRule& rule : rules.table.rules()) {
    const std::string guard = GuardText(rule.guard);
    // Pressure, reads, distance and the like may hold or not at any time: spin tries both.
    text += fmt::format("  /* {}{}{} */\n  :: atomic {{ state[me] == {} {} }}\n", CellEventName(rule.event),
                        guard.empty() ? "" : ": ", guard, Name(rule.from), Body(rule));
  }
  return text + std::string(kTail);
}

}  // namespace kvcell
