"""One engine with and without the plugin, on the same model: do they say the same, and how long does a token take?

    python3 -m vivace.verify --engine sglang --model MODEL --out verify.json
    python3 -m vivace.verify --engine vllm --model MODEL --vivace build/bin/vivace -- --load-format dummy --max-model-len 8192

Starts the engine's own server twice, first as it is, then with the plugin's flags; what stands after -- goes to both. Each gets the
same prompts of token ids, greedy, and the load of the engine's own benchmark client. With --vivace the program's load comes too,
and its report of both sides: what `vivace bench serve --compare` writes, as verify.html beside the JSON.

Ends with 0 when all was measured and outputs agree as far as --least-agreement asks, with 1 when they do not, with 2 when a side
could not be run, which the engine's log then explains, or was not to be: the flags do not fit.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import pathlib
import random
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from typing import Any, Callable, NamedTuple, Sequence

from . import _flags


class Engine(NamedTuple):
    """How to start an engine's server and its benchmark client. {model}, {port}, {requests}, ... are filled in."""

    serve: tuple[str, ...]
    plugin: tuple[str, ...]  # flags that choose it
    without: dict[str, str]  # environment that keeps the plugin from being loaded
    client: tuple[str, ...]
    tpot_ms: Callable[[dict[str, Any]], dict[str, float]]


def _named(result: dict[str, Any]) -> dict[str, float]:
    return {key: float(result[f"{key}_tpot_ms"]) for key in ("mean", "median", "p99") if f"{key}_tpot_ms" in result}


ENGINES = {
    "vllm": Engine(
        serve=("vllm", "serve", "{model}", "--host", "127.0.0.1", "--port", "{port}", "--dtype", "bfloat16"),
        plugin=("--attention-backend", "CUSTOM"),
        without={"VLLM_PLUGINS": "none"},
        client=("vllm", "bench", "serve", "--model", "{model}", "--host", "127.0.0.1", "--port", "{port}", "--dataset-name", "random",
                "--random-input-len", "{input}", "--random-output-len", "{output}", "--num-prompts", "{requests}", "--max-concurrency",
                "{concurrency}", "--ignore-eos", "--save-result", "--result-dir", "{folder}", "--result-filename", "{file}"),
        tpot_ms=_named),
    "sglang": Engine(
        serve=(sys.executable, "-m", "sglang.launch_server", "--model-path", "{model}", "--host", "127.0.0.1", "--port", "{port}",
               "--dtype", "bfloat16", "--page-size", "64"),
        plugin=("--attention-backend", "vivace"),
        without={"SGLANG_PLUGINS": "none"},
        client=(sys.executable, "-m", "sglang.bench_serving", "--backend", "sglang", "--model", "{model}", "--host", "127.0.0.1", "--port",
                "{port}", "--dataset-name", "random-ids", "--random-input-len", "{input}", "--random-output-len", "{output}",
                "--random-range-ratio", "1", "--num-prompts", "{requests}", "--max-concurrency", "{concurrency}", "--output-file", "{path}"),
        tpot_ms=_named),
}


# What stands after -- may not be: where the server listens, what it runs, and files of flags, which may say both.
OWN_FLAGS = ("--host", "--port", "--model", "--model-path", "--served-model-name", "--config")


class Trouble(Exception):
    """A side could not be run."""


class Server:
    """An engine's server while the block lasts."""

    grace_s = 30.0

    def __init__(self, command: Sequence[str], environment: dict[str, str], port: int, log: pathlib.Path, patience_s: float) -> None:
        self.command, self.environment, self.port, self.log, self.patience_s = command, environment, port, log, patience_s

    def __enter__(self) -> "Server":
        with self.log.open("wb") as log:
            try:
                self.process = subprocess.Popen(self.command, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, **self.environment},
                                                start_new_session=True)
            except OSError as error:
                raise Trouble(f"{self.command[0]}: {error.strerror}: is the engine installed?") from None
        try:
            self._wait()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _wait(self) -> None:
        until = time.monotonic() + self.patience_s
        while time.monotonic() < until:
            if self.process.poll() is not None:
                raise Trouble(f"the server ended with {self.process.returncode}; its log is {self.log}, and ends with\n{_tail(self.log)}")
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5):
                    return
            except (OSError, urllib.error.URLError):
                time.sleep(0.2)
        raise Trouble(f"the server was not ready after {self.patience_s:.0f} s; its log is {self.log}")

    def __exit__(self, *unused: object) -> None:
        """Ends the server and the workers that it started, which are of its session: all get grace_s to end in order."""
        until = time.monotonic() + self.grace_s
        try:
            os.killpg(self.process.pid, signal.SIGTERM)
            while time.monotonic() < until:
                self.process.poll()  # a child that ended is of the group until it was waited for
                os.killpg(self.process.pid, 0)
                time.sleep(0.05)
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait()


