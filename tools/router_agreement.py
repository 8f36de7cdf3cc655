#!/usr/bin/env python3
"""How often router scores choose other experts than float64's, and how far from it they are: the modes of router_gemm beside torch.

    python3 tools/router_agreement.py --agreement         2,000,000 random tokens for each router, its weight in fp32 and in bf16
    python3 tools/router_agreement.py --errors            the largest error by number of tokens, mean of 20 seeds
    python3 tools/router_agreement.py --model DIR --text FILE
                                                          the same choices on what the routers of a model are given, and its perplexity

with a Python that has torch and the wheel; --model runs build/bin/vivace too. Random inputs and weights are from N(0, 1), inputs in bf16.

exact            mode exact
exact.invariant  with batch_invariant: on Hopper the bits of a call below 512 tokens, whatever the number here
two_term         mode two_term
fp32, tf32       torch's product; tf32 on a GPU alone
bf16             inputs and weight rounded to bf16, the rest as fp32

`other` are the tokens whose set of experts, chosen by route_top_k, is not float64's. Each falls short there: its worst expert's score in
float64 is below that of the last one chosen. `units` is the largest shortfall, in units of fp32 rounding, 2^-23 of the larger of both.
Below two, one for each score, fp32 cannot tell them apart: `excused`.

The exit code is 1 if one of exact is not excused, or if its mean error is above fp32's. It is 2 if there is no verdict: for arguments and files
that are refused, packages that are missing and programs that fail.
"""

from __future__ import annotations

import argparse
import importlib
import json
import mmap
import pathlib
import re
import struct
import subprocess
import sys
import tempfile
import time
import traceback
from typing import Any, Callable, NamedTuple

ROOT = pathlib.Path(__file__).resolve().parents[1]
UNIT, EXCUSED_UNITS = 2.0**-23, 2.0
TOKENS_OF_A_WEIGHT = 1 << 18  # then another is drawn
SCORES_ALONE = "takes part in the choice, which is by scores alone here"
ROUTER_WEIGHT = re.compile(r"model\.layers\.(\d+)\.mlp\.(?:router\.)?gate\.weight")
TYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
NAMES = {f"torch.{dtype}": name.lower() for name, dtype in TYPES.items()}
PACKAGES = {"torch": "python3 -m pip install torch", "vivace": "./run wheel && python3 -m pip install build/wheel/vivace-*.whl"}


class Fault(Exception):
    """Why there is no verdict."""


def import_packages():
    """Makes torch and vivace names of this module, once the arguments are read: --help needs neither."""
    for name, install in PACKAGES.items():
        try:
            globals()[name] = importlib.import_module(name)
        except (ImportError, OSError) as error:
            raise Fault(f"{sys.executable} cannot import {name}: {error}\nTo install it: {install}") from None


class Router(NamedTuple):
    experts: int
    hidden: int
    top_k: int


ROUTERS = {"hy3": Router(192, 4096, 8), "longcat-chat": Router(768, 6144, 12), "longcat-lite": Router(384, 3072, 12),
           "dsv3": Router(256, 7168, 8), "qwen3": Router(128, 4096, 8)}


class Ours:
    """router_gemm with a prepared weight."""

    def __init__(self, weight, **options):
        self.weight, self.options = weight, options

    def __call__(self, x):
        return vivace.router_gemm(x, self.weight, **self.options)

    def row(self, x):
        return vivace.router_gemm.explain(x, self.weight, **self.options).row


class Torch:
    """torch's product in fp32, or in tf32."""

    def __init__(self, weight, tf32=False, bf16=False):
        self.tf32, self.rounded = tf32, torch.Tensor.bfloat16 if bf16 else torch.Tensor.float
        self.weight = self.rounded(weight).float().t()

    def __call__(self, x):
        torch.backends.cuda.matmul.allow_tf32 = self.tf32
        return self.rounded(x).float() @ self.weight

    def row(self, x):
        return "torch"


