// A meeting point for the threads that compute one layer together.
#pragma once

#include <atomic>
#include <thread>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace kvcell {

// Spins, since the threads arrive within microseconds of each other, but yields when one is late (more threads than
// processors).
class Barrier {
 public:
  // One of n_parts threads is there. It goes on with what needs none of the others until it calls Await with what this
  // returns.
  uint32_t Arrive(int n_parts) {
    const uint32_t round = round_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == n_parts) {
      arrived_.store(0, std::memory_order_relaxed);
      round_.fetch_add(1, std::memory_order_release);
    }
    return round;
  }

  // Returns when all have arrived. What each did before is visible then.
  void Await(uint32_t round) const {
    for (int spins = 0; round_.load(std::memory_order_acquire) == round; ++spins) {
      if (spins < kSpins) {
        Pause();
      } else {
        std::this_thread::yield();
      }
    }
  }

 private:
  static constexpr int kSpins = 20000;
  static void Pause() {
#if defined(__x86_64__)
    _mm_pause();
#endif
  }

  std::atomic<int> arrived_{0};
  std::atomic<uint32_t> round_{0};
};

}  // namespace kvcell
