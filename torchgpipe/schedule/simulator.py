"""How long a schedule takes if all begins as soon as it may, and what each worker must hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from os import PathLike

from torchgpipe.schedule import picture
from torchgpipe.schedule.costs import Costs, Table
from torchgpipe.schedule.language import Schedule
from torchgpipe.schedule.program import Op, timetable
from torchgpipe.schedule.validator import validate

__all__ = ["Report", "simulate"]


@dataclass(frozen=True)
class Report:
    """What :func:`simulate` found, in the units of its costs.

    Args:
        schedule: what was simulated.
        makespan: when all has ended that began at 0.
        start, end: of each computation.
        busy, bubble: how long each worker computes, and how long it does not until the makespan.
        peak: the most memory that it holds at any time.
    """

    schedule: Schedule = field(repr=False)
    makespan: float
    start: Mapping[Op, float] = field(repr=False)
    end: Mapping[Op, float] = field(repr=False)
    busy: tuple[float, ...]
    bubble: tuple[float, ...]
    peak: tuple[float, ...]

    def __str__(self) -> str:
        columns = enumerate(zip(self.busy, self.bubble, self.peak))
        rows = [f"{w:6}" + "".join(f"{float(x):10.4g}" for x in row) for w, row in columns]
        head = "worker      busy    bubble      peak"
        return "\n".join([head, *rows, f"makespan {float(self.makespan):g}"])

    def svg(self, path: str | PathLike[str], scale: float | None = None) -> None:
        """Draws into a file the schedule with these times; scale is the pixels of a unit."""
        picture.draw(path, self.schedule.program, (self.start, self.end), scale)


def simulate(schedule: Schedule, costs: Costs = Costs()) -> Report:
    """Finds when everything begins and ends; a ValueError names the faults of the schedule."""
    if faults := validate(schedule):
        rule = f"a schedule must be valid (faults: {len(faults)}); mend what validate() finds:"
        raise ValueError("\n".join([rule, *faults[:10]]))
    table = Table(costs, schedule.placement)
    start, end = timetable(schedule.program, table.duration, table.delay)
    makespan = max(end.values())
    busy = tuple(sum(map(table.duration, line)) for line in schedule.program)
    bubble = tuple(makespan - time for time in busy)
    peak = tuple(max(table.held(line)) for line in schedule.program)
    return Report(schedule, makespan, start, end, busy, bubble, peak)
