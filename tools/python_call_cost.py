#!/usr/bin/env python3
"""What a call from Python costs on the host, in us: the median of rounds of 100 calls that the device keeps up with, and beside them one of
torch's own.

    python3 tools/python_call_cost.py [cpu|cuda]      with a Python that has torch and the wheel
"""

import statistics
import sys
import time

import torch
import vivace
import vivace.torch_ops
from vivace import _library

ROUNDS, CALLS = 60, 100


def median_us(call, device):
    call()
    rounds = []
    for _ in range(ROUNDS):
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(CALLS):
            call()
        rounds.append((time.perf_counter() - start) / CALLS * 1e6)
    return statistics.median(rounds)


def calls(device):
    """Each operator with outputs and workspace given, on as little work as there is: name, the call, and what its function packs."""
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


def main(device):
    where = torch.cuda.get_device_name() if device == "cuda" else "CPU, no rows"
    print(f"{where}, torch {torch.__version__}, Python {sys.version.split()[0]}: us a call")
    print(f"{'':20}{'direct':>10}{'torch.ops':>12}{'C call alone':>14}")
    x = torch.randn(1 if device == "cuda" else 0, 128, dtype=torch.bfloat16, device=device)
    y = torch.empty_like(x)
    print(f"{'torch.add, out':20}{median_us(lambda: torch.add(x, x, out=y), device):10.2f}")
    for name, call, (values, _) in calls(device):
        operator, entry = getattr(torch.ops.vivace, name), _library.ENTRIES[name]
        parts, stream = entry._call(values)
        packed = b"".join(parts)
        times = [median_us(timed, device) for timed in (call, lambda: operator(*values), lambda: entry._run(packed, stream))]
        print(f"{name:20}{times[0]:10.2f}{times[1]:12.2f}{times[2]:14.2f}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else ("cuda" if torch.cuda.is_available() else "cpu"))
