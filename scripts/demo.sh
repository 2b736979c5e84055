#!/usr/bin/env bash
# The main job, end to end: a document and a question in one process, a second question in another that resumes the session.
source "$(dirname "$0")/lib.sh"

KVCELL="$BUILD/release/kvcell"
MODEL=$("$ROOT/scripts/model.sh")
DEMO="$BUILD/demo"
BUDGET=64MiB
rm -rf "$DEMO"
mkdir -p "$DEMO"
"$ROOT/scripts/document.sh" >"$DEMO/document.txt"
if grep -q '= Du Fu =' "$DEMO/document.txt"; then
  first_question="Using the text above, answer briefly: who was Du Fu?"
  second_question="Which television series did Robert Boulter have a guest role in, in 2000?"
else
  first_question="Using the text above, answer briefly: what is kvcell?"
  second_question="What is a session?"
fi

say ""
say "1. One process reads a document of $(wc -w <"$DEMO/document.txt") words, answers, and stores its session."
say "   KV memory may not pass $BUDGET."
say ""
say "> $first_question"
"$KVCELL" run -m "$MODEL" -f "$DEMO/document.txt" -p "$first_question" -n 80 --ram-budget "$BUDGET" \
  --store "$DEMO/store" --session demo --report "$DEMO/first.json"

say ""
say "2. That process has ended. Another one resumes the session from the store."
say ""
say "> $second_question"
"$KVCELL" run -m "$MODEL" -p "$second_question" -n 80 --ram-budget "$BUDGET" \
  --store "$DEMO/store" --session demo --report "$DEMO/second.json"

say ""
python3 - "$DEMO/first.json" "$DEMO/second.json" <<'PYTHON'
import json
import sys

first, second = (json.load(open(path, encoding="utf-8")) for path in sys.argv[1:3])
print(f"Not computed again: {second['reused_tokens']:,} of {second['reused_tokens'] + second['prompt_tokens']:,} tokens.")
print(f"First token after {second['ttft_ms']:,.0f} ms; computing the document took {first['ttft_ms']:,.0f} ms, "
      f"{first['ttft_ms'] / second['ttft_ms']:,.0f} times as long.")
print(f"KV: {first['kv']['bytes'] / 2**20:.1f} MiB where f16 takes {first['kv']['f16_bytes'] / 2**20:.1f} MiB.")
PYTHON
