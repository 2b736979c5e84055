// Bringing cells back from a tier: read in long runs, verified, and taken into RAM.
#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <utility>
#include <vector>

#include "cell/cell_memory.h"
#include "codec/cell_codec.h"

namespace kvcell {
namespace {

// Most bytes of one read: they are verified and copied while they lie in the CPU's cache.
constexpr uint64_t kReadBytes = uint64_t{64} << 10;

// Two places are side by side when one read can take both.
bool Follows(const BlockPlace& a, const BlockPlace& b) {
  return a.segment == b.segment && a.offset == b.offset && a.index + 1 == b.index;
}

}  // namespace

CellMemory::Recovered CellMemory::Recover(std::span<Block* const> blocks, CellGroup group, bool keep) {
  Recovered result;
  while (result.n_sound < blocks.size()) {
    const size_t begin = result.n_sound;
    if (!blocks[begin]->places[group]) {
      result.damage = Status(StatusCode::kCorruption,
                             fmt::format("the cells at position {} are not in the store: they were evicted, or lost",
                                         blocks[begin]->position));
      return result;
    }
    size_t end = begin + 1;
    while (end < blocks.size() && blocks[end]->places[group] &&
           Follows(*blocks[end - 1]->places[group], *blocks[end]->places[group])) {
      ++end;
    }
    const size_t sound = RecoverExtent(blocks.subspan(begin, end - begin), group, keep, &result.damage);
    result.n_sound += sound;
    if (sound < end - begin) return result;
  }
  return result;
}

// Blocks that lie side by side. Returns how many of them, from the first on, are sound.
size_t CellMemory::RecoverExtent(std::span<Block* const> blocks, CellGroup group, bool keep, Status* damage) {
  if (keep) BeginRecovery(blocks, group);
  size_t sound = blocks.size();
  std::optional<Unsound> unsound;
  Status read;
  std::vector<std::byte> buffer;
  // In file order and by one thread: the system then reads ahead by itself, which costs half of what asking for it
  // does, and a second thread that verifies and copies gains nothing.
  for (const CellRun& run : Runs(group)) {
    const size_t block_bytes = size_t{run.second->n_heads} * run.second->layout.bytes;
    const size_t at_once = std::max<size_t>(1, kReadBytes / block_bytes);
    for (size_t begin = 0; begin < sound && read.ok(); begin += at_once) {
      const auto part = blocks.subspan(begin, std::min(at_once, sound - begin));
      buffer.resize(part.size() * block_bytes);
      read = options_.tier->ReadRun(map_.shapes[group], *part[0]->places[group], run.second->slot,
                                    static_cast<uint32_t>(part.size()), buffer.data());
      if (!read.ok()) break;
      auto found = TakeInRun(part, run, buffer);
      if (!found) continue;
      sound = begin + found->block;
      found->block = sound;
      unsound = std::move(found);
    }
  }

  if (!read.ok()) {
    *damage = std::move(read);
    sound = 0;
  } else if (unsound) {
    const Block& block = *blocks[unsound->block];
    const auto [path, offset] =
        options_.tier->Locate(map_.shapes[group], *block.places[group], unsound->slot, unsound->cell);
    *damage = Status(StatusCode::kCorruption, fmt::format("{} at byte {}: layer {}, head {}, tokens {}..{}: {}", path,
                                                          offset, unsound->layer, unsound->head, block.position,
                                                          block.position + kBlockTokens - 1, unsound->what.message()));
    options_.tier->ReportDamage(*block.places[group]);
  }
  if (keep) EndRecovery(blocks, group, sound);
  return sound;
}

// CACHE_MISS of every cell of the blocks; what the rules want in RAM gets its slot.
void CellMemory::BeginRecovery(std::span<Block* const> blocks, CellGroup group) {
  for (Block* block : blocks) {
    CellFacts facts = FactsOf(*block);
    facts.durable = true;
    ForEachCell(block, group, [&](const LayerCells& layer, uint16_t h, CellEntry* cell) {
      facts.layer = layer.number;
      facts.head = h;
      if (Apply(*block, cell, CellEvent::kCacheMiss, facts) == nullptr) return;  // it is attended from the store
      cell->coded = coded_[layer.run(h).pool]->Take();
    });
  }
}

// Verifies one run's cells of blocks and copies those that have a slot; says which is the first that is damaged.
std::optional<CellMemory::Unsound> CellMemory::TakeInRun(std::span<Block* const> blocks, const CellRun& which,
                                                         std::span<const std::byte> bytes) {
  const auto& [layer, run] = which;
  const size_t cell_bytes = run->layout.bytes;
  for (size_t b = 0; b < blocks.size(); ++b) {
    const Block& block = *blocks[b];
    for (uint16_t i = 0; i < run->n_heads; ++i) {
      const auto h = static_cast<uint16_t>(run->first_head + i);
      const auto cell_at = bytes.subspan((b * run->n_heads + i) * cell_bytes, cell_bytes);
      Status ok = VerifyCell(cell_at, layer->number, h, block.position, block.key);
      if (ok.ok() && reinterpret_cast<const CellHeader*>(cell_at.data())->generation != block.generation) {
        ok = Status(StatusCode::kCorruption, "the cell is of another generation than its block");
      }
      if (!ok.ok()) return Unsound{b, run->slot, i, layer->number, h, std::move(ok)};
      const CellEntry& cell = block.cells[layer->first_cell + h];
      if (cell.coded != kNoSlot) std::memcpy(coded(*layer, h, cell), cell_at.data(), cell_bytes);
    }
  }
  return std::nullopt;
}

// WRITE_BACK of the first `sound` blocks; the others give their slots back.
void CellMemory::EndRecovery(std::span<Block* const> blocks, CellGroup group, size_t sound) {
  for (size_t b = 0; b < blocks.size(); ++b) {
    CellFacts facts{.sealed = true, .durable = true};
    ForEachCell(blocks[b], group, [&](const LayerCells& layer, uint16_t h, CellEntry* cell) {
      facts.layer = layer.number;
      facts.head = h;
      if (b >= sound) {
        GiveCoded(layer, h, cell);
        Apply(*blocks[b], cell, CellEvent::kEvict, facts);
      } else if (cell->state == CellState::kRecovering) {
        Admit(*blocks[b], layer, h, cell, facts);
      }
    });
    if (b < sound && group == kFullLayers) AddResident(blocks[b]);
  }
  NotePeak();
}

// WRITE_BACK of a cell whose coded bytes have come: QUANTIZED, or ACTIVE where the rules say so and there is room for
// the exact replica that this takes.
void CellMemory::Admit(const Block& block, const LayerCells& layer, uint16_t head, CellEntry* cell,
                       const CellFacts& facts) {
  static const CellRule kCodedOnly{.event = CellEvent::kWriteBack,
                                   .from = CellState::kRecovering,
                                   .to = CellState::kQuantized,
                                   .action = CellAction::kAdmit};
  const CellRule* rule = rules_->table.Find(CellEvent::kWriteBack, CellState::kRecovering, facts);
  const bool room = used() + ExactGrowth(1) <= coded_limit();
  if (rule == nullptr || (rule->to == CellState::kActive && !room)) rule = &kCodedOnly;
  if (rule->to == CellState::kActive) {
    if (cell->exact == kNoSlot) cell->exact = exact_[layer.exact_pool]->Take();
    Decode(layer, head, coded(layer, head, *cell), exact(layer, *cell));
  }
  cell->state = rule->to;
  transitions_.Add(*rule);
  trace_.Add(*rule, block.position);
}

}  // namespace kvcell
