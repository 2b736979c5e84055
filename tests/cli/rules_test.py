#!/usr/bin/env python3
"""Rules on the command line: files checked, drawn and replayed; a model under them; a running process seen and steered."""

import json
import os
import signal
import subprocess
import time
import unittest
from pathlib import Path

from cli_test import KVCELL, MODEL, TEXT, CliTest

ISSUE_FILE = """state_transition_rules:
  - {event: TOKEN_APPEND, from_state: "none", to_state: "ACTIVE"}
  - {event: MEMORY_PRESSURE, from_state: "ACTIVE", to_state: "QUANTIZED"}
  - {event: CACHE_MISS, from_state: "QUANTIZED", to_state: "RECOVERING"}
  - {event: WRITE_BACK, from_state: "RECOVERING", to_state: "ACTIVE"}
  - {event: EVICT, from_state: "QUANTIZED", to_state: "EVICTED"}
"""
PROFILES = ["quality", "balanced", "elastic", "long-context", "edge", "server"]


class RulesTest(CliTest):
    def write(self, text, name="rules.yaml"):
        path = self.home / name
        path.write_text(text)
        return str(path)

    def background(self, *args):
        """A run that goes on until it is ended; its socket lies in a runtime directory of this test."""
        runtime = self.home / "runtime"
        runtime.mkdir(exist_ok=True)
        os.chmod(runtime, 0o700)
        self.env["XDG_RUNTIME_DIR"] = str(runtime)
        process = subprocess.Popen([KVCELL, "run", "-m", MODEL, "--raw", "-p", TEXT, "-n", "100000", "--ctx", "100000",
                                    "--quiet", *map(str, args)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                                   env=self.env, text=True)
        self.addCleanup(process.stderr.close)
        self.addCleanup(process.wait)
        self.addCleanup(process.kill)
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            done = self.call("top", "--pid", process.pid, "--json")
            if done.returncode == 0 and json.loads(done.stdout)["tokens"] > 100:
                return process
            self.assertIsNone(process.poll(), "it ended before it could be seen")
            time.sleep(0.2)
        self.fail("the process does not answer")


class Files(RulesTest):
    def test_check_names_line_and_what_is_allowed(self):
        path = self.write("codec: i4\nrules:\n  - {event: EVICT, from: ACTIVE, to: QUANTIZED}\n")
        done = self.call("rules", "check", path, "--json")
        self.assertEqual(done.returncode, 1)
        report = json.loads(done.stdout)
        self.assertFalse(report["ok"])
        self.assertEqual(report["errors"][0]["line"], 3)
        self.assertIn("what it can do is", report["errors"][0]["message"])

    def test_the_documented_long_form_is_sound_with_warnings(self):
        report = self.json("rules", "check", self.write(ISSUE_FILE))
        self.assertTrue(report["ok"])
        self.assertTrue(report["depends_on_memory"])
        self.assertTrue(any("PERSISTED" in w["message"] for w in report["warnings"]))
        self.assertTrue(any("depend on memory" in w["message"] for w in report["warnings"]))

    def test_profiles_are_shown_checked_and_drawn(self):
        for profile in PROFILES:
            self.assertTrue(self.json("rules", "check", profile)["ok"], profile)
            self.assertIn(f"name: {profile}", self.call("rules", "show", profile).stdout)
            self.assertIn("stateDiagram-v2", self.call("rules", "graph", profile).stdout)
            self.assertIn("proctype owner", self.call("rules", "promela", profile).stdout)
        self.assertIn("digraph", self.call("rules", "graph", "edge", "--dot").stdout)

    def test_simulate_replays_a_trace(self):
        trace = self.write("append 2048\nstep 70\nsave  # nothing is in the store before\npersist\ntrim 1024\n", "trace")
        rows = self.json("rules", "simulate", "balanced", "-f", trace, "--ram-budget", "8MiB")["rows"]
        self.assertEqual([row["line"] for row in rows], [1, 2, 3, 4, 5])
        self.assertEqual(rows[1]["tokens"], 2118)
        self.assertEqual(rows[3]["cells"]["PERSISTED"], 33 * 8)
        self.assertLess(rows[3]["ram_bytes"], rows[2]["ram_bytes"])
        self.assertEqual(rows[4]["tokens"], 1024)
        bad = self.write("append many\n", "bad")
        self.refused("rules", "simulate", "balanced", "-f", bad, code=2, words=["line 1"])

    def test_contradicting_options_are_refused(self):
        path = self.write(ISSUE_FILE)
        self.refused("run", "-m", MODEL, "-p", "x", "--rules", path, "--codec", "i8", code=2, words=["--codec", "--rules"])
        self.refused("run", "-m", MODEL, "-p", "x", "--rules", path, "--profile", "edge", code=2, words=["--profile"])
        self.refused("run", "-m", MODEL, "-p", "x", "--profile", "fast", code=2, words=["elastic"])


class Runs(RulesTest):
    def test_empty_files_and_second_documents_are_told(self):
        path = self.home / "rules.yaml"
        for text, word in (("", "empty"), ("codec: i4\n---\nbogus: 1\n", ":2: a second document"), (",codec: i4\n", ":1: a second document")):
            path.write_text(text)
            self.refused("run", "-m", MODEL, "-p", "x", "--rules", path, code=2, words=["rules.yaml", word])
        self.refused("run", "-m", MODEL, "-p", "x", "--rules", self.home, code=1, words=["directory"])
        self.refused("run", "-m", MODEL, "-p", "x", "-n", 1, "--store", self.store, "--curve", "/dev/full", code=1,
                     words=["/dev/full", "space"])

    def test_a_stream_too_short_to_score_is_refused(self):
        text = self.home / "t.txt"
        text.write_text("A few words. " * 40)
        self.refused("lab", "stream", "-m", MODEL, "-f", text, "--profile", "edge", "--context", 1000, code=2, words=["window", "2624"])

    def test_windows_for_all_layers_leave_the_context_open(self):
        little = ["run", "-m", MODEL, "-p", "x", "--ram-budget", "1KiB", "--store", self.store]
        self.refused(*little, code=2, words=["8,192 tokens"])
        self.refused(*little, "--profile", "edge", code=2, words=["1,048,576 tokens"])
        self.refused(*little, "--profile", "edge", "--ctx", 500, code=2, words=["500 tokens"])

    def test_the_documented_long_form_runs_a_model(self):
        report = self.run_json("-p", TEXT, "--raw", "-n", 8, "--rules", self.write(ISSUE_FILE))
        self.assertEqual(report["generated_tokens"], 8)
        self.assertGreater(report["kv"]["cells"]["ACTIVE"], 0)
        self.assertEqual(report["kv"]["cells"]["QUANTIZED"], 0)

    def test_balanced_is_the_default(self):
        plain = self.run_json("-p", TEXT, "--raw", "-n", 8)
        balanced = self.run_json("-p", TEXT, "--raw", "-n", 8, "--profile", "balanced")
        self.assertEqual(plain["tokens"], balanced["tokens"])
        self.assertEqual(plain["kv"], balanced["kv"])

    def test_codecs_by_layer_show_in_inspect(self):
        rules = self.write("codec: i4\ncodecs:\n  - {layers: 0-1, codec: i8}\n  - {layers: 5, heads: 2, codec: f16}\n")
        self.run_json("-p", TEXT, "--raw", "-n", 2, "--rules", rules, "--session", "s")
        for cell in self.json("inspect", "--store", self.store, "--session", "s")["cells"]:
            if cell["state"] == "ACTIVE":
                continue
            expected = "int8" if cell["layer"] < 2 else "f16" if (cell["layer"], cell["head"]) == (5, 2) else "int4"
            self.assertEqual(cell["k_precision"], expected)
        self.assertEqual(self.json("store", "verify", "--store", self.store)["damaged"], [])

    def test_metrics_trace_and_curve_are_written(self):
        metrics, trace, curve = (str(self.home / name) for name in ("m", "t", "c"))
        self.run_json("-p", TEXT, "--raw", "-n", 4, "--metrics", metrics, "--trace", trace, "--curve", curve,
                      "--curve-every", "0.05")
        self.assertIn('kvcell_cells{state="QUANTIZED"}', Path(metrics).read_text())
        events = json.loads(Path(trace).read_text())["traceEvents"]
        self.assertTrue(any(e["name"] == "TOKEN_APPEND" and e["args"].get("to") == "QUANTIZED" for e in events))
        lines = Path(curve).read_text().splitlines()
        self.assertIn("kv_quantized", lines[0])
        self.assertGreater(len(lines), 2)
        self.assertEqual({len(line.split(",")) for line in lines}, {len(lines[0].split(","))})


class Steering(RulesTest):
    def test_another_process_sees_and_steers(self):
        process = self.background("--store", self.store, "--session", "s")
        socket = self.home / "runtime" / "kvcell" / f"{process.pid}.sock"
        self.assertEqual(os.stat(socket).st_mode & 0o777, 0o600)
        self.assertEqual(os.stat(socket.parent).st_mode & 0o777, 0o700)
        self.assertIn("tokens/s", self.call("top", "--once").stdout)
        self.assertEqual(self.call("ctl", "pin").returncode, 0)
        self.refused("ctl", "persist", code=2, words=["pinned", "unpin"])
        found = self.json("doctor", "--pid", process.pid)["findings"]
        self.assertIn("invisible", [f["trouble"] for f in found], "nothing has been saved yet")
        self.assertEqual(self.call("ctl", "unpin").returncode, 0)
        self.assertEqual(self.call("ctl", "persist").returncode, 0)
        stats = self.json("ctl", "stats")
        self.assertGreater(stats["cells"]["PERSISTED"], 0)
        self.assertEqual(self.call("ctl", "evict", "--end", "64").returncode, 0)
        self.refused("ctl", "evict", "--begin", 64, "--end", 10, code=2, words=["begin < end"])
        cells = self.json("ctl", "cells")["cells"]
        self.assertTrue(all(c["state"] == "EVICTED" for c in cells if c["token_end"] <= 64))
        self.assertIn("kvcell_misses_total", self.call("ctl", "metrics").stdout)
        self.refused("ctl", "fly", code=2, words=["no command"])
        process.send_signal(signal.SIGINT)
        self.assertEqual(process.wait(60), 130)
        self.assertFalse(socket.exists())

    def test_rules_are_read_again_and_a_bad_file_changes_nothing(self):
        path = self.write("codec: i4\nrules:\n  - {event: TOKEN_APPEND, from: ACTIVE, to: QUANTIZED}\n")
        process = self.background("--rules", path)
        self.write("codec: i4\nrules:\n  - {event: MEMORY_PRESSURE, from: ACTIVE, to: QUANTIZED}\n")
        self.assertEqual(self.call("ctl", "reload").returncode, 0)
        deadline = time.monotonic() + 120
        sealed_exactly = []
        while not sealed_exactly and time.monotonic() < deadline:
            time.sleep(0.5)
            sealed_exactly = [c for c in self.json("ctl", "cells")["cells"]
                              if c["state"] == "ACTIVE" and c["token_end"] - c["token_start"] == 64]
        self.assertTrue(sealed_exactly, "blocks sealed since stay exact")
        self.write("codec: i4\nrules:\n  - {event: NEVER, from: ACTIVE, to: QUANTIZED}\n")
        self.refused("ctl", "reload", code=2, words=["rules.yaml:3", "TOKEN_APPEND"])
        process.send_signal(signal.SIGHUP)
        time.sleep(1)
        self.assertIsNone(process.poll(), "a bad file at SIGHUP ends nothing")


class Windows(RulesTest):
    def test_an_endless_answer_takes_constant_memory(self):
        rules = self.write("codec: i4\nrules:\n  - {event: TOKEN_APPEND, from: ACTIVE, to: QUANTIZED}\n"
                           "  - {event: EVICT, from: QUANTIZED, to: EVICTED, when: {age_tokens: \">= 128\"}}\n")
        text = TEXT * 12
        short = self.run_json("-p", text, "--raw", "-n", 2, "--rules", rules)
        long = self.run_json("-p", text * 2, "--raw", "-n", 2, "--rules", rules)
        self.assertGreater(long["kv"]["cells"]["EVICTED"], short["kv"]["cells"]["EVICTED"])
        self.assertEqual(long["kv"]["cells"]["QUANTIZED"], short["kv"]["cells"]["QUANTIZED"])
        self.assertEqual(long["kv"]["ram_bytes"], short["kv"]["ram_bytes"])


class Doctor(RulesTest):
    def test_a_missing_session_is_what_another_process_does_not_see(self):
        self.run_json("-p", TEXT, "--raw", "-n", 2, "--session", "s")
        report = self.json("doctor", "--store", self.store, "--session", "t")
        self.assertEqual([f["trouble"] for f in report["findings"]], ["invisible"])


if __name__ == "__main__":
    unittest.main()
