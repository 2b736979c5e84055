// Stores and export files as every released format version wrote them, read forever. Made once by scripts/golden.sh.
#include <gtest/gtest.h>

#include <cstdlib>

#include "store/store_test_util.h"

namespace kvcell::test {
namespace {

std::vector<Token> GoldenTokens() { return MakeTokens(77, 3 * 64 + 9, 64); }
std::vector<Token> GoldenShared() { return MakeTokens(78, 2 * 64, 64); }

// Writes the fixture of the format that this program writes, where KVCELL_WRITE_GOLDEN names a directory.
TEST(Golden, DISABLED_Write) {
  const char* to = std::getenv("KVCELL_WRITE_GOLDEN");
  ASSERT_NE(to, nullptr) << "run scripts/golden.sh";
  const std::string path = to;
  {
    auto store = OpenStore(path + "/store");
    ASSERT_TRUE(SaveSession(*store, "golden", GoldenTokens()));
    ASSERT_TRUE(SaveSession(*store, "shared", GoldenShared()));
    ASSERT_TRUE(store->Export("golden", path + "/golden.kvsession").ok());
  }
  std::filesystem::remove(path + "/store/open.lock");
  std::filesystem::remove(path + "/store/locks");
}

}  // namespace
}  // namespace kvcell::test
