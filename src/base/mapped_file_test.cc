// Mapped files whose pages go away: reads end as values, and signals of others reach whom they are for.
#include "base/mapped_file.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <numeric>
#include <thread>
#include <vector>

namespace kvcell {
namespace {

constexpr uint64_t kPage = 4096;

class MappedFileTest : public testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = (std::filesystem::temp_directory_path() / "kvcell-map-XXXXXX").string();
    directory_ = ::mkdtemp(pattern.data());
    path_ = directory_ + "/f";
    std::ofstream(path_, std::ios::binary) << std::string(16 * kPage, '\1');
  }
  void TearDown() override { std::filesystem::remove_all(directory_); }
  std::unique_ptr<MappedFile> Map(uint64_t bytes = 16 * kPage) {
    const auto file = File::Open(SystemCalls::Real(), AT_FDCWD, path_, O_RDONLY, 0, path_);
    EXPECT_TRUE(file) << file.error().message();
    auto mapped = MappedFile::Map(*file, bytes);
    EXPECT_TRUE(mapped) << mapped.error().message();
    return std::move(*mapped);
  }
  std::string directory_, path_;
};

// volatile: every byte is really read.
uint64_t Sum(std::span<const std::byte> bytes) {
  const volatile std::byte* at = bytes.data();
  uint64_t sum = 0;
  for (size_t i = 0; i < bytes.size(); ++i) sum += static_cast<uint64_t>(at[i]);
  return sum;
}

TEST_F(MappedFileTest, GivesTheFilesBytesAlsoWhenItsNameIsGone) {
  const auto mapped = Map();
  std::filesystem::remove(path_);
  EXPECT_EQ(Sum(mapped->bytes()), 16 * kPage);
  EXPECT_FALSE(mapped->lost());
}

TEST_F(MappedFileTest, ACutFileReadsAsZerosAndIsLost) {
  const auto mapped = Map();
  const auto other = Map();
  ASSERT_EQ(Sum(mapped->bytes().first(kPage)), kPage);
  std::filesystem::resize_file(path_, 4 * kPage);
  EXPECT_EQ(Sum(mapped->bytes().first(4 * kPage)), 4 * kPage) << "what is left can be read";
  EXPECT_FALSE(mapped->lost());
  EXPECT_EQ(Sum(mapped->bytes().subspan(4 * kPage)), 0u);
  EXPECT_TRUE(mapped->lost());
  EXPECT_FALSE(other->lost()) << "another mapping's reader is not told";
}

TEST_F(MappedFileTest, WhatAFileGrowsByIsThere) {
  const auto mapped = Map(64 * kPage);
  std::filesystem::resize_file(path_, 32 * kPage);
  EXPECT_EQ(Sum(mapped->bytes().first(32 * kPage)), 16 * kPage);
  EXPECT_FALSE(mapped->lost());
}

TEST_F(MappedFileTest, ThreadsThatReadWhileTheFileGoesAllComeToAnEnd) {
  for (int round = 0; round < 20; ++round) {
    std::ofstream(path_, std::ios::binary) << std::string(16 * kPage, '\1');
    const auto mapped = Map();
    std::atomic<bool> lost{false};
    std::vector<std::thread> readers;
    for (int i = 0; i < 4; ++i) {
      readers.emplace_back([&] {
        while (!lost) {
          const uint64_t sum = Sum(mapped->bytes());
          if (sum == 16 * kPage) continue;
          EXPECT_TRUE(mapped->lost()) << "wrong bytes that nobody is told of";
          lost = true;
        }
      });
    }
    // To nothing: a file that ends within a page reads as zeros behind its end without a signal.
    std::filesystem::resize_file(path_, 0);
    for (auto& reader : readers) reader.join();
  }
}

// In processes of their own, started anew: what handles SIGBUS there is set before the first mapping.
class MappedFileDeathTest : public MappedFileTest {
 protected:
  void SetUp() override {
    MappedFileTest::SetUp();
    GTEST_FLAG_SET(death_test_style, "threadsafe");
  }
  // Maps the file twice, once as others do, cuts it off and reads theirs.
  void ReadAForeignMappingOfACutFile() {
    const auto mapped = Map();
    const int fd = ::open(path_.c_str(), O_RDONLY | O_CLOEXEC);
    const void* foreign = ::mmap(nullptr, kPage, PROT_READ, MAP_SHARED, fd, 0);
    std::filesystem::resize_file(path_, 0);
    (void)Sum({static_cast<const std::byte*>(foreign), kPage});
    ::_exit(0);
  }
};

TEST_F(MappedFileDeathTest, ASignalThatIsNotItsOwnEndsTheProcessAsEver) {
  EXPECT_EXIT(
      {
        ::signal(SIGBUS, SIG_DFL);  // whatever a sanitizer has put there
        ReadAForeignMappingOfACutFile();
      },
      testing::KilledBySignal(SIGBUS), "");
  EXPECT_EXIT(
      {
        ::signal(SIGBUS, SIG_DFL);
        const auto mapped = Map();
        (void)::raise(SIGBUS);
        ::_exit(0);
      },
      testing::KilledBySignal(SIGBUS), "");
}

TEST_F(MappedFileDeathTest, AHandlerThatWasThereBeforeIsCalled) {
  EXPECT_EXIT(
      {
        ::signal(SIGBUS, [](int) { ::_exit(7); });
        ReadAForeignMappingOfACutFile();
      },
      testing::ExitedWithCode(7), "");
}

}  // namespace
}  // namespace kvcell
