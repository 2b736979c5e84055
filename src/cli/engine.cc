#include "cli/engine.h"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <limits>
#include <utility>

#include "attention/attention.h"
#include "cell/rules.h"
#include "cli/interrupt.h"
#include "cli/open_store.h"
#include "cli/output.h"
#include "cli/units.h"
#include "store/store.h"

namespace kvcell::cli {
namespace {

// A request that can't be met as asked is wrong usage, whatever layer found it out.
tl::unexpected<Status> Refuse(const Status& status, std::string_view option) {
  return Fail(StatusCode::kInvalidArgument, fmt::format("{}: {}", option, status.message()));
}

// Room for the whole context; less needs a store.
uint64_t WholeContext(const MemoryPlan& plan) { return std::max(plan.total, plan.minimum); }

Status CheckBudget(const EnginePlan& plan) {
  const uint64_t budget = plan.cache.ram_budget;
  if (budget == 0 || budget >= plan.budget_floor) return OkStatus();
  return Status(
      StatusCode::kInvalidArgument,
      fmt::format("--ram-budget {} is too small for {} tokens of context; the smallest that would do is {} ({} bytes)",
                  FormatSize(budget), FormatCount(plan.context), FormatSize(plan.budget_floor), plan.budget_floor));
}

// A codec in use that is not attended in place; null: none.
const CodecSpec* DecodedFirst(const CacheOptions& cache) {
  if (!AttendedInPlace(cache.codec)) return &cache.codec;
  const auto found =
      std::ranges::find_if(cache.codec_ranges, [](const CodecRange& range) { return !AttendedInPlace(range.codec); });
  return found == cache.codec_ranges.end() ? nullptr : &found->codec;
}

}  // namespace

Result<uint64_t> BudgetFloor(CacheOptions cache, int64_t context, int32_t n_sequences) {
  // How much the whole context takes depends on the budget itself, which decides on the size of chunks.
  cache.ram_budget = 1;
  cache.store.clear();
  uint64_t whole = 0;
  for (int round = 0; round < 4 && whole != cache.ram_budget; ++round) {
    if (whole != 0) cache.ram_budget = whole;
    const Result<MemoryPlan> plan = PlanMemory(cache, context, n_sequences);
    if (!plan) return Fail(plan.error());
    whole = std::max(whole, WholeContext(*plan));
  }
  cache.store = "any";  // cells come back from it through a little memory of its own
  const Result<MemoryPlan> with_store = PlanMemory(cache, context, n_sequences);
  if (!with_store) return Fail(with_store.error());
  return std::min(whole, with_store->minimum);
}

// Tokens that a query sees at most, however long the context: no limit unless the rules have a window for every layer
// that sees all (sliding layers see distances alone, which stay as they are).
int64_t Reach(const Rules& rules, const Geometry& geometry) {
  constexpr int64_t kAll = std::numeric_limits<int64_t>::max();
  int64_t reach = 0;
  for (size_t i = 0; i < geometry.size(); ++i) {
    if (geometry[i].window > 0) continue;
    const int64_t window = rules.WindowOf(static_cast<int32_t>(i));
    if (window == 0) return kAll;
    reach = std::max(reach, window + 2 * kBlockTokens);
  }
  return reach > 0 ? reach : kAll;
}

Result<EnginePlan> PlanEngine(const Options& options, const ModelFacts& facts) {
  Result<CacheOptions> cache = ToCacheOptions(options);
  if (!cache) return Fail(cache.error());
  EnginePlan plan;
  plan.cache = *std::move(cache);
  plan.cache.geometry = facts.geometry;
  plan.cache.model_name = facts.name;
  plan.context = options.ctx > 0 ? options.ctx : facts.context_train;
  if (plan.context <= 0) {
    return Fail(StatusCode::kInvalidArgument, fmt::format("{} does not say its context length; set --ctx", facts.path));
  }
  const Rules& rules = plan.cache.rules == nullptr ? *DefaultRules() : *plan.cache.rules;
  if (options.ctx == 0 && Reach(rules, facts.geometry) <= plan.context)
    plan.context = std::max(plan.context, kEndlessContext);
  plan.cache.max_step_tokens = static_cast<int32_t>(std::min<int64_t>(kChunkTokens, plan.context));
  for (const LayerGeometry& layer : facts.geometry) {
    const Result<double> bits = CodecBitsPerElement(plan.cache.codec, layer.head_dim_k, layer.head_dim_v);
    if (!bits) return Refuse(bits.error(), "--codec");
  }
  plan.cache.rope = facts.rope;
  for (const EvictWindow& window : rules.windows) {
    if (!window.keep) continue;
    KVCELL_FAIL_IF_ERROR(CheckStoreKnown(options));
    plan.cache.store = options.store;
  }
  if (!options.session.empty()) {
    if (const Status status = CheckSessionName(options.session); !status.ok()) return Refuse(status, "--session");
    KVCELL_FAIL_IF_ERROR(CheckStoreKnown(options));
    plan.cache.store = options.store;
  }
  plan.cache.max_sequences = std::max(1, options.samples);
  Result<MemoryPlan> memory = PlanMemory(plan.cache, plan.context, plan.cache.max_sequences);
  if (!memory) return Fail(memory.error());
  if (!plan.cache.store.empty()) {
    plan.budget_floor = memory->minimum;
  } else {
    const Result<uint64_t> floor = BudgetFloor(plan.cache, plan.context, plan.cache.max_sequences);
    if (!floor) return Fail(floor.error());
    plan.budget_floor = *floor;
    if (plan.cache.ram_budget > 0 && plan.cache.ram_budget < WholeContext(*memory)) {
      KVCELL_FAIL_IF_ERROR(CheckStoreKnown(options));
      plan.cache.store = options.store;
    }
  }
  plan.memory = *memory;
  KVCELL_FAIL_IF_ERROR(CheckBudget(plan));
  return plan;
}

Result<Engine> OpenEngine(const Options& options) {
  if (options.model.empty()) {
    return Fail(StatusCode::kInvalidArgument, "name a model with -m FILE; `make model` fetches a small one");
  }
  KVCELL_FAIL_IF_ERROR(CheckForcedIsa());
  const Result<ModelFacts> facts = Model::ReadFacts(options.model);
  if (!facts) return Fail(facts.error());
  Result<EnginePlan> plan = PlanEngine(options, *facts);
  if (!plan) return Fail(plan.error());
  const Rules& rules = plan->cache.rules == nullptr ? *DefaultRules() : *plan->cache.rules;
  const int64_t reach = std::min(plan->context, Reach(rules, facts->geometry));
  if (!options.quiet) {
    for (const RuleMessage& warning : rules.warnings) {
      PrintWarning(fmt::format("{}{}: {}", rules.name, warning.line > 0 ? fmt::format(":{}", warning.line) : "",
                               warning.message));
    }
  }
  if (reach > facts->context_train && facts->context_train > 0 && !options.quiet) {
    PrintWarning(fmt::format("--ctx {} is more than the {} tokens that {} was trained for; answers may make no sense",
                             plan->context, facts->context_train, facts->name));
  }
  if (const CodecSpec* slow = DecodedFirst(plan->cache); slow != nullptr && !options.quiet) {
    PrintWarning(
        fmt::format("codec {} is decoded before it is attended, which is slow; `kvcell info --codecs` shows "
                    "which ones are attended in place",
                    CodecText(*slow)));
  }

  const auto start = std::chrono::steady_clock::now();
  Engine engine;
  engine.context = plan->context;
  Result<std::unique_ptr<Model>> model = Model::Load(
      options.model,
      {.n_threads = options.threads, .max_batch = plan->cache.max_step_tokens, .digest_folder = DefaultDigestFolder()});
  if (!model) return Fail(model.error());
  engine.model = *std::move(model);
  engine.load_ms = std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();

  plan->cache.identity = engine.model->identity();
  const bool needs_store = !plan->cache.store.empty();
  engine.shares_prefixes = !options.no_prefix && !options.store.empty() && rules.MayShare();
  if (engine.shares_prefixes) plan->cache.store = options.store;
  if (!plan->cache.store.empty()) {
    Result<std::string> key = ReadStoreKey(options);
    if (!key) return Fail(key.error());
    plan->cache.store_key = *std::move(key);
  }
  Result<std::unique_ptr<Cache>> cache = Cache::Open(plan->cache);
  if (!cache && engine.shares_prefixes && !needs_store) {
    // Nobody asked for the store: without it the answer is the same, only the prompt is computed whole.
    if (!options.quiet)
      PrintWarning(fmt::format("prompts are not shared with other runs: {}", cache.error().message()));
    engine.shares_prefixes = false;
    plan->cache.store.clear();
    cache = Cache::Open(plan->cache);
  }
  if (!cache) return Fail(cache.error());
  engine.cache = *std::move(cache);
  return engine;
}

Status OpenToOthers(const Options& options, SequenceId sequence, Engine* engine) {
  Status status;
  CatchHangups();
  engine->control = Control::Start(
      {.cache = engine->cache.get(), .sequence = sequence, .session = options.session, .rules_path = options.rules},
      &status);
  engine->control->NoteSaved(engine->cache->Length(sequence));
  if (!status.ok() && !options.quiet)
    PrintWarning(fmt::format("other processes can't see this one: {}", status.message()));
  return options.curve.empty() ? OkStatus() : engine->control->StartSampling(options.curve, options.curve_every);
}

void TellRemoved(const Options& options, const Engine& engine) {
  if (options.quiet) return;
  const CacheStats stats = engine.cache->Stats();
  if (stats.removed_blocks > 0 || stats.removed_sessions > 0) {
    PrintWarning(
        fmt::format("to keep within --disk-cap or --ttl, {} sessions were removed from {}, and {} blocks of 64 "
                    "tokens of sessions in all",
                    stats.removed_sessions, options.store, stats.removed_blocks));
  }
}

Status WriteObservations(const Options& options, const Engine& engine, int64_t tokens) {
  const auto write = [](const std::string& path, const std::string& text) {
    std::FILE* file = std::fopen(path.c_str(), "wb");
    if (file == nullptr || std::fwrite(text.data(), 1, text.size(), file) != text.size() || std::fclose(file) != 0) {
      return Status(StatusCode::kIoError, fmt::format("{}: it can't be written: {}", path, std::strerror(errno)));
    }
    return OkStatus();
  };
  if (!options.metrics.empty()) {
    KVCELL_RETURN_IF_ERROR(write(options.metrics, MetricsText(*engine.cache, tokens)));
  }
  return options.trace.empty() ? OkStatus() : write(options.trace, engine.cache->Trace());
}

}  // namespace kvcell::cli
