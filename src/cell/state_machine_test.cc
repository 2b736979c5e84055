// The default rules: what each event does in each state, as docs/state_machine.md says.
#include "cell/state_machine.h"

#include <gtest/gtest.h>

#include "cell/rules.h"

namespace kvcell {
namespace {

using enum CellEvent;
using enum CellState;

std::optional<CellState> After(CellEvent event, std::optional<CellState> from, const CellFacts& facts = {}) {
  const CellRule* rule = DefaultRules()->table.Find(event, from, facts);
  return rule == nullptr ? std::nullopt : std::optional(rule->to);
}

TEST(CellRules, LifeOfACellThatIsWrittenBackAndRecovered) {
  EXPECT_EQ(After(kTokenAppend, std::nullopt), kActive);
  EXPECT_EQ(After(kTokenAppend, kActive, {.sealed = false}), std::nullopt) << "an open block stays as it is";
  EXPECT_EQ(After(kTokenAppend, kActive, {.sealed = true}), kQuantized);
  EXPECT_EQ(After(kWriteBack, kQuantized, {.durable = false}), kQuantized);
  EXPECT_EQ(After(kMemoryPressure, kQuantized, {.sealed = true, .durable = true, .pressure = Pressure::kHard}),
            kPersisted);
  EXPECT_EQ(After(kCacheMiss, kPersisted), kRecovering);
  EXPECT_EQ(After(kWriteBack, kRecovering), kQuantized);
}

TEST(CellRules, SoftPressureAndOpenBlocksMoveNothing) {
  EXPECT_EQ(After(kMemoryPressure, kQuantized, {.sealed = true, .pressure = Pressure::kSoft}), std::nullopt);
  EXPECT_EQ(After(kMemoryPressure, kActive, {.sealed = true, .pressure = Pressure::kHard}), std::nullopt);
}

TEST(CellRules, AReadOfACodedCellIsNoMiss) {
  EXPECT_EQ(After(kCacheMiss, kQuantized), std::nullopt) << "it is attended in place";
  EXPECT_EQ(After(kReadRequest, kPersisted), std::nullopt) << "streamed: the state only says which bytes exist";
}

TEST(CellRules, EverythingCanBeEvictedOnce) {
  for (const CellState state : {kActive, kQuantized, kPersisted, kRecovering})
    EXPECT_EQ(After(kEvict, state), kEvicted);
  EXPECT_EQ(After(kEvict, kEvicted), std::nullopt);
}

TEST(CellRules, OnlyTransitionsThatMoveBytesExist) {
  EXPECT_EQ(ActionOf(kMemoryPressure, kQuantized, kPersisted), CellAction::kDropRam);
  EXPECT_EQ(ActionOf(kEvict, kActive, kQuantized), std::nullopt);
  EXPECT_EQ(ActionOf(kTokenAppend, std::nullopt, kQuantized), std::nullopt);
}

TEST(TransitionCounts, CountByEventAndTarget) {
  TransitionCounts counts;
  counts.Add(*DefaultRules()->table.Find(kEvict, kActive, {}), 3);
  counts.Add(*DefaultRules()->table.Find(kTokenAppend, std::nullopt, {}));
  EXPECT_EQ(counts.of(kEvict, kEvicted), 3u);
  EXPECT_EQ(counts.of(kEvict, kActive, kEvicted), 3u);
  EXPECT_EQ(counts.of(kEvict, kQuantized, kEvicted), 0u);
  EXPECT_EQ(counts.of(kTokenAppend, kActive), 1u);
  EXPECT_EQ(counts.total(), 4u);
}

}  // namespace
}  // namespace kvcell
