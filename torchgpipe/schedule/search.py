"""Schedules by name, and the best of all that there are."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any

from torchgpipe.schedule.costs import Costs, Each, numbers
from torchgpipe.schedule.language import Schedule
from torchgpipe.schedule.limits import bounds
from torchgpipe.schedule.looped import checked, fill_drain, interleaved, looped_bfs, one_f_one_b
from torchgpipe.schedule.simulator import Report, simulate
from torchgpipe.schedule.v_shaped import dualpipe_v, v_half, v_min, zero_bubble_v
from torchgpipe.schedule.validator import validate
from torchgpipe.schedule.wave import wave
from torchgpipe.schedule.zero_bubble import interleaved_zero_bubble, zero_bubble_h1, zero_bubble_h2

__all__ = ["Candidate", "best", "named"]

#: By their stages per worker: one, two, or as many as one likes; wave has two for each wave.
_ONE = (fill_drain, one_f_one_b, zero_bubble_h1, zero_bubble_h2)
_TWO = (zero_bubble_v, v_half, v_min, dualpipe_v)
_MANY = (interleaved, looped_bfs, interleaved_zero_bubble)
_BUILT_IN: tuple[Callable[..., Schedule], ...] = (*_ONE, *_MANY, *_TWO, wave)
#: Other names: of papers, and of torch.distributed.pipelining.
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
    """A schedule by its name, as ``named("1f1b", workers=4, chunks=8)``.

    Args:
        name: of its function, or another that is common for it, such as those of
            torch.distributed.pipelining. Case, ``_`` and ``-`` make no difference.
        workers: the number of workers.
        chunks: the number of micro-batches.
        parameters: what else its function takes: ``stages_per_worker`` or ``waves``.

    Raises:
        ValueError: nothing has this name.
    """
    functions = {f.__name__.replace("_", ""): f for f in _BUILT_IN} | _ALIASES
    found = functions.get(re.sub("[-_ ]", "", name).lower())
    if found is None:
        raise ValueError(
            f"a schedule must have a known name (name: {name!r}); use one of "
            + ", ".join([*_ALIASES, *(f.__name__ for f in _BUILT_IN)])
        )
    return found(workers, chunks, **parameters)


@dataclass(frozen=True)
class Candidate:
    """One of the schedules of :func:`best`.

    Args:
        name: how it is made.
        schedule: itself.
        costs: of its stages.
        report: its simulation.
        gap: how much longer it takes than the bound of its own placement, as a share of that.
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
    """Simulates all built-in schedules, and ranks those that fit into the memory.

    One that does not fit is tried again with all of its cells recomputed.

    Args:
        workers: the number of workers.
        chunks: the number of micro-batches.
        costs: of a model of one stage per worker. With ``v`` stages per worker each of those is cut
            into v that cost the same; copies are not divided. Or a function that makes the costs of
            the ``v * workers`` stages of ``v``.
        capacity: how much memory a worker has, or each, in the unit of the costs; None for enough.
        stages_per_worker: which ``v`` there can be.

    Returns:
        The fastest first; of equally fast ones, that which needs least memory.

    Raises:
        ValueError: none fits.
    """
    checked(workers=workers, chunks=chunks)
    counts = sorted({*stages_per_worker})
    for count in counts or [0]:
        checked(stages_per_worker=count)
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
            "a built-in schedule must fit into the memory of the workers "
            f"(capacity: {capacity}, the least that one needs: {float(least):g}); use more "
            "workers, smaller micro-batches, or more stages per worker"
        )
    return sorted(found, key=lambda x: (x.report.makespan, max(x.report.peak)))


def _all(
    workers: int, chunks: int, stages_per_worker: Iterable[int]
) -> Iterator[tuple[int, str, Schedule]]:
    """Each built-in schedule that has one of these numbers of stages per worker."""
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
    """The costs of the same model cut into so many times as many stages."""
    if count == 1:
        return costs
    if isinstance(costs.copy, Mapping):
        raise ValueError(
            "stages that are cut further have edges of their own (copy: a mapping, stages per "
            f"worker: {count}); give one number for copies, or a function that makes the costs"
        )

    def part(value: Each | None) -> Each | None:
        if isinstance(value, Iterable):
            return [x / count for x in value for _ in range(count)]
        return None if value is None else value / count

    names = ("F", "I", "W", "R", "activation", "pending", "checkpoint")
    parts: dict[str, Any] = {name: part(getattr(costs, name)) for name in names}
    return replace(costs, **parts)
