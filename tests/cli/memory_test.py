#!/usr/bin/env python3
"""The RAM budget as seen from outside: what the kernel says is resident, and a run inside a memory cgroup."""

import json
import os
import pathlib
import subprocess
import sys
import time
import unittest

from cli_test import KVCELL, MODEL, TEXT, CliTest

# Beside what the plan counts: SQLite, threads' stacks, what the allocator keeps.
MARGIN = 12 << 20
PROMPT = TEXT * 20  # about 1,500 tokens: several times the budget in f16
CONTEXT = 2048


class Memory(CliTest):
    def setUp(self):
        super().setUp()
        row = self.json("plan", "-m", MODEL, "--context", CONTEXT, "--codec", "i4")["rows"][0]
        self.budget = row["minimum_ram_budget"]
        beside = row["total_bytes"] - row["weights_bytes"] - row["cache_ram_bytes"]
        self.allowed = self.budget + beside + MARGIN
        self.prompt = self.home / "prompt.txt"
        self.prompt.write_text(PROMPT, encoding="utf-8")
        self.command = [KVCELL, "run", "-m", MODEL, "--store", self.store, "--raw", "-f", str(self.prompt), "-n", "8",
                        "--ctx", str(CONTEXT), "--ram-budget", str(self.budget), "--json"]

    def check(self, process):
        out, err = process.communicate(timeout=600)
        self.assertEqual(process.returncode, 0, err)
        report = json.loads(out)
        self.assertLessEqual(report["kv"]["ram_peak_bytes"], self.budget)
        self.assertGreater(report["kv"]["f16_bytes"], 3 * self.budget)
        return report

    def test_resident_memory_is_budget_and_work_space(self):
        with subprocess.Popen(self.command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=self.env) as process:
            peak = 0
            while process.poll() is None:
                try:
                    with open(f"/proc/{process.pid}/smaps_rollup", encoding="ascii") as smaps:
                        for line in smaps:
                            if line.startswith("Anonymous:"):
                                peak = max(peak, int(line.split()[1]) << 10)
                except (FileNotFoundError, ProcessLookupError):
                    break  # it has just ended
                time.sleep(0.02)
            self.check(process)
        self.assertGreater(peak, 0)
        self.assertLessEqual(peak, self.allowed, f"budget {self.budget}")

    def test_a_memory_cgroup_of_budget_and_model_is_enough(self):
        group = self.memory_cgroup(self.allowed + os.path.getsize(MODEL))

        def enter():
            (group / "cgroup.procs").write_text("0", encoding="ascii")

        with subprocess.Popen(self.command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=self.env,
                              preexec_fn=enter) as process:
            self.check(process)

    def memory_cgroup(self, limit):
        for root, file in (("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max")):
            group = pathlib.Path(root) / f"kvcell-test-{os.getpid()}"
            try:
                group.mkdir()
                self.addCleanup(group.rmdir)
                (group / file).write_text(str(limit), encoding="ascii")
                return group
            except OSError:
                continue
        self.skipTest("no memory cgroup can be made here (needs root and a writable hierarchy)")
        return None


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], *sys.argv[1:]], verbosity=2)
