#!/usr/bin/env python3
"""Makes the table of measured results: prints it, or writes it into README.md between its two marks.

readme_table.py [--print] [FOLDER]: FOLDER holds what `make bench` wrote (build/bench).
"""

import argparse
import json
import pathlib
import platform
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
BEGIN = "<!-- measured: written by scripts/readme_table.py from what `make bench` left in build/bench -->"
END = "<!-- measured: end -->"


def mib(n):
    return f"{n / 2**20:,.1f} MiB"


def cpu():
    names = re.findall(r"^model name\s*:\s*(.+)$", pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.M)
    return f"{names[0] if names else platform.machine()}, {len(names)} threads"


def rows(folder):
    for codec in ("f16", "i8", "i4"):
        ran = json.loads((folder / f"{codec}.json").read_text(encoding="utf-8"))
        resumed = json.loads((folder / f"{codec}-resumed.json").read_text(encoding="utf-8"))
        yield ran, resumed


def table(folder):
    everything = list(rows(folder))
    first = everything[0][0]
    lines = [
        f"SmolLM2-135M, {first['prompt_tokens']:,} tokens of prompt, {first['generated_tokens']} generated; {cpu()}, "
        f"kernels: {first['isa']}.",
        "",
        "| codec | bits per element | KV bytes | of f16 | prefill tokens/s | decode tokens/s | first token, computed | first token, "
        "resumed | peak memory |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for ran, resumed in everything:
        kv = ran["kv"]
        lines.append(
            f"| {ran['codec']} | {kv['bits_per_element']:.2f} | {mib(kv['bytes'])} | {kv['bytes'] / kv['f16_bytes']:.3f} "
            f"| {ran['prefill_tokens_per_s']:,.0f} | {ran['decode_tokens_per_s']:,.1f} | {ran['ttft_ms']:,.0f} ms "
            f"| {resumed['ttft_ms']:,.0f} ms | {mib(ran['peak_rss_bytes'])} |"
        )
    return lines


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--print", action="store_true", help="print the table instead of writing it into README.md")
    parser.add_argument("folder", nargs="?", type=pathlib.Path, default=ROOT / "build" / "bench")
    arguments = parser.parse_args()
    try:
        lines = table(arguments.folder)
    except FileNotFoundError as error:
        print(f"{error.filename} is not there; run `make bench` first", file=sys.stderr)
        return 1
    if arguments.print:
        print("\n".join(lines))
        return 0
    readme = ROOT / "README.md"
    text = readme.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN, 1)
    after = rest.split(END, 1)[1]
    readme.write_text(before + BEGIN + "\n" + "\n".join(lines) + "\n" + END + after, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
