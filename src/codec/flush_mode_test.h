// For tests: flushes f32 subnormals to zero for a scope, as some hosts of ours (audio, other runtimes) do for all
// threads.
#pragma once

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace kvcell {

class FlushMode {
 public:
  explicit FlushMode(bool flush) {
#if defined(__x86_64__)
    saved_ = _mm_getcsr();
    constexpr unsigned kFlushToZero = 0x8000;
    constexpr unsigned kDenormalsAreZero = 0x0040;
    if (flush) _mm_setcsr(saved_ | kFlushToZero | kDenormalsAreZero);
#else
    (void)flush;
#endif
  }
  ~FlushMode() {
#if defined(__x86_64__)
    _mm_setcsr(saved_);
#endif
  }
  FlushMode(const FlushMode&) = delete;
  FlushMode& operator=(const FlushMode&) = delete;

 private:
  unsigned saved_ = 0;
};

}  // namespace kvcell
