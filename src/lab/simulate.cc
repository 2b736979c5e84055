#include "lab/simulate.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <sstream>
#include <utility>

namespace kvcell {
namespace {

struct Event {
  int line = 0;
  std::string text, verb;
  int64_t a = 0, b = 0;
};

Result<std::vector<Event>> ParseTrace(const std::string& text) {
  struct Verb {
    std::string_view name;
    int numbers;
  };
  static constexpr Verb kVerbs[] = {{"append", 1}, {"step", 1},  {"trim", 1},  {"save", 0},  {"persist", 0},
                                    {"pin", 0},    {"unpin", 0}, {"evict", 2}, {"settle", 0}};
  std::vector<Event> events;
  std::istringstream lines(text.empty() ? "append 4096\nstep 64\n" : text);
  int number = 0;
  for (std::string line; std::getline(lines, line);) {
    ++number;
    std::istringstream words(line.substr(0, line.find('#')));
    Event event{.line = number, .text = {}, .verb = {}};
    if (!(words >> event.verb)) continue;
    const auto verb =
        std::find_if(std::begin(kVerbs), std::end(kVerbs), [&](const Verb& v) { return v.name == event.verb; });
    const auto bad = [&](std::string_view why) {
      return Fail(StatusCode::kInvalidArgument, fmt::format("trace, line {}: {}", number, why));
    };
    if (verb == std::end(kVerbs)) {
      return bad("an event is append N, step N, trim N, save, persist, pin, unpin, evict BEGIN END or settle");
    }
    if (verb->numbers >= 1 && (!(words >> event.a) || event.a < 0 || event.a > (1 << 24))) return bad("0..2^24 tokens");
    if (verb->numbers >= 2 && (!(words >> event.b) || event.b < event.a)) return bad("BEGIN END, in order");
    std::string rest;
    if (words >> rest) return bad("there is more on the line than the event takes");
    event.text = verb->numbers == 0   ? event.verb
                 : verb->numbers == 1 ? fmt::format("{} {}", event.verb, event.a)
                                      : fmt::format("{} {} {}", event.verb, event.a, event.b);
    events.push_back(std::move(event));
  }
  return events;
}

class Simulator {
 public:
  Simulator(Cache* cache, SequenceId sequence) : cache_(cache), sequence_(sequence) {
    const LayerGeometry& g = cache->options().geometry.front();
    const size_t rows = 64;
    kv_.resize(rows * static_cast<size_t>(g.n_kv_heads * g.head_dim_k));
    for (size_t i = 0; i < kv_.size(); ++i) kv_[i] = std::sin(static_cast<float>(i));
    out_.resize(kv_.size());
  }

  Status Run(const Event& event) {
    if (event.verb == "append") return Append(event.a, 64);
    if (event.verb == "step") return Append(event.a, 1);
    if (event.verb == "trim") {
      const auto cut = cache_->Trim(sequence_, event.a);
      return cut ? OkStatus() : cut.error();
    }
    if (event.verb == "save") return cache_->Save(sequence_, "simulated", {}, "");
    if (event.verb == "persist") return cache_->Persist(sequence_);
    if (event.verb == "pin") return cache_->Pin(sequence_, true);
    if (event.verb == "unpin") return cache_->Pin(sequence_, false);
    if (event.verb == "evict") return cache_->Evict(sequence_, event.a, event.b);
    return cache_->Settle();
  }

 private:
  Status Append(int64_t n, int64_t chunk) {
    while (n > 0) {
      const auto take = static_cast<size_t>(std::min(n, chunk));
      const std::vector<Token> tokens(take, 1);
      const StepItem item{sequence_, tokens};
      KVCELL_RETURN_IF_ERROR(cache_->Begin({&item, 1}));
      for (size_t layer = 0; layer < cache_->options().geometry.size(); ++layer) {
        cache_->Compute(static_cast<int>(layer), kv_.data(), kv_.data(), kv_.data(), out_.data());
      }
      KVCELL_RETURN_IF_ERROR(cache_->Commit());
      n -= static_cast<int64_t>(take);
    }
    return OkStatus();
  }

  Cache* cache_;
  SequenceId sequence_;
  std::vector<float> kv_, out_;
};

struct TemporaryStore {
  std::string path;
  TemporaryStore() {
    std::string pattern = (std::filesystem::temp_directory_path() / "kvcell_simulate_XXXXXX").string();
    if (mkdtemp(pattern.data()) != nullptr) path = pattern;
  }
  ~TemporaryStore() {
    std::error_code ignored;
    if (!path.empty()) std::filesystem::remove_all(path, ignored);
  }
};

}  // namespace

Result<std::vector<SimulateRow>> SimulateRules(const SimulateOptions& options) {
  auto events = ParseTrace(options.trace);
  if (!events) return Fail(events.error());
  const TemporaryStore store;
  if (store.path.empty()) {
    return Fail(StatusCode::kIoError, "a temporary directory can't be made; set TMPDIR to one that can be written to");
  }
  CacheOptions cache_options;
  const LayerGeometry layer{.n_heads = options.kv_heads,
                            .n_kv_heads = options.kv_heads,
                            .head_dim_k = options.head_dim,
                            .head_dim_v = options.head_dim,
                            .window = 0,
                            .scale = 1.0f / std::sqrt(static_cast<float>(options.head_dim)),
                            .softcap = 0.0f};
  cache_options.geometry.assign(static_cast<size_t>(options.layers), layer);
  cache_options.codec = *ParseCodec("i4");
  cache_options.rope.resize(cache_options.geometry.size());
  cache_options.rules = options.rules;
  cache_options.max_step_tokens = 64;
  cache_options.max_threads = 1;
  cache_options.store = store.path;
  cache_options.durability = 0;
  cache_options.ram_budget = options.ram_budget;
  int64_t longest = 64, now = 0;
  for (const Event& event : *events) {
    if (event.verb == "append" || event.verb == "step") now += event.a;
    if (event.verb == "trim") now = std::min(now, event.a);
    longest = std::max(longest, now);
  }
  const auto plan = PlanMemory(cache_options, longest, 1);
  if (!plan) return Fail(plan.error());
  if (options.ram_budget == 0) cache_options.ram_budget = plan->minimum + plan->coded / 4;
  auto cache = Cache::Open(cache_options);
  if (!cache) return Fail(cache.error());
  const auto sequence = (*cache)->Create();
  if (!sequence) return Fail(sequence.error());
  Simulator simulator(cache->get(), *sequence);
  std::vector<SimulateRow> rows;
  for (const Event& event : *events) {
    const Status status = simulator.Run(event);
    rows.push_back({.line = event.line,
                    .what = event.text,
                    .tokens = (*cache)->Length(*sequence),
                    .stats = (*cache)->Stats(),
                    .note = status.ok() ? "" : status.message()});
  }
  return rows;
}

}  // namespace kvcell
