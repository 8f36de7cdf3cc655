"""Vivace in SGLang, installed with the wheel: SGLang loads the entry point `sglang.srt.plugins` in each of its processes.

    python -m sglang.launch_server --model-path MODEL --attention-backend vivace --page-size 64
    python -m sglang.launch_server --model-path MODEL --decode-attention-backend vivace --moe-runner-backend vivace --page-size 64

Each part is chosen by its flag: nothing changes for those who set none.
"""

from __future__ import annotations

import logging

from ..versions import check_version

logger = logging.getLogger("vivace")

NAME = "vivace"
_registered = False


def register() -> None:
    """The entry point. May be called again; touches no device."""
    global _registered
    if _registered:
        return
    problem = check_version("sglang")
    if problem:
        logger.warning("vivace: not registered with SGLang: %s", problem)
        return
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.server_args import add_attention_backend_choices

    @register_attention_backend(NAME)
    def create(model_runner: object) -> object:
        from .attention import VivaceAttnBackend
        return VivaceAttnBackend(model_runner)

    add_attention_backend_choices([NAME])
    from . import moe, router
    moe.register()
    router.register()
    _registered = True
