// Tokenizer and chat template of a model file, by libllama (vocabulary only, no weights).
#pragma once

#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "kvcell/status.h"
#include "model/gguf_check.h"
#include "model/model.h"

struct llama_model;
struct llama_vocab;

namespace kvcell {

// From now on libllama and ggml write nothing to standard output or error; what they report as an error while a call of
// ours runs becomes part of that call's Status. Process-wide; safe to call often.
void SilenceLlama();
// The last error line that libllama logged on this thread since the last call, "" where there is none.
std::string TakeLlamaError();

// Thread-safe once loaded.
class Tokenizer {
 public:
  // Checks everything that libllama's vocabulary loader asserts, then gives it a copy of the tokenizer's keys alone, so
  // that nothing else of a hostile file reaches it. kCorruption, kUnsupported (kinds other than SentencePiece and BPE).
  static Result<std::unique_ptr<Tokenizer>> Load(const GgufHeader& header, int32_t n_vocab);
  ~Tokenizer();
  Tokenizer(const Tokenizer&) = delete;
  Tokenizer& operator=(const Tokenizer&) = delete;

  Result<std::vector<Token>> Tokenize(const std::string& text, bool special, bool parse) const;
  std::string Piece(Token token) const;
  bool IsEndOfGeneration(Token token) const;
  bool SpellsControlTokens(std::string_view text) const;
  size_t LongestPiece() const { return longest_piece_; }
  Result<std::string> ApplyChatTemplate(std::span<const ChatMessage> messages, bool add_assistant) const;

 private:
  Tokenizer(std::string path, llama_model* model);

  std::string path_;
  llama_model* model_;
  const llama_vocab* vocab_;
  int32_t n_tokens_ = 0;
  size_t longest_piece_ = 1;
  std::vector<std::string> control_;  // texts of the control tokens
};

}  // namespace kvcell
