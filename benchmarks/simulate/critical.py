"""Critical path of a step: its time if each cell starts as soon as its inputs are there.

A cell's forward needs the same micro-batch in the previous partition, and the previous micro-batch
in the same partition. Backward starts when all forwards are done, for the loss, and needs the
reverse. A device recomputes a checkpointed cell right before the cell's backward; if the device
does not block the host, it may recompute before the gradient has come.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

__all__ = ["MODES", "backward_path", "forward_path", "recomputed", "step_path"]

#: Checkpoint modes.
MODES = ("never", "except_last", "always")

#: Times in any unit; row ``i``, column ``j`` is micro-batch ``i`` in partition ``j``.
Times = Sequence[Sequence[float]]


def forward_path(forward: Times) -> float:
    """Time from the start of a step to the end of its last forward."""
    ends = [0.0] * len(forward[0])
    for row in forward:
        before = 0.0
        for j, time in enumerate(row):
            before = ends[j] = max(before, ends[j]) + time
    return ends[-1]


def backward_path(backward: Times, again: Times | None = None, *, ahead: bool = False) -> float:
    """Time from the start of backward to the end of its last cell.

    Args:
        backward: time of each cell's backward.
        again: time of each cell's recomputation, zero for cells without a checkpoint.
        ahead: whether a device recomputes a cell as soon as it is free, even before the gradient
            has come. Otherwise it waits for the gradient first.
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
    """Number of micro-batches that are recomputed."""
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
    """Makespan of a step in which each task starts as soon as its inputs are there.

    A device computes the forwards of all micro-batches in order; then, for each micro-batch in
    reverse order, the recomputation, if there is a checkpoint, and the backward. A forward needs
    the copied outputs of the partitions that its input and its skips come from, and a backward the
    copied gradients of the partitions that they go to. A recomputation needs nothing. The last
    partition's backwards need all its forwards, for the loss.

    Args:
        mode: which micro-batches are checkpointed.
        m: number of micro-batches.
        forward: time of a forward in each partition.
        again: time of a recomputation in each partition.
        backward: time of a backward in each partition.
        copies: time of a copy between each partition and the next one, in either direction.
        skips: source partition, target partition and time of a copy of each skip.
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
        """Time at which the k-th task of a partition is done."""
        kind = order[k][0]
        start = end(k - 1, j) if k else 0.0
        if kind == "F":
            start = max([start, *[end(k, a) + copy for a, b, copy in edges if b == j]])
        if kind == "B":
            start = max([start, *[end(k, b) + copy for a, b, copy in edges if a == j]])
        return start + cost[kind][j]

    # Fill the cache task by task: recursion through the whole graph would overflow the stack.
    for k in range(len(order)):
        for j in range(n) if order[k][0] == "F" else reversed(range(n)):
            end(k, j)
    return max(end(len(order) - 1, j) for j in range(n))
