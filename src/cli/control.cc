#include "cli/control.h"

#include <fmt/format.h>
#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <utility>

#include "base/gpu_probe.h"
#include "base/memory_probe.h"
#include "cli/interrupt.h"
#include "cli/output.h"
#include "kvcell/rules.h"

namespace kvcell::cli {
namespace {

constexpr size_t kMaxMessage = size_t{64} << 20;

Status SocketStatus(std::string_view what, const std::string& path) {
  return Status(StatusCode::kIoError, fmt::format("{}: {}: {}", path, what, std::strerror(errno)));
}

std::string SocketPath(int64_t pid) { return fmt::format("{}/{}.sock", RuntimeDirectory(), pid); }

bool Address(const std::string& path, sockaddr_un* address) {
  *address = {};
  address->sun_family = AF_UNIX;
  if (path.size() >= sizeof(address->sun_path)) return false;
  std::memcpy(address->sun_path, path.data(), path.size());
  return true;
}

// A line from a socket; nothing after `ms` milliseconds of silence, at its end, or where it is too long.
std::optional<std::string> ReadLine(int fd, int ms) {
  std::string line;
  char buffer[65536];
  while (line.size() < kMaxMessage) {
    pollfd wait{fd, POLLIN, 0};
    if (poll(&wait, 1, ms) <= 0) return std::nullopt;
    const ssize_t n = recv(fd, buffer, sizeof(buffer), 0);
    if (n <= 0) return std::nullopt;
    line.append(buffer, static_cast<size_t>(n));
    if (line.back() == '\n') return line;
  }
  return std::nullopt;
}

bool WriteAll(int fd, const std::string& text) {
  for (size_t at = 0; at < text.size();) {
    const ssize_t n = send(fd, text.data() + at, text.size() - at, MSG_NOSIGNAL);
    if (n <= 0) return false;
    at += static_cast<size_t>(n);
  }
  return true;
}

std::string Dump(const Json& object) { return object.dump(-1, ' ', false, Json::error_handler_t::replace) + "\n"; }

Json ErrorJson(const Status& status) {
  return {{"error", {{"code", StatusCodeName(status.code())}, {"message", status.message()}}}};
}

}  // namespace

std::string RuntimeDirectory() {
  if (const char* path = std::getenv("XDG_RUNTIME_DIR"); path != nullptr && path[0] == '/') {
    return std::string(path) + "/kvcell";
  }
  return fmt::format("/tmp/kvcell-{}", getuid());
}

std::vector<int64_t> RunningProcesses() {
  std::vector<int64_t> pids;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(RuntimeDirectory(), error)) {
    const std::string name = entry.path().filename();
    char* end = nullptr;
    const long long pid = std::strtoll(name.c_str(), &end, 10);
    if (pid <= 0 || std::string_view(end) != ".sock") continue;
    if (AskProcess(pid, {{"command", "ping"}})) {
      pids.push_back(pid);
    } else if (kill(static_cast<pid_t>(pid), 0) != 0 && errno == ESRCH) {
      unlink(entry.path().c_str());  // left behind by a process that was killed
    }
  }
  std::sort(pids.begin(), pids.end());
  return pids;
}

Result<Json> AskProcess(int64_t pid, const Json& request) {
  const std::string path = SocketPath(pid);
  sockaddr_un address;
  if (!Address(path, &address))
    return Fail(StatusCode::kInvalidArgument, fmt::format("{}: the path is too long", path));
  const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd < 0) return Fail(SocketStatus("no socket", path));
  Result<Json> answer = Fail(StatusCode::kNotFound, fmt::format("no kvcell process {} answers at {}", pid, path));
  if (connect(fd, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0 && WriteAll(fd, Dump(request))) {
    const auto line = ReadLine(fd, 60000);
    const Json object = line ? Json::parse(*line, nullptr, false) : Json();
    if (!object.is_object()) {
      answer = Fail(StatusCode::kIoError, fmt::format("process {} gave no answer within a minute", pid));
    } else if (object.contains("error")) {
      answer = Fail(StatusCode::kInvalidArgument, object["error"].value("message", "it failed"));
    } else {
      answer = object;
    }
  }
  close(fd);
  return answer;
}

