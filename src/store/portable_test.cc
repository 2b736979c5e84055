// Export files as an enemy or a bad disk would have them: never a crash, never a wrong session, nothing stored is
// touched.
#include "store/portable.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "store/bytes.h"
#include "store/segment_format.h"
#include "store/store_test_util.h"

namespace kvcell::test {
namespace {

using testing::HasSubstr;

class ExportFile : public testing::Test {
 protected:
  void SetUp() override {
    auto store = OpenStore(directory_.store());
    ASSERT_TRUE(SaveSession(*store, "a", tokens_));
    ASSERT_TRUE(store->Export("a", path_).ok());
    std::ifstream in(path_, std::ios::binary);
    whole_.assign(std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>());
    target_ = OpenStore(directory_ / "target");
    ASSERT_TRUE(SaveSession(*target_, "before", MakeTokens(9, 70)));
  }
  Status Import(const std::string& content) {
    std::ofstream(path_, std::ios::binary | std::ios::trunc) << content;
    const auto name = target_->Import(path_, "");
    return name ? OkStatus() : name.error();
  }
  // The same file with another manifest, its checksums right.
  std::string WithManifest(const std::string& manifest) const {
    uint64_t offset = 0;
    std::memcpy(&offset, whole_.data() + 16, sizeof(offset));
    ByteWriter header;
    header.Raw(std::as_bytes(std::span(whole_).first(16))).Put(offset).Put(uint64_t{manifest.size()});
    const auto digest = Checksum128(std::as_bytes(std::span(manifest)));
    header.Raw(std::as_bytes(std::span(digest))).Put(uint64_t{0});
    header.Put(Checksum64(header.bytes()));
    return std::string(reinterpret_cast<const char*>(header.bytes().data()), 64) + whole_.substr(64, offset - 64) +
           manifest;
  }
  std::string Manifest() const {
    uint64_t offset = 0;
    std::memcpy(&offset, whole_.data() + 16, sizeof(offset));
    return whole_.substr(offset);
  }

