"""Lifetimes: from when to when a worker keeps what a cell needs later, and where it could be.

A worker has its instructions in order. So positions in its line tell which cells are kept at the
same time, whatever each instruction takes. Cells that are never kept at the same time can use the
same memory, a *slot*, in every step again. Slots are of one stage and one kind, since others have
other sizes. A cell that leaves for the memory of the host is kept twice: until it is gone, and from
when it comes back.

A lifetime includes both its ends. The two computations of an overlap read and write at the same
time, so neither can have a slot that the other one frees.

Source: an interval graph is coloured with the fewest colours in the order of the intervals' starts
(Golumbic, Algorithmic Graph Theory and Perfect Graphs, 1980).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from torchgpipe.schedule.program import Instruction, Program, operations, operations_of
from torchgpipe.schedule.trips import trips

__all__ = ["Lifetime", "Lifetimes"]


class Lifetime(NamedTuple):
    """The time for which a worker keeps something of a cell.

    Args:
        stage: the stage of the cell.
        microbatch: its micro-batch.
        kind: ``'checkpoint'`` from F until R, ``'activation'`` from F, or from R, until B or I,
            ``'pending'`` from I until W, and ``'host'`` from F until B or I, in the host's memory.
        start: the place in the worker's line of the instruction that makes it, from 0.
        end: the place of the one that needs it last, or of the last one in the line if that is
            missing.
        slot: the number of the memory that it can have, from 0, for its stage and kind.
    """

    stage: int
    microbatch: int
    kind: str
    start: int
    end: int
    slot: int


class Lifetimes(NamedTuple):
    """The lifetimes on one worker.

    Args:
        all: the lifetimes, in the order of their starts.
        slots: the fewest slots that suffice, for each stage and kind.
    """

    all: tuple[Lifetime, ...]
    slots: Mapping[tuple[int, str], int]


def lifetimes(program: Program, ahead: Sequence[int]) -> tuple[Lifetimes, ...]:
    """Find the lifetimes on each worker.

    A schedule without any backward keeps nothing. In other schedules, a cell without a backward is
    kept until the end of the line.

    Args:
        program: the instructions of each worker.
        ahead: for each stage, how many instructions before its backward a cell comes back from the
            memory of the host; 0 if its cells stay.
    """
    trains = any(op.kind in "BI" for op in operations_of(program))
    return tuple([_of_worker(line if trains else (), ahead) for line in program])


def _of_worker(line: Sequence[Instruction], ahead: Sequence[int]) -> Lifetimes:
    found: list[Lifetime] = []
    slots: dict[tuple[int, str], int] = {}
    #: For each stage and kind, the slots in use, with the place after which each is free.
    used: dict[tuple[int, str], list[tuple[int, int]]] = {}
    free: dict[tuple[int, str], list[int]] = {}
    for start, end, stage, microbatch, kind in sorted(_intervals(line, ahead)):
        key = stage, kind
        busy, idle = used.setdefault(key, []), free.setdefault(key, [])
        # What an instruction reads until its end cannot be written over by the same one.
        while busy and busy[0][0] < start:
            heapq.heappush(idle, heapq.heappop(busy)[1])
        slot = heapq.heappop(idle) if idle else slots.get(key, 0)
        slots[key] = max(slots.get(key, 0), slot + 1)
        heapq.heappush(busy, (end, slot))
        found.append(Lifetime(stage, microbatch, kind, start, end, slot))
    return Lifetimes(tuple(found), slots)


def _intervals(
    line: Sequence[Instruction], ahead: Sequence[int]
) -> Iterator[tuple[int, int, int, int, str]]:
    """Yield start, end, stage, micro-batch and kind of whatever is kept."""
    places: dict[tuple[int, int], dict[str, int]] = {}
    for place, x in enumerate(line):
        for op in operations(x):
            places.setdefault((op.stage, op.microbatch), {})[op.kind] = place
    last = len(line) - 1
    away = {(trip.stage, trip.microbatch): trip for trip in trips(line, ahead)}
    for (stage, microbatch), at in places.items():
        if "R" in at and "F" in at:
            yield at["F"], at["R"], stage, microbatch, "checkpoint"
        begin = at.get("R", at.get("F"))
        end, trip = at.get("B", at.get("I", last)), away.get((stage, microbatch))
        if trip is not None:
            yield trip.begin, trip.gone, stage, microbatch, "activation"
            yield trip.back, trip.end, stage, microbatch, "activation"
            yield trip.begin, trip.end, stage, microbatch, "host"
        elif begin is not None:
            yield begin, end, stage, microbatch, "activation"
        if "I" in at:
            yield at["I"], at.get("W", last), stage, microbatch, "pending"
