"""Routed experts in SGLang: --moe-runner-backend vivace, for fp8 with one scale a tensor or one per 128 x 128, and for bf16."""

from __future__ import annotations

from typing import Any

import torch

from .. import serving
from . import NAME


def register() -> None:
    from sglang.srt.layers.moe.moe_runner.runner import register_moe_runner_core
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from sglang.srt.server_args import add_moe_runner_backend_choices
    add_moe_runner_backend_choices([NAME])
    register_moe_runner_core(NAME, lambda config: _core_class()(config))
    # The quantisation methods know the backends by name: they are told what this one takes, which is what Triton's takes.
    for target, hook in (("sglang.srt.layers.quantization.fp8.Fp8MoEMethod.create_moe_runner", create_moe_runner),
                         ("sglang.srt.layers.quantization.fp8.Fp8MoEMethod.apply", apply_fp8),
                         ("sglang.srt.layers.quantization.unquant.UnquantizedFusedMoEMethod.create_moe_runner", create_moe_runner)):
        HookRegistry.register(target, hook, HookType.AROUND)


def _chosen() -> Any:
    """The backend that this run chose, if it is ours."""
    from sglang.srt.layers.moe.utils import get_moe_runner_backend
    backend = get_moe_runner_backend()
    return backend if backend.value == NAME else None


def create_moe_runner(original: Any, self: Any, layer: torch.nn.Module, moe_runner_config: Any) -> None:
    original(self, layer, moe_runner_config)
    backend = _chosen()
    if backend is not None:
        from sglang.srt.layers.moe.moe_runner.runner import MoeRunner
        self.runner = MoeRunner(backend, moe_runner_config)
        self._owns_moe_runner = True


def apply_fp8(original: Any, self: Any, layer: torch.nn.Module, dispatch_output: Any) -> Any:
    runner = getattr(self, "runner", None)
    if runner is None or runner.runner_backend.value != NAME:
        return original(self, layer, dispatch_output)
    return runner.run(dispatch_output, self.get_triton_quant_info(layer))


def problems(config: Any) -> list[str]:
    """What of a layer's configuration is not known here. gate_up_interleaved, true by default, counts with gemm1_alpha alone."""
    found = []
    if config.activation != "silu" or not config.is_gated:
        found.append(f"activation {config.activation}{'' if config.is_gated else ' without a gate'}; silu with a gate is known")
    for name in ("gemm1_alpha", "gemm1_beta", "gemm1_clamp_limit", "swiglu_limit"):
        if getattr(config, name, None) is not None:
            found.append(name)
    for name in ("apply_router_weight_on_input", "no_combine"):
        if getattr(config, name, False):
            found.append(name)
    return found


_class: type | None = None


def _core_class() -> type:
    """Made when first asked for: its base class imports much of SGLang."""
    global _class
    if _class is not None:
        return _class
    from sglang.srt.layers.moe.moe_runner.base import DispatchMoeRunnerCore
    from sglang.srt.layers.moe.token_dispatcher.standard import StandardCombineInput
    from sglang.srt.layers.moe.utils import resolve_moe_runner_backend
    from sglang.srt.runtime_context import get_exec

    class VivaceRunnerCore(DispatchMoeRunnerCore):
        """Tokens, experts and weights in, the weighted sum out: one call of fused_moe."""

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            found = problems(config)
            if found:
                raise NotImplementedError(f"vivace: --moe-runner-backend vivace does not know {', '.join(found)} (layer {config.layer_id})")

        @property
        def runner_backend(self) -> Any:
            return resolve_moe_runner_backend(NAME)

        def run_from_dispatch(self, dispatch_output: Any, quant_info: Any, runner_config: Any, hooks: Any = None) -> Any:
            if hooks is not None:
                raise NotImplementedError("vivace: LoRA on experts is not known")
            if quant_info.b13 is not None or quant_info.b2 is not None:
                raise NotImplementedError("vivace: experts with a bias are not known")
            if quant_info.block_shape is not None and list(quant_info.block_shape) != [128, 128]:
                raise NotImplementedError(f"vivace: experts with blocks of {quant_info.block_shape}, [128, 128] is known")
            for name in ("use_mxfp8", "use_int8_w8a8", "use_int8_w8a16", "use_int4_w4a16", "per_channel_quant", "fuse_swiglu_interleaved"):
                if getattr(quant_info, name, False):
                    raise NotImplementedError(f"vivace: experts with {name} are not known")
            x, topk = dispatch_output.hidden_states, dispatch_output.topk_output
            out = x if runner_config.inplace and x.is_contiguous() and quant_info.use_fp8_w8a8 else torch.empty_like(x)
            serving.experts(x, quant_info.w13_weight, quant_info.w2_weight, topk.topk_ids, topk.topk_weights,
                            gate_up_scale=quant_info.w13_scale, down_scale=quant_info.w2_scale, x_scale=quant_info.a13_scale,
                            act_scale=quant_info.a2_scale, block=quant_info.block_shape is not None,
                            batch_invariant=get_exec().deterministic.enable_deterministic_inference, out=out)
            if runner_config.routed_scaling_factor not in (None, 1.0):
                out.mul_(runner_config.routed_scaling_factor)
            return StandardCombineInput(hidden_states=out)

    _class = VivaceRunnerCore
    return _class
