#!/usr/bin/env python3
"""Drives the program as a user does. KVCELL names it, KVCELL_TEST_MODEL a small chat model. Arguments: test classes to run."""

import glob
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import unittest

KVCELL = os.environ["KVCELL"]
MODEL = os.environ.get("KVCELL_TEST_MODEL", "")
BLOCK = 64
TEXT = "The old harbour lies at the mouth of the river. Ships bring salt, timber and wool, and leave with grain. " * 3


class CliTest(unittest.TestCase):
    """A fresh home directory and store for every test."""

    def setUp(self):
        self.home = pathlib.Path(tempfile.mkdtemp(prefix="kvcell-cli-"))
        self.addCleanup(shutil.rmtree, self.home, ignore_errors=True)
        self.store = str(self.home / "store")
        self.env = {k: v for k, v in os.environ.items() if not k.startswith(("KVCELL_", "XDG_"))}
        self.env["HOME"] = str(self.home)

    def call(self, *args, stdin=None, env=None):
        return subprocess.run([KVCELL, *map(str, args)], input=stdin, capture_output=True, text=True, timeout=300,
                              env={**self.env, **(env or {})}, check=False)

    def json(self, *args, **kwargs):
        done = self.call(*args, "--json", **kwargs)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(done.stdout.count("\n"), 1, "one object on one line")
        return json.loads(done.stdout)

    def run_json(self, *args, **kwargs):
        return self.json("run", "-m", MODEL, "--store", self.store, *args, **kwargs)

    def prompt_tokens(self, text):
        return self.run_json("--raw", "-p", text, "-n", 0, "--no-prefix")["prompt_tokens"]

    def refused(self, *args, code, words, **kwargs):
        """The call must fail with this exit code and one sentence that holds these words."""
        done = self.call(*args, **kwargs)
        self.assertEqual(done.returncode, code, f"{args}: {done.stderr}")
        lines = done.stderr.strip().splitlines()
        self.assertEqual(len(lines), 1, done.stderr)
        self.assertTrue(lines[0].startswith("kvcell: "), lines[0])
        for word in words:
            self.assertIn(word, lines[0])
        self.assertEqual(done.stdout, "")
        return lines[0]


class Usage(CliTest):
    COMMANDS = ["run", "chat", "sessions ls", "sessions show", "sessions rm", "sessions export", "sessions import", "plan",
                "inspect", "rules check", "rules show", "rules graph", "rules simulate", "rules promela", "top", "ctl", "doctor",
                "store stats", "store verify", "store compact", "store rm", "prefix ls", "prefix pin", "prefix rm",
                "bench attention", "bench model", "bench sharing", "bench store", "bench overhead",
                "lab export", "lab stats", "lab error", "lab quality", "lab answers", "lab choice", "lab latency",
                "lab capacity", "lab growth", "lab sweep", "lab report", "lab stream", "tune", "info", "config show", "completion bash"]

    def test_help_of_every_command_has_an_example(self):
        for command in self.COMMANDS:
            done = self.call(*command.split(), "--help")
            self.assertEqual(done.returncode, 0, command)
            self.assertIn("Example:", done.stdout, command)
            self.assertLess(max(map(len, done.stdout.splitlines())), 122, command)

    def test_help_shows_defaults_and_costs(self):
        text = " ".join(self.call("run", "--help").stdout.split())  # wherever lines end
        for words in ("[i4]", "[256]", "fewer bits take less", "most bytes of KV memory"):
            self.assertIn(words, text)

    def test_wrong_usage_is_exit_code_2_and_one_sentence(self):
        for args in ([], ["fly"], ["run", "--no-such-option"], ["run", "--threads", "many"], ["run", "--threads", "0"],
                     ["run"], ["sessions"], ["sessions", "rm"], ["run", "--ram-budget", "lots"],
                     ["run", "--durability", "forever"], ["run", "--file-reads", "slowly"], ["plan", "--layers", "2"]):
            self.refused(*args, code=2, words=[])

    def test_an_unknown_command_is_named(self):
        self.refused("bogus", code=2, words=["'bogus'", "sessions"])
        self.refused("sessions", "bogus", "--help", code=2, words=["'bogus'", "export"])

    def test_an_option_takes_one_value_and_leaves_the_rest(self):
        self.refused("sessions", "rm", "--store", self.store, "a", "b", code=1, words=["no store"])

    def test_version(self):
        self.assertRegex(self.call("--version").stdout, r"^kvcell \d+\.\d+\.\d+\n$")

    def test_completion_is_bash_and_knows_the_options(self):
        script = self.call("completion", "bash").stdout
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)
        probe = script + "\nCOMP_WORDS=(kvcell run --ram); COMP_CWORD=2; _kvcell; echo ${COMPREPLY[@]}\n"
        done = subprocess.run(["bash"], input=probe, text=True, capture_output=True, check=True)
        self.assertEqual(done.stdout.strip(), "--ram-budget")

    def test_info(self):
        info = self.json("info", "--codecs")
        self.assertIn(info["isa_used"], info["isa_found"])
        self.assertIn("ggml", info["libraries"])
        bits = {row["name"]: row["bits_by_head_dim"]["128"] for row in info["codecs"]}
        self.assertLessEqual(bits["i4"], 4.5)
        self.assertGreaterEqual(bits["f16"], 16)
        self.assertLess(bits["i3"], bits["i43"])
        self.assertLess(bits["i5"], bits["i8"])
        in_place = {row["name"]: row["in_place"] for row in info["codecs"]}
        self.assertTrue(in_place["i4"] and in_place["int5"])
        self.assertFalse(in_place["nf4"] or in_place["tq4"])

    def test_info_of_a_model_states_licence_and_shape(self):
        model = self.json("info", "-m", MODEL)["model"]
        self.assertEqual((model["layers"], model["heads"], model["kv_heads"], model["head_dim_k"]), (30, 9, 3, 64))
        self.assertIn("license", model)

    def test_a_forced_instruction_set_that_is_not_there_is_refused(self):
        self.refused("info", code=1, words=["KVCELL_ISA"], env={"KVCELL_ISA": "z80"})


class Output(CliTest):
    """What can't be printed is not done."""

    def to(self, path, *args):
        with open(path, "wb") as sink:
            return subprocess.run([KVCELL, *map(str, args)], stdout=sink, stderr=subprocess.PIPE, text=True, timeout=300,
                                  env=self.env, check=False)

    def test_a_full_disk_behind_the_output_is_a_failure(self):
        for args in (("info",), ("info", "--json"), ("--help",), ("completion", "bash")):
            done = self.to("/dev/full", *args)
            self.assertEqual(done.returncode, 1, args)
            self.assertIn("standard output", done.stderr)

    def test_a_reader_that_leaves_ends_the_answer_and_the_session_is_kept(self):
        with subprocess.Popen([KVCELL, "run", "-m", MODEL, "--store", self.store, "--session", "s", "-p", "Count to fifty.",
                               "-n", "200", "--quiet"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=self.env) as run:
            run.stdout.read(1)
            run.stdout.close()
            self.assertEqual(run.wait(timeout=300), 128 + signal.SIGPIPE)
        tokens = self.json("sessions", "ls", "--store", self.store)["sessions"][0]["tokens"]
        self.assertGreater(tokens, 0)
        self.assertLess(tokens, 200)

    def test_completion_takes_names_as_they_are(self):
        name = "$(touch ran) it's; `id`"
        self.run_json("-p", "hi", "-n", 1, "--session", name)
        script = f"""
            kvcell() {{ "{KVCELL}" "$@"; }}
            source <(kvcell completion bash)
            COMP_WORDS=(kvcell inspect --store "{self.store}" --session ''); COMP_CWORD=5
            _kvcell
            eval "printf '%s\\n' ${{COMPREPLY[0]}}"
        """
        done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, cwd=self.home, env=self.env, check=True)
        self.assertEqual(done.stdout, name + "\n", done.stderr)
        self.assertFalse((self.home / "ran").exists())


