#include "cli/options.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <cstdlib>
#include <filesystem>
#include <limits>
#include <utility>

#include "base/text_file.h"
#include "cell/rules.h"
#include "cli/auto_codec.h"
#include "cli/config_file.h"
#include "cli/units.h"
#include "kvcell/codec.h"
#include "store/store.h"

namespace kvcell::cli {
namespace {

constexpr int64_t kMaxContext = int64_t{1} << 31;
constexpr uint64_t kLeastDiskCap = uint64_t{1} << 20;

template <typename T>
Status SetInteger(const std::string& text, int64_t low, int64_t high, T* value) {
  const Result<int64_t> number = ParseInteger(text, low, high);
  if (!number) return number.error();
  *value = static_cast<T>(*number);
  return OkStatus();
}

Status SetDecimal(const std::string& text, double low, double high, double* value) {
  const Result<double> number = ParseDecimal(text, low, high);
  if (!number) return number.error();
  *value = *number;
  return OkStatus();
}

Status SetBool(const std::string& text, bool* value) {
  const Result<bool> parsed = ParseBool(text);
  if (!parsed) return parsed.error();
  *value = *parsed;
  return OkStatus();
}

Status SetSize(const std::string& text, uint64_t* value) {
  const Result<uint64_t> size = ParseSize(text);
  if (!size) return size.error();
  *value = *size;
  return OkStatus();
}

Status SetText(const std::string& text, const char* what, std::string* value) {
  if (text.empty()) return Status(StatusCode::kInvalidArgument, fmt::format("{} can't be empty", what));
  *value = text;
  return OkStatus();
}

Status CheckCodec(const std::string& text) {
  if (text == kAutoCodec) {
    return Status(StatusCode::kInvalidArgument,
                  "'auto' chooses codecs for `run` and `chat`; name with --codec which ones this command is to take");
  }
  const Result<CodecSpec> codec = ParseCodec(text);
  return codec ? OkStatus() : codec.error();
}

// Lists are separated by commas; a codec spec `k=A,v=B` or `k=A,v=B,early-v=C` holds some itself.
std::vector<std::string> SplitList(const std::string& text) {
  std::vector<std::string> parts;
  size_t from = 0;
  while (from <= text.size()) {
    const size_t comma = std::min(text.find(',', from), text.size());
    std::string part = text.substr(from, comma - from);
    const std::string_view last = parts.empty() ? std::string_view() : std::string_view(parts.back());
    const bool other_side =
        last.find(',') == std::string_view::npos
            ? (last.starts_with("k=") && part.starts_with("v=")) || (last.starts_with("v=") && part.starts_with("k="))
            : last.starts_with("k=") && part.starts_with("early-v=");
    if (other_side) {
      parts.back() += "," + part;
    } else {
      parts.push_back(std::move(part));
    }
    from = comma + 1;
  }
  return parts;
}

Status SetIntegers(const std::string& text, int64_t high, std::vector<int64_t>* values) {
  values->clear();
  for (const std::string& part : SplitList(text)) {
    KVCELL_RETURN_IF_ERROR(SetInteger(part, 1, high, &values->emplace_back()));
  }
  return OkStatus();
}

Status SetCodecs(const std::string& text, std::vector<std::string>* values) {
  *values = SplitList(text);
  for (const std::string& codec : *values) KVCELL_RETURN_IF_ERROR(CheckCodec(codec));
  return OkStatus();
}

Status SetTypes(const std::string& text, std::vector<std::string>* values) {
  *values = SplitList(text);
  for (const std::string& type : *values) {
    if (type != "f16" && type != "i8" && type != "i4") {
      return Status(StatusCode::kInvalidArgument, fmt::format("'{}' is no type to measure; use f16, i8 or i4", type));
    }
  }
  return OkStatus();
}

Status SetDurability(const std::string& text, uint8_t* value) {
  const std::optional<uint8_t> level = ParseDurability(text);
  if (!level) {
    return Status(StatusCode::kInvalidArgument, fmt::format("'{}' is no durability; use none, process or power", text));
  }
  *value = *level;
  return OkStatus();
}

Status SetCodec(const std::string& text, Options* options) {
  KVCELL_RETURN_IF_ERROR(CheckCodec(text));
  options->codec = text;
  return OkStatus();
}

Status SetCodecOrAuto(const std::string& text, Options* options) {
  if (text != kAutoCodec) return SetCodec(text, options);
  options->codec = text;
  return OkStatus();
}

const std::vector<OptionSpec>& Table() {
  static const std::vector<OptionSpec> table = {
      {.name = "model",
       .flags = "-m,--model",
       .type = "FILE",
       .help = "model file (GGUF); `make model` fetches a small one",
       .set = [](const std::string& t, Options* o) { return SetText(t, "the model's path", &o->model); }},
      {.name = "prompt",
       .flags = "-p,--prompt",
       .type = "TEXT",
       .help = "prompt",
       .setting = false,
       .set =
           [](const std::string& t, Options* o) {
             o->prompt = t;
             return OkStatus();
           }},
      {.name = "file",
       .flags = "-f,--file",
       .type = "FILE",
       .help = "reads the text from a file, - for standard input; a prompt given with -p comes after it",

       .setting = false,
       .set =
           [](const std::string& t, Options* o) {
             o->file = t;
             return SetText(t, "the file's name", &*o->file);
           }},
      {.name = "max-tokens",
       .flags = "-n,--max-tokens",
       .type = "N",
       .shown_default = "256",
       .help = "most tokens to generate; the answer may end earlier",
       .set = [](const std::string& t, Options* o) { return SetInteger(t, 0, kMaxContext, &o->max_tokens); }},
      {.name = "temp",
       .flags = "--temp",
       .type = "T",
       .shown_default = "0",
       .help = "temperature of sampling; 0 takes the likeliest token every time, more makes answers vary",
       .set = [](const std::string& t, Options* o) { return SetDecimal(t, 0.0, 100.0, &o->temp); }},
      {.name = "top-k",
       .flags = "--top-k",
       .type = "N",
       .shown_default = "40",
       .help = "samples among the N likeliest tokens; 0: all of them",
       .set = [](const std::string& t, Options* o) { return SetInteger(t, 0, 1 << 30, &o->top_k); }},
      {.name = "top-p",
       .flags = "--top-p",
       .type = "P",
       .shown_default = "0.95",
       .help = "samples among the likeliest tokens that hold this share of the probability; 1: all",
       .set = [](const std::string& t, Options* o) { return SetDecimal(t, 0.0, 1.0, &o->top_p); }},
      {.name = "min-p",
       .flags = "--min-p",
       .type = "P",
       .shown_default = "0.05",
       .help = "leaves out tokens below this share of the likeliest one's probability; 0: none",
       .set = [](const std::string& t, Options* o) { return SetDecimal(t, 0.0, 1.0, &o->min_p); }},
      {.name = "seed",
       .flags = "--seed",
       .type = "S",
       .shown_default = "0",
       .help = "start of the random draws; the same seed gives the same answer",
       .set = [](const std::string& t,
                 Options* o) { return SetInteger(t, 0, std::numeric_limits<uint32_t>::max(), &o->seed); }},
      {.name = "raw",
       .flags = "--raw",
       .help = "feeds the prompt as it is, without the model's chat template",
       .set = [](const std::string& t, Options* o) { return SetBool(t, &o->raw); }},
      {.name = "ignore-eos",
       .flags = "--ignore-eos",
       .help = "goes on past the tokens with which the model ends a text, up to --max-tokens",
       .set = [](const std::string& t, Options* o) { return SetBool(t, &o->ignore_eos); }},
      {.name = "ctx",
       .flags = "--ctx",
       .type = "N",
       .shown_default = "what the model was trained for; 1,048,576 where the rules' windows never let it see that much",
       .help = "most tokens of prompt and answers together; more takes more KV memory as it fills",
       .set = [](const std::string& t, Options* o) { return SetInteger(t, 1, kMaxContext, &o->ctx); }},
      {.name = "threads",
       .flags = "--threads",
       .type = "N",
       .shown_default = "all processors",
       .help = "threads that compute; more than the machine has slows it down",
       .set = [](const std::string& t, Options* o) { return SetInteger(t, 1, 512, &o->threads); }},
      {.name = "codec",
       .flags = "--codec",
       .type = "SPEC",
       .shown_default = "i4",
       .help = "how sealed cells are coded: f16, i8, i5, i4, i43, i3 or k=...,v=...[,early-v=...] (`kvcell info "
               "--codecs`); fewer bits take less memory and read faster, more keep answers closer to f16; auto: the "
               "smallest one for each layer that keeps them close, measured once for each model (`kvcell tune`)",
       .set = SetCodecOrAuto},
      {.name = "one-codec",
       .flags = "--codec",
       .type = "SPEC",
       .shown_default = "i4",
       .help = "the codec to measure (`kvcell info --codecs`)",
       .setting = false,
       .setting_name = "codec",
       .set = SetCodec},
      {.name = "rules",
       .flags = "--rules",
       .type = "FILE",
       .help = "rules by which cells change state, YAML or JSON (`kvcell rules check FILE`); read again on SIGHUP",
       .set = [](const std::string& t, Options* o) { return SetText(t, "the rule file's path", &o->rules); }},
      {.name = "profile",
       .flags = "--profile",
       .type = "NAME",
       .shown_default = "balanced",
       .help = "rules that kvcell brings along: quality, balanced, elastic, long-context, edge, server (`kvcell rules "
               "show NAME`)",
       .set =
           [](const std::string& t, Options* o) {
             const auto rules = ProfileRules(t);
             if (!rules) return rules.error();
             o->profile = t;
             return OkStatus();
           }},
      {.name = "metrics",
       .flags = "--metrics",
       .type = "FILE",
       .help = "writes counters in Prometheus' text form at the end",
       .setting = false,
       .set = [](const std::string& t, Options* o) { return SetText(t, "the metrics' path", &o->metrics); }},
      {.name = "trace",
       .flags = "--trace",
       .type = "FILE",
       .help = "writes the newest 100,000 transitions in Chrome's trace format at the end (chrome://tracing, Perfetto)",
       .setting = false,
       .set = [](const std::string& t, Options* o) { return SetText(t, "the trace's path", &o->trace); }},
      {.name = "curve",
       .flags = "--curve",
       .type = "FILE",
       .help = "writes the resource curve as CSV: host, process, GPU and KV memory by state",
       .setting = false,
       .set = [](const std::string& t, Options* o) { return SetText(t, "the curve's path", &o->curve); }},
      {.name = "curve-every",
       .flags = "--curve-every",
       .type = "S",
       .shown_default = "1",
       .help = "seconds between two lines of --curve; less shows more and writes more",
       .setting = false,
       .set = [](const std::string& t, Options* o) { return SetDecimal(t, 0.01, 3600.0, &o->curve_every); }},
      {.name = "pid",
       .flags = "--pid",
       .type = "N",
       .shown_default = "the only one",
       .help = "process to look at or to steer, where several run",
       .setting = false,
       .set = [](const std::string& t, Options* o) { return SetInteger(t, 1, int64_t{1} << 31, &o->pid); }},
      {.name = "sinks",
       .flags = "--sinks",
       .type = "N",
       .shown_default = "4",
       .help = "first tokens kept exact, 0..64; more is closer to f16 and costs their f16 bytes",
       .set = [](const std::string& t, Options* o) { return SetInteger(t, 0, 64, &o->sinks); }},
      {.name = "recent-blocks",
       .flags = "--recent-blocks",
       .type = "N",
       .shown_default = "0",
       .help = "blocks of 64 tokens before the newest one that are read exactly; each costs one f16 block",
       .set = [](const std::string& t, Options* o) { return SetInteger(t, 0, 1 << 20, &o->recent_blocks); }},
      {.name = "ram-budget",
       .flags = "--ram-budget",
       .type = "SIZE",
       .shown_default = "as much as the context takes",
       .help =
           "most bytes of KV memory, never passed; with less, older cells leave for the store and are attended from "
           "there, which is slower",
       .set =
           [](const std::string& t, Options* o) {
             const Result<uint64_t> size = ParseSize(t);
             if (!size) return size.error();
             if (*size == 0) {
               return Status(StatusCode::kInvalidArgument,
                             "a budget of 0 bytes holds nothing; leave it out for as much as the context takes");
             }
             o->ram_budget = *size;
             return OkStatus();
           }},
      {.name = "store",
       .flags = "--store",
       .type = "DIR",
       .shown_default = "$XDG_DATA_HOME/kvcell",
       .help = "directory of sessions and cells, readable by its owner only; `run`, `chat` and `import` make it",

       .set = [](const std::string& t, Options* o) { return SetText(t, "the store's directory", &o->store); }},
      {.name = "durability",
       .flags = "--durability",
       .type = "LEVEL",
       .shown_default = "process",
       .help =
           "what a save survives: none (nothing promised, fastest), process (kill -9), power (power loss, slowest); a "
           "session keeps its level until another one is given",
       .set =
           [](const std::string& t, Options* o) {
             o->durability_given = true;
             return SetDurability(t, &o->durability);
           }},
      {.name = "file-reads",
       .flags = "--file-reads",
       .type = "HOW",
       .shown_default = "mapped",
       .help =
           "how cells that don't fit into --ram-budget are attended: mapped (in the file's own pages while the system "
           "has them at hand, checked when the file or they are new; else streamed) or streamed (read and checked "
           "every "
           "time, which keeps the pages out of resident memory)",
       .set =
           [](const std::string& t, Options* o) {
             if (t != "mapped" && t != "streamed") {
               return Status(StatusCode::kInvalidArgument, fmt::format("'{}' is neither mapped nor streamed", t));
             }
             o->file_reads = t == "mapped" ? FileReads::kMapped : FileReads::kStreamed;
             return OkStatus();
           }},
      {.name = "disk-cap",
       .flags = "--disk-cap",
       .type = "SIZE",
       .shown_default = "none",
       .help = "most bytes of the store's files, 1MiB and more, what is there already counts; before it is passed, "
               "sessions that were not used for the longest lose cells, from their end, which are computed again when "
               "asked for, and at last are removed whole",
       .set = [](const std::string& t, Options* o) -> Status {
         KVCELL_RETURN_IF_ERROR(SetSize(t, &o->disk_cap));
         if (o->disk_cap == 0 || o->disk_cap >= kLeastDiskCap) return OkStatus();
         return {StatusCode::kInvalidArgument,
                 fmt::format("'{}' is {} bytes, and a store takes at least {}; a unit such as GiB may be missing", t,
                             o->disk_cap, FormatSize(kLeastDiskCap))};
       }},
      {.name = "ttl",
       .flags = "--ttl",
       .type = "TIME",
       .shown_default = "for ever",
       .help = "removes sessions that were not used for so long: seconds, or a number with s, m, h, d or w",
       .set =
           [](const std::string& t, Options* o) {
             const Result<int64_t> seconds = ParseDuration(t);
             if (!seconds) return seconds.error();
             o->ttl_seconds = *seconds;
             return OkStatus();
           }},
      {.name = "namespace",
       .flags = "--namespace",
       .type = "NAME",
       .shown_default = "the common one",
       .help = "tenant whose sessions these are: those of others are neither seen nor shared",
       .set =
           [](const std::string& t, Options* o) {
             KVCELL_RETURN_IF_ERROR(CheckSessionName(t));
             o->name_space = t;
             return OkStatus();
           }},
      {.name = "key-file",
       .flags = "--key-file",
       .type = "FILE",
       .help =
           "file with the store's key, 32 random bytes or more: a store made with one is encrypted, and opens with no "
           "other; --key-command or the key itself in KVCELL_KEY do as well; costs 64 bytes a cell and a pass over "
           "them",
       .set = [](const std::string& t, Options* o) { return SetText(t, "the key file's name", &o->key_file); }},
      {.name = "key-command",
       .flags = "--key-command",
       .type = "COMMAND",
       .help = "shell command that prints the store's key, as a password manager does",
       .set = [](const std::string& t, Options* o) { return SetText(t, "the key command", &o->key_command); }},
      {.name = "scrub-rate",
       .flags = "--scrub-rate",
       .type = "SIZE",
       .shown_default = "1MiB",
       .help = "bytes a second that a running program reads of its store to find damage early; 0 never, more finds it "
               "sooner and reads more",
       .set = [](const std::string& t, Options* o) { return SetSize(t, &o->scrub_rate); }},
      {.name = "session",
       .flags = "--session",
       .type = "NAME",
       .help = "name of the conversation in the store; `run` and `chat` go on with it when it is there and save it",

       .set = [](const std::string& t, Options* o) { return SetText(t, "a session's name", &o->session); }},
      {.name = "save-every",
       .flags = "--save-every",
       .type = "N",
       .shown_default = "256",
       .help = "saves the session while an answer is made, each time that it has grown by so many tokens, beside the "
               "work: a process that is killed loses about that much; 0: at the end only",
       .set = [](const std::string& t,
                 Options* o) { return SetInteger(t, 0, std::numeric_limits<int64_t>::max(), &o->save_every); }},
      {.name = "samples",
       .flags = "--samples",
       .type = "N",
       .shown_default = "1",
       .help = "answers to the one prompt, which is fed and kept once; answer i (from 0) draws with seed + i, so give "
               "a --temp "
               "above 0. Each takes memory for its own tokens only",
       .setting = false,
       .set = [](const std::string& t, Options* o) { return SetInteger(t, 1, 1024, &o->samples); }},
      {.name = "no-prefix",
       .flags = "--no-prefix",
       .help = "computes the whole prompt, and keeps nothing of it for later prompts that begin alike",
       .set = [](const std::string& t, Options* o) { return SetBool(t, &o->no_prefix); }},
      {.name = "json",
       .flags = "--json",
       .help = "prints one JSON object on standard output and nothing else there",
       .set = [](const std::string& t, Options* o) { return SetBool(t, &o->json); }},
      {.name = "report",
       .flags = "--report",
       .type = "FILE",
       .help = "writes the object of --json to a file as well",
       .setting = false,
       .set = [](const std::string& t, Options* o) { return SetText(t, "the report's path", &o->report); }},
      {.name = "quiet",
       .flags = "--quiet",
       .help = "no progress, no summary, no warnings; errors are still told",
       .set = [](const std::string& t, Options* o) { return SetBool(t, &o->quiet); }},
      {.name = "context",
       .flags = "--context",
       .type = "N...",
       .shown_default = "2048 8192 32768",
       .help = "tokens per sequence",
       .many = true,
       .setting = false,
       .set = [](const std::string& t, Options* o) { return SetIntegers(t, kMaxContext, &o->contexts); }},
      {.name = "batch",
       .flags = "--batch",
       .type = "N...",
       .shown_default = "1",
       .help = "sequences at once to plan for",
       .many = true,
       .setting = false,
       .set = [](const std::string& t, Options* o) { return SetIntegers(t, 1 << 16, &o->batches); }},
      {.name = "codecs",
       .flags = "--codec",
       .type = "SPEC...",
       .shown_default = "f16 i8 i4",
       .help = "codecs to compare (`kvcell info --codecs`)",
       .many = true,
       .setting = false,
       .setting_name = "codec",
       .set = [](const std::string& t, Options* o) { return SetCodecs(t, &o->codecs); }},
      {.name = "layers",
       .flags = "--layers",
       .type = "N",
       .help = "layers of a model that is not at hand",
       .setting = false,
       .set = [](const std::string& t, Options* o) { return SetInteger(t, 1, 4096, &o->layers); }},
      {.name = "heads",
       .flags = "--heads",
       .type = "N",
       .shown_default = "as many as KV heads",
       .help = "its query heads; they take working memory only",
       .setting = false,
       .set = [](const std::string& t, Options* o) { return SetInteger(t, 1, 4096, &o->heads); }},
      {.name = "kv-heads",
       .flags = "--kv-heads",
       .type = "N",
       .help = "its KV heads",
       .setting = false,
       .set = [](const std::string& t, Options* o) { return SetInteger(t, 1, 4096, &o->kv_heads); }},
      {.name = "head-dim",
       .flags = "--head-dim",
       .type = "N",
       .help = "its values per head",
       .setting = false,
       .set = [](const std::string& t, Options* o) { return SetInteger(t, 1, 1024, &o->head_dim); }},
      {.name = "lab-text",
       .flags = "-f,--file",
       .type = "FILE",
       .help = "text to measure on, - for standard input; long enough for what is asked",
       .setting = false,
       .setting_name = "file",
       .set =
           [](const std::string& t, Options* o) {
             o->file = t;
             return SetText(t, "the file's name", &*o->file);
           }},
      {.name = "lab-context",
       .flags = "--context",
       .type = "N",
       .shown_default = "2048",
       .help =
           "tokens of each window, of which the second half is scored; longer windows read more coded cells and take "
           "longer",
       .setting = false,
       .setting_name = "context",
       .set = [](const std::string& t, Options* o) { return SetIntegers(t, kMaxContext, &o->contexts); }},
      {.name = "lab-tokens",
       .flags = "--context",
       .type = "N",
       .shown_default = "1024",
       .help = "tokens of the text whose K and V are taken; more take longer and say more of long contexts",
       .setting = false,
       .setting_name = "context",
       .set = [](const std::string& t, Options* o) { return SetIntegers(t, kMaxContext, &o->contexts); }},
      {.name = "stream-tokens",
       .flags = "--context",
       .type = "N",
       .shown_default = "8192",
       .help = "tokens of the text that go through the window; more take longer and narrow the error",
       .setting = false,
       .setting_name = "context",
       .set = [](const std::string& t, Options* o) { return SetIntegers(t, kMaxContext, &o->contexts); }},
      {.name = "growth-stages",
       .flags = "--context",
       .type = "N...",
       .shown_default = "4096 8192 16384 32768 65536",
       .help = "tokens at which memory, speed and an answer are taken; the last one ends a run that has not failed",
       .many = true,
       .setting = false,
       .setting_name = "context",
       .set = [](const std::string& t, Options* o) { return SetIntegers(t, kMaxContext, &o->contexts); }},
      {.name = "bench-depth",
       .flags = "--context",
       .type = "N",
       .shown_default = "2048",
       .help = "tokens in the cache before the measured steps",
       .setting = false,
       .setting_name = "context",
       .set = [](const std::string& t, Options* o) { return SetIntegers(t, kMaxContext, &o->contexts); }},
      {.name = "lab-contexts",
       .flags = "--context",
       .type = "N...",
       .shown_default = "2048 8192 32768",
       .help = "tokens that the cache holds, one measurement each",
       .many = true,
       .setting = false,
       .setting_name = "context",
       .set = [](const std::string& t, Options* o) { return SetIntegers(t, kMaxContext, &o->contexts); }},
      {.name = "lab-codecs",
       .flags = "--codec",
       .type = "SPEC...",
       .shown_default = "i8 i4",
       .help =
           "codecs to measure (`kvcell info --codecs`); f16 is always measured, as what the others are compared with",
       .many = true,
       .setting = false,
       .setting_name = "codec",
       .set = [](const std::string& t, Options* o) { return SetCodecs(t, &o->codecs); }},
      {.name = "lab-rules",
       .flags = "--rules",
       .type = "FILE...",
       .help = "rules files or profiles to measure beside the codecs, each with the codecs and exact tokens that it "
               "names",
       .many = true,
       .setting = false,
       .set =
           [](const std::string& t, Options* o) {
             o->rules_files = SplitList(t);
             return OkStatus();
           }},
      {.name = "lab-output",
       .flags = "-o,--output",
       .type = "PATH",
       .help = "what to write: a directory for `lab export`, an HTML file for `lab report`, a rules file for `tune`; "
               "for `lab "
               "sweep` a directory to measure reading in, on the disk that is meant",
       .setting = false,
       .setting_name = "output",
       .set = [](const std::string& t, Options* o) { return SetText(t, "the output's path", &o->output); }},
      {.name = "from",
       .flags = "--from",
       .type = "DIR",
       .help = "directory that `lab export` wrote, instead of a model and a text; without either, values are made",
       .setting = false,
       .set = [](const std::string& t, Options* o) { return SetText(t, "the directory", &o->from); }},
      {.name = "measurements",
       .flags = "--measurement",
       .type = "FILE...",
       .help = "what `kvcell lab ... --json` printed, to be drawn in the report; each file takes a section",
       .many = true,
       .setting = false,
       .set =
           [](const std::string& t, Options* o) {
             o->measurements = SplitList(t);
             return OkStatus();
           }},
      {.name = "questions",
       .flags = "--questions",
       .type = "N",
       .help = "most questions to ask; more take longer and narrow the error",
       .setting = false,
       .set = [](const std::string& t, Options* o) { return SetInteger(t, 1, 1 << 20, &o->questions); }},
      {.name = "lab-probe",
       .flags = "--context",
       .type = "N",
       .shown_default = "1024",
       .help = "tokens of the probe, of which the second half is scored; more measures better and takes longer",
       .setting = false,
       .setting_name = "context",
       .set = [](const std::string& t, Options* o) { return SetIntegers(t, kMaxContext, &o->contexts); }},
      {.name = "tune-codecs",
       .flags = "--codec",
       .type = "SPEC...",
       .shown_default = "the presets, and two with a finer K",
       .help = "codecs to choose from (`kvcell info --codecs`)",
       .many = true,
       .setting = false,
       .set = [](const std::string& t, Options* o) { return SetCodecs(t, &o->codecs); }},
      {.name = "kld",
       .flags = "--kld",
       .type = "X",
       .shown_default = "0.01",
       .help =
           "mean KL divergence against f16 KV that the choice must stay under; lower keeps answers closer and takes "
           "more bits",
       .setting = false,
       .set = [](const std::string& t, Options* o) { return SetDecimal(t, 1e-6, 10.0, &o->kld_limit); }},
      {.name = "bits",
       .flags = "--bits",
       .type = "X",
       .help =
           "bits per element that the choice must not pass, in place of --kld: the answers closest to f16 that they "
           "buy",
       .setting = false,
       .set = [](const std::string& t, Options* o) { return SetDecimal(t, 1.0, 32.0, &o->bits_limit); }},
      {.name = "calibrate",
       .flags = "--calibrate",
       .type = "N...",
       .help = "measures K's channel offsets from calibration too, in place of each block's own mean: from the first N "
               "tokens; with two more numbers taken again every so many tokens over so many last ones (512 256 1024)",
       .many = true,
       .setting = false,
       .set =
           [](const std::string& t, Options* o) {
             KVCELL_RETURN_IF_ERROR(SetIntegers(t, kMaxContext, &o->calibrate));
             return o->calibrate.size() == 1 || o->calibrate.size() == 3
                        ? OkStatus()
                        : Status(StatusCode::kInvalidArgument, "give one number, or three: first, every, over");
           }},
      {.name = "channels",
       .flags = "--channels",
       .help = "adds every channel's figures to --json",
       .setting = false,
       .set = [](const std::string& t, Options* o) { return SetBool(t, &o->channels); }},
      {.name = "by-layer",
       .flags = "--by-layer",
       .help = "prints a row for every layer too; --json has them always",
       .setting = false,
       .set = [](const std::string& t, Options* o) { return SetBool(t, &o->by_layer); }},
      {.name = "windows",
       .flags = "--windows",
       .type = "N",
       .shown_default = "16",
       .help = "windows of the text to measure; more take longer and narrow the error",
       .setting = false,
       .set = [](const std::string& t, Options* o) { return SetInteger(t, 1, 1 << 20, &o->windows); }},
      {.name = "layer",
       .flags = "--layer",
       .type = "N",
       .help = "only cells of this layer",
       .setting = false,
       .set = [](const std::string& t, Options* o) { return SetInteger(t, 0, 4095, &o->only_layer); }},
      {.name = "head",
       .flags = "--head",
       .type = "N",
       .help = "only cells of this KV head",
       .setting = false,
       .set = [](const std::string& t, Options* o) { return SetInteger(t, 0, 4095, &o->only_head); }},
      {.name = "in-state",
       .flags = "--in-state",
       .type = "STATE",
       .help = "only cells in this state: ACTIVE, QUANTIZED, PERSISTED, RECOVERING or EVICTED",
       .setting = false,
       .set =
           [](const std::string& t, Options* o) {
             for (int i = 0; i < kCellStates; ++i) {
               if (t == CellStateName(static_cast<CellState>(i))) return SetText(t, "a state", &o->only_state);
             }
             return Status(StatusCode::kInvalidArgument,
                           fmt::format("'{}' is no state; use ACTIVE, QUANTIZED, PERSISTED, RECOVERING or EVICTED", t));
           }},
      {.name = "from-token",
       .flags = "--from-token",
       .type = "N",
       .shown_default = "0",
       .help = "only cells that hold tokens from this position on",
       .setting = false,
       .set = [](const std::string& t, Options* o) { return SetInteger(t, 0, kMaxContext, &o->from_token); }},
      {.name = "to-token",
       .flags = "--to-token",
       .type = "N",
       .shown_default = "the end",
       .help = "only cells that hold tokens before this position",
       .setting = false,
       .set = [](const std::string& t, Options* o) { return SetInteger(t, 0, kMaxContext, &o->to_token); }},
      {.name = "every",
       .flags = "--every",
       .type = "N",
       .shown_default = "8",
       .help = "of the blocks behind the first window, one in N is recomputed from scratch; fewer take longer",
       .setting = false,
       .set = [](const std::string& t, Options* o) { return SetInteger(t, 1, 1 << 20, &o->every); }},
      {.name = "peer",
       .flags = "--peer",
       .help = "measures libllama's f16, q8_0 and q4_0 in the same run, on the same windows",
       .setting = false,
       .set = [](const std::string& t, Options* o) { return SetBool(t, &o->peer); }},
      {.name = "weights",
       .flags = "--weights",
       .type = "f32|file",
       .shown_default = "file",
       .help = "f32 turns all weights to f32 first: with 4-bit weights two exact attentions already differ, which "
               "hides what is "
               "finer; takes four bytes per parameter of disk and memory",
       .setting = false,
       .set =
           [](const std::string& t, Options* o) {
             if (t != "f32" && t != "file") {
               return Status(StatusCode::kInvalidArgument, fmt::format("'{}' is neither f32 nor file", t));
             }
             o->weights_f32 = t == "f32";
             return OkStatus();
           }},
      {.name = "folder",
       .flags = "--folder",
       .type = "DIR",
       .shown_default = "the system's temporary one",
       .help = "where what the measurement makes is put (a q4_0 copy of the model, kept for the next time)",
       .setting = false,
       .set = [](const std::string& t, Options* o) { return SetText(t, "the folder's path", &o->folder); }},
      {.name = "state",
       .flags = "--state",
       .type = "FILE",
       .help = "keeps what is finished in a file, so that an interrupted measurement goes on from there; written again "
               "after every part",
       .setting = false,
       .set = [](const std::string& t, Options* o) { return SetText(t, "the state's path", &o->state); }},
      {.name = "tokens",
       .flags = "--tokens",
       .type = "N...",
       .shown_default = "the shapes of docs/kernels.md",
       .help =
           "tokens before the queries, the open block's 32 not counted; with this or another size given, only these "
           "shapes are measured",
       .many = true,
       .setting = false,
       .set = [](const std::string& t, Options* o) { return SetIntegers(t, 1 << 24, &o->tokens); }},
      {.name = "queries",
       .flags = "--queries",
       .type = "N...",
       .shown_default = "1",
       .help = "queries at once: 1 is decode, more are prefill",
       .many = true,
       .setting = false,
       .set = [](const std::string& t, Options* o) { return SetIntegers(t, 4096, &o->queries); }},
      {.name = "group",
       .flags = "--group",
       .type = "N",
       .shown_default = "4",
       .help = "query heads per KV head",
       .setting = false,
       .set = [](const std::string& t, Options* o) { return SetInteger(t, 1, 128, &o->group); }},
      {.name = "rounds",
       .flags = "--rounds",
       .type = "N",
       .shown_default = "15, 3 for whole models",
       .help = "alternations between the engines; more narrow the medians and take longer",
       .setting = false,
       .set = [](const std::string& t, Options* o) { return SetInteger(t, 1, 10000, &o->rounds); }},
      {.name = "types",
       .flags = "--types",
       .type = "TYPE...",
       .shown_default = "f16 i8 i4",
       .help = "our types to measure; the peer's f16, q8_0 and q4_0 go beside them",
       .many = true,
       .setting = false,
       .set = [](const std::string& t, Options* o) { return SetTypes(t, &o->types); }},
      {.name = "phase",
       .flags = "--phase",
       .type = "decode|prefill",
       .shown_default = "both",
       .help = "measures one phase alone",
       .setting = false,
       .set =
           [](const std::string& t, Options* o) {
             if (t != "decode" && t != "prefill") {
               return Status(StatusCode::kInvalidArgument, fmt::format("'{}' is neither decode nor prefill", t));
             }
             o->phase = t;
             return OkStatus();
           }},
      {.name = "depth",
       .flags = "--depth",
       .type = "N...",
       .shown_default = "0 8064",
       .help = "tokens in the cache before what is measured",
       .many = true,
       .setting = false,
       .set =
           [](const std::string& t, Options* o) {
             o->depths.clear();
             for (const std::string& part : SplitList(t)) {
               KVCELL_RETURN_IF_ERROR(SetInteger(part, 0, kMaxContext, &o->depths.emplace_back()));
             }
             return OkStatus();
           }},
  };
  return table;
}

const OptionSpec* Find(std::string_view name) {
  for (const OptionSpec& spec : Table()) {
    if (spec.name == name) return &spec;
  }
  return nullptr;
}

// Breaks help text into lines that fit beside the option names on 100 columns.
std::string Wrap(const std::string& text) {
  constexpr size_t kWidth = 68;
  std::string wrapped;
  size_t line = 0, at = 0;
  while (at < text.size()) {
    const size_t end = std::min(text.find(' ', at), text.size());
    const size_t length = end - at;
    if (line > 0) {
      const bool breaks = line + 1 + length > kWidth;
      wrapped += breaks ? '\n' : ' ';
      line = breaks ? 0 : line + 1;
    }
    wrapped.append(text, at, length);
    line += length;
    at = end + 1;
  }
  return wrapped;
}

std::string HelpText(const OptionSpec& spec) {
  std::string text(spec.help);
  if (!spec.shown_default.empty()) text += fmt::format(" [{}]", spec.shown_default);
  return Wrap(text);
}

std::string HomePath(const char* xdg, const char* below_home) {
  if (const char* path = std::getenv(xdg); path != nullptr && path[0] == '/') return path;
  const char* home = std::getenv("HOME");
  return home != nullptr && home[0] != '\0' ? std::string(home) + below_home : std::string();
}

struct FileSettings {
  std::string path;
  std::vector<ConfigEntry> entries;
};

Result<FileSettings> LoadConfig(const std::string& from_command_line) {
  FileSettings settings;
  settings.path = from_command_line;
  if (settings.path.empty()) {
    if (const char* path = std::getenv("KVCELL_CONFIG"); path != nullptr) settings.path = path;
  }
  if (settings.path.empty()) {
    const std::string home = HomePath("XDG_CONFIG_HOME", "/.config");
    if (home.empty()) return settings;
    settings.path = home + "/kvcell/config.yaml";
    std::error_code error;
    if (!std::filesystem::exists(settings.path, error)) return settings;  // nobody asked for it
  }
  Result<std::vector<ConfigEntry>> entries = ReadConfigFile(settings.path);
  if (!entries) return Fail(entries.error());
  for (const ConfigEntry& entry : *entries) {
    if (Find(entry.name) == nullptr) {
      return Fail(StatusCode::kInvalidArgument, fmt::format("{}:{}: '{}' is no option; `kvcell config show` lists them",
                                                            settings.path, entry.line, entry.name));
    }
  }
  settings.entries = *std::move(entries);
  return settings;
}

std::string Join(const std::vector<std::string>& values) { return fmt::format("{}", fmt::join(values, ",")); }

}  // namespace

std::span<const OptionSpec> OptionTable() { return Table(); }

std::string EnvironmentName(std::string_view option) {
  std::string name = "KVCELL_";
  for (const char c : option) name += c == '-' ? '_' : c >= 'a' && c <= 'z' ? static_cast<char>(c - 'a' + 'A') : c;
  return name;
}

std::string DefaultDigestFolder() {
  // Never a folder of everybody's: what lies there is believed.
  const std::string folder = HomePath("XDG_CACHE_HOME", "/.cache");
  return folder.empty() ? folder : folder + "/kvcell";
}

std::string DefaultStore() {
  const std::string home = HomePath("XDG_DATA_HOME", "/.local/share");
  return home.empty() ? home : home + "/kvcell";
}

Status CheckStoreKnown(const Options& options) {
  if (!options.store.empty()) return OkStatus();
  return Status(StatusCode::kInvalidArgument, "HOME is not set, so there is no place for a store; give --store DIR");
}

void OptionParser::OfferOne(CLI::App* command, const OptionSpec& spec) {
  auto offered = std::make_unique<Offered>();
  offered->command = command;
  offered->spec = &spec;
  offered->flag = spec.type.empty();
  const std::string flags(spec.flags);
  const std::string help = HelpText(spec);
  if (offered->flag) {
    offered->option = command->add_flag(flags, help);
  } else {
    offered->option = command->add_option(flags, offered->values, help);
    offered->option->type_name(std::string(spec.type));
    offered->option->expected(1, spec.many ? CLI::detail::expected_max_vector_size : 1);
    offered->option->allow_extra_args(spec.many);
    if (!spec.many) offered->option->multi_option_policy(CLI::MultiOptionPolicy::Throw);
  }
  offered_.push_back(std::move(offered));
}

void OptionParser::OfferConfig(CLI::App* command) {
  auto offered = std::make_unique<Offered>();
  offered->command = command;
  offered->option = command->add_option("--config", offered->values,
                                        Wrap("YAML file with any of these options by their long names; KVCELL_... "
                                             "variables and the command line win over it "
                                             "[$XDG_CONFIG_HOME/kvcell/config.yaml, where it exists]"));
  offered->option->type_name("FILE")->expected(1);
  offered_.push_back(std::move(offered));
}

void OptionParser::Offer(CLI::App* command, std::initializer_list<std::string_view> names) {
  for (const std::string_view name : names) OfferOne(command, *Find(name));
  OfferConfig(command);
}

void OptionParser::OfferSettings(CLI::App* command) {
  for (const OptionSpec& spec : Table()) {
    if (spec.setting) OfferOne(command, spec);
  }
  OfferConfig(command);
}

Result<Options> OptionParser::Resolve(const CLI::App* command) {
  origins_.clear();
  std::string config;
  for (const auto& offered : offered_) {
    if (offered->command == command && offered->spec == nullptr && !offered->values.empty()) {
      config = offered->values.back();
      if (config.empty()) return Fail(StatusCode::kInvalidArgument, "--config: the file's name can't be empty");
    }
  }
  const Result<FileSettings> file = LoadConfig(config);
  if (!file) return Fail(file.error());

  Options options;
  for (const auto& offered : offered_) {
    if (offered->command != command || offered->spec == nullptr) continue;
    const OptionSpec& spec = *offered->spec;
    OptionOrigin origin{.name = std::string(spec.name), .value = std::string(spec.shown_default), .source = "default"};
    bool set = true;
    const std::string_view known_as = spec.setting_name.empty() ? spec.name : spec.setting_name;
    const std::string variable = EnvironmentName(known_as);
    const char* environment = std::getenv(variable.c_str());
    const auto entry = std::find_if(file->entries.begin(), file->entries.end(),
                                    [&](const ConfigEntry& candidate) { return candidate.name == known_as; });
    std::string blame;
    if (offered->option->count() > 0) {
      origin.value = offered->flag ? "true" : Join(offered->values);
      origin.source = "command line";
      blame = std::string(spec.flags.substr(spec.flags.find("--")));
    } else if (environment != nullptr) {
      origin.value = environment;
      origin.source = "environment " + variable;
      blame = variable;
    } else if (entry != file->entries.end()) {
      origin.value = entry->value;
      origin.source = fmt::format("{}:{}", file->path, entry->line);
      blame = fmt::format("{}: {}", origin.source, known_as);
    } else {
      set = false;
      if (offered->flag) origin.value = "false";
      if (spec.name == "store") origin.value = DefaultStore();
    }
    if (set) {
      options.given.emplace_back(spec.name);
      if (const Status status = spec.set(origin.value, &options); !status.ok()) {
        return Fail(StatusCode::kInvalidArgument, fmt::format("{}: {}", blame, status.message()));
      }
    }
    origins_.push_back(std::move(origin));
  }
  if (options.store.empty()) options.store = DefaultStore();
  return options;
}

bool OptionParser::IsSet(std::string_view name) const {
  return std::any_of(origins_.begin(), origins_.end(),
                     [&](const OptionOrigin& origin) { return origin.name == name && origin.source != "default"; });
}

bool Options::Given(std::string_view name) const { return std::find(given.begin(), given.end(), name) != given.end(); }

Result<std::shared_ptr<const Rules>> RulesFrom(const Options& options) {
  const bool named = !options.rules.empty() || !options.profile.empty();
  const bool measured = !named && options.codec == kAutoCodec;
  if (!named && !measured) return std::shared_ptr<const Rules>();
  if (!options.rules.empty() && !options.profile.empty()) {
    return Fail(StatusCode::kInvalidArgument, "--rules and --profile can't both be given; choose one");
  }
  if (named && options.Given("codec")) {
    return Fail(
        StatusCode::kInvalidArgument,
        "--codec can't be given beside --rules or --profile, which say how cells are coded; put it into the file");
  }
  auto loaded = measured                ? AutoRules(options)
                : options.rules.empty() ? ProfileRules(options.profile)
                                        : LoadRules(options.rules);
  if (!loaded) return loaded;
  auto rules = std::make_shared<Rules>(**loaded);
  if (options.Given("sinks")) rules->sinks = options.sinks;
  if (options.Given("recent-blocks")) rules->recent_blocks = options.recent_blocks;
  if (options.Given("ram-budget")) rules->ram_budget = options.ram_budget;
  return std::shared_ptr<const Rules>(std::move(rules));
}

Result<std::string> RuleText(const std::string& path) {
  auto text = ReadTextFile(path, kMostSettingsBytes);
  if (!text && text.error().code() == StatusCode::kNotFound && !ProfileText(path).empty()) {
    return std::string(ProfileText(path));
  }
  return text;
}

Result<CacheOptions> ToCacheOptions(const Options& options) {
  auto rules = RulesFrom(options);
  if (!rules) return Fail(rules.error());
  Result<CodecSpec> codec = ParseCodec(*rules == nullptr ? options.codec : "i4");
  if (!codec) return Fail(codec.error());
  CacheOptions cache;
  cache.rules = *rules;
  cache.codec = *std::move(codec);
  cache.sinks = options.sinks;
  cache.recent_blocks = options.recent_blocks;
  cache.ram_budget = options.ram_budget;
  cache.durability = options.durability;
  cache.file_reads = options.file_reads;
  cache.disk_cap = options.disk_cap;
  cache.ttl_seconds = options.ttl_seconds;
  cache.name_space = options.name_space;
  cache.scrub_bytes_per_second = options.scrub_rate;
  if (!options.trace.empty()) cache.trace_records = 100000;
  if (cache.rules == nullptr) return cache;
  // As the cache will have it, so that what is shown and planned is what runs.
  const Rules& r = *cache.rules;
  if (r.codec) cache.codec = *r.codec;
  cache.codec_ranges = r.codec_ranges;
  if (r.sinks) cache.sinks = *r.sinks;
  if (r.recent_blocks) cache.recent_blocks = *r.recent_blocks;
  if (r.ram_budget) cache.ram_budget = *r.ram_budget;
  return cache;
}

}  // namespace kvcell::cli
