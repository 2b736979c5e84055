// The store's prefix tree: what is found is what was published under the same identity, block by block, token by token.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sqlite3.h>

#include <fstream>

#include "store/store_test_util.h"

namespace kvcell::test {
namespace {

constexpr size_t kBlock = kBlockTokens;

const Identity& TestIdentity() {
  static const Identity identity = {{"weights", "3f"}, {"codec", "i4"}};
  return identity;
}

std::vector<BlockKey> KeysOf(const std::vector<Token>& tokens) {
  std::vector<BlockKey> keys;
  for (size_t b = 0; b < tokens.size() / kBlock; ++b) keys.push_back(KeyAt(tokens, b));
  return keys;
}

Result<PrefixRecord> PublishTokens(Store& store, const std::vector<Token>& tokens,
                                   const Identity& identity = TestIdentity()) {
  SessionRecord made =
      MakeSession("", {tokens.begin(), tokens.begin() + static_cast<ptrdiff_t>(tokens.size() / kBlock * kBlock)});
  KVCELL_FAIL_IF_ERROR(AppendBlocks(store, &made, 0, made.tokens.size() / kBlock));
  PrefixRecord record{.identity = identity, .model = "test-model", .tokens = made.tokens, .blocks = made.blocks};
  record.sinks.assign(100, std::byte{7});
  const auto shapes = SmallShapes();
  KVCELL_FAIL_IF_ERROR(store.Publish(&record, shapes.data()));
  for (const auto& block : record.blocks) store.Release(block);
  return record;
}

PrefixFound Find(Store& store, const std::vector<Token>& tokens, const Identity& identity = TestIdentity()) {
  const auto keys = KeysOf(tokens);
  auto found = store.FindPrefix({.identity = identity, .tokens = tokens, .keys = keys});
  EXPECT_TRUE(found) << found.error().message();
  if (!found) return {};
  for (const auto& block : found->blocks) store.Release(block);
  return *std::move(found);
}

std::vector<Token> Joined(std::vector<Token> a, const std::vector<Token>& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

TEST(StorePrefix, TheLongestStoredOneIsFoundInAnotherObject) {
  TemporaryDirectory directory;
  const auto tokens = MakeTokens(1, 10 * kBlock + 5);
  { ASSERT_TRUE(PublishTokens(*OpenStore(directory.store()), tokens)); }
  auto store = OpenStore(directory.store());
  PrefixFound found = Find(*store, tokens);
  EXPECT_EQ(found.blocks.size(), 10u);
  EXPECT_EQ(found.end, PrefixEnd::kWhole);
  EXPECT_EQ(found.sinks.size(), 100u);
  found = Find(*store, Joined(tokens, MakeTokens(2, 200)));
  EXPECT_EQ(found.blocks.size(), 10u);
  EXPECT_EQ(found.end, PrefixEnd::kEnds);
  EXPECT_TRUE(store->Verify(VerifyTestCell)->empty());
}

TEST(StorePrefix, WhereAPromptDiffersIsTold) {
  TemporaryDirectory directory;
  auto store = OpenStore(directory.store());
  const auto tokens = MakeTokens(1, 6 * kBlock);
  ASSERT_TRUE(PublishTokens(*store, tokens));
  ASSERT_TRUE(PublishTokens(*store, MakeTokens(3, 6 * kBlock)));
  for (const size_t at : {size_t{1}, kBlock - 1, kBlock, 3 * kBlock + 17, 6 * kBlock - 1}) {
    auto other = tokens;
    ++other[at];
    const PrefixFound found = Find(*store, other);
    EXPECT_EQ(found.blocks.size(), at / kBlock);
    EXPECT_EQ(found.end, PrefixEnd::kDiffers);
    EXPECT_EQ(found.differs_at, static_cast<int64_t>(at));
  }
}

TEST(StorePrefix, AnotherIdentityIsAMissAndNamed) {  // field case C19
  TemporaryDirectory directory;
  auto store = OpenStore(directory.store());
  const auto tokens = MakeTokens(1, 4 * kBlock);
  ASSERT_TRUE(PublishTokens(*store, tokens));
  const PrefixFound found = Find(*store, tokens, {{"weights", "40"}, {"codec", "i4"}});
  EXPECT_TRUE(found.blocks.empty());
  EXPECT_EQ(found.end, PrefixEnd::kOtherIdentity);
  EXPECT_THAT(found.detail, testing::HasSubstr("weights"));
}

TEST(StorePrefix, NamespacesNeverSeeEachOther) {  // field cases H3, H4
  TemporaryDirectory directory;
  auto store = OpenStore(directory.store());
  const auto tokens = MakeTokens(1, 4 * kBlock);
  ASSERT_TRUE(PublishTokens(*store, tokens, {{"weights", "3f"}, {"namespace", "a"}}));
  const PrefixFound found = Find(*store, tokens, {{"weights", "3f"}, {"namespace", "b"}});
  EXPECT_TRUE(found.blocks.empty());
  EXPECT_EQ(found.end, PrefixEnd::kNothingStored) << "not even that another namespace has it is told";
}

TEST(StorePrefix, KeysAloneProveNothing) {  // field case D20
  TemporaryDirectory directory;
  auto store = OpenStore(directory.store());
  const auto shapes = SmallShapes();
  const BlockKey same{};
  // Three chains whose blocks all have one key; the second blocks of the first two even have the same tokens.
  const auto tail = MakeTokens(9, kBlock);
  const std::vector<std::vector<Token>> chains = {Joined(MakeTokens(1, kBlock), tail),
                                                  Joined(MakeTokens(2, kBlock), tail),
                                                  Joined(MakeTokens(1, kBlock), MakeTokens(8, kBlock))};
  std::vector<PrefixRecord> records;
  for (const auto& tokens : chains) {
    SessionRecord made = MakeSession("", tokens);
    ASSERT_TRUE(AppendBlocks(*store, &made, 0, 2).ok());
    for (auto& block : made.blocks) block.key = same;
    PrefixRecord record{.identity = TestIdentity(), .tokens = tokens, .blocks = made.blocks};
    record.sinks.assign(1, std::byte{1});
    ASSERT_TRUE(store->Publish(&record, shapes.data()).ok());
    records.push_back(record);
  }
  EXPECT_EQ(store->Stats()->blocks, 5) << "only the first block of the first and third chain is the same one";
  const std::vector<BlockKey> keys = {same, same};
  for (size_t i = 0; i < chains.size(); ++i) {
    const auto found = store->FindPrefix({.identity = TestIdentity(), .tokens = chains[i], .keys = keys});
    ASSERT_TRUE(found);
    ASSERT_EQ(found->blocks.size(), 2u);
    for (size_t b = 0; b < 2; ++b) {
      EXPECT_EQ(found->blocks[b].places[0]->offset, records[i].blocks[b].places[0]->offset);
      EXPECT_EQ(found->blocks[b].places[0]->index, records[i].blocks[b].places[0]->index);
    }
  }
}

TEST(StorePrefix, BlocksAreStoredOnceForSessionsAndPrefixes) {
  TemporaryDirectory directory;
  auto store = OpenStore(directory.store());
  const auto tokens = MakeTokens(1, 5 * kBlock);
  ASSERT_TRUE(SaveSession(*store, "a", tokens));
  auto record = MakeSession("a", tokens);
  ASSERT_TRUE(PublishTokens(*store, tokens));
  EXPECT_EQ(store->Stats()->blocks, 5);
  const auto list = store->ListPrefixes();
  ASSERT_EQ(list->size(), 1u);
  EXPECT_EQ(list->front().tokens, 5 * static_cast<int64_t>(kBlock));
  EXPECT_EQ(list->front().refs, 1);
  EXPECT_TRUE(list->front().published);
  ASSERT_TRUE(store->Remove("a", false).ok());
  EXPECT_EQ(Find(*store, tokens).blocks.size(), 5u) << "published in its own right";
}

TEST(StorePrefix, ASavedSessionIsFoundAndGoesWithIt) {
  TemporaryDirectory directory;
  auto store = OpenStore(directory.store());
  const auto tokens = MakeTokens(1, 5 * kBlock);
  SessionRecord session = MakeSession("a", tokens);
  ASSERT_TRUE(AppendBlocks(*store, &session, 0, 5).ok());
  session.sinks.assign(10, std::byte{3});
  const auto shapes = SmallShapes();
  ASSERT_TRUE(store->Commit(&session, shapes.data()).ok());
  for (const auto& block : session.blocks) store->Release(block);
  EXPECT_EQ(Find(*store, tokens).blocks.size(), 5u);
  ASSERT_TRUE(store->Remove("a", true).ok());
  EXPECT_TRUE(Find(*store, tokens).blocks.empty());
  EXPECT_EQ(store->Stats()->blocks, 0);
}

TEST(StorePrefix, ChainsLoseTheirTailFirstAndPinnedOnesStay) {  // field case C25
  TemporaryDirectory directory;
  auto store = OpenStore(directory.store());
  const auto common = MakeTokens(1, 3 * kBlock);
  const auto first = Joined(common, MakeTokens(2, 2 * kBlock)), second = Joined(common, MakeTokens(3, 2 * kBlock));
  ASSERT_TRUE(PublishTokens(*store, first));
  ASSERT_TRUE(PublishTokens(*store, second));
  auto list = store->ListPrefixes().value();
  ASSERT_EQ(list.size(), 3u) << "two ends and where they part";
  const auto end = [&](int64_t tokens, size_t n) {
    std::vector<int64_t> ids;
    for (const auto& one : list) {
      if (one.tokens == tokens) ids.push_back(one.id);
    }
    EXPECT_GT(ids.size(), n);
    return ids.at(n);
  };
  ASSERT_TRUE(store->PinPrefix(end(5 * static_cast<int64_t>(kBlock), 1), true).ok());
  for (size_t left = 4; left >= 3; --left) {
    ASSERT_GT(store->EvictPrefixes(1).value(), 0u);
    const PrefixFound found = Find(*store, first);
    EXPECT_EQ(found.blocks.size(), left) << "one block of the tail, nothing in the middle";
    EXPECT_EQ(found.end, PrefixEnd::kEvicted);
    EXPECT_EQ(Find(*store, second).blocks.size(), 5u);
  }
  EXPECT_EQ(store->EvictPrefixes(1).value(), 0u) << "what is left is pinned";
  EXPECT_EQ(store->RemovePrefix(end(5 * static_cast<int64_t>(kBlock), 1)).code(), StatusCode::kBusy);
  ASSERT_TRUE(store->PinPrefix(end(5 * static_cast<int64_t>(kBlock), 1), false).ok());
  ASSERT_TRUE(store->RemovePrefix(end(5 * static_cast<int64_t>(kBlock), 1)).ok());
  EXPECT_EQ(store->Stats()->blocks, 0);
  EXPECT_EQ(store->RemovePrefix(1).code(), StatusCode::kNotFound);
}

TEST(StorePrefix, ADamagedRowEndsThePrefixBeforeIt) {
  TemporaryDirectory directory;
  const auto tokens = MakeTokens(1, 5 * kBlock);
  { ASSERT_TRUE(PublishTokens(*OpenStore(directory.store()), tokens)); }
  const auto run = [&](const char* sql) {
    sqlite3* db = nullptr;
    ASSERT_EQ(sqlite3_open((directory.store() + "/store.db").c_str(), &db), SQLITE_OK);
    EXPECT_EQ(sqlite3_exec(db, sql, nullptr, nullptr, nullptr), SQLITE_OK) << sqlite3_errmsg(db);
    sqlite3_close(db);
  };
  run("UPDATE prefix_nodes SET parent=1 WHERE depth=3");
  {
    auto store = OpenStore(directory.store());
    EXPECT_EQ(Find(*store, tokens).blocks.size(), 3u);
    EXPECT_FALSE(store->Verify(VerifyTestCell)->empty());
  }
  run("UPDATE prefix_bytes SET bytes=x'00'");
  auto store = OpenStore(directory.store());
  const PrefixFound found = Find(*store, tokens);
  EXPECT_TRUE(found.blocks.empty()) << "no reader can do without the first tokens' exact cells";
  EXPECT_EQ(found.end, PrefixEnd::kDamaged);
}

TEST(StorePrefix, AStoreFromBeforeThereWasATreeIsTakenOver) {
  TemporaryDirectory directory;
  const auto tokens = MakeTokens(1, 3 * kBlock);
  { ASSERT_TRUE(SaveSession(*OpenStore(directory.store()), "a", tokens)); }
  sqlite3* db = nullptr;
  ASSERT_EQ(sqlite3_open((directory.store() + "/store.db").c_str(), &db), SQLITE_OK);
  for (const char* table : {"prefix_spaces", "prefix_nodes", "prefix_bytes", "prefix_evicted", "session_parts"}) {
    ASSERT_EQ(sqlite3_exec(db, fmt::format("DROP TABLE {}", table).c_str(), nullptr, nullptr, nullptr), SQLITE_OK);
  }
  ASSERT_EQ(sqlite3_exec(db, "PRAGMA user_version=1", nullptr, nullptr, nullptr), SQLITE_OK);
  sqlite3_close(db);
  {
    StoreOptions options;
    options.read_only = true;
    auto store = OpenStore(directory.store(), options);
    EXPECT_TRUE(Find(*store, tokens).blocks.empty());
    EXPECT_TRUE(store->ListPrefixes()->empty());
  }
  auto store = OpenStore(directory.store());
  EXPECT_EQ(CheckSession(*store, "a", tokens), "");
  ASSERT_TRUE(PublishTokens(*store, tokens));
  EXPECT_EQ(store->Stats()->blocks, 3) << "the blocks that are there become part of the tree";
  EXPECT_EQ(Find(*store, tokens).blocks.size(), 3u);
}

TEST(StorePrefix, AnEncryptedStoreKeepsPrefixesAndShowsNothingOfThem) {
  TemporaryDirectory directory;
  const auto tokens = MakeTokens(1, 3 * kBlock);
  StoreOptions options;
  options.key = std::string(40, 'k');
  const Identity identity = {{"weights", "secret-weights"}};
  { ASSERT_TRUE(PublishTokens(*OpenStore(directory.store(), options), tokens, identity)); }
  std::string stored;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(directory.store())) {
    if (!entry.is_regular_file()) continue;
    std::ifstream in(entry.path(), std::ios::binary);
    stored.append(std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>());
  }
  for (const std::string& word : {std::string("secret-weights"), std::string("test-model"), std::string(100, '\7')})
    EXPECT_EQ(stored.find(word), std::string::npos) << word;
  auto store = OpenStore(directory.store(), options);
  const PrefixFound found = Find(*store, tokens, identity);
  EXPECT_EQ(found.blocks.size(), 3u);
  EXPECT_EQ(found.sinks, std::vector<std::byte>(100, std::byte{7}));
  EXPECT_EQ(store->ListPrefixes()->at(0).model, "test-model");
  EXPECT_EQ(Find(*store, tokens, {{"weights", "other"}}).detail, "weights: stored secret-weights, now other");
  EXPECT_TRUE(store->Verify(VerifyTestCell)->empty());
}

TEST(StorePrefix, TheStoresNamespaceIsPartOfThem) {
  TemporaryDirectory directory;
  const auto tokens = MakeTokens(1, 3 * kBlock);
  const auto of = [&](const char* tenant) {
    StoreOptions options;
    options.name_space = tenant;
    return OpenStore(directory.store(), options);
  };
  auto a = of("a");
  ASSERT_TRUE(PublishTokens(*a, tokens));
  EXPECT_EQ(Find(*a, tokens).blocks.size(), 3u);
  const int64_t id = a->ListPrefixes()->at(0).id;
  for (const char* tenant : {"b", ""}) {
    auto other = of(tenant);
    const PrefixFound found = Find(*other, tokens);
    EXPECT_TRUE(found.blocks.empty());
    EXPECT_EQ(found.end, PrefixEnd::kNothingStored);
    EXPECT_TRUE(other->ListPrefixes()->empty());
    EXPECT_EQ(other->PinPrefix(id, true).code(), StatusCode::kNotFound);
    EXPECT_EQ(other->RemovePrefix(id).code(), StatusCode::kNotFound);
  }
}

TEST(StorePrefix, ErasingASessionTakesWhatOnlyItKept) {
  TemporaryDirectory directory;
  auto store = OpenStore(directory.store());
  const auto tokens = MakeTokens(1, 3 * kBlock, kBlock);
  const auto other = MakeTokens(2, 3 * kBlock, kBlock);
  ASSERT_TRUE(PublishTokens(*store, tokens));
  ASSERT_TRUE(PublishTokens(*store, other));
  auto saved = SaveSession(*store, "s", tokens);
  ASSERT_TRUE(saved);
  for (const auto& block : saved->blocks) store->Release(block);
  ASSERT_TRUE(store->Remove("s", true).ok());
  EXPECT_EQ(Find(*store, tokens).blocks.size(), 1u) << "another prefix goes on from the first";
  EXPECT_EQ(Find(*store, other).blocks.size(), 3u);
}

}  // namespace
}  // namespace kvcell::test
