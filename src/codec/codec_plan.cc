#include "kvcell/codec_plan.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <utility>

namespace kvcell {
namespace {

// Cuts `text` at the first `;`: returns what is before it and leaves what is after.
std::string_view NextPart(std::string_view* text) {
  const size_t at = text->find(';');
  const std::string_view part = text->substr(0, at);
  *text = at == std::string_view::npos ? std::string_view() : text->substr(at + 1);
  return part;
}

}  // namespace

CodecSpec CodecOfLayer(CodecSpec codec, size_t layer, size_t n_layers) {
  if (codec.early_v && layer < n_layers / 4) codec.v = *codec.early_v;
  codec.early_v.reset();
  return codec;
}

CodecSpec CodecFor(const CodecSpec& base, const std::vector<CodecRange>& ranges, int32_t layer, int32_t head,
                   int32_t n_layers) {
  const auto range = std::ranges::find_if(ranges, [&](const CodecRange& r) { return r.holds(layer, head); });
  return CodecOfLayer(range == ranges.end() ? base : range->codec, static_cast<size_t>(layer),
                      static_cast<size_t>(n_layers));
}

std::string CodecPlanText(const CodecSpec& base, const std::vector<CodecRange>& ranges) {
  std::string text = CodecText(base);
  for (const CodecRange& r : ranges) {
    text += fmt::format(";layers {}-{} heads {}-{}: {}", r.first_layer, r.last_layer, r.first_head, r.last_head,
                        CodecText(r.codec));
  }
  return text;
}

Result<CodecPlan> ParseCodecPlan(std::string_view text) {
  auto base = ParseCodec(NextPart(&text));
  if (!base) return Fail(base.error());
  CodecPlan plan{.base = *std::move(base), .ranges = {}};
  while (!text.empty()) {
    const std::string part(NextPart(&text));
    CodecRange range;
    int read = 0;
    if (std::sscanf(part.c_str(), "layers %d-%d heads %d-%d: %n", &range.first_layer, &range.last_layer,
                    &range.first_head, &range.last_head, &read) != 4 ||
        read == 0) {
      return Fail(StatusCode::kInvalidArgument, fmt::format("codec: '{}' names no layers and heads", part));
    }
    auto codec = ParseCodec(std::string_view(part).substr(static_cast<size_t>(read)));
    if (!codec) return Fail(codec.error());
    range.codec = *std::move(codec);
    plan.ranges.push_back(std::move(range));
  }
  return plan;
}

}  // namespace kvcell
