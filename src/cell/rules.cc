#include "cell/rules.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <functional>
#include <limits>
#include <utility>
#include <vector>

#include "base/text_file.h"
#include "cell/rules_file.h"
#include "cell/yaml_document.h"

namespace kvcell {
namespace {

using rules_internal::Bytes;
using rules_internal::Comparison;
using rules_internal::Integer;
using rules_internal::PressureNumber;
using rules_internal::Seconds;
using rules_internal::Share;

std::string Quoted(std::string_view text) {
  std::string shown;
  for (const char c : text.substr(0, 60)) shown += c >= ' ' && c <= '~' ? c : '?';
  return fmt::format("'{}{}'", shown, text.size() > 60 ? "..." : "");
}

int LineOf(const YAML::Node& node) { return node.Mark().line + 1; }

std::optional<CellEvent> EventNamed(std::string_view name) {
  for (int i = 0; i < kCellEvents; ++i) {
    if (name == CellEventName(static_cast<CellEvent>(i))) return static_cast<CellEvent>(i);
  }
  return std::nullopt;
}

std::optional<CellState> StateNamed(std::string_view name) {
  for (int i = 0; i < kCellStates; ++i) {
    if (name == CellStateName(static_cast<CellState>(i))) return static_cast<CellState>(i);
  }
  return std::nullopt;
}

std::string FromText(std::optional<CellState> from) { return from ? std::string(CellStateName(*from)) : "none"; }

// Reads one file. Goes on after an error, so that a user sees all of them at once.
class Parser {
 public:
  explicit Parser(const std::string& name) { rules_->name = name; }

  RulesCheck Run(std::string_view text) {
    try {
      const YAML::Node root = LoadYamlDocument(std::string(text));
      if (root.IsNull()) {
        Error(1, "the file is empty; `kvcell rules show balanced` prints one to start from");
      } else if (!root.IsMap()) {
        Error(LineOf(root), "expected names such as `rules:` at the top");
      } else {
        ReadTop(root);
      }
    } catch (const YAML::Exception& error) {
      Error(error.mark.line + 1, error.msg);
    }
    if (check_.errors.empty()) Conclude();
    const auto by_line = [](const RuleMessage& a, const RuleMessage& b) { return a.line < b.line; };
    std::stable_sort(check_.errors.begin(), check_.errors.end(), by_line);
    std::stable_sort(check_.warnings.begin(), check_.warnings.end(), by_line);
    if (check_.errors.empty()) {
      rules_->warnings = check_.warnings;
      check_.rules = std::move(rules_);
    }
    return std::move(check_);
  }

 private:
  using Field = std::pair<std::string_view, std::function<void(const YAML::Node&)>>;

  void Error(int line, std::string message) { check_.errors.push_back({line, std::move(message)}); }
  void Warn(int line, std::string message) { check_.warnings.push_back({line, std::move(message)}); }

  // Hands each entry of a map to its reader; unknown and repeated names are errors that list what is allowed.
  void ReadMap(const YAML::Node& node, std::string_view what, const std::vector<Field>& fields) {
    if (!node.IsMap()) return Error(LineOf(node), fmt::format("{} must be a map of names and values", what));
    std::vector<std::string> seen;
    for (const auto& pair : node) {
      const std::string key = pair.first.IsScalar() ? pair.first.Scalar() : "";
      const int line = LineOf(pair.first);
      const auto field =
          std::find_if(fields.begin(), fields.end(), [&](const Field& candidate) { return candidate.first == key; });
      if (field == fields.end()) {
        std::string names;
        for (const Field& candidate : fields) names += fmt::format("{}{}", names.empty() ? "" : ", ", candidate.first);
        Error(line, fmt::format("{} is not known in {}; allowed are {}", Quoted(key), what, names));
        continue;
      }
      if (std::find(seen.begin(), seen.end(), key) != seen.end()) {
        Error(line, fmt::format("{} stands twice in {}", Quoted(key), what));
        continue;
      }
      seen.push_back(key);
      field->second(pair.second);
    }
  }

  // A scalar's text read by `parse`; an error names the field and what it takes.
  template <typename T, typename F>
  void Scalar(const YAML::Node& node, std::string_view field, std::string_view takes, F parse, T* to) {
    if (node.IsScalar()) {
      if (const auto value = parse(std::string_view(node.Scalar()))) {
        *to = static_cast<T>(*value);
        return;
      }
    }
    Error(LineOf(node), fmt::format("{} takes {}, not {}", field, takes,
                                    node.IsScalar() ? Quoted(node.Scalar()) : std::string("a list or map")));
  }
  static auto IntegerIn(int64_t low, int64_t high) {
    return [low, high](std::string_view text) -> std::optional<int64_t> {
      const auto value = Integer(text);
      return value && *value >= low && *value <= high ? value : std::nullopt;
    };
  }

