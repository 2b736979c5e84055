#include "cell/trace.h"

#include <fmt/format.h>

namespace kvcell {

void TransitionTrace::Enable(size_t capacity) {
  const std::lock_guard lock(mutex_);
  capacity_ = capacity;
  ring_.clear();
  next_ = 0;
  start_ = std::chrono::steady_clock::now();
}

void TransitionTrace::Record(const CellRule& rule, int64_t position) {
  const std::lock_guard lock(mutex_);
  if (!ring_.empty()) {
    TransitionRecord& last = ring_[(next_ + ring_.size() - 1) % ring_.size()];
    if (last.event == rule.event && last.from == rule.from && last.to == rule.to && last.position == position) {
      ++last.cells;
      return;
    }
  }
  const auto at = std::chrono::steady_clock::now() - start_;
  const TransitionRecord record{.at_us = std::chrono::duration_cast<std::chrono::microseconds>(at).count(),
                                .event = rule.event,
                                .from = rule.from,
                                .to = rule.to,
                                .position = position,
                                .cells = 1};
  if (ring_.size() < capacity_) {
    ring_.push_back(record);
    return;  // next_ stays 0: the ring's oldest
  }
  ring_[next_] = record;
  next_ = (next_ + 1) % ring_.size();
}

std::vector<TransitionRecord> TransitionTrace::Records() const {
  const std::lock_guard lock(mutex_);
  std::vector<TransitionRecord> records;
  for (size_t i = 0; i < ring_.size(); ++i) records.push_back(ring_[(next_ + i) % ring_.size()]);
  return records;
}

std::string ChromeTrace(const std::vector<TransitionRecord>& records) {
  std::string text = "{\"traceEvents\":[";
  bool first = true;
  for (int state = 0; state < kCellStates; ++state) {
    text += fmt::format("{}{{\"ph\":\"M\",\"name\":\"thread_name\",\"pid\":1,\"tid\":{},\"args\":{{\"name\":\"{}\"}}}}",
                        first ? "" : ",\n", state + 1, CellStateName(static_cast<CellState>(state)));
    first = false;
  }
  for (const TransitionRecord& r : records) {
    text += fmt::format(
        ",\n{{\"ph\":\"i\",\"s\":\"t\",\"name\":\"{}\",\"cat\":\"cell\",\"pid\":1,\"tid\":{},\"ts\":{},\"args\":"
        "{{\"from\":\"{}\",\"to\":\"{}\",\"position\":{},\"cells\":{}}}}}",
        CellEventName(r.event), static_cast<int>(r.to) + 1, r.at_us, r.from ? CellStateName(*r.from) : "none",
        CellStateName(r.to), r.position, r.cells);
  }
  return text + "]}\n";
}

}  // namespace kvcell
