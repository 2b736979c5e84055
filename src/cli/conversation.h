// One conversation with a model: prompts in, answers out, kept in the store between processes. `run` and `chat` share
// it.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "cli/engine.h"
#include "kvcell/cache.h"
#include "kvcell/status.h"
#include "model/model.h"

namespace kvcell::cli {

struct ConversationSettings {
  std::string session;  // "": nothing is kept
  SamplerOptions sampler;
  SamplerGiven sampler_given;         // a session goes on with what it was stored with for the others
  bool raw = false;                   // prompts are fed as they are
  bool ignore_eos = false;            // tokens that end a text are fed like any other
  int64_t save_every = 0;             // tokens that an answer grows by between two saves beside it; 0: none
  std::optional<uint8_t> durability;  // of the session from now on, as CacheOptions has it; nothing: what it was, or 1
};

ConversationSettings SettingsFrom(const Options& options, SamplerGiven sampler_given);

// What happens while an answer is made. All optional.
struct AnswerHooks {
  std::function<void(std::string_view)> on_text;            // whole UTF-8 characters
  std::function<void(int64_t done, int64_t total)> on_fed;  // tokens of the prompt
  std::function<bool()> should_stop;                        // asked after every step
  std::function<void(std::string_view)> on_trouble;         // what went wrong while the answer goes on all the same
};

enum class AnswerEnd : uint8_t { kEnded, kTokenLimit, kContextFull, kStopped };

struct Answer {
  std::vector<Token> tokens;
  std::string text;
  AnswerEnd end = AnswerEnd::kEnded;
  int64_t prompt_tokens = 0;  // fed before the first token of the answer
  double ttft_ms = 0.0;       // from the prompt (or the opening of the session) to the first token; 0: there was none
  double prefill_ms = 0.0;
  double decode_ms = 0.0;  // of the steps after the first token
  int64_t decode_steps = 0;
};

// Thread-compatible. Model and cache must outlive it.
class Conversation {
 public:
  // Opens the session where the store has it, else starts an empty one. Errors of Cache::OpenSession.
  static Result<std::unique_ptr<Conversation>> Open(Engine* engine, const ConversationSettings& settings);

  // Tokens whose K and V came from the stored session or from a prefix that others have computed.
  int64_t reused_tokens() const { return reused_tokens_ + prefix_.tokens; }
  // What the conversation began with instead of computing it, and why no more.
  const PrefixUse& prefix() const { return prefix_; }
  // Why not all stored tokens could be used, "" where they could.
  const std::string& note() const { return note_; }
  bool resumed() const { return resumed_; }
  // True when the last answer came to its end, so that only a new prompt can go on from here.
  bool ended() const { return ended_; }
  // True when there is something to go on from.
  bool empty() const { return Length() == 0 && pending_.empty(); }
  int64_t Length() const { return engine_->cache->Length(sequence_); }
  // With what is queued to be fed.
  int64_t TotalLength() const { return Length() + static_cast<int64_t>(pending_.size()); }
  SequenceId sequence() const { return sequence_; }
  const SamplerOptions& sampler() const { return sampler_.options(); }

  // Queues a prompt: the next user turn in the model's chat template, or its text alone in raw mode. kInvalidArgument
  // naming the numbers where it is longer than what is left of the context.
  Status AddPrompt(const std::string& text);
  // Feeds what is queued and generates up to max_tokens tokens. An error leaves the conversation at the last whole
  // step.
  Result<Answer> Generate(int64_t max_tokens, const AnswerHooks& hooks);
  // Stores the conversation under its session's name; without one, what later prompts may begin with.
  Status Save();
  // The tokens that are queued, for somebody else to feed; nothing is queued any more.
  std::vector<Token> TakePending() { return std::exchange(pending_, {}); }

 private:
  Conversation(Engine* engine, const ConversationSettings& settings)
      : engine_(engine),
        session_(settings.session),
        sampler_(settings.sampler),
        raw_(settings.raw),
        ignore_eos_(settings.ignore_eos),
        save_every_(settings.save_every),
        durability_(settings.durability) {}

  Status Resume(OpenedSession opened, SamplerGiven sampler_given);
  void ReadExtras(const std::string& extras, SamplerGiven sampler_given);
  std::string WriteExtras() const;
  Result<std::vector<Token>> TurnTokens(const std::string& text) const;
  Result<std::string> TurnText(const std::string& text) const;
  Status BeginWithPrefix();
  Status Feed(const AnswerHooks& hooks, bool* stopped);
  // Begins a save beside the work where the answer has grown enough since the last one.
  void SaveAlong(const AnswerHooks& hooks);
  // One step. Stored cells that are found damaged are computed again, with all behind them, and the step with them.
  Status Step(std::span<const Token> tokens, bool want_logits, const AnswerHooks& hooks);
  Status StepOnce(std::span<const Token> tokens, bool want_logits);
  Status ComputeAgain(std::span<const Token> tokens, bool want_logits, const AnswerHooks& hooks);

  Engine* engine_;
  std::string session_;
  Sampler sampler_;
  bool raw_;
  bool ignore_eos_;
  int64_t save_every_;
  int64_t saved_length_ = 0;
  std::optional<uint8_t> durability_;
  SequenceId sequence_ = 0;
  std::vector<Token> pending_;  // to be fed before anything is generated
  std::vector<float> logits_;   // after the last token; empty while something is pending
  bool ended_ = false;
  bool resumed_ = false;
  int64_t reused_tokens_ = 0;
  PrefixUse prefix_;
  std::string note_;
  std::optional<std::chrono::steady_clock::time_point> turn_start_;
};

}  // namespace kvcell::cli
