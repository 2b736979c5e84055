// kvcell lab: what codecs cost a model, measured.
#include <fmt/format.h>

#include <string>
#include <utility>
#include <vector>

#include "cli/commands.h"
#include "cli/interrupt.h"
#include "cli/output.h"
#include "cli/text_file.h"
#include "cli/units.h"
#include "lab/quality.h"

namespace kvcell::cli {
namespace {

Json QualityJson(const QualityResult& result) {
  Json rows = Json::array();
  for (const QualityRow& row : result.rows) {
    rows.push_back({{"engine", row.engine},
                    {"codec", row.codec},
                    {"bits", row.bits},
                    {"bits_all_in", row.bits_all_in},
                    {"ppl", row.ppl},
                    {"kld_mean", row.kld_mean},
                    {"kld_se", row.kld_se},
                    {"kld_median", row.kld_median},
                    {"kld_p999", row.kld_p999},
                    {"top1", row.top1}});
  }
  return {{"context", result.context},
          {"windows", result.windows},
          {"positions", result.positions},
          {"floor_kld", result.floor_kld},
          {"rows", rows}};
}

void PrintQuality(const QualityResult& result, bool peer) {
  Table table({"ENGINE", "CODEC", "BITS", "BITS ALL IN", "PPL", "KLD MEAN", "+-", "MEDIAN", "99.9 %", "SAME TOP"});
  table.AlignRight({2, 3, 4, 5, 6, 7, 8, 9});
  for (const QualityRow& row : result.rows) {
    table.Add({row.engine, row.codec, fmt::format("{:.3f}", row.bits), fmt::format("{:.3f}", row.bits_all_in),
               fmt::format("{:.4f}", row.ppl), fmt::format("{:.6f}", row.kld_mean), fmt::format("{:.6f}", row.kld_se),
               fmt::format("{:.6f}", row.kld_median), fmt::format("{:.4f}", row.kld_p999),
               fmt::format("{:.2f} %", 100.0 * row.top1)});
  }
  table.Print(stdout);
  if (!IsTerminal(stdout)) return;
  Print(stdout, "\n{} windows of {} tokens, {} positions scored (second halves). KLD against the same engine's f16.\n",
        result.windows, result.context, result.positions);
  if (peer) Print(stdout, "Floor: our f16 and libllama's differ by {:.6f}.\n", result.floor_kld);
}

}  // namespace

int LabQualityCommand(const Options& options) {
  if (options.model.empty() || !options.file) {
    return Failed(Status(StatusCode::kInvalidArgument, "lab quality needs a model (-m) and a text (-f)"));
  }
  auto text = ReadTextFile(*options.file);
  if (!text) return Failed(text.error());
  Progress progress("windows", !options.quiet && !options.json);
  CatchInterrupts();
  QualityOptions quality{.model = options.model,
                         .text = std::move(*text),
                         .windows = options.windows,
                         .codecs = options.codecs.empty() ? std::vector<std::string>{"i8", "i4"} : options.codecs,
                         .sinks = options.sinks,
                         .recent_blocks = options.recent_blocks,
                         .peer = options.peer,
                         .weights_f32 = options.weights_f32,
                         .n_threads = options.threads,
                         .state = options.state,
                         .on_window = [&](int64_t done, int64_t total) { progress.Show(done, total); },
                         .should_stop = [] { return InterruptSignal() != 0; }};
  if (!options.contexts.empty()) quality.context = options.contexts.front();
  const auto result = MeasureQuality(quality);
  progress.Clear();
  if (!result) return Failed(result.error());
  if (options.json) {
    PrintJson(QualityJson(*result));
  } else {
    PrintQuality(*result, options.peer);
  }
  return 0;
}

}  // namespace kvcell::cli
