// The one parser of options: every command takes its options from the same table, so that a name means the same
// everywhere.
//
// A value comes from the command line, else the environment (KVCELL_RAM_BUDGET for --ram-budget), else the YAML file of
// --config, else the default; where it came from is kept for `kvcell config show` and for error messages.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "kvcell/cache.h"
#include "kvcell/status.h"

namespace CLI {
class App;
class Option;
}  // namespace CLI

namespace kvcell::cli {

// Values in force. The table in options.cc says what each does, its default and its limits.
struct Options {
  std::string model;
  std::optional<std::string> prompt;
  std::optional<std::string> file;
  int64_t max_tokens = 256;
  double temp = 0.0;
  int32_t top_k = 40;
  double top_p = 0.95;
  double min_p = 0.05;
  uint32_t seed = 0;
  bool raw = false;
  bool ignore_eos = false;
  int64_t save_every = 256;  // tokens; 0: at the end only
  int64_t ctx = 0;           // 0: what the model was trained for
  int32_t threads = 0;
  std::string codec = "i4";
  std::string rules;         // file; "": none
  std::string profile;       // name; "": balanced
  std::string metrics;       // file that counters are written to in Prometheus' text form
  std::string trace;         // file for the trace of transitions
  std::string curve;         // file for the resource curve
  double curve_every = 1.0;  // seconds
  int64_t pid = 0;           // of another running process; 0: the only one
  int32_t sinks = 4;
  int32_t recent_blocks = 0;
  uint64_t ram_budget = 0;
  std::string store;  // "" where neither an option nor the home directory tells
  uint8_t durability = 1;
  bool durability_given = false;  // else a session goes on with its own
  FileReads file_reads = FileReads::kMapped;
  uint64_t disk_cap = 0;
  int64_t ttl_seconds = 0;
  std::string name_space;
  std::string key_file;
  std::string key_command;
  uint64_t scrub_rate = uint64_t{1} << 20;
  std::string session;
  int32_t samples = 0;  // 0: one answer, reported as such
  bool no_prefix = false;
  bool json = false;
  bool quiet = false;
  std::string report;
  // plan
  std::vector<int64_t> contexts;
  std::vector<int64_t> batches;
  std::vector<std::string> codecs;
  int32_t layers = 0;
  int32_t heads = 0;
  int32_t kv_heads = 0;
  int32_t head_dim = 0;
  int64_t every = 8;  // lab stream
  // inspect: which cells; -1 and "": all
  int32_t only_layer = -1;
  int32_t only_head = -1;
  std::string only_state;
  int64_t from_token = 0;
  int64_t to_token = INT64_MAX;
  // lab
  int64_t windows = 16;
  bool peer = false;
  bool weights_f32 = false;
  std::string state;
  std::vector<std::string> rules_files;
  // bench
  std::vector<int64_t> tokens;
  std::vector<int64_t> queries;
  std::vector<int64_t> depths;
  int32_t group = 0;
  int32_t rounds = 0;  // 0: the benchmark's own
  std::vector<std::string> types;
  std::string phase;
  std::string folder;
  // lab: what is written, read, asked
  std::string output;
  std::string from;
  std::vector<std::string> measurements;
  int64_t questions = 0;           // 0: the command's own number
  std::vector<int64_t> calibrate;  // prompt, every, over
  bool channels = false;
  bool by_layer = false;
  double kld_limit = 0.01;
  double bits_limit = 0;
  std::vector<std::string> given;  // names of the options that were set anywhere
  bool Given(std::string_view name) const;
};

// Which of the sampler's options somebody set: a session goes on with what it was stored with for the others.
struct SamplerGiven {
  bool temp = false, top_k = false, top_p = false, min_p = false, seed = false;
};

struct OptionSpec {
  std::string_view name;       // "ram-budget"
  std::string_view flags;      // "--ram-budget", "-n,--max-tokens"
  std::string_view type = {};  // "SIZE"; "" for a switch
  std::string_view shown_default = {};
  std::string_view help;  // what it is, its unit, and what raising or lowering it costs
  bool many = false;      // takes several values
  bool setting = true;    // worth a place in a configuration file; `config show` prints it
  // What the environment and configuration files call it, where that is another option's name.
  std::string_view setting_name = {};
  Status (*set)(const std::string& text, Options* options) = nullptr;
};

std::span<const OptionSpec> OptionTable();

// A value in force and where it came from: "default", "environment KVCELL_CTX", "kvcell.yaml:3", "command line".
struct OptionOrigin {
  std::string name;
  std::string value;
  std::string source;
};

class OptionParser {
 public:
  // Offers the named options of the table, and --config, on `command`.
  void Offer(CLI::App* command, std::initializer_list<std::string_view> names);
  // Offers all options that `config show` prints.
  void OfferSettings(CLI::App* command);

  // Finds the values that `command` was given, once CLI11 has read the command line. kInvalidArgument names option and
  // source.
  Result<Options> Resolve(const CLI::App* command);
  // After Resolve: of every option that the command takes.
  const std::vector<OptionOrigin>& origins() const { return origins_; }
  // True when the option was set anywhere, not left at its default.
  bool IsSet(std::string_view name) const;

 private:
  struct Offered {
    const CLI::App* command = nullptr;
    const OptionSpec* spec = nullptr;  // null for --config
    CLI::Option* option = nullptr;
    std::vector<std::string> values;
    bool flag = false;
  };

  void OfferOne(CLI::App* command, const OptionSpec& spec);
  void OfferConfig(CLI::App* command);

  std::vector<std::unique_ptr<Offered>> offered_;
  std::vector<OptionOrigin> origins_;
};

// The options as cache options, geometry and identity left empty. What was asked for on the command line (sinks, recent
// blocks, budget) wins over the rules; a codec beside rules is a contradiction.
Result<CacheOptions> ToCacheOptions(const Options& options);
// The rules of --rules or --profile with what else was asked for; null where neither is given.
Result<std::shared_ptr<const Rules>> RulesFrom(const Options& options);
// A rules file's text; a profile's where there is no such file but a profile of that name.
Result<std::string> RuleText(const std::string& path);

// Where sessions live without --store: $XDG_DATA_HOME/kvcell, else ~/.local/share/kvcell; "" where neither is known.
std::string DefaultStore();
// kInvalidArgument where there is no store to use.
Status CheckStoreKnown(const Options& options);
// Where digests of model files are remembered: $XDG_CACHE_HOME/kvcell, else ~/.cache/kvcell; "" where neither is known.
std::string DefaultDigestFolder();

// The name of an option's environment variable.
std::string EnvironmentName(std::string_view option);

}  // namespace kvcell::cli
