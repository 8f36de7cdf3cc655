"""What Vivace's plugins take over of a model, by which row of which table, and why not the rest.

    python3 -m vivace.explanation CONFIG [--tp 8] [--page-tokens 64] [--kv-dtype fp8_e4m3]

CONFIG is a Hugging Face config.json, or the folder that has one. Nothing is loaded and no GPU is needed: the tables are asked about
shapes, for an H200 unless --compute-capability says otherwise.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
from typing import Any, Mapping, NamedTuple, Sequence

from . import _flags, build
from ._arrays import Shape, shown, whole
from ._library import Choice
from .ops import DecodeScheduleParams, RouterWeight, attention_decode, attention_prefill, fused_moe, route_top_k, router_gemm

BATCHES = (1, 8, 32, 64)
PROMPT = 2048
ENGINES = ("vLLM", "SGLang")

# What is known of when a part pays; figures, and the commands behind them, stand in the operators' pages.
PAYS = {
    "decode attention": "batches of mixed lengths most: the schedule cuts one long request over the chip",
    "prefill attention": "not faster than the engines' own on an H200 yet; --decode-attention-backend leaves extend to the engine",
    "experts": "in decode steps on Hopper, up to 128 tokens and ten rows an expert; measure before choosing it for prompts",
    "router logits": "where logits are asked for in fp32; fp32 accuracy of gates with bf16 weights, on bf16 tensor cores",
    "choice of experts": "one kernel for softmax or sigmoid, bias, groups and renormalisation",
}


class Part(NamedTuple):
    """One part of a layer at one size."""

    name: str
    operator: str
    size: str
    choice: Choice | None  # None: not asked, see `reason`
    reason: str = ""
    refused: Mapping[str, str] = {}  # the engines whose plugin leaves the part alone in this model, and why

    @property
    def taken(self) -> bool:
        return self.choice is not None and self.choice.row is not None


class Explanation(NamedTuple):
    model: str
    layout: str
    parts: tuple[Part, ...]
    notes: tuple[str, ...]

    def __str__(self) -> str:
        lines = [f"{self.model}: {self.layout}"]
        for name in dict.fromkeys(part.name for part in self.parts):
            parts = [part for part in self.parts if part.name == name]
            lines.append(f"\n{name} ({parts[0].operator}): {PAYS[name]}")
            lines += [f"  not in {engine}: {why}" for engine, why in parts[0].refused.items()]
            for part in parts:
                if part.taken:
                    lines.append(f"  {part.size:<24} {part.choice.row}")
                    lines += [f"  {'':<24}   not {row}: {why}" for row, why in part.choice.refused if row.partition(".")[0] not in ("cpu", "reference")]
                else:
                    lines.append(f"  {part.size:<24} left to the engine: {part.reason or _why(part.choice)}")
        return "\n".join([*lines, *(f"\nnote: {note}" for note in self.notes)])


def _why(choice: Choice) -> str:
    return "; ".join(f"{row}: {why}" for row, why in choice.refused if row.partition(".")[0] not in ("cpu", "reference")) or "no row for a GPU"


# What has to be a whole number wherever it is given, and the least of them; some are lists in some configurations, a number a layer.
_NUMBERS = {**dict.fromkeys(("num_attention_heads", "num_key_value_heads", "hidden_size", "head_dim"), 1),
            **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "n_group", "num_expert_group"), 0)}
_LISTS = {**dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_intermediate_size", "expert_hidden_dim", "intermediate_size"), 1),
          "top_k": 0}  # which a model without experts may have for its sampler
_MOST = 2**24


def _mapping(what: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise TypeError(f"vivace.explain: {what} is {shown(value)}, needs an object with names")
    return value


def _read(path: pathlib.Path) -> Any:
    path = path / "config.json" if path.is_dir() else path
    try:
        return json.loads(path.read_text())
    except (RecursionError, ValueError) as error:
        raise ValueError(f"vivace.explain: {path} is no JSON: {error}") from None


def _as_dict(config: Any) -> dict[str, Any]:
    """The part about the decoder, in which all that is looked at is of its type."""
    if isinstance(config, (str, pathlib.Path)):
        config = _read(pathlib.Path(config))
    elif not isinstance(config, Mapping) and hasattr(config, "to_dict"):
        config = config.to_dict()  # transformers' configurations
    config = _mapping("model_config", config)
    found = dict(_mapping("text_config", config.get("text_config") or config))
    for name, least in _NUMBERS.items():
        if found.get(name) is not None:
            whole(f"vivace.explain: {name}", found[name], least, _MOST)
    for name, least in _LISTS.items():
        value = found.get(name)
        for item in value or [None] if isinstance(value, list) else [] if value is None else [value]:
            whole(f"vivace.explain: {name}", item, least, _MOST)
    quantised = _mapping("quantization_config", found.get("quantization_config") or {})
    block = quantised.get("weight_block_size")
    if block and not isinstance(block, (list, tuple)):
        raise TypeError(f"vivace.explain: weight_block_size is {shown(block)}, needs a list of two numbers")
    return found


def _first(config: Mapping[str, Any], *names: str, default: Any = None) -> Any:
    return next((config[name] for name in names if config.get(name) is not None), default)


def explain(model_config: Any, *, tp: int = 1, page_tokens: int = 64, kv_dtype: str = "bf16", compute_capability: int = 90) -> Explanation:
    """What the plugins take over of a model on each of `tp` ranks. str() of the result is a page of text.

    model_config  a dict, a transformers configuration, a path to config.json or to its folder
    ValueError    the configuration lacks what every decoder has, or does not divide by tp; TypeError: it is none
    """
    whole("vivace.explain: tp", tp, 1, _MOST)
    whole("vivace.explain: page_tokens", page_tokens, 1, _MOST)
    whole("vivace.explain: compute_capability", compute_capability, 0, 1000)
    if kv_dtype not in ("bf16", "fp8_e4m3"):
        raise ValueError(f"vivace.explain: kv_dtype is {shown(kv_dtype)}, needs 'bf16' or 'fp8_e4m3'")
    config = _as_dict(model_config)
    heads = _first(config, "num_attention_heads")
    hidden = _first(config, "hidden_size")
    if heads is None or hidden is None:
        raise ValueError("vivace.explain: the configuration has no num_attention_heads or hidden_size: is it that of a decoder?")
    heads_kv, head_dim = _first(config, "num_key_value_heads", default=heads), _first(config, "head_dim", default=max(hidden // heads, 1))
    if heads % tp:
        raise ValueError(f"vivace.explain: tp is {tp}, which does not divide {heads} query heads")
    if heads % heads_kv and not config.get("kv_lora_rank"):
        raise ValueError(f"vivace.explain: num_attention_heads is {heads}, needs a multiple of {heads_kv} (from num_key_value_heads)")
    kind = str(_first(config, "model_type", default="model"))
    heads_q, heads_kv = heads // tp, max(heads_kv // tp, 1)
    where = {"device": "cuda", "compute_capability": compute_capability}
    fp8_kv = kv_dtype == "fp8_e4m3"
    window = config.get("sliding_window") if config.get("use_sliding_window", True) else None
    windows = {"SGLang": f"layers with a window of {window} have pools of their own"} if window else {}

    def shape(extents: tuple[int, ...], dtype: str = "bf16") -> Shape:
        return Shape(extents, dtype, **where)

    scale = shape((1,), "f32") if fp8_kv else None
    scales = {"k_scale": scale, "v_scale": scale}
    cache = shape((1024, page_tokens, heads_kv, head_dim), kv_dtype)
    parts: list[Part] = []
    notes: list[str] = []
    mla = config.get("kv_lora_rank")

    for batch in BATCHES:
        q, pages = shape((batch, heads_q, head_dim)), shape((batch, 64), "i32")
        size = f"batch {batch}"
        if mla:
            parts.append(Part("decode attention", "attention_decode", size, None, "latent attention (MLA) is not known"))
            continue
        parts.append(Part("decode attention", "attention_decode", size, attention_decode.explain(
            q, cache, cache, pages, shape((batch,), "i32"), shape((batch + 1,), "i32"), shape((4096,), "i32"),
            DecodeScheduleParams(heads_kv, workers=132), **scales), refused=windows))
    if not mla:
        q = shape((PROMPT, heads_q, head_dim))
        parts.append(Part("prefill attention", "attention_prefill", f"{PROMPT} tokens", attention_prefill.explain(
            q, cache, cache, shape((1, 64), "i32"), shape((1,), "i32"), shape((2,), "i32"), **scales), refused=windows))

    experts = _first(config, "num_experts", "num_local_experts", "n_routed_experts")
    if experts:
        _experts(config, experts, hidden, tp, shape, parts, notes)
    if not build()["cuda"]:
        notes.append("this build of the library has no rows for a GPU; ask one that was built with nvcc")
    notes.append("not asked here: what an engine's own default would take; both engines log it at start")
    return Explanation(kind, f"{heads_q} query and {heads_kv} KV heads of {head_dim} on each of {tp} rank{'s' if tp > 1 else ''}, pages of "
                             f"{page_tokens} tokens, keys and values in {kv_dtype}", tuple(parts), tuple(notes))


def _experts_refused(config: Mapping[str, Any], hidden: int) -> dict[str, str]:
    """Which engines' plugins leave the experts alone, and why: what serving.experts and the engines' moe.problems() refuse."""
    quantised = config.get("quantization_config") or {}
    block = quantised.get("weight_block_size")
    activation = _first(config, "hidden_act", "hidden_activation", default="silu")
    why = ""
    if activation not in ("silu", "swish"):
        why = f"activation {activation}, silu is known"
    elif config.get("mlp_bias") or config.get("model_type") == "gpt_oss":
        why = "experts with a bias"
    elif _first(config, "swiglu_limit", "swiglu_limits", "swiglu_alpha") is not None:
        why = "a limit or factor of SwiGLU"
    elif quantised.get("quant_method") == "fp8" and not block and quantised.get("activation_scheme", "dynamic") != "static":
        why = "fp8 with one scale a tensor and none of activations; dynamic scales are known with blocks of 128"
    elif block and list(block) != [128, 128]:
        why = f"blocks of {block}, [128, 128] is known"
    if why:
        return dict.fromkeys(ENGINES, why)
    if not quantised:
        return {"vLLM": "experts in bf16, fp8 is known"}
    return {"vLLM": f"a hidden size of {hidden}, multiples of 128 are known"} if hidden % 128 else {}


def _choice_refused(config: Mapping[str, Any]) -> dict[str, str]:
    """The same of the choice of experts; what sglang.router.takes() refuses."""
    scoring = str(_first(config, "scoring_func", default="softmax"))
    bias = config.get("topk_method") == "noaux_tc" or bool(config.get("use_expert_bias"))
    groups = (_first(config, "n_group", "num_expert_group", default=1) or 1) > 1
    refused = {"vLLM": "its router stays as it is"}
    if scoring not in ("softmax", "sigmoid"):
        refused["SGLang"] = f"scores by {scoring}, softmax and sigmoid are known"
    elif scoring == "softmax" and (bias or groups):
        refused["SGLang"] = "softmax with a bias or groups"
    elif groups and not bias:
        refused["SGLang"] = "groups without a bias, which it scores by their best expert"
    return refused


def _experts(config: Mapping[str, Any], experts: int, hidden: int, tp: int, shape: Any, parts: list[Part], notes: list[str]) -> None:
    top_k = _first(config, "num_experts_per_tok", "moe_topk", "top_k", default=1)
    width = _first(config, "moe_intermediate_size", "expert_hidden_dim", "intermediate_size")
    if width is None:
        raise ValueError(f"vivace.explain: the configuration has {experts} experts and no moe_intermediate_size or intermediate_size")
    top_k, width = (value[0] if isinstance(value, list) else value for value in (top_k, width))
    if width % tp:
        raise ValueError(f"vivace.explain: tp is {tp}, which does not divide {width} rows of an expert")
    if top_k < 1:
        raise ValueError(f"vivace.explain: top_k is {top_k}, needs at least 1 expert a token")
    if top_k > experts:
        raise ValueError(f"vivace.explain: {top_k} experts a token are more than the {experts} that there are")
    inner = width // tp
    quantised = config.get("quantization_config") or {}
    fp8, block = quantised.get("quant_method") == "fp8", bool(quantised.get("weight_block_size"))
    dtype = "fp8_e4m3" if fp8 else "bf16"
    refused = _experts_refused(config, hidden)
    for tokens in (*BATCHES, PROMPT):
        size = f"{tokens} token{'s' if tokens > 1 else ''}"
        if quantised and not fp8:
            parts.append(Part("experts", "fused_moe", size, None, f"quantisation {quantised.get('quant_method')} is not known"))
            continue
        if len(refused) == len(ENGINES):
            parts.append(Part("experts", "fused_moe", size, None, refused["vLLM"]))
            continue
        if fp8 and block and inner % 128:
            parts.append(Part("experts", "fused_moe", size, None,
                              f"{inner} rows a rank: gate and up would share a block of scales; use expert parallelism"))
            continue
        options: dict[str, Any] = {}
        if fp8:
            blocks = ((hidden + 127) // 128, (inner + 127) // 128)
            options = ({"x_scale": shape((tokens, blocks[0]), "f32"), "gate_up_scale": shape((experts, 2, blocks[1], blocks[0]), "f32"),
                        "down_scale": shape((experts, *blocks), "f32")} if block else
                       {"x_scale": shape((1,), "f32"), "gate_up_scale": shape((experts, 2), "f32"), "down_scale": shape((experts,), "f32"),
                        "act_scale": shape((1,), "f32")})
        parts.append(Part("experts", "fused_moe", size, fused_moe.explain(
            shape((tokens, hidden), dtype), shape((experts, 2 * inner, hidden), dtype), shape((experts, hidden, inner), dtype),
            shape((tokens, top_k), "i32"), shape((tokens, top_k), "f32"), **options), refused=refused))
    chosen = _choice_refused(config)
    for tokens in (1, PROMPT):
        size = f"{tokens} token{'s' if tokens > 1 else ''}"
        parts.append(Part("router logits", "router_gemm", size,
                          router_gemm.explain(shape((tokens, hidden)), RouterWeight((shape((experts, hidden)),), "exact")),
                          refused={"SGLang": "its router's product stays as it is"}))
        if len(chosen) == len(ENGINES):
            parts.append(Part("choice of experts", "route_top_k", size, None, chosen["SGLang"]))
        else:
            parts.append(Part("choice of experts", "route_top_k", size, route_top_k.explain(shape((tokens, experts), "f32"), top_k),
                              refused=chosen))
    if _first(config, "n_shared_experts", "num_shared_expert"):
        notes.append("shared experts stay with the engine: neither hands them to a runner")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python3 -m vivace.explanation", description=__doc__.partition("\n")[0])
    parser.add_argument("config")
    parser.add_argument("--tp", type=_flags.whole(1, _MOST), default=1)
    parser.add_argument("--page-tokens", type=_flags.whole(1, _MOST), default=64)
    parser.add_argument("--kv-dtype", choices=("bf16", "fp8_e4m3"), default="bf16")
    parser.add_argument("--compute-capability", type=_flags.whole(0, 1000), default=90, metavar="10 * MAJOR + MINOR")
    args = parser.parse_args(arguments)
    try:
        answer = explain(args.config, tp=args.tp, page_tokens=args.page_tokens, kv_dtype=args.kv_dtype, compute_capability=args.compute_capability)
    except OSError as error:
        print(f"vivace.explanation: {error.filename}: {error.strerror}", file=sys.stderr)
        return 1
    except (TypeError, ValueError) as error:
        print(f"vivace.explanation: {str(error).removeprefix('vivace.explain: ')}", file=sys.stderr)
        return 1
    _flags.say(str(answer))
    return 0


if __name__ == "__main__":
    sys.exit(main())
