// Blocks shared by what they hold: sequences that begin alike use the same blocks, from RAM or from the store.
#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <limits>

#include "cache/cache_impl.h"

namespace kvcell {
namespace {

// Head of stored exact cells beside a prefix (docs/format.md): for each layer and KV head in order one exact cell, of
// the sinks or, for each replica, of its 64 tokens, the oldest block first.
struct SharedHeader {
  uint32_t magic = 0x5045564b;  // "KVEP"
  uint32_t version = 1;
  uint32_t n_blocks = 0;  // replicas; 0: sinks
  uint32_t n_tokens = 0;  // per cell
};
static_assert(sizeof(SharedHeader) == 16);

uint64_t SharedBytes(const CellMap& map, const SharedHeader& header) {
  uint64_t bytes = sizeof(SharedHeader);
  for (const LayerCells& layer : map.layers) {
    bytes += uint64_t{layer.n_heads} *
             (header.n_blocks == 0 ? layer.sink.bytes : uint64_t{header.n_blocks} * layer.open.bytes);
  }
  return bytes;
}

bool HeaderFits(const CellMap& map, std::span<const std::byte> bytes, uint32_t n_blocks, uint32_t n_tokens) {
  SharedHeader header;
  if (bytes.size() < sizeof(header)) return false;
  std::memcpy(&header, bytes.data(), sizeof(header));
  return header.magic == SharedHeader{}.magic && header.version == 1 && header.n_blocks == n_blocks &&
         header.n_tokens == n_tokens && bytes.size() == SharedBytes(map, header);
}

}  // namespace

// Puts what the sequence has sealed, and is no guess, into the tree; where another one has computed the same meanwhile,
// that block serves both from now on.
void CacheImpl::Share(Sequence* sequence) {
  if (sequence->approximate || !Shares()) return;
  size_t n_settled = sequence->tokens.size() / kBlockTokens;
  if (sequence->draft_from >= 0)
    n_settled = std::min(n_settled, static_cast<size_t>(sequence->draft_from) / kBlockTokens);
  for (; sequence->n_shared < n_settled; ++sequence->n_shared) {
    const size_t b = sequence->n_shared;
    Block*& block = sequence->blocks[b];
    PrefixNode* parent = b == 0 ? nullptr : sequence->blocks[b - 1]->prefix;
    if (b > 0 && parent == nullptr) return;
    if (block->prefix != nullptr) continue;
    if (PrefixNode* theirs = tree_.Child(parent, block->tokens)) {
      Block* shared = SharedInstead(block, theirs);
      if (shared == nullptr) return;
      block = shared;
      continue;
    }
    CellMemory::AddRef(block);
    tree_.Insert(parent, block);
  }
}

// The block in the tree in place of an equal one, with the references moved; null where theirs lacks cells that mine
// has.
Block* CacheImpl::SharedInstead(Block* mine, PrefixNode* theirs) {
  Block* block = theirs->block;
  if (block->abandoned || mine->refs != 1) return nullptr;  // a fork, or work off the token path, uses mine too
  for (uint32_t i = 0; i < memory_->map().n_cells; ++i) {
    if (mine->cells[i].coded != kNoSlot && block->cells[i].coded == kNoSlot) return nullptr;
    if (mine->cells[i].exact != kNoSlot && block->cells[i].exact == kNoSlot) return nullptr;
  }
  tree_.IsUsed(theirs);
  CellMemory::AddRef(block);
  memory_->Release(mine);
  return block;
}

// A sequence has let go of a block that lives on: in other sequences, or in the tree alone.
void CacheImpl::AfterRelease(Block* block, size_t index) {
  if (block->prefix == nullptr) return DropUnwanted(block, index);
  const int32_t users = block->refs - 1 - (block->busy ? 1 : 0);
  if (users > 0) return DropUnwanted(block, index);
  PrefixNode* node = block->prefix;
  tree_.BecomesIdle(node);
  // Replicas are set aside for live sequences, and a pin is a sequence's.
  memory_->DropExact(block);
  block->pinned = false;
  block->stays_out = false;
  if (block->abandoned && node->n_children == 0) GiveUpIdle(node);
}

void CacheImpl::GiveUpIdle(PrefixNode* node) { memory_->Release(tree_.Remove(node)); }

// Empties the tree; sequences keep their blocks.
void CacheImpl::Withdraw() {
  while (PrefixNode* node = tree_.FirstIdle()) GiveUpIdle(node);
  std::vector<Block*> blocks = LiveBlocks();
  std::erase_if(blocks, [](const Block* block) { return block->prefix == nullptr; });
  std::ranges::sort(blocks, [](const Block* a, const Block* b) { return a->position > b->position; });  // ends first
  for (Block* block : blocks) {
    tree_.Remove(block->prefix);
    memory_->Release(block);
  }
  for (auto& sequence : sequences_) {
    if (sequence != nullptr) sequence->n_shared = 0;
  }
}

// Takes the sequence's blocks from `first_block` on, which no other sequence uses, out of the tree; what it appends
// from here on is its own.
void CacheImpl::WithdrawFrom(Sequence* sequence, size_t first_block) {
  sequence->approximate = true;
  if (sequence->n_shared <= first_block) return;
  while (PrefixNode* node = tree_.FirstIdle()) GiveUpIdle(node);  // some go on from these
  for (; sequence->n_shared > first_block; --sequence->n_shared) {
    Block* block = sequence->blocks[sequence->n_shared - 1];
    if (block->prefix == nullptr) continue;  // shared in the store only
    tree_.Remove(block->prefix);
    memory_->Release(block);
  }
}

void CacheImpl::KeepWithinLimits() {
  const auto most_roots = static_cast<size_t>(options_.prefix_bytes > 0 ? options_.prefix_roots : 0);
  while (tree_.n_idle() * block_bytes_ > options_.prefix_bytes || tree_.n_idle_roots() > most_roots) {
    GiveUpIdle(tree_.FirstIdle());
  }
}

int64_t CacheImpl::Room() const {
  if (tier_ != nullptr) return std::numeric_limits<int64_t>::max();
  return static_cast<int64_t>(memory_->FreeBlocks(tree_.n_idle())) * kBlockTokens;
}

// The longest part of a chain in RAM that ends in as many exact blocks as recent_blocks wants; all of it where it wants
// none.
size_t CacheImpl::ReplicaEnd(std::span<PrefixNode* const> chain) const {
  const auto recent = static_cast<size_t>(options_.recent_blocks);
  for (size_t end = chain.size(); end > 0; --end) {
    size_t exact = 0;
    while (exact < std::min(recent, end) && chain[end - 1 - exact]->block->cells[0].exact != kNoSlot) ++exact;
    if (exact == std::min(recent, end)) return end;
  }
  return 0;
}

// The last block end at which the next token would find all that its sliding windows see.
size_t CacheImpl::WindowEnd(const Sequence& sequence) const {
  size_t end = sequence.blocks.size();
  while (end > 0 && !WindowsThere(sequence, static_cast<int64_t>(end * kBlockTokens))) --end;
  return end;
}

Result<PrefixFound> CacheImpl::FindStored(std::span<const Token> tokens, size_t n_blocks, size_t n_there) const {
  if (store_ == nullptr || n_there >= n_blocks) return PrefixFound{};
  std::vector<BlockKey> keys;
  BlockKey parent{};
  for (size_t b = 0; b < n_blocks; ++b) {
    parent = KeyOf(parent, tokens.subspan(b * kBlockTokens).first<kBlockTokens>());
    keys.push_back(parent);
  }
  return store_->FindPrefix(
      {.identity = identity_, .tokens = tokens, .keys = keys, .needs_replicas = options_.recent_blocks > 0});
}

Result<PrefixUse> CacheImpl::Reuse(SequenceId id, std::span<const Token> tokens) {
  if (in_step_) return Fail(StatusCode::kBusy, "Reuse during a step; Commit or Abort it first");
  Sequence* sequence = Find(id);
  if (sequence == nullptr)
    return Fail(StatusCode::kNotFound, fmt::format("there is no sequence {}; Create gives one", id));
  if (!sequence->tokens.empty()) {
    return Fail(StatusCode::kInvalidArgument,
                fmt::format("sequence {} has {} tokens; only an empty one can begin with a prefix", id,
                            sequence->tokens.size()));
  }
  PrefixUse use;
  if (!Shares()) {
    use.end = PrefixUse::End::kNothing;
    use.note = fmt::format("under the rules `{}` what a sequence reads is its own", options_.rules->name);
    return use;
  }
  const size_t n_most = tokens.empty() ? 0 : (tokens.size() - 1) / kBlockTokens;
  std::vector<PrefixNode*> chain = tree_.Find(tokens, n_most);
  const auto abandoned = std::ranges::find_if(chain, [](const PrefixNode* node) { return node->block->abandoned; });
  chain.erase(abandoned, chain.end());
  use.matched = static_cast<int64_t>(chain.size() * kBlockTokens);
  chain.resize(ReplicaEnd(chain));
  const size_t in_ram = chain.size();
  auto found = FindStored(tokens, n_most, in_ram);
  if (!found) return Fail(found.error());
  const bool from_store = found->blocks.size() > in_ram;
  use.matched = std::max(use.matched, static_cast<int64_t>(found->n_matched * kBlockTokens));

  for (PrefixNode* node : chain) {
    tree_.IsUsed(node);
    CellMemory::AddRef(node->block);
    sequence->blocks.push_back(node->block);
  }
  sequence->n_shared = in_ram;
  if (from_store) {
    (void)TakeStored(&*found, in_ram, sequence, &use);
  } else {
    for (const BlockRecord& block : found->blocks) store_->Release(block);
  }
  const size_t sound = sequence->blocks.size();
  const size_t end = WindowEnd(*sequence);
  if (end < sound) {
    use.end = PrefixUse::End::kWindow;
    // Exact cells belong to the end that was found.
    ReleaseFrom(sequence, options_.recent_blocks > 0 ? 0 : end);
  }
  use.tokens = static_cast<int64_t>(sequence->blocks.size() * kBlockTokens);
  use.from_store = std::max<int64_t>(0, use.tokens - static_cast<int64_t>(in_ram * kBlockTokens));
  sequence->tokens.assign(tokens.begin(), tokens.begin() + use.tokens);
  sequence->window_floor = 0;
  sequence->replica_floor =
      sequence->blocks.size() - std::min(sequence->blocks.size(), static_cast<size_t>(options_.recent_blocks));
  Share(sequence);
  DropPassed(sequence);
  TellEnd(tokens, n_most, *found, &use);
  return use;
}

// Appends the stored blocks that RAM does not have, verified; what does not pass ends the prefix. Their holds go with
// them.
size_t CacheImpl::TakeStored(PrefixFound* found, size_t n_there, Sequence* sequence, PrefixUse* use) {
  const size_t n = found->blocks.size();
  for (size_t b = 0; b < n_there; ++b) store_->Release(found->blocks[b]);
  // Prefixes that nobody uses make room for one that is used.
  while (memory_->RoomForBlocks(n - n_there) < n - n_there) {
    PrefixNode* idle = tree_.FirstIdle();
    if (idle == nullptr) break;
    GiveUpIdle(idle);
  }
  BlockKey parent = n_there == 0 ? BlockKey{} : sequence->blocks.back()->key;
  for (size_t b = n_there; b < n; ++b) {
    const BlockRecord& stored = found->blocks[b];
    Block* block = memory_->NewBlock(static_cast<int64_t>(b) * kBlockTokens, parent);
    sequence->blocks.push_back(block);
    block->tokens = stored.tokens;
    block->key = stored.key;
    memory_->StoredBlock(block, stored.places, stored.generation);
    parent = stored.key;
  }
  if (n_there == 0) {
    memory_->CreateSinks(sequence->blocks[0]);
    if (!UnpackSinks(found->sinks, sequence->blocks[0])) {
      use->end = PrefixUse::End::kDamaged;
      use->note = "the exact cells of the first tokens are not what they must be";
      ReleaseFrom(sequence, 0);
      return 0;
    }
  }
  int64_t widest = 0;
  for (const LayerGeometry& layer : options_.geometry) widest = std::max<int64_t>(widest, layer.window);
  const auto end = static_cast<int64_t>(WindowEnd(*sequence) * kBlockTokens);
  const size_t sound = RecoverFrom(sequence, n_there, end - widest + 1, &use->note);
  if (sound < n) use->end = PrefixUse::End::kDamaged;
  const auto recent = std::min(n, static_cast<size_t>(options_.recent_blocks));
  if (recent > 0 && (sound < n || !UnpackReplicas(found->replicas, std::span(sequence->blocks).last(recent)))) {
    use->end = PrefixUse::End::kReplicas;
    ReleaseFrom(sequence, 0);
  }
  return sequence->blocks.size();
}

void CacheImpl::TellEnd(std::span<const Token> tokens, size_t n_most, const PrefixFound& found, PrefixUse* use) const {
  using End = PrefixUse::End;
  const auto most = static_cast<int64_t>(n_most * kBlockTokens);
  if (use->tokens == most) {
    use->end = most > 0 ? End::kWhole : End::kNothing;
    use->note = most > 0 ? "" : "the prompt is shorter than a block of 64 tokens";
    return;
  }
  if (use->end == End::kDamaged) return;
  if (use->end == End::kWindow) {
    use->note = fmt::format(
        "{} tokens are stored, but the sliding windows of this model have passed the cells that they would "
        "need after token {}",
        use->matched, use->tokens);
    return;
  }
  if (use->tokens < use->matched) {
    use->end = End::kReplicas;
    use->note =
        fmt::format("{} tokens are stored, but recent_blocks wants exact cells, which are kept at published ends only",
                    use->matched);
    return;
  }
  const auto at = static_cast<size_t>(use->tokens);
  const auto chain = tree_.Find(tokens, at / kBlockTokens);
  const bool whole_chain = chain.size() * kBlockTokens == at;
  const int nearest = whole_chain ? tree_.Nearest(chain.empty() ? nullptr : chain.back(), tokens.subspan(at)) : -1;
  use->differs_at = nearest < 0 ? -1 : use->tokens + nearest;
  use->end = nearest >= 0 ? End::kDiffers : at == 0 ? End::kNothing : End::kEnds;
  switch (found.end) {
    case PrefixEnd::kEvicted:
      use->end = End::kEvicted;
      break;
    case PrefixEnd::kOtherIdentity:
      use->end = End::kOtherIdentity;
      break;
    case PrefixEnd::kDamaged:
      use->end = End::kDamaged;
      break;
    case PrefixEnd::kDiffers:
      use->end = End::kDiffers;
      use->differs_at = std::max(use->differs_at, found.differs_at);
      break;
    default:
      break;
  }
  switch (use->end) {
    case End::kNothing:
      use->note = "nothing that is stored begins like this prompt";
      break;
    case End::kEnds:
      use->note = fmt::format("what is stored ends after token {}", use->tokens);
      break;
    case End::kDiffers:
      use->note = fmt::format("the nearest stored prompt has another token at position {}", use->differs_at);
      break;
    case End::kEvicted:
      use->note = fmt::format("what followed token {} has been given up for space", use->tokens);
      break;
    case End::kOtherIdentity:
      use->note = fmt::format("the same prompt is stored with another {}", found.detail);
      break;
    default:
      use->note = found.detail;
  }
}

std::vector<std::byte> CacheImpl::PackShared(const Sequence& sequence, size_t n_blocks, bool sinks) const {
  const CellMap& map = memory_->map();
  const size_t n_replicas = sinks ? 0 : std::min(n_blocks, static_cast<size_t>(options_.recent_blocks));
  if (n_blocks == 0 || (!sinks && n_replicas == 0)) return {};
  SharedHeader header;
  header.n_blocks = static_cast<uint32_t>(n_replicas);
  header.n_tokens = static_cast<uint32_t>(sinks ? map.sinks : kBlockTokens);
  for (size_t b = n_blocks - n_replicas; b < n_blocks; ++b) {
    if (sequence.blocks[b]->cells[0].exact == kNoSlot) return {};
  }
  std::vector<std::byte> bytes(SharedBytes(map, header));
  std::memcpy(bytes.data(), &header, sizeof(header));
  if (sinks && map.sinks == 0) return bytes;
  std::byte* at = bytes.data() + sizeof(header);
  for (const LayerCells& layer : map.layers) {
    for (uint16_t h = 0; h < layer.n_heads; ++h) {
      const uint32_t i = layer.first_cell + h;
      if (sinks) {
        CopyExactTokens(layer.sink, memory_->sink(layer, sequence.blocks[0]->sinks[i]), 0, map.sinks, layer.sink, at,
                        0);
        at += layer.sink.bytes;
      }
      for (size_t b = n_blocks - n_replicas; b < n_blocks; ++b) {
        CopyExactTokens(layer.open, memory_->exact(layer, sequence.blocks[b]->cells[i]), 0, kBlockTokens, layer.open,
                        at, 0);
        at += layer.open.bytes;
      }
    }
  }
  return bytes;
}

bool CacheImpl::UnpackSinks(std::span<const std::byte> bytes, Block* root) {
  const CellMap& map = memory_->map();
  if (!HeaderFits(map, bytes, 0, static_cast<uint32_t>(map.sinks))) return false;
  const std::byte* at = bytes.data() + sizeof(SharedHeader);
  for (const LayerCells& layer : map.layers) {
    for (uint16_t h = 0; h < layer.n_heads && map.sinks > 0; ++h) {
      std::memcpy(memory_->sink(layer, root->sinks[layer.first_cell + h]), at, layer.sink.bytes);
      at += layer.sink.bytes;
    }
  }
  return true;
}

bool CacheImpl::UnpackReplicas(std::span<const std::byte> bytes, std::span<Block* const> blocks) {
  const CellMap& map = memory_->map();
  if (!HeaderFits(map, bytes, static_cast<uint32_t>(blocks.size()), kBlockTokens)) return false;
  // Those that are in RAM are read by others, and stay as they are.
  std::vector<bool> fills;
  for (Block* block : blocks) {
    fills.push_back(block->cells[0].exact == kNoSlot);
    if (fills.back()) memory_->CreateReplicas(block);
  }
  const std::byte* at = bytes.data() + sizeof(SharedHeader);
  for (const LayerCells& layer : map.layers) {
    for (uint16_t h = 0; h < layer.n_heads; ++h) {
      for (size_t b = 0; b < blocks.size(); ++b) {
        if (fills[b]) std::memcpy(memory_->exact(layer, blocks[b]->cells[layer.first_cell + h]), at, layer.open.bytes);
        at += layer.open.bytes;
      }
    }
  }
  return true;
}

Status CacheImpl::Publish(SequenceId id) {
  if (in_step_) return Status(StatusCode::kBusy, "Publish during a step; Commit or Abort it first");
  Sequence* sequence = Find(id);
  if (sequence == nullptr) return Status(StatusCode::kNotFound, fmt::format("there is no sequence {} to publish", id));
  if (store_ == nullptr)
    return Status(StatusCode::kInvalidArgument, "prefixes are kept in a store; give CacheOptions::store");
  EndSave();
  const size_t n = sequence->n_shared;
  if (n == 0) return OkStatus();
  const std::span<Block* const> sealed(sequence->blocks.data(), n);
  KVCELL_RETURN_IF_ERROR(memory_->WriteNow(sealed));
  PrefixRecord record;
  record.identity = identity_;
  record.model = options_.model_name;
  record.tokens.assign(sequence->tokens.begin(),
                       sequence->tokens.begin() + static_cast<std::ptrdiff_t>(n * kBlockTokens));
  record.sinks = PackShared(*sequence, n, /*sinks=*/true);
  record.replicas = PackShared(*sequence, n, /*sinks=*/false);
  for (const Block* block : sealed) {
    record.blocks.push_back(
        {.key = block->key, .generation = block->generation, .tokens = block->tokens, .places = block->places});
  }
  KVCELL_RETURN_IF_ERROR(store_->Publish(&record, memory_->map().shapes.data()));
  for (size_t b = 0; b < n; ++b) memory_->AdoptPlaces(sealed[b], record.blocks[b].places, record.blocks[b].generation);
  return OkStatus();
}

}  // namespace kvcell