class Config(CliTest):
    def shown(self, *args, **kwargs):
        options = self.json("config", "show", *args, **kwargs)["options"]
        return {o["name"]: (o["value"], o["source"]) for o in options}

    def file(self, text):
        path = self.home / "kvcell.yaml"
        path.write_text(text)
        return path

    def test_command_line_beats_environment_beats_file_beats_default(self):
        path = self.file("codec: i8\nthreads: 3\nram_budget: 1GiB\n")
        shown = self.shown("--config", path, "--codec", "f16", env={"KVCELL_CODEC": "i4", "KVCELL_THREADS": "2"})
        self.assertEqual(shown["codec"], ("f16", "command line"))
        self.assertEqual(shown["threads"], ("2", "environment KVCELL_THREADS"))
        self.assertEqual(shown["ram-budget"], ("1GiB", f"{path}:3"))
        self.assertEqual(shown["sinks"], ("4", "default"))

    def test_the_file_is_found_through_the_environment_and_at_its_usual_place(self):
        path = self.file("codec: i8\n")
        self.assertEqual(self.shown(env={"KVCELL_CONFIG": str(path)})["codec"], ("i8", f"{path}:1"))
        usual = self.home / ".config/kvcell/config.yaml"
        usual.parent.mkdir(parents=True)
        usual.write_text("codec: f16\n")
        self.assertEqual(self.shown()["codec"], ("f16", f"{usual}:1"))

    def test_the_default_store_follows_xdg(self):
        self.assertEqual(self.shown()["store"][0], f"{self.home}/.local/share/kvcell")
        self.assertEqual(self.shown(env={"XDG_DATA_HOME": "/data"})["store"][0], "/data/kvcell")

    def test_mistakes_name_where_they_are(self):
        path = self.file("codec: i8\ncodek: i4\n")
        self.refused("config", "show", "--config", path, code=2, words=[f"{path}:2", "codek"])
        path = self.file("threads: none\n")
        self.refused("config", "show", "--config", path, code=2, words=[f"{path}:1", "threads"])
        path = self.file("codec: i8\n---\nthreads: 2\n")
        self.refused("config", "show", "--config", path, code=2, words=[f"{path}:2", "second document"])
        path = self.file("threads: [1, 2\n")
        self.refused("config", "show", "--config", path, code=2, words=[str(path)])
        self.refused("config", "show", "--config", self.home / "nope", code=1, words=["nope"])
        self.refused("config", "show", "--config", "/dev/zero", code=2, words=["/dev/zero", "larger than"])
        self.refused("config", "show", code=2, words=["KVCELL_SINKS"], env={"KVCELL_SINKS": "65"})

    def test_an_empty_file_sets_nothing_and_a_name_may_stand_once(self):
        file = self.home / "kvcell.yaml"
        file.write_text("", encoding="utf-8")
        self.assertEqual(self.call("config", "show", "--config", file).returncode, 0)
        file.write_text("ram_budget: 1G\nram-budget: 2G\n", encoding="utf-8")
        self.refused("config", "show", "--config", file, code=2, words=["kvcell.yaml:2", "ram-budget", "line 1"])

    def test_without_a_home_a_store_must_be_named(self):
        env = {**self.env}
        del env["HOME"]
        done = subprocess.run([KVCELL, "sessions", "ls"], capture_output=True, text=True, env=env, check=False)
        self.assertEqual(done.returncode, 2)
        self.assertIn("--store", done.stderr)

    def test_codecs_to_compare_come_from_the_environment_too(self):
        rows = self.json("plan", "--layers", 2, "--kv-heads", 2, "--head-dim", 64, "--context", 512, env={"KVCELL_CODEC": "i8"})
        self.assertEqual([row["codec"] for row in rows["rows"]], ["i8"])

    def test_a_setting_from_the_file_is_what_runs(self):
        path = self.file(f"model: {MODEL}\ncodec: i8\nmax-tokens: 2\nraw: true\n")
        report = self.json("run", "-p", "One two", "--config", path)
        self.assertEqual((report["codec"], report["generated_tokens"]), ("i8", 2))


class Plan(CliTest):
    SHAPE = ["--layers", 4, "--kv-heads", 2, "--head-dim", 64]

    def rows(self, *args):
        return self.json("plan", *args)["rows"]

    def test_query_heads_take_no_kv_memory(self):
        plain, grouped = (self.rows(*self.SHAPE, "--heads", h, "--context", 4096, "--codec", "i4")[0] for h in (2, 16))
        self.assertEqual(plain["kv_bytes"], grouped["kv_bytes"])

    def test_every_context_batch_and_codec_has_a_row(self):
        rows = self.rows(*self.SHAPE, "--context", 1024, 4096, "--batch", 1, 2, "--codec", "f16", "k=int8:g64,v=int4:g64")
        self.assertEqual(len(rows), 8)
        self.assertEqual({r["codec"] for r in rows}, {"f16", "k=int8:g64,v=int4:g64"})
        early = "k=int8,v=int4,early-v=int8"
        for codecs in (["k=int8,v=int4", early, "i4"], [f"k=int8,v=int4,{early},i4"]):
            found = self.rows(*self.SHAPE, "--context", 1024, "--codec", *codecs)
            self.assertEqual([r["codec"] for r in found], ["k=int8,v=int4", early, "i4"])
            self.assertLess(found[0]["kv_bytes"], found[1]["kv_bytes"])
        for row in rows:
            self.assertTrue({"context", "batch", "codec", "kv_bytes", "weights_bytes", "working_bytes"} <= row.keys())

    def test_four_bits_take_less_than_0_31_of_f16(self):
        f16, i4 = self.rows("--layers", 32, "--kv-heads", 8, "--head-dim", 128, "--context", 32768, "--codec", "f16", "i4")
        self.assertLess(i4["kv_bytes"], 0.31 * f16["kv_bytes"])

    def test_twice_the_batch_takes_twice_the_cells(self):
        one, two = self.rows(*self.SHAPE, "--context", 262144, "--batch", 1, 2, "--codec", "i4")
        self.assertAlmostEqual(two["kv_bytes"] / one["kv_bytes"], 2.0, delta=0.1)

    def test_the_plan_is_what_is_allocated(self):
        for codec in ("f16", "i4"):
            ran = self.json("run", "-m", MODEL, "--raw", "-p", TEXT * 12, "-n", 1, "--codec", codec)
            row = self.rows("-m", MODEL, "--context", ran["context_tokens"], "--codec", codec)[0]
            self.assertAlmostEqual(row["cache_ram_bytes"] / ran["kv"]["ram_bytes"], 1.0, delta=0.02)
            self.assertAlmostEqual(row["kv_bytes"] / ran["kv"]["bytes"], 1.0, delta=0.02)
            self.assertGreater(row["weights_bytes"], 0.9 * os.path.getsize(MODEL))

    def test_the_smallest_budget_is_the_one_that_run_names(self):
        for context in (64, 512):
            row = self.rows("-m", MODEL, "--context", context, "--codec", "i4")[0]
            said = self.refused("run", "-m", MODEL, "-p", "hi", "--ctx", context, "--ram-budget", 4096, "--store", self.store,
                                code=2, words=["smallest"])
            self.assertIn(f"({row['minimum_ram_budget']} bytes)", said)

    def test_what_can_not_be_counted_is_refused(self):
        self.refused("plan", "--layers", 4096, "--kv-heads", 4096, "--head-dim", 1024, "--context", 1 << 31, "--batch", 65536,
                     code=2, words=["ask for less"])
        self.refused("plan", "-m", MODEL, "--layers", 2, code=2, words=["--layers"])

    def test_a_shape_that_can_not_be_is_refused(self):
        self.refused("plan", "--layers", 2, "--kv-heads", 3, "--heads", 4, "--head-dim", 64, code=2, words=["--heads 4"])


