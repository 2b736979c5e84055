// Cells attended from the file: mapped or streamed the rows are the same, and whatever happens to the file meanwhile is
// an error of the step, after which the sequence goes on from what is sound.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <thread>

#include "cache/cache_test_util.h"

namespace kvcell {
namespace {

using ::testing::Eq;
using ::testing::HasSubstr;

constexpr int64_t kSaved = 3000;  // tokens, of which the smallest budget holds a tenth

// A stored session of MadeTokens, and a cache that has so little RAM that nearly all of it is read from the file.
class FileReadsTest : public testing::TestWithParam<FileReads> {
 protected:
  void SetUp() override {
    options_ = MadeOptions();
    options_.store = dir_.path();
    options_.max_sequences = 2;
    options_.max_threads = 1;
    options_.max_step_tokens = 64;
    auto roomy = options_;
    auto cache = OpenOrDie(roomy);
    const SequenceId sequence = cache->Create().value();
    cold_ = Feed(cache.get(), sequence, tokens_);
    ASSERT_EQ(cache->Trim(sequence, kSaved).value(), kAligned);
    ASSERT_TRUE(cache->Save(sequence, "s", {}, "").ok());
    options_.file_reads = GetParam();
    options_.ram_budget = PlanMemory(options_, static_cast<int64_t>(tokens_.size()), 2)->minimum;
  }
  void Open() {
    cache_ = OpenOrDie(options_);
    const auto opened = cache_->OpenSession("s");
    ASSERT_TRUE(opened) << opened.error().message();
    ASSERT_EQ(opened->usable, kAligned) << opened->note;
    sequence_ = opened->sequence;
  }
  // The next n tokens; their rows must be those of a cache that never left RAM.
  Status Go(int64_t n) {
    const auto at = static_cast<size_t>(cache_->Length(sequence_));
    const StepItem item{sequence_, std::span(tokens_).subspan(at, static_cast<size_t>(n))};
    const auto rows = RunStep(cache_.get(), {&item, 1});
    if (!rows) return rows.error();
    EXPECT_THAT(*rows, Eq(std::vector(cold_.begin() + static_cast<std::ptrdiff_t>(at),
                                      cold_.begin() + static_cast<std::ptrdiff_t>(at) + n)));
    return OkStatus();
  }
  // The one segment that the session lies in.
  std::string Segment() const {
    for (const auto& entry : std::filesystem::directory_iterator(options_.store + "/segments")) return entry.path();
    return "";
  }
  CellInfo CellAt(int64_t position) const {
    for (const CellInfo& cell : cache_->Inspect(sequence_)) {
      if (cell.token_start == position && cell.layer == 1 && cell.head == 1) return cell;
    }
    return {};
  }
  // Times of a file that is changed twice within the clock's tick stay the same: the store waits for it, too.
  static void LetTheClockTick() { std::this_thread::sleep_for(std::chrono::milliseconds(120)); }

