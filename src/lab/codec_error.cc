#include "lab/codec_error.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <utility>

#include "codec/cell_codec.h"
#include "kvcell/codec_plan.h"

namespace kvcell {
namespace {

// 64-byte aligned bytes, as cells are.
class CellBytes {
 public:
  explicit CellBytes(size_t n) : lines_((n + 63) / 64) {}
  std::byte* data() { return reinterpret_cast<std::byte*>(lines_.data()); }

 private:
  struct alignas(64) Line {
    std::byte bytes[64];
  };
  std::vector<Line> lines_;
};

// Sums that a side's errors are made of.
struct SideSums {
  double error = 0, energy = 0, cosine = 0;
  int64_t values = 0, tokens = 0;

  void Add(const SideSums& other) {
    error += other.error;
    energy += other.energy;
    cosine += other.cosine;
    values += other.values;
    tokens += other.tokens;
  }
  SideError Mean() const {
    return {.mse = values > 0 ? error / static_cast<double>(values) : 0,
            .relative = energy > 0 ? error / energy : 0,
            .cosine = tokens > 0 ? cosine / static_cast<double>(tokens) : 1};
  }
};

struct OutputSums {
  double error = 0, energy = 0;
  double Relative() const { return energy > 0 ? error / energy : 0; }
};

std::vector<float> HeadRows(const std::vector<float>& values, int64_t n_tokens, int n_heads, int head, int dim) {
  std::vector<float> out;
  out.reserve(static_cast<size_t>(n_tokens * dim));
  for (int64_t t = 0; t < n_tokens; ++t) {
    const auto from = values.begin() + (t * n_heads + head) * dim;
    out.insert(out.end(), from, from + dim);
  }
  return out;
}

// Tokens that are coded: all of whole blocks but the sinks.
struct CodedRange {
  int64_t begin, end;
};
CodedRange Coded(int64_t n_tokens, int32_t sinks) {
  const int64_t end = n_tokens / kBlockTokens * kBlockTokens;
  return {std::min<int64_t>(sinks, end), end};
}

SideSums Compare(const std::vector<float>& want, const std::vector<float>& got, int dim, const CodedRange& range) {
  SideSums sums;
  const auto n = static_cast<size_t>(dim);
  std::vector<double> mean(n);
  for (int64_t t = range.begin; t < range.end; ++t) {
    for (size_t d = 0; d < n; ++d) mean[d] += static_cast<double>(want[static_cast<size_t>(t) * n + d]);
  }
  for (double& m : mean) m /= static_cast<double>(std::max<int64_t>(1, range.end - range.begin));
  for (int64_t t = range.begin; t < range.end; ++t) {
    double xy = 0, xx = 0, yy = 0;
    for (size_t d = 0; d < n; ++d) {
      const auto x = static_cast<double>(want[static_cast<size_t>(t) * n + d]);
      const auto y = static_cast<double>(got[static_cast<size_t>(t) * n + d]);
      sums.error += (x - y) * (x - y);
      sums.energy += (x - mean[d]) * (x - mean[d]);
      xy += x * y;
      xx += x * x;
      yy += y * y;
    }
    sums.cosine += xx > 0 && yy > 0 ? xy / std::sqrt(xx * yy) : xx == yy ? 1.0 : 0.0;
  }
  sums.tokens = range.end - range.begin;
  sums.values = sums.tokens * dim;
  return sums;
}

// Values of one head as one query reads them: coded where the cache has coded cells for it, else exact.
struct Mixed {
  const std::vector<float>& exact;
  const std::vector<float>& coded;
  int dim;
  int64_t first_exact;  // of the blocks that the query reads exactly
  int32_t sinks;

