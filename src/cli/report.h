// What a run has to tell afterwards, as JSON and as a table for people.
#pragma once

#include <span>

#include "cli/conversation.h"
#include "cli/engine.h"
#include "cli/output.h"

namespace kvcell::cli {

// Hooks that draw the prompt's progress, print the answer's text on standard output where `prints`, and stop on a
// signal.
AnswerHooks TerminalHooks(Progress* progress, bool prints, bool quiet);

// The object of `run --json`.
Json AnswerReport(const Engine& engine, const Conversation& conversation, const Answer& answer);
// The object of `run --samples --json`; `tokens` and `text` are the first answer's. `stats` are of the time when all
// answers were being generated.
Json SamplesReport(const Engine& engine, const CacheStats& stats, const PrefixUse& prefix,
                   std::span<const Answer> answers);
// The same figures on standard error.
void PrintAnswerTable(const Engine& engine, const Conversation& conversation, const Answer& answer);
void PrintSamplesTable(const Engine& engine, const CacheStats& stats, const PrefixUse& prefix,
                       std::span<const Answer> answers);
// The cache's part alone: bytes and cells.
void PrintCacheTable(const Engine& engine);

}  // namespace kvcell::cli
