#include "lab/sweep.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <limits>

#include "base/memory_probe.h"
#include "lab/codec_error.h"

namespace kvcell {
namespace {

namespace fs = std::filesystem;

// Squared error and energy of values rounded to 16 uniform levels with one scale for each run of `span` values.
struct Sums {
  double error = 0, energy = 0;
};

void AddRounded(const float* x, size_t n, size_t span, Sums* sums) {
  for (size_t begin = 0; begin < n; begin += span) {
    const size_t end = std::min(n, begin + span);
    float absmax = 0.0f;
    for (size_t i = begin; i < end; ++i) absmax = std::max(absmax, std::fabs(x[i]));
    const float scale = absmax / 7.0f;
    for (size_t i = begin; i < end; ++i) {
      const float y = scale > 0.0f ? std::nearbyint(x[i] / scale) * scale : 0.0f;
      sums->error += static_cast<double>((x[i] - y) * (x[i] - y));
      sums->energy += static_cast<double>(x[i] * x[i]);
    }
  }
}

// Values of one head, token after token.
std::vector<float> HeadRows(const std::vector<float>& values, int64_t n_tokens, int n_heads, int head, int dim) {
  std::vector<float> out;
  for (int64_t t = 0; t < n_tokens; ++t) {
    const auto from = values.begin() + (t * n_heads + head) * dim;
    out.insert(out.end(), from, from + dim);
  }
  return out;
}

class Sweep {
 public:
  Sweep(const KvData& data, const SweepOptions& options) : data_(data), options_(options) {}

  Result<SweepResult> Measure() {
    SweepResult result;
    Granularity(&result);
    KVCELL_FAIL_IF_ERROR(Exact(&result));
    KVCELL_FAIL_IF_ERROR(Next());
    Locality(&result);
    KVCELL_FAIL_IF_ERROR(Next());
    if (!options_.store.empty()) KVCELL_FAIL_IF_ERROR(Reads(&result));
    if (options_.on_part) options_.on_part(kParts, kParts);
    return result;
  }

 private:
  static constexpr int64_t kParts = 16;

  Status Next() {
    if (options_.on_part) options_.on_part(std::min(part_++, kParts), kParts);
    return options_.should_stop && options_.should_stop() ? Status(StatusCode::kCancelled, "stopped") : OkStatus();
  }

  void Granularity(SweepResult* result) {
    std::vector<float> all[2];
    std::vector<std::vector<float>> layers[2], heads[2];
    for (size_t l = 0; l < data_.layers.size(); ++l) {
      const LayerGeometry& g = data_.geometry[l];
      for (const size_t side : {size_t{0}, size_t{1}}) {
        const auto& values = side == 0 ? data_.layers[l].k : data_.layers[l].v;
        all[side].insert(all[side].end(), values.begin(), values.end());
        layers[side].push_back(values);
        for (int h = 0; h < g.n_kv_heads; ++h) {
          heads[side].push_back(
              HeadRows(values, data_.n_tokens, g.n_kv_heads, h, side == 0 ? g.head_dim_k : g.head_dim_v));
        }
      }
    }
    const auto dim = static_cast<size_t>(data_.geometry.front().head_dim_k);
    const auto add = [&](const std::string& scope, double bits, const auto& measure) {
      Sums k, v;
      measure(size_t{0}, &k);
      measure(size_t{1}, &v);
      result->granularity.push_back(
          {scope, bits, k.error / std::max(k.energy, 1e-30), v.error / std::max(v.energy, 1e-30)});
    };
    add("tensor", 0.0, [&](size_t s, Sums* sums) { AddRounded(all[s].data(), all[s].size(), all[s].size(), sums); });
    add("layer", 0.0, [&](size_t s, Sums* sums) {
      for (const auto& x : layers[s]) AddRounded(x.data(), x.size(), x.size(), sums);
    });
    add("head", 0.0, [&](size_t s, Sums* sums) {
      for (const auto& x : heads[s]) AddRounded(x.data(), x.size(), x.size(), sums);
    });
    for (const size_t group : {size_t{128}, size_t{64}, size_t{32}}) {
      add(fmt::format("group {}", group), 16.0 / static_cast<double>(std::min(group, dim)), [&](size_t s, Sums* sums) {
        for (const auto& x : heads[s]) AddRounded(x.data(), x.size(), std::min(group, dim), sums);
      });
    }
  }

  Status Exact(SweepResult* result) {
    for (const int32_t sinks : {0, 1, 4, 16}) {
      for (const int32_t recent : {0, 1, 2}) {
        KVCELL_RETURN_IF_ERROR(Next());
        CodecErrorOptions options{
            .codecs = {options_.codec}, .sinks = sinks, .recent_blocks = recent, .should_stop = options_.should_stop};
        auto rows = MeasureCodecErrors(data_, options);
        if (!rows) return rows.error();
        const auto exact = static_cast<double>(sinks + (recent + 1) * kBlockTokens);
        result->exact.push_back(
            {sinks, recent, rows->front().output, std::min(1.0, exact / static_cast<double>(data_.n_tokens))});
      }
    }
    return OkStatus();
  }

