// The adapter to libllama's model and context.
#include "lab/peer.h"

#include <fmt/format.h>
#include <llama.h>

#include <algorithm>
#include <cstdlib>
#include <exception>
#include <optional>
#include <thread>

#include "model/tokenizer.h"

namespace kvcell {
namespace {

constexpr const char* kRotationSwitch = "LLAMA_ATTN_ROT_DISABLE";

ggml_type GgmlType(PeerKvType type) {
  switch (type) {
    case PeerKvType::kF16:
      return GGML_TYPE_F16;
    case PeerKvType::kF32:
      return GGML_TYPE_F32;
    case PeerKvType::kQ8_0:
      return GGML_TYPE_Q8_0;
    case PeerKvType::kQ4_0:
      return GGML_TYPE_Q4_0;
  }
  return GGML_TYPE_F16;
}

// Sets libllama's switch for a scope and puts the user's own setting back.
class RotationOff {
 public:
  RotationOff() {
    if (const char* value = std::getenv(kRotationSwitch)) before_ = value;
    setenv(kRotationSwitch, "1", 1);
  }
  ~RotationOff() {
    if (before_) {
      setenv(kRotationSwitch, before_->c_str(), 1);
    } else {
      unsetenv(kRotationSwitch);
    }
  }
  RotationOff(const RotationOff&) = delete;
  RotationOff& operator=(const RotationOff&) = delete;

 private:
  std::optional<std::string> before_;
};

llama_context_params ContextParams(const PeerOptions& options) {
  llama_context_params params = llama_context_default_params();
  const int n_threads =
      options.n_threads > 0 ? options.n_threads : static_cast<int>(std::thread::hardware_concurrency());
  params.n_ctx = static_cast<uint32_t>(options.context);
  params.n_seq_max = static_cast<uint32_t>(options.n_sequences);
  params.kv_unified = options.n_sequences > 1;
  params.n_batch = static_cast<uint32_t>(options.n_ubatch);
  params.n_ubatch = static_cast<uint32_t>(options.n_ubatch);
  params.n_threads = n_threads;
  params.n_threads_batch = n_threads;
  params.type_k = GgmlType(options.type_k);
  params.type_v = GgmlType(options.type_v);
  params.flash_attn_type = options.flash_attention ? LLAMA_FLASH_ATTN_TYPE_ENABLED : LLAMA_FLASH_ATTN_TYPE_DISABLED;
  params.no_perf = true;
  return params;
}

class LlamaPeer final : public Peer {
 public:
  LlamaPeer(llama_model* model, llama_context* context, const PeerOptions& options)
      : model_(model), context_(context), n_batch_(options.n_ubatch), limit_(options.context) {
    n_vocab_ = llama_vocab_n_tokens(llama_model_get_vocab(model));
    batch_ = llama_batch_init(n_batch_, 0, 1);
  }
  ~LlamaPeer() override {
    llama_batch_free(batch_);
    llama_free(context_);
    llama_model_free(model_);
  }
  LlamaPeer(const LlamaPeer&) = delete;
  LlamaPeer& operator=(const LlamaPeer&) = delete;

  int32_t n_vocab() const override { return n_vocab_; }
  int64_t length() const override { return length_; }

  Status Decode(std::span<const Token> tokens, bool all_logits, std::vector<float>* logits) override {
    if (length_ + static_cast<int64_t>(tokens.size()) > limit_)
      return {StatusCode::kInvalidArgument,
              fmt::format("{} tokens do not fit into the peer's context of {}; load it with a larger one",
                          tokens.size(), limit_)};
    if (logits != nullptr) logits->clear();
    for (size_t done = 0; done < tokens.size();) {
      const size_t n = std::min(tokens.size() - done, static_cast<size_t>(n_batch_));
      KVCELL_RETURN_IF_ERROR(DecodeBatch(tokens.subspan(done, n), all_logits, done + n == tokens.size(), logits));
      done += n;
    }
    return OkStatus();
  }

