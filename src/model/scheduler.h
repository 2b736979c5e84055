// Many requests on one model and cache: they join and leave at any step, prompts are fed in chunks between the others'
// tokens, what several begin with is computed once, and none is admitted that memory could not carry to its end.
#pragma once

#include <cstdint>
#include <deque>
#include <list>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "kvcell/cache.h"
#include "kvcell/status.h"
#include "model/model.h"

namespace kvcell {

using RequestId = int64_t;

struct GenerationRequest {
  std::vector<Token> prompt;
  int64_t max_tokens = 256;
  SamplerOptions sampler = {};
  // Answers to the one prompt, which is fed once. Sample i draws with seed + i, so that it is the answer that a request
  // of its own with that seed gets.
  int32_t n_samples = 1;
  bool ignore_eos = false;  // tokens that end a text are fed like any other
};

struct SchedulerOptions {
  int64_t context = 0;        // most tokens of a sequence, prompt and answer; 0: no limit but memory
  int32_t step_tokens = 512;  // most rows of a step; not more than model and cache allow
  // Most prompt tokens in a step in which others generate. Less: their tokens come more evenly; more: prompts are fed
  // faster.
  int32_t chunk_tokens = 256;
  bool shares = true;    // begins with what others have computed
  bool publish = false;  // puts finished requests' blocks into the cache's store
};

enum class RequestState : uint8_t { kWaiting, kFeeding, kGenerating, kDone, kCancelled, kFailed };

enum class GenerationEnd : uint8_t { kUnfinished, kEnded, kTokenLimit, kContextFull };

struct SampleResult {
  std::vector<Token> tokens;
  GenerationEnd end = GenerationEnd::kUnfinished;
};

struct RequestResult {
  RequestState state = RequestState::kWaiting;
  std::vector<SampleResult> samples;
  PrefixUse reused;             // tokens that were not computed, and why no more
  int64_t fed_tokens = 0;       // of the prompt, computed for this request
  int64_t first_step = -1;      // number of the step that gave the first token
  double wait_ms = 0.0;         // from Submit to admission
  double first_token_ms = 0.0;  // from Submit to the first token
  Status error;                 // with kFailed
};

struct GeneratedToken {
  RequestId request = 0;
  int32_t sample = 0;
  Token token = 0;
};

// Thread-compatible. Model and cache must outlive it, and nobody else steps the cache meanwhile.
class Scheduler {
 public:
  Scheduler(Model* model, Cache* cache, const SchedulerOptions& options);
  ~Scheduler();

  // Queues a request. Refused with the numbers: kInvalidArgument (no prompt, longer than the context, more samples than
  // sequences), kOutOfBudget where it would not fit even alone.
  Result<RequestId> Submit(GenerationRequest request);
  // Takes the request out, between any two steps; its tokens so far stay readable. kNotFound; nothing to do when it has
  // ended.
  Status Cancel(RequestId id);
  // Runs one step of all that are admitted; tokens that it gave are added to `tokens`, which may be null. False:
  // nothing is left to do. An error of a single request ends that one alone (kFailed).
  Result<bool> Step(std::vector<GeneratedToken>* tokens);
  // Steps until nothing is left.
  Status Run();

  // Valid until Forget. Null: no such request.
  const RequestResult* Find(RequestId id) const;
  void Forget(RequestId id);
  int64_t n_steps() const { return n_steps_; }
  size_t n_running() const { return running_.size(); }
  size_t n_waiting() const { return waiting_.size(); }

 private:
  struct Sample {
    SequenceId sequence = -1;
    Sampler sampler = Sampler(SamplerOptions{});
    Token next = 0;  // sampled, not fed yet
    bool active = false;
  };
  struct Entry {
    RequestId id = 0;
    GenerationRequest request;
    RequestResult result;
    int64_t fed = 0;  // tokens of the prompt that are in the cache
    std::vector<Sample> samples;
    double submitted_ms = 0.0;
  };
  // One row range of a step: a prompt chunk of an entry or the next token of one of its samples.
  struct Part {
    Entry* entry = nullptr;
    int32_t sample = -1;  // -1: prompt
    std::span<const Token> tokens = {};
    bool wants_logits = false;
  };

  int64_t BlocksFor(const GenerationRequest& request) const;
  int64_t BlocksLeft(const Entry& entry) const;
  bool IsBeingComputed(const GenerationRequest& request) const;
  void Admit();
  bool TryAdmit(Entry* entry);
  std::vector<Part> PlanStep();
  Status RunParts(std::span<const Part> parts, std::vector<GeneratedToken>* tokens);
  Status TakeLogits(const Part& part, std::span<const float> logits, std::vector<GeneratedToken>* tokens);
  void TakeToken(Entry* entry, int32_t sample, std::span<const float> logits, std::vector<GeneratedToken>* tokens);
  void EndSample(Entry* entry, int32_t sample, GenerationEnd end);
  void Finish(Entry* entry, RequestState state);
  void Fail(Entry* entry, Status status);

  Model* model_;
  Cache* cache_;
  SchedulerOptions options_;
  int64_t room_blocks_ = 0;  // of a cache that nobody else uses
  int32_t sequences_free_ = 0;
  RequestId next_id_ = 1;
  int64_t n_steps_ = 0;
  std::list<Entry> entries_;
  std::deque<Entry*> waiting_;
  std::vector<Entry*> running_;
};

}  // namespace kvcell
