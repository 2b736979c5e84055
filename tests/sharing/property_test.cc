// Whatever is done to sequences, in whatever order, every row is what plain attention over the same tokens gives, and
// to the bit what a cold cache gives: appends, forks, cuts, saves, restores, shared prefixes, a budget that drives
// cells to the file, cancelled steps, batches. KVCELL_PROPERTY_CASES says how many random sequences of operations are
// tried.
#include <gtest/gtest.h>
#include <rapidcheck.h>
#include <sqlite3.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <iostream>
#include <map>
#include <string>
#include <vector>

#include "base/checksum.h"
#include "cache/cache_test_util.h"

namespace kvcell {
namespace {

constexpr int kDim = 32;
constexpr size_t kMostTokens = 420;
constexpr size_t kMostSequences = 5;

enum class Kind : uint8_t {
  kAppend,
  kBatch,
  kFork,
  kTrim,
  kFree,
  kSave,
  kRestore,
  kCancel,
  kPublish,
  kBegin,
  kDraft,
  kLast = kDraft
};

struct Op {
  Kind kind = Kind::kAppend;
  uint8_t which = 0;    // sequence or session
  uint16_t amount = 0;  // tokens, position
  uint8_t flavour = 0;  // which tokens: few kinds, so that equal blocks with other pasts are common
};

std::ostream& operator<<(std::ostream& out, const Op& op) {
  static constexpr const char* kNames[] = {"append",  "batch",  "fork",    "trim",  "free", "save",
                                           "restore", "cancel", "publish", "begin", "draft"};
  return out << kNames[static_cast<size_t>(op.kind)] << "(" << int{op.which} << ", " << op.amount << ", "
             << int{op.flavour} << ")";
}

rc::Gen<Op> AnyOp() {
  // Ranges are not to grow with the length of the list.
  const auto any = [](int end) { return rc::gen::resize(rc::kNominalSize, rc::gen::inRange<int>(0, end)); };
  return rc::gen::map(rc::gen::tuple(any(static_cast<int>(Kind::kLast) + 5), any(8), any(400), any(3)),
                      [](const std::tuple<int, int, int, int>& made) {
                        const auto [kind, which, amount, flavour] = made;
                        // Appends are what all else is about.
                        return Op{kind > static_cast<int>(Kind::kLast) ? Kind::kAppend : static_cast<Kind>(kind),
                                  static_cast<uint8_t>(which), static_cast<uint16_t>(amount),
                                  static_cast<uint8_t>(flavour)};
                      });
}

struct Live {
  SequenceId id = 0;
  std::vector<Token> tokens;
};

// The cache and the plain model beside it.
class World {
 public:
  World(const CacheOptions& options) : options_(options), cache_(OpenOrDie(options)) {}

  void Do(const Op& op) {
    switch (op.kind) {
      case Kind::kAppend:
        return Append({Pick(op.which)}, op);
      case Kind::kBatch: {
        std::vector<size_t> all;
        for (size_t i = 0; i < live_.size(); ++i) all.push_back(i);
        if (all.empty()) all.push_back(Pick(0));
        return Append(all, op);
      }
      case Kind::kFork:
        return Fork(op);
      case Kind::kTrim:
        return Trim(op);
      case Kind::kFree:
        return Free(op);
      case Kind::kSave:
        return Save(op);
      case Kind::kRestore:
        return Restore(op);
      case Kind::kCancel:
        return Cancel(op);
      case Kind::kPublish:
        if (options_.store.empty()) return;
        return RC_ASSERT(cache_->Publish(live_[Pick(op.which)].id).ok());
      case Kind::kBegin:
        return BeginShared(op);
      case Kind::kDraft:
        return Draft(op);
    }
  }

