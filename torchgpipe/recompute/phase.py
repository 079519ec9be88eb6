"""The run that a thread is in: the first one of a checkpointed cell, or the second."""

from __future__ import annotations

import threading
from typing import Any

from torchgpipe._torch.dynamo import uncompiled
from torchgpipe.ambient.context import registered

__all__ = ["is_checkpointing", "is_recomputing"]


class Phase(threading.local):
    """The run of a checkpointed cell that a thread is in."""

    #: Whether tensors that layers save for backward are dropped, to be computed again.
    checkpointing = False
    #: Whether layers run for the second time, within backward.
    recomputing = False
    #: What layers keep of the first run for the second, if there will be one.
    values: Any = None


phase = registered(Phase())


@uncompiled
def is_checkpointing() -> bool:
    """Whether this thread runs a layer whose saved tensors are dropped, to be recomputed."""
    return phase.checkpointing


@uncompiled
def is_recomputing() -> bool:
    """Whether this thread runs a layer for the second time, within backward.

    A layer that does something once per micro-batch, such as counting, asks this first::

        class Counter(nn.Module):
            count = 0

            def forward(self, input):
                if not is_recomputing():
                    self.count += 1
                return input
    """
    return phase.recomputing


class checkpointing:
    """Mark the first run of a checkpointed cell within a ``with`` block.

    Args:
        values: takes what layers keep.
    """

    def __init__(self, values: Any = None) -> None:
        self.values = values

    def __enter__(self) -> None:
        self.outer = phase.checkpointing, phase.values
        phase.checkpointing, phase.values = True, self.values

    def __exit__(self, *_: object) -> None:
        phase.checkpointing, phase.values = self.outer


class recomputing:
    """Mark the recomputation of a checkpointed cell within a ``with`` block.

    Args:
        values: has what layers have kept.
    """

    def __init__(self, values: Any = None) -> None:
        self.values = values

    def __enter__(self) -> None:
        self.outer = phase.recomputing, phase.values
        phase.recomputing, phase.values = True, self.values

    def __exit__(self, *_: object) -> None:
        phase.recomputing, phase.values = self.outer
