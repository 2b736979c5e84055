// The background scrub: reads every block again and again, slowly, so that damage is found before it is needed.
#include <fmt/format.h>
#include <sched.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <chrono>

#include "base/clock.h"
#include "store/store_impl.h"

namespace kvcell {
namespace {

constexpr double kPauseSeconds = 10;  // between two rounds

// Only what nobody else wants of the processor.
void LowerPriority() {
  const sched_param parameters = {};
  (void)::sched_setscheduler(0, SCHED_IDLE, &parameters);
  (void)::setpriority(PRIO_PROCESS, static_cast<id_t>(::syscall(SYS_gettid)), 19);
}

}  // namespace

void StoreImpl::StartScrub(CellVerifier verifier, uint64_t bytes_per_second,
                           std::function<void(const DamagedCell&)> found) {
  if (bytes_per_second == 0 || scrub_.joinable()) return;
  scrub_ = std::thread([this, verifier = std::move(verifier), bytes_per_second, found = std::move(found)] {
    ScrubLoop(verifier, bytes_per_second, found);
  });
}

bool StoreImpl::SleepOrStop(double seconds) {
  std::unique_lock lock(scrub_mutex_);
  return scrub_wake_.wait_for(lock, std::chrono::duration<double>(seconds), [&] { return scrub_stops_; });
}

std::optional<std::pair<BlockRow, int64_t>> StoreImpl::NextToScrub(int64_t id) {
  const std::lock_guard lock(mutex_);
  auto next = index_->NextBlock(id);
  return next ? std::move(*next) : std::nullopt;
}

void StoreImpl::ScrubLoop(const CellVerifier& verifier, uint64_t bytes_per_second,
                          const std::function<void(const DamagedCell&)>& found) {
  LowerPriority();
  for (int64_t id = 0;;) {
    const auto next = NextToScrub(id);
    if (!next) {
      id = 0;
      if (SleepOrStop(kPauseSeconds)) return;
      continue;
    }
    const auto& [row, position] = *next;
    id = row.id;
    for (const auto& place : row.record.places) {
      if (!place) continue;
      CellSetShape shape;
      {
        const std::lock_guard lock(mutex_);
        if (IsDamaged(*place)) continue;
        const auto extent = ExtentOf(*place);
        const auto clear = extent ? segments_->Clear(extent->shape) : std::nullopt;
        if (!clear) continue;  // for Verify to name
        shape = *clear;
      }
      const auto held = segments_->Hold(*place);
      if (!held || !*held) continue;
      auto damaged = CheckBlock(verifier, shape, row.record, *place, position * kBlockTokens);
      // A second look: memory and cables fail too, and a block is given up for good.
      if (damaged) damaged = CheckBlock(verifier, shape, row.record, *place, position * kBlockTokens);
      segments_->Release(*place);
      if (damaged) {
        ReportDamage(*place);
        if (found) found(*damaged);
      }
      const double bytes = static_cast<double>(BlockBytes(shape).value_or(0));
      if (SleepOrStop(bytes / static_cast<double>(bytes_per_second))) return;
    }
  }
}

std::optional<DamagedCell> StoreImpl::CheckBlock(const CellVerifier& verifier, const CellSetShape& shape,
                                                 const BlockRecord& block, const BlockPlace& place, int64_t position) {
  std::vector<std::byte> run;
  for (size_t slot = 0; slot < shape.layers.size(); ++slot) {
    const auto& layer = shape.layers[slot];
    run.resize(size_t{layer.n_cells} * layer.cell_bytes);
    const Status read = ReadRun(shape, place, slot, 1, run.data());
    for (uint16_t head = 0; head < layer.n_cells; ++head) {
      const auto cell = std::span(run).subspan(size_t{head} * layer.cell_bytes, layer.cell_bytes);
      const Status status = read.ok() ? verifier(cell, layer.layer, head, position, block.key) : read;
      if (status.ok()) continue;
      auto [path, offset] = Locate(shape, place, slot, head);
      return DamagedCell{"", layer.layer, head, position, std::move(path), offset, status.message()};
    }
  }
  return std::nullopt;
}

}  // namespace kvcell
