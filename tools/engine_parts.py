#!/usr/bin/env python3
"""A decode step's parts through torch: vLLM's own kernels beside the plugin's, us a layer, as replays of a CUDA graph.

    python3 tools/engine_parts.py      with a Python that has torch, vLLM and the wheel, beside a Hopper GPU

The shapes are Qwen3-30B-A3B's. A graph has LAYERS layers with weights and caches of their own, so that nothing stays in the L2 from
one replay to the next; the step's plan (FlashAttention's scheduler metadata, the decode schedule) is made once in it. Each line also
has the distance of the two outputs, |ours - theirs| / |theirs|.
"""

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
HEADS, HEADS_KV, DIM, PAGE = 32, 4, 128, 16
HIDDEN, EXPERTS, TOP_K, INTERMEDIATE = 2048, 128, 8, 768
SPLITS = 32  # vLLM's bound in CUDA graphs
BF16 = {"dtype": torch.bfloat16, "device": "cuda"}


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


def attention(batch, what, kv):
    lengths = lengths_of(batch, what)
    pages_of = [-(-n // PAGE) for n in lengths]
    pool, width = sum(pages_of), max(pages_of)
    order, table, at = torch.randperm(pool, dtype=torch.int32), torch.zeros(batch, width, dtype=torch.int32), 0
    for i, n in enumerate(pages_of):
        table[i, :n] = order[at:at + n]
        at += n
    table, seq = table.cuda(), torch.tensor(lengths, dtype=torch.int32, device="cuda")
    start = torch.arange(batch + 1, dtype=torch.int32, device="cuda")
    caches = [torch.randn(pool, PAGE, HEADS_KV, 2 * DIM, **BF16).to(kv) for _ in range(LAYERS)]
    q, out, out2 = torch.randn(batch, HEADS, DIM, **BF16), torch.empty(batch, HEADS, DIM, **BF16), torch.empty(batch, HEADS, DIM, **BF16)
    fp8 = kv == torch.float8_e4m3fn
    one = torch.ones(1, device="cuda")
    longest = max(lengths)

    def theirs():
        plan = get_scheduler_metadata(batch_size=batch, max_seqlen_q=1, max_seqlen_k=longest, num_heads_q=HEADS, num_heads_kv=HEADS_KV,
                                      headdim=DIM, cache_seqlens=seq, qkv_dtype=kv, cu_seqlens_q=start, page_size=PAGE, causal=True,
                                      num_splits=SPLITS)
        for cache in caches:
            k, v = cache.split(DIM, dim=-1)
            query, scales = q, {}
            if fp8:  # vLLM quantises queries too
                query, _ = ops.scaled_fp8_quant(q.view(batch, -1), one)
                query = query.view(q.shape)
                scales = {name: one.expand(batch, HEADS_KV) for name in ("q_descale", "k_descale", "v_descale")}
            flash_attn_varlen_func(query, k, v, max_seqlen_q=1, cu_seqlens_q=start, max_seqlen_k=longest, seqused_k=seq, causal=True,
                                   block_table=table, out=out, scheduler_metadata=plan, num_splits=SPLITS, fa_version=3, **scales)
        return out

    plan = serving.DecodePlan(torch.device("cuda"), max_requests=batch, max_pages=width, heads_q=HEADS, heads_kv=HEADS_KV, head_dim=DIM,
                              page_tokens=PAGE, q_dtype=torch.bfloat16, kv_dtype=kv)
    layer = serving.Attention(softmax_scale=DIM**-0.5)

    def ours():
        plan.write(seq, start)
        for cache in caches:
            k, v = cache.split(DIM, dim=-1)
            layer.decode(plan, q, k, v, table, seq, start, out2, k_scale=one, v_scale=one)
        return out2

    report("attention", batch, f"{'fp8' if fp8 else 'bf16'}, {what}", theirs, ours)


def routed(batch):
    logits = torch.randn(batch, EXPERTS, device="cuda")
    weights, ids = logits.softmax(-1).topk(TOP_K)
    return (weights / weights.sum(-1, keepdim=True)).contiguous(), ids.to(torch.int32).contiguous()


def experts(layers, fp8):
    for batch in BATCHES:
        x = torch.randn(batch, HIDDEN, **BF16)
        routes = [routed(batch) for _ in layers]
        out = torch.empty(batch, HIDDEN, **BF16)

        def theirs():
            for (gate_up, down, s1, s2), (weights, ids) in zip(layers, routes):
                config = fp8_w8a8_moe_quant_config(w1_scale=s1, w2_scale=s2, block_shape=[128, 128]) if fp8 else None
                result = fused_experts(x, gate_up, down, weights, ids, quant_config=config)
            return result

        def ours():
            for (gate_up, down, s1, s2), (weights, ids) in zip(layers, routes):
                serving.experts(x, gate_up, down, ids, weights, gate_up_scale=s1, down_scale=s2, block=fp8, out=out)
            return out

        report("experts", batch, "fp8 blocks" if fp8 else "bf16", theirs, ours)


def expert_layers(fp8):
    def matrix(*shape):
        return (torch.randn(*shape, **BF16) * shape[-1]**-0.5).to(torch.float8_e4m3fn if fp8 else torch.bfloat16)

    def scale(rows, columns):
        return torch.rand(EXPERTS, rows // 128, columns // 128, device="cuda") + 0.5 if fp8 else None

    return [(matrix(EXPERTS, 2 * INTERMEDIATE, HIDDEN), matrix(EXPERTS, HIDDEN, INTERMEDIATE), scale(2 * INTERMEDIATE, HIDDEN),
             scale(HIDDEN, INTERMEDIATE)) for _ in range(LAYERS)]


def router():
    """The gate and the choice: a GEMM in the model's type and topk_softmax; router_gemm with bf16 weights and route_top_k."""
    gates = [torch.randn(EXPERTS, HIDDEN, **BF16) * HIDDEN**-0.5 for _ in range(LAYERS)]
    for batch in BATCHES:
        x = torch.randn(batch, HIDDEN, **BF16)
        weights, ids = torch.empty(batch, TOP_K, device="cuda"), torch.empty(batch, TOP_K, dtype=torch.int32, device="cuda")
        source = torch.empty_like(ids)
        scores = torch.empty(batch, EXPERTS, device="cuda")
        ids2, weights2 = torch.empty_like(ids), torch.empty_like(weights)

        def theirs():
            for gate in gates:
                ops.topk_softmax(weights, ids, source, torch.nn.functional.linear(x, gate), True)
            return weights

        def ours():
            for gate in gates:
                vivace.router_gemm(x, vivace.RouterWeight((gate,), "exact"), out=scores)
                vivace.route_top_k(scores, TOP_K, expert_ids=ids2, expert_weights=weights2)
            return weights2

        report("router", batch, "bf16, softmax", theirs, ours)


def main():
    import vllm
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, vLLM {vllm.__version__}: us a layer, in graphs of {LAYERS}")
    print(f"{'part':10}{'batch':>6} {'':14}{'vLLM':>10}{'vivace':>10}{'ratio':>8}{'distance':>12}")
    torch.manual_seed(1)
    for kv in (torch.bfloat16, torch.float8_e4m3fn):
        for what in ("4096 each", "one of 32K"):
            for batch in BATCHES:
                attention(batch, what, kv)
    torch.cuda.empty_cache()
    router()
    for fp8 in (False, True):
        layers = expert_layers(fp8)
        experts(layers, fp8)
        del layers
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