  template <typename T>
  void Compare(const YAML::Node& node, std::string_view field, std::string_view takes,
               std::optional<T> (*value)(std::string_view), Range<T>* to) {
    if (node.IsSequence()) {  // [4, 5, 6]: consecutive numbers
      ReadList(node, field, takes, value, to);
      return;
    }
    Scalar(
        node, field, takes, [&](std::string_view text) { return Comparison<T>(text, value); }, to);
  }
  template <typename T>
  void ReadList(const YAML::Node& node, std::string_view field, std::string_view takes,
                std::optional<T> (*value)(std::string_view), Range<T>* to) {
    std::vector<T> values;
    for (const YAML::Node& item : node) {
      T one{};
      const size_t before = check_.errors.size();
      Scalar(item, field, takes, value, &one);
      if (check_.errors.size() > before) return;
      values.push_back(one);
    }
    std::sort(values.begin(), values.end());
    for (size_t i = 1; i < values.size(); ++i) {
      if (values[i] - values[i - 1] > T{1}) {
        return Error(LineOf(node), fmt::format("{} leaves a gap; write one rule for each run of numbers", field));
      }
    }
    if (values.empty()) return Error(LineOf(node), fmt::format("{} is an empty list", field));
    *to = {values.front(), values.back()};
  }

  void ReadTop(const YAML::Node& root) {
    ReadMap(root, "a rule file",
            {{"version", [&](const YAML::Node& n) { Scalar(n, "version", "1", IntegerIn(1, 1), &version_); }},
             {"name", [&](const YAML::Node& n) { Scalar(n, "name", "a text", Text, &rules_->name); }},
             {"description", [&](const YAML::Node& n) { Scalar(n, "description", "a text", Text, &description_); }},
             {"budgets", [&](const YAML::Node& n) { ReadBudgets(n); }},
             {"codec", [&](const YAML::Node& n) { ReadBaseCodec(n); }},
             {"codecs", [&](const YAML::Node& n) { ReadCodecs(n); }},
             {"exact", [&](const YAML::Node& n) { ReadExact(n); }},
             {"pressure", [&](const YAML::Node& n) { ReadPressure(n); }},
             {"thrash", [&](const YAML::Node& n) { ReadThrash(n); }},
             {"rules", [&](const YAML::Node& n) { ReadRules(n); }},
             {"state_transition_rules", [&](const YAML::Node& n) { ReadRules(n); }}});
  }

  static std::optional<std::string> Text(std::string_view text) {
    return text.size() <= 1000 ? std::optional(std::string(text)) : std::nullopt;
  }

  void ReadBudgets(const YAML::Node& node) {
    const auto budget = [&](std::optional<uint64_t>* to) {
      return [this, to](const YAML::Node& n) {
        uint64_t bytes = 0;
        Scalar(n, "a budget", "a size such as 256MiB or 2G", Bytes, &bytes);
        *to = bytes;
      };
    };
    ReadMap(node, "budgets", {{"ram", budget(&rules_->ram_budget)}, {"file", budget(&rules_->file_budget)}});
  }

  std::optional<CodecSpec> Codec(const YAML::Node& node) {
    auto codec = node.IsScalar() ? ParseCodec(node.Scalar())
                                 : Result<CodecSpec>(Fail(StatusCode::kInvalidArgument,
                                                          "a codec is a text such as i4 or k=int8:g64,v=int4:g64"));
    if (codec) return *std::move(codec);
    Error(LineOf(node), codec.error().message());
    return std::nullopt;
  }

  void ReadBaseCodec(const YAML::Node& node) {
    if (rules_->codec) Error(LineOf(node), "the codec for all layers stands twice");
    rules_->codec = Codec(node);
  }

  void ReadCodecs(const YAML::Node& node) {
    if (!node.IsSequence()) return Error(LineOf(node), "codecs must be a list such as `- {layers: 0-3, codec: i8}`");
    for (const YAML::Node& item : node) {
      if (item.IsScalar()) {
        ReadBaseCodec(item);
        continue;
      }
      Range<int64_t> layers, heads;
      std::optional<CodecSpec> codec;
      ReadMap(item, "an entry of codecs",
              {{"codec", [&](const YAML::Node& n) { codec = Codec(n); }},
               {"layers", [&](const YAML::Node& n) { Compare<int64_t>(n, "layers", kNumbers, Number, &layers); }},
               {"heads", [&](const YAML::Node& n) { Compare<int64_t>(n, "heads", kNumbers, Number, &heads); }}});
      if (!codec) {
        if (item.IsMap() && !item["codec"]) Error(LineOf(item), "an entry of codecs needs a codec");
        continue;
      }
      if (layers.any() && heads.any()) {
        if (rules_->codec) Error(LineOf(item), "the codec for all layers stands twice");
        rules_->codec = codec;
      } else {
        AddCodecRange(layers, heads, *codec, LineOf(item));
      }
    }
  }

