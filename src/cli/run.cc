// kvcell run: feeds a prompt, prints the answer as it comes, and keeps the session.
#include <fmt/format.h>

#include <cstdio>
#include <memory>
#include <string>
#include <utility>

#include "base/text_file.h"
#include "cli/commands.h"
#include "cli/conversation.h"
#include "cli/engine.h"
#include "cli/interrupt.h"
#include "cli/output.h"
#include "cli/report.h"
#include "cli/units.h"

namespace kvcell::cli {
namespace {

Result<std::string> PromptText(const Options& options) {
  std::string text;
  if (options.file) {
    Result<std::string> read = ReadTextFile(*options.file);
    if (!read) return read;
    text = *std::move(read);
  }
  if (options.prompt) {
    if (!text.empty()) text += "\n\n";
    text += *options.prompt;
  }
  return text;
}

void TellEnd(const Options& options, const Conversation& conversation, const Answer& answer, int64_t context) {
  if (options.quiet) return;
  if (answer.end == AnswerEnd::kContextFull) {
    PrintWarning(fmt::format("the context of {} tokens is full; raise --ctx to go on", FormatCount(context)));
  } else if (answer.end == AnswerEnd::kEnded && answer.tokens.empty() && conversation.resumed() &&
             answer.prompt_tokens == 0) {
    PrintWarning(fmt::format("the last answer of session '{}' had ended; give a new prompt with -p", options.session));
  }
}

}  // namespace

int RunCommand(const Options& options, SamplerGiven sampler_given) {
  const bool has_prompt = options.prompt.has_value() || options.file.has_value();
  if (!has_prompt && options.session.empty()) {
    return Failed(
        Status(StatusCode::kInvalidArgument, "give a prompt with -p TEXT or -f FILE, or a --session to go on with"));
  }
  const Result<std::string> prompt = PromptText(options);
  if (!prompt) return Failed(prompt.error());
  if (!options.report.empty()) {  // found out before an answer is made for nothing
    if (const Status written = WriteJsonFile(options.report, Json::object()); !written.ok()) return Failed(written);
  }
  if (options.samples > 0) return SamplesCommand(options, *prompt);
  Result<Engine> engine = OpenEngine(options);
  if (!engine) return Failed(engine.error());

  CatchInterrupts();
  Result<std::unique_ptr<Conversation>> opened = Conversation::Open(&*engine, SettingsFrom(options, sampler_given));
  if (!opened) return Failed(opened.error());
  Conversation& conversation = **opened;
  if (const Status status = OpenToOthers(options, conversation.sequence(), &*engine); !status.ok())
    return Failed(status);
  if (!conversation.note().empty() && !options.quiet) PrintWarning(conversation.note());
  if (!has_prompt && conversation.empty()) {
    return Failed(Status(StatusCode::kInvalidArgument,
                         fmt::format("session '{}' is not in {} yet; give a prompt with -p to start it",
                                     options.session, options.store)));
  }
  if (has_prompt) {
    if (const Status status = conversation.AddPrompt(*prompt); !status.ok()) return Failed(status);
  }

  Progress progress("prompt", !options.quiet && !options.json);
  const Result<Answer> answer =
      conversation.Generate(options.max_tokens, TerminalHooks(&progress, !options.json, options.quiet));
  progress.Clear();
  if (!answer) return Failed(answer.error());
  if (!options.json) Print(stdout, "\n");
  std::fflush(stdout);
  // Whatever fails from here on, the answer is there and is told.
  Status trouble = conversation.Save();
  if (!trouble.ok() && options.session.empty()) {  // nobody asked for anything to be kept
    if (!options.quiet)
      PrintWarning(fmt::format("nothing is kept for prompts that begin alike: {}", trouble.message()));
    trouble = OkStatus();
  }
  TellRemoved(options, *engine);
  const Status observed = WriteObservations(options, *engine, engine->control->tokens());
  if (trouble.ok()) trouble = observed;
  const Json report = AnswerReport(*engine, conversation, *answer);
  if (!options.report.empty()) {
    const Status written = WriteJsonFile(options.report, report);
    if (trouble.ok()) trouble = written;
  }
  if (options.json) {
    PrintJson(report);
  } else if (!options.quiet) {
    Print(stderr, "\n");
    PrintAnswerTable(*engine, conversation, *answer);
  }
  TellEnd(options, conversation, *answer, engine->context);
  if (!trouble.ok()) return Failed(trouble);
  return answer->end == AnswerEnd::kStopped && InterruptSignal() != 0 ? 128 + InterruptSignal() : 0;
}

}  // namespace kvcell::cli
