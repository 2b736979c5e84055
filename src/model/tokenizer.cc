// The adapter to libllama's vocabulary: checks first, no exceptions or log lines out.
#include "model/tokenizer.h"

#include <fmt/format.h>
#include <llama.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <limits>
#include <mutex>
#include <string_view>
#include <unordered_set>

namespace kvcell {
namespace {

thread_local std::string last_error;

void OnLog(ggml_log_level level, const char* text, void*) noexcept {
  if (level != GGML_LOG_LEVEL_ERROR) return;
  try {
    last_error = text;
    while (!last_error.empty() && last_error.back() == '\n') last_error.pop_back();
  } catch (...) {
    last_error.clear();
  }
}

// libllama asserts that as many different texts as tokens are there, after it cut them at NUL and named empty ones.
Status CheckTokens(const GgufHeader& header, int32_t n_vocab, size_t* n_tokens) {
  std::vector<std::string_view> tokens;
  KVCELL_RETURN_IF_ERROR(header.Strings("tokenizer.ggml.tokens", GgufNeed::kRequired, &tokens));
  if (tokens.empty()) return header.Bad("tokenizer.ggml.tokens is empty");
  if (tokens.size() > static_cast<size_t>(n_vocab))
    return header.Bad(
        fmt::format("tokenizer.ggml.tokens has {} tokens, token_embd.weight {} rows", tokens.size(), n_vocab));
  std::unordered_set<std::string_view> seen;
  seen.reserve(tokens.size());
  for (size_t i = 0; i < tokens.size(); ++i) {
    const std::string_view text = tokens[i].substr(0, tokens[i].find('\0'));
    if (text.starts_with("[EMPTY_") || (!text.empty() && !seen.insert(text).second))
      return header.Bad(fmt::format("token {} of tokenizer.ggml.tokens is there twice", i));
  }
  *n_tokens = tokens.size();
  return OkStatus();
}

Status CheckPerToken(const GgufHeader& header, std::string_view key, GgufType element, size_t n_tokens) {
  const GgufValue* value = header.Find(key);
  if (value == nullptr) return OkStatus();
  if (value->type != GgufType::kArray || value->element != element || value->count != n_tokens)
    return header.Bad(
        fmt::format("{} is not an array of the right type with one entry for each of the {} tokens", key, n_tokens));
  return OkStatus();
}

Status CheckTokenizer(const GgufHeader& header, int32_t n_vocab) {
  std::string kind;
  KVCELL_RETURN_IF_ERROR(header.String("tokenizer.ggml.model", GgufNeed::kRequired, &kind));
  if (kind != "llama" && kind != "gpt2")
    return {StatusCode::kUnsupported,
            fmt::format(
                "{}: tokenizer `{}`, where kvcell has `llama` (SentencePiece) and `gpt2` (BPE); choose another model",
                header.path(), kind.substr(0, 40))};
  size_t n_tokens = 0;
  KVCELL_RETURN_IF_ERROR(CheckTokens(header, n_vocab, &n_tokens));
  KVCELL_RETURN_IF_ERROR(CheckPerToken(header, "tokenizer.ggml.scores", GgufType::kFloat32, n_tokens));
  KVCELL_RETURN_IF_ERROR(CheckPerToken(header, "tokenizer.ggml.token_type", GgufType::kInt32, n_tokens));
  std::vector<std::string_view> merges;
  KVCELL_RETURN_IF_ERROR(
      header.Strings("tokenizer.ggml.merges", kind == "gpt2" ? GgufNeed::kRequired : GgufNeed::kOptional, &merges));
  if (merges.size() > static_cast<size_t>(std::numeric_limits<int32_t>::max()))
    return header.Bad("tokenizer.ggml.merges has more entries than libllama can count");
  std::string chat_template;
  return header.String("tokenizer.chat_template", GgufNeed::kOptional, &chat_template);
}

bool BelongsToTokenizer(std::string_view key) { return key == "general.architecture" || key.starts_with("tokenizer."); }

// A GGUF file without tensors, in memory, that holds the tokenizer's keys as they lie in the model file.
std::string TokenizerFile(const GgufHeader& header) {
  const auto append = [](std::string* out, auto value) {
    out->append(reinterpret_cast<const char*>(&value), sizeof(value));
  };
  std::string body;
  uint64_t n_keys = 0;
  for (const std::string& key : header.keys()) {
    if (!BelongsToTokenizer(key)) continue;
    const auto entry = header.Find(key)->entry;
    body.append(reinterpret_cast<const char*>(entry.data()), entry.size());
    ++n_keys;
  }
  std::string out = "GGUF";
  append(&out, uint32_t{3});
  append(&out, uint64_t{0});
  append(&out, n_keys);
  return out + body;
}

llama_model* LoadVocabulary(const std::string& bytes) {
  const int fd = memfd_create("kvcell-tokenizer", MFD_CLOEXEC);
  if (fd < 0) return nullptr;
  FILE* file = fdopen(fd, "w+b");
  if (file == nullptr) {
    close(fd);
    return nullptr;
  }
  llama_model* model = nullptr;
  if (std::fwrite(bytes.data(), 1, bytes.size(), file) == bytes.size() && std::fflush(file) == 0) {
    std::rewind(file);
    llama_model_params params = llama_model_default_params();
    params.vocab_only = true;
    model = llama_model_load_from_file_ptr(file, params);
  }
  std::fclose(file);
  return model;
}

}  // namespace

void SilenceLlama() {
  static std::once_flag once;
  std::call_once(once, [] { llama_log_set(OnLog, nullptr); });
}

std::string TakeLlamaError() { return std::exchange(last_error, {}); }

Result<std::unique_ptr<Tokenizer>> Tokenizer::Load(const GgufHeader& header, int32_t n_vocab) {
  SilenceLlama();
  KVCELL_FAIL_IF_ERROR(CheckTokenizer(header, n_vocab));
  TakeLlamaError();
  llama_model* model = nullptr;
  try {
    model = LoadVocabulary(TokenizerFile(header));
  } catch (const std::exception& e) {
    return Fail(header.Bad(fmt::format("libllama can't read the tokenizer ({})", e.what())));
  }
  if (model == nullptr)
    return Fail(header.Bad(fmt::format("libllama can't read the tokenizer ({})", TakeLlamaError())));
  std::unique_ptr<Tokenizer> tokenizer(new Tokenizer(header.path(), model));
  // With these flags set and no such token libllama would abort at the first text.
  const llama_vocab* vocab = tokenizer->vocab_;
  if ((llama_vocab_get_add_bos(vocab) && llama_vocab_bos(vocab) == LLAMA_TOKEN_NULL) ||
      (llama_vocab_get_add_eos(vocab) && llama_vocab_eos(vocab) == LLAMA_TOKEN_NULL))
    return Fail(header.Bad("tokenizer.ggml.add_bos_token or add_eos_token is set, but the file names no such token"));
  return tokenizer;
}

Tokenizer::Tokenizer(std::string path, llama_model* model)
    : path_(std::move(path)),
      model_(model),
      vocab_(llama_model_get_vocab(model)),
      n_tokens_(llama_vocab_n_tokens(vocab_)) {
  for (Token token = 0; token < n_tokens_; ++token) {
    const std::string_view text = llama_vocab_get_text(vocab_, token);
    longest_piece_ = std::max(longest_piece_, text.size());
    // What libllama leaves as text unless it is told to parse.
    const auto attributes = static_cast<unsigned>(llama_vocab_get_attr(vocab_, token));
    if ((attributes & (LLAMA_TOKEN_ATTR_CONTROL | LLAMA_TOKEN_ATTR_UNKNOWN)) != 0 && !text.empty())
      control_.emplace_back(text);
  }
}

bool Tokenizer::SpellsControlTokens(std::string_view text) const {
  return std::any_of(control_.begin(), control_.end(),
                     [&](const std::string& control) { return text.find(control) != std::string_view::npos; });
}

Tokenizer::~Tokenizer() { llama_model_free(model_); }

Result<std::vector<Token>> Tokenizer::Tokenize(const std::string& text, bool special, bool parse) const {
  constexpr size_t kMaxText = size_t{1} << 30;  // libllama counts bytes and tokens in 32 bits
  if (text.size() > kMaxText)
    return Fail(StatusCode::kInvalidArgument,
                fmt::format("the text is {} bytes long, more than {}; feed it in parts", text.size(), kMaxText));
  try {
    const auto length = static_cast<int32_t>(text.size());
    std::vector<Token> tokens(text.size() / 2 + 16);
    int32_t n =
        llama_tokenize(vocab_, text.data(), length, tokens.data(), static_cast<int32_t>(tokens.size()), special, parse);
    if (n < 0 && n != std::numeric_limits<int32_t>::min()) {
      tokens.resize(static_cast<size_t>(-n));
      n = llama_tokenize(vocab_, text.data(), length, tokens.data(), static_cast<int32_t>(tokens.size()), special,
                         parse);
    }
    if (n < 0) return Fail(StatusCode::kInvalidArgument, "the text has too many tokens; feed it in parts");
    tokens.resize(static_cast<size_t>(n));
    return tokens;
  } catch (const std::exception& e) {
    return Fail(StatusCode::kUnsupported,
                fmt::format("{}: its vocabulary has no token for part of the text ({}); choose another model", path_,
                            e.what()));
  }
}

std::string Tokenizer::Piece(Token token) const {
  if (token < 0 || token >= n_tokens_) return {};
  try {
    std::string piece(32, '\0');
    int32_t n = llama_token_to_piece(vocab_, token, piece.data(), static_cast<int32_t>(piece.size()), 0, true);
    if (n < 0) {
      piece.resize(static_cast<size_t>(-n));
      n = llama_token_to_piece(vocab_, token, piece.data(), static_cast<int32_t>(piece.size()), 0, true);
    }
    piece.resize(static_cast<size_t>(std::max(n, 0)));
    return piece;
  } catch (const std::exception&) {
    return {};  // a byte token whose text is not <0xNN>
  }
}

bool Tokenizer::IsEndOfGeneration(Token token) const {
  return token >= 0 && token < n_tokens_ && llama_vocab_is_eog(vocab_, token);
}

Result<std::string> Tokenizer::ApplyChatTemplate(std::span<const ChatMessage> messages, bool add_assistant) const {
  const char* source = llama_model_chat_template(model_, nullptr);
  if (source == nullptr)
    return Fail(StatusCode::kUnsupported,
                fmt::format("{}: the file has no chat template; give the prompt as it is (--raw)", path_));
  std::vector<llama_chat_message> chat;
  size_t bytes = 256;
  for (const ChatMessage& message : messages) {
    chat.push_back({message.role.c_str(), message.content.c_str()});
    bytes += 2 * (message.role.size() + message.content.size());
  }
  try {
    std::string out(bytes, '\0');
    int32_t n = llama_chat_apply_template(source, chat.data(), chat.size(), add_assistant, out.data(),
                                          static_cast<int32_t>(out.size()));
    if (n > static_cast<int32_t>(out.size())) {
      out.resize(static_cast<size_t>(n));
      n = llama_chat_apply_template(source, chat.data(), chat.size(), add_assistant, out.data(), n);
    }
    if (n < 0)
      return Fail(
          StatusCode::kUnsupported,
          fmt::format("{}: libllama does not know this file's chat template; give the prompt as it is (--raw)", path_));
    out.resize(static_cast<size_t>(n));
    return out;
  } catch (const std::exception& e) {
    return Fail(
        StatusCode::kUnsupported,
        fmt::format("{}: its chat template can't be applied ({}); give the prompt as it is (--raw)", path_, e.what()));
  }
}

}  // namespace kvcell
