// kvcell plan: the memory a context takes by codec, before anything runs.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/memory_probe.h"
#include "cli/commands.h"
#include "cli/engine.h"
#include "cli/output.h"
#include "cli/units.h"
#include "kvcell/codec.h"
#include "model/model.h"

namespace kvcell::cli {
namespace {

struct PlannedModel {
  Geometry geometry;
  uint64_t weights = 0;
  uint64_t heap = 0;             // vocabulary and the like, measured once the model is there
  std::unique_ptr<Model> model;  // null where only a shape was given
};

Result<PlannedModel> FindModel(const Options& options) {
  PlannedModel planned;
  const bool shaped = options.layers > 0 || options.kv_heads > 0 || options.head_dim > 0 || options.heads > 0;
  if (!options.model.empty()) {
    if (shaped) {
      return Fail(StatusCode::kInvalidArgument,
                  "the model file has a shape of its own; leave out --layers, --heads, --kv-heads and --head-dim");
    }
    Result<std::unique_ptr<Model>> model =
        Model::Load(options.model, {.n_threads = options.threads, .max_batch = kChunkTokens});
    if (!model) return Fail(model.error());
    planned.model = *std::move(model);
    planned.geometry = planned.model->facts().geometry;
    planned.weights = planned.model->facts().weights_bytes;
    const Result<ProcessMemory> memory = ProbeProcessMemory();
    if (memory) planned.heap = memory->anonymous;
    return planned;
  }
  if (options.layers == 0 || options.kv_heads == 0 || options.head_dim == 0) {
    return Fail(StatusCode::kInvalidArgument,
                "name a model with -m FILE, or its shape with --layers, --kv-heads and --head-dim");
  }
  const int32_t heads = options.heads > 0 ? options.heads : options.kv_heads;
  if (heads % options.kv_heads != 0) {
    return Fail(StatusCode::kInvalidArgument,
                fmt::format("--heads {} is no multiple of --kv-heads {}", heads, options.kv_heads));
  }
  const LayerGeometry layer{.n_heads = heads,
                            .n_kv_heads = options.kv_heads,
                            .head_dim_k = options.head_dim,
                            .head_dim_v = options.head_dim,
                            .scale = 1.0f / std::sqrt(static_cast<float>(options.head_dim))};
  planned.geometry.assign(static_cast<size_t>(options.layers), layer);
  return planned;
}

struct PlanRow {
  int64_t context = 0;
  int64_t batch = 0;
  std::string codec;
  uint64_t kv = 0;  // cells, coded and exact, at full context
  uint64_t f16 = 0;
  uint64_t weights = 0;
  uint64_t working = 0;    // the rest: what the cache takes beside, tables, compute buffers, vocabulary, the program
  uint64_t cache_ram = 0;  // what the cache takes: kv, rounded up to chunks, and its scratch
  uint64_t minimum = 0;    // smallest --ram-budget
};

Result<PlanRow> MakeRow(const PlannedModel& planned, CacheOptions cache, int64_t context, int64_t batch,
                        const std::string& codec) {
  Result<CodecSpec> spec = ParseCodec(codec);
  if (!spec) return Fail(spec.error());
  cache.codec = *std::move(spec);
  cache.geometry = planned.geometry;
  cache.max_sequences = static_cast<int32_t>(batch);
  cache.max_step_tokens = static_cast<int32_t>(std::min<int64_t>(kChunkTokens, context));
  const Result<MemoryPlan> memory = PlanMemory(cache, context, static_cast<int32_t>(batch));
  if (!memory) return Fail(memory.error());
  const Result<uint64_t> floor = BudgetFloor(cache, context, static_cast<int32_t>(batch));
  if (!floor) return Fail(floor.error());
  const int rows = static_cast<int>(std::min<int64_t>(kChunkTokens, context * batch));
  return PlanRow{.context = context,
                 .batch = batch,
                 .codec = codec,
                 .kv = memory->cells,
                 .f16 = memory->f16,
                 .weights = planned.weights,
                 .working = memory->total - std::min(memory->total, memory->cells) + memory->metadata + planned.heap +
                            (planned.model ? planned.model->WorkingBytes(rows) : 0),
                 .cache_ram = memory->total,
                 .minimum = *floor};
}

Result<std::vector<PlanRow>> MakeRows(const Options& options) {
  const Result<PlannedModel> planned = FindModel(options);
  if (!planned) return Fail(planned.error());
  Result<CacheOptions> cache = ToCacheOptions(options);
  if (!cache) return Fail(cache.error());
  const std::vector<int64_t> contexts =
      options.contexts.empty() ? std::vector<int64_t>{2048, 8192, 32768} : options.contexts;
  const std::vector<int64_t> batches = options.batches.empty() ? std::vector<int64_t>{1} : options.batches;
  const std::vector<std::string> codecs =
      options.codecs.empty() ? std::vector<std::string>{"f16", "i8", "i4"} : options.codecs;
  std::vector<PlanRow> rows;
  for (const int64_t context : contexts) {
    for (const int64_t batch : batches) {
      for (const std::string& codec : codecs) {
        Result<PlanRow> row = MakeRow(*planned, *cache, context, batch, codec);
        if (!row) return Fail(row.error());
        rows.push_back(*std::move(row));
      }
    }
  }
  return rows;
}

}  // namespace

int PlanCommand(const Options& options) {
  const Result<std::vector<PlanRow>> rows = MakeRows(options);
  if (!rows) return Failed(rows.error());
  if (options.json) {
    Json list = Json::array();
    for (const PlanRow& row : *rows) {
      list.push_back({{"context", row.context},
                      {"batch", row.batch},
                      {"codec", row.codec},
                      {"kv_bytes", row.kv},
                      {"f16_bytes", row.f16},
                      {"weights_bytes", row.weights},
                      {"working_bytes", row.working},
                      {"total_bytes", row.kv + row.weights + row.working},
                      {"cache_ram_bytes", row.cache_ram},
                      {"minimum_ram_budget", row.minimum}});
    }
    PrintJson({{"rows", list}});
    return 0;
  }
  Table table({"CONTEXT", "BATCH", "CODEC", "KV", "WEIGHTS", "WORKING", "TOTAL", "SMALLEST BUDGET"});
  table.AlignRight({0, 1, 3, 4, 5, 6, 7});
  for (const PlanRow& row : *rows) {
    table.Add({std::to_string(row.context), std::to_string(row.batch), row.codec, FormatSize(row.kv),
               FormatSize(row.weights), FormatSize(row.working), FormatSize(row.kv + row.weights + row.working),
               FormatSize(row.minimum)});
  }
  table.Print(stdout);
  return 0;
}

}  // namespace kvcell::cli
