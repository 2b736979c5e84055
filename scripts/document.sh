#!/usr/bin/env bash
# Prints the document that demo and bench read, about 6,000 tokens: encyclopedia articles, or the project's own documents where
# those are not there.
source "$(dirname "$0")/lib.sh"

wikitext="$ROOT/../shared/data/wikitext-2/wiki.test.txt"
if [ -f "$wikitext" ]; then
  head -c 26000 "$wikitext" | sed '$d'
else
  # Not `cat ... | head`: cat would end by SIGPIPE, and the script with it.
  head -c 21000 <(cat "$ROOT/README.md" "$ROOT"/docs/*.md) | sed '$d'
fi
