// Files that users name as outputs: replaced whole, and never something else than they meant.
#include "base/text_file.h"

#include <gtest/gtest.h>
#include <stdlib.h>

#include <filesystem>

namespace kvcell {
namespace {

namespace fs = std::filesystem;

class TextFileTest : public testing::Test {
 protected:
  TextFileTest() {
    std::string pattern = fs::temp_directory_path().string() + "/kvcell-text-XXXXXX";
    directory_ = ::mkdtemp(pattern.data());
  }
  ~TextFileTest() override { fs::remove_all(directory_); }
  std::string In(const std::string& name) const { return directory_ + "/" + name; }
  size_t Files() const {
    return static_cast<size_t>(std::distance(fs::directory_iterator(directory_), fs::directory_iterator()));
  }
  std::string directory_;
};

TEST_F(TextFileTest, ReplacesAndLeavesNothingBeside) {
  for (const std::string& text : {std::string("old"), std::string("new\n"), std::string()}) {
    ASSERT_TRUE(ReplaceTextFile(In("a"), text).ok());
    EXPECT_EQ(*ReadTextFile(In("a")), text);
    EXPECT_EQ(Files(), 1u);
  }
}

TEST_F(TextFileTest, FollowsLinks) {
  ASSERT_TRUE(ReplaceTextFile(In("a"), "old").ok());
  fs::create_symlink("a", In("link"));
  ASSERT_TRUE(ReplaceTextFile(In("link"), "new").ok());
  EXPECT_TRUE(fs::is_symlink(In("link")));
  EXPECT_EQ(*ReadTextFile(In("a")), "new");
}

TEST_F(TextFileTest, WritesToDevicesWithoutReplacingThem) {
  fs::create_symlink("/dev/full", In("full"));
  const Status status = ReplaceTextFile(In("full"), "text");
  EXPECT_EQ(status.code(), StatusCode::kIoError);
  EXPECT_NE(status.message().find("No space left"), std::string::npos) << status.message();
  EXPECT_TRUE(fs::is_character_file("/dev/full"));
  fs::create_symlink("/dev/null", In("null"));
  EXPECT_TRUE(ReplaceTextFile(In("null"), "text").ok());
  EXPECT_TRUE(fs::is_character_file("/dev/null"));
}

TEST_F(TextFileTest, NamesTheFileThatCannotBeWritten) {
  const Status status = ReplaceTextFile(In("none/a"), "text");
  EXPECT_EQ(status.code(), StatusCode::kIoError);
  EXPECT_NE(status.message().find(In("none/a")), std::string::npos) << status.message();
  EXPECT_EQ(Files(), 0u);
}

}  // namespace
}  // namespace kvcell
