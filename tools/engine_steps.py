#!/usr/bin/env python3
"""vLLM's whole engine in this process, with or without the plugin: the time of its decode steps, or the tokens it says.

    python3 tools/engine_steps.py default MODEL                 a folder with config.json; weights are random
    python3 tools/engine_steps.py vivace MODEL --kv fp8 --moe
    python3 tools/engine_steps.py vivace tests/data/tiny-qwen3-moe --references tests/data/tiny-qwen3-moe/references.json

With a Python that has torch, vLLM 0.33 and the wheel, beside a Hopper GPU. --shape qwen3-30b-a3b writes MODEL/config.json first, 16
layers of that shape (--fp8-blocks: weights in fp8 with blocks of 128).
"""

import argparse
import json
import os
import pathlib
import statistics
import time

QWEN3 = dict(architectures=["Qwen3MoeForCausalLM"], model_type="qwen3_moe", dtype="bfloat16", hidden_act="silu", hidden_size=2048,
             num_attention_heads=32, num_key_value_heads=4, head_dim=128, num_hidden_layers=16, moe_intermediate_size=768,
             intermediate_size=6144, num_experts=128, num_experts_per_tok=8, norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[],
             vocab_size=151936, max_position_embeddings=40960, rms_norm_eps=1e-6, rope_theta=1000000.0, tie_word_embeddings=False,
             attention_bias=False, bos_token_id=0, eos_token_id=2)
BATCHES = (1, 8, 32, 64)


def prompts(lengths):
    return [{"prompt_token_ids": [(7 * i + 13 * j * j + 3) % 4000 + 5 for j in range(length)]} for i, length in enumerate(lengths)]


def step_ms(llm, sampling, name, lengths, tokens):
    """The median of the steps behind the last prompt's first ones."""
    times = []
    for i, prompt in enumerate(prompts(lengths)):
        llm.llm_engine.add_request(f"{name}-{i}", prompt, sampling(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False))
    while llm.llm_engine.has_unfinished_requests():
        begin = time.perf_counter()
        llm.llm_engine.step()
        times.append(time.perf_counter() - begin)
    return statistics.median(times[-tokens + 6:-2]) * 1000


def against_references(llm, sampling, path):
    """Where greedy tokens part from the reference's, and how far its two best tokens are apart there."""
    cases = json.loads(path.read_text())["cases"]
    given = [{"prompt_token_ids": case["prompt_ids"]} for case in cases]
    longest = max(len(case["greedy_ids"]) for case in cases)
    outputs = llm.generate(given, sampling(temperature=0, max_tokens=longest, ignore_eos=True), use_tqdm=False)
    for case, output in zip(cases, outputs):
        want, got = case["greedy_ids"], output.outputs[0].token_ids
        first = next((i for i, (a, b) in enumerate(zip(want, got)) if a != b), None)
        print(f"{len(case['prompt_ids']):6} prompt tokens: " +
              (f"{len(want)} equal" if first is None else f"{first} equal, then a gap of {case['greedy_gap'][first]:.4f}"))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("side", choices=("default", "vivace"))
    parser.add_argument("model", type=pathlib.Path)
    parser.add_argument("--kv", default="auto", help="vLLM's --kv-cache-dtype")
    parser.add_argument("--moe", action="store_true", help="the plugin's experts, too; they want fp8 weights")
    parser.add_argument("--shape", choices=("qwen3-30b-a3b",), help="write MODEL/config.json")
    parser.add_argument("--fp8-blocks", action="store_true")
    parser.add_argument("--references", type=pathlib.Path, help="a file of references; the model's own weights are read then")
    args = parser.parse_args()
    if args.shape:
        blocks = {"quantization_config": {
            "quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
            "modules_to_not_convert": [f"model.layers.{i}.mlp.gate" for i in range(QWEN3["num_hidden_layers"])] + ["lm_head"]}}
        args.model.mkdir(parents=True, exist_ok=True)
        (args.model / "config.json").write_text(json.dumps({**QWEN3, **(blocks if args.fp8_blocks else {})}))
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, SamplingParams
    options = dict(model=str(args.model), kv_cache_dtype=args.kv, seed=0, gpu_memory_utilization=0.1, kv_cache_memory_bytes=3 << 30)
    if args.side == "vivace":
        options.update(attention_backend="CUSTOM", additional_config={"vivace": {"router": True, "moe": args.moe}})
        if args.moe:
            options.update(moe_backend="triton")
    if args.references:
        llm = LLM(**options, enforce_eager=True, max_model_len=2048, max_num_seqs=16)
        against_references(llm, SamplingParams, args.references)
    else:
        llm = LLM(**options, load_format="dummy", skip_tokenizer_init=True, max_model_len=18432, max_num_seqs=max(BATCHES),
                  enable_prefix_caching=False,
                  compilation_config={"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": list(BATCHES)})
        step_ms(llm, SamplingParams, "warm", [1024] * max(BATCHES), 12)
        for name, lengths in (*((f"{n} of 1024", [1024] * n) for n in BATCHES), ("16384 and 31 of 1024", [16384] + [1024] * 31)):
            print(f"{name:22}{step_ms(llm, SamplingParams, name, lengths, 64):8.3f} ms a step", flush=True)
    if args.side == "vivace":
        import vivace
        for call in vivace.counts():
            print(f"{call['op']:22}{call['row']:16}{call['calls']:8} calls outside graphs")


if __name__ == "__main__":
    main()
