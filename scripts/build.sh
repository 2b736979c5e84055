#!/usr/bin/env bash
# Configures a CMake preset and builds targets of it: build.sh PRESET [TARGET...] (all targets when none is named).
source "$(dirname "$0")/lib.sh"

preset=$1
shift
targets=()
[ $# -gt 0 ] && targets=(--target "$@")

# Lets ccache find what another clone compiled.
export CCACHE_BASEDIR="$ROOT" CCACHE_NOHASHDIR=1

cd "$ROOT" || exit 1
with_progress "configure $preset" \
  cmake --preset "$preset" "-DKVCELL_LLAMA_PREFIX=${KVCELL_LLAMA_PREFIX:-$DEPS/llama}"
with_progress "build $preset" cmake --build --preset "$preset" "${targets[@]}"