  // One sequence of those that are left goes on to the bit as if nothing had ever happened around it.
  void CheckAgainstColdCache(const Op& op) {
    const size_t i = Pick(op.which);
    if (live_[i].tokens.size() >= kMostTokens) return;
    live_[i].tokens.push_back(5);
    const StepItem item{live_[i].id, std::span(live_[i].tokens).last(1)};
    const auto rows = RunStep(cache_.get(), {&item, 1});
    RC_ASSERT(rows.has_value());
    CacheOptions cold = options_;
    cold.store.clear();
    cold.ram_budget = 0;
    cold.max_sequences = 1;
    auto alone = OpenOrDie(cold);
    const auto expected = Feed(alone.get(), alone->Create().value(), live_[i].tokens);
    RC_ASSERT(rows->back() == expected.back());
    const CacheStats stats = cache_->Stats();
    RC_ASSERT(options_.ram_budget == 0 || stats.ram_peak_bytes <= options_.ram_budget);
  }

 private:
  size_t Pick(uint8_t which) {
    if (live_.empty()) live_.push_back({cache_->Create().value(), {}});
    return which % live_.size();
  }

  // Tokens that continue a sequence: the flavour decides, so that sequences of one flavour agree block by block.
  static std::vector<Token> Next(size_t start, size_t n, uint8_t flavour) {
    std::vector<Token> tokens;
    for (size_t i = 0; i < n; ++i) tokens.push_back(static_cast<Token>((start + i) % 64 * 3 + flavour));
    return tokens;
  }

  double Error(const std::vector<Token>& tokens, const std::vector<float>& row) const {
    const LayerGeometry& g = options_.geometry[0];
    const auto position = static_cast<int64_t>(tokens.size()) - 1;
    double error = 0, power = 0;
    for (int h = 0; h < g.n_heads; ++h) {
      std::vector<double> weight(tokens.size()), sum(kDim);
      const auto q = MadeRows(std::span(tokens).last(1), position, 0, 2, g.n_heads, kDim);
      double total = 0;
      for (size_t p = 0; p < tokens.size(); ++p) {
        double score = 0;
        for (int d = 0; d < kDim; ++d) {
          score += double{q[static_cast<size_t>(h * kDim + d)]} *
                   double{MadeValue(tokens[p], static_cast<int64_t>(p), 0, 0, d)};
        }
        weight[p] = std::exp(score * double{g.scale});
        total += weight[p];
        for (int d = 0; d < kDim; ++d)
          sum[static_cast<size_t>(d)] += weight[p] * double{MadeValue(tokens[p], static_cast<int64_t>(p), 0, 1, d)};
      }
      for (int d = 0; d < kDim; ++d) {
        const double expected = sum[static_cast<size_t>(d)] / total;
        const double difference = double{row[static_cast<size_t>(h * kDim + d)]} - expected;
        error += difference * difference;
        power += expected * expected;
      }
    }
    return std::sqrt(error / power);
  }

  void Append(const std::vector<size_t>& which, const Op& op) {
    std::vector<StepItem> items;
    std::vector<std::vector<Token>> added;
    const size_t n = 1 + op.amount % 90;
    for (const size_t i : which) {
      const size_t room = kMostTokens - live_[i].tokens.size();
      added.push_back(Next(live_[i].tokens.size(), std::min(room, n), op.flavour));
    }
    for (size_t k = 0; k < which.size(); ++k) {
      if (!added[k].empty()) items.push_back({live_[which[k]].id, added[k]});
    }
    if (items.empty()) return;
    const auto rows = RunStep(cache_.get(), items);
    if (!rows) {  // only ever for want of room, and then nothing has changed
      RC_ASSERT(rows.error().code() == StatusCode::kOutOfBudget);
      for (const Live& live : live_) RC_ASSERT(cache_->Length(live.id) == static_cast<int64_t>(live.tokens.size()));
      return;
    }
    size_t row = 0;
    for (size_t k = 0; k < which.size(); ++k) {
      if (added[k].empty()) continue;
      std::vector<Token>& tokens = live_[which[k]].tokens;
      tokens.insert(tokens.end(), added[k].begin(), added[k].end());
      row += added[k].size();
      const double limit = options_.codec.name == "f16" ? 2e-3 : options_.codec.name == "i8" ? 0.03 : 0.35;
      RC_ASSERT(Error(tokens, (*rows)[row - 1]) < limit);
    }
  }

  void Fork(const Op& op) {
    const size_t i = Pick(op.which);
    if (live_.size() == kMostSequences) return;
    const auto fork = cache_->Fork(live_[i].id);
    RC_ASSERT(fork.has_value());
    live_.push_back({*fork, live_[i].tokens});
  }

