// Damage that heals or stays small: stored cells are replaced by who computes them again, parts of a session's data
// fall one by one, and what is missing is named.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sqlite3.h>
#include <sys/mount.h>
#include <sys/wait.h>
#include <unistd.h>

#include <fstream>

#include "store/store_test_util.h"

namespace kvcell::test {
namespace {

StoreOptions Checking() {
  StoreOptions options;
  options.cell_check = VerifyTestCell;
  return options;
}

void RunSql(const std::string& store, const std::string& sql) {
  sqlite3* db = nullptr;
  ASSERT_EQ(sqlite3_open((store + "/store.db").c_str(), &db), SQLITE_OK);
  char* error = nullptr;
  EXPECT_EQ(sqlite3_exec(db, sql.c_str(), nullptr, nullptr, &error), SQLITE_OK) << sql << ": " << error;
  sqlite3_close(db);
}

// Turns bits over in the first cell of a block.
void DamageCell(Store& store, const BlockRecord& block, size_t kind = 0) {
  const auto [path, offset] = store.Locate(SmallShapes()[kind], *block.places[kind], 0, 0);
  std::fstream file(path, std::ios::binary | std::ios::in | std::ios::out);
  file.seekp(static_cast<std::streamoff>(offset) + 70);
  file.write("\x5a\xa5\x5a", 3);
  ASSERT_TRUE(file.good());
}

void ReleaseAll(Store& store, const SessionRecord& record) {
  for (const auto& block : record.blocks) store.Release(block);
}

TEST(Heal, WhoComputesDamagedBlocksAgainReplacesThemAllAtOnce) {
  TemporaryDirectory directory;
  const auto tokens = MakeTokens(1, 6 * 64 + 5);
  {
    auto store = OpenStore(directory.store(), Checking());
    auto record = SaveSession(*store, "s", tokens);
    ASSERT_TRUE(record);
    for (const size_t block : {1u, 3u, 4u}) DamageCell(*store, record->blocks[block]);
    DamageCell(*store, record->blocks[5], 1);
    ReleaseAll(*store, *record);
  }
  auto store = OpenStore(directory.store(), Checking());
  EXPECT_EQ(store->Verify(VerifyTestCell)->size(), 4u);
  // As the cache does: a block that is found sound is not written again.
  for (const size_t block : {1u, 3u, 4u, 5u}) {
    const auto found = store->FindBlock(KeyAt(tokens, block), std::span(tokens).subspan(block * 64).first<64>());
    EXPECT_TRUE(found && !*found) << block;
  }
  const auto sound = store->FindBlock(KeyAt(tokens, 2), std::span(tokens).subspan<128, 64>());
  ASSERT_TRUE(sound && *sound);
  store->Release(**sound);
  auto again = SaveSession(*store, "s", tokens);
  ASSERT_TRUE(again) << again.error().message();
  ReleaseAll(*store, *again);
  EXPECT_THAT(*store->Verify(VerifyTestCell), testing::IsEmpty());
  EXPECT_EQ(CheckSession(*store, "s", tokens), "");
  store.reset();
  EXPECT_EQ(CheckSession(*OpenStore(directory.store()), "s", tokens), "");
}

TEST(Heal, AFreshSaveChecksWhatItWouldShareWithoutHavingLookedBefore) {
  TemporaryDirectory directory;
  const auto tokens = MakeTokens(1, 4 * 64);
  auto store = OpenStore(directory.store(), Checking());
  {
    auto record = SaveSession(*store, "s", tokens);
    ASSERT_TRUE(record);
    for (const size_t block : {0u, 2u, 3u}) DamageCell(*store, record->blocks[block]);
    ReleaseAll(*store, *record);
  }
  auto other = SaveSession(*store, "other", tokens);
  ASSERT_TRUE(other);
  ReleaseAll(*store, *other);
  EXPECT_THAT(*store->Verify(VerifyTestCell), testing::IsEmpty());
  EXPECT_EQ(store->Stats()->blocks, 4) << "shared, not doubled";
  for (const char* name : {"s", "other"}) EXPECT_EQ(CheckSession(*store, name, tokens), "") << name;
}

TEST(Heal, ATruncatedSegmentIsReplaced) {
  TemporaryDirectory directory;
  const auto tokens = MakeTokens(1, 4 * 64);
  {
    auto store = OpenStore(directory.store(), Checking());
    ASSERT_TRUE(SaveSession(*store, "s", tokens));
  }
  for (const auto& entry : std::filesystem::directory_iterator(directory.store() + "/segments"))
    std::filesystem::resize_file(entry.path(), std::filesystem::file_size(entry.path()) / 2);
  auto store = OpenStore(directory.store(), Checking());
  EXPECT_FALSE(store->Verify(VerifyTestCell)->empty());
  auto again = SaveSession(*store, "s", tokens);
  ASSERT_TRUE(again) << again.error().message();
  ReleaseAll(*store, *again);
  EXPECT_EQ(CheckSession(*store, "s", tokens), "");
  EXPECT_THAT(*store->Verify(VerifyTestCell), testing::IsEmpty());
}

// One damaged part of a session's data at a time, in plain and in encrypted stores.
class Parts : public testing::TestWithParam<bool> {
 protected:
  StoreOptions Options() const {
    StoreOptions options;
    if (GetParam()) options.key = std::string(40, 'k');
    return options;
  }
  // Turns a byte of a column over.
  void Damage(const std::string& column) {
    RunSql(directory_.store(), fmt::format("UPDATE session_data SET {0}=CAST(substr({0},1,length({0})-1) || "
                                           "CASE WHEN substr({0},-1)=x'00' THEN x'01' ELSE x'00' END AS BLOB)",
                                           column));
  }
  Result<SessionRecord> Load() {
    store_ = OpenStore(directory_.store(), Options());
    auto record = store_->Load("s");
    if (record) ReleaseAll(*store_, *record);
    return record;
  }
  size_t CountDamage() { return store_->Verify(VerifyTestCell)->size(); }

