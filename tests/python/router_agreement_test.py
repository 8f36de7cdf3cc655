"""tools/router_agreement.py on the CPU with few tokens: what it counts, and that its verdict can be no."""

import contextlib
import importlib.util
import io
import json
import os
import pathlib
import struct
import subprocess
import sys
import tempfile
import unittest
from unittest import mock

import package

package.need("torch", "vivace")
import torch  # noqa: E402

TOOL = package.ROOT / "tools" / "router_agreement.py"
SPEC = importlib.util.spec_from_file_location("router_agreement", TOOL)
tool = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(tool)
tool.import_packages()
QWEN = package.ROOT / "tests" / "data" / "tiny-qwen3-moe"
PROGRAM = os.environ.get("VIVACE", str(package.ROOT / "build" / "bin" / "vivace"))


def run(*args):
    """The exit code, what --json has, and standard error."""
    with tempfile.TemporaryDirectory() as folder:
        file, errors = pathlib.Path(folder) / "rows.json", io.StringIO()
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(errors):
            code = tool.main(["--device", "cpu", "--json", str(file), *map(str, args)])
        return code, json.loads(file.read_text()), errors.getvalue()


def refused(*args):
    """What is on standard error where there is no verdict."""
    errors = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(errors):
        try:
            code = tool.main([*map(str, args)])
        except SystemExit as stopped:
            code = stopped.code
    if code != 2 or "Traceback" in errors.getvalue():
        raise AssertionError(f"exit code {code}: {errors.getvalue()}")
    return errors.getvalue()


@contextlib.contextmanager
def poisoned(name, by):
    """The tool, with another way in the place of one: that of this name, or what this makes of a weight."""
    real = tool.scorers
    with mock.patch.object(tool, "scorers", lambda weight: {**real(weight), name: by(weight) if callable(by) else real(weight)[by]}):
        yield


