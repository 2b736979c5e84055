#include "lab/report.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <map>
#include <set>
#include <utility>

namespace kvcell {
namespace {

using Json = nlohmann::json;

std::string Escaped(const std::string& text) {
  std::string out;
  for (const char c : text) {
    switch (c) {
      case '&':
        out += "&amp;";
        break;
      case '<':
        out += "&lt;";
        break;
      case '>':
        out += "&gt;";
        break;
      case '"':
        out += "&quot;";
        break;
      default:
        out += c;
    }
  }
  return out;
}

const char* Colour(size_t i) {
  static constexpr const char* kColours[] = {"#2b6cb0", "#c05621", "#2f855a", "#6b46c1", "#b83280", "#4a5568"};
  return kColours[i % std::size(kColours)];
}

// Four digits that say something.
std::string Number(double x) {
  if (x == 0) return "0";
  const double magnitude = std::fabs(x);
  if (magnitude >= 1000) return fmt::format("{:.0f}", x);
  if (magnitude >= 1) return fmt::format("{:.2f}", x);
  if (magnitude >= 0.001) return fmt::format("{:.4f}", x);
  return fmt::format("{:.1e}", x);
}

// --- Plots ---------------------------------------------------------------------------------------------------------

std::string Bars(const std::vector<Experiment::Bar>& bars) {
  constexpr double kLabel = 190, kWidth = 380, kRow = 26;
  double most = 0;
  for (const auto& bar : bars) most = std::max(most, bar.value);
  const double height = kRow * static_cast<double>(bars.size()) + 6;
  std::string svg = fmt::format("<svg viewBox='0 0 720 {}' width='720' height='{}' role='img'>", height, height);
  for (size_t i = 0; i < bars.size(); ++i) {
    const double y = kRow * static_cast<double>(i) + 4;
    const double width = most > 0 ? std::max(1.0, kWidth * bars[i].value / most) : 1.0;
    svg += fmt::format("<text x='{}' y='{}' text-anchor='end'>{}</text>", kLabel - 8, y + 14, Escaped(bars[i].label));
    svg += fmt::format("<rect x='{}' y='{}' width='{:.1f}' height='18' fill='{}'/>", kLabel, y, width, Colour(i));
    svg += fmt::format("<text x='{:.1f}' y='{}'>{}</text>", kLabel + width + 8, y + 14, Escaped(bars[i].text));
  }
  return svg + "</svg>";
}

struct Point {
  double x = 0, y = 0;
  std::string label = {};
};
struct Series {
  std::string name = {};
  std::vector<Point> points = {};
  bool line = true;
};

// One axis: where values go, and its ticks.
class Axis {
 public:
  Axis(double low, double high, bool log) : log_(log) {
    if (log) {
      low_ = std::floor(std::log10(low));
      high_ = std::max(low_ + 1, std::ceil(std::log10(high)));
    } else {
      const double step = Step(std::max(high - low, 1e-12));
      low_ = std::floor(low / step) * step;
      high_ = std::max(low_ + step, std::ceil(high / step) * step);
      step_ = step;
    }
  }
  double Place(double x) const { return ((log_ ? std::log10(x) : x) - low_) / (high_ - low_); }
  std::vector<double> Ticks() const {
    std::vector<double> ticks;
    for (double at = low_; at <= high_ * (1 + 1e-9) + 1e-12; at += log_ ? 1.0 : step_) {
      ticks.push_back(log_ ? std::pow(10.0, at) : at);
    }
    return ticks;
  }

