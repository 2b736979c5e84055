// Codec specs as text: presets, parsing and the canonical form that identities are made of.
#include "kvcell/codec.h"

#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "codec/cell_layout.h"

namespace kvcell {
namespace {

constexpr size_t kMaxSpecText = 200;

// User text for a message: short, and without bytes that could confuse a terminal.
std::string Quoted(std::string_view text) {
  constexpr size_t kMaxShown = 48;
  std::string shown;
  for (const char c : text.substr(0, kMaxShown)) shown += c >= ' ' && c <= '~' ? c : '?';
  return fmt::format("'{}{}'", shown, text.size() > kMaxShown ? "..." : "");
}

// Cuts `text` at the first `separator`: returns what is before it and leaves what is after; all of it where there is
// none.
std::string_view NextPart(std::string_view* text, char separator) {
  const size_t at = text->find(separator);
  const std::string_view part = text->substr(0, at);
  *text = at == std::string_view::npos ? std::string_view() : text->substr(at + 1);
  return part;
}

std::optional<SideSpec::Type> TypeOf(std::string_view word) {
  if (word == "f16") return SideSpec::Type::kF16;
  if (word == "int8") return SideSpec::Type::kInt8;
  if (word == "int4") return SideSpec::Type::kInt4;
  return std::nullopt;
}

std::string AllowedParts(SideSpec::Type type, bool is_key) {
  if (type == SideSpec::Type::kF16) return "f16 takes no parts";
  return fmt::format("{} takes g32, g64 or g128, {}, rot{}", type == SideSpec::Type::kInt4 ? "int4" : "int8",
                     type == SideSpec::Type::kInt4 ? "sym or lloyd" : "sym", is_key ? ", off" : "; off is for k alone");
}

// What parts of a side have been seen, so that a second word for the same thing is an error.
struct SeenParts {
  bool group = false;
  bool levels = false;
};

// Applies one `:` part to a side; false where the side has no such part or has it already.
bool ApplyPart(std::string_view part, bool is_key, SideSpec* side, SeenParts* seen) {
  if (side->type == SideSpec::Type::kF16) return false;
  if (part == "g32" || part == "g64" || part == "g128") {
    side->group = part == "g32" ? 32 : part == "g64" ? 64 : 128;
    return !std::exchange(seen->group, true);
  }
  if (part == "sym" || (part == "lloyd" && side->type == SideSpec::Type::kInt4)) {
    side->levels = part == "sym" ? SideSpec::Levels::kUniform : SideSpec::Levels::kLloydMax;
    return !std::exchange(seen->levels, true);
  }
  if (part == "rot") return !std::exchange(side->rotate, true);
  if (part == "off" && is_key) return !std::exchange(side->channel_offset, true);
  return false;
}

Result<SideSpec> ParseSide(std::string_view text, bool is_key) {
  std::string_view rest = text;
  const std::string_view word = NextPart(&rest, ':');
  const std::optional<SideSpec::Type> type = TypeOf(word);
  if (!type) {
    return Fail(StatusCode::kInvalidArgument,
                fmt::format("codec: side {} names {}; use f16, int8 or int4", is_key ? "k" : "v", Quoted(word)));
  }
  SideSpec side;
  side.type = *type;
  SeenParts seen;
  bool more = word.size() < text.size();
  while (more) {
    more = rest.find(':') != std::string_view::npos;
    const std::string_view part = NextPart(&rest, ':');
    if (part == "off" && !is_key) {
      return Fail(
          StatusCode::kInvalidArgument,
          "codec: side v has 'off'; channel means are a property of keys, on values they cost bytes and give nothing: "
          "leave it out");
    }
    if (!ApplyPart(part, is_key, &side, &seen)) {
      return Fail(StatusCode::kInvalidArgument,
                  fmt::format("codec: side {} has {}, unknown or given twice; {}", is_key ? "k" : "v", Quoted(part),
                              AllowedParts(side.type, is_key)));
    }
  }
  return side;
}

std::string SideText(const SideSpec& side) {
  if (side.type == SideSpec::Type::kF16) return "f16";
  const bool int4 = side.type == SideSpec::Type::kInt4;
  return fmt::format("{}:g{}:{}{}{}", int4 ? "int4" : "int8", side.group,
                     side.levels == SideSpec::Levels::kLloydMax ? "lloyd" : "sym", side.rotate ? ":rot" : "",
                     side.channel_offset ? ":off" : "");
}

std::vector<CodecPreset> MakePresets() {
  using enum SideSpec::Type;
  using enum SideSpec::Levels;
  const SideSpec f16;
  const SideSpec i8_k = {.type = kInt8, .rotate = true, .channel_offset = true, .group = 128};
  const SideSpec i8_v = {.type = kInt8, .rotate = true, .group = 64};
  const SideSpec i4_k = {.type = kInt4, .levels = kLloydMax, .rotate = true, .channel_offset = true, .group = 32};
  const SideSpec i4_v = {.type = kInt4, .levels = kLloydMax, .rotate = true, .group = 64};
  return {
      {"f16", "half precision as appended: the reference, 16 bits per element", {f16, f16, "f16"}},
      {"i8",
       "8-bit codes after a Hadamard rotation, K around its channel means: next to no loss, half the bytes",
       {i8_k, i8_v, "i8"}},
      {"i4",
       "4-bit Lloyd-Max codes after a Hadamard rotation, K around its channel means: a bit over a quarter of the bytes",
       {i4_k, i4_v, "i4"}},
  };
}

}  // namespace

const std::vector<CodecPreset>& CodecPresets() {
  static const std::vector<CodecPreset> presets = MakePresets();
  return presets;
}

Result<CodecSpec> ParseCodec(std::string_view text) {
  for (const CodecPreset& preset : CodecPresets()) {
    if (text == preset.name) return preset.spec;
  }
  std::string_view rest = text;
  const std::string_view k = NextPart(&rest, ',');
  const std::string_view v = rest;
  if (text.size() > kMaxSpecText || !k.starts_with("k=") || !v.starts_with("v=")) {
    std::string names;
    for (const CodecPreset& preset : CodecPresets()) names += preset.name + ", ";
    return Fail(
        StatusCode::kInvalidArgument,
        fmt::format("codec: {} is none of {}and not of the form k=SIDE,v=SIDE with SIDE such as f16, int8:g64 or "
                    "int4:g64:lloyd:rot",
                    Quoted(text), names));
  }
  Result<SideSpec> k_side = ParseSide(k.substr(2), true);
  if (!k_side) return Fail(k_side.error());
  Result<SideSpec> v_side = ParseSide(v.substr(2), false);
  if (!v_side) return Fail(v_side.error());
  return CodecSpec{*k_side, *v_side, std::string(text)};
}

std::string CodecText(const CodecSpec& spec) { return fmt::format("k={},v={}", SideText(spec.k), SideText(spec.v)); }

Result<double> CodecBitsPerElement(const CodecSpec& spec, int head_dim_k, int head_dim_v) {
  const Result<CellLayout> layout = MakeCellLayout(spec, head_dim_k, head_dim_v);
  if (!layout) return Fail(layout.error());
  return 8.0 * layout->bytes / (double(kBlockTokens) * (head_dim_k + head_dim_v));
}

}  // namespace kvcell
