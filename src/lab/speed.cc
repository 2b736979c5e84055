#include "lab/speed.h"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstring>
#include <memory>
#include <thread>
#include <utility>

#include "attention/attention.h"
#include "codec/cell_codec.h"
#include "codec/f16.h"
#include "kvcell/cache.h"
#include "lab/kv_data.h"
#include "lab/statistics.h"
#include "model/model.h"

namespace kvcell {
namespace {

using Clock = std::chrono::steady_clock;

double MillisecondsSince(Clock::time_point start) {
  return std::chrono::duration<double, std::milli>(Clock::now() - start).count();
}

// Rows of 64 bytes, so that cells lie aligned in it.
class AlignedBytes {
 public:
  void Resize(size_t n) { lines_.resize((n + 63) / 64); }
  std::byte* data() { return reinterpret_cast<std::byte*>(lines_.data()); }

 private:
  struct alignas(64) Line {
    std::byte bytes[64];
  };
  std::vector<Line> lines_;
};

// Turns a cell's codes into an f16 cell, in the rotated basis where the codec rotates: the query is rotated instead, as
// any fast implementation of dequantization would do.
class Dequantizer {
 public:
  explicit Dequantizer(const CellLayout& layout)
      : layout_(layout), exact_(MakeExactLayout(kBlockTokens, layout.k.dim, layout.v.dim)) {
    plain_ = layout;
    // Decoding in a layout that says nothing of a rotation leaves it out.
    plain_.k.spec.rotate = plain_.v.spec.rotate = false;
    k_.resize(static_cast<size_t>(kBlockTokens * layout.k.dim));
    v_.resize(static_cast<size_t>(kBlockTokens * layout.v.dim));
  }
  const ExactLayout& exact() const { return exact_; }

  void Run(const std::byte* cell, std::byte* out) {
    DecodeCell(plain_, cell, k_.data(), v_.data());
    auto* k_out = reinterpret_cast<uint16_t*>(out);
    auto* v_out = reinterpret_cast<uint16_t*>(out + exact_.v);
    for (int d = 0; d < layout_.k.dim; ++d) {
      for (int t = 0; t < kBlockTokens; ++t) {
        k_out[d * kBlockTokens + t] = F32ToF16(k_[static_cast<size_t>(t * layout_.k.dim + d)]);
      }
    }
    for (int t = 0; t < kBlockTokens; ++t) {
      for (int d = 0; d < layout_.v.dim; ++d) {
        v_out[t * exact_.dv_padded + d] = F32ToF16(v_[static_cast<size_t>(t * layout_.v.dim + d)]);
      }
    }
  }

 private:
  CellLayout layout_, plain_;
  ExactLayout exact_;
  std::vector<float> k_, v_;
};

// One layer's cells under one codec: made values, one block coded per head and repeated, at different places in memory.
class LayerCellsOf {
 public:
  static Result<std::unique_ptr<LayerCellsOf>> Make(const LayerGeometry& shape, const std::string& codec,
                                                    int64_t context) {
    auto spec = ParseCodec(codec);
    if (!spec) return Fail(spec.error());
    auto layout = MakeCellLayout(*spec, shape.head_dim_k, shape.head_dim_v);
    if (!layout) return Fail(layout.error());
    auto cells = std::make_unique<LayerCellsOf>();
    cells->layout = *layout;
    cells->n_blocks = context / kBlockTokens;
    const auto n = static_cast<size_t>(cells->n_blocks);
    cells->bytes.Resize(n * static_cast<size_t>(shape.n_kv_heads) * layout->bytes);
    const ExactLayout exact_layout = MakeExactLayout(kBlockTokens, shape.head_dim_k, shape.head_dim_v);
    AlignedBytes exact;
    exact.Resize(exact_layout.bytes);
    const KvData made = MakeKv({shape}, kBlockTokens, 1, 7);
    SanitizeCounts counts;
    for (int h = 0; h < shape.n_kv_heads; ++h) {
      for (int t = 0; t < kBlockTokens; ++t) {
        const auto row = static_cast<size_t>(t * shape.n_kv_heads + h);
        WriteExactToken(exact_layout, exact.data(), t, &made.layers[0].k[row * static_cast<size_t>(shape.head_dim_k)],
                        &made.layers[0].v[row * static_cast<size_t>(shape.head_dim_v)], &counts);
      }
      std::byte* first = cells->Cell(h, 0);
      EncodeCell(*layout, exact_layout, exact.data(), 0, first);
      for (size_t b = 1; b < n; ++b) std::memcpy(cells->Cell(h, static_cast<int64_t>(b)), first, layout->bytes);
    }
    return cells;
  }