Json StatsJson(const Cache& cache) {
  const CacheStats s = cache.Stats();
  Json cells = Json::object(), bytes = Json::object(), moves = Json::array();
  for (int i = 0; i < kCellStates; ++i) {
    const std::string name(CellStateName(static_cast<CellState>(i)));
    cells[name] = s.cells.by_state[static_cast<size_t>(i)];
    bytes[name] = s.bytes_by_state[static_cast<size_t>(i)];
  }
  for (const TransitionCount& t : cache.Transitions()) {
    moves.push_back({{"event", t.event}, {"from", t.from}, {"to", t.to}, {"n", t.n}});
  }
  return {
      {"cells", cells},
      {"bytes", bytes},
      {"ram_bytes", s.ram_bytes},
      {"ram_peak_bytes", s.ram_peak_bytes},
      {"ram_budget", cache.options().ram_budget},
      {"ram_fill", s.ram_fill},
      {"file_bytes", s.file_bytes},
      {"kv_bytes", s.kv_bytes},
      {"f16_bytes", s.f16_bytes},
      {"pressure", s.pressure},
      {"reads_ram", s.reads_ram},
      {"reads_file", s.reads_file},
      {"misses", {{"streamed", s.misses_streamed}, {"recovering", s.misses_recovering}, {"evicted", s.evicted_skips}}},
      {"transitions", s.transitions},
      {"moves", moves},
      {"thrashed", s.thrashed},
      {"damped", s.damped},
      {"waits", s.waits},
      {"longest_wait_ms", s.longest_wait_ms},
      {"jobs", s.jobs},
      {"failed_jobs", s.failed_jobs},
      {"saturated", s.saturated},
      {"not_finite", s.not_finite}};
}

Json CellInfoJson(const CellInfo& info) {
  return {{"layer", info.layer},
          {"head", info.head},
          {"token_start", info.token_start},
          {"token_end", info.token_end},
          {"state", CellStateName(info.state)},
          {"durable", info.durable},
          {"k_precision", info.k_precision},
          {"v_precision", info.v_precision},
          {"tier", info.tier},
          {"storage_path", info.storage_path},
          {"offset", info.offset},
          {"length", info.length},
          {"checksum", fmt::format("{:016x}", info.checksum)},
          {"refs", info.refs},
          {"reads", info.reads},
          {"last_access", info.last_access}};
}

std::string MetricsText(const Cache& cache, int64_t tokens) {
  const CacheStats s = cache.Stats();
  std::string text;
  const auto family = [&](std::string_view name, std::string_view type, std::string_view help) {
    text += fmt::format("# HELP kvcell_{} {}\n# TYPE kvcell_{} {}\n", name, help, name, type);
  };
  const auto one = [&](std::string_view name, std::string_view type, std::string_view help, double value) {
    family(name, type, help);
    text += fmt::format("kvcell_{} {}\n", name, value);
  };
  family("cells", "gauge", "Cells by state.");
  for (int i = 0; i < kCellStates; ++i) {
    text += fmt::format("kvcell_cells{{state=\"{}\"}} {}\n", CellStateName(static_cast<CellState>(i)),
                        s.cells.by_state[static_cast<size_t>(i)]);
  }
  family("cell_bytes", "gauge", "Bytes of cells by state.");
  for (int i = 0; i < kCellStates; ++i) {
    text += fmt::format("kvcell_cell_bytes{{state=\"{}\"}} {}\n", CellStateName(static_cast<CellState>(i)),
                        s.bytes_by_state[static_cast<size_t>(i)]);
  }
  one("ram_bytes", "gauge", "KV memory taken.", static_cast<double>(s.ram_bytes));
  one("ram_budget_bytes", "gauge", "KV memory allowed.", static_cast<double>(cache.options().ram_budget));
  one("file_bytes", "gauge", "Bytes of cells in the store.", static_cast<double>(s.file_bytes));
  one("pressure", "gauge", "0 none, 1 soft, 2 hard.", s.pressure);
  family("reads_total", "counter", "Cells attended, by where they were.");
  text += fmt::format("kvcell_reads_total{{tier=\"ram\"}} {}\nkvcell_reads_total{{tier=\"file\"}} {}\n", s.reads_ram,
                      s.reads_file);
  family("misses_total", "counter", "Reads that found no bytes in RAM, by reason.");
  text += fmt::format(
      "kvcell_misses_total{{reason=\"persisted\"}} {}\nkvcell_misses_total{{reason=\"recovering\"}} {}\n"
      "kvcell_misses_total{{reason=\"evicted\"}} {}\n",
      s.misses_streamed, s.misses_recovering, s.evicted_skips);
  family("transitions_total", "counter", "Cells moved, by event and states.");
  for (const TransitionCount& t : cache.Transitions()) {
    text +=
        fmt::format("kvcell_transitions_total{{event=\"{}\",from=\"{}\",to=\"{}\"}} {}\n", t.event, t.from, t.to, t.n);
  }
  one("thrashed_total", "counter", "Blocks put to rest after going to and fro.", static_cast<double>(s.thrashed));
  one("waits_total", "counter", "Steps that waited for room.", static_cast<double>(s.waits));
  one("failed_jobs_total", "counter", "Batches of background work that failed.", static_cast<double>(s.failed_jobs));
  one("tokens_total", "counter", "Tokens appended.", static_cast<double>(tokens));
  return text;
}

