// The YAML file of --config: a flat map from option names to values.
#pragma once

#include <string>
#include <vector>

#include "kvcell/status.h"

namespace kvcell::cli {

struct ConfigEntry {
  std::string name;   // as in the table; underscores are read as dashes
  std::string value;  // a list's values are joined by commas
  int line = 0;
};

// kNotFound, kIoError, kInvalidArgument with file and line.
Result<std::vector<ConfigEntry>> ReadConfigFile(const std::string& path);

}  // namespace kvcell::cli
