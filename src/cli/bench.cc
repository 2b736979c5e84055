// kvcell bench: how fast things are here, beside what else does them.
#include <fmt/format.h>

#include <string>
#include <utility>
#include <vector>

#include "attention/attention.h"
#include "cli/commands.h"
#include "cli/interrupt.h"
#include "cli/output.h"
#include "lab/bench_attention.h"
#include "lab/bench_model.h"

namespace kvcell::cli {
namespace {

std::vector<AttentionShape> ShapesOf(const Options& options) {
  std::vector<AttentionShape> shapes;
  const bool given = !options.tokens.empty() || !options.queries.empty() || options.kv_heads != 0 ||
                     options.group != 0 || options.head_dim != 0;
  if (given) {
    for (const int64_t tokens : options.tokens.empty() ? std::vector<int64_t>{32768} : options.tokens) {
      for (const int64_t queries : options.queries.empty() ? std::vector<int64_t>{1} : options.queries) {
        AttentionShape shape;
        shape.queries = static_cast<int32_t>(queries);
        // One query finds an open block of 32 tokens, itself included.
        shape.tokens = queries == 1 ? tokens + 32 : tokens + queries;
        if (options.kv_heads != 0) shape.kv_heads = options.kv_heads;
        if (options.group != 0) shape.group = options.group;
        if (options.head_dim != 0) shape.head_dim = options.head_dim;
        shapes.push_back(shape);
      }
    }
  } else {
    shapes = DefaultAttentionShapes();
  }
  if (!options.phase.empty()) {
    std::erase_if(shapes, [&](const AttentionShape& s) { return (s.queries == 1) != (options.phase == "decode"); });
  }
  return shapes;
}

// ggml's K and V lie in RAM for every shape.
bool InFile(const AttentionBenchRow& row) { return row.shape.in_file && row.engine == "kvcell"; }

const char* PhaseOf(const AttentionBenchRow& row) { return row.shape.queries == 1 ? "decode" : "prefill"; }

Json AttentionJson(const AttentionBenchResult& result) {
  Json rows = Json::array(), scaling = Json::array();
  for (const AttentionBenchRow& row : result.rows) {
    Json object{{"engine", row.engine},
                {"type", row.type},
                {"phase", PhaseOf(row)},
                {"tokens", row.shape.tokens},
                {"queries", row.shape.queries},
                {"kv_heads", row.shape.kv_heads},
                {"group", row.shape.group},
                {"head_dim", row.shape.head_dim},
                {"cells", InFile(row) ? "mapped file" : "RAM"},
                {"threads", row.threads},
                {"isa", row.isa},
                {"ms", row.ms},
                {"bytes", row.bytes},
                {"gb_s", row.gb_s},
                {"of_bandwidth", row.of_bandwidth},
                {"gmac_s", row.gmac_s},
                {"rel_error", row.rel_error},
                {"x_ggml_f16", row.ratio},
                {"x_ggml_same", row.ratio_same}};
    if (row.engine == "kvcell" && row.type != "f16") {
      object["rounding_error"] = row.rounding_error;
      object["rounding_share"] = row.rounding_share;
    }
    rows.push_back(std::move(object));
  }
  for (const ScalingRow& row : result.scaling) scaling.push_back({{"name", row.name}, {"gain", row.gain}});
  return {{"read_bandwidth_gb_s", result.read_bandwidth_gb_s},
          {"seal_share", result.seal_share},
          {"rows", rows},
          {"scaling", scaling}};
}

void PrintAttention(const AttentionBenchResult& result) {
  Table table({"PHASE", "TOKENS", "QUERIES", "HEADS", "DIM", "ENGINE", "TYPE", "MS", "GB/S", "OF BANDWIDTH", "GMAC/S",
               "ERROR", "ROUNDING", "X GGML F16", "X GGML SAME"});
  table.AlignRight({1, 2, 3, 4, 7, 8, 9, 10, 11, 12, 13, 14});
  for (const AttentionBenchRow& row : result.rows) {
    const bool rounded = row.engine == "kvcell" && row.type != "f16";
    table.Add({PhaseOf(row), std::to_string(row.shape.tokens), std::to_string(row.shape.queries),
               fmt::format("{} x {}", row.shape.kv_heads, row.shape.group), std::to_string(row.shape.head_dim),
               row.engine, row.type + (InFile(row) ? ", in a file" : ""), fmt::format("{:.3f}", row.ms),
               fmt::format("{:.1f}", row.gb_s),
               row.shape.queries == 1 ? fmt::format("{:.0f} %", 100.0 * row.of_bandwidth) : "",
               fmt::format("{:.1f}", row.gmac_s), fmt::format("{:.4f}", row.rel_error),
               rounded ? fmt::format("{:.4f} ({:.1f} %)", row.rounding_error, 100.0 * row.rounding_share) : "",
               fmt::format("{:.2f}", row.ratio), fmt::format("{:.2f}", row.ratio_same)});
  }
  table.Print(stdout);
  if (!IsTerminal(stdout)) return;
  Print(stdout, "\nRead bandwidth of the same threads: {:.1f} GB/s. Kernels: {}.\n", result.read_bandwidth_gb_s,
        AttentionIsa());
  for (const ScalingRow& row : result.scaling) Print(stdout, "Gain of all threads: {:.2f} {}\n", row.gain, row.name);
  if (result.seal_share > 0.0) {
    Print(stdout, "Coding a block takes {:.2f} % of the decode steps that filled it.\n", 100.0 * result.seal_share);
  }
}

}  // namespace

int BenchAttentionCommand(const Options& options) {
  if (const Status status = CheckForcedIsa(); !status.ok()) return Failed(status);
  Progress progress("shapes", !options.quiet && !options.json);
  CatchInterrupts();
  AttentionBenchOptions bench{.shapes = ShapesOf(options),
                              .n_threads = options.threads,
                              .on_shape = [&](int64_t done, int64_t total) { progress.Show(done, total); },
                              .should_stop = [] { return InterruptSignal() != 0; }};
  if (!options.types.empty()) bench.types = options.types;
  if (options.rounds != 0) bench.rounds = options.rounds;
  const auto result = BenchAttention(bench);
  progress.Clear();
  if (!result) return Failed(result.error());
  if (options.json) {
    PrintJson(AttentionJson(*result));
  } else {
    PrintAttention(*result);
  }
  return 0;
}

namespace {

Json ModelJson(const ModelBenchResult& result) {
  Json rows = Json::array();
  for (const ModelBenchRow& row : result.rows) {
    rows.push_back({{"engine", row.engine},
                    {"kv_type", row.kv_type},
                    {"depth", row.depth},
                    {"phase", row.phase},
                    {"tokens_per_s", row.tokens_per_s},
                    {"x_libllama_f16", row.ratio},
                    {"kld", row.kld}});
  }
  return {{"rows", rows}};
}

void PrintModel(const ModelBenchResult& result) {
  Table table({"DEPTH", "PHASE", "ENGINE", "KV TYPE", "TOKENS/S", "X LIBLLAMA F16", "KLD"});
  table.AlignRight({0, 4, 5, 6});
  for (const ModelBenchRow& row : result.rows) {
    table.Add({std::to_string(row.depth), row.phase, row.engine, row.kv_type, fmt::format("{:.1f}", row.tokens_per_s),
               fmt::format("{:.2f}", row.ratio), fmt::format("{:.4f}", row.kld)});
  }
  table.Print(stdout);
}

}  // namespace

int BenchModelCommand(const Options& options) {
  if (options.model.empty()) return Failed(Status(StatusCode::kInvalidArgument, "bench model needs a model (-m)"));
  if (const Status status = CheckForcedIsa(); !status.ok()) return Failed(status);
  Progress progress("steps", !options.quiet && !options.json);
  CatchInterrupts();
  ModelBenchOptions bench{.model = options.model,
                          .n_threads = options.threads,
                          .on_progress = [&](int64_t done, int64_t total) { progress.Show(done, total); },
                          .should_stop = [] { return InterruptSignal() != 0; }};
  if (!options.depths.empty()) bench.depths = options.depths;
  if (!options.types.empty()) bench.types = options.types;
  if (options.rounds != 0) bench.rounds = options.rounds;
  const auto result = BenchModel(bench);
  progress.Clear();
  if (!result) return Failed(result.error());
  if (options.json) {
    PrintJson(ModelJson(*result));
  } else {
    PrintModel(*result);
  }
  return 0;
}

}  // namespace kvcell::cli
