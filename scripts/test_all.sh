#!/usr/bin/env bash
# Everything that can be checked on one machine, part by part; a part that fails does not stop the others.
#
# test_all.sh [PART...], parts: release parity asan tsan crash fuzz lint (all of them when none is named). The fast suite of the
# release build is `make test`; here all tests run, the slow ones too.
source "$(dirname "$0")/lib.sh"
cd "$ROOT" || exit 1

parts=("$@")
[ ${#parts[@]} -gt 0 ] || parts=(lint fuzz crash tsan asan release)
FUZZ_SECONDS=${KVCELL_FUZZ_SECONDS:-20}
CRASH_CYCLES=${KVCELL_CRASH_CYCLES:-10000}
JOBS=$(nproc)

scripts/setup.sh all
scripts/llama.sh
scripts/model.sh >/dev/null

part_release() { scripts/build.sh release && ctest --preset release-all -j "$JOBS"; }
# Logits of the demo model beside libllama's, on the file as shipped and in f32.
part_parity() { scripts/build.sh release && ctest --preset release-all -R RealModel --verbose; }
part_asan() { scripts/build.sh asan && ctest --preset asan -j "$JOBS"; }
part_tsan() { scripts/build.sh tsan && ctest --preset tsan -j "$JOBS"; }
part_crash() {
  # Not by ctest: its time limit is for tests of a few seconds.
  scripts/build.sh release && KVCELL_CRASH_CYCLES=$CRASH_CYCLES build/release/src/store/store_test --gtest_filter='*Crash*'
}
part_fuzz() {
  local source name corpus status=0 names=()
  for source in fuzz/*_fuzz.cc; do names+=("$(basename "$source" .cc)"); done
  scripts/build.sh fuzz "${names[@]}" || return 1
  for name in "${names[@]}"; do
    corpus="build/fuzz/corpus/$name"
    mkdir -p "$corpus"
    local seeds=("$corpus")
    [ -d "fuzz/corpus/${name%_fuzz}" ] && seeds+=("fuzz/corpus/${name%_fuzz}")
    say "fuzz: $name, $FUZZ_SECONDS s"
    "build/fuzz/fuzz/$name" -max_total_time="$FUZZ_SECONDS" -print_final_stats=1 -artifact_prefix=build/fuzz/ "${seeds[@]}" \
      >"$LOGS/$name.log" 2>&1 || { tail -n 30 "$LOGS/$name.log" >&2; status=1; }
    grep -E '^stat::number_of_executed_units' "$LOGS/$name.log" >&2 || true
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
