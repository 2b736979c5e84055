// Sequences over shared blocks, and the frame of a step: room first, then the layers, then the commit.
#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <unordered_map>
#include <unordered_set>

#include "base/checksum.h"
#include "base/clock.h"
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

// What rules and tiers need of a cache beside themselves.
Status CheckRulesFit(const CacheOptions& options) {
  const Rules& rules = *options.rules;
  bool keeps = false;
  for (const EvictWindow& window : rules.windows) keeps |= window.keep;
  if (options.tier != nullptr && !options.store.empty()) {
    return Status(StatusCode::kInvalidArgument, "a cache has a store or a tier of its own, not both; leave one out");
  }
  if (keeps && options.store.empty() && options.tier == nullptr) {
    return Status(StatusCode::kInvalidArgument,
                  fmt::format("rules `{}` keep evicted cells in the store, but there is none; name one", rules.name));
  }
  if (!rules.windows.empty() && options.rope.empty()) {
    return Status(StatusCode::kInvalidArgument,
                  fmt::format("rules `{}` cut the past to a window, which needs to know how the model turns positions; "
                              "give CacheOptions::rope for each layer",
                              rules.name));
  }
  // Layers and heads that the model has not: rules made for another one.
  const auto n_layers = static_cast<int64_t>(options.geometry.size());
  int64_t n_heads = 0;
  for (const LayerGeometry& layer : options.geometry) n_heads = std::max<int64_t>(n_heads, layer.n_kv_heads);
  const auto beyond = [&](std::string_view what, std::string_view where, int64_t first, int64_t n) {
    return Status(StatusCode::kInvalidArgument,
                  fmt::format("rules `{}`{} ask for {} {}, but the model has {}s 0..{}; are they for another model?",
                              rules.name, where, what, first, what, n - 1));
  };
  for (const CellRule& rule : rules.table.rules()) {
    const std::string where = fmt::format(" (line {})", rule.line);
    if (rule.guard.layers.low >= n_layers) return beyond("layer", where, rule.guard.layers.low, n_layers);
    if (rule.guard.heads.low >= n_heads) return beyond("KV head", where, rule.guard.heads.low, n_heads);
  }
  for (const CodecRange& range : options.codec_ranges) {
    if (range.first_layer < 0 || range.last_layer < range.first_layer || range.first_head < 0 ||
        range.last_head < range.first_head) {
      return {StatusCode::kInvalidArgument,
              fmt::format("a codec range of layers {}..{}, KV heads {}..{} holds nothing", range.first_layer,
                          range.last_layer, range.first_head, range.last_head)};
    }
    if (range.first_layer >= n_layers) return beyond("layer", " (codecs)", range.first_layer, n_layers);
    if (range.first_head >= n_heads) return beyond("KV head", " (codecs)", range.first_head, n_heads);
  }
  return OkStatus();
}

// Steps between two that measure attention mass.
constexpr int64_t kMassSteps = 16;

size_t BlocksFor(size_t n_tokens) { return (n_tokens + kBlockTokens - 1) / kBlockTokens; }

}  // namespace

Result<std::unique_ptr<Cache>> Cache::Open(const CacheOptions& options) { return CacheImpl::Create(options); }

