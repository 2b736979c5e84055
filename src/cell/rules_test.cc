// Rule files: both forms, every error with its line, what follows from a table, and the profiles.
#include "cell/rules.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace kvcell {
namespace {

using ::testing::HasSubstr;
using enum CellEvent;
using enum CellState;

// The first error as "line: message", "" where there is none.
std::string ErrorOf(std::string_view text) {
  const RulesCheck check = CheckRules(text, "test");
  return check.errors.empty() ? "" : std::to_string(check.errors[0].line) + ": " + check.errors[0].message;
}

std::shared_ptr<const Rules> Parsed(std::string_view text) {
  auto rules = ParseRules(text, "test");
  if (!rules) {
    ADD_FAILURE() << rules.error().message();
    return DefaultRules();
  }
  return *rules;
}

bool HasWarning(const Rules& rules, std::string_view words) {
  for (const RuleMessage& warning : rules.warnings) {
    if (warning.message.find(words) != std::string::npos) return true;
  }
  return false;
}

constexpr std::string_view kLongForm = R"(state_transition_rules:
  - {event: TOKEN_APPEND, from_state: "none", to_state: "ACTIVE"}
  - {event: MEMORY_PRESSURE, from_state: "ACTIVE", to_state: "QUANTIZED"}
  - {event: CACHE_MISS, from_state: "QUANTIZED", to_state: "RECOVERING"}
  - {event: WRITE_BACK, from_state: "RECOVERING", to_state: "ACTIVE"}
  - {event: EVICT, from_state: "QUANTIZED", to_state: "EVICTED"}
)";

TEST(Rules, LongFormAndShortFormMeanTheSame) {
  const auto long_form = Parsed(kLongForm);
  const auto short_form = Parsed(R"(rules:
  - {event: TOKEN_APPEND, from: none, to: ACTIVE}
  - {event: MEMORY_PRESSURE, from: ACTIVE, to: QUANTIZED}
  - {event: CACHE_MISS, from: QUANTIZED, to: RECOVERING}
  - {event: WRITE_BACK, from: RECOVERING, to: ACTIVE}
  - {event: EVICT, from: QUANTIZED, to: EVICTED}
)");
  ASSERT_EQ(long_form->table.rules().size(), short_form->table.rules().size());
  for (size_t i = 0; i < long_form->table.rules().size(); ++i) {
    const CellRule &a = long_form->table.rules()[i], &b = short_form->table.rules()[i];
    EXPECT_TRUE(a.event == b.event && a.from == b.from && a.to == b.to && a.action == b.action && a.guard == b.guard);
  }
  EXPECT_TRUE(HasWarning(*long_form, "no rule leads to PERSISTED"));
  EXPECT_TRUE(long_form->replicates_on_read);
  EXPECT_TRUE(long_form->depends_on_memory);
  EXPECT_FALSE(long_form->codes_on_seal);
}

TEST(Rules, JsonIsReadAsItIs) {
  const auto rules =
      Parsed(R"({"codec": "i8", "rules": [{"event": "TOKEN_APPEND", "from": "ACTIVE", "to": "QUANTIZED"}]})");
  EXPECT_EQ(rules->codec->name, "i8");
  EXPECT_TRUE(rules->codes_on_seal);
}

TEST(Rules, GuardsAreRead) {
  const auto rules = Parsed(R"(rules:
  - {event: TOKEN_APPEND, from: ACTIVE, to: QUANTIZED, when: {block: sealed}, action: {codec: i4}}
  - event: MEMORY_PRESSURE
    from: QUANTIZED
    to: PERSISTED
    when: {pressure: ">= soft", age_tokens: ">= 1024", reads: "< 2", within_steps: 16, mass: "<= 1 %", layers: 2-5,
           heads: [0, 1], idle: ">= 10m", ram_fill: ">= 80 %", stored: true}
)");
  const CellRule& rule = rules->table.rules()[1];
  CellFacts facts{.sealed = true,
                  .durable = true,
                  .pressure = Pressure::kHard,
                  .age_tokens = 1024,
                  .read_steps = uint64_t{1} << 20 | 1,
                  .mass = 0.01,
                  .layer = 2,
                  .head = 1,
                  .idle_s = 600,
                  .ram_fill = 0.8};
  EXPECT_EQ(rules->table.Find(kMemoryPressure, kQuantized, facts), &rule);
  const auto without = [&](auto change) {
    CellFacts other = facts;
    change(&other);
    return rules->table.Find(kMemoryPressure, kQuantized, other) == nullptr;
  };
  EXPECT_TRUE(without([](CellFacts* f) { f->pressure = Pressure::kNone; }));
  EXPECT_TRUE(without([](CellFacts* f) { f->age_tokens = 1023; }));
  EXPECT_TRUE(without([](CellFacts* f) { f->read_steps = 3; }));
  EXPECT_TRUE(without([](CellFacts* f) { f->mass = 0.011; }));
  EXPECT_TRUE(without([](CellFacts* f) { f->layer = 6; }));
  EXPECT_TRUE(without([](CellFacts* f) { f->layer = 1; }));
  EXPECT_TRUE(without([](CellFacts* f) { f->head = 2; }));
  EXPECT_TRUE(without([](CellFacts* f) { f->idle_s = 599; }));
  EXPECT_TRUE(without([](CellFacts* f) { f->ram_fill = 0.79; }));
  EXPECT_TRUE(without([](CellFacts* f) { f->durable = false; }));
  EXPECT_TRUE(without([](CellFacts* f) { f->sealed = false; })) << "under pressure only sealed blocks move";
}

