#!/usr/bin/env python3
"""A decode step's parts through torch: vLLM's own kernels beside the plugin's, us a layer, as replays of a CUDA graph.

    python3 tools/engine_parts.py [--shape hy3]      with a Python that has torch, vLLM and the wheel, beside a Hopper GPU

The shapes are Qwen3-30B-A3B's, or Hy3's, whole or of a rank of eight. A graph has LAYERS layers with weights and caches of their own, so
that nothing stays in the L2 from one replay to the next; the step's plan (FlashAttention's scheduler metadata, the decode schedule) is made
once in it. Each line also has the distance of the two outputs, |ours - theirs| / |theirs|.
"""

import argparse
import dataclasses
import statistics

import torch
import vivace
import vivace.torch_ops
from vivace.plugins import serving
from vllm import _custom_ops as ops
from vllm.model_executor.layers.fused_moe.config import fp8_w8a8_moe_quant_config
from vllm.model_executor.layers.fused_moe.fused_moe import fused_experts
from vllm.vllm_flash_attn.flash_attn_interface import flash_attn_varlen_func, get_scheduler_metadata

LAYERS, REPLAYS, BATCHES = 4, 30, (1, 8, 32, 64)
DIM, PAGE, TOP_K = 128, 16, 8
SPLITS = 32  # vLLM's bound in CUDA graphs
BF16 = {"dtype": torch.bfloat16, "device": "cuda"}
FP8 = torch.float8_e4m3fn


@dataclasses.dataclass(frozen=True)
class Shape:
    """What a GPU has of a layer."""
    heads: int
    heads_kv: int
    hidden: int
    experts: int
    intermediate: int
    sigmoid: bool  #: scores with a correction bias, else softmax

    @property
    def blocks(self):
        """Whether weights in fp8 have scales of blocks of 128; one scale a tensor where gate and up would share a block."""
        return self.intermediate % 128 == 0


SHAPES = {"qwen3-30b-a3b": Shape(heads=32, heads_kv=4, hidden=2048, experts=128, intermediate=768, sigmoid=False),
          "hy3": Shape(heads=64, heads_kv=8, hidden=4096, experts=192, intermediate=1536, sigmoid=True),
          "hy3@tp8": Shape(heads=8, heads_kv=1, hidden=4096, experts=192, intermediate=192, sigmoid=True)}


def graph_us(step):
    """The median replay of a graph with LAYERS layers, a layer, and what the step gave."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(REPLAYS)]
    for begin, end in [marks[0], *marks]:
        begin.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in marks) * 1000 / LAYERS, out


def report(part, batch, what, theirs, ours):
    """theirs and ours are steps that return their last layer's output."""
    try:
        (a, x), (b, y) = graph_us(theirs), graph_us(ours)
    except Exception as error:  # the other lines still count
        print(f"{part:10}{batch:>6} {what:14} {type(error).__name__}: {str(error)[:300]}", flush=True)
        return
    distance = float((y.float() - x.float()).norm() / x.float().norm())
    print(f"{part:10}{batch:>6} {what:14}{a:10.2f}{b:10.2f}{a / b:8.2f}{distance:12.1e}", flush=True)


def lengths_of(batch, what):
    """All alike, or one request of 32768 among short ones; about the same bytes for 8 requests or more."""
    if what == "4096 each":
        return [4096] * batch
    return [32768] + [1024 + 37 * (i % 20) for i in range(batch - 1)]


