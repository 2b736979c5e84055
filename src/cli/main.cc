// kvcell, the program.
#include "cli/app.h"

int main(int argc, char** argv) { return kvcell::cli::RunProgram(argc, argv); }
