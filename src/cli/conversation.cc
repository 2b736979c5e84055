#include "cli/conversation.h"

#include <fmt/format.h>

#include <algorithm>
#include <mutex>
#include <nlohmann/json.hpp>
#include <utility>

#include "cli/units.h"
#include "cli/utf8.h"

namespace kvcell::cli {
namespace {

// Files that go on being damaged under a running process are not waited for.
constexpr int kMostRepairs = 8;

using Clock = std::chrono::steady_clock;

double MillisecondsSince(Clock::time_point start) {
  return std::chrono::duration<double, std::milli>(Clock::now() - start).count();
}

bool HasWindows(const Geometry& geometry) {
  return std::any_of(geometry.begin(), geometry.end(), [](const LayerGeometry& layer) { return layer.window > 0; });
}

template <typename T>
void ReadField(const nlohmann::json& object, const char* name, T* value) {
  const auto field = object.find(name);
  if (field != object.end() && (field->is_number() || field->is_boolean())) *value = field->get<T>();
}

}  // namespace

ConversationSettings SettingsFrom(const Options& options, SamplerGiven sampler_given) {
  return {.session = options.session,
          .sampler = {.temperature = static_cast<float>(options.temp),
                      .top_k = options.top_k,
                      .top_p = static_cast<float>(options.top_p),
                      .min_p = static_cast<float>(options.min_p),
                      .seed = options.seed},
          .sampler_given = sampler_given,
          .raw = options.raw,
          .ignore_eos = options.ignore_eos,
          .save_every = options.save_every,
          .durability = options.durability_given ? std::optional(options.durability) : std::nullopt};
}

Result<std::unique_ptr<Conversation>> Conversation::Open(Engine* engine, const ConversationSettings& settings) {
  std::unique_ptr<Conversation> conversation(new Conversation(engine, settings));
  conversation->turn_start_ = Clock::now();
  if (!settings.session.empty()) {
    Result<OpenedSession> opened = engine->cache->OpenSession(settings.session, /*create=*/true);
    if (!opened) return Fail(opened.error());
    if (opened->created) {
      conversation->sequence_ = opened->sequence;
    } else {
      KVCELL_FAIL_IF_ERROR(conversation->Resume(*std::move(opened), settings.sampler_given));
    }
    return conversation;
  }
  const Result<SequenceId> sequence = engine->cache->Create();
  if (!sequence) return Fail(sequence.error());
  conversation->sequence_ = *sequence;
  return conversation;
}

Status Conversation::Resume(OpenedSession opened, SamplerGiven sampler_given) {
  resumed_ = true;
  sequence_ = opened.sequence;
  saved_length_ = opened.usable;
  ReadExtras(opened.extras, sampler_given);
  const auto stored = static_cast<int64_t>(opened.tokens.size());
  if (stored > engine_->context) {
    return Status(StatusCode::kInvalidArgument,
                  fmt::format("session '{}' holds {} tokens, more than the context of {}; raise --ctx", session_,
                              stored, engine_->context));
  }
  int64_t from = opened.usable;
  if (from == stored && stored > 0 && opened.logits.empty() && pending_.empty()) {
    // The store has no logits of the last token: it is computed once more.
    const Result<int64_t> position = engine_->cache->Trim(sequence_, stored - 1);
    if (!position) return position.error();
    from = *position;
  }
  reused_tokens_ = from;
  pending_.insert(pending_.begin(), opened.tokens.begin() + from, opened.tokens.end());
  if (pending_.empty()) logits_ = std::move(opened.logits);
  if (opened.usable < stored) {
    note_ = fmt::format("session '{}': {}; {} of its {} tokens are used as stored, the rest is computed again",
                        session_, opened.note, FormatCount(from), FormatCount(stored));
  }
  if (!opened.notice.empty()) note_ = note_.empty() ? opened.notice : fmt::format("{}; {}", opened.notice, note_);
  return OkStatus();
}

void Conversation::ReadExtras(const std::string& extras, SamplerGiven sampler_given) {
  // Another program may have stored the session: whatever is not as expected is left at its default.
  const nlohmann::json object = nlohmann::json::parse(extras, nullptr, false);
  if (!object.is_object()) return;
  ReadField(object, "ended", &ended_);
  if (!raw_) ReadField(object, "raw", &raw_);
  if (const auto level = object.find("durability"); !durability_ && level != object.end() && level->is_string()) {
    durability_ = ParseDurability(level->get<std::string>());
  }
  if (const auto sampler = object.find("sampler"); sampler != object.end() && sampler->is_object()) {
    SamplerOptions options = sampler_.options();
    if (!sampler_given.temp) ReadField(*sampler, "temperature", &options.temperature);
    if (!sampler_given.top_k) ReadField(*sampler, "top_k", &options.top_k);
    if (!sampler_given.top_p) ReadField(*sampler, "top_p", &options.top_p);
    if (!sampler_given.min_p) ReadField(*sampler, "min_p", &options.min_p);
    if (!sampler_given.seed) ReadField(*sampler, "seed", &options.seed);
    sampler_ = Sampler(options);
  }
  if (const auto pending = object.find("pending"); pending != object.end() && pending->is_array()) {
    const int32_t n_vocab = engine_->model->facts().n_vocab;
    for (const nlohmann::json& token : *pending) {
      if (!token.is_number_integer() || token.get<int64_t>() < 0 || token.get<int64_t>() >= n_vocab) {
        pending_.clear();
        return;
      }
      pending_.push_back(token.get<Token>());
    }
  }
}

std::string Conversation::WriteExtras() const {
  const SamplerOptions& sampler = sampler_.options();
  nlohmann::json object = {{"ended", ended_},
                           {"raw", raw_},
                           {"sampler",
                            {{"temperature", sampler.temperature},
                             {"top_k", sampler.top_k},
                             {"top_p", sampler.top_p},
                             {"min_p", sampler.min_p},
                             {"seed", sampler.seed}}}};
  if (!pending_.empty()) object["pending"] = pending_;
  object["durability"] = DurabilityName(durability_.value_or(engine_->cache->options().durability));
  return object.dump();
}

Result<std::vector<Token>> Conversation::TurnTokens(const std::string& text) const {
  const Model& model = *engine_->model;
  if (raw_) return model.Tokenize(text, /*special=*/empty(), /*parse=*/false);
  // Text that spells one of the model's control tokens stays text: it is tokenized apart from the template, whose
  // control tokens count. Other text is tokenized together with it, as the model was trained to see it.
  if (!model.SpellsControlTokens(text)) {
    const Result<std::string> turn = TurnText(text);
    if (!turn) return Fail(turn.error());
    return model.Tokenize(*turn, /*special=*/empty(), /*parse=*/true);
  }
  const std::string stand_in = "kvcell-this-question";
  const Result<std::string> turn = TurnText(stand_in);
  if (!turn) return Fail(turn.error());
  const size_t at = turn->find(stand_in);
  if (at == std::string::npos) {
    return Fail(StatusCode::kUnsupported, "the model's chat template changes what it is given; use --raw");
  }
  Result<std::vector<Token>> tokens = model.Tokenize(turn->substr(0, at), /*special=*/empty(), /*parse=*/true);
  if (!tokens) return tokens;
  const std::string after = turn->substr(at + stand_in.size());
  for (const auto& [part, parse] : {std::pair<const std::string&, bool>(text, false), {after, true}}) {
    const Result<std::vector<Token>> more = model.Tokenize(part, /*special=*/false, parse);
    if (!more) return more;
    tokens->insert(tokens->end(), more->begin(), more->end());
  }
  return tokens;
}

// The user's turn as the chat template writes it where the conversation stands.
Result<std::string> Conversation::TurnText(const std::string& text) const {
  const Model& model = *engine_->model;
  if (empty()) return model.ApplyChatTemplate(std::vector<ChatMessage>{{"user", text}}, true);
  // What the template puts after an answer: its end mark, then the next turn. A made exchange shows it.
  const std::string answer = "kvcell-earlier-answer";
  const Result<std::string> whole =
      model.ApplyChatTemplate(std::vector<ChatMessage>{{"user", "u"}, {"assistant", answer}, {"user", text}}, true);
  if (!whole) return whole;
  const size_t at = whole->find(answer);
  if (at == std::string::npos) {
    return Fail(StatusCode::kUnsupported,
                "the model's chat template drops earlier answers, so a turn can't be added; use --raw");
  }
  return whole->substr(at + answer.size());
}

Status Conversation::AddPrompt(const std::string& text) {
  const int64_t before = TotalLength();
  const auto too_long = [&](std::string_view at_least, int64_t added) {
    return Status(
        StatusCode::kInvalidArgument,
        fmt::format("the prompt has {}{} tokens{}, and the context holds {} with the answer; shorten it or raise --ctx",
                    at_least, FormatCount(added),
                    before > 0 ? fmt::format(", {} are there already", FormatCount(before)) : "",
                    FormatCount(engine_->context)));
  };
  // Tokenizing takes more than linear time: text that can't fit is refused by its length.
  const auto least = static_cast<int64_t>(text.size() / engine_->model->LongestPiece());
  if (before + least >= engine_->context) return too_long("at least ", least);
  const Result<std::vector<Token>> tokens = TurnTokens(text);
  if (!tokens) return tokens.error();
  const auto added = static_cast<int64_t>(tokens->size());
  if (before + added >= engine_->context) return too_long("", added);
  if (added == 0 && before == 0)
    return Status(StatusCode::kInvalidArgument, "the prompt holds no tokens; give some text");
  if (added == 0) return OkStatus();
  if (!turn_start_) turn_start_ = Clock::now();
  pending_.insert(pending_.end(), tokens->begin(), tokens->end());
  logits_.clear();
  ended_ = false;
  return OkStatus();
}

Status Conversation::Step(std::span<const Token> tokens, bool want_logits, const AnswerHooks& hooks) {
  Status status = StepOnce(tokens, want_logits);
  for (int attempt = 0; status.code() == StatusCode::kCorruption && attempt < kMostRepairs; ++attempt) {
    status = ComputeAgain(tokens, want_logits, hooks);
  }
  return status;
}

Status Conversation::ComputeAgain(std::span<const Token> tokens, bool want_logits, const AnswerHooks& hooks) {
  Cache& cache = *engine_->cache;
  const auto before = cache.Tokens(sequence_);
  std::vector<Token> all(before.begin(), before.end());
  std::string what;
  std::unique_lock<std::mutex> lock;
  if (engine_->control != nullptr) lock = engine_->control->Step();
  const Result<int64_t> from = cache.CutToSound(sequence_, &what);
  if (!from) return from.error();
  if (lock.owns_lock()) lock.unlock();
  if (hooks.on_trouble && *from < static_cast<int64_t>(all.size())) {
    hooks.on_trouble(fmt::format("{}; tokens {}..{} are computed again", what, FormatCount(*from),
                                 FormatCount(static_cast<int64_t>(all.size()) - 1)));
  }
  all.insert(all.end(), tokens.begin(), tokens.end());
  const auto chunk_limit = static_cast<size_t>(cache.options().max_step_tokens);
  for (auto at = static_cast<size_t>(*from); at < all.size();) {
    const size_t n = std::min(chunk_limit, all.size() - at);
    KVCELL_RETURN_IF_ERROR(StepOnce(std::span(all).subspan(at, n), want_logits && at + n == all.size()));
    at += n;
  }
  return OkStatus();
}

Status Conversation::StepOnce(std::span<const Token> tokens, bool want_logits) {
  const ModelStep step{.sequence = sequence_, .tokens = tokens, .want_logits = want_logits};
  std::vector<float> logits;
  if (engine_->control != nullptr) engine_->control->ReloadIfAsked();
  std::unique_lock<std::mutex> lock;
  if (engine_->control != nullptr) lock = engine_->control->Step();
  KVCELL_RETURN_IF_ERROR(engine_->model->Forward(engine_->cache.get(), {&step, 1}, &logits));
  if (engine_->control != nullptr) engine_->control->NoteTokens(static_cast<int64_t>(tokens.size()));
  logits_ = std::move(logits);
  return OkStatus();
}

// An empty conversation begins with what others have computed of its first tokens.
Status Conversation::BeginWithPrefix() {
  if (!engine_->shares_prefixes || Length() > 0 || pending_.empty()) return OkStatus();
  std::unique_lock<std::mutex> lock;
  if (engine_->control != nullptr) lock = engine_->control->Step();
  Result<PrefixUse> use = engine_->cache->Reuse(sequence_, pending_);
  if (!use) return use.error();
  prefix_ = *std::move(use);
  pending_.erase(pending_.begin(), pending_.begin() + static_cast<std::ptrdiff_t>(prefix_.tokens));
  return OkStatus();
}

// Feeds the pending tokens chunk by chunk; what has been fed is no longer pending, so that an interrupted prompt goes
// on later.
Status Conversation::Feed(const AnswerHooks& hooks, bool* stopped) {
  const auto total = static_cast<int64_t>(pending_.size());
  const auto chunk_limit = static_cast<size_t>(engine_->cache->options().max_step_tokens);
  size_t fed = 0;
  Status status;
  while (fed < pending_.size() && !*stopped) {
    const size_t n = std::min(chunk_limit, pending_.size() - fed);
    status = Step(std::span(pending_).subspan(fed, n), fed + n == pending_.size(), hooks);
    if (!status.ok()) break;
    fed += n;
    if (hooks.on_fed) hooks.on_fed(static_cast<int64_t>(fed), total);
    *stopped = hooks.should_stop && hooks.should_stop();
  }
  pending_.erase(pending_.begin(), pending_.begin() + static_cast<std::ptrdiff_t>(fed));
  if (!pending_.empty()) logits_.clear();
  return status;
}

Result<Answer> Conversation::Generate(int64_t max_tokens, const AnswerHooks& hooks) {
  Answer answer;
  const Clock::time_point start = turn_start_.value_or(Clock::now());
  turn_start_.reset();
  const Clock::time_point feed_start = Clock::now();
  KVCELL_FAIL_IF_ERROR(BeginWithPrefix());
  const auto queued = static_cast<int64_t>(pending_.size());
  bool stopped = false;
  const Status fed = Feed(hooks, &stopped);
  answer.prompt_tokens = queued - static_cast<int64_t>(pending_.size());
  answer.prefill_ms = MillisecondsSince(feed_start);
  if (!fed.ok()) return Fail(fed);
  if (engine_->shares_prefixes && HasWindows(engine_->model->facts().geometry)) {
    // What a sliding window needs at the prompt's end is gone once the answer has moved on. What can't be stored now is
    // told by Save.
    std::unique_lock<std::mutex> lock;
    if (engine_->control != nullptr) lock = engine_->control->Step();
    (void)engine_->cache->Publish(sequence_);
  }

  Utf8Stream stream;
  const auto show = [&](const std::string& text) {
    answer.text += text;
    if (hooks.on_text && !text.empty()) hooks.on_text(text);
  };
  const bool keeps = !session_.empty();
  Clock::time_point first_token{};
  if (ignore_eos_) ended_ = false;
  answer.end = ended_ ? AnswerEnd::kEnded : AnswerEnd::kTokenLimit;
  while (!ended_ && static_cast<int64_t>(answer.tokens.size()) < max_tokens) {
    if (stopped || !pending_.empty()) {
      answer.end = AnswerEnd::kStopped;
      break;
    }
    if (Length() >= engine_->context) {
      answer.end = AnswerEnd::kContextFull;
      break;
    }
    const Token token = sampler_.Sample(logits_, Length());
    if (!ignore_eos_ && engine_->model->IsEndOfGeneration(token)) {
      ended_ = true;
      answer.end = AnswerEnd::kEnded;
      break;
    }
    answer.tokens.push_back(token);
    if (answer.tokens.size() == 1) {
      first_token = Clock::now();
      answer.ttft_ms = MillisecondsSince(start);
    }
    show(stream.Push(engine_->model->Piece(token)));
    // The last token is fed only where a later process may go on from its logits.
    if (static_cast<int64_t>(answer.tokens.size()) == max_tokens && !keeps) break;
    if (const Status status = Step({&token, 1}, true, hooks); !status.ok()) return Fail(status);
    ++answer.decode_steps;
    if (keeps) SaveAlong(hooks);
    stopped = hooks.should_stop && hooks.should_stop();
  }
  show(stream.Flush());
  if (!answer.tokens.empty()) answer.decode_ms = MillisecondsSince(first_token);
  return answer;
}

void Conversation::SaveAlong(const AnswerHooks& hooks) {
  if (save_every_ == 0 || Length() - saved_length_ < save_every_) return;
  std::unique_lock<std::mutex> lock;
  if (engine_->control != nullptr) lock = engine_->control->Step();
  const Status status = engine_->cache->BeginSave(sequence_, session_, logits_, WriteExtras(), durability_);
  if (status.ok()) {
    if (engine_->control != nullptr) engine_->control->NoteSaved(saved_length_);  // the one before has ended
    saved_length_ = Length();
  } else if (status.code() != StatusCode::kBusy) {
    save_every_ = 0;
    if (hooks.on_trouble) {
      hooks.on_trouble(
          fmt::format("the session could not be saved, which is tried again at the end only: {}", status.message()));
    }
  }
}

Status Conversation::Save() {
  std::unique_lock<std::mutex> lock;
  if (engine_->control != nullptr) lock = engine_->control->Step();
  if (session_.empty()) return engine_->shares_prefixes ? engine_->cache->Publish(sequence_) : OkStatus();
  KVCELL_RETURN_IF_ERROR(engine_->cache->Save(sequence_, session_, logits_, WriteExtras(), durability_));
  if (engine_->control != nullptr) engine_->control->NoteSaved(Length());
  return OkStatus();
}

}  // namespace kvcell::cli
