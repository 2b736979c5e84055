#!/usr/bin/env python3
"""Prints what `kvcell bench` measured as one table and holds its ratios against the stored ones.

bench_report.py [--update] FOLDER PART...: FOLDER holds attention.json and model.json of scripts/bench.sh. A ratio (speed to the
peer's, share of the read bandwidth) says little about the machine, so ratios are what bench/baseline.json keeps, by instruction set.
"""

import argparse
import json
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
BASELINE = ROOT / "bench" / "baseline.json"
ALLOWED_FALL = 0.15


def shape_of(row):
    queries = f", {row['queries']} queries" if row["queries"] > 1 else ""
    cells = ", cells in a mapped file" if row["cells"] != "RAM" else ""
    return f"{row['phase']} {row['tokens']} tokens, {row['kv_heads']} x {row['group']} heads, {row['head_dim']}{queries}{cells}"


def attention(result):
    """Yields (shape, type, figures, ratios) of our rows."""
    for row in result["rows"]:
        if row["engine"] != "kvcell":
            continue
        ratios = {"x ggml f16": row["x_ggml_f16"], "x ggml same width": row["x_ggml_same"]}
        if row["phase"] == "decode":
            ratios["of bandwidth"] = row["of_bandwidth"]
        yield shape_of(row), row["type"], f"{row['ms']:.3f} ms", ratios
    gains = {row["name"]: row["gain"] for row in result["scaling"]}
    loop = gains.pop("fma loop", None)
    for name, gain in gains.items():
        yield "all threads, of a multiply-add loop's gain", name, f"{gain:.2f}", {"of the loop": gain / loop}


def model(result):
    for row in result["rows"]:
        if row["engine"] == "kvcell":
            yield (f"model {row['phase']} at depth {row['depth']}", row["kv_type"], f"{row['tokens_per_s']:.1f} tokens/s",
                   {"x libllama f16": row["x_libllama_f16"]})


def complaints(result):
    """What must hold on any machine: cells of fewer bits are no slower than our own f16 in prefill, and in long decode."""
    f16 = {shape_of(row): row["ms"] for row in result["rows"] if row["engine"] == "kvcell" and row["type"] == "f16"}
    for row in result["rows"]:
        shape = shape_of(row)
        if row["engine"] != "kvcell" or row["type"] == "f16" or shape not in f16:
            continue
        long = row["tokens"] >= 8192
        if (row["phase"] == "prefill" or long) and row["ms"] > 1.1 * f16[shape]:
            yield f"{shape}: {row['type']} takes {row['ms']:.2f} ms, our f16 {f16[shape]:.2f} ms"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--update", action="store_true", help="store the measured ratios as the new baseline")
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("parts", nargs="*")
    arguments = parser.parse_args()
    rows, found, isa = [], [], None
    if "attention" in arguments.parts:
        result = json.loads((arguments.folder / "attention.json").read_text(encoding="utf-8"))
        isa = next(row["isa"] for row in result["rows"] if row["engine"] == "kvcell")
        rows += attention(result)
        found += complaints(result)
        print(f"Read bandwidth {result['read_bandwidth_gb_s']:.1f} GB/s, kernels {isa}; coding a block takes "
              f"{100 * result['seal_share']:.2f} % of the decode steps that filled it.")
    if "model" in arguments.parts:
        rows += model(json.loads((arguments.folder / "model.json").read_text(encoding="utf-8")))
    if not rows:
        return 0
    baseline = json.loads(BASELINE.read_text(encoding="utf-8")) if BASELINE.exists() else {}
    stored = baseline.setdefault(isa or next(iter(baseline), "unknown"), {})
    print("\n| what | type | measured | ratios |\n|---|---|---|---|")
    for shape, kind, figure, ratios in rows:
        print(f"| {shape} | {kind} | {figure} | {', '.join(f'{name} {value:.2f}' for name, value in ratios.items())} |")
        for name, value in ratios.items():
            key = f"{shape}; {kind}; {name}"
            if key in stored and value < (1 - ALLOWED_FALL) * stored[key]:
                found.append(f"{key}: {value:.2f}, was {stored[key]:.2f}")
            if arguments.update:
                stored[key] = round(value, 3)
    if arguments.update:
        BASELINE.parent.mkdir(exist_ok=True)
        BASELINE.write_text(json.dumps(baseline, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        print(f"\nStored in {BASELINE.relative_to(ROOT)}.")
        return 0
    if not stored:
        print("\nNo ratios are stored for these kernels; scripts/bench.sh --update stores them.")
    for complaint in found:
        print(f"slower: {complaint}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
