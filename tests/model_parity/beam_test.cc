// Beam search over forks of one sequence, on quantized cells: the same beams with the same scores as when every
// hypothesis is computed from nothing, wherever block edges fall.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <numeric>
#include <random>
#include <vector>

#include "model/model.h"
#include "tiny_model.h"

namespace kvcell {
namespace {

constexpr size_t kBeams = 4;
constexpr int kSteps = 9;  // tokens that each hypothesis gains
constexpr double kNoise = 1e-3;

struct Hypothesis {
  std::vector<Token> tokens;  // prompt included
  double score = 0.0;         // sum of log probabilities
  SequenceId sequence = 0;
};

struct Candidate {
  size_t parent = 0;
  Token token = 0;
  double score = 0.0;
};

// All continuations of all hypotheses, best first; logits [n_hypotheses][n_vocab].
std::vector<Candidate> Continuations(const std::vector<Hypothesis>& beams, const std::vector<float>& logits) {
  const size_t n_vocab = logits.size() / beams.size();
  std::vector<Candidate> all;
  for (size_t b = 0; b < beams.size(); ++b) {
    const auto row = std::span(logits).subspan(b * n_vocab, n_vocab);
    const double top = *std::ranges::max_element(row);
    double sum = 0.0;
    for (const float x : row) sum += std::exp(double{x} - top);
    for (size_t t = 0; t < n_vocab; ++t)
      all.push_back({b, static_cast<Token>(t), beams[b].score + double{row[t]} - top - std::log(sum)});
  }
  std::ranges::sort(all, std::greater<>(), &Candidate::score);
  return all;
}

class BeamSearch : public testing::TestWithParam<TinyModelSpec> {
 protected:
  void SetUp() override {
    path_ = TemporaryPath("beams.gguf");
    WriteTinyModel(GetParam(), path_);
    model_ = Model::Load(path_, {.n_threads = 1, .max_batch = 256}).value();
  }
  void TearDown() override { std::remove(path_.c_str()); }

  std::unique_ptr<Cache> OpenCache(int32_t sequences) const {
    CacheOptions options;
    options.geometry = model_->facts().geometry;
    options.codec = ParseCodec("i4").value();
    options.max_sequences = sequences;
    options.max_threads = 1;
    options.identity = model_->identity();
    return Cache::Open(options).value();
  }

  std::vector<float> Forward(Cache* cache, std::span<const ModelStep> steps) {
    std::vector<float> logits;
    const Status status = model_->Forward(cache, steps, &logits);
    EXPECT_TRUE(status.ok()) << status.message();
    return logits;
  }

  // Logits after all tokens, each hypothesis in a cache of its own.
  std::vector<float> FromNothing(const std::vector<Hypothesis>& beams) {
    std::vector<float> all;
    for (const Hypothesis& beam : beams) {
      auto cache = OpenCache(1);
      const ModelStep step{.sequence = cache->Create().value(), .tokens = beam.tokens, .want_logits = true};
      const auto logits = Forward(cache.get(), {&step, 1});
      all.insert(all.end(), logits.begin(), logits.end());
    }
    return all;
  }

  // What becomes of the beams with the best candidates: the first child of each goes on in its parent's sequence,
  // others fork it. `late` forks them when the first one has already gained its token, and takes that token back, which
  // at a block's end means the whole block again.
  std::vector<Hypothesis> Grow(Cache* cache, const std::vector<Hypothesis>& beams,
                               const std::vector<Candidate>& candidates, bool late) {
    std::vector<Hypothesis> grown;
    std::vector<int> children(beams.size());
    for (const Candidate& c : std::span(candidates).first(kBeams)) {
      Hypothesis next = beams[c.parent];
      next.tokens.push_back(c.token);
      next.score = c.score;
      if (children[c.parent]++ > 0) {
        next.sequence = cache->Fork(beams[c.parent].sequence).value();
        if (late) {
          const auto n = static_cast<int64_t>(next.tokens.size()) - 1;
          const int64_t from = cache->Trim(next.sequence, n).value();
          EXPECT_GE(from, n / 64 * 64);
        }
      }
      if (late && children[c.parent] == 1) {
        const ModelStep step{.sequence = next.sequence, .tokens = std::span(&c.token, 1)};
        Forward(cache, {&step, 1});
      }
      grown.push_back(std::move(next));
    }
    for (size_t b = 0; b < beams.size(); ++b) {
      if (children[b] == 0) {
        EXPECT_TRUE(cache->Free(beams[b].sequence).ok());
      }
    }
    return grown;
  }

  // Logits of the grown beams: each appends what it lacks. Where nothing is lacking the last token is computed again.
  std::vector<float> Extend(Cache* cache, const std::vector<Hypothesis>& beams) {
    std::vector<ModelStep> steps;
    for (const Hypothesis& beam : beams) {
      const auto n = static_cast<int64_t>(beam.tokens.size());
      const int64_t from = cache->Trim(beam.sequence, n - 1).value();
      steps.push_back({.sequence = beam.sequence,
                       .tokens = std::span(beam.tokens).subspan(static_cast<size_t>(from)),
                       .want_logits = true});
    }
    return Forward(cache, steps);
  }

  std::string path_;
  std::unique_ptr<Model> model_;
};

TEST_P(BeamSearch, OverForksEqualsEveryHypothesisFromNothing) {
  std::mt19937 random(3);
  for (size_t length = 56; length <= 66; ++length) {
    for (const bool late : {false, true}) {
      auto cache = OpenCache(static_cast<int32_t>(kBeams) * 2);
      std::vector<Hypothesis> beams(1);
      for (size_t i = 0; i < length; ++i) beams[0].tokens.push_back(static_cast<Token>(random() % 256));
      beams[0].sequence = cache->Create().value();
      std::vector<Hypothesis> alone = beams;
      const ModelStep prompt{.sequence = beams[0].sequence, .tokens = beams[0].tokens, .want_logits = true};
      std::vector<float> logits = Forward(cache.get(), {&prompt, 1});
      for (int step = 0; step < kSteps; ++step) {
        const auto expected = Continuations(alone, FromNothing(alone));
        beams = Grow(cache.get(), beams, Continuations(beams, logits), late);
        logits = Extend(cache.get(), beams);
        // Each is what it is from nothing, and as good as the best there, but for the noise of ggml's batch sizes.
        std::vector<Hypothesis> next = beams;
        for (size_t b = 0; b < kBeams; ++b) {
          const auto same = std::ranges::find_if(expected, [&](const Candidate& c) {
            return c.token == beams[b].tokens.back() &&
                   std::ranges::equal(alone[c.parent].tokens,
                                      std::span(beams[b].tokens).first(beams[b].tokens.size() - 1));
          });
          ASSERT_NE(same, expected.end());
          ASSERT_NEAR(beams[b].score, same->score, kNoise) << "prompt " << length << " step " << step << " beam " << b;
          ASSERT_NEAR(beams[b].score, expected[b].score, kNoise) << "prompt " << length << " step " << step;
          next[b].score = same->score;
        }
        alone = std::move(next);
      }
      for (const Hypothesis& beam : beams) ASSERT_TRUE(cache->Free(beam.sequence).ok());
      EXPECT_EQ(cache->Stats().kv_bytes, 0u);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Models, BeamSearch,
                         testing::Values(TinyModelSpec{}, TinyModelSpec{.architecture = "gemma3", .window = 40}),
                         [](const auto& instance) { return instance.param.architecture; });

}  // namespace
}  // namespace kvcell
