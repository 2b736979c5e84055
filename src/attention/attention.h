// Attention of query rows over cells as they lie: raw pointers in, partial softmax sums out; no state, no allocation on
// the way.
//
// The caller cuts the past of a sequence into fixed segments, gets one Partial for each, and merges them in order, so
// that the result does not depend on threads or on how many rows were asked at once (every row is computed
// independently of the others). Online softmax as in FlashAttention (arXiv 2205.14135), split over tokens and merged as
// in Flash-Decoding.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "codec/cell_layout.h"
#include "kvcell/status.h"
#include "kvcell/tier.h"

namespace kvcell {

namespace attention_internal {
struct KernelSet;
}

// What one KV head of one layer needs: shape, score function and the layouts of its cells.
struct HeadContext {
  int32_t dk = 0;
  int32_t dv = 0;
  float scale = 0.0f;
  float softcap = 0.0f;  // <= 0: none; applied before the mask
  CellLayout coded;  // layout of this layer's sealed cells; integer codes need scales >= 0, as EncodeCell writes them
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
  const float* const* q = nullptr;  // [n_rows] pointers to [dk], unrotated, as the model gives them
  const int64_t* begin = nullptr;   // [n_rows] row r sees positions [begin[r], end[r])
  const int64_t* end = nullptr;
  const float* alibi_slope = nullptr;  // [n_rows] or null: score += slope * (position - (end[r] - 1))
};

// Queries in the forms that the kernels read, made once per tile: plain for exact cells; rotated, rounded to integers
// with their scales and their sums when the first coded cell asks for them. `head` and the arrays of `rows` must live
// as long as the queries are attended with; the q vectors are copied.
//
// A score of a key that is attended in place in 2 to 6 bits gets half the variance that the codes' noise gives it,
// before any softcap: scale^2 / 2 * LevelNoise * sum over groups of |q|^2 * (group's scale)^2, in the coded basis. A
// cell whose largest scale would make that more than kMostNoise for a row gets so much less of it. A fitted code is
// what its values are on average, so exp(score) is on average exp(variance / 2) times what its code says; without it
// coded tokens weigh too little beside exact ones and beside those of smaller scales.
//
// A row that holds a NaN or an infinity gives NaN in that row's output and touches no other row. The memory grows once
// and is reused. One thread at a time attends with them.
class PreparedQueries {
 public:
  void Prepare(const HeadContext& head, const QueryRows& rows);
  const HeadContext& head() const { return *head_; }
  const QueryRows& rows() const { return rows_; }

 private:
  friend struct AttentionAccess;
  void PrepareCoded() const;

  const HeadContext* head_ = nullptr;
  const attention_internal::KernelSet* kernels_ = nullptr;
  QueryRows rows_;
  int32_t stride_ = 0;                      // elements from row to row of the arrays below
  int64_t first_begin_ = 0, last_end_ = 0;  // what any row sees
  int64_t last_begin_ = 0, first_end_ = 0;  // what all rows see
  std::vector<float> exact_;  // [n_rows][stride] plain, score scale folded in: for exact cells and f16 codes
  // What PrepareCoded makes.
  mutable bool has_coded_ = false;
  mutable int32_t scale_stride_ = 0;
  mutable std::vector<float> coded_;      // [n_rows][stride] rotated, score scale folded in: for offsets
  mutable std::vector<int16_t> int16_;    // [n_rows][stride] rounded per group: for int8 codes
  mutable std::vector<int8_t> int8_;      // [n_rows][stride * copies] rounded per group: for int2 to int6 codes
  mutable std::vector<float> scale_;      // [n_rows][n_groups][copies] of the rounded forms
  mutable std::vector<int32_t> start_;    // the same: what a group's integer sum starts from (level bias taken off)
  mutable std::vector<float> noise_;      // the same: half the variance of scores (above), in units of scale_
  mutable std::vector<float> noise_sum_;  // [n_rows] what it adds up to with keys of scale 1
};

// Running softmax state of n_rows rows: maximum score, sum of weights, weighted values (rotated and plain kept apart,
// since one rotation at the end serves all cells).
class Partial {
 public:
  // Sizes the state for `head` and n_rows and makes it empty (no token seen).
  void Reset(const HeadContext& head, int n_rows);

