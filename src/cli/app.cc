#include "cli/app.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <exception>
#include <functional>
#include <string>
#include <vector>

#include "cli/commands.h"
#include "cli/completion.h"
#include "cli/options.h"
#include "cli/output.h"

namespace kvcell::cli {
namespace {

// The commands and what they parsed. A command's callback only chooses what is run once everything has been read.
class Program {
 public:
  Program() {
    app_.set_version_flag("--version", "kvcell " KVCELL_VERSION);
    app_.require_subcommand(1);
    app_.footer(
        "`kvcell COMMAND --help` shows a command's options with an example. Every option can also be set as\n"
        "KVCELL_NAME in the environment and in a YAML file (`kvcell config show` tells what is in force).");
    AddRun();
    AddChat();
    AddSessions();
    AddPlan();
    AddInspect();
    AddRules();
    AddSteering();
    AddStore();
    AddPrefix();
    AddLab();
    AddBench();
    AddTune();
    AddInfo();
    AddConfig();
    AddCompletion();
  }

  int Run(int argc, const char* const* argv) {
    if (const Status status = CheckCommand(argc, argv); !status.ok()) return Failed(status);
    try {
      app_.parse(argc, argv);
    } catch (const CLI::ParseError& error) {
      if (error.get_exit_code() == 0) return app_.exit(error);  // --help, --version
      return Failed(Status(StatusCode::kInvalidArgument, OneSentence(error.what())));
    }
    return chosen_();
  }

 private:
  using Handler = std::function<int(const Options&)>;

  // CLI11 says of an unknown command only that one is required.
  Status CheckCommand(int argc, const char* const* argv) const {
    const CLI::App* at = &app_;
    for (int i = 1; i < argc && argv[i][0] != '-'; ++i) {
      const auto commands = at->get_subcommands([](const CLI::App*) { return true; });
      if (commands.empty()) break;
      const auto found = std::find_if(commands.begin(), commands.end(),
                                      [&](const CLI::App* command) { return command->get_name() == argv[i]; });
      if (found == commands.end()) {
        std::string names;
        for (const CLI::App* command : commands) names += (names.empty() ? "" : ", ") + command->get_name();
        return Status(StatusCode::kInvalidArgument, fmt::format("'{}' is none of the commands {}", argv[i], names));
      }
      at = *found;
    }
    return OkStatus();
  }

  static std::string OneSentence(std::string message) {
    message = message.substr(0, message.find('\n'));
    while (!message.empty() && (message.back() == '.' || message.back() == ' ')) message.pop_back();
    return message + "; --help shows what is there";
  }

  CLI::App* Command(CLI::App* parent, const char* name, const char* what, const char* example) {
    CLI::App* command = parent->add_subcommand(name, what);
    if (example != nullptr) command->footer(fmt::format("Example:\n  {}", example));
    return command;
  }

  CLI::App* Group(const char* name, const char* what) {
    CLI::App* group = app_.add_subcommand(name, what);
    group->require_subcommand(1);
    return group;
  }

  void OnChosen(CLI::App* command, Handler handler) {
    command->callback([this, command, handler = std::move(handler)] {
      chosen_ = [this, command, handler] {
        const Result<Options> options = parser_.Resolve(command);
        return options ? handler(*options) : Failed(options.error());
      };
    });
  }

  SamplerGiven Given() const {
    return {.temp = parser_.IsSet("temp"),
            .top_k = parser_.IsSet("top-k"),
            .top_p = parser_.IsSet("top-p"),
            .min_p = parser_.IsSet("min-p"),
            .seed = parser_.IsSet("seed")};
  }

