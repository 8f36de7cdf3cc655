"""The choice of experts in SGLang, in one kernel, where --moe-runner-backend vivace is given and the router is a plain one."""

from __future__ import annotations

from typing import Any

import torch

import vivace


def register() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    HookRegistry.register("sglang.srt.layers.moe.topk.select_experts", select_experts, HookType.AROUND)


def takes(config: Any, router_logits: torch.Tensor, others: dict[str, Any]) -> bool:
    """Whether route_top_k computes what this configuration asks for."""
    return (config.scoring_func in ("softmax", "sigmoid") and config.custom_routing_function is None and not config.torch_native
            and config.num_shared_topk_slots == 0
            and not (config.scoring_func == "softmax" and (config.correction_bias is not None or config.use_grouped_topk))
            # Without a bias SGLang scores a group by its best expert, route_top_k by its best two.
            and not (config.use_grouped_topk and config.correction_bias is None and (config.num_expert_group or 1) > 1)
            and router_logits.dtype in (torch.float32, torch.bfloat16)
            and all(value is None for name, value in others.items() if name not in ("layer_id", "num_token_non_padded")))


def select_experts(original: Any, hidden_states: torch.Tensor, router_logits: torch.Tensor, topk_config: Any, **others: Any) -> Any:
    from .moe import _chosen
    if _chosen() is None or not takes(topk_config, router_logits, others):
        return original(hidden_states, router_logits, topk_config, **others)
    from sglang.srt.layers.moe.topk import StandardTopKOutput
    config, live = topk_config, others.get("num_token_non_padded")
    bias = config.correction_bias
    scale = config.routed_scaling_factor if config.apply_routed_scaling_factor_on_output and config.routed_scaling_factor else 1.0
    route = vivace.route_top_k(
        router_logits.float(), config.top_k, scoring=config.scoring_func, renormalise=config.renormalize, scale=scale,
        correction_bias=None if bias is None else bias.float(), live_tokens=None if live is None else live.view(1).to(torch.int32),
        groups=(config.num_expert_group or 1) if config.use_grouped_topk else 1,
        top_groups=(config.topk_group or 1) if config.use_grouped_topk else 1)
    return StandardTopKOutput(route.expert_weights, route.expert_ids, router_logits)
