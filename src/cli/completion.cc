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
  local current=${COMP_WORDS[COMP_CWORD]} previous=${COMP_WORDS[COMP_CWORD - 1]} path='' word words='' i
  COMPREPLY=()
  for word in "${COMP_WORDS[@]:1:COMP_CWORD-1}"; do
    case "$word" in
      -*) break ;;
      *) path="${path:+$path }$word" ;;
    esac
  done
  case "$previous" in
    --session)
      # Names come from whoever wrote the store: they are data here, never expanded, and quoted for the command line.
      local -a names store=()
      for ((i = 1; i + 1 < COMP_CWORD; ++i)); do
        [ "${COMP_WORDS[i]}" = --store ] && store=(--store "${COMP_WORDS[i + 1]}")
      done
      mapfile -t names < <(kvcell sessions ls "${store[@]}" 2>/dev/null | cut -f1)
      for word in "${names[@]}"; do
        [ "${word:0:${#current}}" = "$current" ] && COMPREPLY+=("$(printf '%q' "$word")")
      done
      return ;;
    --codec) COMPREPLY=($(compgen -W 'f16 i8 i5 i4 i43 i3' -- "$current")); return ;;
    --durability) COMPREPLY=($(compgen -W 'none process power' -- "$current")); return ;;
    --file-reads) COMPREPLY=($(compgen -W 'mapped streamed' -- "$current")); return ;;
    --store) compopt -o dirnames; return ;;
    --profile) COMPREPLY=($(compgen -W 'quality balanced elastic long-context edge server' -- "$current")); return ;;
    -m|--model|-f|--file|--config|--report|--state|--rules|--metrics|--trace|--curve) return ;;  # a file's name: readline's own completion
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
