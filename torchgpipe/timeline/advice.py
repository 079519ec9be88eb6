"""Advice: the one change of a model's settings that is expected to gain the most."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["Advice"]


@dataclass(frozen=True)
class Advice:
    """A change, why it helps, and what it is expected to gain.

    Args:
        reason: what takes the time now.
        change: the settings to change, such as ``{"chunks": 16}``; empty if it is the code that has
            to change.
        gain: the share of the step's time that is expected to be saved.
        caution: what has to be seen to, such as memory; empty if nothing.
        remedy: what to change in words: in the code, or in a setting too long for a sentence, such
            as a device map; empty if settings say it.
    """

    reason: str
    change: Mapping[str, Any]
    gain: float
    caution: str = ""
    remedy: str = ""

    def __str__(self) -> str:
        change = ", ".join(f"{name}={value!r}" for name, value in self.change.items())
        text = f"{self.reason}: {self.remedy or change} is expected to take {self.gain:.0%} less"
        return f"{text} ({self.caution})" if self.caution else text
