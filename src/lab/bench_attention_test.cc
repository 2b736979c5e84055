// The attention benchmark itself: what it says of a right and of a wrong result.
#include "lab/bench_attention.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace kvcell {
namespace {

AttentionBenchOptions Small() {
  AttentionBenchOptions options;
  options.shapes = {{.tokens = 200, .queries = 1, .kv_heads = 2, .group = 3, .head_dim = 64},
                    {.tokens = 192, .queries = 64, .kv_heads = 1, .group = 2, .head_dim = 64},
                    {.tokens = 200, .queries = 1, .kv_heads = 2, .group = 3, .head_dim = 64, .in_file = true}};
  options.n_threads = 2;
  options.rounds = 1;
  return options;
}

TEST(BenchAttention, BothEnginesAreNearFloat64AndTheRoundingIsASmallPart) {
  const auto result = BenchAttention(Small());
  ASSERT_TRUE(result.has_value()) << result.error().message();
  EXPECT_EQ(result->rows.size(), 18u);  // three shapes, three types of ours, three of ggml's
  for (const AttentionBenchRow& row : result->rows) {
    EXPECT_GT(row.rel_error, 0.0) << row.engine << " " << row.type;
    EXPECT_LT(row.rel_error, row.type == "f16"                        ? 5e-3
                             : row.type == "i8" || row.type == "q8_0" ? 2e-2
                                                                      : 0.2)
        << row.engine << " " << row.type;
    if (row.engine == "kvcell" && row.type == "i4") {
      EXPECT_LT(row.rounding_share, 0.1);
    }
    EXPECT_GT(row.bytes, 0u);
  }
}

// E12: a kernel that gives garbage has no figures, however fast it is.
TEST(BenchAttention, E12AWrongOutputFails) {
  for (const char* wrong : {"kvcell", "ggml"}) {
    AttentionBenchOptions options = Small();
    options.tamper = [&](const std::string& engine, const std::string& type, std::span<float> out) {
      if (engine == wrong && (type == "i4" || type == "q4_0")) {
        for (size_t i = 0; i < out.size(); i += 2) out[i] = -out[i];
      }
    };
    const auto result = BenchAttention(options);
    ASSERT_FALSE(result.has_value());
    EXPECT_EQ(result.error().code(), StatusCode::kInternal);
    EXPECT_THAT(result.error().message(), testing::HasSubstr(wrong));
  }
}

}  // namespace
}  // namespace kvcell
