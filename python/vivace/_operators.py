"""Each operator's arguments, in the order of its struct in vivace/c_api.h, once for all who need them: the packing of calls,
torch's schemas, and the test that compares this list with the header.

A word is a tensor, or NAME:int or NAME:float. "?" stands after one that may be absent, "!" after one that is written. The
struct's pointer arguments have the type "pointer"; Python always gives null.
"""

from __future__ import annotations

import re
from typing import NamedTuple

_SCALED = "y! y_scale?! y_scaling:int"
_ATTENTION = ("q k v page_table kv_lengths query_start output! q_scale? k_scale? v_scale? sinks? lse?! "
              "softmax_scale:float window:int soft_cap:float")
_SCHEDULE_PARAMS = " ".join(f"params_{name}:int" for name in (
    "heads_kv", "tile_tokens", "workers", "min_tiles", "request_cost", "window", "piece_tiles"))
_PARTS = " ".join(f"parts_{i}_{part}" for i in range(3) for part in (
    ("weight", "weight_scale?", "bias?", "y!") if i == 0 else ("weight?", "weight_scale?", "bias?", "y?!")))
_SHARED = " ".join(f"shared_{part}?" for part in ("gate", "up", "down", "gate_scale", "up_scale", "down_scale", "act_scale"))

_TABLE = {
    "rms_norm": f"x residual?! weight {_SCALED} eps:float y_fp8?!",
    "linear": f"x x_scale? {_PARTS} workspace?! part_count:int x_scaling:int exact:int batch_invariant:int "
              "weight_ready:int",
    "embedding": "ids table y!",
    "attention_prologue": ("qkv q_norm_weight? k_norm_weight? cos_sin? positions? slots q! k! v! q_scale?! k_scale?! v_scale? "
                           "qk_norm:int rope_style:int eps:float"),
    "attention_prefill": f"{_ATTENTION} max_query_tokens:int split_tokens:int",
    "attention_decode": f"{_ATTENTION} schedule! workspace?! {_SCHEDULE_PARAMS} max_query_tokens:int old_keys_ready:int",
    "decode_schedule": f"kv_lengths query_start schedule! {_SCHEDULE_PARAMS}",
    "router_gemm": ("x weight_terms_0 weight_terms_1? weight_terms_2? weight_term_count:int weight_scaled:int weight_mode:int "
                    "weight_version:int bias? scores! current_version:int batch_invariant:int weight_ready:int"),
    "route_top_k": ("scores correction_bias? expert_ids! expert_weights! zero_weight?! live_tokens? scoring:int renormalise:int "
                    "scale:float groups:int top_groups:int zero_experts:int"),
    "choose_experts": ("x weight_terms_0 weight_terms_1? weight_terms_2? weight_term_count:int weight_scaled:int weight_mode:int "
                       "weight_version:int bias? scores?! correction_bias? expert_ids! expert_weights! zero_weight?! live_tokens? "
                       "workspace?! current_version:int scoring:int renormalise:int scale:float groups:int top_groups:int "
                       "zero_experts:int batch_invariant:int weight_ready:int"),
    "fused_moe": (f"x x_scale? gate_up down gate_up_scale? down_scale? act_scale? {_SHARED} expert_ids expert_weights "
                  "expert_map? y! workspace?! experts:pointer expert_count:int block_offset:int first_expert:int total_experts:int "
                  "swiglu_alpha:float swiglu_limit:float swiglu_beta:float batch_invariant:int"),
    "grouped_gemm": "x weight group_start group_rows x_scale? weight_scale? y! batch_invariant:int",
    "silu_mul": f"gate up {_SCALED}",
    "quantize_fp8": "x y! scale?! scaling:int",
    "sampler": ("logits temperature? top_p? min_p? top_k? repetition_penalty? presence_penalty? frequency_penalty? seed? "
                "position? prompt_bits? output_counts?! state? bias_start? bias_ids? bias_values? allowed_bits? ids! valid! "
                "logprobs?! top_ids?! top_logprobs?! workspace?! count_ids:int"),
}


class Argument(NamedTuple):
    name: str
    kind: str  # tensor, int, float or pointer
    optional: bool
    written: bool

    @property
    def said(self) -> str:
        """Its name in messages, as the library writes it."""
        return re.sub(r"^(params|shared|swiglu)_", r"\1.", re.sub(r"^parts_(\d)_", r"parts[\1].", self.name))


class Operator(NamedTuple):
    name: str
    arguments: tuple[Argument, ...]
    workspace: int | None  # its place among the arguments

    @property
    def schema(self) -> str:
        """For torch: every output is an argument that is written, and nothing is returned."""
        words = []
        for i, argument in enumerate(self.arguments):
            if argument.kind != "tensor":
                words.append(f"{'int' if argument.kind == 'pointer' else argument.kind} {argument.name}")
            else:
                alias = f"(a{i}!)" if argument.written else ""
                words.append(f"Tensor{alias}{'?' if argument.optional else ''} {argument.name}")
        return f"{self.name}({', '.join(words)}) -> ()"


def _parse(name: str, words: str) -> Operator:
    arguments = []
    for word in words.split():
        word, _, kind = word.partition(":")
        arguments.append(Argument(word.rstrip("?!"), kind or "tensor", "?" in word, "!" in word))
    names = [argument.name for argument in arguments]
    return Operator(name, tuple(arguments), names.index("workspace") if "workspace" in names else None)


OPERATORS = {name: _parse(name, words) for name, words in _TABLE.items()}