@contextlib.contextmanager
def qwen(rename=("", ""), without=(), size=None, **config):
    """A copy of the model: one part of its tensors' names by another, its file cut to a size, keys of config.json left out or changed."""
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        for file in QWEN.iterdir():
            if file.name not in ("config.json", "model.safetensors"):
                (folder / file.name).symlink_to(file)
        values = {**json.loads((QWEN / "config.json").read_text()), **config}
        (folder / "config.json").write_text(json.dumps({key: value for key, value in values.items() if key not in without}))
        data = (QWEN / "model.safetensors").read_bytes()
        end = 8 + struct.unpack("<Q", data[:8])[0]
        header = data[8:end].replace(rename[0].encode(), rename[1].encode()) if rename[0] else data[8:end]
        header = header.ljust(-(-len(header) // 8) * 8)
        (folder / "model.safetensors").write_bytes((struct.pack("<Q", len(header)) + header + data[end:])[:size])
        yield folder


class Given:
    """Scores that are there already."""

    def __init__(self, scores):
        self.scores = torch.tensor(scores, dtype=torch.float64)

    def __call__(self, x):
        return self.scores.float()

    def row(self, x):
        return "given"


class Counts(unittest.TestCase):
    def count(self, reference, scores):
        return tool.Count.of(Given(scores), torch.empty(len(scores), 1), tool.Choices.of(Given(reference).scores, 2))

    def test_a_set_has_no_order(self):
        self.assertEqual(self.count([[4.0, 3.0, 2.0, 1.0]], [[30.0, 40.0, 2.0, 1.0]]), tool.Count("given", 1))

    def test_what_is_excused(self):
        unit = 4 * 2.0**-23  # of scores at 4
        for units, excused in ((0.5, 1), (1.9, 1), (2.1, 0), (1000.0, 0)):
            count = self.count([[8.0, 4.0, 4.0 - units * unit, 1.0]], [[8.0, 3.0, 4.0, 1.0]])
            self.assertEqual(count[1:4], (1, 1, excused), units)
            self.assertAlmostEqual(count.units, units, places=5)

    def test_a_close_gap_excuses_no_third_expert(self):
        close = [[8.0, 4.0, 4.0 - 2.0**-30, 1.0]]
        self.assertEqual(self.count(close, [[8.0, 3.0, 2.0, 5.0]])[1:4], (1, 1, 0))
        self.assertEqual(self.count(close, [[8.0, float("nan"), float("nan"), 5.0]])[1:4], (1, 1, 0))

    def test_they_add_up(self):
        self.assertEqual(tool.Count("a", 3, 2, 1, 5.0) + tool.Count("b", 4, 1, 1, 0.5), tool.Count("a", 7, 3, 2, 5.0))


class Random(unittest.TestCase):
    AGREEMENT = ("--agreement", "--routers", "qwen3", "--tokens", 1500)
    ERRORS = ("--errors", "--routers", "qwen3,longcat-lite", "--counts", "1,40", "--seeds", 2)

    def test_agreement(self):
        with mock.patch.object(tool, "TOKENS_OF_A_WEIGHT", 1000), mock.patch.object(tool, "chunk_tokens", lambda device: 700):
            code, found, errors = run(*self.AGREEMENT)
        self.assertEqual((code, found["failures"]), (0, []), errors)
        other = {(row["weight"], row["scores"]): row["other"] for row in found["agreement"]}
        self.assertEqual({row["tokens"] for row in found["agreement"]}, {1500})
        self.assertGreater(other["f32", "bf16"], 5, "8 bits of a weight do not suffice")
        for weight in ("f32", "bf16"):
            self.assertLess(other[weight, "two_term"], 5)
            self.assertLess(other[weight, "fp32"], 5)

    def test_agreement_can_fail(self):
        for way in ("exact", "exact.invariant"):
            with poisoned(way, "bf16"):
                code, found, errors = run(*self.AGREEMENT)
            self.assertEqual((code, len(found["failures"])), (1, 1), errors)
            self.assertIn(f"qwen3, f32 weight: {way} chooses others for ", errors)
        with poisoned("two_term", "bf16"):  # which promises less
            self.assertEqual(run(*self.AGREEMENT)[0], 0)

    def test_errors(self):
        code, found, errors = run(*self.ERRORS)
        self.assertEqual((code, found["failures"]), (0, []), errors)
        self.assertEqual([(row["router"], row["tokens"]) for row in found["errors"]],
                         [(router, tokens) for router in ("qwen3", "longcat-lite") for tokens in (1, 40)])
        for row in found["errors"]:
            self.assertLess(row["exact"], row["two_term"])
            self.assertLess(row["two_term"], 5e-3)

    def test_errors_are_fp32s_at_most(self):
        for tokens, exact, failures in ((1, 2.0, 0), (1, 2.1, 1), (1, float("nan"), 1), (4, 2.0, 0), (4, 2.1, 1)):
            report = tool.Report()
            with self.subTest(tokens=tokens, exact=exact), contextlib.redirect_stdout(io.StringIO()):
                report.errors("qwen3", tokens, {"exact": exact, "two_term": 160.0, "fp32": 2.0})
                self.assertEqual(len(report.failures), failures)

    def test_errors_can_fail(self):
        with poisoned("exact", "two_term"):
            code, found, errors = run(*self.ERRORS)
        self.assertEqual((code, len(found["failures"])), (1, 4), errors)
        self.assertIn("longcat-lite, 40 tokens: the error of exact is ", errors)


class OfAModel(unittest.TestCase):
    ARGS = ("--model", QWEN, "--text", QWEN / "sample.txt", "--program", PROGRAM, "--window", 64, "--windows", 3)

    def setUp(self):
        if not pathlib.Path(PROGRAM).exists():
            self.skipTest(f"{PROGRAM} is not there")

    def test_its_routers(self):
        code, found, errors = run(*self.ARGS)
        self.assertEqual((code, found["failures"]), (0, []), errors)
        self.assertEqual([row["mode"] for row in found["perplexity"]], ["exact", "two_term"])
        self.assertEqual({row["tokens"] for row in found["perplexity"]}, {3 * 63})
        tokens = {row["router"]: row["tokens"] for row in found["agreement"]}
        self.assertEqual(tokens, {"layer 0": 192, "layer 1": 192, "layer 2": 192, "layer 3": 189})

    def test_it_can_fail(self):
        with poisoned("exact", lambda weight: tool.Torch(weight.flip(1))):  # nearly all choices are others
            code, found, errors = run(*self.ARGS)
        self.assertEqual((code, len(found["failures"])), (1, 4), errors)
        self.assertIn("layer 3, bf16 weight: exact chooses others for ", errors)

    def test_names_of_hy3(self):
        with qwen(("mlp.gate.weight", "mlp.router.gate.weight")) as folder:
            code, found, errors = run("--model", folder, *self.ARGS[2:], "--windows", 1)
        self.assertEqual((code, found["failures"]), (0, []), errors)
        self.assertEqual({row["router"] for row in found["agreement"]}, {f"layer {n}" for n in range(4)})


class Refused(unittest.TestCase):
    MODEL = ("--device", "cpu", "--text", QWEN / "sample.txt", "--model")

    def test_before_anything_is_scored(self):
        for options, message in (({"without": ["num_experts_per_tok"]}, "config.json has no num_experts_per_tok"),
                                 ({"num_experts_per_tok": 0}, "config.json has num_experts_per_tok = 0, needs at least 1"),
                                 ({"num_experts_per_tok": "2"}, 'config.json has num_experts_per_tok = "2", needs at least 1'),
                                 ({"n_group": 2}, "config.json has n_group = 2, which takes part in the choice, which is by scores alone here"),
                                 ({"num_expert_group": "4"}, "config.json has num_expert_group = 4"),
                                 ({"rename": ("mlp.gate.weight", "mlp.wg.weight")}, "no *.safetensors has model.layers.N.mlp.gate.weight or "),
                                 ({"rename": ("0.mlp.gate.weight\":{\"dtype\":\"BF16", "0.mlp.gate.weight\":{\"dtype\":\"I16")},
                                  "model.layers.0.mlp.gate.weight is of another type than F32, BF16, F16")):
            with self.subTest(message), qwen(**options) as folder, mock.patch.object(tool.subprocess, "run", side_effect=AssertionError):
                self.assertIn(f"error: {folder}: {message}", refused(*self.MODEL, folder))
        self.assertRegex(refused(*self.MODEL, package.ROOT), "config.json cannot be read: .*No such file")

    def test_a_configuration_that_is_no_object(self):
        with qwen() as folder:
            (folder / "config.json").write_text("[]")
            self.assertIn(f"{folder}: config.json is no object", refused(*self.MODEL, folder))

    def test_a_file_that_was_cut(self):
        for size, message in ((0, "cannot mmap an empty file"), (5, "requires a buffer of 8 bytes"), (1000, "its header would end at byte "),
                              (-1, " would end at byte ")):
            with self.subTest(size=size), qwen(size=size) as folder, mock.patch.object(tool.subprocess, "run", side_effect=AssertionError):
                self.assertRegex(refused(*self.MODEL, folder), f"model.safetensors is no safetensors file, or was cut: .*{message}")

    def test_a_choice_by_more_than_scores(self):
        hy3 = package.ROOT / "tests" / "data" / "tiny-hy3"
        with self.assertRaisesRegex(tool.Fault, "takes part in the choice, which is by scores alone here"):
            tool.router_weights(hy3)

    def test_programs_that_fail(self):
        for program, message in (("/nonexistent", "--program /nonexistent cannot be run: No such file or directory"),
                                 ("/bin/true", "/bin/true score gave no perplexity; on standard output: ''"),
                                 ("/bin/false", "/bin/false score ended with exit code 1; on standard output: ''"),
                                 ("/bin/echo", "/bin/echo score gave no perplexity; on standard output: 'score --model ")):
            with self.subTest(program):
                self.assertIn(message, refused(*self.MODEL, QWEN, "--program", program))

    @unittest.skipIf(torch.cuda.is_available(), "there is a GPU")
    def test_a_gpu_that_is_not_there(self):
        self.assertRegex(refused("--errors", "--device", "cuda"), "--device cuda: torch .* finds no GPU")

    def test_where_rows_cannot_be_written(self):
        with mock.patch.object(tool, "random_errors", side_effect=AssertionError):
            for path, message in (("/nonexistent/x", "No such file or directory"), ("/dev/full", "No space left on device"),
                                  (package.ROOT, "Is a directory")):
                self.assertIn(f"--json {path} cannot be written: {message}", refused("--errors", "--json", path))

    def test_a_failure_leaves_old_rows(self):
        with tempfile.TemporaryDirectory() as folder:
            old, new = pathlib.Path(folder) / "old.json", pathlib.Path(folder) / "new.json"
            old.write_text("{}\n")
            for path in (old, new):
                refused(*self.MODEL, QWEN, "--program", "/bin/false", "--json", path)
            self.assertEqual((old.read_text(), new.exists()), ("{}\n", False))

    def test_what_nothing_foresees(self):
        errors = io.StringIO()
        with mock.patch.object(tool, "random_errors", side_effect=RuntimeError("unforeseen")), contextlib.redirect_stdout(io.StringIO()):
            with contextlib.redirect_stderr(errors):
                self.assertEqual(tool.main(["--errors", "--device", "cpu"]), 2)
        self.assertIn("RuntimeError: unforeseen", errors.getvalue())


class Usage(unittest.TestCase):
    def test_what_is_refused(self):
        for args, message in (((), "nothing to do"), (("--text", "x"), "nothing to do"),
                              (("--errors", "--routers", "hy4"), "--routers: 'hy4' is no router, needs some of hy3, "),
                              (("--model", QWEN), "--model needs --text"),
                              (("--errors", "--seeds", 0), "--seeds: '0' is no whole number of at least 1"),
                              (("--errors", "--counts", "a"), "--counts: 'a' is no whole number of at least 1"),
                              (("--errors", "--counts", "1,"), "--counts: '' is no whole number of at least 1"),
                              (("--model", QWEN, "--text", "x", "--windows", 0), "--windows: '0' is no whole number of at least 1"),
                              (("--agreement", "--seeds", 2), "--seeds is of --errors alone"),
                              (("--agreement", "--window", 64), "--window is of --model alone"),
                              (("--errors", "--text", "x"), "--text is of --model alone"),
                              (("--model", QWEN, "--text", "x", "--routers", "hy3"), "--routers is of --agreement and --errors alone")):
            with self.subTest(args):
                self.assertIn(message, refused(*args))

    def test_twice_is_once(self):
        args = tool.arguments(["--errors", "--routers", "qwen3,hy3,qwen3", "--counts", "4,1,4"])
        self.assertEqual((args.routers, args.counts), (["qwen3", "hy3"], [4, 1]))

    def test_help_needs_no_packages(self):
        def bare(*args):  # -S: without the environment's packages
            return subprocess.run([sys.executable, "-I", "-S", TOOL, *args], capture_output=True, text=True)

        said = bare("--help")
        self.assertEqual((said.returncode, said.stderr), (0, ""))
        self.assertIn("The exit code is 1 if ", said.stdout)
        self.assertIn("It is 2 if there is no verdict", said.stdout)
        missing = bare("--errors")
        self.assertEqual(missing.returncode, 2)
        self.assertRegex(missing.stderr, "^error: .* cannot import torch: .*\nTo install it: .*pip install torch\n$")

    def test_the_wheel_is_missing(self):
        with mock.patch.dict(sys.modules, {"vivace": None}):
            self.assertRegex(refused("--errors"), "cannot import vivace: .*\nTo install it: ./run wheel && ")

    def test_progress(self):
        errors = io.StringIO()
        with contextlib.redirect_stderr(errors), mock.patch.object(tool.time, "monotonic", side_effect=[100.0, 100.0, 102.0, 106.0, 107.0, 124.0]):
            progress = tool.Progress("hy3", 2000, "tokens")
            self.assertEqual(errors.getvalue(), "hy3: 0 of 2,000 tokens, 0.0 s\n")
            for done in (300, 500, 600, 2000):
                progress(done)
        self.assertEqual(errors.getvalue().splitlines()[1:],
                         ["hy3: 500 of 2,000 tokens, 6.0 s, about 18 s left", "hy3: 2,000 of 2,000 tokens, 24.0 s"])


if __name__ == "__main__":
    package.main()