  void AddRun() {
    CLI::App* command = Command(&app_, "run", "feeds a prompt and prints the answer as it comes",
                                "kvcell run -m model.gguf -f report.txt -p 'What does it conclude?' --session report");
    parser_.Offer(
        command,
        {"model",      "prompt",  "file",       "max-tokens", "temp",      "top-k",       "top-p",     "min-p",
         "seed",       "raw",     "ignore-eos", "ctx",        "threads",   "codec",       "sinks",     "recent-blocks",
         "ram-budget", "store",   "durability", "disk-cap",   "ttl",       "namespace",   "key-file",  "key-command",
         "scrub-rate", "session", "save-every", "samples",    "no-prefix", "json",        "report",    "quiet",
         "rules",      "profile", "metrics",    "trace",      "curve",     "curve-every", "file-reads"});
    OnChosen(command, [this](const Options& options) { return RunCommand(options, Given()); });
  }

  void AddChat() {
    CLI::App* command = Command(&app_, "chat", "a conversation in the terminal, kept in the store",
                                "kvcell chat -m model.gguf --session ideas");
    parser_.Offer(command,
                  {"model",         "session",     "save-every", "max-tokens",  "temp",      "top-k", "top-p",
                   "min-p",         "seed",        "raw",        "ctx",         "threads",   "codec", "sinks",
                   "recent-blocks", "ram-budget",  "store",      "durability",  "disk-cap",  "ttl",   "namespace",
                   "key-file",      "key-command", "scrub-rate", "no-prefix",   "quiet",     "rules", "profile",
                   "metrics",       "trace",       "curve",      "curve-every", "file-reads"});
    OnChosen(command, [this](const Options& options) { return ChatCommand(options, Given()); });
  }

  void AddSessions() {
    CLI::App* group = Group("sessions", "the conversations that a store holds");
    CLI::App* list = Command(group, "ls", "lists them", "kvcell sessions ls --json");
    parser_.Offer(list, {"store", "namespace", "key-file", "key-command", "json"});
    OnChosen(list, SessionsListCommand);

    CLI::App* show = Command(group, "show", "one session: its size, and what a model must be to go on with it",
                             "kvcell sessions show report");
    show->add_option("name", name_, "the session")->required();
    parser_.Offer(show, {"store", "namespace", "key-file", "key-command", "json"});
    OnChosen(show, [this](const Options& options) { return SessionsShowCommand(options, name_); });

    CLI::App* remove = Command(group, "rm", "removes sessions and the cells that no other session uses",
                               "kvcell sessions rm report --erase");
    remove->add_option("names", names_, "the sessions")->required();
    remove->add_flag("--erase", erase_, "overwrites their bytes too; slower");
    parser_.Offer(remove, {"store", "namespace", "key-file", "key-command", "json"});
    OnChosen(remove, [this](const Options& options) { return SessionsRemoveCommand(options, names_, erase_); });

    CLI::App* exported = Command(group, "export", "writes a session as one portable file",
                                 "kvcell sessions export report report.kvcell");
    exported->add_option("name", name_, "the session")->required();
    exported->add_option("file", path_, "the file to write")->required();
    parser_.Offer(exported, {"store", "namespace", "key-file", "key-command", "json"});
    OnChosen(exported, [this](const Options& options) { return SessionsExportCommand(options, name_, path_); });

    CLI::App* imported = Command(group, "import", "reads a session from such a file",
                                 "kvcell sessions import report.kvcell --as report2");
    imported->add_option("file", path_, "the file to read")->required();
    imported->add_option("--as", as_, "name to give it; needed where the store has one of its name already");
    parser_.Offer(imported,
                  {"store", "durability", "disk-cap", "ttl", "namespace", "key-file", "key-command", "json", "quiet"});
    OnChosen(imported, [this](const Options& options) { return SessionsImportCommand(options, path_, as_); });
  }

  void AddPlan() {
    CLI::App* command = Command(&app_, "plan", "memory by codec, before anything runs",
                                "kvcell plan --layers 32 --kv-heads 8 --head-dim 128 --context 8192 32768 --batch 1 4");
    parser_.Offer(command, {"model", "layers", "heads", "kv-heads", "head-dim", "context", "batch", "codecs", "sinks",
                            "recent-blocks", "threads", "json"});
    OnChosen(command, PlanCommand);
  }