 private:
  static double Step(double range) {
    const double raw = range / 5, power = std::pow(10.0, std::floor(std::log10(raw)));
    for (const double m : {1.0, 2.0, 5.0}) {
      if (m * power >= raw) return m * power;
    }
    return 10.0 * power;
  }
  bool log_;
  double low_ = 0, high_ = 1, step_ = 1;
};

std::string Chart(const std::vector<Series>& series, const std::string& x_title, const std::string& y_title, bool log_x,
                  bool log_y) {
  constexpr double kLeft = 74, kRight = 20, kTop = 14, kBottom = 46, kWidth = 720, kHeight = 330;
  double x_low = 1e300, x_high = -1e300, y_low = 1e300, y_high = -1e300;
  for (const Series& s : series) {
    for (const Point& p : s.points) {
      if ((log_x && p.x <= 0) || (log_y && p.y <= 0)) continue;
      x_low = std::min(x_low, p.x);
      x_high = std::max(x_high, p.x);
      y_low = std::min(y_low, p.y);
      y_high = std::max(y_high, p.y);
    }
  }
  if (x_low > x_high) return "<p>Nothing to draw.</p>";
  if (!log_y) y_low = std::min(0.0, y_low);
  const Axis x(x_low, x_high, log_x), y(y_low, y_high, log_y);
  const auto px = [&](double v) { return kLeft + x.Place(v) * (kWidth - kLeft - kRight); };
  const auto py = [&](double v) { return kHeight - kBottom - y.Place(v) * (kHeight - kTop - kBottom); };
  std::string svg = fmt::format("<svg viewBox='0 0 {0} {1}' width='{0}' height='{1}' role='img'>", kWidth, kHeight);
  for (const double tick : x.Ticks()) {
    svg += fmt::format("<line class='grid' x1='{0:.1f}' y1='{1}' x2='{0:.1f}' y2='{2}'/>", px(tick), kTop,
                       kHeight - kBottom);
    svg += fmt::format("<text x='{:.1f}' y='{}' text-anchor='middle'>{}</text>", px(tick), kHeight - kBottom + 18,
                       Number(tick));
  }
  for (const double tick : y.Ticks()) {
    svg += fmt::format("<line class='grid' x1='{1}' y1='{0:.1f}' x2='{2}' y2='{0:.1f}'/>", py(tick), kLeft,
                       kWidth - kRight);
    svg += fmt::format("<text x='{}' y='{:.1f}' text-anchor='end'>{}</text>", kLeft - 8, py(tick) + 4, Number(tick));
  }
  svg += fmt::format("<text x='{}' y='{}' text-anchor='middle'>{}</text>", (kLeft + kWidth - kRight) / 2, kHeight - 8,
                     Escaped(x_title));
  svg += fmt::format("<text transform='rotate(-90 14 {0})' x='14' y='{0}' text-anchor='middle'>{1}</text>",
                     (kTop + kHeight - kBottom) / 2, Escaped(y_title));
  for (size_t i = 0; i < series.size(); ++i) {
    std::string path;
    for (const Point& p : series[i].points) {
      if ((log_x && p.x <= 0) || (log_y && p.y <= 0)) continue;
      path += fmt::format("{}{:.1f} {:.1f} ", path.empty() ? "M" : "L", px(p.x), py(p.y));
      svg += fmt::format("<circle cx='{:.1f}' cy='{:.1f}' r='4' fill='{}'/>", px(p.x), py(p.y), Colour(i));
      if (!p.label.empty()) {
        const bool left = px(p.x) > kWidth - 130;
        svg += fmt::format("<text x='{:.1f}' y='{:.1f}'{}>{}</text>", px(p.x) + (left ? -8 : 8), py(p.y) - 6,
                           left ? " text-anchor='end'" : "", Escaped(p.label));
      }
    }
    if (series[i].line) {
      svg += fmt::format("<path d='{}' fill='none' stroke='{}' stroke-width='1.5'/>", path, Colour(i));
    }
  }
  svg += "</svg><p class='legend'>";
  for (size_t i = 0; i < series.size(); ++i) {
    svg += fmt::format("<span><i style='background:{}'></i>{}</span>", Colour(i), Escaped(series[i].name));
  }
  return svg + "</p>";
}

// --- Tables ----------------------------------------------------------------------------------------------------------

struct Column {
  const char* key;
  const char* title;
};

std::string Cell(const Json& value) {
  if (value.is_null()) return "";
  if (value.is_number_integer()) return fmt::format("{}", value.get<int64_t>());
  if (value.is_number()) return Number(value.get<double>());
  if (value.is_boolean()) return value.get<bool>() ? "yes" : "no";
  return Escaped(value.is_string() ? value.get<std::string>() : value.dump());
}

std::string TableOf(const Json& rows, const std::vector<Column>& columns) {
  std::string html = "<table><tr>";
  for (const Column& column : columns) html += fmt::format("<th>{}</th>", column.title);
  html += "</tr>";
  for (const Json& row : rows) {
    html += "<tr>";
    for (const Column& column : columns) {
      const auto found = row.find(column.key);
      const bool number = found != row.end() && found->is_number();
      html += fmt::format("<td{}>{}</td>", number ? " class='n'" : "", found == row.end() ? "" : Cell(*found));
    }
    html += "</tr>";
  }
  return html + "</table>";
}

// --- Sections: one for each command
// ------------------------------------------------------------------------------------

double At(const Json& row, const char* key) {
  const auto found = row.find(key);
  return found != row.end() && found->is_number() ? found->get<double>() : 0.0;
}
std::string TextAt(const Json& row, const char* key) {
  const auto found = row.find(key);
  return found != row.end() && found->is_string() ? found->get<std::string>() : "";
}
const Json& Rows(const Json& m, const char* key = "rows") {
  static const Json kNone = Json::array();
  const auto found = m.find(key);
  return found != m.end() && found->is_array() ? *found : kNone;
}

std::string Quality(const Json& m) {
  std::string html = fmt::format(
      "<h2>What the answers lose: perplexity and KL divergence</h2><p>{} windows of {} tokens, second halves scored. "
      "KL "
      "divergence is against the same engine's own f16 cache: 0 would be the same answers.",
      Cell(m.value("windows", Json())), Cell(m.value("context", Json())));
  if (At(m, "floor_kld") > 0) {
    html += fmt::format(" Two exact implementations differ by {}, so what lies below that can't be seen.",
                        Number(At(m, "floor_kld")));
  }
  html += "</p>";
  std::vector<Series> series(2);
  series[0].name = "kvcell";
  series[1].name = "libllama";
  series[0].line = series[1].line = false;
  for (const Json& row : Rows(m)) {
    if (At(row, "kld_mean") <= 0) continue;
    const bool peer = TextAt(row, "engine") == "libllama";
    std::string label = TextAt(row, "codec");
    if (label.size() > 26) label = label.substr(0, 24) + "..";
    series[peer ? 1 : 0].points.push_back({At(row, "bits"), At(row, "kld_mean"), label});
  }
  html += Chart(series, "bits per element", "mean KL divergence", false, true);
  return html + TableOf(Rows(m), {{"engine", "engine"},
                                  {"codec", "codec"},
                                  {"bits", "bits"},
                                  {"bits_all_in", "bits all in"},
                                  {"ppl", "perplexity"},
                                  {"kld_mean", "mean KLD"},
                                  {"kld_se", "+-"},
                                  {"kld_p999", "99.9 %"},
                                  {"top1", "same top token"}});
}

std::string Error(const Json& m) {
  std::string html = fmt::format(
      "<h2>What the values lose</h2><p>{}. Squared error of coded K and V over their energy, and of attention's "
      "outputs. A "
      "codec that is not attended in place is there for comparison.</p>",
      Escaped(TextAt(m, "source")));
  std::vector<Series> series;
  Series all{.name = "codecs", .line = false};
  for (const Json& row : Rows(m)) {
    all.points.push_back({At(row, "bits"), At(row, "output_relative"), TextAt(row, "codec").substr(0, 26)});
  }
  series.push_back(all);
  html += Chart(series, "bits per element", "error of attention outputs", false, true);
  html += TableOf(Rows(m), {{"codec", "codec"},
                            {"bits", "bits"},
                            {"in_place", "in place"},
                            {"k_relative", "K error"},
                            {"k_cosine", "K cosine"},
                            {"v_relative", "V error"},
                            {"v_cosine", "V cosine"},
                            {"output_relative", "output error"}});
  std::vector<Series> layers;
  for (const Json& row : Rows(m)) {
    Series s{.name = TextAt(row, "codec")};
    for (const Json& layer : Rows(row, "layers")) {
      s.points.push_back({At(layer, "layer"), At(layer, "output_relative"), ""});
    }
    if (s.points.size() > 1 && layers.size() < 6) layers.push_back(std::move(s));
  }
  if (!layers.empty()) html += "<h3>Layer by layer</h3>" + Chart(layers, "layer", "output error", false, true);
  return html;
}

std::string Answers(const Json& m) {
  std::string html =
      "<h2>What people read: answers side by side</h2><p>Only questions that f16 itself gets right are counted as "
      "right "
      "or wrong.</p>";
  html += TableOf(Rows(m), {{"codec", "codec"},
                            {"bits", "bits"},
                            {"questions", "questions"},
                            {"right", "right"},
                            {"f16_wrong", "f16 wrong"},
                            {"same", "same as f16"},
                            {"similarity", "similarity"},
                            {"first_difference", "first difference"},
                            {"repetition", "repetition"}});
  html += "<details><summary>All answers</summary><table><tr><th>question</th><th>codec</th><th>answer</th></tr>";
  for (const Json& answer : Rows(m, "answers")) {
    html += fmt::format("<tr><td>{}</td><td>{}</td><td>{}</td></tr>", Escaped(TextAt(answer, "question")),
                        Escaped(TextAt(answer, "codec")), Escaped(TextAt(answer, "text")));
  }
  return html + "</table></details>";
}

std::string Choice(const Json& m) {
  return "<h2>The true continuation among four</h2>" + TableOf(Rows(m), {{"codec", "codec"},
                                                                         {"bits", "bits"},
                                                                         {"questions", "questions"},
                                                                         {"accuracy", "accuracy"},
                                                                         {"same_as_f16", "same as f16"},
                                                                         {"margin", "margin"}});
}

std::string Latency(const Json& m) {
  std::string html = "<h2>Latency of attention</h2>";
  std::map<std::string, Series> ways;
  for (const Json& row : Rows(m)) {
    Series& s = ways[TextAt(row, "codec") + ", " + TextAt(row, "way")];
    s.points.push_back({At(row, "context"), At(row, "ms"), ""});
  }
  std::vector<Series> series;
  for (auto& [name, s] : ways) {
    s.name = name;
    series.push_back(s);
  }
  return html + Chart(series, "tokens", "ms per layer", true, true) +
         TableOf(Rows(m),
                 {{"codec", "codec"}, {"way", "way"}, {"context", "tokens"}, {"ms", "ms"}, {"ratio", "x f16"}});
}

std::string Capacity(const Json& m) {
  std::vector<Experiment::Bar> bars;
  for (const Json& row : Rows(m)) {
    bars.push_back({TextAt(row, "shape") + " " + TextAt(row, "codec"), At(row, "context"),
                    fmt::format("{} tokens", Cell(row.value("context", Json())))});
  }
  return "<h2>What a given memory holds</h2>" + Bars(bars) +
         TableOf(Rows(m), {{"shape", "shape"},
                           {"codec", "codec"},
                           {"bits", "bits"},
                           {"context", "longest context"},
                           {"batch", "sequences"},
                           {"tokens_per_s", "tokens/s"}});
}

std::string Sweep(const Json& m) {
  std::string html = "<h2>Granularity, exact area, locality</h2>";
  html += TableOf(Rows(m, "granularity"), {{"scope", "values that share a scale"},
                                           {"scale_bits", "scale bits"},
                                           {"k_relative", "K error"},
                                           {"v_relative", "V error"}});
  std::map<int64_t, Series> recent;
  for (const Json& row : Rows(m, "exact")) {
    Series& s = recent[static_cast<int64_t>(At(row, "recent_blocks"))];
    s.name = fmt::format("{} recent blocks exact", static_cast<int64_t>(At(row, "recent_blocks")));
    s.points.push_back({At(row, "sinks"), At(row, "output_relative"), ""});
  }
  std::vector<Series> series;
  for (const auto& [blocks, s] : recent) series.push_back(s);
  html += "<h3>First tokens kept exact</h3>" + Chart(series, "first tokens exact", "output error", false, false);
  Series locality{.name = "share of attention on the newest blocks"};
  for (const Json& row : Rows(m, "locality")) {
    locality.points.push_back({At(row, "newest_blocks"), At(row, "mass"), ""});
  }
  html += "<h3>Where attention looks</h3>" + Chart({locality}, "newest blocks of 64 tokens", "share", true, false);
  if (!Rows(m, "reads").empty()) {
    html += "<h3>Reading cells back</h3>" +
            TableOf(Rows(m, "reads"), {{"from", "from"}, {"gb_s", "GB/s"}, {"missed", "share that came from a disk"}});
  }
  return html;
}

std::string Curve(const Json& m) {
  constexpr double kMiB = 1048576.0;
  const auto drawn = [&](std::initializer_list<std::pair<const char*, const char*>> columns) {
    std::vector<Series> series;
    for (const auto& [key, name] : columns) {
      Series s{.name = name};
      for (const Json& row : Rows(m)) s.points.push_back({At(row, "seconds"), At(row, key) / kMiB, ""});
      const bool any = std::ranges::any_of(s.points, [](const Point& p) { return p.y > 0; });
      if (any) series.push_back(std::move(s));
    }
    return Chart(series, "seconds", "MiB", false, false);
  };
  return fmt::format("<h2>Memory over time</h2><p>{}</p><h3>KV cells by state</h3>", Escaped(TextAt(m, "source"))) +
         drawn({{"kv_active", "ACTIVE"},
                {"kv_quantized", "QUANTIZED"},
                {"kv_persisted", "PERSISTED"},
                {"kv_recovering", "RECOVERING"},
                {"kv_ram", "taken in RAM"}}) +
         "<h3>The process and the machine</h3>" +
         drawn({{"process_resident", "process, resident"},
                {"process_anonymous", "process, anonymous"},
                {"cgroup_used", "memory cgroup, used"},
                {"gpu_used", "GPU, used"}});
}

std::string Growth(const Json& m) {
  std::string html = fmt::format(
      "<h2>One growing text under one budget</h2><p>{} MiB of RAM for K and V; the model was trained on {} tokens, "
      "and beyond these only memory and speed count.</p>",
      Number(At(m, "ram_budget") / 1048576.0), Number(At(m, "context_train")));
  std::vector<Experiment::Bar> bars;
  std::vector<Series> speed;
  for (const Json& row : Rows(m)) {
    bars.push_back({TextAt(row, "way"), At(row, "longest"), fmt::format("{} tokens", Cell(row["longest"]))});
    Series s{.name = TextAt(row, "way")};
    for (const Json& stage : Rows(row, "stages")) {
      s.points.push_back({At(stage, "tokens"), At(stage, "decode_tokens_per_s"), ""});
    }
    speed.push_back(std::move(s));
  }
  html += Bars(bars) + "<h3>Decoding as it grows</h3>" + Chart(speed, "tokens", "tokens/s", true, false);
  for (const Json& row : Rows(m)) {
    html += fmt::format("<h3>{}</h3><p>Ended by: {}</p>", Escaped(TextAt(row, "way")), Escaped(TextAt(row, "limit")));
    html += TableOf(Rows(row, "stages"), {{"tokens", "tokens"},
                                          {"kv_ram_bytes", "KV in RAM"},
                                          {"process_bytes", "process grew by"},
                                          {"file_bytes", "in files"},
                                          {"prefill_tokens_per_s", "prefill tokens/s"},
                                          {"decode_tokens_per_s", "decode tokens/s"},
                                          {"same_as_f16", "answer tokens as f16's"},
                                          {"answer", "answer"}});
  }
  return html;
}

std::string Stats(const Json& m) {
  std::string html = fmt::format("<h2>What K and V look like</h2><p>{}</p>", Escaped(TextAt(m, "source")));
  std::vector<Series> series = {{.name = "K coded alone"}, {.name = "V coded alone"}};
  for (const Json& row : Rows(m, "losses")) {
    series[0].points.push_back({At(row, "layer"), At(row, "k"), ""});
    series[1].points.push_back({At(row, "layer"), At(row, "v"), ""});
  }
  html += Chart(series, "layer", "output error", false, true);
  return html + fmt::format("<p>Layers that should stay finer: K {}, V {}.</p>",
                            Escaped(m.value("finer_k", Json()).dump()), Escaped(m.value("finer_v", Json()).dump()));
}

std::string ExperimentHtml(const Experiment& e, size_t number) {
  std::string html = fmt::format("<section class='experiment'><h3><span class='{}'>{}</span> {}. {}</h3>",
                                 e.pass ? "pass" : "fail", e.pass ? "PASS" : "FAIL", number, Escaped(e.name));
  html += fmt::format("<p>{}</p><dl><dt>Bound</dt><dd>{}</dd><dt>Measured</dt><dd>{}</dd></dl>", Escaped(e.question),
                      Escaped(e.bound), Escaped(e.found));
  if (!e.bars.empty()) html += Bars(e.bars);
  return html + "</section>";
}

constexpr const char* kStyle = R"(
body{font:15px/1.5 system-ui,sans-serif;color:#1a202c;max-width:800px;margin:2em auto;padding:0 1em}
h1{font-size:1.6em}h2{margin-top:2.2em;border-bottom:1px solid #cbd5e0}
table{border-collapse:collapse;margin:1em 0;font-size:13px}td,th{border:1px solid #cbd5e0;padding:3px 8px;text-align:left;
vertical-align:top;overflow-wrap:anywhere}
td.n{text-align:right;white-space:nowrap}th{background:#edf2f7}svg{max-width:100%;height:auto}
svg text{font:12px system-ui,sans-serif;fill:#2d3748}
.grid{stroke:#e2e8f0}.legend span{margin-right:1.2em}.legend i{display:inline-block;width:10px;height:10px;margin-right:5px}
.pass,.fail{color:#fff;border-radius:3px;padding:2px 8px;font-size:.8em}.pass{background:#2f855a}.fail{background:#c53030}
.experiment{border:1px solid #cbd5e0;border-radius:6px;padding:0 1em 1em;margin:1em 0}dt{font-weight:600}dd{margin:0 0 .4em 0}
)";

}  // namespace

std::string ReportHtml(const ReportInput& input) {
  static const std::map<std::string, std::function<std::string(const Json&)>> kSections = {
      {"lab quality", Quality}, {"lab error", Error},     {"lab answers", Answers},
      {"lab choice", Choice},   {"lab latency", Latency}, {"lab capacity", Capacity},
      {"lab sweep", Sweep},     {"lab stats", Stats},     {"lab growth", Growth},
      {"curve", Curve}};
  const auto passed =
      std::count_if(input.experiments.begin(), input.experiments.end(), [](const auto& e) { return e.pass; });
  std::string html =
      "<!doctype html><html lang='en'><head><meta charset='utf-8'><title>kvcell lab report: " + Escaped(input.title) +
      "</title><style>" + kStyle + "</style></head><body>";
  html += fmt::format("<h1>kvcell lab report: {}</h1><p>{}</p>", Escaped(input.title), Escaped(input.machine));
  html +=
      "<p>A language model remembers what it has read in a cache of keys (K) and values (V), 16 bits each. kvcell "
      "keeps that "
      "cache in fewer bits and on disk; this report shows what that saves and what it costs, measured on this "
      "machine.</p>";
  html += fmt::format("<h2>Four experiments: {} of {} passed</h2>", passed, input.experiments.size());
  for (size_t i = 0; i < input.experiments.size(); ++i) html += ExperimentHtml(input.experiments[i], i + 1);
  for (const Json& m : input.measurements) {
    const auto section = kSections.find(TextAt(m, "command"));
    if (section != kSections.end()) html += section->second(m);
  }
  return html + "</body></html>\n";
}

// The resource curve that `kvcell run --curve` writes: a line of names, then one line of numbers for each moment.
static Result<nlohmann::json> ReadCurve(std::ifstream& file, const std::string& path, const std::string& names) {
  const auto split = [](const std::string& line) {
    std::vector<std::string> fields(1);
    for (const char c : line) {
      if (c == ',') {
        fields.emplace_back();
      } else if (c != '\r') {
        fields.back() += c;
      }
    }
    return fields;
  };
  const auto columns = split(names);
  Json rows = Json::array();
  std::string line;
  for (int number = 2; std::getline(file, line); ++number) {
    if (line.empty()) continue;
    const auto fields = split(line);
    Json row = Json::object();
    for (size_t i = 0; i < fields.size() && i < columns.size(); ++i) {
      char* end = nullptr;
      row[columns[i]] = std::strtod(fields[i].c_str(), &end);
      if (end == fields[i].c_str() || *end != '\0') row.erase(columns[i]);
    }
    if (fields.size() != columns.size() || row.size() != columns.size()) {
      return Fail(StatusCode::kCorruption,
                  fmt::format("{}:{}: a line of the resource curve has {} numbers", path, number, columns.size()));
    }
    rows.push_back(std::move(row));
  }
  return Json{{"command", "curve"}, {"source", path}, {"rows", std::move(rows)}};
}

Result<nlohmann::json> ReadMeasurement(const std::string& path) {
  std::ifstream file(path);
  if (!file) return Fail(StatusCode::kNotFound, fmt::format("can't read {}", path));
  if (std::string first; std::getline(file, first) && first.starts_with("seconds,")) {
    return ReadCurve(file, path, first);
  }
  file.clear();
  file.seekg(0);
  Json measurement = Json::parse(file, nullptr, /*allow_exceptions=*/false);
  if (!measurement.is_object() || !TextAt(measurement, "command").starts_with("lab ")) {
    return Fail(StatusCode::kCorruption,
                fmt::format("{} is neither what a `kvcell lab` command printed with --json (it has no \"command\") nor "
                            "what `kvcell run --curve` wrote",
                            path));
  }
  return measurement;
}

}  // namespace kvcell
