// kvcell lab, what codecs cost a model's answers: quality, answers, choice.
#include <fmt/format.h>

#include <string>
#include <utility>
#include <vector>

#include "base/text_file.h"
#include "cli/commands.h"
#include "cli/interrupt.h"
#include "cli/output.h"
#include "cli/units.h"
#include "lab/answers.h"
#include "lab/quality.h"

namespace kvcell::cli {
namespace {

Json QualityJson(const QualityResult& result) {
  Json rows = Json::array();
  for (const QualityRow& row : result.rows) {
    rows.push_back({{"engine", row.engine},
                    {"codec", row.codec},
                    {"bits", row.bits},
                    {"bits_all_in", row.bits_all_in},
                    {"ppl", row.ppl},
                    {"kld_mean", row.kld_mean},
                    {"kld_se", row.kld_se},
                    {"kld_median", row.kld_median},
                    {"kld_p999", row.kld_p999},
                    {"top1", row.top1}});
  }
  return {{"command", "lab quality"},
          {"context", result.context},
          {"windows", result.windows},
          {"positions", result.positions},
          {"floor_kld", result.floor_kld},
          {"ppl_difference", result.ppl_difference},
          {"rows", rows}};
}

void PrintQuality(const QualityResult& result, bool peer) {
  Table table({"ENGINE", "CODEC", "BITS", "BITS ALL IN", "PPL", "KLD MEAN", "+-", "MEDIAN", "99.9 %", "SAME TOP"});
  table.AlignRight({2, 3, 4, 5, 6, 7, 8, 9});
  for (const QualityRow& row : result.rows) {
    table.Add({row.engine, row.codec, fmt::format("{:.3f}", row.bits), fmt::format("{:.3f}", row.bits_all_in),
               fmt::format("{:.4f}", row.ppl), fmt::format("{:.6f}", row.kld_mean), fmt::format("{:.6f}", row.kld_se),
               fmt::format("{:.6f}", row.kld_median), fmt::format("{:.4f}", row.kld_p999),
               fmt::format("{:.2f} %", 100.0 * row.top1)});
  }
  table.Print(stdout);
  if (!IsTerminal(stdout)) return;
  Print(stdout, "\n{} windows of {} tokens, {} positions scored (second halves). KLD against the same engine's f16.\n",
        result.windows, result.context, result.positions);
  if (peer) {
    Print(stdout, "Floor: our f16 and libllama's differ by {:.6f}; their perplexities by {:.3f} %.\n", result.floor_kld,
          100.0 * result.ppl_difference);
  }
}

std::vector<std::string> CodecsOr(const Options& options, std::vector<std::string> otherwise) {
  return options.codecs.empty() ? std::move(otherwise) : options.codecs;
}

void PrintAnswers(const AnswersResult& result) {
  Table table(
      {"CODEC", "BITS", "RIGHT", "OF", "F16 WRONG", "SAME AS F16", "SIMILARITY", "FIRST DIFFERENCE", "REPETITION"});
  table.AlignRight({1, 2, 3, 4, 5, 6, 7, 8});
  for (const AnswersRow& row : result.rows) {
    table.Add({row.codec, fmt::format("{:.3f}", row.bits), std::to_string(row.right), std::to_string(row.questions),
               std::to_string(row.f16_wrong), fmt::format("{:.1f} %", 100.0 * row.same),
               fmt::format("{:.3f}", row.similarity), fmt::format("{:.1f}", row.first_difference),
               fmt::format("{:.3f}", row.repetition)});
  }
  table.Print(stdout);
  if (!IsTerminal(stdout)) return;
  for (size_t q = 0; q < result.questions.size(); ++q) {
    const Question& question = result.questions[q];
    Print(stdout, "\n[{}] {}{}\n", question.topic, question.text,
          question.context.empty() ? "" : " (after a long text)");
    for (const Answer& answer : result.answers) {
      if (answer.question != q) continue;
      Print(stdout, "  {:<8} {}{}\n", answer.codec, answer.text,
            answer.first_difference < 0 ? "" : fmt::format("  [differs from token {}]", answer.first_difference));
    }
  }
  Print(stdout, "\nRIGHT counts questions that f16 itself gets right; those that it gets wrong are told apart.\n");
}

Json AnswersJson(const AnswersResult& result) {
  Json rows = Json::array(), answers = Json::array();
  for (const AnswersRow& row : result.rows) {
    rows.push_back({{"codec", row.codec},
                    {"bits", row.bits},
                    {"questions", row.questions},
                    {"right", row.right},
                    {"f16_wrong", row.f16_wrong},
                    {"f16_wrong_right", row.f16_wrong_right},
                    {"open", row.open},
                    {"same", row.same},
                    {"similarity", row.similarity},
                    {"first_difference", row.first_difference},
                    {"repetition", row.repetition}});
  }
  for (const Answer& answer : result.answers) {
    const Question& question = result.questions[answer.question];
    answers.push_back({{"topic", question.topic},
                       {"question", question.text},
                       {"codec", answer.codec},
                       {"text", answer.text},
                       {"tokens", answer.tokens},
                       {"right", question.right.empty() ? Json() : Json(answer.right)},
                       {"same", answer.same},
                       {"similarity", answer.similarity},
                       {"first_difference", answer.first_difference},
                       {"repetition", answer.repetition}});
  }
  return {{"command", "lab answers"}, {"rows", rows}, {"answers", answers}};
}

}  // namespace

int LabQualityCommand(const Options& options) {
  if (options.model.empty() || !options.file) {
    return Failed(Status(StatusCode::kInvalidArgument, "lab quality needs a model (-m) and a text (-f)"));
  }
  auto text = ReadTextFile(*options.file);
  if (!text) return Failed(text.error());
  Progress progress("windows", !options.quiet && !options.json);
  CatchInterrupts();
  QualityOptions quality{.model = options.model,
                         .text = std::move(*text),
                         .windows = options.windows,
                         .codecs = CodecsOr(options, {"i8", "i4"}),
                         .sinks = options.sinks,
                         .recent_blocks = options.recent_blocks,
                         .peer = options.peer,
                         .weights_f32 = options.weights_f32,
                         .n_threads = options.threads,
                         .state = options.state,
                         .on_window = [&](int64_t done, int64_t total) { progress.Show(done, total); },
                         .should_stop = [] { return InterruptSignal() != 0; }};
  if (!options.contexts.empty()) quality.context = options.contexts.front();
  for (const std::string& path : options.rules_files) {
    auto rules = RuleText(path);
    if (!rules) return Failed(rules.error());
    quality.rules.push_back({path, *std::move(rules)});
  }
  const auto result = MeasureQuality(quality);
  progress.Clear();
  if (!result) return Failed(result.error());
  if (options.json) {
    PrintJson(QualityJson(*result));
  } else {
    PrintQuality(*result, options.peer);
  }
  return 0;
}

int LabAnswersCommand(const Options& options) {
  if (options.model.empty()) {
    return Failed(Status(StatusCode::kInvalidArgument, "lab answers needs a model (-m)"));
  }
  Progress progress("answers", !options.quiet && !options.json);
  CatchInterrupts();
  const auto result = MeasureAnswers({.model = options.model,
                                      .codecs = CodecsOr(options, {"i8", "i4"}),
                                      .sinks = options.sinks,
                                      .recent_blocks = options.recent_blocks,
                                      .max_questions = options.questions,
                                      .n_threads = options.threads,
                                      .state = options.state,
                                      .on_answer = [&](int64_t done, int64_t total) { progress.Show(done, total); },
                                      .should_stop = [] { return InterruptSignal() != 0; }});
  progress.Clear();
  if (!result) return Failed(result.error());
  if (options.json) {
    PrintJson(AnswersJson(*result));
  } else {
    PrintAnswers(*result);
  }
  return 0;
}

int LabChoiceCommand(const Options& options) {
  if (options.model.empty() || !options.file) {
    return Failed(Status(StatusCode::kInvalidArgument, "lab choice needs a model (-m) and a text (-f)"));
  }
  auto text = ReadTextFile(*options.file);
  if (!text) return Failed(text.error());
  Progress progress("choices", !options.quiet && !options.json);
  CatchInterrupts();
  ChoiceOptions choice{.model = options.model,
                       .text = std::move(*text),
                       .codecs = CodecsOr(options, {"i8", "i4"}),
                       .sinks = options.sinks,
                       .recent_blocks = options.recent_blocks,
                       .n_threads = options.threads,
                       .state = options.state,
                       .on_question = [&](int64_t done, int64_t total) { progress.Show(done, total); },
                       .should_stop = [] { return InterruptSignal() != 0; }};
  if (options.questions > 0) choice.questions = options.questions;
  const auto rows = MeasureChoice(choice);
  progress.Clear();
  if (!rows) return Failed(rows.error());
  Table table({"CODEC", "BITS", "QUESTIONS", "RIGHT", "SAME AS F16", "MARGIN"});
  table.AlignRight({1, 2, 3, 4, 5});
  Json list = Json::array();
  for (const ChoiceRow& row : *rows) {
    table.Add({row.codec, fmt::format("{:.3f}", row.bits), std::to_string(row.questions),
               fmt::format("{:.1f} %", 100.0 * row.accuracy), fmt::format("{:.1f} %", 100.0 * row.same_as_f16),
               fmt::format("{:.4f}", row.margin)});
    list.push_back({{"codec", row.codec},
                    {"bits", row.bits},
                    {"questions", row.questions},
                    {"accuracy", row.accuracy},
                    {"same_as_f16", row.same_as_f16},
                    {"margin", row.margin}});
  }
  if (options.json) {
    PrintJson({{"command", "lab choice"},
               {"context", choice.context},
               {"continuation", choice.continuation},
               {"rows", list}});
  } else {
    table.Print(stdout);
  }
  return 0;
}

}  // namespace kvcell::cli
