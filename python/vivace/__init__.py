"""Vivace: operators that make decoding with large language models fast on NVIDIA Hopper GPUs, and run everywhere.

    import numpy, vivace
    y = vivace.rms_norm(numpy.ones((2, 8), "float32"), numpy.ones(8, "float32"))

Neither NumPy nor torch is imported until arrays of theirs arrive. Errors are ValueError (an argument is wrong),
TypeError (it is not even an array, a number ...), NotImplementedError (nothing here can do it), MemoryError and RuntimeError, each with the
operator, the argument, its value and what would fit.
"""

from __future__ import annotations

from typing import Any

from . import _library, numbers
from ._arrays import Shape, Typed, current_stream, use_stream
from ._library import Choice, Cost, configure
from .ops import (Array, DecodeScheduleParams, ExpertWeights, Operator, Route, RouterWeight, Sampled, attention_decode,
                  attention_decode_schedule_params, attention_prefill, attention_prologue, choose_experts, decode_attention,
                  decode_schedule, decode_schedule_ints, embedding, empty_scale, fused_moe, grouped_gemm, linear, linear_parts,
                  prepare_router_weight, quantize_fp8, rms_norm, route_top_k, router_gemm, sampler, silu_mul)

__version__: str = _library.LIBRARY.vivace_version().decode()


def operators() -> list[dict[str, Any]]:
    """Every operator with its table, rows in order of preference: [{"op", "summary", "rows": [{"row", "device", "needs", "summary"}]}]."""
    return _library.text_of(_library.LIBRARY.vivace_operators)


def counts() -> list[dict[str, Any]]:
    """How often each row ran in this process since vivace.configure: [{"op", "row", "calls"}]."""
    import ctypes
    context = _library.context()
    return _library.text_of(_library.LIBRARY.vivace_context_counts, ctypes.c_void_p(context.handle))


def build() -> dict[str, Any]:
    """What the library was built with, and what this machine has for it."""
    return _library.text_of(_library.LIBRARY.vivace_build)


def explain(model_config: Any, *, tp: int = 1, page_tokens: int = 64, kv_dtype: str = "bf16", compute_capability: int = 90) -> Any:
    """What the plugins for SGLang and vLLM take over of a model, by which rows, and why not the rest; print() the result.

    model_config  a dict, a transformers configuration, a path to config.json or to its folder
    """
    from .explanation import explain as answer
    return answer(model_config, tp=tp, page_tokens=page_tokens, kv_dtype=kv_dtype, compute_capability=compute_capability)


__all__ = ["Array", "Choice", "Cost", "DecodeScheduleParams", "ExpertWeights", "Operator", "Route", "RouterWeight", "Sampled", "Shape", "Typed",
           "attention_decode", "attention_decode_schedule_params", "attention_prefill", "attention_prologue", "build", "choose_experts", "configure",
           "counts", "current_stream", "decode_attention", "decode_schedule", "decode_schedule_ints", "embedding", "empty_scale", "explain",
           "fused_moe", "grouped_gemm", "linear", "linear_parts", "numbers", "operators", "prepare_router_weight", "quantize_fp8",
           "rms_norm", "route_top_k", "router_gemm", "sampler", "silu_mul", "use_stream"]
