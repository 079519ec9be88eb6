"""What is wrong with a schedule, all of it at once."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from math import isclose

from torchgpipe.schedule.costs import Costs, Each, Table, numbers
from torchgpipe.schedule.language import Schedule
from torchgpipe.schedule.program import Op, Waiting, operations, operations_of, walk

__all__ = ["validate"]


def validate(schedule: Schedule, capacity: Each | None = None, costs: Costs = Costs()) -> list[str]:
    """Finds every fault of a schedule.

    A schedule without any computes each cell once, comes to its end, and fits into the memory.

    Args:
        schedule: any one.
        capacity: how much memory a worker has, or each; None for enough.
        costs: what cells keep there; by default, one unit each.
    """
    faults = [*_strays(schedule), *_gaps(schedule), *_deadlocks(schedule)]
    return faults if capacity is None else [*faults, *_excesses(schedule, capacity, costs)]


def _strays(schedule: Schedule) -> Iterator[str]:
    """What belongs to no cell, or to another worker, or is there twice."""
    stages, chunks = range(len(schedule.placement)), range(schedule.chunks)
    place = "{} (worker {}, instruction {})".format
    seen: set[Op] = set()
    for w, line in enumerate(schedule.program):
        for k, op in ((k, op) for k, x in enumerate(line, 1) for op in operations(x)):
            if op.stage not in stages:
                yield f"out of range: {place(op, w, k)}; stages are from 0 to {stages[-1]}"
            elif (right := schedule.placement[op.stage]) != w:
                yield f"wrong worker: {place(op, w, k)}; its stage is on worker {right}"
            if op.microbatch not in chunks:
                yield f"out of range: {place(op, w, k)}; micro-batches are from 0 to {chunks[-1]}"
            if op in seen:
                yield f"duplicate: {place(op, w, k)}; leave all but one out"
            seen.add(op)


def _gaps(schedule: Schedule) -> Iterator[str]:
    """What a cell lacks, or has both whole and in halves."""
    ops = set(operations_of(schedule.program))
    lacks = {"": "B", "I": "W", "W": "I"}
    for j, i in product(range(len(schedule.placement)), range(schedule.chunks)):
        if (j, "F", i) not in ops:
            yield f"missing: {j}F{i} on worker {schedule.placement[j]}"
        there = "".join(kind for kind in "BIW" if (j, kind, i) in ops)
        if there in lacks:
            yield f"missing: {j}{lacks[there]}{i} on worker {schedule.placement[j]}"
        for half in there[1:] if "B" in there else ():
            yield f"duplicate: {j}{half}{i}, which is a part of {j}B{i}; leave one of both out"


def _deadlocks(schedule: Schedule) -> list[str]:
    """Workers that wait for each other in a cycle."""
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
            behind = "" if missing in operations(other) else f" behind {other}"
            links.append(
                f"{head} (worker {member}) needs {missing}{behind} (worker {where[missing]})"
            )
        found.append("deadlock: " + "; ".join(links))
        return w

    for _ in walk(schedule.program, stuck):
        pass
    return found


def _excesses(schedule: Schedule, capacity: Each, costs: Costs) -> Iterator[str]:
    """Of each worker that holds too much: when it first does, and how much at most."""
    table = Table(costs, schedule.placement)
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
