// What a long measurement keeps in a file, so that an interrupted one goes on from there.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

#include "kvcell/status.h"

namespace kvcell {

// One JSON object under a key that says what it was measured with. Another key, or bytes that are no state: empty.
class ProgressState {
 public:
  // path "": nothing is kept.
  ProgressState(std::string path, std::string key);

  nlohmann::json& values() { return values_; }
  // Replaces the file whole. kIoError.
  Status Write() const;

 private:
  std::string path_, key_;
  nlohmann::json values_ = nlohmann::json::object();
};

}  // namespace kvcell
