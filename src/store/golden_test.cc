// Stores and export files as every format version wrote them, read forever. Made once by scripts/golden.sh.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>

#include "store/store_test_util.h"

namespace kvcell::test {
namespace {

const std::string kKey(40, 'k');

std::vector<Token> GoldenTokens() { return MakeTokens(77, 3 * 64 + 9, 64); }
std::vector<Token> GoldenShared() { return MakeTokens(78, 2 * 64, 64); }

void WriteStore(const std::string& path, const StoreOptions& options) {
  {
    auto store = OpenStore(path + "/store", options);
    ASSERT_TRUE(SaveSession(*store, "golden", GoldenTokens()));
    ASSERT_TRUE(SaveSession(*store, "shared", GoldenShared()));
    ASSERT_TRUE(store->Export("golden", path + "/golden.kvsession").ok());
  }
  std::filesystem::remove(path + "/store/open.lock");
  std::filesystem::remove(path + "/store/locks");
}

// Writes the fixtures of the format that this program writes, where KVCELL_WRITE_GOLDEN names a directory.
TEST(Golden, DISABLED_Write) {
  const char* to = std::getenv("KVCELL_WRITE_GOLDEN");
  ASSERT_NE(to, nullptr) << "run scripts/golden.sh";
  const std::string path = to;
  StoreOptions options;
  options.index_page_bytes = 1024;
  WriteStore(path, options);
  std::filesystem::create_directory(path + "/sealed");
  options.key = kKey;
  WriteStore(path + "/sealed", options);
}

// A copy of a fixture, as a program of that version left it on the disk.
std::string Unpack(const std::string& version, const TemporaryDirectory& directory) {
  const std::string to = directory / "golden";
  std::filesystem::copy(std::string(KVCELL_STORE_TESTDATA) + "/" + version, to,
                        std::filesystem::copy_options::recursive);
  return to;
}

class Golden : public testing::TestWithParam<const char*> {};

TEST_P(Golden, IsReadByWhoOnlyLooks) {
  TemporaryDirectory directory;
  const std::string path = Unpack(GetParam(), directory);
  std::filesystem::create_directory(path + "/store/locks");
  StoreOptions options;
  options.read_only = true;
  if (std::string(GetParam()).ends_with("sealed")) options.key = kKey;
  auto store = OpenStore(path + "/store", options);
  ASSERT_NE(store, nullptr);
  EXPECT_EQ(CheckSession(*store, "golden", GoldenTokens()), "");
  EXPECT_EQ(CheckSession(*store, "shared", GoldenShared()), "");
  EXPECT_THAT(*store->Verify(VerifyTestCell), testing::IsEmpty());
}

TEST_P(Golden, IsGoneOnWith) {
  TemporaryDirectory directory;
  const std::string path = Unpack(GetParam(), directory);
  StoreOptions options;
  if (std::string(GetParam()).ends_with("sealed")) options.key = kKey;
  {
    auto store = OpenStore(path + "/store", options);
    ASSERT_NE(store, nullptr);
    EXPECT_EQ(CheckSession(*store, "golden", GoldenTokens()), "");
    ASSERT_TRUE(SaveSession(*store, "new", MakeTokens(79, 200, 64)));
    EXPECT_EQ(store->Stats()->blocks, 6) << "the first block is shared with what was there";
    const auto imported = store->Import(path + "/golden.kvsession", "imported");
    ASSERT_TRUE(imported) << imported.error().message();
    EXPECT_EQ(store->Stats()->blocks, 6);
  }
  auto store = OpenStore(path + "/store", options);
  for (const char* name : {"golden", "imported"}) EXPECT_EQ(CheckSession(*store, name, GoldenTokens()), "") << name;
  EXPECT_EQ(CheckSession(*store, "shared", GoldenShared()), "");
  EXPECT_EQ(CheckSession(*store, "new", MakeTokens(79, 200, 64)), "");
  EXPECT_THAT(*store->Verify(VerifyTestCell), testing::IsEmpty());
}

INSTANTIATE_TEST_SUITE_P(Versions, Golden, testing::Values("v1", "v2", "v2/sealed"));

}  // namespace
}  // namespace kvcell::test
