"""Lifetimes: how long a worker keeps what a cell needs, and when it is in the host's memory."""

from __future__ import annotations

import heapq
from bisect import insort
from collections.abc import Container, Iterator, Mapping, Sequence
from math import inf
from typing import NamedTuple

from torchgpipe.schedule.program import Instruction, Program, operations, operations_of

__all__: list[str] = [
    "Lifetime",
    "Lifetimes",
    "Tracks",
    "Trip",
    "leaving",
    "stops",
    "trips",
]


# Trips: when a cell leaves for the memory of the host, and when it comes back.
#
# ::
#
#   place     0     1     2     3     4     5
#   compute   F0 ── F1 ── F2 ── B2 ── B1 ── B0          of a worker
#               ╲  ↗                     ↗
#   out, back    0                      0               copies of cell 0, beside it
#
# The memory of a cell is free when the instruction after its forward is done, and is taken again
# before the one that it comes back in. So at least three lie between forward and backward, or
# nothing would be gained. That is the one rule of whoever sends cells away, and of the simulator.
# Where autograd orders backward, all micro-batches come before it, and so the last two stay:
# backward needs them at once, and while the second last computes, the one before it is still
# leaving.


#: At least so many instructions lie between the forward and the backward of a cell that leaves.
BETWEEN = 3


class Trip(NamedTuple):
    """The places in a worker's line of the instructions that a cell on its way has to do with.

    Args:
        stage: the stage of the cell.
        microbatch: its micro-batch.
        begin: its forward.
        gone: the instruction after which its memory is free.
        back: the instruction before which it takes memory again, and comes back.
        end: its backward, or the half for the input.
    """

    stage: int
    microbatch: int
    begin: int
    gone: int
    back: int
    end: int


def trips(
    line: Sequence[Instruction], ahead: Sequence[int], policies: Container[int] = ()
) -> list[Trip]:
    """The trips of a worker's cells, in the order in which they come back.

    Args:
        line: the instructions of the worker.
        ahead: for each stage, how many instructions before its backward a cell comes back; 0 if its
            cells stay.
        policies: the stages with a policy. There cells with an R leave, and come back for it, as
            what the policy sends does. In other stages such a cell keeps nothing that could leave.
    """
    if not any(ahead):
        return []
    place: dict[tuple[int, str, int], int]
    place = {op: k for k, x in enumerate(line) for op in operations(x)}
    found = []
    for (j, kind, i), end in place.items():
        if kind not in "BI" or not ahead[j]:
            continue
        begin, again = place.get((j, "F", i)), place.get((j, "R", i))
        if begin is None or (again is not None) != (j in policies):
            continue
        if again is not None:
            end = again
        if end - begin - 1 >= BETWEEN:
            # One that has not left yet cannot come back.
            back = min(end, max(begin + 2, end - ahead[j]))
            found.append(Trip(j, i, begin, begin + 1, back, end))
    return sorted(found, key=lambda trip: (trip.back, trip.end))


def leaving(m: int) -> range:
    """The micro-batches that leave where autograd orders backward, of ``m``.

    Between forward and backward of micro-batch ``i`` are those of all that come after it.
    """
    return range(sum(2 * (m - 1 - i) >= BETWEEN for i in range(m)))


#: What an instruction has to do with: the trips of cells that come back before it, of those that it
#: waits for, and of those that leave after it. These are gone after the next instruction.
Stop = tuple[Sequence[Trip], Sequence[Trip], Sequence[Trip]]

#: What most instructions have to do with, where few cells leave.
NOTHING: Stop = ((), (), ())

#: The stops of each line, by its number and how much earlier the cells of each stage come back.
Known = dict[tuple[int, tuple[int, ...]], list[Stop]]


def stops(
    lines: Sequence[Sequence[Instruction]],
    numbers: Sequence[int],
    ahead: Sequence[int],
    known: Known,
) -> list[list[Stop]]:
    """Find what each instruction of each line has to do with, of :func:`trips`.

    Args:
        lines: the instructions of each line.
        numbers: the number of the line of each stage.
        ahead: for each stage, how many instructions before its backward a cell comes back.
        known: what was found for these lines before; it takes what is found now.
    """
    found = []
    for k, line in enumerate(lines):
        # The stages of other lines change nothing.
        own = tuple([x if y == k else 0 for x, y in zip(ahead, numbers)])
        if (k, own) not in known:
            known[k, own] = _stops(line, own)
        found.append(known[k, own])
    return found


