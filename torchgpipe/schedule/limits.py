"""Lower bounds on makespan and memory that hold for every schedule.

Each worker gives a bound of its own. The head of a computation is the longest chain of computations
and copies that must come before it; the tail is the longest chain that must come after it. So for
any set of computations of one worker

    makespan  >=  smallest head  +  sum of times  +  smallest tail.

Source: Carlier, The one-machine sequencing problem (1982).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import inf, isclose
from typing import TypeAlias

from torchgpipe.checks import verify_kind
from torchgpipe.schedule.costs import Costs, Each, Table, numbers
from torchgpipe.schedule.language import Schedule, checked_placement, checked_skips
from torchgpipe.schedule.program import Op, Overlap, Skips, by_stage, needs
from torchgpipe.schedule.simulator import Report

__all__ = ["Bounds", "bounds", "capacities"]

#: For each kind and stage, the head of a computation (the least time from the beginning of a step
#: to its start), or for all of them the tail (the least time from its end to the end of the step).
Chains: TypeAlias = dict[tuple[str, int], float]
#: All computations of a kind in a stage, for _one_machine(): head, sum of their times, tail.
Job: TypeAlias = tuple[float, float, float]


@dataclass(frozen=True)
class Bounds:
    """The result of :func:`bounds`, in the units of its costs; exact with ints and Fractions.

    Args:
        makespan: the bound on the makespan; infinite if no schedule fits into the memory.
        peak: the bound on the peak memory of each worker, whatever the makespan.
    """

    makespan: float
    peak: tuple[float, ...]

    def gap(self, report: Report) -> float:
        """Return the excess of a makespan over the bound, as a share of the bound."""
        remedy = "pass simulate(schedule, costs)"
        verify_kind(report, Report, "a bound is compared with a Report", "report", remedy)
        if not self.makespan:
            return inf if report.makespan else 0
        return max(0, report.makespan / self.makespan - 1)


def bounds(
    placement: Sequence[int],
    chunks: int,
    costs: Costs = Costs(),
    capacity: Each | None = None,
    skips: Skips = (),
) -> Bounds:
    """Compute bounds that hold for every valid schedule of a placement.

    Args:
        placement: stage -> worker.
        chunks: the number of micro-batches.
        costs: the costs of the stages.
        capacity: the memory of all workers, or of each; unlimited if None.
        skips: the stages that each skip leads from and to.

    Raises:
        TypeError, ValueError: The arguments do not fit each other.

    Example::

        >>> bounds((0, 1, 2, 3), chunks=8)
        Bounds(makespan=27, peak=(1, 1, 1, 1))
    """
    placement = checked_placement(placement)
    workers = len(set(placement))
    # Schedule() raises if placement, chunks and skips do not fit each other.
    Schedule(placement, chunks, ((),) * workers, checked_skips(skips))
    table = Table(costs, placement, skips)
    limits = capacities(capacity, workers)
    edges = _edges(table, skips)
    heads, tails = _heads(table, edges), _tails(table, edges)
    makespans: list[float] = []
    peaks: list[float] = []
    for w, limit in enumerate(limits):
        stages = [j for j, worker in enumerate(placement) if worker == w]
        share = _share(table, stages)
        jobs = [
            (heads[x], chunks * table.time[x[0]][x[1]], tails[x]) for x in product("FIW", stages)
        ]
        makespans += [_one_machine(jobs, share)]
        peaks += [_least(table, stages)]
        if peaks[w] > limit and not isclose(peaks[w], limit):
            makespans += [inf]
    return Bounds(max(makespans), tuple(peaks))


def capacities(capacity: Each | None, workers: int) -> list[float]:
    """Return the memory of each worker; infinite if ``capacity`` is None."""
    return [inf] * workers if capacity is None else numbers("capacity", capacity, workers)


def _edges(table: Table, skips: Skips) -> list[tuple[Op, list[Op]]]:
    """Return the computations of one micro-batch in an order of time, each with what it needs."""
    stages = range(len(table.activation))
    ops = [Op(j, "F", 0) for j in stages]
    ops += [Op(j, kind, 0) for j in reversed(stages) for kind in "IW"]
    there, near = set(ops), by_stage(skips)
    return [(op, needs(op, there, near.get(op.stage, ()))) for op in ops]


def _heads(table: Table, edges: Sequence[tuple[Op, list[Op]]]) -> Chains:
    heads: Chains = {}
    for op, sources in edges:
        ends = [
            heads[x.kind, x.stage] + table.time[x.kind][x.stage] + table.delay((x, op))
            for x in sources
        ]
        heads[op.kind, op.stage] = max(ends, default=0)
    return heads


def _tails(table: Table, edges: Sequence[tuple[Op, list[Op]]]) -> Chains:
    tails: Chains = {(op.kind, op.stage): 0 for op, _ in edges}
    for op, sources in reversed(edges):
        after = table.time[op.kind][op.stage] + tails[op.kind, op.stage]
        for x in sources:
            chain = table.delay((x, op)) + after
            tails[x.kind, x.stage] = max(tails[x.kind, x.stage], chain)
    return tails


def _one_machine(jobs: Sequence[Job], share: float) -> float:
    """Return the bound by heads and tails: between them, a worker has to compute all of its jobs.

    For each smallest head and smallest tail, the largest set of jobs gives the best bound.
    """
    makespans: list[float] = []
    for (head, _, _), (_, _, tail) in product(jobs, jobs):
        times = [time for h, time, t in jobs if h >= head and t >= tail]
        if times:
            makespans.append(head + share * sum(times) + tail)
    return max(makespans)


def _share(table: Table, stages: Sequence[int]) -> float:
    """Return how much an overlap saves at best: its time by the sum of its two times, at most 1."""
    ops = [Op(j, kind, 0) for j in stages for kind in "FBIWR"]
    both = [
        (table.duration(Overlap(a, b)), table.duration(a) + table.duration(b))
        for a, b in product(ops, ops)
    ]
    return min([1, *(time / total for time, total in both if total)])


def _least(table: Table, stages: Sequence[int]) -> float:
    """Return the memory that a worker needs at least, while a micro-batch is on its way back.

    When the micro-batch comes back to a stage, this stage keeps its activation, and the earlier
    stages of the worker keep their activations, as far as these stay, or checkpoints.
    """
    kept = [min(table.activation[j] - table.away[j], table.checkpoint[j]) for j in stages]
    return max(table.activation[j] + sum(kept[:k]) for k, j in enumerate(stages))
