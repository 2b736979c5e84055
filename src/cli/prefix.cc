// kvcell prefix: the beginnings of prompts that a store keeps for later ones. No model is needed.
#include <fmt/format.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cli/commands.h"
#include "cli/open_store.h"
#include "cli/output.h"
#include "cli/units.h"
#include "store/store.h"

namespace kvcell::cli {
int PrefixListCommand(const Options& options) {
  const Result<std::unique_ptr<Store>> store = OpenStore(options, StoreUse::kLook);
  if (!store) return Failed(store.error());
  const Result<std::vector<PrefixSummary>> prefixes = (*store)->ListPrefixes();
  if (!prefixes) return Failed(prefixes.error());
  if (options.json) {
    Json list = Json::array();
    for (const PrefixSummary& prefix : *prefixes) {
      list.push_back({{"id", prefix.id},
                      {"tokens", prefix.tokens},
                      {"refs", prefix.refs},
                      {"pinned", prefix.pinned},
                      {"sessions", prefix.sessions},
                      {"published", prefix.published},
                      {"last_used", prefix.last_used},
                      {"model", prefix.model}});
    }
    PrintJson({{"store", options.store}, {"prefixes", list}});
    return 0;
  }
  Table table({"ID", "TOKENS", "REFS", "PINNED", "KEPT BY", "LAST USED", "MODEL"});
  table.AlignRight({0, 1, 2});
  for (const PrefixSummary& prefix : *prefixes) {
    table.Add({std::to_string(prefix.id), std::to_string(prefix.tokens), std::to_string(prefix.refs),
               prefix.pinned ? "yes" : "no", prefix.published ? "itself" : "sessions", FormatTime(prefix.last_used),
               prefix.model});
  }
  if (table.empty() && IsTerminal(stdout)) {
    Print(stderr, "no prefixes in {}\n", options.store);
    return 0;
  }
  table.Print(stdout);
  return 0;
}

int PrefixPinCommand(const Options& options, int64_t id, bool off) {
  const Result<std::unique_ptr<Store>> store = OpenStore(options, StoreUse::kChange);
  if (!store) return Failed(store.error());
  if (const Status status = (*store)->PinPrefix(id, !off); !status.ok()) return Failed(status);
  if (options.json) PrintJson({{"id", id}, {"pinned", !off}});
  return 0;
}

int PrefixRemoveCommand(const Options& options, const std::vector<int64_t>& ids) {
  const Result<std::unique_ptr<Store>> store = OpenStore(options, StoreUse::kChange);
  if (!store) return Failed(store.error());
  for (const int64_t id : ids) {
    if (const Status status = (*store)->RemovePrefix(id); !status.ok()) return Failed(status);
  }
  if (options.json) PrintJson({{"removed", ids}});
  return 0;
}

}  // namespace kvcell::cli
