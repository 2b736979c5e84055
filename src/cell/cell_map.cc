#include "cell/cell_map.h"

#include <fmt/format.h>

#include <cmath>

namespace kvcell {
namespace {

Status CheckLayer(const LayerGeometry& g, size_t layer) {
  const auto bad = [&](std::string_view field, auto value, std::string_view rule) {
    return Status(StatusCode::kInvalidArgument,
                  fmt::format("geometry: layer {}: {} is {}, {}", layer, field, value, rule));
  };
  if (g.n_kv_heads < 1 || g.n_kv_heads > 4096) return bad("n_kv_heads", g.n_kv_heads, "but must be 1..4096");
  if (g.n_heads < 1 || g.n_heads > 65536) return bad("n_heads", g.n_heads, "but must be 1..65536");
  if (g.n_heads % g.n_kv_heads != 0) return bad("n_heads", g.n_heads, "but must be a multiple of n_kv_heads");
  if (g.window < 0) return bad("window", g.window, "but must be 0 (none) or more");
  if (!std::isfinite(g.scale) || g.scale == 0.0f) return bad("scale", g.scale, "but must be finite and not 0");
  if (!std::isfinite(g.softcap) || g.softcap < 0.0f) return bad("softcap", g.softcap, "but must be 0 (none) or more");
  return OkStatus();
}

uint16_t PoolFor(std::vector<CellMap::PoolUse>* pools, uint32_t slot_bytes, uint32_t n, CellGroup group) {
  size_t i = 0;
  while (i < pools->size() && (*pools)[i].slot_bytes != slot_bytes) ++i;
  if (i == pools->size()) pools->push_back({.slot_bytes = slot_bytes, .slots_per_block = {}});
  (*pools)[i].slots_per_block[group] += n;
  return static_cast<uint16_t>(i);
}

// Cuts a layer's heads into runs of one codec and gives each its layout, pool and place in files.
Status AddRuns(const CodecSpec& base, const std::vector<CodecRange>& ranges, int32_t n_layers, CellMap* map,
               LayerCells* layer) {
  for (uint16_t h = 0; h < layer->n_heads; ++h) {
    const CodecSpec codec = CodecFor(base, ranges, layer->number, h, n_layers);
    if (!layer->runs.empty()) {
      const CellLayout& last = layer->runs.back().layout;
      if (last.k.spec == codec.k && last.v.spec == codec.v) {
        ++layer->runs.back().n_heads;
        continue;
      }
    }
    auto coded = MakeCellLayout(codec, layer->geometry.head_dim_k, layer->geometry.head_dim_v);
    if (!coded)
      return Status(coded.error().code(), fmt::format("layer {}: {}", layer->number, coded.error().message()));
    layer->runs.push_back({.first_head = h, .n_heads = 1, .layout = *coded});
  }
  CellSetShape& shape = map->shapes[layer->group];
  for (HeadRun& run : layer->runs) {
    run.before = map->CodedBytesPerBlock(layer->group);
    run.slot = static_cast<uint16_t>(shape.layers.size());
    shape.layers.push_back({layer->number, run.n_heads, run.layout.bytes});
    run.pool = PoolFor(&map->coded_pools, run.layout.bytes, run.n_heads, layer->group);
  }
  return OkStatus();
}

}  // namespace

Result<CellMap> MakeCellMap(const Geometry& geometry, const CodecSpec& codec, int32_t sinks,
                            const std::vector<CodecRange>& ranges) {
  if (geometry.empty() || geometry.size() > 4096) {
    return Fail(StatusCode::kInvalidArgument, fmt::format("geometry: {} layers, but must be 1..4096", geometry.size()));
  }
  if (sinks < 0 || sinks > kBlockTokens) {
    return Fail(StatusCode::kInvalidArgument, fmt::format("sinks is {}, but must be 0..{}", sinks, kBlockTokens));
  }
  CellMap map;
  map.sinks = sinks;
  const int sink_tokens = (sinks + 15) / 16 * 16;
  for (size_t i = 0; i < geometry.size(); ++i) {
    const LayerGeometry& g = geometry[i];
    KVCELL_FAIL_IF_ERROR(CheckLayer(g, i));
    LayerCells layer;
    layer.geometry = g;
    layer.open = MakeExactLayout(kBlockTokens, g.head_dim_k, g.head_dim_v);
    layer.first_cell = map.n_cells;
    layer.n_heads = static_cast<uint16_t>(g.n_kv_heads);
    layer.group = g.window > 0 ? kWindowLayers : kFullLayers;
    layer.number = static_cast<uint16_t>(i);
    KVCELL_FAIL_IF_ERROR(AddRuns(codec, ranges, static_cast<int32_t>(geometry.size()), &map, &layer));
    layer.exact_pool = PoolFor(&map.exact_pools, layer.open.bytes, layer.n_heads, layer.group);
    if (sinks > 0) {
      layer.sink = MakeExactLayout(sink_tokens, g.head_dim_k, g.head_dim_v);
      layer.sink_pool = PoolFor(&map.sink_pools, layer.sink.bytes, layer.n_heads, layer.group);
    }
    map.n_cells += layer.n_heads;
    map.layers.push_back(layer);
  }
  return map;
}

uint64_t CellMap::CodedBytesPerBlock(CellGroup group) const {
  uint64_t bytes = 0;
  for (const PoolUse& pool : coded_pools) bytes += uint64_t{pool.slot_bytes} * pool.slots_per_block[group];
  return bytes;
}

uint64_t CellMap::ExactBytesPerBlock() const {
  uint64_t bytes = 0;
  for (const PoolUse& pool : exact_pools) bytes += uint64_t{pool.slot_bytes} * pool.slots();
  return bytes;
}

}  // namespace kvcell
