// Room and tenants: what goes when the cap is reached or the time is up, what stays, and who sees what.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <thread>

#include "store/fault_test_util.h"
#include "store/store_test_util.h"

namespace kvcell::test {
namespace {

using testing::HasSubstr;

constexpr uint64_t kCap = uint64_t{4} << 20;
constexpr size_t kLargeCell = 16384;  // four to a block: 64 KiB
std::array<CellSetShape, 2> LargeShapes() { return {CellSetShape{{{0, 4, kLargeCell}}}, CellSetShape{}}; }

// A session whose cells, as in life, are far larger than its rows; not stored yet.
Result<SessionRecord> AppendLarge(Store& store, const std::string& name, int seed, size_t n_blocks, size_t shared) {
  const auto shapes = LargeShapes();
  SessionRecord record = MakeSession(name, MakeTokens(seed, n_blocks * kBlockTokens, shared));
  const std::vector<std::byte> cell(kLargeCell, static_cast<std::byte>(seed));
  const auto places = store.CreateCells(shapes[0], static_cast<uint32_t>(n_blocks),
                                        [&](size_t, uint32_t, uint16_t) { return cell.data(); });
  if (!places) return Fail(places.error());
  for (size_t i = 0; i < n_blocks; ++i) {
    BlockRecord& block = record.blocks.emplace_back();
    block.key = KeyAt(record.tokens, i);
    std::copy_n(record.tokens.begin() + static_cast<ptrdiff_t>(i * kBlockTokens), kBlockTokens, block.tokens.begin());
    block.places[0] = (*places)[i];
  }
  return record;
}

// Nothing stays held.
Status SaveLarge(Store& store, const std::string& name, int seed, size_t n_blocks, size_t shared = 0) {
  auto record = AppendLarge(store, name, seed, n_blocks, shared);
  if (!record) return record.error();
  const Status status = store.Commit(&*record, LargeShapes().data());
  for (const auto& block : record->blocks) store.Release(block);
  return status;
}

Status PublishLarge(Store& store, int seed, size_t n_blocks) {
  auto made = AppendLarge(store, "prefix", seed, n_blocks, 0);
  if (!made) return made.error();
  PrefixRecord record{
      .identity = made->identity, .model = "test-model", .tokens = made->tokens, .blocks = made->blocks};
  record.sinks.assign(100, std::byte{7});
  const Status status = store.Publish(&record, LargeShapes().data());
  for (const auto& block : record.blocks) store.Release(block);
  return status;
}

PrefixFound FindLarge(Store& store, int seed, size_t n_blocks) {
  const auto tokens = MakeTokens(seed, n_blocks * kBlockTokens);
  std::vector<BlockKey> keys;
  for (size_t i = 0; i < n_blocks; ++i) keys.push_back(KeyAt(tokens, i));
  auto found = store.FindPrefix({.identity = MakeSession("", {}).identity, .tokens = tokens, .keys = keys});
  EXPECT_TRUE(found) << found.error().message();
  if (!found) return {};
  for (const auto& block : found->blocks) store.Release(block);
  return *std::move(found);
}

// As a file system counts: what a user's `du` shows.
uint64_t DiskBytes(const std::string& path) {
  uint64_t bytes = 0;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(path)) {
    struct stat info = {};
    if (::lstat(entry.path().c_str(), &info) == 0 && S_ISREG(info.st_mode)) {
      bytes += static_cast<uint64_t>(info.st_blocks) * 512;
    }
  }
  return bytes;
}

std::vector<std::string> Names(Store& store) {
  std::vector<std::string> names;
  const auto list = store.List();
  for (const auto& session : list.value()) names.push_back(session.name);
  return names;
}

StoreOptions Capped(uint64_t cap = kCap) {
  StoreOptions options;
  options.disk_cap = cap;
  return options;
}

// Field case D10: what was there before the start counts.
TEST(Room, TheCapCountsWhatWasThere) {
  TemporaryDirectory directory;
  {
    auto store = OpenStore(directory.store());
    for (int i = 0; i < 20; ++i) ASSERT_TRUE(SaveLarge(*store, fmt::format("old {:02}", i), i, 4).ok());
  }
  ASSERT_GT(DiskBytes(directory.store()), kCap);
  auto store = OpenStore(directory.store(), Capped());
  EXPECT_LE(DiskBytes(directory.store()), kCap) << "when it is opened";
  EXPECT_THAT(Names(*store), testing::Contains("old 19"));
  EXPECT_THAT(Names(*store), testing::Not(testing::Contains("old 00")));
  for (int i = 0; i < 40; ++i) {
    const Status saved = SaveLarge(*store, fmt::format("new {:02}", i), 100 + i, 4);
    ASSERT_TRUE(saved.ok()) << saved.message();
    ASSERT_LE(DiskBytes(directory.store()), kCap) << "after save " << i;
  }
  EXPECT_THAT(Names(*store), testing::Contains("new 39"));
  EXPECT_THAT(Names(*store), testing::Not(testing::Contains("old 19")));
  EXPECT_GT(store->Stats()->evicted_sessions, 20);
  EXPECT_GE(Names(*store).size(), 8u) << "no more than needed";
  EXPECT_TRUE(
      store->Verify([](std::span<const std::byte>, uint16_t, uint16_t, int64_t, const BlockKey&) { return OkStatus(); })
          ->empty());
}

// Field case C25: blocks behind a gap are of no use, so a session loses its last ones first.
TEST(Room, ASessionLosesItsEndFirst) {
  TemporaryDirectory directory;
  {
    auto store = OpenStore(directory.store());
    ASSERT_TRUE(SaveLarge(*store, "long", 1, 40).ok());
  }
  auto store = OpenStore(directory.store(), Capped());
  ASSERT_TRUE(SaveLarge(*store, "next", 2, 30).ok());
  const auto record = store->Load("long");
  ASSERT_TRUE(record) << record.error().message();
  EXPECT_GT(record->blocks.size(), 10u);
  EXPECT_LT(record->blocks.size(), 35u);
  EXPECT_EQ(record->tokens.size(), 40u * 64) << "the text is all there";
  EXPECT_THAT(record->damage, HasSubstr("disk cap"));
  std::vector<std::byte> cell(kLargeCell);
  for (size_t i = 0; i < record->blocks.size(); ++i) {
    EXPECT_EQ(record->blocks[i].key, KeyAt(record->tokens, i));
    ASSERT_TRUE(store->ReadCells(LargeShapes()[0], *record->blocks[i].places[0], 0, 3, 1, cell.data()).ok());
    EXPECT_EQ(cell[100], std::byte{1});
  }
  EXPECT_EQ(store->Load("next")->damage, "");
}

TEST(Room, WhatIsInUseIsNeverEvicted) {
  TemporaryDirectory directory;
  {
    auto store = OpenStore(directory.store());
    ASSERT_TRUE(SaveLarge(*store, "held", 1, 20).ok());
    ASSERT_TRUE(SaveLarge(*store, "locked", 2, 20).ok());
    ASSERT_TRUE(SaveLarge(*store, "idle", 3, 8).ok());
  }
  auto other = OpenStore(directory.store());
  const auto held = other->Load("held");
  ASSERT_TRUE(held);
  const auto lock = other->LockSession("locked");
  ASSERT_TRUE(lock);
  auto store = OpenStore(directory.store(), Capped());
  const Status saved = SaveLarge(*store, "more", 4, 30);
  EXPECT_EQ(saved.code(), StatusCode::kNoSpace);
  EXPECT_THAT(saved.message(), HasSubstr("cap"));
  EXPECT_THAT(Names(*store), testing::ElementsAre("held", "locked"));
  EXPECT_EQ(store->Load("locked")->blocks.size(), 20u);
  std::vector<std::byte> cell(kLargeCell);
  for (const auto& block : held->blocks) {
    ASSERT_TRUE(other->ReadCells(LargeShapes()[0], *block.places[0], 0, 0, 1, cell.data()).ok());
    ASSERT_EQ(cell[7], std::byte{1});
  }
  for (const auto& block : held->blocks) other->Release(block);
  EXPECT_TRUE(SaveLarge(*store, "more", 4, 30).ok()) << "released, it makes room";
}

TEST(Room, TheLeastRecentlyUsedGoesFirst) {
  TemporaryDirectory directory;
  auto store = OpenStore(directory.store(), Capped());
  for (const char* name : {"a", "b", "c"}) ASSERT_TRUE(SaveLarge(*store, name, name[0], 12).ok());
  std::this_thread::sleep_for(std::chrono::milliseconds(2100));
  const auto used = store->Load("a");
  ASSERT_TRUE(used);
  for (const auto& block : used->blocks) store->Release(block);
  ASSERT_TRUE(SaveLarge(*store, "d", 'd', 26).ok());
  EXPECT_EQ(store->Load("a")->damage, "");
  EXPECT_EQ(store->Load("d")->damage, "");
  const auto b = store->Load("b");
  EXPECT_TRUE(!b || !b->damage.empty());
}

// A prefix is computed again by whoever misses it; with a session's cells a user waits. So prefixes give way first,
// from their ends, however lately they were used.
TEST(Room, PrefixesGoBeforeSessionsAndTheirEndFirst) {
  TemporaryDirectory directory;
  auto store = OpenStore(directory.store(), Capped());
  ASSERT_TRUE(SaveLarge(*store, "kept", 1, 16).ok());
  ASSERT_TRUE(PublishLarge(*store, 2, 30).ok());
  ASSERT_EQ(FindLarge(*store, 2, 30).blocks.size(), 30u);
  ASSERT_TRUE(SaveLarge(*store, "more", 3, 24).ok());
  const PrefixFound left = FindLarge(*store, 2, 30);
  EXPECT_GT(left.blocks.size(), 10u) << "no more than needed";
  EXPECT_LT(left.blocks.size(), 28u);
  EXPECT_EQ(left.end, PrefixEnd::kEvicted);
  EXPECT_EQ(store->Load("kept")->damage, "");
  EXPECT_EQ(store->Load("more")->damage, "");
  EXPECT_EQ(store->Load("kept")->blocks.size(), 16u);
  EXPECT_LE(DiskBytes(directory.store()), kCap);
  store.reset();
  store = OpenStore(directory.store(), Capped(uint64_t{3} << 20));
  EXPECT_LE(DiskBytes(directory.store()), uint64_t{3} << 20);
  EXPECT_LT(FindLarge(*store, 2, 30).blocks.size(), left.blocks.size());
  EXPECT_EQ(store->Load("kept")->damage, "");
  EXPECT_EQ(store->Load("more")->damage, "");
}

TEST(Room, WhatAnotherSessionSharesStays) {
  TemporaryDirectory directory;
  auto store = OpenStore(directory.store(), Capped());
  ASSERT_TRUE(SaveLarge(*store, "first", 1, 16, 8 * 64).ok());
  ASSERT_TRUE(SaveLarge(*store, "second", 2, 12, 8 * 64).ok());
  auto other = OpenStore(directory.store());
  const auto lock = other->LockSession("second");
  ASSERT_TRUE(SaveLarge(*store, "third", 3, 46).ok());
  EXPECT_NE(store->Load("first")->damage, "") << "it had to give";
  const auto second = store->Load("second");
  ASSERT_TRUE(second);
  EXPECT_EQ(second->damage, "");
  EXPECT_EQ(second->blocks.size(), 12u);
}

TEST(Room, TimeIsUp) {
  TemporaryDirectory directory;
  {
    auto store = OpenStore(directory.store());
    for (const char* name : {"a", "b", "locked"}) ASSERT_TRUE(SaveLarge(*store, name, name[0], 2).ok());
  }
  auto other = OpenStore(directory.store());
  const auto lock = other->LockSession("locked");
  StoreOptions options;
  options.ttl_seconds = 3600;
  EXPECT_EQ(Names(*OpenStore(directory.store(), options)).size(), 3u);
  std::this_thread::sleep_for(std::chrono::milliseconds(2100));
  options.ttl_seconds = 1;
  auto store = OpenStore(directory.store(), options);
  EXPECT_THAT(Names(*store), testing::ElementsAre("locked"));
  EXPECT_EQ(store->Stats()->blocks, 2);
}

TEST(Room, TimeIsUpForPrefixesToo) {
  TemporaryDirectory directory;
  {
    auto store = OpenStore(directory.store());
    ASSERT_TRUE(PublishLarge(*store, 1, 4).ok());
    ASSERT_TRUE(PublishLarge(*store, 2, 3).ok());
    const auto prefixes = store->ListPrefixes().value();
    for (const auto& prefix : prefixes) {
      if (prefix.tokens != 3 * kBlockTokens) continue;
      ASSERT_TRUE(store->PinPrefix(prefix.id, true).ok());
    }
  }
  StoreOptions options;
  options.ttl_seconds = 3600;
  EXPECT_EQ(FindLarge(*OpenStore(directory.store(), options), 1, 4).blocks.size(), 4u);
  std::this_thread::sleep_for(std::chrono::milliseconds(2100));
  options.ttl_seconds = 1;
  auto store = OpenStore(directory.store(), options);
  EXPECT_EQ(FindLarge(*store, 1, 4).blocks.size(), 0u);
  EXPECT_EQ(FindLarge(*store, 2, 3).blocks.size(), 3u) << "pinned, it has no end";
  EXPECT_EQ(store->Stats()->blocks, 3);
}

// The index's log is written back before it takes much: a full disk needs room for it to remove anything at all.
TEST(Room, TheLogStaysShort) {
  TemporaryDirectory directory;
  auto store = OpenStore(directory.store());
  uint64_t longest = 0;
  for (int i = 0; i < 40; ++i) {
    SessionRecord record = MakeSession("s", MakeTokens(i, 100));
    record.exact.assign(size_t{1} << 20, static_cast<std::byte>(i));
    ASSERT_TRUE(AppendBlocks(*store, &record, 0, 1).ok());
    const auto shapes = SmallShapes();
    ASSERT_TRUE(store->Commit(&record, shapes.data()).ok());
    store->Release(record.blocks[0]);
    longest = std::max<uint64_t>(longest, std::filesystem::file_size(directory.store() + "/store.db-wal"));
  }
  EXPECT_LE(longest, uint64_t{6} << 20) << "40 MiB went through it";
}

// Field case H3: another tenant's prefix is neither found nor shared, so there is nothing to time; one's own is.
TEST(Namespaces, OthersAreNeitherSeenNorShared) {
  for (const bool sealed : {false, true}) {
    TemporaryDirectory directory;
    const auto tokens = MakeTokens(1, 3 * 64 + 5);
    const auto of = [&](const std::string& tenant) {
      StoreOptions options;
      options.name_space = tenant;
      if (sealed) options.key = std::string(32, 'k');
      return OpenStore(directory.store(), options);
    };
    auto a = of("tenant-a"), b = of("tenant-b"), common = of("");
    ASSERT_TRUE(SaveSession(*a, "s", tokens));
    const auto first = std::span(tokens).first<64>();
    for (auto* other : {b.get(), common.get()}) {
      EXPECT_EQ(other->Load("s").error().code(), StatusCode::kNotFound);
      EXPECT_TRUE(other->List()->empty());
      EXPECT_FALSE(*other->FindBlock(KeyAt(tokens, 0), first));
      EXPECT_EQ(other->Remove("s", false).code(), StatusCode::kNotFound);
    }
    EXPECT_TRUE(*of("tenant-a")->FindBlock(KeyAt(tokens, 0), first)) << "the same tenant's other process hits";
    const auto of_b = SaveSession(*b, "s", tokens);
    ASSERT_TRUE(of_b);
    for (const auto& block : of_b->blocks) b->Release(block);
    ASSERT_TRUE(SaveSession(*common, "s", MakeTokens(2, 100)));
    EXPECT_EQ(a->Stats()->blocks, 7) << "3 of a, 3 of b, 1 of the common one";
    EXPECT_EQ(CheckSession(*a, "s", tokens), "");
    EXPECT_EQ(CheckSession(*b, "s", tokens), "");
    EXPECT_EQ(CheckSession(*common, "s", MakeTokens(2, 100)), "");
    const auto lock = a->LockSession("s");
    EXPECT_TRUE(b->LockSession("s")) << "names of two tenants have nothing to do with each other";
    ASSERT_TRUE(b->Remove("s", true).ok());
    EXPECT_EQ(CheckSession(*a, "s", tokens), "");
    EXPECT_TRUE(a->Verify(VerifyTestCell)->empty());
  }
}

TEST(Namespaces, AreNames) {
  TemporaryDirectory directory;
  for (const char* bad : {"a/b", "..", "\n"}) {
    StoreOptions options;
    options.name_space = bad;
    const auto store = Store::Open(directory.store(), options);
    ASSERT_FALSE(store);
    EXPECT_EQ(store.error().code(), StatusCode::kInvalidArgument);
    EXPECT_THAT(store.error().message(), HasSubstr("namespace"));
  }
}

// One store, sessions saved at each level: what is synced before a save returns is what its own level says.
TEST(Durability, IsOfTheSaveWhereItSaysSo) {
  TemporaryDirectory directory;
  WatchedCalls calls;
  WatchedSqlite sqlite(calls);
  StoreOptions options;
  options.system_calls = &calls;
  auto store = OpenStore(directory.store(), options);
  std::map<std::string, int> syncs;  // by folder or file
  calls.watcher = [&](const Call& call) {
    if (call.kind != CallKind::kSync) return 0;
    ++syncs[call.path.ends_with("-wal")                        ? "log"
            : call.path.find("/segments") != std::string::npos ? "segments"
                                                               : "else"];
    return 0;
  };
  int n = 0;
  for (const auto level : {Durability::kPower, Durability::kNone, Durability::kProcess, Durability::kPower}) {
    SessionRecord record = MakeSession(fmt::format("session {}", n), MakeTokens(n, 100));
    record.durability = level;
    syncs.clear();
    ASSERT_TRUE(AppendBlocks(*store, &record, 0, 1).ok());
    const auto shapes = SmallShapes();
    ASSERT_TRUE(store->Commit(&record, shapes.data()).ok());
    if (level == Durability::kPower) {
      EXPECT_GT(syncs["segments"], 0) << n;
      EXPECT_GT(syncs["log"], 0) << n;
    } else {
      EXPECT_EQ(syncs["segments"] + syncs["log"], 0) << n;
    }
    EXPECT_EQ(CheckSession(*store, record.name, record.tokens), "");
    store->Release(record.blocks[0]);
    ++n;
  }
  calls.watcher = nullptr;
  store.reset();
}

}  // namespace
}  // namespace kvcell::test
