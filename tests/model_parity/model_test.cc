// What the Model promises beside right logits: facts, identity, batches, errors that change nothing, sampling, f32
// copies.
#include "model/model.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <limits>
#include <map>
#include <set>

#include "logits.h"
#include "reference_cache.h"
#include "tiny_model.h"

namespace kvcell {
namespace {

using testing::HasSubstr;

class ModelTest : public testing::Test {
 protected:
  void SetUp() override {
    path_ = TemporaryPath("model.gguf");
    WriteTinyModel(Spec(), path_);
    Result<std::unique_ptr<Model>> model = Model::Load(path_, {.n_threads = 1, .max_batch = 32});
    ASSERT_TRUE(model.has_value()) << model.error().message();
    model_ = std::move(*model);
    cache_ = std::make_unique<ReferenceCache>(model_->facts().geometry, ReferenceCache::Precision::kF32);
  }
  void TearDown() override { std::remove(path_.c_str()); }

  static TinyModelSpec Spec() {
    TinyModelSpec spec;
    spec.n_heads = 4;
    spec.n_kv_heads = 2;
    return spec;
  }
  static std::map<std::string, std::string> Identity(const std::string& path) {
    const Result<std::unique_ptr<Model>> model = Model::Load(path, {.n_threads = 1, .max_batch = 1});
    EXPECT_TRUE(model.has_value());
    return {(*model)->identity().begin(), (*model)->identity().end()};
  }
  void ExpectRefused(std::span<const ModelStep> steps, std::string_view what) {
    std::vector<float> logits{1.0f};
    const Status status = model_->Forward(cache_.get(), steps, &logits);
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    EXPECT_THAT(status.message(), HasSubstr(std::string(what)));
    EXPECT_EQ(logits.size(), 1u);
  }

