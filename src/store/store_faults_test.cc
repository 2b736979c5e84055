// Every call of a save made to fail, cut short or be forgotten in turn: the old session or the new one is there, whole.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/wait.h>

#include <map>
#include <set>

#include "store/fault_test_util.h"
#include "store/store_test_util.h"

namespace kvcell::test {
namespace {

constexpr const char* kName = "a";
const std::vector<Token>& Before() {
  static const auto tokens = MakeTokens(1, 3 * 64 + 5);
  return tokens;
}
const std::vector<Token>& After() {
  static const auto tokens = MakeTokens(2, 5 * 64 + 9, 130);
  return tokens;
}

void Copy(const std::string& from, const std::string& to) {
  std::filesystem::remove_all(to);
  std::filesystem::copy(from, to, std::filesystem::copy_options::recursive);
}

void MakeTemplate(const std::string& path, Durability durability) {
  StoreOptions options;
  options.durability = durability;
  auto store = OpenStore(path, options);
  ASSERT_TRUE(SaveSession(*store, kName, Before()));
}

struct Fault {
  int error = 0;       // or kShort
  bool stays = false;  // every call from then on fails too: the disk is gone
};

class SaveFaults : public testing::TestWithParam<std::tuple<Durability, Fault>> {};

TEST_P(SaveFaults, OldOrNewSessionIsWhole) {
  const Durability durability = std::get<0>(GetParam());
  const Fault fault = std::get<1>(GetParam());
  TemporaryDirectory directory;
  MakeTemplate(directory / "template", durability);
  int points = 0;
  for (int at = 1;; ++at) {
    Copy(directory / "template", directory.store());
    int calls_made = 0;
    bool saved = false;
    {
      WatchedCalls calls;
      WatchedSqlite sqlite(calls);
      StoreOptions options;
      options.durability = durability;
      options.system_calls = &calls;
      auto store = OpenStore(directory.store(), options);
      ASSERT_NE(store, nullptr);
      calls.watcher = [&](const Call&) {
        return ++calls_made == at || (fault.stays && calls_made > at) ? fault.error : 0;
      };
      const auto result = SaveSession(*store, kName, After());
      saved = result.has_value();
      if (!saved) {
        EXPECT_FALSE(result.error().message().empty());
      }
      if (!fault.stays) {
        calls.watcher = nullptr;
        EXPECT_EQ(CheckSession(*store, kName, saved ? After() : Before()), "") << "call " << at << ", same process";
      }
    }
    auto store = OpenStore(directory.store());
    ASSERT_NE(store, nullptr);
    const std::string as_after = CheckSession(*store, kName, After());
    const std::string as_before = CheckSession(*store, kName, Before());
    if (saved) {
      EXPECT_EQ(as_after, "") << "call " << at;
    } else if (fault.stays) {
      EXPECT_TRUE(as_after.empty() || as_before.empty()) << "call " << at << ": " << as_before << as_after;
    } else {
      EXPECT_EQ(as_before, "") << "call " << at;
    }
    const auto damaged = store->Verify(VerifyTestCell);
    ASSERT_TRUE(damaged);
    EXPECT_TRUE(damaged->empty()) << "call " << at << ": " << damaged->front().what;
    if (calls_made < at) break;
    points = at;
  }
  EXPECT_GT(points, 15);
  RecordProperty("points", points);
}

INSTANTIATE_TEST_SUITE_P(All, SaveFaults,
                         testing::Combine(testing::Values(Durability::kProcess, Durability::kPower),
                                          testing::Values(Fault{EIO}, Fault{ENOSPC}, Fault{kShort}, Fault{EIO, true},
                                                          Fault{ENOSPC, true})));

// A save fails, the process goes on (its cells are released) and dies without closing: what the log still holds of the
// failed save must not come back as a session without cells.
TEST(StoreFaults, FailedThenKilled) {
  TemporaryDirectory directory;
  MakeTemplate(directory / "template", Durability::kPower);
  bool fired = true;
  for (const bool stays : {false, true}) {
    for (int at = 1; fired || at == 1; ++at) {
      Copy(directory / "template", directory.store());
      const pid_t child = ::fork();
      if (child == 0) {
        WatchedCalls calls;
        WatchedSqlite sqlite(calls);
        StoreOptions options;
        options.durability = Durability::kPower;
        options.system_calls = &calls;
        auto store = Store::Open(directory.store(), options);
        int made = 0;
        calls.watcher = [&](const Call&) { return ++made == at || (stays && made > at) ? EIO : 0; };
        const bool saved = SaveSession(**store, kName, After()).has_value();
        ::_exit(made < at ? 1 : saved ? 2 : 3);
      }
      int status = 0;
      ::waitpid(child, &status, 0);
      ASSERT_TRUE(WIFEXITED(status));
      fired = WEXITSTATUS(status) != 1;
      auto store = OpenStore(directory.store());
      ASSERT_NE(store, nullptr);
      const std::string as_after = CheckSession(*store, kName, After());
      const std::string as_before = CheckSession(*store, kName, Before());
      if (WEXITSTATUS(status) == 3) {
        EXPECT_TRUE(as_after.empty() || as_before.empty()) << "call " << at << ": " << as_before << as_after;
      } else {
        EXPECT_EQ(as_after, "") << "call " << at;
      }
    }
  }
}

// Field case D8: a store that fails now and then never shows a session that isn't whole.
TEST(StoreFaults, EverySeventhWriteFails) {
  TemporaryDirectory directory;
  WatchedCalls calls;
  WatchedSqlite sqlite(calls);
  StoreOptions options;
  options.system_calls = &calls;
  auto store = OpenStore(directory.store(), options);
  std::map<std::string, std::vector<Token>> saved;
  int writes = 0, failed = 0;
  for (int i = 0; i < 40; ++i) {
    const auto name = fmt::format("s{}", i % 5);
    const auto tokens = MakeTokens(i, static_cast<size_t>(64 * (1 + i % 4) + i));
    calls.watcher = [&](const Call& call) {
      if (call.kind != CallKind::kWrite || ++writes % 7 != 0) return 0;
      return writes % 2 == 0 ? EIO : kShort;
    };
    const auto result = SaveSession(*store, name, tokens);
    calls.watcher = nullptr;
    if (result) {
      saved[name] = tokens;
      for (const auto& block : result->blocks) store->Release(block);
    } else {
      ++failed;
    }
    for (const auto& [stored, expected] : saved) ASSERT_EQ(CheckSession(*store, stored, expected), "") << i;
  }
  EXPECT_GT(failed, 3);
}

// A session whose cells, as in life, are far larger than its rows: 4 blocks of 64 KiB.
Result<SessionRecord> SaveLargeSession(Store& store, const std::string& name, int seed) {
  const std::array<CellSetShape, 2> shapes = {CellSetShape{{{0, 4, 16384}}}, {}};
  SessionRecord record = MakeSession(name, MakeTokens(seed, 256));
  const std::vector<std::byte> cell(16384, std::byte{7});
  const auto places = store.CreateCells(shapes[0], 4, [&](size_t, uint32_t, uint16_t) { return cell.data(); });
  if (!places) return Fail(places.error());
  for (size_t i = 0; i < 4; ++i) {
    BlockRecord& block = record.blocks.emplace_back();
    block.key = KeyAt(record.tokens, i);
    std::copy_n(record.tokens.begin() + static_cast<ptrdiff_t>(i * kBlockTokens), kBlockTokens, block.tokens.begin());
    block.places[0] = (*places)[i];
  }
  const Status status = store.Commit(&record, shapes.data());
  for (const auto& block : record.blocks) store.Release(block);
  if (!status.ok()) return Fail(status);
  return record;
}

// Field case D9: a disk that is full is an error value, before anything was written over.
TEST(StoreFaults, FullDisk) {
  TemporaryDirectory directory;
  const std::string disk = directory / "disk";
  std::filesystem::create_directory(disk);
  const pid_t child = ::fork();
  if (child == 0) {
    if (::unshare(CLONE_NEWNS) != 0 || ::mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0 ||
        ::mount("tmpfs", disk.c_str(), "tmpfs", 0, "size=4m") != 0) {
      ::_exit(77);
    }
    auto store = Store::Open(disk + "/store", {});
    if (!store || !SaveSession(**store, kName, Before())) ::_exit(1);
    auto large = MakeSession("large", MakeTokens(9, 64));
    auto shape = SmallShapes()[0];
    const std::vector<std::byte> cell(4096);
    const auto failed = (*store)->CreateCells(shape, 100'000, [&](size_t, uint32_t, uint16_t) { return cell.data(); });
    if (failed || failed.error().code() != StatusCode::kNoSpace) ::_exit(2);
    int saves = 0;
    for (; saves < 10'000; ++saves) {
      auto record = SaveLargeSession(**store, fmt::format("more {}", saves), 100 + saves);
      if (!record && record.error().code() == StatusCode::kNoSpace) break;
      if (!record) ::_exit(3);
    }
    if (saves == 0 || saves == 10'000) ::_exit(4);
    if (!CheckSession(**store, kName, Before()).empty()) ::_exit(5);
    store->reset();
    store = Store::Open(disk + "/store", {});
    if (!store || !CheckSession(**store, kName, Before()).empty()) ::_exit(6);
    std::ofstream(disk + "/filler", std::ios::binary) << std::string(size_t{8} << 20, 'x');  // the last byte is taken
    const Status removed = (*store)->Remove("more 0", false);
    if (!removed.ok()) fmt::print(stderr, "{}\n", removed.message());
    ::_exit(removed.ok() ? 0 : 7);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  if (WIFEXITED(status) && WEXITSTATUS(status) == 77) GTEST_SKIP() << "needs the right to mount a tmpfs";
  EXPECT_EQ(status, 0) << "exit code " << WEXITSTATUS(status);
}

// What a save asked of the disk, to be played back with some of it forgotten.
struct Op {
  CallKind kind;
  std::string path;  // relative to the store
  uint64_t offset = 0;
  uint64_t bytes = 0;
  std::string data;
};

void Apply(const std::string& store, const Op& op) {
  const std::string path = store + "/" + op.path;
  if (op.kind == CallKind::kUnlink) {
    std::filesystem::remove(path);
    return;
  }
  const int fd = ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  ASSERT_GE(fd, 0) << path;
  int failed = 0;
  switch (op.kind) {
    case CallKind::kWrite:
      failed = ::pwrite(fd, op.data.data(), op.data.size(), static_cast<off_t>(op.offset)) !=
               static_cast<ssize_t>(op.data.size());
      break;
    case CallKind::kTruncate:
      failed = ::ftruncate(fd, static_cast<off_t>(op.bytes));
      break;
    case CallKind::kAllocate:
      failed = ::posix_fallocate(fd, static_cast<off_t>(op.offset), static_cast<off_t>(op.bytes));
      break;
    case CallKind::kPunch:
      failed = ::fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(op.offset),
                           static_cast<off_t>(op.bytes));
      break;
    default:
      break;
  }
  EXPECT_EQ(failed, 0) << path;
  ::close(fd);
}

// Power fails after any call of a save at durability `power`: what was synced is there, of the rest none, all, any one
// call alone or all but any one; before each sync and at the end, where there are no more than `exhaustive` of them,
// every set of them. Once the save has returned, the new session is there in each of these worlds.
void ForgetUnsynced(size_t exhaustive) {
  TemporaryDirectory directory;
  MakeTemplate(directory / "base", Durability::kPower);
  std::filesystem::remove_all((directory / "base") + "/locks");
  Copy(directory / "base", directory.store());
  std::vector<Op> log;
  {
    WatchedCalls calls;
    WatchedSqlite sqlite(calls);
    StoreOptions options;
    options.durability = Durability::kPower;
    options.segment_bytes = 1;  // a segment of its own, so that making a file is part of it
    options.system_calls = &calls;
    calls.watcher = [&](const Call& call) {
      Op op{call.kind, "", call.offset, call.bytes, ""};
      const bool counts = call.kind == CallKind::kWrite || call.kind == CallKind::kSync ||
                          call.kind == CallKind::kTruncate || call.kind == CallKind::kUnlink ||
                          call.kind == CallKind::kAllocate || call.kind == CallKind::kPunch || call.creates;
      if (!counts || !call.path.starts_with(directory.store() + "/")) return 0;
      op.path = call.path.substr(directory.store().size() + 1);
      if (op.path.starts_with("locks") || op.path.starts_with("open.lock") || op.path == "segments") return 0;
      if (call.data != nullptr) op.data.assign(static_cast<const char*>(call.data), call.bytes);
      log.push_back(std::move(op));
      return 0;
    };
    auto store = OpenStore(directory.store(), options);
    const auto saved = SaveSession(*store, kName, After());
    ASSERT_TRUE(saved) << saved.error().message();
    calls.watcher = nullptr;
  }
  int worlds = 0, exhausted = 0;
  size_t most = 0;
  const auto check = [&](size_t cut, const std::set<size_t>& forgotten, bool returned) {
    ++worlds;
    Copy(directory / "base", directory.store());
    for (size_t i = 0; i < cut; ++i) {
      if (log[i].kind != CallKind::kSync && !forgotten.contains(i)) Apply(directory.store(), log[i]);
    }
    auto store = OpenStore(directory.store());
    ASSERT_NE(store, nullptr) << "cut " << cut;
    const std::string as_after = CheckSession(*store, kName, After());
    const std::string as_before = CheckSession(*store, kName, Before());
    EXPECT_TRUE(as_after.empty() || (!returned && as_before.empty()))
        << "cut " << cut << " of " << log.size() << ": as before: " << as_before << ", as after: " << as_after;
  };
  for (size_t cut = 0; cut <= log.size(); ++cut) {
    std::vector<size_t> unsynced;
    for (size_t i = 0; i < cut; ++i) {
      bool synced = log[i].kind == CallKind::kSync;
      for (size_t j = i + 1; j < cut; ++j) synced |= log[j].kind == CallKind::kSync && log[j].path == log[i].path;
      if (!synced) unsynced.push_back(i);
    }
    const bool returned = cut == log.size();
    const std::set<size_t> all(unsynced.begin(), unsynced.end());
    check(cut, {}, returned);
    check(cut, all, returned);
    const bool at_sync = returned || log[cut].kind == CallKind::kSync;
    if (at_sync && unsynced.size() <= exhaustive) {
      ++exhausted;
      for (uint64_t set = 1; set + 1 < uint64_t{1} << unsynced.size(); ++set) {
        std::set<size_t> forgotten;
        for (size_t i = 0; i < unsynced.size(); ++i) {
          if ((set >> i & 1) != 0) forgotten.insert(unsynced[i]);
        }
        check(cut, forgotten, returned);
        ASSERT_FALSE(testing::Test::HasFailure());
      }
      continue;
    }
    most = std::max(most, unsynced.size());
    for (const size_t one : unsynced) {
      if (!at_sync) break;
      auto others = all;
      others.erase(one);
      check(cut, {one}, returned);
      check(cut, others, returned);
    }
    ASSERT_FALSE(testing::Test::HasFatalFailure());
  }
  fmt::print(
      "{} calls, {} worlds; every set of what was not synced at {} points, singly and all but one where there were "
      "more ({} at most)\n",
      log.size(), worlds, exhausted, most);
  EXPECT_GT(worlds, 40);
  EXPECT_GT(exhausted, 0);
}

TEST(StoreFaults, UnsyncedWritesAreForgottenOrReordered) { ForgetUnsynced(6); }
TEST(StoreFaults, SlowEverySetOfUnsyncedWritesIsForgotten) { ForgetUnsynced(14); }

}  // namespace
}  // namespace kvcell::test