def scorers(weight):
    """The ways to score with a weight, f32 or bf16."""
    exact = vivace.prepare_router_weight(weight, mode="exact")
    found = {"exact": Ours(exact), "exact.invariant": Ours(exact, batch_invariant=True),
             "two_term": Ours(vivace.prepare_router_weight(weight, mode="two_term")), "fp32": Torch(weight)}
    if weight.is_cuda:
        found["tf32"] = Torch(weight, tf32=True)
    found["bf16"] = Torch(weight, bf16=True)
    return found


class Choices(NamedTuple):
    """What float64 says of some tokens: its scores, the chosen experts by id, and the last chosen one's score."""

    scores: torch.Tensor
    ids: torch.Tensor
    last: torch.Tensor

    @classmethod
    def of(cls, scores, top_k):
        best, ids = scores.topk(top_k, dim=1)
        return cls(scores, ids.sort(dim=1).values, best[:, -1])


class Count(NamedTuple):
    """How the choices of some tokens compare with float64's; row is what computed the scores of the first."""

    row: str
    tokens: int = 0
    other: int = 0
    excused: int = 0
    units: float = 0.0

    def __add__(self, more):
        return Count(self.row, self.tokens + more.tokens, self.other + more.other, self.excused + more.excused, max(self.units, more.units))

    @classmethod
    def of(cls, score, x, choices):
        ids = vivace.route_top_k(score(x), choices.ids.shape[1]).expert_ids.long().sort(dim=1).values
        other = (ids != choices.ids).any(dim=1)
        worst = choices.scores.gather(1, ids).amin(dim=1)
        units = (choices.last - worst) / (UNIT * torch.maximum(choices.last.abs(), worst.abs()))
        counts = torch.stack([other.sum(), (other & (units < EXCUSED_UNITS)).sum(), torch.where(other, units, 0).amax()]).tolist()
        return cls(score.row(x), len(x), int(counts[0]), int(counts[1]), counts[2])


class Report:
    """Rows as they come, for people and for --json, and what must not be."""

    def __init__(self):
        self.rows, self.failures = {"agreement": [], "errors": [], "perplexity": []}, []

    def agreement(self, router, weight, counts):
        for name, count in counts.items():
            self.rows["agreement"].append({"router": router, "weight": weight, "scores": name, **count._asdict()})
            print(f"{router:<14}{weight:<8}{name:<17}{count.row:<13}{count.tokens:>10,}{count.other:>10,}"
                  f"{count.other / count.tokens:>10.1e}{count.excused:>9,}{count.units:>12,.2f}", flush=True)
            if name.startswith("exact") and count.other > count.excused:
                self.failures.append(f"{router}, {weight} weight: {name} chooses others for {count.other - count.excused} tokens "
                                     f"that nothing excuses, up to {count.units:.2f} units")

    def errors(self, router, tokens, means):
        self.rows["errors"].append({"router": router, "tokens": tokens, **means})
        ratio = means["exact"] / means["fp32"]
        print(f"{router:<14}{tokens:>7,}" + "".join(f"{means[name]:>11.2e}" for name in ERRORS_OF) + f"{ratio:>12.2f}", flush=True)
        if not means["exact"] <= means["fp32"]:
            self.failures.append(f"{router}, {tokens} token{'s' * (tokens > 1)}: the error of exact is {ratio:.2f} of fp32's, needs at most 1")

    def perplexity(self, mode, result):
        self.rows["perplexity"].append({"mode": mode, **result})
        print(f"perplexity, {mode}: {result['perplexity']:.4f} over {result['tokens']:,} predictions", flush=True)


AGREEMENT_HEAD = f"{'router':<14}{'weight':<8}{'scores':<17}{'row':<13}{'tokens':>10}{'other':>10}{'share':>10}{'excused':>9}{'units':>12}"
ERRORS_OF = ("exact", "two_term", "fp32")
ERRORS_HEAD = f"{'router':<14}{'tokens':>7}" + "".join(f"{name:>11}" for name in ERRORS_OF) + f"{'exact/fp32':>12}"


