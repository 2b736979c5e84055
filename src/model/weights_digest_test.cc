// A remembered digest is used only while the file is the same, and nothing that lies in its folder can do harm.
#include "model/weights_digest.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <vector>

namespace kvcell {
namespace {

class RememberedDigest : public testing::Test {
 protected:
  RememberedDigest() {
    std::string pattern = std::filesystem::temp_directory_path().string() + "/kvcell-digest-XXXXXX";
    path_ = ::mkdtemp(pattern.data());
    for (size_t i = 0; i < bytes_.size(); ++i) bytes_[i] = static_cast<std::byte>(i * 31 + i / 4096);
    Write();
  }
  ~RememberedDigest() override { std::filesystem::remove_all(path_); }
  void Write() {
    std::ofstream out(path_ + "/model", std::ios::binary | std::ios::trunc);
    out.write(reinterpret_cast<const char*>(bytes_.data()), static_cast<std::streamsize>(bytes_.size()));
  }
  WeightsDigest Digest() {
    struct stat info = {};
    EXPECT_EQ(::stat((path_ + "/model").c_str(), &info), 0);
    return DigestWeights(bytes_, info, folder(), 1);
  }
  std::string folder() const { return path_ + "/cache/kvcell"; }
  std::string OnlyFile() const {
    std::string found;
    for (const auto& entry : std::filesystem::directory_iterator(folder())) found = entry.path();
    return found;
  }

  std::string path_;
  std::vector<std::byte> bytes_ = std::vector<std::byte>(size_t{1} << 20);
};

TEST_F(RememberedDigest, IsUsedWhileTheFileIsTheSame) {
  const WeightsDigest first = Digest();
  EXPECT_FALSE(first.remembered);
  EXPECT_EQ(first.text.size(), 32u);
  const WeightsDigest second = Digest();
  EXPECT_TRUE(second.remembered);
  EXPECT_EQ(second.text, first.text);
  struct stat info = {};
  ASSERT_EQ(::stat(OnlyFile().c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0600u);
  ASSERT_EQ(::stat(folder().c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0700u);
}

TEST_F(RememberedDigest, AChangedFileIsDigestedAnew) {
  const WeightsDigest first = Digest();
  bytes_[500'000] ^= std::byte{1};  // where no sample is taken
  Write();
  const WeightsDigest second = Digest();
  EXPECT_FALSE(second.remembered);
  EXPECT_NE(second.text, first.text);
}

// Even where all that the file system tells is the same: another look at the content.
TEST_F(RememberedDigest, SamplesAreCompared) {
  const WeightsDigest first = Digest();
  bytes_.back() ^= std::byte{1};  // the mapping shows it, the file's times don't
  const WeightsDigest second = Digest();
  EXPECT_FALSE(second.remembered);
  EXPECT_NE(second.text, first.text);
}

TEST_F(RememberedDigest, WhatLiesThereIsNotTrusted) {
  const std::string right = Digest().text;
  const std::string file = OnlyFile();
  std::ifstream in(file);
  const std::string line((std::istreambuf_iterator<char>(in)), std::istreambuf_iterator<char>());
  for (size_t at = 0; at < line.size(); ++at) {
    std::string changed = line;
    changed[at] = static_cast<char>(changed[at] ^ 1);
    std::ofstream(file, std::ios::trunc) << changed;
    const WeightsDigest digest = Digest();
    EXPECT_FALSE(digest.remembered) << at;
    EXPECT_EQ(digest.text, right) << at;
  }
  for (const std::string& content : {std::string(), std::string("x"), std::string(100'000, 'y'), line + line}) {
    std::ofstream(file, std::ios::trunc) << content;
    EXPECT_EQ(Digest().text, right);
  }
  std::filesystem::remove(file);
  ASSERT_EQ(::mkfifo(file.c_str(), 0600), 0);
  EXPECT_EQ(Digest().text, right) << "no hang";
}

TEST_F(RememberedDigest, SmallFilesAndNoFolderAreDigestedEveryTime) {
  struct stat info = {};
  ASSERT_EQ(::stat((path_ + "/model").c_str(), &info), 0);
  EXPECT_EQ(DigestWeights(bytes_, info, folder()).text, DigestWeights(bytes_, info, "", 1).text);
  EXPECT_FALSE(std::filesystem::exists(folder()));
}

}  // namespace
}  // namespace kvcell
