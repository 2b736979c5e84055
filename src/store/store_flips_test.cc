// Every single bit of a small store turned over, index and log included: each is found by verify and by the run that
// goes on with the session, or harms nothing.
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <thread>

#include "store/head.h"
#include "store/store_test_util.h"

namespace kvcell::test {
namespace {

std::vector<Token> Saved() { return MakeTokens(1, 64 + 5); }

using Image = std::map<std::string, std::string>;  // path below the store -> content

Image ReadStore(const std::string& store) {
  Image image;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(store)) {
    if (!entry.is_regular_file() || entry.path().string().ends_with("-shm")) continue;
    std::ifstream in(entry.path(), std::ios::binary);
    image[entry.path().string().substr(store.size() + 1)] = {(std::istreambuf_iterator<char>(in)),
                                                             std::istreambuf_iterator<char>()};
  }
  return image;
}

void WriteStore(const std::string& store, const Image& image) {
  for (const char* file : {"store.db-shm", "store.db-wal"}) std::filesystem::remove(store + "/" + file);
  for (const char* folder : {"segments", "locks"}) std::filesystem::create_directories(store + "/" + folder);
  for (const auto& [path, content] : image) {
    std::ofstream(store + "/" + path, std::ios::binary | std::ios::trunc) << content;
  }
}

// A store as a process that was killed right after two saves leaves it: with a log; or closed, without.
Image MakeImage(bool killed, const std::string& key) {
  TemporaryDirectory directory;
  const pid_t child = ::fork();
  if (child == 0) {
    StoreOptions options;
    options.index_page_bytes = 512;
    options.key = key;
    auto store = Store::Open(directory.store(), options);
    if (!store || !SaveSession(**store, "s", MakeTokens(1, 64 + 2)) || !SaveSession(**store, "s", Saved())) ::_exit(1);
    if (!killed) store->reset();
    ::_exit(0);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
  return ReadStore(directory.store());
}

struct Counts {
  std::atomic<int64_t> bits, found_by_both, found_by_verify, harmless, wrong;
  std::atomic<int64_t> missed;  // the run says that something is wrong, verify doesn't
};

enum class Seen { kSame, kTold, kWrong };

Seen Resume(const std::string& path, const StoreOptions& options) {
  const auto store = Store::Open(path, options);
  if (!store) return Seen::kTold;
  const auto record = (*store)->Load("s");
  if (!record) return record.error().code() == StatusCode::kNotFound ? Seen::kWrong : Seen::kTold;
  const bool told = !record->damage.empty() || !record->notice.empty();
  for (const auto& block : record->blocks) (*store)->Release(block);
  // What is served of a damaged one is checked by CheckSession cell by cell; it must be the session's.
  const std::string difference = CheckSession(**store, "s", Saved());
  if (difference.empty() && !told) return Seen::kSame;
  if (told) return Seen::kTold;
  // A cell that fails its own check is found when it is read, as the cache does.
  return difference.find("differ") != std::string::npos && difference.find("cell of layer") == std::string::npos
             ? Seen::kWrong
             : Seen::kTold;
}

bool VerifyFinds(const std::string& path, StoreOptions options) {
  options.read_only = true;
  const auto store = Store::Open(path, options);
  if (!store) return true;
  const auto damaged = (*store)->Verify(VerifyTestCell);
  return !damaged || !damaged->empty();
}

void FlipOne(const Image& image, const std::string& file, size_t bit, const std::string& directory,
             const StoreOptions& options, Counts* counts) {
  Image flipped = image;
  std::string& content = flipped[file];
  content[bit / 8] = static_cast<char>(content[bit / 8] ^ (1 << (bit % 8)));
  WriteStore(directory, flipped);
  const bool found = VerifyFinds(directory, options);
  WriteStore(directory, flipped);
  const Seen seen = Resume(directory, options);
  ++counts->bits;
  if (seen == Seen::kWrong) {
    ++counts->wrong;
    fmt::print(stderr, "{} bit {}: served wrongly\n", file, bit);
  } else if (seen == Seen::kTold && !found) {
    ++counts->missed;
    fmt::print(stderr, "{} bit {}: told by the run, not found by verify\n", file, bit);
  } else {
    ++(seen == Seen::kTold ? counts->found_by_both : found ? counts->found_by_verify : counts->harmless);
  }
}

// `step`: one bit in so many.
void FlipAll(bool killed, const std::string& key, size_t step) {
  const Image image = MakeImage(killed, key);
  ASSERT_EQ(image.contains("store.db-wal"), killed);
  void* memory = ::mmap(nullptr, sizeof(Counts), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(memory, MAP_FAILED);
  auto* counts = new (memory) Counts{};
  StoreOptions options;
  options.key = key;
  TemporaryDirectory directory;
  {
    WriteStore(directory.store(), image);
    ASSERT_FALSE(VerifyFinds(directory.store(), options));
    WriteStore(directory.store(), image);
    ASSERT_EQ(Resume(directory.store(), options), Seen::kSame);
  }
  const unsigned workers = std::max(1u, std::thread::hardware_concurrency());
  std::vector<pid_t> children;
  for (unsigned worker = 0; worker < workers; ++worker) {
    const pid_t child = ::fork();
    if (child == 0) {
      const std::string path = directory / fmt::format("worker {}", worker);
      size_t n = 0;
      for (const auto& [file, content] : image) {
        if (file == "open.lock" || file.starts_with("locks/")) continue;  // a process number for people
        for (size_t bit = 0; bit < content.size() * 8; bit += step) {
          if (n++ % workers == worker) FlipOne(image, file, bit, path, options, counts);
        }
      }
      ::_exit(0);
    }
    children.push_back(child);
  }
  for (const pid_t child : children) {
    int status = 0;
    ::waitpid(child, &status, 0);
    EXPECT_EQ(status, 0) << "a process ended by itself";
  }
  fmt::print("{}{}: {} bits: {} found by both, {} by verify (the run serves the same), {} harmless\n",
             killed ? "with a log" : "closed", key.empty() ? "" : ", encrypted", counts->bits.load(),
             counts->found_by_both.load(), counts->found_by_verify.load(), counts->harmless.load());
  EXPECT_EQ(counts->wrong, 0);
  EXPECT_EQ(counts->missed, 0);
  EXPECT_GT(counts->found_by_both, counts->bits / 20);
  ::munmap(memory, sizeof(Counts));
}

constexpr size_t kSome = 211;  // a prime: every bit of a byte has its turn
const std::string kKey(32, 'k');

TEST(Flips, SomeBitsOfAClosedStore) { FlipAll(false, "", kSome); }
TEST(Flips, SomeBitsOfAStoreWithALog) { FlipAll(true, "", kSome); }
TEST(Flips, SomeBitsOfAnEncryptedStore) { FlipAll(true, kKey, kSome); }
TEST(Flips, SlowEveryBitOfAClosedStore) { FlipAll(false, "", 1); }
TEST(Flips, SlowEveryBitOfAStoreWithALog) { FlipAll(true, "", 1); }
TEST(Flips, SlowEveryBitOfAnEncryptedStore) { FlipAll(true, kKey, 1); }

// Field case of a log cut off or damaged at its end: SQLite goes on with what came before; the user is told.
TEST(Flips, ALostEndOfTheLogIsToldUntilSomethingIsSaved) {
  Image image = MakeImage(true, "");
  image["store.db-wal"].resize(image["store.db-wal"].size() / 2);
  TemporaryDirectory directory;
  WriteStore(directory.store(), image);
  {
    StoreOptions options;
    options.read_only = true;
    EXPECT_FALSE(OpenStore(directory.store(), options)->Verify(VerifyTestCell)->empty());
  }
  auto store = OpenStore(directory.store());
  const auto record = store->Load("s");
  EXPECT_TRUE(!record || !record->notice.empty());
  ASSERT_TRUE(SaveSession(*store, "s", Saved()));
  EXPECT_EQ(store->Load("s")->notice, "");
  store.reset();
  store = OpenStore(directory.store());
  EXPECT_EQ(CheckSession(*store, "s", Saved()), "");
  EXPECT_EQ(store->Load("s")->notice, "");
  EXPECT_TRUE(store->Verify(VerifyTestCell)->empty());
}

TEST(Flips, ALostLogIsToldUntilTheStoreIsCompacted) {
  Image image = MakeImage(true, "");
  image["store.db-wal"].clear();
  TemporaryDirectory directory;
  WriteStore(directory.store(), image);
  auto store = OpenStore(directory.store());
  const auto record = store->Load("s");
  ASSERT_FALSE(record);
  EXPECT_EQ(record.error().code(), StatusCode::kCorruption);
  ASSERT_TRUE(store->Compact());
  EXPECT_EQ(store->Load("s").error().code(), StatusCode::kNotFound);
  store.reset();
  EXPECT_EQ(OpenStore(directory.store())->Load("s").error().code(), StatusCode::kNotFound);
}

}  // namespace
}  // namespace kvcell::test
