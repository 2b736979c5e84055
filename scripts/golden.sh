#!/usr/bin/env bash
# Writes the fixtures of the format version that this tree writes: golden.sh VERSION. Once for each version; what is there
# is never written over, since it is what that version's programs left on people's disks.
source "$(dirname "$0")/lib.sh"
cd "$ROOT" || exit 1

[ $# -eq 1 ] || die "usage: golden.sh VERSION"
target="src/store/testdata/$1"
[ -e "$target" ] && die "$target is there already: fixtures are written once"
program="build/release/src/store/store_test"
[ -x "$program" ] || die "build first: scripts/build.sh release"
mkdir -p "$target"
KVCELL_WRITE_GOLDEN="$PWD/$target" "$program" --gtest_also_run_disabled_tests --gtest_filter='Golden.DISABLED_Write' ||
  die "the fixtures could not be written"
say "written: $target"
