#!/usr/bin/env bash
# Measures speed on this machine and prints tables: attention kernels beside ggml's, the demo model beside libllama, and what a user
# sees of a document of 4,000 words, by codec.
#
# bench.sh [--update] [PART...], parts: attention model document (all of them when none is named). Writes build/bench/*.json.
# Ratios to the peers are held against bench/baseline.json: one that fell by more than 15 % is reported, and the exit code is 1.
# --update stores the measured ratios there instead. scripts/readme_table.py puts the document's figures into the README.
source "$(dirname "$0")/lib.sh"

KVCELL="$BUILD/release/kvcell"
BENCH="$BUILD/bench"
update=()
if [ "${1:-}" = --update ]; then
  update=(--update)
  shift
fi
parts=("$@")
[ ${#parts[@]} -gt 0 ] || parts=(attention model document)
MODEL=$("$ROOT/scripts/model.sh")
mkdir -p "$BENCH"

part_attention() { "$KVCELL" bench attention --json >"$BENCH/attention.json"; }
part_model() { "$KVCELL" bench model -m "$MODEL" --json >"$BENCH/model.json"; }
part_document() {
  rm -rf "$BENCH/store"
  "$ROOT/scripts/document.sh" >"$BENCH/document.txt"
  for codec in f16 i8 i4; do
    say "codec $codec ..."
    "$KVCELL" run -m "$MODEL" --raw -f "$BENCH/document.txt" -n 64 --codec "$codec" --store "$BENCH/store" --session "$codec" \
      --json >"$BENCH/$codec.json"
    "$KVCELL" run -m "$MODEL" -n 16 --codec "$codec" --store "$BENCH/store" --session "$codec" --json >"$BENCH/$codec-resumed.json"
  done
  python3 "$ROOT/scripts/readme_table.py" --print "$BENCH"
}

for part in "${parts[@]}"; do
  say "== $part"
  # Not after || or in a condition: the first command that fails ends the script.
  "part_$part"
done
python3 "$ROOT/scripts/bench_report.py" "${update[@]}" "$BENCH" "${parts[@]}"
