// What a codec does to K and V themselves, and to what attention makes of them: no model runs, so any codec can be
// compared on the same values in seconds.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "kvcell/codec.h"
#include "kvcell/status.h"
#include "lab/kv_data.h"

namespace kvcell {

struct SideError {
  double mse = 0;       // mean squared error of the coded values
  double relative = 0;  // squared error over the values' energy around each channel's mean
  double cosine = 0;    // mean over tokens of the cosine between a token's values and its decoded ones
};

struct LayerError {
  int32_t layer = 0;
  SideError k = {}, v = {};
  double output = 0;  // of the attention outputs of all queries and heads: squared error over energy
};

struct CodecError {
  std::string codec = {};
  double bits = 0;  // of sealed cells, over all layers
  bool in_place = true;
  SideError k = {}, v = {};  // over all layers
  double output = 0;         // likewise
  std::vector<LayerError> layers = {};
};

// Where the channel offsets of K come from in place of each block's own mean: the mean over the first `prompt` tokens
// (static calibration), taken again every `every` tokens over the last `over` ones. What was coded before keeps its
// own.
struct Calibration {
  int64_t prompt = 512;
  int64_t every = 0;  // 0: never again
  int64_t over = 0;

  std::string Text() const;  // "calibrated on 512", "calibrated on 512, every 256 over 1024"
};

struct CodecErrorOptions {
  std::vector<std::string> codecs = {};
  // Measured beside each codec whose K takes channel offsets off; its parameters are stored with the block, as the
  // block's own are.
  std::vector<Calibration> calibrations = {};
  int32_t sinks = 4;  // tokens that stay exact at the start
  int32_t recent_blocks = 0;
  std::function<void(int64_t done, int64_t total)> on_layer = {};
  std::function<bool()> should_stop = {};
};

// Codes whole blocks of 64 tokens as the cache does (what is left over stays exact) and attends with the data's queries
// in float, exactly in every other respect; what attention makes up for codes' noise (attention/attention.h) is left
// out, so that rows of all codecs compare. kInvalidArgument (codec, fewer than 64 tokens), kCancelled.
Result<std::vector<CodecError>> MeasureCodecErrors(const KvData& data, const CodecErrorOptions& options);

// One head's K [n_tokens, dk] and V as a reader of the cache gets them under `codec`: decoded cells, and exact values
// where sinks and the last, open block are. With `calibration` its offsets are taken off K before coding, and the
// codec's own are not.
struct DecodedHead {
  std::vector<float> k = {}, v = {};
};
Result<DecodedHead> CodeHead(const KvData& data, size_t layer, int head, CodecSpec codec, int32_t sinks,
                             const Calibration* calibration = nullptr);

// Rows [layer, head] of what channels hold.
struct HeadStats {
  int32_t layer = 0, head = 0;
  char side = 'k';
  double min = 0, max = 0, mean = 0, stddev = 0;
  double p001 = 0, p50 = 0, p999 = 0;  // quantiles 0.1 %, 50 %, 99.9 %
  double kurtosis = 0;                 // of the values around their channels' means; 3 for a Gaussian
  double outliers = 0;                 // share of values beyond 6 standard deviations of the head
  int32_t widest_channel = 0;          // with the largest standard deviation
  double widest_ratio = 0;             // that over the median channel's
  int32_t biased_channel = 0;          // with the largest mean in magnitude
  double biased_ratio = 0;             // that over the median channel's standard deviation
  std::vector<double> channel_mean = {}, channel_stddev = {}, channel_min = {}, channel_max = {},
                      channel_kurtosis = {};  // [head_dim]
};

struct KvStats {
  std::vector<HeadStats> rows = {};   // K then V of every layer and head
  std::vector<double> k_loss = {};    // [n_layers] attention-output error with `codec` on K alone
  std::vector<double> v_loss = {};    // and on V alone
  std::vector<int32_t> finer_k = {};  // layers whose loss is more than three times the median's: better kept finer
  std::vector<int32_t> finer_v = {};
};
// `codec` (i4 for one) is what the layers are judged with. Same errors as above.
Result<KvStats> MeasureStats(const KvData& data, const std::string& codec, const CodecErrorOptions& options);

}  // namespace kvcell
