// Hostile and damaged model files: each is an error that names the file and the field, and none reaches ggml or
// libllama.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <random>

#include "gguf_bytes.h"
#include "model/architecture.h"
#include "model/model.h"
#include "model/tokenizer.h"
#include "tiny_model.h"

namespace kvcell {
namespace {

using testing::HasSubstr;

void ExpectRefused(const GgufBytes& bytes, std::string_view what, StatusCode code = StatusCode::kCorruption) {
  const Result<GgufHeader> header = bytes.Read();
  ASSERT_FALSE(header.has_value()) << what;
  EXPECT_EQ(header.error().code(), code) << header.error().message();
  EXPECT_THAT(header.error().message(), HasSubstr(std::string(what)));
  EXPECT_THAT(header.error().message(), HasSubstr("test.gguf: "));
  EXPECT_EQ(header.error().message().find('\n'), std::string::npos);
}

std::string ReadFile(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

void WriteFile(const std::string& path, std::string_view bytes) {
  std::ofstream(path, std::ios::binary).write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
}

// All that loading does with bytes of the file, short of starting threads.
Status Inspect(const std::string& bytes) {
  const Result<GgufHeader> header = GgufHeader::Read(std::as_bytes(std::span(bytes)), "test.gguf");
  if (!header) return header.error();
  const Result<Hparams> h = ReadHparams(*header);
  if (!h) return h.error();
  Weights weights(*header);
  const std::unique_ptr<Architecture> architecture = MakeArchitecture(*h, &weights);
  KVCELL_RETURN_IF_ERROR(weights.Finish());
  const Result<std::unique_ptr<Tokenizer>> tokenizer = Tokenizer::Load(*header, h->n_vocab);
  return tokenizer ? OkStatus() : tokenizer.error();
}

TEST(HostileGguf, NotAModelAtAll) {
  ExpectRefused(GgufBytes(), "too short");
  ExpectRefused(GgufBytes().Raw("GG"), "too short");
  ExpectRefused(GgufBytes().Raw("PK\3\4 and more"), "not a GGUF file");
  ExpectRefused(GgufBytes().Header(0, 0, 1), "GGUF version 1", StatusCode::kUnsupported);
  ExpectRefused(GgufBytes().Header(0, 0, 4), "GGUF version 4", StatusCode::kUnsupported);
}

TEST(HostileGguf, D18WrongByteOrder) {
  ExpectRefused(GgufBytes().Raw("FUGG").Number(uint32_t{3}), "wrong byte order");
  ExpectRefused(GgufBytes().Header(0, 0, 0x03000000), "wrong byte order");
}

TEST(HostileGguf, CountsThatCantFit) {
  ExpectRefused(GgufBytes().Header(0, uint64_t{1} << 61), "keys can't fit");
  ExpectRefused(GgufBytes().Header(0, ~uint64_t{0}), "keys can't fit");
  ExpectRefused(GgufBytes().Header(uint64_t{1} << 61, 0), "tensors can't fit");
  ExpectRefused(GgufBytes().Header(~uint64_t{0}, 0), "tensors can't fit");
  ExpectRefused(GgufBytes().Header(0, 1).Array("a", GgufType::kUint32, uint64_t{1} << 62).Data(64), "ends inside a");
  ExpectRefused(GgufBytes().Header(0, 1).Array("a", GgufType::kString, uint64_t{1} << 61).Data(64), "ends inside a");
  ExpectRefused(GgufBytes().Header(0, 1).Number(~uint64_t{0}).Data(64), "more than 65535");
  ExpectRefused(GgufBytes().Header(0, 1).Key("a", GgufType::kString).Number(~uint64_t{7}).Data(64), "more than");
}

TEST(HostileGguf, H6AlignmentAndKeys) {
  for (const uint32_t alignment : {0u, 1u, 3u, 4u, 33u, 1u << 17, 1u << 31})
    ExpectRefused(GgufBytes().Header(0, 1).Uint("general.alignment", alignment), "general.alignment is");
  ExpectRefused(GgufBytes().Header(0, 1).Key("general.alignment", GgufType::kUint64).Number(uint64_t{32}),
                "general.alignment is not");
  ExpectRefused(GgufBytes().Header(0, 1).String("general.alignment", "32"), "general.alignment is not");
  ExpectRefused(GgufBytes().Header(0, 1).Uint("", 1).Data(8), "empty");
  ExpectRefused(GgufBytes().Header(0, 1).Uint(std::string_view("a\0b", 3), 1), "NUL");
  ExpectRefused(GgufBytes().Header(0, 2).Uint("a", 1).Uint("a", 2), "a is there twice");
  ExpectRefused(GgufBytes().Header(0, 1).Text("a").Number(uint32_t{13}).Data(8), "unknown value type 13");
  ExpectRefused(GgufBytes().Header(0, 1).Array("a", GgufType::kArray, 1).Data(64), "array of arrays");
  ExpectRefused(GgufBytes().Header(0, 1).Key("a", GgufType::kBool).Number(uint8_t{2}), "neither 0 nor 1");
}

TEST(HostileGguf, H6H7Tensors) {
  ExpectRefused(GgufBytes().Header(1, 0).Tensor("t", {0}, 0, 0).Data(64), "dimension 0 of tensor t is 0");
  ExpectRefused(GgufBytes().Header(1, 0).Tensor("t", {4, 0}, 0, 0).Data(64), "dimension 1 of tensor t is 0");
  ExpectRefused(GgufBytes().Header(1, 0).Tensor("t", {}, 0, 0).Data(64), "0 dimensions");
  ExpectRefused(GgufBytes().Header(1, 0).Tensor("t", {1, 1, 1, 1, 1}, 0, 0).Data(64), "5 dimensions");
  ExpectRefused(GgufBytes().Header(1, 0).Tensor("t", {~uint64_t{0}}, 0, 0).Data(64), "dimension 0 of tensor t");
  const uint64_t big = uint64_t{1} << 39;
  ExpectRefused(GgufBytes().Header(1, 0).Tensor("t", {big, big}, 0, 0).Data(64), "more elements");
  ExpectRefused(GgufBytes().Header(1, 0).Tensor("t", {big, 1 << 16}, 0, 0).Data(64), "ends inside tensor t");
  ExpectRefused(GgufBytes().Header(1, 0).Tensor("t", {4}, 1000, 0).Data(64), "unknown type 1000");
  ExpectRefused(GgufBytes().Header(1, 0).Tensor("t", {4}, 4, 0).Data(64), "unknown type 4");  // Q4_2, dropped by ggml
  ExpectRefused(GgufBytes().Header(1, 0).Tensor("t", {33}, GGML_TYPE_Q4_0, 0).Data(64),
                "not a multiple of q4_0's block");
  ExpectRefused(GgufBytes().Header(1, 0).Tensor("t", {4}, 0, 1).Data(64), "not aligned");
  ExpectRefused(GgufBytes().Header(1, 0).Tensor("t", {4}, 0, uint64_t{1} << 63).Data(64), "ends inside tensor t");
  ExpectRefused(GgufBytes().Header(1, 0).Tensor("t", {4}, 0, 64).Data(64), "ends inside tensor t");
  ExpectRefused(GgufBytes().Header(2, 0).Tensor("t", {4}, 0, 0).Tensor("t", {4}, 0, 32).Data(64),
                "tensor t is there twice");
  ExpectRefused(GgufBytes().Header(1, 0).Tensor("", {4}, 0, 0).Data(64), "empty");
  ExpectRefused(GgufBytes().Header(1, 0).Tensor(std::string(64, 'x'), {4}, 0, 0).Data(64), "more than 63");
}

// A model in one piece, with one key replaced.
class HostileKeys : public testing::Test {
 protected:
  using Edit = std::function<void(GgufBytes*)>;

  static GgufBytes Model(const std::string& replaced, const Edit& edit) {
    const std::vector<std::pair<std::string, Edit>> keys = {
        {"general.architecture", [](GgufBytes* b) { b->String("general.architecture", "llama"); }},
        {"llama.block_count", [](GgufBytes* b) { b->Uint("llama.block_count", 1); }},
        {"llama.context_length", [](GgufBytes* b) { b->Uint("llama.context_length", 64); }},
        {"llama.embedding_length", [](GgufBytes* b) { b->Uint("llama.embedding_length", 8); }},
        {"llama.feed_forward_length", [](GgufBytes* b) { b->Uint("llama.feed_forward_length", 8); }},
        {"llama.attention.head_count", [](GgufBytes* b) { b->Uint("llama.attention.head_count", 2); }},
        {"llama.attention.head_count_kv", [](GgufBytes* b) { b->Uint("llama.attention.head_count_kv", 1); }},
        {"llama.attention.layer_norm_rms_epsilon",
         [](GgufBytes* b) { b->Float("llama.attention.layer_norm_rms_epsilon", 1e-5f); }},
        {"llama.rope.freq_base", [](GgufBytes* b) { b->Float("llama.rope.freq_base", 1e4f); }},
    };
    GgufBytes bytes;
    uint64_t n_keys = keys.size();
    bool found = false;
    GgufBytes entries;
    for (const auto& [name, write] : keys) {
      if (name == replaced) {
        found = true;
        if (edit) edit(&entries);
        if (!edit) --n_keys;
      } else {
        write(&entries);
      }
    }
    if (!found && edit) {
      edit(&entries);
      ++n_keys;
    }
    return bytes.Header(1, n_keys).Raw(entries.str()).Tensor("token_embd.weight", {8, 4}, 0, 0).Data(128);
  }

  static void ExpectKeyRefused(const std::string& key, const Edit& edit, std::string_view what,
                               StatusCode code = StatusCode::kCorruption) {
    const Status status = Inspect(Model(key, edit).str());
    EXPECT_EQ(status.code(), code) << key << ": " << status.message();
    EXPECT_THAT(status.message(), HasSubstr(std::string(what)));
  }
  static Edit Uint(const std::string& key, uint32_t value) {
    return [=](GgufBytes* b) { b->Uint(key, value); };
  }
  static Edit Float(const std::string& key, float value) {
    return [=](GgufBytes* b) { b->Float(key, value); };
  }
};

TEST_F(HostileKeys, TheUnchangedModelGetsAsFarAsItsTensors) {
  EXPECT_THAT(Inspect(Model("", nullptr).str()).message(), HasSubstr("tensor output_norm.weight is missing"));
}

TEST_F(HostileKeys, MissingOrOfTheWrongType) {
  for (const char* key :
       {"llama.block_count", "llama.context_length", "llama.embedding_length", "llama.feed_forward_length",
        "llama.attention.head_count", "llama.attention.layer_norm_rms_epsilon", "general.architecture"}) {
    ExpectKeyRefused(key, nullptr, std::string(key) + " is missing");
    ExpectKeyRefused(
        key, [&](GgufBytes* b) { b->Key(key, GgufType::kBool).Number(uint8_t{1}); }, std::string(key) + " is not");
    ExpectKeyRefused(
        key, [&](GgufBytes* b) { b->Array(key, GgufType::kInt8, 1).Number(int8_t{1}); }, key);
  }
}

TEST_F(HostileKeys, H7Counts) {
  ExpectKeyRefused("llama.block_count", Uint("llama.block_count", 0), "llama.block_count is 0");
  ExpectKeyRefused("llama.block_count", Uint("llama.block_count", 513), "llama.block_count is 513");
  ExpectKeyRefused("llama.block_count", Uint("llama.block_count", ~0u), "llama.block_count");
  ExpectKeyRefused("llama.attention.head_count", Uint("llama.attention.head_count", 0),
                   "llama.attention.head_count is 0");
  ExpectKeyRefused("llama.attention.head_count", Uint("llama.attention.head_count", 3), "not a multiple");
  ExpectKeyRefused("llama.attention.head_count_kv", Uint("llama.attention.head_count_kv", 0), "head_count_kv is 0");
  ExpectKeyRefused("llama.attention.head_count_kv", Uint("llama.attention.head_count_kv", 3),
                   "not a multiple of its 3 KV heads");
  ExpectKeyRefused("llama.embedding_length", Uint("llama.embedding_length", 0), "llama.embedding_length is 0");
  ExpectKeyRefused("llama.embedding_length", Uint("llama.embedding_length", 16), "token_embd.weight is 8 x 4");
  ExpectKeyRefused("llama.context_length", Uint("llama.context_length", 0), "llama.context_length is 0");
  ExpectKeyRefused("llama.context_length", Uint("llama.context_length", 1u << 31), "llama.context_length");
  ExpectKeyRefused("llama.feed_forward_length", Uint("llama.feed_forward_length", 0), "feed_forward_length is 0");
  ExpectKeyRefused("", Uint("llama.attention.key_length", 0), "key_length is 0");
  ExpectKeyRefused("", Uint("llama.attention.key_length", 3), "not an even number");
  ExpectKeyRefused("", Uint("llama.attention.key_length", 2048), "key_length is 2048");
  // An array that says it has one entry per layer and has not.
  ExpectKeyRefused(
      "llama.attention.head_count",
      [](GgufBytes* b) { b->Array("llama.attention.head_count", GgufType::kUint32, 2).Number(2u).Number(2u); },
      "2 entries for 1 layers");
}

TEST_F(HostileKeys, NumbersThatPoisonEverything) {
  const float nan = std::numeric_limits<float>::quiet_NaN(), inf = std::numeric_limits<float>::infinity();
  for (const float bad : {nan, inf, -1.0f})
    ExpectKeyRefused("llama.attention.layer_norm_rms_epsilon", Float("llama.attention.layer_norm_rms_epsilon", bad),
                     "epsilon is");
  for (const float bad : {nan, inf, 0.0f, -1.0f})
    ExpectKeyRefused("llama.rope.freq_base", Float("llama.rope.freq_base", bad), "freq_base is");
  ExpectKeyRefused("", Float("llama.rope.scaling.factor", nan), "rope.scaling.factor is");
}

TEST_F(HostileKeys, WhatKvcellHasNotIsNamed) {
  const auto text = [](const std::string& key, const std::string& value) {
    return [=](GgufBytes* b) { b->String(key, value); };
  };
  ExpectKeyRefused("general.architecture", text("general.architecture", "mamba"),
                   "kvcell has llama, qwen2, qwen3 and gemma3", StatusCode::kUnsupported);
  ExpectKeyRefused("", text("llama.rope.scaling.type", "yarn"), "RoPE scaling `yarn`", StatusCode::kUnsupported);
  ExpectKeyRefused("", text("llama.rope.scaling.type", "longrope"), "RoPE scaling `longrope`",
                   StatusCode::kUnsupported);
  ExpectKeyRefused("", Uint("llama.expert_count", 8), "mixture of experts", StatusCode::kUnsupported);
  ExpectKeyRefused("", Uint("llama.rope.dimension_count", 2), "RoPE turns 2 of 4", StatusCode::kUnsupported);
  ExpectKeyRefused("", Uint("split.count", 3), "one of 3 parts", StatusCode::kUnsupported);
}

// A whole small model whose bytes the tests damage.
class HostileBytes : public testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    path_ = TemporaryPath("hostile.gguf");
    TinyModelSpec spec;
    spec.architecture = GetParam();
    spec.n_layers = 1;
    spec.n_heads = 2;
    spec.n_kv_heads = 1;
    spec.head_dim = 8;
    spec.n_embd = 16;
    spec.n_ff = 16;
    WriteTinyModel(spec, path_);
    bytes_ = ReadFile(path_);
    ASSERT_TRUE(Inspect(bytes_).ok());
    const Result<GgufHeader> header = GgufHeader::Read(std::as_bytes(std::span(bytes_)), path_);
    header_bytes_ = static_cast<size_t>(header->tensors()[0].data.data() - std::as_bytes(std::span(bytes_)).data());
  }
  void TearDown() override { std::remove(path_.c_str()); }

