#include "lab/bench_overhead.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <memory>
#include <utility>

#include "cell/cell_memory.h"
#include "kvcell/cache.h"
#include "lab/statistics.h"
#include "model/model.h"

namespace kvcell {
namespace {

using Clock = std::chrono::steady_clock;

double Milliseconds(Clock::time_point from) {
  return std::chrono::duration<double, std::milli>(Clock::now() - from).count();
}

// A sweep under soft pressure: the blocks that it moves have been written, as the write-ahead leaves them.
Result<std::vector<BenchRow>> BenchSweep(const OverheadOptions& options) {
  constexpr int32_t kLayers = 30, kHeads = 3, kDim = 16;
  constexpr int64_t kCellsPerBlock = kLayers * kHeads;
  LayerGeometry layer{.n_heads = kHeads,
                      .n_kv_heads = kHeads,
                      .head_dim_k = kDim,
                      .head_dim_v = kDim,
                      .window = 0,
                      .scale = 0.25f,
                      .softcap = 0.0f};
  const auto codec = ParseCodec("i4");
  auto map = MakeCellMap(Geometry(kLayers, layer), *codec, 0);
  if (!map) return Fail(map.error());
  const auto n_blocks = static_cast<uint64_t>((options.cells + kCellsPerBlock - 1) / kCellsPerBlock);
  const auto to_move = static_cast<uint64_t>((options.moved + kCellsPerBlock - 1) / kCellsPerBlock);
  auto rules =
      ParseRules("pressure: {soft: 0.0, hard: 1.0, blocks_per_step: " + std::to_string(to_move) +
                     "}\nrules:\n - {event: TOKEN_APPEND, from: ACTIVE, to: QUANTIZED}\n"
                     " - {event: MEMORY_PRESSURE, from: QUANTIZED, to: PERSISTED, when: {pressure: \">= soft\"}}\n",
                 "bench");
  if (!rules) return Fail(rules.error());
  const uint64_t budget = 2 * CodedBytes(*map, uint64_t{2} << 20, n_blocks + 1, 0) + (uint64_t{256} << 20);
  const MemoryShape shape = MakeMemoryShape(*map, budget, 1, 0, 64, 0);
  auto memory = CellMemory::Create(std::move(*map), {.budget = budget,
                                                     .scratch_bytes = 0,
                                                     .shape = shape,
                                                     .tier = nullptr,
                                                     .tier_bytes = 0,
                                                     .generation = 1,
                                                     .rules = *rules,
                                                     .probe = {}});
  if (!memory) return Fail(memory.error());
  const std::array<std::optional<BlockPlace>, kCellGroups> stored = {
      BlockPlace{.segment = 1, .offset = 0, .n_blocks = 1, .index = 0}, std::nullopt};
  std::vector<Block*> blocks;
  for (uint64_t b = 0; b < n_blocks; ++b) {
    Block* block = (*memory)->NewBlock(static_cast<int64_t>(b) * kBlockTokens, {});
    block->sequence_end = static_cast<int64_t>(n_blocks) * kBlockTokens;
    (*memory)->TakeCoded(block);
    (*memory)->Sealed(block);
    (*memory)->AdoptPlaces(block, stored, 1);
    blocks.push_back(block);
    if (b >= to_move) continue;  // pages that give back must be there; the others cost nothing to leave untouched
    for (const LayerCells& l : (*memory)->map().layers) {
      for (uint16_t h = 0; h < l.n_heads; ++h) {
        std::memset((*memory)->coded(l, h, block->cells[l.first_cell + h]), 1, l.coded(h).bytes);
      }
    }
  }
  const uint64_t before = (*memory)->transitions().of(CellEvent::kMemoryPressure, CellState::kPersisted);
  const auto start = Clock::now();
  (*memory)->BalanceInBackground();
  const double ms = Milliseconds(start);
  const uint64_t moved = (*memory)->transitions().of(CellEvent::kMemoryPressure, CellState::kPersisted) - before;
  for (Block* block : blocks) {
    (*memory)->AdoptPlaces(block, {}, 1);
    (*memory)->Release(block);
  }
  const double metadata =
      static_cast<double>(sizeof(CellEntry)) + static_cast<double>(sizeof(Block)) / static_cast<double>(kCellsPerBlock);
  return std::vector<BenchRow>{{"cells in the table", static_cast<double>(n_blocks * kCellsPerBlock), "cells"},
                               {"cells moved by the sweep", static_cast<double>(moved), "cells"},
                               {"sweep, token path", ms, "ms", 20.0, ms / 20.0, "the limit"},
                               {"metadata per cell", metadata, "bytes", 32.0, metadata / 32.0, "the limit"}};
}

struct Runner {
  std::unique_ptr<Cache> cache;
  SequenceId sequence = 0;
};

Result<Runner> Filled(const OverheadOptions& options, Model* model, const std::string& store) {
  CacheOptions cache_options;
  cache_options.geometry = model->facts().geometry;
  cache_options.rope = model->facts().rope;
  cache_options.codec = *ParseCodec("i4");
  cache_options.max_step_tokens = 256;
  cache_options.store = store;
  auto cache = Cache::Open(cache_options);
  if (!cache) return Fail(cache.error());
  const auto sequence = (*cache)->Create();
  if (!sequence) return Fail(sequence.error());
  std::vector<Token> tokens;
  for (int64_t i = 0; i < options.context; ++i) {
    tokens.push_back(static_cast<Token>((i * 7919) % model->facts().n_vocab));
  }
  for (size_t at = 0; at < tokens.size(); at += 256) {
    const size_t n = std::min<size_t>(256, tokens.size() - at);
    const ModelStep step{.sequence = *sequence, .tokens = std::span(tokens).subspan(at, n)};
    KVCELL_FAIL_IF_ERROR(model->Forward(cache->get(), {&step, 1}, nullptr));
  }
  return Runner{std::move(*cache), *sequence};
}

// The frame of a step alone, on a cache of its own: everything but K, V and attention. What is appended between its two
// ends is not timed.
Result<double> FrameMs(Cache* cache, SequenceId sequence, Token token) {
  const StepItem item{sequence, {&token, 1}};
  const auto begin = Clock::now();
  KVCELL_FAIL_IF_ERROR(cache->Begin({&item, 1}));
  const double ms = Milliseconds(begin);
  const Geometry& geometry = cache->options().geometry;
  for (size_t l = 0; l < geometry.size(); ++l) {
    const LayerGeometry& g = geometry[l];
    const std::vector<float> k(static_cast<size_t>(g.n_kv_heads * g.head_dim_k));
    const std::vector<float> v(static_cast<size_t>(g.n_kv_heads * g.head_dim_v));
    KVCELL_FAIL_IF_ERROR(cache->Append(static_cast<int>(l), k.data(), v.data()));
  }
  const auto commit = Clock::now();
  KVCELL_FAIL_IF_ERROR(cache->Commit());
  return ms + Milliseconds(commit);
}

Status BenchSteps(const OverheadOptions& options, std::vector<BenchRow>* rows) {
  auto model = Model::Load(options.model, {.n_threads = options.n_threads, .max_batch = 256});
  if (!model) return model.error();
  auto whole = Filled(options, model->get(), "");
  if (!whole) return whole.error();
  auto frame = Filled(options, model->get(), "");
  if (!frame) return frame.error();
  std::vector<double> steps, frames, shares;
  for (int64_t i = 0; i < options.pairs; ++i) {
    const auto token = static_cast<Token>((i * 104729) % (*model)->facts().n_vocab);
    const ModelStep step{.sequence = whole->sequence, .tokens = {&token, 1}, .want_logits = true};
    std::vector<float> logits;
    const auto start = Clock::now();
    KVCELL_RETURN_IF_ERROR((*model)->Forward(whole->cache.get(), {&step, 1}, &logits));
    steps.push_back(Milliseconds(start));
    auto ms = FrameMs(frame->cache.get(), frame->sequence, token);
    if (!ms) return ms.error();
    frames.push_back(*ms);
    shares.push_back(frames.back() / (steps.back() - frames.back()));
  }
  const double step = Quantile(steps, 0.5);
  rows->push_back({"decode step", step, "ms"});
  rows->push_back({"state, paging and accounting in a step", Quantile(frames, 0.5), "ms", step,
                   Quantile(frames, 0.5) / step, "a decode step"});
  const double share = 100.0 * Quantile(shares, 0.5);
  rows->push_back({"added to a decode step, median of pairs", share, "%", 3.0, share / 3.0, "the limit"});
  rows->push_back(
      {"added to a decode step, 5 % of pairs below", 100.0 * Quantile(shares, 0.05), "%", 3.0, 0, "the limit"});
  rows->push_back(
      {"added to a decode step, 5 % of pairs above", 100.0 * Quantile(shares, 0.95), "%", 3.0, 0, "the limit"});
  return OkStatus();
}

}  // namespace

Result<std::vector<BenchRow>> BenchOverhead(const OverheadOptions& options) {
  auto rows = BenchSweep(options);
  if (!rows || options.model.empty()) return rows;
  KVCELL_FAIL_IF_ERROR(BenchSteps(options, &*rows));
  return rows;
}

}  // namespace kvcell