  static constexpr int64_t kAligned = kSaved / kBlockTokens * kBlockTokens;  // where Trim cuts
  TempDir dir_;
  CacheOptions options_;
  const std::vector<Token> tokens_ = MadeTokens(kSaved + 400);
  std::vector<std::vector<float>> cold_;
  std::unique_ptr<Cache> cache_;
  SequenceId sequence_ = 0;
};

TEST_P(FileReadsTest, GivesTheRowsOfACacheInRam) {
  Open();
  for (const int64_t n : {1, 1, 63, 7, 64, 1}) ASSERT_TRUE(Go(n).ok());
  const CacheStats stats = cache_->Stats();
  EXPECT_GT(stats.reads_file, stats.reads_ram);
  EXPECT_LE(stats.ram_peak_bytes, options_.ram_budget);
  if (GetParam() == FileReads::kMapped) {
    EXPECT_GT(stats.reads_mapped, 0u);  // all, but where a step had to wait for a disk
  } else {
    EXPECT_EQ(stats.reads_mapped, 0u);
  }
}

TEST_P(FileReadsTest, ARemovedFileStaysReadable) {
  Open();
  ASSERT_TRUE(Go(1).ok());
  ASSERT_TRUE(std::filesystem::remove(Segment()));
  ASSERT_TRUE(Go(1).ok());
  ASSERT_TRUE(Go(64).ok());
}

// To nothing, somewhere, and within a page, behind which the kernel gives zeros without a signal.
TEST_P(FileReadsTest, ACutFileEndsTheStepAndTheSequenceGoesOn) {
  for (const double keep : {0.0, 0.5, 0.999, -1.0}) {
    SCOPED_TRACE(keep);
    TempDir copy;
    std::filesystem::copy(dir_.path(), copy.path(), std::filesystem::copy_options::recursive);
    options_.store = copy.path();
    Open();
    ASSERT_TRUE(Go(1).ok());
    const uint64_t size = std::filesystem::file_size(Segment());
    std::filesystem::resize_file(Segment(),
                                 keep < 0 ? size - 1 : static_cast<uint64_t>(keep * static_cast<double>(size)));
    const Status failed = Go(1);
    ASSERT_EQ(failed.code(), StatusCode::kCorruption) << failed.message();
    EXPECT_THAT(failed.message(), HasSubstr(Segment()));
    EXPECT_EQ(cache_->Length(sequence_), kAligned + 1) << "a failed step changes nothing";
    std::string note;
    const auto from = cache_->CutToSound(sequence_, &note);
    ASSERT_TRUE(from) << from.error().message();
    ASSERT_LT(*from, kAligned);
    EXPECT_EQ(cache_->Length(sequence_), *from);
    EXPECT_NE(note, "");
    while (cache_->Length(sequence_) < kAligned) ASSERT_TRUE(Go(64).ok());
    ASSERT_TRUE(Go(1).ok());
    cache_.reset();
  }
}

// A file that is written over while it is in use: a mapped cell that was found sound is checked again.
TEST_P(FileReadsTest, ChangedBytesAreNoticedByTheNextStep) {
  Open();
  ASSERT_TRUE(Go(1).ok());
  LetTheClockTick();
  ASSERT_TRUE(Go(1).ok());
  ASSERT_TRUE(Go(1).ok());
  const CellInfo cell = CellAt(640);
  ASSERT_NE(cell.storage_path, "");
  std::fstream file(cell.storage_path, std::ios::in | std::ios::out | std::ios::binary);
  file.seekg(static_cast<std::streamoff>(cell.offset + 1000));
  const char was = static_cast<char>(file.get());
  file.seekp(static_cast<std::streamoff>(cell.offset + 1000));
  file.put(static_cast<char>(was ^ 1)).flush();
  const Status failed = Go(1);
  ASSERT_EQ(failed.code(), StatusCode::kCorruption);
  EXPECT_THAT(failed.message(), HasSubstr("640"));
  const auto from = cache_->CutToSound(sequence_, nullptr);
  ASSERT_TRUE(from);
  EXPECT_EQ(*from, 640);
  while (cache_->Length(sequence_) < kAligned) ASSERT_TRUE(Go(64).ok());
}

// What is sound is left alone: a file that was cut off behind the sequence's cells, an error that has passed.
TEST_P(FileReadsTest, ASoundSequenceIsNotCut) {
  Open();
  ASSERT_TRUE(Go(5).ok());
  const auto from = cache_->CutToSound(sequence_, nullptr);
  ASSERT_TRUE(from);
  EXPECT_EQ(*from, kAligned + 5);
  ASSERT_TRUE(Go(1).ok());
}

// A damaged block is nobody else's: neither a fork's nor a later prompt's.
TEST_P(FileReadsTest, WhatIsDamagedIsNotSharedOn) {
  options_.prefix_bytes = 1 << 20;
  options_.ram_budget = PlanMemory(options_, static_cast<int64_t>(tokens_.size()), 2)->minimum;
  Open();
  const auto fork = cache_->Fork(sequence_);
  ASSERT_TRUE(fork) << fork.error().message();
  const CellInfo cell = CellAt(640);
  std::fstream file(cell.storage_path, std::ios::in | std::ios::out | std::ios::binary);
  file.seekp(static_cast<std::streamoff>(cell.offset + 1000));
  file << "overwritten" << std::flush;
  ASSERT_EQ(Go(1).code(), StatusCode::kCorruption);
  ASSERT_EQ(cache_->CutToSound(sequence_, nullptr).value(), 640);
  while (cache_->Length(sequence_) < kAligned) ASSERT_TRUE(Go(64).ok());
  ASSERT_TRUE(Go(64).ok());
  // The fork finds it for itself.
  sequence_ = *fork;
  ASSERT_EQ(Go(1).code(), StatusCode::kCorruption);
  ASSERT_EQ(cache_->CutToSound(sequence_, nullptr).value(), 640);
  while (cache_->Length(sequence_) < kAligned) ASSERT_TRUE(Go(64).ok());
  ASSERT_TRUE(Go(64).ok());
}

INSTANTIATE_TEST_SUITE_P(Ways, FileReadsTest, testing::Values(FileReads::kMapped, FileReads::kStreamed),
                         [](const auto& way) { return way.param == FileReads::kMapped ? "Mapped" : "Streamed"; });

// The write-back appends to the very file that is mapped, and saves give blocks other places.
TEST(FileReads, AGrowingFileIsReadWhileItGrows) {
  TempDir dir;
  auto options = MadeOptions();
  options.store = dir.path();
  options.max_sequences = 1;
  options.max_threads = 2;
  options.max_step_tokens = 64;
  const auto tokens = MadeTokens(4000);
  const auto cold = [&] {
    auto roomy = options;
    roomy.store.clear();
    auto cache = OpenOrDie(roomy);
    return Feed(cache.get(), cache->Create().value(), tokens);
  }();
  options.ram_budget = PlanMemory(options, 4000, 1)->minimum;
  auto cache = OpenOrDie(options);
  const SequenceId sequence = cache->Create().value();
  for (size_t at = 0; at < tokens.size(); at += 64) {
    const size_t n = std::min<size_t>(64, tokens.size() - at);
    const StepItem item{sequence, std::span(tokens).subspan(at, n)};
    const auto rows = RunStep(cache.get(), {&item, 1});
    ASSERT_TRUE(rows) << rows.error().message();
    ASSERT_THAT(*rows, Eq(std::vector(cold.begin() + static_cast<std::ptrdiff_t>(at),
                                      cold.begin() + static_cast<std::ptrdiff_t>(at + n))))
        << at;
    if (at % 640 != 0) continue;
    ASSERT_TRUE(cache->Save(sequence, "growing", {}, "").ok());
  }
  EXPECT_GT(cache->Stats().reads_mapped, 0u);
}

TEST(FileReads, AnEncryptedStoreIsStreamed) {
  TempDir dir;
  auto options = MadeOptions();
  options.store = dir.path();
  options.store_key = std::string(32, 'k');
  options.max_sequences = 1;
  options.max_threads = 1;
  options.max_step_tokens = 64;
  options.ram_budget = PlanMemory(options, 2000, 1)->minimum;
  auto cache = OpenOrDie(options);
  Feed(cache.get(), cache->Create().value(), MadeTokens(2000), {64});
  EXPECT_GT(cache->Stats().reads_file, 0u);
  EXPECT_EQ(cache->Stats().reads_mapped, 0u);
}

}  // namespace
}  // namespace kvcell
