"""The critical path of a step: how long it takes if each cell starts as soon as it may.

Forward of a cell needs the same micro-batch in the partition before, and the micro-batch before in
the same partition. Backward starts when all forwards are done, for the loss, and goes the other way
round. A checkpointed cell is computed again right before its backward, on the same device: where a
device runs its work without blocking the host, that may be before the gradient has come.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

__all__ = ["MODES", "backward_path", "forward_path", "recomputed", "step_path"]

#: When checkpoints may be made.
MODES = ("never", "except_last", "always")

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


def recomputed(mode: str, m: int) -> int:
    """How many micro-batches are recomputed."""
    return {"never": 0, "except_last": m - 1, "always": m}[mode]


def step_path(
    mode: str,
    m: int,
    forward: Sequence[float],
    again: Sequence[float],
    backward: Sequence[float],
    copies: Sequence[float] | None = None,
    skips: Sequence[tuple[int, int, float]] = (),
) -> float:
    """The makespan of a step in which each task starts as soon as it may.

    A device computes the forwards of all micro-batches in order, then in reverse order of each the
    recomputation, if it is due, and the backward. A forward needs those of the partitions that its
    input and its skips come from, a backward those that they go to, all copied; a recomputation
    needs nothing. The last partition's backwards need all its forwards, for the loss.

    Args:
        mode: what is checkpointed.
        m: how many micro-batches there are.
        forward: what a forward of each partition takes.
        again: what a recomputation takes, likewise.
        backward: likewise.
        copies: what a copy between each partition and the next one takes, in either direction.
        skips: from which partition to which one, and what their copies take, likewise.
    """
    n = len(forward)
    edges = [(j, j + 1, copy) for j, copy in enumerate(copies or [0.0] * (n - 1))] + [*skips]
    count = recomputed(mode, m)
    order = [("F", i) for i in range(m)]
    for i in reversed(range(m)):
        order += [("R", i)] * (i < count) + [("B", i)]
    cost = {"F": forward, "R": again, "B": backward}

    @cache
    def end(k: int, j: int) -> float:
        """When the k-th task of a partition is done."""
        kind = order[k][0]
        start = end(k - 1, j) if k else 0.0
        if kind == "F":
            start = max([start, *[end(k, a) + copy for a, b, copy in edges if b == j]])
        if kind == "B":
            start = max([start, *[end(k, b) + copy for a, b, copy in edges if a == j]])
        return start + cost[kind][j]

    # Task by task: the graph is deeper than Python's stack.
    for k in range(len(order)):
        for j in range(n) if order[k][0] == "F" else reversed(range(n)):
            end(k, j)
    return max(end(len(order) - 1, j) for j in range(n))
