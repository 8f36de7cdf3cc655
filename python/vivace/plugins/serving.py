"""What the plugins of all engines share: attention over an engine's paged cache, and the experts of its layers, on torch tensors."""

from __future__ import annotations

from typing import Any

import torch

import vivace
import vivace.torch_ops

MAX_DECODE_TOKENS = 8  # query tokens of one request that attention_decode takes
_FP8 = {torch.uint8, torch.float8_e4m3fn}


def as_fp8(cache: torch.Tensor) -> torch.Tensor:
    """Engines keep fp8 as bytes."""
    return cache.view(torch.float8_e4m3fn) if cache.dtype == torch.uint8 else cache


def name_of(dtype: torch.dtype) -> str:
    return "fp8_e4m3" if dtype in _FP8 else vivace.torch_ops._NAMES[dtype]


class DecodePlan:
    """The schedule of a step's decode requests, which all layers with one window share, in memory that CUDA graphs may hold.

    write() cuts it anew from lengths on the device, without a look at them on the host: it is enqueued, and may be captured.
    """

    def __init__(self, device: torch.device, *, max_requests: int, max_pages: int, heads_q: int, heads_kv: int, head_dim: int,
                 page_tokens: int, q_dtype: torch.dtype, kv_dtype: torch.dtype, max_query_tokens: int = 1, window: int = 0,
                 piece_tiles: int = 0) -> None:
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        where = {"device": str(device)}
        q = vivace.Shape((max_requests * max_query_tokens, heads_q, head_dim), name_of(q_dtype), **where)
        k = vivace.Shape((1, page_tokens, heads_kv, head_dim), name_of(kv_dtype), **where)
        pages = vivace.Shape((max_requests, max_pages), "i32", **where)
        scale = vivace.Shape((1,), "f32", **where) if k.dtype == "fp8_e4m3" else None
        self.max_query_tokens, self.window = max_query_tokens, window
        self.params = vivace.attention_decode_schedule_params(q, k, pages, k_scale=scale, v_scale=scale, max_query_tokens=max_query_tokens,
                                                              window=window, piece_tiles=piece_tiles)
        self.schedule = torch.zeros(vivace.decode_schedule_ints(max_requests, self.params.workers), dtype=torch.int32, device=device)
        needed = vivace.attention_decode.workspace_bytes(q, k, k, pages, vivace.Shape((max_requests,), "i32", **where),
                                                         vivace.Shape((max_requests + 1,), "i32", **where), self.schedule, self.params,
                                                         k_scale=scale, v_scale=scale, window=window, max_query_tokens=max_query_tokens)
        self.workspace = torch.empty(max(needed, 1), dtype=torch.uint8, device=device)

    def write(self, kv_lengths: torch.Tensor, query_start: torch.Tensor) -> None:
        vivace.decode_schedule(kv_lengths, query_start, self.params, out=self.schedule)


class Attention:
    """One layer's attention: what a model says of it, and the two calls. sinks are f32 [heads_q]."""

    def __init__(self, *, softmax_scale: float, window: int = 0, soft_cap: float = 0.0) -> None:
        self.options: dict[str, Any] = {"softmax_scale": softmax_scale, "window": window, "soft_cap": soft_cap}

    def _scales(self, k: torch.Tensor, k_scale: torch.Tensor | None, v_scale: torch.Tensor | None) -> dict[str, torch.Tensor | None]:
        if k.dtype != torch.float8_e4m3fn:
            return {}
        return {"k_scale": k_scale.view(-1), "v_scale": v_scale.view(-1)}

    def decode(self, plan: DecodePlan, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, page_table: torch.Tensor,
               kv_lengths: torch.Tensor, query_start: torch.Tensor, out: torch.Tensor, *, sinks: torch.Tensor | None = None,
               k_scale: torch.Tensor | None = None, v_scale: torch.Tensor | None = None) -> None:
        k, v = as_fp8(k), as_fp8(v)
        vivace.attention_decode(q, k, v, page_table, kv_lengths, query_start, plan.schedule, plan.params, out=out, workspace=plan.workspace,
                                max_query_tokens=plan.max_query_tokens, sinks=sinks, **self.options, **self._scales(k, k_scale, v_scale))

    def prefill(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, page_table: torch.Tensor, kv_lengths: torch.Tensor,
                query_start: torch.Tensor, out: torch.Tensor, *, max_query_tokens: int = 0, sinks: torch.Tensor | None = None,
                k_scale: torch.Tensor | None = None, v_scale: torch.Tensor | None = None) -> None:
        k, v = as_fp8(k), as_fp8(v)
        vivace.attention_prefill(q, k, v, page_table, kv_lengths, query_start, out=out, max_query_tokens=max_query_tokens,
                                 sinks=sinks, **self.options, **self._scales(k, k_scale, v_scale))


def expert_scales(gate_up: torch.Tensor, down: torch.Tensor, gate_up_scale: torch.Tensor, down_scale: torch.Tensor,
                  block: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """An engine's weight scales as fused_moe has them. Engines keep one for gate and up together, or block rows of both in one row.

    ValueError: a half of the rows is not whole blocks, so that gate and up share a block.
    """
    experts, rows, hidden = gate_up.shape
    if not block:
        return gate_up_scale.view(experts, -1).expand(experts, 2).contiguous(), down_scale.reshape(experts)
    half = rows // 2
    if half % 128:
        raise ValueError(f"vivace: the intermediate size {half} of this rank is no multiple of 128, so that gate and up share a block of scales")
    return gate_up_scale.view(experts, 2, half // 128, (hidden + 127) // 128), down_scale


def experts(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, *,
            gate_up_scale: torch.Tensor | None = None, down_scale: torch.Tensor | None = None, x_scale: torch.Tensor | None = None,
            act_scale: torch.Tensor | None = None, block: bool = False, expert_map: torch.Tensor | None = None,
            batch_invariant: bool = False, out: torch.Tensor | None = None) -> torch.Tensor:
    """The routed experts of a layer. fused_moe quantises x where the weights are fp8 and it is not yet.

    Without blocks x_scale has one value and act_scale one, or one an expert, in any shape: engines reduce them to no dimension.
    """
    options: dict[str, Any] = {}
    if gate_up.dtype == torch.float8_e4m3fn:
        if not block and (x_scale is None or act_scale is None):
            raise NotImplementedError("vivace: experts in fp8 with one scale a tensor, whose activations have none in the checkpoint; "
                                      "dynamic scales are known with blocks of 128")
        scales = expert_scales(gate_up, down, gate_up_scale, down_scale, block)
        options = {"gate_up_scale": scales[0], "down_scale": scales[1]}
        if not block:
            options |= {"x_scale": x_scale.reshape(1), "act_scale": act_scale.reshape(-1)}
        elif x.dtype == torch.float8_e4m3fn:
            options["x_scale"] = x_scale
    if expert_map is not None:
        options["expert_map"] = expert_map.to(torch.int32)
    return vivace.fused_moe(x, gate_up, down, ids.to(torch.int32), weights.float(), batch_invariant=batch_invariant, out=out, **options)
