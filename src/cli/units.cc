#include "cli/units.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <ctime>
#include <utility>

namespace kvcell::cli {
namespace {

std::string Lower(std::string_view text) {
  std::string lower(text);
  std::transform(lower.begin(), lower.end(), lower.begin(),
                 [](char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c; });
  return lower;
}

Result<double> ReadDecimal(std::string_view text) {
  // strtod instead of from_chars: clang 14's library has no floating-point from_chars.
  const std::string copy(text);
  char* end = nullptr;
  const double value = std::strtod(copy.c_str(), &end);
  const bool starts_well = !copy.empty() && (copy[0] == '-' || copy[0] == '.' || (copy[0] >= '0' && copy[0] <= '9'));
  if (!starts_well || end != copy.c_str() + copy.size() || !std::isfinite(value)) {
    return Fail(StatusCode::kInvalidArgument, fmt::format("'{}' is not a number", text));
  }
  return value;
}

}  // namespace

Result<uint64_t> ParseSize(std::string_view text) {
  const auto fail = [&] {
    return Fail(StatusCode::kInvalidArgument,
                fmt::format("'{}' is not a size; write bytes as 1500000, 64MiB, 2G or 1.5GB", text));
  };
  const size_t digits = std::min(text.find_first_not_of("0123456789."), text.size());
  const Result<double> number = ReadDecimal(text.substr(0, digits));
  if (!number) return fail();
  static constexpr std::array<std::pair<std::string_view, double>, 14> kUnits = {{{"", 1.0},
                                                                                  {"b", 1.0},
                                                                                  {"k", 0x1p10},
                                                                                  {"kib", 0x1p10},
                                                                                  {"kb", 1e3},
                                                                                  {"m", 0x1p20},
                                                                                  {"mib", 0x1p20},
                                                                                  {"mb", 1e6},
                                                                                  {"g", 0x1p30},
                                                                                  {"gib", 0x1p30},
                                                                                  {"gb", 1e9},
                                                                                  {"t", 0x1p40},
                                                                                  {"tib", 0x1p40},
                                                                                  {"tb", 1e12}}};
  std::string unit = Lower(text.substr(digits));
  unit.erase(0, std::min(unit.find_first_not_of(' '), unit.size()));
  for (const auto& [name, factor] : kUnits) {
    if (name != unit) continue;
    const double bytes = *number * factor;
    if (bytes > 0x1p62) return fail();
    return static_cast<uint64_t>(bytes);
  }
  return fail();
}

Result<int64_t> ParseDuration(std::string_view text) {
  static constexpr std::array<std::pair<char, int64_t>, 5> kDurations = {
      {{'s', 1}, {'m', 60}, {'h', 3600}, {'d', 86400}, {'w', 604800}}};
  constexpr int64_t kMost = int64_t{1} << 40;
  int64_t factor = 1;
  std::string_view digits = text;
  for (const auto& [unit, seconds] : kDurations) {
    if (digits.empty() || digits.back() != unit) continue;
    factor = seconds;
    digits.remove_suffix(1);
    break;
  }
  const Result<int64_t> number = ParseInteger(digits, 0, kMost / factor);
  if (!number) {
    return Fail(StatusCode::kInvalidArgument,
                fmt::format("'{}' is not a time; write seconds, or a number with s, m, h, d or w, like 30d", text));
  }
  return *number * factor;
}

std::string FormatSize(uint64_t bytes) {
  static constexpr std::array<const char*, 5> kNames = {"B", "KiB", "MiB", "GiB", "TiB"};
  if (bytes < 1024) return fmt::format("{} B", bytes);
  double value = static_cast<double>(bytes);
  size_t unit = 0;
  while (value >= 1024.0 && unit + 1 < kNames.size()) {
    value /= 1024.0;
    ++unit;
  }
  return fmt::format("{:.{}f} {}", value, value < 10.0 ? 2 : 1, kNames[unit]);
}

Result<int64_t> ParseInteger(std::string_view text, int64_t low, int64_t high) {
  int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || text.empty()) {
    return Fail(StatusCode::kInvalidArgument, fmt::format("'{}' is not a whole number", text));
  }
  if (value < low || value > high) {
    return Fail(StatusCode::kInvalidArgument, fmt::format("{} is outside {}..{}", value, low, high));
  }
  return value;
}

Result<double> ParseDecimal(std::string_view text, double low, double high) {
  const Result<double> value = ReadDecimal(text);
  if (!value) return value;
  if (*value < low || *value > high) {
    return Fail(StatusCode::kInvalidArgument, fmt::format("{} is outside {}..{}", *value, low, high));
  }
  return value;
}

Result<bool> ParseBool(std::string_view text) {
  const std::string lower = Lower(text);
  if (lower == "true" || lower == "yes" || lower == "on" || lower == "1") return true;
  if (lower == "false" || lower == "no" || lower == "off" || lower == "0") return false;
  return Fail(StatusCode::kInvalidArgument, fmt::format("'{}' is neither true nor false", text));
}

namespace {
constexpr std::array<std::string_view, 3> kDurabilities = {"none", "process", "power"};
}  // namespace

std::optional<uint8_t> ParseDurability(std::string_view text) {
  const auto found = std::ranges::find(kDurabilities, text);
  if (found == kDurabilities.end()) return std::nullopt;
  return static_cast<uint8_t>(found - kDurabilities.begin());
}

std::string_view DurabilityName(uint8_t level) { return kDurabilities.at(level); }

std::string FormatMilliseconds(double ms) {
  if (ms < 1.0) return fmt::format("{:.2f} ms", ms);
  if (ms < 10000.0) return fmt::format("{:.{}f} ms", ms, ms < 100.0 ? 1 : 0);
  if (ms < 120000.0) return fmt::format("{:.1f} s", ms / 1000.0);
  const auto seconds = static_cast<int64_t>(ms / 1000.0);
  return fmt::format("{} min {} s", seconds / 60, seconds % 60);
}

std::string FormatCount(int64_t n) {
  std::string digits = std::to_string(n < 0 ? -n : n);
  for (auto at = static_cast<int64_t>(digits.size()) - 3; at > 0; at -= 3) digits.insert(static_cast<size_t>(at), ",");
  return n < 0 ? "-" + digits : digits;
}

std::string FormatTime(int64_t unix_seconds) {
  const std::time_t time = unix_seconds;
  std::tm local{};
  if (localtime_r(&time, &local) == nullptr) return std::to_string(unix_seconds);
  std::array<char, 32> text{};
  const size_t n = std::strftime(text.data(), text.size(), "%Y-%m-%d %H:%M:%S", &local);
  return {text.data(), n};
}

}  // namespace kvcell::cli