class Run(CliTest):
    def test_the_report_has_what_scripts_read(self):
        report = self.run_json("-p", "Name three colours.", "-n", 8)
        for key in ("prompt_tokens", "reused_tokens", "generated_tokens", "tokens", "text", "ttft_ms", "prefill_tokens_per_s",
                    "decode_tokens_per_s", "peak_rss_bytes", "isa"):
            self.assertIn(key, report)
        for key in ("bytes", "ram_bytes", "file_bytes", "f16_bytes", "bits_per_element", "cells"):
            self.assertIn(key, report["kv"])
        self.assertEqual(report["generated_tokens"], len(report["tokens"]))
        self.assertEqual(set(report["kv"]["cells"]), {"ACTIVE", "QUANTIZED", "PERSISTED", "RECOVERING", "EVICTED"})

    def test_text_and_nothing_else_on_standard_output(self):
        report = self.run_json("-p", "Name three colours.", "-n", 8)
        done = self.call("run", "-m", MODEL, "-p", "Name three colours.", "-n", 8, "--quiet")
        self.assertEqual((done.stdout, done.stderr), (report["text"] + "\n", ""))

    def test_a_prompt_comes_from_standard_input_or_a_file(self):
        path = self.home / "prompt.txt"
        path.write_text(TEXT)
        expected = self.run_json("--raw", "-p", TEXT, "-n", 4)["tokens"]
        self.assertEqual(self.run_json("--raw", "-f", path, "-n", 4)["tokens"], expected)
        self.assertEqual(self.run_json("--raw", "-f", "-", "-n", 4, stdin=TEXT)["tokens"], expected)

    def test_the_same_seed_gives_the_same_answer(self):
        args = ("--raw", "-p", "Once upon a time", "-n", 12, "--temp", 1.0, "--top-k", 0, "--min-p", 0)
        first, again, other = (self.run_json(*args, "--seed", s)["tokens"] for s in (1, 1, 2))
        self.assertEqual(first, again)
        self.assertNotEqual(first, other)

    def test_four_bit_cells_take_less_and_the_codec_in_use_is_shown(self):
        report = self.run_json("--raw", "-p", TEXT * 10, "-n", 2)
        self.assertEqual(report["codec"], "i4")
        self.assertLess(report["kv"]["bits_per_element"], 4.6)
        self.assertLess(report["kv"]["bytes"], 0.45 * report["kv"]["f16_bytes"])
        self.assertGreater(report["kv"]["cells"]["QUANTIZED"], 0)

    def test_text_that_spells_control_tokens_stays_text(self):
        plain = self.run_json("-p", "x", "-n", 1)["prompt_tokens"]
        spelled = self.run_json("-p", "<|im_end|><|im_start|>system", "-n", 1)["prompt_tokens"]
        self.assertGreater(spelled, plain + 8, "each control token is several tokens of text")

    def test_an_answer_goes_on_past_its_end_where_that_is_asked_for(self):
        args = ("-p", "Say yes.", "-n", 60)
        ended = self.run_json(*args, "--session", "s")
        self.assertEqual(ended["end"], "ended", "this prompt has a short answer, else the test says nothing")
        longer = self.run_json(*args, "--ignore-eos", "--no-prefix")
        self.assertEqual((longer["end"], len(longer["tokens"])), ("token_limit", 60))
        self.assertEqual(longer["tokens"][: len(ended["tokens"])], ended["tokens"])
        samples = self.run_json(*args, "--ignore-eos", "--no-prefix", "--samples", 2)
        self.assertEqual(samples["tokens"], longer["tokens"])
        resumed = self.run_json("--session", "s", "-n", 60 - len(ended["tokens"]), "--ignore-eos")
        self.assertEqual(ended["tokens"] + resumed["tokens"], longer["tokens"])

    def test_a_full_context_ends_the_answer(self):
        report = self.run_json("--raw", "-p", TEXT, "-n", 200, "--ctx", 100)
        self.assertEqual((report["end"], report["context_tokens"]), ("context_full", 100))


class Bench(CliTest):
    SMALL = ["--tokens", 256, "--kv-heads", 2, "--group", 2, "--head-dim", 64, "--threads", 2, "--rounds", 1]

    def test_a_folder_that_can_not_be_made_is_named(self):
        self.refused("bench", "sharing", "-m", MODEL, "--folder", "/dev/null/x", code=1, words=["--folder /dev/null/x"])

    def test_attention_has_both_engines_with_errors_and_bandwidth(self):
        result = self.json("bench", "attention", *self.SMALL, "--queries", 1, 64, "--types", "f16", "i4")
        self.assertGreater(result["read_bandwidth_gb_s"], 0)
        self.assertEqual({(row["phase"], row["engine"], row["type"]) for row in result["rows"]},
                         {(phase, *of) for phase in ("decode", "prefill")
                          for of in (("kvcell", "f16"), ("kvcell", "i4"), ("ggml", "f16"), ("ggml", "q4_0"))})
        for row in result["rows"]:
            for key in ("tokens", "queries", "kv_heads", "group", "head_dim", "threads", "isa", "ms", "bytes", "gb_s",
                        "of_bandwidth", "gmac_s", "rel_error"):
                self.assertIn(key, row)
            self.assertLess(row["rel_error"], 0.2 if row["type"] in ("i4", "q4_0") else 0.01)

    def test_attention_in_a_forced_instruction_set(self):
        result = self.json("bench", "attention", *self.SMALL, "--types", "i4", env={"KVCELL_ISA": "scalar"})
        self.assertEqual([row["isa"] for row in result["rows"] if row["engine"] == "kvcell"], ["scalar"])

    def test_a_model_at_two_depths_beside_libllama(self):
        result = self.json("bench", "model", "-m", MODEL, "--depth", 0, 128, "--types", "i4", "--rounds", 1)
        rows = {(row["engine"], row["kv_type"], row["depth"], row["phase"]): row for row in result["rows"]}
        for depth in (0, 128):
            for phase in ("decode", "prefill"):
                for of in (("kvcell", "i4"), ("libllama", "f16"), ("libllama", "q4_0")):
                    self.assertGreater(rows[(*of, depth, phase)]["tokens_per_s"], 0)

    def test_what_can_not_be_measured_is_refused(self):
        self.refused("bench", "attention", "--types", "q4_0", code=2, words=["q4_0", "i4"])
        self.refused("bench", "attention", "--phase", "both", code=2, words=["both"])
        self.refused("bench", "model", code=2, words=["-m"])


