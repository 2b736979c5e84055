#include "lab/bench_store.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <optional>
#include <system_error>

#include "base/memory_probe.h"
#include "kvcell/cache.h"
#include "lab/peer.h"
#include "lab/statistics.h"
#include "model/model.h"

namespace kvcell {
namespace {

using Clock = std::chrono::steady_clock;

constexpr size_t kWriteChunk = size_t{4} << 20;
constexpr uint64_t kDiskProbeBytes = uint64_t{256} << 20;
constexpr int kDecodeSteps = 32;  // of a round
// Decode steps between two saves beside them: often, and as `run` and `chat` do it.
constexpr std::array<int, 2> kSaveEvery = {16, 256};
constexpr int kStepsOfATurn = 8;  // where ways of reading take turns
constexpr int kLimitedSteps = 12;
constexpr uint64_t kGroupSlack = uint64_t{4} << 20;  // of a cgroup: the kernel's own tables
constexpr int32_t kChunk = 512;                      // tokens per prefill step
constexpr int kColdRuns = 5;
constexpr int kMinSavingRounds = 5;
const char* const kSession = "bench";

double MsSince(Clock::time_point start) {
  return std::chrono::duration<double, std::milli>(Clock::now() - start).count();
}

double MegabytesPerSecond(uint64_t bytes, double ms) { return ms > 0 ? static_cast<double>(bytes) / 1000.0 / ms : 0; }

uint64_t BytesBelow(const std::string& path) {
  uint64_t bytes = 0;
  std::error_code error;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(path, error)) {
    if (entry.is_regular_file(error)) bytes += entry.file_size(error);
  }
  return bytes;
}

// A directory of its own below the one given, gone at the end.
class Workplace {
 public:
  static Result<Workplace> Make(const std::string& directory) {
    std::error_code error;
    std::filesystem::create_directories(directory, error);
    std::string pattern = directory + "/kvcell-bench-XXXXXX";
    if (::mkdtemp(pattern.data()) == nullptr) {
      return Fail(StatusCode::kIoError,
                  fmt::format("cannot make a directory in {}: choose another with --store", directory));
    }
    Workplace place;
    place.path_ = std::move(pattern);
    return place;
  }
  Workplace(Workplace&& other) noexcept : path_(std::exchange(other.path_, "")) {}
  Workplace& operator=(Workplace&&) = delete;
  ~Workplace() {
    std::error_code ignored;
    if (!path_.empty()) std::filesystem::remove_all(path_, ignored);
  }
  std::string store() const { return path_ + "/store"; }
  std::string peer_file() const { return path_ + "/peer.state"; }
  std::string probe() const { return path_ + "/probe"; }

