#include "cli/auto_codec.h"

#include <fmt/format.h>
#include <unistd.h>

#include <filesystem>
#include <span>
#include <utility>

#include "base/checksum.h"
#include "base/text_file.h"
#include "cell/rules.h"
#include "cli/interrupt.h"
#include "cli/output.h"
#include "kvcell/codec.h"
#include "lab/tune.h"
#include "model/key_balance.h"
#include "model/weights.h"
#include "model/weights_digest.h"

namespace kvcell::cli {
namespace {

// What a choice was made from, as 16 hexadecimal digits: another version's codecs and keys are measured anew.
std::string Candidates() {
  std::string texts = kBalancedKeys;
  for (const std::string& codec : TuneOptions{}.codecs) {
    const auto spec = ParseCodec(codec);
    texts.append("|").append(spec ? CodecText(*spec) : codec);
  }
  return fmt::format("{:016x}", Checksum64(std::as_bytes(std::span(texts))));
}

// Rules that were kept: what tune writes says which codecs hold and nothing on which answers depend.
Result<std::shared_ptr<const Rules>> Kept(const std::string& path) {
  std::error_code error;
  const auto type = std::filesystem::status(path, error).type();
  if (type == std::filesystem::file_type::not_found) return Fail(StatusCode::kNotFound, path);
  if (type != std::filesystem::file_type::regular) {
    return Fail(StatusCode::kIoError, fmt::format("{} is no file", path));
  }
  const auto text = ReadTextFile(path, kMostSettingsBytes);
  if (!text) return Fail(text.error());
  auto rules = ParseRules(*text, path);
  if (rules && (!(*rules)->codec || !(*rules)->MayShare())) {
    return Fail(StatusCode::kCorruption, fmt::format("{} says more than codecs by layer", path));
  }
  return rules;
}

Result<std::string> Measure(const Options& options) {
  CatchInterrupts();
  const bool shown = !options.quiet && !options.json;
  if (shown) {
    Print(stderr, "Measuring once which codec each layer of {} bears ...\n",
          std::filesystem::path(options.model).filename().string());
  }
  Progress progress("probes", shown);
  const auto result = Tune({.model = options.model,
                            .n_threads = options.threads,
                            .on_probe = [&](int64_t done, int64_t total) { progress.Show(done, total); },
                            .should_stop = [] { return InterruptSignal() != 0; }});
  progress.Clear();
  if (!result) return Fail(result.error());
  return result->rules;
}

}  // namespace

Result<std::shared_ptr<const Rules>> AutoRules(const Options& options) {
  if (options.model.empty()) {
    return Fail(StatusCode::kInvalidArgument, "--codec auto measures a model: name one with -m FILE");
  }
  const std::string folder = DefaultDigestFolder();
  if (folder.empty()) {
    return Fail(StatusCode::kInvalidArgument,
                fmt::format("--codec auto keeps what it measures in the home directory, and HOME is not set; write a "
                            "rules file with `kvcell tune -m {} -o FILE` and give it by --rules",
                            options.model));
  }
  const auto weights = WeightsFile::Open(options.model);
  if (!weights) return Fail(weights.error());
  const std::string digest = DigestWeights(weights->bytes(), weights->info(), folder).text;
  const std::string path = fmt::format("{}/{}.{}.auto.yaml", folder, digest, Candidates());
  auto known = Kept(path);
  if (known) return known;
  std::error_code ignored;
  std::filesystem::create_directories(folder, ignored);
  if (!options.quiet) {
    if (known.error().code() != StatusCode::kNotFound) {
      PrintWarning(
          fmt::format("the codecs that were measured for this model are measured again: {}", known.error().message()));
    }
    if (::access(folder.c_str(), W_OK) != 0) {
      PrintWarning(
          fmt::format("{} can't be written, so what is measured now is not kept; `kvcell tune -m {} -o FILE` "
                      "keeps it where you say, for --rules FILE",
                      folder, options.model));
    }
  }
  auto text = Measure(options);
  if (!text) return Fail(text.error());
  if (const Status kept = ReplaceTextFile(path, *text); !kept.ok() && !options.quiet) {
    PrintWarning(
        fmt::format("the codecs were measured but not kept, so the next run measures again: {}", kept.message()));
  }
  return ParseRules(*text, path);
}

}  // namespace kvcell::cli
