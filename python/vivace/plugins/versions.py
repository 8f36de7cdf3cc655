"""Which versions of the engines the plugins were written and tested against."""

from __future__ import annotations

import importlib.metadata
import logging
import re

logger = logging.getLogger("vivace")

# The first whose interfaces these plugins know, and the one that tests/python/interfaces/ was recorded from.
KNOWN = {"vllm": ((0, 33), (0, 33)), "sglang": ((0, 5, 23), (0, 5, 23))}


def parsed(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.match(r"\d+(?:\.\d+)*", version)[0].split("."))


def check_version(engine: str, version: str | None = None) -> str:
    """Why the plugin cannot work with this version; "" when it may. A newer one than was tested is tried, and said."""
    first, tested = KNOWN[engine]
    if version is None:
        try:
            version = importlib.metadata.version(engine)
        except importlib.metadata.PackageNotFoundError:
            return f"{engine} is not installed"
    found = parsed(version)
    if found < first:
        return (f"{engine} {version} is older than {'.'.join(map(str, first))}, the first whose interfaces this plugin knows; "
                f"update {engine}, or leave the plugin out")
    if found[:len(tested)] > tested:
        logger.warning("vivace: %s %s is newer than %s, which the plugin was tested against", engine, version, ".".join(map(str, tested)))
    return ""