  void AddInspect() {
    CLI::App* command = Command(&app_, "inspect", "the cells of a stored session: state, precision and place of each",
                                "kvcell inspect --session report --json");
    parser_.Offer(command, {"store", "session", "namespace", "key-file", "key-command", "json", "layer", "head",
                            "in-state", "from-token", "to-token"});
    OnChosen(command, InspectCommand);
  }

  void AddRules() {
    CLI::App* group = Group("rules", "rule files: what moves cells between states, and when");
    const auto file = [this](CLI::App* command) {
      command->add_option("file", path_, "the rule file, YAML or JSON, - for standard input; or a profile's name")
          ->required();
    };
    CLI::App* check = Command(group, "check", "finds every mistake in a rule file; exit code 1 when there is one",
                              "kvcell rules check my.yaml --json");
    file(check);
    parser_.Offer(check, {"json"});
    OnChosen(check, [this](const Options& options) { return RulesCheckCommand(options, path_); });

    CLI::App* show = Command(group, "show", "prints a profile's file, to start from", "kvcell rules show balanced");
    show->add_option("profile", name_, "quality, balanced, elastic, long-context, edge or server")->required();
    parser_.Offer(show, {});
    OnChosen(show, [this](const Options& options) { return RulesShowCommand(options, name_); });

    CLI::App* graph = Command(group, "graph", "draws the states and transitions (Mermaid)",
                              "kvcell rules graph edge --dot | dot -Tsvg > edge.svg");
    file(graph);
    graph->add_flag("--dot", dot_, "for Graphviz instead");
    parser_.Offer(graph, {"json"});
    OnChosen(graph, [this](const Options& options) { return RulesGraphCommand(options, path_, dot_); });

    CLI::App* simulate = Command(group, "simulate", "replays a trace of events without a model: states, bytes, misses",
                                 "kvcell rules simulate elastic --ram-budget 4MiB -f trace.txt");
    file(simulate);
    parser_.Offer(simulate, {"file", "layers", "kv-heads", "head-dim", "ram-budget", "json"});
    OnChosen(simulate, [this](const Options& options) { return RulesSimulateCommand(options, path_); });

    CLI::App* promela = Command(group, "promela", "prints the cell life cycle as a model for spin",
                                "kvcell rules promela balanced > cell.pml && spin -a cell.pml");
    file(promela);
    parser_.Offer(promela, {});
    OnChosen(promela, [this](const Options& options) { return RulesPromelaCommand(options, path_); });
  }

  void AddSteering() {
    CLI::App* top = Command(&app_, "top", "a running process: memory by state, misses, transitions, tokens per second",
                            "kvcell top --pid 4711");
    top->add_flag("--once", once_, "prints one view and ends");
    parser_.Offer(top, {"pid", "json"});
    OnChosen(top, [this](const Options& options) { return TopCommand(options, once_); });

    CLI::App* ctl = Command(&app_, "ctl", "steers a running process from outside: it does so between two steps",
                            "kvcell ctl evict --begin 64 --end 4096");
    ctl->add_option("command", name_, "pin, persist, unpin, evict, reload, stats, cells, metrics or trace")->required();
    ctl->add_option("--begin", begin_, "evict: first token, rounded up to a block of 64 [0]");
    ctl->add_option("--end", end_, "evict: token behind the last one, rounded down");
    parser_.Offer(ctl, {"pid", "json", "quiet"});
    OnChosen(ctl, [this](const Options& options) { return CtlCommand(options, name_, begin_, end_); });

    CLI::App* doctor =
        Command(&app_, "doctor", "what is wrong with a running process or a stored session, and what to change",
                "kvcell doctor --session report");
    parser_.Offer(doctor, {"store", "session", "pid", "namespace", "key-file", "key-command", "json"});
    OnChosen(doctor, DoctorCommand);
  }

