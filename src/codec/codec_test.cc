// Codec specs as text: what is read, what is refused and why, and that the canonical text reads back.
#include "kvcell/codec.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "codec/cell_layout.h"
#include "kvcell/codec_plan.h"

namespace kvcell {
namespace {

using ::testing::HasSubstr;

// Every side that a text of parts can say.
std::vector<std::string> AllSides(bool is_key) {
  std::vector<std::string> sides = {"f16", "bf16", "f32", "fp8e4m3", "fp8e5m2", "tq2", "tq3:qjl", "tq4"};
  const auto add = [&](const std::string& side) {
    for (const char* rotate : {"", ":rot"}) {
      for (const char* offset : {"", ":off"}) {
        if (*offset == '\0' || is_key) sides.push_back(side + rotate + offset);
      }
    }
  };
  for (const char* group : {":g16", ":g32", ":g64", ":g128"}) {
    add(std::string("nf4") + group);
    add(std::string("fp4") + group);
    for (const char* type : {"int8", "int6", "int5", "int4", "int3", "int2"}) add(std::string(type) + group + ":sym");
    for (const char* type : {"int5", "int4", "int3", "int2"}) add(std::string(type) + group + ":lloyd");
    for (const char* type : {"int4", "int3"}) add(std::string(type) + group + ":skew");
  }
  for (const char* type : {"int4", "int3", "int2"}) {
    for (const char* group : {":g32", ":t16", ":t32", ":t64"}) {
      for (const char* levels : {":sym", ":asym", ":lloyd"}) {
        for (const char* more : {"", ":plain", ":clip", ":two", ":plain:clip:two"}) {
          sides.push_back(std::string(type) + group + levels + more);
        }
      }
    }
  }
  return sides;
}

TEST(CodecText, EverySpecReadsBack) {
  const auto check = [](const std::string& text) {
    const Result<CodecSpec> read = ParseCodec(text);
    ASSERT_TRUE(read) << text << ": " << read.error().message();
    EXPECT_EQ(CodecText(*read), text);
    EXPECT_EQ(read->name, text);
    EXPECT_TRUE(MakeCellLayout(*read, 64, 128)) << text;
  };
  for (const std::string& k : AllSides(true)) check("k=" + k + ",v=f16");
  for (const std::string& v : AllSides(false)) check("k=int4:g32:lloyd:rot:off,v=" + v);
}

TEST(CodecText, OnlyWhatNoKernelReadsIsForStudy) {
  for (const char* side :
       {"f16", "int8:g16", "int6", "int5:lloyd", "int4:g128:lloyd", "int3:skew", "int3:rot", "int2:g16"}) {
    EXPECT_TRUE(AttendedInPlace(ParseCodec(std::string("k=") + side + ",v=f16")->k)) << side;
  }
  for (const char* side : {"bf16", "f32", "fp8e4m3", "nf4", "fp4", "tq4", "tq2:qjl", "int4:asym", "int4:t32",
                           "int3:plain", "int2:clip", "int4:two"}) {
    EXPECT_FALSE(AttendedInPlace(ParseCodec(std::string("k=") + side + ",v=f16")->k)) << side;
  }
  for (const CodecPreset& preset : CodecPresets()) {
    EXPECT_TRUE(AttendedInPlace(preset.spec)) << preset.name;
  }
}

TEST(CodecText, EveryFamilysExampleReads) {
  for (const CodecFamily& family : CodecFamilies()) {
    const Result<CodecSpec> read = ParseCodec(family.example);
    ASSERT_TRUE(read) << family.example;
    EXPECT_TRUE(TypeName(read->k.type) == family.name || TypeName(read->v.type) == family.name) << family.name;
  }
}

TEST(CodecText, PresetsReadBackUnderTheirNames) {
  ASSERT_EQ(CodecPresets().size(), 6u);
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
      {"", "f16, i8, i5, i4, i43, i3"},
      {"q4_0", "'q4_0'"},
      {"I4", "'I4'"},
      {"k=f16", "k=SIDE,v=SIDE"},
      {"v=f16,k=f16", "k=SIDE,v=SIDE"},
      {"k=f16,v=f16,v=f16", "k=SIDE,v=SIDE,early-v=SIDE"},
      {"k=f16,v=f16,", "k=SIDE,v=SIDE,early-v=SIDE"},
      {"k=f16,v=f16,early-v=", "f16, int8"},
      {"k=f16,v=f16,early-v=int4:off", "leave it out"},
      {"k=f16,v=f16,early-v=int7", "side early-v names 'int7'"},
      {"k=f16,v=f16,early-v=int8,early-v=int8", "'int8,early-v=int8'"},
      {"k=,v=f16", "f16, int8"},
      {"k=int7,v=f16", "'int7'"},
      {"k=f16,v=int4:g8", "'g8'"},
      {"k=f16,v=int4:g8", "g16, g32, g64 or g128"},
      {"k=f16,v=int4:t128", "'t128'"},
      {"k=f16,v=int8:t32", "'t32'"},
      {"k=f16,v=int6:lloyd", "'lloyd'"},
      {"k=int5:asym,v=f16", "'asym'"},
      {"k=int5:skew,v=f16", "g32, g64 or g128, one of sym lloyd, rot"},
      {"k=f16,v=int2:skew", "one of sym asym lloyd, plain"},
      {"k=int4:skew:t32,v=f16", "side k has 'skew' beside groups along tokens"},
      {"k=f16,v=int3:plain:skew", "side v has 'skew' beside groups along tokens"},
      {"k=nf4:sym,v=f16", "'sym'"},
      {"k=tq4:g64,v=f16", "qjl alone"},
      {"k=bf16:rot,v=f16", "bf16 takes no parts"},
      {"k=int4:g32:t32,v=f16", "given twice"},
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

TEST(CodecText, EarlyLayersHaveTheirOwnV) {
  const char* const text = "k=int4:g64:sym,v=int3:g32:sym,early-v=int8:g64:sym";
  const CodecSpec spec = *ParseCodec(text);
  EXPECT_EQ(CodecText(spec), text);
  EXPECT_EQ(*ParseCodec(CodecText(spec)), spec);
  EXPECT_NE(spec, *ParseCodec("k=int4:g64,v=int3:g32"));
  const CodecSpec same = *ParseCodec("k=int4,v=int3,early-v=int3");
  EXPECT_EQ(same, *ParseCodec("k=int4,v=int3")) << "nothing that differs";
  EXPECT_EQ(CodecText(same), CodecText(*ParseCodec("k=int4,v=int3")));
  EXPECT_TRUE(AttendedInPlace(spec));
  EXPECT_FALSE(AttendedInPlace(*ParseCodec("k=int4,v=int3,early-v=nf4")));

  const auto v = [&](int32_t layer, int32_t n_layers) { return CodecFor(spec, {}, layer, 0, n_layers).v.type; };
  for (const int32_t n_layers : {1, 3, 4, 30, 32}) {
    for (int32_t layer = 0; layer < n_layers; ++layer) {
      const bool early = layer < n_layers / 4;
      EXPECT_EQ(v(layer, n_layers), early ? SideSpec::Type::kInt8 : SideSpec::Type::kInt3) << layer << "/" << n_layers;
    }
  }
  EXPECT_FALSE(CodecFor(spec, {}, 0, 0, 4).early_v) << "what a layer has is said";
  const auto bits = [](const char* codec) { return *CodecBitsPerElement(*ParseCodec(codec), 64, 64); };
  EXPECT_DOUBLE_EQ(bits(text), 0.75 * bits("k=int4,v=int3:g32") + 0.25 * bits("k=int4,v=int8"));
  EXPECT_EQ(ParseCodecPlan(CodecPlanText(spec, {}))->base, spec) << "as stores keep it";
}

TEST(CodecBits, PresetsKeepTheirPromise) {
  const CodecSpec i4 = *ParseCodec("i4");
  const CodecSpec i8 = *ParseCodec("i8");
  EXPECT_LE(*CodecBitsPerElement(i4, 64, 64), 4.6);
  EXPECT_LE(*CodecBitsPerElement(i4, 128, 128), 4.5);
  EXPECT_LE(*CodecBitsPerElement(i4, 256, 256), 4.5);
  EXPECT_LE(*CodecBitsPerElement(i8, 64, 64), 8.35);
  EXPECT_LE(*CodecBitsPerElement(i8, 128, 128), 8.35);
  for (const int dim : {64, 80, 96, 112, 128, 256}) {
    // Heads that are no multiple of 64 have a short last group and wider padding.
    const double more = dim % 64 == 0 ? 0.0 : 0.16;
    EXPECT_LE(*CodecBitsPerElement(*ParseCodec("i5"), dim, dim), 5.0 + more) << dim;
    EXPECT_LE(*CodecBitsPerElement(*ParseCodec("i43"), dim, dim), 4.1 + more) << dim;
    EXPECT_LE(*CodecBitsPerElement(*ParseCodec("i3"), dim, dim), 3.6 + more) << dim;
  }
  EXPECT_FALSE(CodecBitsPerElement(i4, 0, 64));
}

}  // namespace
}  // namespace kvcell
