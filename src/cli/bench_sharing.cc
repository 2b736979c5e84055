// kvcell bench sharing: what sequences with a common past save, beside libllama.
#include "lab/bench_sharing.h"

#include <fmt/format.h>

#include <filesystem>
#include <string>
#include <system_error>

#include "cli/bench_rows.h"
#include "cli/commands.h"
#include "cli/interrupt.h"
#include "cli/output.h"

namespace kvcell::cli {
int BenchSharingCommand(const Options& options) {
  if (options.model.empty()) {
    return Failed(
        Status(StatusCode::kInvalidArgument, "bench sharing needs a model (-m); `make model` fetches a small one"));
  }
  const std::string folder = options.folder.empty() ? std::filesystem::temp_directory_path().string() : options.folder;
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  if (error) {
    return Failed(Status(StatusCode::kIoError, fmt::format("--folder {}: {}", folder, error.message())));
  }
  CatchInterrupts();
  SharingBenchOptions bench{.model = options.model,
                            .n_threads = options.threads,
                            .folder = folder,
                            .on_part = {},
                            .on_row = {},
                            .should_stop = [] { return InterruptSignal() != 0; }};
  if (!options.quiet && !options.json) {
    bench.on_part = [](const std::string& what) { Print(stderr, "{} ...\n", what); };
    bench.on_row = [](const BenchRow& row) {
      Print(stderr, "  {}: {} {} {}\n", row.name, FormatFigure(row.value), row.unit,
            row.ratio > 0.0 ? fmt::format("({} times better than {}, {})", FormatFigure(row.ratio), row.versus,
                                          FormatFigure(row.peer))
                            : "");
    };
  }
  const auto rows = BenchSharing(bench);
  if (!rows) return Failed(rows.error());
  if (options.json) {
    PrintJson({{"model", options.model}, {"rows", BenchRowsJson(*rows)}});
  } else {
    PrintBenchRows(*rows);
  }
  return 0;
}

}  // namespace kvcell::cli
