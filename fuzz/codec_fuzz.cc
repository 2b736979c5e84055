// Fuzzes what reads bytes and text from outside: codec specs, cell headers, and the decoding of cells whose payload is
// anything.
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <span>
#include <string_view>
#include <vector>

#include "codec/cell_codec.h"
#include "kvcell/codec.h"
#include "kvcell/codec_plan.h"

namespace {

using namespace kvcell;

void Check(bool holds) {
  if (!holds) std::abort();
}

// A spec that reads has a canonical text that reads as the same spec.
void FuzzSpec(std::string_view text) {
  const Result<CodecSpec> spec = ParseCodec(text);
  if (!spec) {
    Check(spec.error().code() == StatusCode::kInvalidArgument && spec.error().message().size() < 400);
    return;
  }
  const Result<CodecSpec> again = ParseCodec(CodecText(*spec));
  Check(again && *again == *spec);
  for (const int32_t layer : {0, 3}) Check(MakeCellLayout(CodecFor(*spec, {}, layer, 0, 4), 64, 80).has_value());
}

// Any bytes can be verified, and decoded where they have the layout's size; sealed once more, they are sound.
void FuzzCell(std::span<const uint8_t> data) {
  constexpr const char* kSpecs[] = {"f16",
                                    "i8",
                                    "i4",
                                    "i3",
                                    "k=int4:g128:sym,v=int4:g128:lloyd:rot",
                                    "k=f16,v=int8:g32:rot",
                                    "k=int6:g16:off,v=int5:lloyd",
                                    "k=int2:t32:asym,v=int3:g64:two:clip",
                                    "k=tq3:qjl,v=fp4",
                                    "k=fp8e4m3,v=nf4:g16"};
  constexpr int kDims[] = {1, 7, 16, 40, 65};
  if (data.size() < 2) return;
  const int dk = kDims[data[0] % 5];
  const int dv = kDims[data[0] / 5 % 5];
  const CellLayout layout = *MakeCellLayout(*ParseCodec(kSpecs[data[1] % std::size(kSpecs)]), dk, dv);
  data = data.subspan(2);
  const std::array<uint8_t, 16> key = {};
  (void)VerifyCell(std::as_bytes(data), 0, 0, 0, key);

  std::vector<std::byte> cell(layout.bytes);
  for (size_t i = 0; i < cell.size() && !data.empty(); ++i) cell[i] = std::byte(data[i % data.size()]);
  std::vector<float> k(size_t(kBlockTokens) * size_t(dk)), v(size_t(kBlockTokens) * size_t(dv));
  DecodeCell(layout, cell.data(), k.data(), v.data());

  CellHeader header = {};
  header.magic = kCellMagic;
  header.version = kCellVersion;
  header.bytes = layout.bytes;
  std::memcpy(cell.data(), &header, sizeof(header));
  SealHeader(cell.data(), 1, 2, 3, key.data(), 4);
  Check(VerifyCell(cell, 1, 2, 3, key).ok());
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  FuzzSpec(std::string_view(reinterpret_cast<const char*>(data), size));
  FuzzCell({data, size});
  return 0;
}