  void AddCodecRange(const Range<int64_t>& layers, const Range<int64_t>& heads, const CodecSpec& codec, int line) {
    const auto clamp = [](int64_t value) {
      return static_cast<int32_t>(std::clamp<int64_t>(value, 0, std::numeric_limits<int32_t>::max()));
    };
    const CodecRange range{.first_layer = clamp(layers.low),
                           .last_layer = clamp(layers.high),
                           .first_head = clamp(heads.low),
                           .last_head = clamp(heads.high),
                           .codec = codec};
    for (size_t i = 0; i < rules_->codec_ranges.size(); ++i) {
      const CodecRange& other = rules_->codec_ranges[i];
      const int32_t layer = std::max(range.first_layer, other.first_layer);
      const int32_t head = std::max(range.first_head, other.first_head);
      if (!range.holds(layer, head) || !other.holds(layer, head) || other.codec == codec) continue;
      Error(line, fmt::format("layer {}, head {} has another codec in line {} already; let the ranges not overlap",
                              layer, head, codec_lines_[i]));
    }
    rules_->codec_ranges.push_back(range);
    codec_lines_.push_back(line);
  }

  void ReadExact(const YAML::Node& node) {
    ReadMap(node, "exact",
            {{"sinks",
              [&](const YAML::Node& n) {
                int32_t value = 0;
                Scalar(n, "sinks", "0..64 tokens", IntegerIn(0, kBlockTokens), &value);
                rules_->sinks = value;
              }},
             {"recent_blocks", [&](const YAML::Node& n) {
                int32_t value = 0;
                Scalar(n, "recent_blocks", "0..1024 blocks of 64 tokens", IntegerIn(0, 1024), &value);
                rules_->recent_blocks = value;
              }}});
  }

  void ReadPressure(const YAML::Node& node) {
    PressureLimits& limits = rules_->pressure;
    const auto order = [](std::string_view text) -> std::optional<VictimOrder> {
      if (text == "distance") return VictimOrder::kDistance;
      if (text == "frequency") return VictimOrder::kFrequency;
      if (text == "mass") return VictimOrder::kMass;
      return std::nullopt;
    };
    constexpr std::string_view kShare = "a share such as 0.8 or 80 %";
    ReadMap(node, "pressure",
            {{"soft", [&](const YAML::Node& n) { Scalar(n, "soft", kShare, Share, &limits.soft); }},
             {"hard", [&](const YAML::Node& n) { Scalar(n, "hard", kShare, Share, &limits.hard); }},
             {"min_free",
              [&](const YAML::Node& n) { Scalar(n, "min_free", "a size such as 1GiB", Bytes, &limits.min_free); }},
             {"order",
              [&](const YAML::Node& n) { Scalar(n, "order", "distance, frequency or mass", order, &limits.order); }},
             {"blocks_per_step",
              [&](const YAML::Node& n) {
                Scalar(n, "blocks_per_step", "1..65536", IntegerIn(1, 65536), &limits.blocks_per_step);
              }},
             {"wait_ms", [&](const YAML::Node& n) {
                Scalar(n, "wait_ms", "1..600000 milliseconds", IntegerIn(1, 600000), &limits.wait_ms);
              }}});
    if (limits.soft > limits.hard) {
      Error(LineOf(node), fmt::format("soft is {}, more than hard, which is {}", limits.soft, limits.hard));
    }
  }

  void ReadThrash(const YAML::Node& node) {
    ThrashLimits& limits = rules_->thrash;
    const auto count = [&](std::string_view field, int32_t* to) {
      return [this, field, to](const YAML::Node& n) { Scalar(n, field, "1..1000000", IntegerIn(1, 1000000), to); };
    };
    ReadMap(node, "thrash",
            {{"moves", count("moves", &limits.moves)},
             {"within_steps", count("within_steps", &limits.within_steps)},
             {"rest_steps", count("rest_steps", &limits.rest_steps)}});
  }

  void ReadRules(const YAML::Node& node) {
    if (has_rules_) return Error(LineOf(node), "the rules stand twice; use either `rules` or `state_transition_rules`");
    has_rules_ = true;
    if (node.IsNull()) return;
    if (!node.IsSequence()) {
      return Error(LineOf(node), "rules must be a list such as `- {event: EVICT, from: QUANTIZED, to: EVICTED}`");
    }
    for (const YAML::Node& item : node) ReadRule(item);
  }

