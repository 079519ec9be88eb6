"""List scheduling: a worker that is free takes what has the highest priority of what it can do.

Memory can run full of what has begun and cannot end. So no computation is taken after which the
micro-batches that have begun could not end one after another, in the order in which they began:
the banker's algorithm (Dijkstra, EWD 623), on each worker.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from math import isclose
from typing import Any

from torchgpipe.schedule.costs import Costs, Each, Table
from torchgpipe.schedule.language import Schedule
from torchgpipe.schedule.limits import capacities
from torchgpipe.schedule.program import Op, needs

__all__ = ["greedy"]


def greedy(
    placement: Sequence[int],
    chunks: int,
    priority: Callable[[Op], Any],
    *,
    split: bool = False,
    costs: Costs = Costs(),
    capacity: Each | None = None,
) -> Schedule:
    """Makes a schedule of a priority, without recomputation and overlaps.

    Args:
        placement: stage -> worker.
        chunks: the number of micro-batches.
        priority: of a computation. The smallest goes first, as in ``sorted``; of equal ones the
            earlier stage, the first kind in the alphabet, and the first micro-batch.
        split: whether backward is computed in halves, as I and W, or whole, as B.
        costs: what computing, copying and keeping costs; the order follows from it.
        capacity: how much memory a worker has, or each; None for enough.

    Raises:
        ValueError: one micro-batch alone needs more memory than a worker has.

    Example::

        >>> depth_first = greedy((0, 1), 3, lambda op: ("BF".index(op.kind), op.microbatch))
        >>> print(depth_first.text)
        0F0 0F1 0F2 0B0 0B1 0B2
        1F0 1B0 1F1 1B1 1F2 1B2
    """
    placement = tuple(placement)
    workers = len(set(placement))
    Schedule(placement, chunks, ((),) * workers)  # Raises if they do not fit each other.
    table = Table(costs, placement)
    memory = _Memory(placement, table, capacity, split)
    stages, kinds = range(len(placement)), "FIW" if split else "FB"
    ops = {Op(j, kind, i) for j in stages for kind in kinds for i in range(chunks)}
    missing = {op: len(needs(op, ops)) for op in ops}
    targets: dict[Op, list[Op]] = {op: [] for op in ops}
    for op in ops:
        for source in needs(op, ops):
            targets[source].append(op)

    lines: list[list[Op]] = [[] for _ in range(workers)]
    free: list[float] = [0] * workers
    #: What nothing is missing of, by worker: on its way, and there.
    coming: list[list[tuple[float, Op]]] = [[] for _ in range(workers)]
    there: list[list[tuple[Any, Op]]] = [[] for _ in range(workers)]
    #: When a worker may have something to do.
    looks = [(0.0, w) for w in range(workers)]
    for op in ops:
        if not missing[op]:
            coming[placement[op.stage]].append((0, op))
    while looks:
        now, w = heapq.heappop(looks)
        if free[w] > now:
            continue
        while coming[w] and coming[w][0][0] <= now:
            op = heapq.heappop(coming[w])[1]
            insort(there[w], (priority(op), op))
        found = memory.first([op for _, op in there[w]])
        if found is None:
            continue
        _, op = there[w].pop(found)
        memory.take(op)
        lines[w].append(op)
        free[w] = now + table.duration(op)
        heapq.heappush(looks, (free[w], w))
        for target in targets[op]:
            # Nothing that it needs comes later than the last of that to begin.
            missing[target] -= 1
            if not missing[target]:
                to, arrival = placement[target.stage], free[w] + table.delay((op, target))
                heapq.heappush(coming[to], (arrival, target))
                heapq.heappush(looks, (arrival, to))
    assert sum(map(len, lines)) == len(ops)
    return Schedule(placement, chunks, tuple(map(tuple, lines)))


class _Memory:
    """What each worker holds, and whether all that has begun can still end."""

    def __init__(
        self, placement: Sequence[int], table: Table, capacity: Each | None, split: bool
    ) -> None:
        self.placement, self.table, self.split = placement, table, split
        workers = len(set(placement))
        self.limits = capacities(capacity, workers)
        self.stages = [[j for j, x in enumerate(placement) if x == w] for w in range(workers)]
        self.held: list[float] = [0] * workers
        #: Of each micro-batch in the order in which they began, the last of F, I and W of a stage.
        self.begun: dict[int, dict[int, str]] = {}
        #: What one micro-batch needs on each worker.
        self.least = [self._rest(w, 0, {})[0] for w in range(workers)]
        for w, (least, limit) in enumerate(zip(self.least, self.limits)):
            if least > limit and not isclose(least, limit):
                raise ValueError(
                    "a worker must have memory for one micro-batch in all of its stages "
                    f"(worker: {w}, capacity: {float(limit):g}, needed: {float(least):g}); "
                    "give it more, or place fewer stages there"
                )

    def take(self, op: Op) -> None:
        """Notes that a computation runs."""
        self.held[self.placement[op.stage]] += self._growth(op)
        cells = self.begun.setdefault(op.microbatch, {})
        cells[op.stage] = op.kind
        if len(cells) == len(self.placement) and {*cells.values()} <= {"B", "W"}:
            del self.begun[op.microbatch]  # It has ended.

    def first(self, ops: Sequence[Op]) -> int | None:
        """Which of some computations is the first after which all that has begun can still end."""
        refused: set[tuple[int, str]] = set()
        for k, op in enumerate(ops):
            # Micro-batches that have not begun are all alike.
            alike = op.microbatch not in self.begun
            if not (alike and op[:2] in refused) and self._allows(op):
                return k
            if alike:
                refused.add(op[:2])
        return None

    def _allows(self, op: Op) -> bool:
        w, growth = self.placement[op.stage], self._growth(op)
        # Within rounding of the limit, in whatever unit that is.
        free = self.limits[w] * (1 + 1e-12) - self.held[w] - growth
        if growth <= 0 or free >= self.least[w]:
            return True  # Without asking all, which is what follows.
        last = {**self.begun.get(op.microbatch, {}), op.stage: op.kind}
        for i, cells in {**self.begun, op.microbatch: last}.items():
            peak, change = self._rest(w, i, cells)
            if peak > free:
                return False
            free -= change
        return True

    def _growth(self, op: Op) -> float:
        """How much more a worker holds after a computation than before."""
        activation, pending = self.table.activation[op.stage], self.table.pending[op.stage]
        return {"F": activation, "B": -activation, "I": pending - activation, "W": -pending}[
            op.kind
        ]

    def _rest(self, w: int, i: int, last: Mapping[int, str]) -> tuple[float, float]:
        """How much more a micro-batch holds at most until it ends on a worker, and when it has."""
        stages = self.stages[w]
        rest = [Op(j, "W", i) for j in stages if last.get(j) == "I"]
        rest += [Op(j, "F", i) for j in stages if j not in last]
        backward = [j for j in reversed(stages) if last.get(j, "F") == "F"]
        rest += [Op(j, kind, i) for j in backward for kind in ("IW" if self.split else "B")]
        sums = [0, *accumulate(map(self._growth, rest))]
        return max(sums), sums[-1]
