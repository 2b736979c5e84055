// Prepares queries, walks cells in order with one instruction set's kernels, merges and finishes partial results.
#include "attention/attention.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <optional>
#include <utility>

#include "attention/dispatch.h"
#include "attention/kernels.h"
#include "codec/cell_codec.h"
#include "codec/f16.h"

namespace kvcell {

using namespace attention_internal;

struct AttentionAccess {
  class Walk;
  static void Attend(const PreparedQueries& queries, std::span<const CellRef> cells, Partial* state,
                     CellWeight* weights);
  static void Merge(const Partial& from, Partial* into);
  static void CopyRows(const Partial& from, int from_row, int n_rows, int to_row, Partial* to);
  static void RowValues(const HeadContext& head, const Partial& state, size_t row, float* to);
  static void ToTier(const HeadContext& head, const Partial& state, TierPartial* partial);
  static Status FromTier(const HeadContext& head, int n_rows, const TierPartial& partial, Partial* state);
  static void Finish(const HeadContext& head, const Partial& state, float* const* out, const float* sink_logits);
  static void CellMasses(const Partial& state, std::span<const CellWeight> weights, std::span<float> mass);
};

namespace {

constexpr float kNone = -std::numeric_limits<float>::infinity();

constexpr int Pad16(int n) { return (n + 15) / 16 * 16; }

Code CodeOf(const SideLayout& side) {
  switch (side.spec.type) {
    case SideSpec::Type::kInt8:
      return kCodeInt8;
    case SideSpec::Type::kInt2:
      return kCodeInt2;
    case SideSpec::Type::kInt3:
      return kCodeInt3;
    case SideSpec::Type::kInt4:
      return kCodeInt4;
    case SideSpec::Type::kInt5:
      return kCodeInt5;
    case SideSpec::Type::kInt6:
      return kCodeInt6;
    default:
      return kCodeF16;  // and sides for study, which no kernel sees
  }
}

// Of codes that kernels look up as levels and multiply as bytes.
constexpr bool IsLevels(Code code) { return code >= kCodeInt4; }

// Scores of a block of rows against a side that no kernel attends in place: sixteen tokens at a time are decoded to
// f32, [dim][16], and multiplied. Never a whole context, not even a whole cell.
void ScoreDecoded(const CellLayout& layout, const std::byte* cell, int begin, int end, int n_rows, const float* q,
                  int q_stride, float* scores) {
  constexpr int kTile = 16;
  static thread_local std::vector<float> rows, tile;
  const int dim = layout.k.dim;
  rows.resize(static_cast<size_t>(kTile * dim));
  tile.resize(rows.size());
  for (int t = begin / kTile * kTile; t < end; t += kTile) {
    DecodeKeys(layout, cell, t, t + kTile, rows.data());
    for (int i = 0; i < kTile; ++i) {
      for (int d = 0; d < dim; ++d) tile[static_cast<size_t>(d * kTile + i)] = rows[static_cast<size_t>(i * dim + d)];
    }
    for (int r = 0; r < n_rows; ++r) {
      float sum[kTile] = {};
      for (int d = 0; d < dim; ++d) {
        const float factor = q[r * q_stride + d];
        for (int i = 0; i < kTile; ++i) sum[i] += factor * tile[static_cast<size_t>(d * kTile + i)];
      }
      std::copy_n(sum, kTile, scores + r * kBlockTokens + t);
    }
  }
}

// acc[r] += weights of tokens [begin, end) times V, decoded sixteen tokens at a time.
void ValueDecoded(const CellLayout& layout, const std::byte* cell, int begin, int end, int n_rows, const float* w,
                  float* acc, int acc_stride) {
  constexpr int kTile = 16;
  static thread_local std::vector<float> rows;
  const int dim = layout.v.dim;
  rows.resize(static_cast<size_t>(kTile * dim));
  for (int t = begin; t < end; t += kTile) {
    const int n = std::min(kTile, end - t);
    DecodeValues(layout, cell, t, t + n, rows.data());
    for (int r = 0; r < n_rows; ++r) {
      for (int i = 0; i < n; ++i) {
        const float factor = w[r * kBlockTokens + t + i];
        for (int d = 0; d < dim; ++d) acc[r * acc_stride + d] += factor * rows[static_cast<size_t>(i * dim + d)];
      }
    }
  }
}

template <typename T>
void Grow(std::vector<T>* v, size_t n) {
  if (v->size() < n) v->resize(n);
}

// Compared as the floats' bits, which compilers turn into vector code.
float LargestMagnitude(const float* x, int n) {
  int32_t bits = 0;
  for (int i = 0; i < n; ++i) bits = std::max(bits, std::bit_cast<int32_t>(x[i]) & 0x7fffffff);
  return std::bit_cast<float>(bits);
}

// Rounds one group of q [n], a multiple of 4, to integers of at most `top`; returns the factor that undoes it: NaN
// where a value is not finite. In plain loops over bits, which compilers turn into vector code: a step of few rows
// spends as much here as on a whole cell.
template <typename Int>
float RoundGroup(const float* q, int n, float top, Int* out) {
  constexpr float kRound = 12582912.0f;          // 1.5 * 2^23: adding it leaves the rounded integer in the low bits
  const float largest = LargestMagnitude(q, n);  // what is not finite is larger than all that is
  const float inverse = top / largest;
  const bool finite = std::isfinite(largest);
  if (!finite || largest < std::numeric_limits<float>::min() || !std::isfinite(inverse)) {
    std::fill_n(out, n, Int{0});
    return finite ? 0.0f : std::numeric_limits<float>::quiet_NaN();
  }
  for (int i = 0; i < n; ++i) {
    out[i] = static_cast<Int>(std::bit_cast<int32_t>(q[i] * inverse + kRound) - std::bit_cast<int32_t>(kRound));
  }
  return largest / top;
}

// The larger of the sums of magnitudes of a group's two halves (KernelSet::sums16).
int32_t LargerHalf(const int8_t* q, int n) {
  int32_t halves[2] = {0, 0};
  for (int i = 0; i < n; i += 4) {
    halves[0] += std::abs(q[i]) + std::abs(q[i + 1]);
    halves[1] += std::abs(q[i + 2]) + std::abs(q[i + 3]);
  }
  return std::max(halves[0], halves[1]);
}

// RoundGroup to 8 bits, so that no half of the group adds up to more than the levels' limit.
float RoundGroup8(const float* q, int n, const Levels& levels, int8_t* out) {
  const float scale = RoundGroup(q, n, static_cast<float>(kTop8), out);
  const int32_t half = LargerHalf(out, n);
  if (half <= levels.half_limit) return scale;
  // Rounding may have taken a half of each of the n / 2 values off, and may add as much again.
  const float slack = 0.25f * static_cast<float>(n);
  const float room = static_cast<float>(levels.half_limit) - slack - 1.0f;
  return RoundGroup(q, n, static_cast<float>(kTop8) * room / (static_cast<float>(half) + slack), out);
}

// What kernels call a score of 1: they have scores in units of log2, or as the argument of a softcap's tanh.
float ScoreUnit(const HeadContext& head) { return head.softcap > 0.0f ? 1.0f / head.softcap : kLog2E; }

// Half the variance that the noise of levels gives to the score of a rounded group of q [n] with keys of scale 1, in
// units of q's scale.
float NoiseOf(const int8_t* q, int n, float noise, float unit, float q_scale) {
  int32_t norm = 0;
  for (int i = 0; i < n; ++i) norm += q[i] * q[i];
  constexpr float kMost = 1e15f;  // scores of such queries are beyond any noise
  return 0.5f * noise / unit * std::min(q_scale, kMost) * static_cast<float>(norm);
}

// What the integer sum of a group of q starts from: see KernelSet::sums16.
int32_t StartOf(const int8_t* q, int n, int32_t bias, bool sums16) {
  int32_t halves[2] = {0, 0};
  for (int i = 0; i < n; i += 4) {
    halves[0] -= q[i] + q[i + 1];
    halves[1] -= q[i + 2] + q[i + 3];
  }
  halves[0] *= bias;
  halves[1] *= bias;
  if (!sums16) return halves[0] + halves[1];
  return static_cast<int32_t>((static_cast<uint32_t>(halves[0]) & 0xffff) | static_cast<uint32_t>(halves[1]) << 16);
}

// Writes each four bytes of x [n] `copies` times over.
void Repeat(const int8_t* x, int n, int copies, int8_t* out) {
  if (copies == 1) {
    std::copy_n(x, n, out);
    return;
  }
  for (int i = 0; i < n; i += 4) {
    int32_t four;
    std::memcpy(&four, x + i, sizeof(four));
    for (int c = 0; c < copies; ++c, out += 4) std::memcpy(out, &four, sizeof(four));
  }
}

// Work space of one Attend call: big enough for every shape, so nothing is allocated on the way.
struct Scratch {
  alignas(64) float k_scale[kMaxGroups * kBlockTokens];
  alignas(64) float v_scale[kMaxGroups * kBlockTokens];
  alignas(64) float scores[kMaxRows * kBlockTokens];
  alignas(64) int8_t w8[kMaxRows * kMaxGroups * kWeightStride];
  alignas(64) int16_t w16[kMaxRows * kMaxGroups * kBlockTokens];
  float q_noise[kMaxRows * kMaxGroups * 8];
  float w_scale[kMaxRows * kMaxGroups];
  alignas(32) int32_t w_start[kMaxRows * kMaxGroups * 8];
  float bias[kMaxRows];
};

// One side of cells of a kind.
struct Side {
  Code code = kCodeF16;
  const SideLayout* layout = nullptr;  // null for exact cells

