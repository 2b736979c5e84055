// kvcell sessions and kvcell store: what a store holds, moved, removed and checked. No model is needed.
#include <fmt/format.h>

#include <memory>
#include <nlohmann/json.hpp>
#include <string>

#include "cli/commands.h"
#include "cli/open_store.h"
#include "cli/output.h"
#include "cli/units.h"
#include "codec/cell_codec.h"
#include "store/store.h"

namespace kvcell::cli {
namespace {

// What its saves survive, as `run` and `chat` have written it down; "" where another program has saved it.
std::string SessionDurability(const nlohmann::json& extras) {
  if (!extras.is_object()) return "";
  const auto level = extras.find("durability");
  return level != extras.end() && level->is_string() && ParseDurability(level->get<std::string>())
             ? level->get<std::string>()
             : "";
}

Json IdentityJson(const Identity& identity) {
  Json object = Json::object();
  for (const auto& [name, value] : identity) object[name] = value;
  return object;
}

}  // namespace

int SessionsListCommand(const Options& options) {
  const Result<std::unique_ptr<Store>> store = OpenStore(options, StoreUse::kLook);
  if (!store) return Failed(store.error());
  const Result<std::vector<SessionSummary>> sessions = (*store)->List();
  if (!sessions) return Failed(sessions.error());
  if (options.json) {
    Json list = Json::array();
    for (const SessionSummary& session : *sessions) {
      list.push_back({{"name", session.name},
                      {"tokens", session.tokens},
                      {"bytes", session.bytes},
                      {"model", session.model},
                      {"last_used", session.last_used}});
    }
    PrintJson({{"store", options.store}, {"sessions", list}});
    return 0;
  }
  Table table({"NAME", "TOKENS", "SIZE", "MODEL", "LAST USED"});
  table.AlignRight({1, 2});
  for (const SessionSummary& session : *sessions) {
    table.Add({session.name, std::to_string(session.tokens), FormatSize(static_cast<uint64_t>(session.bytes)),
               session.model, FormatTime(session.last_used)});
  }
  if (table.empty() && IsTerminal(stdout)) {
    Print(stderr, "no sessions in {}\n", options.store);
    return 0;
  }
  table.Print(stdout);
  return 0;
}

int SessionsShowCommand(const Options& options, const std::string& name) {
  const Result<std::unique_ptr<Store>> store = OpenStore(options, StoreUse::kLook);
  if (!store) return Failed(store.error());
  const Result<SessionRecord> session = (*store)->Load(name);
  if (!session) return Failed(session.error());
  const auto tokens = static_cast<int64_t>(session->tokens.size());
  const nlohmann::json extras = nlohmann::json::parse(session->extras, nullptr, false);
  const std::string durability = SessionDurability(extras);
  if (options.json) {
    PrintJson({{"name", session->name},
               {"tokens", tokens},
               {"blocks", session->blocks.size()},
               {"model", session->model},
               {"last_used", session->last_used},
               {"durability", durability},
               {"identity", IdentityJson(session->identity)},
               {"extras", extras.is_discarded() ? nlohmann::json(session->extras) : extras}});
    return 0;
  }
  Table table({"", ""});
  table.Add({"name", session->name});
  table.Add({"model", session->model});
  table.Add({"tokens", FormatCount(tokens)});
  table.Add({"sealed blocks", FormatCount(static_cast<int64_t>(session->blocks.size()))});
  table.Add({"last used", FormatTime(session->last_used)});
  if (!durability.empty()) table.Add({"durability", durability});
  for (const auto& [field, value] : session->identity) table.Add({"identity: " + field, value});
  table.Add({"extras", session->extras});
  table.Print(stdout);
  return 0;
}

int SessionsRemoveCommand(const Options& options, const std::vector<std::string>& names, bool erase) {
  const Result<std::unique_ptr<Store>> store = OpenStore(options, StoreUse::kChange);
  if (!store) return Failed(store.error());
  // One that can't be removed does not keep the others.
  std::vector<std::string> removed;
  Status trouble;
  for (const std::string& name : names) {
    const Status status = (*store)->Remove(name, erase);
    if (status.ok()) {
      removed.push_back(name);
      continue;
    }
    if (!trouble.ok()) PrintError(trouble);
    trouble = status;
  }
  if (options.json) PrintJson({{"removed", removed}, {"erased", erase}});
  return trouble.ok() ? 0 : Failed(trouble);
}

int SessionsExportCommand(const Options& options, const std::string& name, const std::string& path) {
  const Result<std::unique_ptr<Store>> store = OpenStore(options, StoreUse::kLook);
  if (!store) return Failed(store.error());
  if (const Status status = (*store)->Export(name, path); !status.ok()) return Failed(status);
  if (options.json) PrintJson({{"name", name}, {"file", path}});
  return 0;
}

int SessionsImportCommand(const Options& options, const std::string& path, const std::string& as) {
  const Result<std::unique_ptr<Store>> store = OpenStore(options, StoreUse::kMake);
  if (!store) return Failed(store.error());
  const Result<std::string> name = (*store)->Import(path, as);
  if (!name) return Failed(name.error());
  if (options.json) {
    PrintJson({{"name", *name}, {"file", path}});
  } else if (!options.quiet) {
    Print(stdout, "{}\n", *name);
  }
  return 0;
}

int StoreStatsCommand(const Options& options) {
  const Result<std::unique_ptr<Store>> store = OpenStore(options, StoreUse::kLook);
  if (!store) return Failed(store.error());
  const Result<kvcell::StoreStats> stats = (*store)->Stats();
  if (!stats) return Failed(stats.error());
  if (options.json) {
    PrintJson({{"store", options.store},
               {"sessions", stats->sessions},
               {"blocks", stats->blocks},
               {"cells", stats->cells},
               {"segment_bytes", stats->segment_bytes},
               {"live_bytes", stats->live_bytes},
               {"index_bytes", stats->index_bytes},
               {"encrypted", stats->encrypted}});
    return 0;
  }
  Table table({"", ""});
  table.Add({"store", options.store});
  table.Add({"sessions", FormatCount(stats->sessions)});
  table.Add({"blocks", FormatCount(stats->blocks)});
  table.Add({"cells", FormatCount(stats->cells)});
  table.Add({"segment files", FormatSize(static_cast<uint64_t>(stats->segment_bytes))});
  table.Add({"of these in use", FormatSize(static_cast<uint64_t>(stats->live_bytes))});
  table.Add({"index", FormatSize(static_cast<uint64_t>(stats->index_bytes))});
  table.Add({"encrypted", stats->encrypted ? "yes" : "no"});
  table.Print(stdout);
  return 0;
}

int StoreVerifyCommand(const Options& options) {
  const Result<std::unique_ptr<Store>> store = OpenStore(options, StoreUse::kLook);
  if (!store) return Failed(store.error());
  int64_t cells = 0;
  const Result<std::vector<DamagedCell>> damaged = (*store)->Verify(
      [&cells](std::span<const std::byte> cell, uint16_t layer, uint16_t head, int64_t position, const BlockKey& key) {
        ++cells;
        return VerifyCell(cell, layer, head, position, key);
      });
  if (!damaged) return Failed(damaged.error());
  if (options.json) {
    Json list = Json::array();
    for (const DamagedCell& cell : *damaged) {
      list.push_back({{"session", cell.session},
                      {"layer", cell.layer},
                      {"head", cell.head},
                      {"position", cell.position},
                      {"path", cell.path},
                      {"offset", cell.offset},
                      {"what", cell.what}});
    }
    PrintJson({{"cells", cells}, {"damaged", list}});
  } else {
    Table table({"SESSION", "LAYER", "HEAD", "POSITION", "FILE", "OFFSET", "WHAT"});
    for (const DamagedCell& cell : *damaged) {
      table.Add({cell.session, std::to_string(cell.layer), std::to_string(cell.head), std::to_string(cell.position),
                 cell.path, std::to_string(cell.offset), cell.what});
    }
    if (!table.empty()) table.Print(stdout);
    if (!options.quiet) {
      Print(stderr, "{} cells checked, {} damaged\n", FormatCount(cells),
            FormatCount(static_cast<int64_t>(damaged->size())));
    }
  }
  return damaged->empty() ? 0 : 1;
}

int StoreCompactCommand(const Options& options) {
  const Result<std::unique_ptr<Store>> store = OpenStore(options, StoreUse::kChange);
  if (!store) return Failed(store.error());
  const Result<CompactReport> report = (*store)->Compact();
  if (!report) return Failed(report.error());
  if (options.json) {
    PrintJson({{"segments_before", report->segments_before},
               {"segments_after", report->segments_after},
               {"bytes_before", report->bytes_before},
               {"bytes_after", report->bytes_after},
               {"blocks_moved", report->blocks_moved},
               {"segments_in_use", report->segments_in_use}});
  } else if (!options.quiet) {
    Print(stderr, "{} -> {}, {} blocks moved{}\n", FormatSize(static_cast<uint64_t>(report->bytes_before)),
          FormatSize(static_cast<uint64_t>(report->bytes_after)), FormatCount(report->blocks_moved),
          report->segments_in_use > 0
              ? fmt::format("; {} segments are in use and stay as they are", report->segments_in_use)
              : "");
  }
  return 0;
}

int StoreRemoveCommand(const Options& options, bool erase) {
  if (const Status status = CheckStoreKnown(options); !status.ok()) return Failed(status);
  if (const Status status = Store::Destroy(options.store, erase); !status.ok()) return Failed(status);
  if (options.json) PrintJson({{"removed", options.store}, {"erased", erase}});
  return 0;
}

}  // namespace kvcell::cli
