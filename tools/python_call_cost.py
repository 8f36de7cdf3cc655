#!/usr/bin/env python3
"""What a call from Python costs on the host, in us: of rounds of 100 calls that the device keeps up with, the median, and in brackets what a
tenth of them took at most. Every round has all calls in turn, and the first two seconds of rounds are not counted, so that a slower start of
the processor is in none of them. Beside them one of torch's own and an empty kernel: what the driver takes of any call.

    python3 tools/python_call_cost.py [cpu|cuda]      with a Python that has torch and the wheel
"""

import ctypes
import statistics
import sys
import time

import torch
import vivace
import vivace.torch_ops
from vivace import _library

WARM_SECONDS, ROUNDS, CALLS = 2, 200, 100


def cost_of(calls, synchronize):
    """Of each call: median and first tenth."""
    rounds, start = [[] for _ in calls], time.perf_counter()
    while len(rounds[0]) < ROUNDS:
        warm = time.perf_counter() - start > WARM_SECONDS
        for call, taken in zip(calls, rounds):
            synchronize()
            call()
            begin = time.perf_counter()
            for _ in range(CALLS):
                call()
            if warm:
                taken.append((time.perf_counter() - begin) / CALLS * 1e6)
    return [(statistics.median(taken), statistics.quantiles(taken, n=10)[0]) for taken in rounds]


class _LaunchConfig(ctypes.Structure):  # CUlaunchConfig
    _fields_ = [("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("shared_bytes", ctypes.c_uint), ("stream", ctypes.c_void_p),
                ("attributes", ctypes.POINTER(ctypes.c_int)), ("attribute_count", ctypes.c_uint)]


def empty_kernel():
    """Launches one as the operators launch theirs, where the GPU knows that: it may start before the kernel ahead ends. Through ctypes, as
    "C call alone" is.
    """
    driver, module, function = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p(), ctypes.c_void_p()
    overlap = (ctypes.c_int * 18)(6, 0, 1)  # a CUlaunchAttribute: CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    config = _LaunchConfig((1, 1, 1), (32, 1, 1), 0, torch.cuda.current_stream().cuda_stream or None, overlap,
                           int(torch.cuda.get_device_capability() >= (9, 0)))

    def launch(start=driver.cuLaunchKernelEx, config=ctypes.byref(config)):
        return start(config, function, None, None)

    source = b".version 7.0\n.target sm_80\n.address_size 64\n.visible .entry empty() { ret; }\n"
    for what, code in (("load", driver.cuModuleLoadData(ctypes.byref(module), source)),
                       ("find", driver.cuModuleGetFunction(ctypes.byref(function), module, b"empty")), ("launch", launch())):
        if code:
            raise RuntimeError(f"the driver does not {what} an empty kernel: CUresult {code}")
    return launch


def operators(device):
    """Each with outputs and workspace given, on as little work as there is: name, the call, and what its function packs."""
    bf16 = {"dtype": torch.bfloat16, "device": device}
    rows = 1 if device == "cuda" else 0  # none: on the CPU the work itself would be in the time
    x, weight = torch.randn(rows, 128, **bf16), torch.ones(128, **bf16)
    y = torch.empty_like(x)
    yield "rms_norm", lambda: vivace.rms_norm(x, weight, out=y), vivace.rms_norm._build(x, weight, out=y)
    yield "silu_mul", lambda: vivace.silu_mul(x, x, out=y), vivace.silu_mul._build(x, x, out=y)
    q, k, v = torch.randn(rows, 8, 128, **bf16), torch.randn(2, 16, 1, 128, **bf16), torch.randn(2, 16, 1, 128, **bf16)
    pages, lengths = torch.zeros(rows, 2, dtype=torch.int32, device=device), torch.ones(rows, dtype=torch.int32, device=device)
    starts = torch.arange(rows + 1, dtype=torch.int32, device=device)
    params = vivace.attention_decode_schedule_params(q, k, pages)
    schedule = vivace.decode_schedule(lengths, starts, params)
    yield ("decode_schedule", lambda: vivace.decode_schedule(lengths, starts, params, out=schedule),
           vivace.decode_schedule._build(lengths, starts, params, out=schedule))
    args = (q, k, v, pages, lengths, starts, schedule, params)
    out, scratch = torch.empty_like(q), torch.empty(max(vivace.attention_decode.workspace_bytes(*args), 1), dtype=torch.uint8, device=device)
    yield ("attention_decode", lambda: vivace.attention_decode(q, k, v, pages, lengths, starts, schedule, params, out=out, workspace=scratch),
           vivace.attention_decode._build(*args, out=out, workspace=scratch))


def three_ways(name, call, values):
    entry = _library.ENTRIES[name]
    parts, stream = entry._call(values)
    run, packed, custom = entry._run, b"".join(parts), getattr(torch.ops.vivace, name)
    return [call, lambda: custom(*values), lambda: run(packed, stream)]


def main(device):
    cuda = device == "cuda"
    x = torch.randn(1 if cuda else 0, 128, dtype=torch.bfloat16, device=device)
    y = torch.empty_like(x)
    calls = {"torch.add, out": [lambda: torch.add(x, x, out=y)]}
    if cuda:
        calls["an empty kernel"] = [empty_kernel()]
    for name, call, (values, _) in operators(device):
        calls[name] = three_ways(name, call, values)
    costs = iter(cost_of([call for ways in calls.values() for call in ways], torch.cuda.synchronize if cuda else lambda: None))
    print(f"{torch.cuda.get_device_name() if cuda else 'CPU, no rows'}, torch {torch.__version__}, Python {sys.version.split()[0]}: us a call")
    print(f"{'':20}{'direct':>16}{'torch.ops':>16}{'C call alone':>16}")
    for name, ways in calls.items():
        texts = [f"{median:.2f} ({tenth:.2f})" for median, tenth in (next(costs) for _ in ways)]
        print(f"{name:20}" + "".join(f"{text:>16}" for text in (["", "", *texts] if name == "an empty kernel" else texts)))


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else ("cuda" if torch.cuda.is_available() else "cpu"))