  std::byte* Cell(int head, int64_t block) {
    return bytes.data() +
           (static_cast<size_t>(head) * static_cast<size_t>(n_blocks) + static_cast<size_t>(block)) * layout.bytes;
  }

  CellLayout layout;
  int64_t n_blocks = 0;
  AlignedBytes bytes;
};

// One way of attending; units of work (head, segment of 16 blocks) are shared out to threads and merged in order.
class Way {
 public:
  Way(const LayerGeometry& shape, LayerCellsOf* cells, bool dequantize)
      : shape_(shape), cells_(cells), dequantize_(dequantize) {
    head_.dk = shape.head_dim_k;
    head_.dv = shape.head_dim_v;
    head_.scale = shape.scale;
    head_.coded = cells->layout;
  }

  void Step(const std::vector<float>& q, int n_threads, std::vector<float>* out) {
    constexpr int64_t kSegment = 16;
    const int64_t n_segments = (cells_->n_blocks + kSegment - 1) / kSegment;
    const int group = shape_.group();
    const auto n_units = static_cast<size_t>(shape_.n_kv_heads) * static_cast<size_t>(n_segments);
    partials_.resize(n_units);
    std::atomic<size_t> next{0};
    const int64_t begin = 0, end = cells_->n_blocks * kBlockTokens;
    const std::vector<int64_t> begins(static_cast<size_t>(group), begin), ends(static_cast<size_t>(group), end);
    const auto prepare = [&](int head, std::vector<const float*>* rows, PreparedQueries* queries) {
      rows->clear();
      for (int j = 0; j < group; ++j) rows->push_back(q.data() + (head * group + j) * shape_.head_dim_k);
      queries->Prepare(head_, {group, rows->data(), begins.data(), ends.data(), nullptr});
    };
    const auto work = [&] {
      Dequantizer dequantizer(cells_->layout);
      AlignedBytes scratch;
      if (dequantize_) scratch.Resize(dequantizer.exact().bytes);
      PreparedQueries queries;
      std::vector<const float*> rows;
      std::vector<CellRef> refs;
      for (size_t unit = next.fetch_add(1); unit < n_units; unit = next.fetch_add(1)) {
        const auto head = static_cast<int>(unit / static_cast<size_t>(n_segments));
        const int64_t first = static_cast<int64_t>(unit % static_cast<size_t>(n_segments)) * kSegment;
        const int64_t last = std::min(cells_->n_blocks, first + kSegment);
        prepare(head, &rows, &queries);
        partials_[unit].Reset(head_, group);
        refs.clear();
        for (int64_t b = first; b < last; ++b) {
          CellRef ref{cells_->Cell(head, b), nullptr, b * kBlockTokens, 0, kBlockTokens, CellRef::Kind::kCoded};
          if (!dequantize_) {
            refs.push_back(ref);
            continue;
          }
          dequantizer.Run(ref.bytes, scratch.data());
          ref.bytes = scratch.data();
          ref.exact = &dequantizer.exact();
          ref.kind = CellRef::Kind::kExact;
          Attend(queries, {&ref, 1}, &partials_[unit]);
        }
        if (!dequantize_) Attend(queries, refs, &partials_[unit]);
      }
    };
    std::vector<std::thread> threads;
    for (int t = 1; t < n_threads; ++t) threads.emplace_back(work);
    work();
    for (std::thread& thread : threads) thread.join();
    out->resize(static_cast<size_t>(shape_.n_heads * shape_.head_dim_v));
    for (int head = 0; head < shape_.n_kv_heads; ++head) {
      Partial all;
      all.Reset(head_, group);
      for (int64_t s = 0; s < n_segments; ++s) {
        Merge(head_, partials_[static_cast<size_t>(head * n_segments + s)], &all);
      }
      std::vector<float*> rows;
      for (int j = 0; j < group; ++j) rows.push_back(out->data() + (head * group + j) * shape_.head_dim_v);
      Finish(head_, all, rows.data());
    }
  }

