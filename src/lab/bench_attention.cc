#include "lab/bench_attention.h"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <limits>
#include <memory>
#include <numeric>
#include <thread>

#include "attention/attention.h"
#include "codec/cell_codec.h"
#include "kvcell/cache.h"
#include "lab/made_values.h"
#include "lab/statistics.h"

namespace kvcell {
namespace {

constexpr int64_t kOpenTokens = 32;  // of the open block that decode reads and writes beside the sealed ones
constexpr int32_t kFillers = 64;     // sequences whose freed blocks ours take, so that neighbours lie apart
constexpr double kSecondsPerShape = 4.0;
constexpr int32_t kFewestRounds = 3;
constexpr int32_t kSinks = 4;

double Now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

std::string_view GgmlTypeFor(std::string_view type) { return type == "i4" ? "q4_0" : type == "i8" ? "q8_0" : "f16"; }

// More than engine and type can cost on these values; what is beyond it is a wrong answer. ggml adds f16 values up in
// f16, which costs it 0.02 at 32,768 tokens.
double WorstError(std::string_view engine, std::string_view type) {
  if (type == "f16") return engine == "ggml" ? 0.2 : 0.01;
  return type == "i8" || type == "q8_0" ? 0.05 : 0.4;
}

// Adds up a buffer that no cache holds, every thread its own part.
class ReadLoop {
 public:
  ReadLoop() : buffer_(size_t{256} << 20) {
    if (buffer_.data() != nullptr) std::memset(buffer_.data(), 1, buffer_.size());
  }
  bool ok() const { return buffer_.data() != nullptr; }

  double GbPerSecond(GgmlThreads* threads) {
    const double start = Now();
    threads->Run([&](int part, int n_parts) {
      const size_t n = buffer_.size() / sizeof(uint64_t) / static_cast<size_t>(n_parts) / 16 * 16;
      const auto* x = reinterpret_cast<const uint64_t*>(buffer_.data()) + static_cast<size_t>(part) * n;
      uint64_t sums[16] = {};
      for (size_t i = 0; i < n; i += 16) {
        for (size_t j = 0; j < 16; ++j) sums[j] += x[i + j];
      }
      sink_ = std::accumulate(std::begin(sums), std::end(sums), uint64_t{0});
    });
    return static_cast<double>(buffer_.size()) / (Now() - start) * 1e-9;
  }

 private:
  HugeBuffer buffer_;
  std::atomic<uint64_t> sink_{0};  // so that nothing is left out
};

// A loop of multiplications and additions in registers: what this machine gains from more threads at best.
double FmaSeconds(GgmlThreads* threads) {
  std::atomic<float> sink{0.0f};
  const double start = Now();
  threads->Run([&](int, int n_parts) {
    float x[32];
    for (size_t i = 0; i < 32; ++i) x[i] = static_cast<float>(i);
    const int n = 2000000 / n_parts;
    for (int i = 0; i < n; ++i) {
      for (float& value : x) value = value * 0.999f + 0.001f;
    }
    sink = std::accumulate(std::begin(x), std::end(x), 0.0f);
  });
  return Now() - start;
}

// One way to attend that is timed.
class Engine {
 public:
  virtual ~Engine() = default;
  virtual Result<double> TimedRun() = 0;           // seconds
  virtual std::span<const float> out() const = 0;  // [queries, heads, head_dim] of the last run
  virtual uint64_t kv_bytes() const = 0;
  std::string engine, type;
  std::vector<double> seconds;
};

class PeerEngine final : public Engine {
 public:
  static Result<std::unique_ptr<Engine>> Make(const AttentionShape& shape, std::string_view type,
                                              GgmlThreads* threads) {
    auto attention = GgmlAttention::Make(shape, type, threads);
    if (!attention) return Fail(attention.error());
    auto engine = std::make_unique<PeerEngine>();
    engine->engine = "ggml";
    engine->type = type;
    engine->attention_ = std::move(*attention);
    return engine;
  }
  Result<double> TimedRun() override {
    const double start = Now();
    attention_->Run();
    return Now() - start;
  }
  std::span<const float> out() const override { return attention_->out(); }
  uint64_t kv_bytes() const override { return attention_->kv_bytes(); }