TEST(Rules, ErrorsNameLineAndWhatIsAllowed) {
  const struct {
    std::string_view text, line, words;
  } kCases[] = {
      {"", "1: ", "empty"},
      {"[1, 2]", "1: ", "expected names"},
      {"rules: [", "1: ", ""},
      {"colour: red", "1: ", "'colour' is not known in a rule file; allowed are version, name"},
      {"codec: i9", "1: ", "'i9' is none of"},
      {"\n\ncodec: i4\ncodec: i8", "4: ", "'codec' stands twice"},
      {"budgets: {ram: lots}", "1: ", "a size such as 256MiB"},
      {"exact: {sinks: 65}", "1: ", "0..64 tokens, not '65'"},
      {"exact: {recent_blocks: -1}", "1: ", "0..1024 blocks"},
      {"pressure: {soft: 0.9, hard: 0.5}", "1: ", "more than hard"},
      {"pressure: {order: age}", "1: ", "distance, frequency or mass, not 'age'"},
      {"thrash: {moves: 0}", "1: ", "1..1000000"},
      {"rules:\n - {event: TOKEN_APPENDED, from: none, to: ACTIVE}", "2: ", "takes TOKEN_APPEND, READ_REQUEST"},
      {"rules:\n - {event: EVICT, from: COLD, to: EVICTED}", "2: ", "from takes none, ACTIVE, QUANTIZED"},
      {"rules:\n - {event: EVICT, from: ACTIVE, to: none}", "2: ", "to takes ACTIVE, QUANTIZED"},
      {"rules:\n - {event: EVICT, from: ACTIVE}", "2: ", "needs the state it leads to"},
      {"rules:\n - {from: ACTIVE, to: EVICTED}", "2: ", "needs an event"},
      {"rules:\n - {event: EVICT, from: ACTIVE, to: QUANTIZED}",
       "2: ", "can't lead from ACTIVE to QUANTIZED; what it can"},
      {"rules:\n - {event: EVICT, from: ACTIVE, to: EVICTED, when: {age: 5}}", "2: ", "allowed are block, stored"},
      {"rules:\n - {event: EVICT, from: ACTIVE, to: EVICTED, when: {layers: [1, 5]}}", "2: ", "leaves a gap"},
      {"rules:\n - {event: EVICT, from: QUANTIZED, to: EVICTED, when: {age_tokens: \">= 63\"}}", "2: ", "64 or more"},
      {"rules:\n - {event: EVICT, from: QUANTIZED, to: EVICTED, when: {reads: \"about 3\"}}", "2: ", "a comparison"},
      {"rules:\n - {event: TOKEN_APPEND, from: ACTIVE, to: QUANTIZED, when: {block: open}}", "2: ", "open block"},
      {"rules:\n - {event: MEMORY_PRESSURE, from: QUANTIZED, to: PERSISTED, when: {pressure: none}}",
       "2: ", "never hold"},
      {"rules:\n - {event: EVICT, from: ACTIVE, to: EVICTED, action: {codec: i4}}", "2: ", "a codec belongs to"},
      {"rules:\n - {event: EVICT, from: ACTIVE, to: EVICTED, action: fetch}", "2: ", "that is drop"},
      {"rules:\n - {event: CACHE_MISS, from: QUANTIZED, to: RECOVERING}", "2: ", "RECOVERING to ACTIVE is needed"},
      {"rules:\n - {event: EVICT, from: QUANTIZED, to: EVICTED}\n - {event: EVICT, from: QUANTIZED, to: PERSISTED}",
       "3: ", "contradicts line 2"},
      {"codecs:\n - {layers: 0-3, codec: i8}\n - {layers: 3-5, codec: f16}",
       "3: ", "layer 3, head 0 has another codec in line 2"},
      {"codec: i8\nrules:\n - {event: TOKEN_APPEND, from: ACTIVE, to: QUANTIZED, action: {codec: i4}}",
       "3: ", "one codec"},
      {"rules: []\nstate_transition_rules: []", "2: ", "stand twice"},
      {"rules:\n - event: EVICT\n   from: ACTIVE\n   from_state: QUANTIZED\n   to: EVICTED", "4: ", "mean the same"},
      {"rules:\n - event: EVICT\n   from: ACTIVE\n   to: EVICTED\n   to_state: EVICTED", "5: ", "mean the same"},
      {"rules:\n - {event: EVICT, from: ACTIVE, to: EVICTED, when: {within_steps: 5}}", "2: ", "add `reads`"},
  };
  for (const auto& c : kCases) {
    const std::string error = ErrorOf(c.text);
    EXPECT_EQ(error.substr(0, 3), c.line) << c.text << " gave " << error;
    EXPECT_THAT(error, HasSubstr(std::string(c.words))) << c.text;
  }
}

