// The offline check of a whole store: rows, headers and every cell, nothing changed.
#include <fmt/format.h>

#include <algorithm>
#include <set>
#include <utility>

#include "store/prefix_index.h"
#include "store/shape.h"
#include "store/store_impl.h"

namespace kvcell {
// Collects what is wrong and remembers which blocks were looked at.
struct StoreImpl::Findings {
  std::vector<DamagedCell> damaged;
  std::set<std::pair<uint64_t, uint64_t>> seen;  // segment, lock byte

  void Row(const std::string& session, int64_t position, const std::string& path, std::string what) {
    damaged.push_back({session, 0, 0, position, path, 0, std::move(what)});
  }
};

// Reads all cells of one block of one shape, a layer at a time.
void StoreImpl::VerifyBlock(const CellVerifier& verifier, const CellSetShape& shape, const BlockRecord& block,
                            const BlockPlace& place, const std::string& session, int64_t position, Findings* findings) {
  std::vector<std::byte> run;
  for (size_t slot = 0; slot < shape.layers.size(); ++slot) {
    const auto& layer = shape.layers[slot];
    run.resize(size_t{layer.n_cells} * layer.cell_bytes);
    const Status read = ReadRun(shape, place, slot, 1, run.data());
    for (uint16_t i = 0; i < layer.n_cells; ++i) {
      const auto head = static_cast<uint16_t>(FirstHead(shape, slot) + i);
      const auto cell = std::span(run).subspan(size_t{i} * layer.cell_bytes, layer.cell_bytes);
      const Status status = read.ok() ? verifier(cell, layer.layer, head, position, block.key) : read;
      if (status.ok()) continue;
      auto [path, offset] = Locate(shape, place, slot, i);
      findings->damaged.push_back({session, layer.layer, head, position, std::move(path), offset, status.message()});
    }
  }
}

// The cells of one block, unless it was looked at before.
void StoreImpl::VerifyHeld(const CellVerifier& verifier, const BlockRecord& block, const std::string& session,
                           int64_t position, Findings* findings) {
  for (const auto& place : block.places) {
    if (!place || !findings->seen.insert({place->segment, place->offset + place->index}).second) continue;
    const auto extent = [&] {
      const std::lock_guard lock(mutex_);
      return ExtentOf(*place);
    }();
    const auto held = extent ? segments_->Hold(*place) : Result<bool>(Fail(extent.error()));
    if (!held) {
      findings->Row(session, position, segments_->PathOf(place->segment), held.error().message());
      continue;
    }
    if (!*held) continue;  // its session was removed meanwhile
    const auto shape = segments_->Clear(extent->shape);
    if (shape) {
      VerifyBlock(verifier, *shape, block, *place, session, position, findings);
    } else {
      findings->Row(session, position, segments_->PathOf(place->segment), "its cells are too short to be encrypted");
    }
    segments_->Release(*place);
  }
}

// Blocks that no session uses are in the prefix tree alone.
Status StoreImpl::VerifyPrefixes(const CellVerifier& verifier, Findings* findings) {
  std::vector<std::pair<int64_t, BlockRow>> blocks;  // position
  {
    const std::lock_guard lock(mutex_);
    Transaction transaction(index_->database());
    KVCELL_RETURN_IF_ERROR(transaction.Begin(Transaction::Kind::kRead));
    PrefixIndex prefixes = index_->prefixes();
    const auto there = prefixes.IsThere();
    if (!there) return there.error();
    if (!*there) return OkStatus();
    int64_t damaged = 0;
    const auto nodes = prefixes.List(&damaged);
    if (!nodes) return nodes.error();
    for (int64_t i = 0; i < damaged; ++i) {
      findings->Row("", 0, index_->path(),
                    "a row of the prefix tree fails its checksum; what it begins is computed again");
    }
    for (const PrefixRow& node : *nodes) {
      auto block = index_->FindBlock(node.block);
      if (!block) return block.error();
      const int64_t position = node.depth * kBlockTokens;
      if (*block) {
        blocks.emplace_back(position, **std::move(block));
      } else {
        findings->Row("", position, index_->path(), fmt::format("the row of block {} fails its checksum", node.block));
      }
      for (const PrefixBytes kind : {PrefixBytes::kSinks, PrefixBytes::kReplicas}) {
        const auto sound = prefixes.CheckBytes(node.block, kind);
        if (!sound) return sound.error();
        if (!*sound) findings->Row("", position, index_->path(), "exact cells of a prefix fail their checksum");
      }
    }
  }
  for (const auto& [position, row] : blocks) VerifyHeld(verifier, row.record, "", position, findings);
  return OkStatus();
}

Result<std::vector<DamagedCell>> StoreImpl::Verify(const CellVerifier& verifier) {
  Findings findings;
  std::vector<SessionRow> sessions;
  {
    const std::lock_guard lock(mutex_);
    const auto structure = index_->CheckStructure();
    if (!structure) return Fail(structure.error());
    for (const auto& line : *structure) findings.Row("", 0, index_->path(), line);
    std::vector<std::string> damaged;
    if (const std::string lost = LostCommits(); !lost.empty()) findings.Row("", 0, index_->path(), lost);
    if (head_.IsDamaged()) findings.Row("", 0, path_ + "/" + kHeadName, "its content fails its checksum");
    auto rows = index_->ListSessions(Spaces::kAll, &damaged);
    if (!rows) return Fail(rows.error());
    sessions = std::move(*rows);
    for (const auto& name : damaged) findings.Row(name, 0, index_->path(), "the session's row fails its checksum");
  }
  for (const auto& row : sessions) {
    std::vector<std::optional<BlockRow>> blocks;
    {
      const std::lock_guard lock(mutex_);
      Transaction transaction(index_->database());
      KVCELL_FAIL_IF_ERROR(transaction.Begin(Transaction::Kind::kRead));
      const auto again = index_->FindSession(row.id);
      if (!again || !*again || (*again)->revision != row.revision) continue;  // saved or removed meanwhile
      SessionRecord record;
      SessionDamage damage;
      KVCELL_FAIL_IF_ERROR(index_->ReadSessionData(row, &record, &damage));
      for (const auto& [is_damaged, part] : {std::pair(damage.tokens, "tokens"),
                                             {damage.exact, "exact cells"},
                                             {damage.logits, "logits"},
                                             {damage.extras, "settings"}}) {
        if (is_damaged) {
          findings.Row(row.name, 0, index_->path(), fmt::format("the session's stored {} fail their checksum", part));
        }
      }
      auto read = index_->ReadSessionBlocks(row, record.tokens);
      if (!read) return Fail(read.error());
      blocks = std::move(*read);
    }
    for (size_t i = 0; i < blocks.size(); ++i) {
      const auto position = static_cast<int64_t>(i) * kBlockTokens;
      if (!blocks[i]) {
        findings.Row(row.name, position, index_->path(), index_->BlockDamage(row, i));
        continue;
      }
      VerifyHeld(verifier, blocks[i]->record, row.name, position, &findings);
    }
  }
  KVCELL_FAIL_IF_ERROR(VerifyPrefixes(verifier, &findings));
  const std::lock_guard lock(mutex_);
  const auto keys = index_->ListExtentKeys();
  if (!keys) return Fail(keys.error());
  for (const auto& key : *keys) {
    const std::string path = segments_->PathOf(key.segment);
    const auto extent = index_->FindExtent(key);
    if (!extent) {
      findings.Row("", 0, index_->path(), extent.error().message());
      continue;
    }
    if (!*extent) continue;
    // One that nobody uses any more may have been freed, its row being all that is left of it.
    const auto used = index_->UsedBlocks(**extent);
    if (!used) return Fail(used.error());
    if (std::ranges::find(*used, true) == used->end()) continue;
    const ExtentRange range = (*extent)->range();
    std::vector<std::byte> header(static_cast<size_t>(key.offset - range.begin));
    const Status read = segments_->Read(key.segment, range.begin, header);
    const auto parsed = read.ok() ? ParseExtentHeader(header, range.begin, path) : Result<ExtentHeader>(Fail(read));
    std::string what;
    if (!parsed) {
      what = parsed.error().message();
    } else if (parsed->n_blocks != (*extent)->n_blocks || !SameShape(parsed->shape, (*extent)->shape)) {
      what = "the extent's header and its row in the index differ";
    }
    if (!what.empty()) findings.damaged.push_back({"", 0, 0, 0, path, range.begin, std::move(what)});
  }
  return std::move(findings.damaged);
}

}  // namespace kvcell