 private:
  std::unique_ptr<GgmlAttention> attention_;
};

// A sequence in a cache of one layer, sealed through its own append, the blocks shuffled in memory. A run is a whole
// step of the cache, its K and V appended and attended, then undone.
class CellEngine final : public Engine {
 public:
  static Result<std::unique_ptr<Engine>> Make(const AttentionShape& shape, const std::string& codec,
                                              GgmlThreads* threads) {
    auto engine = std::make_unique<CellEngine>();
    engine->engine = "kvcell";
    engine->type = codec;
    engine->shape_ = shape;
    engine->threads_ = threads;
    KVCELL_FAIL_IF_ERROR(engine->Open());
    KVCELL_FAIL_IF_ERROR(engine->Fill());
    engine->MakeStep();
    return engine;
  }

  Result<double> TimedRun() override {
    const StepItem item{sequence_, step_tokens_};
    KVCELL_FAIL_IF_ERROR(cache_->Begin({&item, 1}));
    const double start = Now();
    threads_->Run([&](int part, int n_parts) {
      cache_->Compute(0, k_.data(), v_.data(), q_.data(), out_.data(), part, n_parts);
    });
    const double took = Now() - start;
    cache_->Abort();
    return took;
  }
  std::span<const float> out() const override { return out_; }
  uint64_t kv_bytes() const override { return cache_->Stats().kv_bytes; }
  ~CellEngine() override {
    cache_.reset();
    std::error_code ignored;
    if (!store_.empty()) std::filesystem::remove_all(store_, ignored);
  }
  void UseThreads(GgmlThreads* threads) { threads_ = threads; }

 private:
  Status Open() {
    CacheOptions options;
    auto spec = ParseCodec(type);
    if (!spec) return spec.error();
    options.codec = *spec;
    options.geometry = {LayerGeometry{.n_heads = shape_.heads(),
                                      .n_kv_heads = shape_.kv_heads,
                                      .head_dim_k = shape_.head_dim,
                                      .head_dim_v = shape_.head_dim,
                                      .scale = 1.0f / std::sqrt(static_cast<float>(shape_.head_dim))}};
    options.sinks = kSinks;
    options.max_step_tokens = std::max(shape_.queries, kStep);
    options.max_sequences = kFillers + 1;
    options.max_threads = threads_->n_threads();
    // Room to spare for the fillers, who give theirs back as the sequence grows; what is not used takes no memory.
    auto plan = PlanMemory(options, shape_.tokens + (kFillers + 4) * kBlockTokens, 2);
    if (!plan) return plan.error();
    options.ram_budget = plan->total + (uint64_t{1} << 30);
    if (shape_.in_file) {
      store_ = (std::filesystem::temp_directory_path() / "kvcell-bench-XXXXXX").string();
      if (::mkdtemp(store_.data()) == nullptr) {
        return {StatusCode::kIoError, fmt::format("can't make a directory {}; set TMPDIR to another place", store_)};
      }
      options.store = store_;
      options.file_reads = FileReads::kMapped;
    }
    auto cache = Cache::Open(options);
    if (!cache) return cache.error();
    cache_ = std::move(*cache);
    return OkStatus();
  }

  // Appends tokens [begin, end) to a sequence; `real` ones have the made-up values, others zeros.
  Status Append(SequenceId sequence, int64_t begin, int64_t end, bool real) {
    const auto width = static_cast<size_t>(shape_.kv_heads) * static_cast<size_t>(shape_.head_dim);
    for (int64_t at = begin; at < end; at += kStep) {
      const auto n = static_cast<size_t>(std::min<int64_t>(kStep, end - at));
      k_.assign(n * width, 0.0f);
      v_.assign(n * width, 0.0f);
      if (real) MakeRows(at, static_cast<int64_t>(n));
      const std::vector<Token> tokens(n, static_cast<Token>(sequence));
      const StepItem item{sequence, tokens};
      KVCELL_RETURN_IF_ERROR(cache_->Begin({&item, 1}));
      KVCELL_RETURN_IF_ERROR(cache_->Append(0, k_.data(), v_.data()));
      KVCELL_RETURN_IF_ERROR(cache_->Commit());
    }
    return OkStatus();
  }

