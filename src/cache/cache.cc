// Sequences over shared blocks, and the frame of a step: room first, then the layers, then the commit.
#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <unordered_map>
#include <unordered_set>

#include "base/checksum.h"
#include "cache/cache_impl.h"
#include "codec/cell_codec.h"

namespace kvcell {
namespace {

// Of the identity that decides whether stored cells may be read (docs/format.md).
constexpr int kCacheFormat = 1;

// Tiles of up to this many tokens read what they share with others together.
constexpr int32_t kFewRows = 4;

std::string GeometryText(const Geometry& geometry) {
  std::string text;
  for (const LayerGeometry& g : geometry) {
    text += fmt::format("{}/{}x{}/{}w{}s{}c{};", g.n_heads, g.n_kv_heads, g.head_dim_k, g.head_dim_v, g.window, g.scale,
                        g.softcap);
  }
  return text;
}

Status CheckStoredCell(std::span<const std::byte> cell, uint16_t layer, uint16_t head, int64_t position,
                       const BlockKey& key) {
  return VerifyCell(cell, layer, head, static_cast<uint64_t>(position), key.data());
}

size_t BlocksFor(size_t n_tokens) { return (n_tokens + kBlockTokens - 1) / kBlockTokens; }

}  // namespace

Result<std::unique_ptr<Cache>> Cache::Open(const CacheOptions& options) { return CacheImpl::Create(options); }

Result<std::unique_ptr<Cache>> CacheImpl::Create(const CacheOptions& given) {
  const CacheOptions options = WithDefaults(given);
  KVCELL_FAIL_IF_ERROR(CheckOptions(options));
  auto map = MakeCellMap(options.geometry, options.codec, options.sinks);
  if (!map) return Fail(map.error());
  const uint64_t block_bytes = map->CodedBytesPerBlock(kFullLayers) + map->CodedBytesPerBlock(kWindowLayers);
  const MemoryShape shape = ShapeFor(*map, options);
  const uint64_t scratch = ScratchBytes(*map, options);
  const uint64_t minimum = shape.fixed_bytes + shape.minimum_coded + scratch;
  if (options.ram_budget < minimum) {
    return Fail(
        StatusCode::kOutOfBudget,
        fmt::format("a RAM budget of {} bytes is too small for this model and step size; the smallest that works is {}",
                    options.ram_budget, minimum));
  }
  std::unique_ptr<CacheImpl> cache(new CacheImpl(options));
  if (!options.store.empty()) {
    StoreOptions store_options;
    store_options.durability = static_cast<Durability>(options.durability);
    store_options.key = options.store_key;
    store_options.name_space = options.name_space;
    store_options.disk_cap = options.disk_cap;
    store_options.ttl_seconds = options.ttl_seconds;
    store_options.cell_check = CheckStoredCell;
    auto store = Store::Open(options.store, store_options);
    if (!store) return Fail(store.error());
    cache->store_ = std::move(*store);
    cache->store_->StartScrub(CheckStoredCell, options.scrub_bytes_per_second, nullptr);
  }
  uint64_t generation = 1;
  if (cache->store_ != nullptr) {
    auto next = cache->store_->NextGeneration();
    if (!next) return Fail(next.error());
    generation = *next;
  }
  auto memory = CellMemory::Create(std::move(*map), {.budget = options.ram_budget,
                                                     .scratch_bytes = scratch,
                                                     .shape = shape,
                                                     .store = cache->store_.get(),
                                                     .generation = generation});
  if (!memory) return Fail(memory.error());
  cache->memory_ = std::move(*memory);
  cache->block_bytes_ = block_bytes;
  cache->identity_ = options.identity;
  cache->identity_.emplace_back("geometry", GeometryText(options.geometry));
  cache->identity_.emplace_back("codec", CodecText(options.codec));
  cache->identity_.emplace_back("sinks", std::to_string(options.sinks));
  cache->identity_.emplace_back("recent_blocks", std::to_string(options.recent_blocks));
  cache->identity_.emplace_back("format",
                                fmt::format("block{} cell{} cache{}", kBlockTokens, kCellVersion, kCacheFormat));
  std::string text;
  for (const auto& [field, value] : cache->identity_) text += field + '\0' + value + '\0';
  cache->identity_digest_ = Address128(Checksum128(std::as_bytes(std::span(text))));

  const CellMap& cells = cache->memory_->map();
  for (const LayerCells& layer : cells.layers) {
    const LayerGeometry& g = layer.geometry;
    cache->heads_.push_back(
        {.dk = g.head_dim_k, .dv = g.head_dim_v, .scale = g.scale, .softcap = g.softcap, .coded = layer.coded});
  }
  cache->sequences_.resize(static_cast<size_t>(options.max_sequences));
  cache->scratch_.resize(StepScratchBytes(cells, options));
  cache->next_unit_ = std::make_unique<std::atomic<uint32_t>[]>(cells.layers.size());
  cache->workers_.resize(static_cast<size_t>(options.max_threads));
  for (Worker& worker : cache->workers_) worker.ring.resize(RingBytes(cells, options));
  return cache;
}

CacheImpl::~CacheImpl() {
  if (in_step_) Abort();
  for (auto& sequence : sequences_) {
    if (sequence != nullptr) ReleaseFrom(sequence.get(), 0);
  }
  while (PrefixNode* node = tree_.FirstIdle()) GiveUpIdle(node);
}

Sequence* CacheImpl::Find(SequenceId id) const {
  if (id < 0 || static_cast<size_t>(id) >= sequences_.size()) return nullptr;
  return sequences_[static_cast<size_t>(id)].get();
}

namespace {
Status NoSequence(SequenceId id) {
  return Status(StatusCode::kNotFound, fmt::format("there is no sequence {}; Create or OpenSession gives one", id));
}
Status InStep(std::string_view call) {
  return Status(StatusCode::kBusy, fmt::format("{} during a step; Commit or Abort it first", call));
}
}  // namespace

Result<SequenceId> CacheImpl::Create() {
  for (size_t i = 0; i < sequences_.size(); ++i) {
    if (sequences_[i] != nullptr) continue;
    sequences_[i] = std::make_unique<Sequence>();
    return static_cast<SequenceId>(i);
  }
  return Fail(StatusCode::kOutOfBudget,
              fmt::format("all {} sequences are in use; free one or raise max_sequences", sequences_.size()));
}

Result<SequenceId> CacheImpl::Fork(SequenceId parent_id) {
  if (in_step_) return Fail(InStep("Fork"));
  Sequence* parent = Find(parent_id);
  if (parent == nullptr) return Fail(NoSequence(parent_id));
  auto id = Create();
  if (!id) return id;
  Sequence* child = Find(*id);
  child->blocks = parent->blocks;
  child->tokens = parent->tokens;
  child->window_floor = parent->window_floor;
  child->replica_floor = parent->replica_floor;
  child->n_shared = parent->n_shared;
  child->draft_from = parent->draft_from;
  child->approximate = parent->approximate;
  for (Block* block : child->blocks) CellMemory::AddRef(block);
  return id;
}

Status CacheImpl::Free(SequenceId id) {
  if (in_step_) return InStep("Free");
  Sequence* sequence = Find(id);
  if (sequence == nullptr) return NoSequence(id);
  ReleaseFrom(sequence, 0);
  sequences_[static_cast<size_t>(id)].reset();
  return OkStatus();
}

void CacheImpl::ReleaseFrom(Sequence* sequence, size_t first_block) {
  // From the end on: a chain in the prefix tree loses its tail first.
  while (sequence->blocks.size() > first_block) {
    Block* block = sequence->blocks.back();
    sequence->blocks.pop_back();
    if (--block->refs == 0) {
      ++block->refs;
      memory_->Release(block);
    } else {
      AfterRelease(block, sequence->blocks.size());
    }
  }
  sequence->n_shared = std::min(sequence->n_shared, sequence->blocks.size());
  KeepWithinLimits();
}

Result<int64_t> CacheImpl::Trim(SequenceId id, int64_t length) {
  if (in_step_) return Fail(InStep("Trim"));
  Sequence* sequence = Find(id);
  if (sequence == nullptr) return Fail(NoSequence(id));
  if (length < 0)
    return Fail(StatusCode::kInvalidArgument, fmt::format("can't trim to {} tokens; give 0 or more", length));
  const auto now = static_cast<int64_t>(sequence->tokens.size());
  if (length >= now) {
    sequence->draft_from = -1;
    Share(sequence);
    return now;
  }
  const auto inside = static_cast<size_t>(length / kBlockTokens);
  if (length % kBlockTokens != 0 && sequence->blocks[inside]->sealed) length -= length % kBlockTokens;
  if (!WindowsThere(*sequence, length)) length = 0;
  ReleaseFrom(sequence, BlocksFor(static_cast<size_t>(length)));
  sequence->tokens.resize(static_cast<size_t>(length));
  sequence->window_floor = std::min(sequence->window_floor, sequence->blocks.size());
  sequence->replica_floor = std::min(sequence->replica_floor, sequence->blocks.size());
  sequence->draft_from = -1;
  Share(sequence);
  return length;
}

// Whether the next token after `length` would find all that its sliding windows see.
bool CacheImpl::WindowsThere(const Sequence& sequence, int64_t length) const {
  for (const LayerCells& layer : memory_->map().layers) {
    if (layer.group != kWindowLayers || length == 0) continue;
    const int64_t oldest = std::max<int64_t>(0, length - layer.geometry.window + 1);
    for (auto b = static_cast<size_t>(oldest / kBlockTokens); b < BlocksFor(static_cast<size_t>(length)); ++b) {
      if (sequence.blocks[b]->cells[layer.first_cell].state == CellState::kEvicted) return false;
    }
  }
  return true;
}

int64_t CacheImpl::Length(SequenceId id) const {
  const Sequence* sequence = Find(id);
  return sequence == nullptr ? 0 : static_cast<int64_t>(sequence->tokens.size());
}

std::span<const Token> CacheImpl::Tokens(SequenceId id) const {
  const Sequence* sequence = Find(id);
  return sequence == nullptr ? std::span<const Token>{} : std::span<const Token>(sequence->tokens);
}

BlockKey CacheImpl::KeyOf(const BlockKey& parent, std::span<const Token, kBlockTokens> tokens) const {
  Checksum128Stream stream;
  stream.Update(std::as_bytes(std::span(identity_digest_)));
  stream.Update(std::as_bytes(std::span(parent)));
  stream.Update(std::as_bytes(tokens));
  return Address128(stream.Digest());
}

BlockKey CacheImpl::KeyOf(const Block& block) const { return KeyOf(block.parent, block.tokens); }

Status CacheImpl::CheckItems(std::span<const StepItem> items) const {
  if (in_step_) return InStep("Begin");
  size_t rows = 0;
  std::unordered_set<SequenceId> seen;
  for (const StepItem& item : items) {
    if (Find(item.sequence) == nullptr) return NoSequence(item.sequence);
    if (!seen.insert(item.sequence).second) {
      return Status(StatusCode::kInvalidArgument, fmt::format("sequence {} is in the step twice", item.sequence));
    }
    if (item.tokens.empty()) {
      return Status(StatusCode::kInvalidArgument,
                    fmt::format("sequence {} is in the step without tokens", item.sequence));
    }
    rows += item.tokens.size();
  }
  if (rows == 0 || rows > static_cast<size_t>(options_.max_step_tokens)) {
    return Status(StatusCode::kInvalidArgument,
                  fmt::format("a step of {} tokens, but 1..{} are allowed; cut it or raise max_step_tokens", rows,
                              options_.max_step_tokens));
  }
  return OkStatus();
}

// The first write to an open block that a fork shares copies that block only.
Status CacheImpl::MakeWritable(Sequence* sequence) {
  const size_t n_open = sequence->tokens.size() % kBlockTokens;
  if (n_open == 0 || sequence->blocks.back()->refs == 1) return OkStatus();
  auto copy = memory_->CopyOpen(*sequence->blocks.back(), static_cast<int>(n_open));
  if (!copy) return copy.error();
  memory_->Release(sequence->blocks.back());
  sequence->blocks.back() = *copy;
  return OkStatus();
}

Status CacheImpl::PlanSequence(const StepItem& item, int32_t first_row, int32_t* scratch, StepSequence* planned) {
  Sequence& sequence = *Find(item.sequence);
  const size_t start = sequence.tokens.size();
  const size_t end = start + item.tokens.size();
  planned->sequence = &sequence;
  planned->draft = item.draft;
  planned->tokens.assign(item.tokens.begin(), item.tokens.end());
  planned->first_block = start / kBlockTokens;
  KVCELL_RETURN_IF_ERROR(MakeWritable(&sequence));
  const size_t n_sealed = end / kBlockTokens;
  BlockKey parent = planned->first_block == 0 ? BlockKey{} : sequence.blocks[planned->first_block - 1]->key;
  for (size_t b = planned->first_block; b < BlocksFor(end); ++b) {
    StepBlock step;
    step.is_new = b >= sequence.blocks.size();
    const auto position = static_cast<int64_t>(b) * kBlockTokens;
    step.block = step.is_new ? memory_->NewBlock(position, parent) : sequence.blocks[b];
    planned->blocks.push_back(step);  // from here on Abort gives it back
    StepBlock& kept = planned->blocks.back();
    kept.begin = static_cast<int32_t>(std::max(start, b * kBlockTokens) - b * kBlockTokens);
    kept.end = static_cast<int32_t>(std::min(end, (b + 1) * kBlockTokens) - b * kBlockTokens);
    kept.first_row = first_row + static_cast<int32_t>(b * kBlockTokens + static_cast<size_t>(kept.begin) - start);
    kept.seals = kept.end == kBlockTokens;
    Block& block = *kept.block;
    std::copy_n(item.tokens.begin() + (kept.first_row - first_row), kept.end - kept.begin,
                block.tokens.begin() + kept.begin);
    const bool stays_exact = !kept.seals || b + static_cast<size_t>(options_.recent_blocks) >= n_sealed;
    if (kept.is_new && !stays_exact) kept.scratch = (*scratch)++;
    if (kept.is_new && stays_exact) KVCELL_RETURN_IF_ERROR(memory_->CreateExact(&block));
    if (kept.is_new && b == 0 && options_.sinks > 0) memory_->CreateSinks(&block);
    if (kept.seals) {
      block.key = KeyOf(block);
      parent = block.key;
      memory_->TakeCoded(&block);
    }
  }
  // Exact cells that a cut has left without: what this step computes is this sequence's alone.
  const size_t first_recent =
      planned->first_block - std::min(planned->first_block, static_cast<size_t>(options_.recent_blocks));
  for (size_t b = first_recent; b < planned->first_block; ++b) {
    if (sequence.blocks[b]->cells[0].exact == kNoSlot) planned->approximate = true;
  }
  return OkStatus();
}

Status CacheImpl::Begin(std::span<const StepItem> items) {
  KVCELL_RETURN_IF_ERROR(CheckItems(items));
  uint64_t n_sealing = 0;
  for (const StepItem& item : items) {
    const size_t start = Find(item.sequence)->tokens.size();
    n_sealing += (start + item.tokens.size()) / kBlockTokens - start / kBlockTokens;
  }
  KVCELL_RETURN_IF_ERROR(SettleRoom(n_sealing));
  step_.clear();
  step_.resize(items.size());
  in_step_ = true;
  error_ = OkStatus();
  step_rows_ = 0;
  int32_t scratch = 0;
  for (size_t i = 0; i < items.size(); ++i) {
    if (Status status = PlanSequence(items[i], step_rows_, &scratch, &step_[i]); !status.ok()) {
      Abort();
      return status;
    }
    step_rows_ += static_cast<int32_t>(items[i].tokens.size());
  }
  ++n_steps_;
  PlanTiles();
  return OkStatus();
}

void CacheImpl::PlanTiles() {
  const CellMap& map = memory_->map();
  tiles_.clear();
  whole_tiles_.clear();
  for (const StepSequence& item : step_) {
    for (size_t i = 0; i < item.blocks.size(); ++i) {
      const size_t own = item.first_block + i;
      const size_t n_coded = own - std::min(own, static_cast<size_t>(options_.recent_blocks));
      tiles_.push_back({&item, i, static_cast<int32_t>((n_coded + kSegmentBlocks - 1) / kSegmentBlocks), n_coded});
    }
    for (size_t b = 0; b < item.first_block; ++b) {
      Block& block = *item.sequence->blocks[b];
      ++block.reads;
      block.last_access = static_cast<uint64_t>(n_steps_);
    }
  }
  for (size_t i = 0; i < map.layers.size(); ++i) next_unit_[i].store(0, std::memory_order_relaxed);

  split_heads_ = 0;
  for (const LayerCells& layer : map.layers) split_heads_ = std::max<size_t>(split_heads_, layer.n_heads);
  // Partial results are worth their merging where whole tiles would leave threads idle, and where tiles have so few
  // rows that reading the cells is what takes the time: these read together what they share.
  const bool split_all = tiles_.size() * split_heads_ < 4 * workers_.size();
  for (size_t t = tiles_.size(); t-- > 0;) {
    const StepBlock& step = tiles_[t].owner->blocks[tiles_[t].index];
    tiles_[t].split = split_all || step.end - step.begin <= kFewRows;
    if (!tiles_[t].split) whole_tiles_.push_back(static_cast<uint32_t>(t));
  }
  PlanGroups();
  while (split_units_.size() < tiles_.size() * split_heads_) split_units_.push_back(std::make_unique<SplitUnit>());
  for (size_t t = 0; t < tiles_.size(); ++t) {
    if (!tiles_[t].split) continue;
    const auto n = static_cast<size_t>(tiles_[t].n_segments) + 1;
    for (size_t h = 0; h < split_heads_; ++h) {
      SplitUnit& unit = *split_units_[t * split_heads_ + h];
      if (unit.partials.size() < n) unit.partials.resize(n);
      unit.left.store(static_cast<int32_t>(n), std::memory_order_relaxed);
    }
  }
}

// Segments of split tiles, those that begin with the same block together. What they share is always at the front:
// blocks have one past. The exact cells are each tile's own.
void CacheImpl::PlanGroups() {
  groups_.clear();
  std::unordered_map<const Block*, size_t> by_block;  // into groups_
  for (uint32_t t = 0; t < tiles_.size(); ++t) {
    if (!tiles_[t].split) continue;
    for (int32_t s = 0; s < tiles_[t].n_segments; ++s) {
      const Block* first = &BlockAt(tiles_[t], static_cast<size_t>(s) * kSegmentBlocks);
      const auto [at, is_new] = by_block.try_emplace(first, groups_.size());
      if (is_new) groups_.push_back({.segment = s, .tiles = {}});
      groups_[at->second].tiles.push_back(t);
    }
  }
  // The dearest first, so that no thread is left with one at the end.
  std::ranges::stable_sort(groups_, std::greater<>(), [](const SegmentGroup& group) { return group.tiles.size(); });
  const auto of_the_past = [&](const SegmentGroup& group) {
    const size_t end = (static_cast<size_t>(group.segment) + 1) * kSegmentBlocks;
    return std::ranges::all_of(
        group.tiles, [&](uint32_t t) { return std::min(tiles_[t].n_coded, end) <= tiles_[t].owner->first_block; });
  };
  const auto rest = std::stable_partition(groups_.begin(), groups_.end(), of_the_past);
  n_past_groups_ = static_cast<size_t>(rest - groups_.begin());
  for (uint32_t t = 0; t < tiles_.size(); ++t) {
    if (tiles_[t].split) groups_.push_back({.segment = tiles_[t].n_segments, .tiles = {t}});
  }
}

void CacheImpl::Abort() {
  for (StepSequence& item : step_) {
    for (StepBlock& step : item.blocks) {
      memory_->UndoCoded(step.block);
      if (step.is_new) memory_->Release(step.block);
    }
  }
  step_.clear();
  in_step_ = false;
}

Status CacheImpl::Commit() {
  if (!in_step_) return Status(StatusCode::kInvalidArgument, "Commit: no step has begun; call Begin first");
  if (!error_.ok()) {
    Abort();
    return error_;
  }
  for (StepSequence& item : step_) {
    Sequence& sequence = *item.sequence;
    for (StepBlock& step : item.blocks) {
      step.block->n_tokens = step.end;
      if (step.is_new) sequence.blocks.push_back(step.block);
      if (step.seals) memory_->Sealed(step.block);
    }
    sequence.approximate = sequence.approximate || item.approximate;
    if (!item.draft) {
      sequence.draft_from = -1;
    } else if (sequence.draft_from < 0) {
      sequence.draft_from = static_cast<int64_t>(sequence.tokens.size());
    }
    sequence.tokens.insert(sequence.tokens.end(), item.tokens.begin(), item.tokens.end());
    DropPassed(&sequence);
    Share(&sequence);
  }
  step_.clear();
  in_step_ = false;
  memory_->BalanceInBackground();
  return OkStatus();
}

// Exact copies that no later query reads, and cells that every window has passed. A sequence that is behind still needs
// them.
void CacheImpl::DropPassed(Sequence* sequence) {
  const size_t n_sealed = sequence->tokens.size() / kBlockTokens;
  const size_t keep_exact = static_cast<size_t>(options_.recent_blocks);
  while (sequence->replica_floor + keep_exact < n_sealed) {
    const size_t passed = sequence->replica_floor++;
    DropUnwanted(sequence->blocks[passed], passed);
  }
  if (memory_->map().shapes[kWindowLayers].layers.empty()) return;
  int64_t widest = 0;
  for (const LayerGeometry& layer : options_.geometry) widest = std::max<int64_t>(widest, layer.window);
  // The next query is at position `length` and sees [length - window + 1, length].
  const int64_t oldest = static_cast<int64_t>(sequence->tokens.size()) - widest + 1;
  while (static_cast<int64_t>(sequence->window_floor + 1) * kBlockTokens <= oldest) {
    const size_t passed = sequence->window_floor++;
    DropUnwanted(sequence->blocks[passed], passed);
  }
}

// Drops what no sequence that uses the block will read again: its exact cells, its sliding-window cells.
void CacheImpl::DropUnwanted(Block* block, size_t index) {
  bool exact = false, windows = false;
  for (const auto& sequence : sequences_) {
    if (sequence == nullptr || sequence->blocks.size() <= index || sequence->blocks[index] != block) continue;
    exact = exact || !block->sealed || sequence->replica_floor <= index;
    windows = windows || sequence->window_floor <= index;
  }
  if (!exact) memory_->DropExact(block);
  if (!windows && !memory_->map().shapes[kWindowLayers].layers.empty()) memory_->EvictGroup(block, kWindowLayers);
}

// Room for n more sealed blocks: prefixes that nobody uses go first, then older cells leave for the store.
Status CacheImpl::SettleRoom(uint64_t n_blocks) {
  while (!memory_->Fits(n_blocks)) {
    PrefixNode* node = tree_.FirstIdle();
    if (node == nullptr) break;
    GiveUpIdle(node);
  }
  return memory_->ReserveCoded(n_blocks);
}

std::vector<Block*> CacheImpl::LiveBlocks() const {
  std::vector<Block*> blocks;
  std::unordered_set<const Block*> seen;
  for (const auto& sequence : sequences_) {
    if (sequence == nullptr) continue;
    for (Block* block : sequence->blocks) {
      if (seen.insert(block).second) blocks.push_back(block);
    }
  }
  return blocks;
}

CacheStats CacheImpl::Stats() const {
  CacheStats stats;
  const CellMap& map = memory_->map();
  uint64_t coded_bytes = 0, elements = 0;
  for (const Block* block : LiveBlocks()) {
    for (const LayerCells& layer : map.layers) {
      for (uint16_t h = 0; h < layer.n_heads; ++h) {
        const CellEntry& cell = block->cells[layer.first_cell + h];
        ++stats.cells.by_state[static_cast<size_t>(cell.state)];
        if (cell.state == CellState::kEvicted) continue;
        if (block->sealed) {
          stats.kv_bytes += layer.coded.bytes;
          coded_bytes += layer.coded.bytes;
          elements += static_cast<uint64_t>(kBlockTokens) *
                      static_cast<uint64_t>(layer.geometry.head_dim_k + layer.geometry.head_dim_v);
        }
        if (cell.exact != kNoSlot) stats.kv_bytes += layer.open.bytes;
        if (cell.durable) stats.file_bytes += layer.coded.bytes;
      }
      if (!block->sinks.empty()) stats.kv_bytes += uint64_t{layer.n_heads} * layer.sink.bytes;
    }
  }
  for (const auto& sequence : sequences_) {
    if (sequence != nullptr)
      stats.f16_bytes += F16Bytes(options_.geometry, static_cast<int64_t>(sequence->tokens.size()));
  }
  const LayerCells& first = map.layers.front();
  stats.bits_per_element =
      elements != 0
          ? 8.0 * static_cast<double>(coded_bytes) / static_cast<double>(elements)
          : CodecBitsPerElement(options_.codec, first.geometry.head_dim_k, first.geometry.head_dim_v).value_or(0.0);
  stats.ram_bytes = memory_->committed();
  stats.ram_peak_bytes = memory_->peak_committed();
  stats.reads_ram = reads_ram_.load(std::memory_order_relaxed);
  stats.reads_shared = reads_shared_.load(std::memory_order_relaxed);
  stats.prefix_bytes = tree_.n_idle() * block_bytes_;
  stats.reads_file = reads_file_.load(std::memory_order_relaxed);
  stats.approximate_reads = approximate_reads_.load(std::memory_order_relaxed);
  stats.transitions = memory_->transitions().total();
  stats.saturated = saturated_.load(std::memory_order_relaxed);
  stats.not_finite = not_finite_.load(std::memory_order_relaxed);
  return stats;
}

}  // namespace kvcell
