// Codec specs as text: presets, parsing and the canonical form that identities are made of.
#include "kvcell/codec.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <iterator>
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

using Type = SideSpec::Type;
using Levels = SideSpec::Levels;

struct NamedType {
  std::string_view name;
  Type type;
};
constexpr NamedType kTypes[] = {
    {"f16", Type::kF16},   {"int8", Type::kInt8},       {"int6", Type::kInt6},       {"int5", Type::kInt5},
    {"int4", Type::kInt4}, {"int3", Type::kInt3},       {"int2", Type::kInt2},       {"f32", Type::kF32},
    {"bf16", Type::kBf16}, {"fp8e4m3", Type::kFp8E4M3}, {"fp8e5m2", Type::kFp8E5M2}, {"nf4", Type::kNf4},
    {"fp4", Type::kFp4},   {"tq2", Type::kTq2},         {"tq3", Type::kTq3},         {"tq4", Type::kTq4}};

const NamedType* FindType(std::string_view word) {
  const auto* found = std::find_if(std::begin(kTypes), std::end(kTypes), [&](const auto& t) { return t.name == word; });
  return found == std::end(kTypes) ? nullptr : found;
}

bool TakesNoParts(Type type) {
  return type == Type::kF16 || type == Type::kF32 || type == Type::kBf16 || type == Type::kFp8E4M3 ||
         type == Type::kFp8E5M2;
}
bool IsTurbo(Type type) { return type == Type::kTq2 || type == Type::kTq3 || type == Type::kTq4; }
bool IsFloat4(Type type) { return type == Type::kNf4 || type == Type::kFp4; }
// The types that have every option of the study family.
bool IsLowInt(Type type) { return type == Type::kInt2 || type == Type::kInt3 || type == Type::kInt4; }

struct NamedLevels {
  std::string_view name;
  Levels levels;
};
constexpr NamedLevels kLevels[] = {
    {"sym", Levels::kUniform}, {"asym", Levels::kAsymmetric}, {"lloyd", Levels::kLloydMax}, {"skew", Levels::kSkewed}};

bool HasLevels(Type type, Levels levels) {
  if (IsFloat4(type)) return false;
  switch (levels) {
    case Levels::kUniform:
      return true;
    case Levels::kAsymmetric:
      return IsLowInt(type);
    case Levels::kLloydMax:
      return IsLowInt(type) || type == Type::kInt5;
    case Levels::kSkewed:
      return type == Type::kInt3 || type == Type::kInt4;
  }
  return false;
}

std::string AllowedParts(Type type, bool is_key) {
  const std::string name(TypeName(type));
  if (TakesNoParts(type)) return name + " takes no parts";
  if (IsTurbo(type)) return name + " takes qjl alone";
  std::string text = name + " takes g16, g32, g64 or g128";
  if (IsLowInt(type)) text += " (t16, t32 or t64 for groups along tokens)";
  if (!IsFloat4(type)) {
    std::vector<std::string_view> levels;
    for (const NamedLevels& known : kLevels) {
      if (HasLevels(type, known.levels)) levels.push_back(known.name);
    }
    text += levels.size() == 1 ? ", sym" : fmt::format(", one of {}", fmt::join(levels, " "));
    if (IsLowInt(type)) text += ", plain, clip, two";
  }
  return text + ", rot" + (is_key ? ", off" : "; off is for k alone");
}

// What parts of a side have been seen, so that a second word for the same thing is an error.
struct SeenParts {
  bool group = false;
  bool levels = false;
};

bool SetGroup(std::string_view part, SideSpec* side) {
  for (const uint16_t group : {uint16_t{16}, uint16_t{32}, uint16_t{64}, uint16_t{128}}) {
    if (part.substr(1) != std::to_string(group)) continue;
    side->along_tokens = part[0] == 't';
    side->group = group;
    return !side->along_tokens || (IsLowInt(side->type) && group <= 64);
  }
  return false;
}

