"""The run that a thread is in: the first one of a checkpointed cell, or the second."""

from __future__ import annotations

import threading

from torchgpipe._torch.dynamo import uncompiled
from torchgpipe.ambient.thread import registered

__all__ = ["is_checkpointing", "is_recomputing"]


class Phase(threading.local):
    """The run of a checkpointed cell that a thread is in."""

    #: Whether tensors that layers save for backward are dropped, to be computed again.
    checkpointing = False
    #: Whether layers run for the second time, within backward.
    recomputing = False


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
    """Mark the first run of a checkpointed cell within a ``with`` block."""

    def __enter__(self) -> None:
        self.outer, phase.checkpointing = phase.checkpointing, True

    def __exit__(self, *_: object) -> None:
        phase.checkpointing = self.outer


class recomputing:
    """Mark the second run of a checkpointed cell within a ``with`` block."""

    def __enter__(self) -> None:
        self.outer, phase.recomputing = phase.recomputing, True

    def __exit__(self, *_: object) -> None:
        phase.recomputing = self.outer