  const float* Row(int64_t t) const {
    const auto& from = t < sinks || t >= first_exact ? exact : coded;
    return from.data() + t * dim;
  }
};

// Means of K's channels that `calibration` has for the block at `begin`. Sinks take no part, as in block means.
std::vector<float> OffsetsAt(const std::vector<float>& keys, int dim, int64_t begin, int32_t sinks,
                             const Calibration& calibration) {
  const auto n_tokens = static_cast<int64_t>(keys.size()) / dim;
  int64_t from = 0, to = std::min(calibration.prompt, n_tokens);
  if (calibration.every > 0 && begin >= calibration.prompt) {
    to = calibration.prompt + (begin - calibration.prompt) / calibration.every * calibration.every;
    from = std::max<int64_t>(0, to - calibration.over);
  }
  from = std::max<int64_t>(from, sinks);
  std::vector<double> sums(static_cast<size_t>(dim));
  for (int64_t t = from; t < to; ++t) {
    for (size_t d = 0; d < sums.size(); ++d) sums[d] += static_cast<double>(keys[static_cast<size_t>(t * dim) + d]);
  }
  std::vector<float> means;
  for (const double sum : sums)
    means.push_back(static_cast<float>(sum / static_cast<double>(std::max<int64_t>(1, to - from))));
  return means;
}

// To a block's rows [64, dim].
void AddToRows(float* rows, const std::vector<float>& offsets, float factor) {
  for (int t = 0; t < kBlockTokens; ++t) {
    for (const float offset : offsets) *rows++ += factor * offset;
  }
}

void AttendOne(const LayerGeometry& g, const float* q, const Mixed& k, const Mixed& v, int64_t begin, int64_t end,
               std::vector<float>* scores, std::vector<double>* out) {
  scores->resize(static_cast<size_t>(end - begin));
  float max = -std::numeric_limits<float>::infinity();
  for (int64_t t = begin; t < end; ++t) {
    const float* row = k.Row(t);
    float s = 0.0f;
    for (int d = 0; d < g.head_dim_k; ++d) s += q[d] * row[d];
    s *= g.scale;
    if (g.softcap > 0.0f) s = g.softcap * std::tanh(s / g.softcap);
    (*scores)[static_cast<size_t>(t - begin)] = s;
    max = std::max(max, s);
  }
  out->assign(static_cast<size_t>(g.head_dim_v), 0.0);
  double sum = 0;
  for (int64_t t = begin; t < end; ++t) {
    const auto p = static_cast<double>(std::exp((*scores)[static_cast<size_t>(t - begin)] - max));
    sum += p;
    const float* row = v.Row(t);
    for (size_t d = 0; d < out->size(); ++d) (*out)[d] += p * static_cast<double>(row[d]);
  }
  for (double& x : *out) x /= sum;
}

class Measure {
 public:
  Measure(const KvData& data, const CodecErrorOptions& options) : data_(data), options_(options) {}

  Result<std::vector<CodecError>> Codecs() {
    KVCELL_FAIL_IF_ERROR(Check());
    std::vector<CodecError> rows;
    std::vector<CodecSpec> specs;
    std::vector<const Calibration*> calibrations;  // of each row; null: none
    const auto add = [&](const CodecSpec& spec, std::string name, const Calibration* calibration) {
      specs.push_back(spec);
      calibrations.push_back(calibration);
      rows.push_back({.codec = std::move(name), .in_place = AttendedInPlace(spec)});
    };
    for (const std::string& name : options_.codecs) {
      auto spec = ParseCodec(name);
      if (!spec) return Fail(spec.error());
      add(*spec, name, nullptr);
      if (!spec->k.channel_offset) continue;
      for (const Calibration& c : options_.calibrations) add(*spec, fmt::format("{} {}", name, c.Text()), &c);
    }
    if (!options_.calibrations.empty() && rows.size() == options_.codecs.size()) {
      return Fail(StatusCode::kInvalidArgument,
                  "none of these codecs takes channel offsets off K (`off`), so there is nothing to calibrate");
    }
    std::vector<SideSums> k(specs.size()), v(specs.size());
    std::vector<OutputSums> output(specs.size());
    std::vector<double> bytes(specs.size());
    double elements = 0;
    for (size_t l = 0; l < data_.layers.size(); ++l) {
      if (options_.on_layer) options_.on_layer(static_cast<int64_t>(l), static_cast<int64_t>(data_.layers.size()));
      const LayerGeometry& g = data_.geometry[l];
      const double heads = g.n_kv_heads * static_cast<double>(g.head_dim_k + g.head_dim_v);
      elements += heads;
      std::vector<SideSums> layer_k(specs.size()), layer_v(specs.size());
      std::vector<OutputSums> layer_output(specs.size());
      for (int h = 0; h < g.n_kv_heads; ++h) {
        if (options_.should_stop && options_.should_stop()) {
          return Fail(StatusCode::kCancelled, fmt::format("stopped in layer {} of {}", l, data_.layers.size()));
        }
        const Exact exact = ExactHead(l, h);
        for (size_t c = 0; c < specs.size(); ++c) {
          auto coded = CodeHead(data_, l, h, specs[c], options_.sinks, calibrations[c]);
          if (!coded) return Fail(coded.error());
          const CodedRange range = Coded(data_.n_tokens, options_.sinks);
          layer_k[c].Add(Compare(exact.k, coded->k, g.head_dim_k, range));
          layer_v[c].Add(Compare(exact.v, coded->v, g.head_dim_v, range));
          AddOutputs(l, h, exact, coded->k, coded->v, &layer_output[c]);
        }
      }
      for (size_t c = 0; c < specs.size(); ++c) {
        rows[c].layers.push_back({.layer = static_cast<int32_t>(l),
                                  .k = layer_k[c].Mean(),
                                  .v = layer_v[c].Mean(),
                                  .output = layer_output[c].Relative()});
        k[c].Add(layer_k[c]);
        v[c].Add(layer_v[c]);
        output[c].error += layer_output[c].error;
        output[c].energy += layer_output[c].energy;
        const CodecSpec codec = CodecOfLayer(specs[c], l, data_.geometry.size());
        bytes[c] += heads * *CodecBitsPerElement(codec, g.head_dim_k, g.head_dim_v);
      }
    }
    for (size_t c = 0; c < specs.size(); ++c) {
      rows[c].k = k[c].Mean();
      rows[c].v = v[c].Mean();
      rows[c].output = output[c].Relative();
      rows[c].bits = bytes[c] / elements;
    }
    return rows;
  }

