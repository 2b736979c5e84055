#include "cell/yaml_document.h"

#include <gtest/gtest.h>

#include <optional>
#include <string>

namespace kvcell {
namespace {

// The line, counted from 1, that the refusal of `text` names; nothing when it is taken.
std::optional<int> RefusedAt(const std::string& text) {
  try {
    LoadYamlDocument(text);
    return std::nullopt;
  } catch (const YAML::Exception& error) {
    return error.mark.line + 1;
  }
}

TEST(YamlDocument, OneIsRead) {
  EXPECT_EQ(LoadYamlDocument("a: 1\nb: [x, y]\n")["b"][1].Scalar(), "y");
  EXPECT_EQ(LoadYamlDocument("# first\n---\na: 1\n...\n")["a"].Scalar(), "1");
  EXPECT_TRUE(LoadYamlDocument("").IsNull());
  EXPECT_TRUE(LoadYamlDocument("# nothing\n").IsNull());
}

TEST(YamlDocument, MoreThanOneIsRefusedWhereTheSecondBegins) {
  EXPECT_EQ(RefusedAt("a: 1\n---\nb: 2\n"), 2);
  EXPECT_EQ(RefusedAt("a: 1\n...\n---\nb: 2\n"), 3);
}

TEST(YamlDocument, StrayTextIsRefusedAndEnds) {
  EXPECT_EQ(RefusedAt(",a: b\n"), 1);
  EXPECT_EQ(RefusedAt("# one\n,ame: balanced\ncodec: i4\n"), 2);
  EXPECT_TRUE(RefusedAt("a: 1\n]\n"));
  EXPECT_TRUE(RefusedAt("a: 1\n}\nb: [\n"));
  EXPECT_TRUE(RefusedAt("? ,\n"));
}

TEST(YamlDocument, WhatIsNoTextOrHasNoEndIsRefused) {
  EXPECT_EQ(RefusedAt(std::string("a: 1\nb: \0c\n", 11)), 2);
  EXPECT_TRUE(RefusedAt("a: \"x\nrules:\n  - b\n"));
  EXPECT_TRUE(RefusedAt("a: 'x\nrules:\n  - b\n\n"));
  EXPECT_TRUE(RefusedAt("a: " + std::string(100'000, '[')));
  EXPECT_EQ(LoadYamlDocument("a: \"x\"\n\n")["a"].Scalar(), "x");
}

}  // namespace
}  // namespace kvcell