  std::string path_;
  std::string bytes_;
  size_t header_bytes_ = 0;
};

TEST_P(HostileBytes, TruncatedAnywhere) {
  for (size_t n = 0; n < bytes_.size(); n += n < header_bytes_ + 64 ? 1 : 997) {
    // A copy of its own size, so that a sanitizer sees a read past the end.
    const std::vector<char> cut(bytes_.begin(), bytes_.begin() + static_cast<std::ptrdiff_t>(n));
    const Result<GgufHeader> header = GgufHeader::Read(std::as_bytes(std::span(cut)), "test.gguf");
    ASSERT_FALSE(header.has_value()) << n;
    ASSERT_EQ(header.error().code(), StatusCode::kCorruption) << n;
  }
  for (const size_t n : {size_t{0}, size_t{3}, size_t{24}, header_bytes_ / 2, header_bytes_, bytes_.size() - 1}) {
    WriteFile(path_, std::string_view(bytes_).substr(0, n));
    const Result<std::unique_ptr<Model>> model = Model::Load(path_, {});
    ASSERT_FALSE(model.has_value()) << n;
    EXPECT_EQ(model.error().code(), StatusCode::kCorruption) << model.error().message();
    EXPECT_THAT(model.error().message(), HasSubstr(path_));
  }
}

// Whatever a changed byte does, it ends as a model or as an error.
TEST_P(HostileBytes, AnyByteOfTheHeaderChanged) {
  std::mt19937 random(11);
  size_t refused = 0;
  for (size_t at = 0; at < header_bytes_; at += 1 + random() % 3) {
    std::string changed = bytes_;
    changed[at] = static_cast<char>(static_cast<uint8_t>(changed[at]) ^ (1u << (random() % 8)));
    refused += Inspect(changed).ok() ? 0 : 1;
  }
  EXPECT_GT(refused, header_bytes_ / 20);
}

INSTANTIATE_TEST_SUITE_P(Architectures, HostileBytes, testing::Values("llama", "qwen2", "qwen3", "gemma3"),
                         [](const testing::TestParamInfo<std::string>& i) { return i.param; });

// The tokenizer's checks stand before asserts of libllama.
class HostileTokenizer : public testing::Test {
 protected:
  static Status Load(uint64_t n_keys, const GgufBytes& entries, int32_t n_vocab = 8) {
    GgufBytes bytes;
    bytes.Header(0, n_keys).Raw(entries.str());
    const Result<GgufHeader> header = bytes.Read();
    EXPECT_TRUE(header.has_value()) << header.error().message();
    const Result<std::unique_ptr<Tokenizer>> tokenizer = Tokenizer::Load(*header, n_vocab);
    return tokenizer ? OkStatus() : tokenizer.error();
  }
  static GgufBytes Bpe(std::initializer_list<std::string_view> tokens) {
    GgufBytes b;
    b.String("general.architecture", "llama").String("tokenizer.ggml.model", "gpt2");
    b.Array("tokenizer.ggml.merges", GgufType::kString, 0)
        .Array("tokenizer.ggml.tokens", GgufType::kString, tokens.size());
    for (const std::string_view token : tokens) b.Text(token);
    return b;
  }
};

TEST_F(HostileTokenizer, TokensThatAreThereTwice) {
  EXPECT_TRUE(Load(4, Bpe({"a", "b"})).ok());
  EXPECT_THAT(Load(4, Bpe({"a", "a"})).message(), HasSubstr("there twice"));
  EXPECT_THAT(Load(4, Bpe({"a", std::string_view("a\0x", 3)})).message(), HasSubstr("there twice"));
  EXPECT_THAT(Load(4, Bpe({"", "[EMPTY_0]"})).message(), HasSubstr("there twice"));
}

TEST_F(HostileTokenizer, TablesOfTheWrongLength) {
  EXPECT_THAT(Load(4, Bpe({})).message(), HasSubstr("tokenizer.ggml.tokens is empty"));
  EXPECT_THAT(Load(4, Bpe({"a", "b"}), 1).message(), HasSubstr("has 2 tokens, token_embd.weight 1 rows"));
  EXPECT_THAT(Load(5, Bpe({"a", "b"}).Array("tokenizer.ggml.token_type", GgufType::kInt32, 1).Number(1)).message(),
              HasSubstr("tokenizer.ggml.token_type"));
  EXPECT_THAT(Load(5, Bpe({"a"}).Array("tokenizer.ggml.scores", GgufType::kUint8, 1).Number(uint8_t{1})).message(),
              HasSubstr("tokenizer.ggml.scores"));
}

TEST_F(HostileTokenizer, BosThatIsNotThere) {
  EXPECT_THAT(
      Load(5, Bpe({"a", "b"}).Key("tokenizer.ggml.add_bos_token", GgufType::kBool).Number(uint8_t{1})).message(),
      HasSubstr("names no such token"));
}

TEST_F(HostileTokenizer, KindsThatKvcellHasNot) {
  const Status status =
      Load(2, GgufBytes().String("general.architecture", "llama").String("tokenizer.ggml.model", "rwkv"));
  EXPECT_EQ(status.code(), StatusCode::kUnsupported);
  EXPECT_THAT(status.message(), HasSubstr("tokenizer `rwkv`"));
  EXPECT_THAT(Load(1, GgufBytes().String("general.architecture", "llama")).message(),
              HasSubstr("tokenizer.ggml.model is missing"));
}

TEST(ModelFiles, D28WhatIsNoFile) {
  const auto code = [](const std::string& path) {
    const Result<std::unique_ptr<Model>> model = Model::Load(path, {});
    EXPECT_FALSE(model.has_value());
    EXPECT_THAT(model.error().message(), HasSubstr(path));
    EXPECT_EQ(Model::ReadFacts(path).error().code(), model.error().code());
    return model.error().code();
  };
  EXPECT_EQ(code(TemporaryPath("absent.gguf")), StatusCode::kNotFound);
  EXPECT_EQ(code(testing::TempDir()), StatusCode::kInvalidArgument);
  const std::string fifo = TemporaryPath("fifo.gguf");
  ASSERT_EQ(mkfifo(fifo.c_str(), 0600), 0);
  EXPECT_EQ(code(fifo), StatusCode::kInvalidArgument);
  std::filesystem::remove(fifo);
  const std::string empty = TemporaryPath("empty.gguf");
  WriteFile(empty, "");
  EXPECT_EQ(code(empty), StatusCode::kCorruption);
  std::filesystem::remove(empty);
}

}  // namespace
}  // namespace kvcell
