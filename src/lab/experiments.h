// The four experiments that a report opens with, each run here and now with its own bound to pass.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "kvcell/geometry.h"
#include "kvcell/status.h"

namespace kvcell {

struct Experiment {
  std::string name = {};
  std::string question = {};  // one sentence
  std::string bound = {};     // what it has to stay within
  std::string found = {};     // what it measured
  bool pass = false;
  // Bars to draw, each with its label and unit; empty where there is nothing to draw.
  struct Bar {
    std::string label = {};
    double value = 0;
    std::string text = {};
  };
  std::vector<Bar> bars = {};
};

struct ExperimentOptions {
  Geometry geometry = {};  // of the model that the report is about; its first layers stand for it
  std::string codec = "i4";
  std::string directory = {};            // for the stores of experiments 1 and 2; made and emptied again
  uint64_t budget = uint64_t{64} << 20;  // of experiment 3
  int32_t n_threads = 0;
  std::function<void(int64_t done, int64_t total)> on_experiment = {};
  std::function<bool()> should_stop = {};
};

// State written to a store and read back within an error bound; the states that a cell goes through; the context limit
// of f16 and of the codec; latency three ways. kInvalidArgument, kIoError, kCancelled.
Result<std::vector<Experiment>> RunExperiments(const ExperimentOptions& options);

}  // namespace kvcell