  void AddStore() {
    CLI::App* group = Group("store", "care of a store");
    CLI::App* stats = Command(group, "stats", "what it holds and takes", "kvcell store stats --json");
    parser_.Offer(stats, {"store", "key-file", "key-command", "json"});
    OnChosen(stats, StoreStatsCommand);
    CLI::App* verify =
        Command(group, "verify", "checks every row and cell, changes nothing; exit code 1 when one is damaged",
                "kvcell store verify --store /var/lib/kvcell");
    parser_.Offer(verify, {"store", "key-file", "key-command", "json", "quiet"});
    OnChosen(verify, StoreVerifyCommand);
    CLI::App* compact = Command(
        group, "compact", "writes segments that have holes anew and gives the space back; programs may go on meanwhile",
        "kvcell store compact --store /var/lib/kvcell");
    parser_.Offer(compact, {"store", "key-file", "key-command", "json", "quiet"});
    OnChosen(compact, StoreCompactCommand);
    CLI::App* remove = Command(group, "rm", "removes a whole store with all its sessions; no program may have it open",
                               "kvcell store rm --store /var/lib/kvcell --erase");
    remove->add_flag("--erase", erase_, "overwrites its files first; slower");
    parser_.Offer(remove, {"store", "json"});
    OnChosen(remove, [this](const Options& options) { return StoreRemoveCommand(options, erase_); });
  }

  void AddPrefix() {
    CLI::App* group = Group("prefix", "beginnings of prompts that later prompts share");
    CLI::App* list = Command(group, "ls", "lists them: where chains of blocks end or part", "kvcell prefix ls --json");
    parser_.Offer(list, {"store", "namespace", "key-file", "key-command", "json"});
    OnChosen(list, PrefixListCommand);
    CLI::App* pin = Command(group, "pin", "keeps a prefix, and all that it begins with, whatever space is needed for",
                            "kvcell prefix pin 124");
    pin->add_option("id", id_, "its number in `kvcell prefix ls`")->required();
    pin->add_flag("--off", off_, "takes the pin out again");
    parser_.Offer(pin, {"store", "namespace", "key-file", "key-command", "json"});
    OnChosen(pin, [this](const Options& options) { return PrefixPinCommand(options, id_, off_); });
    CLI::App* remove =
        Command(group, "rm", "gives up prefixes and what goes on from them; blocks of sessions stay with these",
                "kvcell prefix rm 124");
    remove->add_option("ids", ids_, "their numbers in `kvcell prefix ls`")->required();
    parser_.Offer(remove, {"store", "namespace", "key-file", "key-command", "json"});
    OnChosen(remove, [this](const Options& options) { return PrefixRemoveCommand(options, ids_); });
  }

