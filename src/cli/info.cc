// kvcell info and kvcell config show: what this build, this machine, a model file and the settings in force are.
#include <fmt/format.h>
#include <ggml.h>
#include <llama.h>
#include <sqlite3.h>
#include <xxhash.h>

#include <CLI/Version.hpp>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "attention/attention.h"
#include "cli/commands.h"
#include "cli/output.h"
#include "cli/units.h"
#include "kvcell/codec.h"
#include "model/model.h"

namespace kvcell::cli {
namespace {

std::vector<std::pair<std::string, std::string>> Libraries() {
  const unsigned xxhash = XXH_versionNumber();
  return {{"llama.cpp", llama_version()},
          {"ggml", ggml_version()},
          {"sqlite", sqlite3_libversion()},
          {"xxhash", fmt::format("{}.{}.{}", xxhash / 10000, xxhash / 100 % 100, xxhash % 100)},
          {"fmt", fmt::format("{}.{}.{}", FMT_VERSION / 10000, FMT_VERSION / 100 % 100, FMT_VERSION % 100)},
          {"yaml-cpp", KVCELL_YAML_CPP_VERSION},
          {"nlohmann-json", fmt::format("{}.{}.{}", NLOHMANN_JSON_VERSION_MAJOR, NLOHMANN_JSON_VERSION_MINOR,
                                        NLOHMANN_JSON_VERSION_PATCH)},
          {"CLI11", CLI11_VERSION}};
}

Json ModelJson(const ModelFacts& facts) {
  const LayerGeometry& layer = facts.geometry.front();
  return {{"path", facts.path},
          {"name", facts.name},
          {"architecture", facts.architecture},
          {"license", facts.license},
          {"source", facts.source},
          {"parameters", facts.n_parameters},
          {"layers", facts.n_layers},
          {"heads", layer.n_heads},
          {"kv_heads", layer.n_kv_heads},
          {"head_dim_k", layer.head_dim_k},
          {"head_dim_v", layer.head_dim_v},
          {"vocabulary", facts.n_vocab},
          {"context", facts.context_train},
          {"weight_types", facts.weight_types},
          {"file_bytes", facts.file_bytes},
          {"weights_bytes", facts.weights_bytes}};
}

void AddModelRows(const ModelFacts& facts, Table* table) {
  const LayerGeometry& layer = facts.geometry.front();
  const auto stated = [](const std::string& text) {
    return text.empty() ? std::string("the file does not say") : text;
  };
  table->Add({"model", facts.name});
  table->Add({"license", stated(facts.license)});
  table->Add({"source", stated(facts.source)});
  table->Add({"architecture", facts.architecture});
  table->Add({"parameters", FormatCount(static_cast<int64_t>(facts.n_parameters))});
  table->Add({"layers", fmt::format("{}, {} query heads on {} KV heads, head_dim {}", facts.n_layers, layer.n_heads,
                                    layer.n_kv_heads, layer.head_dim_k)});
  table->Add({"context", FormatCount(facts.context_train)});
  table->Add({"weights", fmt::format("{} ({})", FormatSize(facts.weights_bytes), facts.weight_types)});
}

struct CodecRow {
  std::string name;
  bool in_place = true;
  std::string spec;
  std::string idea;
  std::vector<std::pair<int, double>> bits;  // by head_dim
};

Status AddRow(const std::string& name, const std::string& text, const std::string& idea, std::vector<CodecRow>* rows) {
  const Result<CodecSpec> spec = ParseCodec(text);
  if (!spec) return spec.error();
  CodecRow row{.name = name, .in_place = AttendedInPlace(*spec), .spec = text, .idea = idea, .bits = {}};
  for (const int head_dim : {64, 128, 256}) {
    const Result<double> bits = CodecBitsPerElement(*spec, head_dim, head_dim);
    if (!bits) return bits.error();
    row.bits.emplace_back(head_dim, *bits);
  }
  rows->push_back(std::move(row));
  return OkStatus();
}

// Presets first, then single codecs by their plain names with an example each.
Result<std::vector<CodecRow>> CodecRows() {
  std::vector<CodecRow> rows;
  for (const CodecPreset& preset : CodecPresets()) {
    KVCELL_FAIL_IF_ERROR(AddRow(preset.name, CodecText(preset.spec), preset.idea, &rows));
  }
  for (const CodecFamily& family : CodecFamilies()) {
    if (family.name == "f16") continue;  // a preset too
    const std::string idea = family.parts.empty() ? family.idea : fmt::format("{} ({})", family.idea, family.parts);
    KVCELL_FAIL_IF_ERROR(AddRow(family.name, family.example, idea, &rows));
  }
  return rows;
}

Json CodecsJson(const std::vector<CodecRow>& rows) {
  Json list = Json::array();
  for (const CodecRow& row : rows) {
    Json bits = Json::object();
    for (const auto& [head_dim, value] : row.bits) bits[std::to_string(head_dim)] = value;
    list.push_back({{"name", row.name},
                    {"spec", row.spec},
                    {"bits_by_head_dim", bits},
                    {"in_place", row.in_place},
                    {"idea", row.idea}});
  }
  return list;
}

void PrintCodecs(const std::vector<CodecRow>& rows) {
  Table table({"CODEC", "BITS AT HEAD_DIM 64", "128", "256", "ATTENDED", "SPEC", "IDEA"});
  table.AlignRight({1, 2, 3});
  for (const CodecRow& row : rows) {
    std::vector<std::string> cells = {row.name};
    for (const auto& bits : row.bits) cells.push_back(fmt::format("{:.3f}", bits.second));
    cells.push_back(row.in_place ? "in place" : "decoded");
    cells.push_back(row.spec);
    cells.push_back(row.idea);
    table.Add(std::move(cells));
  }
  table.Print(stdout);
  if (IsTerminal(stdout)) {
    Print(
        stdout,
        "\nOr K and V apart: k=int4:g64:lloyd:rot:off,v=int8:g64, and behind it ,early-v=... for V of the first "
        "quarter of the layers.\n"
        "Bits count every byte of a sealed cell. What is decoded (sixteen tokens at a time) is for study: slower than "
        "what is attended in place.\n"
        "`run` and `chat` take `--codec auto` too: for each layer the smallest codec that the model bears, measured "
        "once (`kvcell tune`).\n");
  }
}

}  // namespace

int InfoCommand(const Options& options, bool codecs) {
  if (const Status status = CheckForcedIsa(); !status.ok()) return Failed(status);
  Result<ModelFacts> facts = ModelFacts{};
  if (!options.model.empty()) {
    facts = Model::ReadFacts(options.model);
    if (!facts) return Failed(facts.error());
  }
  const Result<std::vector<CodecRow>> rows = CodecRows();
  if (!rows) return Failed(rows.error());

  if (options.json) {
    Json libraries = Json::object();
    for (const auto& [name, version] : Libraries()) libraries[name] = version;
    Json report = {{"version", KVCELL_VERSION},
                   {"isa_found", AttentionIsasFound()},
                   {"isa_used", AttentionIsa()},
                   {"libraries", libraries}};
    if (!options.model.empty()) report["model"] = ModelJson(*facts);
    if (codecs) report["codecs"] = CodecsJson(*rows);
    PrintJson(report);
    return 0;
  }
  if (codecs) {
    PrintCodecs(*rows);
    return 0;
  }
  Table table({"", ""});
  table.Add({"kvcell", KVCELL_VERSION});
  table.Add({"instruction sets found", fmt::format("{}", fmt::join(AttentionIsasFound(), " "))});
  table.Add({"in use", std::string(AttentionIsa())});
  for (const auto& [name, version] : Libraries()) table.Add({name, version});
  if (!options.model.empty()) AddModelRows(*facts, &table);
  table.Print(stdout);
  return 0;
}

int ConfigShowCommand(const Options& options, std::span<const OptionOrigin> origins) {
  if (options.json) {
    Json list = Json::array();
    for (const OptionOrigin& origin : origins) {
      list.push_back({{"name", origin.name}, {"value", origin.value}, {"source", origin.source}});
    }
    PrintJson({{"options", list}});
    return 0;
  }
  Table table({"OPTION", "VALUE", "FROM"});
  for (const OptionOrigin& origin : origins) table.Add({origin.name, origin.value, origin.source});
  table.Print(stdout);
  return 0;
}

}  // namespace kvcell::cli
