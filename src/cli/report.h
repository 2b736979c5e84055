// What a run has to tell afterwards, as JSON and as a table for people.
#pragma once

#include "cli/conversation.h"
#include "cli/engine.h"
#include "cli/output.h"

namespace kvcell::cli {

// Hooks that draw the prompt's progress, print the answer's text on standard output where `prints`, and stop on a
// signal.
AnswerHooks TerminalHooks(Progress* progress, bool prints);

// The object of `run --json`.
Json AnswerReport(const Engine& engine, const Conversation& conversation, const Answer& answer);
// The same figures on standard error.
void PrintAnswerTable(const Engine& engine, const Conversation& conversation, const Answer& answer);
// The cache's part alone: bytes and cells.
void PrintCacheTable(const Engine& engine);

}  // namespace kvcell::cli
