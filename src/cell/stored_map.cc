#include "cell/stored_map.h"

#include <fmt/format.h>

#include <cstdio>
#include <string>
#include <string_view>

namespace kvcell {
namespace {

Result<std::string> IdentityField(const SessionRecord& record, std::string_view field) {
  for (const auto& [name, value] : record.identity) {
    if (name == field) return value;
  }
  return Fail(StatusCode::kMismatch,
              fmt::format("session '{}' does not say its {}; it was stored by something else than a cache", record.name,
                          field));
}

// The inverse of what the cache writes into the identity: `heads/kv_heads x dk/dv w window s scale c softcap ;` a
// layer.
Result<Geometry> ParseGeometry(const std::string& session, const std::string& text) {
  Geometry geometry;
  for (size_t at = 0; at < text.size();) {
    const size_t end = text.find(';', at);
    LayerGeometry layer;
    int read = 0;
    const std::string one = text.substr(at, end == std::string::npos ? end : end - at);
    const int fields =
        std::sscanf(one.c_str(), "%d/%dx%d/%dw%ds%fc%f%n", &layer.n_heads, &layer.n_kv_heads, &layer.head_dim_k,
                    &layer.head_dim_v, &layer.window, &layer.scale, &layer.softcap, &read);
    if (end == std::string::npos || fields != 7 || static_cast<size_t>(read) != one.size()) {
      return Fail(StatusCode::kCorruption, fmt::format("session '{}': its geometry '{}' can't be read", session, one));
    }
    geometry.push_back(layer);
    at = end + 1;
  }
  return geometry;
}

}  // namespace

Result<CellMap> StoredCellMap(const SessionRecord& record) {
  const Result<std::string> geometry_text = IdentityField(record, "geometry");
  if (!geometry_text) return Fail(geometry_text.error());
  const Result<std::string> codec_text = IdentityField(record, "codec");
  if (!codec_text) return Fail(codec_text.error());
  const Result<std::string> sinks_text = IdentityField(record, "sinks");
  if (!sinks_text) return Fail(sinks_text.error());
  const Result<Geometry> geometry = ParseGeometry(record.name, *geometry_text);
  if (!geometry) return Fail(geometry.error());
  const Result<CodecPlan> codec = ParseCodecPlan(*codec_text);
  if (!codec) return Fail(codec.error());
  int32_t sinks = 0;
  if (std::sscanf(sinks_text->c_str(), "%d", &sinks) != 1) {
    return Fail(StatusCode::kCorruption,
                fmt::format("session '{}': its sinks '{}' can't be read", record.name, *sinks_text));
  }
  return MakeCellMap(*geometry, codec->base, sinks, codec->ranges);
}

}  // namespace kvcell
