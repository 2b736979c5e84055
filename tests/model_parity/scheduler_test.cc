// Many requests at once: each gets the answer it would get alone, joins and leaves at any step, and never costs another
// its own.
#include "model/scheduler.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <random>

#include "logits.h"
#include "tiny_model.h"

namespace kvcell {
namespace {

using testing::HasSubstr;

std::vector<Token> RandomTokens(int n, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<Token> tokens;
  for (int i = 0; i < n; ++i) tokens.push_back(static_cast<Token>(random() % 256));
  return tokens;
}

std::vector<Token> Joined(std::vector<Token> a, const std::vector<Token>& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

class SchedulerTest : public testing::TestWithParam<TinyModelSpec> {
 protected:
  void SetUp() override {
    path_ = TemporaryPath("scheduled.gguf");
    WriteTinyModel(GetParam(), path_);
    model_ = Model::Load(path_, {.n_threads = 1, .max_batch = 256}).value();
  }
  void TearDown() override { std::remove(path_.c_str()); }

  CacheOptions Options(int32_t sequences, uint64_t budget = 0) const {
    CacheOptions options;
    options.geometry = model_->facts().geometry;
    options.codec = ParseCodec("i4").value();
    options.max_sequences = sequences;
    options.max_step_tokens = 256;
    options.max_threads = 1;
    options.ram_budget = budget;
    options.identity = model_->identity();
    return options;
  }

  // The answer may part from the one alone where the choice lies within ggml's own noise of batch sizes, and only
  // there.
  void ExpectSolo(const GenerationRequest& request, const SampleResult& result, int32_t sample) {
    auto cache = Cache::Open(Options(1)).value();
    Scheduler scheduler(model_.get(), cache.get(), {.step_tokens = 256});
    GenerationRequest alone = request;
    alone.n_samples = 1;
    alone.sampler.seed += static_cast<uint32_t>(sample);
    const RequestId id = scheduler.Submit(alone).value();
    ASSERT_TRUE(scheduler.Run().ok());
    const std::vector<Token>& expected = scheduler.Find(id)->samples[0].tokens;
    if (expected == result.tokens) {
      EXPECT_EQ(scheduler.Find(id)->samples[0].end, result.end);
      return;
    }
    const auto [mine, theirs] = std::ranges::mismatch(result.tokens, expected);
    ASSERT_TRUE(mine != result.tokens.end() && theirs != expected.end());
    EXPECT_TRUE(WithinNoise(alone, {expected.begin(), theirs}, *mine))
        << "token " << mine - result.tokens.begin() << " of sample " << sample << " is " << *mine << ", alone "
        << *theirs;
  }

  // Whether logits that differ from those after these tokens by no more than ggml's products do in another batch give
  // `token`.
  bool WithinNoise(const GenerationRequest& request, const std::vector<Token>& before, Token token) {
    auto cache = Cache::Open(Options(1)).value();
    const SequenceId sequence = cache->Create().value();
    const auto tokens = Joined(request.prompt, before);
    std::vector<float> logits;
    for (size_t at = 0; at < tokens.size(); at += 256) {
      const ModelStep step{.sequence = sequence,
                           .tokens = std::span(tokens).subspan(at, std::min<size_t>(256, tokens.size() - at)),
                           .want_logits = true};
      EXPECT_TRUE(model_->Forward(cache.get(), {&step, 1}, &logits).ok());
    }
    const auto [low, high] = std::ranges::minmax(logits);
    std::mt19937 random(1);
    std::normal_distribution<float> noise(0.0f, 1e-3f * (high - low));
    for (int i = 0; i < 300; ++i) {
      std::vector<float> near = logits;
      for (float& x : near) x += noise(random);
      if (Sampler(request.sampler).Sample(near, static_cast<int64_t>(tokens.size())) == token) return true;
    }
    return false;
  }

  std::string path_;
  std::unique_ptr<Model> model_;
};

TEST_P(SchedulerTest, RequestsThatJoinAndLeaveAtAnyStepEqualThemselvesAlone) {
  auto cache = Cache::Open(Options(5)).value();
  Scheduler scheduler(model_.get(), cache.get(), {.step_tokens = 200, .chunk_tokens = 40});
  std::vector<std::pair<RequestId, GenerationRequest>> requests;
  const auto common = RandomTokens(150, 1);
  for (uint32_t i = 0; i < 9; ++i) {
    GenerationRequest request;
    request.prompt = i % 3 == 2 ? RandomTokens(20 + static_cast<int>(i) * 30, i + 10)
                                : Joined(common, RandomTokens(10 + static_cast<int>(i), i + 10));
    request.max_tokens = 5 + i * 4;
    request.sampler = {.temperature = i % 2 == 0 ? 0.0f : 0.8f, .seed = i};
    requests.emplace_back(scheduler.Submit(request).value(), request);
    for (uint32_t steps = 0; steps < i % 4; ++steps) ASSERT_TRUE(scheduler.Step(nullptr).value());
  }
  ASSERT_TRUE(scheduler.Run().ok());
  for (const auto& [id, request] : requests) {
    const RequestResult& result = *scheduler.Find(id);
    EXPECT_EQ(result.state, RequestState::kDone);
    EXPECT_EQ(result.reused.tokens + result.fed_tokens, static_cast<int64_t>(request.prompt.size()));
    ExpectSolo(request, result.samples[0], 0);
  }
  EXPECT_EQ(cache->Stats().kv_bytes, 0u);
}

TEST_P(SchedulerTest, SamplesEqualRequestsOfTheirOwnSeeds) {
  auto cache = Cache::Open(Options(6)).value();
  Scheduler scheduler(model_.get(), cache.get(), {});
  GenerationRequest request{
      .prompt = RandomTokens(190, 3), .max_tokens = 70, .sampler = {.temperature = 1.0f, .seed = 11}, .n_samples = 6};
  const RequestId id = scheduler.Submit(request).value();
  ASSERT_TRUE(scheduler.Run().ok());
  const RequestResult& result = *scheduler.Find(id);
  ASSERT_EQ(result.samples.size(), 6u);
  EXPECT_EQ(result.fed_tokens, 190) << "the prompt is fed once";
  for (int32_t i = 0; i < 6; ++i) ExpectSolo(request, result.samples[static_cast<size_t>(i)], i);
  EXPECT_NE(result.samples[0].tokens, result.samples[1].tokens);
  EXPECT_GT(cache->Stats().reads_shared, 0u);
}

TEST_P(SchedulerTest, WhatSeveralBeginWithIsComputedOnce) {  // field case C15
  auto cache = Cache::Open(Options(8)).value();
  Scheduler scheduler(model_.get(), cache.get(), {.step_tokens = 64});
  const bool windows = cache->options().geometry[0].window > 0 || cache->options().geometry.back().window > 0;
  const auto common = RandomTokens(640, 5);
  std::vector<RequestId> ids;
  for (uint32_t i = 0; i < 8; ++i)
    ids.push_back(scheduler.Submit({.prompt = Joined(common, RandomTokens(5, i + 50)), .max_tokens = 3}).value());
  ASSERT_TRUE(scheduler.Run().ok());
  int64_t fed = 0;
  for (const RequestId id : ids) fed += scheduler.Find(id)->fed_tokens;
  if (!windows) {
    EXPECT_EQ(fed, 640 + 8 * 5) << "all in the queue at once";
  }
  EXPECT_GE(fed, 640 + 8 * 5);
}

TEST_P(SchedulerTest, BatchedLogitsStayWithinTheNoiseOfBatchSizes) {
  auto options = Options(4);
  auto together = Cache::Open(options).value();
  std::vector<std::vector<Token>> prompts;
  std::vector<SequenceId> ids;
  for (uint32_t i = 0; i < 4; ++i) {
    prompts.push_back(RandomTokens(60 + static_cast<int>(i) * 45, i + 1));
    ids.push_back(together->Create().value());
    const ModelStep step{.sequence = ids[i], .tokens = prompts[i], .want_logits = false};
    ASSERT_TRUE(model_->Forward(together.get(), {&step, 1}, nullptr).ok());
  }
  const auto next = RandomTokens(4, 77);
  std::vector<ModelStep> steps;
  for (size_t i = 0; i < 4; ++i)
    steps.push_back({.sequence = ids[i], .tokens = std::span(next).subspan(i, 1), .want_logits = true});
  std::vector<float> batched;
  ASSERT_TRUE(model_->Forward(together.get(), steps, &batched).ok());
  const auto n_vocab = static_cast<size_t>(model_->facts().n_vocab);
  for (size_t i = 0; i < 4; ++i) {
    auto alone = Cache::Open(options).value();
    const SequenceId id = alone->Create().value();
    std::vector<float> logits;
    const ModelStep prompt{.sequence = id, .tokens = prompts[i], .want_logits = false};
    const ModelStep one{.sequence = id, .tokens = std::span(next).subspan(i, 1), .want_logits = true};
    ASSERT_TRUE(model_->Forward(alone.get(), {&prompt, 1}, nullptr).ok());
    ASSERT_TRUE(model_->Forward(alone.get(), {&one, 1}, &logits).ok());
    EXPECT_LT(MeanKld(logits, std::span(batched).subspan(i * n_vocab, n_vocab), n_vocab), 1e-6);
  }
}

TEST_P(SchedulerTest, CancelledAnywhereTheOthersGoOnAndNothingIsLeft) {  // field case C12
  for (const int cancel_at : {0, 2, 5, 9}) {
    auto cache = Cache::Open(Options(3)).value();
    Scheduler scheduler(model_.get(), cache.get(), {.step_tokens = 80, .chunk_tokens = 30});
    GenerationRequest kept{.prompt = RandomTokens(140, 1), .max_tokens = 20};
    GenerationRequest gone{.prompt = Joined(RandomTokens(128, 1), RandomTokens(200, 2)), .max_tokens = 30};
    GenerationRequest later{.prompt = gone.prompt, .max_tokens = 10};
    const RequestId a = scheduler.Submit(kept).value(), b = scheduler.Submit(gone).value(),
                    c = scheduler.Submit(later).value();
    for (int i = 0; i < cancel_at; ++i) ASSERT_TRUE(scheduler.Step(nullptr).has_value());
    ASSERT_TRUE(scheduler.Cancel(b).ok());
    ASSERT_TRUE(scheduler.Cancel(b).ok());
    ASSERT_TRUE(scheduler.Run().ok());
    EXPECT_EQ(scheduler.Find(b)->state, RequestState::kCancelled);
    ExpectSolo(kept, scheduler.Find(a)->samples[0], 0);
    ExpectSolo(later, scheduler.Find(c)->samples[0], 0);
    EXPECT_EQ(cache->Stats().kv_bytes, 0u);
    EXPECT_EQ(scheduler.Cancel(99).code(), StatusCode::kNotFound);
  }
}

TEST_P(SchedulerTest, ARequestWaitsForRoomOrIsRefusedAndNeverKillsAnother) {
  CacheOptions options = Options(4);
  options.ram_budget = std::max(PlanMemory(options, 640, 1)->total, PlanMemory(options, 640, 4)->minimum);
  auto cache = Cache::Open(options).value();
  Scheduler scheduler(model_.get(), cache.get(), {.step_tokens = 128});
  const int64_t room = cache->Room();
  ASSERT_GE(room, 256);
  const auto refused = scheduler.Submit({.prompt = RandomTokens(100, 1), .max_tokens = room});
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code(), StatusCode::kOutOfBudget);
  EXPECT_THAT(refused.error().message(), HasSubstr(std::to_string(room)));
  std::vector<std::pair<RequestId, GenerationRequest>> requests;
  for (uint32_t i = 0; i < 4; ++i) {
    GenerationRequest request{.prompt = RandomTokens(static_cast<int>(room * 2 / 3), i + 1), .max_tokens = 20};
    requests.emplace_back(scheduler.Submit(request).value(), request);
  }
  ASSERT_TRUE(scheduler.Step(nullptr).value());
  EXPECT_EQ(scheduler.n_running(), 1u) << "two do not fit";
  EXPECT_EQ(scheduler.n_waiting(), 3u);
  ASSERT_TRUE(scheduler.Run().ok());
  for (const auto& [id, request] : requests) {
    EXPECT_EQ(scheduler.Find(id)->state, RequestState::kDone) << scheduler.Find(id)->error.message();
    ExpectSolo(request, scheduler.Find(id)->samples[0], 0);
  }
  EXPECT_LE(cache->Stats().ram_peak_bytes, options.ram_budget);
}

TEST_P(SchedulerTest, FinishedRequestsAreFoundByAnotherProcess) {
  const std::string store = TemporaryPath("scheduled.store");
  CacheOptions options = Options(2);
  options.store = store;
  const auto prompt = RandomTokens(200, 8);
  {
    auto cache = Cache::Open(options).value();
    Scheduler scheduler(model_.get(), cache.get(), {.publish = true});
    ASSERT_TRUE(scheduler.Submit({.prompt = prompt, .max_tokens = 1}).has_value());
    ASSERT_TRUE(scheduler.Run().ok());
  }
  auto cache = Cache::Open(options).value();
  Scheduler scheduler(model_.get(), cache.get(), {});
  GenerationRequest request{.prompt = Joined(prompt, RandomTokens(3, 4)), .max_tokens = 8};
  const RequestId id = scheduler.Submit(request).value();
  ASSERT_TRUE(scheduler.Run().ok());
  EXPECT_EQ(scheduler.Find(id)->reused.tokens, 192);
  ExpectSolo(request, scheduler.Find(id)->samples[0], 0);
  cache.reset();
  std::filesystem::remove_all(store);
}

TEST_P(SchedulerTest, WrongRequestsAreRefusedByName) {
  auto cache = Cache::Open(Options(2)).value();
  Scheduler scheduler(model_.get(), cache.get(), {.context = 100});
  EXPECT_EQ(scheduler.Submit({}).error().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(scheduler.Submit({.prompt = RandomTokens(100, 1)}).error().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(scheduler.Submit({.prompt = {1 << 30}}).error().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(scheduler.Submit({.prompt = {1}, .n_samples = 3}).error().code(), StatusCode::kInvalidArgument);
  EXPECT_FALSE(scheduler.Step(nullptr).value());
}

INSTANTIATE_TEST_SUITE_P(Models, SchedulerTest,
                         testing::Values(TinyModelSpec{},
                                         TinyModelSpec{.architecture = "gemma3", .n_layers = 3, .window = 96}));

}  // namespace
}  // namespace kvcell