  void AddLab() {
    CLI::App* group = Group("lab", "measures codecs on a model");
    const auto add = [&](const char* name, const char* what, const char* example,
                         std::initializer_list<std::string_view> options, int (*handler)(const Options&)) {
      CLI::App* command = Command(group, name, what, example);
      parser_.Offer(command, options);
      OnChosen(command, handler);
    };
    add("export", "K and V per layer and head as .npy files, with a manifest",
        "kvcell lab export -m model.gguf -f text.txt --context 1024 -o kv",
        {"model", "lab-text", "lab-tokens", "lab-output", "weights", "threads", "json", "quiet"}, LabExportCommand);
    add("stats", "what K and V look like by layer and head, and which layers should stay finer",
        "kvcell lab stats -m model.gguf -f text.txt",
        {"model", "lab-text", "from", "lab-tokens", "lab-codecs", "sinks", "channels", "weights", "threads", "json",
         "quiet"},
        LabStatsCommand);
    add("error", "what codecs do to K, V and attention's outputs, on exported, live or made values",
        "kvcell lab error --from kv --codec i4 i3 k=nf4,v=nf4 k=tq4,v=tq4",
        {"model", "lab-text", "from", "lab-tokens", "lab-codecs", "calibrate", "sinks", "recent-blocks", "by-layer",
         "layers", "heads", "kv-heads", "head-dim", "weights", "threads", "json", "quiet"},
        LabErrorCommand);
    add("quality", "perplexity and KL divergence by codec, against the same model's f16 KV",
        "kvcell lab quality -m model.gguf -f text.txt --context 2048 --codec i8 i4 --weights f32 --peer",
        {"model", "lab-text", "lab-context", "windows", "lab-codecs", "lab-rules", "sinks", "recent-blocks", "peer",
         "weights", "threads", "state", "json", "quiet"},
        LabQualityCommand);
    add("answers", "a fixed set of questions answered with f16 and with each codec, side by side",
        "kvcell lab answers -m model.gguf --codec i4 i3",
        {"model", "lab-codecs", "questions", "sinks", "recent-blocks", "threads", "state", "json", "quiet"},
        LabAnswersCommand);
    add("choice", "multiple choice made from the text: the true continuation among four",
        "kvcell lab choice -m model.gguf -f text.txt --codec i4 i3 --questions 64",
        {"model", "lab-text", "lab-codecs", "questions", "sinks", "recent-blocks", "threads", "state", "json", "quiet"},
        LabChoiceCommand);
    add("latency", "attention three ways: f16; decoded, then attended; attended in place",
        "kvcell lab latency --heads 32 --kv-heads 8 --head-dim 128 --context 8192",
        {"model", "heads", "kv-heads", "head-dim", "lab-contexts", "lab-codecs", "threads", "json", "quiet"},
        LabLatencyCommand);
    add("capacity", "the longest context and the largest batch that a memory budget holds, by running until it is hit",
        "kvcell lab capacity -m model.gguf --ram-budget 256MiB",
        {"model", "lab-codecs", "ram-budget", "threads", "json", "quiet"}, LabCapacityCommand);
    add("growth",
        "one growing text in f16, coded, and coded with rules and files, under one RAM budget until each fails",
        "kvcell lab growth -m model.gguf -f text.txt --ram-budget 256MiB --disk-cap 1GiB -o /var/tmp/kvcell-growth",
        {"model", "lab-text", "growth-stages", "codec", "rules", "profile", "ram-budget", "disk-cap", "lab-output",
         "threads", "json", "quiet"},
        LabGrowthCommand);
    add("sweep", "error by granularity and exact area, where attention looks, reading from page cache and disk",
        "kvcell lab sweep -m model.gguf -f text.txt -o /tmp/kvcell-sweep",
        {"model", "lab-text", "from", "lab-tokens", "one-codec", "lab-output", "weights", "threads", "json", "quiet"},
        LabSweepCommand);
    add("report", "all of it as one HTML file that opens with four experiments, each passed or failed",
        "kvcell lab report -m model.gguf -o report.html --measurement quality.json error.json",
        {"model", "lab-output", "measurements", "one-codec", "ram-budget", "threads", "json", "quiet"},
        LabReportCommand);
    add("stream", "endless text through a window of rules: perplexity beside recomputing each window",
        "kvcell lab stream -m model.gguf -f text.txt --profile edge --context 16384",
        {"model", "lab-text", "stream-tokens", "rules", "profile", "every", "threads", "json", "quiet"},
        LabStreamCommand);
  }

