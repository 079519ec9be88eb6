"""Options that the command lines of the examples share."""

from __future__ import annotations

import argparse
from collections.abc import Callable

CHECKPOINT = ["always", "except_last", "never"]


def at_least(minimum: int) -> Callable[[str], int]:
    """The type of an option that is an integer, at least the minimum."""

    def integer(text: str) -> int:
        if int(text) < minimum:
            raise argparse.ArgumentTypeError(f"must be at least {minimum} (value: {text})")
        return int(text)

    return integer
