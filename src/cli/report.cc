#include "cli/report.h"

#include <fmt/format.h>

#include <algorithm>

#include "attention/attention.h"
#include "base/memory_probe.h"
#include "cli/interrupt.h"
#include "cli/units.h"

namespace kvcell::cli {
namespace {

double PerSecond(int64_t n, double ms) { return ms > 0.0 ? 1000.0 * static_cast<double>(n) / ms : 0.0; }

uint64_t PeakResidentBytes() {
  const Result<ProcessMemory> memory = ProbeProcessMemory();
  return memory ? memory->peak_resident : 0;
}

const char* EndName(AnswerEnd end) {
  switch (end) {
    case AnswerEnd::kEnded:
      return "ended";
    case AnswerEnd::kTokenLimit:
      return "token_limit";
    case AnswerEnd::kContextFull:
      return "context_full";
    case AnswerEnd::kStopped:
      return "stopped";
  }
  return "";
}

Json KvReport(const CacheStats& stats) {
  Json cells = Json::object();
  for (int state = 0; state < kCellStates; ++state) {
    cells[std::string(CellStateName(static_cast<CellState>(state)))] = stats.cells.by_state[static_cast<size_t>(state)];
  }
  return {{"bytes", stats.kv_bytes},
          {"ram_bytes", stats.ram_bytes},
          {"ram_peak_bytes", stats.ram_peak_bytes},
          {"file_bytes", stats.file_bytes},
          {"f16_bytes", stats.f16_bytes},
          {"bits_per_element", stats.bits_per_element},
          {"cells", cells},
          {"saturated", stats.saturated},
          {"not_finite", stats.not_finite}};
}

const char* PrefixEndName(PrefixUse::End end) {
  switch (end) {
    case PrefixUse::End::kWhole:
      return "whole";
    case PrefixUse::End::kNothing:
      return "nothing";
    case PrefixUse::End::kEnds:
      return "ends";
    case PrefixUse::End::kDiffers:
      return "differs";
    case PrefixUse::End::kEvicted:
      return "evicted";
    case PrefixUse::End::kOtherIdentity:
      return "other_identity";
    case PrefixUse::End::kWindow:
      return "window";
    case PrefixUse::End::kReplicas:
      return "replicas";
    case PrefixUse::End::kDamaged:
      return "damaged";
  }
  return "";
}

Json PrefixReport(const PrefixUse& prefix) {
  Json report = {{"tokens", prefix.tokens}, {"matched", prefix.matched}, {"end", PrefixEndName(prefix.end)}};
  if (prefix.differs_at >= 0) report["differs_at"] = prefix.differs_at;
  if (!prefix.note.empty()) report["note"] = prefix.note;
  return report;
}

std::string CellsText(const CellCounts& cells) {
  std::string text;
  for (int state = 0; state < kCellStates; ++state) {
    const uint64_t n = cells.by_state[static_cast<size_t>(state)];
    if (n == 0) continue;
    text += fmt::format("{}{} {}", text.empty() ? "" : ", ", FormatCount(static_cast<int64_t>(n)),
                        CellStateName(static_cast<CellState>(state)));
  }
  return text.empty() ? "none" : text;
}

void AddCacheRows(const Engine& engine, const CacheStats& stats, Table* table) {
  const double share =
      stats.f16_bytes > 0 ? 100.0 * static_cast<double>(stats.kv_bytes) / static_cast<double>(stats.f16_bytes) : 0.0;
  table->Add({"KV bytes in f16", FormatSize(stats.f16_bytes)});
  table->Add({"KV bytes now",
              fmt::format("{}, {:.1f} % of that ({} of RAM taken, {} in the store)", FormatSize(stats.kv_bytes), share,
                          FormatSize(stats.ram_bytes), FormatSize(stats.file_bytes))});
  table->Add({"codec", fmt::format("{}, {:.2f} bits per element of a sealed cell", engine.cache->options().codec.name,
                                   stats.bits_per_element)});
  table->Add({"cells", CellsText(stats.cells)});
  if (stats.saturated + stats.not_finite > 0) {
    table->Add({"values changed", fmt::format("{} beyond f16, {} not finite", stats.saturated, stats.not_finite)});
  }
}

}  // namespace

AnswerHooks TerminalHooks(Progress* progress, bool prints, bool quiet) {
  AnswerHooks hooks;
  hooks.on_fed = [progress](int64_t done, int64_t total) {
    if (done < total) {
      progress->Show(done, total);
    } else {
      progress->Clear();
    }
  };
  if (prints) {
    hooks.on_text = [progress](std::string_view text) {
      progress->Clear();
      std::fwrite(text.data(), 1, text.size(), stdout);
      std::fflush(stdout);
    };
  }
  if (!quiet) {
    hooks.on_trouble = [progress](std::string_view what) {
      progress->Clear();
      PrintWarning(what);
    };
  }
  // Nobody reads on: as good as a Ctrl-C.
  hooks.should_stop = [] { return InterruptSignal() != 0 || OutputFailed(); };
  return hooks;
}

Json AnswerReport(const Engine& engine, const Conversation& conversation, const Answer& answer) {
  Json report = {{"prompt_tokens", answer.prompt_tokens},
                 {"reused_tokens", conversation.reused_tokens()},
                 {"generated_tokens", answer.tokens.size()},
                 {"tokens", answer.tokens},
                 {"text", answer.text},
                 {"end", EndName(answer.end)},
                 {"prefix", PrefixReport(conversation.prefix())},
                 {"context_tokens", conversation.Length()},
                 {"ttft_ms", answer.ttft_ms},
                 {"load_ms", engine.load_ms},
                 {"prefill_ms", answer.prefill_ms},
                 {"prefill_tokens_per_s", PerSecond(answer.prompt_tokens, answer.prefill_ms)},
                 {"decode_tokens_per_s", PerSecond(answer.decode_steps, answer.decode_ms)},
                 {"kv", KvReport(engine.cache->Stats())},
                 {"codec", engine.cache->options().codec.name},
                 {"peak_rss_bytes", PeakResidentBytes()},
                 {"isa", AttentionIsa()}};
  if (!conversation.note().empty()) report["note"] = conversation.note();
  return report;
}

void PrintAnswerTable(const Engine& engine, const Conversation& conversation, const Answer& answer) {
  Table table({"", ""});
  table.Add({"tokens", fmt::format("{} fed, {} not computed again, {} generated", FormatCount(answer.prompt_tokens),
                                   FormatCount(conversation.reused_tokens()),
                                   FormatCount(static_cast<int64_t>(answer.tokens.size())))});
  // Where more was stored than could be used, why.
  if (!conversation.prefix().note.empty() && (conversation.prefix().tokens > 0 || conversation.prefix().matched > 0)) {
    table.Add({"shared prefix", conversation.prefix().note});
  }
  AddCacheRows(engine, engine.cache->Stats(), &table);
  if (answer.prompt_tokens > 0) {
    table.Add({"prefill", fmt::format("{:.1f} tokens/s", PerSecond(answer.prompt_tokens, answer.prefill_ms))});
  }
  if (answer.decode_steps > 0) {
    table.Add({"decode", fmt::format("{:.1f} tokens/s", PerSecond(answer.decode_steps, answer.decode_ms))});
  }
  if (answer.ttft_ms > 0.0) {
    table.Add({"first token after", fmt::format("{} (model load, {}, apart)", FormatMilliseconds(answer.ttft_ms),
                                                FormatMilliseconds(engine.load_ms))});
  }
  table.Add({"peak resident memory", fmt::format("{}, model file included", FormatSize(PeakResidentBytes()))});
  table.Print(stderr);
}

Json SamplesReport(const Engine& engine, const CacheStats& stats, const PrefixUse& prefix,
                   std::span<const Answer> answers) {
  const Answer& first = answers.front();
  Json samples = Json::array();
  int64_t generated = 0, steps = 0;
  double decode_ms = 0.0;
  for (const Answer& answer : answers) {
    samples.push_back({{"tokens", answer.tokens}, {"text", answer.text}, {"end", EndName(answer.end)}});
    generated += static_cast<int64_t>(answer.tokens.size());
    steps += answer.decode_steps;
    decode_ms = std::max(decode_ms, answer.decode_ms);
  }
  return {{"prompt_tokens", first.prompt_tokens},
          {"reused_tokens", prefix.tokens},
          {"generated_tokens", generated},
          {"tokens", first.tokens},
          {"text", first.text},
          {"samples", samples},
          {"prefix", PrefixReport(prefix)},
          {"ttft_ms", first.ttft_ms},
          {"load_ms", engine.load_ms},
          {"prefill_ms", first.prefill_ms},
          {"prefill_tokens_per_s", PerSecond(first.prompt_tokens, first.prefill_ms)},
          {"decode_tokens_per_s", PerSecond(steps, decode_ms)},
          {"kv", KvReport(stats)},
          {"codec", engine.cache->options().codec.name},
          {"peak_rss_bytes", PeakResidentBytes()},
          {"isa", AttentionIsa()}};
}

void PrintSamplesTable(const Engine& engine, const CacheStats& stats, const PrefixUse& prefix,
                       std::span<const Answer> answers) {
  const Json report = SamplesReport(engine, stats, prefix, answers);
  Table table({"", ""});
  table.Add({"tokens", fmt::format("{} fed, {} not computed again, {} generated in {} answers",
                                   FormatCount(answers.front().prompt_tokens), FormatCount(prefix.tokens),
                                   FormatCount(report["generated_tokens"].get<int64_t>()), answers.size())});
  AddCacheRows(engine, stats, &table);
  table.Add(
      {"decode", fmt::format("{:.1f} tokens/s, all answers together", report["decode_tokens_per_s"].get<double>())});
  table.Print(stderr);
}

void PrintCacheTable(const Engine& engine) {
  Table table({"", ""});
  AddCacheRows(engine, engine.cache->Stats(), &table);
  table.Print(stderr);
}

}  // namespace kvcell::cli
