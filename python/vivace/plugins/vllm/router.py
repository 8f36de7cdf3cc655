"""Router logits in vLLM: GateLinear's product in fp32 accuracy on bf16 tensor cores, where additional_config asks for it."""

from __future__ import annotations

from typing import Any

import torch

import vivace


def register() -> None:
    """Wraps GateLinear.forward. A gate with a weight of fp32 or with a bias keeps its own way."""
    from vllm.model_executor.layers.fused_moe.router.gate_linear import GateLinear
    original = GateLinear.forward
    if getattr(original, "vivace", False):
        return

    def forward(self: Any, x: torch.Tensor) -> Any:
        if not _takes(self, x):
            return original(self, x)
        return self._return(logits(self, x))

    forward.vivace = True
    GateLinear.forward = forward


def logits(gate: Any, x: torch.Tensor) -> torch.Tensor:
    """In the type that the model asked for; in x's, which is bf16, where it asked for none."""
    return vivace.router_gemm(x, vivace.RouterWeight((gate.weight,), "exact"), out_dtype="f32" if gate.out_dtype == torch.float32 else "bf16")


def _takes(gate: Any, x: torch.Tensor) -> bool:
    known = gate.__dict__.get("_vivace")
    if known is None:  # once per layer: the configuration is known while a model is built and run first
        from . import say, wanted
        known = wanted("router")
        problem = _problem_of(gate) if known else ""
        if problem:
            say(f"a router's gate stays vLLM's own: {problem}")
            known = False
        gate.__dict__["_vivace"] = known
    return known and x.dtype == torch.bfloat16 and x.dim() == 2


def _problem_of(gate: Any) -> str:
    """What of a gate is not known here; "" when all is."""
    if not gate.is_unquantized:
        return "its weight is quantised"
    if getattr(gate, "bias", None) is not None:
        return "it has a bias"
    if gate.weight.dtype != torch.bfloat16:
        return f"its weight is {gate.weight.dtype}, torch.bfloat16 is known"
    if gate.out_dtype not in (None, torch.float32, torch.bfloat16):  # without one, the type of x
        return f"its logits are {gate.out_dtype}, torch.float32 and torch.bfloat16 are known"
    return ""
