// The two clocks: the calendar's for what is stored, and a steady one for waiting.
#pragma once

#include <chrono>
#include <cstdint>

namespace kvcell {

inline int64_t UnixSeconds() {
  return std::chrono::duration_cast<std::chrono::seconds>(std::chrono::system_clock::now().time_since_epoch()).count();
}

inline int64_t UnixMilliseconds() {
  return std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::system_clock::now().time_since_epoch())
      .count();
}

inline std::chrono::steady_clock::time_point SteadyNow() { return std::chrono::steady_clock::now(); }

inline int64_t SteadySeconds() {
  return std::chrono::duration_cast<std::chrono::seconds>(SteadyNow().time_since_epoch()).count();
}

}  // namespace kvcell
