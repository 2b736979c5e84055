// The cell life cycle as a Promela model for spin, made from a table of rules (Holzmann, The SPIN Model Checker).
#pragma once

#include <string>

#include "cell/rules.h"

namespace kvcell {

// Two processes that own the same cell of one store, and a crash at any moment. Checked: a cell that was PERSISTED and
// committed can always be had again, no unverified byte is read, and nothing stays RECOVERING. `spin -a` on the text.
std::string PromelaModel(const Rules& rules);

}  // namespace kvcell
