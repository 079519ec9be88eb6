"""Built-in schedules by name, and a ranking of all of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from inspect import signature
from math import inf
from typing import Any

from torchgpipe.checks import has_entries, listed, verify_function, verify_kind
from torchgpipe.schedule.built_in import (
    checked,
    dualpipe_v,
    fill_drain,
    interleaved,
    interleaved_zero_bubble,
    looped_bfs,
    one_f_one_b,
    v_half,
    v_min,
    wave,
    zero_bubble_h1,
    zero_bubble_h2,
    zero_bubble_v,
)
from torchgpipe.schedule.costs import Costs, Each, numbers
from torchgpipe.schedule.language import Schedule
from torchgpipe.schedule.limits import bounds
from torchgpipe.schedule.simulator import Report, simulate, validate

__all__: list[str] = ["Candidate", "best", "named"]


#: Functions by their stages per worker: one, two, or any number; wave has two for each wave.
_ONE = (fill_drain, one_f_one_b, zero_bubble_h1, zero_bubble_h2)
_TWO = (zero_bubble_v, v_half, v_min, dualpipe_v)
_MANY = (interleaved, looped_bfs, interleaved_zero_bubble)
_BUILT_IN: tuple[Callable[..., Schedule], ...] = (*_ONE, *_MANY, *_TWO, wave)
#: Names from papers and from torch.distributed.pipelining.
_ALIASES = {
    "gpipe": fill_drain,
    "1f1b": one_f_one_b,
    "interleaved1f1b": interleaved,
    "zbh1": zero_bubble_h1,
    "zbh2": zero_bubble_h2,
    "zbv": zero_bubble_v,
    "zbvzerobubble": zero_bubble_v,
    "hanayo": wave,
}


def named(name: str, workers: int, chunks: int, **parameters: int) -> Schedule:
    """Make a built-in schedule by its name, such as ``named("1f1b", workers=4, chunks=8)``.

    Args:
        name: the name of the function, or a common name, such as the name of the class in
            torch.distributed.pipelining. Case, spaces, ``_`` and ``-`` make no difference.
        workers: the number of workers.
        chunks: the number of micro-batches.
        parameters: further arguments of the function: ``stages_per_worker`` or ``waves``.

    Raises:
        ValueError: No built-in schedule has this name.
    """
    verify_kind(name, str, "name must be a word", "name", "use '1f1b', for one")
    functions = {f.__name__.replace("_", ""): f for f in _BUILT_IN} | _ALIASES
    found = functions.get(re.sub("[-_ ]", "", name).lower())
    if found is None:
        raise ValueError(
            f"name must be that of a built-in schedule (name: {name!r}); use one of "
            + ", ".join([*_ALIASES, *(f.__name__ for f in _BUILT_IN)])
        )
    known = [*signature(found).parameters]
    for parameter in parameters:
        if parameter not in known:
            raise TypeError(
                f"a schedule takes the arguments of its function (name: {name!r}, {parameter}: "
                f"{parameters[parameter]!r}); use {', '.join(known)}"
            )
    return found(workers, chunks, **parameters)


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
    given = listed(stages_per_worker, rule, "stages_per_worker", remedy)
    for count in given or [0]:
        checked(stages_per_worker=count)
    counts = sorted({*given})
    if not isinstance(costs, Costs):
        verify_function(
            costs,
            "costs must be a Costs, or a function of the stages per worker",
            "costs",
            "pass Costs(F=1, I=1, W=1), for one",
        )
    limits = None if capacity is None else numbers("capacity", capacity, workers)
    found: list[Candidate] = []
    least = inf
    for count, name, schedule in _all(workers, chunks, counts):
        parts = _divided(costs, count) if isinstance(costs, Costs) else costs(count)
        limit = bounds(schedule.placement, chunks, parts, limits)
        tries = ((name, schedule), (f"{name}.recompute()", schedule.recompute()))
        for call, tried in tries:
            report = simulate(tried, parts)
            least = min(least, max(report.peak))
            if limits is None or not validate(tried, limits, parts):
                found.append(Candidate(call, tried, parts, report, limit.gap(report)))
                break
    if not found:
        raise ValueError(
            "capacity must be enough for one of the built-in schedules "
            f"(capacity: {capacity}, smallest peak: {float(least):g}); use more workers, smaller "
            "micro-batches, or more stages per worker"
        )
    return sorted(found, key=lambda x: (x.report.makespan, max(x.report.peak)))


def built_in(workers: int, chunks: int) -> Iterator[tuple[str, Schedule]]:
    """Yield the built-in schedules with one, two and four stages per worker.

    Yields:
        The name of the function, and the schedule.
    """
    for _, call, schedule in _all(workers, chunks, (1, 2, 4)):
        yield call.partition("(")[0], schedule


def _all(
    workers: int, chunks: int, stages_per_worker: Iterable[int]
) -> Iterator[tuple[int, str, Schedule]]:
    """Yield the built-in schedules with these numbers of stages per worker.

    Yields:
        The number of stages per worker, the call that makes the schedule, and the schedule.
    """
    for v in stages_per_worker:
        calls: list[tuple[Callable[..., Schedule], dict[str, int]]]
        if v == 1:
            calls = [(function, {}) for function in _ONE]
        else:
            calls = [(function, {"stages_per_worker": v}) for function in _MANY]
        if v == 2:
            calls += [(function, {}) for function in _TWO]
        if v % 2 == 0:
            calls += [(wave, {"waves": v // 2})]
        for function, parameters in calls:
            words = [str(workers), str(chunks), *(f"{k}={x}" for k, x in parameters.items())]
            schedule = function(workers, chunks, **parameters)
            yield v, f"{function.__name__}({', '.join(words)})", schedule


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