Result<std::unique_ptr<Cache>> CacheImpl::Create(const CacheOptions& given) {
  const CacheOptions options = WithDefaults(given);
  KVCELL_FAIL_IF_ERROR(CheckOptions(options));
  KVCELL_FAIL_IF_ERROR(CheckRulesFit(options));
  auto map = MakeCellMap(options.geometry, options.codec, options.sinks, options.codec_ranges);
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
    store_options.cell_check = VerifyCell;
    auto store = Store::Open(options.store, store_options);
    if (!store) return Fail(store.error());
    cache->store_ = std::move(*store);
    cache->store_->StartScrub(VerifyCell, options.scrub_bytes_per_second, nullptr);
  }
  cache->tier_ = options.tier != nullptr ? options.tier.get() : cache->store_.get();
  uint64_t generation = 1, tier_bytes = 0;
  if (cache->store_ != nullptr) {
    if (options.rules->file_budget) {
      const auto stats = cache->store_->Stats();
      if (!stats) return Fail(stats.error());
      tier_bytes = static_cast<uint64_t>(std::max<int64_t>(0, stats->segment_bytes));
    }
    auto next = cache->store_->NextGeneration();
    if (!next) return Fail(next.error());
    generation = *next;
  }
  auto memory = CellMemory::Create(std::move(*map), {.budget = options.ram_budget,
                                                     .scratch_bytes = scratch,
                                                     .shape = shape,
                                                     .tier = cache->tier_,
                                                     .tier_bytes = tier_bytes,
                                                     .generation = generation,
                                                     .mapped = options.file_reads == FileReads::kMapped,
                                                     .rules = options.rules,
                                                     .probe = {}});
  if (!memory) return Fail(memory.error());
  cache->memory_ = std::move(*memory);
  cache->memory_->trace().Enable(options.trace_records);
  cache->block_bytes_ = block_bytes;
  cache->SetIdentity();

  const CellMap& cells = cache->memory_->map();
  for (const LayerCells& layer : cells.layers) {
    const LayerGeometry& g = layer.geometry;
    for (uint16_t h = 0; h < layer.n_heads; ++h) {
      cache->heads_.push_back(
          {.dk = g.head_dim_k, .dv = g.head_dim_v, .scale = g.scale, .softcap = g.softcap, .coded = layer.coded(h)});
    }
  }
  cache->sequences_.resize(static_cast<size_t>(options.max_sequences));
  cache->scratch_.resize(StepScratchBytes(cells, options));
  cache->next_unit_ = std::make_unique<std::atomic<uint32_t>[]>(cells.layers.size());
  cache->n_appended_ = std::make_unique<std::atomic<uint32_t>[]>(cells.layers.size());
  cache->workers_.resize(static_cast<size_t>(options.max_threads));
  for (Worker& worker : cache->workers_) worker.ring.resize(RingBytes(cells, options));
  return cache;
}

// All that decides whether a stored cell may be read: what the caller gave, and what the cache and its rules add.
void CacheImpl::SetIdentity() {
  identity_ = options_.identity;
  identity_.emplace_back("geometry", GeometryText(options_.geometry));
  identity_.emplace_back("codec", CodecPlanText(options_.codec, options_.codec_ranges));
  identity_.emplace_back("sinks", std::to_string(options_.sinks));
  identity_.emplace_back("recent_blocks", std::to_string(options_.recent_blocks));
  if (const std::string policy = options_.rules->IdentityText(); !policy.empty()) {
    identity_.emplace_back("rules", policy);
  }
  identity_.emplace_back("format", fmt::format("block{} cell{} cache{}", kBlockTokens, kCellVersion, kCacheFormat));
  std::string text;
  for (const auto& [field, value] : identity_) text += field + '\0' + value + '\0';
  identity_digest_ = Address128(Checksum128(std::as_bytes(std::span(text))));
}

CacheImpl::~CacheImpl() {
  if (in_step_) Abort();
  EndSave();
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
    auto sequence = std::make_unique<Sequence>();
    sequence->generation = memory_->generation();
    if (options_.rules->depends_on_memory && store_ != nullptr) {
      auto own = store_->NextGeneration();
      if (!own) return Fail(own.error());
      sequence->generation = *own;
    }
    sequence->evict_floors.assign(options_.rules->windows.size(), 0);
    sequences_[i] = std::move(sequence);
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
  child->evict_floors = parent->evict_floors;
  child->n_shared = parent->n_shared;
  child->draft_from = parent->draft_from;
  child->approximate = parent->approximate;
  child->pinned = parent->pinned;
  child->left_out = parent->left_out;
  for (Block* block : child->blocks) CellMemory::AddRef(block);
  return id;
}

Status CacheImpl::Free(SequenceId id) {
  if (in_step_) return InStep("Free");
  EndSave();  // its name stays locked until it is stored
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
  for (size_t& floor : sequence->evict_floors) floor = std::min(floor, sequence->blocks.size());
  sequence->draft_from = -1;
  Share(sequence);
  return length;
}

