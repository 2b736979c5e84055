#include "cli/completion.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

namespace kvcell::cli {
namespace {

// One `case` line per command: its sub-commands and options.
void AddCases(const CLI::App& app, const std::string& path, std::string* cases) {
  std::string words;
  for (const CLI::App* command : app.get_subcommands([](const CLI::App*) { return true; })) {
    words += command->get_name() + " ";
    AddCases(*command, path.empty() ? command->get_name() : path + " " + command->get_name(), cases);
  }
  for (const CLI::Option* option : app.get_options()) {
    for (const std::string& name : option->get_snames()) words += "-" + name + " ";
    for (const std::string& name : option->get_lnames()) words += "--" + name + " ";
  }
  if (!words.empty()) words.pop_back();
  *cases += fmt::format("    '{}') words='{}' ;;\n", path, words);
}

}  // namespace

std::string BashCompletion(const CLI::App& app) {
  std::string cases;
  AddCases(app, "", &cases);
  return R"bash(# Bash completion of kvcell: source it, or `kvcell completion bash > ~/.local/share/bash-completion/completions/kvcell`.
_kvcell() {
  local current=${COMP_WORDS[COMP_CWORD]} previous=${COMP_WORDS[COMP_CWORD - 1]} path='' word words=''
  for word in "${COMP_WORDS[@]:1:COMP_CWORD-1}"; do
    case "$word" in
      -*) break ;;
      *) path="${path:+$path }$word" ;;
    esac
  done
  case "$previous" in
    --session) COMPREPLY=($(compgen -W "$(kvcell sessions ls 2>/dev/null | cut -f1)" -- "$current")); return ;;
    --codec) COMPREPLY=($(compgen -W 'f16 i8 i4' -- "$current")); return ;;
    --durability) COMPREPLY=($(compgen -W 'none process power' -- "$current")); return ;;
    --store) COMPREPLY=($(compgen -d -- "$current")); return ;;
    -m|--model|-f|--file|--config) COMPREPLY=($(compgen -f -- "$current")); return ;;
  esac
  case "$path" in
)bash" + cases +
         R"bash(  esac
  COMPREPLY=($(compgen -W "$words" -- "$current"))
}
complete -o default -F _kvcell kvcell
)bash";
}

}  // namespace kvcell::cli
