// kvcell chat: a conversation in the terminal, kept in the store after every answer.
#include <fmt/format.h>

#include <csignal>
#include <cstdio>
#include <iostream>
#include <memory>
#include <string>

#include "cli/commands.h"
#include "cli/conversation.h"
#include "cli/engine.h"
#include "cli/interrupt.h"
#include "cli/output.h"
#include "cli/report.h"
#include "cli/units.h"

namespace kvcell::cli {
namespace {

constexpr const char* kHelp =
    "  /save   store the session now (this happens after every answer too)\n"
    "  /stats  memory, cells and speed\n"
    "  /quit   store the session and leave; so does Ctrl-D\n"
    "  Ctrl-C  stops an answer\n";

// One answer to one line. False when the conversation can't go on.
bool Turn(const Options& options, Engine* engine, Conversation* conversation, const std::string& line) {
  if (const Status status = conversation->AddPrompt(line); !status.ok()) {
    PrintError(status);
    return true;
  }
  Progress progress("prompt", !options.quiet);
  const Result<Answer> answer =
      conversation->Generate(options.max_tokens, TerminalHooks(&progress, true, options.quiet));
  progress.Clear();
  if (!answer) {
    PrintError(answer.error());
    return false;
  }
  Print(stdout, "\n");
  if (answer->end == AnswerEnd::kContextFull) {
    PrintWarning(fmt::format("the context of {} tokens is full; leave and come back with a larger --ctx",
                             FormatCount(engine->context)));
  }
  return true;
}

int Loop(const Options& options, Engine* engine, Conversation* conversation) {
  const bool prompts = IsTerminal(stdin) && !options.quiet;
  std::string line;
  while (true) {
    if (prompts) Print(stdout, "> ");
    std::fflush(stdout);
    if (!std::getline(std::cin, line)) {
      const int signal = InterruptSignal();
      if (prompts) Print(stdout, "\n");
      if (!conversation->empty()) {
        if (const Status saved = conversation->Save(); !saved.ok()) return Failed(saved);
      }
      return signal != 0 ? 128 + signal : 0;
    }
    if (line.empty()) continue;
    if (line == "/help") {
      Print(stdout, "{}", kHelp);
      continue;
    }
    if (line == "/stats") {
      Print(stderr, "{} of {} tokens\n", FormatCount(conversation->Length()), FormatCount(engine->context));
      PrintCacheTable(*engine);
      continue;
    }
    if (line[0] == '/' && line != "/save" && line != "/quit") {
      Print(stderr, "no such command; /help lists them\n");
      continue;
    }
    if (line[0] != '/' && !Turn(options, engine, conversation, line)) return 1;
    if (!conversation->empty()) {
      if (const Status saved = conversation->Save(); !saved.ok()) return Failed(saved);
    }
    if (OutputFailed()) return 1;
    // Ctrl-C stops an answer; what ends the process (SIGTERM, a terminal that closes) ends the conversation.
    if (InterruptSignal() != 0 && InterruptSignal() != SIGINT) return 128 + InterruptSignal();
    ClearInterrupt();
    if (line == "/quit") return 0;
    if (line == "/save") Print(stderr, "stored as '{}'\n", options.session);
  }
}

}  // namespace

int ChatCommand(const Options& options, SamplerGiven sampler_given) {
  if (options.session.empty()) {
    return Failed(Status(StatusCode::kInvalidArgument, "name the conversation with --session NAME"));
  }
  Result<Engine> engine = OpenEngine(options);
  if (!engine) return Failed(engine.error());
  CatchInterrupts();
  Result<std::unique_ptr<Conversation>> conversation =
      Conversation::Open(&*engine, SettingsFrom(options, sampler_given));
  if (!conversation) return Failed(conversation.error());
  if (!options.quiet) {
    if (!(*conversation)->note().empty()) PrintWarning((*conversation)->note());
    if ((*conversation)->resumed()) {
      Print(stderr, "Session '{}' goes on after {} tokens. /help shows the commands.\n", options.session,
            FormatCount((*conversation)->TotalLength()));
    } else {
      Print(stderr, "New session '{}' with {}. /help shows the commands.\n", options.session,
            engine->model->facts().name);
    }
  }
  if (const Status status = OpenToOthers(options, (*conversation)->sequence(), &*engine); !status.ok()) {
    return Failed(status);
  }
  const int code = Loop(options, &*engine, conversation->get());
  TellRemoved(options, *engine);
  const Status written = WriteObservations(options, *engine, engine->control->tokens());
  if (!written.ok()) return Failed(written);
  return code;
}

}  // namespace kvcell::cli
