// Finds the codec for each layer by measuring: the fewest bits under which a model's answers stay within a limit, or
// the closest answers within a number of bits.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "kvcell/status.h"

namespace kvcell {

struct TuneOptions {
  std::string model = {};
  std::string text = {};    // "": a text that the library brings along
  int64_t context = 1024;   // tokens of the probe, of which the second half is scored
  double kld_limit = 0.01;  // mean KL divergence against the model's own f16 KV that the choice must stay under
  double bits_limit = 0;    // bits per element that the choice must not pass, in place of kld_limit; 0: no such limit
  // To choose from, in any order. Beside the presets a K that is much finer than V, which some layers need.
  std::vector<std::string> codecs = {"i8", "k=int6:g32:sym:rot:off,v=int4:g64:lloyd:rot",  "i5",
                                     "i4", "k=int5:g32:lloyd:rot:off,v=int3:g64:skew:rot", "i43",
                                     "i3"};
  int32_t sinks = 4;
  bool weights_f32 = false;  // on a copy with all weights in f32: probes then measure the codecs alone
  int32_t n_threads = 0;
  std::function<void(int64_t done, int64_t total)> on_probe = {};
  std::function<bool()> should_stop = {};
};

struct TuneResult {
  std::string model = {};                        // its name
  std::vector<std::string> codec_by_layer = {};  // [n_layers]
  double kld = 0;                                // measured with this choice
  double bits = 0;                               // per element of sealed cells, over all layers
  double kld_smallest = 0;                       // with the smallest codec everywhere, and
  double kld_finest = 0;                         // with the finest one everywhere
  int32_t sinks = 4;                             // that all of this was measured with
  std::string rules = {};                        // the rules file's text
};

// Each layer's loss is measured alone under the smallest codec (and drawn halfway to the layers' mean), and that of the
// other codecs taken in proportion to what they do to attention's outputs on the layer's own K and V; layers get finer
// where that gains most for each bit until the sum is under the limit. The choice is measured whole, the sum corrected
// by what it was off, and chosen again, some rounds long; the smallest choice that was measured under the limit is it.
// With bits_limit layers get finer as long as bits are left. kInvalidArgument where even the finest codec everywhere is
// above the limit: the sentence says by how much.
Result<TuneResult> Tune(const TuneOptions& options);

// A rules file (docs/rules.md) with these codecs by layer: runs of equal layers in one line.
std::string RulesText(const TuneResult& result);

}  // namespace kvcell