  Result<KvStats> Stats(const std::string& codec) {
    KVCELL_FAIL_IF_ERROR(Check());
    auto spec = ParseCodec(codec);
    if (!spec) return Fail(spec.error());
    KvStats stats;
    for (size_t l = 0; l < data_.layers.size(); ++l) {
      if (options_.on_layer) options_.on_layer(static_cast<int64_t>(l), static_cast<int64_t>(data_.layers.size()));
      const LayerGeometry& g = data_.geometry[l];
      OutputSums k_loss, v_loss;
      for (int h = 0; h < g.n_kv_heads; ++h) {
        if (options_.should_stop && options_.should_stop()) {
          return Fail(StatusCode::kCancelled, fmt::format("stopped in layer {} of {}", l, data_.layers.size()));
        }
        const Exact exact = ExactHead(l, h);
        stats.rows.push_back(HeadStatsOf(l, h, 'k', exact.k, g.head_dim_k));
        stats.rows.push_back(HeadStatsOf(l, h, 'v', exact.v, g.head_dim_v));
        auto coded = CodeHead(data_, l, h, *spec, options_.sinks);
        if (!coded) return Fail(coded.error());
        AddOutputs(l, h, exact, coded->k, exact.v, &k_loss);
        AddOutputs(l, h, exact, exact.k, coded->v, &v_loss);
      }
      stats.k_loss.push_back(k_loss.Relative());
      stats.v_loss.push_back(v_loss.Relative());
    }
    stats.finer_k = FarAbove(stats.k_loss);
    stats.finer_v = FarAbove(stats.v_loss);
    return stats;
  }

 private:
  struct Exact {
    std::vector<float> k, v;
  };

  Status Check() const {
    if (data_.n_tokens < kBlockTokens) {
      return Status(
          StatusCode::kInvalidArgument,
          fmt::format("{} tokens are less than a block of {}; nothing would be coded", data_.n_tokens, kBlockTokens));
    }
    for (const Calibration& c : options_.calibrations) {
      if (c.prompt <= options_.sinks || c.prompt > data_.n_tokens || (c.every > 0 && c.over < 1)) {
        return Status(StatusCode::kInvalidArgument,
                      fmt::format("K can't be calibrated on {} tokens: there are {}, of which the first {} stay exact",
                                  c.prompt, data_.n_tokens, options_.sinks));
      }
    }
    return OkStatus();
  }

  Exact ExactHead(size_t l, int h) const {
    const LayerGeometry& g = data_.geometry[l];
    return {HeadRows(data_.layers[l].k, data_.n_tokens, g.n_kv_heads, h, g.head_dim_k),
            HeadRows(data_.layers[l].v, data_.n_tokens, g.n_kv_heads, h, g.head_dim_v)};
  }

