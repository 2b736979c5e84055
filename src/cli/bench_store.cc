// kvcell bench store: what saving and resuming cost, beside libllama's state file.
#include "lab/bench_store.h"

#include <string>
#include <utility>

#include "base/text_file.h"
#include "cli/bench_rows.h"
#include "cli/commands.h"
#include "cli/output.h"

namespace kvcell::cli {
namespace {

// Text enough for a prompt where none is given: it is repeated to fill the context.
constexpr const char* kText =
    "The harbour of the old town lies between two hills. In the morning the boats come back with the catch of the "
    "night, "
    "and the people who buy it stand on the stones and talk about the weather, the prices and the road to the city. ";

}  // namespace

int BenchStoreCommand(const Options& options) {
  if (options.model.empty()) return Failed(Status(StatusCode::kInvalidArgument, "bench store needs a model (-m)"));
  BenchStoreOptions bench;
  bench.model = options.model;
  bench.text = kText;
  bench.directory = options.store;
  bench.codec = options.codec;
  bench.n_threads = options.threads;
  bench.peer = options.peer;
  if (!options.contexts.empty()) bench.context = options.contexts.front();
  if (options.file) {
    auto text = ReadTextFile(*options.file);
    if (!text) return Failed(text.error());
    bench.text = std::move(*text);
  }
  if (!options.quiet && !options.json) {
    bench.on_stage = [](const std::string& what) { Print(stderr, "{} ...\n", what); };
  }
  const Result<BenchStoreResult> result = BenchStore(bench);
  if (!result) return Failed(result.error());
  if (options.json) {
    PrintJson({{"context", bench.context}, {"rows", BenchRowsJson(result->rows)}});
  } else {
    PrintBenchRows(result->rows);
  }
  return 0;
}

}  // namespace kvcell::cli
