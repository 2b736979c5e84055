// Values in rule files: sizes, times, comparisons and ranges as text.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "cell/state_machine.h"

namespace kvcell::rules_internal {

// Each gives nothing where the text is not of its kind; the caller knows what to say about it.
std::optional<int64_t> Integer(std::string_view text);
std::optional<double> Decimal(std::string_view text);
std::optional<double> Share(std::string_view text);    // 0.5 or 50 %
std::optional<double> Seconds(std::string_view text);  // 90, 90s, 10m, 2h, 1d, 250ms
std::optional<uint64_t> Bytes(std::string_view text);  // 64MiB, 2G, 1500000
std::optional<int64_t> PressureNumber(std::string_view text);

// `>= X`, `> X`, `<= X`, `< X`, `== X`, `X`, or `X..Y` (also `X-Y` for integers), with X read by `value`. A range
// without values (`5..3`) is nothing too.
template <typename T>
std::optional<Range<T>> Comparison(std::string_view text, std::optional<T> (*value)(std::string_view));
extern template std::optional<Range<int64_t>> Comparison(std::string_view,
                                                         std::optional<int64_t> (*)(std::string_view));
extern template std::optional<Range<double>> Comparison(std::string_view, std::optional<double> (*)(std::string_view));

}  // namespace kvcell::rules_internal
