"""A ranking of the built-in schedules, by their simulations."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any

from torchgpipe.checks import has_entries, listed, verify_function
from torchgpipe.schedule.built_in import checked
from torchgpipe.schedule.by_name import every
from torchgpipe.schedule.costs import Costs, Each, numbers
from torchgpipe.schedule.language import Schedule
from torchgpipe.schedule.limits import bounds
from torchgpipe.schedule.simulator import Report, simulate, validate

__all__: list[str] = ["Candidate", "best"]


@dataclass(frozen=True)
class Candidate:
    """One schedule in the ranking of :func:`best`.

    Args:
        name: the call that makes the schedule.
        schedule: the schedule.
        costs: the costs of its stages.
        report: the simulation of the schedule.
        gap: the excess of the makespan over the bound of this placement, as a share of the bound.
    """

    name: str
    schedule: Schedule = field(repr=False)
    costs: Costs = field(repr=False)
    report: Report = field(repr=False)
    gap: float

    def __str__(self) -> str:
        makespan, peak = float(self.report.makespan), float(max(self.report.peak))
        return f"{self.name:60} makespan {makespan:9.4g}  peak {peak:7.4g}  gap {self.gap:6.1%}"


def best(
    workers: int,
    chunks: int,
    costs: Costs | Callable[[int], Costs] = Costs(),
    capacity: Each | None = None,
    stages_per_worker: Iterable[int] = (1, 2, 4),
) -> list[Candidate]:
    """Simulate all built-in schedules, and rank those that fit into the memory.

    A schedule that does not fit is tried again with all cells recomputed.

    Args:
        workers: the number of workers.
        chunks: the number of micro-batches.
        costs: the costs of a model with one stage per worker. With ``v`` stages per worker, each
            stage is cut into v equal ones; copies are not divided. Or a function of ``v`` that
            returns the costs of the ``v * workers`` stages.
        capacity: the memory of all workers, or of each, in the unit of the costs; unlimited if
            None.
        stages_per_worker: the values of ``v`` to try.

    Returns:
        The candidates, the fastest first; of equally fast ones, the one with the least memory.

    Raises:
        ValueError: No schedule fits, or the arguments do not fit each other.
    """
    checked(workers=workers, chunks=chunks)
    remedy = "pass such as (1, 2, 4)"
    rule = "stages_per_worker must be a sequence of numbers to try"
    entries = listed(stages_per_worker, rule, "stages_per_worker", remedy)
    for count in entries or [0]:
        checked(stages_per_worker=count)
    counts = sorted({*entries})
    if not isinstance(costs, Costs):
        verify_function(
            costs,
            "costs must be a Costs, or a function of the stages per worker",
            "costs",
            "pass Costs(F=1, I=1, W=1), for one",
        )
    limits = None if capacity is None else numbers("capacity", capacity, workers)
    fitting: list[Candidate] = []
    least = inf
    for count, name, schedule in every(workers, chunks, counts):
        parts = _divided(costs, count) if isinstance(costs, Costs) else costs(count)
        limit = bounds(schedule.placement, chunks, parts, limits)
        tries = ((name, schedule), (f"{name}.recompute()", schedule.recompute()))
        for call, tried in tries:
            report = simulate(tried, parts)
            least = min(least, max(report.peak))
            if limits is None or not validate(tried, limits, parts):
                fitting.append(Candidate(call, tried, parts, report, limit.gap(report)))
                break
    if not fitting:
        raise ValueError(
            "capacity must be enough for one of the built-in schedules "
            f"(capacity: {capacity}, smallest peak: {float(least):g}); use more workers, smaller "
            "micro-batches, or more stages per worker"
        )
    return sorted(fitting, key=lambda x: (x.report.makespan, max(x.report.peak)))


def _divided(costs: Costs, count: int) -> Costs:
    """Return the costs of the same model if each stage is cut into ``count`` equal ones."""
    if count == 1:
        return costs
    if isinstance(costs.copy, Mapping):
        raise ValueError(
            "copy must be one number if stages are cut, since that makes new edges (copy: a "
            f"mapping, stages per worker: {count}); give a number, or a function as costs"
        )

    def part(value: Any) -> Each | None:
        if has_entries(value):
            return [x / count for x in value for _ in range(count)]
        return None if value is None else value / count

    names = ("F", "I", "W", "R", "activation", "pending", "checkpoint", "away", "out", "back")
    parts: dict[str, Any] = {name: part(getattr(costs, name)) for name in names}
    return replace(costs, **parts)
