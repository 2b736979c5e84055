// `--codec auto` on a small random model: measured once, kept by the model's content, used as rules.
#include "cli/auto_codec.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <string>

#include "base/text_file.h"
#include "cell/rules.h"
#include "tiny_model.h"

namespace kvcell::cli {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;

class AutoCodec : public testing::Test {
 protected:
  void SetUp() override {
    home_ = testing::TempDir() + "kvcell_auto_" + testing::UnitTest::GetInstance()->current_test_info()->name();
    fs::remove_all(home_);
    fs::create_directories(home_);
    ::setenv("XDG_CACHE_HOME", home_.c_str(), 1);
    options_.model = home_ + "/tiny.gguf";
    WriteTinyModel({}, options_.model);
    options_.codec = kAutoCodec;
    options_.quiet = true;
    options_.threads = 1;
  }
  void TearDown() override {
    ::unsetenv("XDG_CACHE_HOME");
    fs::remove_all(home_);
  }
  std::string Kept() const {
    for (const auto& entry : fs::directory_iterator(home_ + "/kvcell")) {
      if (entry.path().extension() == ".yaml") return entry.path().string();
    }
    return "";
  }

  std::string home_;
  Options options_;
};

TEST_F(AutoCodec, IsMeasuredOnceAndFoundAgainUnderAnotherName) {
  const auto first = AutoRules(options_);
  ASSERT_TRUE(first) << first.error().message();
  ASSERT_TRUE((*first)->codec);
  ASSERT_FALSE(Kept().empty());
  // What lies there is used: a choice that nothing measures.
  ASSERT_TRUE(ReplaceTextFile(Kept(),
                              "codec: \"k=int4:g16,v=int2:g16\"\nrules:\n"
                              "  - {event: TOKEN_APPEND, from: none, to: ACTIVE}\n"
                              "  - {event: TOKEN_APPEND, from: ACTIVE, to: QUANTIZED, when: {block: sealed}}\n")
                  .ok());
  fs::rename(options_.model, home_ + "/renamed.gguf");
  options_.model = home_ + "/renamed.gguf";
  const auto again = AutoRules(options_);
  ASSERT_TRUE(again) << again.error().message();
  EXPECT_EQ(CodecText(*(*again)->codec), "k=int4:g16:sym,v=int2:g16:sym");
  const auto cache = ToCacheOptions(options_);
  ASSERT_TRUE(cache) << cache.error().message();
  EXPECT_EQ(CodecText(cache->codec), "k=int4:g16:sym,v=int2:g16:sym");
}

TEST_F(AutoCodec, AFileThatCanNotBeReadIsMeasuredAgain) {
  ASSERT_TRUE(AutoRules(options_));
  const auto measured = ReadTextFile(Kept());
  ASSERT_TRUE(ReplaceTextFile(Kept(), "codec: nonsense\n").ok());
  ASSERT_TRUE(AutoRules(options_));
  EXPECT_EQ(*ReadTextFile(Kept()), *measured);
  // A window would change answers: no file of codecs.
  ASSERT_TRUE(ReplaceTextFile(Kept(), std::string(ProfileText("edge"))).ok());
  ASSERT_TRUE(AutoRules(options_));
  EXPECT_EQ(*ReadTextFile(Kept()), *measured);
}

TEST_F(AutoCodec, WhatCanNotBeMeasuredIsRefused) {
  options_.model = "";
  EXPECT_THAT(AutoRules(options_).error().message(), HasSubstr("-m"));
  options_.model = home_ + "/none.gguf";
  EXPECT_EQ(AutoRules(options_).error().code(), StatusCode::kNotFound);
}

}  // namespace
}  // namespace kvcell::cli
