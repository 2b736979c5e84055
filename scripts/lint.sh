#!/usr/bin/env bash
# Checks formatting, layers, shell scripts and a short list of clang-tidy checks (.clang-tidy says which and why).
source "$(dirname "$0")/lib.sh"
cd "$ROOT" || exit 1
scripts/setup.sh all

status=0
mapfile -t sources < <(git ls-files '*.cc' '*.h' | grep -v '^build/')
clang-format --dry-run -Werror "${sources[@]}" || { say "run: clang-format -i FILE..."; status=1; }
python3 scripts/check_layers.py || status=1
shellcheck -x -e SC1091 scripts/*.sh .ci/run || status=1
if [ -f build/release/compile_commands.json ]; then
  mapfile -t units < <(git ls-files 'src/*.cc' | grep -v '_test\.cc$')
  printf '%s\n' "${units[@]}" | xargs -P "$(nproc)" -n 4 clang-tidy -p build/release --quiet 2>/dev/null || status=1
fi
exit $status
