"""Runs the program under test. Every *_test.py uses it and ends with vivace.main()."""

import json
import os
import pathlib
import resource
import signal
import subprocess
import sys
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
DATA = ROOT / "tests" / "data"
QWEN = DATA / "tiny-qwen3-moe"
HY3 = DATA / "tiny-hy3"
SMOLLM2 = ROOT / "build" / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"  # ./run fetches it
BINARY = os.environ.get("VIVACE", str(ROOT / "build" / "bin" / "vivace"))
SANITIZED = bool(os.environ.get("VIVACE_SANITIZE"))


class Run:
    """What one call of the program gave back."""

    def __init__(self, code, out, err):
        self.code = code
        self.out = out  # bytes
        self.err = err  # text

    @property
    def text(self):
        return self.out.decode("utf-8")  # an exception here is a failed test: the output is not UTF-8

    @property
    def json(self):
        return json.loads(self.text)


def vivace(*args, timeout=300, max_file_bytes=None):
    def limit():  # the write fails instead of ending the program
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (max_file_bytes, max_file_bytes))

    done = subprocess.run([BINARY, *map(os.fspath, map(str, args))], capture_output=True, timeout=timeout, check=False,
                          preexec_fn=None if max_file_bytes is None else limit)
    return Run(done.returncode, done.stdout, done.stderr.decode("utf-8", "replace"))


class Case(unittest.TestCase):
    maxDiff = 4000

    def ok(self, *args, **kwargs):
        """Runs the program and expects success."""
        run = vivace(*args, **kwargs)
        self.assertEqual(run.code, 0, f"vivace {args}: {run.err}")
        return run

    def fails(self, code, message, *args):
        """Runs the program and expects this exit code, these words on standard error and nothing else."""
        run = vivace(*args)
        self.assertEqual(run.code, code, f"vivace {args}: {run.err}")
        self.assertIn(message, run.err)
        self.assertEqual(run.out, b"")
        return run


def main():
    unittest.main(verbosity=2)