 private:
  LayerGeometry shape_;
  LayerCellsOf* cells_;
  bool dequantize_;
  HeadContext head_;
  std::vector<Partial> partials_;
};

int ThreadsOf(int32_t n) { return n > 0 ? n : static_cast<int>(std::max(1u, std::thread::hardware_concurrency())); }

}  // namespace

Result<std::vector<LatencyRow>> MeasureLatency(const LatencyOptions& options) {
  std::vector<LatencyRow> rows;
  const LayerGeometry& shape = options.shape;
  const int n_threads = ThreadsOf(options.n_threads);
  const std::vector<float> q = MakeKv({shape}, kBlockTokens, 1, 9).layers[0].q;
  for (size_t c = 0; c < options.contexts.size(); ++c) {
    const int64_t context = options.contexts[c];
    if (options.on_context) {
      options.on_context(static_cast<int64_t>(c), static_cast<int64_t>(options.contexts.size()));
    }
    if (context < kBlockTokens) {
      return Fail(StatusCode::kInvalidArgument,
                  fmt::format("a context of {} is less than a block of {} tokens", context, kBlockTokens));
    }
    std::vector<std::unique_ptr<LayerCellsOf>> cells;
    std::vector<Way> ways;
    const size_t first = rows.size();
    const auto add = [&](const std::string& codec, const std::string& way, bool dequantize) {
      ways.emplace_back(shape, cells.back().get(), dequantize);
      rows.push_back({.codec = codec,
                      .way = way,
                      .context = context,
                      .bytes = static_cast<uint64_t>(cells.back()->n_blocks) * static_cast<uint64_t>(shape.n_kv_heads) *
                               cells.back()->layout.bytes});
    };
    std::vector<std::string> codecs = {"f16"};
    for (const std::string& codec : options.codecs) {
      if (codec != "f16") codecs.push_back(codec);
    }
    for (const std::string& codec : codecs) {
      auto made = LayerCellsOf::Make(shape, codec, context);
      if (!made) return Fail(made.error());
      cells.push_back(std::move(*made));
      if (codec == "f16") {
        add(codec, "f16", false);
      } else {
        add(codec, "dequantized", true);
        add(codec, "in place", false);
      }
    }
    // All ways in turn, so that what else the machine does hits each alike.
    std::vector<std::vector<double>> times(ways.size());
    std::vector<float> out;
    const auto start = Clock::now();
    const double limit = 1000.0 * options.seconds * static_cast<double>(ways.size());
    for (int round = 0; round < 3 || MillisecondsSince(start) < limit; ++round) {
      if (options.should_stop && options.should_stop()) {
        return Fail(StatusCode::kCancelled, fmt::format("stopped at a context of {}", context));
      }
      for (size_t w = 0; w < ways.size(); ++w) {
        const auto begin = Clock::now();
        ways[w].Step(q, n_threads, &out);
        if (round > 0) times[w].push_back(MillisecondsSince(begin));
      }
    }
    for (size_t w = 0; w < ways.size(); ++w) rows[first + w].ms = Median(times[w]);
    for (size_t w = 0; w < ways.size(); ++w) rows[first + w].ratio = rows[first].ms / rows[first + w].ms;
  }
  if (options.on_context) {
    const auto n = static_cast<int64_t>(options.contexts.size());
    options.on_context(n, n);
  }
  return rows;
}

namespace {

// Appends made or real tokens to sequences of one cache until it has no room.
class CapacityRun {
 public:
  CapacityRun(const CapacityOptions& options, Model* model) : options_(options), model_(model) {
    const KvData made = MakeKv({options.geometry.front()}, kStep, 1, 5);
    // One layer's values serve all layers; of the largest size.
    size_t k = 0, v = 0, q = 0, out = 0;
    for (const LayerGeometry& g : options.geometry) {
      k = std::max(k, static_cast<size_t>(kStep * g.n_kv_heads * g.head_dim_k));
      v = std::max(v, static_cast<size_t>(kStep * g.n_kv_heads * g.head_dim_v));
      q = std::max(q, static_cast<size_t>(kStep * g.n_heads * g.head_dim_k));
      out = std::max(out, static_cast<size_t>(kStep * g.n_heads * g.head_dim_v));
    }
    const auto cycle = [](const std::vector<float>& from, size_t n) {
      std::vector<float> to(n);
      for (size_t i = 0; i < n; ++i) to[i] = from[i % from.size()];
      return to;
    };
    k_ = cycle(made.layers[0].k, k);
    v_ = cycle(made.layers[0].v, v);
    q_ = cycle(made.layers[0].k, q);
    out_.resize(out);
  }

