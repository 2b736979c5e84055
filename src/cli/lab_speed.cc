// kvcell lab, time and room, and the report of everything: latency, capacity, report; kvcell tune.
#include <fmt/format.h>

#include <cmath>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "attention/attention.h"
#include "base/text_file.h"
#include "cli/commands.h"
#include "cli/interrupt.h"
#include "cli/output.h"
#include "cli/units.h"
#include "lab/experiments.h"
#include "lab/growth.h"
#include "lab/report.h"
#include "lab/speed.h"
#include "lab/tune.h"
#include "model/model.h"

namespace kvcell::cli {
namespace {

bool Stop() { return InterruptSignal() != 0; }

// The shape that the options name; the model's first layer where one is given.
Result<LayerGeometry> ShapeOf(const Options& options) {
  if (!options.model.empty()) {
    const auto facts = Model::ReadFacts(options.model);
    if (!facts) return Fail(facts.error());
    LayerGeometry shape = facts->geometry.front();
    shape.window = 0;
    return shape;
  }
  LayerGeometry shape = LatencyOptions().shape;
  if (options.kv_heads > 0) shape.n_kv_heads = options.kv_heads;
  if (options.heads > 0) shape.n_heads = options.heads;
  if (options.head_dim > 0) shape.head_dim_k = shape.head_dim_v = options.head_dim;
  if (shape.n_heads % shape.n_kv_heads != 0) {
    return Fail(StatusCode::kInvalidArgument,
                fmt::format("{} query heads can't share {} KV heads evenly; --heads must be a multiple of --kv-heads",
                            shape.n_heads, shape.n_kv_heads));
  }
  shape.scale = 1.0f / std::sqrt(static_cast<float>(shape.head_dim_k));
  return shape;
}

}  // namespace

int LabLatencyCommand(const Options& options) {
  const auto shape = ShapeOf(options);
  if (!shape) return Failed(shape.error());
  CatchInterrupts();
  Progress progress("contexts", !options.quiet && !options.json);
  LatencyOptions latency{.shape = *shape,
                         .n_threads = options.threads,
                         .on_context = [&](int64_t done, int64_t total) { progress.Show(done, total); },
                         .should_stop = Stop};
  if (!options.contexts.empty()) latency.contexts = options.contexts;
  if (!options.codecs.empty()) latency.codecs = options.codecs;
  const auto rows = MeasureLatency(latency);
  progress.Clear();
  if (!rows) return Failed(rows.error());
  Table table({"TOKENS", "CODEC", "WAY", "MS PER LAYER", "BYTES", "TIMES AS FAST AS F16"});
  table.AlignRight({0, 3, 4, 5});
  Json list = Json::array();
  for (const LatencyRow& row : *rows) {
    table.Add({std::to_string(row.context), row.codec, row.way, fmt::format("{:.4f}", row.ms), FormatSize(row.bytes),
               fmt::format("{:.2f}", row.ratio)});
    list.push_back({{"codec", row.codec},
                    {"way", row.way},
                    {"context", row.context},
                    {"ms", row.ms},
                    {"bytes", row.bytes},
                    {"ratio", row.ratio}});
  }
  if (options.json) {
    PrintJson({{"command", "lab latency"},
               {"isa", AttentionIsa()},
               {"kv_heads", shape->n_kv_heads},
               {"heads", shape->n_heads},
               {"head_dim", shape->head_dim_k},
               {"rows", list}});
  } else {
    table.Print(stdout);
  }
  return 0;
}

int LabCapacityCommand(const Options& options) {
  struct Shape {
    std::string name;
    Geometry geometry;
    std::string model;
  };
  std::vector<Shape> shapes;
  if (!options.model.empty()) {
    const auto facts = Model::ReadFacts(options.model);
    if (!facts) return Failed(facts.error());
    shapes.push_back({facts->name, facts->geometry, options.model});
  }
  shapes.push_back({"Llama-2-7B's shape", Llama2Shape7B(), ""});
  shapes.push_back({"Llama-3-8B's shape", Llama3Shape8B(), ""});
  CatchInterrupts();
  Progress progress("codecs", !options.quiet && !options.json);
  Table table({"SHAPE", "CODEC", "BITS", "LONGEST CONTEXT", "SEQUENCES OF 1024", "TOKENS/S"});
  table.AlignRight({2, 3, 4, 5});
  Json list = Json::array();
  const uint64_t budget = options.ram_budget > 0 ? options.ram_budget : uint64_t{1} << 30;
  for (size_t s = 0; s < shapes.size(); ++s) {
    CapacityOptions capacity{.geometry = shapes[s].geometry,
                             .shape = shapes[s].name,
                             .model = shapes[s].model,
                             .budget = budget,
                             .n_threads = options.threads,
                             .on_codec =
                                 [&](int64_t done, int64_t total) {
                                   progress.Show(static_cast<int64_t>(s) * total + done,
                                                 static_cast<int64_t>(shapes.size()) * total);
                                 },
                             .should_stop = Stop};
    if (!options.codecs.empty()) capacity.codecs = options.codecs;
    const auto rows = MeasureCapacity(capacity);
    if (!rows) {
      progress.Clear();
      return Failed(rows.error());
    }
    for (const CapacityRow& row : *rows) {
      table.Add({row.shape, row.codec, fmt::format("{:.3f}", row.bits), std::to_string(row.context),
                 std::to_string(row.batch), fmt::format("{:.1f}", row.tokens_per_s)});
      list.push_back({{"shape", row.shape},
                      {"codec", row.codec},
                      {"bits", row.bits},
                      {"context", row.context},
                      {"context_bytes", row.context_bytes},
                      {"limit", row.limit},
                      {"batch", row.batch},
                      {"batch_bytes", row.batch_bytes},
                      {"tokens_per_s", row.tokens_per_s}});
    }
  }
  progress.Clear();
  if (options.json) {
    PrintJson({{"command", "lab capacity"}, {"budget", budget}, {"sequence_tokens", 1024}, {"rows", list}});
  } else {
    table.Print(stdout);
  }
  return 0;
}

int LabGrowthCommand(const Options& options) {
  if (options.model.empty() || !options.file) {
    return Failed(Status(StatusCode::kInvalidArgument, "lab growth needs a model (-m) and a text (-f)"));
  }
  auto text = ReadTextFile(*options.file);
  if (!text) return Failed(text.error());
  const auto facts = Model::ReadFacts(options.model);
  if (!facts) return Failed(facts.error());
  auto rules = RulesFrom(options);
  if (!rules) return Failed(rules.error());
  CatchInterrupts();
  Progress progress("tokens", !options.quiet && !options.json);
  GrowthOptions growth{.model = options.model,
                       .text = *std::move(text),
                       .codec = options.codec,
                       .rules = *rules,
                       .directory = options.output,
                       .n_threads = options.threads,
                       .should_stop = Stop};
  if (options.ram_budget > 0) growth.ram_budget = options.ram_budget;
  if (options.disk_cap > 0) growth.file_budget = options.disk_cap;
  if (!options.contexts.empty()) growth.stages = options.contexts;
  std::ranges::sort(growth.stages);
  growth.on_progress = [&](const std::string&, int64_t tokens) { progress.Show(tokens, growth.stages.back()); };
  const auto rows = MeasureGrowth(growth);
  progress.Clear();
  if (!rows) return Failed(rows.error());
  const int64_t f16 = rows->front().longest;
  Table table({"KEPT AS", "TOKENS", "TIMES F16", "KV RAM", "PROCESS", "FILES", "PREFILL", "DECODE", "SAME ANSWER"});
  table.AlignRight({1, 2, 3, 4, 5, 6, 7, 8});
  Json list = Json::array();
  for (const GrowthRow& row : *rows) {
    Json stages = Json::array();
    for (const GrowthStage& stage : row.stages) {
      const bool is_last = &stage == &row.stages.back();
      table.Add(
          {row.way, std::to_string(stage.tokens),
           is_last && f16 > 0 ? fmt::format("{:.2f}", static_cast<double>(row.longest) / static_cast<double>(f16)) : "",
           FormatSize(stage.kv_ram_bytes), FormatSize(stage.process_bytes), FormatSize(stage.file_bytes),
           fmt::format("{:.1f}", stage.prefill_tokens_per_s), fmt::format("{:.1f}", stage.decode_tokens_per_s),
           stage.same_as_f16 < 0 ? "" : fmt::format("{} of {}", stage.same_as_f16, growth.answer_tokens)});
      stages.push_back({{"tokens", stage.tokens},
                        {"kv_ram_bytes", stage.kv_ram_bytes},
                        {"process_bytes", stage.process_bytes},
                        {"file_bytes", stage.file_bytes},
                        {"prefill_tokens_per_s", stage.prefill_tokens_per_s},
                        {"decode_tokens_per_s", stage.decode_tokens_per_s},
                        {"answer", stage.answer},
                        {"same_as_f16", stage.same_as_f16}});
    }
    list.push_back({{"way", row.way}, {"longest", row.longest}, {"limit", row.limit}, {"stages", stages}});
  }
  if (options.json) {
    PrintJson({{"command", "lab growth"},
               {"ram_budget", growth.ram_budget},
               {"file_budget", growth.file_budget},
               {"context_train", facts->context_train},
               {"answer_tokens", growth.answer_tokens},
               {"rows", list}});
    return 0;
  }
  table.Print(stdout);
  for (const GrowthRow& row : *rows) Print(stdout, "{}: {} tokens; {}\n", row.way, row.longest, row.limit);
  if (facts->context_train > 0 && rows->back().longest > facts->context_train) {
    Print(stdout, "The model was trained on {} tokens: beyond these memory and speed count, answers don't.\n",
          facts->context_train);
  }
  return 0;
}

int LabReportCommand(const Options& options) {
  if (options.model.empty() || options.output.empty()) {
    return Failed(Status(StatusCode::kInvalidArgument, "lab report needs a model (-m) and a file to write (-o)"));
  }
  const auto facts = Model::ReadFacts(options.model);
  if (!facts) return Failed(facts.error());
  ReportInput input{.title = facts->name,
                    .machine = fmt::format("instruction set {}, threads: {}", AttentionIsa(),
                                           options.threads > 0 ? std::to_string(options.threads) : "all")};
  for (const std::string& path : options.measurements) {
    auto measurement = ReadMeasurement(path);
    if (!measurement) return Failed(measurement.error());
    input.measurements.push_back(std::move(*measurement));
  }
  CatchInterrupts();
  Progress progress("experiments", !options.quiet && !options.json);
  ExperimentOptions experiments{.geometry = facts->geometry,
                                .codec = options.codec,
                                .directory = options.output + ".scratch",
                                .n_threads = options.threads,
                                .on_experiment = [&](int64_t done, int64_t total) { progress.Show(done, total); },
                                .should_stop = Stop};
  if (options.ram_budget > 0) experiments.budget = options.ram_budget;
  auto found = RunExperiments(experiments);
  progress.Clear();
  std::error_code ignored;
  std::filesystem::remove_all(experiments.directory, ignored);
  if (!found) return Failed(found.error());
  input.experiments = std::move(*found);
  if (const Status status = ReplaceTextFile(options.output, ReportHtml(input)); !status.ok()) return Failed(status);
  Json list = Json::array();
  for (const Experiment& e : input.experiments) {
    list.push_back({{"name", e.name}, {"pass", e.pass}, {"bound", e.bound}, {"measured", e.found}});
    if (!options.json) Print(stdout, "{}  {}: {}\n", e.pass ? "pass" : "FAIL", e.name, e.found);
  }
  if (options.json) {
    PrintJson({{"command", "lab report"}, {"file", options.output}, {"experiments", list}});
  } else {
    Print(stdout, "{}\n", options.output);
  }
  return 0;
}

int TuneCommand(const Options& options) {
  if (options.model.empty()) return Failed(Status(StatusCode::kInvalidArgument, "tune needs a model (-m)"));
  TuneOptions tune{.model = options.model,
                   .kld_limit = options.kld_limit,
                   .bits_limit = options.bits_limit,
                   .sinks = options.sinks,
                   .weights_f32 = options.weights_f32,
                   .n_threads = options.threads,
                   .should_stop = Stop};
  if (options.bits_limit > 0 && options.Given("kld"))
    return Failed(Status(StatusCode::kInvalidArgument, "--kld and --bits can't both be given; choose one limit"));
  if (options.file) {
    auto text = ReadTextFile(*options.file);
    if (!text) return Failed(text.error());
    tune.text = std::move(*text);
  }
  if (!options.contexts.empty()) tune.context = options.contexts.front();
  if (!options.codecs.empty()) tune.codecs = options.codecs;
  CatchInterrupts();
  Progress progress("probes", !options.quiet && !options.json);
  tune.on_probe = [&](int64_t done, int64_t total) { progress.Show(done, total); };
  const auto result = Tune(tune);
  progress.Clear();
  if (!result) return Failed(result.error());
  if (!options.output.empty()) {
    if (const Status status = ReplaceTextFile(options.output, result->rules); !status.ok()) return Failed(status);
  }
  if (options.json) {
    PrintJson({{"command", "tune"},
               {"codec_by_layer", result->codec_by_layer},
               {"kld", result->kld},
               {"bits", result->bits},
               {"kld_smallest", result->kld_smallest},
               {"kld_finest", result->kld_finest}});
    return 0;
  }
  if (options.output.empty()) {
    Print(stdout, "{}", result->rules);
  } else {
    Print(stdout, "{}: {:.3f} bits, KLD {:.5f}\n", options.output, result->bits, result->kld);
  }
  return 0;
}

}  // namespace kvcell::cli