std::unique_ptr<Control> Control::Start(const Target& target, Status* status) {
  std::unique_ptr<Control> control(new Control(target));
  *status = OkStatus();
  const std::string directory = RuntimeDirectory();
  if (mkdir(directory.c_str(), 0700) != 0 && errno != EEXIST) {
    *status = SocketStatus("the runtime directory can't be made", directory);
    return control;
  }
  struct stat info {};
  if (lstat(directory.c_str(), &info) != 0 || !S_ISDIR(info.st_mode) || info.st_uid != getuid() ||
      (info.st_mode & 077) != 0) {
    *status = Status(StatusCode::kPermission,
                     fmt::format("{} is not a directory of this user's alone (0700); set XDG_RUNTIME_DIR", directory));
    return control;
  }
  control->path_ = SocketPath(getpid());
  sockaddr_un address;
  if (!Address(control->path_, &address) || pipe(control->stop_pipe_) != 0) {
    *status = SocketStatus("no socket of this name", control->path_);
    control->path_.clear();
    return control;
  }
  unlink(control->path_.c_str());
  control->listener_ = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  // The directory keeps others out before the mode does.
  if (control->listener_ < 0 ||
      bind(control->listener_, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0 ||
      chmod(control->path_.c_str(), 0600) != 0 || listen(control->listener_, 8) != 0) {
    *status = SocketStatus("the socket can't be opened", control->path_);
    return control;
  }
  control->server_ = std::thread([c = control.get()] { c->Serve(); });
  return control;
}

Control::~Control() {
  stop_.store(true);
  if (server_.joinable()) {
    [[maybe_unused]] const ssize_t written = write(stop_pipe_[1], "x", 1);
    server_.join();
  }
  if (sampler_.joinable()) sampler_.join();
  for (const int fd : {listener_, stop_pipe_[0], stop_pipe_[1]}) {
    if (fd >= 0) close(fd);
  }
  if (!path_.empty()) unlink(path_.c_str());
}

std::unique_lock<std::mutex> Control::Step() {
  // A mutex makes no queue: without this a process that steps without a pause would never let anyone in.
  for (int i = 0; i < 50 && waiting_.load(std::memory_order_acquire) > 0; ++i) {
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
  return std::unique_lock(mutex_);
}

void Control::Serve() {
  while (true) {
    pollfd waits[2] = {{listener_, POLLIN, 0}, {stop_pipe_[0], POLLIN, 0}};
    if (poll(waits, 2, -1) < 0 && errno != EINTR) return;
    if (waits[1].revents != 0) return;
    if ((waits[0].revents & POLLIN) == 0) continue;
    const int connection = accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC);
    if (connection < 0) continue;
    Answer(connection);
    close(connection);
  }
}

void Control::Answer(int connection) {
  const auto line = ReadLine(connection, 2000);
  if (!line) return;
  const Json request = Json::parse(*line, nullptr, false);
  Json answer;
  if (!request.is_object() || !request.contains("command") || !request["command"].is_string()) {
    answer = ErrorJson(Status(StatusCode::kInvalidArgument, "a request is one line of JSON with a command"));
  } else {
    try {
      answer = Do(request);
    } catch (const std::exception& error) {  // a field of another type than it has to be
      answer = ErrorJson(Status(StatusCode::kInvalidArgument, error.what()));
    }
  }
  WriteAll(connection, Dump(answer));
}

Json Control::Do(const Json& request) {
  const std::string command = request["command"].get<std::string>();
  if (command == "ping") return {{"ok", true}};
  waiting_.fetch_add(1, std::memory_order_acq_rel);
  const std::lock_guard lock(mutex_);
  waiting_.fetch_sub(1, std::memory_order_acq_rel);
  Cache& cache = *target_.cache;
  const auto done = [](const Status& status) { return status.ok() ? Json{{"ok", true}} : ErrorJson(status); };
  if (command == "stats") {
    Json stats = StatsJson(cache);
    stats["pid"] = getpid();
    stats["session"] = target_.session;
    stats["length"] = cache.Length(target_.sequence);
    stats["saved"] = saved_.load();
    stats["tokens"] = tokens();
    stats["pinned"] = pinned_.load();
    stats["durability"] = cache.options().durability;
    return stats;
  }
  if (command == "cells") {
    Json cells = Json::array();
    for (const CellInfo& cell : cache.Inspect(target_.sequence)) cells.push_back(CellInfoJson(cell));
    return {{"session", target_.session}, {"tokens", cache.Length(target_.sequence)}, {"cells", cells}};
  }
  if (command == "metrics") return {{"text", MetricsText(cache, tokens())}};
  if (command == "trace") return {{"text", cache.Trace()}};
  if (command == "pin" || command == "unpin") {
    const Status status = cache.Pin(target_.sequence, command == "pin");
    if (status.ok()) pinned_.store(command == "pin");
    return done(status);
  }
  if (command == "persist") return done(cache.Persist(target_.sequence));
  if (command == "evict") {
    const auto begin = request.value("begin", int64_t{0}), end = request.value("end", int64_t{0});
    if (begin < 0 || end <= begin) {
      return ErrorJson(Status(
          StatusCode::kInvalidArgument,
          fmt::format("evict takes tokens [begin, end) with 0 <= begin < end, not --begin {} --end {}", begin, end)));
    }
    return done(cache.Evict(target_.sequence, begin, end));
  }
  if (command == "reload") return done(Reload());
  return ErrorJson(
      Status(StatusCode::kInvalidArgument,
             fmt::format(
                 "'{}' is no command; there are ping, stats, cells, metrics, trace, pin, unpin, persist, evict, reload",
                 command)));
}

Status Control::Reload() {
  if (target_.rules_path.empty()) {
    return Status(StatusCode::kInvalidArgument,
                  "this process was started without --rules, so there is no file to read again");
  }
  auto rules = LoadRules(target_.rules_path);
  if (!rules) return rules.error();
  return target_.cache->SetRules(*std::move(rules));
}

void Control::ReloadIfAsked() {
  if (!TakeHangup()) return;
  const auto lock = Step();
  if (const Status status = Reload(); !status.ok()) {
    PrintWarning(fmt::format("rules not read again, the old ones stay in force: {}", status.message()));
  } else {
    PrintWarning(fmt::format("rules of {} are in force", target_.rules_path));
  }
}

Status Control::StartSampling(const std::string& path, double every_s) {
  std::FILE* file = std::fopen(path.c_str(), "w");
  if (file == nullptr) return SocketStatus("the resource curve can't be written", path);
  Print(file,
        "seconds,host_total,host_available,cgroup_limit,cgroup_used,process_resident,process_anonymous,gpu_total,"
        "gpu_used,kv_ram,kv_active,kv_quantized,kv_persisted,kv_recovering,tokens,misses,pressure\n");
  if (std::fflush(file) != 0) {
    Status status = SocketStatus("the resource curve can't be written", path);
    std::fclose(file);
    return status;
  }
  sampler_ = std::thread([this, file, every_s] { Sample(file, every_s); });
  return OkStatus();
}

void Control::Sample(std::FILE* file, double every_s) {
  const auto start = std::chrono::steady_clock::now();
  for (int64_t i = 0;; ++i) {
    const auto host = ProbeSystemMemory();
    const auto group = ProbeCgroupMemory();
    const auto process = ProbeProcessMemory();
    const auto gpu = ProbeGpuMemory();
    CacheStats s;
    {
      waiting_.fetch_add(1, std::memory_order_acq_rel);
      const std::lock_guard lock(mutex_);
      waiting_.fetch_sub(1, std::memory_order_acq_rel);
      s = target_.cache->Stats();
    }
    const double at = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    Print(file, "{:.3f},{},{},{},{},{},{},{},{},{},{},{},{},{},{},{},{}\n", at, host ? host->total : 0,
          host ? host->available : 0, group ? group->limit : 0, group ? group->used : 0,
          process ? process->resident : 0, process ? process->anonymous : 0, gpu ? gpu->total : 0, gpu ? gpu->used : 0,
          s.ram_bytes, s.bytes_by_state[0], s.bytes_by_state[1], s.bytes_by_state[2], s.bytes_by_state[3], tokens(),
          s.misses_streamed + s.misses_recovering, s.pressure);
    std::fflush(file);
    const auto next = start + std::chrono::duration<double>(every_s * static_cast<double>(i + 1));
    while (std::chrono::steady_clock::now() < next) {
      if (stop_.load()) {
        std::fclose(file);
        return;
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
  }
}

}  // namespace kvcell::cli