TEST(Rules, AllErrorsOfAFileAreFound) {
  EXPECT_EQ(
      CheckRules("codec: i9\nrules:\n - {event: X, from: none, to: ACTIVE}\n - {event: EVICT}\n", "t").errors.size(),
      4u);
}

TEST(Rules, AFileWithoutEndIsRefused) {
  const auto rules = LoadRules("/dev/zero");
  ASSERT_FALSE(rules);
  EXPECT_THAT(rules.error().message(), HasSubstr("larger than 1 MiB"));
}

TEST(Rules, OddRulesAreWarnings) {
  const auto rules = Parsed(R"(rules:
  - {event: MEMORY_PRESSURE, from: QUANTIZED, to: PERSISTED}
  - {event: MEMORY_PRESSURE, from: QUANTIZED, to: EVICTED, when: {layers: 3}}
)");
  EXPECT_TRUE(HasWarning(*rules, "never applies: line 2"));
  EXPECT_TRUE(HasWarning(*rules, "starts from QUANTIZED, which no rule leads to"));
}

TEST(Rules, WhatDependsOnMemoryIsSaid) {
  EXPECT_FALSE(DefaultRules()->depends_on_memory);
  EXPECT_FALSE(ProfileRules("long-context").value()->depends_on_memory) << "eviction to the store changes no answer";
  EXPECT_FALSE(ProfileRules("edge").value()->depends_on_memory) << "a window is a mask on positions";
  EXPECT_TRUE(ProfileRules("elastic").value()->depends_on_memory);
  EXPECT_TRUE(HasWarning(*ProfileRules("elastic").value(), "results depend on memory"));
  const auto by_mass = Parsed("rules:\n - {event: EVICT, from: QUANTIZED, to: EVICTED, when: {mass: \"< 0.001\"}}\n");
  EXPECT_TRUE(by_mass->depends_on_memory);
  EXPECT_TRUE(by_mass->measures_mass);
}

TEST(Rules, EveryProfileIsSoundAndOnlyBalancedIsTheDefault) {
  EXPECT_THAT(ProfileNames(), testing::ElementsAre("quality", "balanced", "elastic", "long-context", "edge", "server"));
  for (const std::string& name : ProfileNames()) {
    const auto rules = ProfileRules(name);
    ASSERT_TRUE(rules) << rules.error().message();
    EXPECT_EQ((*rules)->name, name);
  }
  EXPECT_EQ(DefaultRules()->name, "balanced");
  EXPECT_EQ(DefaultRules()->IdentityText(), "") << "sessions stored before there were rules go on";
  EXPECT_THAT(ProfileRules("fast").error().message(), HasSubstr("quality, balanced, elastic"));
}

TEST(Rules, CodecsByLayerAndHead) {
  const auto rules =
      Parsed("codec: i4\ncodecs:\n - {layers: 0-1, codec: i8}\n - {layers: \">= 4\", heads: 1, codec: f16}\n");
  const auto codec = [&](int layer, int head) {
    return CodecFor(*rules->codec, rules->codec_ranges, layer, head, 30).name;
  };
  EXPECT_EQ(codec(0, 0), "i8");
  EXPECT_EQ(codec(1, 7), "i8");
  EXPECT_EQ(codec(2, 1), "i4");
  EXPECT_EQ(codec(4, 1), "f16");
  EXPECT_EQ(codec(30, 1), "f16");
  EXPECT_EQ(codec(30, 0), "i4");
  const std::string text = CodecPlanText(*rules->codec, rules->codec_ranges);
  const auto plan = ParseCodecPlan(text);
  ASSERT_TRUE(plan) << plan.error().message();
  EXPECT_EQ(plan->ranges, rules->codec_ranges);
  EXPECT_TRUE(plan->base == *rules->codec);
}

TEST(Rules, PicturesShowEveryRule) {
  const std::string mermaid = RulesMermaid(*DefaultRules());
  EXPECT_THAT(mermaid, HasSubstr("QUANTIZED --> PERSISTED: MEMORY_PRESSURE / sealed, pressure hard"));
  EXPECT_THAT(mermaid, HasSubstr("[*] --> ACTIVE: TOKEN_APPEND"));
  const std::string dot = RulesDot(*DefaultRules());
  for (const CellRule& rule : DefaultRules()->table.rules()) {
    EXPECT_THAT(dot, HasSubstr(std::string(CellEventName(rule.event))));
  }
}

}  // namespace
}  // namespace kvcell
