// Several processes with one store: who sees what, who waits, who is refused, and what the dead leave behind.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sqlite3.h>
#include <sys/wait.h>

#include <atomic>
#include <thread>

#include "store/store_test_util.h"

namespace kvcell::test {
namespace {

using testing::HasSubstr;

// Runs `body` in a child; its result is the exit code.
template <typename Body>
pid_t Spawn(Body body) {
  const pid_t child = ::fork();
  if (child == 0) ::_exit(body());
  return child;
}

int WaitFor(pid_t child) {
  int status = -1;
  ::waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

// A pipe by which a child says "go on".
struct Signal {
  std::array<int, 2> ends{};
  Signal() { EXPECT_EQ(::pipe(ends.data()), 0); }
  ~Signal() {
    ::close(ends[0]);
    ::close(ends[1]);
  }
  void Give() const { EXPECT_EQ(::write(ends[1], "x", 1), 1); }
  void Await() const {
    char c = 0;
    EXPECT_EQ(::read(ends[0], &c, 1), 1);
  }
};

void ReleaseAll(Store& store, const SessionRecord& record) {
  for (const auto& block : record.blocks) store.Release(block);
}

// Field case D13.
TEST(StoreProcesses, EightStartOnAMissingDirectory) {
  TemporaryDirectory directory;
  const std::string path = directory / "not/there/yet";
  std::vector<pid_t> children;
  for (int i = 0; i < 8; ++i) {
    children.push_back(Spawn([&] {
      auto store = Store::Open(path, {});
      if (!store) return 1;
      return SaveSession(**store, fmt::format("s{}", i), MakeTokens(i, 200)) ? 0 : 2;
    }));
  }
  for (const pid_t child : children) EXPECT_EQ(WaitFor(child), 0);
  auto store = OpenStore(path);
  for (int i = 0; i < 8; ++i) EXPECT_EQ(CheckSession(*store, fmt::format("s{}", i), MakeTokens(i, 200)), "");
}

TEST(StoreProcesses, SavedHereIsSeenThereAtOnceAndALockedSessionIsBusy) {
  TemporaryDirectory directory;
  Signal saved, done;
  const auto tokens = MakeTokens(1, 300);
  const pid_t child = Spawn([&] {
    auto store = Store::Open(directory.store(), {});
    auto lock = (*store)->LockSession("mine");
    if (!lock || !SaveSession(**store, "mine", tokens)) return 1;
    saved.Give();
    done.Await();
    return 0;
  });
  auto store = OpenStore(directory.store());
  saved.Await();
  EXPECT_EQ(CheckSession(*store, "mine", tokens), "") << "a reader isn't kept out";
  const auto lock = store->LockSession("mine");
  ASSERT_FALSE(lock);
  EXPECT_EQ(lock.error().code(), StatusCode::kBusy);
  EXPECT_THAT(lock.error().message(), HasSubstr(fmt::format("process {}", child)));
  EXPECT_EQ(SaveSession(*store, "mine", tokens).error().code(), StatusCode::kBusy);
  EXPECT_EQ(store->Remove("mine", false).code(), StatusCode::kBusy);
  ASSERT_TRUE(SaveSession(*store, "another", tokens)) << "only that name is taken";
  done.Give();
  EXPECT_EQ(WaitFor(child), 0);
  EXPECT_TRUE(store->LockSession("mine"));
}

TEST(StoreProcesses, ADeadHolderIsGone) {
  TemporaryDirectory directory;
  Signal ready;
  const pid_t child = Spawn([&] {
    auto store = Store::Open(directory.store(), {});
    auto lock = (*store)->LockSession("s");
    ready.Give();
    ::pause();
    return 0;
  });
  auto store = OpenStore(directory.store());
  ready.Await();
  EXPECT_FALSE(store->LockSession("s"));
  ::kill(child, SIGKILL);
  WaitFor(child);
  auto lock = store->LockSession("s");
  ASSERT_TRUE(lock) << lock.error().message();
  EXPECT_EQ(store->LockSession("s").error().code(), StatusCode::kBusy) << "one at a time in one process too";
  lock->reset();
  EXPECT_TRUE(store->LockSession("s"));
}

// Field case D5.
TEST(StoreProcesses, WhatDeadProcessesAppendedIsReclaimed) {
  TemporaryDirectory directory;
  {
    auto store = OpenStore(directory.store());
    ASSERT_TRUE(SaveSession(*store, "kept", MakeTokens(1, 300)));
  }
  const int64_t before = OpenStore(directory.store())->Stats()->segment_bytes;
  for (int i = 0; i < 5; ++i) {
    const pid_t child = Spawn([&] {
      auto store = Store::Open(directory.store(), {});
      SessionRecord record = MakeSession("lost", MakeTokens(2, 64 * 100));
      if (!AppendBlocks(**store, &record, 0, 100).ok()) return 1;
      ::kill(::getpid(), SIGKILL);
      return 0;
    });
    EXPECT_EQ(WaitFor(child), -SIGKILL);
  }
  auto store = OpenStore(directory.store());
  EXPECT_EQ(store->Stats()->segment_bytes, before);
  EXPECT_EQ(CheckSession(*store, "kept", MakeTokens(1, 300)), "");
}

TEST(StoreProcesses, ALivingProcessKeepsWhatItHasNotCommitted) {
  TemporaryDirectory directory;
  auto store = OpenStore(directory.store());
  SessionRecord record = MakeSession("late", MakeTokens(2, 64 * 10));
  ASSERT_TRUE(AppendBlocks(*store, &record, 0, 10).ok());
  EXPECT_EQ(WaitFor(Spawn([&] { return Store::Open(directory.store(), {}) ? 0 : 1; })), 0);
  const auto shapes = SmallShapes();
  ASSERT_TRUE(store->Commit(&record, shapes.data()).ok());
  EXPECT_EQ(CheckSession(*store, "late", record.tokens), "");
}

TEST(StoreProcesses, HeldCellsOutliveTheirSession) {
  TemporaryDirectory directory;
  {
    auto store = OpenStore(directory.store());
    ASSERT_TRUE(SaveSession(*store, "s", MakeTokens(1, 64 * 200)));
  }
  auto reader = OpenStore(directory.store());
  auto record = reader->Load("s");
  ASSERT_TRUE(record);
  {
    auto other = OpenStore(directory.store());
    EXPECT_EQ(other->Remove("s", true).code(), StatusCode::kBusy) << "cells in use are not erased";
    EXPECT_EQ(CheckSession(*other, "s", MakeTokens(1, 64 * 200)), "") << "and nothing was changed";
    ASSERT_TRUE(other->Remove("s", false).ok());
    EXPECT_EQ(other->Load("s").error().code(), StatusCode::kNotFound);
  }
  const auto shapes = SmallShapes();
  std::vector<std::byte> cell(128);
  for (size_t i = 0; i < record->blocks.size(); ++i) {
    ASSERT_TRUE(reader->ReadCells(shapes[0], *record->blocks[i].places[0], 0, 1, 1, cell.data()).ok());
    EXPECT_TRUE(VerifyTestCell(cell, 0, 1, static_cast<int64_t>(i * 64), record->blocks[i].key).ok());
  }
  ASSERT_TRUE(reader->Commit(&*record, shapes.data()).ok()) << "what is held can be saved again";
  EXPECT_EQ(CheckSession(*reader, "s", MakeTokens(1, 64 * 200)), "");
  ASSERT_TRUE(reader->Remove("s", false).ok());
  EXPECT_GT(reader->Stats()->segment_bytes, 200 * 640);
  ReleaseAll(*reader, *record);
  reader.reset();
  EXPECT_LT(OpenStore(directory.store())->Stats()->segment_bytes, 200 * 640) << "released, it is found and given back";
}

// A writer that takes its time in the middle of a transaction: whoever reads goes on, and so does who opens the store.
TEST(StoreProcesses, ReadersNeverWaitForWriters) {
  TemporaryDirectory directory;
  const auto tokens = MakeTokens(1, 300);
  ASSERT_TRUE(SaveSession(*OpenStore(directory.store()), "s", tokens));
  std::array<int, 2> begun{}, go_on{};
  ASSERT_EQ(::pipe(begun.data()), 0);
  ASSERT_EQ(::pipe(go_on.data()), 0);
  const pid_t writer = Spawn([&] {
    sqlite3* database = nullptr;
    char word = 0;
    if (sqlite3_open((directory.store() + "/store.db").c_str(), &database) != SQLITE_OK) return 1;
    if (sqlite3_exec(database, "BEGIN IMMEDIATE; DELETE FROM sessions", nullptr, nullptr, nullptr) != SQLITE_OK)
      return 2;
    if (::write(begun[1], "b", 1) != 1 || ::read(go_on[0], &word, 1) != 1) return 3;  // until the readers are done
    return sqlite3_exec(database, "ROLLBACK", nullptr, nullptr, nullptr) == SQLITE_OK ? 0 : 4;
  });
  char word = 0;
  ASSERT_EQ(::read(begun[0], &word, 1), 1);
  auto store = OpenStore(directory.store());
  ASSERT_NE(store, nullptr);
  EXPECT_EQ(CheckSession(*store, "s", tokens), "");
  EXPECT_EQ(store->List()->size(), 1u);
  const auto found = store->FindBlock(KeyAt(tokens, 1), std::span(tokens).subspan<64, 64>());
  EXPECT_TRUE(found && *found);
  EXPECT_TRUE(store->Verify(VerifyTestCell)->empty());
  EXPECT_EQ(::write(go_on[1], "g", 1), 1);
  EXPECT_EQ(WaitFor(writer), 0);
}

// Field case D7.
TEST(StoreProcesses, AReaderSeesAWholeSessionWhileItIsSaved) {
  TemporaryDirectory directory;
  const auto version = [](int v) { return MakeTokens(v, static_cast<size_t>(64 * (1 + v % 5) + v % 64), 100); };
  {
    auto store = OpenStore(directory.store());
    ASSERT_TRUE(SaveSession(*store, "s", version(0)));
  }
  const pid_t writer = Spawn([&] {
    auto store = Store::Open(directory.store(), {});
    for (int v = 1; v < 200; ++v) {
      const auto saved = SaveSession(**store, "s", version(v));
      if (!saved) return 1;
      ReleaseAll(**store, *saved);
    }
    return 0;
  });
  auto store = OpenStore(directory.store());
  int status = 0, reads = 0;
  const auto shapes = SmallShapes();
  while (::waitpid(writer, &status, WNOHANG) == 0) {
    auto record = store->Load("s");
    if (!record && record.error().code() == StatusCode::kBusy) continue;  // saved faster than it can be read
    ASSERT_TRUE(record) << record.error().message();
    ASSERT_EQ(record->damage, "");
    ASSERT_EQ(record->blocks.size(), record->tokens.size() / 64);
    for (size_t i = 0; i < record->blocks.size(); ++i) {
      std::vector<std::byte> cell(192);
      ASSERT_EQ(record->blocks[i].key, KeyAt(record->tokens, i));
      ASSERT_TRUE(store->ReadCells(shapes[0], *record->blocks[i].places[0], 1, 0, 1, cell.data()).ok());
      ASSERT_TRUE(VerifyTestCell(cell, 2, 0, static_cast<int64_t>(i * 64), record->blocks[i].key).ok());
    }
    ReleaseAll(*store, *record);
    ++reads;
  }
  EXPECT_EQ(status, 0);
  EXPECT_GT(reads, 0);
}

TEST(StoreProcesses, ThreadsShareOneObject) {
  TemporaryDirectory directory;
  auto store = OpenStore(directory.store());
  std::vector<std::thread> threads;
  std::atomic<int> wrong{0};
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      const auto name = fmt::format("of thread {}", t);
      for (int v = 0; v < 10; ++v) {
        const auto tokens = MakeTokens(10 * t + v, static_cast<size_t>(64 * (1 + v % 4) + t), 64);
        const auto saved = SaveSession(*store, name, tokens);
        if (!saved || !CheckSession(*store, name, tokens).empty()) ++wrong;
        if (saved) ReleaseAll(*store, *saved);
        if (!store->List() || !store->Stats()) ++wrong;
        if (v % 5 == 4 && !store->Remove(name, v == 9).ok()) ++wrong;
      }
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
  EXPECT_TRUE(store->Verify(VerifyTestCell)->empty());
  EXPECT_EQ(store->Stats()->blocks, 0);
}

// Field case D11: nothing that a store finds depends on the process.
TEST(StoreProcesses, FoundAgainFromAnotherPlaceAndEnvironment) {
  TemporaryDirectory directory;
  EXPECT_EQ(WaitFor(Spawn([&] {
              if (::chdir((directory / "").c_str()) != 0) return 3;
              auto store = Store::Open("store/", {});
              if (!store || ::chdir("/") != 0) return 1;  // later changes don't matter
              return SaveSession(**store, "sé", MakeTokens(1, 300)) ? 0 : 2;
            })),
            0);
  ::setenv("LC_ALL", "C", 1);
  auto store = OpenStore(directory.store());
  EXPECT_EQ(CheckSession(*store, "sé", MakeTokens(1, 300)), "");
  const auto tokens = MakeTokens(1, 300);
  const auto found = store->FindBlock(KeyAt(tokens, 2), std::span(tokens).subspan<128, 64>());
  ASSERT_TRUE(found && *found);
  EXPECT_FALSE(*store->FindBlock(KeyAt(tokens, 2), std::span(tokens).subspan<64, 64>())) << "tokens are compared";
}

}  // namespace
}  // namespace kvcell::test