  bool in_place() const { return layout == nullptr || layout->in_place; }
  // Codes that kernels multiply as integers, with scales.
  bool is_integer() const { return code != kCodeF16 && in_place(); }
};

}  // namespace

Levels attention_internal::MakeLevels(const SideSpec& side) {
  Levels out;
  const int bits = LevelBits(side.type);
  if (bits == 0 || !AttendedInPlace(side)) return out;
  const LevelTable table = MakeLevelTable(bits, side.levels);
  const auto count = static_cast<size_t>(table.count);
  out.bias = -table.level[0];
  for (size_t i = 0; i < count; ++i) out.biased[i] = static_cast<uint8_t>(table.level[i] + out.bias);
  out.half_limit = 32767 / std::max<int32_t>(table.level[count - 1], -table.level[0]);
  out.noise = LevelNoise(bits, side.levels);
  return out;
}

void PreparedQueries::Prepare(const HeadContext& head, const QueryRows& rows) {
  head_ = &head;
  rows_ = rows;
  kernels_ = &ActiveKernels();
  has_coded_ = false;
  const auto n_rows = static_cast<size_t>(rows.n_rows);
  stride_ = Pad16(head.dk);
  const auto stride = static_cast<size_t>(stride_);
  Grow(&exact_, n_rows * stride);
  first_begin_ = first_end_ = std::numeric_limits<int64_t>::max();
  last_begin_ = last_end_ = std::numeric_limits<int64_t>::min();
  // Scores come out in units of log2; with a softcap as the argument of its tanh.
  const float factor = head.scale * ScoreUnit(head);
  for (size_t r = 0; r < n_rows; ++r) {
    first_begin_ = std::min(first_begin_, rows.begin[r]);
    last_begin_ = std::max(last_begin_, rows.begin[r]);
    first_end_ = std::min(first_end_, rows.end[r]);
    last_end_ = std::max(last_end_, rows.end[r]);
    float* exact = exact_.data() + r * stride;
    for (int d = 0; d < head.dk; ++d) exact[d] = rows.q[r][d] * factor;
    std::fill(exact + head.dk, exact + stride, 0.0f);
  }
}

void PreparedQueries::PrepareCoded() const {
  has_coded_ = true;
  const SideLayout& k = head_->coded.k;
  const Code code = k.in_place ? CodeOf(k) : kCodeF16;
  if (code == kCodeF16) return;  // attended as exact values are, as is what has to be decoded
  const auto n_rows = static_cast<size_t>(rows_.n_rows);
  const auto copies = static_cast<size_t>(kernels_->copies);
  scale_stride_ = k.n_groups * kernels_->copies;
  const auto stride = static_cast<size_t>(stride_);
  Grow(&coded_, n_rows * stride);
  Grow(&scale_, n_rows * static_cast<size_t>(scale_stride_));
  if (code == kCodeInt8) Grow(&int16_, n_rows * stride);
  if (IsLevels(code)) {
    Grow(&start_, n_rows * static_cast<size_t>(scale_stride_));
    Grow(&noise_, n_rows * static_cast<size_t>(scale_stride_));
    noise_sum_.assign(n_rows, 0.0f);
    Grow(&int8_, n_rows * stride * copies);
  }
  const Levels levels = MakeLevels(k.spec);
  int8_t rounded[kMaxHeadDim];
  for (size_t r = 0; r < n_rows; ++r) {
    float* coded = coded_.data() + r * stride;
    std::copy_n(exact_.data() + r * stride, stride, coded);
    RotateInPlace(k, coded);
    for (int g = 0; g < k.n_groups; ++g) {
      const int begin = g * k.spec.group;
      const int n = std::min<int>(k.spec.group, stride_ - begin);
      const size_t at = r * static_cast<size_t>(scale_stride_) + static_cast<size_t>(g) * copies;
      float scale;
      if (code == kCodeInt8) {
        scale = RoundGroup(coded + begin, n, 32767.0f, int16_.data() + r * stride + begin);
      } else {
        // The limit of 16-bit sums on every instruction set, so that all of them multiply with the same integers.
        scale = RoundGroup8(coded + begin, n, levels, rounded);
        std::fill_n(start_.data() + at, copies, StartOf(rounded, n, levels.bias, kernels_->sums16));
        const float noise = NoiseOf(rounded, n, levels.noise, ScoreUnit(*head_), scale);
        std::fill_n(noise_.data() + at, copies, noise);
        noise_sum_[r] += noise * scale;
        Repeat(rounded, n, kernels_->copies, int8_.data() + (r * stride + static_cast<size_t>(begin)) * copies);
      }
      std::fill_n(scale_.data() + at, copies, scale);
    }
  }
}

void Partial::Reset(const HeadContext& head, int n_rows) {
  n_rows_ = n_rows;
  stride_ = Pad16(head.dv);
  const auto rows = static_cast<size_t>(n_rows);
  max_.assign(rows, kNone);
  sum_.assign(rows, 0.0f);
  has_plain_ = has_rotated_ = false;
}

std::vector<float>* Partial::Plain() {
  if (!has_plain_) plain_.assign(static_cast<size_t>(n_rows_) * static_cast<size_t>(stride_), 0.0f);
  has_plain_ = true;
  return &plain_;
}

std::vector<float>* Partial::Rotated() {
  if (!has_rotated_) rotated_.assign(static_cast<size_t>(n_rows_) * static_cast<size_t>(stride_), 0.0f);
  has_rotated_ = true;
  return &rotated_;
}

void Partial::RaiseMax(const KernelSet& kernels, size_t row, float max) {
  if (sum_[row] != 0.0f) {
    const float factor = std::exp2(max_[row] - max);
    const size_t at = row * static_cast<size_t>(stride_);
    sum_[row] *= factor;
    if (has_plain_) kernels.scale(plain_.data() + at, stride_, factor);
    if (has_rotated_) kernels.scale(rotated_.data() + at, stride_, factor);
  }
  max_[row] = max;
}

namespace {

// Rows [begin, end) of a cell that one row sees, as token numbers of the cell; empty where end <= begin.
struct Visible {
  int begin = 0;
  int end = 0;
};

Visible VisibleTokens(const CellRef& cell, const QueryRows& rows, int r) {
  const auto clamp = [&](int64_t position) {
    return static_cast<int>(std::clamp<int64_t>(position - cell.position, cell.first, cell.last));
  };
  return {clamp(rows.begin[r]), clamp(rows.end[r])};
}

// Fetches what the kernels' own prefetching leaves out: scales, offsets, and the header, where the offsets' scale lies.
void PrefetchMetadata(const SideLayout& side, const std::byte* cell) {
  if (side.channel_offset != 0) __builtin_prefetch(cell);
  for (uint32_t at = side.scales; at < side.end; at += 64) __builtin_prefetch(cell + at);
}

}  // namespace

// One Attend call: cell after cell, and the rows that see one in blocks of neighbours.
class AttentionAccess::Walk {
 public:
  Walk(const PreparedQueries& queries, Partial* state, Scratch* scratch)
      : scratch_(*scratch),
        kernels_(*queries.kernels_),
        queries_(queries),
        head_(*queries.head_),
        rows_(queries.rows_),
        state_(*state),
        plain_scores_(head_.softcap <= 0.0f && rows_.alibi_slope == nullptr) {}

