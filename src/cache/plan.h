// What a configuration takes in memory: the one place that computes it, for PlanMemory and for the cache itself.
#pragma once

#include <cstdint>

#include "cell/cell_memory.h"
#include "kvcell/cache.h"

namespace kvcell {

// Coded blocks per segment of attention. Segments start at fixed positions, so that the order of all float sums, and
// with it the result, depends neither on threads nor on how a prompt was cut into steps.
inline constexpr size_t kSegmentBlocks = 16;

// max_threads, ram_budget as they are meant when 0 is given.
CacheOptions WithDefaults(CacheOptions options);
// Tokens before its own block that the farthest-seeing full-attention layer reads under the rules; 0: all of them.
int64_t WidestRuleWindow(const Rules& rules, const Geometry& geometry);
// kInvalidArgument names the field.
Status CheckOptions(const CacheOptions& options);

// Exact cells of blocks that begin and end within one step, for the layer that needs most.
uint64_t StepScratchBytes(const CellMap& map, const CacheOptions& options);
// One thread's cells on their way from the store; 0 without one.
uint64_t RingBytes(const CellMap& map, const CacheOptions& options);
uint64_t ScratchBytes(const CellMap& map, const CacheOptions& options);

MemoryShape ShapeFor(const CellMap& map, const CacheOptions& options);

// Bytes of `tokens` tokens in f16.
uint64_t F16Bytes(const Geometry& geometry, int64_t tokens);

}  // namespace kvcell
