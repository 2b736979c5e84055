// Lays out cells: sizes and offsets of every plane from a codec spec and the head sizes.
#include "codec/cell_layout.h"

#include <fmt/format.h>

#include <algorithm>

#include "codec/hadamard.h"
#include "codec/study_codec.h"

namespace kvcell {
namespace {

constexpr uint32_t kAlign = 64;

constexpr uint32_t AlignUp(uint32_t bytes) { return (bytes + kAlign - 1) / kAlign * kAlign; }
constexpr int PadDim(int dim) { return (dim + 15) / 16 * 16; }

// The first thing that a spec asks for and no side can give; empty where it is sound.
std::string SpecProblem(const SideSpec& spec, bool is_key) {
  if (TypeName(spec.type) == "unknown") return "its type is none of those that `kvcell info --codecs` lists";
  // A sound spec is what its own text reads back as.
  const std::string side = CodecText({spec, spec, ""}).substr(2);
  const std::string text = side.substr(0, side.find(','));
  const Result<CodecSpec> read = ParseCodec(is_key ? "k=" + text + ",v=f16" : "k=f16,v=" + text);
  if (!read) return read.error().message();
  return (is_key ? read->k : read->v) == spec ? "" : fmt::format("it is more than its text {} says", text);
}

// Places one side's planes from byte `at` on.
SideLayout PlaceSide(const SideSpec& spec, int dim, bool is_key, uint32_t at) {
  SideLayout side;
  side.spec = spec;
  side.dim = dim;
  side.dim_padded = PadDim(dim);
  side.in_place = AttendedInPlace(spec);
  side.codes = at;
  if (spec.type == SideSpec::Type::kF16) {
    side.end = at + uint32_t(is_key ? dim : side.dim_padded) * kBlockTokens * 2;
    side.codes_high = side.scales = side.channel_offset = side.end;
    return side;
  }
  uint32_t scale_bytes = 0;
  if (side.in_place) {
    side.n_groups = (dim + spec.group - 1) / spec.group;
    if (spec.group > dim) side.rows_per_scale = std::min(HadamardBlock(spec.group / dim), kBlockTokens);
    const uint32_t values = uint32_t(side.dim_padded) * kBlockTokens;
    const int bits = LevelBits(spec.type);
    side.codes_high = at + (bits == 0 ? values : values * uint32_t(LowBits(bits)) / 8);
    side.scales = side.codes_high + (bits == 0 ? 0 : values * uint32_t(HighBits(bits)) / 8);
    scale_bytes = uint32_t(side.n_groups) * uint32_t(kBlockTokens / side.rows_per_scale) * 2;
  } else {
    const StudyPlanes planes = MakeStudyPlanes(spec, dim);
    side.codes_high = side.scales = at + AlignUp(planes.code_bytes);
    scale_bytes = planes.scale_bytes;
  }
  side.channel_offset = side.scales + AlignUp(scale_bytes);
  side.end = side.channel_offset + (spec.channel_offset ? AlignUp(uint32_t(side.dim_padded)) : 0);
  return side;
}

}  // namespace

Result<CellLayout> MakeCellLayout(const CodecSpec& spec, int head_dim_k, int head_dim_v) {
  for (const bool is_key : {true, false}) {
    const char* name = is_key ? "k" : "v";
    const int dim = is_key ? head_dim_k : head_dim_v;
    if (dim < 1 || dim > kMaxHeadDim) {
      return Fail(
          StatusCode::kInvalidArgument,
          fmt::format("codec: head_dim_{} is {}; kvcell codes heads of 1 to {} values", name, dim, kMaxHeadDim));
    }
    if (const std::string problem = SpecProblem(is_key ? spec.k : spec.v, is_key); !problem.empty()) {
      return Fail(StatusCode::kInvalidArgument, fmt::format("codec: side {} can't be coded: {}", name, problem));
    }
  }
  CellLayout layout;
  layout.k = PlaceSide(spec.k, head_dim_k, true, sizeof(CellHeader));
  layout.v = PlaceSide(spec.v, head_dim_v, false, layout.k.end);
  layout.bytes = layout.v.end;
  return layout;
}

ExactLayout MakeExactLayout(int n_tokens, int head_dim_k, int head_dim_v) {
  ExactLayout layout;
  layout.n_tokens = n_tokens;
  layout.dk = head_dim_k;
  layout.dv = head_dim_v;
  layout.dv_padded = PadDim(head_dim_v);
  layout.v = AlignUp(uint32_t(head_dim_k) * uint32_t(n_tokens) * 2);
  layout.bytes = layout.v + AlignUp(uint32_t(layout.dv_padded) * uint32_t(n_tokens) * 2);
  return layout;
}

}  // namespace kvcell
