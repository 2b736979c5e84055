// The system-call seam and what stands on it: complete reads and writes, exact modes, no links followed, errors in
// words.
#include "base/file.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <stdlib.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <filesystem>
#include <string>
#include <vector>

#include "base/checksum.h"
#include "base/clock.h"
#include "base/memory_probe.h"

namespace kvcell {
namespace {

using testing::HasSubstr;

class FileTest : public testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = (std::filesystem::temp_directory_path() / "kvcell-base-XXXXXX").string();
    directory_ = ::mkdtemp(pattern.data());
  }
  void TearDown() override { std::filesystem::remove_all(directory_); }
  Result<File> Open(const std::string& name, int flags, SystemCalls& calls = SystemCalls::Real()) {
    const std::string path = directory_ + "/" + name;
    return File::Open(calls, AT_FDCWD, path, flags, 0600, path);
  }
  std::string directory_;
};

std::span<const std::byte> Bytes(const std::string& text) { return std::as_bytes(std::span(text)); }

// Does one byte at a time and says 0 at a chosen call.
class ShortCalls : public SystemCalls {
 public:
  int stuck_at = -1;
  int made = 0;
  ssize_t PRead(int fd, void* to, size_t, off_t offset) override { return SystemCalls::PRead(fd, to, 1, offset); }
  ssize_t PWrite(int fd, const void* from, size_t, off_t offset) override {
    return made++ == stuck_at ? 0 : SystemCalls::PWrite(fd, from, 1, offset);
  }
};

TEST_F(FileTest, ShortReadsAndWritesAreCompleted) {
  ShortCalls calls;
  const auto file = Open("f", O_RDWR | O_CREAT, calls);
  ASSERT_TRUE(file) << file.error().message();
  const std::string text = "one byte at a time";
  ASSERT_TRUE(file->WriteAt(3, Bytes(text)).ok());
  std::string back(text.size() + 10, '\0');
  const auto n = file->ReadAt(3, std::as_writable_bytes(std::span(back)));
  ASSERT_TRUE(n);
  EXPECT_EQ(*n, text.size()) << "what is there, up to the end";
  EXPECT_EQ(back.substr(0, *n), text);
  calls.made = 0;
  calls.stuck_at = 2;
  EXPECT_EQ(file->WriteAt(0, Bytes(text)).code(), StatusCode::kNoSpace) << "no progress is an error, not a loop";
}

TEST_F(FileTest, ModeIsExactWhateverTheUmask) {
  for (const mode_t mask : {0000u, 0022u, 0777u}) {
    const mode_t old = ::umask(mask);
    const auto file = Open(std::to_string(mask), O_RDWR | O_CREAT);
    const Status made = MakeDirectories(SystemCalls::Real(), directory_ + "/d" + std::to_string(mask) + "/e");
    ::umask(old);
    ASSERT_TRUE(file && made.ok());
    EXPECT_EQ(file->Stat()->st_mode & 0777, 0600u);
    for (const char* below : {"", "/e"}) {
      const auto status = std::filesystem::status(directory_ + "/d" + std::to_string(mask) + below);
      EXPECT_EQ(static_cast<unsigned>(status.permissions()), 0700u);
    }
  }
}

TEST_F(FileTest, LinksFifosAndDirectoriesAreRefused) {
  ASSERT_TRUE(Open("real", O_RDWR | O_CREAT));
  std::filesystem::create_symlink(directory_ + "/real", directory_ + "/link");
  ASSERT_EQ(::mkfifo((directory_ + "/fifo").c_str(), 0600), 0);
  for (const int flags : {O_RDONLY, O_RDWR, O_RDWR | O_CREAT}) {
    for (const char* name : {"link", "fifo", "."}) {
      const auto file = Open(name, flags);
      ASSERT_FALSE(file) << name;
      EXPECT_EQ(file.error().code(), StatusCode::kInvalidArgument) << file.error().message();
      EXPECT_THAT(file.error().message(), HasSubstr(directory_ + "/" + name));
    }
  }
  EXPECT_EQ(Open("none", O_RDONLY).error().code(), StatusCode::kNotFound);
  EXPECT_FALSE(Open("real", O_RDONLY | O_DIRECTORY));
}