  void MakeRows(int64_t first, int64_t n) {
    const auto dim = static_cast<size_t>(shape_.head_dim);
    for (int64_t t = 0; t < n; ++t) {
      for (int head = 0; head < shape_.kv_heads; ++head) {
        const size_t at =
            (static_cast<size_t>(t) * static_cast<size_t>(shape_.kv_heads) + static_cast<size_t>(head)) * dim;
        MakeValues(MadeKind::kKey, first + t, head, {k_.data() + at, dim});
        MakeValues(MadeKind::kValue, first + t, head, {v_.data() + at, dim});
      }
    }
  }

  // Fillers take the memory first, each a stretch of it; before each block of ours one of them, chosen at random, gives
  // its last one back, so that our next one lands there.
  Status Fill() {
    const int64_t past = shape_.tokens - shape_.queries;
    const int64_t n_blocks = past / kBlockTokens;
    std::vector<std::pair<SequenceId, int64_t>> fillers;
    for (int32_t f = 0; f < kFillers; ++f) {
      const int64_t blocks = n_blocks / kFillers + (f < n_blocks % kFillers ? 1 : 0);
      if (blocks == 0) continue;
      auto filler = cache_->Create();
      if (!filler) return filler.error();
      fillers.emplace_back(*filler, blocks);
      KVCELL_RETURN_IF_ERROR(Append(*filler, 0, blocks * kBlockTokens, false));
    }
    auto created = cache_->Create();
    if (!created) return created.error();
    sequence_ = *created;
    uint64_t random = 88172645463325252u;
    for (int64_t b = 0; b < n_blocks; ++b) {
      random ^= random << 13;
      random ^= random >> 7;
      random ^= random << 17;
      auto& [filler, blocks] = fillers[static_cast<size_t>(random % fillers.size())];
      auto trimmed = cache_->Trim(filler, --blocks * kBlockTokens);
      if (!trimmed) return trimmed.error();
      if (blocks == 0) {
        KVCELL_RETURN_IF_ERROR(cache_->Free(filler));
        fillers.erase(std::find_if(fillers.begin(), fillers.end(), [](const auto& f) { return f.second == 0; }));
      }
      KVCELL_RETURN_IF_ERROR(Append(sequence_, b * kBlockTokens, (b + 1) * kBlockTokens, true));
    }
    KVCELL_RETURN_IF_ERROR(Append(sequence_, n_blocks * kBlockTokens, past, true));
    if (!shape_.in_file) return OkStatus();
    KVCELL_RETURN_IF_ERROR(cache_->Persist(sequence_));
    const CacheStats stats = cache_->Stats();
    const uint64_t sealed = static_cast<uint64_t>(n_blocks) * static_cast<uint64_t>(shape_.kv_heads);
    if (stats.cells.by_state[static_cast<size_t>(CellState::kPersisted)] == sealed) return OkStatus();
    return {StatusCode::kInternal, "cells that should be attended in a file stayed in RAM"};
  }

  void MakeStep() {
    const auto n = static_cast<size_t>(shape_.queries), dim = static_cast<size_t>(shape_.head_dim);
    const auto width = static_cast<size_t>(shape_.kv_heads) * dim;
    k_.assign(n * width, 0.0f);
    v_.assign(n * width, 0.0f);
    const int64_t first = shape_.tokens - shape_.queries;
    MakeRows(first, shape_.queries);
    step_tokens_.assign(n, 1);
    out_.assign(n * static_cast<size_t>(shape_.heads()) * dim, std::numeric_limits<float>::quiet_NaN());
    q_.resize(out_.size());
    for (size_t i = 0; i < n; ++i) {
      for (int head = 0; head < shape_.heads(); ++head) {
        const size_t at = (i * static_cast<size_t>(shape_.heads()) + static_cast<size_t>(head)) * dim;
        MakeValues(MadeKind::kQuery, first + static_cast<int64_t>(i), head, {q_.data() + at, dim});
      }
    }
  }

  static constexpr int32_t kStep = 64;

