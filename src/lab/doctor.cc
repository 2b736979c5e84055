#include "lab/doctor.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <numeric>
#include <utility>

#include "cell/cell_map.h"
#include "cell/stored_map.h"
#include "codec/cell_codec.h"
#include "codec/f16.h"
#include "lab/statistics.h"
#include "store/store.h"

namespace kvcell {
namespace {

// int4 with rotation and Lloyd-Max levels comes to about 0.01, int8 to 0.0001, int3 to 0.03; beyond that answers of
// small models change visibly (docs/codecs.md tells how it was measured).
constexpr double kMuchError = 0.04;
constexpr double kLayerSpread = 4.0;            // times the median layer
constexpr double kManyMisses = 0.2;             // of all reads
constexpr double kMuchUnused = 2.0;             // RAM taken over bytes of cells in it
constexpr uint64_t kSmall = uint64_t{4} << 20;  // below this, whole chunks and set-aside room are all there is to see

// Expected squared error and power of one side: LevelNoise, or of codes that are a scale apart a twelfth of its square.
struct ErrorSum {
  double error = 0, power = 0;
};
void AddSide(const SideLayout& side, const std::byte* cell, const float* values, ErrorSum* sum) {
  if (!side.in_place) return;  // for study: scales of other kinds, and of no known loss
  const auto n = static_cast<size_t>(kBlockTokens * side.dim);
  for (size_t i = 0; i < n; ++i) sum->power += static_cast<double>(values[i]) * static_cast<double>(values[i]);
  if (side.spec.type == SideSpec::Type::kF16) return;
  const int bits = LevelBits(side.spec.type);
  const double noise = bits > 0 ? static_cast<double>(LevelNoise(bits, side.spec.levels)) : 1.0 / 12.0;
  for (int t = 0; t < kBlockTokens; ++t) {
    for (int d = 0; d < side.dim; ++d) {
      uint16_t half = 0;
      std::memcpy(&half, cell + side.scales + ScaleIndex(side, t, d) * 2, sizeof(half));
      const auto scale = static_cast<double>(F16ToF32(half));
      sum->error += noise * scale * scale;
    }
  }
}

}  // namespace

std::vector<DoctorFinding> Diagnose(const DoctorFigures& f) {
  std::vector<DoctorFinding> findings;
  if (!f.errors.empty()) {
    std::vector<double> errors;
    for (const LayerError& layer : f.errors) errors.push_back(layer.error);
    const double mean = std::accumulate(errors.begin(), errors.end(), 0.0) / static_cast<double>(errors.size());
    const double median = Median(errors);
    const LayerError worst = *std::ranges::max_element(f.errors, {}, &LayerError::error);
    if (median > kMuchError) {
      findings.push_back({"quality", "quantizing costs much of the values' accuracy in most layers",
                          fmt::format("expected squared error over power: {:.4f} (mean of layers)", mean),
                          "use a codec with more bits or rotation (--codec i8 or i4), --profile quality, or more "
                          "--recent-blocks; `kvcell lab quality` measures what answers lose"});
    }
    if (worst.error > kLayerSpread * median && worst.error > 1e-3) {
      findings.push_back(
          {"layers", "one layer is coded far worse than the others",
           fmt::format("layer {}: expected error {:.4f}, median of all layers {:.4f}", worst.layer, worst.error,
                       median),
           fmt::format("give that layer more bits in a rule file: codecs: [{{layers: {}, codec: i8}}]", worst.layer)});
    }
  }
  if (f.stats && f.stats->saturated + f.stats->not_finite > 0) {
    findings.push_back({"quality", "the model makes keys or values that f16 can't hold",
                        fmt::format("{} values beyond f16, {} not finite", f.stats->saturated, f.stats->not_finite),
                        "check the model file (`kvcell info -m`): sound weights don't do this"});
  }
  if (f.cells_damaged > 0) {
    findings.push_back(
        {"transition", "stored cells are not what was written",
         fmt::format("{} of {} cells fail their check; the first: {}", f.cells_damaged, f.cells_checked,
                     f.first_damage),
         "kvcell leaves them out and computes their tokens again; look at the disk, and remove or save the "
         "session anew"});
  }
  if (f.stats && f.stats->failed_jobs > 0) {
    findings.push_back({"transition", "work off the token path failed, so cells stayed where they were",
                        fmt::format("{} of {} batches failed", f.stats->failed_jobs, f.stats->jobs),
                        "look at the disk's space and health; `kvcell store verify` checks every cell"});
  }
  if (f.stats) {
    const uint64_t reads = f.stats->reads_ram + f.stats->reads_file;
    const double share = reads == 0 ? 0.0 : static_cast<double>(f.stats->reads_file) / static_cast<double>(reads);
    if (f.stats->thrashed > 0 || share > kManyMisses) {
      findings.push_back(
          {"thrash", "steps get slower with the context: cells go to and fro, or come from the store every time",
           fmt::format("{:.1f} % of reads went to the store, {} blocks went to and fro, {} steps waited up to "
                       "{:.0f} ms",
                       100.0 * share, f.stats->thrashed, f.stats->waits, f.stats->longest_wait_ms),
           "raise --ram-budget, use fewer bits, or a window (--profile edge)"});
    }
    const uint64_t in_ram = f.stats->bytes_by_state[static_cast<size_t>(CellState::kActive)] +
                            f.stats->bytes_by_state[static_cast<size_t>(CellState::kQuantized)];
    const uint64_t exact = f.stats->bytes_by_state[static_cast<size_t>(CellState::kActive)];
    const bool unused =
        f.stats->ram_bytes > kSmall &&
        static_cast<double>(f.stats->ram_bytes) > kMuchUnused * static_cast<double>(std::max<uint64_t>(1, in_ram));
    const bool mostly_exact = f.stats->ram_bytes > kSmall && exact * 2 > in_ram;
    if (f.pinned || unused || mostly_exact) {
      findings.push_back(
          {"memory",
           f.pinned       ? "memory does not shrink: cells are pinned"
           : mostly_exact ? "memory does not shrink: most of it holds exact cells"
                          : "memory does not shrink: much of it is set aside, not in use",
           fmt::format("{} bytes taken, {} of cells in RAM, {} of these exact", f.stats->ram_bytes, in_ram, exact),
           f.pinned       ? "`kvcell ctl unpin`"
           : mostly_exact ? "rules that code cells when they seal (--profile balanced), or fewer --recent-blocks"
                          : "fewer sequences at once, fewer --recent-blocks, smaller steps"});
    }
  }
  if (f.session_missing || f.unsaved_tokens.value_or(0) > 0 || f.promises_nothing) {
    findings.push_back({"invisible", "another process does not see what this one has",
                        f.session_missing ? std::string("the store has no session of that name")
                        : f.unsaved_tokens.value_or(0) > 0
                            ? fmt::format("{} tokens are in memory and not saved", *f.unsaved_tokens)
                            : std::string("durability is none: a save may never reach the store's files"),
                        f.session_missing ? "check --store and --session; `kvcell sessions ls` lists what is there"
                                          : "save (chat: /save), give run a --session, and use --durability process"});
  }
  return findings;
}

Result<DoctorFigures> ExamineSession(Store* store, const std::string& session) {
  DoctorFigures figures;
  const auto record = store->Load(session);
  if (!record && record.error().code() == StatusCode::kNotFound) {
    figures.session_missing = true;
    return figures;
  }
  if (!record) return Fail(record.error());
  const auto map = StoredCellMap(*record);
  if (!map) return Fail(map.error());
  std::vector<ErrorSum> sums(map->layers.size());
  std::vector<std::byte> bytes;
  std::vector<float> k, v;
  for (size_t b = 0; b < record->blocks.size(); ++b) {
    for (const LayerCells& layer : map->layers) {
      const auto& place = record->blocks[b].places[layer.group];
      if (!place) continue;
      for (uint16_t h = 0; h < layer.n_heads; ++h) {
        const CellLayout& layout = layer.coded(h);
        bytes.resize(layout.bytes);
        ++figures.cells_checked;
        Status status =
            store->ReadCells(map->shapes[layer.group], *place, layer.slot(h), layer.head_in_slot(h), 1, bytes.data());
        if (status.ok())
          status = VerifyCell(bytes, layer.number, h, static_cast<int64_t>(b) * kBlockTokens, record->blocks[b].key);
        if (!status.ok()) {
          if (figures.cells_damaged++ == 0) figures.first_damage = status.message();
          continue;
        }
        k.resize(static_cast<size_t>(kBlockTokens * layout.k.dim));
        v.resize(static_cast<size_t>(kBlockTokens * layout.v.dim));
        DecodeCell(layout, bytes.data(), k.data(), v.data());
        AddSide(layout.k, bytes.data(), k.data(), &sums[layer.number]);
        AddSide(layout.v, bytes.data(), v.data(), &sums[layer.number]);
      }
    }
  }
  if (!record->damage.empty() && figures.cells_damaged++ == 0) figures.first_damage = record->damage;
  for (size_t l = 0; l < sums.size(); ++l) {
    if (sums[l].power > 0) figures.errors.push_back({.layer = l, .error = sums[l].error / sums[l].power});
  }
  return figures;
}

}  // namespace kvcell
