"""What a thread runs: which layer, in which of its runs, within which cells."""

from __future__ import annotations

import threading
from typing import Any

import torch

__all__: list[str] = []


class Turn:
    """A step, or a recomputation, that is in no other, and holds the locks of what it draws."""

    over = False


class Running(threading.local):
    """What this thread runs."""

    #: The name of a layer in the module, while it runs and after it has failed.
    layer: str | None = None
    #: The name of its class.
    kind: str | None = None
    #: Whether what layers save for backward is dropped, to be computed again.
    checkpointing = False
    #: Whether layers run for the second time, within backward.
    recomputing = False
    #: In how many cells this thread computes, the one within the other.
    depth = 0
    #: The outermost step, or recomputation, that this thread computes for.
    turn: Turn | None = None
    #: Where layers stash and pop; None where they are run outside of a wrapper.
    tracker: Any = None

    def __init__(self) -> None:
        #: How often a step was run within a cell, by device whose random numbers it exchanges.
        self.steps: dict[torch.device, int] = {}


running = Running()
