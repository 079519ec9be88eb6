"""Whether a schedule runs, and how long it takes: all faults at once, and a simulation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import isclose

from torchgpipe.schedule.costs import Costs, Each, Table, checked_costs, numbers
from torchgpipe.schedule.language import Schedule, checked_schedule
from torchgpipe.schedule.program import (
    Edge,
    Instruction,
    Op,
    Program,
    Skips,
    Waiting,
    operations,
    operations_of,
    walk,
)
from torchgpipe.schedule.trips import Known, Tracks
from torchgpipe.show.span import Stream, computation, copy, trip
from torchgpipe.show.timeline import Timeline

__all__ = ["validate", "Report", "in_order", "simulate", "Rehearsal", "WorkerInstruction"]


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


def verify_valid(schedule: Schedule, rehearsal: Rehearsal | None = None) -> None:
    """Check that a schedule has no faults.

    To look for deadlocks takes as long as to rehearse, so a rehearsal that has ended saves it.

    Raises:
        ValueError: it has some, which the message names.
    """
    faults = [*_strays(schedule), *_gaps(schedule)]
    if rehearsal is None or len(rehearsal.steps) < sum(map(len, schedule.program)):
        faults += _deadlocks(schedule)
    if faults:
        rule = f"a schedule must be valid (faults: {len(faults)}); fix what validate() finds:"
        raise ValueError("\n".join([rule, *faults[:10]]))


def _strays(schedule: Schedule) -> Iterator[str]:
    """Find computations that belong to no cell or to another worker, or that appear twice."""
    stages, chunks = range(len(schedule.placement)), range(schedule.chunks)
    where = "{} (worker {}, instruction {})".format
    seen: set[Op] = set()
    for w, line in enumerate(schedule.program):
        for k, op in ((k, op) for k, x in enumerate(line, 1) for op in operations(x)):
            if op.stage not in stages:
                yield f"out of range: {where(op, w, k)}; stages are 0 to {stages[-1]}"
            elif (right := schedule.placement[op.stage]) != w:
                yield f"wrong worker: {where(op, w, k)}; its stage is on worker {right}"
            if op.microbatch not in chunks:
                yield f"out of range: {where(op, w, k)}; micro-batches are 0 to {chunks[-1]}"
            if op in seen:
                yield f"duplicate: {where(op, w, k)}; leave all but one out"
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
    faults: list[str] = []

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
        faults.append("deadlock: " + "; ".join(links))
        return w

    for _ in walk(schedule.program, stuck, schedule.skips):
        pass
    return faults


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


# A simulation, in which each instruction starts as soon as it can.
#
# A search simulates one program under hundreds of costs. To find which instruction waits for which
# takes several times as long as to add up their times. So a :class:`Rehearsal` finds that once.


#: What :func:`walk` yields: a worker, its instruction, and the edges to that instruction.
WorkerInstruction = tuple[int, Instruction, list[Edge]]


class Rehearsal:
    """A program without deadlocks, ready to be simulated.

    Args:
        program: the instructions of each worker.
        skips: the stages that each skip leads from and to.
    """

    def __init__(self, program: Program, skips: Skips = ()) -> None:
        self.program = program
        self._stops: Known = {}
        #: The instructions of all workers, each after those that it needs, as walk() yields them.
        self.steps: list[WorkerInstruction] = [*walk(program, lambda waiting: None, skips)]
        #: For the kind and stage of each computation of an instruction: the first such instruction.
        #: Instructions with equal keys take the same time.
        self._kinds: dict[tuple[tuple[str, int], ...], Instruction] = {}
        #: For each two stages on two workers, one edge: all copies between them take the same time.
        self._ways: dict[tuple[int, int], Edge] = {}
        index: dict[Op, int] = {}
        kinds: dict[tuple[tuple[str, int], ...], int] = {}
        ways: dict[tuple[int, int], int] = {}
        #: For each step: its worker, the index of its kind in `_kinds`, and its edges from other
        #: workers, each as (index of the step that it comes from, index of its stages in `_ways`).
        self._waits: list[tuple[int, int, tuple[tuple[int, int], ...]]] = []
        #: For each cell (stage, micro-batch), the index of the step with its backward (B or I).
        self._backward: dict[tuple[int, int], int] = {}
        for k, (w, instruction, edges) in enumerate(self.steps):
            ops = operations(instruction)
            kind = tuple([(op.kind, op.stage) for op in ops])
            self._kinds.setdefault(kind, instruction)
            waits = []
            for source, op in edges:
                if self.steps[index[source]][0] != w:
                    way = source.stage, op.stage
                    self._ways.setdefault(way, (source, op))
                    waits.append((index[source], ways.setdefault(way, len(ways))))
            for op in ops:
                index[op] = k
                if op.kind in "BI":
                    self._backward[op.stage, op.microbatch] = k
            self._waits.append((w, kinds.setdefault(kind, len(kinds)), (*waits,)))

    def times(self, table: Table) -> tuple[list[float], list[float]]:
        """The start and the end of each step, if each starts as soon as it can."""
        return self.with_copies(table)[:2]

    def with_copies(
        self, table: Table, again: Iterable[tuple[int, int]] = ()
    ) -> tuple[list[float], list[float], Tracks | None]:
        """The start and the end of each step, and the copies to the host, if there are any.

        Some cells may have an R right before their backward, if nothing leaves.
        """
        tracks = table.tracks(self.program, self._stops)
        duration = [*map(table.duration, self._kinds.values())]
        delay = [*map(table.delay, self._ways.values())]
        free: list[float] = [0] * len(self.program)
        start: list[float] = [0] * len(self._waits)
        end = [*start]
        #: For each step, how long its worker recomputes cells of `again` right before it.
        before = [*start]
        for cell in again:
            before[self._backward[cell]] += table.time["R"][cell[0]]
        for k, (w, kind, waits) in enumerate(self._waits):
            begin = free[w] + before[k]
            if tracks is not None:
                begin = tracks.before(w, begin)
            for source, way in waits:
                arrival = end[source] + delay[way]
                if arrival > begin:
                    begin = arrival
            start[k] = begin
            end[k] = free[w] = begin + duration[kind]
            if tracks is not None:
                free[w] = tracks.after(w, end[k])
        return start, end, tracks

    def makespan(self, table: Table, again: Iterable[tuple[int, int]] = ()) -> float:
        """The time of all steps together, with an R right before the backward of some cells.

        If there are such cells, nothing may leave.
        """
        return max(self.with_copies(table, again)[1])

    def order(self, start: Sequence[float]) -> Sequence[WorkerInstruction]:
        """The steps by their starts, as a driver issues them.

        Of equal starts, the first worker goes first, except that what takes no time comes before
        what needs it.
        """
        #: For each step, the length of the longest chain of steps that lead to it and start at the
        #: same time as it does. It sorts steps of equal starts.
        depth: list[int] = []
        last: list[int | None] = [None] * len(self.program)
        for k, (w, _, waits) in enumerate(self._waits):
            begin, chain = start[k], 0
            before = last[w]
            if before is not None and start[before] == begin:
                chain = depth[before] + 1
            for source, _ in waits:
                if start[source] == begin:
                    chain = max(chain, depth[source] + 1)
            depth.append(chain)
            last[w] = k
        order = sorted(range(len(start)), key=lambda k: (start[k], depth[k], self._waits[k][0]))
        return [self.steps[k] for k in order]


# The simulation of one schedule, and its report.


@dataclass(frozen=True)
class Report:
    """The result of :func:`simulate`, in the units of its costs.

    Args:
        schedule: the schedule that was simulated.
        makespan: the time at which the last computation ends; the first one starts at 0.
        start, end: the start and the end of each computation.
        busy: the time that each worker computes.
        bubble: the time that each worker does not compute, up to the makespan.
        peak: the most memory that each worker holds at any time.
        costs: the costs of the stages.
        host: the most memory of the host that each worker holds at any time.
        out, back: the start and the end of the copies of each cell, by stage and micro-batch, to
            the memory of the host and back.
    """

    schedule: Schedule = field(repr=False)
    makespan: float
    start: Mapping[Op, float] = field(repr=False)
    end: Mapping[Op, float] = field(repr=False)
    busy: tuple[float, ...]
    bubble: tuple[float, ...]
    peak: tuple[float, ...]
    costs: Costs = field(default=Costs(), repr=False)
    host: tuple[float, ...] = ()
    out: Mapping[tuple[int, int], tuple[float, float]] = field(default_factory=dict, repr=False)
    back: Mapping[tuple[int, int], tuple[float, float]] = field(default_factory=dict, repr=False)

    def __str__(self) -> str:
        hosts = [self.host] if any(self.host) else []
        columns = enumerate(zip(self.busy, self.bubble, self.peak, *hosts))
        rows = [f"{w:6}" + "".join(f"{float(x):10.4g}" for x in row) for w, row in columns]
        head = "worker      busy    bubble      peak" + "      host" * len(hosts)
        return "\n".join([head, *rows, f"makespan {float(self.makespan):g}"])

    @property
    def longest(self) -> float:
        """The longest span of a worker, from the start of its first computation to its last end.

        Papers on zero bubbles divide by this time, as if a worker that begins late waited for
        nothing: with an optimizer that does not wait, steps then follow each other without a gap.
        """
        lines = [[op for x in line for op in operations(x)] for line in self.schedule.program]
        return max(max(self.end[x] for x in ops) - self.start[ops[0]] for ops in lines)

    @property
    def timeline(self) -> Timeline:
        """The computations and copies, to be drawn beside those of a step that was measured."""
        schedule = self.schedule
        table = Table(self.costs, schedule.placement, schedule.skips)
        spans = []
        for w, instruction, edges in walk(schedule.program, lambda waiting: None, schedule.skips):
            for op in operations(instruction):
                times = float(self.start[op]), float(self.end[op])
                spans.append(computation(Stream(f"worker {w}", 0), *times, op))
            for source, op in edges:
                if time := table.delay((source, op)):
                    times = float(self.end[source]), float(self.end[source] + time)
                    ends = source.stage, op.stage
                    spans.append(copy(Stream(f"worker {w}", 1), *times, *ends, op.microbatch))
        for number, (kind, copies) in enumerate({"out": self.out, "back": self.back}.items(), 2):
            for (j, i), (begin, finish) in copies.items():
                stream = Stream(f"worker {schedule.placement[j]}", number)
                spans.append(trip(stream, float(begin), float(finish), kind, j, i))
        return Timeline(sorted(spans, key=lambda span: span.start), unit="")


def simulate(schedule: Schedule, costs: Costs = Costs()) -> Report:
    """Find the start and the end of each computation, and the memory of each worker.

    Args:
        schedule: a valid schedule.
        costs: the costs of its stages.

    Raises:
        ValueError: The schedule has faults, which the message names, or the costs do not fit it.
    """
    checked_schedule(schedule)
    rehearsal = Rehearsal(schedule.program, schedule.skips)
    verify_valid(schedule, rehearsal)
    table = Table(costs, schedule.placement, schedule.skips)
    start: dict[Op, float] = {}
    end: dict[Op, float] = {}
    *both, tracks = rehearsal.with_copies(table)
    for (_, instruction, _), *times in zip(rehearsal.steps, *both):
        for op in operations(instruction):
            start[op], end[op] = times
    makespan = max(end.values())
    busy = tuple(sum(map(table.duration, line)) for line in schedule.program)
    bubble = tuple(makespan - time for time in busy)
    peak = tuple(max(table.held(line)) for line in schedule.program)
    host = tuple(map(table.hosted, schedule.program))
    copies = {} if tracks is None else tracks.copies
    return Report(schedule, makespan, start, end, busy, bubble, peak, costs, host, **copies)


def in_order(schedule: Schedule, costs: Costs = Costs()) -> Sequence[WorkerInstruction]:
    """List the instructions by their simulated starts, as a driver issues them.

    Each one comes after those that it needs. Of equal starts, the first worker goes first, except
    that what takes no time comes before what needs it.

    Args:
        schedule: a schedule without deadlocks.
        costs: the costs of its stages.

    Returns:
        For each instruction its worker, the instruction, and the edges that lead to it.
    """
    table = Table(costs, schedule.placement, schedule.skips)
    rehearsal = Rehearsal(schedule.program, schedule.skips)
    return rehearsal.order(rehearsal.times(table)[0])
