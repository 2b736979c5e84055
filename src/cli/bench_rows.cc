#include "cli/bench_rows.h"

#include <fmt/format.h>

#include <utility>

namespace kvcell::cli {

std::string FormatFigure(double value) {
  if (value == 0.0) return "";
  return value >= 100.0 ? fmt::format("{:.0f}", value) : fmt::format("{:.3g}", value);
}

void PrintBenchRows(std::span<const BenchRow> rows) {
  Table table({"WHAT", "VALUE", "UNIT", "AGAINST", "RATIO", "OF"});
  table.AlignRight({1, 3, 4});
  for (const BenchRow& row : rows) {
    table.Add(
        {row.name, FormatFigure(row.value), row.unit, FormatFigure(row.peer), FormatFigure(row.ratio), row.versus});
  }
  table.Print(stdout);
}

Json BenchRowsJson(std::span<const BenchRow> rows) {
  Json list = Json::array();
  for (const BenchRow& row : rows) {
    Json one = {{"name", row.name}, {"value", row.value}, {"unit", row.unit}, {"peer", nullptr}, {"ratio", nullptr}};
    if (row.peer != 0.0) one["peer"] = row.peer;
    if (row.ratio != 0.0) one["ratio"] = row.ratio;
    if (!row.versus.empty()) one["versus"] = row.versus;
    list.push_back(std::move(one));
  }
  return list;
}

}  // namespace kvcell::cli
