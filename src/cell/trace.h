// Transitions as they happen, for people who want to see them: a ring of the newest, off unless asked for.
#pragma once

#include <chrono>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "cell/state_machine.h"

namespace kvcell {

// Cells of one block that made the same move one after the other.
struct TransitionRecord {
  int64_t at_us = 0;  // since the trace began
  CellEvent event = CellEvent::kTokenAppend;
  std::optional<CellState> from;
  CellState to = CellState::kActive;
  int64_t position = 0;  // of the block
  uint32_t cells = 0;
};

// Thread-safe: one writer, any number of readers.
class TransitionTrace {
 public:
  // Keeps the newest `capacity` records from now on; 0: none.
  void Enable(size_t capacity);
  bool enabled() const { return capacity_ != 0; }
  void Add(const CellRule& rule, int64_t position) {
    if (capacity_ != 0) Record(rule, position);
  }
  std::vector<TransitionRecord> Records() const;  // oldest first

 private:
  void Record(const CellRule& rule, int64_t position);

  mutable std::mutex mutex_;
  size_t capacity_ = 0;
  std::vector<TransitionRecord> ring_;
  size_t next_ = 0;
  std::chrono::steady_clock::time_point start_;
};

// Chrome's trace event format (chrome://tracing, Perfetto): one instant event a record, rows by target state.
std::string ChromeTrace(const std::vector<TransitionRecord>& records);

}  // namespace kvcell