  TemporaryDirectory directory_;
  std::unique_ptr<Store> store_;
  const std::vector<Token> tokens_ = MakeTokens(1, 3 * 64 + 5);
};

TEST_P(Parts, FallOneByOne) {
  for (const std::string column : {"logits", "extras", "exact", "tokens"}) {
    SCOPED_TRACE(column);
    store_ = OpenStore(directory_.store(), Options());
    ASSERT_TRUE(SaveSession(*store_, "s", tokens_));
    store_.reset();
    const SessionRecord whole = MakeSession("s", tokens_);
    Damage(column);
    const auto record = Load();
    ASSERT_TRUE(record) << record.error().message();
    EXPECT_EQ(record->blocks.size(), 3u);
    const bool text_lost = column == "tokens";
    EXPECT_EQ(record->tokens.size(), text_lost ? 3u * 64 : tokens_.size());
    EXPECT_TRUE(std::ranges::equal(record->tokens, std::span(tokens_).first(record->tokens.size())));
    EXPECT_EQ(record->logits.empty(), column == "logits" || text_lost);
    EXPECT_EQ(record->extras.empty(), column == "extras" || text_lost);
    EXPECT_EQ(record->exact.empty(), column == "exact" || text_lost);
    if (!record->exact.empty()) {
      EXPECT_EQ(record->exact, whole.exact);
    }
    EXPECT_EQ(record->notice.empty(), column == "exact");
    EXPECT_EQ(record->damage.empty(), column == "logits" || column == "extras");
    EXPECT_EQ(CountDamage(), 1u);
  }
}

TEST_P(Parts, CellsAreVerifiedBehindADamagedPart) {
  store_ = OpenStore(directory_.store(), Options());
  auto saved = SaveSession(*store_, "s", tokens_);
  ASSERT_TRUE(saved);
  DamageCell(*store_, saved->blocks[2]);
  store_.reset();
  Damage("tokens");
  ASSERT_TRUE(Load());
  EXPECT_GE(CountDamage(), 2u);
}

TEST_P(Parts, ADamagedSessionCanBeSavedOverAndRemoved) {
  store_ = OpenStore(directory_.store(), Options());
  ASSERT_TRUE(SaveSession(*store_, "s", tokens_));
  store_.reset();
  Damage("exact");
  ASSERT_TRUE(Load());
  ASSERT_TRUE(SaveSession(*store_, "s", tokens_));
  EXPECT_EQ(CountDamage(), 0u);
  EXPECT_EQ(CheckSession(*store_, "s", tokens_), "");
  store_.reset();
  Damage("tokens");
  store_ = OpenStore(directory_.store(), Options());
  EXPECT_TRUE(store_->Remove("s", false).ok());
}

INSTANTIATE_TEST_SUITE_P(Stores, Parts, testing::Bool());

TEST(Missing, FoldersAreNamed) {
  for (const char* folder : {"segments", "locks"}) {
    TemporaryDirectory directory;
    { ASSERT_TRUE(SaveSession(*OpenStore(directory.store()), "s", MakeTokens(1, 70))); }
    std::filesystem::remove_all(directory.store() + "/" + folder);
    StoreOptions options;
    options.read_only = true;
    const auto store = Store::Open(directory.store(), options);
    ASSERT_FALSE(store);
    EXPECT_EQ(store.error().code(), StatusCode::kCorruption);
    EXPECT_THAT(store.error().message(), testing::HasSubstr(fmt::format("'{}'", folder)));
  }
}

TEST(ExportPadding, EveryByteOfAnExportCounts) {
  TemporaryDirectory directory;
  auto store = OpenStore(directory.store());
  ASSERT_TRUE(SaveSession(*store, "s", MakeTokens(1, 64 + 3)));
  const std::string path = directory / "s.kvsession";
  ASSERT_TRUE(store->Export("s", path).ok());
  std::ifstream in(path, std::ios::binary);
  const std::string content((std::istreambuf_iterator<char>(in)), std::istreambuf_iterator<char>());
  for (size_t i = 0; i < content.size(); ++i) {
    std::string flipped = content;
    flipped[i] = static_cast<char>(flipped[i] ^ 1);
    std::ofstream(path, std::ios::binary | std::ios::trunc) << flipped;
    EXPECT_FALSE(store->Import(path, "copy")) << "byte " << i;
    if (HasFailure()) break;
  }
}

// A session whose cells another one uses gives no cells back; its rows are long, and zeroing them takes room in the
// log.
TEST(FullDisk, ASessionThatSharesItsCellsCanBeRemoved) {
  TemporaryDirectory directory;
  const std::string disk = directory / "disk";
  std::filesystem::create_directory(disk);
  const pid_t child = ::fork();
  if (child == 0) {
    if (::unshare(CLONE_NEWNS) != 0 || ::mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0 ||
        ::mount("tmpfs", disk.c_str(), "tmpfs", 0, "size=16m") != 0) {
      ::_exit(77);
    }
    const auto tokens = MakeTokens(1, 3 * 64 + 5);
    {
      auto store = OpenStore(disk + "/store");
      for (const char* name : {"a", "b"}) {
        auto record = MakeSession(name, tokens);
        record.exact.assign(size_t{3} << 20, std::byte{7});
        const auto shapes = SmallShapes();
        if (!AppendBlocks(*store, &record, 0, 3).ok() || !store->Commit(&record, shapes.data()).ok()) ::_exit(1);
        ReleaseAll(*store, record);
      }
    }
    auto store = OpenStore(disk + "/store");
    if (store == nullptr) ::_exit(2);
    std::ofstream(disk + "/filler", std::ios::binary) << std::string(size_t{32} << 20, 'x');
    std::filesystem::resize_file(disk + "/filler", std::filesystem::file_size(disk + "/filler") - (size_t{384} << 10));
    const Status removed = store->Remove("a", false);
    if (!removed.ok()) fmt::print(stderr, "{}\n", removed.message());
    if (!removed.ok()) ::_exit(3);
    ::_exit(store->Verify(VerifyTestCell)->empty() ? 0 : 4);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  if (WIFEXITED(status) && WEXITSTATUS(status) == 77) GTEST_SKIP() << "needs the right to mount a tmpfs";
  EXPECT_EQ(status, 0) << "exit code " << WEXITSTATUS(status);
}

}  // namespace
}  // namespace kvcell::test