  void Trim(const Op& op) {
    Live& live = live_[Pick(op.which)];
    const auto from = cache_->Trim(live.id, op.amount);
    RC_ASSERT(from.has_value());
    RC_ASSERT(*from <= std::min<int64_t>(op.amount, static_cast<int64_t>(live.tokens.size())));
    RC_ASSERT(*from + kBlockTokens > std::min<int64_t>(op.amount, static_cast<int64_t>(live.tokens.size())));
    live.tokens.resize(static_cast<size_t>(*from));
  }

  void Free(const Op& op) {
    if (live_.empty()) return;
    const size_t i = op.which % live_.size();
    RC_ASSERT(cache_->Free(live_[i].id).ok());
    live_.erase(live_.begin() + static_cast<std::ptrdiff_t>(i));
  }

  static std::string Name(uint8_t which) { return std::string(1, static_cast<char>('a' + which % 3)); }

  void Save(const Op& op) {
    if (options_.store.empty()) return;
    Live& live = live_[Pick(op.which)];
    const Status saved = cache_->Save(live.id, Name(op.flavour), {}, "");
    // A name that another sequence of this cache has open is refused.
    RC_ASSERT(saved.ok() || saved.code() == StatusCode::kBusy);
    if (saved.ok()) Saved()[options_.codec.name + Name(op.flavour)] = live.tokens;
  }

  void Restore(const Op& op) {
    if (options_.store.empty() || live_.size() == kMostSequences) return;
    const auto opened = cache_->OpenSession(Name(op.flavour));
    if (!opened) {
      const StatusCode code = opened.error().code();
      RC_ASSERT(code == StatusCode::kBusy || code == StatusCode::kNotFound || code == StatusCode::kMismatch);
      return;
    }
    RC_ASSERT(opened->note.empty());
    const auto& expected = Saved()[options_.codec.name + Name(op.flavour)];
    RC_ASSERT(opened->tokens == expected);
    RC_ASSERT(opened->usable == static_cast<int64_t>(expected.size()));
    live_.push_back({opened->sequence, expected});
  }

  void Cancel(const Op& op) {
    const Live& live = live_[Pick(op.which)];
    const auto tokens = Next(live.tokens.size(), 1 + op.amount % 150, op.flavour);
    const StepItem item{live.id, tokens};
    if (!cache_->Begin({&item, 1}).ok()) return;
    if (op.amount % 2 == 0) {
      const LayerGeometry& g = options_.geometry[0];
      const auto start = static_cast<int64_t>(live.tokens.size());
      const auto k = MadeRows(tokens, start, 0, 0, g.n_kv_heads, kDim),
                 v = MadeRows(tokens, start, 0, 1, g.n_kv_heads, kDim);
      const auto q = MadeRows(tokens, start, 0, 2, g.n_heads, kDim);
      std::vector<float> out(tokens.size() * static_cast<size_t>(g.n_heads * kDim));
      cache_->Compute(0, k.data(), v.data(), q.data(), out.data());
    }
    cache_->Abort();
    RC_ASSERT(cache_->Length(live.id) == static_cast<int64_t>(live.tokens.size()));
  }

  // A new sequence that begins like another one, or like a saved session, and then differs.
  void BeginShared(const Op& op) {
    if (live_.size() == kMostSequences) return;
    std::vector<Token> prompt = live_.empty() ? Next(0, op.amount, op.flavour) : live_[op.which % live_.size()].tokens;
    prompt.resize(std::min<size_t>(prompt.size(), op.amount));
    const auto more = Next(prompt.size(), 1 + op.amount % 70, op.flavour);
    prompt.insert(prompt.end(), more.begin(), more.end());
    prompt.resize(std::min(prompt.size(), kMostTokens));
    const SequenceId id = cache_->Create().value();
    const auto use = cache_->Reuse(id, prompt);
    RC_ASSERT(use.has_value());
    RC_ASSERT(use->tokens % kBlockTokens == 0);
    RC_ASSERT(use->tokens < static_cast<int64_t>(prompt.size()));
    prompt.resize(static_cast<size_t>(use->tokens));
    live_.push_back({id, prompt});
  }

