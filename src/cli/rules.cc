// kvcell rules: checks, shows, draws and replays rule files, without a model.
#include "cell/rules.h"

#include <fmt/format.h>

#include <string>
#include <utility>

#include "base/text_file.h"
#include "cell/promela.h"
#include "cli/commands.h"
#include "cli/output.h"
#include "cli/units.h"
#include "lab/simulate.h"

namespace kvcell::cli {
namespace {

Json MessagesJson(const std::vector<RuleMessage>& messages) {
  Json list = Json::array();
  for (const RuleMessage& m : messages) list.push_back({{"line", m.line}, {"message", m.message}});
  return list;
}

Result<std::shared_ptr<const Rules>> Load(const std::string& path) {
  auto text = RuleText(path);
  if (!text) return Fail(text.error());
  return ParseRules(*text, path);
}

}  // namespace

int RulesCheckCommand(const Options& options, const std::string& path) {
  const auto text = RuleText(path);
  if (!text) return Failed(text.error());
  const RulesCheck check = CheckRules(*text, path);
  const bool ok = check.errors.empty();
  if (options.json) {
    Json object = {{"ok", ok}, {"errors", MessagesJson(check.errors)}, {"warnings", MessagesJson(check.warnings)}};
    if (ok) {
      object["rules"] = check.rules->n_written;
      object["depends_on_memory"] = check.rules->depends_on_memory;
    }
    PrintJson(object);
    return ok ? 0 : 1;
  }
  for (const RuleMessage& m : check.errors) Print(stderr, "kvcell: {}:{}: {}\n", path, m.line, m.message);
  for (const RuleMessage& m : check.warnings) {
    PrintWarning(m.line > 0 ? fmt::format("{}:{}: {}", path, m.line, m.message)
                            : fmt::format("{}: {}", path, m.message));
  }
  if (ok) Print(stdout, "{}: {} rules, sound\n", path, check.rules->n_written);
  return ok ? 0 : 1;
}

int RulesShowCommand(const Options&, const std::string& name) {
  const auto rules = ProfileRules(name);
  if (!rules) return Failed(rules.error());
  Print(stdout, "{}", ProfileText(name));
  return 0;
}

int RulesGraphCommand(const Options& options, const std::string& path, bool dot) {
  const auto rules = Load(path);
  if (!rules) return Failed(rules.error());
  const std::string picture = dot ? RulesDot(**rules) : RulesMermaid(**rules);
  if (options.json) {
    PrintJson({{"format", dot ? "dot" : "mermaid"}, {"graph", picture}});
  } else {
    Print(stdout, "{}", picture);
  }
  return 0;
}

int RulesPromelaCommand(const Options&, const std::string& path) {
  const auto rules = Load(path);
  if (!rules) return Failed(rules.error());
  Print(stdout, "{}", PromelaModel(**rules));
  return 0;
}

int RulesSimulateCommand(const Options& options, const std::string& path) {
  SimulateOptions simulate;
  auto rules = Load(path);
  if (!rules) return Failed(rules.error());
  simulate.rules = *std::move(rules);
  simulate.ram_budget = options.ram_budget;
  if (options.layers > 0) simulate.layers = options.layers;
  if (options.kv_heads > 0) simulate.kv_heads = options.kv_heads;
  if (options.head_dim > 0) simulate.head_dim = options.head_dim;
  if (options.file) {
    auto trace = ReadTextFile(*options.file);
    if (!trace) return Failed(trace.error());
    simulate.trace = *std::move(trace);
  }
  const auto rows = SimulateRules(simulate);
  if (!rows && options.file) {
    return Failed(Status(rows.error().code(), fmt::format("{}: {}", *options.file, rows.error().message())));
  }
  if (!rows) return Failed(rows.error());
  if (options.json) {
    Json list = Json::array();
    for (const SimulateRow& row : *rows) {
      Json cells = Json::object();
      for (int s = 0; s < kCellStates; ++s) {
        cells[std::string(CellStateName(static_cast<CellState>(s)))] = row.stats.cells.by_state[static_cast<size_t>(s)];
      }
      list.push_back({{"line", row.line},
                      {"event", row.what},
                      {"tokens", row.tokens},
                      {"cells", cells},
                      {"ram_bytes", row.stats.ram_bytes},
                      {"file_bytes", row.stats.file_bytes},
                      {"misses", row.stats.misses_streamed + row.stats.misses_recovering},
                      {"pressure", row.stats.pressure},
                      {"transitions", row.stats.transitions},
                      {"note", row.note}});
    }
    PrintJson({{"rows", list}});
    return 0;
  }
  Table table({"LINE", "EVENT", "TOKENS", "ACTIVE", "QUANTIZED", "PERSISTED", "RECOVERING", "EVICTED", "RAM", "FILE",
               "MISSES", "NOTE"});
  table.AlignRight({0, 2, 3, 4, 5, 6, 7, 8, 9, 10});
  for (const SimulateRow& row : *rows) {
    const auto& n = row.stats.cells.by_state;
    table.Add({std::to_string(row.line), row.what, std::to_string(row.tokens), std::to_string(n[0]),
               std::to_string(n[1]), std::to_string(n[2]), std::to_string(n[3]), std::to_string(n[4]),
               FormatSize(row.stats.ram_bytes), FormatSize(row.stats.file_bytes),
               std::to_string(row.stats.misses_streamed + row.stats.misses_recovering), row.note});
  }
  table.Print(stdout);
  return 0;
}

}  // namespace kvcell::cli
