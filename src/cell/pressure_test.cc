// What a sample of free memory means for pressure, and the trace of transitions.
#include "cell/pressure.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <thread>

#include "cell/trace.h"

namespace kvcell {
namespace {

TEST(PressureSampler, TheScarcestMemoryDecides) {
  EXPECT_EQ((MemorySample{.host_free = 10, .cgroup_free = 5, .gpu_free = 7}.least()), 5u);
  EXPECT_EQ((MemorySample{.host_free = 10, .cgroup_free = {}, .gpu_free = 7}.least()), 7u);
  EXPECT_EQ((MemorySample{.host_free = 10, .cgroup_free = {}, .gpu_free = {}}.least()), 10u);
}

TEST(PressureSampler, LevelsFollowFreeMemory) {
  std::atomic<uint64_t> free{1000};
  PressureSampler sampler([&] { return MemorySample{.host_free = free, .cgroup_free = {}, .gpu_free = {}}; }, 100,
                          std::chrono::milliseconds(1));
  EXPECT_EQ(sampler.pressure(), Pressure::kNone);
  const auto settle = [&] {
    const uint64_t before = sampler.samples();
    while (sampler.samples() < before + 2) std::this_thread::yield();
  };
  free = 199;
  settle();
  EXPECT_EQ(sampler.pressure(), Pressure::kSoft);
  free = 99;
  settle();
  EXPECT_EQ(sampler.pressure(), Pressure::kHard);
  free = 200;
  settle();
  EXPECT_EQ(sampler.pressure(), Pressure::kNone);
}

TEST(PressureSampler, TheRealProbeSeesThisMachine) { EXPECT_GT(ProbeFreeMemory().host_free, 0u); }

TEST(TransitionTrace, KeepsTheNewestAndJoinsOneBlocksCells) {
  TransitionTrace trace;
  const CellRule rule{.event = CellEvent::kEvict, .from = CellState::kActive, .to = CellState::kEvicted};
  trace.Add(rule, 0);
  EXPECT_TRUE(trace.Records().empty()) << "off unless asked for";
  trace.Enable(2);
  for (int i = 0; i < 3; ++i) trace.Add(rule, 0);
  trace.Add(rule, 64);
  trace.Add(rule, 128);
  const auto records = trace.Records();
  ASSERT_EQ(records.size(), 2u);
  EXPECT_EQ(records[0].position, 64);
  EXPECT_EQ(records[1].position, 128);
  EXPECT_EQ(records[0].cells, 1u);
  EXPECT_THAT(ChromeTrace(records), testing::HasSubstr("\"from\":\"ACTIVE\",\"to\":\"EVICTED\",\"position\":128"));
}

}  // namespace
}  // namespace kvcell