  // `next` is the cell that will follow, or this one; `weights` null or [n_rows].
  void OverCell(const CellRef& cell, const CellRef& next, CellWeight* weights) {
    if (cell.last <= cell.first || cell.position + cell.last <= queries_.first_begin_ ||
        cell.position + cell.first >= queries_.last_end_) {
      return;
    }
    if (kind_ != cell.kind) SetKind(cell.kind);
    SetCell(cell, next);
    const bool seen_by_all =
        queries_.last_begin_ <= cell.position + cell.first && queries_.first_end_ >= cell.position + cell.last;
    bool fetch = is_coded();
    for (int row = 0; row < rows_.n_rows;) {
      Block block{.first = row};
      if (seen_by_all) {
        block.n = std::min(kMaxRows, rows_.n_rows - row);
        std::fill_n(block.seen, block.n, Visible{cell.first, cell.last});
        block.begin = cell.first;
        block.end = cell.last;
      } else {
        FindBlock(cell, &block);
      }
      if (block.n == 0) {
        ++row;
        continue;
      }
      Score(cell, block);
      if (fetch) PrefetchMetadata(head_.coded.k, next_);
      Soften(cell, block, weights);
      if (fetch) PrefetchMetadata(head_.coded.v, next_);
      fetch = false;
      AddValues(cell, block);
      row += block.n;
    }
  }

