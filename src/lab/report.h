// One HTML file for someone who was not there: the four experiments first, then whatever the other lab commands
// measured, drawn.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "kvcell/status.h"
#include "lab/experiments.h"

namespace kvcell {

struct ReportInput {
  std::string title = {};    // the model
  std::string machine = {};  // instruction set, threads
  std::vector<Experiment> experiments = {};
  std::vector<nlohmann::json> measurements = {};  // what `kvcell lab ... --json` printed; "command" says which
};

// The page: no script, no file or address outside it.
std::string ReportHtml(const ReportInput& input);

// Reads a measurement from a file. kNotFound, kCorruption where it is not an object that a lab command printed.
Result<nlohmann::json> ReadMeasurement(const std::string& path);

}  // namespace kvcell
