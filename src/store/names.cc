// What a session may be called, and how two identities differ.
#include <fmt/format.h>

#include <string_view>

#include "store/store.h"

namespace kvcell {
namespace {

constexpr size_t kMaxNameBytes = 128;

// The length of the well-formed UTF-8 sequence at the start (RFC 3629: shortest form, no surrogates), 0 where there is
// none.
size_t SequenceLength(std::string_view text) {
  const auto byte = [&](size_t i) { return i < text.size() ? static_cast<uint8_t>(text[i]) : uint8_t{0}; };
  const auto continues = [&](size_t i, uint8_t low = 0x80, uint8_t high = 0xbf) {
    return byte(i) >= low && byte(i) <= high;
  };
  const uint8_t first = byte(0);
  if (first < 0x80) return 1;
  if (first >= 0xc2 && first <= 0xdf) return continues(1) ? 2 : 0;
  if (first >= 0xe0 && first <= 0xef) {
    const uint8_t low = first == 0xe0 ? 0xa0 : 0x80;
    const uint8_t high = first == 0xed ? 0x9f : 0xbf;
    return continues(1, low, high) && continues(2) ? 3 : 0;
  }
  if (first >= 0xf0 && first <= 0xf4) {
    const uint8_t low = first == 0xf0 ? 0x90 : 0x80;
    const uint8_t high = first == 0xf4 ? 0x8f : 0xbf;
    return continues(1, low, high) && continues(2) && continues(3) ? 4 : 0;
  }
  return 0;
}

// Marks of direction and line separators (U+200E, U+200F, U+2028 to U+202E, U+2066 to U+2069): a terminal that obeys
// them shows another name than the one that is there.
bool TurnsText(std::string_view character) {
  return character == "\u200e" || character == "\u200f" || (character >= "\u2028" && character <= "\u202e") ||
         (character >= "\u2066" && character <= "\u2069");
}

}  // namespace

Status CheckSessionName(const std::string& name) {
  const auto refuse = [&](std::string_view rule) {
    return Status(StatusCode::kInvalidArgument, fmt::format("session name {}: choose another", rule));
  };
  if (name.empty()) return refuse("is empty");
  if (name.size() > kMaxNameBytes) return refuse(fmt::format("has {} bytes, more than {}", name.size(), kMaxNameBytes));
  if (name == "." || name == "..") return refuse("is a directory's name, '.' or '..'");
  if (name[0] == '-') return refuse("begins with a '-', as options do");
  if (name.find_first_not_of(' ') == std::string::npos) return refuse("is blank");
  for (std::string_view rest = name; !rest.empty();) {
    const size_t length = SequenceLength(rest);
    if (length == 0) return refuse("is not valid UTF-8");
    const auto first = static_cast<uint8_t>(rest[0]);
    const bool c1 = length == 2 && first == 0xc2 && static_cast<uint8_t>(rest[1]) < 0xa0;
    if (first < 0x20 || first == 0x7f || c1) return refuse("has a control character");
    if (TurnsText(rest.substr(0, length))) return refuse("has a character that changes how text around it is shown");
    if (first == '/' || first == '\\') return refuse(fmt::format("has a '{}'", rest[0]));
    rest.remove_prefix(length);
  }
  return OkStatus();
}

std::optional<std::string> IdentityDifference(const Identity& stored, const Identity& now) {
  const auto text = [](const Identity& identity, std::string_view field) -> std::string_view {
    for (const auto& [name, value] : identity) {
      if (name == field) return value;
    }
    return "absent";
  };
  for (const auto* side : {&now, &stored}) {
    for (const auto& [name, value] : *side) {
      const auto was = text(stored, name);
      const auto is = text(now, name);
      if (was != is) return fmt::format("{}: stored {}, now {}", name, was, is);
    }
  }
  if (stored != now) return std::string("fields: stored in another order or twice");
  return std::nullopt;
}

}  // namespace kvcell