  std::string path_;
  std::unique_ptr<Model> model_;
  std::unique_ptr<ReferenceCache> cache_;
};

TEST_F(ModelTest, FactsAreWhatTheFileStates) {
  for (const ModelFacts& facts : {model_->facts(), *Model::ReadFacts(path_)}) {
    EXPECT_EQ(facts.architecture, "llama");
    EXPECT_EQ(facts.name, "tiny");
    EXPECT_EQ(facts.license, "cc0-1.0 (https://example.org/license)");
    EXPECT_EQ(facts.source, "https://example.org/tiny");
    EXPECT_EQ(facts.weight_types, "f32 x20");
    EXPECT_EQ(facts.n_layers, 2);
    EXPECT_EQ(facts.context_train, 4096);
    EXPECT_EQ(facts.n_vocab, 286);
    EXPECT_EQ(facts.file_bytes, std::filesystem::file_size(path_));
    EXPECT_EQ(facts.weights_bytes, facts.n_parameters * 4);
    ASSERT_EQ(facts.geometry.size(), 2u);
    EXPECT_EQ(facts.geometry[1].n_heads, 4);
    EXPECT_EQ(facts.geometry[1].n_kv_heads, 2);
    EXPECT_EQ(facts.geometry[1].head_dim_k, 64);
    EXPECT_EQ(facts.geometry[1].window, 0);
    EXPECT_FLOAT_EQ(facts.geometry[1].scale, 0.125f);
  }
}

TEST_F(ModelTest, C19IdentityChangesWithWeightsTokenizerAndRope) {
  const auto before = Identity(path_);
  EXPECT_EQ(Identity(path_), before);
  const auto changed = [&](const TinyModelSpec& spec) {
    WriteTinyModel(spec, path_);
    return Identity(path_);
  };
  TinyModelSpec spec = Spec();
  spec.seed = 2;
  auto other = changed(spec);
  EXPECT_NE(other["weights"], before.at("weights"));
  EXPECT_EQ(other["tokenizer"], before.at("tokenizer"));
  EXPECT_EQ(other["rope"], before.at("rope"));
  spec = Spec();
  spec.rope_base = 20000.0f;
  EXPECT_NE(changed(spec)["rope"], before.at("rope"));
  spec = Spec();
  spec.rope_factors = true;
  EXPECT_NE(changed(spec)["rope"], before.at("rope"));
  spec = Spec();
  spec.architecture = "qwen3";
  other = changed(spec);
  EXPECT_NE(other["architecture"], before.at("architecture"));
  EXPECT_NE(other["tokenizer"], before.at("tokenizer"));
  // Keys balanced against queries are other keys than those of builds before.
  EXPECT_EQ(before.count("keys"), 0u);
  EXPECT_EQ(other["keys"], "balanced1");
}

TEST_F(ModelTest, KeysAreBalancedWhereTheHeadsAreNormed) {
  EXPECT_TRUE(model_->facts().key_factors.empty());
  TinyModelSpec spec = Spec();
  spec.architecture = "qwen3";
  WriteTinyModel(spec, path_);
  const auto facts = Model::ReadFacts(path_);
  ASSERT_TRUE(facts.has_value()) << facts.error().message();
  ASSERT_EQ(facts->key_factors.size(), 2u);
  ASSERT_EQ(facts->key_factors[1].size(), 64u);
  EXPECT_NE(facts->key_factors[0], facts->key_factors[1]);
}

TEST_F(ModelTest, TokenizesAndBack) {
  const Result<std::vector<Token>> tokens = model_->Tokenize("hello \xe2\x82\xac", true, true);
  ASSERT_TRUE(tokens.has_value()) << tokens.error().message();
  EXPECT_EQ(tokens->front(), 1);  // BOS
  std::string text;
  for (size_t i = 1; i < tokens->size(); ++i) text += model_->Piece((*tokens)[i]);
  EXPECT_EQ(text, " hello \xe2\x82\xac");
  EXPECT_EQ(model_->Piece(-1), "");
  EXPECT_EQ(model_->Piece(1 << 20), "");
  EXPECT_TRUE(model_->IsEndOfGeneration(2));
  EXPECT_FALSE(model_->IsEndOfGeneration(-1));
  EXPECT_FALSE(model_->IsEndOfGeneration(50));
  const ChatMessage message{.role = "user", .content = "hi"};
  EXPECT_EQ(model_->ApplyChatTemplate({&message, 1}, true).error().code(), StatusCode::kUnsupported);
}

// Decision 3: batched = alone, whatever else is in the batch and whose logits are wanted.
TEST_F(ModelTest, BatchedIsAlone) {
  const std::vector<std::vector<Token>> texts{{5, 6, 7, 8, 9}, {50}, {100, 90, 80}};
  std::vector<std::vector<float>> alone;
  for (const auto& text : texts) {
    const std::vector<float> all = ChunkedLogits(model_.get(), cache_.get(), text, {32});
    alone.push_back(std::vector<float>(all.end() - model_->facts().n_vocab, all.end()));
  }
  std::vector<ModelStep> steps;
  for (const auto& text : texts) steps.push_back({.sequence = *cache_->Create(), .tokens = text});
  steps[0].want_logits = true;
  steps[2].want_logits = true;
  std::vector<float> logits;
  ASSERT_TRUE(model_->Forward(cache_.get(), steps, &logits).ok());
  const auto n_vocab = static_cast<size_t>(model_->facts().n_vocab);
  ASSERT_EQ(logits.size(), 2 * n_vocab);
  EXPECT_LT(MeanKld(alone[0], std::span(logits).first(n_vocab), n_vocab), 1e-10);
  EXPECT_LT(MeanKld(alone[2], std::span(logits).last(n_vocab), n_vocab), 1e-10);
  // A step that wants nothing still appends.
  const Token next[] = {3};
  ModelStep step{.sequence = steps[1].sequence, .tokens = next};
  ASSERT_TRUE(model_->Forward(cache_.get(), {&step, 1}, &logits).ok());
  EXPECT_TRUE(logits.empty());
  EXPECT_EQ(cache_->Length(steps[1].sequence), 2);
  step.want_logits = true;
  ASSERT_TRUE(model_->Forward(cache_.get(), {&step, 1}, &logits).ok());
  const std::vector<Token> whole{50, 3, 3};
  const std::vector<float> all = ChunkedLogits(model_.get(), cache_.get(), whole, {1});
  EXPECT_LT(MeanKld(std::span(all).last(n_vocab), logits, n_vocab), 1e-10);
}

// Graphs are kept by shape and share one buffer: going back and forth between shapes must not mix them up.
TEST_F(ModelTest, ShapesTakeTurns) {
  std::vector<Token> text;
  for (Token t = 0; t < 60; ++t) text.push_back(3 + t * 4);
  const std::vector<float> once = ChunkedLogits(model_.get(), cache_.get(), text, {32});
  const std::vector<float> mixed =
      ChunkedLogits(model_.get(), cache_.get(), text, {1, 2, 1, 3, 2, 4, 1, 5, 6, 7, 8, 1, 9, 2});
  EXPECT_LT(MeanKld(once, mixed, static_cast<size_t>(model_->facts().n_vocab)), 1e-10);
}

TEST_F(ModelTest, BadStepsChangeNothing) {
  const SequenceId s = *cache_->Create();
  const Token good[] = {1, 2}, high[] = {1, 286}, low[] = {-1};
  const std::vector<Token> many(33, 1);
  ExpectRefused({}, "a batch of 0 rows");
  ExpectRefused(std::vector<ModelStep>{{.sequence = s, .tokens = {}}}, "without tokens");
  ExpectRefused(std::vector<ModelStep>{{.sequence = s, .tokens = high}}, "token 286 is none of the model's 286");
  ExpectRefused(std::vector<ModelStep>{{.sequence = s, .tokens = low}}, "token -1");
  ExpectRefused(std::vector<ModelStep>{{.sequence = s, .tokens = many}}, "a batch of 33 rows");
  ExpectRefused(std::vector<ModelStep>{{.sequence = s, .tokens = good}, {.sequence = s, .tokens = good}}, "twice");
  ReferenceCache other(Geometry(1), ReferenceCache::Precision::kF32);
  const ModelStep step{.sequence = 0, .tokens = good};
  EXPECT_EQ(model_->Forward(&other, {&step, 1}, nullptr).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(cache_->Length(s), 0);
}

TEST_F(ModelTest, CacheErrorsComeThroughAndUndoTheStep) {
  const SequenceId s = *cache_->Create();
  const Token tokens[] = {1, 2};
  const ModelStep step{.sequence = s, .tokens = tokens, .want_logits = true};
  std::vector<float> logits;
  cache_->fail_begin = true;
  EXPECT_EQ(model_->Forward(cache_.get(), {&step, 1}, &logits).code(), StatusCode::kOutOfBudget);
  cache_->fail_begin = false;
  cache_->fail_commit = true;
  EXPECT_EQ(model_->Forward(cache_.get(), {&step, 1}, &logits).code(), StatusCode::kIoError);
  EXPECT_EQ(cache_->Length(s), 0);
  cache_->fail_commit = false;
  EXPECT_TRUE(model_->Forward(cache_.get(), {&step, 1}, &logits).ok());
  EXPECT_EQ(cache_->Length(s), 2);
}

TEST_F(ModelTest, OptionsAreChecked) {
  EXPECT_EQ(Model::Load(path_, {.n_threads = -1}).error().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(Model::Load(path_, {.n_threads = 100000}).error().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(Model::Load(path_, {.n_threads = 1, .max_batch = 0}).error().code(), StatusCode::kInvalidArgument);
}

TEST_F(ModelTest, WorkingBytesGrowWithTheBatch) {
  EXPECT_GT(model_->WorkingBytes(1), 0u);
  EXPECT_GT(model_->WorkingBytes(32), model_->WorkingBytes(1));
}

TEST_F(ModelTest, F32CopyOfF32IsTheSameModel) {
  const std::string copy = TemporaryPath("copy.gguf");
  ASSERT_TRUE(WriteF32Copy(path_, copy).ok());
  EXPECT_EQ(Identity(copy), Identity(path_));
  std::filesystem::remove(copy);
  const Status absent = WriteF32Copy(path_, TemporaryPath("no/such/directory.gguf"));
  EXPECT_EQ(absent.code(), StatusCode::kNotFound) << absent.message();
  EXPECT_EQ(WriteF32Copy(TemporaryPath("absent.gguf"), copy).code(), StatusCode::kNotFound);
  EXPECT_FALSE(std::filesystem::exists(copy));
}

TEST(SamplerTest, GreedyTakesTheLowestOfEquals) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const Sampler sampler(SamplerOptions{});
  EXPECT_EQ(sampler.Sample(std::vector<float>{1, 3, 3, 2}, 0), 1);
  EXPECT_EQ(sampler.Sample(std::vector<float>{nan, 1, nan, 2}, 0), 3);
  EXPECT_EQ(sampler.Sample(std::vector<float>{nan, nan}, 0), 0);
}

TEST(SamplerTest, DrawsDependOnSeedAndPositionAlone) {
  std::vector<float> logits(100, 0.0f);
  const auto draws = [&](uint32_t seed) {
    SamplerOptions options;
    options.temperature = 1.0f;
    options.seed = seed;
    std::vector<Token> out;
    for (int64_t position = 0; position < 64; ++position) out.push_back(Sampler(options).Sample(logits, position));
    return out;
  };
  EXPECT_EQ(draws(1), draws(1));
  EXPECT_NE(draws(1), draws(2));
  const std::vector<Token> some = draws(1);
  EXPECT_GT(std::set<Token>(some.begin(), some.end()).size(), 20u);
}

TEST(SamplerTest, TopKOneIsGreedy) {
  SamplerOptions options;
  options.temperature = 2.0f;
  options.top_k = 1;
  EXPECT_EQ(Sampler(options).Sample(std::vector<float>{1, 2, 5, 4}, 3), 2);
}

}  // namespace
}  // namespace kvcell
