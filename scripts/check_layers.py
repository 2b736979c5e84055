#!/usr/bin/env python3
"""Checks that every #include of the tree points down the layers; --self-test shows that a bad one is caught.

Folders of src/ are layers. The table names what each may include besides itself; public headers (include/kvcell) may be
included by everyone and include nothing of src/. Examples are embedders: they see the public headers only.
"""

import argparse
import pathlib
import re
import sys
import tempfile

EMBEDDED = {"base", "store", "codec", "attention", "cell"}
ALLOWED = {
    "base": set(),
    "store": {"base"},
    "codec": {"base"},
    "attention": {"base", "codec"},
    "cell": {"base", "store", "codec", "attention"},
    "cache": EMBEDDED,
    "model": {"base"},  # and the cache, through its public header alone
    "lab": EMBEDDED | {"cache", "model"},
    "cli": EMBEDDED | {"cache", "model", "lab"},
}
INCLUDE = re.compile(r'^\s*#\s*include\s*["<]([^">]+)[">]')
SOURCES = {".h", ".cc", ".cpp", ".inc"}


def files_in(folder):
    return sorted(p for p in folder.rglob("*") if p.suffix in SOURCES) if folder.is_dir() else []


def includes_of(path):
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        match = INCLUDE.match(line)
        if match:
            yield number, match.group(1)


def layer_of_include(name, path, root):
    """The layer that `name` belongs to, or None for a public, system or library header."""
    first = name.split("/", 1)[0]
    if "/" in name and first in ALLOWED:
        return first
    try:  # a path relative to the including file
        target = (path.parent / name).resolve().relative_to(root / "src")
    except ValueError:
        return None
    return target.parts[0] if (root / "src" / target).is_file() else None


def check(root):
    root = root.resolve()
    errors = []
    src = root / "src"
    for path in files_in(src):
        relative = path.relative_to(src)
        layer = relative.parts[0]
        if layer not in ALLOWED:
            errors.append(f"{path}:1: src/{layer} is no known layer; name it in scripts/check_layers.py")
            continue
        for number, name in includes_of(path):
            target = layer_of_include(name, path, root)
            if target is None or target == layer:
                continue
            if target not in ALLOWED[layer]:
                allowed = ", ".join(sorted(ALLOWED[layer])) or "nothing"
                errors.append(f"{path}:{number}: {layer} may not include {name}: it may use {allowed}")
    for folder in ("include", "examples"):
        for path in files_in(root / folder):
            for number, name in includes_of(path):
                if layer_of_include(name, path, root) is not None or name.startswith("src/"):
                    errors.append(f"{path}:{number}: {folder}/ may include public headers only, not {name}")
    return errors


def self_test():
    def errors_for(files):
        with tempfile.TemporaryDirectory() as folder:
            root = pathlib.Path(folder)
            for name, text in files.items():
                target = root / name
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_text(text, encoding="utf-8")
            return check(root)

    codec = {"src/codec/a.h": "#pragma once\n"}
    bad = {
        "store sees codec": {**codec, "src/store/s.cc": '#include "codec/a.h"\n'},
        "codec sees attention": {"src/codec/c.cc": '#include "attention/b.h"\n'},
        "a path around the rule": {**codec, "src/store/s.cc": '#  include "../codec/a.h"\n'},
        "model sees the cache's inside": {"src/model/m.cc": "#include <cache/block_table.h>\n"},
        "a public header sees src": {**codec, "include/kvcell/x.h": '#include "codec/a.h"\n'},
        "an example sees src": {**codec, "examples/x.cc": '#include "../src/codec/a.h"\n'},
        "an unknown layer": {"src/other/o.cc": "\n"},
    }
    good = {
        **codec,
        "include/kvcell/cache.h": "#include <vector>\n",
        "src/attention/a.cc": '#include "codec/a.h"\n#include "kvcell/cache.h"\n#include <string>\n',
        "src/cli/main.cc": '#include "model/m.h"\n#include "options.h"\n',
        "src/cli/options.h": "",
    }
    failures = [f"not caught: {name}" for name, files in bad.items() if len(errors_for(files)) != 1]
    failures += [f"wrongly refused: {error}" for error in errors_for(good)]
    return failures


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--self-test", action="store_true", help="check the checker on small made trees")
    parser.add_argument("root", nargs="?", type=pathlib.Path, default=pathlib.Path(__file__).parent.parent)
    arguments = parser.parse_args()
    errors = self_test() if arguments.self_test else check(arguments.root)
    for error in errors:
        print(error, file=sys.stderr)
    if not errors:
        print("layers: ok")
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
