// A tier in a process of its own: cells go there once and never come back; it attends to them and answers with partial
// sums, all over shared memory.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "cell/cell_map.h"
#include "kvcell/tier.h"

namespace kvcell {

class ProcessTier final : public CellTier {
 public:
  // Forks the process that will hold the cells of `map`. Call while this process has one thread.
  static Result<std::shared_ptr<ProcessTier>> Start(const CellMap& map);
  ~ProcessTier() override;

  pid_t pid() const { return pid_; }
  int64_t reads() const { return reads_; }
  int64_t answers() const { return answers_; }
  // The holder answers nonsense from now on.
  enum class Lie : int32_t { kNone = 0, kNotANumber = 1, kTooFewRows = 2 };
  void SetLie(Lie lie);

  std::string_view TierName() const override { return "remote"; }
  Result<std::vector<BlockPlace>> CreateCells(const CellSetShape& shape, uint32_t n_blocks,
                                              const CellSource& cell) override;
  void DestroyCells(const BlockPlace& place) override;
  Status ReadCells(const CellSetShape& shape, const BlockPlace& place, size_t layer_slot, uint16_t head_begin,
                   uint16_t n, std::byte* dst) override;
  Status ReadRun(const CellSetShape& shape, const BlockPlace& place, size_t layer_slot, uint32_t n_blocks,
                 std::byte* dst) override;
  void ReportDamage(const BlockPlace&) override {}
  std::pair<std::string, uint64_t> Locate(const CellSetShape&, const BlockPlace& place, size_t,
                                          uint16_t) const override {
    return {"process " + std::to_string(pid_), place.offset};
  }
  bool Attends() const override { return true; }
  Status Attend(const TierQuery& query, TierPartial* partial) override;

  struct Mailbox;  // in shared memory

 private:
  ProcessTier() = default;
  // Has the holder do what the mailbox says; kIoError where it has died.
  Status Ask();

  Mailbox* box_ = nullptr;
  pid_t pid_ = -1;
  std::mutex mutex_;  // one question at a time
  uint64_t last_extent_ = 0;
  std::atomic<int64_t> reads_{0}, answers_{0};
};

}  // namespace kvcell
