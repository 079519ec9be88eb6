"""The critical path of a step: how long it takes if each cell starts as soon as it may.

Forward of a cell needs the same micro-batch in the partition before, and the micro-batch before in
the same partition. Backward starts when all forwards are done, for the loss, and goes the other way
round. A checkpointed cell is computed again right before its backward, on the same device: where a
device runs its work without blocking the host, that may be before the gradient has come.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["forward_path", "backward_path"]

#: Seconds, or whatever: of micro-batch ``i`` in partition ``j`` in row ``i``, column ``j``.
Times = Sequence[Sequence[float]]


def forward_path(forward: Times) -> float:
    """From the start of a step to the end of its last forward."""
    ends = [0.0] * len(forward[0])
    for row in forward:
        before = 0.0
        for j, time in enumerate(row):
            before = ends[j] = max(before, ends[j]) + time
    return ends[-1]


def backward_path(backward: Times, again: Times | None = None, *, ahead: bool = False) -> float:
    """From the start of a backward to the end of its last cell.

    Args:
        backward: what each cell's backward takes.
        again: what each cell's recomputation takes, zero where it is not checkpointed.
        ahead: whether a cell is recomputed as soon as its device is free, which is before its
            gradient has come. Otherwise the gradient comes first.
    """
    again = again or [[0.0] * len(row) for row in backward]
    ends = [0.0] * len(backward[0])
    for row, row_again in zip(reversed(backward), reversed(again)):
        gradient = 0.0
        for j in reversed(range(len(row))):
            free = ends[j] + row_again[j] if ahead else max(gradient, ends[j]) + row_again[j]
            gradient = ends[j] = max(gradient, free) + row[j]
    return max(ends)
