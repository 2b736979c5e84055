// What users and disks do to a store: each a Status with a sentence that names the file, and nothing stored is touched.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include "store/segment_format.h"
#include "store/store_test_util.h"

namespace kvcell::test {
namespace {

using testing::AllOf;
using testing::HasSubstr;

void Overwrite(const std::string& path, uint64_t offset, const std::string& bytes) {
  const int fd = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  ASSERT_GE(fd, 0) << path;
  EXPECT_EQ(::pwrite(fd, bytes.data(), bytes.size(), static_cast<off_t>(offset)), static_cast<ssize_t>(bytes.size()));
  ::close(fd);
}

std::string ReadAll(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  return {(std::istreambuf_iterator<char>(in)), std::istreambuf_iterator<char>()};
}

std::string OnlySegment(const std::string& store) {
  std::string found;
  for (const auto& entry : std::filesystem::directory_iterator(store + "/segments")) found = entry.path().string();
  return found;
}

// A closed store with session "a" of three blocks and a tail.
class DamagedStore : public testing::Test {
 protected:
  void SetUp() override {
    auto store = OpenStore(directory_.store());
    ASSERT_TRUE(SaveSession(*store, "a", tokens_));
  }
  Status OpenStatus() {
    const auto store = Store::Open(directory_.store(), {});
    return store ? OkStatus() : store.error();
  }
  std::string index() const { return directory_.store() + "/store.db"; }

