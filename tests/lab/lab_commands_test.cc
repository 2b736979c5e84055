// The lab's measurements on small random models and on values whose figures are known.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "cell/rules.h"
#include "kvcell/cache.h"
#include "lab/answers.h"
#include "lab/bench_overhead.h"
#include "lab/codec_error.h"
#include "lab/experiments.h"
#include "lab/growth.h"
#include "lab/kv_data.h"
#include "lab/npy.h"
#include "lab/progress_state.h"
#include "lab/quality.h"
#include "lab/report.h"
#include "lab/speed.h"
#include "lab/sweep.h"
#include "lab/tune.h"
#include "model/model.h"
#include "tiny_model.h"

namespace kvcell {
namespace {

namespace fs = std::filesystem;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

Geometry OneLayer(int heads = 4, int kv_heads = 2, int dim = 64) {
  return {LayerGeometry{.n_heads = heads,
                        .n_kv_heads = kv_heads,
                        .head_dim_k = dim,
                        .head_dim_v = dim,
                        .scale = 1.0f / std::sqrt(static_cast<float>(dim))}};
}

// A tiny random model and a text that it can read, for all tests of a suite.
class TinyModelTest : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    path_ = TemporaryPath("lab_tiny.gguf");
    WriteTinyModel({}, path_);
    text_.clear();
    uint32_t state = 1;
    while (text_.size() < 6000) {
      state = state * 1664525u + 1013904223u;
      text_ += static_cast<char>('a' + state % 26);
      if (state % 7 == 0) text_ += ' ';
    }
  }
  static void TearDownTestSuite() { fs::remove(path_); }

  static std::string path_, text_;
};
std::string TinyModelTest::path_, TinyModelTest::text_;

// --- Values ----------------------------------------------------------------------------------------------------------

TEST(Npy, ReadsBackWhatItWroteAndRefusesAnythingElse) {
  const std::string path = TemporaryPath("array.npy");
  const std::vector<float> values = {1.0f, -2.5f, 65504.0f, 0.0f, 1.0f / 3.0f, -0.0f};
  ASSERT_TRUE(WriteNpy(path, "<f4", {2, 3}, values).ok());
  auto read = ReadNpy(path);
  ASSERT_TRUE(read) << read.error().message();
  EXPECT_THAT(read->shape, ElementsAre(2, 3));
  EXPECT_EQ(read->values, values);
  ASSERT_TRUE(WriteNpy(path, "<f2", {6}, values).ok());
  read = ReadNpy(path);
  ASSERT_TRUE(read);
  EXPECT_THAT(read->shape, ElementsAre(6));
  EXPECT_NEAR(read->values[4], 1.0f / 3.0f, 1e-4);
  EXPECT_NE(read->values[4], 1.0f / 3.0f);
  std::ifstream file(path, std::ios::binary);
  const std::string bytes{std::istreambuf_iterator<char>(file), {}};
  EXPECT_EQ(bytes.find('\n') % 64, 63u);  // what NumPy wants of the header's length
  for (const size_t size : {size_t{0}, size_t{7}, size_t{10}, size_t{40}, bytes.size() - 1}) {
    std::ofstream(path, std::ios::binary | std::ios::trunc) << bytes.substr(0, size);
    EXPECT_EQ(ReadNpy(path).error().code(), StatusCode::kCorruption) << size;
  }
  std::string hostile = bytes;
  hostile.replace(hostile.find("(6,)"), 4, "(9,)");
  std::ofstream(path, std::ios::binary | std::ios::trunc) << hostile;
  EXPECT_THAT(ReadNpy(path).error().message(), HasSubstr("size"));
  fs::remove(path);
  EXPECT_EQ(ReadNpy(path).error().code(), StatusCode::kNotFound);
}

TEST(Export, ReadsBackAndAnUnfinishedOneIsNone) {
  const std::string directory = TemporaryPath("export");
  const KvData data = MakeKv(OneLayer(), 130, 16, 4);
  ASSERT_TRUE(ExportKv(data, directory).ok());
  auto read = ImportKv(directory);
  ASSERT_TRUE(read) << read.error().message();
  EXPECT_EQ(read->geometry, data.geometry);
  EXPECT_EQ(read->n_tokens, 130);
  EXPECT_EQ(read->layers[0].k, data.layers[0].k);
  EXPECT_EQ(read->layers[0].v, data.layers[0].v);
  EXPECT_EQ(read->layers[0].q, data.layers[0].q);
  const fs::path base(directory);
  EXPECT_TRUE(fs::exists(base / "layer_000_head_001_v.npy"));
  EXPECT_TRUE(fs::exists(base / "positions.npy"));
  fs::remove(base / "layer_000_head_001_v.npy");
  EXPECT_THAT(ImportKv(directory).error().message(), HasSubstr("layer_000_head_001_v.npy"));
  std::ofstream(base / "manifest.json") << "{\"format\": \"kvcell-kv\", \"version\": 1}";
  EXPECT_EQ(ImportKv(directory).error().code(), StatusCode::kCorruption);
  fs::remove(base / "manifest.json");
  EXPECT_EQ(ImportKv(directory).error().code(), StatusCode::kNotFound);
  fs::remove_all(directory);
}