 private:
  bool is_coded() const { return kind_ == CellRef::Kind::kCoded; }

  struct Block {
    int first = 0, n = 0;      // rows
    int begin = 0, end = 0;    // tokens that any of them sees
    Visible seen[kMaxRows]{};  // that each does
  };

  // As many neighbouring rows from block->first on as see something of the cell.
  void FindBlock(const CellRef& cell, Block* block) const {
    block->begin = cell.last;
    block->end = cell.first;
    for (; block->n < kMaxRows && block->first + block->n < rows_.n_rows; ++block->n) {
      const Visible seen = VisibleTokens(cell, rows_, block->first + block->n);
      if (seen.end <= seen.begin) break;
      block->seen[block->n] = seen;
      block->begin = std::min(block->begin, seen.begin);
      block->end = std::max(block->end, seen.end);
    }
  }

  // What the kernels are told of all cells of a kind.
  void SetKind(CellRef::Kind kind) {
    kind_ = kind;
    const CellLayout& coded = head_.coded;
    k_ = v_ = Side{};
    if (is_coded()) {
      if (!queries_.has_coded_) queries_.PrepareCoded();
      if (!has_levels_) {
        k_levels_ = MakeLevels(coded.k.spec);
        v_levels_ = MakeLevels(coded.v.spec);
        has_levels_ = true;
      }
      k_ = {CodeOf(coded.k), &coded.k};
      v_ = {CodeOf(coded.v), &coded.v};
    }
    score_ = ScoreArgs{};
    score_.dim = head_.dk;
    score_.dim_padded = queries_.stride_;
    score_.n_tokens = kBlockTokens;
    score_.q_stride = queries_.stride_;
    score_.bias = scratch_.bias;
    score_.scores = scratch_.scores;
    std::fill_n(scratch_.bias, kMaxRows, 0.0f);
    if (k_.is_integer()) {
      if (IsLevels(k_.code)) score_.q_stride = queries_.stride_ * kernels_.copies;
      score_.group = k_.layout->n_groups == 1 ? kMaxHeadDim : k_.layout->spec.group;
      score_.n_groups = k_.layout->n_groups;
      score_.k_scale = scratch_.k_scale;
      score_.levels = k_levels_.biased.data();
      score_.scale_stride = queries_.scale_stride_;
    }
    value_ = ValueArgs{};
    value_.dim_padded = state_.stride_;
    value_.acc_stride = state_.stride_;
    value_.w = scratch_.scores;
    if (v_.is_integer()) {
      value_.group = v_.layout->n_groups == 1 ? kMaxHeadDim : v_.layout->spec.group;
      value_.n_groups = v_.layout->n_groups;
      value_.levels = v_levels_.biased.data();
      value_.w = IsLevels(v_.code) ? static_cast<const void*>(scratch_.w8) : scratch_.w16;
      value_.w_scale = scratch_.w_scale;
      value_.w_start = scratch_.w_start;
    }
    values_ = is_coded() && coded.v.rotated() ? state_.Rotated()->data() : state_.Plain()->data();
  }

