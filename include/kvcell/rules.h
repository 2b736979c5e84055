// Rules: what a cache does with its cells, read from a YAML or JSON file (docs/rules.md). CacheOptions::rules takes
// them, Cache::SetRules exchanges them while it runs.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "kvcell/status.h"

namespace kvcell {

struct Rules;  // an immutable table; made by the functions below

// kNotFound, kIoError; kInvalidArgument with `file:line:` and what is allowed there, for the first error of the file.
Result<std::shared_ptr<const Rules>> LoadRules(const std::string& path);
// The same for a text; `name` stands for the file in messages.
Result<std::shared_ptr<const Rules>> ParseRules(std::string_view text, const std::string& name);
// One of the rule files that the library brings along; kInvalidArgument lists their names.
Result<std::shared_ptr<const Rules>> ProfileRules(std::string_view name);
// quality, balanced, elastic, long-context, edge, server.
std::vector<std::string> ProfileNames();
// The text of a profile's file, "" where there is none of that name.
std::string_view ProfileText(std::string_view name);

}  // namespace kvcell
