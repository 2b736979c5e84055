#include "cell/cell_memory.h"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <utility>

#include "base/clock.h"
#include "codec/cell_codec.h"

namespace kvcell {
namespace {

constexpr uint64_t kHugeChunk = uint64_t{2} << 20;
constexpr uint64_t kSmallChunk = uint64_t{128} << 10;
// Chunks that are whole huge pages cost fewer page faults when cells come and fewer TLB misses when they are attended,
// and at most one of them a pool lies unused. Coded cells get them from this budget a pool on, so that a 24th of it is
// lost at most; exact cells and sinks, of which there are few, from the other one on.
constexpr uint64_t kHugeCodedBudget = uint64_t{48} << 20;
constexpr uint64_t kHugeExactBudget = uint64_t{256} << 20;

uint64_t PoolBytes(const std::vector<CellMap::PoolUse>& pools, uint64_t chunk_target, uint64_t n_blocks) {
  uint64_t bytes = 0;
  for (const CellMap::PoolUse& pool : pools) {
    bytes += BytesForSlots(MakeChunkShape(pool.slot_bytes, chunk_target), n_blocks * pool.slots());
  }
  return bytes;
}

}  // namespace

MemoryShape MakeMemoryShape(const CellMap& map, uint64_t budget, int32_t max_sequences, int32_t recent_blocks,
                            int32_t max_step_tokens, int32_t prefix_roots, bool elastic) {
  MemoryShape shape;
  shape.coded_chunk = budget / kHugeCodedBudget >= map.coded_pools.size() ? kHugeChunk : kSmallChunk;
  shape.exact_chunk = budget >= kHugeExactBudget ? kHugeChunk : kSmallChunk;
  // A step holds the open block it began with and the one it ends with, and replicas on both sides while it lasts.
  const auto sequences = static_cast<uint64_t>(max_sequences);
  shape.exact_blocks = sequences * (2 * static_cast<uint64_t>(recent_blocks) + 2);
  shape.sink_blocks = sequences + static_cast<uint64_t>(prefix_roots);
  shape.fixed_bytes = PoolBytes(map.exact_pools, shape.exact_chunk, shape.exact_blocks) +
                      PoolBytes(map.sink_pools, shape.exact_chunk, shape.sink_blocks);
  int32_t window = 0;
  for (const LayerCells& layer : map.layers) window = std::max(window, layer.geometry.window);
  const auto step_blocks = static_cast<uint64_t>(max_step_tokens / kBlockTokens + 1);
  const uint64_t window_blocks = sequences * ((static_cast<uint64_t>(window) + kBlockTokens - 1) / kBlockTokens + 1);
  shape.minimum_coded =
      CodedBytes(map, shape.coded_chunk, step_blocks + 1, step_blocks + (window > 0 ? window_blocks : 0));
  if (elastic) {  // a step's blocks exactly, and the coded cells that they become when the next step needs the room
    shape.minimum_coded += PoolBytes(map.exact_pools, shape.exact_chunk, step_blocks + kCodeBatch) +
                           CodedBytes(map, shape.coded_chunk, kCodeBatch, kCodeBatch);
  }
  return shape;
}

uint64_t CodedBytes(const CellMap& map, uint64_t chunk_target, uint64_t n_blocks, uint64_t n_window_blocks) {
  uint64_t bytes = 0;
  for (const CellMap::PoolUse& pool : map.coded_pools) {
    const uint64_t slots =
        n_blocks * pool.slots_per_block[kFullLayers] + n_window_blocks * pool.slots_per_block[kWindowLayers];
    bytes += BytesForSlots(MakeChunkShape(pool.slot_bytes, chunk_target), slots);
  }
  return bytes;
}

Result<std::unique_ptr<CellMemory>> CellMemory::Create(CellMap map, const Options& options) {
  std::unique_ptr<CellMemory> memory(new CellMemory(std::move(map), options));
  const auto make = [&](const std::vector<CellMap::PoolUse>& uses, uint64_t chunk_target,
                        std::vector<std::unique_ptr<SlotPool>>* pools) -> Status {
    for (const CellMap::PoolUse& use : uses) {
      auto pool = SlotPool::Create(use.slot_bytes, chunk_target, options.budget);
      if (!pool) return pool.error();
      pools->push_back(std::move(*pool));
    }
    return OkStatus();
  };
  KVCELL_FAIL_IF_ERROR(make(memory->map_.coded_pools, options.shape.coded_chunk, &memory->coded_));
  KVCELL_FAIL_IF_ERROR(make(memory->map_.exact_pools, options.shape.exact_chunk, &memory->exact_));
  KVCELL_FAIL_IF_ERROR(make(memory->map_.sink_pools, options.shape.exact_chunk, &memory->sinks_));
  for (size_t i = 0; i < memory->exact_.size(); ++i) {
    memory->exact_[i]->SetAside(options.shape.exact_blocks * memory->map_.exact_pools[i].slots());
  }
  for (size_t i = 0; i < memory->sinks_.size(); ++i) {
    memory->sinks_[i]->SetAside(options.shape.sink_blocks * memory->map_.sink_pools[i].slots());
  }
  for (const auto& pool : memory->exact_) memory->exact_set_aside_ += pool->committed();
  memory->rules_ = options.rules != nullptr ? options.rules : DefaultRules();
  memory->file_bytes_ = options.tier_bytes;
  memory->StartSampler();
  memory->NotePeak();
  memory->worker_ = std::thread([m = memory.get()] { m->WorkerLoop(); });
  memory->disk_reads_ = ProbeDiskReads();
  return memory;
}

void CellMemory::StartSampler() {
  sampler_.reset();
  const uint64_t min_free = rules_->pressure.min_free;
  if (min_free == 0) return;
  sampler_ = std::make_unique<PressureSampler>(options_.probe ? options_.probe : ProbeFreeMemory, min_free,
                                               std::chrono::milliseconds(250));
}

void CellMemory::SetRules(std::shared_ptr<const Rules> rules) {
  const bool samples = rules->pressure.min_free != rules_->pressure.min_free;
  rules_ = std::move(rules);
  if (samples) StartSampler();
  moved_on_ = true;
}

CellMemory::~CellMemory() {
  if (!worker_.joinable()) return;
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  wake_.notify_all();
  worker_.join();
  // What was never taken in: its slots go with the pools, its holds on blocks here.
  for (Job& job : finished_) {
    if (job.kind == JobKind::kWrite && job.places) {
      for (const BlockPlace& place : *job.places) options_.tier->DestroyCells(place);
    }
    for (Block* block : job.blocks) Release(block);
  }
  for (Job& job : queue_) {
    for (Block* block : job.blocks) Release(block);
  }
}

Block* CellMemory::NewBlock(int64_t position, const BlockKey& parent) {
  auto* block = new Block;
  block->position = position;
  block->parent = parent;
  block->generation = options_.generation;
  block->cells.resize(map_.n_cells);
  return block;
}

void CellMemory::Release(Block* block) {
  if (--block->refs > 0) return;
  Forget(block);
  for (const CellGroup group : {kFullLayers, kWindowLayers}) EvictGroup(block, group);
  for (const auto& place : block->places) {
    if (place) options_.tier->DestroyCells(*place);
  }
  for (const LayerCells& layer : map_.layers) {
    if (block->sinks.empty()) break;
    for (uint16_t h = 0; h < layer.n_heads; ++h) sinks_[layer.sink_pool]->Give(block->sinks[layer.first_cell + h]);
  }
  delete block;
}

const CellRule* CellMemory::Apply(const Block& block, CellEntry* cell, CellEvent event, const CellFacts& facts) {
  const CellRule* rule = rules_->table.Find(event, cell->state, facts);
  if (rule == nullptr) return nullptr;
  cell->state = rule->to;
  transitions_.Add(*rule);
  trace_.Add(*rule, block.position);
  return rule;
}

CellFacts CellMemory::FactsOf(const Block& block) const {
  return {.sealed = block.sealed,
          .pressure = pressure(),
          .age_tokens = std::max<int64_t>(0, block.sequence_end - block.position - kBlockTokens),
          // As of now: the bits have moved on by the steps that did not read the block.
          .read_steps = step_ - block.last_access >= 64 ? 0 : block.read_steps << (step_ - block.last_access),
          .idle_s = block.last_read_s == 0 ? 0.0 : static_cast<double>(SteadySeconds() - block.last_read_s),
          .ram_fill = ram_fill(),
          .file_fill = rules_->file_budget.value_or(0) == 0
                           ? 0.0
                           : std::min(1.0, static_cast<double>(file_bytes_.load(std::memory_order_relaxed)) /
                                               static_cast<double>(*rules_->file_budget))};
}

void CellMemory::GiveCoded(const LayerCells& layer, uint16_t head, CellEntry* cell) {
  if (cell->coded != kNoSlot) coded_[layer.run(head).pool]->Give(std::exchange(cell->coded, kNoSlot));
}

void CellMemory::GiveExact(const LayerCells& layer, CellEntry* cell) {
  if (cell->exact != kNoSlot) exact_[layer.exact_pool]->Give(std::exchange(cell->exact, kNoSlot));
}

Status CellMemory::CreateExact(Block* block) {
  const CellRule* rule = rules_->table.Find(CellEvent::kTokenAppend, std::nullopt, {});
  if (rule == nullptr) return Status(StatusCode::kInternal, "rules: none creates a cell on TOKEN_APPEND");
  for (const CellGroup group : {kFullLayers, kWindowLayers}) {
    ForEachCell(block, group, [&](const LayerCells& layer, uint16_t, CellEntry* cell) {
      cell->exact = exact_[layer.exact_pool]->Take();
      cell->state = rule->to;
      transitions_.Add(*rule);
      trace_.Add(*rule, block->position);
    });
  }
  NotePeak();
  return OkStatus();
}

void CellMemory::CreateSinks(Block* block) {
  block->sinks.assign(map_.n_cells, kNoSlot);
  for (const LayerCells& layer : map_.layers) {
    for (uint16_t h = 0; h < layer.n_heads; ++h) block->sinks[layer.first_cell + h] = sinks_[layer.sink_pool]->Take();
  }
  NotePeak();
}

bool CellMemory::SealCodesAll() const {
  const auto sealing = rules_->table.Of(CellEvent::kTokenAppend, CellState::kActive);
  CellFacts facts{.sealed = true, .pressure = pressure(), .ram_fill = ram_fill()};
  for (const LayerCells& layer : map_.layers) {
    facts.layer = layer.number;
    for (uint16_t h = 0; h < layer.n_heads; ++h) {
      facts.head = h;
      const auto fits = [&](const CellRule* rule) { return Holds(rule->guard, facts); };
      if (!std::any_of(sealing.begin(), sealing.end(), fits)) return false;
    }
  }
  return true;
}

void CellMemory::TakeCoded(Block* block) {
  CellFacts facts{.sealed = true, .pressure = pressure(), .ram_fill = ram_fill()};
  for (const CellGroup group : {kFullLayers, kWindowLayers}) {
    ForEachCell(block, group, [&](const LayerCells& layer, uint16_t h, CellEntry* cell) {
      facts.layer = layer.number;
      facts.head = h;
      // A cell whose exact values live in the step's scratch alone has to be coded, whatever has changed since.
      const bool may_stay = cell->exact != kNoSlot;
      if (may_stay && rules_->table.Find(CellEvent::kTokenAppend, CellState::kActive, facts) == nullptr) return;
      cell->coded = coded_[layer.run(h).pool]->Take();
    });
  }
  NotePeak();
}

void CellMemory::UndoCoded(Block* block) {
  for (const CellGroup group : {kFullLayers, kWindowLayers}) {
    ForEachCell(block, group, [&](const LayerCells& layer, uint16_t h, CellEntry* cell) { GiveCoded(layer, h, cell); });
  }
}

void CellMemory::Sealed(Block* block) {
  static const CellRule kCreated{
      .event = CellEvent::kTokenAppend, .from = std::nullopt, .to = CellState::kActive, .action = CellAction::kCreate};
  static const CellRule kCoded{.event = CellEvent::kTokenAppend,
                               .from = CellState::kActive,
                               .to = CellState::kQuantized,
                               .action = CellAction::kCode};
  block->sealed = true;
  for (const CellGroup group : {kFullLayers, kWindowLayers}) {
    ForEachCell(block, group, [&](const LayerCells&, uint16_t, CellEntry* cell) {
      // A cell whose exact values lived in the step's scratch was created and coded within one step.
      if (cell->state == CellState::kEvicted) {
        transitions_.Add(kCreated);
        trace_.Add(kCreated, block->position);
        cell->state = CellState::kActive;
      }
      // TakeCoded asked the rules; since then the bytes have been coded, which completes the transition.
      if (cell->coded == kNoSlot) return;
      cell->state = CellState::kQuantized;
      transitions_.Add(kCoded);
      trace_.Add(kCoded, block->position);
    });
  }
  AddResident(block);
  moved_on_ = true;
}

void CellMemory::DropExact(Block* block) {
  for (const CellGroup group : {kFullLayers, kWindowLayers}) {
    ForEachCell(block, group, [&](const LayerCells& layer, uint16_t, CellEntry* cell) {
      if (cell->state != CellState::kActive) GiveExact(layer, cell);
    });
  }
}

void CellMemory::CreateReplicas(Block* block) {
  for (const CellGroup group : {kFullLayers, kWindowLayers}) {
    ForEachCell(block, group, [&](const LayerCells& layer, uint16_t, CellEntry* cell) {
      cell->exact = exact_[layer.exact_pool]->Take();
    });
  }
  NotePeak();
}

void CellMemory::StoredBlock(Block* block, const std::array<std::optional<BlockPlace>, kCellGroups>& places,
                             uint64_t generation) {
  block->sealed = true;
  block->n_tokens = kBlockTokens;
  block->places = places;
  block->generation = generation;
  for (const CellGroup group : {kFullLayers, kWindowLayers}) {
    if (!places[group]) continue;
    ForEachCell(block, group, [&](const LayerCells&, uint16_t, CellEntry* cell) {
      cell->state = CellState::kPersisted;
      cell->durable = true;
    });
  }
}

void CellMemory::AdoptPlaces(Block* block, const std::array<std::optional<BlockPlace>, kCellGroups>& places,
                             uint64_t generation) {
  for (const CellGroup group : {kFullLayers, kWindowLayers}) PlaceAt(block, group, places[group]);
  block->generation = generation;
}

// Bytes at another place are others, though they are to be equal: nobody has checked them.
void CellMemory::PlaceAt(Block* block, CellGroup group, const std::optional<BlockPlace>& place) {
  const auto& now = block->places[group];
  const bool same =
      now && place && now->segment == place->segment && now->offset == place->offset && now->index == place->index;
  block->places[group] = place;
  if (same) return;
  block->mapped = nullptr;
  ForEachCell(block, group, [](const LayerCells&, uint16_t, CellEntry* cell) { cell->checked = 0; });
}

void CellMemory::EvictGroup(Block* block, CellGroup group) {
  ForEachCell(block, group, [&](const LayerCells& layer, uint16_t h, CellEntry* cell) {
    GiveCoded(layer, h, cell);
    GiveExact(layer, cell);
    if (cell->state == CellState::kEvicted) return;
    // The end of a cell's life needs no rule's consent: what always holds has one from every state.
    static const std::array<CellRule, kCellStates> kEnds = [] {
      std::array<CellRule, kCellStates> ends;
      for (int i = 0; i < kCellStates; ++i) {
        ends[static_cast<size_t>(i)] = {.event = CellEvent::kEvict,
                                        .from = static_cast<CellState>(i),
                                        .to = CellState::kEvicted,
                                        .action = CellAction::kDrop};
      }
      return ends;
    }();
    const CellRule& end = kEnds[static_cast<size_t>(cell->state)];
    cell->state = CellState::kEvicted;
    transitions_.Add(end);
    trace_.Add(end, block->position);
  });
}

bool CellMemory::EvictLayers(Block* block, const Range<int64_t>& layers, int64_t age_tokens) {
  if (block->busy) return false;
  // An extent holds whole blocks: where only some layers are given up, the block is written while it is whole.
  if (!layers.any() && options_.tier != nullptr && NeedsWrite(*block, kFullLayers)) {
    block->write_wanted = true;
    moved_on_ = true;
    return false;
  }
  CellFacts facts = FactsOf(*block);
  facts.age_tokens = age_tokens;
  bool write = false, there = false;
  for (const LayerCells& layer : map_.layers) {
    if (layer.group != kFullLayers) continue;
    facts.layer = layer.number;
    for (uint16_t h = 0; h < layer.n_heads; ++h) {
      CellEntry& cell = block->cells[layer.first_cell + h];
      facts.head = h;
      facts.durable = cell.durable;
      const CellRule* rule = nullptr;
      const bool kept = cell.state == CellState::kPersisted && rules_->KeepsEvicted(layer.number);
      if (layers.holds(layer.number) && cell.state != CellState::kEvicted && !kept) {
        rule = rules_->table.Find(CellEvent::kEvict, cell.state, facts);
      }
      if (rule != nullptr && rule->action == CellAction::kDropRam && !cell.durable) {
        write = true;  // it leaves when it has been written
      } else if (rule != nullptr) {
        Apply(*block, &cell, CellEvent::kEvict, facts);
        GiveCoded(layer, h, &cell);
        GiveExact(layer, &cell);
      }
      there |= cell.coded != kNoSlot || cell.exact != kNoSlot;
    }
  }
  if (!there) Forget(block);
  if (!write) return true;
  block->write_wanted = true;
  moved_on_ = true;
  return false;
}

Result<Block*> CellMemory::CopyOpen(const Block& block, int n_tokens) {
  Block* copy = NewBlock(block.position, block.parent);
  copy->n_tokens = n_tokens;
  copy->tokens = block.tokens;
  if (Status status = CreateExact(copy); !status.ok()) {
    Release(copy);
    return Fail(std::move(status));
  }
  if (!block.sinks.empty()) CreateSinks(copy);
  for (const LayerCells& layer : map_.layers) {
    for (uint16_t h = 0; h < layer.n_heads; ++h) {
      const uint32_t i = layer.first_cell + h;
      CopyExactTokens(layer.open, exact(layer, block.cells[i]), 0, n_tokens, layer.open, exact(layer, copy->cells[i]),
                      0);
      if (!block.sinks.empty()) {
        std::memcpy(sink(layer, copy->sinks[i]), sink(layer, block.sinks[i]), layer.sink.bytes);
      }
    }
  }
  return copy;
}

void CellMemory::AddResident(Block* block) {
  if (block->resident_index != SIZE_MAX) return;
  block->resident_index = resident_.size();
  resident_.push_back(block);
}

void CellMemory::Forget(Block* block) {
  if (block->resident_index == SIZE_MAX) return;
  resident_[block->resident_index] = resident_.back();
  resident_.back()->resident_index = block->resident_index;
  resident_.pop_back();
  block->resident_index = SIZE_MAX;
}

uint64_t CellMemory::used() const {
  uint64_t bytes = 0;
  for (const auto& pool : coded_) bytes += pool->committed();
  for (const auto& pool : exact_) bytes += pool->committed();
  return bytes - exact_set_aside_;
}

uint64_t CellMemory::coded_limit() const {
  return options_.budget - options_.shape.fixed_bytes - options_.scratch_bytes;
}

double CellMemory::ram_fill() const {
  const uint64_t limit = coded_limit();
  return limit == 0 ? 1.0 : std::min(1.0, static_cast<double>(used()) / static_cast<double>(limit));
}

Pressure CellMemory::pressure() const {
  const double fill = ram_fill();
  const Pressure ours = fill >= rules_->pressure.hard   ? Pressure::kHard
                        : fill >= rules_->pressure.soft ? Pressure::kSoft
                                                        : Pressure::kNone;
  return sampler_ == nullptr ? ours : std::max(ours, sampler_->pressure());
}

uint64_t CellMemory::CodedGrowth(uint64_t n_blocks) const {
  uint64_t bytes = 0;
  for (size_t i = 0; i < coded_.size(); ++i) bytes += coded_[i]->GrowthFor(n_blocks * map_.coded_pools[i].slots());
  return bytes;
}

uint64_t CellMemory::ExactGrowth(uint64_t n_blocks) const {
  uint64_t bytes = 0;
  for (size_t i = 0; i < exact_.size(); ++i) bytes += exact_[i]->GrowthFor(n_blocks * map_.exact_pools[i].slots());
  return bytes;
}

// Where sealed cells may be exact, room for coding some of them is kept free: coding takes before it gives.
bool CellMemory::Fits(uint64_t n_blocks, uint64_t n_exact) const {
  const uint64_t reserve = n_exact > 0 ? kCodeBatch : 0;
  return used() + CodedGrowth(n_blocks + reserve) + ExactGrowth(n_exact) <= coded_limit();
}

uint64_t CellMemory::committed() const {
  uint64_t bytes = options_.scratch_bytes;
  for (const auto& pool : coded_) bytes += pool->committed();
  for (const auto& pool : exact_) bytes += pool->committed();
  for (const auto& pool : sinks_) bytes += pool->committed();
  return bytes;
}

void CellMemory::NotePeak() { peak_ = std::max(peak_, committed()); }

Status CellMemory::NoRoom() const {
  if (options_.tier == nullptr) {
    return Status(
        StatusCode::kOutOfBudget,
        fmt::format("the RAM budget of {} bytes is full and there is no store or other tier for older cells to go to; "
                    "raise ram_budget or name a store",
                    options_.budget));
  }
  return Status(StatusCode::kOutOfBudget,
                fmt::format("the RAM budget of {} bytes is too small for this step under the rules `{}`, which let no "
                            "more cells go; raise ram_budget, lower the step's tokens, or change the rules",
                            options_.budget, rules_->name));
}

Status CellMemory::ReserveCoded(uint64_t n_blocks, uint64_t n_exact) {
  if (n_blocks == 0 && n_exact == 0) return OkStatus();
  const auto start = std::chrono::steady_clock::now();
  const auto deadline = start + std::chrono::milliseconds(rules_->pressure.wait_ms);
  bool waited = false;
  while (!Fits(n_blocks, n_exact)) {
    KVCELL_RETURN_IF_ERROR(TakeIn(std::chrono::seconds(0)));
    if (Fits(n_blocks, n_exact)) break;
    Sweep sweep;
    MakeRoom(n_blocks, n_exact, &sweep);
    if (sweep.moved > 0) continue;
    // Coding gives back most, and at once; writing is asked for where nothing is left to be coded.
    const bool started = Start(JobKind::kCode, std::move(sweep.code)) || Start(JobKind::kWrite, std::move(sweep.write));
    if (!started && jobs_under_way_ == 0) return NoRoom();
    const auto left = deadline - std::chrono::steady_clock::now();
    if (left <= std::chrono::seconds(0)) {
      return Status(StatusCode::kOutOfBudget,
                    fmt::format("no room in the RAM budget of {} bytes after {} ms: older cells are still on their way "
                                "out; try again, or raise ram_budget or the rules' wait_ms",
                                options_.budget, rules_->pressure.wait_ms));
    }
    waited = true;
    KVCELL_RETURN_IF_ERROR(TakeIn(left));
  }
  if (waited) {
    ++counters_.waits;
    const double ms = std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
    counters_.longest_wait_ms = std::max(counters_.longest_wait_ms, ms);
  }
  return OkStatus();
}

uint64_t CellMemory::FreeBlocks(uint64_t n_going) const {
  const uint64_t per_block = map_.CodedBytesPerBlock(kFullLayers) + map_.CodedBytesPerBlock(kWindowLayers);
  uint64_t low = 0, high = (coded_limit() - std::min(coded_limit(), used())) / per_block + n_going + 1;
  for (size_t i = 0; i < coded_.size(); ++i) {
    if (map_.coded_pools[i].slots() > 0) high += coded_[i]->free_slots() / map_.coded_pools[i].slots();
  }
  while (low < high) {
    const uint64_t middle = (low + high + 1) / 2;
    if (middle <= n_going || Fits(middle - n_going)) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

uint64_t CellMemory::RoomForBlocks(uint64_t n_blocks) const {
  const uint64_t taken = used() + options_.shape.minimum_coded;
  uint64_t low = 0;
  while (low < n_blocks) {
    const uint64_t middle = (low + n_blocks + 1) / 2;
    if (taken + CodedGrowth(middle) <= coded_limit()) {
      low = middle;
    } else {
      n_blocks = middle - 1;
    }
  }
  return low;
}

void CellMemory::Encode(const Block& block, const LayerCells& layer, uint16_t head, std::byte* out) const {
  const CellEntry& cell = block.cells[layer.first_cell + head];
  EncodeCell(layer.coded(head), layer.open, exact(layer, cell), block.position == 0 ? map_.sinks : 0, out);
  SealHeader(out, layer.number, head, static_cast<uint64_t>(block.position), block.key.data(), block.generation);
}

Status CellMemory::CheckFileBudget(uint64_t bytes) const {
  const auto budget = rules_->file_budget;
  if (!budget || file_bytes_.load(std::memory_order_relaxed) + bytes <= *budget) return OkStatus();
  return Status(StatusCode::kNoSpace,
                fmt::format("the file budget of {} bytes is full; remove sessions (`kvcell sessions rm`) or raise "
                            "budgets.file in the rules",
                            *budget));
}

// Cells that are exact only are coded on the way: their bytes in the file are what they would be in RAM.
Result<std::vector<BlockPlace>> CellMemory::WriteExtent(std::span<Block* const> blocks, CellGroup group) const {
  const auto slots = Runs(group);
  const uint64_t bytes = blocks.size() * map_.CodedBytesPerBlock(group);
  KVCELL_FAIL_IF_ERROR(CheckFileBudget(bytes));
  std::vector<std::byte> made;
  auto places = options_.tier->CreateCells(map_.shapes[group], static_cast<uint32_t>(blocks.size()),
                                           [&](size_t slot, uint32_t b, uint16_t head) {
                                             const auto& [layer, run] = slots[slot];
                                             const auto h = static_cast<uint16_t>(run->first_head + head);
                                             const CellEntry& cell = blocks[b]->cells[layer->first_cell + h];
                                             if (cell.coded != kNoSlot) return coded(*layer, h, cell);
                                             made.resize(run->layout.bytes);
                                             Encode(*blocks[b], *layer, h, made.data());
                                             return static_cast<const std::byte*>(made.data());
                                           });
  if (places && places->size() != blocks.size()) {
    for (const BlockPlace& place : *places) options_.tier->DestroyCells(place);
    return Fail(StatusCode::kInternal, fmt::format("tier '{}' gave {} places to {} blocks", options_.tier->TierName(),
                                                   places->size(), blocks.size()));
  }
  if (places) file_bytes_.fetch_add(bytes, std::memory_order_relaxed);
  return places;
}

void CellMemory::MarkWritten(std::span<Block* const> blocks, CellGroup group, const std::vector<BlockPlace>& places) {
  for (size_t i = 0; i < blocks.size(); ++i) {
    PlaceAt(blocks[i], group, places[i]);
    CellFacts facts = FactsOf(*blocks[i]);
    ForEachCell(blocks[i], group, [&](const LayerCells& layer, uint16_t h, CellEntry* cell) {
      if (cell->coded == kNoSlot && cell->exact == kNoSlot) return;
      facts.durable = cell->durable;
      facts.layer = layer.number;
      facts.head = h;
      const CellRule* rule = Apply(*blocks[i], cell, CellEvent::kWriteBack, facts);
      cell->durable = true;  // an exact cell too: the store holds what it would be coded to
      if (rule != nullptr && rule->action == CellAction::kDropRam) GiveCoded(layer, h, cell);
    });
  }
}

// True where the group's bytes are in RAM and not in the store: all of them, since an extent holds whole blocks.
bool CellMemory::NeedsWrite(const Block& block, CellGroup group) const {
  if (block.places[group] || !block.sealed || map_.shapes[group].layers.empty()) return false;
  for (const LayerCells& layer : map_.layers) {
    if (layer.group != group) continue;
    for (uint16_t h = 0; h < layer.n_heads; ++h) {
      const CellEntry& cell = block.cells[layer.first_cell + h];
      if (cell.coded == kNoSlot && cell.exact == kNoSlot) return false;
    }
  }
  return true;
}

Status CellMemory::WriteNow(std::span<Block* const> blocks) {
  KVCELL_RETURN_IF_ERROR(Settle());
  for (const CellGroup group : {kFullLayers, kWindowLayers}) {
    std::vector<Block*> missing;
    for (Block* block : blocks) {
      if (NeedsWrite(*block, group)) missing.push_back(block);
    }
    if (missing.empty()) continue;
    auto places = WriteExtent(missing, group);
    if (!places) return places.error();
    MarkWritten(missing, group, *places);
  }
  return OkStatus();
}

Status CellMemory::Persist(std::span<Block* const> blocks) {
  if (options_.tier == nullptr) return Status(StatusCode::kInvalidArgument, "there is no store for cells to go to");
  KVCELL_RETURN_IF_ERROR(WriteNow(blocks));
  size_t moved = 0;
  bool any_in_ram = false;
  for (Block* block : blocks) {
    any_in_ram |= block->resident_index != SIZE_MAX;
    if (!block->sealed || block->pinned) continue;
    CellFacts facts = FactsOf(*block);
    facts.pressure = Pressure::kHard;
    block->stays_out = true;
    Sweep sweep;
    for (int round = 0; round < 2; ++round) {  // an exact cell is coded first, then it leaves
      if (SweepBlock(block, facts, &sweep)) ++moved;
      if (!Start(JobKind::kCode, std::move(sweep.code))) break;
      sweep.code.clear();
      KVCELL_RETURN_IF_ERROR(Settle());
    }
  }
  if (moved > 0 || !any_in_ram) return OkStatus();
  if (std::ranges::any_of(blocks, [](const Block* block) { return block->pinned; }))
    return Status(StatusCode::kInvalidArgument, "these cells are pinned in RAM; unpin them first");
  return Status(StatusCode::kInvalidArgument,
                fmt::format("the rules `{}` let none of these cells leave RAM", rules_->name));
}

// A sealed cell's values as an exact cell, tokens that it leaves out as zero.
void CellMemory::Decode(const LayerCells& layer, uint16_t head, const std::byte* from, std::byte* to) const {
  const auto dk = static_cast<size_t>(layer.geometry.head_dim_k), dv = static_cast<size_t>(layer.geometry.head_dim_v);
  std::vector<float> k(kBlockTokens * dk), v(kBlockTokens * dv);
  DecodeCell(layer.coded(head), from, k.data(), v.data());
  SanitizeCounts none;
  for (int t = 0; t < kBlockTokens; ++t) {
    const auto row = static_cast<size_t>(t);
    WriteExactToken(layer.open, to, t, k.data() + row * dk, v.data() + row * dv, &none);
  }
}

std::vector<CellMemory::CellRun> CellMemory::Runs(CellGroup group) const {
  std::vector<CellRun> runs;
  for (const LayerCells& layer : map_.layers) {
    if (layer.group != group) continue;
    for (const HeadRun& run : layer.runs) runs.emplace_back(&layer, &run);
  }
  return runs;
}

bool CellMemory::InStoreOnly(const Block& block) const {
  if (!block.places[kFullLayers]) return false;
  for (const LayerCells& layer : map_.layers) {
    if (layer.group != kFullLayers) continue;
    for (uint16_t h = 0; h < layer.n_heads; ++h) {
      const CellEntry& cell = block.cells[layer.first_cell + h];
      if (cell.coded == kNoSlot && cell.state != CellState::kEvicted) return true;
    }
  }
  return false;
}

// Mapped while the system has the file's pages at hand. Where a step had to wait for them, the next one streams, until
// one comes without the disk: reading whole runs ahead is faster then than faults of single pages, and what comes from
// a disk is checked as it comes.
void CellMemory::BeginReads() {
  mapped_version_ = 0;
  file_runs_.clear();
  if (options_.tier == nullptr) return;
  const DiskReads before = std::exchange(disk_reads_, ProbeDiskReads());
  const bool faulted = disk_reads_.major_faults != before.major_faults;
  disk_was_read_ = disk_reads_.bytes != before.bytes;
  const bool streams_on = !was_mapped_ && disk_was_read_;
  was_mapped_ = options_.mapped && !faulted && !streams_on;
  if (!was_mapped_) return;
  auto version = options_.tier->MappedVersion();
  if (!version) version = options_.tier->MappedVersion();  // without the file that was cut off meanwhile
  if (version) mapped_version_ = static_cast<uint32_t>(*version);
}

void CellMemory::MapBlock(Block* block) {
  block->mapped = nullptr;
  if (!InStoreOnly(*block)) return;
  const BlockPlace& place = *block->places[kFullLayers];
  if (mapped_version_ != 0) block->mapped = options_.tier->MapExtent(map_.shapes[kFullLayers], place);
  if (!disk_was_read_) return;
  if (!file_runs_.empty()) {
    FileRun& run = file_runs_.back();
    if (run.first.segment == place.segment && run.first.offset == place.offset &&
        run.first.index + run.n_blocks == place.index) {
      ++run.n_blocks;
      return;
    }
  }
  file_runs_.push_back({place, 1});
}

void CellMemory::PrefetchLayer(const LayerCells& layer) const {
  if (layer.group != kFullLayers) return;
  for (const FileRun& file : file_runs_) {
    for (const HeadRun& run : layer.runs) {
      options_.tier->Prefetch(map_.shapes[kFullLayers], file.first, run.slot, file.n_blocks);
    }
  }
}

const std::byte* CellMemory::MappedCell(const Block& block, const LayerCells& layer, uint16_t head) const {
  const BlockPlace& place = *block.places[kFullLayers];
  const HeadRun& run = layer.run(head);
  return block.mapped + run.before * place.n_blocks +
         (uint64_t{place.index} * run.n_heads + layer.head_in_slot(head)) * run.layout.bytes;
}

// What a step checked and then read is what the file holds, unless the file changed in between, or pages of it came
// from the disk: then it is checked once more, which tells whether what was read is what is there now.
Status CellMemory::EndReads(std::span<Block* const> blocks) {
  if (mapped_version_ == 0) return OkStatus();
  const auto version = options_.tier->MappedVersion();
  if (!version) return version.error();
  const auto now = static_cast<uint32_t>(*version);
  if (now == mapped_version_ && ProbeDiskReads().major_faults == disk_reads_.major_faults) return OkStatus();
  for (Block* block : blocks) {
    if (block->mapped == nullptr) continue;
    for (const LayerCells& layer : map_.layers) {
      for (uint16_t h = 0; layer.group == kFullLayers && h < layer.n_heads; ++h) {
        const CellEntry& cell = block->cells[layer.first_cell + h];
        if (cell.checked != mapped_version_) continue;  // not read, or in an earlier state of the file
        KVCELL_RETURN_IF_ERROR(CheckRead(*block, layer, h, MappedCell(*block, layer, h)));
        cell.checked = now;
      }
    }
  }
  // Those bytes, too, may just have gone.
  const auto last = options_.tier->MappedVersion();
  return last ? OkStatus() : last.error();
}

Result<CellMemory::CodedBytes> CellMemory::CodedForRead(const Block& block, const LayerCells& layer, uint16_t head,
                                                        std::byte* ring) const {
  const CellEntry& cell = block.cells[layer.first_cell + head];
  if (cell.coded != kNoSlot) return CodedBytes{coded(layer, head, cell), ReadFrom::kRam};
  if (!block.places[layer.group]) {
    return Fail(StatusCode::kInternal,
                fmt::format("the cell at position {} is neither in RAM nor in the store", block.position));
  }
  if (block.mapped != nullptr && layer.group == kFullLayers) {
    const std::byte* const bytes = MappedCell(block, layer, head);
    const std::atomic_ref<uint32_t> checked(cell.checked);
    if (checked.load(std::memory_order_relaxed) != mapped_version_) {
      KVCELL_FAIL_IF_ERROR(CheckRead(block, layer, head, bytes));
      checked.store(mapped_version_, std::memory_order_relaxed);
    }
    return CodedBytes{bytes, ReadFrom::kMapped};
  }
  KVCELL_FAIL_IF_ERROR(ReadVerified(block, layer, head, ring));
  return CodedBytes{ring, ReadFrom::kRing};
}

Status CellMemory::ReadVerified(const Block& block, const LayerCells& layer, uint16_t head, std::byte* to) const {
  KVCELL_RETURN_IF_ERROR(options_.tier->ReadCells(map_.shapes[layer.group], *block.places[layer.group],
                                                  layer.slot(head), layer.head_in_slot(head), 1, to));
  return CheckRead(block, layer, head, to);
}

Status CellMemory::CheckRead(const Block& block, const LayerCells& layer, uint16_t head, const std::byte* bytes) const {
  const Status ok = VerifyCell({bytes, layer.coded(head).bytes}, layer.number, head, block.position, block.key);
  if (ok.ok()) return ok;
  const BlockPlace& place = *block.places[layer.group];
  options_.tier->ReportDamage(place);
  const auto [path, offset] =
      options_.tier->Locate(map_.shapes[layer.group], place, layer.slot(head), layer.head_in_slot(head));
  return Status(ok.code(), fmt::format("{} at byte {}: {}; cut the sequence to {} tokens and append the rest again",
                                       path, offset, ok.message(), block.position));
}

}  // namespace kvcell
