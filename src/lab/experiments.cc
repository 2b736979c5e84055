#include "lab/experiments.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <memory>
#include <utility>

#include "kvcell/cache.h"
#include "lab/kv_data.h"
#include "lab/speed.h"

namespace kvcell {
namespace {

namespace fs = std::filesystem;

// A cache over made values, driven as an engine drives it.
class MadeRun {
 public:
  static Result<std::unique_ptr<MadeRun>> Open(CacheOptions options, const KvData& data) {
    auto run = std::make_unique<MadeRun>(data);
    options.geometry = data.geometry;
    options.max_step_tokens = kBlockTokens;
    options.max_threads = 1;
    auto cache = Cache::Open(options);
    if (!cache) return Fail(cache.error());
    run->cache = std::move(*cache);
    return run;
  }
  explicit MadeRun(const KvData& made) : data(made) {}

  Status Create() {
    auto created = cache->Create();
    if (!created) return created.error();
    sequence = *created;
    return OkStatus();
  }

  // Appends tokens [from, from + n) and keeps the outputs of the last one's attention, all layers one after the other.
  Status Step(int64_t from, int64_t n) {
    std::vector<Token> tokens;
    for (int64_t i = 0; i < n; ++i) tokens.push_back(static_cast<Token>((from + i) % 1000));
    const StepItem item{sequence, tokens};
    KVCELL_RETURN_IF_ERROR(cache->Begin({&item, 1}));
    outputs.clear();
    for (size_t l = 0; l < data.geometry.size(); ++l) {
      const LayerGeometry& g = data.geometry[l];
      const LayerValues& values = data.layers[l];
      std::vector<float> out(static_cast<size_t>(n * g.n_heads * g.head_dim_v));
      // The data has queries of its last tokens alone; any will do here.
      std::vector<float> q(static_cast<size_t>(n * g.n_heads * g.head_dim_k));
      for (size_t i = 0; i < q.size(); ++i) q[i] = values.q[i % values.q.size()];
      cache->Compute(static_cast<int>(l), values.k.data() + from * g.n_kv_heads * g.head_dim_k,
                     values.v.data() + from * g.n_kv_heads * g.head_dim_v, q.data(), out.data());
      outputs.insert(outputs.end(), out.end() - g.n_heads * g.head_dim_v, out.end());
    }
    return cache->Commit();
  }

  Status Fill(int64_t tokens) {
    for (int64_t at = 0; at < tokens; at += kBlockTokens) {
      KVCELL_RETURN_IF_ERROR(Step(at, std::min<int64_t>(kBlockTokens, tokens - at)));
    }
    return OkStatus();
  }

  const KvData& data;
  std::unique_ptr<Cache> cache;
  SequenceId sequence = 0;
  std::vector<float> outputs;
};

double RelativeError(const std::vector<float>& want, const std::vector<float>& got) {
  double error = 0, energy = 0;
  for (size_t i = 0; i < want.size(); ++i) {
    error += std::pow(static_cast<double>(want[i]) - static_cast<double>(got[i]), 2);
    energy += std::pow(static_cast<double>(want[i]), 2);
  }
  return energy > 0 ? error / energy : error;
}

// A directory that is there for one experiment.
class Scratch {
 public:
  explicit Scratch(const std::string& path) : path_(path) {
    std::error_code error;
    fs::remove_all(path_, error);
  }
  ~Scratch() {
    std::error_code error;
    fs::remove_all(path_, error);
  }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

class Experiments {
 public:
  explicit Experiments(const ExperimentOptions& options) : options_(options) {}

  Result<std::vector<Experiment>> Run() {
    if (options_.geometry.empty())
      return Fail(StatusCode::kInvalidArgument, "the experiments need a shape with layers");
    auto spec = ParseCodec(options_.codec);
    if (!spec) return Fail(spec.error());
    spec_ = *spec;
    Geometry few(options_.geometry.begin(), options_.geometry.begin() + static_cast<std::ptrdiff_t>(std::min<size_t>(
                                                                            4, options_.geometry.size())));
    for (LayerGeometry& g : few) g.window = 0;
    data_ = MakeKv(few, 512, 64, 3);
    std::vector<Experiment> all;
    using Step = Result<Experiment> (Experiments::*)();
    const Step steps[] = {&Experiments::StoreRoundTrip, &Experiments::StateTrace, &Experiments::ContextLimit,
                          &Experiments::Latency};
    for (const Step step : steps) {
      if (options_.on_experiment) options_.on_experiment(static_cast<int64_t>(all.size()), 4);
      if (options_.should_stop && options_.should_stop()) return Fail(StatusCode::kCancelled, "stopped");
      auto experiment = (this->*step)();
      if (!experiment) return Fail(experiment.error());
      all.push_back(std::move(*experiment));
    }
    if (options_.on_experiment) options_.on_experiment(4, 4);
    return all;
  }