  struct Action {
    std::optional<CodecSpec> codec;
    std::string word;
    int line = 0;
  };

  void ReadRule(const YAML::Node& node) {
    CellRule rule;
    rule.line = LineOf(node);
    bool has_event = false, has_from = false, has_to = false;
    Action action;
    const size_t errors = check_.errors.size();
    const auto once = [&](const YAML::Node& n, std::string_view field, bool* has) {
      if (*has) Error(LineOf(n), fmt::format("`{}` and `{}_state` mean the same; keep one of them", field, field));
      *has = true;
    };
    const auto from = [&](const YAML::Node& n) {
      once(n, "from", &has_from);
      ReadState(n, "from", /*none_allowed=*/true, &rule.from);
    };
    const auto to = [&](const YAML::Node& n) {
      once(n, "to", &has_to);
      std::optional<CellState> state;
      ReadState(n, "to", /*none_allowed=*/false, &state);
      if (state) rule.to = *state;
    };
    ReadMap(node, "a rule",
            {{"event",
              [&](const YAML::Node& n) {
                has_event = true;
                Scalar(n, "event", "TOKEN_APPEND, READ_REQUEST, CACHE_MISS, MEMORY_PRESSURE, WRITE_BACK or EVICT",
                       EventNamed, &rule.event);
              }},
             {"from", from},
             {"from_state", from},
             {"to", to},
             {"to_state", to},
             {"when", [&](const YAML::Node& n) { ReadGuard(n, &rule.guard); }},
             {"action", [&](const YAML::Node& n) { ReadAction(n, &action); }}});
    if (!node.IsMap()) return;
    if (!has_event) Error(rule.line, "a rule needs an event");
    if (!has_from) Error(rule.line, "a rule needs the state it leads from (`none` for a cell that does not exist yet)");
    if (!has_to) Error(rule.line, "a rule needs the state it leads to");
    if (check_.errors.size() > errors) return;
    const auto found = ActionOf(rule.event, rule.from, rule.to);
    if (!found) {
      return Error(rule.line,
                   fmt::format("{} can't lead from {} to {}; what it can do is {}", CellEventName(rule.event),
                               FromText(rule.from), CellStateName(rule.to), TransitionsText(rule.event)));
    }
    rule.action = *found;
    CheckGuard(&rule);
    CheckAction(rule, action);
    written_.push_back(rule);
  }

  void ReadState(const YAML::Node& node, std::string_view field, bool none_allowed, std::optional<CellState>* to) {
    if (node.IsScalar() && none_allowed && node.Scalar() == "none") return;
    if (node.IsScalar()) *to = StateNamed(node.Scalar());
    if (*to) return;
    Error(LineOf(node), fmt::format("{} takes {}ACTIVE, QUANTIZED, PERSISTED, RECOVERING or EVICTED, not {}", field,
                                    none_allowed ? "none, " : "",
                                    node.IsScalar() ? Quoted(node.Scalar()) : std::string("a list or map")));
  }

  static constexpr std::string_view kNumbers = "numbers such as 3, 0-11 or \">= 4\"";
  static std::optional<int64_t> Number(std::string_view text) {
    const auto value = Integer(text);
    return value && *value >= 0 ? value : std::nullopt;
  }

