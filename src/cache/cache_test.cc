// Cold = chunked = forked = trimmed = batched = threaded, and all of them close to plain attention over the same
// values.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <thread>

#include "cache/cache_test_util.h"
#include "cache/plan.h"

namespace kvcell {
namespace {

using ::testing::Eq;
using ::testing::HasSubstr;

std::vector<std::vector<float>> Cold(const CacheOptions& options, std::span<const Token> tokens,
                                     const std::vector<size_t>& chunks = {512}) {
  auto cache = OpenOrDie(options);
  return Feed(cache.get(), cache->Create().value(), tokens, chunks);
}

// Plain attention in double over unrounded values: what f16 cells must come very close to and INT4 cells close.
std::vector<double> PlainRow(const LayerGeometry& g, std::span<const Token> tokens, int64_t position, int layer,
                             int head) {
  const auto q =
      MadeRows(tokens.subspan(static_cast<size_t>(position), 1), position, layer, 2, g.n_heads, g.head_dim_k);
  const int kv = head / g.group();
  const int64_t begin = g.window > 0 ? std::max<int64_t>(0, position - g.window + 1) : 0;
  std::vector<double> scores;
  double highest = -INFINITY;
  for (int64_t p = begin; p <= position; ++p) {
    double score = 0;
    for (int i = 0; i < g.head_dim_k; ++i) {
      score += static_cast<double>(q[static_cast<size_t>(head * g.head_dim_k + i)]) *
               static_cast<double>(MadeValue(tokens[static_cast<size_t>(p)], p, layer, 0, kv * g.head_dim_k + i));
    }
    score *= static_cast<double>(g.scale);
    if (g.softcap > 0) score = static_cast<double>(g.softcap) * std::tanh(score / static_cast<double>(g.softcap));
    scores.push_back(score);
    highest = std::max(highest, score);
  }
  std::vector<double> out(static_cast<size_t>(g.head_dim_v));
  double sum = 0;
  for (int64_t p = begin; p <= position; ++p) {
    const double w = std::exp(scores[static_cast<size_t>(p - begin)] - highest);
    sum += w;
    for (int i = 0; i < g.head_dim_v; ++i) {
      out[static_cast<size_t>(i)] +=
          w * static_cast<double>(MadeValue(tokens[static_cast<size_t>(p)], p, layer, 1, kv * g.head_dim_v + i));
    }
  }
  for (double& x : out) x /= sum;
  return out;
}

double RelativeError(const Geometry& geometry, std::span<const Token> tokens,
                     const std::vector<std::vector<float>>& rows, std::initializer_list<int64_t> positions) {
  double error = 0, power = 0;
  for (const int64_t position : positions) {
    size_t at = 0;
    for (size_t l = 0; l < geometry.size(); ++l) {
      for (int h = 0; h < geometry[l].n_heads; ++h) {
        for (const double expected : PlainRow(geometry[l], tokens, position, static_cast<int>(l), h)) {
          const double got = static_cast<double>(rows[static_cast<size_t>(position)][at++]);
          error += (got - expected) * (got - expected);
          power += expected * expected;
        }
      }
    }
  }
  return std::sqrt(error / power);
}

TEST(Cache, F16CellsAreAsGoodAsPlainAttention) {
  const auto tokens = MadeTokens(300);
  const auto options = MadeOptions("f16");
  const auto rows = Cold(options, tokens);
  EXPECT_LT(RelativeError(options.geometry, tokens, rows, {0, 1, 3, 4, 63, 64, 65, 127, 128, 200, 299}), 1e-3);
}

TEST(Cache, Int4CellsComeClose) {
  const auto tokens = MadeTokens(300);
  const auto options = MadeOptions("i4");
  const auto rows = Cold(options, tokens);
  EXPECT_LT(RelativeError(options.geometry, tokens, rows, {63}), 1e-3) << "the open block is exact";
  const double error = RelativeError(options.geometry, tokens, rows, {64, 65, 127, 128, 200, 299});
  EXPECT_LT(error, 0.15);
  EXPECT_GT(error, 0.01) << "sealed cells must really be read back quantized (A16)";
}

TEST(Cache, SlidingWindowSeesItsWindowOnly) {
  for (const int window : {1, 5, 64, 65, 100}) {
    auto options = MadeOptions("f16", MadeGeometry(2, 4, 2, 64, window));
    options.geometry[1].window = 0;
    const auto tokens = MadeTokens(300);
    for (const auto& chunks : {std::vector<size_t>{1}, {512}, {100}}) {
      const auto rows = Cold(options, tokens, chunks);
      EXPECT_LT(RelativeError(options.geometry, tokens, rows, {0, 63, 64, 65, 127, 128, 163, 200, 299}), 1e-3)
          << window;
    }
  }
}

TEST(Cache, LayersOfDifferentShapes) {  // field case B8
  Geometry geometry = MadeGeometry(1, 4, 2, 64);
  geometry.push_back({.n_heads = 6, .n_kv_heads = 1, .head_dim_k = 128, .head_dim_v = 96, .window = 70, .scale = 0.1f});
  geometry.push_back(
      {.n_heads = 3, .n_kv_heads = 3, .head_dim_k = 80, .head_dim_v = 80, .scale = 0.1f, .softcap = 20.0f});
  const auto tokens = MadeTokens(260);
  const auto options = MadeOptions("f16", geometry);
  const auto rows = Cold(options, tokens, {100});
  EXPECT_LT(RelativeError(geometry, tokens, rows, {0, 64, 100, 200, 259}), 1e-3);
}

TEST(Cache, ChunkingChangesNothing) {  // field cases A17, B3, B14, B19, B20
  for (const int recent : {0, 1, 2}) {
    for (const int sinks : {0, 4, 17, 64}) {
      auto options = MadeOptions("i4");
      options.recent_blocks = recent;
      options.sinks = sinks;
      const auto tokens = MadeTokens(270);
      const auto whole = Cold(options, tokens);
      for (const auto& chunks : std::vector<std::vector<size_t>>{{1}, {7, 33, 100}, {64}, {63, 2, 64}, {129}}) {
        EXPECT_EQ(Cold(options, tokens, chunks), whole)
            << "recent " << recent << " sinks " << sinks << " chunk " << chunks[0];
      }
    }
  }
}

TEST(Cache, RecentBlocksAreExact) {  // field case A19
  auto options = MadeOptions("i4", MadeGeometry(1));
  options.recent_blocks = 2;
  const auto tokens = MadeTokens(400);
  const auto rows = Cold(options, tokens, {1});
  EXPECT_LT(RelativeError(options.geometry, tokens, rows, {100, 127, 128, 191}), 1e-3)
      << "all within own and two recent blocks";
  EXPECT_GT(RelativeError(options.geometry, tokens, rows, {192, 255, 399}), 1e-3)
      << "block 0 is read as its codes from here";
}

TEST(Cache, ThreadsChangeNothing) {
  auto options = MadeOptions("i4", MadeGeometry(1, 6, 2, 64));
  options.max_threads = 3;
  const auto tokens = MadeTokens(1500);
  const auto alone = Cold(options, tokens, {512, 512, 300, 1});
  auto cache = OpenOrDie(options);
  const SequenceId sequence = cache->Create().value();
  size_t at = 0;
  for (const size_t n : {size_t{512}, size_t{512}, size_t{300}}) {
    const auto chunk = std::span(tokens).subspan(at, n);
    const StepItem item{sequence, chunk};
    ASSERT_TRUE(cache->Begin({&item, 1}).ok());
    const auto start = static_cast<int64_t>(at);
    const auto k = MadeRows(chunk, start, 0, 0, 2, 64), v = MadeRows(chunk, start, 0, 1, 2, 64),
               q = MadeRows(chunk, start, 0, 2, 6, 64);
    std::vector<float> out(n * 6 * 64);
    std::vector<std::thread> threads;
    for (int part = 0; part < 3; ++part) {
      threads.emplace_back([&, part] { cache->Compute(0, k.data(), v.data(), q.data(), out.data(), part, 3); });
    }
    for (auto& thread : threads) thread.join();
    ASSERT_TRUE(cache->Commit().ok());
    for (size_t r = 0; r < n; ++r) {
      ASSERT_TRUE(
          std::equal(alone[at + r].begin(), alone[at + r].end(), out.begin() + static_cast<std::ptrdiff_t>(r * 6 * 64)))
          << at + r;
    }
    at += n;
  }
}

TEST(Cache, ForksEqualTheSequenceAlone) {
  const auto options = MadeOptions("i4");
  const auto shared = MadeTokens(150, 1), left = MadeTokens(100, 2), right = MadeTokens(130, 3);
  auto cache = OpenOrDie(options);
  const SequenceId a = cache->Create().value();
  Feed(cache.get(), a, shared);
  const SequenceId b = cache->Fork(a).value();
  const auto rows_b = Feed(cache.get(), b, right, {10});
  const auto rows_a = Feed(cache.get(), a, left, {1});
  auto joined = shared;
  joined.insert(joined.end(), left.begin(), left.end());
  auto alone = Cold(options, joined);
  EXPECT_THAT(rows_a, Eq(std::vector(alone.begin() + 150, alone.end())));
  joined = shared;
  joined.insert(joined.end(), right.begin(), right.end());
  alone = Cold(options, joined);
  EXPECT_THAT(rows_b, Eq(std::vector(alone.begin() + 150, alone.end())));
}

TEST(Cache, ForkCopiesNothingUntilTheFirstWrite) {
  const auto options = MadeOptions("i4");
  auto cache = OpenOrDie(options);
  const SequenceId a = cache->Create().value();
  Feed(cache.get(), a, MadeTokens(150));
  const auto before = cache->Stats();
  const SequenceId b = cache->Fork(a).value();
  EXPECT_EQ(cache->Stats().kv_bytes, before.kv_bytes);
  Feed(cache.get(), b, MadeTokens(1));
  const auto after = cache->Stats();
  const uint64_t one_open_block = F16Bytes(options.geometry, kBlockTokens);
  EXPECT_EQ(after.kv_bytes, before.kv_bytes + one_open_block);
  ASSERT_TRUE(cache->Free(a).ok());
  ASSERT_TRUE(cache->Free(b).ok());
  EXPECT_EQ(cache->Stats().kv_bytes, 0u);
}

TEST(Cache, TrimThenAppendEqualsCold) {  // field cases B12, C7, C22
  const auto options = MadeOptions("i4");
  const auto tokens = MadeTokens(300), other = MadeTokens(60, 9);
  for (const int64_t cut : {0, 1, 63, 64, 65, 127, 128, 200, 255, 256, 257, 299, 300, 400}) {
    auto cache = OpenOrDie(options);
    const SequenceId sequence = cache->Create().value();
    Feed(cache.get(), sequence, tokens);
    const int64_t from = cache->Trim(sequence, cut).value();
    const int64_t kept = std::min<int64_t>(cut, 300);
    EXPECT_EQ(from, cut >= 300   ? 300
                    : cut >= 256 ? cut
                                 : cut - cut % 64)
        << "a cut inside a sealed block goes to its start";
    std::vector<Token> joined(tokens.begin(), tokens.begin() + kept);
    joined.insert(joined.end(), other.begin(), other.end());
    const auto rows = Feed(cache.get(), sequence, std::span(joined).subspan(static_cast<size_t>(from)), {50});
    const auto alone = Cold(options, joined);
    EXPECT_THAT(rows, Eq(std::vector(alone.begin() + from, alone.end()))) << cut;
  }
}

TEST(Cache, TrimBehindASlidingWindowStartsOver) {  // field case C9
  auto options = MadeOptions("i4", MadeGeometry(2, 4, 2, 64, 100));
  options.geometry[0].window = 0;
  auto cache = OpenOrDie(options);
  const SequenceId sequence = cache->Create().value();
  const auto tokens = MadeTokens(600);
  Feed(cache.get(), sequence, tokens);
  EXPECT_EQ(cache->Trim(sequence, 590).value(), 590);
  EXPECT_EQ(cache->Trim(sequence, 200).value(), 0) << "the window's cells there are gone";
  const auto rows = Feed(cache.get(), sequence, std::span(tokens).first(200), {33});
  EXPECT_THAT(rows, Eq(Cold(options, std::span(tokens).first(200))));
}

TEST(Cache, SlidingWindowLayersHoldTheirWindowAndTwoBlocks) {
  auto options = MadeOptions("i4", MadeGeometry(1, 4, 2, 64, 128));
  auto cache = OpenOrDie(options);
  const SequenceId sequence = cache->Create().value();
  Feed(cache.get(), sequence, MadeTokens(3000), {1});
  int in_ram = 0;
  for (const CellInfo& cell : cache->Inspect(sequence)) in_ram += cell.head == 0 && cell.tier == "ram";
  EXPECT_LE(in_ram, 128 / 64 + 2);
  const auto full = [&] {
    auto other = OpenOrDie(MadeOptions("i4", MadeGeometry(1)));
    Feed(other.get(), other->Create().value(), MadeTokens(3000));
    return other->Stats().kv_bytes;
  }();
  EXPECT_LT(cache->Stats().kv_bytes, full / 5);
}

TEST(Cache, BatchedEqualsAlone) {  // field case A20
  const auto options = MadeOptions("i4");
  const auto a = MadeTokens(200, 1), b = MadeTokens(200, 2), c = MadeTokens(200, 3);
  auto cache = OpenOrDie(options);
  const SequenceId ids[] = {cache->Create().value(), cache->Create().value(), cache->Create().value()};
  Feed(cache.get(), ids[0], std::span(a).first(130));
  Feed(cache.get(), ids[1], std::span(b).first(5));
  const StepItem items[] = {
      {ids[0], std::span(a).subspan(130, 1)}, {ids[1], std::span(b).subspan(5, 70)}, {ids[2], std::span(c).first(64)}};
  const auto rows = RunStep(cache.get(), items).value();
  const auto alone_a = Cold(options, a), alone_b = Cold(options, b), alone_c = Cold(options, c);
  EXPECT_EQ(rows[0], alone_a[130]);
  EXPECT_THAT(std::vector(rows.begin() + 1, rows.begin() + 71),
              Eq(std::vector(alone_b.begin() + 5, alone_b.begin() + 75)));
  EXPECT_THAT(std::vector(rows.begin() + 71, rows.end()), Eq(std::vector(alone_c.begin(), alone_c.begin() + 64)));
}

TEST(Cache, AbortLeavesTheSequenceAsItWas) {  // field cases C1, C12
  const auto options = MadeOptions("i4");
  const auto tokens = MadeTokens(260);
  auto cache = OpenOrDie(options);
  const SequenceId sequence = cache->Create().value();
  Feed(cache.get(), sequence, std::span(tokens).first(100));
  const auto before = cache->Stats();
  const auto junk = MadeTokens(150, 77);
  const StepItem item{sequence, junk};
  ASSERT_TRUE(cache->Begin({&item, 1}).ok());
  cache->Abort();
  EXPECT_EQ(cache->Length(sequence), 100);
  EXPECT_EQ(cache->Stats().kv_bytes, before.kv_bytes);
  const auto rows = Feed(cache.get(), sequence, std::span(tokens).subspan(100), {40});
  const auto alone = Cold(options, tokens);
  EXPECT_THAT(rows, Eq(std::vector(alone.begin() + 100, alone.end())));
}

TEST(Cache, BadValuesAreCountedAndHarmless) {  // field cases A4, A8
  const auto options = MadeOptions("i4", MadeGeometry(1, 1, 1, 64));
  auto cache = OpenOrDie(options);
  const SequenceId sequence = cache->Create().value();
  const auto tokens = MadeTokens(130);
  const StepItem item{sequence, tokens};
  ASSERT_TRUE(cache->Begin({&item, 1}).ok());
  auto k = MadeRows(tokens, 0, 0, 0, 1, 64), v = MadeRows(tokens, 0, 0, 1, 1, 64);
  const auto q = MadeRows(tokens, 0, 0, 2, 1, 64);
  k[5 * 64] = std::nanf("");
  k[6 * 64 + 1] = INFINITY;
  v[5 * 64 + 2] = -INFINITY;
  v[7 * 64] = -70000.0f;
  std::vector<float> out(130 * 64);
  cache->Compute(0, k.data(), v.data(), q.data(), out.data());
  ASSERT_TRUE(cache->Commit().ok());
  EXPECT_EQ(cache->Stats().not_finite, 3u);
  EXPECT_EQ(cache->Stats().saturated, 1u);
  for (const float x : out) ASSERT_TRUE(std::isfinite(x));
}

TEST(Cache, MemoryIsWhatThePlanSays) {
  for (const int64_t context : {64, 1000, 4096}) {
    auto options = MadeOptions("i4", MadeGeometry(4, 4, 2, 64));
    options.max_sequences = 1;
    const MemoryPlan plan = PlanMemory(options, context, 1).value();
    auto cache = OpenOrDie(options);
    const SequenceId sequence = cache->Create().value();
    Feed(cache.get(), sequence, MadeTokens(context));
    const auto allocated = static_cast<double>(cache->Stats().ram_peak_bytes);
    EXPECT_NEAR(static_cast<double>(plan.total) / allocated, 1.0, 0.02) << context;
    EXPECT_EQ(plan.f16, cache->Stats().f16_bytes);
  }
}

TEST(Cache, BitsPerElementCountEverything) {
  const auto options = MadeOptions("i4", MadeGeometry(1, 4, 2, 64));
  auto cache = OpenOrDie(options);
  Feed(cache.get(), cache->Create().value(), MadeTokens(640));
  EXPECT_LE(cache->Stats().bits_per_element, 4.6);
  EXPECT_GE(cache->Stats().bits_per_element, 4.0);
}

TEST(Cache, BitsPerElementAreTheMeanOfAllLayersBeforeAnyCellIsSealedToo) {
  auto options = MadeOptions("i4", MadeGeometry(3, 4, 2, 64));
  options.codec_ranges = {{.first_layer = 1, .last_layer = 1, .codec = *ParseCodec("i8")}};
  auto cache = OpenOrDie(options);
  const double before = cache->Stats().bits_per_element;
  EXPECT_NEAR(
      before,
      (2 * *CodecBitsPerElement(*ParseCodec("i4"), 64, 64) + *CodecBitsPerElement(*ParseCodec("i8"), 64, 64)) / 3,
      1e-9);
  Feed(cache.get(), cache->Create().value(), MadeTokens(640));
  EXPECT_DOUBLE_EQ(cache->Stats().bits_per_element, before);
}

TEST(Cache, EarlyLayersHaveTheirOwnV) {
  auto options = MadeOptions("i43", MadeGeometry(9, 4, 2, 64));  // two early layers
  const auto bits = [](const std::string& codec) { return *CodecBitsPerElement(*ParseCodec(codec), 64, 64); };
  const std::string late = "k=int4:g64:lloyd:rot:off,v=int3:g32:skew:rot";
  const std::string early = "k=int4:g64:lloyd:rot:off,v=int4:g64:lloyd:rot";
  auto cache = OpenOrDie(options);
  Feed(cache.get(), cache->Create().value(), MadeTokens(640));
  EXPECT_NEAR(cache->Stats().bits_per_element, (2 * bits(early) + 7 * bits(late)) / 9, 1e-9);
  // The same within a range: the quarter is the model's.
  options.codec = *ParseCodec("i8");
  options.codec_ranges = {{.first_layer = 1, .last_layer = 4, .codec = *ParseCodec("i43")}};
  EXPECT_NEAR(OpenOrDie(options)->Stats().bits_per_element, (bits(early) + 3 * bits(late) + 5 * bits("i8")) / 9, 1e-9);
}

TEST(Cache, WrongUseIsAnErrorAndChangesNothing) {
  const auto options = MadeOptions("i4");
  auto cache = OpenOrDie(options);
  const SequenceId sequence = cache->Create().value();
  const auto tokens = MadeTokens(600);
  const auto begin = [&](std::vector<StepItem> items) { return cache->Begin(items).code(); };
  EXPECT_EQ(begin({}), StatusCode::kInvalidArgument);
  EXPECT_EQ(begin({{sequence, {}}}), StatusCode::kInvalidArgument);
  EXPECT_EQ(begin({{sequence, std::span(tokens)}}), StatusCode::kInvalidArgument) << "600 tokens, 512 allowed";
  EXPECT_EQ(begin({{99, std::span(tokens).first(1)}}), StatusCode::kNotFound);
  EXPECT_EQ(begin({{-1, std::span(tokens).first(1)}}), StatusCode::kNotFound);
  EXPECT_EQ(begin({{sequence, std::span(tokens).first(1)}, {sequence, std::span(tokens).first(1)}}),
            StatusCode::kInvalidArgument);
  EXPECT_EQ(cache->Commit().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(begin({{sequence, std::span(tokens).first(1)}}), StatusCode::kOk);
  EXPECT_EQ(begin({{sequence, std::span(tokens).first(1)}}), StatusCode::kBusy);
  EXPECT_EQ(cache->Fork(sequence).error().code(), StatusCode::kBusy);
  cache->Abort();
  EXPECT_EQ(cache->Trim(sequence, -1).error().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(cache->Save(sequence, "x", {}, "").code(), StatusCode::kInvalidArgument) << "no store";
  EXPECT_EQ(cache->Length(sequence), 0);
}

TEST(Cache, LayersAndPartsThatAreNoneAreErrorsOfTheStep) {
  auto options = MadeOptions("i4");
  options.max_threads = 2;
  auto cache = OpenOrDie(options);
  const SequenceId sequence = cache->Create().value();
  const auto tokens = MadeTokens(4);
  const StepItem item{sequence, tokens};
  const std::vector<float> k(1024), q(2048);
  std::vector<float> out(2048);
  for (const int layer : {-1, 2, 1000}) {
    ASSERT_TRUE(cache->Begin({&item, 1}).ok());
    EXPECT_EQ(cache->Append(layer, k.data(), k.data()).code(), StatusCode::kInvalidArgument);
    EXPECT_EQ(cache->Attend(layer, q.data(), out.data()).code(), StatusCode::kInvalidArgument);
    cache->Compute(layer, k.data(), k.data(), q.data(), out.data());
    EXPECT_THAT(cache->Commit().message(), HasSubstr("the geometry has 0..1"));
  }
  for (const auto& [part, n_parts] : {std::pair(0, 0), {0, 3}, {-1, 1}, {1, 1}, {0, -1}}) {
    ASSERT_TRUE(cache->Begin({&item, 1}).ok());
    cache->Compute(0, k.data(), k.data(), q.data(), out.data(), part, n_parts);
    EXPECT_EQ(cache->Commit().code(), StatusCode::kInvalidArgument) << part << " of " << n_parts;
  }
  EXPECT_EQ(cache->Length(sequence), 0);
}

// A layer's cells that nothing was written to hold what a sequence that is gone has left there.
TEST(Cache, ALayerIsAppendedInEveryStepOfASequenceOrInNone) {
  auto cache = OpenOrDie(MadeOptions("i4"));
  const auto tokens = MadeTokens(70);
  const std::vector<float> k(70 * 128), q(70 * 256);
  std::vector<float> out(70 * 256);
  const auto step = [&](SequenceId sequence, std::vector<int> layers) {
    const StepItem item{sequence, tokens};
    EXPECT_TRUE(cache->Begin({&item, 1}).ok());
    for (const int l : layers) cache->Compute(l, k.data(), k.data(), q.data(), out.data());
    return cache->Commit();
  };
  SequenceId sequence = cache->Create().value();
  EXPECT_TRUE(step(sequence, {0, 1}).ok());
  EXPECT_THAT(step(sequence, {}).message(), HasSubstr("layer 0 of the step was left out"));
  EXPECT_THAT(step(sequence, {0}).message(), HasSubstr("layer 1 of the step was left out"));
  EXPECT_THAT(step(sequence, {0, 0, 1}).message(), HasSubstr("twice"));
  EXPECT_EQ(cache->Length(sequence), 70);
  ASSERT_TRUE(cache->Free(sequence).ok());
  sequence = cache->Create().value();
  EXPECT_TRUE(step(sequence, {1}).ok());
  EXPECT_TRUE(step(sequence, {1}).ok());
  EXPECT_THAT(step(sequence, {0, 1}).message(),
              HasSubstr("layer 0 of the step was left out by the sequence's earlier"));
  EXPECT_EQ(cache->Length(sequence), 140);
}

TEST(Cache, ABudgetTooSmallIsRefusedWithTheSmallestThatWorks) {
  auto options = MadeOptions("i4");
  options.ram_budget = 1000;
  const auto refused = Cache::Open(options);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code(), StatusCode::kOutOfBudget);
  const MemoryPlan plan = PlanMemory(options, 4096, options.max_sequences).value();
  EXPECT_THAT(refused.error().message(), ::testing::HasSubstr(std::to_string(plan.minimum)));
  options.ram_budget = plan.minimum;
  EXPECT_TRUE(Cache::Open(options).has_value());
}

TEST(Cache, WithoutAStoreAFullBudgetIsAnErrorBeforeAnythingChanges) {
  auto options = MadeOptions("i4");
  options.ram_budget = PlanMemory(options, 4096, options.max_sequences).value().minimum;
  auto cache = OpenOrDie(options);
  const SequenceId sequence = cache->Create().value();
  const auto tokens = MadeTokens(512);
  Status status;
  for (int i = 0; i < 100 && status.ok(); ++i) {
    const StepItem item{sequence, tokens};
    const int64_t before = cache->Length(sequence);
    auto rows = RunStep(cache.get(), {&item, 1});
    if (!rows) {
      status = rows.error();
      EXPECT_EQ(cache->Length(sequence), before);
    }
    EXPECT_LE(cache->Stats().ram_peak_bytes, options.ram_budget);
  }
  EXPECT_EQ(status.code(), StatusCode::kOutOfBudget);
}

TEST(Cache, BadGeometryIsRefused) {
  const auto refused = [](auto change) {
    auto options = MadeOptions();
    change(&options);
    auto cache = Cache::Open(options);
    return !cache && cache.error().code() == StatusCode::kInvalidArgument;
  };
  EXPECT_TRUE(refused([](CacheOptions* o) { o->geometry.clear(); }));
  EXPECT_TRUE(refused([](CacheOptions* o) { o->geometry[0].n_kv_heads = 0; }));
  EXPECT_TRUE(refused([](CacheOptions* o) { o->geometry[1].n_heads = 3; }));
  EXPECT_TRUE(refused([](CacheOptions* o) { o->geometry[0].head_dim_k = 0; }));
  EXPECT_TRUE(refused([](CacheOptions* o) { o->geometry[0].head_dim_v = 1 << 20; }));
  EXPECT_TRUE(refused([](CacheOptions* o) { o->geometry[0].scale = std::nanf(""); }));
  EXPECT_TRUE(refused([](CacheOptions* o) { o->sinks = 65; }));
  EXPECT_TRUE(refused([](CacheOptions* o) { o->max_step_tokens = 0; }));
  EXPECT_TRUE(refused([](CacheOptions* o) { o->recent_blocks = -1; }));
  EXPECT_TRUE(refused([](CacheOptions* o) { o->ttl_seconds = -1; }));
  EXPECT_TRUE(refused([](CacheOptions* o) { o->ram_budget = UINT64_MAX; }));
  EXPECT_TRUE(refused([](CacheOptions* o) { o->rope.resize(1); }));
  EXPECT_TRUE(refused([](CacheOptions* o) { o->rope.assign(2, {.factors = {1.0f}}); }));
  EXPECT_TRUE(refused([](CacheOptions* o) { o->rope.assign(2, {.base = 0.0f, .factors = {}}); }));
  EXPECT_TRUE(refused([](CacheOptions* o) { o->codec_ranges = {{.first_layer = 1, .last_layer = 0, .codec = {}}}; }));
}

}  // namespace
}  // namespace kvcell
