// Fuzzes all that is done with the text of a rules file.
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "cell/promela.h"
#include "cell/rules.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace kvcell;
  const RulesCheck check = CheckRules(std::string_view(reinterpret_cast<const char*>(data), size), "fuzz.yaml");
  if (check.rules != nullptr) (void)PromelaModel(*check.rules);
  return 0;
}