  Status SaveState(const std::string& path, std::span<const Token> tokens) override {
    try {
      if (llama_state_seq_save_file(context_, path.c_str(), 0, tokens.data(), tokens.size()) > 0) return OkStatus();
    } catch (const std::exception& e) {
      return {StatusCode::kIoError, fmt::format("{}: libllama could not save its state ({})", path, e.what())};
    }
    return {StatusCode::kIoError, fmt::format("{}: libllama could not save its state ({})", path, TakeLlamaError())};
  }

  Status LoadState(const std::string& path) override {
    std::vector<llama_token> tokens(static_cast<size_t>(limit_));
    size_t n = 0;
    try {
      if (llama_state_seq_load_file(context_, path.c_str(), 0, tokens.data(), tokens.size(), &n) > 0) {
        length_ = static_cast<int64_t>(n);
        return OkStatus();
      }
    } catch (const std::exception& e) {
      return {StatusCode::kIoError, fmt::format("{}: libllama could not load its state ({})", path, e.what())};
    }
    return {StatusCode::kIoError, fmt::format("{}: libllama could not load its state ({})", path, TakeLlamaError())};
  }

  Status Trim(int64_t length) override {
    if (length >= length_) return OkStatus();
    if (!llama_memory_seq_rm(llama_get_memory(context_), 0, static_cast<llama_pos>(length), -1)) {
      return {StatusCode::kInternal, fmt::format("libllama could not cut its sequence to {} tokens", length)};
    }
    length_ = length;
    return OkStatus();
  }

  void ShareWith(int32_t to) override {
    llama_memory_seq_cp(llama_get_memory(context_), 0, to, -1, -1);
    lengths_.resize(std::max(lengths_.size(), static_cast<size_t>(to) + 1));
    lengths_[static_cast<size_t>(to)] = length_;
  }

  Status DecodeTo(int32_t sequence, std::span<const Token> tokens, std::vector<float>* logits) override {
    if (logits != nullptr) logits->clear();
    for (size_t done = 0; done < tokens.size();) {
      const size_t n = std::min(tokens.size() - done, static_cast<size_t>(n_batch_));
      batch_.n_tokens = static_cast<int32_t>(n);
      for (size_t i = 0; i < n; ++i) {
        SetRow(i, sequence, tokens[done + i], LengthOf(sequence) + static_cast<int64_t>(i));
        batch_.logits[i] = logits != nullptr && done + i + 1 == tokens.size();
      }
      KVCELL_RETURN_IF_ERROR(RunBatch(logits));
      LengthOf(sequence) += static_cast<int64_t>(n);
      done += n;
    }
    return OkStatus();
  }

  Status DecodeEach(std::span<const Token> tokens, std::vector<float>* logits) override {
    if (logits != nullptr) logits->clear();
    batch_.n_tokens = static_cast<int32_t>(tokens.size());
    for (size_t i = 0; i < tokens.size(); ++i) {
      SetRow(i, static_cast<int32_t>(i), tokens[i], LengthOf(static_cast<int32_t>(i)));
      batch_.logits[i] = 1;
    }
    KVCELL_RETURN_IF_ERROR(RunBatch(logits));
    for (size_t i = 0; i < tokens.size(); ++i) ++LengthOf(static_cast<int32_t>(i));
    return OkStatus();
  }

  void Reset() override {
    llama_memory_clear(llama_get_memory(context_), true);
    length_ = 0;
    lengths_.clear();
  }

 private:
  Status DecodeBatch(std::span<const Token> tokens, bool all_logits, bool last, std::vector<float>* logits) {
    batch_.n_tokens = static_cast<int32_t>(tokens.size());
    for (size_t i = 0; i < tokens.size(); ++i) {
      batch_.token[i] = tokens[i];
      batch_.pos[i] = static_cast<llama_pos>(length_ + static_cast<int64_t>(i));
      batch_.n_seq_id[i] = 1;
      batch_.seq_id[i][0] = 0;
      batch_.logits[i] = logits != nullptr && (all_logits || (last && i + 1 == tokens.size()));
    }
    KVCELL_RETURN_IF_ERROR(RunBatch(logits));
    length_ += static_cast<int64_t>(tokens.size());
    return OkStatus();
  }

