// Sequences to the store and back: sealed blocks as their cells stand, sinks and the open tail exactly.
#include <fmt/format.h>
#include <pthread.h>

#include <algorithm>
#include <cstring>
#include <system_error>
#include <utility>

#include "cache/cache_impl.h"

namespace kvcell {
namespace {

// Head of SessionRecord::exact (docs/format.md). What follows, for each layer and KV head in order: the sinks' exact
// cell, the replicas' (oldest first), and the open block's, cut to its tokens rounded up to 16.
struct ExactHeader {
  uint32_t magic = 0x5845564b;  // "KVEX"
  uint32_t version = 1;
  uint32_t n_open = 0;      // tokens of the open block
  uint32_t n_replicas = 0;  // sealed blocks before it whose exact cells follow
  uint32_t has_sinks = 0;
  uint32_t reserved[3] = {0, 0, 0};
};
static_assert(sizeof(ExactHeader) == 32);

int RoundUp16(uint32_t n) { return static_cast<int>((n + 15) / 16 * 16); }

uint64_t ExactBytes(const CellMap& map, const ExactHeader& header) {
  uint64_t bytes = sizeof(ExactHeader);
  for (const LayerCells& layer : map.layers) {
    const LayerGeometry& g = layer.geometry;
    uint64_t per_head = uint64_t{header.n_replicas} * layer.open.bytes;
    if (header.has_sinks != 0) per_head += layer.sink.bytes;
    if (header.n_open != 0) per_head += MakeExactLayout(RoundUp16(header.n_open), g.head_dim_k, g.head_dim_v).bytes;
    bytes += layer.n_heads * per_head;
  }
  return bytes;
}

}  // namespace

std::vector<std::byte> CacheImpl::PackExact(const Sequence& sequence) {
  const CellMap& map = memory_->map();
  const size_t n_sealed = sequence.tokens.size() / kBlockTokens;
  ExactHeader header;
  header.n_open = static_cast<uint32_t>(sequence.tokens.size() % kBlockTokens);
  header.has_sinks = !sequence.blocks.empty() && !sequence.blocks[0]->sinks.empty() ? 1 : 0;
  while (header.n_replicas < std::min(n_sealed, static_cast<size_t>(options_.recent_blocks)) &&
         sequence.blocks[n_sealed - 1 - header.n_replicas]->cells[0].exact != kNoSlot) {
    ++header.n_replicas;
  }
  std::vector<std::byte> bytes(ExactBytes(map, header));  // zeros: padding is the same in every save
  std::memcpy(bytes.data(), &header, sizeof(header));
  std::byte* at = bytes.data() + sizeof(header);
  for (const LayerCells& layer : map.layers) {
    const ExactLayout open =
        MakeExactLayout(RoundUp16(header.n_open), layer.geometry.head_dim_k, layer.geometry.head_dim_v);
    for (uint16_t h = 0; h < layer.n_heads; ++h) {
      const uint32_t i = layer.first_cell + h;
      if (header.has_sinks != 0) {
        const int n = std::min<int>(map.sinks, static_cast<int>(sequence.tokens.size()));
        CopyExactTokens(layer.sink, memory_->sink(layer, sequence.blocks[0]->sinks[i]), 0, n, layer.sink, at, 0);
        at += layer.sink.bytes;
      }
      for (size_t b = n_sealed - header.n_replicas; b < n_sealed; ++b) {
        CopyExactTokens(layer.open, memory_->exact(layer, sequence.blocks[b]->cells[i]), 0, kBlockTokens, layer.open,
                        at, 0);
        at += layer.open.bytes;
      }
      if (header.n_open != 0) {
        CopyExactTokens(layer.open, memory_->exact(layer, sequence.blocks.back()->cells[i]), 0,
                        static_cast<int>(header.n_open), open, at, 0);
        at += open.bytes;
      }
    }
  }
  return bytes;
}

// The inverse: fills sinks, replicas and the open block of a sequence whose sealed blocks are there. Where the sequence
// was cut back to its sound blocks (fewer than the n_stored tokens that were packed), only the sinks still belong to
// it.
Status CacheImpl::UnpackExact(std::span<const std::byte> bytes, size_t n_stored, Sequence* sequence) {
  const CellMap& map = memory_->map();
  const auto damaged = [](std::string_view field) {
    return Status(StatusCode::kCorruption, fmt::format("the session's exact part: {} is not what it must be", field));
  };
  ExactHeader header;
  if (bytes.size() < sizeof(header)) return damaged("length");
  std::memcpy(&header, bytes.data(), sizeof(header));
  const size_t n_sealed = n_stored / kBlockTokens;
  if (header.magic != ExactHeader{}.magic || header.version != 1) return damaged("magic or version");
  if (header.n_open != n_stored % kBlockTokens) return damaged("open token count");
  if (header.n_replicas > std::min(n_sealed, static_cast<size_t>(options_.recent_blocks)))
    return damaged("replica count");
  if (header.has_sinks != (map.sinks > 0 && n_stored > 0 ? 1u : 0u)) return damaged("sinks flag");
  if (bytes.size() != ExactBytes(map, header)) return damaged("length");

  const bool whole = sequence->tokens.size() == n_stored;
  if (whole && header.n_open != 0) {
    const BlockKey parent = n_sealed == 0 ? BlockKey{} : sequence->blocks[n_sealed - 1]->key;
    Block* block = memory_->NewBlock(static_cast<int64_t>(n_sealed) * kBlockTokens, parent);
    sequence->blocks.push_back(block);
    block->n_tokens = static_cast<int32_t>(header.n_open);
    std::copy(sequence->tokens.begin() + static_cast<std::ptrdiff_t>(n_sealed * kBlockTokens), sequence->tokens.end(),
              block->tokens.begin());
    KVCELL_RETURN_IF_ERROR(memory_->CreateExact(block));
  }
  if (sequence->blocks.empty()) return OkStatus();
  if (whole && header.n_replicas > 0 && IsElastic(memory_->rules())) {
    KVCELL_RETURN_IF_ERROR(memory_->ReserveCoded(0, header.n_replicas));
  }
  if (header.has_sinks != 0) memory_->CreateSinks(sequence->blocks[0]);
  for (size_t b = n_sealed - header.n_replicas; whole && b < n_sealed; ++b)
    memory_->CreateReplicas(sequence->blocks[b]);
  const std::byte* at = bytes.data() + sizeof(header);
  for (const LayerCells& layer : map.layers) {
    const ExactLayout open =
        MakeExactLayout(RoundUp16(header.n_open), layer.geometry.head_dim_k, layer.geometry.head_dim_v);
    for (uint16_t h = 0; h < layer.n_heads; ++h) {
      const uint32_t i = layer.first_cell + h;
      if (header.has_sinks != 0) {
        std::memcpy(memory_->sink(layer, sequence->blocks[0]->sinks[i]), at, layer.sink.bytes);
        at += layer.sink.bytes;
      }
      for (size_t b = n_sealed - header.n_replicas; b < n_sealed; ++b) {
        if (whole) std::memcpy(memory_->exact(layer, sequence->blocks[b]->cells[i]), at, layer.open.bytes);
        at += layer.open.bytes;
      }
      if (header.n_open == 0) continue;
      if (whole) {
        CopyExactTokens(open, at, 0, static_cast<int>(header.n_open), layer.open,
                        memory_->exact(layer, sequence->blocks.back()->cells[i]), 0);
      }
      at += open.bytes;
    }
  }
  return OkStatus();
}

Result<std::unique_ptr<SessionSave>> CacheImpl::PackSession(SequenceId id, const std::string& name,
                                                            std::span<const float> logits, const std::string& extras,
                                                            std::optional<uint8_t> durability) {
  if (in_step_) return Fail(StatusCode::kBusy, "Save during a step; Commit or Abort it first");
  Sequence* sequence = Find(id);
  if (sequence == nullptr) return Fail(StatusCode::kNotFound, fmt::format("there is no sequence {} to save", id));
  if (store_ == nullptr) return Fail(StatusCode::kInvalidArgument, "sessions need a store; give CacheOptions::store");
  KVCELL_FAIL_IF_ERROR(CheckSessionName(name));
  if (durability.value_or(0) > static_cast<uint8_t>(Durability::kPower)) {
    return Fail(StatusCode::kInvalidArgument, fmt::format("durability is {}, but must be 0..2", *durability));
  }
  if (sequence->draft_from >= 0) {
    return Fail(StatusCode::kInvalidArgument,
                fmt::format("sequence {} ends in drafted tokens: Trim it to those that were accepted, then save", id));
  }
  if (sequence->lock == nullptr || sequence->locked_name != name) {
    auto lock = store_->LockSession(name);
    if (!lock) return Fail(lock.error());
    sequence->lock = std::move(*lock);
    sequence->locked_name = name;
  }
  const size_t n_sealed = sequence->tokens.size() / kBlockTokens;
  const std::span<Block* const> sealed(sequence->blocks.data(), n_sealed);
  KVCELL_FAIL_IF_ERROR(memory_->WriteNow(sealed));

  auto save = std::make_unique<SessionSave>();
  SessionRecord& record = save->record;
  record.name = name;
  record.model = options_.model_name;
  record.identity = identity_;
  record.tokens = sequence->tokens;
  record.exact = PackExact(*sequence);
  record.logits.assign(logits.begin(), logits.end());
  record.extras = extras;
  if (durability) record.durability = static_cast<Durability>(*durability);
  if (sequence->approximate || !Shares()) record.n_shared = sequence->n_shared;
  record.sinks = PackShared(*sequence, n_sealed, /*sinks=*/true);
  for (Block* block : sealed) {
    record.blocks.push_back(
        {.key = block->key, .generation = block->generation, .tokens = block->tokens, .places = block->places});
    save->blocks.push_back(block);
  }
  return save;
}

// Blocks that the store had already are shared: from now on theirs is the copy in the file.
void CacheImpl::Adopt(SessionSave* save) {
  for (size_t b = 0; b < save->blocks.size(); ++b) {
    const BlockRecord& stored = save->record.blocks[b];
    memory_->AdoptPlaces(save->blocks[b], stored.places, stored.generation);
  }
  for (const BlockPlace& place : save->given_up) store_->DestroyCells(place);
}

Status CacheImpl::Save(SequenceId id, const std::string& name, std::span<const float> logits, const std::string& extras,
                       std::optional<uint8_t> durability) {
  EndSave();
  if (save_error_name_ == name) save_error_ = OkStatus();  // what comes later holds more, and its error is this call's
  auto save = PackSession(id, name, logits, extras, durability);
  if (!save) return save.error();
  KVCELL_RETURN_IF_ERROR(store_->Commit(&(*save)->record, memory_->map().shapes.data(), &(*save)->given_up));
  Adopt(save->get());
  return OkStatus();
}

Status CacheImpl::BeginSave(SequenceId id, const std::string& name, std::span<const float> logits,
                            const std::string& extras, std::optional<uint8_t> durability) {
  if (save_ != nullptr && !save_->done) return Status(StatusCode::kBusy, "the save before is still under way");
  KVCELL_RETURN_IF_ERROR(FinishSave());
  auto packed = PackSession(id, name, logits, extras, durability);
  if (!packed) return packed.error();
  save_ = std::move(*packed);
  for (Block* block : save_->blocks) CellMemory::AddRef(block);
  const auto commit = [store = store_.get(), save = save_.get(), shapes = memory_->map().shapes.data()] {
    pthread_setname_np(pthread_self(), "kvcell-save");
    save->status = store->Commit(&save->record, shapes, &save->given_up);
    save->done = true;
  };
  try {
    save_->thread = std::thread(commit);
  } catch (const std::system_error&) {  // no thread is to be had
    commit();
  }
  return OkStatus();
}

Status CacheImpl::FinishSave() {
  if (in_step_) return Status(StatusCode::kBusy, "FinishSave during a step; Commit or Abort it first");
  EndSave();
  return std::exchange(save_error_, OkStatus());
}

void CacheImpl::EndSave() {
  if (save_ == nullptr || in_step_) return;
  const std::unique_ptr<SessionSave> save = std::move(save_);
  if (save->thread.joinable()) save->thread.join();
  if (save->status.ok()) Adopt(save.get());
  save_error_ = save->status;
  save_error_name_ = save->record.name;
  Sequence holder;
  holder.blocks = save->blocks;
  ReleaseFrom(&holder, 0);
}

// Fills sequence->blocks with the sound prefix of the record's blocks; as many of the newest as fit stay in RAM.
Result<size_t> CacheImpl::BringBack(const SessionRecord& record, Sequence* sequence, std::string* note) {
  const size_t n_blocks = record.blocks.size();
  BlockKey parent{};
  for (size_t b = 0; b < n_blocks; ++b) {
    const BlockRecord& stored = record.blocks[b];
    Block* block = memory_->NewBlock(static_cast<int64_t>(b) * kBlockTokens, parent);
    sequence->blocks.push_back(block);
    block->tokens = stored.tokens;
    block->key = stored.key;
    block->generation = stored.generation;  // the key of a block that depends on memory is made of it too
    // A block of the session's own may have been made under rules that were exchanged since: its key is what its row
    // and its cells say.
    const bool own = b >= record.n_shared;
    if ((!own && KeyOf(*block) != stored.key) ||
        !std::equal(stored.tokens.begin(), stored.tokens.end(),
                    record.tokens.begin() + static_cast<std::ptrdiff_t>(b * kBlockTokens))) {
      *note = fmt::format("block {} of the session has another key than its tokens make", b);
      ReleaseFrom(sequence, b);
      for (size_t rest = b; rest < n_blocks; ++rest) store_->Release(record.blocks[rest]);
      break;
    }
    memory_->StoredBlock(block, stored.places, stored.generation);
    parent = stored.key;
  }
  return RecoverFrom(sequence, 0, 0, note);
}

size_t CacheImpl::RecoverFrom(Sequence* sequence, size_t first, int64_t windows_from, std::string* note) {
  size_t n_sound = sequence->blocks.size();
  const std::span<Block* const> blocks(sequence->blocks);
  // Blocks behind every window of the rules may have been given up: nothing will attend to them.
  const size_t visible = std::max(first, FirstVisible(n_sound));
  const bool has_full_layers = !memory_->map().shapes[kFullLayers].layers.empty();
  const size_t n_seen = n_sound - visible;
  const size_t n_left_in_store = visible + n_seen - static_cast<size_t>(memory_->RoomForBlocks(n_seen));
  for (const bool keep : {false, true}) {
    if (!has_full_layers) break;
    const size_t begin = keep ? n_left_in_store : visible;
    const size_t end = keep ? n_sound : n_left_in_store;
    const auto recovered = memory_->Recover(blocks.subspan(begin, end - begin), kFullLayers, keep);
    if (recovered.n_sound < end - begin) {
      *note = recovered.damage.message();
      n_sound = begin + recovered.n_sound;
      break;
    }
  }
  // Sliding-window cells are needed only as far back as the windows of the next token reach.
  for (size_t b = first; b < n_sound; ++b) {
    if (!blocks[b]->places[kWindowLayers]) continue;
    if (blocks[b]->position + kBlockTokens <= windows_from) {
      memory_->EvictGroup(blocks[b], kWindowLayers);
      continue;
    }
    const auto recovered = memory_->Recover(blocks.subspan(b, 1), kWindowLayers, /*keep=*/true);
    if (recovered.n_sound == 0 && note->empty()) *note = recovered.damage.message();
  }
  ReleaseFrom(sequence, n_sound);
  return n_sound;
}

Result<int64_t> CacheImpl::CutToSound(SequenceId id, std::string* note) {
  if (in_step_) return Fail(StatusCode::kBusy, "CutToSound during a step; Commit or Abort it first");
  Sequence* sequence = Find(id);
  if (sequence == nullptr) return Fail(StatusCode::kNotFound, fmt::format("there is no sequence {} to check", id));
  const std::span<Block* const> blocks(sequence->blocks);
  size_t sound = sequence->tokens.size() / kBlockTokens;
  for (size_t begin = 0; begin < sound;) {
    size_t end = begin;
    while (end < sound && memory_->InStoreOnly(*blocks[end])) ++end;
    const auto checked = memory_->Recover(blocks.subspan(begin, end - begin), kFullLayers, /*keep=*/false);
    if (checked.n_sound < end - begin) {
      if (checked.damage.code() != StatusCode::kCorruption) return Fail(checked.damage);  // it may be read later
      if (note != nullptr) *note = checked.damage.message();
      sound = begin + checked.n_sound;
    }
    begin = end + 1;
  }
  if (sound == sequence->tokens.size() / kBlockTokens) return static_cast<int64_t>(sequence->tokens.size());
  for (Block* block : blocks.subspan(sound)) block->abandoned = true;
  return Trim(id, static_cast<int64_t>(sound * kBlockTokens));
}

Result<OpenedSession> CacheImpl::OpenSession(const std::string& name, bool create) {
  if (in_step_) return Fail(StatusCode::kBusy, "OpenSession during a step; Commit or Abort it first");
  if (store_ == nullptr) return Fail(StatusCode::kInvalidArgument, "sessions need a store; give CacheOptions::store");
  KVCELL_FAIL_IF_ERROR(CheckSessionName(name));
  // Locked first: what is loaded stays the newest.
  auto lock = store_->LockSession(name);
  if (!lock) return Fail(lock.error());
  auto record = store_->Load(name);
  if (!record && record.error().code() == StatusCode::kNotFound && create) {
    // The name is held from the start: of two that begin it at once, the second is told.
    const auto id = Create();
    if (!id) return Fail(id.error());
    Sequence* sequence = Find(*id);
    sequence->lock = std::move(*lock);
    sequence->locked_name = name;
    OpenedSession opened;
    opened.sequence = *id;
    opened.created = true;
    return opened;
  }
  if (!record) return Fail(record.error());
  const auto release_all = [&] {
    for (const BlockRecord& block : record->blocks) store_->Release(block);
  };
  if (const auto difference = IdentityDifference(record->identity, identity_)) {
    release_all();
    return Fail(StatusCode::kMismatch,
                fmt::format("session '{}' was made with another {}; use what it was made with, or another session name",
                            name, *difference));
  }
  auto id = Create();
  if (!id) {
    release_all();
    return Fail(id.error());
  }
  Sequence* sequence = Find(*id);
  OpenedSession opened;
  opened.sequence = *id;
  opened.note = record->damage;
  opened.notice = record->notice;
  const auto give_up = [&](Status status) {
    (void)Free(*id);
    return Fail(std::move(status));
  };
  auto n_sound = BringBack(*record, sequence, &opened.note);
  if (!n_sound) return give_up(n_sound.error());

  // The tail is worth nothing without every block before it; nor are sinks that failed their check, which every query
  // reads.
  const size_t usable = *n_sound * kBlockTokens;
  const bool whole = *n_sound == record->tokens.size() / kBlockTokens && opened.note.empty();
  sequence->tokens.assign(record->tokens.begin(),
                          record->tokens.begin() + static_cast<std::ptrdiff_t>(whole ? record->tokens.size() : usable));
  if (record->exact.empty() && !record->tokens.empty()) {
    // Damaged, which the note tells: the sinks of sound blocks stand in the prefix tree too.
    if (memory_->map().sinks > 0 && !sequence->blocks.empty()) {
      memory_->CreateSinks(sequence->blocks[0]);
      if (!UnpackSinks(record->sinks, sequence->blocks[0])) {
        ReleaseFrom(sequence, 0);
        sequence->tokens.clear();
      }
    }
  } else if (Status status = UnpackExact(record->exact, record->tokens.size(), sequence); !status.ok()) {
    if (status.code() != StatusCode::kCorruption) return give_up(std::move(status));
    if (opened.note.empty()) opened.note = status.message();
    ReleaseFrom(sequence, 0);
    sequence->tokens.clear();
  }
  if (!WindowsThere(*sequence, static_cast<int64_t>(sequence->tokens.size()))) {
    if (opened.note.empty()) opened.note = "cells of sliding-window layers are missing";
    ReleaseFrom(sequence, 0);
    sequence->tokens.clear();
  }
  sequence->lock = std::move(*lock);
  sequence->locked_name = name;
  sequence->replica_floor = 0;
  sequence->approximate = record->n_shared < record->blocks.size();
  if (sequence->approximate) {
    sequence->n_shared = std::min(record->n_shared, sequence->blocks.size());  // as the store has it
  } else {
    Share(sequence);
  }
  opened.usable = static_cast<int64_t>(sequence->tokens.size());
  opened.tokens = std::move(record->tokens);
  if (opened.usable == static_cast<int64_t>(opened.tokens.size()) && !opened.note.empty()) {
    // Nothing is to be computed again, so that nobody would tell.
    opened.notice = opened.notice.empty() ? opened.note : fmt::format("{}; {}", opened.notice, opened.note);
  }
  if (opened.usable == static_cast<int64_t>(opened.tokens.size())) opened.logits = std::move(record->logits);
  opened.extras = std::move(record->extras);
  return opened;
}

std::vector<CellInfo> CacheImpl::Inspect(SequenceId id) const {
  std::vector<CellInfo> cells;
  const Sequence* sequence = Find(id);
  if (sequence == nullptr) return cells;
  const CellMap& map = memory_->map();
  for (size_t b = 0; b < sequence->blocks.size(); ++b) {
    const Block& block = *sequence->blocks[b];
    for (size_t l = 0; l < map.layers.size(); ++l) {
      const LayerCells& layer = map.layers[l];
      for (uint16_t h = 0; h < layer.n_heads; ++h) {
        const CellEntry& cell = block.cells[layer.first_cell + h];
        CellInfo info;
        info.layer = static_cast<int32_t>(l);
        info.head = h;
        info.token_start = block.position;
        info.token_end =
            std::min<int64_t>(block.position + kBlockTokens, static_cast<int64_t>(sequence->tokens.size()));
        info.state = cell.state;
        info.durable = cell.durable;
        const CellLayout& layout = layer.coded(h);
        const bool exact = !block.sealed || (cell.state == CellState::kActive && cell.exact != kNoSlot);
        info.k_precision = exact ? "f16" : std::string(TypeName(layout.k.spec.type));
        info.v_precision = exact ? "f16" : std::string(TypeName(layout.v.spec.type));
        info.tier = cell.state == CellState::kPersisted ? std::string(tier_->TierName())
                    : cell.state == CellState::kEvicted ? ""
                                                        : "ram";
        info.length = exact ? layer.open.bytes : layout.bytes;
        if (cell.durable && block.places[layer.group]) {
          const auto [path, offset] =
              tier_->Locate(map.shapes[layer.group], *block.places[layer.group], layer.slot(h), layer.head_in_slot(h));
          info.storage_path = path;
          info.offset = offset;
        }
        if (cell.coded != kNoSlot) {
          info.checksum = reinterpret_cast<const CellHeader*>(memory_->coded(layer, h, cell))->checksum;
        }
        info.refs = static_cast<uint32_t>(block.refs);
        info.reads = static_cast<uint32_t>(block.reads);
        info.last_access = static_cast<int64_t>(block.last_access);
        cells.push_back(std::move(info));
      }
    }
  }
  return cells;
}

}  // namespace kvcell