class Resume(CliTest):
    def test_stopped_anywhere_it_goes_on_as_if_it_had_not(self):
        prompt = self.run_json("--raw", "-p", TEXT, "-n", 0)["prompt_tokens"]
        edge = (prompt // BLOCK + 1) * BLOCK
        whole = self.run_json("--raw", "-p", TEXT, "-n", edge + 1 - prompt + 6)["tokens"]
        for length in (edge - 1, edge, edge + 1):
            session = f"at-{length}"
            first = self.run_json("--raw", "-p", TEXT, "-n", length - prompt, "--session", session)
            self.assertEqual(first["context_tokens"], length)
            second = self.run_json("-n", 6, "--session", session)
            self.assertEqual(second["reused_tokens"], length)
            self.assertEqual(second["prompt_tokens"], 0)
            self.assertEqual(first["tokens"] + second["tokens"], whole[: length - prompt + 6], session)

    def test_sampling_goes_on_with_the_stored_options(self):
        args = ("--raw", "-p", "Once upon a time", "--temp", 0.9, "--seed", 7)
        whole = self.run_json(*args, "-n", 16)["tokens"]
        first = self.run_json(*args, "-n", 8, "--session", "s")["tokens"]
        self.assertEqual(first + self.run_json("-n", 8, "--session", "s")["tokens"], whole)

    def test_an_option_given_again_leaves_the_other_stored_ones(self):
        sampler = ("--temp", 1, "--top-k", 5, "--seed", 42)
        self.run_json("-p", "Tell a story.", "-n", 4, "--session", "s", *sampler)
        self.run_json("-n", 2, "--session", "s", "--top-p", 0.9)
        kept = self.json("sessions", "show", "s", "--store", self.store)["extras"]["sampler"]
        self.assertEqual((kept["temperature"], kept["top_k"], kept["seed"]), (1, 5, 42))
        self.assertAlmostEqual(kept["top_p"], 0.9, places=5)

    def test_a_session_that_two_begin_at_once_belongs_to_the_first(self):
        command = [KVCELL, "run", "-m", MODEL, "--store", self.store, "--session", "s", "-p", "Count.", "-n", "300", "--quiet"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, env=self.env) as first:
            first.stdout.read(1)
            self.refused("run", "-m", MODEL, "--store", self.store, "--session", "s", "-p", "hi", "-n", 1, code=1,
                         words=["in use", str(first.pid)])
            first.send_signal(signal.SIGTERM)
            self.assertEqual(first.wait(timeout=300), 128 + signal.SIGTERM)
        self.assertEqual(len(self.json("sessions", "ls", "--store", self.store)["sessions"]), 1)

    def test_a_second_question_is_the_next_turn(self):
        first = self.run_json("-p", "What is the capital of France?", "-n", 24, "--session", "s")
        second = self.run_json("-p", "And of Italy?", "-n", 24, "--session", "s")
        self.assertEqual(second["reused_tokens"], first["context_tokens"])
        self.assertLess(second["prompt_tokens"], 24)
        self.assertIn("Rome", second["text"])

    def test_with_nothing_left_to_say_a_prompt_is_asked_for(self):
        first = self.run_json("-p", "Say yes.", "-n", 200, "--session", "s")
        self.assertEqual(first["end"], "ended")
        done = self.call("run", "-m", MODEL, "--store", self.store, "--session", "s", "-n", 5, "--json")
        self.assertEqual(done.returncode, 0)
        self.assertIn("give a new prompt", done.stderr)
        self.assertEqual(json.loads(done.stdout)["generated_tokens"], 0)

    def test_another_codec_is_refused_by_name_and_the_session_stays(self):
        first = self.run_json("--raw", "-p", TEXT, "-n", 4, "--session", "s")
        self.refused("run", "-m", MODEL, "--store", self.store, "--session", "s", "--codec", "i8", "-n", 1, code=1,
                     words=["codec"])
        self.assertEqual(self.run_json("--session", "s", "-n", 1)["reused_tokens"], first["context_tokens"])

    def test_ctrl_c_stores_what_there_is(self):
        process = subprocess.Popen([KVCELL, "run", "-m", MODEL, "--store", self.store, "--raw", "-p", TEXT, "-n", "100000",
                                    "--ctx", "8000", "--session", "s"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=self.env)
        process.stdout.read(20)  # the answer has begun
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=120)
        self.assertEqual(process.returncode, 130)
        tokens = self.json("sessions", "show", "s", "--store", self.store)["tokens"]
        self.assertEqual(self.run_json("--session", "s", "-n", 1)["reused_tokens"], tokens)

    def test_an_answer_that_can_not_be_saved_is_there_all_the_same(self):
        answer = ["run", "-m", MODEL, "--raw", "-p", TEXT * 4, "-n", "40", "--ignore-eos", "--store", self.store, "--json"]
        for extra, names, alone in ((["--session", "s", "--disk-cap", "1MiB", "--save-every", "8"], "cap", False),
                                    (["--metrics", self.home / "none" / "x"], "none/x: it can't be written: No such file", True)):
            done = self.call(*answer, *extra)
            self.assertEqual(done.returncode, 1)
            self.assertEqual(len(json.loads(done.stdout)["tokens"]), 40)
            self.assertIn(names, done.stderr)
            if not alone:  # the first save that fails is told when it does
                self.assertIn("tried again at the end", done.stderr)

    def test_what_was_saved_along_survives_a_kill(self):
        answer = ["--raw", "-p", TEXT, "-n", "100000", "--ctx", "8000", "--ignore-eos"]
        with subprocess.Popen([KVCELL, "run", "-m", MODEL, "--store", self.store, *answer, "--session", "s", "--save-every", "32"],
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=self.env) as process:
            tokens = lambda: sum(s["tokens"] for s in self.json("sessions", "ls", "--store", self.store)["sessions"])
            process.stdout.read(20)  # the answer has begun
            first = tokens()
            while tokens() <= first:  # a second save has come
                self.assertIsNone(process.poll())
                process.stdout.read1(4096)
            process.kill()
        shown = self.json("sessions", "show", "s", "--store", self.store)
        resumed = self.run_json("--session", "s", "-n", 8, "--ignore-eos")
        self.assertEqual(resumed["reused_tokens"], shown["tokens"])
        straight = self.run_json(*answer[:3], "-n", shown["tokens"] - self.prompt_tokens(TEXT) + 8, "--ignore-eos", "--no-prefix")
        self.assertEqual(resumed["tokens"], straight["tokens"][-8:])

    def test_a_damaged_file_shortens_what_is_used_and_says_so(self):
        prompt = TEXT * 4
        whole = self.run_json("--raw", "-p", prompt, "-n", 10)["tokens"]
        self.run_json("--raw", "-p", prompt, "-n", 4, "--session", "s")
        cell = next(c for c in self.json("inspect", "--session", "s", "--store", self.store)["cells"]
                    if c["token_start"] == BLOCK and c["layer"] == 7)
        with open(cell["storage_path"], "r+b") as segment:
            segment.seek(cell["offset"] + 200)
            byte = segment.read(1)[0]
            segment.seek(cell["offset"] + 200)
            segment.write(bytes([byte ^ 4]))
        damaged = self.call("store", "verify", "--store", self.store, "--json")
        self.assertEqual(damaged.returncode, 1)
        found = json.loads(damaged.stdout)["damaged"]
        self.assertEqual([(d["layer"], d["head"], d["position"]) for d in found], [(7, cell["head"], BLOCK)])

        report = self.run_json("--session", "s", "-n", 6)
        self.assertEqual(report["reused_tokens"], BLOCK)
        self.assertIn("computed again", report["note"])
        self.assertEqual(report["tokens"], whole[4:])

    def test_what_was_computed_again_replaces_what_was_damaged(self):
        self.run_json("--raw", "-p", TEXT * 4, "-n", 2, "--session", "s")
        cut, flipped = str(self.home / "cut"), str(self.home / "flipped")
        for copy in (cut, flipped):
            shutil.copytree(self.store, copy)
        for segment in glob.glob(f"{cut}/segments/*.kvs"):
            os.truncate(segment, os.path.getsize(segment) * 2 // 3)
        for segment in glob.glob(f"{flipped}/segments/*.kvs"):
            with open(segment, "r+b") as file:
                size = os.path.getsize(segment)
                for part in (3, 5, 8):
                    file.seek(size * part // 10)
                    byte = file.read(1)[0]
                    file.seek(size * part // 10)
                    file.write(bytes([byte ^ 4]))
        for copy in (cut, flipped):
            once = self.call("run", "-m", MODEL, "--store", copy, "--session", "s", "-n", 2)
            self.assertEqual(once.returncode, 0, once.stderr)
            self.assertIn("computed again", once.stderr)
            self.assertEqual(self.json("store", "verify", "--store", copy)["damaged"], [])
            again = self.json("run", "-m", MODEL, "--store", copy, "--session", "s", "-n", 2)
            self.assertEqual(again["prompt_tokens"], 0, "all was stored")

    def test_budget_smaller_than_the_context_gives_the_same_answer(self):
        prompt = TEXT * 14
        free = self.run_json("--raw", "-p", prompt, "-n", 8)
        smallest = self.smallest_budget()
        for reads in ("mapped", "streamed"):
            tight = self.run_json("--raw", "-p", prompt, "-n", 8, "--ctx", 2048, "--ram-budget", smallest, "--file-reads", reads,
                                  "--no-prefix", "--session", reads)
            self.assertEqual(tight["tokens"], free["tokens"])
            self.assertLessEqual(tight["kv"]["ram_peak_bytes"], smallest)
            self.assertGreater(tight["kv"]["cells"]["PERSISTED"], 0)

    def smallest_budget(self):
        return self.json("plan", "-m", MODEL, "--context", 2048, "--codec", "i4")["rows"][0]["minimum_ram_budget"]

    def test_a_file_cut_off_under_a_running_chat_is_told_and_computed_again(self):
        question = "What is the capital of France?"
        session = ["-m", MODEL, "--session", "s", "--ctx", "2048", "--no-prefix"]
        self.run_json("-p", TEXT * 14 + question, "-n", 8, *session[2:])
        untouched = str(self.home / "untouched")
        shutil.copytree(self.store, untouched)
        for reads in ("mapped", "streamed"):
            store = str(self.home / reads)
            shutil.copytree(self.store, store)
            command = [KVCELL, "chat", "--store", store, *session, "-n", "8", "--ram-budget", str(self.smallest_budget()),
                       "--file-reads", reads]
            with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                  env=self.env) as chat:
                chat.stdin.write(question + "\n")
                chat.stdin.flush()
                first = chat.stdout.readline()
                for segment in glob.glob(f"{store}/segments/*.kvs"):
                    os.truncate(segment, os.path.getsize(segment) // 2)
                rest, err = chat.communicate(question + "\n", timeout=300)
                self.assertEqual(chat.returncode, 0, err)
            self.assertIn("computed again", err)
            calm = self.call("chat", "--store", untouched, *session, "-n", "8", stdin=f"{question}\n{question}\n")
            self.assertEqual(first + rest, calm.stdout)
            shutil.rmtree(untouched)
            shutil.copytree(self.store, untouched)
            self.assertEqual(self.json("store", "verify", "--store", store)["damaged"], [])


class Sharing(CliTest):
    """Prompts that begin alike are computed once, whoever asks and whenever."""

    LONG = TEXT * 6

    def prefixes(self):
        return self.json("prefix", "ls", "--store", self.store)["prefixes"]

    def test_a_prompt_that_begins_alike_is_not_computed_again(self):
        asked = self.LONG + "What does the text say of the river? " * 12
        first = self.run_json("--raw", "-p", asked, "-n", 6)
        self.assertEqual(first["reused_tokens"], 0)
        again = self.run_json("--raw", "-p", asked, "-n", 6)
        self.assertEqual(again["tokens"], first["tokens"])
        self.assertEqual(again["reused_tokens"], (first["prompt_tokens"] - 1) // BLOCK * BLOCK)
        self.assertEqual(again["reused_tokens"] + again["prompt_tokens"], first["prompt_tokens"])
        question = "And what of the ships that lie at anchor? " * 12
        other = self.run_json("--raw", "-p", self.LONG + question, "-n", 6)
        alone = self.run_json("--raw", "-p", self.LONG + question, "-n", 6, "--no-prefix")
        self.assertGreater(other["reused_tokens"], 0)
        self.assertEqual(alone["reused_tokens"], 0)
        self.assertEqual(other["tokens"], alone["tokens"])
        self.assertEqual(other["prefix"]["end"], "differs")
        self.assertGreaterEqual(other["prefix"]["differs_at"], other["reused_tokens"])

    def test_a_session_gives_and_takes_prefixes(self):
        first = self.run_json("--raw", "-p", self.LONG, "-n", 2, "--session", "a")
        self.assertGreater(self.run_json("--raw", "-p", self.LONG + "More.", "-n", 2)["reused_tokens"], 0)
        self.assertGreater(self.run_json("--raw", "-p", self.LONG + "More.", "-n", 2, "--session", "b")["reused_tokens"], 0)
        self.assertEqual(first["reused_tokens"], 0)
        blocks = self.json("store", "stats", "--store", self.store)["blocks"]
        self.assertLessEqual(blocks, first["prompt_tokens"] // BLOCK + 2, "stored once")

    def test_another_codec_is_told(self):
        self.run_json("--raw", "-p", self.LONG, "-n", 1)
        other = self.run_json("--raw", "-p", self.LONG, "-n", 1, "--codec", "i8")
        self.assertEqual((other["reused_tokens"], other["prefix"]["end"]), (0, "other_identity"))
        self.assertIn("codec", other["prefix"]["note"])

    def test_ls_pin_and_rm(self):
        self.run_json("--raw", "-p", self.LONG, "-n", 1)
        self.run_json("--raw", "-p", "Another text. " * 60, "-n", 1)
        prefixes = self.prefixes()
        self.assertEqual(len(prefixes), 2)
        for prefix in prefixes:
            self.assertTrue({"id", "tokens", "refs", "pinned"} <= prefix.keys())
            self.assertEqual(prefix["tokens"] % BLOCK, 0)
        kept, gone = (p["id"] for p in prefixes)
        self.json("prefix", "pin", kept, "--store", self.store)
        self.assertTrue(next(p for p in self.prefixes() if p["id"] == kept)["pinned"])
        self.refused("prefix", "rm", kept, "--store", self.store, code=1, words=["pinned"])
        self.json("prefix", "rm", gone, "--store", self.store)
        self.assertEqual([p["id"] for p in self.prefixes()], [kept])
        self.json("prefix", "pin", kept, "--off", "--store", self.store)
        self.json("prefix", "rm", kept, "--store", self.store)
        self.assertEqual(self.prefixes(), [])
        self.assertEqual(self.json("store", "stats", "--store", self.store)["blocks"], 0)
        self.refused("prefix", "rm", 12345, "--store", self.store, code=1, words=["12345"])

    def test_samples_equal_runs_of_their_own_seeds(self):
        args = ("--raw", "-p", TEXT, "-n", 10, "--temp", 0.9, "--no-prefix")
        many = self.run_json(*args, "--seed", 5, "--samples", 3)
        self.assertEqual(len(many["samples"]), 3)
        for i, sample in enumerate(many["samples"]):
            alone = self.run_json(*args, "--seed", 5 + i)
            self.assertEqual((sample["tokens"], sample["text"]), (alone["tokens"], alone["text"]), i)
        self.assertEqual(many["tokens"], many["samples"][0]["tokens"])
        self.refused("run", "-m", MODEL, "-p", "x", "--samples", 2, "--session", "s", "--store", self.store, code=2,
                     words=["--session"])

    def test_a_store_that_can_not_be_made_costs_sharing_only(self):
        done = self.call("run", "-m", MODEL, "-p", "Name a colour.", "-n", 3, "--store", "/proc/nowhere/store")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("not shared", done.stderr)


class Sessions(CliTest):
    def setUp(self):
        super().setUp()
        self.first = self.run_json("--raw", "-p", TEXT, "-n", 4, "--session", "first")

    def test_ls_and_show(self):
        sessions = self.json("sessions", "ls", "--store", self.store)["sessions"]
        self.assertEqual([(s["name"], s["tokens"]) for s in sessions], [("first", self.first["context_tokens"])])
        for key in ("bytes", "model", "last_used"):
            self.assertTrue(sessions[0][key])
        shown = self.json("sessions", "show", "first", "--store", self.store)
        self.assertIn("codec", shown["identity"])
        self.assertEqual(shown["extras"]["raw"], True)

    def test_a_session_keeps_its_durability_until_another_is_given(self):
        def level():
            return self.json("sessions", "show", "first", "--store", self.store)["durability"]

        self.assertEqual(level(), "process")
        for given, expected in (("power", "power"), (None, "power"), ("none", "none"), (None, "none")):
            self.run_json("--session", "first", "-n", 1, *(["--durability", given] if given else []))
            self.assertEqual(level(), expected)
        self.assertIn("durability", self.call("sessions", "show", "first", "--store", self.store).stdout)

    def test_ls_in_a_pipe_is_plain_columns(self):
        done = self.call("sessions", "ls", "--store", self.store)
        self.assertEqual(done.stdout.split("\t")[:2], ["first", str(self.first["context_tokens"])])

    def test_export_and_import_move_a_session(self):
        path = self.home / "first.kvcell"
        self.json("sessions", "export", "first", path, "--store", self.store)
        other = str(self.home / "other")
        self.assertEqual(self.json("sessions", "import", path, "--as", "second", "--store", other)["name"], "second")
        here = self.run_json("--session", "first", "-n", 3)
        there = self.json("run", "-m", MODEL, "--store", other, "--session", "second", "-n", 3)
        self.assertEqual(here["tokens"], there["tokens"])
        self.assertEqual(there["reused_tokens"], self.first["context_tokens"])
        data = path.read_bytes()
        path.write_bytes(data[:-100])
        self.refused("sessions", "import", path, "--as", "third", "--store", other, code=1, words=[str(path)])

    def test_rm_removes(self):
        self.assertEqual(self.call("sessions", "rm", "first", "--erase", "--store", self.store).returncode, 0)
        self.assertEqual(self.json("sessions", "ls", "--store", self.store)["sessions"], [])
        self.refused("sessions", "rm", "first", "--store", self.store, code=1, words=["first"])

    def test_inspect_lists_every_cell(self):
        report = self.json("inspect", "--store", self.store, "--session", "first")
        tokens = self.first["context_tokens"]
        self.assertEqual(len(report["cells"]), 30 * 3 * -(-tokens // BLOCK))
        self.assertEqual(report["by_state"]["PERSISTED"]["cells"], 30 * 3 * (tokens // BLOCK))
        cell = report["cells"][0]
        for key in ("layer", "head", "token_start", "token_end", "state", "k_precision", "v_precision", "tier", "storage_path",
                    "offset", "length", "checksum", "refs", "reads", "last_access"):
            self.assertIn(key, cell)
        self.assertEqual((cell["state"], cell["k_precision"], cell["tier"]), ("PERSISTED", "int4", "file"))
        self.assertTrue(os.path.getsize(cell["storage_path"]) >= cell["offset"] + cell["length"])

    def test_store_stats_and_verify(self):
        stats = self.json("store", "stats", "--store", self.store)
        verified = self.json("store", "verify", "--store", self.store)
        self.assertEqual(stats["sessions"], 1)
        self.assertEqual((verified["cells"], verified["damaged"]), (stats["cells"], []))
        self.assertEqual(verified["cells"], 30 * 3 * (self.first["context_tokens"] // BLOCK))

    def test_files_are_the_owners_alone(self):
        for path in [self.store, *glob.glob(self.store + "/**", recursive=True)]:
            self.assertEqual(os.stat(path).st_mode & 0o077, 0, path)

    def test_chat_goes_on_with_it(self):
        done = self.call("chat", "-m", MODEL, "--store", self.store, "--session", "talk", "-n", "12",
                         stdin="What is the capital of France?\n/stats\n/nonsense\n/quit\n")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("Paris", done.stdout)
        self.assertIn("no such command", done.stderr)
        self.assertIn("talk", [s["name"] for s in self.json("sessions", "ls", "--store", self.store)["sessions"]])

    def test_sigterm_in_an_answer_ends_a_chat_and_keeps_the_turn(self):
        command = [KVCELL, "chat", "-m", MODEL, "--store", self.store, "--session", "s", "-n", "4000"]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                              env=self.env) as chat:
            chat.stdin.write(b"Tell me a very long story.\n")
            chat.stdin.flush()
            chat.stdout.read(1)
            chat.send_signal(signal.SIGTERM)
            self.assertEqual(chat.wait(timeout=300), 128 + signal.SIGTERM)
        self.assertGreater(self.json("sessions", "ls", "--store", self.store)["sessions"][0]["tokens"], 0)


class Stores(CliTest):
    """What a store takes besides its directory: a key, a tenant, a cap, a time to live; and its care."""

    KEY = b"thirty-two bytes and more of a key"

    def key_file(self, name="key", content=KEY):
        path = self.home / name
        path.write_bytes(content)
        return path

    def names(self, *args, **kwargs):
        return [s["name"] for s in self.json("sessions", "ls", "--store", self.store, *args, **kwargs)["sessions"]]

    def test_an_encrypted_store_opens_with_its_key_and_no_other(self):
        key = self.key_file()
        first = self.run_json("--raw", "-p", TEXT, "-n", 3, "--session", "secret plan", "--key-file", key)
        stored = b"".join(p.read_bytes() for p in pathlib.Path(self.store).rglob("*") if p.is_file())
        for word in (b"secret plan", b"temperature", b"SmolLM2", b"weights"):
            self.assertNotIn(word, stored)
        session = ("--session", "secret plan", "-n", 2)
        for source in (("--key-file", key), ("--key-command", f"cat {key}")):
            again = self.run_json(*session, *source)
            self.assertGreaterEqual(again["reused_tokens"], first["context_tokens"])
        self.run_json(*session, env={"KVCELL_KEY": self.KEY.decode()})
        self.assertEqual(self.names("--key-file", key), ["secret plan"])
        self.assertTrue(self.json("store", "stats", "--store", self.store, "--key-file", key)["encrypted"])
        verified = self.json("store", "verify", "--store", self.store, "--key-file", key)
        self.assertGreater(verified["cells"], 0)
        self.assertEqual(verified["damaged"], [])
        run = ("run", "-m", MODEL, "--store", self.store, "--session", "secret plan", "--quiet")
        self.refused(*run, code=1, words=["encrypted", "--key-file"])
        other = self.key_file("other", b"another key that is as long as the first")
        self.refused(*run, "--key-file", other, code=1, words=["key", self.store])
        self.refused("sessions", "ls", "--store", self.store, code=1, words=["encrypted"])

    def test_prompts_without_a_session_are_kept_encrypted_too(self):
        key = self.key_file()
        first = self.run_json("--raw", "-p", TEXT, "-n", 1, "--key-file", key)
        again = self.run_json("--raw", "-p", TEXT, "-n", 1, "--key-file", key)
        self.assertGreater(again["reused_tokens"], 0)
        self.assertEqual(again["tokens"], first["tokens"])
        self.assertTrue(self.json("store", "stats", "--store", self.store, "--key-file", key)["encrypted"])

    def test_keys_that_are_none(self):
        run = ("run", "-m", MODEL, "--store", self.store, "--session", "s", "-p", "x", "--quiet")
        self.refused(*run, "--key-file", self.key_file(content=b"short"), code=2, words=["32"])
        self.refused(*run, "--key-file", self.home / "none", code=2, words=["none"])
        self.refused(*run, "--key-command", "false", code=2, words=["--key-command"])
        self.refused(*run, "--key-command", "echo x", "--key-file", self.key_file(), code=2, words=["one of them"])
        self.refused(*run, code=2, words=["KVCELL_KEY"], env={"KVCELL_KEY": "short"})
        self.run_json("--raw", "-p", TEXT, "-n", 1, "--session", "plain")
        self.refused(*run, "--key-file", self.key_file(), code=2, words=["not encrypted"])

    def test_an_encrypted_export_stays_encrypted(self):
        key = self.key_file()
        self.run_json("--raw", "-p", TEXT, "-n", 3, "--session", "s", "--key-file", key)
        path = self.home / "s.kvcell"
        self.json("sessions", "export", "s", path, "--store", self.store, "--key-file", key)
        self.assertNotIn(b"temperature", path.read_bytes())
        other = str(self.home / "other")
        self.refused("sessions", "import", path, "--store", other, code=1, words=["encrypted", str(path)])
        third = str(self.home / "third")
        self.json("sessions", "import", path, "--store", third, "--key-file", key)
        there = self.json("run", "-m", MODEL, "--store", third, "--session", "s", "-n", 2, "--key-file", key)
        self.assertGreater(there["reused_tokens"], 0)

    def test_tenants_do_not_see_each_other(self):
        self.run_json("--raw", "-p", TEXT, "-n", 3, "--session", "s", "--namespace", "a")
        self.assertEqual(self.names("--namespace", "a"), ["s"])
        self.assertEqual(self.names("--namespace", "b"), [])
        self.assertEqual(self.names(), [])
        other = self.run_json("--raw", "-p", TEXT, "-n", 1, "--session", "s", "--namespace", "b")
        self.assertEqual(other["reused_tokens"], 0)
        self.refused("sessions", "ls", "--store", self.store, "--namespace", "a/b", code=2, words=["--namespace"])

    def test_a_cap_too_small_is_refused_before_anything_is_removed(self):
        self.run_json("--raw", "-p", TEXT * 4, "-n", 1, "--session", "kept")
        self.refused("run", "-m", MODEL, "-p", "x", "--store", self.store, "--session", "new", "--disk-cap", "10", code=2,
                     words=["10 bytes", "GiB"])
        self.assertIn("kept", self.names())

    def test_sessions_rm_removes_what_is_there_and_names_the_others(self):
        for name in ("a", "b"):
            self.run_json("--raw", "-p", "x", "-n", 1, "--session", name)
        done = self.call("sessions", "rm", "a", "nosuch", "b", "--store", self.store, "--json")
        self.assertEqual((done.returncode, json.loads(done.stdout)["removed"]), (1, ["a", "b"]))
        self.assertIn("nosuch", done.stderr)
        self.assertEqual(self.names(), [])

    def test_the_cap_holds_and_what_was_lost_is_computed_again(self):
        # As much as some of these take: each its cells and an index row with the exact tail.
        for i in range(6):
            self.run_json("--raw", "-p", f"{i} " + TEXT * 4, "-n", 1, "--session", f"s{i}")
        size = sum(p.stat().st_blocks * 512 for p in pathlib.Path(self.store).rglob("*") if p.is_file())
        cap = size * 2 // 3
        self.run_json("--raw", "-p", "7 " + TEXT * 4, "-n", 1, "--session", "s7", "--disk-cap", cap)
        after = sum(p.stat().st_blocks * 512 for p in pathlib.Path(self.store).rglob("*") if p.is_file())
        self.assertLessEqual(after, cap)
        told = self.call("run", "-m", MODEL, "--raw", "-p", "8 " + TEXT * 4, "-n", 1, "--store", self.store, "--session", "s8",
                         "--disk-cap", cap)
        self.assertIn("sessions were removed", told.stderr)
        self.assertIn("s7", self.names())
        self.assertNotIn("s0", self.names())
        self.assertEqual(self.json("store", "verify", "--store", self.store)["damaged"], [])

    def test_old_sessions_go_when_their_time_is_up(self):
        self.run_json("--raw", "-p", TEXT, "-n", 1, "--session", "old")
        time.sleep(2.1)
        self.run_json("--raw", "-p", TEXT, "-n", 1, "--session", "new", "--ttl", "1s")
        self.assertEqual(self.names(), ["new"])

    def test_compact_and_rm(self):
        for name in ("a", "b", "c"):
            self.run_json("--raw", "-p", f"{name} {TEXT}", "-n", 1, "--session", name)
        self.call("sessions", "rm", "a", "b", "--store", self.store)
        report = self.json("store", "compact", "--store", self.store)
        self.assertLessEqual(report["bytes_after"], report["bytes_before"])
        self.assertEqual(self.json("store", "verify", "--store", self.store)["damaged"], [])
        self.assertGreater(self.run_json("--session", "c", "-n", 1)["reused_tokens"], 0)
        self.refused("store", "rm", "--store", self.home, code=1, words=["no store"])
        self.assertEqual(self.call("store", "rm", "--erase", "--store", self.store).returncode, 0)
        self.assertFalse(os.path.exists(self.store))


class Lab(CliTest):
    """Each command once, small: the figures themselves are tested on made values and tiny models."""

    def setUp(self):
        super().setUp()
        self.text = self.home / "text.txt"
        self.text.write_text(TEXT * 4)
        self.out = self.home / "kv"

    def test_exported_values_are_measured_without_the_model(self):
        done = self.json("lab", "export", "-m", MODEL, "-f", self.text, "--context", 192, "-o", self.out)
        self.assertEqual((done["layers"], done["tokens"]), (30, 192))
        manifest = json.loads((self.out / "manifest.json").read_text())
        self.assertEqual(manifest["format"], "kvcell-kv")
        self.assertEqual(len(list(self.out.glob("*.npy"))), 30 * 7 + 1)
        rows = {row["codec"]: row for row in self.json("lab", "error", "--from", self.out, "--codec", "i4", "i3", "k=nf4,v=nf4")["rows"]}
        self.assertLess(rows["i4"]["k_relative"], rows["i3"]["k_relative"])
        self.assertLess(rows["i4"]["output_relative"], rows["i3"]["output_relative"])
        self.assertEqual((rows["i4"]["in_place"], rows["k=nf4,v=nf4"]["in_place"]), (True, False))
        self.assertEqual(len(rows["i4"]["layers"]), 30)
        stats = self.json("lab", "stats", "--from", self.out, "--channels")
        self.assertEqual(len(stats["rows"]), 30 * 3 * 2)
        self.assertEqual(len(stats["rows"][0]["channels"]["mean"]), 64)
        sweep = self.json("lab", "sweep", "--from", self.out, "-o", self.home / "reads")
        self.assertEqual([row["from"] for row in sweep["reads"]], ["page cache", "disk"])

    def test_quality_has_the_columns_that_scripts_read_and_the_peers_perplexity(self):
        result = self.json("lab", "quality", "-m", MODEL, "-f", self.text, "--context", 128, "--windows", 1, "--codec", "i4",
                           "--peer")
        self.assertEqual([(row["engine"], row["codec"]) for row in result["rows"]],
                         [("kvcell", "f16"), ("kvcell", "i4"), ("libllama", "f16"), ("libllama", "q8_0"), ("libllama", "q4_0")])
        for key in ("bits", "bits_all_in", "ppl", "kld_mean", "kld_se", "kld_median", "kld_p999", "top1"):
            self.assertIn(key, result["rows"][0])

    def test_a_report_opens_with_the_experiments(self):
        latency = self.home / "latency.json"
        latency.write_text(self.call("lab", "latency", "--heads", 4, "--kv-heads", 2, "--head-dim", 64, "--context", 128,
                                     "--json").stdout)
        report = self.home / "report.html"
        done = self.json("lab", "report", "-m", MODEL, "-o", report, "--ram-budget", "16MiB", "--measurement", latency)
        self.assertEqual(len(done["experiments"]), 4)
        for experiment in done["experiments"][:3]:
            self.assertTrue(experiment["pass"], experiment)
        page = report.read_text()
        self.assertLess(page.index("Four experiments"), page.index("Latency of attention"))
        self.assertNotIn("http", page)
        self.assertFalse(pathlib.Path(f"{report}.scratch").exists())

    def test_a_codec_that_is_decoded_first_runs_with_a_warning(self):
        done = self.call("run", "-m", MODEL, "--raw", "-p", TEXT, "-n", 2, "--codec", "k=nf4,v=fp8e4m3", "--json")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("decoded before it is attended", done.stderr)
        self.assertNotIn("warning", self.call("run", "-m", MODEL, "--raw", "-p", TEXT, "-n", 2, "--codec", "i3").stderr)

    def test_wrong_requests_are_refused_in_one_sentence(self):
        self.refused("lab", "quality", "-m", MODEL, code=2, words=["text"])
        self.refused("lab", "export", "-m", MODEL, "-f", self.text, code=2, words=["-o"])
        self.refused("lab", "error", "--from", self.home / "none", code=1, words=["manifest.json"])
        self.refused("lab", "error", "--codec", "int9", code=2, words=["int9"])
        self.refused("lab", "report", "-m", MODEL, "-o", self.home / "r.html", "--measurement", self.text, code=1,
                     words=["command"])
        self.refused("tune", code=2, words=["-m"])
        self.refused("tune", "-m", MODEL, "--kld", 0.1, "--bits", 4, code=2, words=["--bits"])
        self.refused("lab", "quality", "-m", MODEL, "-f", self.text, "--context", 2, code=2, words=["--context 4"])
        self.refused("lab", "quality", "-m", MODEL, "-f", self.text, "--codec", "auto", code=2, words=["auto", "run"])
        self.refused("lab", "quality", "-m", MODEL, "-f", self.text, "--rules", self.home / "none.yaml", code=1, words=["none.yaml"])

    def test_interrupted_quality_goes_on_where_it_was(self):
        state = self.home / "state.json"
        args = ("lab", "quality", "-m", MODEL, "-f", self.text, "--context", 64, "--windows", 2, "--codec", "i4", "--state", state)
        whole = self.json(*args)
        again = self.json(*args)
        self.assertEqual(whole, again)
        self.assertTrue(state.exists())


class BadInput(CliTest):
    def bad_model(self, name, data):
        path = self.home / name
        path.write_bytes(data)
        return path

    def test_model_files_that_are_none(self):
        with open(MODEL, "rb") as file:
            head = file.read(1 << 20)
        self.refused("run", "-m", self.home / "nope.gguf", "-p", "x", code=1, words=["nope.gguf"])
        self.refused("run", "-m", self.home, "-p", "x", code=2, words=[str(self.home)])
        for name, data in {"empty.gguf": b"", "text.gguf": b"hello world, this is no model", "head.gguf": head[:16],
                           "cut.gguf": head, "version.gguf": head[:4] + b"\xff\0\0\0" + head[8:],
                           "counts.gguf": head[:8] + b"\xff" * 16 + head[24:]}.items():
            self.refused("run", "-m", self.bad_model(name, data), "-p", "x", code=1, words=[name])

    def test_requests_that_can_not_be_met_are_refused_before_the_model_loads(self):
        start = time.monotonic()
        self.refused("run", "-m", MODEL, "-p", "x", "--codec", "int5", code=2, words=["--codec", "int5"])
        self.refused("run", "-m", MODEL, "-p", "x", "--codec", "k=int4:g63,v=f16", code=2, words=["--codec"])
        self.refused("run", "-m", MODEL, "-p", "x", "--session", "../x", code=2, words=["--session"])
        self.refused("run", "-m", MODEL, "-p", "x", "--session", "", code=2, words=["--session"])
        self.refused("run", "-m", MODEL, "-p", "x", "--ram-budget", "1KiB", code=2, words=["smallest that would do"])
        self.assertLess(time.monotonic() - start, 60)

    def test_the_smallest_budget_that_the_refusal_names_works(self):
        text = self.refused("run", "-m", MODEL, "-p", "x", "--ctx", "512", "--ram-budget", "1KiB", code=2, words=[])
        smallest = int(text.split("(")[1].split(" bytes")[0])
        self.assertEqual(self.run_json("-p", "x", "--ctx", 512, "--ram-budget", smallest, "-n", 2)["generated_tokens"], 2)
        self.refused("run", "-m", MODEL, "-p", "x", "--ctx", "512", "--ram-budget", smallest - 1, code=2, words=["smallest"])

    def test_a_prompt_longer_than_the_context_names_both_numbers(self):
        self.refused("run", "-m", MODEL, "--raw", "-p", TEXT * 4, "--ctx", "64", code=2, words=["64", "tokens"])

    def test_prompts_without_end_or_content(self):
        self.refused("run", "-m", MODEL, "-f", "/dev/zero", code=2, words=["/dev/zero", "larger than"])
        self.refused("run", "-m", MODEL, "-f", self.home, code=1, words=[str(self.home)])
        self.refused("run", "-m", MODEL, "-f", self.home / "nope.txt", "--session", "s", code=1, words=["nope.txt"])
        self.refused("run", "-m", MODEL, "--session", "s", "--store", self.store, code=2, words=["give a prompt"])

    def test_bytes_that_are_no_text_are_a_prompt_all_the_same(self):
        path = self.home / "bytes"
        path.write_bytes(bytes(range(1, 256)))
        self.assertEqual(self.run_json("--raw", "-f", path, "-n", 2)["generated_tokens"], 2)

    def test_store_directories_that_can_not_be(self):
        file = self.home / "file"
        file.write_text("x")
        self.refused("run", "-m", MODEL, "-p", "x", "--session", "s", "--store", file, code=2, words=[str(file)])
        self.refused("run", "-m", MODEL, "-p", "x", "--session", "s", "--store", "/proc/kvcell", code=1, words=["/proc/kvcell"])
        self.refused("sessions", "ls", "--store", self.home / "nope", code=1, words=["nope"])
        self.refused("inspect", "--session", "s", "--store", self.home / "nope", code=1, words=["nope"])

    def test_a_full_disk_is_told_and_what_was_stored_stays(self):
        mount = self.home / "small"
        mount.mkdir()
        if os.geteuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", mount], check=False,
                                               capture_output=True).returncode != 0:
            self.skipTest("needs the right to mount a small tmpfs")
        self.addCleanup(subprocess.run, ["umount", "-l", mount], check=False)
        store = str(mount / "store")
        self.json("run", "-m", MODEL, "--store", store, "--session", "small", "--raw", "-p", "One two three", "-n", 2)
        before = self.json("sessions", "ls", "--store", store)["sessions"]
        full = self.call("run", "-m", MODEL, "--store", store, "--session", "large", "--raw", "-p", TEXT * 12, "-n", "1", "--quiet",
                         "--json")
        self.assertEqual((full.returncode, len(json.loads(full.stdout)["tokens"])), (1, 1), "the answer is there")
        self.assertIn("space", full.stderr)
        self.assertEqual(len(full.stderr.splitlines()), 1)
        after = self.json("sessions", "ls", "--store", store)["sessions"]
        self.assertEqual(before, after)
        self.assertEqual(self.json("store", "verify", "--store", store)["damaged"], [])


if __name__ == "__main__":
    unittest.main(verbosity=2, argv=[sys.argv[0], *sys.argv[1:]])
