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
#include <utility>

#include "attention/dispatch.h"
#include "attention/kernels.h"
#include "codec/cell_codec.h"

namespace kvcell {

using namespace attention_internal;

struct AttentionAccess {
  static void Attend(const PreparedQueries& queries, std::span<const CellRef> cells, Partial* state,
                     CellWeight* weights);
  static void Merge(const Partial& from, Partial* into);
  static void CopyRows(const Partial& from, int from_row, int n_rows, int to_row, Partial* to);
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

// Rounds one group of q [n], a multiple of 4, to integers of at most `top`; returns the factor that undoes it: NaN
// where a value is not finite. In plain loops over bits, which compilers turn into vector code: a step of few rows
// spends as much here as on a whole cell.
template <typename Int>
float RoundGroup(const float* q, int n, float top, Int* out) {
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it leaves the rounded integer in the low bits
  constexpr int32_t kInfinity = 0x7f800000;
  int32_t bits = 0;  // of the largest magnitude: these compare as the values do, and what is not finite is larger
  for (int i = 0; i < n; ++i) bits = std::max(bits, std::bit_cast<int32_t>(q[i]) & 0x7fffffff);
  const float largest = std::bit_cast<float>(bits);
  const float inverse = top / largest;
  if (bits >= kInfinity || largest < std::numeric_limits<float>::min() || !std::isfinite(inverse)) {
    std::fill_n(out, n, Int{0});
    return bits >= kInfinity ? std::numeric_limits<float>::quiet_NaN() : 0.0f;
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
  float w_scale[kMaxRows * kMaxGroups];
  alignas(32) int32_t w_start[kMaxRows * kMaxGroups * 8];
  float bias[kMaxRows];
};

// One side of one cell as the kernels see it.
struct Plane {
  Code code = kCodeF16;
  const std::byte* codes = nullptr;
  const std::byte* prefetch = nullptr;
  const SideLayout* side = nullptr;  // null for an exact cell

  bool in_place() const { return side == nullptr || side->in_place; }
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
  return out;
}

void PreparedQueries::Prepare(const HeadContext& head, const QueryRows& rows) {
  head_ = &head;
  rows_ = rows;
  kernels_ = &ActiveKernels();
  const SideLayout& k = head.coded.k;
  const Code code = k.in_place ? CodeOf(k) : kCodeF16;  // what is decoded is attended as exact values are
  const auto n_rows = static_cast<size_t>(rows.n_rows);
  stride_ = Pad16(head.dk);
  const auto copies = static_cast<size_t>(kernels_->copies);
  scale_stride_ = k.n_groups * kernels_->copies;
  const auto stride = static_cast<size_t>(stride_);
  Grow(&exact_, n_rows * stride);
  if (code != kCodeF16) {
    Grow(&coded_, n_rows * stride);
    Grow(&scale_, n_rows * static_cast<size_t>(scale_stride_));
    if (IsLevels(code)) Grow(&start_, n_rows * static_cast<size_t>(scale_stride_));
  }
  if (code == kCodeInt8) Grow(&int16_, n_rows * stride);
  if (IsLevels(code)) Grow(&int8_, n_rows * stride * copies);

  const Levels levels = MakeLevels(k.spec);
  int8_t rounded[kMaxHeadDim];

  first_begin_ = std::numeric_limits<int64_t>::max();
  last_end_ = std::numeric_limits<int64_t>::min();
  // Scores come out in units of log2; with a softcap as the argument of its tanh.
  const float factor = head.softcap > 0.0f ? head.scale / head.softcap : head.scale * kLog2E;
  for (size_t r = 0; r < n_rows; ++r) {
    first_begin_ = std::min(first_begin_, rows.begin[r]);
    last_end_ = std::max(last_end_, rows.end[r]);
    float* exact = exact_.data() + r * stride;
    std::fill_n(exact, stride, 0.0f);
    for (int d = 0; d < head.dk; ++d) exact[d] = rows.q[r][d] * factor;
    if (code == kCodeF16) continue;
    float* coded = coded_.data() + r * stride;
    std::copy_n(exact, stride, coded);
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
  const size_t values = rows * static_cast<size_t>(stride_);
  max_.assign(rows, kNone);
  sum_.assign(rows, 0.0f);
  values_.assign(values, 0.0f);
  rotated_.assign(head.coded.v.rotated() ? values : 0, 0.0f);
}

void Partial::RaiseMax(const KernelSet& kernels, size_t row, float max) {
  if (sum_[row] != 0.0f) {
    const float factor = std::exp2(max_[row] - max);
    const size_t at = row * static_cast<size_t>(stride_);
    sum_[row] *= factor;
    kernels.scale(values_.data() + at, stride_, factor);
    if (!rotated_.empty()) kernels.scale(rotated_.data() + at, stride_, factor);
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

// Fetches what the kernels' own prefetching leaves out: header, scales and offsets.
void PrefetchMetadata(const CellLayout& layout, const std::byte* cell) {
  __builtin_prefetch(cell);
  for (uint32_t at = layout.k.scales; at < layout.k.end; at += 64) __builtin_prefetch(cell + at);
  for (uint32_t at = layout.v.scales; at < layout.v.end; at += 64) __builtin_prefetch(cell + at);
}

}  // namespace

void AttentionAccess::Attend(const PreparedQueries& queries, std::span<const CellRef> cells, Partial* state,
                             CellWeight* weights) {
  static thread_local Scratch scratch;
  const KernelSet& kernels = *queries.kernels_;
  const HeadContext& head = *queries.head_;
  const QueryRows& rows = queries.rows_;
  const CellLayout& coded = head.coded;
  const auto n_rows = static_cast<size_t>(rows.n_rows);
  const Levels k_levels = MakeLevels(coded.k.spec), v_levels = MakeLevels(coded.v.spec);
  const bool plain_scores = head.softcap <= 0.0f && rows.alibi_slope == nullptr;
  if (weights != nullptr) std::fill_n(weights, cells.size() * n_rows, CellWeight{kNone, 0.0f});

  for (size_t i = 0; i < cells.size(); ++i) {
    const CellRef& cell = cells[i];
    if (cell.last <= cell.first || cell.position + cell.last <= queries.first_begin_ ||
        cell.position + cell.first >= queries.last_end_) {
      continue;
    }
    const bool is_coded = cell.kind == CellRef::Kind::kCoded;
    Plane k, v;
    if (is_coded) {
      k = {CodeOf(coded.k), cell.bytes + coded.k.codes, nullptr, &coded.k};
      v = {CodeOf(coded.v), cell.bytes + coded.v.codes, nullptr, &coded.v};
    } else {
      k.codes = cell.bytes;
      v.codes = cell.bytes + cell.exact->v;
    }
    // Integer codes: V is fetched while K is computed and the next cell's K while V is, so that at most a cell and a
    // half is on its way through L1. f16: memory is the limit, so a whole cell ahead. Where no cell of the same kind
    // follows, this one again (a hit).
    const CellRef* next = i + 1 < cells.size() && cells[i + 1].kind == cell.kind ? &cells[i + 1] : &cell;
    const bool same_layout = is_coded || next->exact->bytes == cell.exact->bytes;
    const std::byte* next_bytes = same_layout ? next->bytes : cell.bytes;
    const std::byte* next_k = next_bytes + (k.codes - cell.bytes);
    const std::byte* next_v = next_bytes + (v.codes - cell.bytes);
    k.prefetch = k.code == kCodeF16 ? next_k : v.codes;
    v.prefetch = v.code == kCodeF16 ? next_v : next_k;
    if (is_coded) PrefetchMetadata(coded, next_bytes);

    bool scales_ready = false;
    for (int r0 = 0; r0 < rows.n_rows;) {
      // A block: as many neighbouring rows as see something of this cell.
      Visible seen[kMaxRows];
      int n = 0;
      int union_begin = cell.last, union_end = cell.first;
      for (; n < kMaxRows && r0 + n < rows.n_rows; ++n) {
        seen[n] = VisibleTokens(cell, rows, r0 + n);
        if (seen[n].end <= seen[n].begin) break;
        union_begin = std::min(union_begin, seen[n].begin);
        union_end = std::max(union_end, seen[n].end);
      }
      if (n == 0) {
        ++r0;
        continue;
      }
      if (!scales_ready) {
        scales_ready = true;
        for (const auto& [plane, out] : {std::pair(&k, scratch.k_scale), std::pair(&v, scratch.v_scale)}) {
          if (plane->code == kCodeF16 || !plane->in_place()) continue;
          kernels.expand_scales(cell.bytes + plane->side->scales, plane->side->n_groups, plane->side->rows_per_scale,
                                cell.first, cell.last, out);
        }
      }

      const auto at = static_cast<size_t>(n - 1);
      ScoreArgs score;
      score.codes = k.codes;
      if (is_coded) score.codes_high = cell.bytes + coded.k.codes_high;
      score.prefetch = k.prefetch;
      score.dim = head.dk;
      score.dim_padded = queries.stride_;
      score.begin = union_begin;
      score.end = union_end;
      score.n_tokens = is_coded ? kBlockTokens : cell.exact->n_tokens;
      score.q_stride = queries.stride_;
      score.bias = scratch.bias;
      score.scores = scratch.scores;
      std::fill_n(scratch.bias, kMaxRows, 0.0f);
      const auto row = static_cast<size_t>(r0);
      const size_t q_at = row * static_cast<size_t>(queries.stride_);
      if (k.code == kCodeF16 || !k.in_place()) {
        score.q = queries.exact_.data() + q_at;
      } else {
        if (IsLevels(k.code)) {
          score.q = queries.int8_.data() + q_at * static_cast<size_t>(kernels.copies);
          score.q_stride = queries.stride_ * kernels.copies;
        } else {
          score.q = queries.int16_.data() + q_at;
        }
        score.group = k.side->n_groups == 1 ? kMaxHeadDim : k.side->spec.group;
        score.n_groups = k.side->n_groups;
        score.k_scale = scratch.k_scale;
        score.levels = k_levels.biased.data();
        score.scale_stride = queries.scale_stride_;
        score.q_scale = queries.scale_.data() + row * static_cast<size_t>(queries.scale_stride_);
        score.q_start = queries.start_.data() + row * static_cast<size_t>(queries.scale_stride_);
        if (k.side->spec.channel_offset) {
          float offset_scale;
          std::memcpy(&offset_scale, cell.bytes + offsetof(CellHeader, k_offset_scale), sizeof(offset_scale));
          kernels.offset_bias[at](cell.bytes + k.side->channel_offset, offset_scale, k.side->dim_padded,
                                  queries.coded_.data() + q_at, queries.stride_, scratch.bias);
        }
      }
      if (k.in_place()) {
        kernels.score[k.code][at](score);
      } else {
        ScoreDecoded(coded, cell.bytes, union_begin, union_end, n, queries.exact_.data() + q_at, queries.stride_,
                     scratch.scores);
      }

      ValueArgs value;
      value.codes = v.codes;
      if (is_coded) value.codes_high = cell.bytes + coded.v.codes_high;
      value.prefetch = v.prefetch;
      value.dim_padded = state->stride_;
      value.begin = union_begin;
      value.end = union_end;
      value.w = scratch.scores;
      value.acc_stride = state->stride_;
      value.acc = is_coded && !state->rotated_.empty() ? state->rotated_.data() : state->values_.data();
      value.acc += row * static_cast<size_t>(state->stride_);
      if (v.code != kCodeF16 && v.in_place()) {
        value.group = v.side->n_groups == 1 ? kMaxHeadDim : v.side->spec.group;
        value.n_groups = v.side->n_groups;
        value.levels = v_levels.biased.data();
        value.w = IsLevels(v.code) ? static_cast<const void*>(scratch.w8) : scratch.w16;
        value.w_scale = scratch.w_scale;
        value.w_start = scratch.w_start;
      }
      for (int b = 0; b < n; ++b) {
        if (plain_scores && seen[b].begin == 0 && seen[b].end == kBlockTokens) continue;
        const size_t r = row + static_cast<size_t>(b);
        AdjustArgs adjust;
        adjust.scores = scratch.scores + b * kBlockTokens;
        adjust.begin = seen[b].begin;
        adjust.end = seen[b].end;
        adjust.softcap = head.softcap > 0.0f ? head.softcap * kLog2E : 0.0f;
        if (rows.alibi_slope != nullptr) {
          adjust.has_slope = true;
          adjust.slope = rows.alibi_slope[r] * kLog2E;
          adjust.first_distance = static_cast<float>(cell.position - (rows.end[r] - 1));
        }
        kernels.adjust(adjust);
      }
      float max[kMaxRows], sum[kMaxRows];
      std::copy_n(state->max_.data() + row, n, max);
      kernels.softmax[at](scratch.scores, max, sum);
      for (int b = 0; b < n; ++b) {
        const size_t r = row + static_cast<size_t>(b);
        if (max[b] > state->max_[r]) state->RaiseMax(kernels, r, max[b]);
        state->sum_[r] += sum[b];
        if (weights != nullptr) weights[i * n_rows + r] = {max[b], sum[b]};
      }
      if (!v.in_place()) {
        ValueDecoded(coded, cell.bytes, union_begin, union_end, n, scratch.scores, value.acc, value.acc_stride);
        r0 += n;
        continue;
      }
      if (IsLevels(v.code)) {
        kernels.weights8[at](scratch.scores, scratch.v_scale, value.n_groups, v_levels, scratch.w8, scratch.w_scale,
                             scratch.w_start);
      } else if (v.code == kCodeInt8) {
        kernels.weights16[at](scratch.scores, scratch.v_scale, value.n_groups, scratch.w16, scratch.w_scale);
      }
      kernels.value[v.code][at](value);
      r0 += n;
    }
  }
}

void AttentionAccess::Merge(const Partial& from, Partial* into) {
  const auto stride = static_cast<size_t>(into->stride_);
  for (size_t r = 0; r < static_cast<size_t>(into->n_rows_); ++r) {
    if (from.max_[r] == kNone && from.sum_[r] == 0.0f) continue;
    const float max = std::max(from.max_[r], into->max_[r]);
    const float a = into->max_[r] == kNone ? 0.0f : std::exp2(into->max_[r] - max);
    const float b = std::exp2(from.max_[r] - max);
    into->max_[r] = max;
    into->sum_[r] = into->sum_[r] * a + from.sum_[r] * b;
    const auto add = [&](const std::vector<float>& x, std::vector<float>* y) {
      if (y->empty()) return;
      for (size_t c = r * stride; c < (r + 1) * stride; ++c) (*y)[c] = (*y)[c] * a + x[c] * b;
    };
    add(from.values_, &into->values_);
    add(from.rotated_, &into->rotated_);
  }
}

void AttentionAccess::CopyRows(const Partial& from, int from_row, int n_rows, int to_row, Partial* to) {
  const auto copy = [&](const std::vector<float>& source, std::vector<float>* target, size_t width) {
    if (target->empty()) return;
    std::copy_n(source.begin() + static_cast<std::ptrdiff_t>(static_cast<size_t>(from_row) * width),
                static_cast<size_t>(n_rows) * width,
                target->begin() + static_cast<std::ptrdiff_t>(static_cast<size_t>(to_row) * width));
  };
  const auto stride = static_cast<size_t>(to->stride_);
  copy(from.max_, &to->max_, 1);
  copy(from.sum_, &to->sum_, 1);
  copy(from.values_, &to->values_, stride);
  copy(from.rotated_, &to->rotated_, stride);
}

// Weighted values of one row, both parts in the basis of exact cells: [dv].
static void PlainValues(const HeadContext& head, std::span<const float> values, std::span<const float> rotated,
                        float* to) {
  const auto dv = static_cast<size_t>(head.dv);
  if (rotated.empty()) {
    std::copy_n(values.data(), dv, to);
    return;
  }
  std::copy_n(rotated.data(), dv, to);
  RotateInPlace(head.coded.v, to);
  for (size_t c = 0; c < dv; ++c) to[c] += values[c];
}

void AttentionAccess::ToTier(const HeadContext& head, const Partial& state, TierPartial* partial) {
  const auto n_rows = static_cast<size_t>(state.n_rows_), dv = static_cast<size_t>(head.dv);
  const auto stride = static_cast<size_t>(state.stride_);
  partial->max.assign(state.max_.begin(), state.max_.begin() + state.n_rows_);
  partial->sum.assign(state.sum_.begin(), state.sum_.begin() + state.n_rows_);
  partial->values.resize(n_rows * dv);
  const std::span<const float> values = state.values_, rotated = state.rotated_;
  for (size_t r = 0; r < n_rows; ++r) {
    PlainValues(head, values.subspan(r * stride, stride),
                rotated.empty() ? rotated : rotated.subspan(r * stride, stride), partial->values.data() + r * dv);
  }
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
    std::copy_n(partial.values.data() + r * dv, dv, state->values_.data() + r * static_cast<size_t>(state->stride_));
  }
  return OkStatus();
}

void AttentionAccess::Finish(const HeadContext& head, const Partial& state, float* const* out,
                             const float* sink_logits) {
  for (size_t r = 0; r < static_cast<size_t>(state.n_rows_); ++r) {
    const auto dv = static_cast<size_t>(head.dv);
    const size_t at = r * static_cast<size_t>(state.stride_);
    float* y = out[r];
    float sum = state.sum_[r];
    if (sink_logits != nullptr) sum += std::exp2(sink_logits[r] * kLog2E - state.max_[r]);
    if (state.sum_[r] == 0.0f) {
      std::fill_n(y, dv, 0.0f);
      continue;
    }
    const auto stride = static_cast<size_t>(state.stride_);
    const std::span<const float> values = state.values_, rotated = state.rotated_;
    PlainValues(head, values.subspan(at, stride), rotated.empty() ? rotated : rotated.subspan(at, stride), y);
    for (size_t c = 0; c < dv; ++c) y[c] /= sum;
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
