#!/usr/bin/env python3
"""Runs every test of vivace-gpu-tests under compute-sanitizer, a process for each test and tool, and prints a table.

Run      tools/sanitize_gpu.py [--filter 'Sampler.*:SameBits.*'] [--tool memcheck,racecheck] [--limit 240]

A cell is `ok`, what the tool found (`3 errors`, `1 hazard`), or why nothing is known: `failed` (the test did, and the tool
found nothing), `skipped`, `time` (over the limit) or `died` (no summary of the tool). The output of all that are not `ok`
stays in the folder of --logs, the seconds of a test are those of all its tools. The exit code is 1 unless all cells are `ok`
or `skipped`.

Kernels of libraries can be left unchecked by a part of their mangled names: --exclude cublas,nvjet,cutlass,xmma. Such parts
must not occur in ours, as `gemm` does.
"""

import argparse
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

TOOLS = ["memcheck", "racecheck", "initcheck", "synccheck"]
FOUND = 99  # exit code of the tool for what it found


def names_of(program, pattern):
    """The tests that a filter picks, as Suite.Name."""
    listed = subprocess.run([program, "--gtest_list_tests", f"--gtest_filter={pattern}"], capture_output=True, text=True,
                            check=True).stdout
    names, suite = [], ""
    for line in listed.splitlines():
        word = line.split("#")[0].rstrip()
        if word.startswith("  "):
            names.append(suite + word.strip())
        elif word.endswith("."):
            suite = word
    return names


def run_limited(command, limit):
    """Output and exit code; the code is None when the process and its children had to be ended."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        output, code = process.communicate(timeout=limit)[0], process.returncode
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, code = process.communicate()[0], None
    return output.decode(errors="replace"), code


def counted(number, noun):
    return f"{number} {noun}{'' if number == 1 else 's'}"


def cell_of(output, code):
    """What one process says about its test."""
    if code is None:
        return "time"
    hazards = re.search(r"RACECHECK SUMMARY: (\d+) hazard", output)
    errors = re.search(r"ERROR SUMMARY: (\d+) error", output)
    if hazards and int(hazards[1]) > 0:
        return counted(int(hazards[1]), "hazard")
    if errors and int(errors[1]) > 0:
        return counted(int(errors[1]), "error")
    if "[  FAILED  ]" in output:
        return "failed"
    if code != 0 or not (hazards or errors):
        return "died"
    return "skipped" if "[  SKIPPED ]" in output else "ok"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", default="build/bin/vivace-gpu-tests", help="default: %(default)s")
    parser.add_argument("--sanitizer", default="compute-sanitizer", help="default: %(default)s")
    parser.add_argument("--filter", default="*", help="as --gtest_filter has it; default: all tests")
    parser.add_argument("--tool", default=",".join(TOOLS), help="a list with commas; default: %(default)s")
    parser.add_argument("--limit", type=float, default=240, help="seconds of a process; default: %(default)s")
    parser.add_argument("--exclude", default="", help="parts of names of kernels that are not checked, a list with commas")
    parser.add_argument("--logs", default="build/sanitize", help="default: %(default)s")
    args = parser.parse_args()

    tools = args.tool.split(",")
    unknown = [tool for tool in tools if tool not in TOOLS]
    if unknown:
        parser.error(f"--tool is '{unknown[0]}', needs some of {', '.join(TOOLS)}")
    names = names_of(args.program, args.filter)
    if not names:
        parser.error(f"--filter picks no test: '{args.filter}'")
    excluded = [word for part in args.exclude.split(",") if part for word in ("--kernel-name-exclude", f"kns={part}")]
    logs = pathlib.Path(args.logs)
    logs.mkdir(parents=True, exist_ok=True)

    width = max(map(len, names))
    print(f"{'test':<{width}}" + "".join(f"  {tool:<12}" for tool in tools) + "  seconds", flush=True)
    cells = []
    for name in names:
        print(f"{name:<{width}}", end="", flush=True)
        start = time.monotonic()
        for tool in tools:
            command = [args.sanitizer, "--tool", tool, "--error-exitcode", str(FOUND), *excluded, args.program,
                       f"--gtest_filter={name}"]
            output, code = run_limited(command, args.limit)
            cells.append(cell_of(output, code))
            log = logs / f"{name.replace('/', '_')}.{tool}.txt"
            log.unlink(missing_ok=True)
            if cells[-1] != "ok":
                log.write_text(f"{' '.join(command)}\nexit code {code}\n\n{output}")
            print(f"  {cells[-1]:<12}", end="", flush=True)
        print(f"{time.monotonic() - start:9.1f}", flush=True)
    good = sum(cell in ("ok", "skipped") for cell in cells)
    print(f"\n{counted(len(names), 'test')}, {counted(len(cells), 'cell')}, {len(cells) - good} neither ok nor skipped; output: {logs}/")
    if not any(cell == "ok" for cell in cells):
        print("nothing ran: is there a GPU?", file=sys.stderr)
        return 1
    return 0 if good == len(cells) else 1


if __name__ == "__main__":
    sys.exit(main())
