#!/usr/bin/env bash
# Everything that can be checked on one machine, part by part; a part that fails does not stop the others.
#
# test_all.sh [PART...], parts: release parity asan tsan crash property fuzz lint neon oldcpu spin (all of them when none is
# named). The fast suite of the release build is `make test`; here all tests run, the slow ones too.
source "$(dirname "$0")/lib.sh"
cd "$ROOT" || exit 1

parts=("$@")
[ ${#parts[@]} -gt 0 ] || parts=(lint fuzz crash property neon oldcpu tsan asan release spin)
FUZZ_SECONDS=${KVCELL_FUZZ_SECONDS:-20}
PROPERTY_CASES=${KVCELL_PROPERTY_CASES:-100000}
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
# Random operations on the cache, also in a build in which all addresses collide.
part_property() {
  scripts/build.sh release sharing_test sharing_collide_test || return 1
  local program status=0
  for program in sharing_test sharing_collide_test; do
    KVCELL_PROPERTY_CASES=$PROPERTY_CASES "build/release/tests/sharing/$program" || status=1
  done
  return $status
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
    "build/fuzz/fuzz/$name" -max_total_time="$FUZZ_SECONDS" -timeout=20 -print_final_stats=1 -artifact_prefix=build/fuzz/ "${seeds[@]}" \
      >"$LOGS/$name.log" 2>&1 || { tail -n 30 "$LOGS/$name.log" >&2; status=1; }
    grep -E '^stat::number_of_executed_units' "$LOGS/$name.log" >&2 || true
  done
  return $status
}
# The cell life cycle as the rule tables have it, model-checked.
part_spin() { scripts/build.sh release kvcell_program && scripts/spin.sh build/release/kvcell; }
part_lint() { scripts/lint.sh; }
# The layers that hold machine code, cross-compiled for 64-bit ARM and run by an emulator of it.
part_neon() {
  cmake -S cmake/neon -B build/neon -G Ninja >"$LOGS/neon-configure.log" || { tail -n 30 "$LOGS/neon-configure.log" >&2; return 1; }
  with_progress "build for ARM" ninja -C build/neon || return 1
  ctest --test-dir build/neon --output-on-failure -j "$JOBS" || return 1
  # Not skipped: the NEON kernels are what this part is for.
  say "neon: $(qemu-aarch64 -L /usr/aarch64-linux-gnu build/neon/attention_test --gtest_filter='*/neon' --gtest_brief=1 | tail -n 1)"
}
# The release build's kernels and caches on emulated CPUs without AVX-512, and without AVX at all: an instruction that leaked out of
# its kernels would end them with an illegal instruction. What such a CPU lacks is skipped by name.
part_oldcpu() {
  local cpu name status=0 found
  scripts/build.sh release attention_test codec_test cell_test cache_test || return 1
  for cpu in Haswell Nehalem; do
    for name in attention codec cell cache; do
      # Processes that the tests start would run on the real CPU; the emulator's signals are no match for those that fork.
      # A7 is of subnormals, which a CPU keeps in f16 whatever the flags for f32 say and the emulator flushes.
      qemu-x86_64 -cpu "$cpu" "build/release/src/$name/${name}_test" --gtest_brief=1 \
        --gtest_filter='-*Slow*:*Death*:FieldCases.A7TinyValues*' \
        >"$LOGS/oldcpu-$cpu-$name.log" 2>&1 || { tail -n 30 "$LOGS/oldcpu-$cpu-$name.log" >&2; status=1; }
      found=$(grep -aoE "instruction set '[a-z0-9]+' is not available" "$LOGS/oldcpu-$cpu-$name.log" | sort | uniq -c | tr -s ' ' | paste -sd ';')
      say "  $cpu $name: $(grep -aE 'PASSED|tests ran' "$LOGS/oldcpu-$cpu-$name.log" | tail -n 1)${found:+ skipped:$found}"
    done
  done
  return $status
}

failed=()
for part in "${parts[@]}"; do
  say "== $part"
  "part_$part" || failed+=("$part")
done
if [ ${#failed[@]} -gt 0 ]; then
  die "failed: ${failed[*]}"
fi
say "All parts passed: ${parts[*]}"
