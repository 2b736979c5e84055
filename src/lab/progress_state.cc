#include "lab/progress_state.h"

#include <fstream>
#include <utility>

#include "base/text_file.h"

namespace kvcell {

ProgressState::ProgressState(std::string path, std::string key) : path_(std::move(path)), key_(std::move(key)) {
  if (path_.empty()) return;
  std::ifstream file(path_);
  const auto state = nlohmann::json::parse(file, nullptr, /*allow_exceptions=*/false);
  if (!state.is_object() || state.value("key", nlohmann::json()) != key_) return;
  if (const auto values = state.find("values"); values != state.end() && values->is_object()) values_ = *values;
}

Status ProgressState::Write() const {
  if (path_.empty()) return OkStatus();
  return ReplaceTextFile(path_, nlohmann::json{{"key", key_}, {"values", values_}}.dump());
}

}  // namespace kvcell
