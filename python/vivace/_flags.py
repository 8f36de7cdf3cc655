"""Values of the command lines of this package's programs."""

from __future__ import annotations

import argparse
import math
import os
import sys
from typing import Callable


def whole(low: int, high: int) -> Callable[[str], int]:
    """What argparse reads a whole number from `low` to `high` by."""
    def number(text: str) -> int:
        if not (text.isascii() and text.isdigit() and len(text) <= 40 and low <= int(text) <= high):
            raise argparse.ArgumentTypeError(f"{text!r}, needs {low} to {high}")
        return int(text)
    return number


def between(low: float, high: float) -> Callable[[str], float]:
    """The same of any number, `low` and `high` among them."""
    def number(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text!r}, needs a number from {low:g} to {high:g}")
        return value
    return number


def say(text: str) -> None:
    """Prints it; a reader that has closed the pipe wants no more."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what Python flushes at its end
