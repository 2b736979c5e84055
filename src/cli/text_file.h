// Reads what a user names as a text: a file, or standard input.
#pragma once

#include <string>

#include "kvcell/status.h"

namespace kvcell::cli {

// The whole text of `path`, `-` for standard input. kNotFound, kIoError, kInvalidArgument where it is larger than any
// context.
Result<std::string> ReadTextFile(const std::string& path);

}  // namespace kvcell::cli