  void ReadGuard(const YAML::Node& node, CellGuard* guard) {
    int within_line = 0;
    const auto sealed = [](std::string_view text) -> std::optional<bool> {
      return text == "sealed" ? std::optional(true) : text == "open" ? std::optional(false) : std::nullopt;
    };
    const auto truth = [](std::string_view text) -> std::optional<bool> {
      return text == "true" || text == "yes"   ? std::optional(true)
             : text == "false" || text == "no" ? std::optional(false)
                                               : std::nullopt;
    };
    const auto share = [&](std::string_view field, Range<double>* to) {
      return Field(field, [this, field, to](const YAML::Node& n) {
        Compare<double>(n, field, "a comparison such as \">= 0.8\"", Share, to);
      });
    };
    ReadMap(node, "when",
            {{"block",
              [&](const YAML::Node& n) {
                bool value = false;
                Scalar(n, "block", "sealed or open", sealed, &value);
                guard->sealed = value;
              }},
             {"stored",
              [&](const YAML::Node& n) {
                bool value = false;
                Scalar(n, "stored", "true or false", truth, &value);
                guard->stored = value;
              }},
             {"pressure",
              [&](const YAML::Node& n) {
                Compare<int64_t>(n, "pressure", "none, soft, hard or a comparison such as \">= soft\"", PressureNumber,
                                 &guard->pressure);
              }},
             {"age_tokens",
              [&](const YAML::Node& n) {
                Compare<int64_t>(n, "age_tokens", "a comparison such as \">= 1024\"", Number, &guard->age_tokens);
              }},
             {"reads",
              [&](const YAML::Node& n) {
                Compare<int64_t>(n, "reads", "a comparison such as \"< 2\"", Number, &guard->reads);
              }},
             {"within_steps",
              [&](const YAML::Node& n) {
                within_line = LineOf(n);
                Scalar(n, "within_steps", "1..64 steps, for `reads`", IntegerIn(1, 64), &guard->within_steps);
              }},
             share("mass", &guard->mass),
             {"layers", [&](const YAML::Node& n) { Compare<int64_t>(n, "layers", kNumbers, Number, &guard->layers); }},
             {"heads", [&](const YAML::Node& n) { Compare<int64_t>(n, "heads", kNumbers, Number, &guard->heads); }},
             {"idle",
              [&](const YAML::Node& n) {
                Compare<double>(n, "idle", "a comparison such as \">= 10m\"", Seconds, &guard->idle_s);
              }},
             share("ram_fill", &guard->ram_fill),
             share("file_fill", &guard->file_fill)});
    if (within_line > 0 && guard->reads.any()) {
      Error(within_line, "within_steps says in how many steps `reads` are counted; add `reads`, or take it out");
    }
  }

  void ReadAction(const YAML::Node& node, Action* action) {
    action->line = LineOf(node);
    if (node.IsScalar()) {
      action->word = node.Scalar();
      return;
    }
    ReadMap(
        node, "action",
        {{"codec", [&](const YAML::Node& n) { action->codec = Codec(n); }},
         {"do", [&](const YAML::Node& n) { Scalar(n, "do", "a word such as code or drop", Text, &action->word); }}});
  }

  // Guards that contradict what the transition is, and those that it always has.
  void CheckGuard(CellRule* rule) {
    CellGuard& guard = rule->guard;
    const bool codes = rule->action == CellAction::kCode;
    if (codes || rule->event == CellEvent::kMemoryPressure) {
      if (guard.sealed == false) Error(rule->line, "an open block can't be coded or moved; only a sealed one can");
      guard.sealed = true;
    }
    if (rule->event == CellEvent::kMemoryPressure && guard.pressure.high < static_cast<int64_t>(Pressure::kSoft)) {
      Error(rule->line, "MEMORY_PRESSURE comes from soft on; with `pressure: none` the rule could never hold");
    }
    if (rule->event == CellEvent::kTokenAppend && !rule->from && !(guard == CellGuard{})) {
      Error(rule->line, "TOKEN_APPEND from none takes no conditions: every token needs its cell");
    }
    if (rule->event == CellEvent::kWriteBack && !guard.PlaceOnly()) {
      Error(rule->line,
            "WRITE_BACK says that bytes have arrived; it takes no conditions but block, stored, layers and "
            "heads");
    }
    if (rule->event == CellEvent::kEvict && guard.age_tokens.low > 0) {
      if (guard.age_tokens.high != Range<int64_t>{}.high || guard.age_tokens.low < kBlockTokens) {
        Error(rule->line, fmt::format("a window is written `age_tokens: \">= N\"` with N of {} or more", kBlockTokens));
      }
    }
  }

  void CheckAction(const CellRule& rule, const Action& action) {
    if (!action.word.empty()) {
      // Words that people write for what the transition does anyway.
      static constexpr std::array<std::pair<std::string_view, CellAction>, 12> kWords = {{
          {"create", CellAction::kCreate},
          {"code", CellAction::kCode},
          {"write", CellAction::kDropRam},
          {"drop_ram", CellAction::kDropRam},
          {"fetch", CellAction::kFetch},
          {"replicate", CellAction::kReplicate},
          {"verify", CellAction::kAdmit},
          {"admit", CellAction::kAdmit},
          {"mark_stored", CellAction::kMarkStored},
          {"drop", CellAction::kDrop},
          {"drop_replica", CellAction::kCode},
          {"none", CellAction::kNone},
      }};
      const auto word =
          std::find_if(kWords.begin(), kWords.end(), [&](const auto& w) { return w.first == action.word; });
      if (word == kWords.end() || word->second != rule.action) {
        std::string fits;
        for (const auto& [name, does] : kWords) {
          if (does == rule.action) fits += fmt::format("{}{}", fits.empty() ? "" : " or ", name);
        }
        Error(action.line, fmt::format("{} is not what {} -> {} does; that is {}", Quoted(action.word),
                                       FromText(rule.from), CellStateName(rule.to), fits));
      }
    }
    if (!action.codec) return;
    if (rule.action != CellAction::kCode) {
      Error(action.line, "a codec belongs to a rule that leads from ACTIVE to QUANTIZED");
      return;
    }
    action_codecs_.push_back({rule.guard.layers, rule.guard.heads, *action.codec, action.line});
  }