  AttentionShape shape_;
  GgmlThreads* threads_ = nullptr;
  std::unique_ptr<Cache> cache_;
  SequenceId sequence_ = -1;
  std::string store_;  // of cells in a file
  std::vector<Token> step_tokens_;
  std::vector<float> k_, v_, q_, out_;
};

// K and V of one head, as they were or as the cells of a codec give them back.
class HeadValues {
 public:
  HeadValues(const AttentionShape& shape, int head) : dim_(static_cast<size_t>(shape.head_dim)) {
    k_.resize(static_cast<size_t>(shape.tokens) * dim_);
    v_.resize(k_.size());
    for (int64_t t = 0; t < shape.tokens; ++t) {
      MakeValues(MadeKind::kKey, t, head, {k_.data() + static_cast<size_t>(t) * dim_, dim_});
      MakeValues(MadeKind::kValue, t, head, {v_.data() + static_cast<size_t>(t) * dim_, dim_});
    }
  }

  // Codes and decodes what a query at the end reads from sealed cells: all whole blocks before `exact_from` but the
  // sinks.
  Status Code(const std::string& codec, int64_t exact_from) {
    auto spec = ParseCodec(codec);
    if (!spec) return spec.error();
    const int dim = static_cast<int>(dim_);
    auto layout = MakeCellLayout(*spec, dim, dim);
    if (!layout) return layout.error();
    const ExactLayout exact_layout = MakeExactLayout(kBlockTokens, dim, dim);
    std::vector<std::byte> exact(exact_layout.bytes), cell(layout->bytes);
    std::vector<float> k(kBlockTokens * dim_), v(k.size());
    SanitizeCounts counts;
    const auto n_tokens = static_cast<int64_t>(k_.size() / dim_);
    for (int64_t begin = 0; begin < n_tokens; begin += kBlockTokens) {
      const int n = static_cast<int>(std::min<int64_t>(kBlockTokens, n_tokens - begin));
      const size_t at = static_cast<size_t>(begin) * dim_;
      for (int t = 0; t < n; ++t) {
        const size_t row = at + static_cast<size_t>(t) * dim_;
        WriteExactToken(exact_layout, exact.data(), t, k_.data() + row, v_.data() + row, &counts);
      }
      DecodeExact(exact_layout, exact.data(), n, k_.data() + at, v_.data() + at);
      if (begin + kBlockTokens > exact_from) continue;
      const int first = begin == 0 ? kSinks : 0;
      EncodeCell(*layout, exact_layout, exact.data(), first, cell.data());
      DecodeCell(*layout, cell.data(), k.data(), v.data());
      const size_t skip = static_cast<size_t>(first) * dim_;
      std::copy(k.begin() + static_cast<std::ptrdiff_t>(skip), k.end(),
                k_.begin() + static_cast<std::ptrdiff_t>(at + skip));
      std::copy(v.begin() + static_cast<std::ptrdiff_t>(skip), v.end(),
                v_.begin() + static_cast<std::ptrdiff_t>(at + skip));
    }
    return OkStatus();
  }

  // One row in float64 over tokens [0, end).
  std::vector<double> Attend(std::span<const float> q, int64_t end) const {
    const double scale = 1.0 / std::sqrt(static_cast<double>(dim_));
    std::vector<double> score(static_cast<size_t>(end)), out(dim_, 0.0);
    double max = -std::numeric_limits<double>::infinity(), sum = 0.0;
    for (size_t t = 0; t < score.size(); ++t) {
      double s = 0.0;
      for (size_t d = 0; d < dim_; ++d) s += static_cast<double>(q[d]) * static_cast<double>(k_[t * dim_ + d]);
      score[t] = s * scale;
      max = std::max(max, score[t]);
    }
    for (size_t t = 0; t < score.size(); ++t) {
      const double p = std::exp(score[t] - max);
      sum += p;
      for (size_t d = 0; d < dim_; ++d) out[d] += p * static_cast<double>(v_[t * dim_ + d]);
    }
    for (double& x : out) x /= sum;
    return out;
  }

