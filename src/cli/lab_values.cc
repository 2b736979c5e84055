// kvcell lab, on K and V themselves: export, stats, error, sweep.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "base/text_file.h"
#include "cli/commands.h"
#include "cli/interrupt.h"
#include "cli/output.h"
#include "cli/units.h"
#include "lab/codec_error.h"
#include "lab/kv_data.h"
#include "lab/sweep.h"

namespace kvcell::cli {
namespace {

bool Stop() { return InterruptSignal() != 0; }

// The values that the options name: exported ones, a model's own on a text, or made ones.
Result<KvData> ValuesOf(const Options& options, bool may_be_made) {
  if (!options.from.empty()) {
    if (!options.model.empty() || options.file) {
      return Fail(StatusCode::kInvalidArgument, "give either --from, or a model (-m) and a text (-f), not both");
    }
    return ImportKv(options.from);
  }
  const int64_t tokens = options.contexts.empty() ? 1024 : options.contexts.front();
  if (options.model.empty() && !options.file && may_be_made) {
    const int32_t head_dim = options.head_dim > 0 ? options.head_dim : 64;
    const int32_t kv_heads = options.kv_heads > 0 ? options.kv_heads : 4;
    const int32_t heads = options.heads > 0 ? options.heads : kv_heads;
    if (heads % kv_heads != 0) {
      return Fail(StatusCode::kInvalidArgument,
                  fmt::format("{} query heads can't share {} KV heads evenly; --heads must be a multiple of --kv-heads",
                              heads, kv_heads));
    }
    const Geometry geometry(static_cast<size_t>(options.layers > 0 ? options.layers : 1),
                            LayerGeometry{.n_heads = heads,
                                          .n_kv_heads = kv_heads,
                                          .head_dim_k = head_dim,
                                          .head_dim_v = head_dim,
                                          .scale = 1.0f / std::sqrt(static_cast<float>(head_dim))});
    return MakeKv(geometry, tokens, 64, 1);
  }
  if (options.model.empty() || !options.file) {
    return Fail(StatusCode::kInvalidArgument,
                "give a model (-m) and a text (-f), or the directory of an export (--from)");
  }
  auto text = ReadTextFile(*options.file);
  if (!text) return Fail(text.error());
  Progress progress("tokens", !options.quiet && !options.json);
  return CaptureKv({.model = options.model,
                    .text = std::move(*text),
                    .tokens = tokens,
                    .weights_f32 = options.weights_f32,
                    .n_threads = options.threads,
                    .on_progress = [&](int64_t done, int64_t total) { progress.Show(done, total); },
                    .should_stop = Stop});
}

std::vector<Calibration> CalibrationsOf(const Options& options) {
  const std::vector<int64_t>& c = options.calibrate;
  std::vector<Calibration> list;
  if (!c.empty()) list.push_back({.prompt = c[0]});
  if (c.size() == 3) list.push_back({.prompt = c[0], .every = c[1], .over = c[2]});
  return list;
}

CodecErrorOptions ErrorOptions(const Options& options, Progress* progress) {
  return {.codecs = options.codecs.empty() ? std::vector<std::string>{"i8", "i4"} : options.codecs,
          .calibrations = CalibrationsOf(options),
          .sinks = options.sinks,
          .recent_blocks = options.recent_blocks,
          .on_layer = [progress](int64_t done, int64_t total) { progress->Show(done, total); },
          .should_stop = Stop};
}

Json SideJson(const SideError& e) { return {{"mse", e.mse}, {"relative", e.relative}, {"cosine", e.cosine}}; }

Json ErrorJson(const KvData& data, const std::vector<CodecError>& rows) {
  Json list = Json::array();
  for (const CodecError& row : rows) {
    Json layers = Json::array();
    for (const LayerError& layer : row.layers) {
      layers.push_back({{"layer", layer.layer},
                        {"k", SideJson(layer.k)},
                        {"v", SideJson(layer.v)},
                        {"output_relative", layer.output}});
    }
    list.push_back({{"codec", row.codec},
                    {"bits", row.bits},
                    {"in_place", row.in_place},
                    {"k_mse", row.k.mse},
                    {"k_relative", row.k.relative},
                    {"k_cosine", row.k.cosine},
                    {"v_mse", row.v.mse},
                    {"v_relative", row.v.relative},
                    {"v_cosine", row.v.cosine},
                    {"output_relative", row.output},
                    {"layers", layers}});
  }
  return {{"command", "lab error"}, {"source", data.source}, {"tokens", data.n_tokens}, {"rows", list}};
}

void PrintErrors(const std::vector<CodecError>& rows, bool by_layer) {
  Table table({"CODEC", "LAYER", "BITS", "ATTENDED", "K MSE", "K ERROR", "K COSINE", "V MSE", "V ERROR", "V COSINE",
               "OUTPUT ERROR"});
  table.AlignRight({1, 2, 4, 5, 6, 7, 8, 9, 10});
  const auto add = [&](const CodecError& row, const std::string& layer, const SideError& k, const SideError& v,
                       double output) {
    table.Add({row.codec, layer, fmt::format("{:.3f}", row.bits), row.in_place ? "in place" : "decoded",
               fmt::format("{:.3g}", k.mse), fmt::format("{:.6f}", k.relative), fmt::format("{:.6f}", k.cosine),
               fmt::format("{:.3g}", v.mse), fmt::format("{:.6f}", v.relative), fmt::format("{:.6f}", v.cosine),
               fmt::format("{:.6f}", output)});
  };
  for (const CodecError& row : rows) {
    add(row, "all", row.k, row.v, row.output);
    if (!by_layer) continue;
    for (const LayerError& layer : row.layers) add(row, std::to_string(layer.layer), layer.k, layer.v, layer.output);
  }
  table.Print(stdout);
}

Json StatsJson(const KvData& data, const KvStats& stats, bool channels) {
  Json rows = Json::array(), losses = Json::array();
  for (const HeadStats& s : stats.rows) {
    Json row{{"layer", s.layer},
             {"head", s.head},
             {"side", std::string(1, s.side)},
             {"min", s.min},
             {"max", s.max},
             {"mean", s.mean},
             {"stddev", s.stddev},
             {"p0.1", s.p001},
             {"p50", s.p50},
             {"p99.9", s.p999},
             {"kurtosis", s.kurtosis},
             {"outliers", s.outliers},
             {"widest_channel", s.widest_channel},
             {"widest_ratio", s.widest_ratio},
             {"biased_channel", s.biased_channel},
             {"biased_ratio", s.biased_ratio}};
    if (channels) {
      row["channels"] = {{"mean", s.channel_mean},
                         {"stddev", s.channel_stddev},
                         {"min", s.channel_min},
                         {"max", s.channel_max},
                         {"kurtosis", s.channel_kurtosis}};
    }
    rows.push_back(std::move(row));
  }
  for (size_t l = 0; l < stats.k_loss.size(); ++l) {
    losses.push_back({{"layer", l}, {"k", stats.k_loss[l]}, {"v", stats.v_loss[l]}});
  }
  return {{"command", "lab stats"},      {"source", data.source},    {"tokens", data.n_tokens}, {"rows", rows},
          {"losses", std::move(losses)}, {"finer_k", stats.finer_k}, {"finer_v", stats.finer_v}};
}

void PrintStats(const KvStats& stats, const std::string& codec) {
  Table table({"LAYER", "HEAD", "SIDE", "MIN", "MAX", "STDDEV", "0.1 %", "99.9 %", "KURTOSIS", "BEYOND 6 SD",
               "WIDEST CHANNEL", "BIASED CHANNEL"});
  table.AlignRight({0, 1, 3, 4, 5, 6, 7, 8, 9});
  for (const HeadStats& s : stats.rows) {
    table.Add({std::to_string(s.layer), std::to_string(s.head), std::string(1, s.side), fmt::format("{:.3g}", s.min),
               fmt::format("{:.3g}", s.max), fmt::format("{:.3g}", s.stddev), fmt::format("{:.3g}", s.p001),
               fmt::format("{:.3g}", s.p999), fmt::format("{:.2f}", s.kurtosis),
               fmt::format("{:.4f} %", 100.0 * s.outliers),
               fmt::format("{} ({:.1f} x)", s.widest_channel, s.widest_ratio),
               fmt::format("{} ({:.1f} sd)", s.biased_channel, s.biased_ratio)});
  }
  table.Print(stdout);
  if (!IsTerminal(stdout)) return;
  const auto names = [](const std::vector<int32_t>& layers) {
    return layers.empty() ? std::string("none") : fmt::format("{}", fmt::join(layers, ", "));
  };
  Print(stdout, "\nLayers that should stay finer than {} (attention loses three times the median): K {}; V {}.\n",
        codec, names(stats.finer_k), names(stats.finer_v));
}

}  // namespace

int LabExportCommand(const Options& options) {
  if (options.output.empty()) {
    return Failed(Status(StatusCode::kInvalidArgument, "lab export needs a directory to write to (-o)"));
  }
  CatchInterrupts();
  const auto data = ValuesOf(options, /*may_be_made=*/false);
  if (!data) return Failed(data.error());
  if (const Status status = ExportKv(*data, options.output); !status.ok()) return Failed(status);
  if (options.json) {
    PrintJson({{"command", "lab export"},
               {"directory", options.output},
               {"tokens", data->n_tokens},
               {"layers", data->geometry.size()},
               {"queries", data->n_queries}});
  } else {
    Print(stdout, "{}: K and V of {} layers, {} tokens\n", options.output, data->geometry.size(), data->n_tokens);
  }
  return 0;
}

int LabStatsCommand(const Options& options) {
  CatchInterrupts();
  const auto data = ValuesOf(options, /*may_be_made=*/false);
  if (!data) return Failed(data.error());
  Progress progress("layers", !options.quiet && !options.json);
  const std::string codec = options.codecs.empty() ? "i4" : options.codecs.front();
  const auto stats = MeasureStats(*data, codec, ErrorOptions(options, &progress));
  progress.Clear();
  if (!stats) return Failed(stats.error());
  if (options.json) {
    PrintJson(StatsJson(*data, *stats, options.channels));
  } else {
    PrintStats(*stats, codec);
  }
  return 0;
}

int LabErrorCommand(const Options& options) {
  CatchInterrupts();
  const auto data = ValuesOf(options, /*may_be_made=*/true);
  if (!data) return Failed(data.error());
  Progress progress("layers", !options.quiet && !options.json);
  const auto rows = MeasureCodecErrors(*data, ErrorOptions(options, &progress));
  progress.Clear();
  if (!rows) return Failed(rows.error());
  if (options.json) {
    PrintJson(ErrorJson(*data, *rows));
  } else {
    PrintErrors(*rows, options.by_layer);
    if (IsTerminal(stdout))
      Print(stdout, "\n{}. Errors are squared, over the values' energy around their channels' means.\n", data->source);
  }
  return 0;
}

int LabSweepCommand(const Options& options) {
  CatchInterrupts();
  const auto data = ValuesOf(options, /*may_be_made=*/false);
  if (!data) return Failed(data.error());
  Progress progress("parts", !options.quiet && !options.json);
  const auto result = MeasureSweep(*data, {.codec = options.codec,
                                           .store = options.output,
                                           .on_part = [&](int64_t done, int64_t total) { progress.Show(done, total); },
                                           .should_stop = Stop});
  progress.Clear();
  if (!result) return Failed(result.error());
  Json granularity = Json::array(), exact = Json::array(), locality = Json::array(), reads = Json::array();
  Table scopes({"SCALE SHARED BY", "SCALE BITS", "K ERROR", "V ERROR"});
  for (const GranularityRow& row : result->granularity) {
    granularity.push_back({{"scope", row.scope},
                           {"scale_bits", row.scale_bits},
                           {"k_relative", row.k_relative},
                           {"v_relative", row.v_relative}});
    scopes.Add({row.scope, fmt::format("{:.3f}", row.scale_bits), fmt::format("{:.5f}", row.k_relative),
                fmt::format("{:.5f}", row.v_relative)});
  }
  Table areas({"FIRST TOKENS EXACT", "RECENT BLOCKS EXACT", "EXACT SHARE", "OUTPUT ERROR"});
  for (const ExactRow& row : result->exact) {
    exact.push_back({{"sinks", row.sinks},
                     {"recent_blocks", row.recent_blocks},
                     {"exact_share", row.exact_share},
                     {"output_relative", row.output}});
    areas.Add({std::to_string(row.sinks), std::to_string(row.recent_blocks),
               fmt::format("{:.1f} %", 100.0 * row.exact_share), fmt::format("{:.6f}", row.output)});
  }
  Table looks({"NEWEST BLOCKS", "SHARE OF ATTENTION"});
  for (const LocalityRow& row : result->locality) {
    locality.push_back({{"newest_blocks", row.newest_blocks}, {"mass", row.mass}});
    looks.Add({std::to_string(row.newest_blocks), fmt::format("{:.1f} %", 100.0 * row.mass)});
  }
  Table files({"READ FROM", "GB/S", "MISSED"});
  for (const ReadRow& row : result->reads) {
    reads.push_back({{"from", row.from}, {"us_per_mib", row.us_per_mib}, {"gb_s", row.gb_s}, {"missed", row.missed}});
    files.Add({row.from, fmt::format("{:.2f}", row.gb_s), fmt::format("{:.1f} %", 100.0 * row.missed)});
  }
  if (options.json) {
    PrintJson({{"command", "lab sweep"},
               {"source", data->source},
               {"codec", options.codec},
               {"granularity", granularity},
               {"exact", exact},
               {"locality", locality},
               {"first_tokens_mass", result->first_tokens_mass},
               {"reads", reads}});
    return 0;
  }
  for (const Table* table : {&scopes, &areas, &looks, &files}) {
    table->Print(stdout);
    if (IsTerminal(stdout)) Print(stdout, "\n");
  }
  if (IsTerminal(stdout))
    Print(stdout, "The first 4 tokens get {:.1f} % of attention.\n", 100.0 * result->first_tokens_mass);
  return 0;
}

}  // namespace kvcell::cli