  // What they are told of one cell, whichever the rows.
  void SetCell(const CellRef& cell, const CellRef& next) {
    const CellLayout& coded = head_.coded;
    const size_t k_at = is_coded() ? coded.k.codes : 0, v_at = is_coded() ? coded.v.codes : cell.exact->v;
    score_.codes = cell.bytes + k_at;
    value_.codes = cell.bytes + v_at;
    // Integer codes: V is fetched while K is computed and the next cell's K while V is, so that at most a cell and a
    // half is on its way through L1. f16: memory is the limit, so a whole cell ahead. Where no cell of the same kind
    // follows, this one again (a hit).
    const bool same_layout = next.kind == cell.kind && (is_coded() || next.exact->bytes == cell.exact->bytes);
    next_ = same_layout ? next.bytes : cell.bytes;
    score_.prefetch = k_.code == kCodeF16 ? next_ + k_at : value_.codes;
    value_.prefetch = next_ + (v_.code == kCodeF16 ? v_at : k_at);
    if (!is_coded()) {
      score_.n_tokens = cell.exact->n_tokens;
      return;
    }
    score_.codes_high = cell.bytes + coded.k.codes_high;
    value_.codes_high = cell.bytes + coded.v.codes_high;
    if (coded.k.spec.channel_offset) {
      std::memcpy(&offset_scale_, cell.bytes + offsetof(CellHeader, k_offset_scale), sizeof(offset_scale_));
    }
    const float largest = ExpandScales(cell, k_, scratch_.k_scale);
    largest_square_ = largest * largest;
    ExpandScales(cell, v_, scratch_.v_scale);
  }

  // Returns the largest magnitude.
  float ExpandScales(const CellRef& cell, const Side& side, float* out) {
    if (!side.is_integer()) return 0.0f;
    return kernels_.expand_scales(cell.bytes + side.layout->scales, side.layout->n_groups, side.layout->rows_per_scale,
                                  cell.first, cell.last, out);
  }