  void Conclude() {
    ApplyActionCodecs();
    if (!has_rules_) {
      for (const CellRule& rule : DefaultRules()->table.rules().first(DefaultRules()->n_written))
        written_.push_back(rule);
    }
    CheckOverlaps();
    CheckReplicas();
    if (!check_.errors.empty()) return;
    FindWindows();
    AddImplied();
    WarnUnreachable();
    FindDependencies();
  }

  // `action: {codec: X}` says the same as an entry of `codecs`; where both speak of one cell they must agree.
  void ApplyActionCodecs() {
    for (const ActionCodec& a : action_codecs_) {
      if (!a.layers.any() || !a.heads.any()) {
        AddCodecRange(a.layers, a.heads, a.codec, a.line);
      } else if (rules_->codec && !(*rules_->codec == a.codec)) {
        Error(a.line,
              fmt::format("cells are coded as {} here, but {} stands elsewhere in the file; a cell has one codec",
                          a.codec.name, rules_->codec->name));
      } else {
        rules_->codec = a.codec;
      }
    }
  }

  void CheckOverlaps() {
    for (size_t i = 0; i < written_.size(); ++i) {
      for (size_t j = 0; j < i; ++j) {
        const CellRule &a = written_[j], &b = written_[i];
        if (a.event != b.event || a.from != b.from || !a.guard.Covers(b.guard)) continue;
        if (a.guard == b.guard && a.to != b.to) {
          Error(b.line, fmt::format("contradicts line {}: {} from {} under the same conditions leads to {} there",
                                    a.line, CellEventName(b.event), FromText(b.from), CellStateName(a.to)));
        } else {
          Warn(b.line, fmt::format("never applies: line {} takes every cell that this rule fits", a.line));
        }
        break;
      }
    }
  }

  void FindWindows() {
    for (const CellRule& rule : written_) {
      if (rule.event != CellEvent::kEvict || rule.guard.age_tokens.low <= 0 || rule.from != CellState::kQuantized)
        continue;
      rules_->windows.push_back({.layers = rule.guard.layers,
                                 .tokens = rule.guard.age_tokens.low,
                                 .keep = rule.to == CellState::kPersisted,
                                 .line = rule.line});
    }
  }

  // Rules that hold in every table, after those of the file: how cells begin, what a write means, how cells end.
  void AddImplied() {
    rules_->n_written = written_.size();
    std::vector<CellRule> table = std::move(written_);
    const auto imply = [&](CellEvent event, std::optional<CellState> from, CellState to, CellGuard guard = {}) {
      table.push_back({.event = event, .from = from, .to = to, .guard = guard, .action = *ActionOf(event, from, to)});
    };
    using enum CellState;
    imply(CellEvent::kTokenAppend, std::nullopt, kActive);
    imply(CellEvent::kWriteBack, kQuantized, kQuantized, {.stored = false});
    imply(CellEvent::kWriteBack, kRecovering, kQuantized);
    for (const CellState from : {kActive, kQuantized, kPersisted, kRecovering})
      imply(CellEvent::kEvict, from, kEvicted);
    rules_->table = CellRules(std::move(table));
  }

  void WarnUnreachable() {
    std::array<bool, kCellStates> reached{};
    bool grows = true;
    while (grows) {
      grows = false;
      for (const CellRule& rule : rules_->table.rules()) {
        if (rule.from && !reached[static_cast<size_t>(*rule.from)]) continue;
        bool& to = reached[static_cast<size_t>(rule.to)];
        grows |= !to;
        to = true;
      }
    }
    for (int i = 0; i < kCellStates; ++i) {
      if (reached[static_cast<size_t>(i)]) continue;
      Warn(0, fmt::format("no rule leads to {}", CellStateName(static_cast<CellState>(i))));
    }
    for (const CellRule& rule : rules_->table.rules().first(rules_->n_written)) {
      if (rule.from && !reached[static_cast<size_t>(*rule.from)]) {
        Warn(rule.line, fmt::format("starts from {}, which no rule leads to", CellStateName(*rule.from)));
      }
    }
    bool frees = false;
    for (const CellRule& rule : rules_->table.rules()) {
      frees |= rule.event == CellEvent::kMemoryPressure && rule.action != CellAction::kCode;
    }
    if (!frees) Warn(0, "no rule gives RAM back under pressure: a step that finds the budget full is refused");
  }

