#include "model/scheduler.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <limits>
#include <utility>

namespace kvcell {
namespace {

double NowMs() {
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

int64_t WholeBlocks(int64_t tokens) { return tokens / kBlockTokens; }

}  // namespace

Scheduler::Scheduler(Model* model, Cache* cache, const SchedulerOptions& options)
    : model_(model), cache_(cache), options_(options) {
  options_.step_tokens = std::min(options_.step_tokens, cache->options().max_step_tokens);
  options_.chunk_tokens = std::clamp(options_.chunk_tokens, 1, options_.step_tokens);
  room_blocks_ = WholeBlocks(cache->Room());
  sequences_free_ = cache->options().max_sequences;
}

Scheduler::~Scheduler() {
  for (Entry& entry : entries_) {
    if (entry.result.state == RequestState::kFeeding || entry.result.state == RequestState::kGenerating) {
      Finish(&entry, RequestState::kCancelled);
    }
  }
}

// Sealed blocks that a request may come to need, nothing shared with others.
int64_t Scheduler::BlocksFor(const GenerationRequest& request) const {
  const auto prompt = static_cast<int64_t>(request.prompt.size());
  const int64_t shared = WholeBlocks(prompt);
  return shared + request.n_samples * (WholeBlocks(prompt + request.max_tokens) - shared);
}

// Of these, the ones that it has not sealed yet.
int64_t Scheduler::BlocksLeft(const Entry& entry) const {
  const auto prompt = static_cast<int64_t>(entry.request.prompt.size());
  const int64_t shared = WholeBlocks(prompt);
  if (entry.result.state != RequestState::kGenerating) {
    return BlocksFor(entry.request) - WholeBlocks(cache_->Length(entry.samples.front().sequence));
  }
  int64_t left = 0;
  for (const Sample& sample : entry.samples) {
    if (sample.active)
      left += WholeBlocks(prompt + entry.request.max_tokens) -
              std::max(shared, WholeBlocks(cache_->Length(sample.sequence)));
  }
  return left;
}

Result<RequestId> Scheduler::Submit(GenerationRequest request) {
  const auto prompt = static_cast<int64_t>(request.prompt.size());
  const auto refuse = [](StatusCode code, std::string message) { return kvcell::Fail(code, std::move(message)); };
  if (prompt == 0) return refuse(StatusCode::kInvalidArgument, "the request has no prompt; give at least one token");
  if (request.max_tokens < 0 || request.n_samples < 1) {
    return refuse(StatusCode::kInvalidArgument,
                  "a request asks for at least one sample and no negative number of tokens");
  }
  if (options_.context > 0 && prompt >= options_.context) {
    return refuse(StatusCode::kInvalidArgument,
                  fmt::format("the prompt has {} tokens, and the context holds {} with the answer; shorten it", prompt,
                              options_.context));
  }
  if (request.n_samples > cache_->options().max_sequences) {
    return refuse(StatusCode::kInvalidArgument,
                  fmt::format("{} samples, but the cache holds {} sequences; raise max_sequences", request.n_samples,
                              cache_->options().max_sequences));
  }
  for (const Token token : request.prompt) {
    if (token < 0 || token >= model_->facts().n_vocab) {
      return refuse(StatusCode::kInvalidArgument,
                    fmt::format("token {} is none of the model's {}", token, model_->facts().n_vocab));
    }
  }
  if (options_.context > 0) request.max_tokens = std::min(request.max_tokens, options_.context - prompt);
  const int64_t limit = std::numeric_limits<int64_t>::max() / (2 * request.n_samples) - prompt;
  request.max_tokens = std::min(request.max_tokens, limit);
  if (BlocksFor(request) > room_blocks_) {
    return refuse(
        StatusCode::kOutOfBudget,
        fmt::format("the request may come to {} tokens of KV in all, but the RAM budget holds {}; lower max_tokens, "
                    "raise the budget or name a store",
                    BlocksFor(request) * kBlockTokens, room_blocks_ * kBlockTokens));
  }
  Entry& entry = entries_.emplace_back();
  entry.id = next_id_++;
  entry.request = std::move(request);
  entry.submitted_ms = NowMs();
  waiting_.push_back(&entry);
  return entry.id;
}

const RequestResult* Scheduler::Find(RequestId id) const {
  for (const Entry& entry : entries_) {
    if (entry.id == id) return &entry.result;
  }
  return nullptr;
}

void Scheduler::Forget(RequestId id) {
  if (!Cancel(id).ok()) return;
  entries_.remove_if([&](const Entry& entry) { return entry.id == id; });
}

Status Scheduler::Cancel(RequestId id) {
  for (Entry& entry : entries_) {
    if (entry.id != id) continue;
    switch (entry.result.state) {
      case RequestState::kWaiting:
        std::erase(waiting_, &entry);
        entry.result.state = RequestState::kCancelled;
        break;
      case RequestState::kFeeding:
      case RequestState::kGenerating:
        Finish(&entry, RequestState::kCancelled);
        break;
      default:
        break;
    }
    return OkStatus();
  }
  return Status(StatusCode::kNotFound, fmt::format("there is no request {}", id));
}

void Scheduler::Finish(Entry* entry, RequestState state) {
  if (options_.publish && state == RequestState::kDone && !entry->samples.empty() &&
      entry->samples.front().sequence >= 0) {
    // The answer is there all the same; what could not be stored is computed again another time.
    (void)cache_->Publish(entry->samples.front().sequence);
  }
  for (Sample& sample : entry->samples) {
    if (sample.sequence >= 0) (void)cache_->Free(std::exchange(sample.sequence, -1));
    sample.active = false;
  }
  sequences_free_ += entry->request.n_samples;
  entry->result.state = state;
  std::erase(running_, entry);
}

void Scheduler::Fail(Entry* entry, Status status) {
  entry->result.error = std::move(status);
  Finish(entry, RequestState::kFailed);
}

// True while another request computes blocks that this one could use: it waits for them instead of computing them too.
bool Scheduler::IsBeingComputed(const GenerationRequest& request) const {
  if (!options_.shares) return false;
  const auto most = WholeBlocks(static_cast<int64_t>(request.prompt.size()) - 1);
  for (const Entry* other : running_) {
    if (other->result.state != RequestState::kFeeding) continue;
    const auto [mine, theirs] = std::ranges::mismatch(request.prompt, other->request.prompt);
    const int64_t common = std::min(most, WholeBlocks(mine - request.prompt.begin()));
    if (common > WholeBlocks(other->fed)) return true;
  }
  return false;
}

void Scheduler::Admit() {
  for (size_t i = 0; i < waiting_.size();) {
    Entry* entry = waiting_[i];
    if (IsBeingComputed(entry->request)) {
      ++i;  // others may pass it: what it waits for is under way
      continue;
    }
    if (entry->request.n_samples > sequences_free_ || !TryAdmit(entry)) {
      if (!running_.empty()) return;  // in order: a large request is not kept waiting by smaller ones for ever
      waiting_.erase(waiting_.begin() + static_cast<std::ptrdiff_t>(i));
      entry->result.state = RequestState::kFailed;
      entry->result.error =
          Status(StatusCode::kOutOfBudget,
                 "nothing else is running and the request still does not fit; free sequences of the cache");
      continue;
    }
    waiting_.erase(waiting_.begin() + static_cast<std::ptrdiff_t>(i));
  }
}

bool Scheduler::TryAdmit(Entry* entry) {
  const Result<SequenceId> sequence = cache_->Create();
  if (!sequence) return false;
  Result<PrefixUse> use = options_.shares ? cache_->Reuse(*sequence, entry->request.prompt) : PrefixUse{};
  if (!use) use = PrefixUse{.note = use.error().message()};  // computed instead
  entry->fed = use->tokens;
  entry->samples.clear();
  for (int32_t i = 0; i < entry->request.n_samples; ++i) {
    SamplerOptions sampler = entry->request.sampler;
    sampler.seed += static_cast<uint32_t>(i);
    entry->samples.push_back({.sequence = i == 0 ? *sequence : -1, .sampler = Sampler(sampler)});
  }
  int64_t promised = BlocksLeft(*entry);
  for (const Entry* other : running_) promised += BlocksLeft(*other);
  if (promised > WholeBlocks(cache_->Room())) {
    (void)cache_->Free(*sequence);
    entry->samples.clear();
    return false;
  }
  entry->result.reused = *std::move(use);
  entry->result.state = RequestState::kFeeding;
  entry->result.samples.resize(static_cast<size_t>(entry->request.n_samples));
  entry->result.wait_ms = NowMs() - entry->submitted_ms;
  sequences_free_ -= entry->request.n_samples;
  running_.push_back(entry);
  return true;
}

std::vector<Scheduler::Part> Scheduler::PlanStep() {
  std::vector<Part> parts;
  auto rows = static_cast<int64_t>(options_.step_tokens);
  for (Entry* entry : running_) {
    if (entry->result.state != RequestState::kGenerating) continue;
    for (size_t i = 0; i < entry->samples.size() && rows > 0; ++i) {
      if (!entry->samples[i].active) continue;
      parts.push_back({entry, static_cast<int32_t>(i), {&entry->samples[i].next, 1}, true});
      --rows;
    }
  }
  if (!parts.empty()) rows = std::min(rows, static_cast<int64_t>(options_.chunk_tokens));
  for (Entry* entry : running_) {
    if (entry->result.state != RequestState::kFeeding || rows == 0) continue;
    const auto left = static_cast<int64_t>(entry->request.prompt.size()) - entry->fed;
    const int64_t n = std::min(left, rows);
    parts.push_back({entry, -1,
                     std::span(entry->request.prompt).subspan(static_cast<size_t>(entry->fed), static_cast<size_t>(n)),
                     n == left});
    rows -= n;
  }
  return parts;
}

Result<bool> Scheduler::Step(std::vector<GeneratedToken>* tokens) {
  Admit();
  if (running_.empty()) return !waiting_.empty();
  const std::vector<Part> parts = PlanStep();
  ++n_steps_;
  if (RunParts(parts, tokens).ok()) return true;
  // One of them can't be carried out. Each by itself, so that it is known which, and the others go on.
  for (const Part& part : parts) {
    if (part.entry->result.state == RequestState::kFailed) continue;
    if (Status status = RunParts({&part, 1}, tokens); !status.ok()) Fail(part.entry, std::move(status));
  }
  return true;
}

Status Scheduler::Run() {
  for (;;) {
    const Result<bool> more = Step(nullptr);
    if (!more) return more.error();
    if (!*more) return OkStatus();
  }
}

Status Scheduler::RunParts(std::span<const Part> parts, std::vector<GeneratedToken>* tokens) {
  std::vector<ModelStep> steps;
  for (const Part& part : parts) {
    const size_t sample = part.sample < 0 ? 0 : static_cast<size_t>(part.sample);
    steps.push_back(
        {.sequence = part.entry->samples[sample].sequence, .tokens = part.tokens, .want_logits = part.wants_logits});
  }
  std::vector<float> logits;
  KVCELL_RETURN_IF_ERROR(model_->Forward(cache_, steps, &logits));
  const auto n_vocab = static_cast<size_t>(model_->facts().n_vocab);
  size_t row = 0;
  for (const Part& part : parts) {
    if (part.sample < 0) {
      part.entry->fed += static_cast<int64_t>(part.tokens.size());
      part.entry->result.fed_tokens += static_cast<int64_t>(part.tokens.size());
    }
    if (!part.wants_logits) continue;
    const Status status = TakeLogits(part, std::span(logits).subspan(row++ * n_vocab, n_vocab), tokens);
    if (!status.ok()) Fail(part.entry, status);
  }
  return OkStatus();
}

Status Scheduler::TakeLogits(const Part& part, std::span<const float> logits, std::vector<GeneratedToken>* tokens) {
  Entry* entry = part.entry;
  if (part.sample >= 0) {
    TakeToken(entry, part.sample, logits, tokens);
    return OkStatus();
  }
  // The prompt is complete: every sample goes on from here.
  for (size_t i = 1; i < entry->samples.size(); ++i) {
    const Result<SequenceId> fork = cache_->Fork(entry->samples.front().sequence);
    if (!fork) return fork.error();
    entry->samples[i].sequence = *fork;
  }
  entry->result.state = RequestState::kGenerating;
  entry->result.first_step = n_steps_;
  entry->result.first_token_ms = NowMs() - entry->submitted_ms;
  for (Sample& sample : entry->samples) sample.active = true;
  const auto n = static_cast<int32_t>(entry->samples.size());
  for (int32_t i = 0; i < n && entry->result.state == RequestState::kGenerating; ++i)
    TakeToken(entry, i, logits, tokens);
  return OkStatus();
}

void Scheduler::TakeToken(Entry* entry, int32_t index, std::span<const float> logits,
                          std::vector<GeneratedToken>* tokens) {
  Sample& sample = entry->samples[static_cast<size_t>(index)];
  SampleResult& result = entry->result.samples[static_cast<size_t>(index)];
  const int64_t length = cache_->Length(sample.sequence);
  const auto n = static_cast<int64_t>(result.tokens.size());
  if (n >= entry->request.max_tokens) return EndSample(entry, index, GenerationEnd::kTokenLimit);
  if (options_.context > 0 && length >= options_.context) return EndSample(entry, index, GenerationEnd::kContextFull);
  const Token token = sample.sampler.Sample(logits, length);
  if (!entry->request.ignore_eos && model_->IsEndOfGeneration(token))
    return EndSample(entry, index, GenerationEnd::kEnded);
  result.tokens.push_back(token);
  if (tokens != nullptr) tokens->push_back({entry->id, index, token});
  if (n + 1 == entry->request.max_tokens) return EndSample(entry, index, GenerationEnd::kTokenLimit);
  sample.next = token;
}

void Scheduler::EndSample(Entry* entry, int32_t index, GenerationEnd end) {
  Sample& sample = entry->samples[static_cast<size_t>(index)];
  entry->result.samples[static_cast<size_t>(index)].end = end;
  sample.active = false;
  const bool all = std::ranges::none_of(entry->samples, [](const Sample& one) { return one.active; });
  if (all) return Finish(entry, RequestState::kDone);
  // The first one stays for Publish; it holds what the others share anyway.
  if (index > 0) (void)cache_->Free(std::exchange(sample.sequence, -1));
}

}  // namespace kvcell
