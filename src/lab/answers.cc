#include "lab/answers.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cctype>
#include <cmath>
#include <memory>
#include <set>
#include <span>
#include <utility>

#include "base/checksum.h"
#include "kvcell/cache.h"
#include "lab/divergence.h"
#include "lab/progress_state.h"
#include "model/model.h"

namespace kvcell {
namespace {

constexpr int64_t kChunk = 64;

// Prose without facts that a question could mean, as long as wanted.
std::string Filler(int from, int sentences) {
  static const char* const kSentences[] = {
      "The road followed the river for a while and then turned into the hills.",
      "In the market, people spoke about the weather and the price of wheat.",
      "A gardener trimmed the hedge while two children watched from the gate.",
      "The library had been painted in spring, and the smell of it was still there.",
      "Later that day the wind dropped and the boats came back one after the other.",
      "Nobody could remember a year in which the apples had ripened so early.",
      "The clock on the tower was a few minutes slow, as it had always been.",
      "Someone had left a bicycle against the wall and a basket of plums beside it.",
      "On the second floor a pianist practised the same four bars again and again.",
      "The baker closed early, because there was nothing left that could be sold.",
      "Rain fell in the night, but by the morning the square was dry.",
      "A letter lay on the table, opened, read and folded back into its envelope.",
      "The old maps show a bridge there, but no stone of it is left.",
      "They walked without talking until the lights of the station came in sight.",
      "From the roof one could see the fields, the mill and a part of the lake."};
  std::string text;
  for (int i = 0; i < sentences; ++i) {
    text += kSentences[static_cast<size_t>((from + i * 7) % static_cast<int>(std::size(kSentences)))];
    text += i % 6 == 5 ? "\n\n" : " ";
  }
  return text;
}

// A fact within long text.
std::string Hidden(int seed, int before, const std::string& fact, int after) {
  return Filler(seed, before) + fact + " " + Filler(seed + 3, after);
}

bool Holds(const std::string& text, const std::vector<std::string>& right) {
  const auto lower = [](std::string s) {
    for (char& c : s) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
    return s;
  };
  const std::string answer = lower(text);
  return std::any_of(right.begin(), right.end(),
                     [&](const std::string& r) { return answer.find(lower(r)) != std::string::npos; });
}

Result<std::unique_ptr<Cache>> OpenCache(const Model& model, const std::string& codec, int32_t sinks,
                                         int32_t recent_blocks) {
  auto spec = ParseCodec(codec);
  if (!spec) return Fail(spec.error());
  CacheOptions options;
  options.codec = *spec;
  options.geometry = model.facts().geometry;
  options.sinks = sinks;
  options.recent_blocks = recent_blocks;
  options.max_step_tokens = static_cast<int32_t>(kChunk);
  options.max_sequences = 2;
  return Cache::Open(options);
}

// f16 first, each codec once.
std::vector<std::string> WithReference(const std::vector<std::string>& codecs) {
  std::vector<std::string> all = {"f16"};
  for (const std::string& codec : codecs) {
    if (std::find(all.begin(), all.end(), codec) == all.end()) all.push_back(codec);
  }
  return all;
}

Status Feed(Model* model, Cache* cache, SequenceId sequence, std::span<const Token> tokens, bool all,
            std::vector<float>* logits) {
  std::vector<float> part;
  logits->clear();
  for (size_t at = 0; at < tokens.size(); at += kChunk) {
    const size_t n = std::min<size_t>(kChunk, tokens.size() - at);
    const bool last = at + n == tokens.size();
    const ModelStep step{
        .sequence = sequence, .tokens = tokens.subspan(at, n), .want_logits = last, .want_all_logits = all};
    KVCELL_RETURN_IF_ERROR(model->Forward(cache, {&step, 1}, &part));
    if (all) {
      logits->insert(logits->end(), part.begin(), part.end());
    } else if (last) {
      *logits = part;
    }
  }
  return OkStatus();
}

class AnswersRun {
 public:
  explicit AnswersRun(const AnswersOptions& options) : options_(options) {}

