#include "lab/progress_state.h"

#include <fmt/format.h>

#include <filesystem>
#include <fstream>
#include <utility>

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
  const std::string temporary = path_ + ".tmp";
  std::ofstream file(temporary, std::ios::trunc);
  file << nlohmann::json{{"key", key_}, {"values", values_}};
  file.close();
  std::error_code error;
  std::filesystem::rename(temporary, path_, error);
  if (!file || error) return Status(StatusCode::kIoError, fmt::format("can't write the state file {}", path_));
  return OkStatus();
}

}  // namespace kvcell
