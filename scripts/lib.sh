# shellcheck shell=bash disable=SC2034
# Shell helpers shared by the set-up scripts: where things are, and how a long step shows its progress.
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
BUILD="$ROOT/build"
DEPS="$BUILD/deps"
LOGS="$BUILD/logs"
mkdir -p "$LOGS"
# Paths relative to the checkout, so that a second clone finds what the first one compiled.
export CCACHE_BASEDIR="$ROOT" CCACHE_NOHASHDIR=1

say() { printf '%s\n' "$*" >&2; }
die() { printf 'error: %s\n' "$*" >&2; exit 1; }

# with_progress NAME COMMAND...: runs the command with its output in build/logs/NAME.log. Shows a line with the newest
# "[n/m]" of the log and the elapsed time (redrawn on a terminal, every 30 s elsewhere); on failure shows the log's end.
with_progress() {
  local name=$1 log="$LOGS/$1.log" start=$SECONDS last=0 pid status=0
  shift
  "$@" >"$log" 2>&1 &
  pid=$!
  while kill -0 "$pid" 2>/dev/null; do
    sleep $((SECONDS - start > 3 ? 1 : 0)).2
    local step
    step=$(tr '\r' '\n' <"$log" | grep -aoE '^\[[0-9]+/[0-9]+\]' | tail -n 1 || true)
    if [ -t 2 ]; then
      printf '\r  %s %s %ds ' "$name" "$step" $((SECONDS - start)) >&2
    elif [ $((SECONDS - start)) -ge $((last + 30)) ]; then
      last=$((SECONDS - start))
      say "  $name $step ${last}s"
    fi
  done
  wait "$pid" || status=$?
  [ -t 2 ] && printf '\r\033[K' >&2
  if [ "$status" -ne 0 ]; then
    tail -n 30 "$log" >&2
    die "$name failed; its whole output is in $log"
  fi
  say "  $name: done in $((SECONDS - start)) s"
}

# The python that has pip: the first one in PATH, else Debian's own.
python_with_pip() {
  local candidate
  for candidate in python3 /usr/bin/python3; do
    if "$candidate" -m pip --version >/dev/null 2>&1; then
      printf '%s\n' "$candidate"
      return
    fi
  done
  die "no python3 with pip; run scripts/setup.sh, which installs python3-pip"
}

# fetch_from_pypi DIR PIP_ARG...: downloads a package archive into DIR with pip, without installing it.
fetch_from_pypi() {
  local dir=$1 python
  shift
  python=$(python_with_pip)
  mkdir -p "$dir"
  "$python" -m pip download --progress-bar off --disable-pip-version-check --no-deps --dest "$dir" "$@"
}