  // Softmax weights of every query, added up by distance in blocks.
  void Locality(SweepResult* result) {
    const int64_t n_blocks = (data_.n_tokens + kBlockTokens - 1) / kBlockTokens;
    std::vector<double> mass(static_cast<size_t>(n_blocks) + 1);
    double first = 0, total = 0;
    std::vector<double> weight;
    for (size_t l = 0; l < data_.layers.size(); ++l) {
      const LayerGeometry& g = data_.geometry[l];
      const LayerValues& values = data_.layers[l];
      for (int64_t i = 0; i < data_.n_queries; i += 4) {
        const int64_t position = data_.n_tokens - data_.n_queries + i;
        const int64_t begin = g.window > 0 ? std::max<int64_t>(0, position - g.window + 1) : 0;
        for (int h = 0; h < g.n_heads; ++h) {
          const float* q = values.q.data() + (i * g.n_heads + h) * g.head_dim_k;
          double max = -std::numeric_limits<double>::infinity(), sum = 0;
          weight.assign(static_cast<size_t>(position + 1), 0.0);
          for (int64_t t = begin; t <= position; ++t) {
            const float* k = values.k.data() + (t * g.n_kv_heads + h / g.group()) * g.head_dim_k;
            float s = 0.0f;
            for (int d = 0; d < g.head_dim_k; ++d) s += q[d] * k[d];
            s *= g.scale;
            if (g.softcap > 0.0f) s = g.softcap * std::tanh(s / g.softcap);
            weight[static_cast<size_t>(t)] = static_cast<double>(s);
            max = std::max(max, static_cast<double>(s));
          }
          for (int64_t t = begin; t <= position; ++t) {
            double& w = weight[static_cast<size_t>(t)];
            w = std::exp(w - max);
            sum += w;
          }
          for (int64_t t = begin; t <= position; ++t) {
            const double share = weight[static_cast<size_t>(t)] / sum;
            total += share;
            if (t < 4) {
              first += share;
            } else {
              mass[static_cast<size_t>(position / kBlockTokens - t / kBlockTokens)] += share;
            }
          }
        }
      }
    }
    if (total <= 0) return;
    result->first_tokens_mass = first / total;
    double sum = 0;
    for (int64_t b = 0; b < n_blocks; ++b) {
      sum += mass[static_cast<size_t>(b)];
      if ((b & (b + 1)) == 0 || b + 1 == n_blocks) {  // 1, 2, 4, 8 ... blocks, and all
        result->locality.push_back({b + 1, sum / std::max(total - first, 1e-30)});
      }
    }
  }

  // A file of the data's size under this codec, read whole: once with its pages in memory, once after they were given
  // up.
  Status Reads(SweepResult* result) {
    std::error_code error;
    fs::create_directories(options_.store, error);
    const std::string path = (fs::path(options_.store) / "sweep.bytes").string();
    constexpr size_t kMiB = size_t{1} << 20;
    constexpr size_t kBytes = 64 * kMiB;
    const auto fail = [&](const char* what) {
      return Status(StatusCode::kIoError, fmt::format("can't {} {}: {}", what, path, std::strerror(errno)));
    };
    const int file = ::open(path.c_str(), O_CREAT | O_RDWR | O_TRUNC | O_CLOEXEC, 0600);
    if (file < 0) return fail("make");
    std::vector<char> buffer(kMiB, 'k');
    Status status = OkStatus();
    for (size_t at = 0; at < kBytes && status.ok(); at += kMiB) {
      if (::pwrite(file, buffer.data(), kMiB, static_cast<off_t>(at)) != static_cast<ssize_t>(kMiB)) {
        status = fail("write");
      }
    }
    if (status.ok() && ::fsync(file) != 0) status = fail("sync");
    for (const bool cold : {false, true}) {
      if (!status.ok()) break;
      if (cold) ::posix_fadvise(file, 0, 0, POSIX_FADV_DONTNEED);
      const uint64_t from_disk = ProbeDiskReads().bytes;
      const auto start = std::chrono::steady_clock::now();
      for (size_t at = 0; at < kBytes; at += kMiB) {
        if (::pread(file, buffer.data(), kMiB, static_cast<off_t>(at)) != static_cast<ssize_t>(kMiB)) {
          status = fail("read");
          break;
        }
      }
      const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
      result->reads.push_back({cold ? "disk" : "page cache", seconds * 1e6 / (kBytes / kMiB), kBytes / seconds / 1e9,
                               static_cast<double>(ProbeDiskReads().bytes - from_disk) / kBytes});
    }
    ::close(file);
    fs::remove(path, error);
    return status;
  }

  const KvData& data_;
  const SweepOptions& options_;
  int64_t part_ = 0;
};

}  // namespace

Result<SweepResult> MeasureSweep(const KvData& data, const SweepOptions& options) {
  return Sweep(data, options).Measure();
}

}  // namespace kvcell
