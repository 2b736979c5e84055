// Random events under rules against a plain reference: a cache without budget, store or rules of its own. Where
// positions alone decide, every answer and every coded byte is the same; under all rules, budgets hold, and cells in
// each state are what the counted transitions leave there.
#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <array>
#include <cstdlib>
#include <map>
#include <optional>
#include <sstream>

#include "cache/cache_test_util.h"
#include "cell/rules.h"

namespace kvcell {
namespace {

constexpr int kSequences = 3;

// One thing that a user does; numbers are taken modulo what is possible.
struct Action {
  int kind = 0;
  uint32_t a = 0, b = 0;
};

std::vector<Action> RandomActions(size_t n) {
  std::vector<Action> actions;
  for (size_t i = 0; i < n; ++i) {
    actions.push_back({*rc::gen::inRange(0, 100), *rc::gen::arbitrary<uint32_t>(), *rc::gen::arbitrary<uint32_t>()});
  }
  return actions;
}

CacheOptions Plain() {
  CacheOptions options = MadeOptions("i4", MadeGeometry(1, 2, 1, 32));
  options.max_sequences = kSequences;
  options.max_step_tokens = 64;
  options.max_threads = 1;
  return options;
}

uint64_t SmallestBudget(CacheOptions options) {
  options.ram_budget = 1;
  const std::string refused = Cache::Open(options).error().message();
  return std::stoull(refused.substr(refused.rfind(' ') + 1));
}

// Population of each state by the transitions that were counted.
std::map<std::string, int64_t> Balance(const Cache& cache) {
  std::map<std::string, int64_t> balance;
  for (const TransitionCount& t : cache.Transitions()) {
    balance[t.from] -= static_cast<int64_t>(t.n);
    balance[t.to] += static_cast<int64_t>(t.n);
  }
  return balance;
}

class Machine {
 public:
  Machine(std::vector<std::string> profiles, bool compares)
      : profiles_(std::move(profiles)), compares_(compares), reference_(OpenOrDie(Plain())) {
    CacheOptions options = Plain();
    options.store = store_.path();
    options.durability = 0;
    options.rules = ProfileRules(profiles_[0]).value();
    budget_ = options.ram_budget = SmallestBudget(options) + (128 << 10);
    cache_ = OpenOrDie(options);
  }

  // False where something is not as it has to be; the reason is a failure of the test.
  bool Do(const Action& action) {
    const int kind = action.kind;
    if (kind < 50) return Append(action);
    if (kind < 60) return Trim(action);
    if (kind < 66) return Fork(action);
    if (kind < 72) return Free(action);
    if (kind < 78) return Save(action);
    if (kind < 84) return Outside(action);
    if (kind < 90) return cache_->SetRules(ProfileRules(profiles_[action.a % profiles_.size()]).value()).ok();
    if (kind < 94) return cache_->Settle().ok();
    return Check();
  }

  bool Check() {
    EXPECT_TRUE(cache_->Settle().ok());  // blocks in work under way belong to no sequence that Stats could count
    const CacheStats stats = cache_->Stats();
    EXPECT_LE(stats.ram_peak_bytes, budget_);
    auto balance = Balance(*cache_);
    for (const CellState state :
         {CellState::kActive, CellState::kQuantized, CellState::kPersisted, CellState::kRecovering}) {
      EXPECT_EQ(balance[std::string(CellStateName(state))],
                static_cast<int64_t>(stats.cells.by_state[static_cast<size_t>(state)]))
          << CellStateName(state);
    }
    if (compares_) CompareCells();
    return !testing::Test::HasFailure();
  }

 private:
  std::optional<SequenceId> Pick(uint32_t n) const {
    std::vector<SequenceId> live;
    for (SequenceId id = 0; id < kSequences; ++id) {
      if (live_[static_cast<size_t>(id)]) live.push_back(id);
    }
    return live.empty() ? std::nullopt : std::optional(live[n % live.size()]);
  }

  bool Append(const Action& action) {
    auto id = Pick(action.a);
    if (!id) {
      id = cache_->Create().value();
      EXPECT_EQ(*id, reference_->Create().value());
      live_[static_cast<size_t>(*id)] = true;
    }
    if (cache_->Length(*id) > 64 * 24) return true;
    const auto tokens = MadeTokens(1 + action.b % 64, action.b);
    const StepItem item{*id, tokens};
    const auto rows = RunStep(cache_.get(), {&item, 1});
    if (!rows) {  // no room: nothing may have changed
      EXPECT_EQ(rows.error().code(), StatusCode::kOutOfBudget) << rows.error().message();
      EXPECT_EQ(cache_->Length(*id), reference_->Length(*id));
      return !testing::Test::HasFailure();
    }
    const auto expected = RunStep(reference_.get(), {&item, 1});
    EXPECT_TRUE(expected.has_value());
    if (compares_ && *rows != *expected) ADD_FAILURE() << "another answer at length " << cache_->Length(*id);
    return !testing::Test::HasFailure();
  }

