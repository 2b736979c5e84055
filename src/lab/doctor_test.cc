// Each of the classic troubles is provoked, and the doctor names it, the figure that shows it and what to change.
#include "lab/doctor.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <tuple>

#include "cache/cache_test_util.h"
#include "store/store.h"

namespace kvcell {
namespace {

using ::testing::Contains;
using ::testing::HasSubstr;

std::vector<std::string> Troubles(const DoctorFigures& figures) {
  std::vector<std::string> names;
  for (const DoctorFinding& finding : Diagnose(figures)) {
    names.push_back(finding.trouble);
    EXPECT_FALSE(finding.figure.empty());
    EXPECT_FALSE(finding.change.empty());
  }
  return names;
}

// Feeds made values, those of layer `bad_layer` with a few huge channels among tiny ones, and saves them as "s".
void SaveSession(const std::string& store, const std::string& codec, int bad_layer, int64_t n_tokens = 256) {
  CacheOptions options = MadeOptions(codec, MadeGeometry(4, 2, 2, 64));
  options.store = store;
  auto cache = OpenOrDie(options);
  const SequenceId sequence = cache->Create().value();
  for (int64_t at = 0; at < n_tokens; at += 64) {
    const auto tokens = MadeTokens(64, static_cast<uint32_t>(at + 1));
    const StepItem item{sequence, tokens};
    ASSERT_TRUE(cache->Begin({&item, 1}).ok());
    for (int layer = 0; layer < 4; ++layer) {
      auto k = MadeRows(tokens, at, layer, 0, 2, 64);
      auto v = MadeRows(tokens, at, layer, 1, 2, 64);
      const auto q = MadeRows(tokens, at, layer, 2, 2, 64);
      if (layer == bad_layer || bad_layer == 99) {
        for (size_t i = 0; i < v.size(); ++i) v[i] *= i % 64 < 1 ? 100.0f : 0.5f;
        for (size_t i = 0; i < k.size(); ++i) k[i] *= i % 64 < 1 ? 100.0f : 0.5f;
      }
      std::vector<float> out(q.size());
      cache->Compute(layer, k.data(), v.data(), q.data(), out.data());
    }
    ASSERT_TRUE(cache->Commit().ok());
  }
  ASSERT_TRUE(cache->Save(sequence, "s", {}, "").ok());
}

Result<DoctorFigures> Examined(const std::string& directory, const std::string& session) {
  StoreOptions options;
  options.create = false;
  options.read_only = true;
  const auto store = Store::Open(directory, options);
  if (!store) return Fail(store.error());
  return ExamineSession(store->get(), session);
}

TEST(Doctor, ASoundSessionHasNoTrouble) {
  TempDir store;
  SaveSession(store.path(), "i8", -1);
  const auto figures = Examined(store.path(), "s");
  ASSERT_TRUE(figures) << figures.error().message();
  EXPECT_EQ(figures->cells_checked, 4 * 2 * 4);
  EXPECT_THAT(Troubles(*figures), testing::IsEmpty());
}

// What is expected is what decoding shows.
TEST(Doctor, ExpectedErrorIsTheErrorOfTheValues) {
  for (const auto& [codec, low, high] :
       {std::tuple("i8", 1e-5, 1e-4), std::tuple("i4", 0.004, 0.012), std::tuple("i3", 0.018, 0.04)}) {
    TempDir store;
    SaveSession(store.path(), codec, -1);
    const auto figures = Examined(store.path(), "s");
    ASSERT_TRUE(figures) << figures.error().message();
    ASSERT_EQ(figures->errors.size(), 4u);
    for (const LayerError& layer : figures->errors) {
      EXPECT_GT(layer.error, low) << codec;
      EXPECT_LT(layer.error, high) << codec;
    }
    EXPECT_THAT(Troubles(*figures), testing::IsEmpty()) << codec;
  }
}

TEST(Doctor, QualityThatFellAfterQuantizing) {
  TempDir store;
  SaveSession(store.path(), "k=int4:g128:sym,v=int4:g128:sym", 99);
  EXPECT_THAT(Troubles(Examined(store.path(), "s").value()), Contains("quality"));
}

TEST(Doctor, LayersOfUnknownErrorKeepTheirNumbers) {
  DoctorFigures figures;
  figures.errors = {{2, 0.01}, {3, 0.01}, {5, 0.2}};
  const auto findings = Diagnose(figures);
  ASSERT_EQ(findings.size(), 1u);
  EXPECT_THAT(findings[0].figure, HasSubstr("layer 5:"));
}

TEST(Doctor, OneLayerFarWorseThanTheOthers) {
  TempDir store;
  SaveSession(store.path(), "k=int4:g64:sym,v=int4:g64:sym", 2);
  const auto findings = Diagnose(Examined(store.path(), "s").value());
  const auto layers =
      std::find_if(findings.begin(), findings.end(), [](const auto& f) { return f.trouble == "layers"; });
  ASSERT_NE(layers, findings.end());
  EXPECT_THAT(layers->figure, HasSubstr("layer 2:"));
}

TEST(Doctor, WrongBytesAfterATransition) {
  TempDir store;
  SaveSession(store.path(), "i4", -1);
  for (const auto& file : std::filesystem::recursive_directory_iterator(store.path())) {
    if (file.path().extension() != ".kvs") continue;
    std::fstream segment(file.path(), std::ios::in | std::ios::out | std::ios::binary);
    segment.seekp(static_cast<std::streamoff>(file.file_size() / 2));
    segment.put('\x5a');
    segment.put('\xa5');
  }
  const auto figures = Examined(store.path(), "s").value();
  EXPECT_GT(figures.cells_damaged, 0);
  EXPECT_THAT(Troubles(figures), Contains("transition"));
}

TEST(Doctor, SlowerWithLongerContext) {
  TempDir store;
  CacheOptions options = MadeOptions();
  options.store = store.path();
  options.max_step_tokens = 64;
  options.max_sequences = 1;
  options.ram_budget = 1;
  const std::string refused = Cache::Open(options).error().message();
  options.ram_budget = std::stoull(refused.substr(refused.rfind(' ') + 1));
  auto cache = OpenOrDie(options);
  Feed(cache.get(), cache->Create().value(), MadeTokens(64 * 200));
  DoctorFigures figures;
  figures.stats = cache->Stats();
  EXPECT_GT(figures.stats->reads_file, 0u);
  EXPECT_THAT(Troubles(figures), Contains("thrash"));
}

TEST(Doctor, AnotherProcessDoesNotSeeWhatWasWritten) {
  TempDir store;
  SaveSession(store.path(), "i4", -1);
  EXPECT_THAT(Troubles(Examined(store.path(), "other").value()), Contains("invisible"));
  DoctorFigures unsaved;
  unsaved.unsaved_tokens = 12;
  EXPECT_THAT(Troubles(unsaved), Contains("invisible"));
}

TEST(Doctor, MemoryThatDidNotShrink) {
  CacheOptions options = MadeOptions();
  options.rules = ProfileRules("elastic").value();
  options.max_sequences = 1;
  auto cache = OpenOrDie(options);
  Feed(cache.get(), cache->Create().value(), MadeTokens(64 * 100));
  DoctorFigures figures;
  figures.stats = cache->Stats();
  const auto findings = Diagnose(figures);
  ASSERT_FALSE(findings.empty());
  EXPECT_EQ(findings[0].trouble, "memory");
  EXPECT_THAT(findings[0].says, HasSubstr("exact cells"));
}

}  // namespace
}  // namespace kvcell
