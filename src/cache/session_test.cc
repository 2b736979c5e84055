// Restored = uninterrupted, in RAM and beyond it; damage shortens what is used and is told; nothing else is ever
// served.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sqlite3.h>

#include <fstream>
#include <functional>
#include <thread>

#include "cache/cache_test_util.h"

namespace kvcell {
namespace {

using ::testing::Eq;
using ::testing::HasSubstr;

CacheOptions StoredOptions(const std::string& store, const std::string& codec = "i4",
                           Geometry geometry = MadeGeometry()) {
  auto options = MadeOptions(codec, std::move(geometry));
  options.store = store;
  return options;
}

// For few sequences and short steps, so that a small budget holds them.
CacheOptions SmallOptions(const std::string& store, int32_t max_sequences) {
  auto options = StoredOptions(store);
  options.max_sequences = max_sequences;
  options.max_threads = 1;
  options.max_step_tokens = 64;
  return options;
}

std::vector<std::vector<float>> ColdRows(CacheOptions options, std::span<const Token> tokens) {
  options.store.clear();
  options.ram_budget = 0;
  options.max_step_tokens = 512;
  auto cache = OpenOrDie(options);
  return Feed(cache.get(), cache->Create().value(), tokens);
}

void SaveSession(const CacheOptions& options, const std::string& name, std::span<const Token> tokens,
                 const std::vector<float>& logits = {1.0f, 2.0f}) {
  auto cache = OpenOrDie(options);
  const SequenceId sequence = cache->Create().value();
  Feed(cache.get(), sequence, tokens);
  const Status saved = cache->Save(sequence, name, logits, R"({"a":1})");
  ASSERT_TRUE(saved.ok()) << saved.message();
}

TEST(Session, RestoredEqualsUninterruptedAtEveryEdge) {  // field cases A17, B14, C3, C4, C6
  const auto tokens = MadeTokens(400);
  for (const int recent : {0, 2}) {
    for (const size_t length : {0, 1, 3, 4, 5, 63, 64, 65, 127, 128, 129, 200, 256}) {
      TempDir dir;
      auto options = StoredOptions(dir.path());
      options.recent_blocks = recent;
      SaveSession(options, "s", std::span(tokens).first(length));
      auto cache = OpenOrDie(options);
      const auto opened = cache->OpenSession("s");
      ASSERT_TRUE(opened) << opened.error().message();
      EXPECT_EQ(opened->note, "");
      EXPECT_EQ(opened->usable, static_cast<int64_t>(length));
      EXPECT_EQ(opened->tokens, std::vector(tokens.begin(), tokens.begin() + static_cast<std::ptrdiff_t>(length)));
      EXPECT_EQ(opened->logits, (std::vector<float>{1.0f, 2.0f}));
      EXPECT_EQ(opened->extras, R"({"a":1})");
      const auto rows = Feed(cache.get(), opened->sequence, std::span(tokens).subspan(length), {30});
      const auto alone = ColdRows(options, tokens);
      EXPECT_THAT(rows, Eq(std::vector(alone.begin() + static_cast<std::ptrdiff_t>(length), alone.end()))) << length;
      EXPECT_EQ(cache->Stats().approximate_reads, 0u);
    }
  }
}

// A writer that keeps the store busy until it is let go.
class OtherWriter {
 public:
  explicit OtherWriter(const std::string& store) {
    EXPECT_EQ(sqlite3_open((store + "/store.db").c_str(), &database_), SQLITE_OK);
    EXPECT_EQ(sqlite3_exec(database_, "BEGIN IMMEDIATE", nullptr, nullptr, nullptr), SQLITE_OK);
  }
  ~OtherWriter() { sqlite3_close(database_); }

