#include "cell/cell_memory.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "codec/cell_codec.h"

namespace kvcell {
namespace {

constexpr uint64_t kHugeChunk = uint64_t{2} << 20;
constexpr uint64_t kSmallChunk = uint64_t{128} << 10;
// From this budget on chunks are whole huge pages: fewer TLB misses in attention, at most one chunk per pool unused.
constexpr uint64_t kHugeChunkBudget = uint64_t{256} << 20;
// Blocks per background write: runs by layer are long enough to stream, and a batch ends soon enough to be waited for.
constexpr size_t kWriteBatch = 16;
constexpr uint64_t kReadBufferBytes = uint64_t{4} << 20;

uint64_t PoolBytes(const std::vector<CellMap::PoolUse>& pools, uint64_t chunk_target, uint64_t n_blocks) {
  uint64_t bytes = 0;
  for (const CellMap::PoolUse& pool : pools) {
    bytes += BytesForSlots(MakeChunkShape(pool.slot_bytes, chunk_target), n_blocks * pool.slots());
  }
  return bytes;
}

// Two places are side by side when one read can take both.
bool Follows(const BlockPlace& a, const BlockPlace& b) {
  return a.segment == b.segment && a.offset == b.offset && a.index + 1 == b.index;
}

}  // namespace

MemoryShape MakeMemoryShape(const CellMap& map, uint64_t budget, int32_t max_sequences, int32_t recent_blocks,
                            int32_t max_step_tokens, int32_t prefix_roots) {
  MemoryShape shape;
  shape.chunk_target = budget >= kHugeChunkBudget ? kHugeChunk : kSmallChunk;
  // A step holds the open block it began with and the one it ends with, and replicas on both sides while it lasts.
  const auto sequences = static_cast<uint64_t>(max_sequences);
  shape.exact_blocks = sequences * (2 * static_cast<uint64_t>(recent_blocks) + 2);
  shape.sink_blocks = sequences + static_cast<uint64_t>(prefix_roots);
  shape.fixed_bytes = PoolBytes(map.exact_pools, shape.chunk_target, shape.exact_blocks) +
                      PoolBytes(map.sink_pools, shape.chunk_target, shape.sink_blocks);
  int32_t window = 0;
  for (const LayerCells& layer : map.layers) window = std::max(window, layer.geometry.window);
  const auto step_blocks = static_cast<uint64_t>(max_step_tokens / kBlockTokens + 1);
  const uint64_t window_blocks = sequences * ((static_cast<uint64_t>(window) + kBlockTokens - 1) / kBlockTokens + 1);
  shape.minimum_coded =
      CodedBytes(map, shape.chunk_target, step_blocks + 1, step_blocks + (window > 0 ? window_blocks : 0));
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
  const auto make = [&](const std::vector<CellMap::PoolUse>& uses,
                        std::vector<std::unique_ptr<SlotPool>>* pools) -> Status {
    for (const CellMap::PoolUse& use : uses) {
      auto pool = SlotPool::Create(use.slot_bytes, options.shape.chunk_target, options.budget);
      if (!pool) return pool.error();
      pools->push_back(std::move(*pool));
    }
    return OkStatus();
  };
  KVCELL_FAIL_IF_ERROR(make(memory->map_.coded_pools, &memory->coded_));
  KVCELL_FAIL_IF_ERROR(make(memory->map_.exact_pools, &memory->exact_));
  KVCELL_FAIL_IF_ERROR(make(memory->map_.sink_pools, &memory->sinks_));
  for (size_t i = 0; i < memory->exact_.size(); ++i) {
    memory->exact_[i]->SetAside(options.shape.exact_blocks * memory->map_.exact_pools[i].slots());
  }
  for (size_t i = 0; i < memory->sinks_.size(); ++i) {
    memory->sinks_[i]->SetAside(options.shape.sink_blocks * memory->map_.sink_pools[i].slots());
  }
  memory->NotePeak();
  if (options.store != nullptr) memory->writer_ = std::thread([m = memory.get()] { m->WriterLoop(); });
  return memory;
}

CellMemory::~CellMemory() {
  if (!writer_.joinable()) return;
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  wake_.notify_all();
  writer_.join();
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
  if (block->places[kFullLayers] || block->places[kWindowLayers]) {
    options_.store->Release(
        {.key = block->key, .generation = block->generation, .tokens = block->tokens, .places = block->places});
  }
  for (const LayerCells& layer : map_.layers) {
    if (block->sinks.empty()) break;
    for (uint16_t h = 0; h < layer.n_heads; ++h) sinks_[layer.sink_pool]->Give(block->sinks[layer.first_cell + h]);
  }
  delete block;
}

bool CellMemory::Transition(CellEntry* cell, CellEvent event, const CellFacts& facts) {
  const CellRule* rule = rules_.Find(event, cell->state, facts);
  if (rule == nullptr) return false;
  cell->state = rule->to;
  transitions_.Add(*rule);
  return true;
}

template <typename F>
void CellMemory::ForEachCell(Block* block, CellGroup group, F f) {
  for (const LayerCells& layer : map_.layers) {
    if (layer.group != group) continue;
    for (uint16_t h = 0; h < layer.n_heads; ++h) f(layer, &block->cells[layer.first_cell + h]);
  }
}

Status CellMemory::CreateExact(Block* block) {
  const CellRule* rule = rules_.Find(CellEvent::kTokenAppend, std::nullopt, {});
  if (rule == nullptr) return Status(StatusCode::kInternal, "rules: none creates a cell on TOKEN_APPEND");
  for (const CellGroup group : {kFullLayers, kWindowLayers}) {
    ForEachCell(block, group, [&](const LayerCells& layer, CellEntry* cell) {
      cell->exact = exact_[layer.exact_pool]->Take();
      cell->state = rule->to;
      transitions_.Add(*rule);
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

void CellMemory::TakeCoded(Block* block) {
  for (const CellGroup group : {kFullLayers, kWindowLayers}) {
    ForEachCell(block, group,
                [&](const LayerCells& layer, CellEntry* cell) { cell->coded = coded_[layer.coded_pool]->Take(); });
  }
  NotePeak();
}

void CellMemory::UndoCoded(Block* block) {
  for (const CellGroup group : {kFullLayers, kWindowLayers}) {
    ForEachCell(block, group, [&](const LayerCells& layer, CellEntry* cell) {
      if (cell->coded != kNoSlot) coded_[layer.coded_pool]->Give(std::exchange(cell->coded, kNoSlot));
    });
  }
}

void CellMemory::Sealed(Block* block) {
  block->sealed = true;
  for (const CellGroup group : {kFullLayers, kWindowLayers}) {
    ForEachCell(block, group, [&](const LayerCells&, CellEntry* cell) {
      // A cell whose exact values lived in the step's scratch was created and coded within one step.
      if (cell->state == CellState::kEvicted) {
        cell->state = CellState::kActive;
        transitions_.Add(*rules_.Find(CellEvent::kTokenAppend, std::nullopt, {}));
      }
      Transition(cell, CellEvent::kTokenAppend, {.sealed = true});
    });
  }
  resident_.push_back(block);
}

void CellMemory::DropExact(Block* block) {
  for (const CellGroup group : {kFullLayers, kWindowLayers}) {
    ForEachCell(block, group, [&](const LayerCells& layer, CellEntry* cell) {
      if (cell->exact != kNoSlot) exact_[layer.exact_pool]->Give(std::exchange(cell->exact, kNoSlot));
    });
  }
}

void CellMemory::CreateReplicas(Block* block) {
  for (const CellGroup group : {kFullLayers, kWindowLayers}) {
    ForEachCell(block, group,
                [&](const LayerCells& layer, CellEntry* cell) { cell->exact = exact_[layer.exact_pool]->Take(); });
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
    ForEachCell(block, group, [&](const LayerCells&, CellEntry* cell) {
      cell->state = CellState::kPersisted;
      cell->durable = true;
    });
  }
}

void CellMemory::AdoptPlaces(Block* block, const std::array<std::optional<BlockPlace>, kCellGroups>& places,
                             uint64_t generation) {
  block->places = places;
  block->generation = generation;
}

void CellMemory::EvictGroup(Block* block, CellGroup group) {
  ForEachCell(block, group, [&](const LayerCells& layer, CellEntry* cell) {
    if (cell->coded != kNoSlot) coded_[layer.coded_pool]->Give(std::exchange(cell->coded, kNoSlot));
    if (cell->exact != kNoSlot) exact_[layer.exact_pool]->Give(std::exchange(cell->exact, kNoSlot));
    Transition(cell, CellEvent::kEvict, {.sealed = block->sealed, .durable = cell->durable});
  });
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

void CellMemory::Forget(Block* block) {
  const auto it = std::find(resident_.begin(), resident_.end(), block);
  if (it != resident_.end()) resident_.erase(it);
}

uint64_t CellMemory::coded_committed() const {
  uint64_t bytes = 0;
  for (const auto& pool : coded_) bytes += pool->committed();
  return bytes;
}

uint64_t CellMemory::coded_limit() const {
  return options_.budget - options_.shape.fixed_bytes - options_.scratch_bytes;
}

uint64_t CellMemory::CodedGrowth(uint64_t n_blocks) const {
  uint64_t bytes = 0;
  for (size_t i = 0; i < coded_.size(); ++i) bytes += coded_[i]->GrowthFor(n_blocks * map_.coded_pools[i].slots());
  return bytes;
}

uint64_t CellMemory::committed() const {
  uint64_t bytes = options_.scratch_bytes + coded_committed();
  for (const auto& pool : exact_) bytes += pool->committed();
  for (const auto& pool : sinks_) bytes += pool->committed();
  return bytes;
}

void CellMemory::NotePeak() { peak_ = std::max(peak_, committed()); }

bool CellMemory::DropOldestDurable() {
  const auto it = std::find_if(resident_.begin(), resident_.end(), [](const Block* block) {
    return block->places[kFullLayers].has_value() && !block->writing;
  });
  if (it == resident_.end()) return false;
  Block* block = *it;
  resident_.erase(it);
  ForEachCell(block, kFullLayers, [&](const LayerCells& layer, CellEntry* cell) {
    if (!Transition(cell, CellEvent::kMemoryPressure, {.sealed = true, .durable = cell->durable})) return;
    coded_[layer.coded_pool]->Give(std::exchange(cell->coded, kNoSlot));
  });
  return true;
}

Status CellMemory::ReserveCoded(uint64_t n_blocks) {
  if (n_blocks == 0) return OkStatus();
  while (coded_committed() + CodedGrowth(n_blocks) > coded_limit()) {
    if (DropOldestDurable()) continue;
    if (options_.store == nullptr) {
      return Status(
          StatusCode::kOutOfBudget,
          fmt::format("the RAM budget of {} bytes is full and there is no store for older cells to go to; raise "
                      "ram_budget or name a store",
                      options_.budget));
    }
    if (batches_under_way_ == 0) {
      std::vector<Block*> batch;
      for (Block* block : resident_) {
        if (batch.size() == kWriteBatch) break;
        if (!block->places[kFullLayers] && !block->writing) batch.push_back(block);
      }
      if (batch.empty()) {
        return Status(StatusCode::kOutOfBudget,
                      fmt::format("the RAM budget of {} bytes is too small for this step; raise ram_budget "
                                  "or lower the step's tokens",
                                  options_.budget));
      }
      Enqueue(std::move(batch));
    }
    KVCELL_RETURN_IF_ERROR(TakeIn(/*wait=*/true));
  }
  return OkStatus();
}

uint64_t CellMemory::FreeBlocks(uint64_t n_going) const {
  const uint64_t per_block = map_.CodedBytesPerBlock(kFullLayers) + map_.CodedBytesPerBlock(kWindowLayers);
  uint64_t low = 0, high = (coded_limit() - std::min(coded_limit(), coded_committed())) / per_block + n_going + 1;
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
  const uint64_t used = coded_committed() + options_.shape.minimum_coded;
  uint64_t low = 0;
  while (low < n_blocks) {
    const uint64_t middle = (low + n_blocks + 1) / 2;
    if (used + CodedGrowth(middle) <= coded_limit()) {
      low = middle;
    } else {
      n_blocks = middle - 1;
    }
  }
  return low;
}

Result<std::vector<BlockPlace>> CellMemory::WriteExtent(std::span<Block* const> blocks, CellGroup group) const {
  std::vector<const LayerCells*> layers;
  for (const LayerCells& layer : map_.layers) {
    if (layer.group == group) layers.push_back(&layer);
  }
  return options_.store->AppendExtent(map_.shapes[group], static_cast<uint32_t>(blocks.size()),
                                      [&](size_t slot, uint32_t b, uint16_t head) {
                                        const LayerCells& layer = *layers[slot];
                                        return coded(layer, blocks[b]->cells[layer.first_cell + head]);
                                      });
}

void CellMemory::MarkWritten(std::span<Block* const> blocks, CellGroup group, const std::vector<BlockPlace>& places) {
  for (size_t i = 0; i < blocks.size(); ++i) {
    blocks[i]->places[group] = places[i];
    ForEachCell(blocks[i], group, [&](const LayerCells&, CellEntry* cell) {
      if (Transition(cell, CellEvent::kWriteBack, {.sealed = true, .durable = cell->durable})) cell->durable = true;
    });
  }
}

Status CellMemory::WriteNow(std::span<Block* const> blocks) {
  KVCELL_RETURN_IF_ERROR(TakeIn(/*wait=*/true));
  for (const CellGroup group : {kFullLayers, kWindowLayers}) {
    if (map_.shapes[group].layers.empty()) continue;
    std::vector<Block*> missing;
    for (Block* block : blocks) {
      const LayerCells& first = *std::find_if(map_.layers.begin(), map_.layers.end(),
                                              [&](const LayerCells& layer) { return layer.group == group; });
      if (!block->places[group] && block->cells[first.first_cell].coded != kNoSlot) missing.push_back(block);
    }
    if (missing.empty()) continue;
    auto places = WriteExtent(missing, group);
    if (!places) return places.error();
    MarkWritten(missing, group, *places);
  }
  return OkStatus();
}

void CellMemory::Enqueue(std::vector<Block*> blocks) {
  for (Block* block : blocks) {
    AddRef(block);
    block->writing = true;
  }
  {
    std::lock_guard lock(mutex_);
    queue_.push_back(std::move(blocks));
    ++batches_under_way_;
  }
  wake_.notify_one();
}

void CellMemory::WriterLoop() {
  std::unique_lock lock(mutex_);
  while (true) {
    wake_.wait(lock, [&] { return stop_ || !queue_.empty(); });
    if (stop_) return;
    Written written{.blocks = std::move(queue_.front()), .group = kFullLayers, .places = {}};
    queue_.pop_front();
    lock.unlock();
    written.places = WriteExtent(written.blocks, written.group);
    lock.lock();
    written_.push_back(std::move(written));
    done_.notify_all();
  }
}

Status CellMemory::TakeIn(bool wait) {
  std::vector<Written> arrived;
  {
    std::unique_lock lock(mutex_);
    if (wait) done_.wait(lock, [&] { return written_.size() == batches_under_way_; });
    arrived.swap(written_);
    batches_under_way_ -= arrived.size();
  }
  Status status;
  for (Written& batch : arrived) {
    if (batch.places) {
      MarkWritten(batch.blocks, batch.group, *batch.places);
    } else {
      status = batch.places.error();
    }
    for (Block* block : batch.blocks) {
      block->writing = false;
      Release(block);
    }
  }
  return status;
}

void CellMemory::BalanceInBackground() {
  if (options_.store == nullptr) return;
  // A failed write shows again, and is reported, when the room is really needed.
  if (Status status = TakeIn(/*wait=*/false); !status.ok()) return;
  const uint64_t used = coded_committed();
  const uint64_t soft = coded_limit() / 2;
  const uint64_t per_block = map_.CodedBytesPerBlock(kFullLayers);
  if (used <= soft || batches_under_way_ > 0 || per_block == 0) return;
  uint64_t wanted = (used - soft) / per_block;  // blocks that should be droppable without waiting
  std::vector<Block*> batch;
  for (Block* block : resident_) {
    if (wanted == 0 || batch.size() == kWriteBatch) break;
    --wanted;
    if (!block->places[kFullLayers] && !block->writing) batch.push_back(block);
  }
  if (batch.size() >= kWriteBatch / 4) Enqueue(std::move(batch));
}

CellMemory::Recovered CellMemory::Recover(std::span<Block* const> blocks, CellGroup group, bool keep) {
  Recovered result;
  while (result.n_sound < blocks.size()) {
    const size_t begin = result.n_sound;
    if (!blocks[begin]->places[group]) {
      result.damage = Status(StatusCode::kCorruption,
                             fmt::format("the cells at position {} are not in the store", blocks[begin]->position));
      return result;
    }
    uint64_t widest = 1;
    for (const auto& layer : map_.shapes[group].layers) {
      widest = std::max<uint64_t>(widest, uint64_t{layer.n_cells} * layer.cell_bytes);
    }
    const size_t most = std::max<size_t>(1, kReadBufferBytes / widest);
    size_t end = begin + 1;
    while (end < blocks.size() && end - begin < most && blocks[end]->places[group] &&
           Follows(*blocks[end - 1]->places[group], *blocks[end]->places[group])) {
      ++end;
    }
    const size_t sound = RecoverRun(blocks.subspan(begin, end - begin), group, keep, &result.damage);
    result.n_sound += sound;
    if (sound < end - begin) return result;
  }
  return result;
}

size_t CellMemory::RecoverRun(std::span<Block* const> blocks, CellGroup group, bool keep, Status* damage) {
  const CellSetShape& shape = map_.shapes[group];
  size_t sound = blocks.size();
  std::vector<std::byte> buffer;
  if (keep) {
    for (Block* block : blocks) {
      ForEachCell(block, group, [&](const LayerCells& layer, CellEntry* cell) {
        Transition(cell, CellEvent::kCacheMiss, {.sealed = true, .durable = true});
        cell->coded = coded_[layer.coded_pool]->Take();
      });
    }
  }
  for (const LayerCells& layer : map_.layers) {
    if (layer.group != group || sound == 0) continue;
    const size_t cell_bytes = layer.coded.bytes;
    buffer.resize(sound * layer.n_heads * cell_bytes);
    Status read = options_.store->ReadRun(shape, *blocks[0]->places[group], layer.group_slot,
                                          static_cast<uint32_t>(sound), buffer.data());
    if (!read.ok()) {
      *damage = std::move(read);
      sound = 0;
      break;
    }
    for (size_t b = 0; b < sound; ++b) {
      Block& block = *blocks[b];
      for (uint16_t h = 0; h < layer.n_heads; ++h) {
        const std::span<const std::byte> bytes(buffer.data() + (b * layer.n_heads + h) * cell_bytes, cell_bytes);
        Status ok = VerifyCell(bytes, shape.layers[layer.group_slot].layer, h, static_cast<uint64_t>(block.position),
                               block.key.data());
        if (ok.ok() && reinterpret_cast<const CellHeader*>(bytes.data())->generation != block.generation) {
          ok = Status(StatusCode::kCorruption, "the cell is of another generation than its block");
        }
        if (!ok.ok()) {
          const auto [path, offset] = options_.store->Locate(shape, *block.places[group], layer.group_slot, h);
          *damage = Status(StatusCode::kCorruption,
                           fmt::format("{} at byte {}: layer {}, head {}, tokens {}..{}: {}", path, offset,
                                       shape.layers[layer.group_slot].layer, h, block.position,
                                       block.position + kBlockTokens - 1, ok.message()));
          options_.store->ReportDamage(*block.places[group]);
          sound = b;
          break;
        }
        if (keep) std::memcpy(coded(layer, block.cells[layer.first_cell + h]), bytes.data(), cell_bytes);
      }
    }
  }
  if (keep) {
    for (size_t b = 0; b < blocks.size(); ++b) {
      ForEachCell(blocks[b], group, [&](const LayerCells& layer, CellEntry* cell) {
        if (b < sound) {
          Transition(cell, CellEvent::kWriteBack, {.sealed = true, .durable = true});
        } else {
          coded_[layer.coded_pool]->Give(std::exchange(cell->coded, kNoSlot));
          Transition(cell, CellEvent::kEvict, {.sealed = true, .durable = true});
        }
      });
      if (b < sound && group == kFullLayers) resident_.push_back(blocks[b]);
    }
    NotePeak();
  }
  return sound;
}

Result<const std::byte*> CellMemory::CodedForRead(const Block& block, const LayerCells& layer, uint16_t head,
                                                  std::byte* ring) const {
  const CellEntry& cell = block.cells[layer.first_cell + head];
  if (cell.coded != kNoSlot) return coded(layer, cell);
  if (!block.places[layer.group]) {
    return Fail(StatusCode::kInternal,
                fmt::format("the cell at position {} is neither in RAM nor in the store", block.position));
  }
  const CellSetShape& shape = map_.shapes[layer.group];
  KVCELL_FAIL_IF_ERROR(options_.store->ReadCells(shape, *block.places[layer.group], layer.group_slot, head, 1, ring));
  Status ok = VerifyCell({ring, layer.coded.bytes}, shape.layers[layer.group_slot].layer, head,
                         static_cast<uint64_t>(block.position), block.key.data());
  if (!ok.ok()) {
    options_.store->ReportDamage(*block.places[layer.group]);
    const auto [path, offset] = options_.store->Locate(shape, *block.places[layer.group], layer.group_slot, head);
    return Fail(ok.code(), fmt::format("{} at byte {}: {}; cut the sequence to {} tokens and append the rest again",
                                       path, offset, ok.message(), block.position));
  }
  return ring;
}

}  // namespace kvcell