  void AddBench() {
    CLI::App* group = Group("bench", "measures speed beside peers, alternating in one run");
    CLI::App* attention =
        Command(group, "attention", "attention kernels beside ggml's flash attention and the machine's read bandwidth",
                "kvcell bench attention --tokens 32768 --kv-heads 8 --group 4 --head-dim 128 --threads 2 --types i4");
    parser_.Offer(attention, {"tokens", "queries", "kv-heads", "group", "head-dim", "threads", "types", "phase",
                              "rounds", "json", "quiet"});
    OnChosen(attention, BenchAttentionCommand);
    CLI::App* model =
        Command(group, "model", "a whole model's tokens per second beside libllama's, by depth and KV type",
                "kvcell bench model -m model.gguf --depth 0 8064 --types i4");
    parser_.Offer(model, {"model", "depth", "types", "threads", "rounds", "json", "quiet"});
    OnChosen(model, BenchModelCommand);
    CLI::App* sharing =
        Command(group, "sharing", "sequences with a common past: memory, first tokens, speed; forks, lookup, batches",
                "kvcell bench sharing -m model.gguf --json");
    parser_.Offer(sharing, {"model", "threads", "folder", "json", "quiet"});
    OnChosen(sharing, BenchSharingCommand);
    CLI::App* overhead = Command(group, "overhead",
                                 "what state machine, paging and accounting add to a decode step, and a sweep under "
                                 "pressure over a million cells",
                                 "kvcell bench overhead -m model.gguf --context 2048");
    parser_.Offer(overhead, {"model", "bench-depth", "threads", "json", "quiet"});
    OnChosen(overhead, BenchOverheadCommand);
    CLI::App* store =
        Command(group, "store",
                "saving and resuming a session, beside libllama's state file with --peer; --store names the "
                "disk to be measured",
                "kvcell bench store -m model.gguf --context 8192 --store /var/tmp --peer");
    parser_.Offer(store, {"model", "file", "context", "one-codec", "threads", "peer", "store", "json", "quiet"});
    OnChosen(store, BenchStoreCommand);
  }

  void AddTune() {
    CLI::App* command = Command(
        &app_, "tune", "finds the codec for each layer under a limit of divergence or bits, writes a rules file",
        "kvcell tune -m model.gguf --kld 0.01 -o model.rules.yaml");
    parser_.Offer(command, {"model", "lab-text", "lab-probe", "tune-codecs", "kld", "bits", "weights", "lab-output",
                            "sinks", "threads", "json", "quiet"});
    OnChosen(command, TuneCommand);
  }

  void AddInfo() {
    CLI::App* command = Command(&app_, "info", "version, instruction sets, libraries; facts of a model; codecs",
                                "kvcell info -m model.gguf");
    command->add_flag("--codecs", codecs_, "lists the codecs with their bits per element");
    parser_.Offer(command, {"model", "json"});
    OnChosen(command, [this](const Options& options) { return InfoCommand(options, codecs_); });
  }

  void AddConfig() {
    CLI::App* group = Group("config", "settings");
    CLI::App* show = Command(group, "show", "every setting in force and where it came from",
                             "KVCELL_CODEC=i8 kvcell config show --config kvcell.yaml");
    parser_.OfferSettings(show);
    OnChosen(show, [this](const Options& options) { return ConfigShowCommand(options, parser_.origins()); });
  }

  void AddCompletion() {
    CLI::App* group = Group("completion", "completion of this command line in a shell");
    CLI::App* bash = Command(group, "bash", "prints the script for bash", "source <(kvcell completion bash)");
    bash->callback([this] {
      chosen_ = [this] {
        Print(stdout, "{}", BashCompletion(app_));
        return 0;
      };
    });
  }

  CLI::App app_{"kvcell: the KV cache of a language model as persistent state", "kvcell"};
  OptionParser parser_;
  std::function<int()> chosen_ = [] { return 2; };
  std::string name_, path_, as_;
  std::vector<std::string> names_;
  std::vector<int64_t> ids_;
  int64_t id_ = 0;
  bool off_ = false;
  bool erase_ = false;
  bool codecs_ = false;
  bool dot_ = false, once_ = false;
  int64_t begin_ = 0, end_ = 0;
};

}  // namespace

int RunProgram(int argc, const char* const* argv) {
  // Layers below throw nothing; what is caught here comes from a library, such as memory that ran out.
  try {
    PrepareStandardStreams();
    return FinishOutput(Program().Run(argc, argv));
  } catch (const std::exception& error) {
    return Failed(Status(StatusCode::kInternal, fmt::format("unexpected: {}; please report it", error.what())));
  }
}

}  // namespace kvcell::cli
