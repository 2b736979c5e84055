// kvcell run --samples: several answers to one prompt, which is fed once and shared by all of them.
#include <fmt/format.h>

#include <chrono>
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "cli/commands.h"
#include "cli/conversation.h"
#include "cli/engine.h"
#include "cli/interrupt.h"
#include "cli/output.h"
#include "cli/report.h"
#include "cli/utf8.h"
#include "model/scheduler.h"

namespace kvcell::cli {
namespace {

AnswerEnd EndOf(GenerationEnd end) {
  switch (end) {
    case GenerationEnd::kEnded:
      return AnswerEnd::kEnded;
    case GenerationEnd::kTokenLimit:
      return AnswerEnd::kTokenLimit;
    case GenerationEnd::kContextFull:
      return AnswerEnd::kContextFull;
    case GenerationEnd::kUnfinished:
      return AnswerEnd::kStopped;
  }
  return AnswerEnd::kStopped;
}

std::string TextOf(const Model& model, std::span<const Token> tokens) {
  Utf8Stream stream;
  std::string text;
  for (const Token token : tokens) text += stream.Push(model.Piece(token));
  return text + stream.Flush();
}

// The prompt's tokens as `run` without --samples would feed them.
Result<std::vector<Token>> PromptTokens(const Options& options, Engine* engine, const std::string& prompt) {
  Result<std::unique_ptr<Conversation>> conversation = Conversation::Open(engine, SettingsFrom(options, {}));
  if (!conversation) return Fail(conversation.error());
  const Status status = (*conversation)->AddPrompt(prompt);
  (void)engine->cache->Free((*conversation)->sequence());
  if (!status.ok()) return Fail(status);
  return (*conversation)->TakePending();
}

std::vector<Answer> AnswersOf(const Engine& engine, const RequestResult& result, double start_ms, double first_ms,
                              double end_ms) {
  std::vector<Answer> answers;
  for (const SampleResult& sample : result.samples) {
    Answer& answer = answers.emplace_back();
    answer.tokens = sample.tokens;
    answer.text = TextOf(*engine.model, sample.tokens);
    answer.end = EndOf(sample.end);
    answer.prompt_tokens = result.fed_tokens;
    answer.ttft_ms = result.first_token_ms;
    answer.prefill_ms = first_ms - start_ms;
    answer.decode_ms = end_ms - first_ms;
    answer.decode_steps = std::max<int64_t>(0, static_cast<int64_t>(sample.tokens.size()) - 1);
  }
  return answers;
}

double NowMs() {
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace

int SamplesCommand(const Options& options, const std::string& prompt) {
  if (!options.session.empty()) {
    return Failed(Status(StatusCode::kInvalidArgument,
                         "--samples with --session: only one answer can go on; leave one of them out"));
  }
  if (!options.curve.empty()) {
    return Failed(Status(StatusCode::kInvalidArgument,
                         "--samples with --curve: the resource curve is of one answer; leave one of them out"));
  }
  Result<Engine> engine = OpenEngine(options);
  if (!engine) return Failed(engine.error());
  CatchInterrupts();
  const Result<std::vector<Token>> tokens = PromptTokens(options, &*engine, prompt);
  if (!tokens) return Failed(tokens.error());

  Scheduler scheduler(engine->model.get(), engine->cache.get(),
                      {.context = engine->context,
                       .step_tokens = kChunkTokens,
                       .shares = engine->shares_prefixes,
                       .publish = engine->shares_prefixes});
  const double start = NowMs();
  const Result<RequestId> id = scheduler.Submit({.prompt = *tokens,
                                                 .max_tokens = options.max_tokens,
                                                 .sampler = SettingsFrom(options, {}).sampler,
                                                 .n_samples = options.samples,
                                                 .ignore_eos = options.ignore_eos});
  if (!id) return Failed(id.error());
  const RequestResult& result = *scheduler.Find(*id);
  Progress progress("tokens", !options.quiet && !options.json);
  double first = 0.0;
  CacheStats stats;  // while all answers are there
  while (InterruptSignal() == 0) {
    const Result<bool> more = scheduler.Step(nullptr);
    if (!more) return Failed(more.error());
    if (first == 0.0 && result.first_step >= 0) first = NowMs();
    if (!*more) break;
    if (result.state == RequestState::kGenerating) stats = engine->cache->Stats();
    if (first == 0.0) progress.Show(result.reused.tokens + result.fed_tokens, static_cast<int64_t>(tokens->size()));
  }
  const double end = NowMs();
  progress.Clear();
  if (result.state == RequestState::kFailed) return Failed(result.error);
  const std::vector<Answer> answers = AnswersOf(*engine, result, start, first == 0.0 ? end : first, end);
  int64_t n_computed = result.fed_tokens;
  for (const Answer& answer : answers) n_computed += answer.decode_steps;
  TellRemoved(options, *engine);
  Status trouble = WriteObservations(options, *engine, n_computed);  // the answers are there all the same
  const Json report = SamplesReport(*engine, stats, result.reused, answers);
  if (!options.report.empty()) {
    const Status written = WriteJsonFile(options.report, report);
    if (trouble.ok()) trouble = written;
  }
  if (options.json) {
    PrintJson(report);
  } else {
    for (size_t i = 0; i < answers.size(); ++i) {
      // In a pipe the answers are told apart too.
      Print(stdout, "{}--- {} (seed {})\n{}\n", i == 0 ? "" : "\n", i + 1, options.seed + static_cast<uint32_t>(i),
            answers[i].text);
    }
    if (!options.quiet) {
      Print(stderr, "\n");
      PrintSamplesTable(*engine, stats, result.reused, answers);
    }
  }
  if (!trouble.ok()) return Failed(trouble);
  return InterruptSignal() != 0 ? 128 + InterruptSignal() : 0;
}

}  // namespace kvcell::cli