  Status RunBatch(std::vector<float>* logits) {
    TakeLlamaError();
    try {
      if (llama_decode(context_, batch_) != 0)
        return {StatusCode::kInternal, fmt::format("libllama could not decode ({})", TakeLlamaError())};
    } catch (const std::exception& e) {
      return {StatusCode::kInternal, fmt::format("libllama could not decode ({})", e.what())};
    }
    for (int32_t i = 0; i < batch_.n_tokens; ++i) {
      if (!batch_.logits[i]) continue;
      const float* row = llama_get_logits_ith(context_, i);
      if (logits != nullptr) logits->insert(logits->end(), row, row + n_vocab_);
    }
    return OkStatus();
  }

  void SetRow(size_t row, int32_t sequence, Token token, int64_t position) {
    batch_.token[row] = token;
    batch_.pos[row] = static_cast<llama_pos>(position);
    batch_.n_seq_id[row] = 1;
    batch_.seq_id[row][0] = sequence;
  }
  int64_t& LengthOf(int32_t sequence) {
    if (sequence == 0) return length_;
    lengths_.resize(std::max(lengths_.size(), static_cast<size_t>(sequence) + 1));
    return lengths_[static_cast<size_t>(sequence)];
  }

  llama_model* model_;
  llama_context* context_;
  llama_batch batch_{};
  int32_t n_batch_;
  int32_t n_vocab_ = 0;
  int64_t limit_;
  int64_t length_ = 0;
  std::vector<int64_t> lengths_;  // of the sequences after the first
};

}  // namespace

Status WriteQ4Copy(const std::string& from, const std::string& to) {
  SilenceLlama();
  TakeLlamaError();
  llama_model_quantize_params params = llama_model_quantize_default_params();
  params.ftype = LLAMA_FTYPE_MOSTLY_Q4_0;
  params.allow_requantize = true;
  try {
    if (llama_model_quantize(from.c_str(), to.c_str(), &params) == 0) return OkStatus();
  } catch (const std::exception& e) {
    return {StatusCode::kInternal, fmt::format("{}: libllama could not make a q4_0 copy ({})", from, e.what())};
  }
  return {StatusCode::kIoError, fmt::format("{}: libllama could not make a q4_0 copy ({})", from, TakeLlamaError())};
}

Result<std::unique_ptr<Peer>> Peer::Load(const std::string& path, const PeerOptions& options) {
  if (options.n_ubatch < 1 || options.context < 1 || options.context > (int64_t{1} << 30))
    return Fail(StatusCode::kInvalidArgument,
                "the peer's batch and context must be positive and its context below 2^30");
  SilenceLlama();
  TakeLlamaError();
  try {
    llama_model* model = llama_model_load_from_file(path.c_str(), llama_model_default_params());
    if (model == nullptr)
      return Fail(StatusCode::kCorruption, fmt::format("{}: libllama can't load it ({})", path, TakeLlamaError()));
    std::optional<RotationOff> off;
    if (!options.rotate_quantized) off.emplace();
    llama_context* context = llama_init_from_model(model, ContextParams(options));
    if (context == nullptr) {
      llama_model_free(model);
      return Fail(StatusCode::kUnsupported,
                  fmt::format("{}: libllama can't make such a context ({})", path, TakeLlamaError()));
    }
    return std::make_unique<LlamaPeer>(model, context, options);
  } catch (const std::exception& e) {
    return Fail(StatusCode::kInternal, fmt::format("{}: libllama failed ({})", path, e.what()));
  }
}

}  // namespace kvcell
