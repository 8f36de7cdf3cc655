"""Routed experts in vLLM: a class of experts that stands before Triton's where additional_config asks for it."""

from __future__ import annotations

from typing import Any

import torch

from .. import serving


def register() -> None:
    """Wraps the function that names a backend's classes; vLLM 0.33 has no registry for them."""
    from vllm.model_executor.layers.fused_moe.oracle import fp8
    original = fp8.backend_to_kernel_cls
    if getattr(original, "vivace", False):
        return

    def backend_to_kernel_cls(backend: Any) -> list[type]:
        from . import say, wanted
        classes = original(backend)
        if not wanted("moe"):
            return classes
        if backend == fp8.Fp8MoeBackend.TRITON:
            return [_experts_class(), *classes]  # the first that supports a layer's configuration is taken, the others stay
        say(f"vLLM asks {backend.value} for experts before Triton, where ours stand; pass --moe-backend triton if it takes them")
        return classes

    backend_to_kernel_cls.vivace = True
    fp8.backend_to_kernel_cls = backend_to_kernel_cls


def problems(moe_config: Any, quant_config: Any = None) -> list[str]:
    """What of a layer's configuration is not known here: what changes SiLU(gate) * up, and biases."""
    found = [name for name in ("swiglu_limit", "swiglu_alpha", "swiglu_beta", "activation_situ_beta", "activation_situ_linear_beta")
             if getattr(moe_config, name, None) is not None]
    found += [name for name in ("gemm1_clamp_limit", "gemm1_alpha", "gemm1_beta", "w1_bias", "w2_bias")
              if getattr(quant_config, name, None) is not None]
    return found + ["has_bias"] * bool(getattr(moe_config, "has_bias", False))


_class: type | None = None


def _experts_class() -> type:
    """Made when first asked for: its base class imports much of vLLM."""
    global _class
    if _class is not None:
        return _class
    import vllm.model_executor.layers.fused_moe.modular_kernel as mk
    from vllm import envs
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceNoOP
    from vllm.model_executor.layers.quantization.utils.quant_utils import kFp8Dynamic128Sym, kFp8Static128BlockSym, kFp8StaticTensorSym
    from vllm.platforms import current_platform

    class VivaceExperts(mk.FusedMoEExpertsModular):
        """FP8 experts, with one scale a tensor or one per 128 x 128; ids of other ranks are skipped."""

        def __init__(self, moe_config: Any, quant_config: Any, max_num_tokens: int | None = None,
                     num_dispatchers: int | None = None) -> None:
            super().__init__(moe_config, quant_config, max_num_tokens, num_dispatchers)
            found = problems(moe_config, quant_config)
            if found:
                raise NotImplementedError(f"vivace: experts with {', '.join(found)} are not known")

        @staticmethod
        def is_supported_config(cls: type, moe_config: Any, weight_key: Any, activation_key: Any,
                                activation_format: Any) -> tuple[bool, str | None]:
            found = problems(moe_config)
            if found:
                return False, f"kernel does not support {', '.join(found)}"
            return mk.FusedMoEExpertsModular.is_supported_config(cls, moe_config, weight_key, activation_key, activation_format)

        @staticmethod
        def activation_format() -> Any:
            return mk.FusedMoEActivationFormat.Standard

        @staticmethod
        def _supports_current_device() -> bool:
            return current_platform.is_cuda() and current_platform.has_device_capability(80)

        @staticmethod
        def _supports_no_act_and_mul() -> bool:
            return False

        @staticmethod
        def _supports_quant_scheme(weight_key: Any, activation_key: Any) -> bool:
            return (weight_key, activation_key) in [(kFp8StaticTensorSym, kFp8StaticTensorSym), (kFp8Static128BlockSym, kFp8Dynamic128Sym)]

        @staticmethod
        def _supports_activation(activation: Any) -> bool:
            return activation == MoEActivation.SILU

        @staticmethod
        def _supports_parallel_config(moe_parallel_config: Any) -> bool:
            return True

        @staticmethod
        def _supports_shape(hidden_dim: int) -> bool:
            return hidden_dim % 128 == 0

        @staticmethod
        def _supports_batch_invariance() -> bool:
            return True

        def supports_expert_map(self) -> bool:
            return True

        def finalize_weight_and_reduce_impl(self) -> Any:
            return TopKWeightAndReduceNoOP()

        def workspace_shapes(self, M: int, N: int, K: int, topk: int, global_num_experts: int, local_num_experts: int,
                             expert_tokens_meta: Any, activation: Any) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
            return (0,), (0,), (M, K)

        def apply(self, output: torch.Tensor, hidden_states: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, topk_weights: torch.Tensor,
                  topk_ids: torch.Tensor, activation: Any, global_num_experts: int, expert_map: torch.Tensor | None,
                  a1q_scale: torch.Tensor | None, a2_scale: torch.Tensor | None, workspace13: torch.Tensor, workspace2: torch.Tensor,
                  expert_tokens_meta: Any, apply_router_weight_on_input: bool) -> None:
            if apply_router_weight_on_input:
                raise NotImplementedError("vivace: router weights on the input are not known")
            block = self.block_shape is not None
            serving.experts(hidden_states, w1, w2, topk_ids, topk_weights, gate_up_scale=self.w1_scale, down_scale=self.w2_scale,
                            x_scale=a1q_scale.contiguous() if a1q_scale is not None else self.a1_scale,
                            act_scale=a2_scale if a2_scale is not None else self.a2_scale, block=block,
                            expert_map=expert_map, batch_invariant=envs.VLLM_BATCH_INVARIANT, out=output)

    _class = VivaceExperts
    return _class
