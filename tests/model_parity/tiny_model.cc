// Writes small random GGUF models with ggml's own writer.
#include "tiny_model.h"

#include <fmt/format.h>
#include <ggml.h>
#include <gguf.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <random>
#include <string>
#include <vector>

namespace kvcell {
namespace {

class Writer {
 public:
  explicit Writer(const TinyModelSpec& spec) : spec_(spec), random_(spec.seed), gguf_(gguf_init_empty()) {
    ggml_init_params params{};
    params.mem_size = size_t{256} << 20;
    context_ = ggml_init(params);
    if (spec_.architecture == "qwen2") spec_.n_embd = spec_.n_heads * spec_.head_dim;
  }
  ~Writer() {
    gguf_free(gguf_);
    ggml_free(context_);
  }
  Writer(const Writer&) = delete;
  Writer& operator=(const Writer&) = delete;

  void Write(const std::string& path) {
    Keys();
    if (spec_.architecture == "llama" || spec_.architecture == "gemma3") {
      SentencePiece();
    } else {
      BytePairs();
    }
    Tensors();
    ASSERT_TRUE(gguf_write_to_file(gguf_, path.c_str(), false)) << path;
  }

 private:
  std::string Key(const std::string& name) const { return spec_.architecture + "." + name; }
  void Set(const std::string& name, int value) {
    gguf_set_val_u32(gguf_, Key(name).c_str(), static_cast<uint32_t>(value));
  }
  void Set(const std::string& name, float value) { gguf_set_val_f32(gguf_, Key(name).c_str(), value); }

  void Keys() {
    gguf_set_val_str(gguf_, "general.architecture", spec_.architecture.c_str());
    gguf_set_val_str(gguf_, "general.name", "tiny");
    gguf_set_val_str(gguf_, "general.license", "cc0-1.0");
    gguf_set_val_str(gguf_, "general.license.link", "https://example.org/license");
    gguf_set_val_str(gguf_, "general.source.url", "https://example.org/tiny");
    Set("context_length", 4096);
    Set("embedding_length", spec_.n_embd);
    Set("block_count", spec_.n_layers);
    Set("feed_forward_length", spec_.n_ff);
    Set("attention.head_count", spec_.n_heads);
    Set("attention.head_count_kv", spec_.n_kv_heads);
    Set("attention.key_length", spec_.head_dim);
    Set("attention.value_length", spec_.head_dim);
    Set("rope.dimension_count", spec_.head_dim);
    Set("attention.layer_norm_rms_epsilon", 1e-5f);
    Set("rope.freq_base", spec_.rope_base);
    if (spec_.rope_linear > 0) {
      gguf_set_val_str(gguf_, Key("rope.scaling.type").c_str(), "linear");
      Set("rope.scaling.factor", spec_.rope_linear);
    }
    if (spec_.architecture == "gemma3") {
      Set("attention.sliding_window", spec_.window);
      Set("attention.sliding_window_pattern", 2);
      Set("rope.freq_base_swa", 5000.0f);
    }
  }

  void Tokens(const std::vector<std::string>& tokens, const std::vector<int32_t>& types) {
    std::vector<const char*> texts;
    for (const std::string& token : tokens) texts.push_back(token.c_str());
    gguf_set_arr_str(gguf_, "tokenizer.ggml.tokens", texts.data(), texts.size());
    gguf_set_arr_data(gguf_, "tokenizer.ggml.token_type", GGUF_TYPE_INT32, types.data(), types.size());
    gguf_set_val_u32(gguf_, "tokenizer.ggml.bos_token_id", 1);
    gguf_set_val_u32(gguf_, "tokenizer.ggml.eos_token_id", 2);
    n_vocab_ = static_cast<int64_t>(tokens.size());
  }

  // <unk>, <s>, </s>, the bytes, the space and a few letters.
  void SentencePiece() {
    gguf_set_val_str(gguf_, "tokenizer.ggml.model", "llama");
    std::vector<std::string> tokens{"<unk>", "<s>", "</s>"};
    std::vector<int32_t> types{2, 3, 3};
    for (int byte = 0; byte < 256; ++byte) {
      tokens.push_back(fmt::format("<0x{:02X}>", byte));
      types.push_back(6);
    }
    tokens.emplace_back("\xe2\x96\x81");  // the space
    for (char c = 'a'; c <= 'z'; ++c) tokens.emplace_back(1, c);
    types.resize(tokens.size(), 1);
    const std::vector<float> scores(tokens.size(), -1.0f);
    gguf_set_arr_data(gguf_, "tokenizer.ggml.scores", GGUF_TYPE_FLOAT32, scores.data(), scores.size());
    Tokens(tokens, types);
  }

