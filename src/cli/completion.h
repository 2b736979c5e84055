// Bash completion, made from the tree of commands itself.
#pragma once

#include <string>

namespace CLI {
class App;
}

namespace kvcell::cli {

std::string BashCompletion(const CLI::App& app);

}  // namespace kvcell::cli
