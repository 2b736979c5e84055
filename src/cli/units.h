// Sizes, counts and times as people write and read them.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "kvcell/status.h"

namespace kvcell::cli {

// Reads `1500000`, `64MiB`, `64M` (both powers of 1024), `64MB` (powers of 1000), `1.5G`. kInvalidArgument names the
// text.
Result<uint64_t> ParseSize(std::string_view text);
// "4.2 MiB"; exact below 1 KiB.
std::string FormatSize(uint64_t bytes);

// Reads `3600`, `45s`, `30m`, `12h`, `30d`, `2w` as seconds.
Result<int64_t> ParseDuration(std::string_view text);

// Whole and decimal numbers within [low, high]; the whole text must be the number.
Result<int64_t> ParseInteger(std::string_view text, int64_t low, int64_t high);
Result<double> ParseDecimal(std::string_view text, double low, double high);
// true, yes, on, 1 and their opposites.
Result<bool> ParseBool(std::string_view text);

// `none`, `process` and `power`, as CacheOptions::durability numbers them; nothing where the text is none of them.
std::optional<uint8_t> ParseDurability(std::string_view text);
std::string_view DurabilityName(uint8_t level);

// "123 ms", "4.6 s", "2 min 5 s".
std::string FormatMilliseconds(double ms);
// "6,023"
std::string FormatCount(int64_t n);
// Local date and time to the second.
std::string FormatTime(int64_t unix_seconds);

}  // namespace kvcell::cli