// Whether the next token after `length` would find all that its sliding windows see.
bool CacheImpl::WindowsThere(const Sequence& sequence, int64_t length) const {
  for (const LayerCells& layer : memory_->map().layers) {
    if (length == 0) continue;
    const int64_t oldest = std::max<int64_t>(0, length - layer.geometry.window + 1);
    const size_t begin = layer.group == kWindowLayers ? static_cast<size_t>(oldest / kBlockTokens)
                                                      : FirstVisible(layer, static_cast<size_t>(length / kBlockTokens));
    // Without a window every block is there, or was given up for good by a rule or a person.
    if (layer.group == kFullLayers && options_.rules->WindowOf(layer.number) == 0) continue;
    for (size_t b = begin; b < BlocksFor(static_cast<size_t>(length)); ++b) {
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

BlockKey CacheImpl::KeyOf(const BlockKey& parent, std::span<const Token, kBlockTokens> tokens,
                          uint64_t generation) const {
  Checksum128Stream stream;
  stream.Update(std::as_bytes(std::span(identity_digest_)));
  stream.Update(std::as_bytes(std::span(parent)));
  stream.Update(std::as_bytes(tokens));
  // A block that depends on what memory allowed is its sequence's own: no other has this key.
  if (options_.rules->depends_on_memory) stream.Update(std::as_bytes(std::span(&generation, 1)));
  return Address128(stream.Digest());
}

BlockKey CacheImpl::KeyOf(const Block& block) const { return KeyOf(block.parent, block.tokens, block.generation); }

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
  (*copy)->generation = sequence->generation;
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
  const bool coded_on_seal = memory_->SealCodesAll();
  BlockKey parent = planned->first_block == 0 ? BlockKey{} : sequence.blocks[planned->first_block - 1]->key;
  for (size_t b = planned->first_block; b < BlocksFor(end); ++b) {
    StepBlock step;
    step.is_new = b >= sequence.blocks.size();
    const auto position = static_cast<int64_t>(b) * kBlockTokens;
    step.block = step.is_new ? memory_->NewBlock(position, parent) : sequence.blocks[b];
    if (step.is_new) step.block->generation = sequence.generation;
    step.block->sequence_end = static_cast<int64_t>(end);
    planned->blocks.push_back(step);  // from here on Abort gives it back
    StepBlock& kept = planned->blocks.back();
    kept.begin = static_cast<int32_t>(std::max(start, b * kBlockTokens) - b * kBlockTokens);
    kept.end = static_cast<int32_t>(std::min(end, (b + 1) * kBlockTokens) - b * kBlockTokens);
    kept.first_row = first_row + static_cast<int32_t>(b * kBlockTokens + static_cast<size_t>(kept.begin) - start);
    kept.seals = kept.end == kBlockTokens;
    Block& block = *kept.block;
    std::copy_n(item.tokens.begin() + (kept.first_row - first_row), kept.end - kept.begin,
                block.tokens.begin() + kept.begin);
    const bool stays_exact =
        !kept.seals || !coded_on_seal || b + static_cast<size_t>(options_.recent_blocks) >= n_sealed;
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
  uint64_t n_sealing = 0, n_new = 0;
  for (const StepItem& item : items) {
    const size_t start = Find(item.sequence)->tokens.size();
    n_sealing += (start + item.tokens.size()) / kBlockTokens - start / kBlockTokens;
    n_new += BlocksFor(start + item.tokens.size()) - BlocksFor(start) + 1;  // one for a copy-on-write
  }
  KVCELL_RETURN_IF_ERROR(SettleRoom(n_sealing, IsElastic(*options_.rules) ? n_new : 0));
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

// What guards look at: which steps read a block, and how far it is from its sequence's end.
void CacheImpl::NoteReads(const StepSequence& item) {
  const auto step = static_cast<uint64_t>(n_steps_);
  const int64_t now = SteadySeconds();
  const auto end = static_cast<int64_t>(item.sequence->tokens.size() + item.tokens.size());
  for (size_t b = FirstVisible(item.first_block); b < item.first_block; ++b) {
    Block& block = *item.sequence->blocks[b];
    ++block.reads;
    const bool again = block.last_access == step;  // another sequence of this step has read it
    const uint64_t since = step - block.last_access;
    if (!again) block.read_steps = (since >= 64 ? 0 : block.read_steps << since) | 1;
    block.sequence_end = again ? std::min(block.sequence_end, end) : end;
    block.last_access = step;
    block.last_read_s = now;
    memory_->MapBlock(&block);
  }
}

void CacheImpl::PlanTiles() {
  const CellMap& map = memory_->map();
  memory_->BeginReads();
  tiles_.clear();
  whole_tiles_.clear();
  for (const StepSequence& item : step_) {
    for (size_t i = 0; i < item.blocks.size(); ++i) {
      const size_t own = item.first_block + i;
      const size_t n_coded = own - std::min(own, static_cast<size_t>(options_.recent_blocks));
      const size_t first_segment = FirstVisible(own) / kSegmentBlocks;
      const size_t end_segment = (n_coded + kSegmentBlocks - 1) / kSegmentBlocks;
      const auto n_segments = static_cast<int32_t>(end_segment - std::min(end_segment, first_segment));
      tiles_.push_back({&item, i, n_segments, n_coded, first_segment});
    }
    NoteReads(item);
  }
  for (size_t i = 0; i < map.layers.size(); ++i) {
    next_unit_[i].store(0, std::memory_order_relaxed);
    n_appended_[i].store(0, std::memory_order_relaxed);
  }

  split_heads_ = 0;
  for (const LayerCells& layer : map.layers) split_heads_ = std::max<size_t>(split_heads_, layer.n_heads);
  // Mass is measured now and then, on steps of one tile: its cells then have one writer each. Whole or split, the
  // result is the same.
  weighs_ = options_.rules->measures_mass && tiles_.size() == 1 && n_steps_ % kMassSteps == 0;
  // Partial results are worth their merging where whole tiles would leave threads idle, and where tiles have so few
  // rows that reading the cells is what takes the time: these read together what they share.
  const bool split_all = tiles_.size() * split_heads_ < 4 * workers_.size();
  for (size_t t = tiles_.size(); t-- > 0;) {
    const StepBlock& step = tiles_[t].owner->blocks[tiles_[t].index];
    tiles_[t].split = !weighs_ && (split_all || step.end - step.begin <= kFewRows);
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
// blocks have one past. The exact cells are each tile's own. Where rules cut the past to a window, each tile's begins
// elsewhere and is attended by itself.
void CacheImpl::PlanGroups() {
  groups_.clear();
  std::unordered_map<const Block*, size_t> by_block;  // into groups_
  for (uint32_t t = 0; t < tiles_.size(); ++t) {
    if (!tiles_[t].split) continue;
    for (int32_t s = 0; s < tiles_[t].n_segments; ++s) {
      if (!options_.rules->windows.empty()) {
        groups_.push_back({.segment = s, .tiles = {t}});
        continue;
      }
      const Block* first = &BlockAt(tiles_[t], static_cast<size_t>(s) * kSegmentBlocks);
      const auto [at, is_new] = by_block.try_emplace(first, groups_.size());
      if (is_new) groups_.push_back({.segment = s, .tiles = {}});
      groups_[at->second].tiles.push_back(t);
    }
  }
  // The dearest first, so that no thread is left with one at the end.
  std::ranges::stable_sort(groups_, std::greater<>(), [](const SegmentGroup& group) { return group.tiles.size(); });
  const auto of_the_past = [&](const SegmentGroup& group) {
    return std::ranges::all_of(group.tiles, [&](uint32_t t) {
      const size_t end = (tiles_[t].first_segment + static_cast<size_t>(group.segment) + 1) * kSegmentBlocks;
      return std::min(tiles_[t].n_coded, end) <= tiles_[t].owner->first_block;
    });
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
  std::vector<bool> left_out;
  if (error_.ok()) error_ = CheckLayersOf(&left_out);
  for (const StepSequence& item : step_) {
    if (!error_.ok()) break;
    error_ = memory_->EndReads(std::span(item.sequence->blocks).first(item.first_block));
  }
  if (!error_.ok()) {
    Abort();
    return error_;
  }
  for (StepSequence& item : step_) {
    Sequence& sequence = *item.sequence;
    for (StepBlock& step : item.blocks) {
      step.block->n_tokens = step.end;
      if (step.is_new) sequence.blocks.push_back(step.block);
      step.block->pinned |= sequence.pinned;
      if (step.seals) memory_->Sealed(step.block);
    }
    sequence.approximate = sequence.approximate || item.approximate || !left_out.empty();
    sequence.left_out = left_out;
    if (!item.draft) {
      sequence.draft_from = -1;
    } else if (sequence.draft_from < 0) {
      sequence.draft_from = static_cast<int64_t>(sequence.tokens.size());
    }
    sequence.tokens.insert(sequence.tokens.end(), item.tokens.begin(), item.tokens.end());
    DropPassed(&sequence);
    EvictPassed(&sequence);
    Share(&sequence);
    memory_->Touched(sequence.blocks, static_cast<uint64_t>(n_steps_));
  }
  step_.clear();
  in_step_ = false;
  memory_->BalanceInBackground(/*moved_on=*/false);
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

// Room for n more sealed blocks, and n_exact exact ones beyond those set aside: prefixes that nobody uses go first,
// then the rules say what leaves.
Status CacheImpl::SettleRoom(uint64_t n_blocks, uint64_t n_exact) {
  while (!memory_->Fits(n_blocks, n_exact)) {
    PrefixNode* node = tree_.FirstIdle();
    if (node == nullptr) break;
    GiveUpIdle(node);
  }
  return memory_->ReserveCoded(n_blocks, n_exact);
}

// The first block that a query of block `own_block` sees in this layer, by the windows of the rules; sinks apart.
size_t CacheImpl::FirstVisible(const LayerCells& layer, size_t own_block) const {
  const auto window = layer.group == kFullLayers ? static_cast<size_t>(options_.rules->WindowOf(layer.number)) : 0;
  const size_t blocks = (window + kBlockTokens - 1) / kBlockTokens;
  return window == 0 || own_block <= blocks ? 0 : own_block - blocks;
}

// The same for all layers together.
size_t CacheImpl::FirstVisible(size_t own_block) const {
  if (options_.rules->windows.empty()) return 0;
  size_t first = own_block;
  for (const LayerCells& layer : memory_->map().layers) {
    if (layer.group == kFullLayers) first = std::min(first, FirstVisible(layer, own_block));
  }
  return first;
}

// EVICT of blocks that every later query's window, by the rules, leaves out.
void CacheImpl::EvictPassed(Sequence* sequence) {
  const Rules& rules = *options_.rules;
  const size_t own = sequence->tokens.size() / kBlockTokens;
  for (size_t w = 0; w < rules.windows.size(); ++w) {
    const EvictWindow& window = rules.windows[w];
    const size_t reach = static_cast<size_t>((window.tokens + kBlockTokens - 1) / kBlockTokens);
    size_t& floor = sequence->evict_floors[w];
    bool all = true;
    for (size_t b = floor; b + reach < own; ++b) {
      Block* block = sequence->blocks[b];
      const auto age = static_cast<int64_t>(sequence->tokens.size()) - block->position - kBlockTokens;
      // Shared with a fork that is behind, or on its way to the store: it is asked again after the next step.
      all &= block->refs == 1 && !block->pinned &&
             memory_->EvictLayers(block, window.layers, std::max(age, window.tokens));
      if (all) floor = b + 1;
    }
  }
}

Status CacheImpl::SetRules(std::shared_ptr<const Rules> rules) {
  if (in_step_) return InStep("SetRules");
  if (rules == nullptr) rules = DefaultRules();
  CacheOptions wanted = options_;
  wanted.rules = rules;
  wanted = WithDefaults(wanted);
  const auto fixed = [](std::string_view what) {
    return Status(
        StatusCode::kInvalidArgument,
        fmt::format("the new rules ask for {}, which a cache has for life; the old rules stay in force", what));
  };
  if (CodecPlanText(wanted.codec, wanted.codec_ranges) != CodecPlanText(options_.codec, options_.codec_ranges)) {
    return fixed(fmt::format("codec {}", CodecPlanText(wanted.codec, wanted.codec_ranges)));
  }
  if (wanted.sinks != options_.sinks) return fixed(fmt::format("{} sinks", wanted.sinks));
  if (wanted.recent_blocks != options_.recent_blocks)
    return fixed(fmt::format("{} recent blocks", wanted.recent_blocks));
  KVCELL_RETURN_IF_ERROR(CheckRulesFit(wanted));
  if (rules->ram_budget && rules->ram_budget != options_.rules->ram_budget &&
      *rules->ram_budget != options_.ram_budget) {
    return fixed(fmt::format("a RAM budget of {} bytes", *rules->ram_budget));
  }
  if (IsElastic(*rules) && !IsElastic(*options_.rules)) {
    const uint64_t minimum = [&] {
      const MemoryShape shape = ShapeFor(memory_->map(), wanted);
      return shape.fixed_bytes + shape.minimum_coded + ScratchBytes(memory_->map(), wanted);
    }();
    if (options_.ram_budget < minimum) return fixed(fmt::format("a RAM budget of {} bytes at least", minimum));
  }
  const bool shared = Shares();
  options_.rules = rules;
  memory_->SetRules(std::move(rules));
  SetIdentity();
  // What is computed from here on may be its sequence's own, and cells may go that the tree promises.
  const bool withdraw = !shared || !Shares();
  for (auto& sequence : sequences_) {
    if (sequence == nullptr) continue;
    sequence->evict_floors.assign(options_.rules->windows.size(), 0);
    if (withdraw) sequence->approximate = true;
  }
  if (withdraw) Withdraw();
  return OkStatus();
}

Status CacheImpl::Pin(SequenceId id, bool pinned) {
  if (in_step_) return InStep("Pin");
  Sequence* sequence = Find(id);
  if (sequence == nullptr) return NoSequence(id);
  sequence->pinned = pinned;
  for (size_t b = 0; b < sequence->blocks.size(); ++b) {
    Block* block = sequence->blocks[b];
    block->stays_out = false;
    block->pinned = pinned;
    for (const auto& other : sequences_) {  // a fork's pin holds what both have
      if (block->pinned || block->refs == 1) break;
      block->pinned = other != nullptr && other->pinned && b < other->blocks.size() && other->blocks[b] == block;
    }
  }
  return OkStatus();
}

Status CacheImpl::Persist(SequenceId id) {
  if (in_step_) return InStep("Persist");
  Sequence* sequence = Find(id);
  if (sequence == nullptr) return NoSequence(id);
  const size_t n_sealed = sequence->tokens.size() / kBlockTokens;
  return memory_->Persist(std::span<Block* const>(sequence->blocks.data(), n_sealed));
}

Status CacheImpl::Evict(SequenceId id, int64_t begin, int64_t end) {
  if (in_step_) return InStep("Evict");
  EndSave();
  Sequence* sequence = Find(id);
  if (sequence == nullptr) return NoSequence(id);
  KVCELL_RETURN_IF_ERROR(memory_->Settle());
  const auto goes = [&](const Block& block) {
    const int32_t others = block.refs - 1 - (block.prefix != nullptr ? 1 : 0);
    return block.sealed && others == 0 && block.position >= begin && block.position + kBlockTokens <= end;
  };
  const auto first = std::ranges::find_if(sequence->blocks, [&](const Block* block) { return goes(*block); });
  if (first == sequence->blocks.end()) return OkStatus();
  // Nobody else may begin with cells that are gone, or with what will be computed without them.
  WithdrawFrom(sequence, static_cast<size_t>(first - sequence->blocks.begin()));
  for (Block* block : sequence->blocks) {
    if (goes(*block)) (void)memory_->EvictLayers(block, {}, 0);
  }
  return OkStatus();
}

std::vector<TransitionCount> CacheImpl::Transitions() const {
  std::vector<TransitionCount> counts;
  for (int e = 0; e < kCellEvents; ++e) {
    for (int from = -1; from < kCellStates; ++from) {
      for (int to = 0; to < kCellStates; ++to) {
        const auto event = static_cast<CellEvent>(e);
        const auto before = from < 0 ? std::nullopt : std::optional(static_cast<CellState>(from));
        const uint64_t n = memory_->transitions().of(event, before, static_cast<CellState>(to));
        if (n == 0) continue;
        counts.push_back({std::string(CellEventName(event)), before ? std::string(CellStateName(*before)) : "none",
                          std::string(CellStateName(static_cast<CellState>(to))), n});
      }
    }
  }
  return counts;
}

std::string CacheImpl::Trace() const { return ChromeTrace(memory_->trace().Records()); }

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
        const uint32_t bytes = layer.coded(h).bytes;
        if (cell.exact != kNoSlot) {
          stats.bytes_by_state[static_cast<size_t>(CellState::kActive)] += layer.open.bytes;
        }
        if (cell.state == CellState::kEvicted) continue;
        if (cell.coded != kNoSlot || cell.state == CellState::kPersisted) {
          const bool replica = cell.state == CellState::kActive;
          stats.bytes_by_state[static_cast<size_t>(replica ? CellState::kQuantized : cell.state)] += bytes;
        }
        if (cell.coded != kNoSlot || cell.state == CellState::kPersisted || cell.state == CellState::kRecovering) {
          stats.kv_bytes += bytes;
          coded_bytes += bytes;
          elements += static_cast<uint64_t>(kBlockTokens) *
                      static_cast<uint64_t>(layer.geometry.head_dim_k + layer.geometry.head_dim_v);
        }
        if (cell.exact != kNoSlot) stats.kv_bytes += layer.open.bytes;
        if (cell.durable) stats.file_bytes += bytes;
      }
      if (!block->sinks.empty()) stats.kv_bytes += uint64_t{layer.n_heads} * layer.sink.bytes;
    }
  }
  for (const auto& sequence : sequences_) {
    if (sequence != nullptr)
      stats.f16_bytes += F16Bytes(options_.geometry, static_cast<int64_t>(sequence->tokens.size()));
  }
  if (elements == 0) {  // what sealed cells will be: one of each layer and head
    for (const LayerCells& layer : map.layers) {
      for (uint16_t h = 0; h < layer.n_heads; ++h) coded_bytes += layer.coded(h).bytes;
      elements += uint64_t{layer.n_heads} * static_cast<uint64_t>(kBlockTokens) *
                  static_cast<uint64_t>(layer.geometry.head_dim_k + layer.geometry.head_dim_v);
    }
  }
  stats.bits_per_element = 8.0 * static_cast<double>(coded_bytes) / static_cast<double>(elements);
  stats.ram_bytes = memory_->committed();
  stats.ram_peak_bytes = memory_->peak_committed();
  stats.reads_ram = reads_ram_.load(std::memory_order_relaxed);
  stats.reads_shared = reads_shared_.load(std::memory_order_relaxed);
  stats.prefix_bytes = tree_.n_idle() * block_bytes_;
  stats.reads_mapped = reads_mapped_.load(std::memory_order_relaxed);
  stats.reads_file = reads_file_.load(std::memory_order_relaxed);
  stats.approximate_reads = approximate_reads_.load(std::memory_order_relaxed);
  stats.transitions = memory_->transitions().total();
  stats.pressure = static_cast<int32_t>(memory_->pressure());
  stats.ram_fill = memory_->ram_fill();
  stats.misses_streamed = memory_->streamed_reads();
  stats.misses_recovering = memory_->recovering_reads();
  stats.evicted_skips = evicted_skips_.load(std::memory_order_relaxed);
  const CellMemory::Counters& counters = memory_->counters();
  stats.thrashed = counters.thrashed;
  stats.damped = counters.damped;
  stats.waits = counters.waits;
  stats.longest_wait_ms = counters.longest_wait_ms;
  stats.jobs = counters.jobs;
  stats.failed_jobs = counters.failed_jobs;
  stats.saturated = saturated_.load(std::memory_order_relaxed);
  stats.not_finite = not_finite_.load(std::memory_order_relaxed);
  if (store_ != nullptr) {
    const StoreEvictions evictions = store_->Evictions();
    stats.removed_sessions = static_cast<uint64_t>(evictions.sessions);
    stats.removed_blocks = static_cast<uint64_t>(evictions.blocks);
  }
  return stats;
}

}  // namespace kvcell
