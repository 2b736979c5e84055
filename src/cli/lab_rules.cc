// kvcell lab stream and bench overhead: what windows cost a model, and what the state machine costs a step.
#include <fmt/format.h>

#include <string>
#include <utility>

#include "base/text_file.h"
#include "cell/rules.h"
#include "cli/bench_rows.h"
#include "cli/commands.h"
#include "cli/interrupt.h"
#include "cli/output.h"
#include "cli/units.h"
#include "lab/bench_overhead.h"
#include "lab/stream.h"

namespace kvcell::cli {

int LabStreamCommand(const Options& options) {
  if (options.model.empty() || !options.file) {
    return Failed(Status(StatusCode::kInvalidArgument, "lab stream needs a model (-m) and a text (-f)"));
  }
  auto text = ReadTextFile(*options.file);
  if (!text) return Failed(text.error());
  auto rules = RulesFrom(options);
  if (!rules) return Failed(rules.error());
  if (*rules == nullptr) rules = ProfileRules("edge");
  Progress progress("blocks", !options.quiet && !options.json);
  CatchInterrupts();
  const auto result = MeasureStream({.model = options.model,
                                     .text = *std::move(text),
                                     .rules = *rules,
                                     .tokens = options.contexts.empty() ? 8192 : options.contexts.front(),
                                     .every = options.every,
                                     .n_threads = options.threads,
                                     .on_block = [&](int64_t done, int64_t total) { progress.Show(done, total); },
                                     .should_stop = [] { return InterruptSignal() != 0; }});
  progress.Clear();
  if (!result) return Failed(result.error());
  const double ratio = result->ppl_recomputed > 0 ? result->ppl_stream / result->ppl_recomputed : 0.0;
  if (options.json) {
    Json parts = Json::array();
    for (const StreamPart& part : result->parts) {
      parts.push_back({{"tokens", part.tokens}, {"ram_bytes", part.ram_bytes}, {"tokens_per_s", part.tokens_per_s}});
    }
    PrintJson({{"tokens", result->tokens},
               {"scored", result->scored},
               {"window", result->window},
               {"ppl_stream", result->ppl_stream},
               {"ppl_recomputed", result->ppl_recomputed},
               {"ratio", ratio},
               {"ratio_se", result->ratio_se},
               {"parts", parts}});
    return 0;
  }
  Table table({"TOKENS", "KV RAM", "TOKENS/S"});
  table.AlignRight({0, 1, 2});
  for (const StreamPart& part : result->parts) {
    table.Add({std::to_string(part.tokens), FormatSize(part.ram_bytes), fmt::format("{:.1f}", part.tokens_per_s)});
  }
  table.Print(stdout);
  Print(stdout,
        "perplexity of {} tokens: {:.4f} streamed, {:.4f} with each window recomputed, ratio {:.4f} +- {:.4f}\n",
        result->scored, result->ppl_stream, result->ppl_recomputed, ratio, result->ratio_se);
  return 0;
}

int BenchOverheadCommand(const Options& options) {
  OverheadOptions bench{.model = options.model, .n_threads = options.threads};
  if (!options.contexts.empty()) bench.context = options.contexts.front();
  const auto rows = BenchOverhead(bench);
  if (!rows) return Failed(rows.error());
  if (options.json) {
    PrintJson({{"rows", BenchRowsJson(*rows)}});
  } else {
    PrintBenchRows(*rows);
  }
  return 0;
}

}  // namespace kvcell::cli