  Result<CapacityRow> Measure(const std::string& codec) {
    CapacityRow row{.shape = options_.shape, .codec = codec};
    KVCELL_FAIL_IF_ERROR(Longest(codec, &row));
    KVCELL_FAIL_IF_ERROR(Widest(codec, &row));
    return row;
  }

 private:
  static constexpr int64_t kStep = 64;

  Result<std::unique_ptr<Cache>> Open(const std::string& codec, int32_t sequences) {
    auto spec = ParseCodec(codec);
    if (!spec) return Fail(spec.error());
    CacheOptions cache;
    cache.codec = *spec;
    cache.geometry = options_.geometry;
    cache.ram_budget = options_.budget;
    cache.max_step_tokens = static_cast<int32_t>(kStep);
    cache.max_sequences = sequences;
    cache.max_threads = ThreadsOf(options_.n_threads);
    return Cache::Open(cache);
  }

  // One step of a single sequence, with or without attention. kOutOfBudget when there is no room.
  Status Append(Cache* cache, SequenceId sequence, int64_t n) {
    // Other tokens in each sequence and block: nothing can be shared by content.
    const int64_t from = cache->Length(sequence) + 31 * sequence;
    for (size_t i = 0; i < tokens_.size(); ++i) tokens_[i] = static_cast<Token>((from + static_cast<int64_t>(i)) % 499);
    const StepItem item{sequence, std::span(tokens_).first(static_cast<size_t>(n))};
    KVCELL_RETURN_IF_ERROR(cache->Begin({&item, 1}));
    for (size_t l = 0; l < options_.geometry.size(); ++l) {
      KVCELL_RETURN_IF_ERROR(cache->Append(static_cast<int>(l), k_.data(), v_.data()));
    }
    return cache->Commit();
  }

  Status Stopped() const {
    return options_.should_stop && options_.should_stop() ? Status(StatusCode::kCancelled, "stopped") : OkStatus();
  }

  Status Longest(const std::string& codec, CapacityRow* row) {
    auto cache = Open(codec, 1);
    if (!cache) return cache.error();
    row->bits = (*cache)->Stats().bits_per_element;
    auto sequence = (*cache)->Create();
    if (!sequence) return sequence.error();
    row->limit = "budget";
    for (;;) {
      KVCELL_RETURN_IF_ERROR(Stopped());
      if (options_.max_context > 0 && (*cache)->Length(*sequence) + kStep > options_.max_context) {
        row->limit = "max_context";
        break;
      }
      const Status status = Append(cache->get(), *sequence, kStep);
      if (status.code() == StatusCode::kOutOfBudget) break;
      KVCELL_RETURN_IF_ERROR(status);
    }
    row->context = (*cache)->Length(*sequence);
    row->context_bytes = (*cache)->Stats().ram_bytes;
    return OkStatus();
  }

  // As many sequences of sequence_tokens as fit. Exact cells are set aside for each when the cache is opened, so the
  // number is looked for by opening caches for more and more.
  Status Widest(const std::string& codec, CapacityRow* row) {
    int64_t fits = 0, fails = 1;
    while (true) {
      KVCELL_RETURN_IF_ERROR(Stopped());
      auto tried = Fits(codec, static_cast<int32_t>(fails));
      if (!tried) return tried.error();
      if (!*tried || fails >= 4096) break;
      fits = fails;
      fails *= 2;
    }
    while (fails - fits > 1) {
      KVCELL_RETURN_IF_ERROR(Stopped());
      const int64_t middle = (fits + fails) / 2;
      auto tried = Fits(codec, static_cast<int32_t>(middle));
      if (!tried) return tried.error();
      (*tried ? fits : fails) = middle;
    }
    row->batch = fits;
    if (fits > 0) return Decode(codec, static_cast<int32_t>(fits), row);
    return OkStatus();
  }

  Result<bool> Fits(const std::string& codec, int32_t n) {
    auto spec = ParseCodec(codec);
    if (!spec) return Fail(spec.error());
    CacheOptions cache;
    cache.codec = *spec;
    cache.geometry = options_.geometry;
    cache.ram_budget = options_.budget;
    cache.max_step_tokens = static_cast<int32_t>(kStep);
    cache.max_sequences = n;
    auto plan = PlanMemory(cache, options_.sequence_tokens + 1, n);
    if (!plan) return Fail(plan.error());
    return plan->total <= options_.budget;
  }

