#include "cli/units.h"

#include <gtest/gtest.h>

namespace kvcell::cli {
namespace {

TEST(UnitsTest, SizesAreReadAsPeopleWriteThem) {
  EXPECT_EQ(ParseSize("1500000").value(), 1500000u);
  EXPECT_EQ(ParseSize("64MiB").value(), 64u << 20);
  EXPECT_EQ(ParseSize("64 MiB").value(), 64u << 20);
  EXPECT_EQ(ParseSize("64m").value(), 64u << 20);
  EXPECT_EQ(ParseSize("2G").value(), uint64_t{2} << 30);
  EXPECT_EQ(ParseSize("1.5GB").value(), 1500000000u);
  EXPECT_EQ(ParseSize("0").value(), 0u);
}

TEST(UnitsTest, WhatIsNoSizeIsRefusedByName) {
  for (const char* text :
       {"", "MiB", "-1", "1e9", "1.2.3", "10 parsecs", "99999999999999999999", "0x10", "inf", "nan", "4MiBs"}) {
    const Result<uint64_t> size = ParseSize(text);
    ASSERT_FALSE(size.has_value()) << text;
    EXPECT_EQ(size.error().code(), StatusCode::kInvalidArgument);
    EXPECT_NE(size.error().message().find(text), std::string::npos);
  }
}

TEST(UnitsTest, NumbersMustBeWholeTextsWithinTheirLimits) {
  EXPECT_EQ(ParseInteger("12", 0, 12).value(), 12);
  for (const char* text : {"13", "-1", "", "1x", " 1", "9223372036854775808"}) {
    EXPECT_FALSE(ParseInteger(text, 0, 12).has_value()) << text;
  }
  EXPECT_DOUBLE_EQ(ParseDecimal("0.7", 0, 1).value(), 0.7);
  for (const char* text : {"1.1", "nan", "inf", "0.5x", ""}) EXPECT_FALSE(ParseDecimal(text, 0, 1).has_value()) << text;
}

TEST(UnitsTest, FormatsForPeople) {
  EXPECT_EQ(FormatSize(1023), "1023 B");
  EXPECT_EQ(FormatSize(uint64_t{3} << 20), "3.00 MiB");
  EXPECT_EQ(FormatCount(1234567), "1,234,567");
  EXPECT_EQ(FormatCount(-1000), "-1,000");
  EXPECT_EQ(FormatMilliseconds(12345.0), "12.3 s");
}

TEST(Units, Durations) {
  EXPECT_EQ(*ParseDuration("90"), 90);
  EXPECT_EQ(*ParseDuration("45s"), 45);
  EXPECT_EQ(*ParseDuration("30m"), 1800);
  EXPECT_EQ(*ParseDuration("2h"), 7200);
  EXPECT_EQ(*ParseDuration("30d"), 30 * 86400);
  EXPECT_EQ(*ParseDuration("2w"), 14 * 86400);
  for (const char* text : {"", "d", "-1d", "1y", "1.5h", "99999999999999d"}) EXPECT_FALSE(ParseDuration(text)) << text;
}

}  // namespace
}  // namespace kvcell::cli
