// What pressure and reads move: which blocks, in which order, by which rules.
#include <algorithm>

#include "base/clock.h"
#include "cell/cell_memory.h"
#include "codec/f16.h"

namespace kvcell {
namespace {

// Blocks that one background sweep looks at, for each that it may move: rules that fit few blocks end it in time too.
constexpr size_t kLooksPerMove = 8;
// Blocks, newest first, that one step looks at for replicas.
constexpr size_t kReplicaLooks = 256;

double MeanMass(const Block& block) {
  float sum = 0.0f;
  for (const CellEntry& cell : block.cells) sum += F16ToF32(cell.mass_f16);
  return static_cast<double>(sum);
}

}  // namespace

// The blocks that leave first come first. Only the front `most` of them are in order.
std::vector<Block*> CellMemory::Victims(size_t most) const {
  std::vector<std::pair<double, Block*>> scored;
  scored.reserve(resident_.size());
  for (Block* block : resident_) {
    if (block->busy || block->pinned) continue;
    const auto age = static_cast<double>(block->sequence_end - block->position);
    double score = 0.0;
    switch (rules_->pressure.order) {
      case VictimOrder::kDistance:
        score = -age;
        break;
      case VictimOrder::kFrequency: {  // steps since the last read, then distance
        score = static_cast<double>(block->last_access) - age * 1e-9;
        break;
      }
      case VictimOrder::kMass:
        score = MeanMass(*block) - age * 1e-12;
        break;
    }
    scored.emplace_back(score, block);
  }
  most = std::min(most, scored.size());
  const auto before = [](const auto& a, const auto& b) {
    return a.first != b.first ? a.first < b.first : a.second->position < b.second->position;
  };
  const auto end = scored.begin() + static_cast<std::ptrdiff_t>(most);
  std::partial_sort(scored.begin(), end, scored.end(), before);
  std::vector<Block*> victims;
  victims.reserve(most);
  for (auto it = scored.begin(); it != end; ++it) victims.push_back(it->second);
  return victims;
}

// Applies MEMORY_PRESSURE to one block's cells; true where RAM came back at once. A block that has to be written or
// coded first is put on the sweep's lists.
bool CellMemory::SweepBlock(Block* block, const CellFacts& block_facts, Sweep* sweep) {
  CellFacts facts = block_facts;
  bool freed = false, write = false, code = false, there = false;
  for (const LayerCells& layer : map_.layers) {
    if (layer.group != kFullLayers) continue;
    facts.layer = layer.number;
    for (uint16_t h = 0; h < layer.n_heads; ++h) {
      CellEntry& cell = block->cells[layer.first_cell + h];
      if (cell.coded == kNoSlot && cell.exact == kNoSlot) continue;
      facts.head = h;
      facts.durable = cell.durable;
      facts.mass = static_cast<double>(F16ToF32(cell.mass_f16));
      const CellRule* rule = rules_->table.Find(CellEvent::kMemoryPressure, cell.state, facts);
      if (rule == nullptr) {
        there = true;
      } else if (rule->action == CellAction::kDropRam && !block->places[kFullLayers]) {
        write = there = true;
      } else if (rule->action == CellAction::kCode && cell.coded == kNoSlot) {
        code = there = true;
      } else {
        Apply(*block, &cell, CellEvent::kMemoryPressure, facts);
        if (rule->action == CellAction::kCode) {  // a replica: the coded bytes are there and stay
          GiveExact(layer, &cell);
          there = true;
          if (block->replica_moves > 0) NoteThrash(block);
        } else {
          GiveCoded(layer, h, &cell);
          // A replica that recent_blocks keeps is read by nearer queries although the coded bytes have left.
          if (rule->action == CellAction::kDrop) GiveExact(layer, &cell);
        }
        freed = true;
      }
    }
  }
  if (write && options_.tier != nullptr) sweep->write.push_back(block);
  if (code) sweep->code.push_back(block);
  if (!there) Forget(block);
  return freed;
}

template <typename F>
void CellMemory::SweepBlocks(std::span<Block* const> victims, Pressure pressure, size_t most, const F& enough,
                             Sweep* sweep) {
  for (Block* block : victims) {
    if (sweep->moved >= most || enough()) return;
    // Enough work for one batch of each kind: the rest waits for the next sweep.
    if (sweep->moved == 0 && sweep->write.size() >= kWriteBatch && sweep->code.empty()) return;
    if (sweep->code.size() >= kCodeBatch && sweep->moved == 0) return;
    CellFacts facts = FactsOf(*block);
    facts.pressure = std::max(facts.pressure, pressure);
    if (SweepBlock(block, facts, sweep)) ++sweep->moved;
  }
}

void CellMemory::MakeRoom(uint64_t n_blocks, uint64_t n_exact, Sweep* sweep) {
  SweepBlocks(
      Victims(resident_.size()), Pressure::kHard, resident_.size(), [&] { return Fits(n_blocks, n_exact); }, sweep);
}

// EVICT rules that ask for more than a place: by mass, reads, idle time or pressure.
void CellMemory::EvictByPolicy() {
  const std::vector<Block*> blocks = Victims(static_cast<size_t>(rules_->pressure.blocks_per_step) * kLooksPerMove);
  for (Block* block : blocks) {
    CellFacts facts = FactsOf(*block);
    bool there = false;
    for (const LayerCells& layer : map_.layers) {
      if (layer.group != kFullLayers) continue;
      facts.layer = layer.number;
      for (uint16_t h = 0; h < layer.n_heads; ++h) {
        CellEntry& cell = block->cells[layer.first_cell + h];
        facts.head = h;
        facts.durable = cell.durable;
        facts.mass = static_cast<double>(F16ToF32(cell.mass_f16));
        const CellRule* rule = rules_->table.Find(CellEvent::kEvict, cell.state, facts);
        if (rule != nullptr && RaisesEvict(*rule) && (rule->action != CellAction::kDropRam || cell.durable)) {
          Apply(*block, &cell, CellEvent::kEvict, facts);
          GiveCoded(layer, h, &cell);
          GiveExact(layer, &cell);
        } else if (rule != nullptr && RaisesEvict(*rule)) {
          block->write_wanted = true;
        }
        there |= cell.coded != kNoSlot || cell.exact != kNoSlot;
      }
    }
    if (!there) Forget(block);
  }
}

void CellMemory::BalanceInBackground(bool moved_on) {
  moved_on_ |= moved_on;
  // A failed write shows again, and is reported, when the room is really needed.
  if (Status status = TakeIn(std::chrono::seconds(0)); !status.ok()) return;
  if (!moved_on_ && (sampler_ == nullptr || sampler_->pressure() == Pressure::kNone)) return;
  moved_on_ = false;
  if (rules_->evicts_by_policy) EvictByPolicy();
  std::vector<Block*> wanted;
  for (Block* block : resident_) {
    if (block->write_wanted && !block->busy) wanted.push_back(block);
  }
  if (!wanted.empty()) Start(JobKind::kWrite, std::move(wanted));
  const Pressure level = pressure();
  if (level == Pressure::kNone) return;
  const auto most = static_cast<size_t>(rules_->pressure.blocks_per_step);
  const std::vector<Block*> victims = Victims(most * kLooksPerMove);
  Sweep sweep;
  const auto holds_now = [&](const CellRule& rule) {
    return rule.event == CellEvent::kMemoryPressure && rule.guard.pressure.holds(static_cast<int64_t>(level));
  };
  const auto table = rules_->table.rules();
  if (std::any_of(table.begin(), table.end(), holds_now)) {
    SweepBlocks(
        victims, level, most, [] { return false; }, &sweep);
  }
  Start(JobKind::kCode, std::move(sweep.code));
  // Blocks that hard pressure would have written are written ahead at soft, so that dropping them costs nothing then.
  if (level == Pressure::kSoft && sweep.write.empty()) WriteAhead(victims, &sweep);
  if (sweep.write.size() >= kWriteBatch / 4 || level == Pressure::kHard) Start(JobKind::kWrite, std::move(sweep.write));
}

// Collects blocks, enough to bring the fill back to the soft threshold, that a rule would move to the store at hard
// pressure.
void CellMemory::WriteAhead(std::span<Block* const> victims, Sweep* sweep) const {
  const auto soft = static_cast<uint64_t>(rules_->pressure.soft * static_cast<double>(coded_limit()));
  const uint64_t per_block = map_.CodedBytesPerBlock(kFullLayers);
  if (options_.tier == nullptr || used() <= soft || per_block == 0) return;
  uint64_t wanted = (used() - soft) / per_block;
  for (Block* block : victims) {
    if (wanted == 0 || sweep->write.size() == kWriteBatch) return;
    --wanted;
    if (!NeedsWrite(*block, kFullLayers)) continue;
    CellFacts facts = FactsOf(*block);
    facts.pressure = Pressure::kHard;
    facts.ram_fill = 1.0;
    for (const LayerCells& layer : map_.layers) {
      if (layer.group != kFullLayers) continue;
      facts.layer = layer.number;
      const CellEntry& cell = block->cells[layer.first_cell];
      const CellRule* rule = rules_->table.Find(CellEvent::kMemoryPressure, cell.state, facts);
      if (rule == nullptr || rule->action != CellAction::kDropRam) continue;
      sweep->write.push_back(block);
      break;
    }
  }
}

// A block that comes back exactly again and again costs more than it gives: it is left QUANTIZED for a while.
void CellMemory::NoteThrash(Block* block) {
  const auto within = static_cast<uint64_t>(rules_->thrash.within_steps);
  if (step_ - block->first_move_step > within) {
    block->replica_moves = 0;
    return;
  }
  if (block->replica_moves < static_cast<uint32_t>(rules_->thrash.moves)) return;
  block->rests_until = step_ + static_cast<uint64_t>(rules_->thrash.rest_steps);
  block->replica_moves = 0;
  ++counters_.thrashed;
}

bool CellMemory::MayReplicate(Block* block, uint64_t step) {
  if (step < block->rests_until) {
    ++counters_.damped;
    return false;
  }
  return true;
}

void CellMemory::Touched(std::span<Block* const> blocks, uint64_t step) {
  step_ = step;
  if (!rules_->fetches && !rules_->replicates_on_read) return;
  // What the tier attends to itself has no need to come back.
  const bool may_fetch = rules_->fetches && options_.tier != nullptr && !options_.tier->Attends() &&
                         under_way_[static_cast<size_t>(JobKind::kFetch)] == 0 && pressure() == Pressure::kNone;
  const bool may_replicate = rules_->replicates_on_read && under_way_[static_cast<size_t>(JobKind::kReplicate)] == 0 &&
                             pressure() != Pressure::kHard;
  if (!may_fetch && !may_replicate) return;
  std::vector<Block*> fetch, replicate;
  size_t looks = 0;
  // Newest first: what is near is worth most.
  for (auto it = blocks.rbegin(); it != blocks.rend(); ++it) {
    Block* block = *it;
    const bool in_ram = block->resident_index != SIZE_MAX;
    if (block->busy || !block->sealed || (in_ram ? !may_replicate : !may_fetch || block->stays_out)) continue;
    if (++looks > kReplicaLooks) break;
    CellFacts facts = FactsOf(*block);
    bool wants_fetch = false, wants_replica = false;
    for (const LayerCells& layer : map_.layers) {
      if (layer.group != kFullLayers || wants_fetch || wants_replica) continue;
      facts.layer = layer.number;
      for (uint16_t h = 0; h < layer.n_heads; ++h) {
        const CellEntry& cell = block->cells[layer.first_cell + h];
        facts.head = h;
        facts.durable = cell.durable;
        const CellRule* rule = rules_->table.Find(CellEvent::kReadRequest, cell.state, facts);
        if (rule == nullptr) rule = rules_->table.Find(CellEvent::kCacheMiss, cell.state, facts);
        if (rule == nullptr) continue;
        wants_fetch |= rule->action == CellAction::kFetch && block->places[kFullLayers].has_value();
        wants_replica |= rule->action == CellAction::kReplicate && cell.coded != kNoSlot;
      }
    }
    if (may_fetch && wants_fetch && fetch.size() < kCodeBatch && RoomForBlocks(fetch.size() + 1) > fetch.size()) {
      fetch.push_back(block);
    }
    if (may_replicate && wants_replica && replicate.size() < kCodeBatch && MayReplicate(block, step)) {
      replicate.push_back(block);
    }
    if (fetch.size() == kCodeBatch || replicate.size() == kCodeBatch) break;
  }
  Start(JobKind::kFetch, std::move(fetch));
  while (!replicate.empty() && !Fits(0, replicate.size())) replicate.pop_back();
  Start(JobKind::kReplicate, std::move(replicate));
}

}  // namespace kvcell
