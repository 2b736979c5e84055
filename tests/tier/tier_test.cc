// A cache over tiers that are not the store: slow, failing and lying ones, and one in another process that attends to
// its cells itself. Neither `cache` nor `model` knows of them.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <algorithm>
#include <chrono>
#include <cmath>

#include "cache/cache_test_util.h"
#include "memory_tier.h"
#include "process_tier.h"

namespace kvcell {
namespace {

using std::chrono_literals::operator""us;
using testing::HasSubstr;

constexpr int64_t kTokens = 3000;

CacheOptions OverTier(std::shared_ptr<CellTier> tier) {
  CacheOptions options = MadeOptions();
  options.max_sequences = 1;
  options.max_threads = 1;
  options.max_step_tokens = 64;
  options.tier = std::move(tier);
  options.ram_budget = PlanMemory(options, kTokens, 1)->minimum + (256 << 10);
  return options;
}

const std::vector<std::vector<float>>& RowsInRam() {
  static const auto rows = [] {
    auto options = OverTier(nullptr);
    options.ram_budget = 0;
    auto cache = OpenOrDie(options);
    return Feed(cache.get(), cache->Create().value(), MadeTokens(kTokens), {64});
  }();
  return rows;
}

size_t InState(const Cache& cache, CellState state) { return cache.Stats().cells.by_state[static_cast<size_t>(state)]; }

TEST(Tier, WhatLiesInAnotherTierIsReadToTheBit) {
  auto tier = std::make_shared<MemoryTier>();
  {
    auto cache = OpenOrDie(OverTier(tier));
    const SequenceId sequence = cache->Create().value();
    EXPECT_EQ(Feed(cache.get(), sequence, MadeTokens(kTokens), {64}), RowsInRam());
    EXPECT_GT(InState(*cache, CellState::kPersisted), 0u);
    EXPECT_GT(tier->reads(), 0);
    EXPECT_LE(cache->Stats().ram_peak_bytes, cache->options().ram_budget);
    EXPECT_THAT(cache->Inspect(sequence), testing::Contains(testing::Field(&CellInfo::tier, "test")));
    EXPECT_GT(tier->blocks(), 0u);
  }
  EXPECT_EQ(tier->blocks(), 0u) << "what nobody uses any more is destroyed";
}

TEST(Tier, ASlowOneGivesTheSame) {
  auto tier = std::make_shared<MemoryTier>();
  tier->Set({.delay = 100us});
  auto cache = OpenOrDie(OverTier(tier));
  EXPECT_EQ(Feed(cache.get(), cache->Create().value(), MadeTokens(kTokens), {64}), RowsInRam());
}

// Feeds until a step is refused; returns how many tokens were taken.
size_t FeedUntilRefused(Cache* cache, SequenceId sequence, std::span<const Token> tokens, Status* refused) {
  size_t at = 0;
  while (at < tokens.size()) {
    const StepItem item{sequence, tokens.subspan(at, std::min<size_t>(64, tokens.size() - at))};
    const auto rows = RunStep(cache, {&item, 1});
    if (!rows) {
      *refused = rows.error();
      cache->Abort();
      return at;
    }
    at += item.tokens.size();
  }
  return at;
}

TEST(Tier, OneThatIsFullRefusesAStepAndLosesNothing) {
  auto tier = std::make_shared<MemoryTier>();
  tier->Set({.create = StatusCode::kNoSpace});
  auto cache = OpenOrDie(OverTier(tier));
  const SequenceId sequence = cache->Create().value();
  const auto tokens = MadeTokens(kTokens);
  Status refused;
  const size_t taken = FeedUntilRefused(cache.get(), sequence, tokens, &refused);
  ASSERT_LT(taken, tokens.size());
  EXPECT_EQ(refused.code(), StatusCode::kNoSpace) << refused.message();
  EXPECT_EQ(cache->Length(sequence), static_cast<int64_t>(taken));
  tier->Set({});
  const auto rest = Feed(cache.get(), sequence, std::span(tokens).subspan(taken), {64});
  EXPECT_EQ(rest, std::vector(RowsInRam().begin() + static_cast<std::ptrdiff_t>(taken), RowsInRam().end()));
}

TEST(Tier, OneThatDoesNotReadEndsTheStepAndTheNextOneGoesOn) {
  auto tier = std::make_shared<MemoryTier>();
  auto cache = OpenOrDie(OverTier(tier));
  const SequenceId sequence = cache->Create().value();
  const auto tokens = MadeTokens(kTokens);
  const size_t before = 2560;
  Feed(cache.get(), sequence, std::span(tokens).first(before), {64});
  ASSERT_GT(InState(*cache, CellState::kPersisted), 0u);
  tier->Set({.read = StatusCode::kIoError});
  Status refused;
  ASSERT_EQ(FeedUntilRefused(cache.get(), sequence, std::span(tokens).subspan(before), &refused), 0u);
  EXPECT_EQ(refused.code(), StatusCode::kIoError);
  EXPECT_THAT(refused.message(), HasSubstr("the test tier reads nothing"));
  tier->Set({});
  EXPECT_EQ(Feed(cache.get(), sequence, std::span(tokens).subspan(before), {64}),
            std::vector(RowsInRam().begin() + before, RowsInRam().end()));
}

TEST(Tier, WhatCanNotBeReadForNowIsNotCutOff) {
  auto tier = std::make_shared<MemoryTier>();
  auto cache = OpenOrDie(OverTier(tier));
  const SequenceId sequence = cache->Create().value();
  Feed(cache.get(), sequence, MadeTokens(kTokens), {64});
  tier->Set({.read = StatusCode::kIoError});
  std::string note;
  const auto cut = cache->CutToSound(sequence, &note);
  ASSERT_FALSE(cut);
  EXPECT_EQ(cut.error().code(), StatusCode::kIoError);
  EXPECT_EQ(cache->Length(sequence), kTokens);
  tier->Set({});
  EXPECT_EQ(cache->CutToSound(sequence, &note).value(), kTokens);
}

TEST(Tier, WhatComesBackWrongIsNeverAttended) {
  auto tier = std::make_shared<MemoryTier>();
  auto cache = OpenOrDie(OverTier(tier));
  const SequenceId sequence = cache->Create().value();
  const auto tokens = MadeTokens(kTokens);
  Feed(cache.get(), sequence, std::span(tokens).first(2560), {64});
  tier->Set({.corrupt = true});
  Status refused;
  ASSERT_EQ(FeedUntilRefused(cache.get(), sequence, std::span(tokens).subspan(2560), &refused), 0u);
  EXPECT_EQ(refused.code(), StatusCode::kCorruption);
  EXPECT_THAT(refused.message(), HasSubstr("test tier at byte"));
  EXPECT_GT(tier->damage_reports(), 0);
}

TEST(Tier, AStoreBesideIsRefused) {
  TempDir store;
  CacheOptions options = OverTier(std::make_shared<MemoryTier>());
  options.store = store.path();
  const auto cache = Cache::Open(options);
  ASSERT_FALSE(cache);
  EXPECT_THAT(cache.error().message(), HasSubstr("not both"));
}

CellMap MapOf(const CacheOptions& options) {
  return MakeCellMap(options.geometry, options.codec, options.sinks, options.codec_ranges).value();
}

// A tier's sums are merged after those of the cells in RAM, so that maxima and sums are rounded in another order, and a
// weight on the edge between two integers may go the other way: docs/kernels.md, for values of size 1.
constexpr float kMergeBound = 5e-4f;

TEST(Tier, AnotherProcessHoldsCellsAndAttendsToThem) {
  for (const int32_t n_sequences : {1, 3}) {
    auto options = OverTier(nullptr);
    options.max_sequences = n_sequences;
    const CellMap map = MapOf(options);
    auto tier = ProcessTier::Start(map).value();
    options.tier = tier;
    options.ram_budget = PlanMemory(options, kTokens, n_sequences)->minimum + (256 << 10);
    auto cache = OpenOrDie(options);
    std::vector<SequenceId> sequences{cache->Create().value()};
    const auto tokens = MadeTokens(kTokens);
    const size_t common = 2560;
    auto rows = Feed(cache.get(), sequences[0], std::span(tokens).first(common), {64});
    while (sequences.size() < static_cast<size_t>(n_sequences)) {
      sequences.push_back(cache->Fork(sequences[0]).value());
    }
    // The forks go on in step: their common past is asked for once, for the rows of all.
    for (size_t at = common; at < tokens.size(); ++at) {
      std::vector<StepItem> items;
      for (const SequenceId sequence : sequences) items.push_back({sequence, std::span(tokens).subspan(at, 1)});
      const auto step = RunStep(cache.get(), items);
      ASSERT_TRUE(step) << step.error().message();
      for (const auto& row : *step) EXPECT_EQ(row, step->front()) << "a row does not depend on who is beside it";
      rows.push_back(step->front());
    }
    ASSERT_GT(InState(*cache, CellState::kPersisted), 0u);
    EXPECT_GT(tier->answers(), 0);
    EXPECT_EQ(tier->reads(), 0) << "no cell came back";
    ASSERT_EQ(rows.size(), RowsInRam().size());
    float worst = 0.0f;
    for (size_t r = 0; r < rows.size(); ++r) {
      for (size_t c = 0; c < rows[r].size(); ++c) worst = std::max(worst, std::abs(rows[r][c] - RowsInRam()[r][c]));
    }
    EXPECT_LT(worst, kMergeBound);
    EXPECT_GT(worst, 0.0f) << "all was attended here";
  }
}

TEST(Tier, AProcessThatDiesOrLiesEndsAStepAndNothingElse) {
  auto options = OverTier(nullptr);
  const CellMap map = MapOf(options);
  auto tier = ProcessTier::Start(map).value();
  options.tier = tier;
  auto cache = OpenOrDie(options);
  const SequenceId sequence = cache->Create().value();
  const auto tokens = MadeTokens(kTokens);
  Feed(cache.get(), sequence, std::span(tokens).first(2560), {64});
  ASSERT_GT(tier->answers(), 0);
  for (const auto lie : {ProcessTier::Lie::kNotANumber, ProcessTier::Lie::kTooFewRows}) {
    tier->SetLie(lie);
    Status refused;
    ASSERT_EQ(FeedUntilRefused(cache.get(), sequence, std::span(tokens).subspan(2560), &refused), 0u);
    EXPECT_EQ(refused.code(), StatusCode::kCorruption) << refused.message();
  }
  tier->SetLie(ProcessTier::Lie::kNone);
  const auto rows = Feed(cache.get(), sequence, std::span(tokens).subspan(2560, 64), {64});
  ASSERT_EQ(rows.size(), 64u);
  EXPECT_NEAR(rows[0][0], RowsInRam()[2560][0], kMergeBound);
  ASSERT_EQ(::kill(tier->pid(), SIGKILL), 0);
  Status refused;
  ASSERT_EQ(FeedUntilRefused(cache.get(), sequence, std::span(tokens).subspan(2624), &refused), 0u);
  EXPECT_EQ(refused.code(), StatusCode::kIoError);
  EXPECT_THAT(refused.message(), HasSubstr("has died"));
  EXPECT_EQ(cache->Length(sequence), 2624);
}

}  // namespace
}  // namespace kvcell
