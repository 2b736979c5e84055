// Our logits against libllama's on small random f32 models: every architecture, GQA ratio, head size and way to cut a
// prompt.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <random>

#include "kvcell/cache.h"
#include "kvcell/codec.h"
#include "lab/peer.h"
#include "logits.h"
#include "model/model.h"
#include "reference_cache.h"
#include "tiny_model.h"

namespace kvcell {
namespace {

constexpr size_t kPrompt = 512;
constexpr double kMaxKld = 1e-6;

class ParityTest : public testing::TestWithParam<TinyModelSpec> {
 protected:
  void SetUp() override {
    path_ = TemporaryPath("parity.gguf");
    WriteTinyModel(GetParam(), path_);
    Result<std::unique_ptr<Model>> model = Model::Load(path_, {.n_threads = Threads(), .max_batch = kPrompt});
    ASSERT_TRUE(model.has_value()) << model.error().message();
    model_ = std::move(*model);
    std::mt19937 random(7);
    for (size_t i = 0; i < kPrompt; ++i)
      tokens_.push_back(static_cast<Token>(random() % static_cast<uint32_t>(model_->facts().n_vocab)));
  }
  void TearDown() override { std::remove(path_.c_str()); }
  static void TearDownTestSuite() { fmt::print("worst mean KLD of all shapes and chunks: {:.2g}\n", worst_); }

  // Several threads for some of the shapes: ggml's barriers spin, which is slow where tests run side by side.
  static int Threads() { return GetParam().n_kv_heads > 1 && GetParam().head_dim <= 80 ? 2 : 1; }

  std::vector<float> PeerLogits(PeerKvType type) {
    PeerOptions options;
    options.type_k = options.type_v = type;
    options.n_threads = 1;
    options.context = kPrompt;
    const Result<std::unique_ptr<Peer>> peer = Peer::Load(path_, options);
    EXPECT_TRUE(peer.has_value()) << peer.error().message();
    std::vector<float> logits;
    const Status status = (*peer)->Decode(tokens_, true, &logits);
    EXPECT_TRUE(status.ok()) << status.message();
    return logits;
  }

  // The first tokens in chunks of 1 and of 7 + 33, all of them at once.
  void ExpectParity(Cache* cache, const std::vector<float>& peer) {
    const auto n_vocab = static_cast<size_t>(model_->facts().n_vocab);
    const auto compare = [&](size_t n, const std::vector<size_t>& chunks) {
      const std::vector<float> ours = ChunkedLogits(model_.get(), cache, std::span(tokens_).first(n), chunks);
      ASSERT_EQ(ours.size(), n * n_vocab);
      const double kld = MeanKld(std::span(peer).first(n * n_vocab), ours, n_vocab);
      EXPECT_LT(kld, kMaxKld) << "chunks of " << chunks[0];
      EXPECT_GT(kld, -kMaxKld);
      worst_ = std::max(worst_, kld);
    };
    compare(40, {1});
    compare(40, {7, 33});
    compare(kPrompt, {kPrompt});
  }

  inline static double worst_ = 0;
  std::string path_;
  std::unique_ptr<Model> model_;
  std::vector<Token> tokens_;
};

TEST_P(ParityTest, ExactAttentionMatchesLibllamaWithF32) {
  ReferenceCache cache(model_->facts().geometry, ReferenceCache::Precision::kF32);
  ExpectParity(&cache, PeerLogits(PeerKvType::kF32));
}

TEST_P(ParityTest, F16CellsMatchLibllamaWithF16) {
  CacheOptions options;
  options.geometry = model_->facts().geometry;
  const Result<CodecSpec> codec = ParseCodec("f16");
  ASSERT_TRUE(codec.has_value());
  options.codec = *codec;
  options.max_step_tokens = kPrompt;
  options.max_sequences = 2;
  const Result<std::unique_ptr<Cache>> cache = Cache::Open(options);
  ASSERT_TRUE(cache.has_value()) << cache.error().message();
  ExpectParity(cache->get(), PeerLogits(PeerKvType::kF16));
}

std::vector<TinyModelSpec> Specs() {
  std::vector<TinyModelSpec> specs;
  const auto add = [&](const std::string& architecture, int ratio, int head_dim) {
    TinyModelSpec spec;
    spec.architecture = architecture;
    spec.n_kv_heads = ratio >= 7 ? 1 : 2;
    spec.n_heads = spec.n_kv_heads * ratio;
    spec.head_dim = head_dim;
    if (architecture == "gemma3") {
      spec.n_layers = 4;
      spec.rope_base = 1e6f;
      spec.rope_linear = 8.0f;
    }
    if (architecture == "qwen2" || architecture == "qwen3") spec.rope_base = 1e6f;
    spec.tied = (ratio + head_dim) % 2 == 0;
    spec.seed = static_cast<uint32_t>(ratio * 1000 + head_dim);
    specs.push_back(spec);
  };
  // Every ratio with every head size once, dealt over the architectures so that each has all of both.
  const std::vector<std::string> architectures{"llama", "qwen2", "qwen3", "gemma3"};
  const std::vector<int> ratios{1, 3, 7, 8}, dims{64, 80, 96, 128, 256};
  for (size_t r = 0; r < ratios.size(); ++r)
    for (size_t d = 0; d < dims.size(); ++d) add(architectures[(r + d) % 4], ratios[r], dims[d]);
  add("llama", 3, 64);
  add("llama", 1, 256);
  add("qwen2", 7, 64);
  add("qwen2", 8, 128);
  add("qwen3", 8, 128);
  add("qwen3", 1, 80);
  add("gemma3", 3, 256);
  add("gemma3", 8, 96);
  TinyModelSpec llama3;
  llama3.rope_factors = true;
  llama3.rope_base = 500000.0f;
  llama3.tied = false;
  specs.push_back(llama3);
  TinyModelSpec linear;
  linear.rope_linear = 4.0f;
  specs.push_back(linear);
  return specs;
}

std::string SpecName(const testing::TestParamInfo<TinyModelSpec>& info) {
  const TinyModelSpec& s = info.param;
  return fmt::format("{}_{}_ratio{}_dim{}{}{}", info.index, s.architecture, s.n_heads / s.n_kv_heads, s.head_dim,
                     s.rope_factors ? "_llama3rope" : "", s.rope_linear > 0 ? "_linearrope" : "");
}

INSTANTIATE_TEST_SUITE_P(Shapes, ParityTest, testing::ValuesIn(Specs()), SpecName);

}  // namespace
}  // namespace kvcell
