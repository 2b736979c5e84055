// The classic troubles of a KV cache, told from figures: which one shows the trouble, and what to change.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "kvcell/cache.h"
#include "kvcell/status.h"

namespace kvcell {

class Store;

// Expected squared error of a layer's coded values over their power, estimated from the cells' own scales.
struct LayerError {
  size_t layer = 0;
  double error = 0;
};

// What is known of a run or of a stored session; what is not known is not judged.
struct DoctorFigures {
  std::vector<LayerError> errors;  // of layers whose codecs are attended in place: those of the others tell none
  int64_t cells_checked = 0, cells_damaged = 0;
  std::string first_damage;
  std::optional<CacheStats> stats;  // of a running process
  bool pinned = false;
  std::optional<int64_t> unsaved_tokens;  // in RAM, not in the store
  bool session_missing = false;           // named, but the store has none of that name
  bool promises_nothing = false;          // durability none
};

struct DoctorFinding {
  std::string trouble;  // "quality", "transition", "thrash", "invisible", "memory", "layers"
  std::string says;     // one sentence for people
  std::string figure;   // the figure and its value
  std::string change;   // what to change
};

std::vector<DoctorFinding> Diagnose(const DoctorFigures& figures);

// Figures of a stored session, read without a model: every cell is verified, and its error estimated.
Result<DoctorFigures> ExamineSession(Store* store, const std::string& session);

}  // namespace kvcell