  Result<AnswersResult> Measure() {
    AnswersResult result;
    result.questions = FixedQuestions();
    if (options_.max_questions > 0 && options_.max_questions < static_cast<int64_t>(result.questions.size())) {
      result.questions.resize(static_cast<size_t>(options_.max_questions));
    }
    auto model =
        Model::Load(options_.model, {.n_threads = options_.n_threads, .max_batch = static_cast<int32_t>(kChunk)});
    if (!model) return Fail(model.error());
    model_ = std::move(*model);
    const std::vector<std::string> codecs = WithReference(options_.codecs);
    const auto total = static_cast<int64_t>(codecs.size() * result.questions.size());
    ProgressState state(options_.state, Key(result.questions.size()));
    for (const std::string& codec : codecs) {
      auto cache = OpenCache(*model_, codec, options_.sinks, options_.recent_blocks);
      if (!cache) return Fail(cache.error());
      for (size_t q = 0; q < result.questions.size(); ++q) {
        const auto done = static_cast<int64_t>(result.answers.size());
        if (options_.on_answer) options_.on_answer(done, total);
        if (options_.should_stop && options_.should_stop()) {
          return Fail(StatusCode::kCancelled, fmt::format("stopped after {} of {} answers", done, total));
        }
        const std::string name = fmt::format("{}|{}", codec, q);
        Answer answer{.question = q, .codec = codec};
        if (const auto kept = state.values().find(name); kept != state.values().end() && kept->is_array()) {
          answer.tokens = kept->get<std::vector<int32_t>>();
        } else {
          auto tokens = Generate(cache->get(), result.questions[q]);
          if (!tokens) return Fail(tokens.error());
          answer.tokens = std::move(*tokens);
          state.values()[name] = answer.tokens;
          KVCELL_FAIL_IF_ERROR(state.Write());
        }
        for (const Token token : answer.tokens) answer.text += model_->Piece(token);
        answer.right = Holds(answer.text, result.questions[q].right);
        const Answer& reference = codec == "f16" ? answer : result.answers[q];
        answer.same = answer.tokens == reference.tokens;
        answer.similarity = Similarity(answer.tokens, reference.tokens);
        if (!answer.same) {
          const auto [a, b] = std::mismatch(answer.tokens.begin(), answer.tokens.end(), reference.tokens.begin(),
                                            reference.tokens.end());
          (void)b;
          answer.first_difference = a - answer.tokens.begin();
        }
        answer.repetition = Repetition(answer.tokens);
        result.answers.push_back(std::move(answer));
      }
      result.rows.push_back(Row(result, codec, (*cache)->Stats().bits_per_element));
    }
    if (options_.on_answer) options_.on_answer(total, total);
    return result;
  }

 private:
  std::string Key(size_t questions) const {
    return fmt::format("answers|{}|{}|{}|{}|{}", options_.model, options_.sinks, options_.recent_blocks,
                       options_.max_tokens, questions);
  }

  Result<std::vector<int32_t>> Generate(Cache* cache, const Question& question) {
    const std::string text =
        question.context.empty() ? question.text : question.context + "\n\nQuestion: " + question.text;
    const ChatMessage message{"user", text};
    auto prompt = model_->ApplyChatTemplate({&message, 1}, /*add_assistant=*/true);
    if (!prompt && prompt.error().code() != StatusCode::kUnsupported) return Fail(prompt.error());
    auto tokens = model_->Tokenize(prompt ? *prompt : text + "\nAnswer:", /*special=*/true, /*parse=*/true);
    if (!tokens) return Fail(tokens.error());
    auto sequence = cache->Create();
    if (!sequence) return Fail(sequence.error());
    std::vector<float> logits;
    Status status = Feed(model_.get(), cache, *sequence, *tokens, /*all=*/false, &logits);
    std::vector<int32_t> answer;
    while (status.ok() && static_cast<int64_t>(answer.size()) < options_.max_tokens) {
      const auto token = static_cast<Token>(std::max_element(logits.begin(), logits.end()) - logits.begin());
      if (model_->IsEndOfGeneration(token)) break;
      answer.push_back(token);
      status = Feed(model_.get(), cache, *sequence, {&answer.back(), 1}, /*all=*/false, &logits);
    }
    KVCELL_FAIL_IF_ERROR(cache->Free(*sequence));
    if (!status.ok()) return Fail(status);
    return answer;
  }

  static AnswersRow Row(const AnswersResult& result, const std::string& codec, double bits) {
    AnswersRow row{.codec = codec, .bits = bits};
    double n = 0, differ = 0;
    for (size_t i = result.answers.size() - result.questions.size(); i < result.answers.size(); ++i) {
      const Answer& answer = result.answers[i];
      const bool f16_right = result.answers[answer.question].right;
      if (result.questions[answer.question].right.empty()) {
        ++row.open;
      } else if (f16_right) {
        ++row.questions;
        row.right += answer.right ? 1 : 0;
      } else {
        ++row.f16_wrong;
        row.f16_wrong_right += answer.right ? 1 : 0;
      }
      ++n;
      row.same += answer.same ? 1 : 0;
      row.similarity += answer.similarity;
      row.repetition += answer.repetition;
      if (!answer.same) {
        ++differ;
        row.first_difference += static_cast<double>(answer.first_difference);
      }
    }
    row.same /= n;
    row.similarity /= n;
    row.repetition /= n;
    if (differ > 0) row.first_difference /= differ;
    return row;
  }

