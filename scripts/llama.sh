#!/usr/bin/env bash
# Builds ggml and libllama once into build/deps/llama from the source package that PyPI carries.
#
# KVCELL_LLAMA_PREFIX=DIR uses an installed llama.cpp instead, and builds nothing.
# The stamp records version, options and the CPU's features: the libraries are built for this machine, and are built
# again only when one of these changes.
source "$(dirname "$0")/lib.sh"

VERSION=0.3.35 # of llama-cpp-python, which vendors llama.cpp whole
PREFIX="$DEPS/llama"
# OpenMP: its threads sleep when one of them is late; ggml's own spin, and on a busy machine lose most of the time so.
OPTIONS=(
  -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=OFF -DCMAKE_POSITION_INDEPENDENT_CODE=ON
  -DGGML_NATIVE=ON -DGGML_OPENMP=ON -DGGML_CCACHE=ON
  -DLLAMA_BUILD_COMMON=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF
  -DLLAMA_BUILD_TOOLS=OFF -DLLAMA_BUILD_SERVER=OFF -DLLAMA_BUILD_APP=OFF -DLLAMA_BUILD_UI=OFF
)

if [ -n "${KVCELL_LLAMA_PREFIX:-}" ]; then
  [ -d "$KVCELL_LLAMA_PREFIX/lib/cmake/llama" ] ||
    die "KVCELL_LLAMA_PREFIX=$KVCELL_LLAMA_PREFIX holds no lib/cmake/llama; point it at an installed llama.cpp"
  exit 0
fi

cpu=$(grep -m1 -E '^(flags|Features)' /proc/cpuinfo | sha256sum | cut -c1-16)
stamp="$VERSION ${OPTIONS[*]} cpu=$cpu"
[ "$(cat "$PREFIX/.stamp" 2>/dev/null || true)" = "$stamp" ] && exit 0

source_dir="$DEPS/src/llama_cpp_python-$VERSION/vendor/llama.cpp"
archive="$DEPS/src/llama_cpp_python-$VERSION.tar.gz"
if [ ! -f "$source_dir/CMakeLists.txt" ]; then
  [ -f "$archive" ] ||
    with_progress "fetch llama.cpp" fetch_from_pypi "$DEPS/src" --no-binary llama-cpp-python "llama-cpp-python==$VERSION"
  rm -rf "$DEPS/src/unpack" && mkdir -p "$DEPS/src/unpack"
  tar -xzf "$archive" -C "$DEPS/src/unpack"
  rm -rf "$DEPS/src/llama_cpp_python-$VERSION"
  mv "$DEPS/src/unpack/llama_cpp_python-$VERSION" "$DEPS/src/"
fi

if command -v ccache >/dev/null; then
  # The libraries are built for this CPU, so its features are part of what may be found again.
  export CMAKE_C_COMPILER_LAUNCHER=ccache CMAKE_CXX_COMPILER_LAUNCHER=ccache
  export CCACHE_BASEDIR="$DEPS" CCACHE_NOHASHDIR=1 CCACHE_NAMESPACE="kvcell-$cpu"
fi

say "Building ggml and libllama once (about four minutes on two cores) ..."
rm -rf "$PREFIX" "$DEPS/llama-build"
with_progress "configure llama.cpp" \
  cmake -S "$source_dir" -B "$DEPS/llama-build" -G Ninja -DCMAKE_INSTALL_PREFIX="$PREFIX" -DCMAKE_INSTALL_LIBDIR=lib "${OPTIONS[@]}"
with_progress "build llama.cpp" ninja -C "$DEPS/llama-build"
with_progress "install llama.cpp" ninja -C "$DEPS/llama-build" install
rm -rf "$DEPS/llama-build" # only the prefix is needed from here on
printf '%s\n' "$stamp" >"$PREFIX/.stamp"
