#include "cell/rules_file.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <type_traits>

namespace kvcell::rules_internal {
namespace {

std::string_view Trim(std::string_view text) {
  while (!text.empty() && (text.front() == ' ' || text.front() == '\t')) text.remove_prefix(1);
  while (!text.empty() && (text.back() == ' ' || text.back() == '\t')) text.remove_suffix(1);
  return text;
}

// A number and the unit behind it; nothing where there is no finite number.
std::optional<double> NumberAndUnit(std::string_view text, std::string_view* unit) {
  text = Trim(text);
  const size_t end = std::min(text.find_first_not_of("0123456789.+-"), text.size());
  const std::string number(text.substr(0, end));
  *unit = Trim(text.substr(end));
  if (number.empty() || number.size() > 30) return std::nullopt;
  char* stop = nullptr;
  const double value = std::strtod(number.c_str(), &stop);
  if (*stop != '\0' || !std::isfinite(value)) return std::nullopt;
  return value;
}

struct Unit {
  std::string_view name;
  double factor;
};

template <size_t N>
std::optional<double> Scaled(std::string_view text, const std::array<Unit, N>& units) {
  std::string_view unit;
  const auto number = NumberAndUnit(text, &unit);
  if (!number) return std::nullopt;
  for (const Unit& u : units) {
    if (unit == u.name) return *number * u.factor;
  }
  return std::nullopt;
}

template <typename T>
T Above(T value) {
  if constexpr (std::is_floating_point_v<T>) {
    return std::nextafter(value, std::numeric_limits<T>::max());
  } else {
    return value == std::numeric_limits<T>::max() ? value : value + 1;
  }
}
template <typename T>
T Below(T value) {
  if constexpr (std::is_floating_point_v<T>) {
    return std::nextafter(value, std::numeric_limits<T>::lowest());
  } else {
    return value == std::numeric_limits<T>::lowest() ? value : value - 1;
  }
}

}  // namespace

std::optional<int64_t> Integer(std::string_view text) {
  text = Trim(text);
  int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || text.empty()) return std::nullopt;
  return value;
}

std::optional<double> Decimal(std::string_view text) {
  std::string_view unit;
  const auto number = NumberAndUnit(text, &unit);
  return number && unit.empty() ? number : std::nullopt;
}

std::optional<double> Share(std::string_view text) {
  const auto value = Scaled(text, std::array<Unit, 2>{{{"", 1.0}, {"%", 0.01}}});
  return value && *value >= 0.0 && *value <= 1.0 ? value : std::nullopt;
}

std::optional<double> Seconds(std::string_view text) {
  const auto value = Scaled(
      text, std::array<Unit, 6>{{{"", 1.0}, {"s", 1.0}, {"ms", 1e-3}, {"m", 60.0}, {"h", 3600.0}, {"d", 86400.0}}});
  return value && *value >= 0.0 ? value : std::nullopt;
}

std::optional<uint64_t> Bytes(std::string_view text) {
  constexpr double kKi = 1024.0;
  const auto value = Scaled(text, std::array<Unit, 14>{{{"", 1.0},
                                                        {"B", 1.0},
                                                        {"K", kKi},
                                                        {"KiB", kKi},
                                                        {"k", kKi},
                                                        {"M", kKi * kKi},
                                                        {"MiB", kKi * kKi},
                                                        {"G", kKi * kKi * kKi},
                                                        {"GiB", kKi * kKi * kKi},
                                                        {"T", kKi * kKi * kKi * kKi},
                                                        {"TiB", kKi * kKi * kKi * kKi},
                                                        {"KB", 1e3},
                                                        {"MB", 1e6},
                                                        {"GB", 1e9}}});
  if (!value || *value < 0.0 || *value > 9e18) return std::nullopt;
  return static_cast<uint64_t>(*value);
}

std::optional<int64_t> PressureNumber(std::string_view text) {
  text = Trim(text);
  for (const Pressure level : {Pressure::kNone, Pressure::kSoft, Pressure::kHard}) {
    if (text == PressureName(level)) return static_cast<int64_t>(level);
  }
  return std::nullopt;
}

template <typename T>
std::optional<Range<T>> Comparison(std::string_view text, std::optional<T> (*value)(std::string_view)) {
  text = Trim(text);
  Range<T> range;
  const auto rest = [&](size_t n) { return value(text.substr(n)); };
  if (text.starts_with(">=")) {
    if (const auto x = rest(2)) return range.low = *x, range;
    return std::nullopt;
  }
  if (text.starts_with("<=")) {
    if (const auto x = rest(2)) return range.high = *x, range;
    return std::nullopt;
  }
  if (text.starts_with("==")) {
    if (const auto x = rest(2)) return Range<T>{*x, *x};
    return std::nullopt;
  }
  if (text.starts_with(">")) {
    if (const auto x = rest(1)) return range.low = Above(*x), range;
    return std::nullopt;
  }
  if (text.starts_with("<")) {
    if (const auto x = rest(1)) return range.high = Below(*x), range;
    return std::nullopt;
  }
  if (const auto x = value(text)) return Range<T>{*x, *x};
  for (const std::string_view between : {std::string_view(".."), std::string_view("-")}) {
    const size_t at = text.find(between, 1);
    if (at == std::string_view::npos) continue;
    const auto low = value(text.substr(0, at));
    const auto high = value(text.substr(at + between.size()));
    if (low && high && *low <= *high) return Range<T>{*low, *high};
  }
  return std::nullopt;
}
template std::optional<Range<int64_t>> Comparison(std::string_view, std::optional<int64_t> (*)(std::string_view));
template std::optional<Range<double>> Comparison(std::string_view, std::optional<double> (*)(std::string_view));

}  // namespace kvcell::rules_internal
