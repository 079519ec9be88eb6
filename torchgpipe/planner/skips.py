"""The skips of a layer, and their ends in partitions."""

from __future__ import annotations

from typing import Any, NamedTuple

from torchgpipe.balance.sandbox import Sandbox
from torchgpipe.skip.namespace import Skip

__all__: list[str] = []


class Stashed(NamedTuple):
    """A skip that a layer stashes, at one size of micro-batch, or as curves by its rows.

    Args:
        size: its memory.
        gradient: memory of its gradient.
        is_input: whether it is in the memory of the layer's input.
        is_output: whether it is in the memory of the layer's output.
        saved: whether the layer keeps it for backward.
    """

    size: Any
    gradient: Any
    is_input: bool
    is_output: bool
    saved: bool


class Popped(NamedTuple):
    """A skip that a layer pops, at one size of micro-batch, or as curves by its rows.

    Args:
        size: its memory.
        gradient: memory of its gradient.
        saved: whether the layer keeps it for backward.
        holds: memory that its gradient keeps, which is more where that is a view, as that of what
            is concatenated.
    """

    size: Any
    gradient: Any
    saved: bool
    holds: Any = 0


class End(NamedTuple):
    """The end of a skip in a partition, for micro-batches of some rows.

    Args:
        size: its memory.
        gradient: memory of its gradient.
        keeps: whether cells keep it for backward, if they are not computed again.
        is_input: whether it is in the memory of the partition's input.
        is_output: whether it is in that of the output.
        holds: memory that its gradient keeps where it is made.
    """

    size: float
    gradient: float
    keeps: bool
    is_input: bool = False
    is_output: bool = False
    holds: float = 0.0


def popped_from(sandbox: Sandbox) -> list[Skip]:
    """The skips that the layer of a sandbox pops."""
    return [skip for skip in sandbox.batch.skips if skip not in sandbox.output.skips]
