// kvcell bench: figures of this machine, beside libllama's.
#include <fmt/format.h>

#include <filesystem>

#include "cli/commands.h"
#include "cli/interrupt.h"
#include "cli/output.h"
#include "lab/bench_sharing.h"

namespace kvcell::cli {
namespace {

std::string FormatFigure(double value) {
  if (value == 0.0) return "";
  return value >= 100.0 ? fmt::format("{:.0f}", value) : fmt::format("{:.3g}", value);
}

void PrintRows(const std::vector<BenchRow>& rows) {
  Table table({"WHAT", "VALUE", "UNIT", "AGAINST", "TIMES BETTER", "OF"});
  table.AlignRight({1, 3, 4});
  for (const BenchRow& row : rows) {
    table.Add(
        {row.name, FormatFigure(row.value), row.unit, FormatFigure(row.peer), FormatFigure(row.ratio), row.versus});
  }
  table.Print(stdout);
}

}  // namespace

int BenchSharingCommand(const Options& options) {
  if (options.model.empty()) {
    return Failed(
        Status(StatusCode::kInvalidArgument, "bench sharing needs a model (-m); `make model` fetches a small one"));
  }
  const std::string folder = options.folder.empty() ? std::filesystem::temp_directory_path().string() : options.folder;
  CatchInterrupts();
  SharingBenchOptions bench{.model = options.model,
                            .n_threads = options.threads,
                            .folder = folder,
                            .on_part = {},
                            .on_row = {},
                            .should_stop = [] { return InterruptSignal() != 0; }};
  if (!options.quiet && !options.json) {
    bench.on_part = [](const std::string& what) { fmt::print(stderr, "{} ...\n", what); };
    bench.on_row = [](const BenchRow& row) {
      fmt::print(stderr, "  {}: {} {} {}\n", row.name, FormatFigure(row.value), row.unit,
                 row.ratio > 0.0 ? fmt::format("({} times better than {}, {})", FormatFigure(row.ratio), row.versus,
                                               FormatFigure(row.peer))
                                 : "");
    };
  }
  const auto rows = BenchSharing(bench);
  if (!rows) return Failed(rows.error());
  if (!options.json) {
    PrintRows(*rows);
    return 0;
  }
  Json list = Json::array();
  for (const BenchRow& row : *rows) {
    Json one = {{"name", row.name}, {"value", row.value}, {"unit", row.unit}, {"peer", nullptr}, {"ratio", nullptr}};
    if (row.ratio > 0.0) {
      one["peer"] = row.peer;
      one["ratio"] = row.ratio;
      one["versus"] = row.versus;
    }
    list.push_back(std::move(one));
  }
  PrintJson({{"model", options.model}, {"rows", list}});
  return 0;
}

}  // namespace kvcell::cli
