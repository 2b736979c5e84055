#!/usr/bin/env bash
# Everything that can be checked on one machine, part by part; a part that fails does not stop the others.
#
# test_all.sh [PART...], parts: release asan tsan crash fuzz lint (all of them when none is named). The fast suite of the
# release build is `make test`; here all tests run, the slow ones too.
source "$(dirname "$0")/lib.sh"
cd "$ROOT"

parts=("$@")
[ ${#parts[@]} -gt 0 ] || parts=(lint fuzz crash tsan asan release)
FUZZ_SECONDS=${KVCELL_FUZZ_SECONDS:-20}
CRASH_CYCLES=${KVCELL_CRASH_CYCLES:-2000}
JOBS=$(nproc)

scripts/setup.sh all
scripts/llama.sh
scripts/model.sh >/dev/null

part_release() { scripts/build.sh release && ctest --preset release-all -j "$JOBS"; }
part_asan() { scripts/build.sh asan && ctest --preset asan -j "$JOBS"; }
part_tsan() { scripts/build.sh tsan && ctest --preset tsan -j "$JOBS"; }
part_crash() {
  scripts/build.sh release && KVCELL_CRASH_CYCLES=$CRASH_CYCLES ctest --preset release-all -R '[Cc]rash'
}
part_fuzz() {
  local target corpus status=0
  scripts/build.sh fuzz || return 1
  for target in build/fuzz/fuzz/*_fuzz; do
    [ -x "$target" ] || { say "no fuzz targets were built"; return 1; }
    corpus="build/fuzz/corpus/$(basename "$target")"
    mkdir -p "$corpus"
    say "fuzz: $(basename "$target"), $FUZZ_SECONDS s"
    "$target" -max_total_time="$FUZZ_SECONDS" -print_final_stats=1 -verbosity=0 \
      -artifact_prefix="build/fuzz/" "$corpus" $(ls -d "fuzz/corpus/$(basename "$target")" 2>/dev/null) || status=1
  done
  return $status
}
part_lint() { scripts/lint.sh; }

failed=()
for part in "${parts[@]}"; do
  say "== $part"
  "part_$part" || failed+=("$part")
done
if [ ${#failed[@]} -gt 0 ]; then
  die "failed: ${failed[*]}"
fi
say "All parts passed: ${parts[*]}"
