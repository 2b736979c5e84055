// How much of a model's answers a codec costs: perplexity and KL divergence against the same model's own f16 KV, K and
// V really read back quantized; libllama's caches beside them on the same windows.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "kvcell/status.h"

namespace kvcell {

struct QualityOptions {
  std::string model = {};                // GGUF file
  std::string text = {};                 // cut into windows of `context` tokens, from the start
  int64_t context = 2048;                // tokens per window
  int64_t windows = 16;                  // fewer where the text ends
  int64_t chunk = 64;                    // tokens per step
  std::vector<std::string> codecs = {};  // specs or presets, each with `sinks` and `recent_blocks`
  int32_t sinks = 4;
  int32_t recent_blocks = 0;
  struct RulesFile {
    std::string name = {}, text = {};
  };
  std::vector<RulesFile> rules = {};  // measured beside the codecs, each with the codecs and exact tokens that it names
  bool peer = false;                  // libllama f16, q8_0 and q4_0 too
  bool weights_f32 = false;  // on a copy with all weights in f32: without it two exact attention paths already differ
  int32_t n_threads = 0;
  std::string state = {};  // file that finished windows are kept in, to go on from; "": none
  std::function<void(int64_t done, int64_t total)> on_window = {};
  std::function<bool()> should_stop = {};
};

struct QualityRow {
  std::string engine = {};  // "kvcell" or "libllama"
  std::string codec = {};   // or the name of the rules
  double bits = 0;          // of sealed cells
  double bits_all_in = 0;   // everything that is kept at this context, exact tokens too
  double ppl = 0;
  double kld_mean = 0, kld_se = 0, kld_median = 0, kld_p999 = 0;  // against the same engine's f16; se over windows
  double top1 = 0;  // fraction of positions with the same most likely token
};

struct QualityResult {
  int64_t context = 0;
  int64_t windows = 0;
  int64_t positions = 0;      // scored: the second half of each window
  double floor_kld = 0;       // our f16 against libllama's: what exact paths already differ by; 0 without --peer
  double ppl_difference = 0;  // of the two f16 perplexities, relative: a check of the scores; 0 without --peer
  std::vector<QualityRow> rows = {};
};

// kNotFound, kInvalidArgument (codec, rules, context beyond the model, text shorter than a window), kCancelled
// (finished windows are in `state`), or what loading the model gives.
Result<QualityResult> MeasureQuality(const QualityOptions& options);

}  // namespace kvcell