  // A replica is asked for with CACHE_MISS from QUANTIZED; what has arrived must lead on, and give its room back.
  void CheckReplicas() {
    const auto has = [&](CellEvent event, std::optional<CellState> from, CellState to) {
      return std::any_of(written_.begin(), written_.end(), [&](const CellRule& rule) {
        return rule.event == event && rule.from == from && rule.to == to;
      });
    };
    for (const CellRule& rule : written_) {
      if (rule.action != CellAction::kReplicate) continue;
      if (!has(CellEvent::kWriteBack, CellState::kRecovering, CellState::kActive)) {
        Error(rule.line, "an exact replica is made here, so a rule WRITE_BACK from RECOVERING to ACTIVE is needed");
      }
      if (!has(CellEvent::kMemoryPressure, CellState::kActive, CellState::kQuantized)) {
        Warn(rule.line, "replicas are never dropped: no rule leads from ACTIVE to QUANTIZED on MEMORY_PRESSURE");
      }
    }
  }

  void FindDependencies() {
    Rules& r = *rules_;
    r.codes_on_seal = false;
    for (const CellRule* rule : r.table.Of(CellEvent::kTokenAppend, CellState::kActive)) {
      if (!rule->guard.PlaceOnly()) {
        Depends(*rule, "whether a sealed block is coded depends on more than its place");
      } else if (rule->guard.layers.any() && rule->guard.heads.any()) {
        r.codes_on_seal = true;
      }
    }
    for (const CellRule& rule : r.table.rules()) {
      const bool mass = !rule.guard.mass.any();
      r.measures_mass |= mass;
      r.evicts_by_policy |= RaisesEvict(rule);
      if (rule.action == CellAction::kFetch) r.fetches = true;
      if (rule.action == CellAction::kReplicate) {
        r.replicates_on_read = true;
        Depends(rule, "what is read often has an exact replica while memory allows");
      }
      if (rule.event == CellEvent::kMemoryPressure && rule.action == CellAction::kCode && !r.codes_on_seal) {
        Depends(rule, "cells are exact until memory asks for their room");
      }
      if (rule.event == CellEvent::kMemoryPressure && rule.to == CellState::kEvicted) {
        Depends(rule, "cells are given up when memory asks for their room");
      }
      if (rule.event == CellEvent::kEvict && (mass || !rule.guard.reads.any() || !rule.guard.pressure.any() ||
                                              !rule.guard.ram_fill.any() || !rule.guard.idle_s.any())) {
        Depends(rule, "which cells are given up depends on more than their place");
      }
    }
    r.measures_mass |= r.pressure.order == VictimOrder::kMass;
    r.depends_on_memory = !r.dependencies.empty();
    if (r.depends_on_memory) {
      Warn(0, fmt::format("results depend on memory, not on positions alone: {}", fmt::join(r.dependencies, "; ")));
    }
  }

  void Depends(const CellRule& rule, std::string_view why) {
    rules_->dependencies.push_back(rule.line > 0 ? fmt::format("line {}: {}", rule.line, why) : std::string(why));
  }

  struct ActionCodec {
    Range<int64_t> layers, heads;
    CodecSpec codec;
    int line = 0;
  };

