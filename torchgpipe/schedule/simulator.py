"""A simulation of a schedule in which every instruction starts as soon as it can."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike

from torchgpipe.schedule.costs import Costs, Table
from torchgpipe.schedule.language import Schedule, checked_schedule
from torchgpipe.schedule.picture import write_svg
from torchgpipe.schedule.program import Op, operations, walk
from torchgpipe.schedule.rehearsal import Rehearsal, Step
from torchgpipe.schedule.validator import validate
from torchgpipe.timeline.span import Stream, computation, copy, trip
from torchgpipe.timeline.timeline import Timeline

__all__ = ["Report", "in_order", "simulate"]


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
                times = self.start[op], self.end[op]
                spans.append(computation(Stream(f"worker {w}", 0), *times, op))
            for source, op in edges:
                if time := table.delay((source, op)):
                    times = self.end[source], self.end[source] + time
                    ends = source.stage, op.stage
                    spans.append(copy(Stream(f"worker {w}", 1), *times, *ends, op.microbatch))
        for number, (kind, copies) in enumerate({"out": self.out, "back": self.back}.items(), 2):
            for (j, i), times in copies.items():
                stream = Stream(f"worker {schedule.placement[j]}", number)
                spans.append(trip(stream, *times, kind, j, i))
        return Timeline(sorted(spans, key=lambda span: span.start), unit="")

    def svg(self, path: str | PathLike[str], scale: float | None = None) -> None:
        """Draw the schedule into an SVG file, with the times of this report.

        Args:
            path: the file.
            scale: pixels per unit of time; chosen to fit the numbers if None.
        """
        write_svg(path, self.schedule.program, (self.start, self.end), scale)


def simulate(schedule: Schedule, costs: Costs = Costs()) -> Report:
    """Find the start and the end of each computation, and the memory of each worker.

    Args:
        schedule: a valid schedule.
        costs: the costs of its stages.

    Raises:
        ValueError: The schedule has faults, which the message names, or the costs do not fit it.
    """
    checked_schedule(schedule)
    if faults := validate(schedule):
        rule = f"a schedule must be valid (faults: {len(faults)}); fix what validate() finds:"
        raise ValueError("\n".join([rule, *faults[:10]]))
    table = Table(costs, schedule.placement, schedule.skips)
    rehearsal = Rehearsal(schedule.program, schedule.skips)
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


def in_order(schedule: Schedule, costs: Costs = Costs()) -> Sequence[Step]:
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
