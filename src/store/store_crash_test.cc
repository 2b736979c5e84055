// A process that saves is killed (-9) again and again, by chance and at every call that writes, syncs or commits in
// turn; an oracle outside it knows what was acknowledged. Field cases D4, D5.
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>

#include <cstdlib>
#include <random>
#include <set>

#include "store/fault_test_util.h"
#include "store/store_test_util.h"

namespace kvcell::test {
namespace {

// What the child tells its parent through shared memory; it outlives the child.
struct Ledger {
  std::atomic<int> begun;
  std::atomic<int> acknowledged;
  std::atomic<int> other_begun;  // of the session that comes and goes; negative: removed
  std::atomic<int> other_acknowledged;
  std::atomic<int> failed;
  std::array<char, 200> point;  // where it was killed
};

std::vector<Token> Version(int version) {
  return MakeTokens(version, static_cast<size_t>(64 * (2 + version % 4) + version % 64), 130);
}
std::vector<Token> OtherVersion(int version) {
  return MakeTokens(version + 1'000'000, static_cast<size_t>(64 * (1 + version % 3) + 3), 64);
}

bool Changes(const Call& call) {
  switch (call.kind) {
    case CallKind::kRead:
    case CallKind::kStat:
    case CallKind::kLock:
      return false;
    case CallKind::kOpen:
      return call.creates;
    default:
      return true;
  }
}

[[noreturn]] void SaveUntilKilled(const std::string& path, Ledger* ledger, int kill_at) {
  WatchedCalls calls;
  WatchedSqlite sqlite(calls);
  int made = 0;
  calls.watcher = [&](const Call& call) {
    if (Changes(call) && ++made == kill_at) {
      const std::string name = call.path.substr(call.path.rfind('/') + 1);
      const std::string file = name.ends_with(".kvs")                           ? "segment"
                               : call.path.find("/locks/") != std::string::npos ? "lock"
                                                                                : name;
      const std::string point = fmt::format("{}:{}:{}", kill_at, static_cast<int>(call.kind), file);
      std::memcpy(ledger->point.data(), point.c_str(), std::min(point.size() + 1, ledger->point.size() - 1));
      ::kill(::getpid(), SIGKILL);
    }
    return 0;
  };
  StoreOptions options;
  options.system_calls = &calls;
  auto store = Store::Open(path, options);
  if (!store) ::_exit(1);
  const auto release = [&](const Result<SessionRecord>& record) {
    if (!record) return;
    for (const auto& block : record->blocks) (*store)->Release(block);
  };
  for (int version = ledger->acknowledged + 1; version < 1'000'000; ++version) {
    ledger->begun = version;
    const auto saved = SaveSession(**store, "main", Version(version));
    if (!saved) ::_exit(2);
    ledger->acknowledged = version;
    release(saved);
    if (version % 3 == 0) {
      ledger->other_begun = version;
      const auto other = SaveSession(**store, "other", OtherVersion(version));
      if (!other) ::_exit(3);
      ledger->other_acknowledged = version;
      release(other);
    } else if (version % 3 == 2 && ledger->other_acknowledged > 0) {
      ledger->other_begun = -version;
      if (!(*store)->Remove("other", false).ok()) ::_exit(4);
      ledger->other_acknowledged = -version;
    }
    if (version % 4 == 3 && !(*store)->Compact()) ::_exit(6);
  }
  ::_exit(5);
}

// One of the versions that the ledger allows; "" where it is so.
std::string CheckOneOf(Store& store, const std::string& name, int acknowledged, int begun,
                       std::vector<Token> (*tokens)(int), int* found) {
  std::string wrong;
  for (const int version : {begun, acknowledged}) {
    if (version <= 0) {
      const auto loaded = store.Load(name);
      *found = version;
      if (!loaded && loaded.error().code() == StatusCode::kNotFound) return "";
      wrong += loaded ? " is there" : loaded.error().message();
    } else {
      const std::string difference = CheckSession(store, name, tokens(version));
      *found = version;
      if (difference.empty()) return "";
      wrong += fmt::format(" as version {}: {}", version, difference);
    }
  }
  return fmt::format("session {}: acknowledged {}, begun {}:{}", name, acknowledged, begun, wrong);
}

constexpr int kAimedCalls = 400;  // saves, removals and a compaction are among them

TEST(StoreCrash, KilledAtAnyMoment) {
  const char* text = std::getenv("KVCELL_CRASH_CYCLES");
  const int cycles = text != nullptr ? std::atoi(text) : 200;
  TemporaryDirectory directory;
  void* memory = ::mmap(nullptr, sizeof(Ledger), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(memory, MAP_FAILED);
  auto* ledger = new (memory) Ledger{};
  std::mt19937 random(20240601);
  std::set<std::string> points;
  int aimed = 0;
  for (int cycle = 0; cycle < cycles; ++cycle) {
    const bool aims = cycle % 2 == 0;
    if (aims) ++aimed;
    ledger->point[0] = 0;
    const pid_t child = ::fork();
    ASSERT_GE(child, 0);
    if (child == 0) SaveUntilKilled(directory.store(), ledger, aims ? 1 + (aimed - 1) % kAimedCalls : 0);
    if (!aims) {
      ::usleep(static_cast<useconds_t>(random() % 30'000));
      ::kill(child, SIGKILL);
    }
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    ASSERT_TRUE(WIFSIGNALED(status)) << "cycle " << cycle << ": the child ended by itself with " << WEXITSTATUS(status);
    if (ledger->point[0] != 0) points.insert(ledger->point.data());
    auto store = OpenStore(directory.store());
    ASSERT_NE(store, nullptr) << "cycle " << cycle << " killed at " << ledger->point.data();
    int main_version = 0, other_version = 0;
    const std::string wrong =
        CheckOneOf(*store, "main", ledger->acknowledged, ledger->begun, Version, &main_version) +
        CheckOneOf(*store, "other", ledger->other_acknowledged, ledger->other_begun, OtherVersion, &other_version);
    ASSERT_EQ(wrong, "") << "cycle " << cycle << " killed at " << ledger->point.data();
    const auto damaged = store->Verify(VerifyTestCell);
    ASSERT_TRUE(damaged);
    for (const auto& cell : *damaged) ADD_FAILURE() << "cycle " << cycle << ": " << cell.path << ": " << cell.what;
    const auto stats = store->Stats();
    ASSERT_TRUE(stats);
    EXPECT_LE(stats->segment_bytes, 4 * stats->live_bytes + 64 * 4096)
        << "cycle " << cycle << ": dead processes' space stays";
    ledger->acknowledged = ledger->begun = main_version;
    ledger->other_acknowledged = ledger->other_begun = other_version;
  }
  fmt::print("{} kills, {} aimed, {} distinct points hit, {} saves acknowledged\n", cycles, aimed, points.size(),
             ledger->acknowledged.load());
  EXPECT_GE(static_cast<int>(points.size()), std::min(aimed, 60) - 5);
  ::munmap(memory, sizeof(Ledger));
}

}  // namespace
}  // namespace kvcell::test
