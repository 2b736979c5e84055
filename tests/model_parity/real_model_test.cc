// Parity with libllama on a real model: KVCELL_TEST_MODEL, or the demo model where `make model` has put it.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "kvcell/cache.h"
#include "kvcell/codec.h"
#include "lab/peer.h"
#include "logits.h"
#include "model/model.h"
#include "tiny_model.h"

namespace kvcell {
namespace {

constexpr size_t kText = 1024;
constexpr size_t kGreedySteps = 200;
const std::filesystem::path kSource = KVCELL_SOURCE_DIR;

std::string ModelPath() {
  if (const char* path = std::getenv("KVCELL_TEST_MODEL")) return path;
  return (kSource / "build/models/SmolLM2-135M-Instruct.Q4_1.gguf").string();
}

// WikiText-2's test set, or this project's documents.
std::string Text() {
  std::stringstream out;
  const std::filesystem::path shared = kSource / "../shared/data/wikitext-2/wiki.test.txt";
  if (std::filesystem::exists(shared)) {
    out << std::ifstream(shared).rdbuf();
    return out.str();
  }
  std::vector<std::filesystem::path> files;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(kSource / "docs"))
    if (entry.path().extension() == ".md") files.push_back(entry.path());
  std::sort(files.begin(), files.end());
  for (const auto& file : files) out << std::ifstream(file).rdbuf();
  return out.str();
}

struct RemoveAtEnd {
  std::string path;
  ~RemoveAtEnd() { std::filesystem::remove(path); }
};

class RealModelTest : public testing::Test {
 protected:
  void SetUp() override {
    if (!std::filesystem::exists(ModelPath()))
      GTEST_SKIP() << "no model at " << ModelPath() << "; run `make model` or set KVCELL_TEST_MODEL";
  }

  void Open(const std::string& path) {
    path_ = path;
    Result<std::unique_ptr<Model>> model = Model::Load(path, {.n_threads = 2, .max_batch = 512});
    ASSERT_TRUE(model.has_value()) << model.error().message();
    model_ = std::move(*model);
    CacheOptions options;
    options.geometry = model_->facts().geometry;
    options.codec = *ParseCodec("f16");
    options.max_step_tokens = 512;
    Result<std::unique_ptr<Cache>> cache = Cache::Open(options);
    ASSERT_TRUE(cache.has_value()) << cache.error().message();
    cache_ = std::move(*cache);
    Result<std::vector<Token>> tokens = model_->Tokenize(Text(), true, false);
    ASSERT_TRUE(tokens.has_value());
    ASSERT_GE(tokens->size(), kText);
    tokens_.assign(tokens->begin(), tokens->begin() + kText);
  }

  std::unique_ptr<Peer> OpenPeer(bool flash_attention) {
    PeerOptions options;
    options.flash_attention = flash_attention;
    options.n_threads = 2;
    options.context = static_cast<int64_t>(kText + kGreedySteps);
    Result<std::unique_ptr<Peer>> peer = Peer::Load(path_, options);
    EXPECT_TRUE(peer.has_value()) << peer.error().message();
    return std::move(*peer);
  }

  std::vector<float> PeerLogits(bool flash_attention) {
    std::vector<float> logits;
    EXPECT_TRUE(OpenPeer(flash_attention)->Decode(tokens_, true, &logits).ok());
    return logits;
  }

  size_t n_vocab() const { return static_cast<size_t>(model_->facts().n_vocab); }

  std::string path_;
  std::unique_ptr<Model> model_;
  std::unique_ptr<Cache> cache_;
  std::vector<Token> tokens_;
};

// With 4-bit weights ggml rounds activations to 8 bits, so that any two exact attentions differ: libllama's own two by
// this much. Ours may differ by no more, but for twice the standard error of the difference between the two means.
TEST_F(RealModelTest, AsShippedNoFurtherThanLibllamaFromItself) {
  ASSERT_NO_FATAL_FAILURE(Open(ModelPath()));
  const std::vector<float> plain = PeerLogits(false);
  const std::vector<double> own = RowKlds(plain, PeerLogits(true), n_vocab());
  const std::vector<double> ours = RowKlds(plain, ChunkedLogits(model_.get(), cache_.get(), tokens_, {512}), n_vocab());
  std::vector<double> difference(own.size()), square(own.size());
  for (size_t i = 0; i < own.size(); ++i) difference[i] = ours[i] - own[i];
  const double mean = Mean(difference);
  for (size_t i = 0; i < own.size(); ++i) square[i] = (difference[i] - mean) * (difference[i] - mean);
  const double error = std::sqrt(Mean(square) / static_cast<double>(own.size()));
  fmt::print(
      "mean KLD to libllama: ours {:.3g}, its own flash attention {:.3g}, standard error of the difference {:.2g}\n",
      Mean(ours), Mean(own), error);
  EXPECT_LE(Mean(ours), Mean(own) + 2 * error);
}

TEST_F(RealModelTest, F32CopyMatches) {
  const std::string copy = TemporaryPath("f32.gguf");
  const Status written = WriteF32Copy(ModelPath(), copy);
  ASSERT_TRUE(written.ok()) << written.message();
  const RemoveAtEnd remove{copy};
  ASSERT_NO_FATAL_FAILURE(Open(copy));
  const double kld = MeanKld(PeerLogits(false), ChunkedLogits(model_.get(), cache_.get(), tokens_, {512}), n_vocab());
  fmt::print("mean KLD on the f32 copy: {:.3g}\n", kld);
  EXPECT_LT(kld, 1e-5);

  // The same greedy answer, token for token.
  const std::unique_ptr<Peer> peer = OpenPeer(false);
  const auto prompt = std::span(tokens_).first(256);
  std::vector<float> theirs, ours;
  ASSERT_TRUE(peer->Decode(prompt, false, &theirs).ok());
  const SequenceId sequence = *cache_->Create();
  ModelStep step{.sequence = sequence, .tokens = prompt, .want_logits = true};
  ASSERT_TRUE(model_->Forward(cache_.get(), {&step, 1}, &ours).ok());
  const Sampler greedy(SamplerOptions{});
  for (size_t i = 0; i < kGreedySteps; ++i) {
    const Token token = greedy.Sample(ours, cache_->Length(sequence));
    ASSERT_EQ(token, greedy.Sample(theirs, cache_->Length(sequence))) << "at step " << i;
    step.tokens = {&token, 1};
    ASSERT_TRUE(peer->Decode(step.tokens, false, &theirs).ok());
    ASSERT_TRUE(model_->Forward(cache_.get(), {&step, 1}, &ours).ok());
  }
}

}  // namespace
}  // namespace kvcell
