// Compaction under readers, holders, failures and kills; the scrub; and stores removed as a whole.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>

#include <condition_variable>
#include <mutex>

#include "store/fault_test_util.h"
#include "store/segment_format.h"
#include "store/store_test_util.h"

namespace kvcell::test {
namespace {

using testing::HasSubstr;

constexpr int kSessions = 12;
std::string Name(int i) { return fmt::format("session {:02}", i); }
std::vector<Token> TokensOf(int i) { return MakeTokens(i, static_cast<size_t>(64 * (2 + i % 5) + i), 64); }
bool IsKept(int i) { return i % 3 == 0; }

StoreOptions Small(const std::string& key = "") {
  StoreOptions options;
  options.segment_bytes = 64 << 10;  // several segments
  options.key = key;
  return options;
}

// A closed store, two thirds of it holes.
void MakeHoles(const std::string& path, const StoreOptions& options = Small()) {
  auto store = OpenStore(path, options);
  for (int i = 0; i < kSessions; ++i) {
    const auto saved = SaveSession(*store, Name(i), TokensOf(i));
    ASSERT_TRUE(saved) << saved.error().message();
    for (const auto& block : saved->blocks) store->Release(block);
  }
  for (int i = 0; i < kSessions; ++i) {
    if (IsKept(i)) continue;
    ASSERT_TRUE(store->Remove(Name(i), false).ok());
  }
}

std::string CheckKept(Store& store) {
  std::string wrong;
  for (int i = 0; i < kSessions; ++i) {
    if (IsKept(i)) wrong += CheckSession(store, Name(i), TokensOf(i));
  }
  const auto damaged = store.Verify(VerifyTestCell);
  if (!damaged) return wrong + damaged.error().message();
  for (const auto& cell : *damaged) wrong += " " + cell.what;
  return wrong;
}

uint64_t SegmentSizes(const std::string& store) {
  uint64_t bytes = 0;
  for (const auto& entry : std::filesystem::directory_iterator(store + "/segments")) bytes += entry.file_size();
  return bytes;
}

TEST(Compact, WritesAnewAndKeepsEverySession) {
  for (const std::string& key : {std::string(), std::string(40, 'k')}) {
    TemporaryDirectory directory;
    MakeHoles(directory.store(), Small(key));
    const uint64_t before = SegmentSizes(directory.store());
    {
      auto store = OpenStore(directory.store(), Small(key));
      const auto report = store->Compact();
      ASSERT_TRUE(report) << report.error().message();
      EXPECT_GT(report->blocks_moved, 5);
      EXPECT_LE(report->bytes_after, report->bytes_before);
      EXPECT_EQ(CheckKept(*store), "");
      const auto again = store->Compact();
      ASSERT_TRUE(again);
      EXPECT_EQ(again->blocks_moved, 0) << "nothing is left to do";
    }
    EXPECT_LT(SegmentSizes(directory.store()), before / 2);
    auto store = OpenStore(directory.store(), Small(key));
    EXPECT_EQ(CheckKept(*store), "");
    const auto tokens = TokensOf(3);
    EXPECT_TRUE(*store->FindBlock(KeyAt(tokens, 1), std::span(tokens).subspan<64, 64>()));
  }
}

TEST(Compact, WhatOthersHoldStaysUntilTheyReleaseIt) {
  TemporaryDirectory directory;
  MakeHoles(directory.store());
  auto reader = OpenStore(directory.store(), Small());
  const auto held = reader->Load(Name(3));
  ASSERT_TRUE(held);
  auto store = OpenStore(directory.store(), Small());
  ASSERT_TRUE(store->Compact());
  const auto shapes = SmallShapes();
  std::vector<std::byte> cell(192);
  for (size_t i = 0; i < held->blocks.size(); ++i) {
    ASSERT_TRUE(reader->ReadCells(shapes[0], *held->blocks[i].places[0], 1, 0, 1, cell.data()).ok());
    EXPECT_TRUE(VerifyTestCell(cell, 2, 0, static_cast<int64_t>(i * 64), held->blocks[i].key).ok());
  }
  EXPECT_EQ(CheckKept(*reader), "") << "and it finds the new places by itself";
  SessionRecord record = *held;
  ASSERT_TRUE(reader->Commit(&record, shapes.data()).ok()) << "saved again from what was loaded before";
  for (const auto& block : record.blocks) reader->Release(block);
  EXPECT_EQ(CheckKept(*reader), "");
  ASSERT_TRUE(store->Compact());
  EXPECT_EQ(CheckKept(*store), "");
}

TEST(Compact, ASegmentThatIsWrittenToIsLeft) {
  TemporaryDirectory directory;
  MakeHoles(directory.store());
  auto writer = OpenStore(directory.store(), Small());
  ASSERT_TRUE(SaveSession(*writer, "new", MakeTokens(99, 100)));
  auto store = OpenStore(directory.store(), Small());
  const auto report = store->Compact();
  ASSERT_TRUE(report);
  EXPECT_GE(report->segments_in_use, 1);
  EXPECT_EQ(CheckKept(*store), "");
  EXPECT_EQ(CheckSession(*writer, "new", MakeTokens(99, 100)), "");
}

TEST(Compact, ReadersAndWritersGoOn) {
  TemporaryDirectory directory;
  MakeHoles(directory.store());
  std::vector<pid_t> children;
  for (int process = 0; process < 4; ++process) {
    const pid_t child = ::fork();
    if (child == 0) {
      auto store = Store::Open(directory.store(), Small());
      if (!store) ::_exit(1);
      for (int round = 0; round < 25; ++round) {
        for (int i = 0; i < kSessions; ++i) {
          if (IsKept(i) && !CheckSession(**store, Name(i), TokensOf(i)).empty()) {
            fmt::print(stderr, "{}\n", CheckSession(**store, Name(i), TokensOf(i)));
            ::_exit(2);
          }
        }
        if (process > 1) continue;
        const std::string name = fmt::format("of process {}", process);
        const auto saved = SaveSession(**store, name, MakeTokens(1000 * process + round, 300));
        if (!saved) ::_exit(3);
        for (const auto& block : saved->blocks) (*store)->Release(block);
        if (!CheckSession(**store, name, MakeTokens(1000 * process + round, 300)).empty()) ::_exit(4);
      }
      ::_exit(0);
    }
    children.push_back(child);
  }
  auto store = OpenStore(directory.store(), Small());
  int running = static_cast<int>(children.size());
  while (running > 0) {
    const auto report = store->Compact();
    ASSERT_TRUE(report) << report.error().message();
    int status = 0;
    while (::waitpid(-1, &status, WNOHANG) > 0) {
      EXPECT_EQ(status, 0) << WEXITSTATUS(status);
      --running;
    }
  }
  EXPECT_EQ(CheckKept(*store), "");
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

// Whatever call of a compaction fails, or is the last one of its process: every session is whole, in the same process
// (where it lives) and after another has opened the store.
TEST(Compact, FailedOrKilledAnywhereLosesNothing) {
  TemporaryDirectory directory;
  MakeHoles(directory / "base");
  for (const int error : {EIO, ENOSPC, SIGKILL}) {
    bool ended = false;
    int points = 0;
    for (int at = 1; !ended; ++at, ++points) {
      std::filesystem::remove_all(directory.store());
      std::filesystem::copy(directory / "base", directory.store(), std::filesystem::copy_options::recursive);
      const pid_t child = ::fork();
      if (child == 0) {
        WatchedCalls calls;
        WatchedSqlite sqlite(calls);
        StoreOptions options = Small();
        options.system_calls = &calls;
        auto store = Store::Open(directory.store(), options);
        if (!store) ::_exit(1);
        int made = 0;
        calls.watcher = [&](const Call& call) {
          if (!Changes(call) || ++made != at) return 0;
          if (error == SIGKILL) ::kill(::getpid(), SIGKILL);
          return error;
        };
        (void)(*store)->Compact();
        calls.watcher = nullptr;
        if (const std::string wrong = CheckKept(**store); !wrong.empty()) {
          fmt::print(stderr, "{}\n", wrong);
          ::_exit(2);
        }
        ::_exit(made < at ? 3 : 0);
      }
      int status = 0;
      ASSERT_EQ(::waitpid(child, &status, 0), child);
      ended = WIFEXITED(status) && WEXITSTATUS(status) == 3;
      ASSERT_TRUE(ended || status == 0 || (WIFSIGNALED(status) && error == SIGKILL))
          << "call " << at << " error " << error << " exit " << WEXITSTATUS(status);
      auto store = OpenStore(directory.store(), Small());
      ASSERT_NE(store, nullptr);
      ASSERT_EQ(CheckKept(*store), "") << "call " << at << " error " << error;
      ASSERT_TRUE(store->Compact());
      ASSERT_EQ(CheckKept(*store), "") << "call " << at << " error " << error;
    }
    EXPECT_GT(points, 15);
  }
}

TEST(Destroy, RemovesAStoreAndNothingElse) {
  TemporaryDirectory directory;
  const auto tokens = MakeTokens(1, 200);
  ASSERT_TRUE(SaveSession(*OpenStore(directory.store()), "a", tokens));
  {
    auto user = OpenStore(directory.store());
    EXPECT_EQ(Store::Destroy(directory.store(), false).code(), StatusCode::kBusy);
    EXPECT_EQ(CheckSession(*user, "a", tokens), "");
  }
  const pid_t child = ::fork();
  if (child == 0) {
    StoreOptions options;
    options.read_only = true;
    auto user = Store::Open(directory.store(), options);
    ::pause();
  }
  ::usleep(200'000);
  const Status busy = Store::Destroy(directory.store(), false);
  EXPECT_EQ(busy.code(), StatusCode::kBusy);
  EXPECT_THAT(busy.message(), HasSubstr(directory.store()));
  ::kill(child, SIGKILL);
  ::waitpid(child, nullptr, 0);
  std::filesystem::create_directory(directory / "other");
  std::ofstream(directory / "other/file") << "mine";
  EXPECT_EQ(Store::Destroy(directory / "other", true).code(), StatusCode::kNotFound);
  EXPECT_EQ(Store::Destroy(directory / "none", true).code(), StatusCode::kNotFound);
  EXPECT_TRUE(std::filesystem::exists(directory / "other/file"));
  std::ofstream(directory.store() + "/mine") << "a file of the user's";
  EXPECT_FALSE(Store::Destroy(directory.store(), true).ok()) << "a directory that isn't empty stays";
  EXPECT_TRUE(std::filesystem::exists(directory.store() + "/mine"));
  std::filesystem::remove_all(directory.store());
  ASSERT_TRUE(SaveSession(*OpenStore(directory.store()), "a", tokens));
  const Status destroyed = Store::Destroy(directory.store(), true);
  ASSERT_TRUE(destroyed.ok()) << destroyed.message();
  EXPECT_FALSE(std::filesystem::exists(directory.store()));
}

TEST(Scrub, FindsDamageBeforeAReaderDoes) {
  TemporaryDirectory directory;
  const auto tokens = MakeTokens(1, 4 * 64);
  auto store = OpenStore(directory.store());
  const auto saved = SaveSession(*store, "a", tokens);
  ASSERT_TRUE(saved);
  const auto [path, offset] = store->Locate(SmallShapes()[0], *saved->blocks[2].places[0], 1, 0);
  const int fd = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  ASSERT_EQ(::pwrite(fd, "?", 1, static_cast<off_t>(offset + 50)), 1);
  ::close(fd);
  std::mutex mutex;
  std::condition_variable wake;
  std::vector<DamagedCell> found;
  store->StartScrub(VerifyTestCell, uint64_t{1} << 30, [&](const DamagedCell& cell) {
    const std::lock_guard lock(mutex);
    found.push_back(cell);
    wake.notify_all();
  });
  {
    std::unique_lock lock(mutex);
    wake.wait(lock, [&] { return !found.empty(); });
    EXPECT_EQ(found.front().path, path);
    EXPECT_EQ(found.front().offset, offset);
    EXPECT_EQ(found.front().layer, 2);
    EXPECT_EQ(found.front().position, 128);
  }
  EXPECT_FALSE(*store->FindBlock(KeyAt(tokens, 2), std::span(tokens).subspan<128, 64>()));
  const auto loaded = store->Load("a");
  ASSERT_TRUE(loaded);
  EXPECT_EQ(loaded->blocks.size(), 2u);
  EXPECT_THAT(loaded->damage, HasSubstr(path));
  for (const auto& block : loaded->blocks) store->Release(block);
  for (const auto& block : saved->blocks) store->Release(block);
  ASSERT_TRUE(SaveSession(*store, "a", tokens));
  EXPECT_EQ(CheckSession(*store, "a", tokens), "") << "saved anew, it is whole";
}

}  // namespace
}  // namespace kvcell::test
