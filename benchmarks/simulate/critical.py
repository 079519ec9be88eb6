"""Critical path of a step: its time if each cell starts as soon as its inputs are there.

What waits for what is what :mod:`torchgpipe.schedule` knows of ``fill_drain``, GPipe's schedule. A
cell's forward needs the same micro-batch in the previous partition, and the previous micro-batch
in the same partition. Backward starts when all forwards are done, for the loss, and needs the
reverse. A device recomputes a checkpointed cell right before the cell's backward; if the device
does not block the host, it may recompute before the gradient has come.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from torchgpipe.schedule import Costs, Op, fill_drain, simulate
from torchgpipe.schedule.program import Program, operations, walk

__all__ = ["MODES", "backward_path", "forward_path", "recomputed", "step_path"]

#: Checkpoint modes.
MODES = ("never", "except_last", "always")

#: Times in any unit; row ``i``, column ``j`` is micro-batch ``i`` in partition ``j``.
Times = Sequence[Sequence[float]]


def forward_path(forward: Times) -> float:
    """Time from the start of a step to the end of its last forward."""
    return path(part("F", forward), lambda op: forward[op.microbatch][op.stage])


def backward_path(backward: Times, again: Times | None = None, *, ahead: bool = False) -> float:
    """Time from the start of backward to the end of its last cell.

    Args:
        backward: time of each cell's backward.
        again: time of each cell's recomputation, zero for cells without a checkpoint.
        ahead: whether a device recomputes a cell as soon as it is free, even before the gradient
            has come. Otherwise it waits for the gradient first.
    """
    again = again or [[0.0] * len(row) for row in backward]
    # What waits for the gradient is one task with the backward.
    program = part("RB" if ahead else "B", backward)

    def time(op: Op) -> float:
        own, first = backward[op.microbatch][op.stage], again[op.microbatch][op.stage]
        return first if op.kind == "R" else own if ahead else first + own

    return path(program, time)


def part(kinds: str, times: Times) -> Program:
    """Some kinds of instructions of GPipe's schedule, with a recomputation of each cell."""
    schedule = fill_drain(len(times[0]), len(times)).recompute()
    lines = [[op for x in line for op in operations(x)] for line in schedule.program]
    return tuple(tuple(op for op in line if op.kind in kinds) for line in lines)


def path(program: Program, time: Callable[[Op], float]) -> float:
    """Time to the end of a program whose copies take no time."""
    free, end = [0.0] * len(program), dict[Op, float]()
    for w, instruction, edges in walk(program, lambda waiting: None):
        begin = max([free[w], *(end[source] for source, _ in edges)])
        free[w] = begin + sum(map(time, operations(instruction)))
        end.update(dict.fromkeys(operations(instruction), free[w]))
    return max(free)


def recomputed(mode: str, m: int) -> int:
    """Number of micro-batches that are recomputed."""
    return {"never": 0, "except_last": m - 1, "always": m}[mode]


def step_path(
    mode: str | Sequence[str],
    m: int,
    forward: Sequence[float],
    again: Sequence[float],
    backward: Sequence[float],
    copies: Sequence[float] | None = None,
    skips: Sequence[tuple[int, int, float]] = (),
) -> float:
    """Makespan of a step in which each task starts as soon as its inputs are there.

    A recomputation needs nothing but its forward.

    Args:
        mode: which micro-batches are checkpointed, one mode for all partitions or one for each.
        m: number of micro-batches.
        forward: time of a forward in each partition.
        again: time of a recomputation in each partition.
        backward: time of a backward in each partition.
        copies: time of a copy between each partition and the next one, in either direction.
        skips: source partition, target partition and time of a copy of each skip.
    """
    n = len(forward)
    copy: dict[tuple[int, int], float] = {}
    for a, b, time in [*zip(range(n), range(1, n), copies or [0.0] * n), *skips]:
        # A skip to the next partition comes beside the value.
        copy[a, b] = copy[b, a] = max(time, copy.get((a, b), 0.0))
    schedule = fill_drain(n, m)
    for j, own in enumerate([mode] * n if isinstance(mode, str) else mode):
        schedule = schedule.recompute(stages=[j], microbatches=range(recomputed(own, m)))
    schedule = replace(schedule, skips=tuple((a, b) for a, b, _ in skips))
    costs = Costs(F=forward, I=backward, W=0, R=again, copy=copy)
    return simulate(schedule, costs).makespan