 private:
  CacheOptions WithStore(const std::string& store) const {
    CacheOptions options;
    options.codec = spec_;
    options.store = store;
    options.identity = {{"weights", "made values"}};
    options.model_name = "made values";
    return options;
  }

  // 1: exact attention, against attention over a session that was stored, closed and opened again.
  Result<Experiment> StoreRoundTrip() {
    constexpr double kBound = 0.02;
    Experiment e{
        .name = "State survives the store",
        .question = "Is attention over stored and reopened cells what it was before, and near exact attention?",
        .bound = fmt::format("the same bits as before saving; squared error below {} of the exact outputs' "
                             "energy ({} codec, {} tokens)",
                             kBound, options_.codec, data_.n_tokens - 1)};
    const int64_t n = data_.n_tokens - 1;
    CacheOptions exact_options;
    exact_options.codec = *ParseCodec("f16");
    auto exact = MadeRun::Open(exact_options, data_);
    if (!exact) return Fail(exact.error());
    KVCELL_FAIL_IF_ERROR((*exact)->Create());
    KVCELL_FAIL_IF_ERROR((*exact)->Fill(n));
    KVCELL_FAIL_IF_ERROR((*exact)->Step(n, 1));

    const Scratch store(options_.directory + "/experiment1");
    {
      auto before = MadeRun::Open(WithStore(store.path()), data_);
      if (!before) return Fail(before.error());
      KVCELL_FAIL_IF_ERROR((*before)->Create());
      KVCELL_FAIL_IF_ERROR((*before)->Fill(n));
      KVCELL_FAIL_IF_ERROR((*before)->cache->Save((*before)->sequence, "experiment", {}, ""));
      KVCELL_FAIL_IF_ERROR((*before)->Step(n, 1));
      unsaved_ = (*before)->outputs;
    }
    auto after = MadeRun::Open(WithStore(store.path()), data_);
    if (!after) return Fail(after.error());
    auto opened = (*after)->cache->OpenSession("experiment", /*create=*/false);
    if (!opened) return Fail(opened.error());
    (*after)->sequence = opened->sequence;
    KVCELL_FAIL_IF_ERROR((*after)->Step(n, 1));
    const bool same = (*after)->outputs == unsaved_;
    const double error = RelativeError((*exact)->outputs, (*after)->outputs);
    e.found = fmt::format("{} of {} tokens usable, outputs {}, squared error {:.5f}", opened->usable,
                          opened->tokens.size(), same ? "the same to the bit" : "DIFFERENT", error);
    e.pass = same && error < kBound && opened->usable == n;
    e.bars = {{"bound", kBound, fmt::format("{:.4f}", kBound)}, {"measured", error, fmt::format("{:.4f}", error)}};
    return e;
  }

  // 2: the states of the first block's first cell, event by event.
  Result<Experiment> StateTrace() {
    Experiment e{.name = "A cell's states are the expected ones",
                 .question = "Does a cell go through its states in the order that the design names?"};
    const std::vector<std::string> expected = {"ACTIVE", "QUANTIZED", "QUANTIZED durable", "PERSISTED",
                                               "QUANTIZED durable"};
    e.bound = fmt::format("{}", fmt::join(expected, " -> "));
    const Scratch store(options_.directory + "/experiment2");
    CacheOptions options = WithStore(store.path());
    options.geometry = data_.geometry;
    options.max_step_tokens = kBlockTokens;
    options.max_threads = 1;
    // The smallest memory that this context can be attended in: most of its blocks have to leave.
    options.ram_budget = 1;
    auto plan = PlanMemory(options, data_.n_tokens, 1);
    if (!plan) return Fail(plan.error());
    options.ram_budget = plan->minimum;
    std::vector<std::string> trace;
    const auto note = [&](const MadeRun& run) {
      const CellInfo cell = run.cache->Inspect(run.sequence).front();
      std::string state(CellStateName(cell.state));
      if (cell.durable && cell.state != CellState::kPersisted) state += " durable";
      if (trace.empty() || trace.back() != state) trace.push_back(state);
    };
    {
      auto run = MadeRun::Open(options, data_);
      if (!run) return Fail(run.error());
      KVCELL_FAIL_IF_ERROR((*run)->Create());
      KVCELL_FAIL_IF_ERROR((*run)->Step(0, 32));
      note(**run);  // TOKEN_APPEND
      KVCELL_FAIL_IF_ERROR((*run)->Step(32, 32));
      note(**run);  // the block is full
      KVCELL_FAIL_IF_ERROR((*run)->cache->Save((*run)->sequence, "experiment", {}, ""));
      note(**run);  // WRITE_BACK
      for (int64_t at = kBlockTokens; at < data_.n_tokens; at += kBlockTokens) {
        KVCELL_FAIL_IF_ERROR((*run)->Step(at, kBlockTokens));
      }
      note(**run);  // MEMORY_PRESSURE
    }
    options.ram_budget = 0;
    auto run = MadeRun::Open(options, data_);
    if (!run) return Fail(run.error());
    auto opened = (*run)->cache->OpenSession("experiment", /*create=*/false);
    if (!opened) return Fail(opened.error());
    (*run)->sequence = opened->sequence;
    KVCELL_FAIL_IF_ERROR((*run)->Step(opened->usable, kBlockTokens));
    note(**run);  // READ_REQUEST: fetched and verified
    e.found = fmt::format("{}", fmt::join(trace, " -> "));
    e.pass = trace == expected;
    return e;
  }