 private:
  size_t dim_;
  std::vector<float> k_, v_;
};

// The rows that are compared: of the first and the last KV head, the first, a middle and the last query.
class Oracle {
 public:
  explicit Oracle(const AttentionShape& shape) : shape_(shape) {
    for (const int head : {0, shape.kv_heads - 1}) {
      for (const int32_t query : {0, shape.queries / 2, shape.queries - 1}) {
        for (int member : {0, shape.group - 1}) {
          const Row row{query, head, head * shape.group + member};
          if (std::find(rows_.begin(), rows_.end(), row) == rows_.end()) rows_.push_back(row);
        }
      }
    }
    original_ = Attend(nullptr);
  }

  // Root mean square of what `out` [queries, heads, dim] is off, relative to the rows' own.
  double Error(std::span<const float> out) const { return std::sqrt(Power(out, original_) / Power({}, original_)); }

  // Against what the codec's cells hold.
  Status Rounding(std::span<const float> out, const std::string& codec, double* error, double* share) {
    const std::vector<std::vector<double>> decoded = Attend(&codec);
    if (!status_.ok()) return status_;
    const double rounding = Power(out, decoded);
    double codes = 0.0;
    for (size_t r = 0; r < rows_.size(); ++r) {
      for (size_t d = 0; d < decoded[r].size(); ++d) codes += Square(decoded[r][d] - original_[r][d]);
    }
    *error = std::sqrt(rounding / Power({}, decoded));
    *share = rounding / codes;
    return OkStatus();
  }

 private:
  struct Row {
    int32_t query;
    int head, q_head;
    bool operator==(const Row&) const = default;
  };

  static double Square(double x) { return x * x; }

  double Power(std::span<const float> out, const std::vector<std::vector<double>>& expected) const {
    double power = 0.0;
    for (size_t r = 0; r < rows_.size(); ++r) {
      const size_t at = (static_cast<size_t>(rows_[r].query) * static_cast<size_t>(shape_.heads()) +
                         static_cast<size_t>(rows_[r].q_head)) *
                        static_cast<size_t>(shape_.head_dim);
      for (size_t d = 0; d < expected[r].size(); ++d) {
        power += Square((out.empty() ? 0.0 : static_cast<double>(out[at + d])) - expected[r][d]);
      }
    }
    return power;
  }

  std::vector<std::vector<double>> Attend(const std::string* codec) {
    std::vector<std::vector<double>> out(rows_.size());
    const int64_t past = shape_.tokens - shape_.queries;
    int made = -1;
    std::unique_ptr<HeadValues> values;
    int64_t coded_for = -1;
    for (size_t r = 0; r < rows_.size(); ++r) {
      const int64_t position = past + rows_[r].query;
      const int64_t exact_from = position / kBlockTokens * kBlockTokens;
      if (rows_[r].head != made || (codec != nullptr && coded_for != exact_from)) {
        values = std::make_unique<HeadValues>(shape_, rows_[r].head);
        made = rows_[r].head;
        coded_for = exact_from;
        if (codec != nullptr) {
          if (Status status = values->Code(*codec, exact_from); !status.ok()) status_ = status;
        }
      }
      std::vector<float> q(static_cast<size_t>(shape_.head_dim));
      MakeValues(MadeKind::kQuery, position, rows_[r].q_head, q);
      out[r] = values->Attend(q, position + 1);
    }
    return out;
  }

  AttentionShape shape_;
  Status status_;
  std::vector<Row> rows_;
  std::vector<std::vector<double>> original_;
};

class Bench {
 public:
  explicit Bench(const AttentionBenchOptions& options)
      : options_(options),
        threads_(options.n_threads > 0 ? options.n_threads
                                       : static_cast<int>(std::max(1u, std::thread::hardware_concurrency()))),
        one_(1) {}

