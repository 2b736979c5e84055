#include "cache/plan.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <thread>

#include "base/memory_probe.h"

namespace kvcell {
namespace {

// Where the machine does not tell how much memory it has.
constexpr uint64_t kDefaultBudget = uint64_t{4} << 30;

int32_t LongestWindow(const Geometry& geometry) {
  int32_t window = 0;
  for (const LayerGeometry& layer : geometry) window = std::max(window, layer.window);
  return window;
}

// Of one sequence's cells once it holds `context` tokens, as Stats counts them.
uint64_t CellBytes(const CellMap& map, const Rules& rules, int64_t context, int32_t recent_blocks) {
  const int64_t n_sealed = context / kBlockTokens;
  const int64_t n_exact = (context % kBlockTokens != 0 ? 1 : 0) + std::min<int64_t>(recent_blocks, n_sealed);
  uint64_t bytes = 0;
  for (const LayerCells& layer : map.layers) {
    const int64_t window = layer.geometry.window;
    int64_t passed = window > 0 ? std::max<int64_t>(0, context - window + 1) / kBlockTokens : 0;
    const int64_t cut = window > 0 || rules.KeepsEvicted(layer.number) ? 0 : rules.WindowOf(layer.number);
    if (cut > 0) passed = n_sealed - (cut + kBlockTokens - 1) / kBlockTokens;
    const auto n_coded = static_cast<uint64_t>(n_sealed - std::clamp<int64_t>(passed, 0, n_sealed));
    for (uint16_t h = 0; h < layer.n_heads; ++h) {
      bytes += n_coded * layer.coded(h).bytes + static_cast<uint64_t>(n_exact) * layer.open.bytes + layer.sink.bytes;
    }
  }
  return bytes;
}

// Whether the bytes of so much context can be counted at all, with room for what comes beside the values.
bool Countable(const Geometry& geometry, int64_t context, int32_t n_sequences) {
  double per_token = 0.0;
  for (const LayerGeometry& layer : geometry) {
    per_token += 2.0 * static_cast<double>(layer.n_kv_heads) * static_cast<double>(layer.head_dim_k + layer.head_dim_v);
  }
  return per_token * static_cast<double>(context) * static_cast<double>(n_sequences) < 0x1p54;
}

}  // namespace

int64_t WidestRuleWindow(const Rules& rules, const Geometry& geometry) {
  int64_t widest = 0;
  for (size_t i = 0; i < geometry.size(); ++i) {
    if (geometry[i].window > 0) continue;
    const int64_t window = rules.WindowOf(static_cast<int32_t>(i));
    if (window == 0) return 0;
    widest = std::max(widest, window);
  }
  return widest;
}

CacheOptions WithDefaults(CacheOptions options) {
  if (options.rules == nullptr) options.rules = DefaultRules();
  if (options.rules != DefaultRules()) {
    const Rules& rules = *options.rules;
    if (rules.codec) options.codec = *rules.codec;
    if (rules.codec || !rules.codec_ranges.empty()) options.codec_ranges = rules.codec_ranges;
    if (rules.sinks) options.sinks = *rules.sinks;
    if (rules.recent_blocks) options.recent_blocks = *rules.recent_blocks;
    if (options.ram_budget == 0) options.ram_budget = rules.ram_budget.value_or(0);
  }
  if (options.max_threads == 0)
    options.max_threads = static_cast<int32_t>(std::max(1u, std::thread::hardware_concurrency()));
  if (options.ram_budget == 0) {
    const auto memory = ProbeSystemMemory();
    options.ram_budget = memory ? memory->total : kDefaultBudget;
  }
  return options;
}

namespace {
constexpr uint64_t kMostBudget = uint64_t{1} << 46;

Status CheckRope(const CacheOptions& options) {
  if (options.rope.empty()) return OkStatus();
  const auto refused = [](size_t layer, std::string_view what) {
    return Status(StatusCode::kInvalidArgument, fmt::format("rope[{}]: {}", layer, what));
  };
  if (options.rope.size() != options.geometry.size()) {
    return {StatusCode::kInvalidArgument,
            fmt::format("rope has {} layers, but the geometry {}", options.rope.size(), options.geometry.size())};
  }
  for (size_t i = 0; i < options.rope.size(); ++i) {
    const RopeSpec& rope = options.rope[i];
    const auto finite = [](float value) { return std::isfinite(value); };
    if (!(rope.base > 0) || !std::isfinite(rope.base) || !finite(rope.scale)) {
      return refused(i, "base must be above 0, and base and scale finite");
    }
    const auto half = static_cast<size_t>(options.geometry[i].head_dim_k / 2);
    if (!rope.factors.empty() && rope.factors.size() != half) {
      return refused(i, fmt::format("{} factors, but must be none or {}, half of head_dim", rope.factors.size(), half));
    }
    if (!std::ranges::all_of(rope.factors, [&](float f) { return finite(f) && f != 0; })) {
      return refused(i, "factors must be finite and not 0");
    }
  }
  return OkStatus();
}
}  // namespace

Status CheckOptions(const CacheOptions& options) {
  const auto range = [](std::string_view field, int64_t value, int64_t low, int64_t high) {
    if (value >= low && value <= high) return OkStatus();
    return Status(StatusCode::kInvalidArgument, fmt::format("{} is {}, but must be {}..{}", field, value, low, high));
  };
  KVCELL_RETURN_IF_ERROR(range("recent_blocks", options.recent_blocks, 0, 1024));
  KVCELL_RETURN_IF_ERROR(range("max_step_tokens", options.max_step_tokens, 1, 65536));
  KVCELL_RETURN_IF_ERROR(range("max_sequences", options.max_sequences, 1, 65536));
  KVCELL_RETURN_IF_ERROR(range("prefix_roots", options.prefix_roots, 1, 65536));
  KVCELL_RETURN_IF_ERROR(range("max_threads", options.max_threads, 0, 1024));
  KVCELL_RETURN_IF_ERROR(range("ttl_seconds", options.ttl_seconds, 0, int64_t{1} << 40));
  KVCELL_RETURN_IF_ERROR(CheckRope(options));
  // More address space than a process has: 0 is what stands for "no limit".
  if (options.ram_budget > kMostBudget) {
    return {StatusCode::kInvalidArgument,
            fmt::format("ram_budget is {} bytes, but must be at most {}; 0 takes as much as "
                        "the context does",
                        options.ram_budget, kMostBudget)};
  }
  return range("durability", options.durability, 0, 2);
}

uint64_t StepScratchBytes(const CellMap& map, const CacheOptions& options) {
  const auto blocks = static_cast<uint64_t>(options.max_step_tokens / kBlockTokens);
  uint64_t widest = 0;
  for (const LayerCells& layer : map.layers)
    widest = std::max<uint64_t>(widest, uint64_t{layer.n_heads} * layer.open.bytes);
  return blocks * widest;
}

uint64_t RingBytes(const CellMap& map, const CacheOptions& options) {
  if (options.store.empty() && options.tier == nullptr) return 0;
  uint64_t widest = 0;
  for (const LayerCells& layer : map.layers) widest = std::max<uint64_t>(widest, layer.widest_coded());
  return widest * std::max<uint64_t>(kSegmentBlocks, static_cast<uint64_t>(options.recent_blocks) + 1);
}

uint64_t ScratchBytes(const CellMap& map, const CacheOptions& options) {
  return StepScratchBytes(map, options) + static_cast<uint64_t>(options.max_threads) * RingBytes(map, options);
}

MemoryShape ShapeFor(const CellMap& map, const CacheOptions& options) {
  return MakeMemoryShape(map, options.ram_budget, options.max_sequences, options.recent_blocks, options.max_step_tokens,
                         options.prefix_bytes > 0 ? options.prefix_roots : 0, IsElastic(*options.rules));
}

uint64_t F16Bytes(const Geometry& geometry, int64_t tokens) {
  uint64_t per_token = 0;
  for (const LayerGeometry& layer : geometry) {
    per_token += uint64_t{2} * static_cast<uint64_t>(layer.n_kv_heads) *
                 static_cast<uint64_t>(layer.head_dim_k + layer.head_dim_v);
  }
  return per_token * static_cast<uint64_t>(tokens);
}

Result<MemoryPlan> PlanMemory(const CacheOptions& given, int64_t context, int32_t n_sequences) {
  CacheOptions options = WithDefaults(given);
  options.max_sequences = n_sequences;
  KVCELL_FAIL_IF_ERROR(CheckOptions(options));
  if (context < 1 || context > int64_t{1} << 40) {
    return Fail(StatusCode::kInvalidArgument, fmt::format("context is {} tokens, but must be 1..2^40", context));
  }
  auto map = MakeCellMap(options.geometry, options.codec, options.sinks, options.codec_ranges);
  if (!map) return Fail(map.error());
  if (!Countable(options.geometry, context, n_sequences)) {
    return Fail(StatusCode::kInvalidArgument,
                fmt::format("{} sequences of {} tokens take more memory than there is anywhere; ask for less",
                            n_sequences, context));
  }
  const auto sequences = static_cast<uint64_t>(n_sequences);
  auto n_blocks = static_cast<uint64_t>(context / kBlockTokens);
  // What rules give up behind a window takes no room, once a step is over.
  if (const int64_t window = WidestRuleWindow(*options.rules, options.geometry); window > 0) {
    n_blocks =
        std::min(n_blocks, static_cast<uint64_t>(window / kBlockTokens + 2 + options.max_step_tokens / kBlockTokens));
  }
  // A window's blocks, and one step's that seal before the window moves on.
  const uint64_t window_blocks = static_cast<uint64_t>(LongestWindow(options.geometry) / kBlockTokens + 1 +
                                                       options.max_step_tokens / kBlockTokens);
  const MemoryShape shape = ShapeFor(*map, options);
  MemoryPlan plan;
  plan.exact = shape.fixed_bytes;
  plan.scratch = ScratchBytes(*map, options);
  plan.coded = CodedBytes(*map, shape.coded_chunk, sequences * n_blocks, sequences * std::min(n_blocks, window_blocks));
  if (IsElastic(*options.rules)) {  // at most: cells that nothing has asked to be coded
    for (const CellMap::PoolUse& pool : map->exact_pools) {
      plan.exact +=
          BytesForSlots(MakeChunkShape(pool.slot_bytes, shape.exact_chunk), sequences * n_blocks * pool.slots());
    }
  }
  plan.cells = sequences * CellBytes(*map, *options.rules, context, options.recent_blocks);
  plan.metadata = sequences * (n_blocks + 1) * (sizeof(Block) + map->n_cells * sizeof(CellEntry));
  plan.total = plan.coded + plan.exact + plan.scratch;
  // What a small budget's smaller chunks would take: the budget itself decides on the chunk size.
  options.ram_budget = 1;
  const MemoryShape smallest = ShapeFor(*map, options);
  // The cache asks for a whole step's room however short the context.
  plan.minimum = smallest.fixed_bytes + plan.scratch + smallest.minimum_coded;
  plan.total = std::max(plan.total, plan.minimum);
  plan.f16 = F16Bytes(options.geometry, context * n_sequences);
  return plan;
}

}  // namespace kvcell