  // 3: tokens until a budget is hit, really appended.
  Result<Experiment> ContextLimit() {
    CapacityOptions capacity;
    capacity.geometry = options_.geometry;
    for (LayerGeometry& g : capacity.geometry) g.window = 0;
    capacity.budget = options_.budget;
    capacity.codecs = {"f16", options_.codec};
    capacity.sequence_tokens = 256;
    capacity.n_threads = options_.n_threads;
    capacity.should_stop = options_.should_stop;
    Experiment e{.name = "More context in the same memory",
                 .question = fmt::format("How many tokens fit into {} MiB of KV memory?", options_.budget >> 20),
                 .bound = fmt::format("{} holds at least 2.5 times as many tokens as f16", options_.codec)};
    auto rows = MeasureCapacity(capacity);
    if (!rows) return Fail(rows.error());
    const double ratio =
        static_cast<double>((*rows)[1].context) / std::max<double>(1.0, static_cast<double>((*rows)[0].context));
    e.found = fmt::format("{} tokens in f16, {} in {}: {:.2f} times", (*rows)[0].context, (*rows)[1].context,
                          options_.codec, ratio);
    e.pass = ratio >= 2.5;
    for (const CapacityRow& row : *rows) {
      e.bars.push_back({row.codec, static_cast<double>(row.context), fmt::format("{} tokens", row.context)});
    }
    return e;
  }

  // 4: one layer's decode attention.
  Result<Experiment> Latency() {
    LatencyOptions latency;
    latency.shape = options_.geometry.front();
    latency.shape.window = 0;
    latency.contexts = {8192};
    latency.codecs = {options_.codec};
    latency.n_threads = options_.n_threads;
    latency.seconds = 0.3;
    latency.should_stop = options_.should_stop;
    Experiment e{.name = "Attending codes as they lie is fastest",
                 .question = "How long does one decode step's attention over 8,192 tokens take, three ways?",
                 .bound = "in place is faster than f16, and than decoding to f16 first (by the plain decoder)"};
    auto rows = MeasureLatency(latency);
    if (!rows) return Fail(rows.error());
    const auto ms = [&](const char* way) {
      return std::find_if(rows->begin(), rows->end(), [&](const LatencyRow& r) { return r.way == way; })->ms;
    };
    const double f16 = ms("f16"), decoded = ms("dequantized"), in_place = ms("in place");
    e.found = fmt::format("f16 {:.3f} ms, decoded first {:.3f} ms, in place {:.3f} ms a layer", f16, decoded, in_place);
    e.pass = in_place < f16 && in_place < decoded;
    e.bars = {{"f16", f16, fmt::format("{:.3f} ms", f16)},
              {"decoded, then attended", decoded, fmt::format("{:.3f} ms", decoded)},
              {"attended in place", in_place, fmt::format("{:.3f} ms", in_place)}};
    return e;
  }

  const ExperimentOptions& options_;
  CodecSpec spec_;
  KvData data_;
  std::vector<float> unsaved_;
};

}  // namespace

Result<std::vector<Experiment>> RunExperiments(const ExperimentOptions& options) { return Experiments(options).Run(); }

}  // namespace kvcell