  TemporaryDirectory directory_;
  const std::string path_ = directory_ / "a.kvsession";
  const std::vector<Token> tokens_ = MakeTokens(1, 2 * 64 + 9);
  std::string whole_;
  std::unique_ptr<Store> target_;
};

// Field case D3.
TEST_F(ExportFile, TruncatedAnywhereIsRefused) {
  std::vector<size_t> sizes = {0, 1, 7, 8, 63, 64, 65, whole_.size() - 1};
  for (size_t n = 100; n < whole_.size(); n += 127) sizes.push_back(n);
  for (const size_t size : sizes) {
    const Status status = Import(whole_.substr(0, size));
    EXPECT_EQ(status.code(), StatusCode::kCorruption) << size << ": " << status.message();
    EXPECT_THAT(status.message(), HasSubstr(path_));
  }
  EXPECT_EQ(target_->List()->size(), 1u);
  EXPECT_EQ(CheckSession(*target_, "before", MakeTokens(9, 70)), "");
}

TEST_F(ExportFile, EveryFlippedByteIsRefusedOrPadding) {
  for (size_t at = 0; at < whole_.size(); ++at) {
    std::string flipped = whole_;
    flipped[at] = static_cast<char>(flipped[at] ^ (1 << (at % 8)));
    const Status status = Import(flipped);
    if (!status.ok()) continue;
    ASSERT_EQ(whole_[at], 0) << "byte " << at << " is no padding";
    ASSERT_EQ(CheckSession(*target_, "a", tokens_), "");
    ASSERT_TRUE(target_->Remove("a", false).ok());
  }
  EXPECT_EQ(CheckSession(*target_, "before", MakeTokens(9, 70)), "");
  EXPECT_TRUE(target_->Verify(VerifyTestCell)->empty());
}

// Field case D16: sizes that wrap or pass the file, with checksums that fit.
TEST_F(ExportFile, LyingManifestsAreRefused) {
  const std::string good = Manifest();
  ASSERT_TRUE(Import(WithManifest(good)).ok());
  ASSERT_TRUE(target_->Remove("a", false).ok());
  const size_t at = good.find("\"bytes\": ");
  const size_t end = good.find_first_of(",\n", at);
  for (const char* size : {"0", "-1", "2305843009213693952", "9223372036854775807", "18446744073709551615", "1e300",
                           "null", "\"9\"", "99999999999999999999999", "[]"}) {
    std::string manifest = good;
    manifest.replace(at, end - at, std::string("\"bytes\": ") + size);
    EXPECT_EQ(Import(WithManifest(manifest)).code(), StatusCode::kCorruption) << size;
  }
  for (const std::string& manifest :
       {std::string("{}"), std::string("[]"), std::string("null"), std::string(), std::string("{\"sections\":7}"),
        std::string("{\"sections\":[1,2,3,4,5,6,7,8,9,10,11]}"), std::string(200'000, '['),
        good.substr(0, good.size() / 2)}) {
    EXPECT_EQ(Import(WithManifest(manifest)).code(), StatusCode::kCorruption) << manifest.substr(0, 40);
  }
  EXPECT_EQ(target_->List()->size(), 1u);
}

TEST_F(ExportFile, OtherVersionsByteOrdersAndFiles) {
  for (const char version : {'\0', '\2', '\xff'}) {
    std::string other = whole_;
    other[8] = version;
    EXPECT_EQ(Import(other).code(), StatusCode::kMismatch);
  }
  std::string swapped = whole_;
  std::reverse(swapped.begin(), swapped.begin() + 8);
  EXPECT_THAT(Import(swapped).message(), HasSubstr("wrong byte order"));
  EXPECT_THAT(Import(std::string(1000, 'x')).message(), HasSubstr("not an exported"));
  EXPECT_EQ(target_->Import(directory_ / "none", "").error().code(), StatusCode::kNotFound);
  EXPECT_EQ(target_->Import(directory_ / "target", "").error().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(target_->Import(path_, "../x").error().code(), StatusCode::kMismatch) << "the file is looked at first";
}

TEST_F(ExportFile, RefusalsLeaveNoFilesAndReplaceIsWhole) {
  auto store = OpenStore(directory_.store());
  EXPECT_EQ(store->Export("none", directory_ / "x").code(), StatusCode::kNotFound);
  EXPECT_EQ(store->Export("a", directory_ / "no/such/place").code(), StatusCode::kNotFound);
  EXPECT_EQ(store->Export("a", directory_.store()).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(store->Export("a", directory_.store() + "/x").code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(store->Import(directory_.store() + "/store.db", "b").error().code(), StatusCode::kInvalidArgument);
  ASSERT_TRUE(store->Export("a", path_).ok()) << "over the older one";
  for (const auto& entry : std::filesystem::directory_iterator(directory_ / "")) {
    EXPECT_EQ(entry.path().string().find(".tmp"), std::string::npos) << entry.path();
  }
}

TEST(SegmentFormat, HeadersSurviveAndEveryFlippedBitIsCaught) {
  const SegmentHeader header{{1, 2, 3}, 77, 1234};
  const auto bytes = MakeSegmentHeader(header);
  ASSERT_EQ(bytes.size(), kSegmentHeaderBytes);
  ASSERT_TRUE(ParseSegmentHeader(bytes, "f"));
  EXPECT_EQ(ParseSegmentHeader(bytes, "f")->segment, 77u);
  const ExtentHeader extent{SmallShapes()[0], 5, 8192 + ExtentHeaderBytes(SmallShapes()[0]), 3};
  const auto extent_bytes = MakeExtentHeader(extent);
  ASSERT_TRUE(ParseExtentHeader(extent_bytes, 8192, "f"));
  EXPECT_FALSE(ParseExtentHeader(extent_bytes, 4096, "f")) << "a header moved elsewhere";
  const auto flip = [](std::vector<std::byte> copy, size_t bit) {
    copy[bit / 8] ^= std::byte(1u << (bit % 8));
    return copy;
  };
  for (size_t bit = 0; bit < bytes.size() * 8; ++bit) EXPECT_FALSE(ParseSegmentHeader(flip(bytes, bit), "f")) << bit;
  for (size_t bit = 0; bit < extent_bytes.size() * 8; ++bit) {
    EXPECT_FALSE(ParseExtentHeader(flip(extent_bytes, bit), 8192, "f")) << bit;
  }
  for (size_t n = 0; n < bytes.size(); ++n) EXPECT_FALSE(ParseSegmentHeader(std::span(bytes).first(n), "f"));
  for (size_t n = 0; n < extent_bytes.size(); ++n)
    EXPECT_FALSE(ParseExtentHeader(std::span(extent_bytes).first(n), 8192, "f"));
}

TEST(SegmentFormat, PlacesThatWrapHaveNoOffset) {
  const CellSetShape shape{{{0, 2, 128}, {1, 65535, 0xffffffc0}}};
  EXPECT_EQ(CellOffset(shape, {1, 4096, 4, 1}, 0, 1), 4096u + (1 * 2 + 1) * 128);
  EXPECT_EQ(CellOffset(shape, {1, 4096, 4, 1}, 1, 0), 4096u + 4 * 256 + uint64_t{65535} * 0xffffffc0);
  EXPECT_EQ(CellOffset(shape, {1, 4096, 0xffffffff, 0xfffffffe}, 1, 65535), std::nullopt);
  EXPECT_EQ(CellOffset(shape, {1, 4096, 4, 4}, 0, 0), std::nullopt);
  EXPECT_EQ(CellOffset(shape, {1, ~uint64_t{0} - 63, 4, 0}, 0, 0), std::nullopt);
  EXPECT_EQ(CellOffset(shape, {1, 4096, 0, 0}, 0, 0), std::nullopt);
  EXPECT_EQ(CellOffset(shape, {1, 4096, 4, 0}, 2, 0), std::nullopt);
}

}  // namespace
}  // namespace kvcell::test
