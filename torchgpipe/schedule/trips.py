"""Trips: when a cell leaves for the memory of the host, and when it comes back.

::

  index     0     1     2     3     4     5
  compute   F0 ── F1 ── F2 ── B2 ── B1 ── B0          of a worker
              ╲  ↗                     ↗
  out, back    0                      0               copies of cell 0, beside it

The memory of a cell is free when the instruction after its forward is done, and is taken again
before the one that it comes back in. So at least three instructions lie between its forward and its
backward, or nothing would be gained. Where autograd orders backward, all micro-batches come before
it, and so the last two stay: backward needs them at once, and while the second last computes, the
one before it is still leaving.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torchgpipe.schedule.program import Instruction, operations

__all__: list[str] = ["Tracks", "Trip", "leaving", "stops", "trips"]


#: The least number of instructions between forward and backward of a cell that leaves: it leaves
#: during the first of them, its memory is free in the second, and it comes back in the third.
BETWEEN = 3


class Trip(NamedTuple):
    """The indices, in a worker's line, of the instructions at which something happens to a cell.

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


def trips(line: Sequence[Instruction], prefetch: Sequence[int]) -> list[Trip]:
    """The trips of a worker's cells, in the order in which they come back.

    Args:
        line: the instructions of the worker.
        prefetch: for each stage, its prefetch distance: how many instructions before its backward a
            cell comes back; 0 if its cells stay. A cell with an R keeps nothing that could leave.
    """
    if not any(prefetch):
        return []
    index: dict[tuple[int, str, int], int]
    index = {op: k for k, x in enumerate(line) for op in operations(x)}
    round_trips = []
    for (j, kind, i), end in index.items():
        if kind not in "BI" or not prefetch[j]:
            continue
        begin = index.get((j, "F", i))
        if begin is None or (j, "R", i) in index:
            continue
        if end - begin - 1 >= BETWEEN:
            # At begin + 2 at the earliest, since a cell must have left before it comes back.
            back = min(end, max(begin + 2, end - prefetch[j]))
            round_trips.append(Trip(j, i, begin, begin + 1, back, end))
    return sorted(round_trips, key=lambda trip: (trip.back, trip.end))


def leaving(m: int) -> range:
    """The micro-batches that leave where autograd orders backward, of ``m``.

    Between forward and backward of micro-batch ``i`` are those of all that come after it.
    """
    return range(sum(2 * (m - 1 - i) >= BETWEEN for i in range(m)))


class Stop(NamedTuple):
    """The trips around one instruction of a worker: copies that begin, or that it waits for."""

    #: The trips whose copies from the host begin before the instruction.
    back: Sequence[Trip]
    #: The trips whose copies from the host must end before the instruction starts.
    awaited: Sequence[Trip]
    #: The trips whose copies to the host begin after the instruction.
    out: Sequence[Trip]


#: The stop of an instruction around which nothing is copied.
NOTHING = Stop((), (), ())
#: What stops() has found: (worker, prefetch distance of each stage) -> the worker's stops.
Known = dict[tuple[int, tuple[int, ...]], list[Stop]]


def stops(
    lines: Sequence[Sequence[Instruction]],
    placement: Sequence[int],
    prefetch: Sequence[int],
    known: Known,
) -> list[list[Stop]]:
    """Find the :func:`trips` of all workers, by the instructions around which they are copied.

    Args:
        lines: the instructions of each worker, in order.
        placement: the worker of each stage.
        prefetch: the prefetch distance of each stage.
        known: stops that were found for these instructions before; new ones are added.
    """
    by_worker = []
    for k, line in enumerate(lines):
        # Distances of other workers' stages do not change these stops, so in the key they are 0.
        distances = tuple([x if w == k else 0 for x, w in zip(prefetch, placement)])
        if (k, distances) not in known:
            known[k, distances] = _stops(line, distances)
        by_worker.append(known[k, distances])
    return by_worker


def _stops(line: Sequence[Instruction], prefetch: Sequence[int]) -> list[Stop]:
    at: dict[int, list[list[Trip]]] = {}
    for trip in trips(line, prefetch):
        for way, k in enumerate((trip.back, trip.end, trip.begin)):
            at.setdefault(k, [[], [], []])[way].append(trip)
    return [Stop(*at[k]) if k in at else NOTHING for k in range(len(line))]


#: For each cell (stage, micro-batch), the start and the end of its copy in one direction.
CopyTimes = dict[tuple[int, int], tuple[float, float]]


class Tracks:
    """The copies in a simulation: a worker makes one at a time to the host, and one back.

    Args:
        lines: the stops of each worker.
        out: the time of a copy to the host, for each stage.
        back: the time of a copy back, for each stage.
    """

    def __init__(
        self,
        lines: Sequence[Sequence[Stop]],
        out: Sequence[float],
        back: Sequence[float],
    ) -> None:
        self._stops = [*map(iter, lines)]
        #: For each worker, the trips whose copies to the host begin after its present instruction.
        self._begin: list[Sequence[Trip]] = [()] * len(lines)
        self._times = {"out": out, "back": back}
        #: For each direction (out, back) and worker, the time when the last copy so far ends.
        self._free: dict[str, list[float]] = {way: [0] * len(lines) for way in self._times}
        #: For each worker, when the copies to the host end that began after its last instruction.
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
        start = max(now, free[w])
        end = free[w] = start + self._times[way][trip.stage]
        self.copies[way][trip[:2]] = start, end
        return end
