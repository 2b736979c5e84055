// kvcell inspect: the cells of a stored session, one by one, read from the store without a model.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstring>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "cell/cell_map.h"
#include "cell/stored_map.h"
#include "cli/commands.h"
#include "cli/control.h"
#include "cli/open_store.h"
#include "cli/output.h"
#include "cli/units.h"
#include "codec/cell_codec.h"
#include "codec/cell_layout.h"
#include "kvcell/cache.h"
#include "kvcell/codec.h"
#include "store/store.h"

namespace kvcell::cli {
namespace {

struct StoredCell {
  CellInfo info;
  std::string damage;  // "" where the cell is sound
};

struct StoredSession {
  SessionRecord record;
  std::vector<StoredCell> cells;
};

StoredCell SealedCell(Store* store, const CellMap& map, const LayerCells& layer, const BlockRecord& block,
                      CellInfo info, std::vector<std::byte>* buffer) {
  StoredCell cell{.info = std::move(info), .damage = ""};
  const auto head = static_cast<uint16_t>(cell.info.head);
  const CellLayout& layout = layer.coded(head);
  cell.info.k_precision = TypeName(layout.k.spec.type);
  cell.info.v_precision = TypeName(layout.v.spec.type);
  const auto& place = block.places[layer.group];
  if (!place) {  // a sliding window has passed it
    cell.info.state = CellState::kEvicted;
    return cell;
  }
  cell.info.state = CellState::kPersisted;
  cell.info.durable = true;
  cell.info.tier = "file";
  cell.info.length = layout.bytes;
  std::tie(cell.info.storage_path, cell.info.offset) =
      store->Locate(map.shapes[layer.group], *place, layer.slot(head), layer.head_in_slot(head));
  buffer->resize(layout.bytes);
  Status status =
      store->ReadCells(map.shapes[layer.group], *place, layer.slot(head), layer.head_in_slot(head), 1, buffer->data());
  if (status.ok()) {
    CellHeader header;
    std::memcpy(&header, buffer->data(), sizeof(header));
    cell.info.checksum = header.checksum;
    status = VerifyCell(*buffer, static_cast<uint16_t>(cell.info.layer), head, cell.info.token_start, block.key);
  }
  if (!status.ok()) cell.damage = status.message();
  return cell;
}

// The open tail is stored exactly, beside the blocks: its cells have no place of their own in a segment.
StoredCell OpenCell(const LayerCells& layer, CellInfo info) {
  info.state = CellState::kActive;
  info.durable = true;
  info.k_precision = info.v_precision = "f16";
  info.tier = "file";
  info.length = layer.open.bytes;
  return {.info = std::move(info), .damage = ""};
}

Result<StoredSession> ReadSession(const Options& options) {
  const Result<std::unique_ptr<Store>> store = OpenStore(options, StoreUse::kLook);
  if (!store) return Fail(store.error());
  Result<SessionRecord> record = (*store)->Load(options.session);
  if (!record) return Fail(record.error());
  const Result<CellMap> map = StoredCellMap(*record);
  if (!map) return Fail(map.error());

  StoredSession session{.record = *std::move(record), .cells = {}};
  std::vector<std::byte> buffer;
  const auto n_tokens = static_cast<int64_t>(session.record.tokens.size());
  const auto n_blocks = static_cast<int64_t>(session.record.blocks.size());
  const int64_t all_blocks = n_blocks + (n_tokens > n_blocks * kBlockTokens && session.record.damage.empty() ? 1 : 0);
  for (int64_t b = 0; b < all_blocks; ++b) {
    for (size_t l = 0; l < map->layers.size(); ++l) {
      const LayerCells& layer = map->layers[l];
      for (uint16_t head = 0; head < layer.n_heads; ++head) {
        CellInfo info;
        info.layer = static_cast<int32_t>(l);
        info.head = head;
        info.token_start = b * kBlockTokens;
        info.token_end = std::min<int64_t>((b + 1) * kBlockTokens, n_tokens);
        info.refs = 1;
        info.last_access = session.record.last_used;
        session.cells.push_back(b < n_blocks ? SealedCell(store->get(), *map, layer,
                                                          session.record.blocks[static_cast<size_t>(b)],
                                                          std::move(info), &buffer)
                                             : OpenCell(layer, std::move(info)));
      }
    }
  }
  return session;
}

Json CellJson(const StoredCell& cell) {
  Json object = CellInfoJson(cell.info);
  if (!cell.damage.empty()) object["damage"] = cell.damage;
  return object;
}

struct StateSum {
  int64_t cells = 0;
  uint64_t bytes = 0;
};

std::array<StateSum, kCellStates> SumByState(const std::vector<StoredCell>& cells) {
  std::array<StateSum, kCellStates> sums;
  for (const StoredCell& cell : cells) {
    StateSum& sum = sums[static_cast<size_t>(cell.info.state)];
    ++sum.cells;
    sum.bytes += cell.info.length;
  }
  return sums;
}

void PrintCells(const StoredSession& session) {
  Table table({"LAYER", "HEAD", "TOKENS", "STATE", "K", "V", "TIER", "FILE", "OFFSET", "LENGTH", "CHECKSUM"});
  table.AlignRight({0, 1, 8, 9});
  for (const StoredCell& cell : session.cells) {
    const CellInfo& info = cell.info;
    table.Add({std::to_string(info.layer), std::to_string(info.head),
               fmt::format("{}..{}", info.token_start, info.token_end), std::string(CellStateName(info.state)),
               info.k_precision, info.v_precision, info.tier, info.storage_path, std::to_string(info.offset),
               std::to_string(info.length),
               cell.damage.empty() ? fmt::format("{:016x}", info.checksum) : "DAMAGED: " + cell.damage});
  }
  table.Print(stdout);
  const auto sums = SumByState(session.cells);
  for (size_t state = 0; state < sums.size(); ++state) {
    if (sums[state].cells == 0) continue;
    Print(stderr, "{}: {} cells, {}\n", CellStateName(static_cast<CellState>(state)), FormatCount(sums[state].cells),
          FormatSize(sums[state].bytes));
  }
}

bool Wanted(const Options& options, const CellInfo& cell) {
  return (options.only_layer < 0 || cell.layer == options.only_layer) &&
         (options.only_head < 0 || cell.head == options.only_head) &&
         (options.only_state.empty() || CellStateName(cell.state) == options.only_state) &&
         cell.token_end > options.from_token && cell.token_start < options.to_token;
}

}  // namespace

int InspectCommand(const Options& options) {
  if (options.session.empty()) {
    return Failed(
        Status(StatusCode::kInvalidArgument, "name the session with --session NAME; `kvcell sessions ls` lists them"));
  }
  Result<StoredSession> session = ReadSession(options);
  if (!session) return Failed(session.error());
  std::erase_if(session->cells, [&](const StoredCell& cell) { return !Wanted(options, cell.info); });
  if (!session->record.damage.empty()) PrintWarning(session->record.damage);
  if (!options.json) {
    PrintCells(*session);
    return 0;
  }
  Json cells = Json::array();
  for (const StoredCell& cell : session->cells) cells.push_back(CellJson(cell));
  Json states = Json::object();
  const auto sums = SumByState(session->cells);
  for (size_t state = 0; state < sums.size(); ++state) {
    states[std::string(CellStateName(static_cast<CellState>(state)))] = {{"cells", sums[state].cells},
                                                                         {"bytes", sums[state].bytes}};
  }
  PrintJson({{"session", session->record.name},
             {"tokens", session->record.tokens.size()},
             {"by_state", states},
             {"cells", cells}});
  return 0;
}

}  // namespace kvcell::cli