  // Fills the batch for real, then decodes a token of every sequence at a time.
  Status Decode(const std::string& codec, int32_t n, CapacityRow* row) {
    constexpr int kRounds = 3;
    auto cache = Open(codec, n);
    if (!cache) return cache.error();
    std::vector<SequenceId> sequences;
    for (int32_t i = 0; i < n; ++i) {
      auto sequence = (*cache)->Create();
      if (!sequence) return sequence.error();
      for (int64_t at = 0; at < options_.sequence_tokens - kRounds; at += kStep) {
        KVCELL_RETURN_IF_ERROR(Stopped());
        KVCELL_RETURN_IF_ERROR(
            Append(cache->get(), *sequence, std::min(kStep, options_.sequence_tokens - kRounds - at)));
      }
      sequences.push_back(*sequence);
    }
    row->batch_bytes = (*cache)->Stats().ram_bytes;
    std::vector<double> times;
    for (int round = 0; round < kRounds; ++round) {
      KVCELL_RETURN_IF_ERROR(Stopped());
      const auto start = Clock::now();
      for (size_t at = 0; at < sequences.size(); at += kStep) {
        const size_t count = std::min<size_t>(kStep, sequences.size() - at);
        KVCELL_RETURN_IF_ERROR(OneToken(cache->get(), std::span(sequences).subspan(at, count)));
      }
      times.push_back(MillisecondsSince(start));
    }
    row->tokens_per_s = 1000.0 * n / Median(times);
    return OkStatus();
  }

  Status OneToken(Cache* cache, std::span<const SequenceId> sequences) {
    if (model_ != nullptr) {
      std::vector<ModelStep> steps;
      for (const SequenceId id : sequences) {
        steps.push_back({.sequence = id, .tokens = std::span<const Token>(tokens_).first(1), .want_logits = true});
      }
      std::vector<float> logits;
      return model_->Forward(cache, steps, &logits);
    }
    std::vector<StepItem> items;
    for (const SequenceId id : sequences) items.push_back({id, std::span<const Token>(tokens_).first(1)});
    KVCELL_RETURN_IF_ERROR(cache->Begin(items));
    const int n_parts = ThreadsOf(options_.n_threads);
    for (size_t l = 0; l < options_.geometry.size(); ++l) {
      std::vector<std::thread> threads;
      const auto part = [&](int p) {
        cache->Compute(static_cast<int>(l), k_.data(), v_.data(), q_.data(), out_.data(), p, n_parts);
      };
      for (int p = 1; p < n_parts; ++p) threads.emplace_back(part, p);
      part(0);
      for (std::thread& thread : threads) thread.join();
    }
    return cache->Commit();
  }

  const CapacityOptions& options_;
  Model* model_;
  std::vector<Token> tokens_ = std::vector<Token>(kStep, 1);
  std::vector<float> k_, v_, q_, out_;
};

Geometry LlamaShape(int kv_heads) {
  return Geometry(32, LayerGeometry{.n_heads = 32,
                                    .n_kv_heads = kv_heads,
                                    .head_dim_k = 128,
                                    .head_dim_v = 128,
                                    .scale = 1.0f / std::sqrt(128.0f)});
}

}  // namespace

Result<std::vector<CapacityRow>> MeasureCapacity(const CapacityOptions& options) {
  if (options.geometry.empty()) return Fail(StatusCode::kInvalidArgument, "capacity needs a shape with layers");
  if (options.sequence_tokens < 8) return Fail(StatusCode::kInvalidArgument, "sequences must have 8 tokens or more");
  std::unique_ptr<Model> model;
  if (!options.model.empty()) {
    auto loaded = Model::Load(options.model, {.n_threads = options.n_threads, .max_batch = 64});
    if (!loaded) return Fail(loaded.error());
    model = std::move(*loaded);
  }
  CapacityRun run(options, model.get());
  std::vector<CapacityRow> rows;
  for (size_t c = 0; c < options.codecs.size(); ++c) {
    if (options.on_codec) options.on_codec(static_cast<int64_t>(c), static_cast<int64_t>(options.codecs.size()));
    auto row = run.Measure(options.codecs[c]);
    if (!row) return Fail(row.error());
    rows.push_back(*row);
  }
  if (options.on_codec) {
    const auto n = static_cast<int64_t>(options.codecs.size());
    options.on_codec(n, n);
  }
  return rows;
}

Geometry Llama2Shape7B() { return LlamaShape(32); }
Geometry Llama3Shape8B() { return LlamaShape(8); }

}  // namespace kvcell
