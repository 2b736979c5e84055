#include "cli/app.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
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
    AddLab();
    AddBench();
    AddInfo();
    AddConfig();
    AddCompletion();
  }

  int Run(int argc, const char* const* argv) {
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

  bool SamplerGiven() const {
    for (const char* name : {"temp", "top-k", "top-p", "min-p", "seed"}) {
      if (parser_.IsSet(name)) return true;
    }
    return false;
  }

  void AddRun() {
    CLI::App* command = Command(&app_, "run", "feeds a prompt and prints the answer as it comes",
                                "kvcell run -m model.gguf -f report.txt -p 'What does it conclude?' --session report");
    parser_.Offer(command,
                  {"model",         "prompt",     "file",    "max-tokens", "temp",    "top-k",  "top-p",
                   "min-p",         "seed",       "raw",     "ctx",        "threads", "codec",  "sinks",
                   "recent-blocks", "ram-budget", "store",   "durability", "session", "json",   "report",
                   "quiet",         "rules",      "profile", "metrics",    "trace",   "sample", "sample-every"});
    OnChosen(command, [this](const Options& options) { return RunCommand(options, SamplerGiven()); });
  }

  void AddChat() {
    CLI::App* command = Command(&app_, "chat", "a conversation in the terminal, kept in the store",
                                "kvcell chat -m model.gguf --session ideas");
    parser_.Offer(command, {"model", "session",       "max-tokens", "temp",  "top-k",      "top-p",
                            "min-p", "seed",          "raw",        "ctx",   "threads",    "codec",
                            "sinks", "recent-blocks", "ram-budget", "store", "durability", "quiet",
                            "rules", "profile",       "metrics",    "trace", "sample",     "sample-every"});
    OnChosen(command, [this](const Options& options) { return ChatCommand(options, SamplerGiven()); });
  }

  void AddSessions() {
    CLI::App* group = Group("sessions", "the conversations that a store holds");
    CLI::App* list = Command(group, "ls", "lists them", "kvcell sessions ls --json");
    parser_.Offer(list, {"store", "json"});
    OnChosen(list, SessionsListCommand);

    CLI::App* show = Command(group, "show", "one session: its size, and what a model must be to go on with it",
                             "kvcell sessions show report");
    show->add_option("name", name_, "the session")->required();
    parser_.Offer(show, {"store", "json"});
    OnChosen(show, [this](const Options& options) { return SessionsShowCommand(options, name_); });

    CLI::App* remove = Command(group, "rm", "removes sessions and the cells that no other session uses",
                               "kvcell sessions rm report --erase");
    remove->add_option("names", names_, "the sessions")->required();
    remove->add_flag("--erase", erase_, "overwrites their bytes too; slower");
    parser_.Offer(remove, {"store", "json"});
    OnChosen(remove, [this](const Options& options) { return SessionsRemoveCommand(options, names_, erase_); });

    CLI::App* exported = Command(group, "export", "writes a session as one portable file",
                                 "kvcell sessions export report report.kvcell");
    exported->add_option("name", name_, "the session")->required();
    exported->add_option("file", path_, "the file to write")->required();
    parser_.Offer(exported, {"store", "json"});
    OnChosen(exported, [this](const Options& options) { return SessionsExportCommand(options, name_, path_); });

    CLI::App* imported = Command(group, "import", "reads a session from such a file",
                                 "kvcell sessions import report.kvcell --as report2");
    imported->add_option("file", path_, "the file to read")->required();
    imported->add_option("--as", as_, "name to give it; needed where the store has one of its name already");
    parser_.Offer(imported, {"store", "durability", "json", "quiet"});
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
    parser_.Offer(command, {"store", "session", "layer", "head", "in-state", "from-token", "to-token", "json"});
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
    ctl->add_option(
           "command", name_,
           "pin or unpin (cells stay in RAM), persist (they leave for the store), evict (given up), reload (the "
           "rule file), stats, cells, metrics or trace")
        ->required();
    ctl->add_option("--begin", begin_, "evict: first token, rounded up to a block of 64 [0]");
    ctl->add_option("--end", end_, "evict: token behind the last one, rounded down");
    parser_.Offer(ctl, {"pid", "json", "quiet"});
    OnChosen(ctl, [this](const Options& options) { return CtlCommand(options, name_, begin_, end_); });

    CLI::App* doctor =
        Command(&app_, "doctor", "what is wrong with a running process or a stored session, and what to change",
                "kvcell doctor --session report");
    parser_.Offer(doctor, {"store", "session", "pid", "json"});
    OnChosen(doctor, DoctorCommand);
  }

  void AddStore() {
    CLI::App* group = Group("store", "care of a store");
    CLI::App* stats = Command(group, "stats", "what it holds and takes", "kvcell store stats --json");
    parser_.Offer(stats, {"store", "json"});
    OnChosen(stats, StoreStatsCommand);
    CLI::App* verify =
        Command(group, "verify", "checks every row and cell, changes nothing; exit code 1 when one is damaged",
                "kvcell store verify --store /var/lib/kvcell");
    parser_.Offer(verify, {"store", "json", "quiet"});
    OnChosen(verify, StoreVerifyCommand);
  }

  void AddLab() {
    CLI::App* group = Group("lab", "measures codecs on a model");
    CLI::App* quality =
        Command(group, "quality", "perplexity and KL divergence by codec, against the same model's f16 KV",
                "kvcell lab quality -m model.gguf -f text.txt --context 2048 --codec i8 i4 --weights f32 --peer");
    parser_.Offer(quality, {"model", "file", "context", "windows", "codecs", "sinks", "recent-blocks", "peer",
                            "weights", "threads", "state", "json", "quiet"});
    OnChosen(quality, LabQualityCommand);
    CLI::App* stream =
        Command(group, "stream", "endless text through a window of rules: perplexity beside recomputing each window",
                "kvcell lab stream -m model.gguf -f text.txt --profile edge --context 16384");
    parser_.Offer(stream, {"model", "file", "context", "rules", "profile", "every", "threads", "json", "quiet"});
    OnChosen(stream, LabStreamCommand);
  }

  void AddBench() {
    CLI::App* group = Group("bench", "measures speed");
    CLI::App* overhead = Command(group, "overhead",
                                 "what state machine, paging and accounting add to a decode step, and a sweep under "
                                 "pressure over a million cells",
                                 "kvcell bench overhead -m model.gguf --context 2048");
    parser_.Offer(overhead, {"model", "context", "threads", "json"});
    OnChosen(overhead, BenchOverheadCommand);
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
        fmt::print("{}", BashCompletion(app_));
        return 0;
      };
    });
  }

  CLI::App app_{"kvcell: the KV cache of a language model as persistent state", "kvcell"};
  OptionParser parser_;
  std::function<int()> chosen_ = [] { return 2; };
  std::string name_, path_, as_;
  std::vector<std::string> names_;
  bool erase_ = false;
  bool codecs_ = false;
  bool dot_ = false, once_ = false;
  int64_t begin_ = 0, end_ = 0;
};

}  // namespace

int RunProgram(int argc, const char* const* argv) {
  // Layers below throw nothing; what is caught here comes from a library, such as memory that ran out.
  try {
    return Program().Run(argc, argv);
  } catch (const std::exception& error) {
    return Failed(Status(StatusCode::kInternal, fmt::format("unexpected: {}; please report it", error.what())));
  }
}

}  // namespace kvcell::cli
