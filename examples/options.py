"""What the command lines of the examples have in common."""

from __future__ import annotations

import argparse
from collections.abc import Callable

CHECKPOINT = ["always", "except_last", "never"]


def at_least(minimum: int) -> Callable[[str], int]:
    """The type of an option that is an integer, and not below a minimum."""

    def integer(text: str) -> int:
        if int(text) < minimum:
            raise argparse.ArgumentTypeError(f"must be at least {minimum} (value: {text})")
        return int(text)

    return integer