def _tail(path: pathlib.Path, lines: int = 12) -> str:
    return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])


def complete(port: int, model: str, prompt: list[int], tokens: int, log: pathlib.Path) -> str:
    """Greedy text of one prompt, by OpenAI's API, which both engines have. `log` is the server's, for when it gives none."""
    body = json.dumps({"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/completions", body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=600) as answer:
            return json.load(answer)["choices"][0]["text"]
    except urllib.error.HTTPError as error:
        raise Trouble(f"a completion was refused: {error.code}: {error.read(400).decode(errors='replace')}") from None
    except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError) as error:
        raise Trouble(f"a completion gave no text: {type(error).__name__}: {error}; the server's log is {log}, and ends with\n"
                      f"{_tail(log)}") from None


def agreement(a: Sequence[str], b: Sequence[str]) -> dict[str, Any]:
    """How far two runs of one plan gave the same text, as `vivace bench serve --compare` counts it."""
    shares = [len(os.path.commonprefix([x, y])) / max(len(x), len(y), 1) if x != y else 1.0 for x, y in zip(a, b, strict=True)]
    return {"compared": len(shares), "equal": sum(x == y for x, y in zip(a, b)), "common_share": statistics.fmean(shares) if shares else 1.0}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _run(command: Sequence[str], environment: dict[str, str]) -> None:
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, env={**os.environ, **environment})
    except OSError as error:
        raise Trouble(f"{command[0]}: {error.strerror}") from None
    if done.returncode:
        raise Trouble(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout[-2000:]}")


def side(engine: Engine, name: str, args: argparse.Namespace, prompts: list[list[int]], folder: pathlib.Path) -> dict[str, Any]:
    """Runs one side: greedy texts, the client's result, and the program's document where there is the program."""
    port, path = _free_port(), folder / f"verify.{name}.client.json"
    values = {"model": args.model, "port": port, "input": args.input_len, "output": args.output_len, "requests": args.requests,
              "concurrency": args.concurrency, "folder": folder, "file": path.name, "path": path}
    flags = [*args.engine_flags, *(engine.plugin if name == "plugin" else ())]  # an engine heeds the last of two
    command = [part.format(**values) for part in engine.serve] + flags
    environment = {} if name == "plugin" else engine.without
    log = folder / f"verify.{name}.log"
    with Server(command, environment, port, log, args.patience):
        texts = [complete(port, args.model, prompt, args.output_len, log) for prompt in prompts]
        path.unlink(missing_ok=True)
        _run([part.format(**values) for part in engine.client], environment)
        document = folder / f"verify.{name}.json"
        if args.vivace:
            _run([args.vivace, "bench", "serve", "--url", f"http://127.0.0.1:{port}", "--served-model-name", args.model, "--vocab",
                  str(args.vocab), "--requests", str(args.requests), "--concurrency", str(args.concurrency), "--temperature", "0",
                  "--json", str(document)], {})
    try:
        result = json.loads(path.read_text().splitlines()[-1])
    except (OSError, ValueError, IndexError) as error:
        raise Trouble(f"the benchmark client left no result in {path}: {error}") from None
    return {"command": command, "texts": texts, "client": result, "tpot_ms": engine.tpot_ms(result)}


def _check(engine: Engine, args: argparse.Namespace) -> None:
    """What would be noticed after an engine has run, or never."""
    own = {*OWN_FLAGS, *(flag for flag in engine.plugin if flag.startswith("--"))}
    for flag in args.engine_flags:
        name = flag.partition("=")[0].replace("_", "-")  # engines take either
        if name in own or (name.startswith("--") and "attention-backend" in name):
            raise Trouble(f"{flag} after --: this program sets {name} itself")
    if args.vivace and shutil.which(args.vivace) is None:
        raise Trouble(f"--vivace: {args.vivace}: there is no such program that can be run")


