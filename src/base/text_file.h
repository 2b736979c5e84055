// Texts that lie in files: read from where a user says, or kept by kvcell for its next run.
#pragma once

#include <cstddef>
#include <string>

#include "kvcell/status.h"

namespace kvcell {

inline constexpr size_t kMostPromptBytes = size_t{64} << 20;   // far beyond any context
inline constexpr size_t kMostSettingsBytes = size_t{1} << 20;  // of rules and options: a reload reads between two steps

// The whole text of `path`, `-` for standard input. kNotFound, kIoError, kInvalidArgument where it is larger than
// `most` bytes, of which no more are read: a device may have no end.
Result<std::string> ReadTextFile(const std::string& path, size_t most = kMostPromptBytes);

// Puts `text` in the place of the file, at once: readers see the old text or the new one, whole. What is no regular
// file (a device, a pipe) is written to as it is; where a link leads, the file there is replaced. kIoError.
Status ReplaceTextFile(const std::string& path, const std::string& text);

}  // namespace kvcell
