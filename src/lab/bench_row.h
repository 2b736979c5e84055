// One figure of a benchmark, as `kvcell bench store|sharing|overhead` prints it.
#pragma once

#include <string>

namespace kvcell {

struct BenchRow {
  std::string name;
  double value = 0.0;
  std::string unit;
  double peer = 0.0;        // the same of libllama, or of what `versus` names, in the same run; 0: nothing
  double ratio = 0.0;       // value against peer, as the benchmark's header says; 0: none
  std::string versus = {};  // what `peer` is
};

}  // namespace kvcell