class Progress:
    """Lines on standard error: one at the start, then one every few seconds with how long the rest may take, and one at the end."""

    SECONDS = 5.0

    def __init__(self, what, total, unit):
        self.what, self.of, self.total, self.start, self.said = what, f"of {total:,} {unit}", total, time.monotonic(), 0.0
        self(0)

    def __call__(self, done):
        now = time.monotonic()
        if 0 < done < self.total and now - self.said < self.SECONDS:
            return
        self.said, spent = now, now - self.start
        left = f", about {spent * (self.total / done - 1):.0f} s left" if 0 < done < self.total else ""
        print(f"{self.what}: {done:,} {self.of}, {spent:.1f} s{left}", file=sys.stderr, flush=True)


def chunk_tokens(device):
    return 16384 if device == "cuda" else 4096


def draw(shape, generator, dtype):
    return torch.randn(shape, generator=generator, device=generator.device, dtype=dtype)


def random_agreement(name, tokens, device, report):
    """Both weights of a router over the same tokens, which are drawn once."""
    router, progress = ROUTERS[name], Progress(name, tokens, "tokens")
    generator = torch.Generator(device).manual_seed(1)
    ways, counts = {}, {"f32": {}, "bf16": {}}
    for begin in range(0, tokens, TOKENS_OF_A_WEIGHT):
        drawn = draw((router.experts, router.hidden), generator, torch.float32)
        for weight in counts:
            values = drawn if weight == "f32" else drawn.bfloat16()
            ways[weight] = values.double().t(), scorers(values)
        end = min(tokens, begin + TOKENS_OF_A_WEIGHT)
        for at in range(begin, end, chunk_tokens(device)):
            x = draw((min(end - at, chunk_tokens(device)), router.hidden), generator, torch.bfloat16)
            for weight, (reference, scored) in ways.items():
                count_choices(x, reference, scored, router.top_k, counts[weight])
            progress(at + len(x))
    for weight, found in counts.items():
        report.agreement(name, weight, found)


def count_choices(x, reference, scored, top_k, counts):
    """Adds the choices of these tokens to the counts of each way."""
    choices = Choices.of(x.double() @ reference, top_k)
    for name, score in scored.items():
        count = Count.of(score, x, choices)
        counts[name] = counts[name] + count if name in counts else count


def random_errors(name, token_counts, seeds, device, report):
    """A call of `count` tokens gets the first of those that a seed draws."""
    router, progress = ROUTERS[name], Progress(name, seeds, "seeds")
    sums = {tokens: dict.fromkeys(ERRORS_OF, 0.0) for tokens in token_counts}
    for seed in range(seeds):
        generator = torch.Generator(device).manual_seed(seed)
        x = draw((max(token_counts), router.hidden), generator, torch.bfloat16)
        weight = draw((router.experts, router.hidden), generator, torch.float32)
        reference, scored = x.double() @ weight.double().t(), scorers(weight)
        for tokens in token_counts:
            for way in ERRORS_OF:
                sums[tokens][way] += (scored[way](x[:tokens]).double() - reference[:tokens]).abs().max().item()
        progress(seed + 1)
    for tokens, found in sums.items():
        report.errors(name, tokens, {way: value / seeds for way, value in found.items()})


