#include "cli/utf8.h"

#include <utility>

namespace kvcell::cli {

size_t UnfinishedTail(std::string_view text) {
  for (size_t back = 1; back <= 3 && back <= text.size(); ++back) {
    const auto byte = static_cast<unsigned char>(text[text.size() - back]);
    if ((byte & 0xC0u) == 0x80u) continue;  // a continuation: the lead byte is further left
    const size_t wanted = byte >= 0xF0u ? 4 : byte >= 0xE0u ? 3 : byte >= 0xC0u ? 2 : 1;
    return wanted > back && byte < 0xF8u ? back : 0;
  }
  return 0;
}

std::string Utf8Stream::Push(std::string_view bytes) {
  held_ += bytes;
  std::string ready = std::move(held_);
  held_.clear();
  const size_t tail = UnfinishedTail(ready);
  held_ = ready.substr(ready.size() - tail);
  ready.resize(ready.size() - tail);
  return ready;
}

std::string Utf8Stream::Flush() { return std::exchange(held_, {}); }

}  // namespace kvcell::cli