  Result<AttentionBenchResult> Run() {
    if (!reader_.ok()) return Fail(StatusCode::kOutOfBudget, "not enough memory to measure the read bandwidth");
    const std::vector<AttentionShape> shapes = options_.shapes.empty() ? DefaultAttentionShapes() : options_.shapes;
    for (size_t i = 0; i < shapes.size(); ++i) {
      if (options_.on_shape) options_.on_shape(static_cast<int64_t>(i), static_cast<int64_t>(shapes.size()));
      KVCELL_FAIL_IF_ERROR(OneShape(shapes[i]));
    }
    if (options_.on_shape) options_.on_shape(static_cast<int64_t>(shapes.size()), static_cast<int64_t>(shapes.size()));
    if (threads_.n_threads() > 1) result_.scaling.push_back({"fma loop", Median(fma_gains_)});
    result_.read_bandwidth_gb_s = Median(bandwidths_);
    return std::move(result_);
  }

 private:
  Status OneShape(const AttentionShape& shape) {
    std::vector<std::unique_ptr<Engine>> engines;
    const auto add = [&](Result<std::unique_ptr<Engine>> made) {
      if (!made) return made.error();
      engines.push_back(std::move(*made));
      return OkStatus();
    };
    // A large one of ggml's before each of ours: nothing of ours is left in a cache.
    KVCELL_RETURN_IF_ERROR(add(PeerEngine::Make(shape, "f16", &threads_)));
    for (const std::string& type : options_.types) {
      KVCELL_RETURN_IF_ERROR(add(CellEngine::Make(shape, type, &threads_)));
      if (type != "f16") KVCELL_RETURN_IF_ERROR(add(PeerEngine::Make(shape, GgmlTypeFor(type), &threads_)));
    }
    std::vector<double> bandwidths;
    const double start = Now();
    for (int32_t round = -1; round < options_.rounds; ++round) {  // the first one warms up
      if (round >= kFewestRounds && Now() - start > kSecondsPerShape) break;
      for (auto& engine : engines) {
        if (options_.should_stop && options_.should_stop()) return {StatusCode::kCancelled, "stopped"};
        auto seconds = engine->TimedRun();
        if (!seconds) return seconds.error();
        if (round >= 0) engine->seconds.push_back(*seconds);
      }
      if (round >= 0) bandwidths.push_back(reader_.GbPerSecond(&threads_));
    }
    bandwidths_.insert(bandwidths_.end(), bandwidths.begin(), bandwidths.end());
    KVCELL_RETURN_IF_ERROR(AddRows(shape, engines, Median(bandwidths)));
    if (threads_.n_threads() > 1 && shape.queries == 1 && !shape.in_file) MeasureScaling(shape, engines);
    return OkStatus();
  }

  Status AddRows(const AttentionShape& shape, const std::vector<std::unique_ptr<Engine>>& engines, double bandwidth) {
    Oracle oracle(shape);
    const double pairs = (static_cast<double>(shape.tokens) - (static_cast<double>(shape.queries) - 1) / 2) *
                         static_cast<double>(shape.queries);
    const auto time_of = [&](std::string_view engine, std::string_view type) {
      for (const auto& e : engines) {
        if (e->engine == engine && e->type == type) return Median(e->seconds);
      }
      return 0.0;
    };
    for (const auto& engine : engines) {
      AttentionBenchRow row;
      row.engine = engine->engine;
      row.type = engine->type;
      row.shape = shape;
      row.threads = threads_.n_threads();
      row.isa = engine->engine == "kvcell" ? AttentionIsa() : "ggml";
      const double seconds = Median(engine->seconds);
      row.ms = seconds * 1e3;
      row.bytes = engine->kv_bytes();
      row.gb_s = static_cast<double>(row.bytes) / seconds * 1e-9;
      row.of_bandwidth = row.gb_s / bandwidth;
      row.gmac_s = pairs * shape.heads() * shape.head_dim * 2.0 / seconds * 1e-9;
      std::vector<float> out(engine->out().begin(), engine->out().end());
      if (options_.tamper) options_.tamper(row.engine, row.type, out);
      row.rel_error = oracle.Error(out);
      row.ratio = time_of("ggml", "f16") / seconds;
      row.ratio_same = time_of("ggml", GgmlTypeFor(row.type)) / seconds;
      if (!(row.rel_error < WorstError(row.engine, row.type))) {
        return {
            StatusCode::kInternal,
            fmt::format("{} {} at {} tokens is off by {:.3f} of its output; that is a wrong result, not a rounded one",
                        row.engine, row.type, shape.tokens, row.rel_error)};
      }
      if (row.engine == "kvcell" && row.type != "f16") {
        KVCELL_RETURN_IF_ERROR(oracle.Rounding(out, row.type, &row.rounding_error, &row.rounding_share));
      }
      result_.rows.push_back(row);
    }
    return OkStatus();
  }