TEST_F(FileTest, OffsetsThatDoNotFitAreErrors) {
  const auto file = Open("f", O_RDWR | O_CREAT);
  std::array<std::byte, 8> bytes{};
  for (const uint64_t offset : {uint64_t{1} << 63, ~uint64_t{0}, (uint64_t{1} << 63) - 4}) {
    EXPECT_FALSE(file->ReadAt(offset, bytes));
    EXPECT_FALSE(file->WriteAt(offset, bytes).ok());
    EXPECT_FALSE(file->Allocate(offset, 8).ok());
    EXPECT_FALSE(file->TryLock(offset, 8, LockKind::kShared));
  }
}

TEST_F(FileTest, LocksConflictBetweenOpensAndGoWithTheFile) {
  auto one = Open("f", O_RDWR | O_CREAT);
  auto two = Open("f", O_RDWR);
  EXPECT_TRUE(*one->TryLock(0, 1, LockKind::kExclusive));
  EXPECT_FALSE(*two->TryLock(0, 1, LockKind::kShared));
  EXPECT_TRUE(*two->TryLock(1, 5, LockKind::kExclusive)) << "another range";
  one->Close();
  EXPECT_TRUE(*two->TryLock(0, 1, LockKind::kExclusive));
}

TEST_F(FileTest, PunchedRangesReadAsZeros) {
  const auto file = Open("f", O_RDWR | O_CREAT);
  ASSERT_TRUE(file->Allocate(0, 16384).ok());
  ASSERT_TRUE(file->WriteAt(0, std::vector<std::byte>(16384, std::byte{1})).ok());
  const Status punched = file->PunchHole(100, 10000);
  if (punched.code() == StatusCode::kUnsupported) GTEST_SKIP() << "this file system has no holes";
  std::vector<std::byte> bytes(16384);
  ASSERT_EQ(*file->ReadAt(0, bytes), bytes.size());
  for (size_t i = 0; i < bytes.size(); ++i) ASSERT_EQ(bytes[i], std::byte{i < 100 || i >= 10100}) << i;
  ASSERT_TRUE(file->WriteZeros(0, 70000).ok());
  EXPECT_EQ(file->Stat()->st_size, 70000);
}

TEST(ErrnoStatus, NamesTheFileTheReasonAndWhatToDo) {
  const Status status = ErrnoStatus(ENOSPC, "write", "/x/y");
  EXPECT_EQ(status.code(), StatusCode::kNoSpace);
  EXPECT_EQ(status.message(),
            "cannot write /x/y: No space left on device; free some space, what was stored before is intact");
  EXPECT_EQ(ErrnoStatus(EROFS, "open", "f").code(), StatusCode::kPermission);
  EXPECT_EQ(ErrnoStatus(EIO, "sync", "f").code(), StatusCode::kIoError);
  EXPECT_EQ(ErrnoStatus(ELOOP, "open", "f").code(), StatusCode::kInvalidArgument);
}

TEST(Checksum, IsXxh3AndTheSameInPieces) {
  EXPECT_EQ(Checksum64({}), 0x2d06800538d394c2u);
  const std::string text(100'000, 'k');
  Checksum128Stream stream;
  for (size_t at = 0; at < text.size(); at += 777) stream.Update(Bytes(text.substr(at, 777)));
  EXPECT_EQ(stream.Digest(), Checksum128(Bytes(text)));
  EXPECT_EQ(Checksum128({}), (Digest128{0x99, 0xaa, 0x06, 0xd3, 0x01, 0x47, 0x98, 0xd8, 0x60, 0x01, 0xc3, 0x24, 0x46,
                                        0x8d, 0x49, 0x7f}));
}

TEST(MemoryProbe, SeesWhatTheProcessTakes) {
  const auto before = ProbeProcessMemory();
  ASSERT_TRUE(before);
  constexpr size_t kBytes = size_t{64} << 20;
  std::vector<std::byte> touched(kBytes, std::byte{1});
  const auto after = ProbeProcessMemory();
  EXPECT_GE(after->anonymous, before->anonymous + kBytes - (kBytes >> 3));
  EXPECT_GE(after->resident, after->anonymous);
  EXPECT_GE(after->peak_resident + (size_t{1} << 20), after->resident);
  EXPECT_EQ(touched[kBytes - 1], std::byte{1});
  const auto system = ProbeSystemMemory();
  ASSERT_TRUE(system);
  EXPECT_GT(system->total, system->available);
  EXPECT_GT(system->available, 0u);
  if (const auto group = ProbeCgroupMemory()) {
    EXPECT_GT(group->limit, 0u);
  }
  EXPECT_GT(UnixSeconds(), 1'700'000'000);
}

}  // namespace
}  // namespace kvcell
