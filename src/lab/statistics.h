// What benchmarks and measurements say of repeated values.
#pragma once

#include <span>
#include <utility>
#include <vector>

namespace kvcell {

// Each 0 where there are no values.
double Mean(std::span<const double> values);
// The value below which a share of `q` (0..1) of them lies.
double Quantile(std::vector<double> values, double q);
inline double Median(std::vector<double> values) { return Quantile(std::move(values), 0.5); }
// Of their mean; 0 for fewer than two.
double StandardError(std::span<const double> values);

}  // namespace kvcell
