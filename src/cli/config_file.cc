#include "cli/config_file.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "base/text_file.h"
#include "cell/yaml_document.h"

namespace kvcell::cli {
namespace {

Result<std::string> ScalarText(const std::string& path, const std::string& name, const YAML::Node& node) {
  if (node.IsScalar()) return node.Scalar();
  const int line = node.Mark().line + 1;
  if (!node.IsSequence()) {
    return Fail(StatusCode::kInvalidArgument,
                fmt::format("{}:{}: {} must have a value or a list of values", path, line, name));
  }
  std::string joined;
  for (const YAML::Node& item : node) {
    if (!item.IsScalar()) {
      return Fail(StatusCode::kInvalidArgument,
                  fmt::format("{}:{}: {} holds something that is no value", path, line, name));
    }
    if (!joined.empty()) joined += ',';
    joined += item.Scalar();
  }
  return joined;
}

}  // namespace

Result<std::vector<ConfigEntry>> ReadConfigFile(const std::string& path) {
  const auto text = ReadTextFile(path, kMostSettingsBytes);
  if (!text) return Fail(text.error());
  std::vector<ConfigEntry> entries;
  try {
    const YAML::Node root = LoadYamlDocument(*text);
    if (root.IsNull()) return entries;
    if (!root.IsMap()) {
      return Fail(StatusCode::kInvalidArgument, fmt::format("{}:1: expected lines such as `ram-budget: 1GiB`", path));
    }
    for (const auto& pair : root) {
      ConfigEntry entry;
      entry.line = pair.first.Mark().line + 1;
      if (!pair.first.IsScalar()) {
        return Fail(StatusCode::kInvalidArgument,
                    fmt::format("{}:{}: an option's name was expected", path, entry.line));
      }
      entry.name = pair.first.Scalar();
      std::replace(entry.name.begin(), entry.name.end(), '_', '-');
      const auto earlier = std::find_if(entries.begin(), entries.end(),
                                        [&](const ConfigEntry& other) { return other.name == entry.name; });
      if (earlier != entries.end()) {
        return Fail(StatusCode::kInvalidArgument, fmt::format("{}:{}: {} is set in line {} already; keep one of them",
                                                              path, entry.line, entry.name, earlier->line));
      }
      Result<std::string> value = ScalarText(path, entry.name, pair.second);
      if (!value) return Fail(value.error());
      entry.value = *std::move(value);
      entries.push_back(std::move(entry));
    }
  } catch (const YAML::Exception& error) {
    return Fail(StatusCode::kInvalidArgument, fmt::format("{}:{}: {}", path, error.mark.line + 1, error.msg));
  }
  return entries;
}

}  // namespace kvcell::cli