 private:
  sqlite3* database_ = nullptr;
};

TEST(Session, ASaveBesideStepsStoresTheMomentItBegan) {
  const auto tokens = MadeTokens(700);
  for (const uint64_t room : {uint64_t{0}, uint64_t{256} << 10}) {  // all in RAM; most of it attended from the file
    TempDir dir;
    auto options = SmallOptions(dir.path(), 2);
    const auto alone = ColdRows(options, tokens);
    if (room > 0) options.ram_budget = PlanMemory(options, 700, 1)->minimum + room;
    {
      auto cache = OpenOrDie(options);
      const SequenceId sequence = cache->Create().value();
      Feed(cache.get(), sequence, std::span(tokens).first(330));
      {
        const OtherWriter writer(dir.path());
        const Status begun = cache->BeginSave(sequence, "s", std::vector{3.0f}, R"({"a":1})", std::nullopt);
        ASSERT_TRUE(begun.ok()) << begun.message();
        EXPECT_EQ(cache->BeginSave(sequence, "s", {}, "", std::nullopt).code(), StatusCode::kBusy);
        EXPECT_THAT(Feed(cache.get(), sequence, std::span(tokens).subspan(330, 100), {7}),
                    Eq(std::vector(alone.begin() + 330, alone.begin() + 430)));
        // What the save names may be cut off meanwhile.
        ASSERT_EQ(cache->Trim(sequence, 100).value(), 64);
      }
      EXPECT_TRUE(cache->FinishSave().ok());
      EXPECT_TRUE(cache->FinishSave().ok()) << "there is none under way";
      EXPECT_THAT(Feed(cache.get(), sequence, std::span(tokens).subspan(64)),
                  Eq(std::vector(alone.begin() + 64, alone.end())));
    }
    auto cache = OpenOrDie(options);
    const auto opened = cache->OpenSession("s");
    ASSERT_TRUE(opened) << opened.error().message();
    EXPECT_EQ(opened->note, "");
    EXPECT_EQ(opened->tokens, std::vector(tokens.begin(), tokens.begin() + 330));
    EXPECT_EQ(opened->logits, std::vector{3.0f});
    EXPECT_THAT(Feed(cache.get(), opened->sequence, std::span(tokens).subspan(330)),
                Eq(std::vector(alone.begin() + 330, alone.end())));
  }
}

// What another session has stored already takes the place of one's own bytes, which steps may read until the save has
// been finished.
TEST(Session, ASaveBesideStepsSharesWhatTheStoreHas) {
  TempDir dir;
  auto options = SmallOptions(dir.path(), 2);
  const auto tokens = MadeTokens(3000);
  const auto alone = ColdRows(options, tokens);
  SaveSession(options, "first", std::span(tokens).first(2560));
  options.ram_budget = PlanMemory(options, 3000, 1)->minimum + (256 << 10);
  auto cache = OpenOrDie(options);
  const uint64_t before = cache->Stats().file_bytes;
  const SequenceId sequence = cache->Create().value();
  Feed(cache.get(), sequence, std::span(tokens).first(2600), {64});
  ASSERT_TRUE(cache->BeginSave(sequence, "second", {}, "", std::nullopt).ok());
  EXPECT_THAT(Feed(cache.get(), sequence, std::span(tokens).subspan(2600, 200), {20}),
              Eq(std::vector(alone.begin() + 2600, alone.begin() + 2800)));
  ASSERT_TRUE(cache->FinishSave().ok());
  EXPECT_THAT(Feed(cache.get(), sequence, std::span(tokens).subspan(2800), {20}),
              Eq(std::vector(alone.begin() + 2800, alone.end())));
  EXPECT_GT(cache->Stats().reads_file, 0u) << "else the test says nothing";
  ASSERT_TRUE(cache->Free(sequence).ok());
  cache.reset();
  cache = OpenOrDie(options);
  EXPECT_EQ(cache->Stats().file_bytes, before) << "bytes that nobody names any more are still there";
  EXPECT_EQ(cache->OpenSession("second")->usable, 2600);
}

TEST(Session, ASaveBesideStepsThatFailsIsTold) {
  TempDir dir;
  const auto options = StoredOptions(dir.path());
  const auto tokens = MadeTokens(100);
  auto cache = OpenOrDie(options);
  const SequenceId sequence = cache->Create().value();
  Feed(cache.get(), sequence, tokens);
  EXPECT_EQ(cache->BeginSave(sequence, "no/name", {}, "", std::nullopt).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(cache->BeginSave(sequence, "s", {}, "", uint8_t{3}).code(), StatusCode::kInvalidArgument);
  {
    sqlite3* database = nullptr;  // the table is gone: whatever is written to it fails
    ASSERT_EQ(sqlite3_open((dir.path() + "/store.db").c_str(), &database), SQLITE_OK);
    ASSERT_EQ(sqlite3_exec(database, "ALTER TABLE sessions RENAME TO moved", nullptr, nullptr, nullptr), SQLITE_OK);
    sqlite3_close(database);
  }
  ASSERT_TRUE(cache->BeginSave(sequence, "s", {}, "", std::nullopt).ok());
  EXPECT_FALSE(cache->FinishSave().ok());
  EXPECT_TRUE(cache->FinishSave().ok()) << "told once";
  ASSERT_TRUE(cache->BeginSave(sequence, "s", {}, "", std::nullopt).ok());
  ASSERT_TRUE(cache->Free(sequence).ok());
  EXPECT_FALSE(cache->FinishSave().ok()) << "what Free waited for is told too";
}

TEST(Session, ASaveBesideThatFailedIsToldThoughAnotherSessionIsSaved) {
  TempDir dir;
  auto options = StoredOptions(dir.path());
  options.max_sequences = 2;
  auto cache = OpenOrDie(options);
  const SequenceId one = cache->Create().value(), two = cache->Create().value();
  Feed(cache.get(), one, MadeTokens(100));
  Feed(cache.get(), two, MadeTokens(100, 2));
  const auto rename = [&](const char* sql) {
    sqlite3* database = nullptr;
    ASSERT_EQ(sqlite3_open((dir.path() + "/store.db").c_str(), &database), SQLITE_OK);
    ASSERT_EQ(sqlite3_exec(database, sql, nullptr, nullptr, nullptr), SQLITE_OK);
    sqlite3_close(database);
  };
  const auto fail_one = [&] {
    rename("ALTER TABLE sessions RENAME TO moved");
    ASSERT_TRUE(cache->BeginSave(one, "one", {}, "", std::nullopt).ok());
    (void)cache->Save(two, "two", {}, "");  // waits for it, and fails as well
    rename("ALTER TABLE moved RENAME TO sessions");
  };
  fail_one();
  ASSERT_TRUE(cache->Save(two, "two", {}, "").ok());
  EXPECT_FALSE(cache->FinishSave().ok());
  fail_one();
  ASSERT_TRUE(cache->Save(one, "one", {}, "").ok());
  EXPECT_TRUE(cache->FinishSave().ok()) << "a later save of the same holds more";
}

TEST(Session, SavedAgainAndAgainItAppendsOnlyWhatIsNew) {
  TempDir dir;
  const auto options = StoredOptions(dir.path());
  const auto tokens = MadeTokens(1000);
  uint64_t bytes_before = 0;
  for (size_t at = 0; at < 1000; at += 250) {
    auto cache = OpenOrDie(options);
    SequenceId sequence = 0;
    if (at == 0) {
      sequence = cache->Create().value();
    } else {
      auto opened = cache->OpenSession("s");
      ASSERT_TRUE(opened) << opened.error().message();
      ASSERT_EQ(opened->usable, static_cast<int64_t>(at));
      sequence = opened->sequence;
    }
    Feed(cache.get(), sequence, std::span(tokens).subspan(at, 250));
    ASSERT_TRUE(cache->Save(sequence, "s", {}, "").ok());
    const uint64_t bytes = cache->Stats().file_bytes;
    EXPECT_LT(bytes - bytes_before, uint64_t{300} * 2 * 2 * 128);
    bytes_before = bytes;
  }
  auto cache = OpenOrDie(options);
  EXPECT_EQ(cache->OpenSession("s")->tokens, tokens);
}

TEST(Session, BeyondTheBudgetCellsAreAttendedFromTheFile) {
  TempDir dir;
  auto options = SmallOptions(dir.path(), 1);
  const auto tokens = MadeTokens(6000);
  const auto alone = ColdRows(options, tokens);
  options.ram_budget = PlanMemory(options, 6000, 1)->minimum + (512 << 10);
  ASSERT_LT(options.ram_budget, PlanMemory(options, 6000, 1)->total * 2 / 3);
  {
    auto cache = OpenOrDie(options);
    const SequenceId sequence = cache->Create().value();
    EXPECT_THAT(Feed(cache.get(), sequence, std::span(tokens).first(5900), {64}),
                Eq(std::vector(alone.begin(), alone.begin() + 5900)));
    const CacheStats stats = cache->Stats();
    EXPECT_GT(stats.reads_file, 0u);
    EXPECT_GT(stats.cells.by_state[static_cast<size_t>(CellState::kPersisted)], 0u);
    EXPECT_LE(stats.ram_peak_bytes, options.ram_budget);
    ASSERT_TRUE(cache->Save(sequence, "long", {}, "").ok());
  }
  auto cache = OpenOrDie(options);
  const auto opened = cache->OpenSession("long");
  ASSERT_TRUE(opened) << opened.error().message();
  EXPECT_EQ(opened->usable, 5900);
  EXPECT_THAT(Feed(cache.get(), opened->sequence, std::span(tokens).subspan(5900), {7}),
              Eq(std::vector(alone.begin() + 5900, alone.end())));
  EXPECT_LE(cache->Stats().ram_peak_bytes, options.ram_budget);
}

TEST(Session, SlidingWindowsComeBackToo) {
  const auto tokens = MadeTokens(700);
  for (const int full_layers : {0, 1}) {
    TempDir dir;
    auto options = StoredOptions(dir.path(), "i4", MadeGeometry(2, 4, 2, 64, 100));
    if (full_layers == 1) options.geometry[0].window = 0;
    SaveSession(options, "s", std::span(tokens).first(600));
    auto cache = OpenOrDie(options);
    const auto opened = cache->OpenSession("s");
    ASSERT_TRUE(opened) << opened.error().message();
    EXPECT_EQ(opened->usable, 600) << opened->note;
    const auto alone = ColdRows(options, tokens);
    EXPECT_THAT(Feed(cache.get(), opened->sequence, std::span(tokens).subspan(600)),
                Eq(std::vector(alone.begin() + 600, alone.end())));
  }
}

TEST(Session, WhatDiffersIsNamed) {  // field cases C19, G1
  TempDir dir;
  const auto options = StoredOptions(dir.path());
  SaveSession(options, "s", MadeTokens(100));
  const auto refusal = [&](auto change) {
    auto other = options;
    change(&other);
    auto cache = OpenOrDie(other);
    auto opened = cache->OpenSession("s");
    if (opened) return std::string("opened");
    EXPECT_EQ(opened.error().code(), StatusCode::kMismatch);
    return opened.error().message();
  };
  EXPECT_THAT(refusal([](CacheOptions* o) { o->identity[0].second = "other"; }), HasSubstr("weights"));
  EXPECT_THAT(refusal([](CacheOptions* o) { o->codec = ParseCodec("f16").value(); }), HasSubstr("codec"));
  EXPECT_THAT(refusal([](CacheOptions* o) { o->sinks = 8; }), HasSubstr("sinks"));
  EXPECT_THAT(refusal([](CacheOptions* o) { o->recent_blocks = 1; }), HasSubstr("recent_blocks"));
  EXPECT_THAT(refusal([](CacheOptions* o) { o->geometry[0].window = 512; }), HasSubstr("geometry"));
  EXPECT_EQ(refusal([](CacheOptions*) {}), "opened");
}

TEST(Session, EachComponentChangedAloneIsAMissThatNamesIt) {
  TempDir dir;
  auto options = StoredOptions(dir.path());
  options.identity = {{"weights", "w"}, {"architecture", "a"}, {"tokenizer", "t"}, {"rope", "r"}, {"adapters", "none"}};
  options.codec = ParseCodec("k=int4:g32:sym,v=int4:g32:sym").value();
  SaveSession(options, "s", MadeTokens(100));
  using Change = std::function<void(CacheOptions*)>;
  std::vector<std::pair<std::string, Change>> changes;
  for (size_t i = 0; i < options.identity.size(); ++i) {
    changes.emplace_back(options.identity[i].first, [i](CacheOptions* o) { o->identity[i].second += "'"; });
    changes.emplace_back(options.identity[i].first,
                         [i](CacheOptions* o) { o->identity.erase(o->identity.begin() + static_cast<ptrdiff_t>(i)); });
  }
  for (const char* codec :
       {"k=int8,v=int4:g32:sym", "k=int4:g32:sym,v=f16", "k=int4:g64:sym,v=int4:g32:sym",
        "k=int4:g32:sym,v=int4:g64:sym", "k=int4:g32,v=int4:g32:sym", "k=int4:g32:sym,v=int4:g32:sym,early-v=int8"}) {
    const auto spec = ParseCodec(codec);
    if (!spec || CodecText(*spec) == CodecText(options.codec)) continue;  // the same by another name
    changes.emplace_back("codec", [spec](CacheOptions* o) { o->codec = *spec; });
  }
  changes.emplace_back("sinks", [](CacheOptions* o) { o->sinks += 1; });
  changes.emplace_back("recent_blocks", [](CacheOptions* o) { o->recent_blocks += 1; });
  changes.emplace_back("geometry", [](CacheOptions* o) { o->geometry[0].scale *= 2; });
  changes.emplace_back("geometry", [](CacheOptions* o) { o->geometry[0].softcap += 30; });
  changes.emplace_back("geometry", [](CacheOptions* o) { o->geometry[0].window += 128; });
  changes.emplace_back("geometry", [](CacheOptions* o) { o->geometry[0].n_heads *= 2; });
  changes.emplace_back("geometry", [](CacheOptions* o) { o->geometry.push_back(o->geometry.back()); });
  EXPECT_GE(changes.size(), 19u);
  for (const auto& [name, change] : changes) {
    auto other = options;
    change(&other);
    auto cache = OpenOrDie(other);
    const auto opened = cache->OpenSession("s");
    ASSERT_FALSE(opened) << name;
    EXPECT_EQ(opened.error().code(), StatusCode::kMismatch);
    EXPECT_THAT(opened.error().message(), HasSubstr("another " + name + ":")) << name;
  }
  EXPECT_TRUE(OpenOrDie(options)->OpenSession("s"));
}

TEST(Session, AnEncryptedStoreAndATenantGiveTheSameRows) {
  TempDir plain_dir, dir;
  const auto tokens = MadeTokens(5 * 64 + 9);
  auto options = StoredOptions(dir.path());
  options.store_key = std::string(40, 'k');
  options.name_space = "tenant";
  SaveSession(options, "s", tokens);
  auto cache = OpenOrDie(options);
  const auto opened = cache->OpenSession("s");
  ASSERT_TRUE(opened) << opened.error().message();
  EXPECT_EQ(opened->usable, static_cast<int64_t>(tokens.size()));
  EXPECT_EQ(opened->note, "");
  const auto more = MadeTokens(400);
  const auto alone = ColdRows(StoredOptions(plain_dir.path()), more);
  EXPECT_THAT(Feed(cache.get(), opened->sequence, std::span(more).subspan(tokens.size())),
              Eq(std::vector(alone.begin() + static_cast<ptrdiff_t>(tokens.size()), alone.end())));
  options.name_space = "other";
  EXPECT_EQ(OpenOrDie(options)->OpenSession("s").error().code(), StatusCode::kNotFound);
}

TEST(Session, AMissingSessionOrBadNameChangesNothing) {  // field case C2
  TempDir dir;
  const auto options = StoredOptions(dir.path());
  const auto tokens = MadeTokens(150);
  auto cache = OpenOrDie(options);
  const SequenceId sequence = cache->Create().value();
  Feed(cache.get(), sequence, std::span(tokens).first(100));
  EXPECT_EQ(cache->OpenSession("nope").error().code(), StatusCode::kNotFound);
  EXPECT_EQ(cache->OpenSession("../x").error().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(cache->Save(sequence, "a/b", {}, "").code(), StatusCode::kInvalidArgument);
  const auto alone = ColdRows(options, tokens);
  EXPECT_THAT(Feed(cache.get(), sequence, std::span(tokens).subspan(100)),
              Eq(std::vector(alone.begin() + 100, alone.end())));
}

TEST(Session, OneWriterAtATime) {
  TempDir dir;
  const auto options = StoredOptions(dir.path());
  SaveSession(options, "s", MadeTokens(100));
  auto first = OpenOrDie(options);
  auto opened = first->OpenSession("s");
  ASSERT_TRUE(opened);
  auto second = OpenOrDie(options);
  EXPECT_EQ(second->OpenSession("s").error().code(), StatusCode::kBusy);
  const SequenceId other = second->Create().value();
  EXPECT_EQ(second->Save(other, "s", {}, "").code(), StatusCode::kBusy);
  ASSERT_TRUE(first->Free(opened->sequence).ok());
  EXPECT_TRUE(second->OpenSession("s").has_value());
}

std::vector<std::filesystem::path> SegmentFiles(const std::string& store) {
  std::vector<std::filesystem::path> files;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(store)) {
    if (entry.path().extension() == ".kvs") files.push_back(entry.path());
  }
  return files;
}

void FlipByte(const std::filesystem::path& path, uint64_t offset) {
  std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
  file.seekg(static_cast<std::streamoff>(offset));
  const int byte = file.get();
  file.seekp(static_cast<std::streamoff>(offset));
  file.put(static_cast<char>(byte ^ 1));
}

TEST(Session, ADamagedCellShortensTheSoundPrefix) {  // field cases C1, C20
  // Far behind the first read: a layer of these blocks takes several.
  constexpr int kTokens = 1930, kVictim = 1792;
  const auto tokens = MadeTokens(kTokens);
  for (const bool small_budget : {false, true}) {
    TempDir dir;
    auto options = StoredOptions(dir.path());
    options.max_sequences = 1;
    options.max_step_tokens = 64;
    options.max_threads = 1;
    if (small_budget) options.ram_budget = PlanMemory(options, kTokens, 1)->minimum;
    SaveSession(options, "s", tokens);
    CellInfo victim;
    {
      auto cache = OpenOrDie(options);
      const auto opened = cache->OpenSession("s");
      ASSERT_TRUE(opened);
      for (const CellInfo& cell : cache->Inspect(opened->sequence)) {
        if (cell.token_start == kVictim && cell.layer == 1 && cell.head == 1) victim = cell;
      }
    }
    ASSERT_NE(victim.storage_path, "");
    FlipByte(victim.storage_path, victim.offset + victim.length - 1);
    auto cache = OpenOrDie(options);
    const auto opened = cache->OpenSession("s");
    ASSERT_TRUE(opened) << opened.error().message();
    EXPECT_EQ(opened->usable, kVictim);
    EXPECT_EQ(opened->tokens, tokens);
    EXPECT_TRUE(opened->logits.empty());
    EXPECT_THAT(opened->note, HasSubstr(victim.storage_path));
    const auto alone = ColdRows(options, tokens);
    EXPECT_THAT(Feed(cache.get(), opened->sequence, std::span(tokens).subspan(kVictim), {64}),
                Eq(std::vector(alone.begin() + kVictim, alone.end())));
    // Saved again, the store is whole again.
    ASSERT_TRUE(cache->Save(opened->sequence, "s", {}, "").ok());
    cache.reset();
    auto again = OpenOrDie(options);
    EXPECT_EQ(again->OpenSession("s")->usable, kTokens);
  }
}

TEST(Session, AnyDamagedByteOfASegmentIsCaughtOrHarmless) {
  TempDir dir;
  const auto options = StoredOptions(dir.path(), "i4", MadeGeometry(1, 1, 1, 16));
  const auto tokens = MadeTokens(150), more = MadeTokens(20, 5);
  SaveSession(options, "s", tokens);
  auto joined = tokens;
  joined.insert(joined.end(), more.begin(), more.end());
  const auto alone = ColdRows(options, joined);
  const auto files = SegmentFiles(dir.path());
  ASSERT_FALSE(files.empty());
  int caught = 0;
  for (const auto& file : files) {
    const uint64_t size = std::filesystem::file_size(file);
    for (uint64_t offset = 0; offset < size; offset += 37) {
      FlipByte(file, offset);
      {
        auto cache = OpenOrDie(options);
        const auto opened = cache->OpenSession("s");
        ASSERT_TRUE(opened) << opened.error().message();
        caught += opened->usable < 150;
        const auto from = static_cast<size_t>(opened->usable);
        ASSERT_THAT(Feed(cache.get(), opened->sequence, std::span(joined).subspan(from)),
                    Eq(std::vector(alone.begin() + opened->usable, alone.end())))
            << file << " at " << offset;
      }
      FlipByte(file, offset);
    }
  }
  EXPECT_GT(caught, 10);
}

TEST(Session, ATruncatedOrMissingSegmentIsAMiss) {  // field case D3
  const auto tokens = MadeTokens(330);
  for (const double keep : {0.0, 0.3, 0.9, -1.0}) {
    TempDir dir;
    const auto options = StoredOptions(dir.path());
    SaveSession(options, "s", tokens);
    for (const auto& file : SegmentFiles(dir.path())) {
      if (keep < 0) {
        std::filesystem::remove(file);
      } else {
        std::filesystem::resize_file(
            file, static_cast<uint64_t>(keep * static_cast<double>(std::filesystem::file_size(file))));
      }
    }
    auto cache = OpenOrDie(options);
    const auto opened = cache->OpenSession("s");
    ASSERT_TRUE(opened) << opened.error().message();
    EXPECT_LT(opened->usable, 330);
    EXPECT_NE(opened->note, "");
    const auto alone = ColdRows(options, tokens);
    EXPECT_THAT(Feed(cache.get(), opened->sequence, std::span(tokens).subspan(static_cast<size_t>(opened->usable))),
                Eq(std::vector(alone.begin() + opened->usable, alone.end())));
  }
}

TEST(Session, ManySessionsNeverMix) {  // field case D14
  TempDir dir;
  auto options = StoredOptions(dir.path());
  for (uint32_t i = 0; i < 12; ++i) SaveSession(options, fmt::format("s{}", i), MadeTokens(150, i + 1));
  for (uint32_t i = 0; i < 12; ++i) {
    auto tokens = MadeTokens(150, i + 1);
    auto cache = OpenOrDie(options);
    const auto opened = cache->OpenSession(fmt::format("s{}", i));
    ASSERT_TRUE(opened);
    EXPECT_EQ(opened->tokens, tokens);
    const auto more = MadeTokens(10, 99);
    tokens.insert(tokens.end(), more.begin(), more.end());
    const auto alone = ColdRows(options, tokens);
    EXPECT_THAT(Feed(cache.get(), opened->sequence, more), Eq(std::vector(alone.begin() + 150, alone.end())));
  }
}

}  // namespace
}  // namespace kvcell
