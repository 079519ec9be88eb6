"""A validator that finds all faults of a schedule at once."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from math import isclose

from torchgpipe.schedule.costs import Costs, Each, Table, checked_costs, numbers
from torchgpipe.schedule.language import Schedule, checked_schedule
from torchgpipe.schedule.program import Op, Waiting, operations, operations_of, walk

__all__ = ["validate"]


def validate(schedule: Schedule, capacity: Each | None = None, costs: Costs = Costs()) -> list[str]:
    """Find all faults of a schedule.

    A schedule without faults computes each cell once, has no deadlock, and fits into the memory.

    Args:
        schedule: the schedule.
        capacity: the memory of all workers, or of each; unlimited if None.
        costs: the memory of each cell; by default one unit.

    Returns:
        One message for each fault.
    """
    checked_schedule(schedule)
    checked_costs(costs)
    faults = [*_strays(schedule), *_gaps(schedule), *_deadlocks(schedule)]
    return faults if capacity is None else [*faults, *_excesses(schedule, capacity, costs)]


def _strays(schedule: Schedule) -> Iterator[str]:
    """Find computations that belong to no cell or to another worker, or that appear twice."""
    stages, chunks = range(len(schedule.placement)), range(schedule.chunks)
    place = "{} (worker {}, instruction {})".format
    seen: set[Op] = set()
    for w, line in enumerate(schedule.program):
        for k, op in ((k, op) for k, x in enumerate(line, 1) for op in operations(x)):
            if op.stage not in stages:
                yield f"out of range: {place(op, w, k)}; stages are 0 to {stages[-1]}"
            elif (right := schedule.placement[op.stage]) != w:
                yield f"wrong worker: {place(op, w, k)}; its stage is on worker {right}"
            if op.microbatch not in chunks:
                yield f"out of range: {place(op, w, k)}; micro-batches are 0 to {chunks[-1]}"
            if op in seen:
                yield f"duplicate: {place(op, w, k)}; leave all but one out"
            seen.add(op)


def _gaps(schedule: Schedule) -> Iterator[str]:
    """Find cells that lack a computation, or that have both B and one of its halves."""
    ops = set(operations_of(schedule.program))
    lacks = {"": "B", "I": "W", "W": "I"}
    for j, i in product(range(len(schedule.placement)), range(schedule.chunks)):
        if (j, "F", i) not in ops:
            yield f"missing: {j}F{i} on worker {schedule.placement[j]}"
        there = "".join(kind for kind in "BIW" if (j, kind, i) in ops)
        if there in lacks:
            yield f"missing: {j}{lacks[there]}{i} on worker {schedule.placement[j]}"
        for half in there[1:] if "B" in there else ():
            yield f"duplicate: {j}{half}{i}, which is a part of {j}B{i}; leave out one of the two"


def _deadlocks(schedule: Schedule) -> list[str]:
    """Find all cycles of workers that wait for each other."""
    where = {op: w for w, x in enumerate(schedule.program) for op in operations_of((x,))}
    found: list[str] = []

    def stuck(waiting: Waiting) -> int:
        chain = [min(waiting)]
        while (w := where[waiting[chain[-1]][1]]) not in chain:
            chain.append(w)
        links = []
        for member in chain[chain.index(w) :]:
            head, missing = waiting[member]
            other, _ = waiting[where[missing]]
            after = "" if missing in operations(other) else f" after {other}"
            links.append(
                f"{head} (worker {member}) needs {missing}{after} (worker {where[missing]})"
            )
        found.append("deadlock: " + "; ".join(links))
        return w

    for _ in walk(schedule.program, stuck, schedule.skips):
        pass
    return found


def _excesses(schedule: Schedule, capacity: Each, costs: Costs) -> Iterator[str]:
    """Find the workers that hold too much: where each first does, and its peak."""
    table = Table(costs, schedule.placement, schedule.skips)
    for w, limit in enumerate(numbers("capacity", capacity, len(schedule.program))):
        line = schedule.program[w]
        held = [*table.held(line)]
        over = [k for k, x in enumerate(held) if x > limit and not isclose(x, limit)]
        if over:
            first, most = float(held[over[0]]), float(max(held))
            yield (
                f"memory: worker {w} holds {first:g} of {float(limit):g} at {line[over[0]]} "
                f"(instruction {over[0] + 1}), and {most:g} at most"
            )
