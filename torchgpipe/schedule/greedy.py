"""List scheduling: a free worker takes, of the computations that are ready, the most urgent.

With limited memory this could block: memory is full, and no micro-batch can end. So a worker takes
a computation only if afterwards the micro-batches that have begun can still end one after another,
in the order in which they began. This is the banker's algorithm (Dijkstra, EWD 623) on each worker.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from math import isclose
from typing import Any

from torchgpipe.checks import verify_function
from torchgpipe.schedule.costs import Costs, Each, Table
from torchgpipe.schedule.language import Schedule, checked_placement, checked_skips
from torchgpipe.schedule.limits import capacities
from torchgpipe.schedule.program import Op, Skips, by_stage, needs

__all__ = ["greedy"]


def greedy(
    placement: Sequence[int],
    chunks: int,
    priority: Callable[[Op], Any],
    *,
    split: bool = False,
    costs: Costs = Costs(),
    capacity: Each | None = None,
    skips: Skips = (),
) -> Schedule:
    """Make a schedule from a priority, without recomputation and overlaps.

    Args:
        placement: stage -> worker.
        chunks: the number of micro-batches.
        priority: the sort key of a computation; the smallest goes first. Of equal ones, the
            earlier stage goes first, then the first kind in the alphabet, then the first
            micro-batch.
        split: whether backward is two computations, I and W, or one, B.
        costs: the costs of the stages, from which the order follows.
        capacity: the memory of all workers, or of each; unlimited if None.
        skips: the stages that each skip leads from and to.

    Raises:
        ValueError: One micro-batch alone needs more memory than a worker has, or the arguments do
            not fit each other.

    Example::

        >>> depth_first = greedy((0, 1), 3, lambda op: ("BF".index(op.kind), op.microbatch))
        >>> print(depth_first)
        0F0 0F1 0F2 0B0 0B1 0B2
        1F0 1B0 1F1 1B1 1F2 1B2
    """
    verify_function(
        priority,
        "priority must be a function of a computation",
        "priority",
        "pass such as lambda op: (op.kind, op.microbatch)",
    )
    placement = checked_placement(placement)
    workers = len(set(placement))
    # Schedule() raises if placement, chunks and skips do not fit each other.
    empty = Schedule(placement, chunks, ((),) * workers, checked_skips(skips))
    table = Table(costs, placement, skips)
    memory = _Memory(placement, table, capacity, split)
    stages, kinds = range(len(placement)), "FIW" if split else "FB"
    ops = {Op(j, kind, i) for j in stages for kind in kinds for i in range(chunks)}
    near = by_stage(skips)
    sources = {op: needs(op, ops, near.get(op.stage, ())) for op in ops}
    missing = {op: len(needed) for op, needed in sources.items()}
    #: For each computation, when the last of those inputs arrives that are computed by now.
    arrived: dict[Op, float] = dict.fromkeys(ops, 0)
    targets: dict[Op, list[Op]] = {op: [] for op in ops}
    for op in ops:
        for source in sources[op]:
            targets[source].append(op)

    lines: list[list[Op]] = [[] for _ in range(workers)]
    free: list[float] = [0] * workers
    #: For each worker, a heap of computations whose inputs are on their way: (last arrival, op).
    coming: list[list[tuple[float, Op]]] = [[] for _ in range(workers)]
    #: For each worker, the computations that can start, the most urgent first: (priority, op).
    ready: list[list[tuple[Any, Op]]] = [[] for _ in range(workers)]
    #: A heap of (time, worker): when each worker looks for a computation that can start.
    wakeups = [(0.0, w) for w in range(workers)]
    for op in ops:
        if not missing[op]:
            coming[placement[op.stage]].append((0, op))
    while wakeups:
        now, w = heapq.heappop(wakeups)
        if free[w] > now:
            continue
        while coming[w] and coming[w][0][0] <= now:
            op = heapq.heappop(coming[w])[1]
            insort(ready[w], (priority(op), op))
        index = memory.first([op for _, op in ready[w]])
        if index is None:
            continue
        _, op = ready[w].pop(index)
        memory.take(op)
        lines[w].append(op)
        free[w] = now + table.duration(op)
        heapq.heappush(wakeups, (free[w], w))
        for target in targets[op]:
            missing[target] -= 1
            arrived[target] = max(arrived[target], free[w] + table.delay((op, target)))
            if not missing[target]:
                to, arrival = placement[target.stage], arrived[target]
                heapq.heappush(coming[to], (arrival, target))
                heapq.heappush(wakeups, (arrival, to))
    assert sum(map(len, lines)) == len(ops)
    return replace(empty, program=tuple(map(tuple, lines)))


class _Memory:
    """The memory that each worker holds, and the check that all begun micro-batches can end."""

    def __init__(
        self, placement: Sequence[int], table: Table, capacity: Each | None, split: bool
    ) -> None:
        self.placement, self.table, self.split = placement, table, split
        workers = len(set(placement))
        self.limits = capacities(capacity, workers)
        self.stages = [[j for j, x in enumerate(placement) if x == w] for w in range(workers)]
        self.held: list[float] = [0] * workers
        #: For each micro-batch that has begun and not ended, the earliest to begin first: stage ->
        #: the kind of the stage's last computation of that micro-batch.
        self.begun: dict[int, dict[int, str]] = {}
        #: For each worker, the peak memory that one micro-batch takes there if it is alone.
        self.least = [self._rest(w, 0, {})[0] for w in range(workers)]
        for w, (least, limit) in enumerate(zip(self.least, self.limits)):
            if least > limit and not isclose(least, limit):
                raise ValueError(
                    "capacity must be enough for one micro-batch in all stages of a worker "
                    f"(worker: {w}, capacity: {float(limit):g}, needed: {float(least):g}); "
                    "give the worker more memory or fewer stages"
                )

    def take(self, op: Op) -> None:
        """Record that a computation runs."""
        self.held[self.placement[op.stage]] += self._growth(op)
        cells = self.begun.setdefault(op.microbatch, {})
        cells[op.stage] = op.kind
        if len(cells) == len(self.placement) and {*cells.values()} <= {"B", "W"}:
            del self.begun[op.microbatch]  # The micro-batch has ended.

    def first(self, ops: Sequence[Op]) -> int | None:
        """Return the index of the first computation after which all begun micro-batches can end."""
        refused: set[tuple[int, str]] = set()
        for k, op in enumerate(ops):
            # _allows() answers the same for all micro-batches that have not begun. So for these, it
            # is asked once for each stage and kind.
            alike = op.microbatch not in self.begun
            if not (alike and op[:2] in refused) and self._allows(op):
                return k
            if alike:
                refused.add(op[:2])
        return None

    def _allows(self, op: Op) -> bool:
        w, growth = self.placement[op.stage], self._growth(op)
        # The tolerance for rounding errors is relative, since memory can be in any unit.
        free = self.limits[w] * (1 + 1e-12) - self.held[w] - growth
        if growth <= 0 or free >= self.least[w]:
            return True  # The loop below would return True, too, but takes longer.
        last = {**self.begun.get(op.microbatch, {}), op.stage: op.kind}
        for i, cells in {**self.begun, op.microbatch: last}.items():
            peak, change = self._rest(w, i, cells)
            if peak > free:
                return False
            free -= change
        return True

    def _growth(self, op: Op) -> float:
        """Return how much more memory a worker holds after a computation than before."""
        activation, pending = self.table.activation[op.stage], self.table.pending[op.stage]
        return {"F": activation, "B": -activation, "I": pending - activation, "W": -pending}[
            op.kind
        ]

    def _rest(self, w: int, i: int, last: Mapping[int, str]) -> tuple[float, float]:
        """Return the extra memory that a micro-batch needs on a worker until it ends there.

        Args:
            w: the worker.
            i: the micro-batch.
            last: stage -> the kind that the micro-batch ran there last.

        Returns:
            The peak of the extra memory, and the extra memory at the end (negative).
        """
        stages = self.stages[w]
        rest = [Op(j, "W", i) for j in stages if last.get(j) == "I"]
        rest += [Op(j, "F", i) for j in stages if j not in last]
        backward = [j for j in reversed(stages) if last.get(j, "F") == "F"]
        rest += [Op(j, kind, i) for j in backward for kind in ("IW" if self.split else "B")]
        sums = [0, *accumulate(map(self._growth, rest))]
        return max(sums), sums[-1]