def verify(engine: Engine, args: argparse.Namespace) -> dict[str, Any]:
    """Both sides, side by side."""
    _check(engine, args)
    out = pathlib.Path(args.out).resolve()
    folder = out.parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Trouble(f"--out: {error.filename}: {error.strerror}") from None
    if out.is_dir() or not os.access(folder, os.W_OK):  # seen before the engines run
        raise Trouble(f"--out: {out}: needs a file that can be written")
    source = random.Random(args.seed)
    prompts = [[source.randrange(args.vocab) for _ in range(args.input_len)] for _ in range(args.prompts)]
    sides = {name: side(engine, name, args, prompts, folder) for name in ("default", "plugin")}
    report = {
        "engine": args.engine, "model": args.model, "agreement": agreement(sides["default"]["texts"], sides["plugin"]["texts"]),
        "tpot_ms": {name: found["tpot_ms"] for name, found in sides.items()},
        "tpot_ratio": _ratio(sides["default"]["tpot_ms"], sides["plugin"]["tpot_ms"]), "sides": sides,
        "notes": ["route overlap is not compared: neither server says which experts a token chose",
                  "greedy texts of two kernels part where two logits are closer than their rounding; compare with the engine against itself"],
    }
    if args.vivace:
        _run([args.vivace, "bench", "serve", "--compare", str(folder / "verify.default.json"), str(folder / "verify.plugin.json"),
              "--report", str(folder / "verify.html")], {})
    pathlib.Path(args.out).write_text(json.dumps(report, indent=1) + "\n")
    return report


def _ratio(before: dict[str, float], after: dict[str, float]) -> float | None:
    return after["median"] / before["median"] if before.get("median") and "median" in after else None


def text_of(report: dict[str, Any]) -> str:
    agreed = report["agreement"]
    lines = [f"{report['engine']}, {report['model']}", f"{'':12}{'mean':>10}{'median':>10}{'p99':>10}   ms per output token"]
    for name, times in report["tpot_ms"].items():
        lines.append(f"{name:12}" + "".join(f"{times[key]:10.2f}" if key in times else f"{'-':>10}" for key in ("mean", "median", "p99")))
    if report["tpot_ratio"]:
        lines.append(f"plugin / default  {report['tpot_ratio']:.3f}")
    lines.append(f"greedy texts  {agreed['equal']} of {agreed['compared']} equal, {100 * agreed['common_share']:.1f} % of the text before the "
                 "first difference")
    return "\n".join([*lines, *(f"note: {note}" for note in report["notes"])])


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python3 -m vivace.verify", description=__doc__.partition("\n")[0])

    def add(flag: str, default: Any, text: str, **options: Any) -> None:
        made.add_argument(flag, default=default, help=f"{text} (default: %(default)s)", **options)

    made.add_argument("--engine", choices=sorted(ENGINES), required=True)
    made.add_argument("--model", required=True, help="a name or a folder, as the engine takes it")
    add("--out", "verify.json", "the report; logs and results of both sides go beside it")
    made.add_argument("--vivace", metavar="PROGRAM", help="the program, for its own load and report")
    add("--prompts", 16, "greedy prompts that are compared", type=_flags.whole(1, 10**6), metavar="N")
    add("--vocab", 32000, "prompts are token ids below this", type=_flags.whole(1, 2**31 - 1), metavar="N")
    add("--input-len", 256, "tokens of a prompt, in the comparison and of the engine's client", type=_flags.whole(1, 10**6), metavar="N")
    add("--output-len", 64, "tokens that follow it", type=_flags.whole(1, 10**6), metavar="N")
    add("--requests", 64, "of the load under which tokens are timed", type=_flags.whole(1, 10**6), metavar="N")
    add("--concurrency", 16, "requests at a time", type=_flags.whole(1, 10**5), metavar="N")
    add("--seed", 1, "of the prompts that are compared", type=_flags.whole(0, 2**63 - 1), metavar="N")
    add("--least-agreement", 0.1, "of the text before two greedy outputs part; near 0 when one side computes something else",
        type=_flags.between(0, 1), metavar="SHARE")
    add("--patience", 900, "for a server to be ready", type=_flags.between(0, 10**6), metavar="S")
    made.add_argument("engine_flags", nargs="*", metavar="-- FLAGS", help="for the engine's server on both sides")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    args = parser().parse_args(arguments)
    try:
        report = verify(ENGINES[args.engine], args)
    except Trouble as problem:
        print(f"vivace.verify: {problem}", file=sys.stderr)
        return 2
    _flags.say(text_of(report))
    return 0 if report["agreement"]["common_share"] >= args.least_agreement else 1


if __name__ == "__main__":
    sys.exit(main())
