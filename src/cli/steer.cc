// kvcell ctl, top and doctor: another running process seen and steered, and what is wrong with a run or a store.
#include <fmt/format.h>

#include <chrono>
#include <cstdio>
#include <string>
#include <thread>
#include <utility>

#include "cli/commands.h"
#include "cli/control.h"
#include "cli/interrupt.h"
#include "cli/open_store.h"
#include "cli/output.h"
#include "cli/units.h"
#include "lab/doctor.h"

namespace kvcell::cli {
namespace {

Result<int64_t> Process(const Options& options) {
  if (options.pid > 0) return options.pid;
  const std::vector<int64_t> pids = RunningProcesses();
  if (pids.size() == 1) return pids.front();
  if (pids.empty()) return Fail(StatusCode::kNotFound, "no kvcell process of this user is running");
  std::string list;
  for (const int64_t pid : pids) list += fmt::format(" {}", pid);
  return Fail(StatusCode::kInvalidArgument,
              fmt::format("several kvcell processes run; choose one with --pid:{}", list));
}

uint64_t Number(const Json& object, const char* name) { return object.value(name, uint64_t{0}); }

// Rates come from two answers `seconds` apart.
void DrawTop(const Json& now, const Json& before, double seconds) {
  const auto rate = [&](const char* name) {
    return seconds > 0
               ? static_cast<double>(Number(now, name) - std::min(Number(now, name), Number(before, name))) / seconds
               : 0.0;
  };
  Print(stdout, "process {}{}, {} tokens, {:.1f} tokens/s, {:.0f} transitions/s\n", Number(now, "pid"),
        now.value("session", "").empty() ? "" : fmt::format(", session '{}'", now.value("session", "")),
        FormatCount(static_cast<int64_t>(Number(now, "length"))), rate("tokens"), rate("transitions"));
  Print(stdout, "RAM {} of {}, pressure {}; store {}\n", FormatSize(Number(now, "ram_bytes")),
        FormatSize(Number(now, "ram_budget")), Number(now, "pressure"), FormatSize(Number(now, "file_bytes")));
  const uint64_t ram = Number(now, "reads_ram"), file = Number(now, "reads_file");
  const double all = static_cast<double>(std::max<uint64_t>(1, ram + file));
  Print(stdout, "reads: {:.2f} % hits, {:.2f} % misses ({} persisted, {} recovering, {} evicted)\n\n",
        100.0 * static_cast<double>(ram) / all, 100.0 * static_cast<double>(file) / all,
        Number(now["misses"], "streamed"), Number(now["misses"], "recovering"), Number(now["misses"], "evicted"));
  Table table({"STATE", "CELLS", "BYTES", "TIER"});
  table.AlignRight({1, 2});
  for (int i = 0; i < kCellStates; ++i) {
    const std::string name(CellStateName(static_cast<CellState>(i)));
    const auto state = static_cast<CellState>(i);
    table.Add({name, FormatCount(static_cast<int64_t>(Number(now["cells"], name.c_str()))),
               FormatSize(Number(now["bytes"], name.c_str())),
               state == CellState::kPersisted ? "file"
               : state == CellState::kEvicted ? "-"
                                              : "ram"});
  }
  table.Print(stdout);
}

CacheStats StatsFrom(const Json& o) {
  CacheStats s;
  for (int i = 0; i < kCellStates; ++i) {
    const std::string name(CellStateName(static_cast<CellState>(i)));
    s.cells.by_state[static_cast<size_t>(i)] = Number(o["cells"], name.c_str());
    s.bytes_by_state[static_cast<size_t>(i)] = Number(o["bytes"], name.c_str());
  }
  s.ram_bytes = Number(o, "ram_bytes");
  s.reads_ram = Number(o, "reads_ram");
  s.reads_file = Number(o, "reads_file");
  s.thrashed = Number(o, "thrashed");
  s.waits = Number(o, "waits");
  s.longest_wait_ms = o.value("longest_wait_ms", 0.0);
  s.jobs = Number(o, "jobs");
  s.failed_jobs = Number(o, "failed_jobs");
  s.saturated = Number(o, "saturated");
  s.not_finite = Number(o, "not_finite");
  return s;
}

}  // namespace

int CtlCommand(const Options& options, const std::string& command, int64_t begin, int64_t end) {
  const auto pid = Process(options);
  if (!pid) return Failed(pid.error());
  Json request = {{"command", command}};
  if (command == "evict") {
    request["begin"] = begin;
    request["end"] = end;
  }
  const auto answer = AskProcess(*pid, request);
  if (!answer) return Failed(answer.error());
  if (!options.json && answer->contains("text")) {
    Print(stdout, "{}", (*answer)["text"].get<std::string>());
  } else if (!options.json && answer->contains("ok")) {
    if (!options.quiet) Print(stderr, "process {}: done\n", *pid);
  } else {
    PrintJson(*answer);
  }
  return 0;
}

int TopCommand(const Options& options, bool once) {
  const auto pid = Process(options);
  if (!pid) return Failed(pid.error());
  CatchInterrupts();
  Json before;
  auto at = std::chrono::steady_clock::now();
  while (InterruptSignal() == 0) {
    const auto answer = AskProcess(*pid, {{"command", "stats"}});
    if (!answer) return before.is_null() ? Failed(answer.error()) : 0;  // it has ended
    if (options.json) {
      PrintJson(*answer);
      return 0;
    }
    const auto now = std::chrono::steady_clock::now();
    if (IsTerminal(stdout) && !once) Print(stdout, "\033[H\033[2J");
    DrawTop(*answer, before.is_null() ? *answer : before,
            before.is_null() ? 0.0 : std::chrono::duration<double>(now - at).count());
    std::fflush(stdout);
    if (once || OutputFailed()) return 0;
    before = *answer;
    at = now;
    for (int i = 0; i < 10 && InterruptSignal() == 0; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(100));
  }
  return 0;
}

int DoctorCommand(const Options& options) {
  DoctorFigures figures;
  std::string what;
  if (!options.session.empty() && options.pid == 0) {
    const Result<std::unique_ptr<Store>> store = OpenStore(options, StoreUse::kLook);
    if (!store) return Failed(store.error());
    auto examined = ExamineSession(store->get(), options.session);
    if (!examined) return Failed(examined.error());
    figures = *std::move(examined);
    what = fmt::format("session '{}'", options.session);
  } else {
    const auto pid = Process(options);
    if (!pid) return Failed(pid.error());
    const auto answer = AskProcess(*pid, {{"command", "stats"}});
    if (!answer) return Failed(answer.error());
    figures.stats = StatsFrom(*answer);
    figures.pinned = answer->value("pinned", false);
    figures.promises_nothing = answer->value("durability", 1) == 0;
    figures.unsaved_tokens = answer->value("length", int64_t{0}) - answer->value("saved", int64_t{0});
    what = fmt::format("process {}", *pid);
  }
  const std::vector<DoctorFinding> findings = Diagnose(figures);
  if (options.json) {
    Json list = Json::array();
    for (const DoctorFinding& f : findings) {
      list.push_back({{"trouble", f.trouble}, {"says", f.says}, {"figure", f.figure}, {"change", f.change}});
    }
    PrintJson({{"subject", what}, {"findings", list}});
    return 0;
  }
  if (findings.empty()) Print(stdout, "{}: no trouble found\n", what);
  for (const DoctorFinding& f : findings) {
    Print(stdout, "{}: {}\n  figure: {}\n  change: {}\n", f.trouble, f.says, f.figure, f.change);
  }
  return 0;
}

}  // namespace kvcell::cli