def _stops(line: Sequence[Instruction], ahead: Sequence[int]) -> list[Stop]:
    at: dict[int, list[list[Trip]]] = {}
    for trip in trips(line, ahead):
        for way, k in enumerate((trip.back, trip.end, trip.begin)):
            at.setdefault(k, [[], [], []])[way].append(trip)
    return [(at[k][0], at[k][1], at[k][2]) if k in at else NOTHING for k in range(len(line))]


#: The start and the end of the copies of cells, by stage and micro-batch.
CopyTimes = dict[tuple[int, int], tuple[float, float]]


class Tracks:
    """The copies of all workers, to the host and back, in a simulation.

    Args:
        lines: the stops of each worker.
        out: the time of a copy to the host, for each stage.
        back: the time of one back.
        link: for workers that share a link to the host, its number. In each direction there is one
            copy at a time. A copy that begins before another one is done takes the time that is
            left.
    """

    def __init__(
        self,
        lines: Sequence[Sequence[Stop]],
        out: Sequence[float],
        back: Sequence[float],
        link: Mapping[int, int],
    ) -> None:
        self._stops, self._link = [*map(iter, lines)], link
        #: What leaves after the instruction of each worker.
        self._begin: list[Sequence[Trip]] = [()] * len(lines)
        self._times = {"out": out, "back": back}
        #: The time at which each track is free.
        self._free: dict[str, list[float]] = {way: [0] * len(lines) for way in self._times}
        #: The times in which each shared link is taken.
        self._taken: dict[tuple[str, int], list[tuple[float, float]]] = {}
        #: The time at which all has left that the instruction before lets leave.
        self._left: list[float] = [0] * len(lines)
        self.copies: dict[str, CopyTimes] = {"out": {}, "back": {}}

    def before(self, w: int, now: float) -> float:
        """Begin the copies back before the next instruction, and return when it may start."""
        back, end, self._begin[w] = next(self._stops[w])
        for trip in back:
            self._copy("back", w, trip, now)
        for trip in end:
            came = self.copies["back"][trip[:2]][1]
            if came > now:
                now = came
        return now

    def after(self, w: int, now: float) -> float:
        """Begin the copies to the host after the instruction, and return when it lets go on.

        What the instruction before has sent is gone by then.
        """
        left = self._left
        until, left[w] = max(now, left[w]), 0
        for trip in self._begin[w]:
            left[w] = self._copy("out", w, trip, now)
        return until

    def _copy(self, way: str, w: int, trip: Trip, now: float) -> float:
        free = self._free[way]
        start, time = max(now, free[w]), self._times[way][trip.stage]
        if w in self._link:
            start, end = pass_through(self._taken.setdefault((way, self._link[w]), []), start, time)
        else:
            end = start + time
        free[w] = end
        self.copies[way][trip[:2]] = start, end
        return end


def pass_through(taken: list[tuple[float, float]], now: float, time: float) -> tuple[float, float]:
    """Take a link for a copy, whenever it is free, and return the start and the end of the copy.

    Args:
        taken: the times in which the link is taken, in order, to which these are added.
        now: when the copy may start.
        time: how long it takes the link.
    """
    parts: list[tuple[float, float]] = []
    at, left = now, time
    # Rounding leaves gaps, which carry nothing, and bytes, which wait for nothing.
    least = time * 1e-9
    for begin, end in [*taken, (inf, inf)]:
        if left <= least:
            break
        if begin - at > least:
            parts.append((at, min(begin, at + left)))
            left -= parts[-1][1] - at
        at = max(at, end)
    for part in parts:
        insort(taken, part)
    return (parts[0][0], parts[-1][1]) if parts else (now, now)


# Lifetimes: from when to when a worker keeps what a cell needs later, and where it could be.
#
# A worker has its instructions in order. So positions in its line tell which cells are kept at
# the same time, whatever each instruction takes. Cells that are never kept at the same time can
# use the same memory, a *slot*, in every step again. Slots are of one stage and one kind, since
# others have other sizes. A cell that leaves for the memory of the host is kept twice: until it
# is gone, and from when it comes back.
#
# A lifetime includes both its ends. The two computations of an overlap read and write at the same
# time, so neither can have a slot that the other one frees.
#
# Source: an interval graph is coloured with the fewest colours in the order of the intervals'
# starts (Golumbic, Algorithmic Graph Theory and Perfect Graphs, 1980).


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