// Applies one `:` part to a side; false where the side has no such part or has it already.
bool ApplyPart(std::string_view part, bool is_key, SideSpec* side, SeenParts* seen) {
  const Type type = side->type;
  if (TakesNoParts(type)) return false;
  if (IsTurbo(type)) return part == "qjl" && !std::exchange(side->qjl, true);
  if (part.starts_with('g') || (part.starts_with('t') && part != "two")) {
    return SetGroup(part, side) && !std::exchange(seen->group, true);
  }
  if (part == "rot") return !std::exchange(side->rotate, true);
  if (part == "off" && is_key) return !std::exchange(side->channel_offset, true);
  for (const NamedLevels& known : kLevels) {
    if (part != known.name || !HasLevels(type, known.levels)) continue;
    side->levels = known.levels;
    return !std::exchange(seen->levels, true);
  }
  if (!IsLowInt(type)) return false;
  if (part == "plain") return !std::exchange(side->plain_scale, true);
  if (part == "clip") return !std::exchange(side->clip, true);
  if (part == "two") return !std::exchange(side->two_axis, true);
  return false;
}

// `name` is the side's: k, v or early-v.
Result<SideSpec> ParseSide(std::string_view text, std::string_view name) {
  const bool is_key = name == "k";
  std::string_view rest = text;
  const std::string_view word = NextPart(&rest, ':');
  const NamedType* type = FindType(word);
  if (type == nullptr) {
    std::string names;
    for (const NamedType& known : kTypes) names.append(names.empty() ? "" : ", ").append(known.name);
    return Fail(StatusCode::kInvalidArgument,
                fmt::format("codec: side {} names {}; use one of {}", name, Quoted(word), names));
  }
  SideSpec side;
  side.type = type->type;
  SeenParts seen;
  bool more = word.size() < text.size();
  while (more) {
    more = rest.find(':') != std::string_view::npos;
    const std::string_view part = NextPart(&rest, ':');
    if (part == "off" && !is_key) {
      return Fail(StatusCode::kInvalidArgument,
                  "codec: a side of values has 'off'; channel means are a property of keys, on values they cost bytes "
                  "and give nothing: "
                  "leave it out");
    }
    if (!ApplyPart(part, is_key, &side, &seen)) {
      return Fail(StatusCode::kInvalidArgument, fmt::format("codec: side {} has {}, unknown or given twice; {}", name,
                                                            Quoted(part), AllowedParts(side.type, is_key)));
    }
  }
  if (side.levels == Levels::kSkewed && !AttendedInPlace(side)) {
    return Fail(
        StatusCode::kInvalidArgument,
        fmt::format("codec: side {} has 'skew' beside groups along tokens, 'plain', 'clip' or 'two'; such a side "
                    "is decoded to be attended and takes sym, asym or lloyd",
                    name));
  }
  return side;
}

std::string SideText(const SideSpec& side) {
  std::string text(TypeName(side.type));
  if (TakesNoParts(side.type)) return text;
  if (IsTurbo(side.type)) return text + (side.qjl ? ":qjl" : "");
  text += fmt::format(":{}{}", side.along_tokens ? 't' : 'g', side.group);
  if (!IsFloat4(side.type)) {
    for (const NamedLevels& known : kLevels) {
      if (known.levels == side.levels) text.append(":").append(known.name);
    }
  }
  if (side.plain_scale) text += ":plain";
  if (side.clip) text += ":clip";
  if (side.two_axis) text += ":two";
  if (side.rotate) text += ":rot";
  if (side.channel_offset) text += ":off";
  return text;
}

CodecPreset Preset(const char* name, const char* idea, const SideSpec& k, const SideSpec& v) {
  return {name, idea, {k, v, name}};
}