  // What the kernels take for the noise of codes in a block of rows, [n][scale_stride]: as prepared, or less where the
  // cell's scales would make it more than kMostNoise.
  const float* NoiseOfBlock(const Block& block, size_t scale_at) {
    const float* const noise = queries_.noise_.data() + scale_at;
    const float* const sum = queries_.noise_sum_.data() + block.first;
    const float most = kMostNoise * ScoreUnit(head_) / largest_square_;
    if (std::none_of(sum, sum + block.n, [&](float s) { return s > most; })) return noise;
    const auto stride = static_cast<size_t>(queries_.scale_stride_);
    for (size_t r = 0; r < static_cast<size_t>(block.n); ++r) {
      const float factor = sum[r] > most ? most / sum[r] : 1.0f;
      for (size_t i = r * stride; i < (r + 1) * stride; ++i) scratch_.q_noise[i] = noise[i] * factor;
    }
    return scratch_.q_noise;
  }

  // scratch_.scores = q . k of a block of rows.
  void Score(const CellRef& cell, const Block& block) {
    const auto row = static_cast<size_t>(block.first), at = static_cast<size_t>(block.n - 1);
    const size_t q_at = row * static_cast<size_t>(queries_.stride_);
    if (!k_.in_place()) {
      ScoreDecoded(head_.coded, cell.bytes, block.begin, block.end, block.n, queries_.exact_.data() + q_at,
                   queries_.stride_, scratch_.scores);
      return;
    }
    score_.begin = block.begin;
    score_.end = block.end;
    if (k_.code == kCodeF16) {
      score_.q = queries_.exact_.data() + q_at;
    } else {
      score_.q = IsLevels(k_.code)
                     ? static_cast<const void*>(queries_.int8_.data() + q_at * static_cast<size_t>(kernels_.copies))
                     : queries_.int16_.data() + q_at;
      const size_t scale_at = row * static_cast<size_t>(queries_.scale_stride_);
      score_.q_scale = queries_.scale_.data() + scale_at;
      score_.q_start = queries_.start_.data() + scale_at;
      if (IsLevels(k_.code)) score_.q_noise = NoiseOfBlock(block, scale_at);
      if (k_.layout->spec.channel_offset) {
        kernels_.offset_bias[at](cell.bytes + k_.layout->channel_offset, offset_scale_, k_.layout->dim_padded,
                                 queries_.coded_.data() + q_at, queries_.stride_, scratch_.bias);
      }
    }
    kernels_.score[k_.code][at](score_);
  }

  // Scores become weights; the state's maxima and sums follow.
  void Soften(const CellRef& cell, const Block& block, CellWeight* weights) {
    const auto row = static_cast<size_t>(block.first);
    for (int b = 0; b < block.n; ++b) {
      const Visible& seen = block.seen[b];
      if (plain_scores_ && seen.begin == 0 && seen.end == kBlockTokens) continue;
      const size_t r = row + static_cast<size_t>(b);
      AdjustArgs adjust;
      adjust.scores = scratch_.scores + b * kBlockTokens;
      adjust.begin = seen.begin;
      adjust.end = seen.end;
      adjust.softcap = head_.softcap > 0.0f ? head_.softcap * kLog2E : 0.0f;
      if (rows_.alibi_slope != nullptr) {
        adjust.has_slope = true;
        adjust.slope = rows_.alibi_slope[r] * kLog2E;
        adjust.first_distance = static_cast<float>(cell.position - (rows_.end[r] - 1));
      }
      kernels_.adjust(adjust);
    }
    float max[kMaxRows], sum[kMaxRows];
    std::copy_n(state_.max_.data() + row, block.n, max);
    kernels_.softmax[static_cast<size_t>(block.n - 1)](scratch_.scores, max, sum);
    for (int b = 0; b < block.n; ++b) {
      const size_t r = row + static_cast<size_t>(b);
      if (max[b] > state_.max_[r]) state_.RaiseMax(kernels_, r, max[b]);
      state_.sum_[r] += sum[b];
      if (weights != nullptr) weights[r] = {max[b], sum[b]};
    }
  }

  // The state's values += weights . v of a block of rows.
  void AddValues(const CellRef& cell, const Block& block) {
    const auto at = static_cast<size_t>(block.n - 1);
    value_.acc = values_ + static_cast<size_t>(block.first) * static_cast<size_t>(state_.stride_);
    if (!v_.in_place()) {
      ValueDecoded(head_.coded, cell.bytes, block.begin, block.end, block.n, scratch_.scores, value_.acc,
                   value_.acc_stride);
      return;
    }
    value_.begin = block.begin;
    value_.end = block.end;
    if (IsLevels(v_.code)) {
      kernels_.weights8[at](scratch_.scores, scratch_.v_scale, value_.n_groups, v_levels_, scratch_.w8,
                            scratch_.w_scale, scratch_.w_start);
    } else if (v_.code == kCodeInt8) {
      kernels_.weights16[at](scratch_.scores, scratch_.v_scale, value_.n_groups, scratch_.w16, scratch_.w_scale);
    }
    kernels_.value[v_.code][at](value_);
  }