def attention(shape, batch, what, kv):
    heads, heads_kv = shape.heads, shape.heads_kv
    lengths = lengths_of(batch, what)
    pages_of = [-(-n // PAGE) for n in lengths]
    pool, width = sum(pages_of), max(pages_of)
    order, table, at = torch.randperm(pool, dtype=torch.int32), torch.zeros(batch, width, dtype=torch.int32), 0
    for i, n in enumerate(pages_of):
        table[i, :n] = order[at:at + n]
        at += n
    table, seq = table.cuda(), torch.tensor(lengths, dtype=torch.int32, device="cuda")
    start = torch.arange(batch + 1, dtype=torch.int32, device="cuda")
    caches = [torch.randn(pool, PAGE, heads_kv, 2 * DIM, **BF16).to(kv) for _ in range(LAYERS)]
    q, out, out2 = torch.randn(batch, heads, DIM, **BF16), torch.empty(batch, heads, DIM, **BF16), torch.empty(batch, heads, DIM, **BF16)
    fp8 = kv == FP8
    one = torch.ones(1, device="cuda")
    longest = max(lengths)

    def theirs():
        plan = get_scheduler_metadata(batch_size=batch, max_seqlen_q=1, max_seqlen_k=longest, num_heads_q=heads, num_heads_kv=heads_kv,
                                      headdim=DIM, cache_seqlens=seq, qkv_dtype=kv, cu_seqlens_q=start, page_size=PAGE, causal=True,
                                      num_splits=SPLITS)
        for cache in caches:
            k, v = cache.split(DIM, dim=-1)
            query, scales = q, {}
            if fp8:  # vLLM quantises queries too
                query, _ = ops.scaled_fp8_quant(q.view(batch, -1), one)
                query = query.view(q.shape)
                scales = {name: one.expand(batch, heads_kv) for name in ("q_descale", "k_descale", "v_descale")}
            flash_attn_varlen_func(query, k, v, max_seqlen_q=1, cu_seqlens_q=start, max_seqlen_k=longest, seqused_k=seq, causal=True,
                                   block_table=table, out=out, scheduler_metadata=plan, num_splits=SPLITS, fa_version=3, **scales)
        return out

    plan = serving.DecodePlan(torch.device("cuda"), max_requests=batch, max_pages=width, heads_q=heads, heads_kv=heads_kv, head_dim=DIM,
                              page_tokens=PAGE, q_dtype=torch.bfloat16, kv_dtype=kv)
    layer = serving.Attention(softmax_scale=DIM**-0.5)

    def ours():
        plan.write(seq, start)
        for cache in caches:
            k, v = cache.split(DIM, dim=-1)
            layer.decode(plan, q, k, v, table, seq, start, out2, k_scale=one, v_scale=one)
        return out2

    report("attention", batch, f"{'fp8' if fp8 else 'bf16'}, {what}", theirs, ours)


def routed(shape, batch):
    logits = torch.randn(batch, shape.experts, device="cuda")
    weights, ids = logits.softmax(-1).topk(TOP_K)
    return (weights / weights.sum(-1, keepdim=True)).contiguous(), ids.to(torch.int32).contiguous()


def experts(shape, layers, fp8):
    block = fp8 and shape.blocks
    one = torch.ones(1, device="cuda")  # of activations, where weights have one scale a tensor
    static = {"a1_scale": one, "a2_scale": one} if fp8 and not block else {}
    for batch in BATCHES:
        x = torch.randn(batch, shape.hidden, **BF16)
        routes = [routed(shape, batch) for _ in layers]
        out = torch.empty(batch, shape.hidden, **BF16)

        def theirs():
            for (gate_up, down, s1, s2), (weights, ids) in zip(layers, routes):
                config = fp8_w8a8_moe_quant_config(w1_scale=s1, w2_scale=s2, block_shape=[128, 128] if block else None,
                                                   **static) if fp8 else None
                result = fused_experts(x, gate_up, down, weights, ids, quant_config=config)
            return result

        def ours():
            for (gate_up, down, s1, s2), (weights, ids) in zip(layers, routes):
                serving.experts(x, gate_up, down, ids, weights, gate_up_scale=s1, down_scale=s2, x_scale=static.get("a1_scale"),
                                act_scale=static.get("a2_scale"), block=block, out=out)
            return out

        report("experts", batch, "fp8 blocks" if block else "fp8" if fp8 else "bf16", theirs, ours)


def expert_layers(shape, fp8):
    count, gate_up, hidden, inner = shape.experts, 2 * shape.intermediate, shape.hidden, shape.intermediate

    def matrix(rows, columns):
        return (torch.randn(count, rows, columns, **BF16) * columns**-0.5).to(FP8 if fp8 else torch.bfloat16)

    def scale(rows, columns):
        blocks = (count, rows // 128, columns // 128) if shape.blocks else (count,)
        return torch.rand(blocks, device="cuda") + 0.5 if fp8 else None

    return [(matrix(gate_up, hidden), matrix(hidden, inner), scale(gate_up, hidden), scale(hidden, inner)) for _ in range(LAYERS)]


def router(shape):
    """The gate and the choice: a GEMM in the model's type and topk_softmax or topk_sigmoid; router_gemm with bf16 weights and route_top_k."""
    gates = [torch.randn(shape.experts, shape.hidden, **BF16) * shape.hidden**-0.5 for _ in range(LAYERS)]
    bias = torch.randn(shape.experts, device="cuda") * 0.1 if shape.sigmoid else None
    choose = ops.topk_sigmoid if shape.sigmoid else ops.topk_softmax
    options = {"scoring": "sigmoid", "correction_bias": bias} if shape.sigmoid else {}
    for batch in BATCHES:
        x = torch.randn(batch, shape.hidden, **BF16)
        weights, ids = torch.empty(batch, TOP_K, device="cuda"), torch.empty(batch, TOP_K, dtype=torch.int32, device="cuda")
        source = torch.empty_like(ids)
        scores = torch.empty(batch, shape.experts, device="cuda")
        ids2, weights2 = torch.empty_like(ids), torch.empty_like(weights)

        def theirs():
            for gate in gates:
                choose(weights, ids, source, torch.nn.functional.linear(x, gate), True, bias)
            return weights

        def ours():
            for gate in gates:
                vivace.router_gemm(x, vivace.RouterWeight((gate,), "exact"), out=scores)
                vivace.route_top_k(scores, TOP_K, expert_ids=ids2, expert_weights=weights2, **options)
            return weights2

        report("router", batch, "bf16, sigmoid" if shape.sigmoid else "bf16, softmax", theirs, ours)


def main():
    import vllm
    parser = argparse.ArgumentParser(description="A decode step's parts through torch: vLLM's own kernels beside the plugin's, us a layer.")
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-30b-a3b", help="whose layers (%(default)s)")
    name = parser.parse_args().shape
    shape = SHAPES[name]
    print(f"{name} on {torch.cuda.get_device_name()}, torch {torch.__version__}, vLLM {vllm.__version__}: us a layer, in graphs of {LAYERS}")
    print(f"{'part':10}{'batch':>6} {'':14}{'vLLM':>10}{'vivace':>10}{'ratio':>8}{'distance':>12}")
    torch.manual_seed(1)
    for kv in (torch.bfloat16, FP8):
        for what in ("4096 each", "one of 32K"):
            for batch in BATCHES:
                attention(shape, batch, what, kv)
    torch.cuda.empty_cache()
    router(shape)
    for fp8 in (False, True):
        layers = expert_layers(shape, fp8)
        experts(shape, layers, fp8)
        del layers
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