std::vector<CodecPreset> MakePresets() {
  const auto value = [](Type type, uint16_t group) {
    // Skewed levels win most at 3 bits; at 4 they win less for twice the time to code (docs/codecs.md).
    const Levels levels = type == Type::kInt8   ? Levels::kUniform
                          : type == Type::kInt3 ? Levels::kSkewed
                                                : Levels::kLloydMax;
    return SideSpec{.type = type, .levels = levels, .rotate = true, .group = group};
  };
  const auto key = [&](Type type, uint16_t group) {
    SideSpec side = value(type, group);
    side.channel_offset = true;
    return side;
  };
  CodecPreset i43 = Preset("i43", "as i4, with 3-bit V behind the first quarter of the layers: a quarter of the bytes",
                           key(Type::kInt4, 64), value(Type::kInt3, 32));
  i43.spec.early_v = value(Type::kInt4, 64);
  return {
      Preset("f16", "half precision as appended: the reference, 16 bits per element", {}, {}),
      Preset("i8", "8-bit codes after a Hadamard rotation, K around its channel means: next to no loss, half the bytes",
             key(Type::kInt8, 128), value(Type::kInt8, 64)),
      Preset("i5", "as i4, with 5-bit K: half of i4's loss for half a bit", key(Type::kInt5, 32),
             value(Type::kInt4, 64)),
      Preset("i4",
             "4-bit Lloyd-Max codes after a Hadamard rotation, K around its channel means: a bit over a quarter of the "
             "bytes",
             key(Type::kInt4, 32), value(Type::kInt4, 64)),
      // V's finer groups win more than K's at 3 bits: `lab error` over both.
      i43,
      Preset("i3", "3-bit codes: for contexts that fit in no other way", key(Type::kInt3, 32), value(Type::kInt3, 64)),
  };
}

std::vector<CodecFamily> MakeFamilies() {
  return {
      {"f16", "", "half precision as appended", "k=f16,v=f16"},
      {"int8", "g16..g128, sym, rot, off", "8-bit codes, absmax scale: next to no loss", "k=int8:g64,v=int8:g64"},
      {"int6", "g16..g128, sym, rot, off", "6-bit uniform codes, scale searched: for K",
       "k=int6:g32:rot:off,v=int4:g64:lloyd:rot"},
      {"int5", "g16..g128, sym or lloyd, rot, off", "5-bit codes: for K",
       "k=int5:g32:lloyd:rot:off,v=int4:g64:lloyd:rot"},
      {"int4", "g16..g128 or t16..t64, sym, asym, lloyd or skew, plain, clip, two, rot, off", "4-bit codes",
       "k=int4:g32:lloyd:rot:off,v=int4:g64:lloyd:rot"},
      {"int3", "as int4", "3-bit codes: for V", "k=int4:g32:lloyd:rot:off,v=int3:g32:skew:rot"},
      {"int2", "as int4 without skew", "2-bit codes; with K per channel and V per token this is KIVI",
       "k=int2:t32:asym:plain,v=int2:g32:asym:plain"},
      {"f32", "", "the appended f16 values in 32 bits: what no coding at all would give", "k=f32,v=f32"},
      {"bf16", "", "8 bits of mantissa: what a bf16 cache costs", "k=bf16,v=bf16"},
      {"fp8e4m3", "", "8-bit float, 3 bits of mantissa, up to 448, no scale", "k=fp8e4m3,v=fp8e4m3"},
      {"fp8e5m2", "", "8-bit float, 2 bits of mantissa, up to 57344, no scale", "k=fp8e5m2,v=fp8e5m2"},
      {"nf4", "g16..g128, rot, off", "4-bit NormalFloat: quantiles of the Gaussian, absmax scale",
       "k=nf4:g64,v=nf4:g64"},
      {"fp4", "g16..g128, rot, off", "4-bit float E2M1 with an f16 scale", "k=fp4:g32,v=fp4:g32"},
      {"tq4", "qjl", "TurboQuant: random rotation, Lloyd-Max on the unit vector, stored norm", "k=tq4,v=tq4"},
      {"tq3", "qjl", "the same in 3 bits", "k=tq3,v=tq3"},
      {"tq2", "qjl", "the same in 2 bits", "k=tq2,v=tq2"},
  };
}

}  // namespace

