// What another process sees of this one, and may ask of it: a socket in the runtime directory, its owner's alone.
//
// Requests are decided outside and done inside, between two steps: each takes the lock that a step holds.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "cli/output.h"
#include "kvcell/cache.h"
#include "kvcell/status.h"

namespace kvcell::cli {

// $XDG_RUNTIME_DIR/kvcell, else /tmp/kvcell-UID: sockets are PID.sock in it.
std::string RuntimeDirectory();
// Process ids whose sockets are there and answer.
std::vector<int64_t> RunningProcesses();
// One request and its answer. kNotFound where no such process runs, kIoError; an answer that holds an error is that
// error.
Result<Json> AskProcess(int64_t pid, const Json& request);

// Counters in Prometheus' text form.
std::string MetricsText(const Cache& cache, int64_t tokens);
Json StatsJson(const Cache& cache);
Json CellInfoJson(const CellInfo& cell);

class Control {
 public:
  struct Target {
    Cache* cache = nullptr;
    SequenceId sequence = 0;
    std::string session;     // "": none
    std::string rules_path;  // read again on SIGHUP or by request; "": nothing to read
  };
  // Opens the socket and serves it on a thread. Where the socket can't be made, the process runs all the same, unseen:
  // the Status says why.
  static std::unique_ptr<Control> Start(const Target& target, Status* status);
  ~Control();
  Control(const Control&) = delete;
  Control& operator=(const Control&) = delete;

  // Held by whoever uses the cache. Lets those who wait go first.
  std::unique_lock<std::mutex> Step();
  // After a step that appended n tokens; `saved` is the length that the store has.
  void NoteTokens(int64_t n) { tokens_.fetch_add(n, std::memory_order_relaxed); }
  void NoteSaved(int64_t length) { saved_.store(length, std::memory_order_relaxed); }
  // Between two steps, by the thread that steps: rules are read again where SIGHUP asked for it. A bad file is told and
  // changes nothing.
  void ReloadIfAsked();
  Status Reload();
  // Writes the resource curve as CSV until the end.
  Status StartSampling(const std::string& path, double every_s);
  int64_t tokens() const { return tokens_.load(std::memory_order_relaxed); }

 private:
  explicit Control(const Target& target) : target_(target) {}
  void Serve();
  void Answer(int connection);
  Json Do(const Json& request);
  void Sample(std::FILE* file, double every_s);

  Target target_;
  std::string path_;
  int listener_ = -1;
  int stop_pipe_[2] = {-1, -1};
  std::thread server_, sampler_;
  std::mutex mutex_;
  std::atomic<int> waiting_{0};
  std::atomic<int64_t> tokens_{0}, saved_{0};
  std::atomic<bool> pinned_{false}, stop_{false};
};

}  // namespace kvcell::cli
