#!/usr/bin/env python3
"""Checks docs/field_cases.md: every test that it names is there, and every case of the list (where it is at hand) has a row."""

import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
CASES = ROOT.parent / "shared" / "cases.md"


def tests_in_tree():
    names = set()
    for folder in ("src", "tests"):
        for path in (ROOT / folder).rglob("*_test.cc"):
            for suite, name in re.findall(r"TEST(?:_F|_P)?\(\s*(\w+)\s*,\s*(\w+)\s*\)", path.read_text(encoding="utf-8")):
                names.add(f"{suite}.{name}")
    for path in (ROOT / "tests/cli").glob("*_test.py"):
        suite = ""
        for line in path.read_text(encoding="utf-8").splitlines():
            if match := re.match(r"class (\w+)\(", line):
                suite = match.group(1)
            elif match := re.match(r"    def (test_\w+)\(", line):
                names.add(f"cli:{suite}.{match.group(1)}")
    return names


def rows_of(path):
    return dict(re.findall(r"^\| ([A-H]\d+) \|(.*)\|$", path.read_text(encoding="utf-8"), re.M))


def main():
    there = tests_in_tree()
    rows = rows_of(ROOT / "docs/field_cases.md")
    errors = []
    for case, row in rows.items():
        for name in re.findall(r"`([\w:]+\.\w+)`", row):
            if name not in there:
                errors.append(f"{case}: there is no test {name}")
    if CASES.is_file():
        errors += [f"{case}: has no row" for case in rows_of(CASES) if case not in rows]
    for error in errors:
        print(f"docs/field_cases.md: {error}", file=sys.stderr)
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
