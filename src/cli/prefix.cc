// kvcell prefix: the beginnings of prompts that a store keeps for later ones. No model is needed.
#include <fmt/format.h>

#include <filesystem>
#include <memory>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "cli/commands.h"
#include "cli/output.h"
#include "cli/units.h"
#include "store/store.h"

namespace kvcell::cli {
namespace {

Result<std::unique_ptr<Store>> OpenStore(const Options& options, bool read_only) {
  StoreOptions store_options;
  store_options.create = false;
  store_options.read_only = read_only;
  store_options.name_space = options.name_space;
  Result<std::string> key = ReadStoreKey(options);
  if (!key) return Fail(key.error());
  store_options.key = *std::move(key);
  Result<std::unique_ptr<Store>> store = Store::Open(options.store, store_options);
  std::error_code error;
  if (!store && store.error().code() == StatusCode::kNotFound && !std::filesystem::exists(options.store, error)) {
    return Fail(
        StatusCode::kNotFound,
        fmt::format("there is no store at {} yet; `kvcell run` makes one, --store DIR names another", options.store));
  }
  return store;
}

}  // namespace

int PrefixListCommand(const Options& options) {
  const Result<std::unique_ptr<Store>> store = OpenStore(options, true);
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
  const Result<std::unique_ptr<Store>> store = OpenStore(options, false);
  if (!store) return Failed(store.error());
  if (const Status status = (*store)->PinPrefix(id, !off); !status.ok()) return Failed(status);
  if (options.json) PrintJson({{"id", id}, {"pinned", !off}});
  return 0;
}

int PrefixRemoveCommand(const Options& options, const std::vector<int64_t>& ids) {
  const Result<std::unique_ptr<Store>> store = OpenStore(options, false);
  if (!store) return Failed(store.error());
  for (const int64_t id : ids) {
    if (const Status status = (*store)->RemovePrefix(id); !status.ok()) return Failed(status);
  }
  if (options.json) PrintJson({{"removed", ids}});
  return 0;
}

}  // namespace kvcell::cli
