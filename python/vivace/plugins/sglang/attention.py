"""SGLang's attention backend "vivace": decode by the device-built schedule, extend by attention_prefill.

The token pool is used where it lies: with pages of P tokens its buffers are [pages, P, heads, head_dim], keys and values apart. The
page table and the schedule are made on the device from SGLang's own tables, and captured with the decode step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.runtime_context import get_parallel

from .. import serving


# Modes whose requests are causal chunks of prompts. ForwardMode.is_extend() names more: a draft's verification, blocks of a
# diffusion model.
_EXTENDS = ("EXTEND", "MIXED", "SPLIT_PREFILL")


@dataclass
class _Step:
    kv_lengths: torch.Tensor
    page_table: torch.Tensor
    query_start: torch.Tensor
    max_query_tokens: int = 1


class VivaceAttnBackend(AttentionBackend):
    """--attention-backend vivace, or one of --decode-attention-backend and --prefill-attention-backend."""

    needs_cpu_seq_lens: bool = False

    def __init__(self, model_runner: Any) -> None:
        super().__init__()
        model = model_runner.model_config
        self.page_size = model_runner.page_size
        for problem in self._problems(model_runner):
            raise NotImplementedError(f"vivace: {problem}")
        self.device = model_runner.device
        self.req_to_token = model_runner.req_to_token_pool.req_to_token
        self.token_to_kv_pool = model_runner.token_to_kv_pool
        self.max_requests = model_runner.req_to_token_pool.size
        self.max_pages = -(-model.context_len // self.page_size)
        ranks = get_parallel().attn_tp_size  # fewer than tp_size with --enable-dp-attention
        self.heads_q, self.heads_kv = model.num_attention_heads // ranks, model.get_num_kv_heads(ranks)
        self.head_dim, self.q_dtype, self.kv_dtype = model.head_dim, model_runner.dtype, model_runner.kv_cache_dtype
        self._one = torch.ones(1, dtype=torch.float32, device=self.device)
        self._every_request = torch.arange(self.max_requests + 1, dtype=torch.int32, device=self.device)
        self._plan = self._plan_for(self.max_requests)
        self._graph: _Step | None = None
        self.forward_metadata: _Step | None = None

    def _problems(self, model_runner: Any) -> list[str]:
        """What of this model or run is not known here; each with what would fit."""
        found = []
        if self.page_size < 16 or self.page_size % 16:
            found.append(f"pages of {self.page_size} tokens; pass --page-size 64, or another multiple of 16")
        if model_runner.spec_algorithm.is_speculative():
            found.append("speculative decoding")
        if model_runner.kv_cache_dtype not in (torch.bfloat16, torch.float8_e4m3fn):
            found.append(f"keys and values of {model_runner.kv_cache_dtype}; pass --kv-cache-dtype bfloat16 or fp8_e4m3")
        if model_runner.dtype != torch.bfloat16:
            found.append(f"activations of {model_runner.dtype}; pass --dtype bfloat16")
        if getattr(model_runner, "sliding_window_size", None):
            found.append("layers with windows of different sizes, which keep pools of their own")
        parallel = get_parallel()
        if parallel.attn_cp_size > 1 or parallel.attn_dcp_size > 1:
            found.append("context parallelism")
        layout = getattr(model_runner.token_to_kv_pool, "kv_cache_layout", "nhd")
        if layout != "nhd":
            found.append(f"a pool of the layout {layout}, nhd is known; unset SGLANG_USE_HND_KVCACHE and what else chooses one")
        return found

    def _plan_for(self, max_requests: int) -> serving.DecodePlan:
        return serving.DecodePlan(torch.device(self.device), max_requests=max_requests, max_pages=self.max_pages, heads_q=self.heads_q,
                                  heads_kv=self.heads_kv, head_dim=self.head_dim, page_tokens=self.page_size, q_dtype=self.q_dtype,
                                  kv_dtype=self.kv_dtype)

    # --- metadata ---

    def _fill(self, step: _Step, forward_batch: Any) -> None:
        """Lengths and page table of a step, on the device."""
        rows = forward_batch.batch_size
        step.kv_lengths[:rows].copy_(forward_batch.seq_lens[:rows])
        first_of_pages = self.req_to_token[:, ::self.page_size][:, :step.page_table.shape[1]]
        table = step.page_table[:rows, :first_of_pages.shape[1]]
        table.copy_(first_of_pages.index_select(0, forward_batch.req_pool_indices[:rows]))
        table.div_(self.page_size, rounding_mode="floor")

    def _new_step(self, rows: int) -> _Step:
        return _Step(torch.zeros(rows, dtype=torch.int32, device=self.device),
                     torch.zeros(rows, self.max_pages, dtype=torch.int32, device=self.device), self._every_request[:rows + 1])

    def init_forward_metadata(self, forward_batch: Any) -> None:
        step = self._new_step(forward_batch.batch_size)
        self._fill(step, forward_batch)
        mode = forward_batch.forward_mode
        if mode.is_decode_or_idle():
            self._plan.write(step.kv_lengths, step.query_start)
        elif mode.name in _EXTENDS:
            step.query_start = torch.nn.functional.pad(torch.cumsum(forward_batch.extend_seq_lens, 0, dtype=torch.int32), (1, 0))
            step.max_query_tokens = int(max(forward_batch.extend_seq_lens_cpu))
        else:
            raise NotImplementedError(f"vivace: forward mode {mode.name} is not known")
        self.forward_metadata = step

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        if max_bs > self.max_requests:
            raise ValueError(f"vivace: graphs of {max_bs} requests, the request pool has {self.max_requests}")
        self._graph = self._new_step(max_bs)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        if not forward_batch.forward_mode.is_decode_or_idle():
            raise NotImplementedError(f"vivace: CUDA graphs of forward mode {forward_batch.forward_mode.name} are not known; they are "
                                      "decode's")
        whole, rows = self._graph, forward_batch.batch_size
        self.forward_metadata = _Step(whole.kv_lengths[:rows], whole.page_table[:rows], self._every_request[:rows + 1])

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """Captured with the step: every replay cuts its schedule from the lengths as they are then."""
        step = self.forward_metadata
        self._fill(step, forward_batch)
        self._plan.write(step.kv_lengths, step.query_start)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    # --- layers ---

    def _attention(self, layer: Any) -> serving.Attention:
        known = getattr(layer, "_vivace", None)
        if known is None:
            problem = _problem_of(layer)
            if problem:
                raise NotImplementedError(f"vivace: layer {layer.layer_id} has {problem}")
            known = layer._vivace = serving.Attention(softmax_scale=layer.scaling, soft_cap=layer.logit_cap or 0.0)
        return known

    def _cache(self, layer: Any) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        k, v = self.token_to_kv_pool.get_kv_buffer(layer.layer_id)
        shape = (-1, self.page_size, layer.tp_k_head_num, layer.head_dim)
        scales = {name: self._one if scale is None else scale.float().view(1)
                  for name, scale in (("k_scale", layer.k_scale), ("v_scale", layer.v_scale))}
        return k.view(shape), v.view(shape), scales

    def _save(self, k: torch.Tensor | None, v: torch.Tensor | None, layer: Any, forward_batch: Any, save_kv_cache: bool) -> None:
        if save_kv_cache and k is not None:
            self.token_to_kv_pool.set_kv_buffer(layer, KVWriteLoc(forward_batch.out_cache_loc), k, v, layer.k_scale, layer.v_scale)

    def forward_decode(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: Any, forward_batch: Any, save_kv_cache: bool = True,
                       *, sinks: torch.Tensor | None = None, **others: Any) -> torch.Tensor:
        _refuse(others)
        self._save(k, v, layer, forward_batch, save_kv_cache)
        keys, values, scales = self._cache(layer)
        step, rows = self.forward_metadata, q.view(-1, layer.tp_q_head_num, layer.head_dim)
        out = torch.empty_like(rows)
        self._attention(layer).decode(self._plan, rows, keys, values, step.page_table, step.kv_lengths, step.query_start, out,
                                     sinks=None if sinks is None else sinks.float(), **scales)
        return out.view(-1, layer.tp_q_head_num * layer.head_dim)

    def forward_extend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: Any, forward_batch: Any, save_kv_cache: bool = True,
                       *, sinks: torch.Tensor | None = None, **others: Any) -> torch.Tensor:
        _refuse(others)
        self._save(k, v, layer, forward_batch, save_kv_cache)
        keys, values, scales = self._cache(layer)
        step, rows = self.forward_metadata, q.view(-1, layer.tp_q_head_num, layer.head_dim)
        out = torch.empty_like(rows)
        self._attention(layer).prefill(rows, keys, values, step.page_table, step.kv_lengths, step.query_start, out,
                                       max_query_tokens=step.max_query_tokens, sinks=None if sinks is None else sinks.float(), **scales)
        return out.view(-1, layer.tp_q_head_num * layer.head_dim)


def _problem_of(layer: Any) -> str:
    """What of a layer is not known here; "" when all is."""
    if layer.is_cross_attention or layer.attn_type.value != "decoder":
        return f"attention of type {'cross' if layer.is_cross_attention else layer.attn_type.value}, a decoder's is known"
    if layer.head_dim != layer.v_head_dim:
        return f"keys of {layer.head_dim} and values of {layer.v_head_dim}"
    if layer.sliding_window_size is not None and layer.sliding_window_size > 0:
        return f"a window of {layer.sliding_window_size}"
    if layer.logit_cap and layer.logit_capping_method != "tanh":
        return f"logits capped by {layer.logit_capping_method}, tanh is known"
    if layer.xai_temperature_len is not None and layer.xai_temperature_len > 0:
        return "a temperature by length"
    if layer.use_irope:
        return "attention within chunks (irope)"
    if layer.pos_encoding_mode != "NONE":
        return f"positions encoded as {layer.pos_encoding_mode}"
    return ""


def _refuse(others: dict[str, Any]) -> None:
    """What a model hands to its attention beside queries, keys, values and sinks."""
    given = [name for name, value in others.items() if value is not None and value is not False]
    if given:
        raise NotImplementedError(f"vivace: attention with {', '.join(given)} is not known")
