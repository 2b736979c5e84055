// How the rows of a benchmark are printed: the one shape of `bench store`, `bench sharing` and `bench overhead`.
#pragma once

#include <span>
#include <string>

#include "cli/output.h"
#include "lab/bench_row.h"

namespace kvcell::cli {

// Three digits are what a measurement is good for; "" for 0.
std::string FormatFigure(double value);
void PrintBenchRows(std::span<const BenchRow> rows);
// `name`, `value`, `unit`, `peer` and `ratio` (null where there is none), and `versus` where it is named.
Json BenchRowsJson(std::span<const BenchRow> rows);

}  // namespace kvcell::cli
