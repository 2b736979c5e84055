// Encrypted stores: nothing private lies in the clear, other keys don't open them, changed bytes are found; and all
// else is as in any store.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "store/cipher.h"
#include "store/envelope.h"
#include "store/segment_format.h"
#include "store/store_test_util.h"

namespace kvcell::test {
namespace {

using testing::HasSubstr;

const std::string kKey = "a key of a test: 32 bytes or more of it";
const std::string kOtherKey = "another one, as long and just as good.";

StoreOptions Sealed(const std::string& key = kKey) {
  StoreOptions options;
  options.key = key;
  return options;
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

template <typename T>
std::string BytesOf(const std::vector<T>& values, size_t at, size_t n) {
  return {reinterpret_cast<const char*>(values.data() + at), n * sizeof(T)};
}

// Of a session of the test: what its user would not want to be found.
std::vector<std::string> Secrets(const std::string& name, const std::vector<Token>& tokens) {
  const SessionRecord record = MakeSession(name, tokens);
  const BlockKey key = KeyAt(tokens, 0);
  return {name,
          "CELL64",
          "test-model",
          "weights",
          record.extras.substr(0, 6),
          BytesOf(tokens, 70, 4),
          BytesOf(tokens, tokens.size() - 3, 3),
          BytesOf(record.exact, 0, 64),
          std::string(reinterpret_cast<const char*>(key.data()), key.size())};
}

TEST(SealedStore, NothingPrivateLiesInTheClear) {
  const auto tokens = MakeTokens(5, 200);
  for (const bool sealed : {false, true}) {
    TemporaryDirectory directory;
    auto store = OpenStore(directory.store(), sealed ? Sealed() : StoreOptions{});
    const auto lock = store->LockSession("telling name");
    ASSERT_TRUE(SaveSession(*store, "telling name", tokens));
    ASSERT_TRUE(store->Export("telling name", directory / "exported").ok());
    for (const auto& secret : Secrets("telling name", tokens)) {
      EXPECT_EQ(AnyFileContains(directory / "", secret), !sealed) << "the test's own device: " << secret;
    }
    EXPECT_EQ(store->Stats()->encrypted, sealed);
  }
}

TEST(SealedStore, IsAStoreLikeAnyOther) {
  TemporaryDirectory directory;
  const auto a = MakeTokens(1, 5 * 64 + 17, 128), b = MakeTokens(2, 4 * 64, 128);
  {
    auto store = OpenStore(directory.store(), Sealed());
    const auto saved = SaveSession(*store, "a", a);
    ASSERT_TRUE(saved) << saved.error().message();
    ASSERT_TRUE(SaveSession(*store, "b", b));
    EXPECT_EQ(store->Stats()->blocks, 7) << "two are shared";
    EXPECT_EQ(CheckSession(*store, "a", a), "");
  }
  auto store = OpenStore(directory.store(), Sealed());
  EXPECT_EQ(CheckSession(*store, "a", a), "");
  EXPECT_EQ(CheckSession(*store, "b", b), "");
  EXPECT_TRUE(store->Verify(VerifyTestCell)->empty());
  const auto list = store->List();
  ASSERT_TRUE(list);
  ASSERT_EQ(list->size(), 2u);
  EXPECT_EQ((*list)[0].name, "a");
  EXPECT_EQ((*list)[0].model, "test-model");
  const auto found = store->FindBlock(KeyAt(b, 3), std::span(b).subspan<192, 64>());
  ASSERT_TRUE(found && *found);
  store->Release(**found);
  const auto lock = store->LockSession("a");
  EXPECT_EQ(OpenStore(directory.store(), Sealed())->LockSession("a").error().code(), StatusCode::kBusy);
  ASSERT_TRUE(store->Remove("b", true).ok());
  EXPECT_EQ(store->Load("b").error().code(), StatusCode::kNotFound);
  EXPECT_EQ(CheckSession(*store, "a", a), "");
}

TEST(SealedStore, AWrongOrMissingKeyIsOneClearError) {
  TemporaryDirectory directory;
  ASSERT_TRUE(SaveSession(*OpenStore(directory.store(), Sealed()), "a", MakeTokens(1, 100)));
  const auto refused = [&](const StoreOptions& options, StatusCode code, const std::string& says) {
    for (const bool read_only : {false, true}) {
      StoreOptions as = options;
      as.read_only = read_only;
      const auto store = Store::Open(directory.store(), as);
      ASSERT_FALSE(store);
      EXPECT_EQ(store.error().code(), code) << store.error().message();
      EXPECT_THAT(store.error().message(), HasSubstr(says));
      EXPECT_THAT(store.error().message(), HasSubstr(directory.store()));
    }
  };
  refused({}, StatusCode::kPermission, "is encrypted");
  refused(Sealed(kOtherKey), StatusCode::kPermission, "does not open");
  EXPECT_EQ(Store::Open(directory.store(), Sealed("short")).error().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(CheckSession(*OpenStore(directory.store(), Sealed()), "a", MakeTokens(1, 100)), "") << "nothing was harmed";
  const auto plain = OpenStore(directory / "plain");
  const auto store = Store::Open(directory / "plain", Sealed());
  ASSERT_FALSE(store);
  EXPECT_THAT(store.error().message(), HasSubstr("not encrypted"));
}

// Also where the unkeyed checksums of rows and cells would be right: cells at each other's places, or of another store.
TEST(SealedStore, ChangedAndMovedCellsAreFound) {
  TemporaryDirectory directory;
  const auto tokens = MakeTokens(1, 3 * 64);
  const auto shapes = SmallShapes();
  auto store = OpenStore(directory.store(), Sealed());
  const auto record = SaveSession(*store, "a", tokens);
  ASSERT_TRUE(record);
  const std::string path = OnlySegment(directory.store());
  const std::string whole = ReadAll(path);
  const auto [first_path, first] = store->Locate(shapes[0], *record->blocks[0].places[0], 0, 0);
  const auto [second_path, second] = store->Locate(shapes[0], *record->blocks[1].places[0], 0, 0);
  const auto write = [&](const std::string& bytes) { std::ofstream(path, std::ios::binary) << bytes; };
  const auto read = [&](size_t block) {
    std::vector<std::byte> cell(128);
    return store->ReadCells(shapes[0], *record->blocks[block].places[0], 0, 0, 1, cell.data());
  };
  constexpr size_t kStoredBytes = 128 + kCellSealBytes;
  for (size_t bit = 0; bit < kStoredBytes * 8; ++bit) {
    std::string changed = whole;
    changed[first + bit / 8] = static_cast<char>(changed[first + bit / 8] ^ (1 << (bit % 8)));
    write(changed);
    ASSERT_EQ(read(0).code(), StatusCode::kCorruption) << "bit " << bit;
    ASSERT_TRUE(read(1).ok());
  }
  std::string swapped = whole;
  std::swap_ranges(swapped.begin() + static_cast<ptrdiff_t>(first),
                   swapped.begin() + static_cast<ptrdiff_t>(first + kStoredBytes),
                   swapped.begin() + static_cast<ptrdiff_t>(second));
  write(swapped);
  EXPECT_EQ(read(0).code(), StatusCode::kCorruption);
  EXPECT_EQ(read(1).code(), StatusCode::kCorruption);
  write(whole);
  EXPECT_EQ(CheckSession(*store, "a", tokens), "");
}

TEST(SealedStore, EqualCellsLookDifferentEveryTime) {
  TemporaryDirectory directory;
  auto store = OpenStore(directory.store(), Sealed());
  const CellSetShape shape{{{0, 1, 64}}};
  const std::vector<std::byte> cell(64, std::byte{7});
  const auto places = store->CreateCells(shape, 2, [&](size_t, uint32_t, uint16_t) { return cell.data(); });
  ASSERT_TRUE(places);
  const std::string bytes = ReadAll(OnlySegment(directory.store()));
  const auto at = [&](size_t i) { return bytes.substr(store->Locate(shape, (*places)[i], 0, 0).second, 64); };
  EXPECT_NE(at(0), at(1));
}

class SealedExport : public testing::Test {
 protected:
  void SetUp() override {
    auto store = OpenStore(directory_.store(), Sealed());
    ASSERT_TRUE(SaveSession(*store, "a", tokens_));
    const Status exported = store->Export("a", path_);
    ASSERT_TRUE(exported.ok()) << exported.message();
    whole_ = ReadAll(path_);
    target_ = OpenStore(directory_ / "target", Sealed());
  }
  Status Import(Store& store, const std::string& content) {
    std::ofstream(path_, std::ios::binary | std::ios::trunc) << content;
    const auto name = store.Import(path_, "");
    return name ? OkStatus() : name.error();
  }

  TemporaryDirectory directory_;
  const std::string path_ = directory_ / "a.kvsession";
  const std::vector<Token> tokens_ = MakeTokens(1, 120 * 64 + 9);  // more than one chunk
  std::string whole_;
  std::unique_ptr<Store> target_;
};

TEST_F(SealedExport, ComesBackWithTheKeyAndNotWithout) {
  ASSERT_GT(whole_.size(), kEnvelopeChunkBytes + 1000);
  const Status imported = Import(*target_, whole_);
  ASSERT_TRUE(imported.ok()) << imported.message();
  EXPECT_EQ(CheckSession(*target_, "a", tokens_), "");
  auto plain = OpenStore(directory_ / "plain");
  EXPECT_EQ(Import(*plain, whole_).code(), StatusCode::kPermission);
  auto other = OpenStore(directory_ / "other", Sealed(kOtherKey));
  EXPECT_EQ(Import(*other, whole_).code(), StatusCode::kPermission);
  ASSERT_TRUE(SaveSession(*plain, "p", MakeTokens(3, 70)));
  ASSERT_TRUE(plain->Export("p", path_).ok());
  ASSERT_TRUE(target_->Import(path_, "")) << "a plain one comes in, and is encrypted from then on";
  EXPECT_EQ(CheckSession(*target_, "p", MakeTokens(3, 70)), "");
}

TEST_F(SealedExport, ChangedOrCutAnywhereIsRefused) {
  std::vector<size_t> sizes = {8,
                               63,
                               64,
                               kEnvelopeHeaderBytes - 1,
                               kEnvelopeHeaderBytes,
                               whole_.size() - 1,
                               kEnvelopeHeaderBytes + kEnvelopeChunkBytes + kSealBytes};
  for (const size_t size : sizes) EXPECT_FALSE(Import(*target_, whole_.substr(0, size)).ok()) << size;
  EXPECT_FALSE(Import(*target_, whole_ + "x").ok());
  size_t step = 1;
  for (size_t at = 0; at < whole_.size(); at += step) {
    if (at >= 300) step = 331;
    std::string flipped = whole_;
    flipped[at] = static_cast<char>(flipped[at] ^ (1 << (at % 8)));
    ASSERT_FALSE(Import(*target_, flipped).ok()) << "byte " << at;
  }
  EXPECT_TRUE(target_->List()->empty());
}

TEST(Cipher, OnlyTheSameBytesForTheSamePlaceOpen) {
  const std::array<uint8_t, 16> salt = {1, 2, 3};
  std::vector<std::byte> box;
  const auto cipher = Cipher::Make(kKey, salt, &box);
  ASSERT_TRUE(cipher);
  const auto about = [](uint64_t place) {
    SealedFor for_place;
    for_place.Put(place);
    return for_place;
  };
  const std::vector<std::byte> plain(50, std::byte{9});
  auto sealed = (*cipher)->Seal(plain, about(1));
  EXPECT_EQ((*cipher)->Unseal(sealed, about(1)), plain);
  EXPECT_FALSE((*cipher)->Unseal(sealed, about(2)));
  EXPECT_FALSE((*cipher)->Unseal(std::span(sealed).first(20), about(1)));
  for (size_t bit = 0; bit < sealed.size() * 8; ++bit) {
    sealed[bit / 8] ^= std::byte(1u << (bit % 8));
    EXPECT_FALSE((*cipher)->Unseal(sealed, about(1))) << bit;
    sealed[bit / 8] ^= std::byte(1u << (bit % 8));
  }
  const auto again = Cipher::Open(kKey, salt, box, "the test");
  ASSERT_TRUE(again);
  EXPECT_EQ((*again)->Unseal(sealed, about(1)), plain);
  EXPECT_EQ((*again)->Name(plain), (*cipher)->Name(plain));
  EXPECT_EQ(Cipher::Open(kOtherKey, salt, box, "the test").error().code(), StatusCode::kPermission);
  EXPECT_EQ(Cipher::Open(kKey, std::array<uint8_t, 16>{9}, box, "the test").error().code(), StatusCode::kPermission);
  const auto stranger = Cipher::Make(kKey, salt, &box);
  EXPECT_FALSE((*stranger)->Unseal(sealed, about(1))) << "each store has keys of its own";
}

}  // namespace
}  // namespace kvcell::test
