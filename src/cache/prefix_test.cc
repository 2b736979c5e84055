// Shared = alone: whatever a sequence begins with instead of computing it, and whoever reads the same cells in the same
// step, every answer is to the bit what a cold cache gives.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <thread>

#include "cache/cache_test_util.h"
#include "cache/plan.h"
#include "store/store.h"

namespace kvcell {
namespace {

using ::testing::Eq;
using ::testing::HasSubstr;
using Rows = std::vector<std::vector<float>>;

Rows Alone(CacheOptions options, std::span<const Token> tokens) {
  options.store.clear();
  options.ram_budget = 0;
  options.max_step_tokens = 512;
  options.max_sequences = 1;
  auto cache = OpenOrDie(options);
  return Feed(cache.get(), cache->Create().value(), tokens);
}

std::vector<Token> Joined(std::vector<Token> a, std::span<const Token> b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

std::vector<Token> FirstOf(const std::vector<Token>& tokens, size_t n) {
  return {tokens.begin(), tokens.begin() + static_cast<std::ptrdiff_t>(n)};
}

// A sequence of these tokens that reuses what it can; checks every row that it computes against a cold cache's.
PrefixUse FeedShared(Cache* cache, std::span<const Token> tokens, SequenceId* id = nullptr) {
  const SequenceId sequence = cache->Create().value();
  const auto use = cache->Reuse(sequence, tokens);
  EXPECT_TRUE(use) << use.error().message();
  EXPECT_EQ(cache->Length(sequence), use->tokens);
  const auto from = static_cast<std::ptrdiff_t>(use->tokens);
  const Rows rows = Feed(cache, sequence, tokens.subspan(static_cast<size_t>(use->tokens)), {50});
  const Rows alone = Alone(cache->options(), tokens);
  EXPECT_THAT(rows, Eq(Rows(alone.begin() + from, alone.end()))) << "after " << from << " reused tokens";
  if (id != nullptr) {
    *id = sequence;
  } else {
    EXPECT_TRUE(cache->Free(sequence).ok());
  }
  return *use;
}

TEST(Prefix, ReuseEqualsColdWhereverThePromptsPart) {  // field cases C7, C22, B20
  const auto options = MadeOptions("i4");
  const auto tokens = MadeTokens(300), other = MadeTokens(70, 9);
  auto cache = OpenOrDie(options);
  Feed(cache.get(), cache->Create().value(), tokens);
  for (const size_t common : {0, 1, 63, 64, 65, 127, 128, 129, 200, 255, 256, 257, 299, 300}) {
    const PrefixUse use = FeedShared(cache.get(), Joined(FirstOf(tokens, common), other));
    EXPECT_EQ(use.tokens, static_cast<int64_t>(std::min<size_t>(common, 256) / 64 * 64)) << common;
    if (common < 256) {
      EXPECT_EQ(use.end, PrefixUse::End::kDiffers);
      EXPECT_EQ(use.differs_at, static_cast<int64_t>(common)) << "the first differing position";
    } else {
      EXPECT_EQ(use.end, PrefixUse::End::kEnds);
    }
  }
}

TEST(Prefix, TheLastTokenIsAlwaysComputed) {  // field case C6
  const auto tokens = MadeTokens(256);
  auto cache = OpenOrDie(MadeOptions("i4"));
  Feed(cache.get(), cache->Create().value(), tokens);
  EXPECT_EQ(FeedShared(cache.get(), tokens).tokens, 192) << "its logits are wanted";
  EXPECT_EQ(FeedShared(cache.get(), Joined(tokens, MadeTokens(1, 3))).tokens, 256);
  EXPECT_EQ(FeedShared(cache.get(), FirstOf(tokens, 64)).tokens, 0);
  EXPECT_EQ(FeedShared(cache.get(), FirstOf(tokens, 65)).tokens, 64);
}

TEST(Prefix, BlocksAreKeptForLaterPromptsAndGoWhenRoomIsNeeded) {
  auto options = MadeOptions("i4");
  options.max_sequences = 2;
  options.prefix_bytes = uint64_t{1} << 30;
  const auto tokens = MadeTokens(1000);
  options.ram_budget = PlanMemory(options, 2000, 1)->total;
  auto cache = OpenOrDie(options);
  FeedShared(cache.get(), tokens);
  EXPECT_EQ(cache->Stats().kv_bytes, 0u);
  EXPECT_GT(cache->Stats().prefix_bytes, 0u);
  EXPECT_EQ(FeedShared(cache.get(), tokens).tokens, 960);
  // Others come and go until it has had to make room, the end of its chain first.
  int64_t before = 960;
  for (uint32_t seed = 2; seed < 8; ++seed) {
    FeedShared(cache.get(), MadeTokens(600, seed));
    const SequenceId probe = cache->Create().value();
    const int64_t left = cache->Reuse(probe, Joined(tokens, MadeTokens(1)))->tokens;
    ASSERT_TRUE(cache->Free(probe).ok());
    EXPECT_LE(left, std::max<int64_t>(before, 960));
    before = left;
    EXPECT_LE(cache->Stats().ram_peak_bytes, options.ram_budget);
  }
}

TEST(Prefix, NothingIsKeptWhereNothingIsToBe) {
  auto cache = OpenOrDie(MadeOptions("i4"));
  const auto tokens = MadeTokens(500);
  FeedShared(cache.get(), tokens);
  EXPECT_EQ(cache->Stats().prefix_bytes, 0u);
  EXPECT_EQ(FeedShared(cache.get(), tokens).tokens, 0);
}

TEST(Prefix, KeptBlocksNeverPassTheirLimits) {  // field case F3
  auto options = MadeOptions("i4");
  const uint64_t block = CodedBytes(*MakeCellMap(options.geometry, options.codec, options.sinks), 1, 1, 1);
  options.prefix_bytes = 10 * block;
  options.prefix_roots = 3;
  auto cache = OpenOrDie(options);
  for (uint32_t seed = 1; seed < 12; ++seed) {
    const SequenceId sequence = cache->Create().value();
    Feed(cache.get(), sequence, MadeTokens(seed * 40, seed));
    ASSERT_TRUE(cache->Free(sequence).ok());
    EXPECT_LE(cache->Stats().prefix_bytes, options.prefix_bytes);
  }
}

TEST(Prefix, PublishedItIsThereForOtherCachesAndProcesses) {  // field cases C4, D11
  for (const char* codec : {"f16", "i8", "i4"}) {
    TempDir dir;
    auto options = MadeOptions(codec);
    options.store = dir.path();
    const auto tokens = MadeTokens(400);
    {
      auto cache = OpenOrDie(options);
      const SequenceId sequence = cache->Create().value();
      Feed(cache.get(), sequence, tokens);
      ASSERT_TRUE(cache->Publish(sequence).ok());
      ASSERT_TRUE(cache->Publish(sequence).ok()) << "again: nothing to do";
    }
    auto cache = OpenOrDie(options);
    for (const size_t common : {65, 200, 400}) {
      const PrefixUse use = FeedShared(cache.get(), Joined(FirstOf(tokens, common), MadeTokens(100, 5)));
      EXPECT_EQ(use.tokens, static_cast<int64_t>(common / 64 * 64));
      EXPECT_EQ(use.from_store, use.tokens);
      if (common < 384) {
        EXPECT_EQ(use.differs_at, static_cast<int64_t>(common));
      }
    }
  }
}

TEST(Prefix, ASavedSessionIsAPrefixForOthers) {
  TempDir dir;
  auto options = MadeOptions("i4");
  options.store = dir.path();
  const auto tokens = MadeTokens(333);
  {
    auto cache = OpenOrDie(options);
    const SequenceId sequence = cache->Create().value();
    Feed(cache.get(), sequence, tokens);
    ASSERT_TRUE(cache->Save(sequence, "s", {}, "").ok());
  }
  auto cache = OpenOrDie(options);
  EXPECT_EQ(FeedShared(cache.get(), tokens).from_store, 320);
  auto opened = cache->OpenSession("s");
  ASSERT_TRUE(opened);
  const PrefixUse use = FeedShared(cache.get(), Joined(tokens, MadeTokens(50, 4)));
  EXPECT_EQ(use.tokens, 320);
  EXPECT_EQ(use.from_store, 0) << "a session that is open serves from RAM";
}

TEST(Prefix, BeyondTheBudgetItIsAttendedFromTheFile) {
  TempDir dir;
  auto options = MadeOptions("i4");
  options.store = dir.path();
  options.max_sequences = 1;
  options.max_threads = 1;
  options.max_step_tokens = 64;
  const auto tokens = MadeTokens(4000);
  {
    auto cache = OpenOrDie(options);
    Feed(cache.get(), cache->Create().value(), tokens);
    ASSERT_TRUE(cache->Publish(0).ok());
  }
  options.ram_budget = PlanMemory(options, 4000, 1)->minimum + (256 << 10);
  auto cache = OpenOrDie(options);
  EXPECT_EQ(FeedShared(cache.get(), Joined(tokens, MadeTokens(10, 2))).tokens, 3968);
  EXPECT_GT(cache->Stats().reads_file, 0u);
  EXPECT_LE(cache->Stats().ram_peak_bytes, options.ram_budget);
}

TEST(Prefix, WindowsDecideWhereReuseEndsAndItIsTold) {
  for (const int window : {40, 64, 100, 150}) {
    TempDir dir;
    auto options = MadeOptions("i4", MadeGeometry(2, 4, 2, 64, window));
    options.geometry[0].window = 0;
    options.store = dir.path();
    const auto tokens = MadeTokens(512);
    {
      auto cache = OpenOrDie(options);
      const SequenceId sequence = cache->Create().value();
      Feed(cache.get(), sequence, tokens);
      ASSERT_TRUE(cache->Publish(sequence).ok());
      EXPECT_EQ(FeedShared(cache.get(), Joined(tokens, MadeTokens(9, 3))).tokens, 512) << "its end, from RAM";
    }
    auto cache = OpenOrDie(options);
    EXPECT_EQ(FeedShared(cache.get(), Joined(tokens, MadeTokens(9, 3))).tokens, 512);
    const PrefixUse none = FeedShared(cache.get(), Joined(FirstOf(tokens, 200), MadeTokens(100, 3)));
    EXPECT_EQ(none.tokens, 0) << window;
    EXPECT_EQ(none.matched, 192);
    EXPECT_EQ(none.end, PrefixUse::End::kWindow);
    EXPECT_THAT(none.note, HasSubstr("windows"));
  }
}

// Published twice, at 256 and at 512 tokens, so that two ends have their windows' cells: a prompt that parts from it
// before the second end goes on from the first.
TEST(Prefix, ReuseGoesBackToTheLastEndWhoseWindowsAreThere) {
  TempDir dir;
  auto options = MadeOptions("i4", MadeGeometry(2, 4, 2, 64, 40));
  options.geometry[0].window = 0;
  options.store = dir.path();
  const auto tokens = MadeTokens(512);
  {
    auto cache = OpenOrDie(options);
    const SequenceId sequence = cache->Create().value();
    Feed(cache.get(), sequence, FirstOf(tokens, 256));
    ASSERT_TRUE(cache->Publish(sequence).ok());
    Feed(cache.get(), sequence, std::span(tokens).subspan(256));
    ASSERT_TRUE(cache->Publish(sequence).ok());
  }
  for (const size_t common : {257, 320, 383, 400}) {
    auto cache = OpenOrDie(options);
    const PrefixUse use = FeedShared(cache.get(), Joined(FirstOf(tokens, common), MadeTokens(100, 3)));
    EXPECT_EQ(use.tokens, 256) << common;
    EXPECT_EQ(use.matched, static_cast<int64_t>(common / 64 * 64));
    if (use.matched > 256) {
      EXPECT_EQ(use.end, PrefixUse::End::kWindow) << common;
      EXPECT_THAT(use.note, HasSubstr("windows"));
    }
  }
}

TEST(Prefix, RecentBlocksComeExactlyOrNotAtAll) {
  TempDir dir;
  auto options = MadeOptions("i4");
  options.store = dir.path();
  options.recent_blocks = 2;
  const auto tokens = MadeTokens(400);
  {
    auto cache = OpenOrDie(options);
    const SequenceId sequence = cache->Create().value();
    Feed(cache.get(), sequence, tokens);
    ASSERT_TRUE(cache->Publish(sequence).ok());
  }
  auto cache = OpenOrDie(options);
  const PrefixUse whole = FeedShared(cache.get(), Joined(tokens, MadeTokens(150, 3)));
  EXPECT_EQ(whole.tokens, 384);
  const PrefixUse inside = FeedShared(cache.get(), Joined(FirstOf(tokens, 300), MadeTokens(150, 4)));
  EXPECT_EQ(inside.tokens, 0) << "exact cells are stored at the published end only";
  EXPECT_EQ(inside.matched, 256);
  EXPECT_EQ(inside.end, PrefixUse::End::kReplicas);
  EXPECT_THAT(inside.note, HasSubstr("recent_blocks"));
  EXPECT_EQ(cache->Stats().approximate_reads, 0u);
}

TEST(Prefix, WhatWasComputedFromApproximateReadsIsNobodyElses) {
  auto options = MadeOptions("i4");
  options.recent_blocks = 1;
  auto cache = OpenOrDie(options);
  const auto tokens = MadeTokens(400);
  const SequenceId sequence = cache->Create().value();
  Feed(cache.get(), sequence, tokens);
  ASSERT_EQ(cache->Trim(sequence, 192).value(), 192);
  Feed(cache.get(), sequence, std::span(tokens).subspan(192));
  EXPECT_GT(cache->Stats().approximate_reads, 0u);
  const SequenceId other = cache->Create().value();
  EXPECT_LE(cache->Reuse(other, tokens)->tokens, 192);
}

TEST(Prefix, AnotherIdentityIsNamed) {  // field case C19
  TempDir dir;
  auto options = MadeOptions("i4");
  options.store = dir.path();
  const auto tokens = MadeTokens(200);
  {
    auto cache = OpenOrDie(options);
    Feed(cache.get(), cache->Create().value(), tokens);
    ASSERT_TRUE(cache->Publish(0).ok());
  }
  options.identity = {{"weights", "others"}};
  auto cache = OpenOrDie(options);
  const PrefixUse use = FeedShared(cache.get(), tokens);
  EXPECT_EQ(use.tokens, 0);
  EXPECT_EQ(use.end, PrefixUse::End::kOtherIdentity);
  EXPECT_THAT(use.note, HasSubstr("weights"));
}

TEST(Prefix, ADamagedCellShortensWhatIsReused) {  // field cases C20, D8
  TempDir dir;
  auto options = MadeOptions("i4");
  options.store = dir.path();
  const auto tokens = MadeTokens(400);
  {
    auto cache = OpenOrDie(options);
    const SequenceId sequence = cache->Create().value();
    Feed(cache.get(), sequence, tokens);
    ASSERT_TRUE(cache->Publish(sequence).ok());
    for (const CellInfo& cell : cache->Inspect(sequence)) {
      if (cell.token_start != 192 || cell.layer != 1 || cell.head != 1) continue;
      std::fstream file(cell.storage_path, std::ios::in | std::ios::out | std::ios::binary);
      file.seekp(static_cast<std::streamoff>(cell.offset + 100));
      file.put('\x5a');
      file.put('\x5a');
    }
  }
  auto cache = OpenOrDie(options);
  const PrefixUse use = FeedShared(cache.get(), tokens);
  EXPECT_EQ(use.tokens, 192);
  EXPECT_EQ(use.end, PrefixUse::End::kDamaged);
  EXPECT_THAT(use.note, HasSubstr("layer 1, head 1"));
}

TEST(Prefix, DraftedTokensAreNobodyElsesUntilTheyAreAccepted) {
  TempDir dir;
  auto options = MadeOptions("i4");
  options.store = dir.path();
  auto cache = OpenOrDie(options);
  const auto tokens = MadeTokens(300);
  const SequenceId sequence = cache->Create().value();
  Feed(cache.get(), sequence, FirstOf(tokens, 100));
  const StepItem item{.sequence = sequence, .tokens = std::span(tokens).subspan(100, 130), .draft = true};
  ASSERT_TRUE(RunStep(cache.get(), {&item, 1}));
  const SequenceId other = cache->Create().value();
  EXPECT_EQ(cache->Reuse(other, tokens)->tokens, 64);
  ASSERT_TRUE(cache->Free(other).ok());
  EXPECT_EQ(cache->Save(sequence, "s", {}, "").code(), StatusCode::kInvalidArgument);
  ASSERT_EQ(cache->Trim(sequence, 140).value(), 128);
  EXPECT_TRUE(cache->Save(sequence, "s", {}, "").ok());
  EXPECT_EQ(FeedShared(cache.get(), tokens).tokens, 128) << "accepted";
}

// Whatever the draft began and ended with, and whoever carries it: only what was accepted can ever be found.
TEST(Prefix, DraftedTokensAreNeverPublished) {
  const auto tokens = MadeTokens(400);
  for (const size_t start : {0, 1, 63, 64, 65, 127, 128, 129}) {
    for (const size_t accepted : {0, 1, 63, 64, 65, 128}) {
      TempDir dir;
      auto options = MadeOptions("i4");
      options.store = dir.path();
      auto cache = OpenOrDie(options);
      const SequenceId sequence = cache->Create().value();
      if (start > 0) Feed(cache.get(), sequence, FirstOf(tokens, start));
      const StepItem guess{.sequence = sequence, .tokens = std::span(tokens).subspan(start, 150), .draft = true};
      ASSERT_TRUE(RunStep(cache.get(), {&guess, 1}));
      const SequenceId fork = cache->Fork(sequence).value();
      const auto found = [&](Cache* in) {
        const SequenceId probe = in->Create().value();
        const auto use = in->Reuse(probe, tokens);
        EXPECT_TRUE(in->Free(probe).ok());
        return use->tokens;
      };
      const auto whole = [](size_t n) { return static_cast<int64_t>(n / 64 * 64); };
      for (const SequenceId id : {sequence, fork}) ASSERT_TRUE(cache->Publish(id).ok());
      ASSERT_EQ(found(cache.get()), whole(start)) << start;
      ASSERT_EQ(found(OpenOrDie(options).get()), whole(start)) << start << ", from the store";
      ASSERT_TRUE(cache->Trim(sequence, static_cast<int64_t>(start + accepted)));
      ASSERT_TRUE(cache->Publish(sequence).ok());
      ASSERT_TRUE(cache->Free(fork).ok());
      ASSERT_EQ(found(cache.get()), whole(start + accepted)) << start << ", accepted " << accepted;
      ASSERT_EQ(found(OpenOrDie(options).get()), whole(start + accepted)) << start << ", accepted " << accepted;
    }
  }
}

// Why there is no more, wherever a prompt is looked up: in RAM, or in the store by a cache that has just been opened.
TEST(Prefix, EveryLookupSaysWhyThereIsNoMore) {
  using End = PrefixUse::End;
  TempDir dir;
  auto options = MadeOptions("i4");
  options.store = dir.path();
  const auto tokens = MadeTokens(320);
  auto writer = OpenOrDie(options);
  Feed(writer.get(), writer->Create().value(), tokens);
  ASSERT_TRUE(writer->Publish(0).ok());
  const auto more = MadeTokens(100, 7);
  const auto lookup = [&](Cache* cache, const std::vector<Token>& prompt) {
    const SequenceId probe = cache->Create().value();
    PrefixUse use = cache->Reuse(probe, prompt).value();
    EXPECT_TRUE(cache->Free(probe).ok());
    EXPECT_EQ(use.note.empty(), use.end == End::kWhole);
    return use;
  };
  for (const bool in_ram : {true, false}) {
    auto reader = OpenOrDie(options);
    Cache* cache = in_ram ? writer.get() : reader.get();
    EXPECT_EQ(lookup(cache, FirstOf(tokens, 300)).end, End::kWhole);
    EXPECT_EQ(lookup(cache, FirstOf(tokens, 40)).end, End::kNothing) << "less than a block";
    EXPECT_EQ(lookup(cache, Joined(tokens, more)).end, End::kEnds);
    const PrefixUse differs = lookup(cache, Joined(FirstOf(tokens, 150), more));
    EXPECT_EQ(differs.end, End::kDiffers);
    EXPECT_EQ(differs.tokens, 128);
    EXPECT_EQ(differs.differs_at, 150);
  }
  ASSERT_TRUE(writer->Free(0).ok());
  auto store = Store::Open(options.store, {}).value();
  ASSERT_GT(store->EvictPrefixes(1).value(), 0u);
  {
    auto cache = OpenOrDie(options);
    const PrefixUse evicted = lookup(cache.get(), Joined(tokens, more));
    EXPECT_EQ(evicted.end, End::kEvicted);
    EXPECT_EQ(evicted.tokens, 256);
    EXPECT_THAT(evicted.note, HasSubstr("256"));
  }
  options.name_space = "another";
  EXPECT_EQ(lookup(OpenOrDie(options).get(), Joined(tokens, more)).end, End::kNothing) << "not even that there is more";
}

TEST(Prefix, SixteenRequestsOfOneTickShareWhatTheyCompute) {  // field case C15
  auto options = MadeOptions("i4");
  options.max_sequences = 16;
  options.max_step_tokens = 16 * 140;
  auto cache = OpenOrDie(options);
  const auto prefix = MadeTokens(128);
  std::vector<std::vector<Token>> prompts;
  std::vector<StepItem> items;
  for (uint32_t i = 0; i < 16; ++i) {
    prompts.push_back(Joined(prefix, MadeTokens(10, i + 2)));
    const SequenceId sequence = cache->Create().value();
    EXPECT_EQ(cache->Reuse(sequence, prompts.back())->tokens, 0) << "nothing is shared before it is complete";
  }
  for (uint32_t i = 0; i < 16; ++i) items.push_back({.sequence = static_cast<SequenceId>(i), .tokens = prompts[i]});
  const Rows rows = RunStep(cache.get(), items).value();
  for (size_t i = 0; i < 16; ++i) {
    const Rows alone = Alone(options, prompts[i]);
    EXPECT_THAT(Rows(rows.begin() + static_cast<std::ptrdiff_t>(i * 138),
                     rows.begin() + static_cast<std::ptrdiff_t>((i + 1) * 138)),
                Eq(alone));
  }
  const auto cells = cache->Stats().cells;
  EXPECT_EQ(cells.by_state[static_cast<size_t>(CellState::kQuantized)], 2u * 4u) << "two blocks, kept once";
}

// Decoding together over a common past, at every way of parting: beam search and parallel sampling.
TEST(Prefix, SequencesThatShareBlocksReadThemOnceAndEqualThoseAlone) {
  for (const char* codec : {"f16", "i8", "i4"}) {
    for (const int window : {0, 100}) {
      auto options = MadeOptions(codec, MadeGeometry(2, 6, 2, 64, window));
      options.geometry[0].window = 0;
      options.max_sequences = 8;
      // Past one and past two segments of 16 blocks; parting at block edges and inside.
      for (const size_t common : {size_t{130}, size_t{1023}, size_t{1024}, size_t{1100}}) {
        auto cache = OpenOrDie(options);
        const auto prefix = MadeTokens(static_cast<int64_t>(common));
        const SequenceId first = cache->Create().value();
        Feed(cache.get(), first, prefix);
        std::vector<std::vector<Token>> all;
        for (uint32_t i = 0; i < 8; ++i) {
          if (i > 0) {
            ASSERT_TRUE(cache->Fork(first));
          }
          all.push_back(Joined(prefix, MadeTokens(70 + 3 * static_cast<int64_t>(i), i + 5)));
        }
        const auto before = cache->Stats();
        Rows first_rows, last_rows;
        for (size_t step = 0; step < 70; ++step) {
          std::vector<StepItem> items;
          for (size_t i = 0; i < 8; ++i)
            items.push_back({static_cast<SequenceId>(i), std::span(all[i]).subspan(common + step, 1)});
          const Rows rows = RunStep(cache.get(), items).value();
          first_rows.push_back(rows.front());
          last_rows.push_back(rows.back());
        }
        const auto from = static_cast<std::ptrdiff_t>(common);
        for (const auto& [i, rows] : {std::pair(size_t{0}, first_rows), std::pair(size_t{7}, last_rows)}) {
          const Rows alone = Alone(options, std::span(all[i]).first(common + 70));
          ASSERT_THAT(rows, Eq(Rows(alone.begin() + from, alone.end())))
              << codec << " window " << window << " common " << common;
        }
        const auto after = cache->Stats();
        if (window == 0) {
          EXPECT_GE(after.reads_shared - before.reads_shared, 70 * 7 * (common / 64) * 4);
        }
      }
    }
  }
}

// Beam search on quantized cells: beams are forked and dropped at every offset around block edges; each equals its
// tokens alone.
TEST(Prefix, BeamsForkedAndTrimmedAtEveryOffset) {
  auto options = MadeOptions("i4");
  options.max_sequences = 6;
  for (size_t start = 60; start <= 68; ++start) {
    auto cache = OpenOrDie(options);
    std::vector<std::pair<SequenceId, std::vector<Token>>> beams;
    const auto prefix = MadeTokens(static_cast<int64_t>(start) + 64);
    beams.emplace_back(cache->Create().value(), prefix);
    Feed(cache.get(), beams[0].first, prefix);
    uint32_t seed = 100;
    for (int round = 0; round < 12; ++round) {
      // The best beam is forked over the worst ones, one of them is rolled back by a few tokens as a wrong guess is.
      while (beams.size() < 4) beams.emplace_back(cache->Fork(beams[0].first).value(), beams[0].second);
      std::vector<std::vector<Token>> added;
      std::vector<StepItem> items;
      for (size_t i = 0; i < beams.size(); ++i) added.push_back(MadeTokens(1 + static_cast<int64_t>(i % 3), ++seed));
      for (size_t i = 0; i < beams.size(); ++i) items.push_back({beams[i].first, added[i]});
      const Rows rows = RunStep(cache.get(), items).value();
      size_t row = 0;
      for (size_t i = 0; i < beams.size(); ++i) {
        beams[i].second = Joined(beams[i].second, added[i]);
        const Rows alone = Alone(options, beams[i].second);
        for (size_t t = 0; t < added[i].size(); ++t) {
          ASSERT_EQ(rows[row++], alone[beams[i].second.size() - added[i].size() + t])
              << start << " round " << round << " beam " << i;
        }
      }
      auto& guess = beams.back();
      const size_t back = 1 + static_cast<size_t>(round) % 5;
      const auto from =
          static_cast<size_t>(cache->Trim(guess.first, static_cast<int64_t>(guess.second.size() - back)).value());
      guess.second.resize(guess.second.size() - back);
      Feed(cache.get(), guess.first, std::span(guess.second).subspan(from));
      std::rotate(beams.begin(), beams.begin() + 1, beams.end());
      ASSERT_TRUE(cache->Free(beams.back().first).ok());
      beams.pop_back();
    }
  }
}

TEST(Prefix, ThreadsThatReadTogetherChangeNothing) {
  auto options = MadeOptions("i4", MadeGeometry(1, 6, 2, 64));
  options.max_threads = 3;
  options.max_sequences = 5;
  auto cache = OpenOrDie(options);
  const auto prefix = MadeTokens(1500);
  const SequenceId first = cache->Create().value();
  Feed(cache.get(), first, prefix);
  std::vector<std::vector<Token>> all;
  for (uint32_t i = 0; i < 5; ++i) {
    if (i > 0) {
      ASSERT_TRUE(cache->Fork(first));
    }
    all.push_back(Joined(prefix, MadeTokens(60, i + 5)));
  }
  for (size_t step = 0; step < 60; ++step) {
    std::vector<StepItem> items;
    std::vector<Token> tokens;
    for (size_t i = 0; i < 5; ++i)
      items.push_back({static_cast<SequenceId>(i), std::span(all[i]).subspan(1500 + step, 1)});
    std::vector<float> k, v, q, out(5 * 6 * 64);
    for (size_t i = 0; i < 5; ++i) {
      const auto add = [&](std::vector<float>* to, int kind, int heads) {
        const auto made = MadeRows(items[i].tokens, static_cast<int64_t>(1500 + step), 0, kind, heads, 64);
        to->insert(to->end(), made.begin(), made.end());
      };
      add(&k, 0, 2);
      add(&v, 1, 2);
      add(&q, 2, 6);
    }
    ASSERT_TRUE(cache->Begin(items).ok());
    std::vector<std::thread> threads;
    for (int part = 0; part < 3; ++part) {
      threads.emplace_back([&, part] { cache->Compute(0, k.data(), v.data(), q.data(), out.data(), part, 3); });
    }
    for (auto& thread : threads) thread.join();
    ASSERT_TRUE(cache->Commit().ok());
    if (step % 29 != 0) continue;
    for (size_t i = 0; i < 5; ++i) {
      const Rows alone = Alone(options, std::span(all[i]).first(1500 + step + 1));
      ASSERT_TRUE(
          std::equal(alone.back().begin(), alone.back().end(), out.begin() + static_cast<std::ptrdiff_t>(i * 6 * 64)))
          << step;
    }
  }
}

TEST(Prefix, AFragmentedPoolServesWhateverFits) {  // field case C5
  auto options = MadeOptions("i4", MadeGeometry(2, 2, 1, 64));
  options.max_sequences = 40;
  options.ram_budget = PlanMemory(options, 64, 40)->total + (uint64_t{1} << 20);
  auto cache = OpenOrDie(options);
  std::vector<SequenceId> sequences;
  while (cache->Room() >= 192 && sequences.size() < 38) {
    sequences.push_back(cache->Create().value());
    Feed(cache.get(), sequences.back(), MadeTokens(192, static_cast<uint32_t>(sequences.size())));
  }
  ASSERT_GT(sequences.size(), 10u);
  int64_t freed = 0;
  for (size_t i = 0; i < sequences.size(); i += 2) {
    ASSERT_TRUE(cache->Free(sequences[i]).ok());
    freed += 192;
  }
  EXPECT_GE(cache->Room(), freed) << "every hole counts";
  const auto tokens = MadeTokens(freed, 99);
  const SequenceId whole = cache->Create().value();
  EXPECT_THAT(Feed(cache.get(), whole, tokens), Eq(Alone(options, tokens)));
  EXPECT_LE(cache->Stats().ram_peak_bytes, options.ram_budget);
}

TEST(Prefix, WasteIsLessThanABlockPerSequence) {
  auto cache = OpenOrDie(MadeOptions("i4"));
  const uint64_t block = F16Bytes(cache->options().geometry, kBlockTokens);
  for (const int64_t n : {1, 63, 64, 65, 129}) {
    const SequenceId sequence = cache->Create().value();
    Feed(cache.get(), sequence, MadeTokens(n, static_cast<uint32_t>(n)));
    const uint64_t exact = cache->Stats().kv_bytes - static_cast<uint64_t>(n / 64) * block / 4;
    EXPECT_LE(exact, 2 * block) << "an open block and the sinks, whatever the length";
    ASSERT_TRUE(cache->Free(sequence).ok());
  }
}

TEST(Prefix, AFullPoolNeverMixesPrompts) {  // field cases C16, C26
  auto options = MadeOptions("i4");
  options.max_sequences = 4;
  options.prefix_bytes = uint64_t{1} << 30;
  options.ram_budget = PlanMemory(options, 64, 4)->minimum +
                       12 * CodedBytes(*MakeCellMap(options.geometry, options.codec, options.sinks), 4096, 1, 1);
  auto cache = OpenOrDie(options);
  for (uint32_t i = 0; i < 40; ++i) {
    // Some unique, some that were there before and may be gone.
    FeedShared(cache.get(), MadeTokens(130 + (i * 37) % 200, i % 7 == 0 ? 1 : i));
    EXPECT_LE(cache->Stats().ram_peak_bytes, options.ram_budget);
  }
}

TEST(Prefix, WrongUseIsAnErrorAndChangesNothing) {
  auto cache = OpenOrDie(MadeOptions("i4"));
  const auto tokens = MadeTokens(100);
  EXPECT_EQ(cache->Reuse(3, tokens).error().code(), StatusCode::kNotFound);
  EXPECT_EQ(cache->Publish(3).code(), StatusCode::kNotFound);
  const SequenceId sequence = cache->Create().value();
  EXPECT_EQ(cache->Reuse(sequence, {})->tokens, 0);
  Feed(cache.get(), sequence, tokens);
  EXPECT_EQ(cache->Reuse(sequence, tokens).error().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(cache->Publish(sequence).code(), StatusCode::kInvalidArgument) << "no store";
  const StepItem item{sequence, tokens};
  ASSERT_TRUE(cache->Begin({&item, 1}).ok());
  EXPECT_EQ(cache->Reuse(sequence, tokens).error().code(), StatusCode::kBusy);
  cache->Abort();
}

}  // namespace
}  // namespace kvcell