bool AttendedInPlace(const SideSpec& side) {
  if (side.along_tokens || side.plain_scale || side.clip || side.two_axis || side.levels == Levels::kAsymmetric) {
    return false;
  }
  return side.type <= Type::kInt6;
}

bool AttendedInPlace(const CodecSpec& spec) {
  return AttendedInPlace(spec.k) && AttendedInPlace(spec.v) && (!spec.early_v || AttendedInPlace(*spec.early_v));
}

std::string_view TypeName(SideSpec::Type type) {
  for (const NamedType& known : kTypes) {
    if (known.type == type) return known.name;
  }
  return "unknown";
}

const std::vector<CodecFamily>& CodecFamilies() {
  static const std::vector<CodecFamily> families = MakeFamilies();
  return families;
}

const std::vector<CodecPreset>& CodecPresets() {
  static const std::vector<CodecPreset> presets = MakePresets();
  return presets;
}

Result<CodecSpec> ParseCodec(std::string_view text) {
  for (const CodecPreset& preset : CodecPresets()) {
    if (text == preset.name) return preset.spec;
  }
  constexpr std::string_view kEarly = "early-v=";
  std::string_view rest = text;
  const std::string_view k = NextPart(&rest, ',');
  const std::string_view v = NextPart(&rest, ',');
  const bool has_early = k.size() + 1 + v.size() < text.size();
  if (text.size() > kMaxSpecText || !k.starts_with("k=") || !v.starts_with("v=") ||
      (has_early && !rest.starts_with(kEarly))) {
    std::string names;
    for (const CodecPreset& preset : CodecPresets()) names += preset.name + ", ";
    return Fail(
        StatusCode::kInvalidArgument,
        fmt::format(
            "codec: {} is none of {}and not of the form k=SIDE,v=SIDE or k=SIDE,v=SIDE,early-v=SIDE with SIDE such "
            "as f16, int8:g64 or int4:g64:lloyd:rot",
            Quoted(text), names));
  }
  Result<SideSpec> k_side = ParseSide(k.substr(2), "k");
  if (!k_side) return Fail(k_side.error());
  Result<SideSpec> v_side = ParseSide(v.substr(2), "v");
  if (!v_side) return Fail(v_side.error());
  CodecSpec spec{*k_side, *v_side, std::string(text)};
  if (has_early) {
    Result<SideSpec> early = ParseSide(rest.substr(kEarly.size()), kEarly.substr(0, kEarly.size() - 1));
    if (!early) return Fail(early.error());
    spec.early_v = *early;
  }
  return spec;
}

std::string CodecText(const CodecSpec& spec) {
  const std::string text = fmt::format("k={},v={}", SideText(spec.k), SideText(spec.v));
  return spec.early_v && *spec.early_v != spec.v ? fmt::format("{},early-v={}", text, SideText(*spec.early_v)) : text;
}

Result<double> CodecBitsPerElement(const CodecSpec& spec, int head_dim_k, int head_dim_v) {
  const Result<CellLayout> layout = MakeCellLayout(spec, head_dim_k, head_dim_v);
  if (!layout) return Fail(layout.error());
  double bytes = layout->bytes;
  if (spec.early_v) {
    const Result<CellLayout> early = MakeCellLayout({spec.k, *spec.early_v, ""}, head_dim_k, head_dim_v);
    if (!early) return Fail(early.error());
    bytes = 0.75 * bytes + 0.25 * early->bytes;
  }
  return 8.0 * bytes / (double(kBlockTokens) * (head_dim_k + head_dim_v));
}

}  // namespace kvcell
