"""vLLM's attention backend CUSTOM: decode by the device-built schedule, prefill by attention_prefill.

A cache is used where it lies, by its strides: any block size that is a multiple of 16, keys and values of a block side by side.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import (AttentionBackend, AttentionCGSupport, AttentionImpl, AttentionMetadata, AttentionMetadataBuilder,
                                       AttentionType, CommonAttentionMetadata, MultipleOf)
from vllm.v1.attention.backends.utils import split_decodes_and_prefills

import vivace

from .. import serving

_FP8 = ("fp8", "fp8_e4m3")


@dataclass
class VivaceMetadata(AttentionMetadata):
    """A step: its decode requests first, then those with more query tokens."""

    tokens: int
    decodes: int
    decode_tokens: int
    prefills: int
    max_query_len: int
    kv_lengths: torch.Tensor
    page_table: torch.Tensor
    query_start: torch.Tensor
    prefill_start: torch.Tensor | None
    plans: dict[int, serving.DecodePlan]  # by window


class VivaceMetadataBuilder(AttentionMetadataBuilder[VivaceMetadata]):
    """Cuts the decode schedule once per step and distinct window, on the device, into memory that CUDA graphs hold."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)
        if self.reorder_batch_threshold > serving.MAX_DECODE_TOKENS:
            raise NotImplementedError(f"vivace: decode steps of {self.reorder_batch_threshold} query tokens a request, at most "
                                      f"{serving.MAX_DECODE_TOKENS} are known; lower num_speculative_tokens")
        model, scheduler = vllm_config.model_config, vllm_config.scheduler_config
        page_tokens = kv_cache_spec.block_size
        layers = vllm_config.compilation_config.static_forward_context
        windows = {layers[name].impl.window for name in layer_names}  # of a cache's layers some may have one and some not
        self.plans = {window: serving.DecodePlan(
            device, max_requests=scheduler.max_num_seqs, max_pages=-(-model.max_model_len // page_tokens),
            heads_q=model.get_num_attention_heads(vllm_config.parallel_config), heads_kv=kv_cache_spec.num_kv_heads,
            head_dim=kv_cache_spec.head_size, page_tokens=page_tokens, q_dtype=model.dtype, kv_dtype=kv_cache_spec.dtype,
            max_query_tokens=self.reorder_batch_threshold, window=window) for window in sorted(windows)}

    def build(self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False) -> VivaceMetadata:
        common = common_attn_metadata
        if common.causal is not True:  # it may be a tensor, one for each request
            raise NotImplementedError("vivace: attention to later tokens is not known")
        decodes, prefills, decode_tokens, _ = split_decodes_and_prefills(common, decode_threshold=self.reorder_batch_threshold)
        lengths, start = common.seq_lens, common.query_start_loc
        if decodes:
            for plan in self.plans.values():
                plan.write(lengths[:decodes], start[:decodes + 1])
        return VivaceMetadata(
            tokens=common.num_actual_tokens, decodes=decodes, decode_tokens=decode_tokens, prefills=prefills,
            max_query_len=common.max_query_len, kv_lengths=lengths, page_table=common.block_table_tensor, query_start=start,
            prefill_start=start[decodes:] - start[decodes] if prefills else None, plans=self.plans)


class VivaceBackend(AttentionBackend):
    """--attention-backend CUSTOM."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "bfloat16", "fp8", "fp8_e4m3"]
    forward_includes_kv_cache_update: bool = False

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[AttentionImpl]:
        return VivaceImpl

    @staticmethod
    def get_builder_cls() -> type[AttentionMetadataBuilder]:
        return VivaceMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        return [MultipleOf(16)]

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return head_size % 8 == 0 and head_size <= 256

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type == AttentionType.DECODER

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        return capability.to_int() >= 80

    @classmethod
    def supports_combination(cls, head_size: int, dtype: torch.dtype, kv_cache_dtype: str | None, block_size: int | None, use_mla: bool,
                             has_sink: bool, use_sparse: bool, use_mm_prefix: bool, device_capability: Any) -> str | None:
        """Asks the library itself: what neither of the two operators takes is refused with its words."""
        fp8 = kv_cache_dtype in _FP8
        where = {"device": "cuda", "compute_capability": device_capability.to_int()}
        q = vivace.Shape((1, 8, head_size), "bf16", **where)
        k = vivace.Shape((1, block_size or 16, 1, head_size), "fp8_e4m3" if fp8 else "bf16", **where)
        pages, one, two = (vivace.Shape(extents, "i32", **where) for extents in ((1, 1), (1,), (2,)))
        scale = vivace.Shape((1,), "f32", **where) if fp8 else None
        options = {"k_scale": scale, "v_scale": scale, "sinks": vivace.Shape((8,), "f32", **where) if has_sink else None}
        prefill = vivace.attention_prefill.explain(q, k, k, pages, one, two, **options)
        decode = vivace.attention_decode.explain(q, k, k, pages, one, two, vivace.Shape((4096,), "i32", **where),
                                                 vivace.DecodeScheduleParams(heads_kv=1, workers=132), **options)
        return next((f"vivace: {name}: {choice}" for name, choice in (("prefill", prefill), ("decode", decode)) if not choice.row), None)


class VivaceImpl(AttentionImpl[VivaceMetadata]):
    """One layer. Keys and values are written by do_kv_cache_update."""

    def __init__(self, num_heads: int, head_size: int, scale: float, num_kv_heads: int | None = None, alibi_slopes: list[float] | None = None,
                 sliding_window: int | None = None, kv_cache_dtype: str = "auto", logits_soft_cap: float | None = None,
                 attn_type: str = AttentionType.DECODER, kv_sharing_target_layer_name: str | None = None,
                 sinks: torch.Tensor | None = None) -> None:
        if attn_type != AttentionType.DECODER:
            raise NotImplementedError(f"vivace: attention of type {attn_type}, only a decoder's is known")
        if alibi_slopes is not None:
            raise NotImplementedError("vivace: ALiBi is not known")
        if self.dcp_world_size > 1 or self.pcp_world_size > 1:
            raise NotImplementedError("vivace: context parallelism is not known")
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self.kv_cache_dtype, self.kv_sharing_target_layer_name = kv_cache_dtype, kv_sharing_target_layer_name
        self.window = sliding_window or 0
        self.attention = serving.Attention(softmax_scale=self.scale, window=self.window, soft_cap=logits_soft_cap or 0.0)
        self._given_sinks, self.sinks = sinks, None if sinks is None else sinks.detach().float()

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Sinks are parameters in the model's type, the operator takes f32: they are copied once they are loaded, and when they are
        loaded again into the memory that graphs have."""
        if self._given_sinks is None:
            return
        loaded = self._given_sinks.detach().float()
        if self.sinks.device == loaded.device:
            self.sinks.copy_(loaded)
        else:
            self.sinks = loaded

    def _split(self, kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[blocks, heads, block_size, 2 * head_size], in whatever order it lies, as keys and values [blocks, block_size, heads, head_size]."""
        k, v = kv_cache.transpose(1, 2).split(self.head_size, dim=-1)
        return serving.as_fp8(k), serving.as_fp8(v)

    def do_kv_cache_update(self, layer: Any, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor,
                           slot_mapping: torch.Tensor) -> None:
        from vllm._custom_ops import reshape_and_cache_flash
        k, v = kv_cache.transpose(1, 2).split(self.head_size, dim=-1)
        reshape_and_cache_flash(key, value, k, v, slot_mapping, self.kv_cache_dtype, layer._k_scale, layer._v_scale)

    def forward(self, layer: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor,
                attn_metadata: VivaceMetadata | None, output: torch.Tensor, output_scale: torch.Tensor | None = None,
                output_block_scale: torch.Tensor | None = None) -> torch.Tensor:
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("vivace: a quantised output of attention is not known")
        if attn_metadata is None:  # the run that measures memory
            return output.fill_(0)
        step = attn_metadata
        k, v = self._split(kv_cache)
        options = {"k_scale": layer._k_scale, "v_scale": layer._v_scale, "sinks": self.sinks}
        q = query.view(-1, self.num_heads, self.head_size)
        out = output.view(-1, self.num_heads, self.head_size)
        if step.decodes:
            self.attention.decode(step.plans[self.window], q[:step.decode_tokens], k, v, step.page_table[:step.decodes],
                                  step.kv_lengths[:step.decodes], step.query_start[:step.decodes + 1], out[:step.decode_tokens], **options)
        if step.prefills:
            rows = slice(step.decode_tokens, step.tokens)
            self.attention.prefill(q[rows], k, v, step.page_table[step.decodes:], step.kv_lengths[step.decodes:], step.prefill_start,
                                   out[rows], max_query_tokens=step.max_query_len, **options)
        return output
