"""Vivace in vLLM, installed with the wheel: vLLM loads the entry point `vllm.general_plugins` in each of its processes.

    vllm serve MODEL --attention-backend CUSTOM
    vllm serve MODEL --attention-backend CUSTOM --additional-config '{"vivace": {"moe": true, "router": true}}'

Attention is chosen by the flag, experts and router by additional_config: nothing changes for those who set neither. Experts stand
beside Triton's: --moe-backend triton keeps vLLM from taking another backend before it.
"""

from __future__ import annotations

import functools
import logging

from ..versions import check_version

logger = logging.getLogger("vivace")

BACKEND = "vivace.plugins.vllm.attention.VivaceBackend"


def register() -> None:
    """The entry point. May be called again; touches no device."""
    problem = check_version("vllm")
    if problem:
        logger.warning("vivace: not registered with vLLM: %s", problem)
        return
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
    register_backend(AttentionBackendEnum.CUSTOM, BACKEND)
    from . import moe, router
    moe.register()
    router.register()


@functools.cache
def say(reason: str) -> None:
    """Warns once in a process of what was asked for and does not come."""
    logger.warning("vivace: %s", reason)


def wanted(part: str) -> bool:
    """Whether this run's additional_config asks for a part."""
    from vllm.config import get_current_vllm_config_or_none
    config = get_current_vllm_config_or_none()
    ours = (getattr(config, "additional_config", None) or {}).get("vivace") or {}
    return bool(ours.get(part, False))