  const AnswersOptions& options_;
  std::unique_ptr<Model> model_;
};

class ChoiceRun {
 public:
  explicit ChoiceRun(const ChoiceOptions& options) : options_(options) {}

  Result<std::vector<ChoiceRow>> Measure() {
    if (options_.context < 1 || options_.continuation < 1 || options_.questions < 1) {
      return Fail(StatusCode::kInvalidArgument, "context, continuation and questions must be positive");
    }
    auto model =
        Model::Load(options_.model, {.n_threads = options_.n_threads, .max_batch = static_cast<int32_t>(kChunk)});
    if (!model) return Fail(model.error());
    model_ = std::move(*model);
    auto tokens = model_->Tokenize(options_.text, /*special=*/true, /*parse=*/false);
    if (!tokens) return Fail(tokens.error());
    tokens_ = std::move(*tokens);
    const int64_t each = options_.context + options_.continuation;
    n_questions_ = std::min(options_.questions, static_cast<int64_t>(tokens_.size()) / each);
    if (n_questions_ < 4) {
      return Fail(StatusCode::kInvalidArgument,
                  fmt::format("the text has {} tokens; four choices of {} tokens each take {}", tokens_.size(), each,
                              4 * each));
    }
    const std::vector<std::string> codecs = WithReference(options_.codecs);
    ProgressState state(options_.state, Key());
    const int64_t total = n_questions_ * static_cast<int64_t>(codecs.size());
    std::vector<ChoiceRow> rows;
    std::vector<int> reference;
    int64_t done = 0;
    for (const std::string& codec : codecs) {
      auto cache = OpenCache(*model_, codec, options_.sinks, options_.recent_blocks);
      if (!cache) return Fail(cache.error());
      ChoiceRow row{.codec = codec, .bits = (*cache)->Stats().bits_per_element, .questions = n_questions_};
      for (int64_t q = 0; q < n_questions_; ++q, ++done) {
        if (options_.on_question) options_.on_question(done, total);
        if (options_.should_stop && options_.should_stop()) {
          return Fail(StatusCode::kCancelled, fmt::format("stopped after {} of {} choices", done, total));
        }
        const std::string name = fmt::format("{}|{}", codec, q);
        std::vector<double> likelihood;
        if (const auto kept = state.values().find(name);
            kept != state.values().end() && kept->is_array() && kept->size() == 4) {
          likelihood = kept->get<std::vector<double>>();
        } else {
          auto measured = Likelihoods(cache->get(), q);
          if (!measured) return Fail(measured.error());
          likelihood = std::move(*measured);
          state.values()[name] = likelihood;
          KVCELL_FAIL_IF_ERROR(state.Write());
        }
        const auto best = static_cast<int>(std::max_element(likelihood.begin(), likelihood.end()) - likelihood.begin());
        if (codec == "f16") reference.push_back(best);
        row.accuracy += best == 0 ? 1 : 0;
        row.same_as_f16 += best == reference[static_cast<size_t>(q)] ? 1 : 0;
        row.margin += likelihood[0] - *std::max_element(likelihood.begin() + 1, likelihood.end());
      }
      const auto n = static_cast<double>(n_questions_);
      row.accuracy /= n;
      row.same_as_f16 /= n;
      row.margin /= n;
      rows.push_back(row);
    }
    if (options_.on_question) options_.on_question(total, total);
    return rows;
  }

 private:
  std::string Key() const {
    return fmt::format("choice|{}|{}|{}|{}|{}|{}", options_.model, options_.context, options_.continuation,
                       options_.sinks, options_.recent_blocks, Checksum64(std::as_bytes(std::span(options_.text))));
  }

  std::span<const Token> Part(int64_t at, int64_t n) const {
    return std::span(tokens_).subspan(static_cast<size_t>(at), static_cast<size_t>(n));
  }

  // Mean log-likelihood per token of the true continuation and of three from elsewhere.
  Result<std::vector<double>> Likelihoods(Cache* cache, int64_t question) {
    const int64_t each = options_.context + options_.continuation;
    const int64_t start = question * each;
    auto sequence = cache->Create();
    if (!sequence) return Fail(sequence.error());
    std::vector<float> first, logits;
    KVCELL_FAIL_IF_ERROR(Feed(model_.get(), cache, *sequence, Part(start, options_.context), false, &first));
    std::vector<double> out;
    for (const int64_t other : {int64_t{0}, n_questions_ / 4, n_questions_ / 2, n_questions_ * 3 / 4}) {
      // Of `other` questions further on, the continuation.
      const auto tokens = Part((question + other) % n_questions_ * each + options_.context, options_.continuation);
      auto fork = cache->Fork(*sequence);
      if (!fork) return Fail(fork.error());
      KVCELL_FAIL_IF_ERROR(Feed(model_.get(), cache, *fork, tokens, true, &logits));
      const auto n_vocab = first.size();
      double sum = LogProbability(first, tokens[0]);
      for (size_t i = 1; i < tokens.size(); ++i) {
        sum += LogProbability(std::span<const float>(logits).subspan((i - 1) * n_vocab, n_vocab), tokens[i]);
      }
      out.push_back(sum / static_cast<double>(tokens.size()));
      KVCELL_FAIL_IF_ERROR(cache->Free(*fork));
    }
    KVCELL_FAIL_IF_ERROR(cache->Free(*sequence));
    return out;
  }

