// Holds back the bytes of a character that is not complete yet, so that streamed text is always whole UTF-8 characters.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace kvcell::cli {

class Utf8Stream {
 public:
  // Adds bytes and returns what may be shown now: everything but an unfinished character at the end.
  std::string Push(std::string_view bytes);
  // What is left at the end of the text (an unfinished character), and forgets it.
  std::string Flush();

 private:
  std::string held_;
};

// The length of the unfinished UTF-8 character at the end of `text`, 0 where it ends with a whole (or an invalid) one.
size_t UnfinishedTail(std::string_view text);

}  // namespace kvcell::cli