  Scratch& scratch_;
  const KernelSet& kernels_;
  const PreparedQueries& queries_;
  const HeadContext& head_;
  const QueryRows& rows_;
  Partial& state_;
  const bool plain_scores_;
  bool has_levels_ = false;
  Levels k_levels_, v_levels_;

  // Of cells of the kind at hand.
  std::optional<CellRef::Kind> kind_;
  Side k_, v_;

  // Of the cell at hand.
  const std::byte* next_ = nullptr;  // the cell to fetch
  float offset_scale_ = 0.0f;
  float largest_square_ = 0.0f;  // of K's scales
  ScoreArgs score_;
  ValueArgs value_;
  float* values_ = nullptr;
};

void AttentionAccess::Attend(const PreparedQueries& queries, std::span<const CellRef> cells, Partial* state,
                             CellWeight* weights) {
  const auto n_rows = static_cast<size_t>(queries.rows_.n_rows);
  if (weights != nullptr) std::fill_n(weights, cells.size() * n_rows, CellWeight{kNone, 0.0f});
  static thread_local Scratch scratch;
  Walk walk(queries, state, &scratch);
  for (size_t i = 0; i < cells.size(); ++i) {
    walk.OverCell(cells[i], cells[std::min(i + 1, cells.size() - 1)],
                  weights == nullptr ? nullptr : weights + i * n_rows);
  }
}

void AttentionAccess::Merge(const Partial& from, Partial* into) {
  const auto stride = static_cast<size_t>(into->stride_);
  // Values that nobody has added to are zeros, which need no adding up.
  const std::pair<const std::vector<float>*, std::vector<float>*> sides[] = {
      {from.has_plain_ ? &from.plain_ : nullptr, from.has_plain_ || into->has_plain_ ? into->Plain() : nullptr},
      {from.has_rotated_ ? &from.rotated_ : nullptr,
       from.has_rotated_ || into->has_rotated_ ? into->Rotated() : nullptr}};
  for (size_t r = 0; r < static_cast<size_t>(into->n_rows_); ++r) {
    if (from.max_[r] == kNone && from.sum_[r] == 0.0f) continue;
    const float max = std::max(from.max_[r], into->max_[r]);
    const float a = into->max_[r] == kNone ? 0.0f : std::exp2(into->max_[r] - max);
    const float b = std::exp2(from.max_[r] - max);
    into->max_[r] = max;
    into->sum_[r] = into->sum_[r] * a + from.sum_[r] * b;
    for (const auto& [x, y] : sides) {
      if (y == nullptr) continue;
      const float* theirs = x == nullptr ? nullptr : x->data() + r * stride;
      float* ours = y->data() + r * stride;
      if (theirs == nullptr) {
        for (size_t c = 0; c < stride; ++c) ours[c] = ours[c] * a;
      } else {
        for (size_t c = 0; c < stride; ++c) ours[c] = ours[c] * a + theirs[c] * b;
      }
    }
  }
}

void AttentionAccess::CopyRows(const Partial& from, int from_row, int n_rows, int to_row, Partial* to) {
  const auto copy = [&](const std::vector<float>& source, std::vector<float>* target, size_t width) {
    std::copy_n(source.begin() + static_cast<std::ptrdiff_t>(static_cast<size_t>(from_row) * width),
                static_cast<size_t>(n_rows) * width,
                target->begin() + static_cast<std::ptrdiff_t>(static_cast<size_t>(to_row) * width));
  };
  const auto stride = static_cast<size_t>(to->stride_);
  const auto clear = [&](std::vector<float>* target) {
    std::fill_n(target->begin() + static_cast<std::ptrdiff_t>(static_cast<size_t>(to_row) * stride),
                static_cast<size_t>(n_rows) * stride, 0.0f);
  };
  copy(from.max_, &to->max_, 1);
  copy(from.sum_, &to->sum_, 1);
  if (from.has_plain_) {
    copy(from.plain_, to->Plain(), stride);
  } else if (to->has_plain_) {
    clear(&to->plain_);
  }
  if (from.has_rotated_) {
    copy(from.rotated_, to->Rotated(), stride);
  } else if (to->has_rotated_) {
    clear(&to->rotated_);
  }
}

// Weighted values of one row, both parts in the basis of exact cells: [dv].
void AttentionAccess::RowValues(const HeadContext& head, const Partial& state, size_t row, float* to) {
  const auto dv = static_cast<size_t>(head.dv);
  const size_t at = row * static_cast<size_t>(state.stride_);
  std::fill_n(to, dv, 0.0f);
  if (state.has_rotated_) {
    std::copy_n(state.rotated_.data() + at, dv, to);
    RotateInPlace(head.coded.v, to);
  }
  if (!state.has_plain_) return;
  for (size_t c = 0; c < dv; ++c) to[c] += state.plain_[at + c];
}

void AttentionAccess::ToTier(const HeadContext& head, const Partial& state, TierPartial* partial) {
  const auto n_rows = static_cast<size_t>(state.n_rows_), dv = static_cast<size_t>(head.dv);
  partial->max.assign(state.max_.begin(), state.max_.begin() + state.n_rows_);
  partial->sum.assign(state.sum_.begin(), state.sum_.begin() + state.n_rows_);
  partial->values.resize(n_rows * dv);
  for (size_t r = 0; r < n_rows; ++r) RowValues(head, state, r, partial->values.data() + r * dv);
}

Status AttentionAccess::FromTier(const HeadContext& head, int n_rows, const TierPartial& partial, Partial* state) {
  state->Reset(head, n_rows);
  const auto rows = static_cast<size_t>(n_rows), dv = static_cast<size_t>(head.dv);
  if (partial.max.size() != rows || partial.sum.size() != rows || partial.values.size() != rows * dv) {
    return Status(StatusCode::kCorruption,
                  fmt::format("the tier answered with {} maxima, {} sums and {} values for {} rows of {}",
                              partial.max.size(), partial.sum.size(), partial.values.size(), n_rows, head.dv));
  }
  const auto finite = [](float x) { return std::isfinite(x); };
  for (size_t r = 0; r < rows; ++r) {
    const bool seen = partial.sum[r] > 0.0f;
    const bool sound =
        seen ? finite(partial.max[r]) && finite(partial.sum[r]) : partial.sum[r] == 0.0f && partial.max[r] == kNone;
    if (!sound || !std::all_of(partial.values.begin() + static_cast<std::ptrdiff_t>(r * dv),
                               partial.values.begin() + static_cast<std::ptrdiff_t>((r + 1) * dv), finite)) {
      state->Reset(head, n_rows);
      return Status(StatusCode::kCorruption, fmt::format("row {} of the tier's answer is not a finite sum", r));
    }
    if (!seen) continue;
    state->max_[r] = partial.max[r];
    state->sum_[r] = partial.sum[r];
    std::copy_n(partial.values.data() + r * dv, dv, state->Plain()->data() + r * static_cast<size_t>(state->stride_));
  }
  return OkStatus();
}

void AttentionAccess::Finish(const HeadContext& head, const Partial& state, float* const* out,
                             const float* sink_logits) {
  const auto dv = static_cast<size_t>(head.dv);
  for (size_t r = 0; r < static_cast<size_t>(state.n_rows_); ++r) {
    float* y = out[r];
    float sum = state.sum_[r];
    if (sink_logits != nullptr) sum += std::exp2(sink_logits[r] * kLog2E - state.max_[r]);
    if (state.sum_[r] == 0.0f) {
      std::fill_n(y, dv, 0.0f);
      continue;
    }
    RowValues(head, state, r, y);
    // Whether zeros have been added on the way depends on what other rows read: the addition here leaves no -0.
    for (size_t c = 0; c < dv; ++c) y[c] = (y[c] + 0.0f) / sum;
  }
}

void AttentionAccess::CellMasses(const Partial& state, std::span<const CellWeight> weights, std::span<float> mass) {
  const auto n_rows = static_cast<size_t>(state.n_rows_);
  for (size_t c = 0; c < mass.size(); ++c) {
    for (size_t r = 0; r < n_rows; ++r) {
      const CellWeight& w = weights[c * n_rows + r];
      if (w.sum > 0.0f) mass[c] += w.sum * std::exp2(w.max - state.max_[r]) / state.sum_[r];
    }
  }
}

void Attend(const PreparedQueries& queries, std::span<const CellRef> cells, Partial* state, CellWeight* weights) {
  AttentionAccess::Attend(queries, cells, state, weights);
}

void Merge(const HeadContext&, const Partial& from, Partial* into) { AttentionAccess::Merge(from, into); }

void CopyRows(const Partial& from, int from_row, int n_rows, int to_row, Partial* to) {
  AttentionAccess::CopyRows(from, from_row, n_rows, to_row, to);
}

void ToTierPartial(const HeadContext& head, const Partial& state, TierPartial* partial) {
  AttentionAccess::ToTier(head, state, partial);
}

Status FromTierPartial(const HeadContext& head, int n_rows, const TierPartial& partial, Partial* state) {
  return AttentionAccess::FromTier(head, n_rows, partial, state);
}

void Finish(const HeadContext& head, const Partial& state, float* const* out, const float* sink_logits) {
  AttentionAccess::Finish(head, state, out, sink_logits);
}

void CellMasses(const Partial& state, std::span<const CellWeight> weights, std::span<float> mass) {
  AttentionAccess::CellMasses(state, weights, mass);
}

}  // namespace kvcell
