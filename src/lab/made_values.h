// Made-up K, V and q for benchmarks: near-normal values, a fixed function of what they belong to, so that any part can
// be made again instead of being kept.
#pragma once

#include <cstdint>
#include <span>

namespace kvcell {

enum class MadeKind : uint64_t { kKey = 1, kValue = 2, kQuery = 3 };

// Fills `out` [head_dim] with the values of one token and head: mean 0, variance 1, the sum of four uniform numbers.
inline void MakeValues(MadeKind kind, int64_t token, int head, std::span<float> out) {
  uint64_t x = static_cast<uint64_t>(kind) * 0x9e3779b97f4a7c15u + static_cast<uint64_t>(token) * 0xbf58476d1ce4e5b9u +
               static_cast<uint64_t>(head) * 0x94d049bb133111ebu + 0x2545f4914f6cdd1du;
  x ^= x >> 29;
  x *= 0xd6e8feb86659fd93u;
  x |= 1;
  constexpr float kScale = 1.7320508f / 65536.0f;  // four uniform numbers have a variance of 4 / 12
  for (float& value : out) {
    x ^= x << 13;
    x ^= x >> 7;
    x ^= x << 17;
    const uint64_t y = x * 0x9fb21c651e98df25u;
    const auto sum = static_cast<int32_t>((y & 0xffff) + (y >> 16 & 0xffff) + (y >> 32 & 0xffff) + (y >> 48));
    value = static_cast<float>(sum - 2 * 65535) * kScale;
  }
}

}  // namespace kvcell