 private:
  Workplace() = default;
  std::string path_;
};

// Sequential write speed of the disk, synced, in MB/s.
Result<double> WriteSpeed(const std::string& path) {
  const int fd = ::open(path.c_str(), O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
  if (fd < 0)
    return Fail(StatusCode::kIoError, fmt::format("cannot write {}: choose another place with --store", path));
  std::vector<std::byte> chunk(kWriteChunk);
  for (size_t i = 0; i < chunk.size(); ++i) chunk[i] = static_cast<std::byte>(i * 2654435761u >> 24);
  bool ok = ::posix_fallocate(fd, 0, static_cast<off_t>(kDiskProbeBytes)) == 0 && ::fsync(fd) == 0;
  const auto start = Clock::now();
  for (uint64_t at = 0; ok && at < kDiskProbeBytes; at += chunk.size()) {
    ok = ::pwrite(fd, chunk.data(), chunk.size(), static_cast<off_t>(at)) == static_cast<ssize_t>(chunk.size());
  }
  ok = ok && ::fdatasync(fd) == 0;
  const double ms = MsSince(start);
  ::close(fd);
  ::unlink(path.c_str());
  if (!ok) return Fail(StatusCode::kNoSpace, fmt::format("the disk probe {} could not be written", path));
  return MegabytesPerSecond(kDiskProbeBytes, ms);
}

// So that the next read comes from the disk.
void ForgetPages(const std::string& path) {
  std::error_code error;
  std::vector<std::string> files;
  if (std::filesystem::is_directory(path, error)) {
    for (const auto& entry : std::filesystem::recursive_directory_iterator(path, error)) {
      if (entry.is_regular_file(error)) files.push_back(entry.path().string());
    }
  } else {
    files.push_back(path);
  }
  for (const auto& file : files) {
    const int fd = ::open(file.c_str(), O_RDONLY | O_CLOEXEC);
    if (fd < 0) continue;
    (void)::fsync(fd);
    (void)::posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
    ::close(fd);
  }
}

// How long the disk takes to give the store's segments: the page-in that no reader can avoid.
double PageInMs(const std::string& path) {
  ForgetPages(path);
  std::error_code error;
  std::vector<std::byte> chunk(kWriteChunk);
  const auto start = Clock::now();
  for (const auto& entry : std::filesystem::recursive_directory_iterator(path, error)) {
    if (!entry.is_regular_file(error)) continue;
    const int fd = ::open(entry.path().c_str(), O_RDONLY | O_CLOEXEC);
    if (fd < 0) continue;
    while (::read(fd, chunk.data(), chunk.size()) > 0) {
    }
    ::close(fd);
  }
  return MsSince(start);
}

struct Engine {
  std::unique_ptr<Model> model;
  std::unique_ptr<Cache> cache;
  double load_ms = 0;
};

// Decode steps of a round with saves beside it, and rounds: enough for a median, since one round is several per cent
// off.
int SavingSteps(int every) { return std::max(every, kDecodeSteps); }
int SavingRounds(const BenchStoreOptions& options, int every) {
  return std::max(kMinSavingRounds, options.rounds * kDecodeSteps / SavingSteps(every));
}

// A budget of 0: as much as the context takes; else no less than the smallest that works.
Result<std::unique_ptr<Cache>> OpenCache(const BenchStoreOptions& options, const Model& model, const std::string& store,
                                         uint64_t ram_budget, FileReads file_reads) {
  const auto codec = ParseCodec(options.codec);
  if (!codec) return Fail(codec.error());
  CacheOptions cache;
  cache.geometry = model.facts().geometry;
  cache.codec = *codec;
  cache.max_step_tokens = kChunk;
  cache.store = store;
  cache.durability = 2;
  cache.file_reads = file_reads;
  cache.identity = model.identity();
  cache.model_name = model.facts().name;
  int64_t n_steps = kDecodeSteps * (options.rounds + 1);
  for (const int every : kSaveEvery) n_steps += int64_t{4} * SavingRounds(options, every) * SavingSteps(every);
  const auto plan = PlanMemory(cache, options.context + n_steps, 1);
  if (!plan) return Fail(plan.error());
  cache.ram_budget = ram_budget != 0 ? std::max(ram_budget, plan->minimum) : std::max(plan->total, plan->minimum);
  return Cache::Open(cache);
}

Result<Engine> OpenEngine(const BenchStoreOptions& options, const std::string& store) {
  Engine engine;
  const auto start = Clock::now();
  auto model = Model::Load(options.model, {.n_threads = options.n_threads, .max_batch = kChunk, .digest_folder = {}});
  if (!model) return Fail(model.error());
  engine.model = std::move(*model);
  auto cache = OpenCache(options, *engine.model, store, 0, FileReads::kMapped);
  if (!cache) return Fail(cache.error());
  engine.cache = std::move(*cache);
  engine.load_ms = MsSince(start);
  return engine;
}

Status Feed(Model* model, Cache* cache, SequenceId sequence, std::span<const Token> tokens,
            std::vector<float>* logits) {
  for (size_t at = 0; at < tokens.size(); at += kChunk) {
    const size_t n = std::min<size_t>(kChunk, tokens.size() - at);
    const ModelStep step{.sequence = sequence, .tokens = tokens.subspan(at, n), .want_logits = at + n == tokens.size()};
    KVCELL_RETURN_IF_ERROR(model->Forward(cache, {&step, 1}, logits));
  }
  return OkStatus();
}

// 0 where nothing was measured.
template <typename Times>
double MedianOf(const std::vector<Times>& runs, double Times::*field) {
  if (runs.empty()) return 0;
  std::vector<double> values;
  for (const Times& times : runs) values.push_back(times.*field);
  return Median(values);
}

Token Likeliest(const std::vector<float>& logits) {
  return static_cast<Token>(std::ranges::max_element(logits) - logits.begin());
}

// Milliseconds of each of n decode steps; `between` runs after a step and is counted into it.
Result<std::vector<double>> Decode(Model* model, Cache* cache, SequenceId sequence, int n, std::vector<float>* logits,
                                   const std::function<Status(int)>& between) {
  std::vector<double> times;
  for (int i = 0; i < n; ++i) {
    const Token token = Likeliest(*logits);
    const auto start = Clock::now();
    KVCELL_FAIL_IF_ERROR(Feed(model, cache, sequence, {&token, 1}, logits));
    if (between) KVCELL_FAIL_IF_ERROR(between(i));
    times.push_back(MsSince(start));
  }
  return times;
}

Result<std::vector<Token>> PromptTokens(const Model& model, const BenchStoreOptions& options) {
  std::string text = options.text;
  for (;;) {
    auto tokens = model.Tokenize(text, true, false);
    if (!tokens) return tokens;
    if (tokens->size() >= static_cast<size_t>(options.context)) {
      tokens->resize(static_cast<size_t>(options.context));
      return tokens;
    }
    text += text;
  }
}

// --- the cold process
// -------------------------------------------------------------------------------------------------

// What the child tells: times in ms; negative where it failed.
struct ColdTimes {
  double model_load = -1;
  double open = -1;         // the session brought back
  double first_token = -1;  // from before OpenSession to the logits behind one new token
  double decode_step = -1;  // warm
  double reused = -1;       // tokens
};

// The same of libllama with its state file.
struct PeerColdTimes {
  double open = -1;
  double first_token = -1;
};

ColdTimes MeasureCold(const BenchStoreOptions& options, const Workplace& place) {
  ColdTimes times;
  auto engine = OpenEngine(options, place.store());
  if (!engine) return times;
  times.model_load = engine->load_ms;
  ForgetPages(place.store() + "/segments");
  const auto start = Clock::now();
  auto session = engine->cache->OpenSession(kSession);
  if (!session || session->logits.empty()) return times;
  times.open = MsSince(start);
  std::vector<float> logits = session->logits;
  const Token token = Likeliest(logits);
  Model* const model = engine->model.get();
  Cache* const cache = engine->cache.get();
  if (!Feed(model, cache, session->sequence, {&token, 1}, &logits).ok()) return times;
  times.first_token = MsSince(start);
  times.reused = static_cast<double>(session->usable);
  const auto steps = Decode(model, cache, session->sequence, kDecodeSteps, &logits, nullptr);
  if (steps) times.decode_step = Median(*steps);
  return times;
}

PeerColdTimes MeasurePeerCold(const BenchStoreOptions& options, const Workplace& place) {
  PeerColdTimes times;
  auto peer = Peer::Load(
      options.model,
      {.flash_attention = true, .n_threads = options.n_threads, .context = options.context + 4 * kDecodeSteps});
  if (!peer) return times;
  ForgetPages(place.peer_file());
  const auto start = Clock::now();
  if (!(*peer)->LoadState(place.peer_file()).ok()) return times;
  times.open = MsSince(start);
  constexpr Token kAnyToken = 1;  // which one changes no time
  std::vector<float> logits;
  if (!(*peer)->Decode({&kAnyToken, 1}, false, &logits).ok()) return times;
  times.first_token = MsSince(start);
  return times;
}

// --- RAM that the machine limits
// --------------------------------------------------------------------------------------

// A memory cgroup for this process, gone with the object once the process has left it. Version 1 or 2 of the
// interface; nothing where none can be made, as without being root.
class MemoryGroup {
 public:
  static std::unique_ptr<MemoryGroup> Make() {
    constexpr std::array<std::array<const char*, 2>, 2> kInterfaces = {
        {{"/sys/fs/cgroup/memory", "memory.limit_in_bytes"}, {"/sys/fs/cgroup", "memory.max"}}};
    for (const auto& [root, limit] : kInterfaces) {
      std::unique_ptr<MemoryGroup> group(new MemoryGroup);
      group->path_ = fmt::format("{}/kvcell-bench-{}", root, ::getpid());
      if (::mkdir(group->path_.c_str(), 0755) != 0) continue;
      group->made_ = true;
      group->limit_ = group->path_ + "/" + limit;
      if (std::filesystem::exists(group->limit_)) return group;
    }
    return nullptr;
  }
  ~MemoryGroup() {
    if (made_) ::rmdir(path_.c_str());
  }
  MemoryGroup(const MemoryGroup&) = delete;
  MemoryGroup& operator=(const MemoryGroup&) = delete;

  bool Enter() const { return Write(path_ + "/cgroup.procs", "0"); }
  bool Limit(uint64_t bytes) const { return Write(limit_, std::to_string(bytes)); }

 private:
  MemoryGroup() = default;
  static bool Write(const std::string& path, const std::string& text) {
    const int fd = ::open(path.c_str(), O_WRONLY | O_CLOEXEC);
    if (fd < 0) return false;
    const bool written = ::write(fd, text.data(), text.size()) == static_cast<ssize_t>(text.size());
    ::close(fd);
    return written;
  }
  std::string path_, limit_;
  bool made_ = false;
};

// ms of a decode step in a cgroup that has room for this process's own memory and a quarter of the context's cells.
struct LimitedTimes {
  double streamed = -1, mapped = -1;
  double disk_streamed = 0, disk_mapped = 0;  // bytes that a step read from the disk
  double context_of_room = 0;
};

LimitedTimes MeasureLimited(const BenchStoreOptions& options, const Workplace& place, const MemoryGroup* group) {
  LimitedTimes times;
  if (group == nullptr || !group->Enter()) return times;
  auto engine = OpenEngine(options, place.store());
  if (!engine) return times;
  engine->cache.reset();
  const uint64_t cells = BytesBelow(place.store() + "/segments");
  for (const FileReads reads : {FileReads::kStreamed, FileReads::kMapped}) {
    const bool streamed = reads == FileReads::kStreamed;
    (void)group->Limit(uint64_t{1} << 50);
    auto cache = OpenCache(options, *engine->model, place.store(), 1, reads);
    if (!cache) return times;
    auto session = (*cache)->OpenSession(kSession);
    if (!session || session->logits.empty()) return times;
    std::vector<float> logits = session->logits;
    Model* const model = engine->model.get();
    if (!Decode(model, cache->get(), session->sequence, 2, &logits, nullptr)) return times;
    const auto memory = ProbeProcessMemory();
    if (!memory) return times;
    const uint64_t room = cells / 4;
    ForgetPages(place.store() + "/segments");
    if (!group->Limit(memory->anonymous + room + kGroupSlack)) return times;
    if (!Decode(model, cache->get(), session->sequence, 2, &logits, nullptr)) return times;
    const uint64_t before = ProbeDiskReads().bytes;
    const auto steps = Decode(model, cache->get(), session->sequence, kLimitedSteps, &logits, nullptr);
    if (!steps) return times;
    (streamed ? times.disk_streamed : times.disk_mapped) =
        static_cast<double>(ProbeDiskReads().bytes - before) / kLimitedSteps;
    (streamed ? times.streamed : times.mapped) = Median(*steps);
    times.context_of_room = static_cast<double>(cells) / static_cast<double>(room);
  }
  (void)group->Limit(uint64_t{1} << 50);
  return times;
}

// A child that waits for a word and then measures: forked before this process has loaded anything.
template <typename Times>
class ColdProcess {
 public:
  static Result<std::unique_ptr<ColdProcess>> Start(const std::function<Times()>& measure) {
    std::array<int, 2> go{}, told{};
    if (::pipe2(go.data(), O_CLOEXEC) != 0 || ::pipe2(told.data(), O_CLOEXEC) != 0) {
      return Fail(StatusCode::kIoError, "no pipe for the cold process: raise the limit of open files");
    }
    std::unique_ptr<ColdProcess> process(new ColdProcess);
    process->pid_ = ::fork();
    if (process->pid_ < 0) return Fail(StatusCode::kIoError, "no process could be started");
    if (process->pid_ == 0) {
      ::close(go[1]);
      char word = 0;
      if (::read(go[0], &word, 1) != 1) ::_exit(1);  // the parent has ended
      const Times times = measure();
      ::_exit(::write(told[1], &times, sizeof(times)) == sizeof(times) ? 0 : 1);
    }
    ::close(go[0]);
    ::close(told[1]);
    process->go_ = go[1];
    process->told_ = told[0];
    return process;
  }
  ~ColdProcess() {
    if (go_ >= 0) ::close(go_);
    ::close(told_);
    if (pid_ >= 0) ::waitpid(pid_, nullptr, 0);
  }
  ColdProcess(const ColdProcess&) = delete;
  ColdProcess& operator=(const ColdProcess&) = delete;

  // Nothing where it could not measure.
  std::optional<Times> Run() {
    Times times;
    if (::write(go_, "g", 1) != 1 || ::read(told_, &times, sizeof(times)) != sizeof(times)) return std::nullopt;
    ::waitpid(std::exchange(pid_, -1), nullptr, 0);  // its locks are free from here on
    return times;
  }

 private:
  ColdProcess() = default;
  pid_t pid_ = -1;
  int go_ = -1;
  int told_ = -1;
};

// Several, so that medians can be taken: the first one that takes memory which the system has not had for long waits
// for it where the machine is a virtual one. Each holds pipes of those before it, so that the last one ends first.
template <typename Times>
class ColdProcesses {
 public:
  Status Start(int n, const std::function<Times()>& measure) {
    for (int i = 0; i < n; ++i) {
      auto process = ColdProcess<Times>::Start(measure);
      if (!process) return process.error();
      processes_.push_back(std::move(*process));
    }
    return OkStatus();
  }
  ColdProcesses() = default;
  ~ColdProcesses() {
    while (!processes_.empty()) processes_.pop_back();
  }
  ColdProcesses(const ColdProcesses&) = delete;
  ColdProcesses& operator=(const ColdProcesses&) = delete;
  std::span<const std::unique_ptr<ColdProcess<Times>>> all() const { return processes_; }

 private:
  std::vector<std::unique_ptr<ColdProcess<Times>>> processes_;
};

// The processes that wait for their turn. Declared, and so started, in the reverse order of their ends.
struct WaitingProcesses {
  ColdProcesses<ColdTimes> ours;
  ColdProcesses<PeerColdTimes> peers;
  std::unique_ptr<ColdProcess<LimitedTimes>> limited;

  Status Start(const BenchStoreOptions& options, const Workplace& place, const MemoryGroup* group) {
    KVCELL_RETURN_IF_ERROR(ours.Start(kColdRuns, [&] { return MeasureCold(options, place); }));
    if (options.peer) KVCELL_RETURN_IF_ERROR(peers.Start(kColdRuns, [&] { return MeasurePeerCold(options, place); }));
    auto process = ColdProcess<LimitedTimes>::Start([&, group] { return MeasureLimited(options, place, group); });
    if (!process) return process.error();
    limited = std::move(*process);
    return OkStatus();
  }
};

// --- the measurement
// --------------------------------------------------------------------------------------------------

class Bench {
 public:
  Bench(const BenchStoreOptions& options, const Workplace& place) : options_(options), place_(place) {}

  Result<BenchStoreResult> Run(const WaitingProcesses& waiting) {
    KVCELL_FAIL_IF_ERROR(Prefill());
    KVCELL_FAIL_IF_ERROR(Save());
    if (options_.peer) KVCELL_FAIL_IF_ERROR(PeerSave());
    KVCELL_FAIL_IF_ERROR(DecodeWhileSaving());
    engine_.cache.reset();  // gives the session's lock back
    KVCELL_FAIL_IF_ERROR(Resume(waiting));
    KVCELL_FAIL_IF_ERROR(BeyondRam());
    KVCELL_FAIL_IF_ERROR(BeyondLimitedRam(waiting.limited.get()));
    return std::move(result_);
  }

 private:
  void Stage(const std::string& what) const {
    if (options_.on_stage) options_.on_stage(what);
  }
  void Add(const std::string& name, double value, const std::string& unit, double peer = 0) {
    result_.rows.push_back({name, value, unit, peer, peer != 0 ? value / peer : 0});
  }

  Status Prefill() {
    Stage("computing the prefix");
    auto engine = OpenEngine(options_, place_.store());
    if (!engine) return engine.error();
    engine_ = std::move(*engine);
    const auto tokens = PromptTokens(*engine_.model, options_);
    if (!tokens) return tokens.error();
    tokens_ = *tokens;
    const auto sequence = engine_.cache->Create();
    if (!sequence) return sequence.error();
    sequence_ = *sequence;
    const auto start = Clock::now();
    KVCELL_RETURN_IF_ERROR(Feed(engine_.model.get(), engine_.cache.get(), sequence_, tokens_, &logits_));
    prefill_ms_ = MsSince(start);
    Add("prefill", prefill_ms_, "ms");
    return OkStatus();
  }

  Status Save() {
    Stage("saving");
    std::vector<double> disk, save;
    const auto before = WriteSpeed(place_.probe());
    if (!before) return before.error();
    const auto start = Clock::now();
    KVCELL_RETURN_IF_ERROR(engine_.cache->Save(sequence_, kSession, logits_, "{}"));
    const double ms = MsSince(start);
    const auto after = WriteSpeed(place_.probe());
    if (!after) return after.error();
    const uint64_t bytes = BytesBelow(place_.store() + "/segments");
    const double speed = std::max(*before, *after);
    Add("disk_write", speed, "MB/s");
    Add("save", ms, "ms");
    Add("save_speed_of_disk", MegabytesPerSecond(bytes, ms), "MB/s", speed);
    file_bytes_ = bytes + BytesBelow(place_.store()) - BytesBelow(place_.store() + "/segments");
    Add("file_of_f16", static_cast<double>(file_bytes_), "bytes",
        static_cast<double>(engine_.cache->Stats().f16_bytes));
    return OkStatus();
  }

  Status PeerSave() {
    Stage("libllama: computing the prefix and saving");
    auto peer = Peer::Load(
        options_.model,
        {.flash_attention = true, .n_threads = options_.n_threads, .context = options_.context + 4 * kDecodeSteps});
    if (!peer) return peer.error();
    std::vector<float> logits;
    const auto start = Clock::now();
    KVCELL_RETURN_IF_ERROR((*peer)->Decode(tokens_, false, &logits));
    const double prefill_ms = MsSince(start);
    const auto save_start = Clock::now();
    KVCELL_RETURN_IF_ERROR((*peer)->SaveState(place_.peer_file(), tokens_));
    const int fd = ::open(place_.peer_file().c_str(), O_RDONLY | O_CLOEXEC);
    if (fd >= 0) {  // as durable as ours is
      (void)::fdatasync(fd);
      ::close(fd);
    }
    const double save_ms = MsSince(save_start);
    std::error_code error;
    const auto bytes = std::filesystem::file_size(place_.peer_file(), error);
    PairWithPeer("prefill", prefill_ms);
    PairWithPeer("save", save_ms);
    Add("file_of_peer_file", static_cast<double>(file_bytes_), "bytes", static_cast<double>(bytes));
    return OkStatus();
  }
  void PairWithPeer(const std::string& name, double peer) {
    for (auto& row : result_.rows) {
      if (row.name != name || peer <= 0) continue;
      row.peer = peer;
      row.ratio = row.value / peer;
    }
  }

  // Steps with and without saves beside them in turns, so that the growing context counts for both the same; sums,
  // since waiting falls on one step.
  Status DecodeWhileSaving() {
    Stage("decoding, with saves and without");
    for (const int every : kSaveEvery) {
      std::vector<double> ratios, plain_ms;
      for (int round = 0; round < SavingRounds(options_, every); ++round) {
        double sums[2] = {0, 0};
        for (const int saving : {0, 1, 1, 0}) {
          const auto steps = DecodeRound(SavingSteps(every), saving == 0 ? 0 : every);
          if (!steps) return steps.error();
          for (const double ms : *steps) sums[saving] += ms;
          if (saving == 0) plain_ms.push_back(Median(*steps));
        }
        ratios.push_back(sums[1] / sums[0]);
      }
      if (decode_ms_ == 0) Add("decode_step", decode_ms_ = Median(plain_ms), "ms");
      Add(fmt::format("decode_step_saving_every_{}", every), decode_ms_ * Median(ratios), "ms", decode_ms_);
    }
    return OkStatus();
  }
  // ms of each of n steps; a save is begun after the first of every `save_every` and waited for at the end. 0: none.
  Result<std::vector<double>> DecodeRound(int n, int save_every) {
    return Decode(engine_.model.get(), engine_.cache.get(), sequence_, n, &logits_, [&](int i) -> Status {
      if (save_every == 0) return OkStatus();
      if (i % save_every == 0) {
        KVCELL_RETURN_IF_ERROR(engine_.cache->FinishSave());
        return engine_.cache->BeginSave(sequence_, "growing", logits_, "{}", std::nullopt);
      }
      return i == n - 1 ? engine_.cache->FinishSave() : OkStatus();
    });
  }

  // All of ours before any of libllama's: in turns, each found the memory that the other had given back taken away by
  // the host of a virtual machine, and waited for it.
  Status Resume(const WaitingProcesses& waiting) {
    Stage("resuming in cold processes");
    std::vector<double> page_in;
    std::vector<ColdTimes> ours;
    for (const auto& process : waiting.ours.all()) {
      page_in.push_back(PageInMs(place_.store() + "/segments"));
      const auto times = process->Run();
      if (!times || times->first_token < 0) {
        return Status(StatusCode::kInternal, "the cold process could not resume the session: please report this");
      }
      if (times->reused != static_cast<double>(tokens_.size())) {
        return Status(StatusCode::kInternal,
                      fmt::format("only {} of {} tokens came back: please report this", times->reused, tokens_.size()));
      }
      ours.push_back(*times);
    }
    std::vector<PeerColdTimes> peers;
    for (const auto& process : waiting.peers.all()) {
      const auto times = process->Run();
      if (!times || times->first_token < 0) {
        return Status(StatusCode::kInternal, "libllama could not load its state file in a cold process");
      }
      peers.push_back(*times);
    }
    const double first_token = MedianOf(ours, &ColdTimes::first_token);
    Add("page_in", Median(page_in), "ms");
    Add("cold_model_load", MedianOf(ours, &ColdTimes::model_load), "ms");
    Add("cold_open_session", MedianOf(ours, &ColdTimes::open), "ms", MedianOf(peers, &PeerColdTimes::open));
    Add("cold_first_token", first_token, "ms", MedianOf(peers, &PeerColdTimes::first_token));
    Add("cold_first_token_of_limit", first_token, "ms",
        1.5 * MedianOf(ours, &ColdTimes::decode_step) + Median(page_in));
    Add("prefill_of_cold_first_token", prefill_ms_, "ms", first_token);
    return OkStatus();
  }

  // The smallest budget there is, so that nearly all is attended from the file, whose pages the system has: streamed,
  // mapped and, for comparison, with room for everything, in turns.
  Status BeyondRam() {
    Stage("decoding from the file");
    struct Way {
      FileReads reads;
      uint64_t budget;  // 0: all in RAM
      std::unique_ptr<Cache> cache = {};
      SequenceId sequence = 0;
      std::vector<float> logits = {};
      std::vector<double> ms = {};
    };
    std::array<Way, 3> ways = {Way{FileReads::kMapped, 0}, Way{FileReads::kStreamed, 1}, Way{FileReads::kMapped, 1}};
    for (size_t i = 0; i < ways.size(); ++i) {
      Way& way = ways.at(i);
      auto cache = OpenCache(options_, *engine_.model, place_.store(), way.budget, way.reads);
      if (!cache) return cache.error();
      way.cache = std::move(*cache);
      auto session = way.cache->OpenSession(kSession);
      if (!session) return session.error();
      way.sequence = session->sequence;
      way.logits = session->logits;
      // Under a name of its own it may be open thrice; the cells are the same ones.
      KVCELL_RETURN_IF_ERROR(way.cache->Save(way.sequence, fmt::format("way {}", i), way.logits, "{}"));
    }
    const auto decode = [&](Way* way, int n) -> Status {
      const auto steps = Decode(engine_.model.get(), way->cache.get(), way->sequence, n, &way->logits, nullptr);
      if (!steps) return steps.error();
      way->ms.insert(way->ms.end(), steps->begin(), steps->end());
      return OkStatus();
    };
    for (Way& way : ways) {
      KVCELL_RETURN_IF_ERROR(decode(&way, 2));
      way.ms.clear();
    }
    const auto before = ways[2].cache->Stats();
    for (int turn = 0; turn < options_.rounds * kDecodeSteps / kStepsOfATurn; ++turn) {
      for (Way& way : ways) KVCELL_RETURN_IF_ERROR(decode(&way, kStepsOfATurn));
    }
    const auto after = ways[2].cache->Stats();
    const auto ram = static_cast<double>(after.reads_ram - before.reads_ram);
    const auto file = static_cast<double>(after.reads_file - before.reads_file);
    const double in_ram = Median(ways[0].ms), streamed = Median(ways[1].ms), mapped = Median(ways[2].ms);
    Add("decode_step_in_ram", in_ram, "ms");
    Add("decode_step_streamed", streamed, "ms", in_ram);
    Add("decode_step_mapped", mapped, "ms", in_ram);
    Add("decode_step_mapped_of_streamed", mapped, "ms", streamed);
    Add("cells_read_from_file", file, "cells", file + ram);
    Add("ram_of_budgeted_cache", static_cast<double>(after.ram_peak_bytes), "bytes",
        static_cast<double>(ways[0].cache->Stats().ram_peak_bytes));
    return OkStatus();
  }

  // The same where the system can't keep the file's pages: every step reads what it attends to from the disk.
  Status BeyondLimitedRam(ColdProcess<LimitedTimes>* limited) {
    Stage("decoding in a cgroup with a quarter of the memory");
    engine_.model.reset();
    ForgetPages(place_.store() + "/segments");
    const auto times = limited->Run();
    if (!times || times->mapped < 0) {
      Stage("left out: no memory cgroup can be made here, which needs root and a writable hierarchy");
      return OkStatus();
    }
    Add("context_of_cgroup_room", times->context_of_room, "x");
    Add("decode_step_cgroup_streamed", times->streamed, "ms", decode_ms_);
    Add("decode_step_cgroup_mapped", times->mapped, "ms", decode_ms_);
    Add("decode_step_cgroup_mapped_of_streamed", times->mapped, "ms", times->streamed);
    Add("disk_read_per_step_streamed", times->disk_streamed / 1e6, "MB");
    Add("disk_read_per_step_mapped", times->disk_mapped / 1e6, "MB");
    return OkStatus();
  }

  const BenchStoreOptions& options_;
  const Workplace& place_;
  Engine engine_;
  SequenceId sequence_ = 0;
  std::vector<Token> tokens_;
  std::vector<float> logits_;
  double prefill_ms_ = 0;
  double decode_ms_ = 0;
  uint64_t file_bytes_ = 0;
  BenchStoreResult result_;
};

}  // namespace

Result<BenchStoreResult> BenchStore(const BenchStoreOptions& options) {
  if (options.text.empty() || options.context < 2 * kBlockTokens || options.rounds < 1) {
    return Fail(StatusCode::kInvalidArgument,
                fmt::format("bench store needs a text and a context of at least {} tokens", 2 * kBlockTokens));
  }
  const auto place = Workplace::Make(options.directory);
  if (!place) return Fail(place.error());
  const auto group = MemoryGroup::Make();
  WaitingProcesses waiting;
  KVCELL_FAIL_IF_ERROR(waiting.Start(options, *place, group.get()));
  return Bench(options, *place).Run(waiting);
}

}  // namespace kvcell
