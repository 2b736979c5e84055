// A language model on ggml: GGUF weights (memory-mapped) and a graph per architecture that produces q, k, v and logits.
// Attention is the cache's; tokenizer, chat template and samplers are libllama's. Knows sequences, no cells.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "kvcell/cache.h"
#include "kvcell/geometry.h"
#include "kvcell/status.h"

namespace kvcell {

// What the file says of itself, and what follows from it.
struct ModelFacts {
  std::string path;
  std::string architecture;  // "llama", "qwen2", "qwen3", "gemma3"
  std::string name;
  std::string license;       // as the file states it, "" where it does not
  std::string source;        // URL or repository as the file states it, ""
  std::string weight_types;  // e.g. "q4_1 x211, f32 x61"
  int32_t n_layers = 0, n_embd = 0, n_vocab = 0;
  int64_t context_train = 0;
  uint64_t n_parameters = 0;
  uint64_t file_bytes = 0;
  uint64_t weights_bytes = 0;  // of all tensors
  Geometry geometry;           // [n_layers]
  std::vector<RopeSpec> rope;  // [n_layers]: for CacheOptions::rope
  // [n_layers][head_dim]: what the cache's keys are multiplied and its queries divided by, so that the two of a channel
  // are alike in size; empty where the model has no norms that allow it.
  std::vector<std::vector<float>> key_factors;
};

struct ModelOptions {
  int32_t n_threads = 0;    // 0: as many as there are processors
  int32_t max_batch = 512;  // most rows per Forward
  // Where the digests of large model files are remembered, so that a start need not read them whole; "": nowhere.
  std::string digest_folder = {};
};

struct ChatMessage {
  std::string role;  // "system", "user", "assistant"
  std::string content;
};

// Rows of one step: which tokens go to which sequence, and whether the logits of the last one are wanted.
struct ModelStep {
  SequenceId sequence = 0;
  std::span<const Token> tokens;
  bool want_logits = false;      // of the last token
  bool want_all_logits = false;  // of every token (perplexity); implies want_logits
  bool draft = false;            // StepItem::draft: a guess that Cache::Trim may take back
};

// Thread-compatible.
class Model {
 public:
  // kNotFound, kPermission, kCorruption (not a GGUF file, truncated, hostile: names the field), kUnsupported
  // (architecture, tensor type or RoPE kind that kvcell has not: names what it has). Never aborts.
  static Result<std::unique_ptr<Model>> Load(const std::string& path, const ModelOptions& options);
  // Reads the header only: facts without loading weights. Same errors.
  static Result<ModelFacts> ReadFacts(const std::string& path);
  virtual ~Model() = default;

  virtual const ModelFacts& facts() const = 0;
  // Named digests of all that decides what K and V mean: weights, tokenizer, RoPE. For CacheOptions::identity.
  virtual const std::vector<std::pair<std::string, std::string>>& identity() const = 0;
  // Bytes of compute buffers for a batch of `rows` rows.
  virtual uint64_t WorkingBytes(int rows) const = 0;

  // special: add BOS and the like at the start; parse: read special tokens' text (<|im_start|>) as those tokens.
  virtual Result<std::vector<Token>> Tokenize(const std::string& text, bool special, bool parse) const = 0;
  // The token's text, possibly part of a UTF-8 character.
  virtual std::string Piece(Token token) const = 0;
  virtual bool IsEndOfGeneration(Token token) const = 0;
  // True when tokenizing `text` with `parse` would find a control token (such as an end of turn) spelled in it.
  virtual bool SpellsControlTokens(std::string_view text) const = 0;
  // Bytes of the longest text that one token can stand for: a text has at least size / LongestPiece() tokens.
  virtual size_t LongestPiece() const = 0;
  // The model's own chat template; kUnsupported where the file has none or libllama does not know it.
  virtual Result<std::string> ApplyChatTemplate(std::span<const ChatMessage> messages, bool add_assistant) const = 0;

  // Runs one step: Begin, one attention node per layer on ggml's threads, Commit. logits gets [n_wanted, n_vocab] in
  // step order. An error leaves cache and sequences as they were.
  virtual Status Forward(Cache* cache, std::span<const ModelStep> steps, std::vector<float>* logits) = 0;
};

struct SamplerOptions {
  float temperature = 0.0f;  // 0: greedy
  int32_t top_k = 40;
  float top_p = 0.95f;
  float min_p = 0.05f;
  uint32_t seed = 0;
};

// Picks the next token. The random draw at a position depends on seed and position alone, so that a resumed session
// goes on as the uninterrupted one would.
class Sampler {
 public:
  explicit Sampler(const SamplerOptions& options) : options_(options) {}
  Token Sample(std::span<const float> logits, int64_t position) const;
  const SamplerOptions& options() const { return options_; }

 private:
  SamplerOptions options_;
};

// Writes a copy of a GGUF file with every tensor turned to f32 (metadata kept): the yardstick that has no weight
// rounding.
Status WriteF32Copy(const std::string& from, const std::string& to);

}  // namespace kvcell
