"""A rehearsal: what waits for what is found once, and then timed under as many costs as wanted.

To find the dependencies of a program takes several times as long as to time it. A search times one
program under hundreds of costs.
"""

from __future__ import annotations

from collections.abc import Sequence

from torchgpipe.schedule.costs import Costs, Table
from torchgpipe.schedule.program import (
    Edge,
    Instruction,
    Op,
    Program,
    Skips,
    operations,
    operations_of,
    walk,
)
from torchgpipe.schedule.trips import Tracks

__all__ = ["Rehearsal", "Step"]

#: The worker, the instruction, and the edges that lead to it.
Step = tuple[int, Instruction, list[Edge]]


class Rehearsal:
    """A program without deadlocks, ready to be timed.

    Args:
        program: the instructions of each worker.
        skips: the stages that each skip leads from and to.
    """

    def __init__(self, program: Program, skips: Skips = ()) -> None:
        self.program = program
        #: The instructions, each behind those that it needs.
        self.steps: list[Step] = [*walk(program, lambda waiting: None, skips)]
        #: Of all instructions that take the same time, one.
        self._kinds: dict[tuple[tuple[str, int], ...], Instruction] = {}
        #: Of all edges between the same stages, one.
        self._ways: dict[tuple[int, int], Edge] = {}
        place: dict[Op, int] = {}
        kinds: dict[tuple[tuple[str, int], ...], int] = {}
        ways: dict[tuple[int, int], int] = {}
        #: For each step its worker, the number of its kind, and for each edge the step that it
        #: comes from, and the number of its way.
        self._waits: list[tuple[int, int, list[tuple[int, int]]]] = []
        for k, (w, instruction, edges) in enumerate(self.steps):
            ops = operations(instruction)
            kind = tuple([(op.kind, op.stage) for op in ops])
            self._kinds.setdefault(kind, instruction)
            found = []
            for source, op in edges:
                way = source.stage, op.stage
                self._ways.setdefault(way, (source, op))
                found.append((place[source], ways.setdefault(way, len(ways))))
            place.update(dict.fromkeys(ops, k))
            self._waits.append((w, kinds.setdefault(kind, len(kinds)), found))

    def times(self, table: Table) -> tuple[list[float], list[float]]:
        """The start and the end of each step, if each starts as soon as it can."""
        return self.with_copies(table)[:2]

    def with_copies(self, table: Table) -> tuple[list[float], list[float], Tracks | None]:
        """The start and the end of each step, and the copies to the host, if there are any."""
        tracks = table.tracks(self.program)
        duration = [*map(table.duration, self._kinds.values())]
        delay = [*map(table.delay, self._ways.values())]
        free: list[float] = [0] * len(self.program)
        start: list[float] = [0] * len(self._waits)
        end = [*start]
        # Of copies over a shared link, the one goes first that the host issues first.
        is_shared = tracks is not None and table.switch
        for k in self._issued() if is_shared else range(len(start)):
            w, kind, waits = self._waits[k]
            begin = free[w] if tracks is None else tracks.before(w, free[w])
            for source, way in waits:
                arrival = end[source] + delay[way]
                if arrival > begin:
                    begin = arrival
            start[k] = begin
            end[k] = free[w] = begin + duration[kind]
            if tracks is not None:
                free[w] = tracks.behind(w, end[k])
        return start, end, tracks

    def makespan(self, table: Table) -> float:
        """The time of all steps together."""
        return max(self.times(table)[1])

    def order(self, start: Sequence[float]) -> Sequence[Step]:
        """The steps by their starts, as a driver issues them.

        Of equal starts, the first worker goes first, except that what takes no time comes before
        what needs it.
        """
        return [self.steps[k] for k in self._places(start)]

    def _issued(self) -> list[int]:
        """The numbers of the steps, in the order in which a driver issues them."""
        count = len({op.stage for op in operations_of(self.program)})
        placement = [0] * count
        return self._places(self.times(Table(Costs(), placement))[0])

    def _places(self, start: Sequence[float]) -> list[int]:
        """The numbers of the steps by their starts."""
        #: For each step, the longest chain of those before it that start at the same time.
        depth: list[int] = []
        last: list[int | None] = [None] * len(self.program)
        for k, (w, _, waits) in enumerate(self._waits):
            begin, found = start[k], 0
            before = last[w]
            if before is not None and start[before] == begin:
                found = depth[before] + 1
            for source, _ in waits:
                if start[source] == begin:
                    found = max(found, depth[source] + 1)
            depth.append(found)
            last[w] = k
        return sorted(range(len(start)), key=lambda k: (start[k], depth[k], self._waits[k][0]))
