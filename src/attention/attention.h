// Attention of query rows over cells as they lie: raw pointers in, partial softmax sums out; no state, no allocation on the way.
//
// The caller cuts the past of a sequence into fixed segments, gets one Partial for each, and merges them in order, so that the
// result does not depend on threads or on how many rows were asked at once (every row is computed independently of the others).
// Online softmax as in FlashAttention (arXiv 2205.14135), split over tokens and merged as in Flash-Decoding.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "codec/cell_layout.h"
#include "kvcell/status.h"

namespace kvcell {

// What one KV head of one layer needs: shape, score function and the layouts of its cells.
struct HeadContext {
  int32_t dk = 0;
  int32_t dv = 0;
  float scale = 0.0f;
  float softcap = 0.0f;     // <= 0: none; applied before the mask
  CellLayout coded;         // layout of this layer's sealed cells
};

struct CellRef {
  enum class Kind : uint8_t { kCoded, kExact };
  const std::byte* bytes = nullptr;
  const ExactLayout* exact = nullptr;  // layout of an exact cell; null for a coded one
  int64_t position = 0;                // of the cell's token 0
  int16_t first = 0;                   // tokens [first, last) of the cell hold values; the rest may be poison
  int16_t last = 0;
  Kind kind = Kind::kCoded;
};

// Query rows that share a KV head: GQA group, queries of a prefill tile, sequences that share blocks.
struct QueryRows {
  int32_t n_rows = 0;
  const float* const* q = nullptr;     // [n_rows] pointers to [dk], unrotated, as the model gives them
  const int64_t* begin = nullptr;      // [n_rows] row r sees positions [begin[r], end[r])
  const int64_t* end = nullptr;
  const float* alibi_slope = nullptr;  // [n_rows] or null: score += slope * (position - (end[r] - 1))
};

// Queries in the forms that the kernels read (rotated, rounded to int8 with their scales, per-group sums), made once per tile.
class PreparedQueries {
 public:
  void Prepare(const HeadContext& head, const QueryRows& rows);
  const HeadContext& head() const { return *head_; }
  const QueryRows& rows() const { return rows_; }

 private:
  friend struct AttentionAccess;
  const HeadContext* head_ = nullptr;
  QueryRows rows_;
  std::vector<std::byte> storage_;  // grows once, reused
};

// Running softmax state of n_rows rows: maximum score, sum of weights, weighted values (rotated and plain kept apart, since
// one rotation at the end serves all cells).
class Partial {
 public:
  // Sizes the state for `head` and n_rows and makes it empty (no token seen).
  void Reset(const HeadContext& head, int n_rows);

 private:
  friend struct AttentionAccess;
  int32_t n_rows_ = 0;
  std::vector<float> storage_;
};

// Attends to the cells in order, adding to `state`. Cells that no row sees are skipped. Bytes outside [first, last) never
// influence the result, whatever they hold.
void Attend(const PreparedQueries& queries, std::span<const CellRef> cells, Partial* state);

// into = into + from, as if from's cells had been attended after into's (up to float rounding, in a fixed order).
void Merge(const HeadContext& head, const Partial& from, Partial* into);

// Writes out[r] = [dv] for every row. A row that saw no token gives zeros.
void Finish(const HeadContext& head, const Partial& state, float* const* out);

// The instruction set in use: "scalar", "avx2", "avx512", "neon". Chosen at first use, best first; KVCELL_ISA forces one.
std::string_view AttentionIsa();
// All that this machine can run, best first.
std::vector<std::string_view> AttentionIsasFound();
// kUnsupported, naming what is there, where KVCELL_ISA asks for something that this machine lacks. Call before first use.
Status CheckForcedIsa();

}  // namespace kvcell