  const ChoiceOptions& options_;
  std::unique_ptr<Model> model_;
  std::vector<Token> tokens_;
  int64_t n_questions_ = 0;
};

}  // namespace

std::vector<Question> FixedQuestions() {
  return {
      {"facts",
       Hidden(0, 40, "The key to the boathouse hangs behind the blue door.", 24),
       "Behind which door does the key to the boathouse hang?",
       {"blue"}},
      {"facts",
       Hidden(1, 12, "The secret number of the lighthouse is 4173.", 60),
       "What is the secret number of the lighthouse?",
       {"4173"}},
      {"facts", Hidden(2, 70, "Marianne's dog is called Biscuit.", 10), "What is Marianne's dog called?", {"Biscuit"}},
      {"facts",
       Hidden(4, 30, "The train to Verona leaves from platform nine.", 30),
       "From which platform does the train to Verona leave?",
       {"nine", "9"}},
      {"facts", Hidden(5, 55, "Doctor Hale was born in Edinburgh.", 25), "Where was Doctor Hale born?", {"Edinburgh"}},
      {"facts",
       Hidden(6, 20, "The treasure lies under the oldest oak tree.", 75),
       "What does the treasure lie under?",
       {"oak"}},
      {"instruction", "", "Write the word HELLO in capital letters and nothing else.", {"HELLO"}},
      {"instruction", "", "List three colours, separated by commas.", {"red", "blue", "green"}},
      {"instruction", "", "Translate 'good morning' into French.", {"bonjour"}},
      {"instruction", "", "Name the capital of Italy.", {"Rome"}},
      {"code", "", "Write a Python function that returns the sum of two numbers.", {"return"}},
      {"code", "", "Write a Python loop that prints the numbers from 1 to 10.", {"range("}},
      {"code", "", "Write an SQL query that selects all rows of the table 'users'.", {"select"}},
      {"reasoning", "", "What is 7 + 5?", {"12", "twelve"}},
      {"reasoning", "", "Tom has three apples and eats one. How many apples are left?", {"2", "two"}},
      {"reasoning", "", "Which is heavier, a stone or a feather?", {"stone"}},
      {"writing", "", "Write a short story about a fox in winter.", {}},
      {"writing", "", "Describe the sea to someone who has never seen it.", {}},
      {"writing", Filler(8, 60), "Summarise the text in two sentences.", {}},
      {"writing", "", "Explain why the sky is blue.", {}},
  };
}

double Similarity(const std::vector<int32_t>& a, const std::vector<int32_t>& b) {
  if (a.empty() && b.empty()) return 1.0;
  std::vector<int> row(b.size() + 1, 0);  // longest common subsequence with the first i tokens of a
  for (const int32_t x : a) {
    int diagonal = 0;
    for (size_t j = 1; j <= b.size(); ++j) {
      const int above = row[j];
      row[j] = x == b[j - 1] ? diagonal + 1 : std::max(row[j], row[j - 1]);
      diagonal = above;
    }
  }
  return 2.0 * row.back() / static_cast<double>(a.size() + b.size());
}

double Repetition(const std::vector<int32_t>& tokens) {
  constexpr size_t kRun = 4;
  if (tokens.size() <= kRun) return 0.0;
  std::set<std::vector<int32_t>> seen;
  int repeated = 0;
  const size_t runs = tokens.size() - kRun + 1;
  for (size_t i = 0; i < runs; ++i) {
    const auto from = tokens.begin() + static_cast<std::ptrdiff_t>(i);
    if (!seen.insert({from, from + kRun}).second) ++repeated;
  }
  return static_cast<double>(repeated) / static_cast<double>(runs);
}

Result<AnswersResult> MeasureAnswers(const AnswersOptions& options) { return AnswersRun(options).Measure(); }

Result<std::vector<ChoiceRow>> MeasureChoice(const ChoiceOptions& options) { return ChoiceRun(options).Measure(); }

}  // namespace kvcell
