// The program: its tree of commands, read from the command line.
#pragma once

namespace kvcell::cli {

// Runs one command and returns the exit code: 0 done, 1 failed, 2 wrong usage, 128 + n ended by signal n. Throws
// nothing.
int RunProgram(int argc, const char* const* argv);

}  // namespace kvcell::cli