  void Draft(const Op& op) {
    const size_t i = Pick(op.which);
    if (live_[i].tokens.size() + 100 > kMostTokens) return;
    const auto guess = Next(live_[i].tokens.size(), 1 + op.amount % 90, op.flavour);
    const StepItem item{.sequence = live_[i].id, .tokens = guess, .draft = true};
    if (!RunStep(cache_.get(), {&item, 1})) return;
    live_[i].tokens.insert(live_[i].tokens.end(), guess.begin(), guess.end());
    const auto from =
        cache_->Trim(live_[i].id, std::max<int64_t>(0, static_cast<int64_t>(live_[i].tokens.size()) - op.amount % 7));
    RC_ASSERT(from.has_value());
    live_[i].tokens.resize(static_cast<size_t>(*from));
  }

  static std::map<std::string, std::vector<Token>>& Saved() {
    static std::map<std::string, std::vector<Token>> saved;
    return saved;
  }

  CacheOptions options_;
  std::unique_ptr<Cache> cache_;
  std::vector<Live> live_;
};

CacheOptions OptionsOf(const std::string& store, const std::string& codec, bool small) {
  CacheOptions options = MadeOptions(codec, MadeGeometry(1, 2, 1, kDim));
  options.codec.name = codec;
  options.max_sequences = kMostSequences;
  options.max_threads = 1;
  options.durability = 0;
  options.store = store.empty() ? "" : store + "/" + codec;
  options.prefix_bytes = 40000;
  options.prefix_roots = 2;
  options.ram_budget = uint64_t{64} << 20;
  if (small)
    options.ram_budget = PlanMemory(options, 4096, options.max_sequences)->minimum + (store.empty() ? 40000 : 0);
  return options;
}

void RunCases(const char* name, bool with_store, int share) {
  const char* wanted = std::getenv("KVCELL_PROPERTY_CASES");
  const int cases = std::max(1, (wanted == nullptr ? 600 : std::atoi(wanted)) / share);
  rc::detail::TestParams params = rc::detail::configuration().testParams;
  params.maxSuccess = cases;
  params.maxSize = 40;
  TempDir dir;
  const auto property = [&] {
    const auto codec = *rc::gen::element<std::string>("f16", "i8", "i4");
    const bool small = *rc::gen::arbitrary<bool>();
    const auto ops = *rc::gen::container<std::vector<Op>>(AnyOp());
    World world(OptionsOf(with_store ? dir.path() : "", codec, small));
    for (const Op& op : ops) world.Do(op);
    world.CheckAgainstColdCache(ops.empty() ? Op{} : ops.front());
  };
  rc::detail::TestMetadata metadata;
  metadata.description = name;
  const auto result = rc::detail::checkTestable(property, metadata, params);
  rc::detail::printResultMessage(result, std::cerr);
  std::cerr << " (seed " << params.seed << ": RC_PARAMS=\"seed=...\" repeats it)\n";
  ASSERT_TRUE(result.is<rc::detail::SuccessResult>());
  if (!with_store || !kHashesCollide) return;
  // This build must really have found everything by one and the same key.
  sqlite3* db = nullptr;
  ASSERT_EQ(sqlite3_open((dir.path() + "/i4/store.db").c_str(), &db), SQLITE_OK);
  const auto count = [](void* n, int, char** values, char**) {
    *static_cast<int*>(n) = std::atoi(values[0]);
    return 0;
  };
  int keys = 0;
  ASSERT_EQ(sqlite3_exec(db, "SELECT count(DISTINCT key) FROM blocks", count, &keys, nullptr), SQLITE_OK);
  sqlite3_close(db);
  EXPECT_EQ(keys, 1);
}

// One in five has a store, where a case takes many times as long.
TEST(Property, RandomOperationsInRamAgreeWithPlainAttention) { RunCases("in RAM", false, 1); }
TEST(Property, RandomOperationsWithAStoreAgreeWithPlainAttention) { RunCases("with a store", true, 5); }

}  // namespace
}  // namespace kvcell