  void AddOutputs(size_t l, int h, const Exact& exact, const std::vector<float>& k, const std::vector<float>& v,
                  OutputSums* sums) {
    const LayerGeometry& g = data_.geometry[l];
    const int group = g.group();
    std::vector<double> want, got;
    for (int64_t i = 0; i < data_.n_queries; ++i) {
      const int64_t position = data_.n_tokens - data_.n_queries + i;
      const int64_t begin = g.window > 0 ? std::max<int64_t>(0, position - g.window + 1) : 0;
      const int64_t own = position / kBlockTokens - options_.recent_blocks;
      const int64_t first_exact = std::max<int64_t>(0, own) * kBlockTokens;
      const Mixed exact_k{exact.k, k, g.head_dim_k, 0, 0}, exact_v{exact.v, v, g.head_dim_v, 0, 0};
      const Mixed coded_k{exact.k, k, g.head_dim_k, first_exact, options_.sinks};
      const Mixed coded_v{exact.v, v, g.head_dim_v, first_exact, options_.sinks};
      for (int j = 0; j < group; ++j) {
        const float* q = data_.layers[l].q.data() + (i * g.n_heads + h * group + j) * g.head_dim_k;
        AttendOne(g, q, exact_k, exact_v, begin, position + 1, &scores_, &want);
        AttendOne(g, q, coded_k, coded_v, begin, position + 1, &scores_, &got);
        for (size_t d = 0; d < want.size(); ++d) {
          sums->error += (want[d] - got[d]) * (want[d] - got[d]);
          sums->energy += want[d] * want[d];
        }
      }
    }
  }

  static double Quantile(std::vector<float>* sorted, double q) {
    return static_cast<double>((*sorted)[static_cast<size_t>(q * static_cast<double>(sorted->size() - 1))]);
  }

  static HeadStats HeadStatsOf(size_t layer, int head, char side, const std::vector<float>& values, int dim) {
    HeadStats s;
    s.layer = static_cast<int32_t>(layer);
    s.head = head;
    s.side = side;
    const auto n_channels = static_cast<size_t>(dim);
    const size_t n = values.size() / n_channels;
    double fourth = 0, second = 0;
    for (size_t d = 0; d < n_channels; ++d) {
      double sum = 0, low = std::numeric_limits<double>::infinity(), high = -low;
      for (size_t t = 0; t < n; ++t) {
        const auto x = static_cast<double>(values[t * n_channels + d]);
        sum += x;
        low = std::min(low, x);
        high = std::max(high, x);
      }
      const double mean = sum / static_cast<double>(n);
      double m2 = 0, m4 = 0;
      for (size_t t = 0; t < n; ++t) {
        const double x = static_cast<double>(values[t * n_channels + d]) - mean;
        m2 += x * x;
        m4 += x * x * x * x;
      }
      second += m2;
      fourth += m4;
      m2 /= static_cast<double>(n);
      m4 /= static_cast<double>(n);
      s.channel_mean.push_back(mean);
      s.channel_stddev.push_back(std::sqrt(m2));
      s.channel_min.push_back(low);
      s.channel_max.push_back(high);
      s.channel_kurtosis.push_back(m2 > 0 ? m4 / (m2 * m2) : 0);
    }
    const auto all = static_cast<double>(values.size());
    s.kurtosis = second > 0 ? fourth * all / (second * second) : 0;
    s.mean = std::accumulate(values.begin(), values.end(), 0.0) / all;
    double variance = 0;
    for (const float x : values) variance += std::pow(static_cast<double>(x) - s.mean, 2);
    s.stddev = std::sqrt(variance / all);
    std::vector<float> sorted = values;
    std::sort(sorted.begin(), sorted.end());
    s.min = static_cast<double>(sorted.front());
    s.max = static_cast<double>(sorted.back());
    s.p001 = Quantile(&sorted, 0.001);
    s.p50 = Quantile(&sorted, 0.5);
    s.p999 = Quantile(&sorted, 0.999);
    const auto beyond = std::count_if(values.begin(), values.end(), [&](float x) {
      return std::abs(static_cast<double>(x) - s.mean) > 6.0 * s.stddev;
    });
    s.outliers = static_cast<double>(beyond) / all;
    std::vector<double> spread = s.channel_stddev;
    std::nth_element(spread.begin(), spread.begin() + dim / 2, spread.end());
    const double median = spread[n_channels / 2];
    const auto widest = std::max_element(s.channel_stddev.begin(), s.channel_stddev.end());
    const auto biased = std::max_element(s.channel_mean.begin(), s.channel_mean.end(),
                                         [](double a, double b) { return std::abs(a) < std::abs(b); });
    s.widest_channel = static_cast<int32_t>(widest - s.channel_stddev.begin());
    s.biased_channel = static_cast<int32_t>(biased - s.channel_mean.begin());
    s.widest_ratio = median > 0 ? *widest / median : 0;
    s.biased_ratio = median > 0 ? std::abs(*biased) / median : 0;
    return s;
  }

