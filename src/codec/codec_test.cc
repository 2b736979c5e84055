// Codec specs as text: what is read, what is refused and why, and that the canonical text reads back.
#include "kvcell/codec.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "codec/cell_layout.h"

namespace kvcell {
namespace {

using ::testing::HasSubstr;

std::vector<SideSpec> AllSides(bool is_key) {
  std::vector<SideSpec> sides = {SideSpec{}};
  for (const uint16_t group : std::initializer_list<uint16_t>{32, 64, 128}) {
    for (const bool rotate : {false, true}) {
      for (const bool offset : {false, true}) {
        if (offset && !is_key) continue;
        const SideSpec side = {.rotate = rotate, .channel_offset = offset, .group = group};
        for (const auto type : {SideSpec::Type::kInt8, SideSpec::Type::kInt4}) {
          sides.push_back(side);
          sides.back().type = type;
        }
        sides.push_back(sides.back());
        sides.back().levels = SideSpec::Levels::kLloydMax;
      }
    }
  }
  return sides;
}

TEST(CodecText, EverySpecReadsBack) {
  for (const SideSpec& k : AllSides(true)) {
    for (const SideSpec& v : AllSides(false)) {
      const CodecSpec spec = {k, v, ""};
      const std::string text = CodecText(spec);
      const Result<CodecSpec> read = ParseCodec(text);
      ASSERT_TRUE(read) << text << ": " << read.error().message();
      EXPECT_EQ(*read, spec) << text;
      EXPECT_EQ(CodecText(*read), text);
      EXPECT_EQ(read->name, text);
      EXPECT_TRUE(MakeCellLayout(*read, 64, 128)) << text;
    }
  }
}

TEST(CodecText, PresetsReadBackUnderTheirNames) {
  ASSERT_EQ(CodecPresets().size(), 3u);
  for (const CodecPreset& preset : CodecPresets()) {
    const Result<CodecSpec> read = ParseCodec(preset.name);
    ASSERT_TRUE(read);
    EXPECT_EQ(*read, preset.spec);
    EXPECT_EQ(read->name, preset.name);
    EXPECT_EQ(*ParseCodec(CodecText(preset.spec)), preset.spec);
  }
}

TEST(CodecText, PartsMayComeInAnyOrderAndDefaultsApply) {
  const CodecSpec spec = *ParseCodec("k=int4:rot:off:lloyd:g32,v=int8");
  EXPECT_EQ(CodecText(spec), "k=int4:g32:lloyd:rot:off,v=int8:g64:sym");
}

struct Refused {
  const char* text;
  const char* names;
};

TEST(CodecText, RefusalsNameTheWordAndWhatIsAllowed) {
  const Refused cases[] = {
      {"", "f16, i8, i4"},
      {"q4_0", "'q4_0'"},
      {"I4", "'I4'"},
      {"k=f16", "k=SIDE,v=SIDE"},
      {"v=f16,k=f16", "k=SIDE,v=SIDE"},
      {"k=f16,v=f16,v=f16", "'f16,v=f16'"},
      {"k=,v=f16", "f16, int8 or int4"},
      {"k=int5,v=f16", "'int5'"},
      {"k=f16,v=int4:g16", "'g16'"},
      {"k=f16,v=int4:g16", "g32, g64 or g128"},
      {"k=f16:rot,v=f16", "f16 takes no parts"},
      {"k=f16:,v=f16", "f16 takes no parts"},
      {"k=int4:,v=f16", "''"},
      {"k=int4:g64:,v=f16", "''"},
      {"k=int4:g64:g32,v=f16", "given twice"},
      {"k=int4:sym:lloyd,v=f16", "given twice"},
      {"k=int4:rot:rot,v=f16", "given twice"},
      {"k=int8:lloyd,v=f16", "'lloyd'"},
      {"k=f16,v=int4:off", "leave it out"},
      {" i4", "' i4'"},
  };
  for (const Refused& refused : cases) {
    const Result<CodecSpec> read = ParseCodec(refused.text);
    ASSERT_FALSE(read) << refused.text;
    EXPECT_EQ(read.error().code(), StatusCode::kInvalidArgument);
    EXPECT_THAT(read.error().message(), HasSubstr(refused.names)) << refused.text;
  }
}

TEST(CodecText, HostileTextIsNotEchoedWhole) {
  const std::string text = "k=int4:" + std::string(100'000, '\x1b') + ",v=f16";
  const Result<CodecSpec> read = ParseCodec(text);
  ASSERT_FALSE(read);
  EXPECT_LT(read.error().message().size(), 400u);
  EXPECT_EQ(read.error().message().find('\x1b'), std::string::npos);
}

TEST(CodecBits, PresetsKeepTheirPromise) {
  const CodecSpec i4 = *ParseCodec("i4");
  const CodecSpec i8 = *ParseCodec("i8");
  EXPECT_LE(*CodecBitsPerElement(i4, 64, 64), 4.6);
  EXPECT_LE(*CodecBitsPerElement(i4, 128, 128), 4.5);
  EXPECT_LE(*CodecBitsPerElement(i4, 256, 256), 4.5);
  EXPECT_LE(*CodecBitsPerElement(i8, 64, 64), 8.35);
  EXPECT_LE(*CodecBitsPerElement(i8, 128, 128), 8.35);
  EXPECT_FALSE(CodecBitsPerElement(i4, 0, 64));
}

}  // namespace
}  // namespace kvcell