 private:
  friend struct AttentionAccess;
  // Makes `max` the reference that a row's sums are relative to.
  void RaiseMax(const attention_internal::KernelSet& kernels, size_t row, float max);
  // Zeros at first.
  std::vector<float>* Plain();
  std::vector<float>* Rotated();

  int32_t n_rows_ = 0;
  int32_t stride_ = 0;      // padded dv
  std::vector<float> max_;  // [n_rows] of scores in units of log2; -inf: no token seen
  std::vector<float> sum_;  // [n_rows]
  // Weighted values. Cells of one kind add to one of the two, so that the other often stays empty.
  bool has_plain_ = false, has_rotated_ = false;
  std::vector<float> plain_;    // [n_rows][stride] in the basis of exact cells
  std::vector<float> rotated_;  // [n_rows][stride] in the basis of coded cells, where that is another one
};

// The weight that one cell got from one row, relative to a maximum that later cells may raise: see CellMasses.
struct CellWeight {
  float max = 0.0f;  // in units of log2
  float sum = 0.0f;
};

// Attends to the cells in order, adding to `state`. Cells that no row sees are skipped. Bytes outside [first, last)
// never influence the result, whatever they hold. `weights`, where given, receives [n_cells][n_rows] for CellMasses.
void Attend(const PreparedQueries& queries, std::span<const CellRef> cells, Partial* state,
            CellWeight* weights = nullptr);

// into = into + from, as if from's cells had been attended after into's (up to float rounding, in a fixed order).
void Merge(const HeadContext& head, const Partial& from, Partial* into);

// Makes rows [to_row, to_row + n_rows) of `to` equal to rows [from_row, from_row + n_rows) of `from`; both states are
// of one head. So rows that have read some cells together go on apart, with the same result as if each had been alone
// throughout.
void CopyRows(const Partial& from, int from_row, int n_rows, int to_row, Partial* to);

// A state as it travels between a tier that attends to its cells and whoever asked: values in the basis of exact cells.
void ToTierPartial(const HeadContext& head, const Partial& state, TierPartial* partial);
// kCorruption where the answer has not n_rows rows of dv finite numbers; `state` is then empty.
Status FromTierPartial(const HeadContext& head, int n_rows, const TierPartial& partial, Partial* state);

// Writes out[r] = [dv] for every row. A row that saw no token gives zeros. `sink_logits` [n_rows], where given, join
// each row's softmax denominator without a value (attention sinks as learned logits).
void Finish(const HeadContext& head, const Partial& state, float* const* out, const float* sink_logits = nullptr);

// The share of each row's attention that went to each cell: mass[c] += sum over rows of the softmax weights of cell c's
// tokens, `weights` [n_cells][n_rows] being what Attend gave and `state` the merged state of all cells that the rows
// saw.
void CellMasses(const Partial& state, std::span<const CellWeight> weights, std::span<float> mass);

// The instruction set in use: "scalar", "avx2", "avx512", "avx512vnni", "neon". Chosen at first use, best first;
// KVCELL_ISA forces one.
std::string_view AttentionIsa();
// All that this machine can run, best first.
std::vector<std::string_view> AttentionIsasFound();
// kUnsupported, naming what is there, where KVCELL_ISA asks for something that this machine lacks. Call before first
// use.
Status CheckForcedIsa();
// Makes queries prepared from now on use `isa`; kUnsupported, changing nothing, where this machine lacks it.
// Thread-safe.
Status UseAttentionIsa(std::string_view isa);

}  // namespace kvcell