  static std::vector<int32_t> FarAbove(const std::vector<double>& losses) {
    std::vector<double> sorted = losses;
    std::nth_element(sorted.begin(), sorted.begin() + static_cast<std::ptrdiff_t>(sorted.size() / 2), sorted.end());
    const double median = sorted[sorted.size() / 2];
    std::vector<int32_t> layers;
    for (size_t l = 0; l < losses.size(); ++l) {
      if (losses[l] > 3.0 * median) layers.push_back(static_cast<int32_t>(l));
    }
    return layers;
  }

  const KvData& data_;
  const CodecErrorOptions& options_;
  std::vector<float> scores_;
};

}  // namespace

std::string Calibration::Text() const {
  return every == 0 ? fmt::format("calibrated on {}", prompt)
                    : fmt::format("calibrated on {}, every {} over {}", prompt, every, over);
}

Result<DecodedHead> CodeHead(const KvData& data, size_t layer, int head, CodecSpec codec, int32_t sinks,
                             const Calibration* calibration) {
  const LayerGeometry& g = data.geometry[layer];
  codec = CodecOfLayer(codec, layer, data.geometry.size());
  if (calibration != nullptr) codec.k.channel_offset = false;
  const auto layout = MakeCellLayout(codec, g.head_dim_k, g.head_dim_v);
  if (!layout) return Fail(layout.error());
  const ExactLayout exact_layout = MakeExactLayout(kBlockTokens, g.head_dim_k, g.head_dim_v);
  CellBytes exact(exact_layout.bytes), cell(layout->bytes);
  DecodedHead out{HeadRows(data.layers[layer].k, data.n_tokens, g.n_kv_heads, head, g.head_dim_k),
                  HeadRows(data.layers[layer].v, data.n_tokens, g.n_kv_heads, head, g.head_dim_v)};
  std::vector<float> k(static_cast<size_t>(kBlockTokens * g.head_dim_k)),
      v(static_cast<size_t>(kBlockTokens * g.head_dim_v));
  SanitizeCounts counts;
  const std::vector<float> keys = calibration != nullptr ? out.k : std::vector<float>();
  std::vector<float> offsets(static_cast<size_t>(g.head_dim_k));
  for (int64_t begin = 0; begin + kBlockTokens <= data.n_tokens; begin += kBlockTokens) {
    if (calibration != nullptr) {
      offsets = OffsetsAt(keys, g.head_dim_k, begin, sinks, *calibration);
      AddToRows(out.k.data() + begin * g.head_dim_k, offsets, -1.0f);
    }
    for (int t = 0; t < kBlockTokens; ++t) {
      WriteExactToken(exact_layout, exact.data(), t, out.k.data() + (begin + t) * g.head_dim_k,
                      out.v.data() + (begin + t) * g.head_dim_v, &counts);
    }
    const int first = begin == 0 ? sinks : 0;
    EncodeCell(*layout, exact_layout, exact.data(), first, cell.data());
    DecodeCell(*layout, cell.data(), k.data(), v.data());
    std::copy(k.begin() + first * g.head_dim_k, k.end(), out.k.begin() + (begin + first) * g.head_dim_k);
    std::copy(v.begin() + first * g.head_dim_v, v.end(), out.v.begin() + (begin + first) * g.head_dim_v);
    if (calibration != nullptr) AddToRows(out.k.data() + begin * g.head_dim_k, offsets, 1.0f);
  }
  return out;
}

Result<std::vector<CodecError>> MeasureCodecErrors(const KvData& data, const CodecErrorOptions& options) {
  return Measure(data, options).Codecs();
}

Result<KvStats> MeasureStats(const KvData& data, const std::string& codec, const CodecErrorOptions& options) {
  return Measure(data, options).Stats(codec);
}

}  // namespace kvcell