  TemporaryDirectory directory_;
  const std::vector<Token> tokens_ = MakeTokens(1, 3 * 64 + 9);
};

// Field case D27: versions 0, 2 and 255 of each format; the file is not altered.
TEST_F(DamagedStore, OtherIndexVersionsAreRefusedUntouched) {
  for (const char version : {'\0', '\3', '\xff'}) {
    Overwrite(index(), 60, std::string{0, 0, 0, version});
    const std::string before = ReadAll(index());
    const Status status = OpenStatus();
    EXPECT_EQ(status.code(), StatusCode::kMismatch);
    EXPECT_THAT(status.message(), HasSubstr("store.db"));
    EXPECT_EQ(ReadAll(index()), before);
  }
  Overwrite(index(), 60, std::string{0, 0, 0, 2});
  EXPECT_TRUE(OpenStatus().ok());
}

TEST_F(DamagedStore, OtherSegmentVersionsOrByteOrderEndTheBlocksAndAreKept) {
  const std::string segment = OnlySegment(directory_.store());
  const std::string good = ReadAll(segment).substr(0, 64);
  std::string swapped = good;
  std::reverse(swapped.begin(), swapped.begin() + 8);
  for (const std::string& header :
       {std::string(good).replace(8, 1, "\2"), std::string(good).replace(8, 1, "\3"),
        std::string(good).replace(8, 1, 1, '\0'), swapped, std::string(good).replace(0, 1, "X"),
        std::string(good).replace(40, 1, 1, '\x55')}) {
    Overwrite(segment, 0, header);
    const std::string before = ReadAll(segment);
    {
      auto store = OpenStore(directory_.store());
      const auto record = store->Load("a");
      ASSERT_TRUE(record) << record.error().message();
      EXPECT_TRUE(record->blocks.empty());
      EXPECT_EQ(record->tokens, tokens_);
      EXPECT_THAT(record->damage, HasSubstr(segment));
      if (header == swapped) {
        EXPECT_THAT(record->damage, HasSubstr("wrong byte order"));
      }
      EXPECT_FALSE(store->Verify(VerifyTestCell)->empty());
    }
    EXPECT_EQ(ReadAll(segment), before);
  }
}

// What a process stores into a file that has no name any more would be lost, and it would never hear of that.
TEST_F(DamagedStore, AnIndexRemovedUnderARunningProcessIsToldAtTheNextSave) {
  auto store = OpenStore(directory_.store());
  for (const char* part : {"", "-wal", "-shm"}) std::filesystem::remove(index() + part);
  const auto saved = SaveSession(*store, "b", tokens_);
  ASSERT_FALSE(saved);
  EXPECT_EQ(saved.error().code(), StatusCode::kIoError);
  EXPECT_THAT(saved.error().message(), AllOf(HasSubstr("store.db"), HasSubstr("removed")));
  // Another store took its place.
  const auto other = OpenStore(directory_.store());
  EXPECT_TRUE(SaveSession(*other, "c", tokens_));
  EXPECT_FALSE(SaveSession(*store, "b", tokens_));
}

TEST_F(DamagedStore, GarbageForAnIndexIsRefusedAndLeft) {
  for (const std::string& garbage :
       {std::string(5000, 'x'), std::string("short"), std::string(100, '\0'), std::string("SQLite format 3\0", 16)}) {
    std::filesystem::remove_all(directory_.store() + "/store.db-wal");
    std::ofstream(index(), std::ios::binary | std::ios::trunc) << garbage;
    const Status status = OpenStatus();
    EXPECT_EQ(status.code(), StatusCode::kCorruption) << status.message();
    EXPECT_THAT(status.message(), HasSubstr("store.db"));
    EXPECT_EQ(ReadAll(index()), garbage);
  }
}

// Field case D3, for the index: never a crash; either refused, or what is still whole is served and nothing else.
TEST_F(DamagedStore, TruncatedIndex) {
  const std::string whole = ReadAll(index());
  std::vector<size_t> sizes = {1, 7, 15, 16, 99, 100, 101, whole.size() - 1};
  for (size_t n = 4096; n < whole.size(); n += 4096) sizes.push_back(n);
  for (const size_t size : sizes) {
    std::filesystem::remove(index() + "-wal");
    std::filesystem::remove(index() + "-shm");
    std::ofstream(index(), std::ios::binary | std::ios::trunc) << whole.substr(0, size);
    auto store = Store::Open(directory_.store(), {});
    if (!store) {
      EXPECT_THAT(store.error().message(), HasSubstr("store.db"));
      continue;
    }
    const auto record = (*store)->Load("a");
    if (record && record->damage.empty()) {
      EXPECT_EQ(CheckSession(**store, "a", tokens_), "") << size;
    }
    (void)(*store)->List();
    (void)(*store)->Verify(VerifyTestCell);
    (void)(*store)->Stats();
  }
}

// Bits of the index turned over, one byte in every so many: never a crash, never a wrong session.
TEST_F(DamagedStore, FlippedIndexBytesNeverServeAWrongSession) {
  const std::string whole = ReadAll(index());
  const std::string segment = OnlySegment(directory_.store());
  const std::string cells = ReadAll(segment);
  int caught = 0;
  for (size_t at = 0; at < whole.size(); at += 61) {
    std::string flipped = whole;
    flipped[at] = static_cast<char>(flipped[at] ^ (1 << (at % 8)));
    std::filesystem::remove(index() + "-wal");
    std::filesystem::remove(index() + "-shm");
    std::ofstream(index(), std::ios::binary | std::ios::trunc) << flipped;
    std::ofstream(segment, std::ios::binary | std::ios::trunc) << cells;
    auto store = Store::Open(directory_.store(), {});
    if (!store) {
      ++caught;
      continue;
    }
    const auto record = (*store)->Load("a");
    if (!record || !record->damage.empty()) {
      ++caught;
      continue;
    }
    ASSERT_EQ(CheckSession(**store, "a", tokens_), "") << "byte " << at;
  }
  EXPECT_GT(caught, 20);
}

TEST_F(DamagedStore, EveryFlippedBitOfAnExtentIsFound) {
  const std::string segment = OnlySegment(directory_.store());
  auto store = OpenStore(directory_.store());
  ASSERT_TRUE(store->Verify(VerifyTestCell)->empty());
  const std::string whole = ReadAll(segment);
  int found = 0;
  for (size_t at = kPageBytes; at < whole.size(); ++at) {
    if (at % 7 != 0 && at > kPageBytes + 256) continue;  // every byte of the first header, one in seven of the rest
    std::string byte(1, static_cast<char>(whole[at] ^ (1 << (at % 8))));
    Overwrite(segment, at, byte);
    const auto damaged = store->Verify(VerifyTestCell);
    ASSERT_TRUE(damaged);
    if (damaged->empty()) {
      EXPECT_EQ(whole[at], 0) << "byte " << at << " is no padding";
    } else {
      ++found;
      EXPECT_EQ(damaged->front().path, segment);
      EXPECT_LE(damaged->front().offset, at);
    }
    Overwrite(segment, at, whole.substr(at, 1));
  }
  EXPECT_GT(found, 300);
  EXPECT_TRUE(store->Verify(VerifyTestCell)->empty());
}

TEST_F(DamagedStore, MissingOrShortSegmentIsAMissNotACrash) {
  const std::string segment = OnlySegment(directory_.store());
  const auto shapes = SmallShapes();
  {
    auto store = OpenStore(directory_.store());
    const auto record = store->Load("a");
    std::filesystem::resize_file(segment, kPageBytes + 300);  // under a running process
    std::vector<std::byte> cell(128);
    const Status status = store->ReadCells(shapes[0], *record->blocks[2].places[0], 0, 1, 1, cell.data());
    EXPECT_EQ(status.code(), StatusCode::kCorruption);
    EXPECT_THAT(status.message(), HasSubstr(segment));
    const auto again = store->Load("a");
    ASSERT_TRUE(again);
    EXPECT_TRUE(again->blocks.empty());
    EXPECT_THAT(again->damage, HasSubstr("block 0"));
  }
  std::filesystem::remove(segment);
  auto store = OpenStore(directory_.store());
  const auto record = store->Load("a");
  ASSERT_TRUE(record);
  EXPECT_THAT(record->damage, HasSubstr("missing"));
  ASSERT_TRUE(SaveSession(*store, "a", tokens_)) << "and it can be saved anew";
  EXPECT_EQ(CheckSession(*store, "a", tokens_), "");
}

TEST_F(DamagedStore, ADamagedBlockIsReplacedOnceReported) {
  auto store = OpenStore(directory_.store());
  const auto record = store->Load("a");
  const auto shapes = SmallShapes();
  const auto [path, offset] = store->Locate(shapes[0], *record->blocks[1].places[0], 0, 0);
  Overwrite(path, offset, "damage");
  EXPECT_NE(CheckSession(*store, "a", tokens_), "");
  store->ReportDamage(*record->blocks[1].places[0]);
  for (const auto& block : record->blocks) store->Release(block);
  ASSERT_TRUE(SaveSession(*store, "a", tokens_));
  EXPECT_EQ(CheckSession(*store, "a", tokens_), "");
  EXPECT_TRUE(store->Verify(VerifyTestCell)->empty());
}

// Field cases D22, D28.
TEST(StoreErrors, PathsThatCannotBeAStore) {
  TemporaryDirectory directory;
  const auto refused = [](const std::string& path, StatusCode code) {
    const auto store = Store::Open(path, {});
    ASSERT_FALSE(store) << path;
    EXPECT_EQ(store.error().code(), code) << store.error().message();
    EXPECT_THAT(store.error().message(), HasSubstr(path));
  };
  std::ofstream(directory / "file") << "text";
  refused(directory / "file", StatusCode::kInvalidArgument);
  refused(directory / "file/below", StatusCode::kInvalidArgument);
  ASSERT_EQ(::mkfifo((directory / "fifo").c_str(), 0600), 0);
  refused(directory / "fifo", StatusCode::kInvalidArgument);
  std::filesystem::create_directory(directory / "real");
  std::filesystem::create_symlink(directory / "real", directory / "link");
  refused(directory / "link", StatusCode::kInvalidArgument);
  refused("", StatusCode::kInvalidArgument);
  StoreOptions existing;
  existing.create = false;
  EXPECT_EQ(Store::Open(directory / "none", existing).error().code(), StatusCode::kNotFound);
  EXPECT_EQ(Store::Open(directory / "real", existing).error().code(), StatusCode::kNotFound);
  EXPECT_FALSE(std::filesystem::exists(directory / "none"));
  EXPECT_TRUE(std::filesystem::is_empty(directory / "real"));
}

TEST(StoreErrors, WhatLiesInTheDirectoryIsNotFollowedAndDoesNotHang) {
  TemporaryDirectory directory;
  for (const char* name : {"store.db", "open.lock", "segments", "locks"}) {
    for (const bool fifo : {true, false}) {
      std::filesystem::remove_all(directory.store());
      std::filesystem::create_directory(directory.store());
      const std::string path = directory.store() + "/" + name;
      std::ofstream(directory / "outside") << "untouched";
      if (fifo) {
        ASSERT_EQ(::mkfifo(path.c_str(), 0600), 0);
      } else {
        std::filesystem::create_symlink(directory / "outside", path);
      }
      const auto store = Store::Open(directory.store(), {});
      ASSERT_FALSE(store) << path;
      EXPECT_EQ(store.error().code(), StatusCode::kInvalidArgument) << store.error().message();
      EXPECT_THAT(store.error().message(), HasSubstr(path));
      EXPECT_EQ(ReadAll(directory / "outside"), "untouched");
    }
  }
  std::filesystem::remove_all(directory.store());
  auto store = OpenStore(directory.store());
  ASSERT_EQ(::mkfifo((directory.store() + "/segments/0000000000000001.kvs").c_str(), 0600), 0);
  ASSERT_TRUE(SaveSession(*store, "a", MakeTokens(1, 64)));
  store = OpenStore(directory.store());
  EXPECT_EQ(CheckSession(*store, "a", MakeTokens(1, 64)), "");
}

TEST(StoreErrors, AnotherUsersDirectories) {
  if (::getuid() != 0) GTEST_SKIP() << "needs the right to become another user";
  TemporaryDirectory directory;
  const auto tokens = MakeTokens(1, 130);
  ASSERT_TRUE(SaveSession(*OpenStore(directory.store()), "a", tokens));
  std::filesystem::permissions(directory / "", std::filesystem::perms(0755));
  const pid_t child = ::fork();
  if (child == 0) {
    if (::setgid(65534) != 0 || ::setuid(65534) != 0) ::_exit(9);
    const auto secret = Store::Open(directory.store(), {});
    if (secret || secret.error().code() != StatusCode::kPermission) ::_exit(1);
    const auto unwritable = Store::Open(directory / "new", {});
    if (unwritable || unwritable.error().code() != StatusCode::kPermission) ::_exit(2);
    ::_exit(0);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  EXPECT_EQ(status, 0) << WEXITSTATUS(status);
  for (const auto& entry : std::filesystem::recursive_directory_iterator(directory.store())) {
    std::filesystem::permissions(entry.path(),
                                 entry.is_directory() ? std::filesystem::perms(0555) : std::filesystem::perms(0444));
  }
  std::filesystem::permissions(directory.store(), std::filesystem::perms(0555));
  const pid_t reader = ::fork();
  if (reader == 0) {
    if (::setgid(65534) != 0 || ::setuid(65534) != 0) ::_exit(9);
    const auto writer = Store::Open(directory.store(), {});
    if (writer || writer.error().code() != StatusCode::kPermission) ::_exit(3);
    StoreOptions options;
    options.read_only = true;
    auto store = Store::Open(directory.store(), options);
    if (!store) {
      fmt::print(stderr, "{}\n", store.error().message());

      ::_exit(4);
    }
    if (!CheckSession(**store, "a", tokens).empty()) ::_exit(5);
    if ((*store)->Remove("a", false).code() != StatusCode::kPermission) ::_exit(6);
    ::_exit(0);
  }
  ::waitpid(reader, &status, 0);
  EXPECT_EQ(status, 0) << WEXITSTATUS(status);
}

// Field case H5: modes at creation whatever the umask, and names that tell nothing.
TEST(StoreErrors, OnlyTheOwnerReadsWhateverTheUmask) {
  for (const mode_t mask : {0000u, 0022u, 0777u}) {
    TemporaryDirectory directory;
    const mode_t old = ::umask(mask);
    auto store = OpenStore(directory.store());
    const auto lock = store->LockSession("telling name");
    EXPECT_TRUE(SaveSession(*store, "telling name", MakeTokens(1, 300)));
    EXPECT_TRUE(store->Export("telling name", directory / "file.export").ok());
    ::umask(old);
    int files = 0;
    for (const auto& entry : std::filesystem::recursive_directory_iterator(directory.store())) {
      const auto mode = static_cast<unsigned>(entry.status().permissions());
      EXPECT_EQ(mode, entry.is_directory() ? 0700u : 0600u) << entry.path();
      EXPECT_EQ(entry.path().string().find("telling"), std::string::npos);
      ++files;
    }
    EXPECT_GE(files, 8);
    EXPECT_EQ(static_cast<unsigned>(std::filesystem::status(directory.store()).permissions()), 0700u);
    EXPECT_EQ(static_cast<unsigned>(std::filesystem::status(directory / "file.export").permissions()), 0600u);
  }
}

// Field case C2.
TEST(StoreErrors, LoadingAMissingNameChangesNothing) {
  TemporaryDirectory directory;
  auto store = OpenStore(directory.store());
  ASSERT_TRUE(SaveSession(*store, "a", MakeTokens(1, 300)));
  const auto missing = store->Load("nope.bin");
  ASSERT_FALSE(missing);
  EXPECT_EQ(missing.error().code(), StatusCode::kNotFound);
  EXPECT_THAT(missing.error().message(), HasSubstr("nope.bin"));
  EXPECT_EQ(store->Remove("nope.bin", true).code(), StatusCode::kNotFound);
  EXPECT_EQ(CheckSession(*store, "a", MakeTokens(1, 300)), "");
}

TEST(StoreErrors, SessionNames) {
  for (const char* name : {"a", "with space", "sé", "\xf0\x9f\x98\x80", "...", "~", "a.b-c_d:e"})
    EXPECT_TRUE(CheckSessionName(name).ok()) << name;
  EXPECT_TRUE(CheckSessionName(std::string(128, 'x')).ok());
  const std::vector<std::string> refused = {"",
                                            ".",
                                            "..",
                                            "../x",
                                            "a/b",
                                            "a\\b",
                                            "a\nb",
                                            std::string("a\0b", 3),
                                            "\x7f",
                                            "\xc2\x85",
                                            "\xff",
                                            "\xc0\xaf",
                                            "\xed\xa0\x80",
                                            "\xf5\x80\x80\x80",
                                            "\xe2\x82",
                                            std::string(129, 'x')};
  for (const auto& name : refused) EXPECT_EQ(CheckSessionName(name).code(), StatusCode::kInvalidArgument) << name;
  TemporaryDirectory directory;
  auto store = OpenStore(directory.store());
  for (const auto& name : refused) {
    EXPECT_EQ(SaveSession(*store, name, MakeTokens(1, 10)).error().code(), StatusCode::kInvalidArgument);
    EXPECT_EQ(store->Load(name).error().code(), StatusCode::kInvalidArgument);
    EXPECT_EQ(store->LockSession(name).error().code(), StatusCode::kInvalidArgument);
  }
}

TEST(StoreErrors, IdentityDifferenceNamesTheField) {
  const Identity one = {{"weights", "3f"}, {"codec", "i4"}};
  EXPECT_EQ(IdentityDifference(one, one), std::nullopt);
  EXPECT_EQ(IdentityDifference(one, {{"weights", "3f"}, {"codec", "i8"}}), "codec: stored i4, now i8");
  EXPECT_EQ(IdentityDifference(one, {{"weights", "3f"}}), "codec: stored i4, now absent");
  EXPECT_EQ(IdentityDifference({{"weights", "3f"}}, one), "codec: stored absent, now i4");
  EXPECT_TRUE(IdentityDifference(one, {{"codec", "i4"}, {"weights", "3f"}}).has_value());
}

// Field case D16: places that can't be are refused, whatever they sum up to.
TEST(StoreErrors, AbsurdPlacesAreRefused) {
  TemporaryDirectory directory;
  auto store = OpenStore(directory.store());
  auto saved = SaveSession(*store, "a", MakeTokens(1, 300));
  ASSERT_TRUE(saved);
  const auto shapes = SmallShapes();
  std::vector<std::byte> cell(4096);
  const BlockPlace good = *saved->blocks[0].places[0];
  for (const uint64_t offset : {uint64_t{0} - 64, uint64_t{1} << 63, (uint64_t{1} << 62) - 64, uint64_t{1} << 61}) {
    BlockPlace place = good;
    place.offset = offset;
    EXPECT_FALSE(store->ReadCells(shapes[0], place, 0, 0, 1, cell.data()).ok());
    EXPECT_FALSE(store->ReadRun(shapes[0], place, 0, 1, cell.data()).ok());
  }
  BlockPlace place = good;
  place.index = place.n_blocks;
  EXPECT_EQ(store->ReadCells(shapes[0], place, 0, 0, 1, cell.data()).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(store->ReadCells(shapes[0], good, 9, 0, 1, cell.data()).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(store->ReadCells(shapes[0], good, 0, 1, 2, cell.data()).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(store->ReadRun(shapes[0], good, 0, good.n_blocks + 1, cell.data()).code(), StatusCode::kInvalidArgument);
  const CellSetShape huge{std::vector<CellSetShape::Layer>(60000, {0, 65535, 0xffffffc0})};
  const auto never = [](size_t, uint32_t, uint16_t) -> const std::byte* { return nullptr; };
  EXPECT_FALSE(store->CreateCells(huge, 0xffffffff, never));
  EXPECT_FALSE(store->CreateCells(CellSetShape{{{0, 1, 65}}}, 1, never));
  EXPECT_FALSE(store->CreateCells(CellSetShape{}, 1, never));
  saved->blocks[0].places[0]->offset += 64;
  saved->blocks[0].key[0] ^= 1;
  EXPECT_EQ(store->Commit(&*saved, shapes.data()).code(), StatusCode::kInvalidArgument) << "a place that nobody holds";
  EXPECT_EQ(CheckSession(*store, "a", MakeTokens(1, 300)), "");
}

// Field case D20: two blocks with one key are told apart by their tokens.
TEST(StoreErrors, CollidingKeysDoNotShare) {
  TemporaryDirectory directory;
  auto store = OpenStore(directory.store());
  const auto shapes = SmallShapes();
  const BlockKey same{};
  std::array<SessionRecord, 2> records = {MakeSession("one", MakeTokens(1, 64)), MakeSession("two", MakeTokens(2, 64))};
  for (auto& record : records) {
    ASSERT_TRUE(AppendBlocks(*store, &record, 0, 1).ok());
    record.blocks[0].key = same;
    ASSERT_TRUE(store->Commit(&record, shapes.data()).ok());
  }
  EXPECT_EQ(store->Stats()->blocks, 2);
  for (const auto& record : records) {
    const auto loaded = store->Load(record.name);
    ASSERT_TRUE(loaded);
    ASSERT_EQ(loaded->blocks.size(), 1u) << loaded->damage;
    EXPECT_EQ(loaded->blocks[0].places[0]->offset, record.blocks[0].places[0]->offset);
  }
  EXPECT_NE(records[0].blocks[0].places[0]->offset, records[1].blocks[0].places[0]->offset);
  const auto tokens = MakeTokens(2, 64);
  const auto found = store->FindBlock(same, std::span(tokens).first<64>());
  ASSERT_TRUE(found && *found);
  EXPECT_EQ((*found)->places[0]->offset, records[1].blocks[0].places[0]->offset);
}

// Field case D15: cells on both sides of 2^31 and 2^32 and beyond, in a sparse file.
TEST(StoreErrors, OffsetsBeyond32Bits) {
  TemporaryDirectory directory;
  StoreOptions options;
  options.segment_bytes = uint64_t{1} << 40;
  std::vector<std::string> names;
  {
    auto store = OpenStore(directory.store(), options);
    ASSERT_TRUE(SaveSession(*store, "0", MakeTokens(0, 128)));
    names.push_back("0");
    for (const uint64_t size : {(uint64_t{1} << 31) - 4096, (uint64_t{1} << 32) - 4096, uint64_t{5} << 30}) {
      const std::string segment = OnlySegment(directory.store());
      if (::truncate(segment.c_str(), static_cast<off_t>(size)) != 0) {
        GTEST_SKIP() << "no sparse file of " << size << " bytes here";
      }
      names.push_back(fmt::format("{}", size));
      const auto saved = SaveSession(*store, names.back(), MakeTokens(static_cast<int>(names.size()), 128));
      ASSERT_TRUE(saved) << saved.error().message();
      EXPECT_GE(saved->blocks[0].places[0]->offset, size);
    }
    for (size_t i = 0; i < names.size(); ++i) {
      EXPECT_EQ(CheckSession(*store, names[i], MakeTokens(i == 0 ? 0 : static_cast<int>(i + 1), 128)), "") << names[i];
    }
  }
  auto store = OpenStore(directory.store(), options);
  EXPECT_TRUE(store->Verify(VerifyTestCell)->empty());
  ASSERT_TRUE(store->Remove(names.back(), true).ok());
}

}  // namespace
}  // namespace kvcell::test
