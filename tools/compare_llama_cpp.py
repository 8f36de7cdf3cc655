#!/usr/bin/env python3
"""Times Vivace against llama.cpp on one GGUF file: decode, prefill of 512 tokens, eight concurrent requests.

Setup    python3 -m venv build/llama && build/llama/bin/pip install llama-cpp-python==0.3.36
Run      build/llama/bin/python tools/compare_llama_cpp.py [--model FILE] [--threads 2] [--runs 3]

Runs alternate (llama.cpp, Vivace, llama.cpp, ...) and medians are printed, so that drift of a shared machine hits both.
llama.cpp is timed around llama_decode alone, so the Python binding's own work is not in its figures. Vivace's are
those of `generate --json` (ttft_ms, tpot_ms) and `bench serve --json` (throughput and TPOT of 8 concurrent requests).
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
PREFILL_TOKENS = 512
DECODE_TOKENS = 128
CONCURRENCY = 8


def prompt_ids(count, vocab):
    """A fixed pseudo-random sequence of ordinary ids."""
    state, ids = 1, []
    for _ in range(count):
        state = (state * 1103515245 + 12345) % 2**31
        ids.append(100 + state // 7 % (vocab - 200))
    return ids


class LlamaCpp:
    def __init__(self, model, threads):
        import llama_cpp
        import numpy

        self.api, self.numpy = llama_cpp, numpy
        self.model = llama_cpp.Llama(model_path=model, n_ctx=2048, n_batch=PREFILL_TOKENS, n_ubatch=PREFILL_TOKENS,
                                     n_threads=threads, n_threads_batch=threads, verbose=False)
        self.context, self.vocab = self.model._ctx.ctx, self.model.n_vocab()

    def decode(self, ids):
        """Seconds of one llama_decode call that appends `ids`."""
        tokens = (self.api.llama_token * len(ids))(*ids)  # the batch points into it
        batch = self.api.llama_batch_get_one(tokens, len(ids))
        begin = time.perf_counter()
        if self.api.llama_decode(self.context, batch) != 0:
            raise RuntimeError("llama_decode failed")
        self.api.llama_synchronize(self.context)
        return time.perf_counter() - begin

    def reset(self):
        self.api.llama_memory_clear(self.api.llama_get_memory(self.context), True)

    def run(self):
        """Milliseconds per prefilled token and per decoded token (greedy; the arg max is not in the time)."""
        self.reset()
        prefill = self.decode(prompt_ids(PREFILL_TOKENS, self.vocab))
        self.reset()
        self.decode(prompt_ids(16, self.vocab))
        token, times = 504, []
        for _ in range(DECODE_TOKENS):
            times.append(self.decode([token]))
            logits = self.api.llama_get_logits_ith(self.context, -1)
            token = int(self.numpy.ctypeslib.as_array(logits, shape=(self.vocab,)).argmax())
        return {"prefill_ms": 1e3 * prefill / PREFILL_TOKENS, "decode_ms": 1e3 * sum(times) / len(times)}


class Vivace:
    def __init__(self, program, model, threads, vocab):
        self.program, self.model, self.threads, self.vocab = program, model, threads, vocab

    def call(self, *args):
        output = subprocess.run([self.program, *args, "--model", self.model, "--threads", str(self.threads)],
                                check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL).stdout
        return output

    def generate(self, tokens_in, tokens_out):
        ids = ",".join(map(str, prompt_ids(tokens_in, self.vocab)))
        return json.loads(self.call("generate", "--prompt-ids", ids, "--max-tokens", str(tokens_out), "--ignore-eos",
                                    "--temperature", "0", "--json"))

    def run(self):
        result = {"prefill_ms": self.generate(PREFILL_TOKENS, 1)["ttft_ms"] / PREFILL_TOKENS,
                  "decode_ms": self.generate(16, DECODE_TOKENS)["tpot_ms"]}
        with tempfile.NamedTemporaryFile(suffix=".json") as out:
            self.call("bench", "serve", "--workload", "uniform", "--requests", str(2 * CONCURRENCY),
                      "--concurrency", str(CONCURRENCY), "--json", out.name)
            bench = json.load(open(out.name))
        result["batch_tpot_ms"] = bench["tpot_ms"]["median"]
        result["batch_throughput"] = bench["throughput_tok_s"]
        return result


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=os.path.join(ROOT, "build/models/SmolLM2-135M-Instruct.Q4_1.gguf"))
    parser.add_argument("--program", default=os.path.join(ROOT, "build/bin/vivace"))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--runs", type=int, default=3)
    args = parser.parse_args()

    peer = LlamaCpp(args.model, args.threads)
    ours = Vivace(args.program, args.model, args.threads, peer.vocab)
    peer.run()  # warm up: page cache, thread pools
    rows = []
    for run in range(args.runs):
        theirs, mine = peer.run(), ours.run()
        rows.append((theirs, mine))
        print(f"run {run + 1}: llama.cpp {theirs}  vivace {mine}", file=sys.stderr)

    def median(index, key):
        return statistics.median(row[index][key] for row in rows)

    decode_peer, decode = 1e3 / median(0, "decode_ms"), 1e3 / median(1, "decode_ms")
    prefill_peer, prefill = 1e3 / median(0, "prefill_ms"), 1e3 / median(1, "prefill_ms")
    batch = CONCURRENCY * 1e3 / median(1, "batch_tpot_ms")
    whole = median(1, "batch_throughput")
    print(f"{'':34}{'llama.cpp':>12}{'vivace':>12}{'ratio':>8}   (tokens/s, medians of {args.runs}, {args.threads} threads)")
    print(f"{'decode, one stream':34}{decode_peer:12.1f}{decode:12.1f}{decode / decode_peer:8.2f}")
    print(f"{'prefill of 512 tokens':34}{prefill_peer:12.1f}{prefill:12.1f}{prefill / prefill_peer:8.2f}")
    print(f"{'8 concurrent, decode (8 / TPOT)':34}{decode_peer:12.1f}{batch:12.1f}{batch / decode_peer:8.2f}")
    print(f"{'8 concurrent, output over all time':34}{decode_peer:12.1f}{whole:12.1f}{whole / decode_peer:8.2f}")


if __name__ == "__main__":
    main()