def tensors_of(path):
    """The tensors of a safetensors file by name, in its memory; None for one of another type."""
    try:
        with open(path, "rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        end = 8 + struct.unpack("<Q", data[:8])[0]
        if end > len(data):
            raise ValueError(f"its header would end at byte {end:,} of {len(data):,}")
        for name, tensor in json.loads(data[8:end]).items():
            if name == "__metadata__":
                continue
            begin, stop = tensor["data_offsets"]
            if end + stop > len(data):
                raise ValueError(f"{name} would end at byte {end + stop:,} of {len(data):,}")
            if tensor["dtype"] not in TYPES:
                yield name, None
                continue
            dtype = getattr(torch, TYPES[tensor["dtype"]])
            values = torch.frombuffer(data, dtype=dtype, count=(stop - begin) // dtype.itemsize, offset=end + begin)
            yield name, values.view(tensor["shape"])
    except OSError as error:
        raise Fault(f"{path} cannot be read: {error.strerror}") from None
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError, struct.error) as error:
        raise Fault(f"{path} is no safetensors file, or was cut: {error}") from None


def chosen_experts(folder):
    """How many experts a checkpoint chooses for a token."""
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise Fault(f"{folder}: config.json cannot be read: {error}") from None
    if not isinstance(config, dict):
        raise Fault(f"{folder}: config.json is no object")
    for key in ("n_group", "topk_group", "num_expert_group"):
        if config.get(key) not in (None, 0, 1):
            raise Fault(f"{folder}: config.json has {key} = {config[key]}, which {SCORES_ALONE}")
    if "num_experts_per_tok" not in config:
        raise Fault(f"{folder}: config.json has no num_experts_per_tok")
    top_k = config["num_experts_per_tok"]
    if not isinstance(top_k, int) or top_k < 1:
        raise Fault(f"{folder}: config.json has num_experts_per_tok = {json.dumps(top_k)}, needs at least 1")
    return top_k


def router_weights(folder):
    """The weights of a checkpoint's routers by layer."""
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        for name, tensor in tensors_of(file):
            if "expert_bias" in name or "e_score_correction_bias" in name:
                raise Fault(f"{folder}: {name} {SCORES_ALONE}")
            if match := ROUTER_WEIGHT.fullmatch(name):
                if tensor is None:
                    raise Fault(f"{folder}: {name} is of another type than {', '.join(TYPES)}")
                found[int(match[1])] = tensor
    if not found:
        raise Fault(f"{folder}: no *.safetensors has model.layers.N.mlp.gate.weight or model.layers.N.mlp.router.gate.weight")
    return found


def score(command):
    """What a call of `vivace score --json` says."""
    command = list(map(str, command))
    print(" ".join(command), file=sys.stderr, flush=True)
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, errors="replace")
    except OSError as error:
        raise Fault(f"--program {command[0]} cannot be run: {error.strerror}") from None
    printed = f"on standard output: {done.stdout[:500]!r}"
    if done.returncode:
        raise Fault(f"{command[0]} score ended with exit code {done.returncode}; {printed}")
    try:
        result = json.loads(done.stdout)
        float(result["perplexity"]), int(result["tokens"])
    except (KeyError, TypeError, ValueError):
        raise Fault(f"{command[0]} score gave no perplexity; {printed}") from None
    return result


def model_agreement(args, report):
    """Scores a text in both modes, and the inputs of the first in all ways, layer by layer."""
    top_k, weights = chosen_experts(args.model), router_weights(args.model)
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder) / "inputs.safetensors"
        for mode in ("exact", "two_term"):
            command = [args.program, "score", "--model", args.model, "--text-file", args.text, "--window", args.window,
                       "--device", args.device, "--router-mode", mode, "--json", *(("--max-windows", args.windows) if args.windows else ()),
                       *(("--router-inputs", file) if mode == "exact" else ())]
            report.perplexity(mode, score(command))
        print(AGREEMENT_HEAD)
        for name, inputs in tensors_of(file):
            layer = int(name.split(".")[2])
            weight = weights[layer].to(args.device)
            reference, scored, counts = weight.double().t(), scorers(weight), {}
            for x in inputs.split(chunk_tokens(args.device)):
                count_choices(x.to(args.device), reference, scored, top_k, counts)
            report.agreement(f"layer {layer}", NAMES[str(weight.dtype)], counts)


def check_writable(path):
    """Says before the run what would be found after it. A file that is there stays as it is, one that is not does not stay."""
    if path.is_fifo():
        return  # whose reader would take the end of this for the end of all
    try:
        there = path.exists()
        with open(path, "ab") as file:
            file.write(b"\n" if path.is_char_device() else b"")
        if not there:
            path.resolve().unlink()
    except OSError as error:
        raise Fault(f"--json {path} cannot be written: {error.strerror}") from None


def at_least_1(text):
    if not (text.isascii() and text.isdecimal() and int(text)):
        raise argparse.ArgumentTypeError(f"'{text}' is no whole number of at least 1")
    return int(text)


