#!/usr/bin/env bash
# Measures what a user sees on this machine, by codec: KV bytes, speed and memory over a document of 4,000 words, then resuming.
# Writes build/bench/*.json and prints a table; scripts/readme_table.py puts the figures into the README.
source "$(dirname "$0")/lib.sh"

KVCELL="$BUILD/release/kvcell"
MODEL=$("$ROOT/scripts/model.sh")
BENCH="$BUILD/bench"
rm -rf "$BENCH"
mkdir -p "$BENCH"
"$ROOT/scripts/document.sh" >"$BENCH/document.txt"

for codec in f16 i8 i4; do
  say "codec $codec ..."
  "$KVCELL" run -m "$MODEL" --raw -f "$BENCH/document.txt" -n 64 --codec "$codec" --store "$BENCH/store" --session "$codec" \
    --json >"$BENCH/$codec.json"
  "$KVCELL" run -m "$MODEL" -n 16 --codec "$codec" --store "$BENCH/store" --session "$codec" --json >"$BENCH/$codec-resumed.json"
done
python3 "$ROOT/scripts/readme_table.py" --print "$BENCH"
