// The store as its users see it: saving, sharing, loading, removing, sending sessions away and bringing them back.
#include "store/store.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "store/store_test_util.h"

namespace kvcell::test {
namespace {

TEST(Store, SavesAndLoadsInAnotherObject) {
  TemporaryDirectory directory;
  const auto tokens = MakeTokens(1, 10 * 64 + 17);
  {
    auto store = OpenStore(directory.store());
    ASSERT_TRUE(SaveSession(*store, "a", tokens));
    EXPECT_EQ(CheckSession(*store, "a", tokens), "");
  }
  auto store = OpenStore(directory.store());
  EXPECT_EQ(CheckSession(*store, "a", tokens), "");
  const auto damaged = store->Verify(VerifyTestCell);
  ASSERT_TRUE(damaged);
  for (const auto& cell : *damaged) ADD_FAILURE() << cell.what;
}

TEST(Store, AnySessionLengthComesBack) {
  TemporaryDirectory directory;
  auto store = OpenStore(directory.store());
  for (const size_t n : {0u, 1u, 63u, 64u, 65u, 127u, 128u, 129u}) {
    const auto name = fmt::format("of {}", n);
    const auto saved = SaveSession(*store, name, MakeTokens(static_cast<int>(n), n));
    ASSERT_TRUE(saved) << saved.error().message();
    EXPECT_EQ(CheckSession(*store, name, MakeTokens(static_cast<int>(n), n)), "");
  }
  const auto list = store->List();
  ASSERT_TRUE(list);
  EXPECT_EQ(list->size(), 8u);
}

TEST(Store, RemoveFreesSpaceAndEraseLeavesNoBytes) {
  TemporaryDirectory directory;
  {
    auto store = OpenStore(directory.store());
    ASSERT_TRUE(SaveSession(*store, "secret name", MakeTokens(5, 640)));
    ASSERT_TRUE(SaveSession(*store, "kept", MakeTokens(6, 64)));
  }
  auto store = OpenStore(directory.store());
  EXPECT_TRUE(AnyFileContains(directory.store(), "CELL576"));
  EXPECT_TRUE(AnyFileContains(directory.store(), "secret name"));
  const auto tokens = MakeTokens(5, 640);
  const std::string token_bytes(reinterpret_cast<const char*>(tokens.data() + 70), 16);
  EXPECT_TRUE(AnyFileContains(directory.store(), token_bytes));
  const Status removed = store->Remove("secret name", true);
  ASSERT_TRUE(removed.ok()) << removed.message();
  EXPECT_FALSE(AnyFileContains(directory.store(), "CELL576"));
  EXPECT_FALSE(AnyFileContains(directory.store(), "secret name"));
  EXPECT_FALSE(AnyFileContains(directory.store(), token_bytes));
  EXPECT_EQ(CheckSession(*store, "kept", MakeTokens(6, 64)), "");
}

TEST(Store, ExportAndImportUnderAnotherName) {
  TemporaryDirectory directory;
  const auto tokens = MakeTokens(3, 5 * 64 + 3);
  auto store = OpenStore(directory.store());
  ASSERT_TRUE(SaveSession(*store, "a", tokens));
  const auto path = directory / "a.kvsession";
  const Status exported = store->Export("a", path);
  ASSERT_TRUE(exported.ok()) << exported.message();
  auto other = OpenStore(directory / "other");
  const auto imported = other->Import(path, "");
  ASSERT_TRUE(imported) << imported.error().message();
  EXPECT_EQ(CheckSession(*other, "a", tokens), "");
  const auto again = other->Import(path, "");
  ASSERT_FALSE(again);
  EXPECT_EQ(again.error().code(), StatusCode::kInvalidArgument);
  ASSERT_TRUE(other->Import(path, "b"));
  EXPECT_EQ(CheckSession(*other, "b", tokens), "");
  EXPECT_EQ(other->Stats()->blocks, 5) << "the same blocks are shared";
}

}  // namespace
}  // namespace kvcell::test