  std::shared_ptr<Rules> rules_ = std::make_shared<Rules>();
  RulesCheck check_;
  std::vector<CellRule> written_;
  std::vector<int> codec_lines_;  // of rules_->codec_ranges
  std::vector<ActionCodec> action_codecs_;
  bool has_rules_ = false;
  int64_t version_ = 1;
  std::string description_;
};

template <typename T>
std::string RangeText(const Range<T>& range) {
  if (range.low == range.high) return fmt::format("{}", range.low);
  if (range.high == std::numeric_limits<T>::max()) return fmt::format(">= {}", range.low);
  if (range.low == std::numeric_limits<T>::lowest()) return fmt::format("<= {}", range.high);
  return fmt::format("{}..{}", range.low, range.high);
}

}  // namespace

bool RaisesEvict(const CellRule& rule) {
  return rule.event == CellEvent::kEvict && rule.guard.age_tokens.any() && !rule.guard.PlaceOnly();
}

std::string GuardText(const CellGuard& guard) {
  std::string text;
  const auto add = [&](std::string part) { text += (text.empty() ? "" : ", ") + std::move(part); };
  const auto range = [&](std::string_view name, const auto& r) {
    if (!r.any()) add(fmt::format("{} {}", name, RangeText(r)));
  };
  if (guard.sealed) add(*guard.sealed ? "sealed" : "open");
  if (guard.stored) add(*guard.stored ? "stored" : "not stored");
  if (!guard.pressure.any()) {
    const auto level = [](int64_t n) { return PressureName(static_cast<Pressure>(std::clamp<int64_t>(n, 0, 2))); };
    const bool open_end = guard.pressure.high > static_cast<int64_t>(Pressure::kHard);
    add(guard.pressure.low == guard.pressure.high ? fmt::format("pressure {}", level(guard.pressure.low))
        : open_end                                ? fmt::format("pressure >= {}", level(guard.pressure.low))
                                                  : fmt::format("pressure <= {}", level(guard.pressure.high)));
  }
  range("age", guard.age_tokens);
  if (!guard.reads.any()) add(fmt::format("reads {} in {} steps", RangeText(guard.reads), guard.within_steps));
  range("mass", guard.mass);
  range("layers", guard.layers);
  range("heads", guard.heads);
  range("idle s", guard.idle_s);
  range("ram fill", guard.ram_fill);
  range("file fill", guard.file_fill);
  return text;
}

int64_t Rules::WindowOf(int32_t layer) const {
  for (const EvictWindow& window : windows) {
    if (window.layers.holds(layer)) return window.tokens;
  }
  return 0;
}

bool Rules::KeepsEvicted(int32_t layer) const {
  for (const EvictWindow& window : windows) {
    if (window.layers.holds(layer)) return window.keep;
  }
  return false;
}

std::string Rules::IdentityText() const {
  std::string text;
  for (const EvictWindow& window : windows) {
    text += fmt::format("window {} layers {};", window.tokens, window.layers.any() ? "all" : RangeText(window.layers));
  }
  if (!depends_on_memory) return text;
  for (const CellRule& rule : table.rules()) {
    text += fmt::format("{} {} {} {};", CellEventName(rule.event), FromText(rule.from), CellStateName(rule.to),
                        GuardText(rule.guard));
  }
  return text;
}

RulesCheck CheckRules(std::string_view text, const std::string& name) { return Parser(name).Run(text); }

Result<std::shared_ptr<const Rules>> ParseRules(std::string_view text, const std::string& name) {
  RulesCheck check = CheckRules(text, name);
  if (check.rules != nullptr) return std::move(check.rules);
  const RuleMessage& first = check.errors.front();
  const size_t more = check.errors.size() - 1;
  return Fail(StatusCode::kInvalidArgument,
              fmt::format("{}:{}: {}{}", name, first.line, first.message,
                          more == 0 ? "" : fmt::format(" ({} more: `kvcell rules check` lists them)", more)));
}

Result<std::shared_ptr<const Rules>> LoadRules(const std::string& path) {
  const auto text = ReadTextFile(path, kMostSettingsBytes);
  return text ? ParseRules(*text, path) : Fail(text.error());
}

const std::shared_ptr<const Rules>& DefaultRules() {
  static const std::shared_ptr<const Rules> rules = ProfileRules("balanced").value();
  return rules;
}

Result<std::shared_ptr<const Rules>> ProfileRules(std::string_view name) {
  const std::string_view text = ProfileText(name);
  if (text.empty()) {
    return Fail(StatusCode::kInvalidArgument,
                fmt::format("there is no profile {}; there are {}", Quoted(name), fmt::join(ProfileNames(), ", ")));
  }
  return ParseRules(text, fmt::format("profile {}", name));
}

std::string RulesMermaid(const Rules& rules) {
  std::string text = "stateDiagram-v2\n";
  size_t i = 0;
  for (const CellRule& rule : rules.table.rules()) {
    const std::string guard = GuardText(rule.guard);
    text += fmt::format("    {} --> {}: {}{}{}\n", rule.from ? CellStateName(*rule.from) : "[*]",
                        CellStateName(rule.to), CellEventName(rule.event), guard.empty() ? "" : " / ", guard);
    if (++i == rules.n_written && i < rules.table.rules().size()) text += "    %% what always holds:\n";
  }
  return text;
}

std::string RulesDot(const Rules& rules) {
  std::string text = "digraph rules {\n  rankdir=LR;\n  node [shape=box, style=rounded];\n  none [shape=point];\n";
  size_t i = 0;
  for (const CellRule& rule : rules.table.rules()) {
    const std::string guard = GuardText(rule.guard);
    text += fmt::format("  {} -> {} [label=\"{}{}{}\\n{}\"{}];\n", FromText(rule.from), CellStateName(rule.to),
                        CellEventName(rule.event), guard.empty() ? "" : "\\n", guard, CellActionName(rule.action),
                        i++ < rules.n_written ? "" : ", style=dashed");
  }
  return text + "}\n";
}

}  // namespace kvcell