def at_least_1_each(text):
    return list(dict.fromkeys(map(at_least_1, text.split(","))))


def router_names(text):
    names = list(dict.fromkeys(text.split(",")))
    for name in names:
        if name not in ROUTERS:
            raise argparse.ArgumentTypeError(f"'{name}' is no router, needs some of {', '.join(ROUTERS)}")
    return names


class Option(NamedTuple):
    """What some modes take and the others refuse."""

    modes: tuple
    type: Callable[[str], Any]
    metavar: str
    default: Any
    help: str

    def where(self):
        return " and ".join(f"--{mode}" for mode in self.modes)


OPTIONS = {
    "text": Option(("model",), pathlib.Path, "FILE", None, "what the model reads"),
    "routers": Option(("agreement", "errors"), router_names, "NAME[,...]", list(ROUTERS), f"some of {', '.join(ROUTERS)}; default: all"),
    "tokens": Option(("agreement",), at_least_1, "N", 2_000_000, "default: 2000000"),
    "counts": Option(("errors",), at_least_1_each, "N[,...]", [1, 4, 16, 48, 96, 208, 512, 1024, 2048, 4096, 8192],
                     "numbers of tokens; default: the targets'"),
    "seeds": Option(("errors",), at_least_1, "N", 20, "default: 20"),
    "window": Option(("model",), at_least_1, "N", 512, "in tokens; default: 512"),
    "windows": Option(("model",), at_least_1, "N", None, "stop after so many; default: all"),
    "program": Option(("model",), pathlib.Path, "FILE", ROOT / "build" / "bin" / "vivace", "default: build/bin/vivace"),
}


def arguments(given):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agreement", action="store_true", help="count choices on random tokens")
    parser.add_argument("--errors", action="store_true", help="measure errors on random tokens")
    parser.add_argument("--model", type=pathlib.Path, metavar="DIR", help="a folder of Hugging Face's whose experts are chosen by scores alone")
    for name, option in OPTIONS.items():
        parser.add_argument(f"--{name}", type=option.type, metavar=option.metavar, help=f"of {option.where()}; {option.help}")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where torch finds a GPU")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write the rows there too")
    args = parser.parse_args(given)
    if not (args.agreement or args.errors or args.model):
        parser.error("nothing to do: one of --agreement, --errors and --model is needed")
    for name, option in OPTIONS.items():
        if getattr(args, name) is None:
            setattr(args, name, option.default)
        elif not any(getattr(args, mode) for mode in option.modes):
            parser.error(f"--{name} is of {option.where()} alone")
    if args.model and not args.text:
        parser.error("--model needs --text")
    return args


def measure(args):
    """The exit code of a run."""
    if args.json:
        check_writable(args.json)
    import_packages()
    if args.device is None:
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    elif args.device == "cuda" and not torch.cuda.is_available():
        raise Fault(f"--device cuda: torch {torch.__version__} finds no GPU")
    report, where = Report(), torch.cuda.get_device_name() if args.device == "cuda" else "CPU"
    print(f"{where}, torch {torch.__version__}, vivace {vivace.__version__}", flush=True)
    if args.agreement:
        print(AGREEMENT_HEAD, flush=True)
        for name in args.routers:
            random_agreement(name, args.tokens, args.device, report)
    if args.errors:
        print(ERRORS_HEAD, flush=True)
        for name in args.routers:
            random_errors(name, args.counts, args.seeds, args.device, report)
    if args.model:
        model_agreement(args, report)
    if args.json:
        result = {"device": where, "torch": torch.__version__, **report.rows, "failures": report.failures}
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    for failure in report.failures:
        print(failure, file=sys.stderr)
    return 1 if report.failures else 0


def main(given=None):
    args = arguments(given)
    try:
        return measure(args)
    except (Fault, OSError) as fault:
        print(f"error: {fault}", file=sys.stderr)
    except Exception:
        traceback.print_exc()
    return 2


if __name__ == "__main__":
    sys.exit(main())
