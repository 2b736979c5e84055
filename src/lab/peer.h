// libllama as the peer: the same model file in the same process, to compare logits and speed with.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "kvcell/geometry.h"
#include "kvcell/status.h"

namespace kvcell {

enum class PeerKvType : uint8_t { kF16, kF32, kQ8_0, kQ4_0 };

struct PeerOptions {
  PeerKvType type_k = PeerKvType::kF16;
  PeerKvType type_v = PeerKvType::kF16;  // a quantized V needs flash_attention
  bool flash_attention = false;
  // This version of libllama rotates quantized K and V (Hadamard along the head) unless the environment variable
  // LLAMA_ATTN_ROT_DISABLE is 1 while a context is made; there is no parameter for it. False sets it for that moment,
  // so peers must not be made on several threads at once.
  bool rotate_quantized = true;
  int32_t n_threads = 0;    // 0: as many as there are processors
  int32_t n_ubatch = 512;   // rows per graph
  int64_t context = 2048;   // tokens, of all sequences together
  int32_t n_sequences = 1;  // more than one share one buffer of cells, so that a common past is kept once
};

// Sequences of libllama; what is not said otherwise is about sequence 0. Thread-compatible.
class Peer {
 public:
  // For files that kvcell's own checks accepted: libllama may abort on hostile ones. kCorruption or kUnsupported with
  // libllama's own words where it can't load the file or make such a context.
  static Result<std::unique_ptr<Peer>> Load(const std::string& path, const PeerOptions& options);
  virtual ~Peer() = default;

  virtual int32_t n_vocab() const = 0;
  virtual int64_t length() const = 0;
  // Appends tokens. logits gets [n_vocab] of the last one, or [n_tokens, n_vocab] with all_logits; it may be null.
  virtual Status Decode(std::span<const Token> tokens, bool all_logits, std::vector<float>* logits) = 0;
  // libllama's own state file of the sequence. kIoError.
  virtual Status SaveState(const std::string& path, std::span<const Token> tokens) = 0;
  virtual Status LoadState(const std::string& path) = 0;
  // Cuts the sequence to its first `length` tokens; kInternal where libllama can't.
  virtual Status Trim(int64_t length) = 0;
  // Makes sequence `to` begin with all of sequence 0's past, no bytes copied.
  virtual void ShareWith(int32_t to) = 0;
  // Appends tokens to one sequence.
  virtual Status DecodeTo(int32_t sequence, std::span<const Token> tokens, std::vector<float>* logits) = 0;
  // Appends one token to each of the sequences 0..n-1 in one batch; logits gets [n, n_vocab].
  virtual Status DecodeEach(std::span<const Token> tokens, std::vector<float>* logits) = 0;
  // Back to empty sequences.
  virtual void Reset() = 0;
};

// Writes a copy of a GGUF file with its matrices in q4_0, made by libllama.
Status WriteQ4Copy(const std::string& from, const std::string& to);

}  // namespace kvcell
