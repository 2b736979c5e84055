// Which instruction set's kernels are in use.
#pragma once

#include "attention/kernels.h"

namespace kvcell::attention_internal {

// Chosen at first use: KVCELL_ISA where it names something that this machine has, else the best.
const KernelSet& ActiveKernels();

}  // namespace kvcell::attention_internal