  void MeasureScaling(const AttentionShape& shape, const std::vector<std::unique_ptr<Engine>>& engines) {
    for (const auto& engine : engines) {
      auto* cells = dynamic_cast<CellEngine*>(engine.get());
      if (cells == nullptr) continue;
      std::vector<double> gains;
      for (int round = 0; round < 7; ++round) {
        cells->UseThreads(&one_);
        const double one = cells->TimedRun().value_or(0.0);
        cells->UseThreads(&threads_);
        const double all = cells->TimedRun().value_or(1.0);
        gains.push_back(one / all);
        fma_gains_.push_back(FmaSeconds(&one_) / FmaSeconds(&threads_));
      }
      result_.scaling.push_back({fmt::format("{} decode, {} tokens, {} KV heads x {}, {}", cells->type, shape.tokens,
                                             shape.kv_heads, shape.group, shape.head_dim),
                                 Median(gains)});
      if (cells->type == "i4" && result_.seal_share == 0.0)
        result_.seal_share = SealShare(shape, Median(cells->seconds));
    }
  }

  // Time to code one block of all heads, shared by the threads, over that of the 64 steps that fill it.
  double SealShare(const AttentionShape& shape, double step_seconds) const {
    const auto spec = ParseCodec("i4");
    const auto layout = MakeCellLayout(*spec, shape.head_dim, shape.head_dim);
    const ExactLayout exact_layout = MakeExactLayout(kBlockTokens, shape.head_dim, shape.head_dim);
    std::vector<std::byte> exact(exact_layout.bytes), cell(layout->bytes);
    std::vector<float> k(static_cast<size_t>(shape.head_dim)), v(k.size());
    SanitizeCounts counts;
    for (int t = 0; t < kBlockTokens; ++t) {
      MakeValues(MadeKind::kKey, t, 0, k);
      MakeValues(MadeKind::kValue, t, 0, v);
      WriteExactToken(exact_layout, exact.data(), t, k.data(), v.data(), &counts);
    }
    std::vector<double> times;
    for (int i = 0; i < 100; ++i) {
      const double start = Now();
      EncodeCell(*layout, exact_layout, exact.data(), 0, cell.data());
      times.push_back(Now() - start);
    }
    const int n_threads = threads_.n_threads();
    const int cells_each = (shape.kv_heads + n_threads - 1) / n_threads;
    return Median(times) * cells_each / (kBlockTokens * step_seconds);
  }

  const AttentionBenchOptions& options_;
  GgmlThreads threads_;
  GgmlThreads one_;
  ReadLoop reader_;
  std::vector<double> bandwidths_, fma_gains_;
  AttentionBenchResult result_;
};

}  // namespace

std::vector<AttentionShape> DefaultAttentionShapes() {
  std::vector<AttentionShape> shapes;
  const auto decode = [&](int64_t tokens, int kv_heads, int group, int dim) {
    shapes.push_back(
        {.tokens = tokens + kOpenTokens, .queries = 1, .kv_heads = kv_heads, .group = group, .head_dim = dim});
  };
  decode(32768, 8, 4, 128);
  for (const int group : {1, 2, 8}) decode(32768, 8, group, 128);
  decode(32768, 1, 8, 128);
  decode(32768, 3, 3, 64);
  decode(32768, 8, 4, 96);
  decode(16384, 4, 4, 256);
  for (const int64_t tokens : {1024, 8192, 131072}) decode(tokens, 8, 4, 128);
  decode(32768, 8, 4, 128);
  shapes.back().in_file = true;
  for (const int64_t past : {4096, 8192}) {
    for (const int32_t queries : {128, 512}) shapes.push_back({.tokens = past + queries, .queries = queries});
  }
  return shapes;
}

Result<AttentionBenchResult> BenchAttention(const AttentionBenchOptions& options) { return Bench(options).Run(); }

}  // namespace kvcell