  // Three special tokens, the bytes in GPT-2's printable form, and one merge.
  void BytePairs() {
    gguf_set_val_str(gguf_, "tokenizer.ggml.model", "gpt2");
    gguf_set_val_str(gguf_, "tokenizer.ggml.pre", "qwen2");
    std::vector<std::string> tokens{"<|endoftext|>", "<|im_start|>", "<|im_end|>"};
    std::vector<int32_t> types{3, 3, 3};
    int extra = 256;
    for (int byte = 0; byte < 256; ++byte) {
      const bool printable = (byte >= 33 && byte <= 126) || (byte >= 161 && byte <= 172) || byte >= 174;
      tokens.push_back(Utf8(printable ? byte : extra++));
      types.push_back(1);
    }
    tokens.emplace_back("ab");
    types.push_back(1);
    const char* merge = "a b";
    gguf_set_arr_str(gguf_, "tokenizer.ggml.merges", &merge, 1);
    Tokens(tokens, types);
  }

  static std::string Utf8(int code) {
    if (code < 0x80) return std::string(1, static_cast<char>(code));
    return {static_cast<char>(0xc0 | (code >> 6)), static_cast<char>(0x80 | (code & 0x3f))};
  }

  void Tensor(const std::string& name, int64_t ne0, int64_t ne1, float mean, float deviation) {
    ggml_tensor* tensor = ne1 > 0 ? ggml_new_tensor_2d(context_, GGML_TYPE_F32, ne0, ne1)
                                  : ggml_new_tensor_1d(context_, GGML_TYPE_F32, ne0);
    ggml_set_name(tensor, name.c_str());
    std::normal_distribution<float> normal(mean, deviation);
    auto* data = static_cast<float*>(tensor->data);
    for (int64_t i = 0; i < ggml_nelements(tensor); ++i) data[i] = normal(random_);
    gguf_add_tensor(gguf_, tensor);
  }
  void Matrix(const std::string& name, int64_t in, int64_t out) {
    Tensor(name, in, out, 0.0f, 1.0f / std::sqrt(static_cast<float>(in)));
  }
  void Norm(const std::string& name, int64_t n) { Tensor(name, n, 0, 1.0f, 0.1f); }
  void Bias(const std::string& name, int64_t n) { Tensor(name, n, 0, 0.0f, 0.5f); }

  void Tensors() {
    Tensor("token_embd.weight", spec_.n_embd, n_vocab_, 0.0f, 0.15f);
    Norm("output_norm.weight", spec_.n_embd);
    if (!spec_.tied) Matrix("output.weight", spec_.n_embd, n_vocab_);
    if (spec_.rope_factors) RopeFactors();
    for (int i = 0; i < spec_.n_layers; ++i) Layer(fmt::format("blk.{}.", i));
  }

  // From 1 for the fast dimensions to 8 for the slow ones.
  void RopeFactors() {
    ggml_tensor* tensor = ggml_new_tensor_1d(context_, GGML_TYPE_F32, spec_.head_dim / 2);
    ggml_set_name(tensor, "rope_freqs.weight");
    auto* data = static_cast<float*>(tensor->data);
    for (int i = 0; i < spec_.head_dim / 2; ++i)
      data[i] = 1.0f + 7.0f * static_cast<float>(i) / static_cast<float>(spec_.head_dim / 2);
    gguf_add_tensor(gguf_, tensor);
  }

  void Layer(const std::string& prefix) {
    const int64_t q = int64_t{spec_.n_heads} * spec_.head_dim, kv = int64_t{spec_.n_kv_heads} * spec_.head_dim;
    Norm(prefix + "attn_norm.weight", spec_.n_embd);
    Matrix(prefix + "attn_q.weight", spec_.n_embd, q);
    Matrix(prefix + "attn_k.weight", spec_.n_embd, kv);
    Matrix(prefix + "attn_v.weight", spec_.n_embd, kv);
    Matrix(prefix + "attn_output.weight", q, spec_.n_embd);
    if (spec_.architecture == "qwen2") {
      Bias(prefix + "attn_q.bias", q);
      Bias(prefix + "attn_k.bias", kv);
      Bias(prefix + "attn_v.bias", kv);
    }
    if (spec_.architecture == "qwen3" || spec_.architecture == "gemma3") {
      // As unlike each other as real ones are.
      Tensor(prefix + "attn_q_norm.weight", spec_.head_dim, 0, 1.0f, 0.5f);
      Tensor(prefix + "attn_k_norm.weight", spec_.head_dim, 0, 1.0f, 0.5f);
    }
    if (spec_.architecture == "gemma3") {
      Norm(prefix + "post_attention_norm.weight", spec_.n_embd);
      Norm(prefix + "post_ffw_norm.weight", spec_.n_embd);
    }
    Norm(prefix + "ffn_norm.weight", spec_.n_embd);
    Matrix(prefix + "ffn_gate.weight", spec_.n_embd, spec_.n_ff);
    Matrix(prefix + "ffn_up.weight", spec_.n_embd, spec_.n_ff);
    Matrix(prefix + "ffn_down.weight", spec_.n_ff, spec_.n_embd);
  }

  TinyModelSpec spec_;
  std::mt19937 random_;
  gguf_context* gguf_;
  ggml_context* context_;
  int64_t n_vocab_ = 0;
};

}  // namespace

void WriteTinyModel(const TinyModelSpec& spec, const std::string& path) { Writer(spec).Write(path); }

std::string TemporaryPath(const std::string& name) {
  return (std::filesystem::path(testing::TempDir()) / fmt::format("kvcell-{}-{}", getpid(), name)).string();
}

}  // namespace kvcell
