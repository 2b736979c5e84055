#include "cli/utf8.h"

#include <gtest/gtest.h>

#include <string>

namespace kvcell::cli {
namespace {

TEST(Utf8StreamTest, CharactersCutAtAnyByteComeOutWhole) {
  const std::string text = "a\xC3\xA9\xE2\x82\xAC\xF0\x9F\x98\x80z";  // a é € 😀 z
  for (size_t step = 1; step <= text.size(); ++step) {
    Utf8Stream stream;
    std::string shown;
    for (size_t at = 0; at < text.size(); at += step) {
      const std::string piece = stream.Push(text.substr(at, step));
      EXPECT_EQ(UnfinishedTail(piece), 0u);
      shown += piece;
    }
    EXPECT_EQ(shown + stream.Flush(), text);
    EXPECT_EQ(shown, text);
  }
}

TEST(Utf8StreamTest, InvalidBytesAreNotHeldBack) {
  Utf8Stream stream;
  EXPECT_EQ(stream.Push("\xFF"), "\xFF");
  EXPECT_EQ(stream.Push("\x80\x80\x80\x80"), "\x80\x80\x80\x80");
}

TEST(Utf8StreamTest, AnUnfinishedCharacterAtTheEndIsNotLost) {
  Utf8Stream stream;
  EXPECT_EQ(stream.Push("x\xE2\x82"), "x");
  EXPECT_EQ(stream.Flush(), "\xE2\x82");
  EXPECT_EQ(stream.Flush(), "");
}

}  // namespace
}  // namespace kvcell::cli
