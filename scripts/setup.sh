#!/usr/bin/env bash
# Installs the Debian packages that a step needs, only those that are missing: setup.sh build|all.
#
# build: compiler, CMake and libraries, those of the tests too, since one configuration serves both; all: clang for fuzzers
# and lint, shellcheck, and what compiles and runs the kernels for other CPUs.
# Says nothing and needs no rights when everything is there. KVCELL_SKIP_SETUP=1 leaves the machine alone.
source "$(dirname "$0")/lib.sh"

BUILD_PACKAGES=(ca-certificates g++ ccache cmake ninja-build pkg-config binutils python3 python3-pip
  libfmt-dev libexpected-dev nlohmann-json3-dev libsqlite3-dev libxxhash-dev libsodium-dev libcli11-dev libyaml-cpp-dev
  libgtest-dev libgmock-dev librapidcheck-dev)
ALL_PACKAGES=(clang clang-tidy clang-format libclang-rt-14-dev llvm shellcheck
  g++-aarch64-linux-gnu googletest qemu-user spin)

case "${1:-build}" in
  build) packages=("${BUILD_PACKAGES[@]}") ;;
  all) packages=("${BUILD_PACKAGES[@]}" "${ALL_PACKAGES[@]}") ;;
  *) die "usage: setup.sh build|all" ;;
esac

[ -n "${KVCELL_SKIP_SETUP:-}" ] && exit 0
if ! command -v dpkg-query >/dev/null || ! command -v apt-get >/dev/null; then
  say "This is not a Debian system; make sure that what these packages hold is installed: ${packages[*]}"
  exit 0
fi

missing=()
for package in "${packages[@]}"; do
  status=$(dpkg-query -W -f '${db:Status-Abbrev}' "$package" 2>/dev/null || true)
  [ "${status:0:2}" = "ii" ] || missing+=("$package")
done
[ ${#missing[@]} -eq 0 ] && exit 0

as_root=()
if [ "$(id -u)" -ne 0 ]; then
  if command -v sudo >/dev/null && [ -t 0 ]; then
    sudo -v || die "run as root: apt-get install --no-install-recommends ${missing[*]}"
    as_root=(sudo)
  elif command -v sudo >/dev/null && sudo -n true 2>/dev/null; then
    as_root=(sudo -n)
  else
    die "missing packages; run as root: apt-get install --no-install-recommends ${missing[*]}"
  fi
fi

install_missing() {
  "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "${missing[@]}"
}
# Package lists may be absent or too old to fetch from; only then are they renewed.
install_or_update() {
  install_missing || { "${as_root[@]}" apt-get update && install_missing; }
}

say "Installing ${#missing[@]} Debian packages: ${missing[*]}"
with_progress "install packages" install_or_update