TEST(CodecErrors, AreThoseOfTheDecodedValues) {
  const KvData data = MakeKv(OneLayer(), 192, 32, 2);
  const auto rows = MeasureCodecErrors(data, {.codecs = {"f16", "i8", "i4", "i3", "k=bf16,v=f32"}});
  ASSERT_TRUE(rows) << rows.error().message();
  ASSERT_EQ(rows->size(), 5u);
  EXPECT_EQ((*rows)[0].k.mse, 0.0);
  EXPECT_EQ((*rows)[0].output, 0.0);
  EXPECT_NEAR((*rows)[0].k.cosine, 1.0, 1e-9);
  // Better codecs lose less, and what attention loses follows.
  for (size_t i = 1; i < 4; ++i) {
    EXPECT_LT((*rows)[i - 1].k.relative, (*rows)[i].k.relative);
    EXPECT_LT((*rows)[i - 1].output, (*rows)[i].output);
    EXPECT_GT((*rows)[i - 1].bits, (*rows)[i].bits);
  }
  EXPECT_NEAR((*rows)[2].v.relative, 0.0070, 0.0006);  // i4's contract
  EXPECT_TRUE((*rows)[3].in_place);
  EXPECT_FALSE((*rows)[4].in_place);
  // By hand: the decoded head against the exact one.
  const auto head = CodeHead(data, 0, 1, *ParseCodec("i4"), 4);
  ASSERT_TRUE(head);
  double error = 0;
  for (size_t t = 4; t < 192; ++t) {
    for (size_t d = 0; d < 64; ++d) {
      error += std::pow(
          static_cast<double>(head->v[t * 64 + d]) - static_cast<double>(data.layers[0].v[(t * 2 + 1) * 64 + d]), 2);
    }
  }
  EXPECT_NEAR(error / (188 * 64), (*rows)[2].v.mse, 0.1 * (*rows)[2].v.mse);
  for (size_t i = 0; i < 4 * 64; ++i) {
    EXPECT_EQ(head->v[i], data.layers[0].v[(i / 64 * 2 + 1) * 64 + i % 64]) << "sinks stay exact";
  }
  EXPECT_EQ(MeasureCodecErrors(data, {.codecs = {"i9"}}).error().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(MeasureCodecErrors(MakeKv(OneLayer(), 63, 8, 1), {.codecs = {"i4"}}).error().code(),
            StatusCode::kInvalidArgument);
}

// Offsets from calibration do not follow a lone token that is far larger than its block; taken again, they follow
// channels whose means move.
TEST(CodecErrors, CalibratedOffsetsWinOverALoneOutlierAndRecalibrationOverDrift) {
  const int64_t n = 768;
  const KvData made = MakeKv(OneLayer(), n, 32, 2);
  const auto k_error = [&](const KvData& data) {
    const auto rows = MeasureCodecErrors(
        data, {.codecs = {"i4", "f16"}, .calibrations = {{.prompt = 256}, {.prompt = 256, .every = 128, .over = 128}}});
    EXPECT_TRUE(rows);
    EXPECT_EQ(rows->size(), 4u);  // f16 takes no offsets off
    EXPECT_EQ((*rows)[1].codec, "i4 calibrated on 256");
    EXPECT_EQ((*rows)[2].codec, "i4 calibrated on 256, every 128 over 128");
    std::vector<double> lost;  // of a token's direction, so that no token counts more than another
    for (size_t i = 0; i < 3; ++i) lost.push_back(1.0 - (*rows)[i].k.cosine);
    return lost;
  };
  KvData outlier = made;
  for (size_t i = 0; i < 128; ++i) outlier.layers[0].k[(10 * 64 + 5) * 128 + i] *= 100.0f;
  EXPECT_LT(k_error(outlier)[1], 0.95 * k_error(outlier)[0]);
  KvData drift = made;
  for (size_t t = 0; t < static_cast<size_t>(n); ++t) {
    for (size_t i = 0; i < 128; ++i) drift.layers[0].k[t * 128 + i] += t < 384 ? 20.0f : -20.0f;
  }
  EXPECT_LT(k_error(drift)[2], 0.5 * k_error(drift)[1]);
  // Both ways are the block's own means where these say the same.
  EXPECT_NEAR(k_error(made)[1] / k_error(made)[0], 1.0, 0.25);
}

TEST(CodecErrors, WhatCanNotBeCalibratedIsRefused) {
  const KvData data = MakeKv(OneLayer(), 128, 16, 1);
  for (const Calibration& c : {Calibration{.prompt = 4}, Calibration{.prompt = 129}, Calibration{64, 64, 0}}) {
    EXPECT_EQ(MeasureCodecErrors(data, {.codecs = {"i4"}, .calibrations = {c}}).error().code(),
              StatusCode::kInvalidArgument);
  }
  EXPECT_THAT(MeasureCodecErrors(data, {.codecs = {"f16"}, .calibrations = {{.prompt = 64}}}).error().message(),
              HasSubstr("nothing to calibrate"));
}

// The same K and V under more and more query heads a KV head: what each head loses does not grow with their number, and
// is told for every ratio.
TEST(FieldCases, A23OutputErrorIsToldAtEveryGqaRatio) {
  double of_one = 0;
  for (const int ratio : {1, 4, 8, 16}) {
    KvData data = MakeKv(OneLayer(ratio, 1), 192, 32, 2);
    const auto rows = MeasureCodecErrors(data, {.codecs = {"i4", "i3"}});
    ASSERT_TRUE(rows);
    EXPECT_GT((*rows)[1].output, (*rows)[0].output);
    if (ratio == 1) of_one = (*rows)[0].output;
    EXPECT_NEAR((*rows)[0].output, of_one, 0.35 * of_one) << ratio;
  }
}

TEST(CodecErrors, MoreExactTokensLoseLess) {
  const KvData data = MakeKv(OneLayer(), 256, 16, 6);
  const auto output = [&](int32_t recent) {
    return MeasureCodecErrors(data, {.codecs = {"i3"}, .recent_blocks = recent})->front().output;
  };
  EXPECT_LT(output(1), output(0));
  EXPECT_EQ(output(3), 0.0);
}

TEST(Stats, NameTheLayerAndChannelsThatAreUnlikeTheRest) {
  Geometry geometry;
  for (int i = 0; i < 5; ++i) geometry.push_back(OneLayer()[0]);
  KvData data = MakeKv(geometry, 128, 16, 3);
  // Layer 2's second head: channel 7 is wide, channel 9 biased, and 16 tokens are far out.
  for (int64_t t = 0; t < 128; ++t) {
    data.layers[2].k[static_cast<size_t>((t * 2 + 1) * 64 + 7)] *= 40.0f;
    data.layers[2].k[static_cast<size_t>((t * 2 + 1) * 64 + 9)] += 200.0f;
  }
  const auto stats = MeasureStats(data, "k=int4:g64:sym:plain,v=int4:g64", {});
  ASSERT_TRUE(stats) << stats.error().message();
  ASSERT_EQ(stats->rows.size(), 20u);
  const HeadStats& odd = stats->rows[2 * 4 + 2];
  EXPECT_EQ(odd.layer, 2);
  EXPECT_EQ(odd.head, 1);
  EXPECT_EQ(odd.side, 'k');
  EXPECT_EQ(odd.widest_channel, 7);
  EXPECT_EQ(odd.biased_channel, 9);
  EXPECT_GT(odd.widest_ratio, 10.0);
  EXPECT_THAT(stats->finer_k, ElementsAre(2));
  const HeadStats& v = stats->rows[1];
  EXPECT_NEAR(v.stddev, 1.0, 0.05);
  EXPECT_NEAR(v.kurtosis, 2.7, 0.3);  // of a sum of four uniform values
  EXPECT_LT(v.p001, v.p50);
  EXPECT_LT(v.p50, v.p999);
}

TEST(Sweep, FinerScalesAndMoreExactTokensLoseLess) {
  const KvData data = MakeKv(OneLayer(), 256, 32, 8);
  const std::string directory = TemporaryPath("sweep");
  const auto result = MeasureSweep(data, {.store = directory});
  ASSERT_TRUE(result) << result.error().message();
  ASSERT_EQ(result->granularity.size(), 6u);
  for (size_t i = 1; i < 6; ++i) {
    EXPECT_LE(result->granularity[i].v_relative, result->granularity[i - 1].v_relative * 1.0001) << i;
  }
  ASSERT_EQ(result->exact.size(), 12u);
  EXPECT_LT(result->exact[11].output, result->exact[0].output);
  EXPECT_NEAR(result->locality.back().mass, 1.0, 1e-6);
  ASSERT_EQ(result->reads.size(), 2u);
  EXPECT_GT(result->reads[0].gb_s, 0.0);
  EXPECT_EQ(result->reads[0].missed, 0.0) << "just written";
  EXPECT_TRUE(fs::is_empty(directory));
  fs::remove_all(directory);
}

// --- On a model ------------------------------------------------------------------------------------------------------

TEST_F(TinyModelTest, CaptureKeepsWhatAttentionWasGiven) {
  const auto data = CaptureKv({.model = path_, .text = text_, .tokens = 200, .queries = 10, .n_threads = 1});
  ASSERT_TRUE(data) << data.error().message();
  ASSERT_EQ(data->layers.size(), 2u);
  EXPECT_EQ(data->layers[1].k.size(), 200u * 2 * 64);
  EXPECT_EQ(data->layers[1].q.size(), 10u * 4 * 64);
  // The same tokens give the same values however many follow.
  const auto shorter = CaptureKv({.model = path_, .text = text_, .tokens = 128, .queries = 10, .n_threads = 1});
  ASSERT_TRUE(shorter);
  EXPECT_TRUE(std::equal(shorter->layers[1].v.begin(), shorter->layers[1].v.end(), data->layers[1].v.begin()));
  const auto too_long = CaptureKv({.model = path_, .text = "short", .tokens = 200, .n_threads = 1});
  EXPECT_THAT(too_long.error().message(), HasSubstr("200 are wanted"));
}

QualityOptions SmallQuality(const std::string& model, const std::string& text) {
  return {
      .model = model, .text = text, .context = 256, .windows = 2, .codecs = {"i4", "i3"}, .peer = true, .n_threads = 1};
}

TEST_F(TinyModelTest, QualityOrdersCodecsAndItsScoresAreThePeers) {
  const auto result = MeasureQuality(SmallQuality(path_, text_));
  ASSERT_TRUE(result) << result.error().message();
  ASSERT_EQ(result->rows.size(), 6u);  // f16, i4, i3; libllama's f16, q8_0, q4_0
  EXPECT_EQ(result->positions, 2 * 127);
  EXPECT_EQ(result->rows[0].kld_mean, 0.0);
  EXPECT_EQ(result->rows[0].top1, 1.0);
  EXPECT_GT(result->rows[1].kld_mean, 0.0);
  EXPECT_LT(result->rows[1].kld_mean, result->rows[2].kld_mean);
  EXPECT_LT(result->rows[1].bits, result->rows[1].bits_all_in);
  // Perplexity of two exact paths over the same windows.
  EXPECT_LT(result->ppl_difference, 0.005);
  EXPECT_NEAR(result->rows[0].ppl / result->rows[3].ppl, 1.0, 0.005);
}

// A rules file stands beside the codecs; one that says what a codec means gives the codec's own figures.
TEST_F(TinyModelTest, QualityMeasuresRulesFilesToo) {
  const std::string tail =
      "rules:\n  - {event: TOKEN_APPEND, from: none, to: ACTIVE}\n"
      "  - {event: TOKEN_APPEND, from: ACTIVE, to: QUANTIZED, when: {block: sealed}}\n";
  QualityOptions options = SmallQuality(path_, text_);
  options.peer = false;
  options.rules = {{"same.yaml", "codec: i3\n" + tail},
                   {"finer.yaml", "codec: i3\ncodecs: [{layers: 0, codec: i8}]\nexact: {recent_blocks: 1}\n" + tail}};
  const auto result = MeasureQuality(options);
  ASSERT_TRUE(result) << result.error().message();
  ASSERT_EQ(result->rows.size(), 5u);  // f16, i4, i3, two files
  EXPECT_EQ(result->rows[3].codec, "same.yaml");
  EXPECT_EQ(result->rows[3].kld_mean, result->rows[2].kld_mean);
  EXPECT_LT(result->rows[4].kld_mean, result->rows[2].kld_mean);
  EXPECT_GT(result->rows[4].bits_all_in, result->rows[2].bits_all_in);
  options.rules[0].text = "codec: i9\n" + tail;
  EXPECT_THAT(MeasureQuality(options).error().message(), HasSubstr("same.yaml:1"));
}

TEST_F(TinyModelTest, QualityIsResumedToTheSameFigures) {
  QualityOptions options = SmallQuality(path_, text_);
  options.peer = false;
  const auto whole = MeasureQuality(options);
  ASSERT_TRUE(whole);
  options.state = TemporaryPath("quality.state");
  int windows = 0;
  options.on_window = [&](int64_t done, int64_t) { windows = static_cast<int>(done); };
  options.should_stop = [&] { return windows == 1; };
  EXPECT_EQ(MeasureQuality(options).error().code(), StatusCode::kCancelled);
  int64_t first = -1;
  options.on_window = [&](int64_t done, int64_t) { first = first < 0 ? done : first; };
  options.should_stop = nullptr;
  const auto resumed = MeasureQuality(options);
  ASSERT_TRUE(resumed);
  EXPECT_EQ(first, 1);
  EXPECT_EQ(resumed->rows[1].kld_mean, whole->rows[1].kld_mean);
  EXPECT_EQ(resumed->rows[2].ppl, whole->rows[2].ppl);
  // Of what is kept, fewer windows take the first ones.
  options.windows = 1;
  const auto fewer = MeasureQuality(options);
  options.state = "";
  const auto fresh = MeasureQuality(options);
  ASSERT_TRUE(fewer && fresh);
  EXPECT_EQ(fewer->positions, 127);
  EXPECT_EQ(fewer->rows[1].kld_mean, fresh->rows[1].kld_mean);
  options.windows = 2;
  options.state = TemporaryPath("quality.state");
  // Figures that are not all there are measured again, never made up.
  nlohmann::json kept = nlohmann::json::parse(std::ifstream(options.state));
  kept["values"]["rows"][1]["kld"].erase(200);
  std::ofstream(options.state) << kept;
  first = -1;
  const auto again = MeasureQuality(options);
  ASSERT_TRUE(again);
  EXPECT_EQ(first, 0);
  EXPECT_EQ(again->rows[1].kld_mean, whole->rows[1].kld_mean);
  // Another measurement does not take it for its own.
  options.sinks = 0;
  first = -1;
  options.on_window = [&](int64_t done, int64_t) { first = first < 0 ? done : first; };
  ASSERT_TRUE(MeasureQuality(options));
  EXPECT_EQ(first, 0);
  fs::remove(options.state);
}

TEST_F(TinyModelTest, AnswersComeFromEveryCodecAndAreResumed) {
  AnswersOptions options{.model = path_, .codecs = {"i4"}, .max_tokens = 8, .max_questions = 7, .n_threads = 1};
  options.state = TemporaryPath("answers.state");
  const auto result = MeasureAnswers(options);
  ASSERT_TRUE(result) << result.error().message();
  ASSERT_EQ(result->rows.size(), 2u);
  ASSERT_EQ(result->answers.size(), 14u);
  EXPECT_EQ(result->rows[0].codec, "f16");
  EXPECT_EQ(result->rows[0].same, 1.0);
  EXPECT_EQ(result->rows[0].right, result->rows[0].questions);
  EXPECT_EQ(result->rows[0].questions + result->rows[0].f16_wrong + result->rows[0].open, 7);
  int64_t generated = 0;
  options.should_stop = [&] { return ++generated > 1000; };
  const auto again = MeasureAnswers(options);
  ASSERT_TRUE(again);
  for (size_t i = 0; i < 14; ++i) EXPECT_EQ(again->answers[i].tokens, result->answers[i].tokens);
  fs::remove(options.state);
}

TEST_F(TinyModelTest, ChoiceComparesFourAndAgreesWithItself) {
  ChoiceOptions options{.model = path_,
                        .text = text_,
                        .codecs = {"f16", "i8"},
                        .context = 96,
                        .continuation = 4,
                        .questions = 8,
                        .n_threads = 1};
  const auto rows = MeasureChoice(options);
  ASSERT_TRUE(rows) << rows.error().message();
  ASSERT_EQ(rows->size(), 2u);
  EXPECT_EQ((*rows)[0].same_as_f16, 1.0);
  EXPECT_EQ((*rows)[0].questions, 8);
  EXPECT_GE((*rows)[1].same_as_f16, 0.5);
  options.text = "too short";
  EXPECT_EQ(MeasureChoice(options).error().code(), StatusCode::kInvalidArgument);
}

TEST_F(TinyModelTest, TuneStaysUnderItsLimitWithFewerBitsThanTheFinestCodec) {
  TuneOptions options{.model = path_, .text = text_, .context = 192, .codecs = {"i3", "i8", "i4"}, .n_threads = 1};
  options.kld_limit = 1.0;
  const auto smallest = Tune(options);
  ASSERT_TRUE(smallest) << smallest.error().message();
  EXPECT_THAT(smallest->codec_by_layer, ElementsAre("i3", "i3"));
  ASSERT_GT(smallest->kld, smallest->kld_finest);
  // A limit between the two: some layer must be finer, and the choice really holds.
  options.kld_limit = 0.5 * (smallest->kld + smallest->kld_finest);
  const auto between = Tune(options);
  ASSERT_TRUE(between) << between.error().message();
  EXPECT_LE(between->kld, options.kld_limit);
  EXPECT_GT(between->bits, smallest->bits);
  EXPECT_LT(between->bits, *CodecBitsPerElement(*ParseCodec("i8"), 64, 64) + 1e-9);
  EXPECT_THAT(between->rules, HasSubstr("name: tuned"));
  options.kld_limit = 0.5 * smallest->kld_finest;
  EXPECT_THAT(Tune(options).error().message(), HasSubstr("raise the limit"));
}

TEST_F(TinyModelTest, TuneWithinBitsBuysTheClosestAnswers) {
  TuneOptions options{.model = path_, .text = text_, .context = 192, .codecs = {"i3", "i8", "i4"}, .n_threads = 1};
  const auto bits = [](const char* codec) { return *CodecBitsPerElement(*ParseCodec(codec), 64, 64); };
  options.bits_limit = bits("i8");
  const auto all = Tune(options);
  ASSERT_TRUE(all) << all.error().message();
  EXPECT_THAT(all->codec_by_layer, ElementsAre("i8", "i8"));
  // Room for one of the two layers: the one that loses more gets it.
  options.bits_limit = 0.5 * (bits("i8") + bits("i3"));
  const auto one = Tune(options);
  ASSERT_TRUE(one) << one.error().message();
  EXPECT_LE(one->bits, options.bits_limit);
  EXPECT_GT(one->bits, bits("i3"));
  EXPECT_LT(one->kld, one->kld_smallest);
  options.bits_limit = bits("i3") - 0.1;
  EXPECT_THAT(Tune(options).error().message(), HasSubstr("raise the limit"));
}

// What `run --rules` makes of the file: every layer gets the codec that was chosen for it.
TEST(TuneRules, AreRulesThatGiveEachLayerItsCodec) {
  for (const std::vector<std::string>& codecs :
       {std::vector<std::string>{"i8", "i8", "i4", "i4", "i4", "k=int5,v=int4", "i4"},
        std::vector<std::string>{"k=int5,v=int4", "k=int5,v=int4", "i3"},
        std::vector<std::string>{"i43", "i43", "i43", "i4", "i43"}}) {
    const std::string text = RulesText({.model = "a: #model", .codec_by_layer = codecs, .sinks = 7});
    const RulesCheck check = CheckRules(text, "tuned.yaml");
    ASSERT_TRUE(check.rules) << text << check.errors.front().message;
    EXPECT_TRUE(check.warnings.empty()) << check.warnings.front().message;
    EXPECT_EQ(check.rules->sinks, 7);
    EXPECT_TRUE(check.rules->MayShare());
    ASSERT_TRUE(check.rules->codec);
    for (size_t l = 0; l < codecs.size(); ++l) {
      const auto layer = static_cast<int32_t>(l), n_layers = static_cast<int32_t>(codecs.size());
      const CodecSpec codec = CodecFor(*check.rules->codec, check.rules->codec_ranges, layer, 0, n_layers);
      EXPECT_EQ(codec, CodecFor(*ParseCodec(codecs[l]), {}, layer, 0, n_layers)) << "layer " << l;
    }
  }
}

TEST(TuneRules, NameRunsOfLayersThatDifferFromMost) {
  TuneResult result{.model = "m", .codec_by_layer = {"i8", "i8", "i4", "i4", "i4", "k=int5,v=int4", "i4"}};
  const std::string text = RulesText(result);
  EXPECT_THAT(text, HasSubstr("\ncodec: \"i4\"\n"));
  EXPECT_THAT(text, HasSubstr("{layers: 0-1, codec: \"i8\"}"));
  EXPECT_THAT(text, HasSubstr("{layers: 5-5, codec: \"k=int5,v=int4\"}"));
  EXPECT_EQ(text.find("6-6"), std::string::npos);
}

TEST(Answers, SimilarityAndRepetitionAreWhatTheySay) {
  EXPECT_EQ(Similarity({1, 2, 3}, {1, 2, 3}), 1.0);
  EXPECT_EQ(Similarity({1, 2, 3}, {4, 5, 6}), 0.0);
  EXPECT_NEAR(Similarity({1, 2, 3, 4}, {1, 3, 4}), 6.0 / 7.0, 1e-12);
  EXPECT_EQ(Similarity({}, {}), 1.0);
  EXPECT_EQ(Similarity({}, {1}), 0.0);
  EXPECT_EQ(Repetition({1, 2, 3, 4, 5, 6, 7, 8}), 0.0);
  EXPECT_NEAR(Repetition({1, 1, 1, 1, 1, 1, 1, 1}), 4.0 / 5.0, 1e-12);
}

// --- Speed and room
// ------------------------------------------------------------------------------------------------------

TEST(Capacity, IsHitWhereThePlanSaysAndSmallerCodesHoldMore) {
  CapacityOptions options{.geometry = OneLayer(),
                          .shape = "test",
                          .budget = uint64_t{2} << 20,
                          .codecs = {"f16", "i4"},
                          .sequence_tokens = 128,
                          .n_threads = 1};
  const auto rows = MeasureCapacity(options);
  ASSERT_TRUE(rows) << rows.error().message();
  ASSERT_EQ(rows->size(), 2u);
  for (const CapacityRow& row : *rows) {
    EXPECT_EQ(row.limit, "budget");
    EXPECT_LE(row.context_bytes, options.budget);
    EXPECT_GT(row.batch, 1);
    EXPECT_LE(row.batch_bytes, options.budget);
    EXPECT_GT(row.tokens_per_s, 0.0);
    CacheOptions cache;
    cache.geometry = options.geometry;
    cache.codec = *ParseCodec(row.codec);
    cache.max_step_tokens = 64;
    cache.ram_budget = options.budget;
    EXPECT_LE(PlanMemory(cache, row.context, 1)->total, options.budget);
    EXPECT_GT(PlanMemory(cache, row.context + 128, 1)->total, options.budget);
  }
  EXPECT_GT((*rows)[1].context, 3 * (*rows)[0].context);
  options.max_context = 256;
  EXPECT_EQ(MeasureCapacity(options)->front().limit, "max_context");
}

TEST(Latency, MeasuresEveryWayAtEveryContext) {
  const auto rows = MeasureLatency(
      {.shape = OneLayer()[0], .contexts = {128, 512}, .codecs = {"i4", "i3"}, .n_threads = 2, .seconds = 0.001});
  ASSERT_TRUE(rows) << rows.error().message();
  ASSERT_EQ(rows->size(), 10u);
  for (const LatencyRow& row : *rows) {
    EXPECT_GT(row.ms, 0.0);
    EXPECT_GT(row.bytes, 0u);
  }
  EXPECT_GT((*rows)[0].bytes, 3 * (*rows)[1].bytes);
  EXPECT_EQ(MeasureLatency({.contexts = {32}}).error().code(), StatusCode::kInvalidArgument);
}

// --- Report
// --------------------------------------------------------------------------------------------------------------

TEST(Experiments, TheFirstThreePassOnASmallShape) {
  const std::string directory = TemporaryPath("experiments");
  const auto found =
      RunExperiments({.geometry = OneLayer(), .directory = directory, .budget = uint64_t{2} << 20, .n_threads = 1});
  ASSERT_TRUE(found) << found.error().message();
  ASSERT_EQ(found->size(), 4u);
  // The fourth compares times, which no test depends on.
  for (size_t i = 0; i < 3; ++i) EXPECT_TRUE((*found)[i].pass) << (*found)[i].name << ": " << (*found)[i].found;
  fs::remove_all(directory);
}

TEST(Report, OpensWithTheExperimentsAndDrawsEveryMeasurement) {
  using Json = nlohmann::json;
  ReportInput input{.title = "a <model>", .machine = "test"};
  input.experiments = {{.name = "first", .bound = "b", .found = "f", .pass = true, .bars = {{"x", 2, "2"}}},
                       {.name = "second", .pass = false}};
  input.measurements = {
      Json{{"command", "lab quality"},
           {"rows", Json::array({Json{{"engine", "kvcell"}, {"codec", "i4"}, {"bits", 4.5}, {"kld_mean", 0.004}}})}},
      Json{{"command", "lab answers"},
           {"answers", Json::array({Json{{"question", "q"}, {"codec", "i4"}, {"text", "<script>"}}})}}};
  const std::string html = ReportHtml(input);
  EXPECT_THAT(html, HasSubstr("a &lt;model&gt;"));
  EXPECT_THAT(html, HasSubstr("1 of 2 passed"));
  EXPECT_LT(html.find("first"), html.find("KL divergence"));
  EXPECT_THAT(html, HasSubstr("<svg"));
  EXPECT_EQ(html.find("<script>"), std::string::npos);
  EXPECT_EQ(html.find("http"), std::string::npos);
}

TEST(Report, ReadsMeasurementsAndRefusesOtherFiles) {
  const std::string path = TemporaryPath("measurement.json");
  std::ofstream(path) << R"({"command": "lab quality", "rows": []})";
  EXPECT_TRUE(ReadMeasurement(path));
  for (const char* text : {"", "[]", "{}", "{\"command\": 3}", "{\"command\": \"plan\"}"}) {
    std::ofstream(path, std::ios::trunc) << text;
    EXPECT_EQ(ReadMeasurement(path).error().code(), StatusCode::kCorruption) << text;
  }
  fs::remove(path);
  EXPECT_EQ(ReadMeasurement(path).error().code(), StatusCode::kNotFound);
}

TEST(Report, DrawsTheResourceCurveAndNamesALineThatIsNone) {
  const std::string path = TemporaryPath("curve.csv");
  std::ofstream(path) << "seconds,process_resident,kv_quantized\n0,1048576,0\n0.5,2097152,1048576\n";
  const auto curve = ReadMeasurement(path);
  ASSERT_TRUE(curve) << curve.error().message();
  EXPECT_EQ(curve->at("rows").size(), 2u);
  const std::string html = ReportHtml({.measurements = {*curve}});
  EXPECT_THAT(html, HasSubstr("Memory over time"));
  EXPECT_THAT(html, HasSubstr("QUANTIZED"));
  EXPECT_EQ(html.find("PERSISTED"), std::string::npos) << "nothing was there to be drawn";
  for (const char* line : {"1,2", "1,2,x", "1,2,3,4"}) {
    std::ofstream(path, std::ios::trunc) << "seconds,process_resident,kv_quantized\n0,1,2\n" << line << "\n";
    const auto bad = ReadMeasurement(path);
    ASSERT_FALSE(bad) << line;
    EXPECT_EQ(bad.error().code(), StatusCode::kCorruption);
    EXPECT_THAT(bad.error().message(), HasSubstr(path + ":3:")) << line;
  }
  fs::remove(path);
}

TEST_F(TinyModelTest, OverheadIsMeasuredOnASweepAndOnSteps) {
  const auto rows =
      BenchOverhead({.model = path_, .context = 128, .pairs = 5, .cells = 9000, .moved = 900, .n_threads = 1});
  ASSERT_TRUE(rows) << rows.error().message();
  const auto value = [&](std::string_view name) {
    const auto row = std::ranges::find(*rows, name, &BenchRow::name);
    return row == rows->end() ? std::nan("") : row->value;
  };
  EXPECT_GT(value("decode step"), 0.0);
  EXPECT_GT(value("state, paging and accounting in a step"), 0.0);
}

TEST_F(TinyModelTest, GrowthEndsWhereTheBudgetDoesAndFilesGoFurther) {
  GrowthOptions options{
      .model = path_, .text = text_, .stages = {512, 1024, 1u << 20}, .answer_tokens = 4, .n_threads = 1};
  const auto facts = Model::ReadFacts(path_);
  ASSERT_TRUE(facts);
  CacheOptions f16;
  f16.geometry = facts->geometry;
  f16.codec = *ParseCodec("f16");
  f16.max_step_tokens = 512;
  options.ram_budget = PlanMemory(f16, 1, 1)->total;
  options.file_budget = uint64_t{1} << 20;
  options.directory = TemporaryPath("growth");
  const auto rows = MeasureGrowth(options);
  ASSERT_TRUE(rows) << rows.error().message();
  ASSERT_EQ(rows->size(), 3u);
  for (size_t i = 0; i < rows->size(); ++i) {
    const GrowthRow& row = (*rows)[i];
    EXPECT_GT(row.longest, i == 0 ? 0 : (*rows)[i - 1].longest) << row.way;
    EXPECT_NE(row.limit, "the last stage");
    for (const GrowthStage& stage : row.stages) EXPECT_LE(stage.kv_ram_bytes, options.ram_budget);
    EXPECT_GE(row.stages[0].same_as_f16, 0);
  }
  EXPECT_EQ((*rows)[0].stages[0].same_as_f16, 4) << "f16 answers as itself";
  EXPECT_LE((*rows)[2].stages.back().file_bytes, options.file_budget);
  EXPECT_GT((*rows)[2].stages.back().file_bytes, options.file_budget / 2);
  EXPECT_FALSE(fs::exists(options.directory));
}

TEST(ProgressState, IsKeptUnderItsKeyAlone) {
  const std::string path = TemporaryPath("progress.json");
  ProgressState state(path, "a");
  EXPECT_TRUE(state.values().empty());
  state.values()["x"] = 3;
  ASSERT_TRUE(state.Write().ok());
  EXPECT_EQ(ProgressState(path, "a").values().at("x"), 3);
  EXPECT_TRUE(ProgressState(path, "b").values().empty());
  std::ofstream(path, std::ios::trunc) << "{\"key\": \"a\", \"values\": [1]}";
  EXPECT_TRUE(ProgressState(path, "a").values().empty());
  std::ofstream(path, std::ios::trunc) << "nonsense";
  EXPECT_TRUE(ProgressState(path, "a").values().empty());
  fs::remove(path);
}

}  // namespace
}  // namespace kvcell
