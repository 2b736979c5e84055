#!/usr/bin/env bash
# The cell life cycle under every profile, checked with spin: no lost PERSISTED cell, no read of an unverified one, no
# stuck RECOVERING. Then the same with a mistake put in, which spin must find.
#
# spin.sh KVCELL: the program whose rule tables are checked.
source "$(dirname "$0")/lib.sh"
KVCELL=$(realpath "${1:-$ROOT/build/release/kvcell}")
command -v spin >/dev/null || die "spin is not there; scripts/setup.sh all installs it"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work" || exit 1

# check MODEL [MACRO...]: true where spin finds nothing wrong.
check() {
  spin -a "$1" >spin.log 2>&1 || { cat spin.log >&2; die "spin can't read $1"; }
  cc -O1 -w -o pan pan.c || die "the verifier of $1 does not compile"
  ./pan -a -f -m1000000 >pan.log 2>&1 || true
  grep -q 'error: max search depth' pan.log && die "$1: the search was not deep enough"
  grep -q 'errors: 0' pan.log
}

for profile in quality balanced elastic long-context edge server; do
  "$KVCELL" rules promela "$profile" >"$profile.pml"
  check "$profile.pml" || { cat pan.log >&2; die "profile $profile: spin found an error"; }
  say "  $profile: $(grep -Eo '[0-9]+ states, stored' pan.log | tail -n 1), no errors"
done

# Mistakes, each of which one property is there to catch.
broken() {
  sed "$2" balanced.pml >"$1.pml"
  cmp -s balanced.pml "$1.pml" && die "the mistake $1 changes nothing"
  check "$1.pml" && die "spin does not find the mistake $1"
  say "  with $1: found"
}
broken lost_cell 's/&& held\[me\] -> forget(); state\[me\] = PERSISTED/-> forget(); state[me] = PERSISTED/'
broken unverified_read 's/verified\[me\] = (verified\[me\] || !damaged)/skip/'
broken stuck 's/state\[me\] == RECOVERING -> \(if\|forget\)/false -> \1/; s/crashes < 2/false/'
