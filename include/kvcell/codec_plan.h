// Codecs by layer and KV head: a base recipe and ranges that have another.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "kvcell/codec.h"
#include "kvcell/status.h"

namespace kvcell {

// A recipe for some layers and KV heads, both ends included, where others hold for the rest.
struct CodecRange {
  int32_t first_layer = 0, last_layer = INT32_MAX;
  int32_t first_head = 0, last_head = INT32_MAX;
  CodecSpec codec;

  bool holds(int32_t layer, int32_t head) const {
    return layer >= first_layer && layer <= last_layer && head >= first_head && head <= last_head;
  }
  bool operator==(const CodecRange&) const = default;
};

// What a codec says of one layer of a model of n_layers: with what `early_v` says of the layer as its v, and no early_v
// of its own.
CodecSpec CodecOfLayer(CodecSpec codec, size_t layer, size_t n_layers);
// The codec of one cell of a model of n_layers: of the first range that holds, else of `base`, what it says of the
// layer.
CodecSpec CodecFor(const CodecSpec& base, const std::vector<CodecRange>& ranges, int32_t layer, int32_t head,
                   int32_t n_layers);
// The canonical text of base and ranges, part of a stored cell's identity: CodecText(base) where there are no ranges,
// else followed by `;layers A-B heads C-D: ` and a codec's text for each.
std::string CodecPlanText(const CodecSpec& base, const std::vector<CodecRange>& ranges);
struct CodecPlan {
  CodecSpec base;
  std::vector<CodecRange> ranges;
};
// The inverse of CodecPlanText. kInvalidArgument.
Result<CodecPlan> ParseCodecPlan(std::string_view text);

}  // namespace kvcell
