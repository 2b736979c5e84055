// One layer of a step: K and V become cells, then every query row attends to its past.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <exception>

#include "cache/cache_impl.h"
#include "codec/f16.h"

namespace kvcell {
namespace {

// A sealed cell that rules have left exact, or made exact again. A replica that recent_blocks keeps for nearer queries
// is QUANTIZED or PERSISTED: farther ones read its coded bytes, wherever these are.
bool ReadsExactly(const Block& block, const CellEntry& cell) {
  return cell.state == CellState::kActive && cell.exact != kNoSlot && (cell.coded == kNoSlot || block.sealed);
}

}  // namespace

void CacheImpl::Compute(int layer, const float* k, const float* v, const float* q, float* out, int part,
                        int n_parts) noexcept {
  if (!in_step_) return;
  if (n_parts < 1 || static_cast<size_t>(n_parts) > workers_.size()) {
    KeepError(Status(
        StatusCode::kInvalidArgument,
        fmt::format("Compute in {} parts, but 1..max_threads = {} are allowed; raise it", n_parts, workers_.size())));
    return;
  }
  if (Status status = CheckLayer("Compute", layer); !status.ok()) return KeepError(std::move(status));
  if (part < 0 || part >= n_parts) {
    KeepError(Status(StatusCode::kInvalidArgument, fmt::format("Compute of part {} of {}", part, n_parts)));
    return barrier_.Await(barrier_.Arrive(n_parts));  // the other parts wait for this one
  }
  try {
    AppendPart(layer, k, v, part, n_parts);
  } catch (const std::exception& e) {
    KeepError(Status(StatusCode::kInternal, e.what()));
  }
  const uint32_t appended = barrier_.Arrive(n_parts);
  try {
    AttendPart(layer, q, out, part, appended);
  } catch (const std::exception& e) {
    KeepError(Status(StatusCode::kInternal, e.what()));
  }
  barrier_.Await(appended);  // whatever happened, nobody goes on to the next layer alone
}

Status CacheImpl::Append(int layer, const float* k, const float* v) {
  if (!in_step_) return Status(StatusCode::kInvalidArgument, "Append: no step has begun; call Begin first");
  KVCELL_RETURN_IF_ERROR(CheckLayer("Append", layer));
  AppendPart(layer, k, v, 0, 1);
  return error_;
}

Status CacheImpl::Attend(int layer, const float* q, float* out) {
  if (!in_step_) return Status(StatusCode::kInvalidArgument, "Attend: no step has begun; call Begin first");
  KVCELL_RETURN_IF_ERROR(CheckLayer("Attend", layer));
  AttendPart(layer, q, out, 0, std::nullopt);
  return error_;
}

Status CacheImpl::CheckLayer(std::string_view call, int layer) const {
  const size_t n = memory_->map().layers.size();
  if (layer >= 0 && static_cast<size_t>(layer) < n) return OkStatus();
  return {StatusCode::kInvalidArgument, fmt::format("{} of layer {}, but the geometry has 0..{}", call, layer, n - 1)};
}

// A cell that nothing was written to holds what somebody else left there: a layer that a sequence's first step leaves
// out stays left out, and nobody attends to it.
Status CacheImpl::CheckLayersOf(std::vector<bool>* left_out) const {
  const auto& layers = memory_->map().layers;
  size_t n_blocks = 0;
  for (const StepSequence& item : step_) n_blocks += item.blocks.size();
  const auto wrong = [](size_t layer, std::string_view what) {
    return Status(
        StatusCode::kInvalidArgument,
        fmt::format("layer {} of the step was {}; Compute or Append every layer, all its parts, once before Commit",
                    layer, what));
  };
  left_out->clear();
  for (size_t layer = 0; layer < layers.size(); ++layer) {
    const uint32_t n = n_appended_[layer].load(std::memory_order_relaxed);
    if (n == n_blocks * layers[layer].n_heads) continue;
    if (n != 0) return wrong(layer, "appended in part or twice");
    left_out->resize(layers.size());
    (*left_out)[layer] = true;
  }
  for (const StepSequence& item : step_) {
    const std::vector<bool>& before = item.sequence->left_out;
    if (item.sequence->tokens.empty() || before == *left_out) continue;
    for (size_t layer = 0; layer < layers.size(); ++layer) {
      const bool was = !before.empty() && before[layer], is = !left_out->empty() && (*left_out)[layer];
      if (was != is) return wrong(layer, is ? "left out" : "left out by the sequence's earlier steps");
    }
  }
  return OkStatus();
}

void CacheImpl::KeepError(Status status) {
  std::lock_guard lock(error_mutex_);
  if (error_.ok()) error_ = std::move(status);
}

void CacheImpl::AppendPart(int layer_index, const float* k, const float* v, int part, int n_parts) {
  const LayerCells& layer = memory_->map().layers[static_cast<size_t>(layer_index)];
  SanitizeCounts counts;
  int unit = 0;
  uint32_t n_mine = 0;
  for (const StepSequence& item : step_) {
    for (const StepBlock& step : item.blocks) {
      for (uint16_t head = 0; head < layer.n_heads; ++head) {
        if (unit++ % n_parts != part) continue;
        AppendBlock(layer, layer_index, step, head, k, v, &counts);
        ++n_mine;
      }
    }
  }
  n_appended_[static_cast<size_t>(layer_index)].fetch_add(n_mine, std::memory_order_relaxed);
  if (counts.saturated != 0) saturated_.fetch_add(counts.saturated, std::memory_order_relaxed);
  if (counts.not_finite != 0) not_finite_.fetch_add(counts.not_finite, std::memory_order_relaxed);
}

void CacheImpl::AppendBlock(const LayerCells& layer, int layer_index, const StepBlock& step, uint16_t head,
                            const float* k, const float* v, SanitizeCounts* counts) {
  Block& block = *step.block;
  const CellEntry& cell = block.cells[layer.first_cell + head];
  auto* exact = const_cast<std::byte*>(ExactCell(layer, step, head));
  const auto dk = static_cast<size_t>(layer.geometry.head_dim_k);
  const auto dv = static_cast<size_t>(layer.geometry.head_dim_v);
  for (int32_t t = step.begin; t < step.end; ++t) {
    const auto row = static_cast<size_t>(step.first_row + (t - step.begin)) * layer.n_heads + head;
    WriteExactToken(layer.open, exact, t, k + row * dk, v + row * dv, counts);
  }
  if (!block.sinks.empty() && step.begin < memory_->map().sinks) {
    CopyExactTokens(layer.open, exact, step.begin, std::min(step.end, memory_->map().sinks), layer.sink,
                    memory_->sink(layer, block.sinks[layer.first_cell + head]), step.begin);
  }
  if (!step.seals || cell.coded == kNoSlot) return;  // the rules may leave a sealed cell exact
  std::byte* coded = memory_->coded(layer, head, cell);
  EncodeCell(layer.coded(head), layer.open, exact, block.position == 0 ? memory_->map().sinks : 0, coded);
  SealHeader(coded, static_cast<uint16_t>(layer_index), head, static_cast<uint64_t>(block.position), block.key.data(),
             block.generation);
}

const std::byte* CacheImpl::ExactCell(const LayerCells& layer, const StepBlock& step, uint16_t head) const {
  if (step.scratch >= 0) {
    return scratch_.data() + (static_cast<size_t>(step.scratch) * layer.n_heads + head) * layer.open.bytes;
  }
  return memory_->exact(layer, step.block->cells[layer.first_cell + head]);
}

// Adds the rows of a tile for one KV head: [query][query head of the group].
void CacheImpl::AddRows(const LayerCells& layer, const Tile& tile, uint16_t head, const float* q, float* out,
                        std::vector<const float*>* rows_q, std::vector<float*>* rows_out, std::vector<int64_t>* begin,
                        std::vector<int64_t>* end) const {
  const StepBlock& step = tile.owner->blocks[tile.index];
  const auto n_heads = static_cast<size_t>(layer.geometry.n_heads);
  const auto group = static_cast<size_t>(layer.geometry.group());
  const auto dk = static_cast<size_t>(layer.geometry.head_dim_k);
  const auto dv = static_cast<size_t>(layer.geometry.head_dim_v);
  const int64_t window = layer.geometry.window;
  const auto n_rows = static_cast<size_t>(RowsOf(layer, tile));
  for (size_t r = 0; r < n_rows; ++r) {
    const size_t query = r / group;
    const size_t row = (static_cast<size_t>(step.first_row) + query) * n_heads + head * group + r % group;
    const int64_t position = step.block->position + step.begin + static_cast<int64_t>(query);
    rows_q->push_back(q + row * dk);
    rows_out->push_back(out + row * dv);
    begin->push_back(window > 0 ? std::max<int64_t>(0, position - window + 1) : 0);
    end->push_back(position + 1);
  }
}

void CacheImpl::SetRows(const LayerCells& layer, const Tile& tile, uint16_t head, const float* q, float* out,
                        Worker* worker) const {
  worker->q.clear();
  worker->out.clear();
  worker->begin.clear();
  worker->end.clear();
  AddRows(layer, tile, head, q, out, &worker->q, &worker->out, &worker->begin, &worker->end);
}

// The rows of some tiles for one KV head. All segments of a sequence, and all that the same sequences share, have the
// same rows: of few rows preparing costs as much as several cells.
const KeptRows& CacheImpl::PreparedRows(int layer_index, std::span<const uint32_t> tiles, uint16_t head, const float* q,
                                        float* out, Worker* worker) const {
  constexpr int kMostRows = 64;  // of more, one head's are kept, not one of each
  const LayerCells& layer = memory_->map().layers[static_cast<size_t>(layer_index)];
  int n_rows = 0;
  for (const uint32_t t : tiles) n_rows += RowsOf(layer, tiles_[t]);
  const size_t slot = n_rows <= kMostRows ? size_t{1} + head : 0;
  if (worker->kept.size() <= slot) worker->kept.resize(slot + 1);
  KeptRows& kept = worker->kept[slot];
  if (kept.head == head && std::ranges::equal(kept.tiles, tiles)) return kept;
  kept.head = head;
  kept.tiles.assign(tiles.begin(), tiles.end());
  kept.q.clear();
  kept.out.clear();
  kept.begin.clear();
  kept.end.clear();
  for (const uint32_t t : tiles) AddRows(layer, tiles_[t], head, q, out, &kept.q, &kept.out, &kept.begin, &kept.end);
  kept.queries.Prepare(heads_[layer.first_cell + head], {.n_rows = n_rows,
                                                         .q = kept.q.data(),
                                                         .begin = kept.begin.data(),
                                                         .end = kept.end.data(),
                                                         .alibi_slope = nullptr});
  return kept;
}

// The exact cells that a tile reads, last of all: sinks, replicas of recent blocks, its own block.
Status CacheImpl::ExactCells(const LayerCells& layer, const Tile& tile, uint16_t head, Worker* worker) {
  const StepSequence& item = *tile.owner;
  const size_t own = item.first_block + tile.index;
  const size_t n_recent = std::min(own, static_cast<size_t>(options_.recent_blocks));
  const uint32_t cell_index = layer.first_cell + head;
  worker->cells.clear();
  worker->away.clear();
  for (size_t b = own - n_recent; b <= own; ++b) {
    const bool in_step = b >= item.first_block;
    const StepBlock* step = in_step ? &item.blocks[b - item.first_block] : nullptr;
    const Block& block = in_step ? *step->block : *item.sequence->blocks[b];
    CellRef cell;
    cell.position = block.position;
    cell.last = static_cast<int16_t>(in_step ? step->end : kBlockTokens);
    if (block.cells[cell_index].state == CellState::kEvicted && !in_step) {
      evicted_skips_.fetch_add(1, std::memory_order_relaxed);
      continue;
    }
    if (in_step || block.cells[cell_index].exact != kNoSlot) {
      cell.kind = CellRef::Kind::kExact;
      cell.exact = &layer.open;
      cell.bytes = in_step ? ExactCell(layer, *step, head) : memory_->exact(layer, block.cells[cell_index]);
    } else {
      // A replica that is gone (after a cut): the coded cell stands in, and the read is counted as approximate.
      auto bytes =
          memory_->CodedForRead(block, layer, head, worker->ring.data() + worker->cells.size() * layer.widest_coded());
      if (!bytes) return bytes.error();
      cell.bytes = bytes->bytes;
      cell.first = static_cast<int16_t>(block.position == 0 ? memory_->map().sinks : 0);
      approximate_reads_.fetch_add(1, std::memory_order_relaxed);
    }
    worker->cells.push_back(cell);
  }
  const Block& first = item.first_block == 0 ? *item.blocks[0].block : *item.sequence->blocks[0];
  const bool first_is_exact = !worker->cells.empty() && worker->cells.front().position == 0 &&
                              worker->cells.front().kind == CellRef::Kind::kExact;
  if (!first_is_exact && !first.sinks.empty()) {
    CellRef cell;
    cell.kind = CellRef::Kind::kExact;
    cell.exact = &layer.sink;
    cell.bytes = memory_->sink(layer, first.sinks[cell_index]);
    cell.last = static_cast<int16_t>(memory_->map().sinks);
    worker->cells.insert(worker->cells.begin(), cell);
  }
  return OkStatus();
}

// The cells of blocks [begin, end) of a tile's past, but for those before `first_seen`: coded, from the store where
// they are not in RAM, or exact where the rules have it so.
Status CacheImpl::CodedCells(const LayerCells& layer, const Tile& tile, uint16_t head, size_t begin, size_t end,
                             int64_t first_seen, Worker* worker, CellReads* reads) {
  worker->cells.clear();
  worker->away.clear();
  std::byte* ring = worker->ring.data();
  for (size_t b = begin; b < end; ++b) {
    const Block& block = BlockAt(tile, b);
    if (block.position + kBlockTokens <= first_seen) continue;
    const CellEntry& entry = block.cells[layer.first_cell + head];
    if (block.sealed && entry.state == CellState::kEvicted) {
      evicted_skips_.fetch_add(1, std::memory_order_relaxed);
      continue;
    }
    CellRef cell;
    if (ReadsExactly(block, entry)) {
      cell.kind = CellRef::Kind::kExact;
      cell.exact = &layer.open;
      cell.bytes = memory_->exact(layer, entry);
    } else if (entry.coded == kNoSlot && block.places[layer.group] && tier_->Attends()) {
      worker->away.push_back({.place = *block.places[layer.group],
                              .position = block.position,
                              .first = block.position == 0 ? memory_->map().sinks : 0});
      ++reads->away;
      memory_->NoteMiss(entry, 1);
      continue;
    } else {
      auto bytes = memory_->CodedForRead(block, layer, head, ring);
      if (!bytes) return bytes.error();
      if (bytes->from != CellMemory::ReadFrom::kRam) memory_->NoteMiss(entry, 1);
      if (bytes->from == CellMemory::ReadFrom::kMapped) ++reads->mapped;
      if (bytes->from == CellMemory::ReadFrom::kRing) {
        ring += layer.widest_coded();
        ++reads->ring;
      }
      cell.bytes = bytes->bytes;
    }
    cell.position = block.position;
    cell.first = static_cast<int16_t>(block.position == 0 ? memory_->map().sinks : 0);
    cell.last = kBlockTokens;
    worker->cells.push_back(cell);
  }
  return OkStatus();
}

// Adds what the tier makes of the cells that it attends to itself.
Status CacheImpl::AttendAway(const LayerCells& layer, uint16_t head, const PreparedQueries& queries, Worker* worker,
                             Partial* state) {
  if (worker->away.empty()) return OkStatus();
  const QueryRows& rows = queries.rows();
  const HeadContext& context = heads_[layer.first_cell + head];
  const auto n_rows = static_cast<size_t>(rows.n_rows), dk = static_cast<size_t>(context.dk);
  worker->away_q.resize(n_rows * dk);
  for (size_t r = 0; r < n_rows; ++r) std::copy_n(rows.q[r], dk, worker->away_q.data() + r * dk);
  const TierQuery query{.shape = &memory_->map().shapes[layer.group],
                        .layer_slot = layer.slot(head),
                        .head = layer.head_in_slot(head),
                        .model_head = head,
                        .cells = worker->away,
                        .n_rows = rows.n_rows,
                        .head_dim_k = context.dk,
                        .head_dim_v = context.dv,
                        .scale = context.scale,
                        .softcap = context.softcap,
                        .q = worker->away_q.data(),
                        .begin = rows.begin,
                        .end = rows.end};
  KVCELL_RETURN_IF_ERROR(tier_->Attend(query, &worker->answer));
  KVCELL_RETURN_IF_ERROR(FromTierPartial(context, rows.n_rows, worker->answer, &worker->answered));
  Merge(context, worker->answered, state);
  return OkStatus();
}

// Adds segment `segment` of the tile's past to `state`; the one after the coded segments is the exact part.
Status CacheImpl::AttendSegment(const LayerCells& layer, const Tile& tile, uint16_t head, int32_t segment,
                                const PreparedQueries& queries, Worker* worker, Partial* state) {
  CellReads reads;
  const size_t first_visible = FirstVisible(layer, tile.owner->first_block + tile.index);
  if (segment == tile.n_segments) {
    KVCELL_RETURN_IF_ERROR(ExactCells(layer, tile, head, worker));
    // Behind a window the sinks come right before its first block, as if what lies between had never been.
    const auto gap = static_cast<int64_t>(first_visible) * kBlockTokens - memory_->map().sinks;
    if (first_visible > 0 && gap > 0 && !worker->cells.empty() && worker->cells.front().exact == &layer.sink) {
      const CellRef sinks = worker->cells.front();
      worker->cells.erase(worker->cells.begin());
      KVCELL_RETURN_IF_ERROR(AttendTurnedSinks(layer, head, static_cast<size_t>(gap), queries, sinks, worker, state));
    }
  } else {
    const size_t begin = (tile.first_segment + static_cast<size_t>(segment)) * kSegmentBlocks;
    const size_t end = std::min(tile.n_coded, begin + kSegmentBlocks);
    KVCELL_RETURN_IF_ERROR(
        CodedCells(layer, tile, head, std::max(begin, first_visible), end, queries.rows().begin[0], worker, &reads));
  }
  CellWeight* weights = nullptr;
  if (worker->weighs) {
    const size_t at = worker->weights.size();
    worker->weights.resize(at + worker->cells.size() * static_cast<size_t>(queries.rows().n_rows));
    weights = worker->weights.data() + at;
    for (const CellRef& cell : worker->cells) {
      worker->weighed.push_back(cell.exact == &layer.sink ? -1 : cell.position);
    }
  }
  ::kvcell::Attend(queries, worker->cells, state, weights);
  KVCELL_RETURN_IF_ERROR(AttendAway(layer, head, queries, worker, state));
  CountReads(reads, worker->cells.size(), 1);
  return OkStatus();
}

// Of n_cells that were read here once for n_tiles.
void CacheImpl::CountReads(const CellReads& reads, uint64_t n_cells, size_t n_tiles) {
  const uint64_t from_file = reads.ring + reads.mapped + reads.away;
  if (from_file != 0) reads_file_.fetch_add(from_file, std::memory_order_relaxed);
  if (reads.mapped != 0) reads_mapped_.fetch_add(reads.mapped, std::memory_order_relaxed);
  n_cells += reads.away;
  reads_ram_.fetch_add(n_cells - from_file, std::memory_order_relaxed);
  if (n_tiles > 1) reads_shared_.fetch_add(n_cells * (n_tiles - 1), std::memory_order_relaxed);
}

// The sinks' part of an exact segment when rules have cut out `gap_tokens` positions behind them: keys stay as they
// are, the query is turned back by as much (StreamingLLM, arXiv 2309.17453).
Status CacheImpl::AttendTurnedSinks(const LayerCells& layer, uint16_t head, size_t gap_tokens,
                                    const PreparedQueries& queries, const CellRef& sinks, Worker* worker,
                                    Partial* state) {
  const RopeSpec& rope = options_.rope[layer.number];
  const auto dk = static_cast<size_t>(layer.geometry.head_dim_k);
  const QueryRows& rows = queries.rows();
  const auto n_rows = static_cast<size_t>(rows.n_rows);
  worker->turned.resize(n_rows * dk);
  worker->turned_q.resize(n_rows);
  for (size_t r = 0; r < n_rows; ++r) {
    worker->turned_q[r] = worker->turned.data() + r * dk;
    std::copy_n(rows.q[r], dk, worker->turned.data() + r * dk);
  }
  for (size_t i = 0; i < dk / 2; ++i) {
    const double factor = rope.factors.empty() ? 1.0 : static_cast<double>(rope.factors[i]);
    const double angle =
        -static_cast<double>(gap_tokens) * static_cast<double>(rope.scale) / factor *
        std::pow(static_cast<double>(rope.base), -2.0 * static_cast<double>(i) / static_cast<double>(dk));
    const auto c = static_cast<float>(std::cos(angle)), s = static_cast<float>(std::sin(angle));
    const size_t a = rope.halves ? i : 2 * i, b = rope.halves ? i + dk / 2 : 2 * i + 1;
    for (size_t r = 0; r < n_rows; ++r) {
      float* q = worker->turned.data() + r * dk;
      const float x = q[a], y = q[b];
      q[a] = x * c - y * s;
      q[b] = x * s + y * c;
    }
  }
  worker->sink_queries.Prepare(
      heads_[layer.first_cell + head],
      {.n_rows = rows.n_rows, .q = worker->turned_q.data(), .begin = rows.begin, .end = rows.end});
  ::kvcell::Attend(worker->sink_queries, {&sinks, 1}, state);
  reads_ram_.fetch_add(1, std::memory_order_relaxed);
  return OkStatus();
}

void CacheImpl::AttendPart(int layer_index, const float* q, float* out, int part, std::optional<uint32_t> appended) {
  Worker& worker = workers_[static_cast<size_t>(part)];
  const LayerCells& layer = memory_->map().layers[static_cast<size_t>(layer_index)];
  for (KeptRows& kept : worker.kept) kept.tiles.clear();
  if (const auto after = static_cast<size_t>(layer_index) + 1; part == 0 && after < memory_->map().layers.size()) {
    memory_->PrefetchLayer(memory_->map().layers[after]);
  }
  // What was there before the step waits for nobody. Then whole tiles, of these the last ones first, which have the
  // longest past; the short units fill the gaps at the end.
  auto& next = next_unit_[static_cast<size_t>(layer_index)];
  const size_t n_past = n_past_groups_ * layer.n_heads;
  const size_t n_whole = n_past + whole_tiles_.size() * layer.n_heads;
  const size_t n_units = n_whole + (groups_.size() - n_past_groups_) * layer.n_heads;
  for (size_t unit = next.fetch_add(1); unit < n_units; unit = next.fetch_add(1)) {
    const auto head = static_cast<uint16_t>(unit % layer.n_heads);
    if (unit >= n_past && appended) {
      barrier_.Await(*appended);
      appended.reset();
    }
    if (unit >= n_past && unit < n_whole) {
      AttendWhole(layer_index, tiles_[whole_tiles_[(unit - n_past) / layer.n_heads]], head, q, out, &worker);
    } else {
      const size_t group = unit / layer.n_heads - (unit < n_past ? 0 : whole_tiles_.size());
      AttendGroup(layer_index, groups_[group], head, q, out, &worker);
    }
  }
}

void CacheImpl::AttendWhole(int layer_index, const Tile& tile, uint16_t head, const float* q, float* out,
                            Worker* worker) {
  const LayerCells& layer = memory_->map().layers[static_cast<size_t>(layer_index)];
  const HeadContext& context = heads_[layer.first_cell + head];
  SetRows(layer, tile, head, q, out, worker);
  const QueryRows rows{.n_rows = static_cast<int32_t>(worker->q.size()),
                       .q = worker->q.data(),
                       .begin = worker->begin.data(),
                       .end = worker->end.data()};
  worker->queries.Prepare(context, rows);
  worker->running.Reset(context, rows.n_rows);
  worker->weighs = weighs_;
  worker->weights.clear();
  worker->weighed.clear();
  for (int32_t segment = 0; segment <= tile.n_segments; ++segment) {
    worker->segment.Reset(context, rows.n_rows);
    if (Status status = AttendSegment(layer, tile, head, segment, worker->queries, worker, &worker->segment);
        !status.ok()) {
      KeepError(std::move(status));
      break;
    }
    Merge(context, worker->segment, &worker->running);
  }
  if (weighs_) NoteMass(layer, tile, head, worker);
  worker->weighs = false;
  Finish(context, worker->running, worker->out.data());
}

// Moves each cell's mass a quarter of the way to what this step gave it.
void CacheImpl::NoteMass(const LayerCells& layer, const Tile& tile, uint16_t head, Worker* worker) {
  worker->mass.assign(worker->weighed.size(), 0.0f);
  CellMasses(worker->running, worker->weights, worker->mass);
  const auto n_rows = static_cast<float>(worker->q.size());
  for (size_t i = 0; i < worker->weighed.size(); ++i) {
    const auto b = static_cast<size_t>(worker->weighed[i] / kBlockTokens);
    if (worker->weighed[i] < 0 || b >= tile.owner->first_block) continue;
    CellEntry& cell = tile.owner->sequence->blocks[b]->cells[layer.first_cell + head];
    cell.mass_f16 = F32ToF16(0.75f * F16ToF32(cell.mass_f16) + 0.25f * worker->mass[i] / n_rows);
  }
}

// One segment of one tile, or of all tiles whose segment begins alike: into a Partial for each tile. Whoever finishes a
// tile's last segment merges them in order.
void CacheImpl::AttendGroup(int layer_index, const SegmentGroup& group, uint16_t head, const float* q, float* out,
                            Worker* worker) {
  const LayerCells& layer = memory_->map().layers[static_cast<size_t>(layer_index)];
  const HeadContext& context = heads_[layer.first_cell + head];
  if (group.tiles.size() > 1) {
    if (worker->shared.empty()) worker->shared.push_back(std::make_unique<SharedRows>());
    SharedRows& rows = *worker->shared[0];
    rows.tiles = group.tiles;
    int n_rows = 0;
    for (const uint32_t t : group.tiles) n_rows += RowsOf(layer, tiles_[t]);
    rows.state.Reset(context, n_rows);
    AttendShared(layer_index, group, head, static_cast<size_t>(group.segment) * kSegmentBlocks, 0, q, out, worker);
    return;
  }
  const Tile& tile = tiles_[group.tiles[0]];
  const PreparedQueries& queries = PreparedRows(layer_index, group.tiles, head, q, out, worker).queries;
  Partial& state = split_units_[group.tiles[0] * split_heads_ + head]->partials[static_cast<size_t>(group.segment)];
  state.Reset(context, queries.rows().n_rows);
  if (Status status = AttendSegment(layer, tile, head, group.segment, queries, worker, &state); !status.ok()) {
    KeepError(std::move(status));
  }
  FinishSplit(layer_index, group.tiles[0], head, q, out, worker);
}

// The rows of worker->shared[depth] have read the segment's cells before block `from` together: now those that all of
// its tiles have in common, then each part of the tiles that go on alike by itself. Every row reads the same cells in
// the same order as it would alone, so the result is the same to the bit.
void CacheImpl::AttendShared(int layer_index, const SegmentGroup& group, uint16_t head, size_t from, size_t depth,
                             const float* q, float* out, Worker* worker) {
  const LayerCells& layer = memory_->map().layers[static_cast<size_t>(layer_index)];
  const HeadContext& context = heads_[layer.first_cell + head];
  SharedRows& rows = *worker->shared[depth];
  const size_t segment_end = (static_cast<size_t>(group.segment) + 1) * kSegmentBlocks;
  const auto end_of = [&](uint32_t t) { return std::min(tiles_[t].n_coded, segment_end); };
  size_t end = end_of(rows.tiles[0]);
  for (const uint32_t t : rows.tiles) {
    size_t same = from;
    while (same < std::min(end, end_of(t)) && &BlockAt(tiles_[t], same) == &BlockAt(tiles_[rows.tiles[0]], same))
      ++same;
    end = same;
  }
  if (end > from) {
    const KeptRows& kept = PreparedRows(layer_index, rows.tiles, head, q, out, worker);
    CellReads reads;
    Status status = CodedCells(layer, tiles_[rows.tiles[0]], head, from, end, *std::ranges::min_element(kept.begin),
                               worker, &reads);
    if (!status.ok()) KeepError(std::move(status));
    ::kvcell::Attend(kept.queries, worker->cells, &rows.state);
    if (Status away = AttendAway(layer, head, kept.queries, worker, &rows.state); !away.ok())
      KeepError(std::move(away));
    CountReads(reads, worker->cells.size(), rows.tiles.size());
  }
  if (worker->shared.size() == depth + 1) worker->shared.push_back(std::make_unique<SharedRows>());
  SharedRows& part = *worker->shared[depth + 1];
  std::vector<bool> done(rows.tiles.size());
  for (size_t i = 0; i < rows.tiles.size(); ++i) {
    if (done[i]) continue;
    const bool ends = end_of(rows.tiles[i]) == end;
    const Block* next = ends ? nullptr : &BlockAt(tiles_[rows.tiles[i]], end);
    part.tiles.clear();
    int n_rows = 0;
    for (size_t j = i; j < rows.tiles.size(); ++j) {
      if (done[j] || ends != (end_of(rows.tiles[j]) == end) || (!ends && &BlockAt(tiles_[rows.tiles[j]], end) != next))
        continue;
      if (ends && j != i) continue;  // each by itself
      done[j] = true;
      part.tiles.push_back(static_cast<uint32_t>(j));
      n_rows += RowsOf(layer, tiles_[rows.tiles[j]]);
    }
    Partial& state =
        ends ? split_units_[rows.tiles[i] * split_heads_ + head]->partials[static_cast<size_t>(group.segment)]
             : part.state;
    state.Reset(context, n_rows);
    int to_row = 0;
    for (uint32_t& j : part.tiles) {
      int from_row = 0;
      for (size_t before = 0; before < j; ++before) from_row += RowsOf(layer, tiles_[rows.tiles[before]]);
      const int n = RowsOf(layer, tiles_[rows.tiles[j]]);
      CopyRows(rows.state, from_row, n, to_row, &state);
      to_row += n;
      j = rows.tiles[j];
    }
    if (ends) {
      FinishSplit(layer_index, rows.tiles[i], head, q, out, worker);
    } else {
      AttendShared(layer_index, group, head, end, depth + 1, q, out, worker);
    }
  }
}

// Called once for each segment of a split tile, when its Partial is complete.
void CacheImpl::FinishSplit(int layer_index, uint32_t t, uint16_t head, const float* q, float* out, Worker* worker) {
  const LayerCells& layer = memory_->map().layers[static_cast<size_t>(layer_index)];
  const HeadContext& context = heads_[layer.first_cell + head];
  SplitUnit& split = *split_units_[t * split_heads_ + head];
  if (split.left.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
  const Tile& tile = tiles_[t];
  SetRows(layer, tile, head, q, out, worker);
  // The same order and the same empty start as in AttendWhole: the same result to the bit.
  worker->running.Reset(context, static_cast<int>(worker->q.size()));
  for (int32_t s = 0; s <= tile.n_segments; ++s)
    Merge(context, split.partials[static_cast<size_t>(s)], &worker->running);
  Finish(context, worker->running, worker->out.data());
  split.left.store(tile.n_segments + 1, std::memory_order_relaxed);  // ready for the next layer
}

}  // namespace kvcell