  bool Trim(const Action& action) {
    const auto id = Pick(action.a);
    if (!id) return true;
    const int64_t length = action.b % (static_cast<uint32_t>(cache_->Length(*id)) + 1);
    EXPECT_EQ(cache_->Trim(*id, length).value(), reference_->Trim(*id, length).value());
    return !testing::Test::HasFailure();
  }

  bool Fork(const Action& action) {
    const auto id = Pick(action.a);
    if (!id) return true;
    const auto child = cache_->Fork(*id);
    const auto expected = reference_->Fork(*id);
    EXPECT_EQ(child.has_value(), expected.has_value());
    if (child) live_[static_cast<size_t>(*child)] = true;
    return !testing::Test::HasFailure();
  }

  bool Free(const Action& action) {
    const auto id = Pick(action.a);
    if (!id) return true;
    live_[static_cast<size_t>(*id)] = false;
    EXPECT_TRUE(cache_->Free(*id).ok() && reference_->Free(*id).ok());
    return !testing::Test::HasFailure();
  }

  bool Save(const Action& action) {
    const auto id = Pick(action.a);
    if (!id) return true;
    const Status saved = cache_->Save(*id, "s" + std::to_string(*id), {}, "");
    EXPECT_TRUE(saved.ok()) << saved.message();
    return saved.ok();
  }

  bool Outside(const Action& action) {
    const auto id = Pick(action.a);
    if (!id) return true;
    EXPECT_TRUE(cache_->Pin(*id, action.b % 4 == 0).ok());
    (void)cache_->Persist(*id);  // may have nothing to move
    EXPECT_TRUE(cache_->Pin(*id, false).ok());
    return !testing::Test::HasFailure();
  }

  void CompareCells() {
    for (SequenceId id = 0; id < kSequences; ++id) {
      if (!live_[static_cast<size_t>(id)]) continue;
      const auto ours = cache_->Inspect(id);
      const auto theirs = reference_->Inspect(id);
      ASSERT_EQ(ours.size(), theirs.size());
      for (size_t i = 0; i < ours.size(); ++i) {
        EXPECT_EQ(ours[i].k_precision, theirs[i].k_precision);
        EXPECT_TRUE(ours[i].state != CellState::kPersisted || ours[i].durable);
      }
    }
  }

  std::vector<std::string> profiles_;
  bool compares_;
  TempDir store_;
  std::unique_ptr<Cache> reference_, cache_;
  std::array<bool, kSequences> live_{};
  uint64_t budget_ = 0;
};

// KVCELL_RANDOM_EVENTS sets how many events there are in all.
void RunEvents(const std::vector<std::string>& profiles, bool compares, size_t events) {
  if (const char* wanted = std::getenv("KVCELL_RANDOM_EVENTS"); wanted != nullptr)
    events = std::strtoull(wanted, nullptr, 10);
  constexpr size_t kPerCase = 250;
  rc::detail::TestParams params;
  params.maxSuccess = static_cast<int>(std::max<size_t>(1, events / kPerCase));
  const auto result = rc::detail::checkTestable(
      [&] {
        Machine machine(profiles, compares);
        for (const Action& action : RandomActions(kPerCase)) RC_ASSERT(machine.Do(action));
        RC_ASSERT(machine.Check());
      },
      rc::detail::TestMetadata{.id = "random events", .description = "random events"}, params);
  std::ostringstream message;
  rc::detail::printResultMessage(result, message);
  EXPECT_TRUE(result.template is<rc::detail::SuccessResult>()) << message.str();
}

TEST(RandomEvents, AnswersAndCellsAreThoseOfTheReference) {
  RunEvents({"balanced", "long-context", "server"}, /*compares=*/true, 2500);
}

TEST(RandomEvents, ElasticRulesKeepBudgetAndBalance) { RunEvents({"elastic"}, /*compares=*/false, 1500); }

TEST(RandomEventsSlow, AMillionEvents) {
  RunEvents({"balanced", "long-context", "server"}, /*compares=*/true, 700000);
  RunEvents({"elastic"}, /*compares=*/false, 300000);
}

}  // namespace
}  // namespace kvcell
