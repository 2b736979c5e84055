#include "lab/progress_state.h"

#include <fstream>
#include <utility>

#include "base/text_file.h"
#include "kvcell/codec.h"

namespace kvcell {
namespace {

// What a codec's name stands for, beside what attention makes of it: one more whenever that gives other values.
std::string Meanings() {
  constexpr int kAttention = 3;
  std::string text = std::to_string(kAttention);
  for (const CodecPreset& preset : CodecPresets()) text.append("|").append(CodecText(preset.spec));
  return text;
}

}  // namespace

ProgressState::ProgressState(std::string path, std::string key)
    : path_(std::move(path)), key_(std::move(key).append("|").append(Meanings())) {
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
