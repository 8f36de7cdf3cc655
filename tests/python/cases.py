"""One list of calls that the tests of NumPy and of torch walk, with what float64 says of them."""

from typing import Any, Callable, NamedTuple

import numpy as np
import vivace


class T(NamedTuple):
    """An array to be made in the library under test."""

    dtype: str
    values: np.ndarray


class Router(NamedTuple):
    """A router weight, to be prepared from an array."""

    weight: T
    mode: str


class Case(NamedTuple):
    name: str
    operator: Any
    args: tuple
    options: dict
    expected: Callable[[], list] | None  # the results, in float64
    bound: float  # relative to the largest magnitude of a result


def numpy_array(item):
    if item.dtype in ("bf16", "fp8_e4m3"):
        return vivace.numbers.bf16(item.values) if item.dtype == "bf16" else vivace.numbers.fp8(item.values)
    return np.ascontiguousarray(item.values, {"f32": "float32", "i32": "int32", "i64": "int64", "u8": "uint8"}[item.dtype])


def built(value, make):
    """`value` with every T and Router in it made by `make`."""
    if isinstance(value, T):
        return make(value)
    if isinstance(value, Router):
        return vivace.prepare_router_weight(make(value.weight), mode=value.mode)
    if isinstance(value, tuple):
        items = [built(item, make) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if isinstance(value, list):
        return [built(item, make) for item in value]
    if isinstance(value, dict):
        return {key: built(item, make) for key, item in value.items()}
    return value


def call(case, make):
    """The results of a case, and after them its arguments as the call left them."""
    args, options = built(case.args, make), built(case.options, make)
    return results_of(case.operator(*args, **options)), results_of([args, list(options.values())])


def results_of(value):
    if isinstance(value, (tuple, list)):
        return [array for item in value for array in results_of(item)]
    return [value] if hasattr(value, "dtype") else []


def rounded(item):
    """What an array of that type holds, in float64."""
    return np.asarray(vivace.numbers.f32(numpy_array(item)) if item.dtype in ("f32", "bf16", "fp8_e4m3") else item.values, "float64")


def normed(x, weight, eps):
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def silu(x):
    return x / (1 + np.exp(-x))


def attention(q, k, v, pages, lengths, starts, window=0, soft_cap=0.0, sinks=None):
    """Causal, over a paged cache; heads of q share those of k in groups. A sink is a key without a value."""
    out = np.zeros(q.shape)
    page_tokens, group = k.shape[1], q.shape[1] // k.shape[2]
    for b, length in enumerate(lengths):
        rows = range(starts[b], starts[b + 1])
        keys = np.array([k[pages[b, j // page_tokens], j % page_tokens] for j in range(length)])
        values = np.array([v[pages[b, j // page_tokens], j % page_tokens] for j in range(length)])
        for i, row in enumerate(rows):
            seen = length - len(rows) + i + 1
            first = max(seen - window, 0) if window else 0
            for head in range(q.shape[1]):
                score = keys[first:seen, head // group] @ q[row, head] / np.sqrt(q.shape[2])
                score = soft_cap * np.tanh(score / soft_cap) if soft_cap else score
                sink = np.exp(sinks[head] - score.max()) if sinks is not None else 0.0
                weight = np.exp(score - score.max())
                out[row, head] = weight @ values[first:seen, head // group] / (weight.sum() + sink)
    return out


def moe(x, gate_up, down, ids, weights, alpha=1, limit=np.inf, beta=0):
    out, half = np.zeros(x.shape), gate_up.shape[1] // 2
    for t in range(x.shape[0]):
        for expert, weight in zip(ids[t], weights[t]):
            if expert >= 0:
                product = gate_up[expert] @ x[t]
                gate, up = np.minimum(product[:half], limit), np.clip(product[half:], -limit, limit)
                out[t] += weight * (down[expert] @ (silu(alpha * gate) / alpha * (up + beta)))
    return out


F32, BF16 = 2e-6, 2.0**-7


def cases():
    rng = np.random.default_rng(8)

    def normal(*shape):
        return rng.standard_normal(shape)

    found = []

    def add(name, operator, args, options=None, expected=None, bound=F32):
        found.append(Case(name, operator, args, options or {}, expected, bound))

    for kind, bound in (("f32", F32), ("bf16", BF16)):
        x, w, r = T(kind, normal(5, 96)), T(kind, normal(96)), T(kind, normal(5, 96))
        add(f"rms_norm.{kind}", vivace.rms_norm, (x, w), {"eps": 1e-5},
            lambda x=x, w=w: [normed(rounded(x), rounded(w), 1e-5)], bound)
        add(f"rms_norm.residual.{kind}", vivace.rms_norm, (x, w), {"residual": r},
            lambda x=x, w=w, r=r: [normed(rounded(x) + rounded(r), rounded(w), 1e-6)], bound)
        add(f"silu_mul.{kind}", vivace.silu_mul, (x, r), {}, lambda x=x, r=r: [silu(rounded(x)) * rounded(r)], bound)
        m, b = T(kind, normal(64, 96)), T(kind, normal(64))
        add(f"linear.{kind}", vivace.linear, (x, m, b), {}, lambda x=x, m=m, b=b: [rounded(x) @ rounded(m).T + rounded(b)], bound)
        add(f"linear_parts.{kind}", vivace.linear_parts, (x, [m, T(kind, normal(32, 96))]), {}, None, bound)
        ids = T("i32", np.array([2, 0, 2, 4]))
        add(f"embedding.{kind}", vivace.embedding, (ids, x), {}, lambda x=x: [rounded(x)[[2, 0, 2, 4]]], bound)

        starts, rows = T("i32", np.array([3, 0])), T("i32", np.array([2, 3]))
        g = T(kind, normal(2, 64, 96))
        add(f"grouped_gemm.{kind}", vivace.grouped_gemm, (x, g, starts, rows), {},
            lambda x=x, g=g: [np.concatenate([rounded(x)[:3] @ rounded(g)[1].T, rounded(x)[3:] @ rounded(g)[0].T])], bound)

        gate_up, down = T(kind, normal(6, 128, 96)), T(kind, normal(6, 96, 64))
        experts, weights = T("i32", np.array([[0, 5], [3, -1], [1, 2], [5, 0], [-1, -1]])), T("f32", rng.random((5, 2)))
        add(f"fused_moe.{kind}", vivace.fused_moe, (x, gate_up, down, experts, weights), {},
            lambda x=x, gu=gate_up, d=down, e=experts, w=weights: [moe(rounded(x), rounded(gu), rounded(d), e.values, w.values)],
            4 * bound)
        there = T("i32", np.array([5, -1, 0, 3, 1, 2]))
        add(f"fused_moe.map.{kind}", vivace.fused_moe, (x, gate_up, down, experts, weights),
            {"expert_map": there, "swiglu_alpha": 1.702, "swiglu_limit": 0.5, "swiglu_beta": 1.0},
            lambda x=x, gu=gate_up, d=down, e=experts, m=there, w=weights: [
                moe(rounded(x), rounded(gu), rounded(d), np.where(e.values < 0, -1, m.values[e.values]), w.values, 1.702, 0.5, 1)],
            4 * bound)

        router = T("f32", normal(8, 96))
        add(f"router_gemm.{kind}", vivace.router_gemm, (x, Router(router, "exact")), {},
            lambda x=x, r=router: [rounded(x) @ rounded(r).T], 2e-6)
        add(f"choose_experts.{kind}", vivace.choose_experts, (x, Router(router, "exact"), 3), {},
            lambda x=x, r=router: softmax_top(rounded(x) @ rounded(r).T, 3), 1e-5)

        q, k, v = T(kind, normal(5, 4, 64)), T(kind, normal(8, 16, 2, 64)), T(kind, normal(8, 16, 2, 64))
        pages, lengths = T("i32", np.array([[1, 0], [4, 7]])), T("i32", np.array([3, 20]))
        begin = T("i32", np.array([0, 3, 5]))
        add(f"attention_prefill.{kind}", vivace.attention_prefill, (q, k, v, pages, lengths, begin), {},
            lambda q=q, k=k, v=v: [attention(rounded(q), rounded(k), rounded(v), pages.values, lengths.values, begin.values)], bound)
        one, each = T(kind, normal(2, 4, 64)), T("i32", np.array([0, 1, 2]))
        add(f"attention_decode.{kind}", vivace.decode_attention, (one, k, v, pages, lengths, each), {},
            lambda q=one, k=k, v=v: [attention(rounded(q), rounded(k), rounded(v), pages.values, lengths.values, each.values)], bound)

        qkv, norm = T(kind, normal(3, 8 * 64)), T(kind, normal(64))
        angles = np.arange(32)[:, None] / 10000 ** (np.arange(32) / 32)
        cos_sin = T("f32", np.concatenate([np.cos(angles), np.sin(angles)], axis=1))
        add(f"attention_prologue.{kind}", vivace.attention_prologue, (qkv, T("i64", np.array([33, -1, 2])), k, v),
            {"cos_sin": cos_sin, "positions": T("i32", np.array([7, 0, 31])), "q_norm_weight": norm, "k_norm_weight": norm},
            lambda qkv=qkv, norm=norm: [rotated(normed(rounded(qkv).reshape(3, 8, 64)[:, :4], rounded(norm), 1e-6), angles, [7, 0, 31])],
            bound)

        logits = T(kind, normal(3, 500))
        add(f"sampler.greedy.{kind}", vivace.sampler, (logits,), {"temperature": T("f32", np.zeros(3))},
            lambda x=logits: [rounded(x).argmax(axis=1), np.ones(3)])
        add(f"sampler.drawn.{kind}", vivace.sampler, (logits,),
            {"seed": T("i64", np.array([1, 2, 3])), "position": T("i64", np.arange(3)), "top_k": T("i32", np.array([5, 0, 20])),
             "top_p": T("f32", np.array([0.9, 0.5, 1.0])), "top_logprobs": 4})
        add(f"quantize_fp8.token.{kind}", vivace.quantize_fp8, (x,), {}, None)
        add(f"quantize_fp8.block.{kind}", vivace.quantize_fp8, (T(kind, normal(3, 300)),), {"scaling": "block"}, None)

    scores = T("f32", normal(4, 16))
    add("route_top_k", vivace.route_top_k, (scores, 3), {}, lambda s=scores: softmax_top(s.values, 3))
    add("route_top_k.zero", vivace.route_top_k, (scores, 3),
        {"scoring": "sigmoid", "correction_bias": T("f32", normal(16)), "groups": 4, "top_groups": 2, "zero_experts": 2, "scale": 2.5,
         "live_tokens": T("i32", np.array([3]))})

    add("choose_experts.zero", vivace.choose_experts, (T("f32", normal(4, 96)), Router(T("f32", normal(16, 96)), "two_term"), 3),
        {"scoring": "sigmoid", "correction_bias": T("f32", normal(16)), "groups": 4, "top_groups": 2, "zero_experts": 2, "scale": 2.5,
         "live_tokens": T("i32", np.array([3]))})

    many, ranges = T("i32", np.array([100, 5, 0, 3000])), T("i32", np.arange(5))
    add("decode_schedule", vivace.decode_schedule, (many, ranges, vivace.DecodeScheduleParams(heads_kv=2, workers=7)))

    x8, w8 = T("fp8_e4m3", normal(4, 256)), T("fp8_e4m3", normal(128, 256))
    block_x, block_w = T("f32", rng.random((4, 2)) + 0.5), T("f32", rng.random((1, 2)) + 0.5)
    add("linear.fp8.block", vivace.linear, (x8, w8),
        {"x_scale": block_x, "weight_scale": block_w, "scaling": "block", "out_dtype": "f32"},
        lambda: [sum((rounded(x8)[:, b] * block_x.values[:, [i]]) @ (rounded(w8)[:, b] * block_w.values[0, i]).T
                     for i, b in enumerate((slice(0, 128), slice(128, 256))))], 1e-5)
    return found


def softmax_top(scores, top_k):
    """Ids by falling probability, and their renormalised weights."""
    order = np.argsort(-scores, axis=1, kind="stable")[:, :top_k]
    weights = np.exp(np.take_along_axis(scores, order, axis=1))
    return [order, weights / weights.sum(axis=1, keepdims=True)]


def rotated(heads, angles, positions):
    half = heads.shape[-1] // 2
    cos, sin = np.cos(angles[positions])[:, None], np.sin(angles[positions])[:, None]
    a, b = heads[..., :half], heads[..., half:]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
