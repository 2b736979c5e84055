// What a codec does to what people read: fixed questions answered under every codec, and multiple choice made from a
// text.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "kvcell/status.h"

namespace kvcell {

struct Question {
  std::string topic = {};    // "facts", "instruction", "code", "reasoning", "writing"
  std::string context = {};  // long text that comes before, "" for none
  std::string text = {};
  std::vector<std::string> right =
      {};  // the answer is right when it holds one of these, case apart; empty: nobody can say
};
// The fixed set: facts that stand in long text, instructions, code, reasoning, free writing.
std::vector<Question> FixedQuestions();

struct AnswersOptions {
  std::string model = {};
  std::vector<std::string> codecs = {};  // f16 is always measured, first
  int32_t sinks = 4;
  int32_t recent_blocks = 0;
  int64_t max_tokens = 64;    // of an answer
  int64_t max_questions = 0;  // 0: all
  int32_t n_threads = 0;
  std::string state = {};  // file that finished answers are kept in; "": none
  std::function<void(int64_t done, int64_t total)> on_answer = {};
  std::function<bool()> should_stop = {};
};

struct Answer {
  size_t question = 0;
  std::string codec = {};
  std::string text = {};
  std::vector<int32_t> tokens = {};
  bool right = false;             // holds what Question::right asks for
  bool same = false;              // token for token f16's answer
  double similarity = 0;          // 2 * longest common subsequence / tokens of both, against f16's
  int64_t first_difference = -1;  // token index, -1 where there is none
  double repetition = 0;          // share of the answer's 4-token runs that it has had before
};

struct AnswersRow {  // of one codec
  std::string codec = {};
  double bits = 0;
  int64_t questions = 0;  // that f16 itself gets right: only these count below
  int64_t right = 0;
  int64_t f16_wrong = 0;        // questions with an answer that f16 gets wrong, told apart
  int64_t f16_wrong_right = 0;  // of those, right with this codec
  int64_t open = 0;             // questions without a right answer
  double same = 0;              // share of all answers that are f16's
  double similarity = 0;        // mean over all
  double first_difference = 0;  // mean over answers that differ, 0 where none does
  double repetition = 0;
};

struct AnswersResult {
  std::vector<Question> questions = {};
  std::vector<Answer> answers = {};  // [codec][question], f16 first
  std::vector<AnswersRow> rows = {};
};
// kNotFound, kInvalidArgument, kCancelled (finished answers are in `state`).
Result<AnswersResult> MeasureAnswers(const AnswersOptions& options);

struct ChoiceOptions {
  std::string model = {};
  std::string text = {};
  std::vector<std::string> codecs = {};
  int32_t sinks = 4;
  int32_t recent_blocks = 0;
  int64_t context = 512;      // tokens before each choice
  int64_t continuation = 16;  // tokens of each of the four
  int64_t questions = 32;     // fewer where the text ends
  int32_t n_threads = 0;
  std::string state = {};
  std::function<void(int64_t done, int64_t total)> on_question = {};
  std::function<bool()> should_stop = {};
};

struct ChoiceRow {
  std::string codec = {};
  double bits = 0;
  int64_t questions = 0;
  double accuracy = 0;     // the true continuation is the likeliest of four
  double same_as_f16 = 0;  // the same choice, right or wrong
  double margin = 0;       // mean log-likelihood per token of the true one over the best other one's
};
// The other three are continuations of other places of the same text. Same errors.
Result<std::vector<ChoiceRow>> MeasureChoice(const ChoiceOptions& options);

// Of two token sequences: for tests.
double Similarity(const std::vector<int32_t>& a, const std::vector<int32_t>& b);
double Repetition(const std::vector<int32_t>& tokens);

}  // namespace kvcell
