"""Trials: a schedule with a balance and checkpoint modes, and its simulated time and memory.

What a worker holds at a moment of a schedule is what its cells keep, the values that wait for it,
and the workspace of one computation. That depends on its own stages and modes alone, apart from the
order in which values arrive, which is the schedule's. So each worker's modes are found by
themselves::

    worker 1 at 1B0    cells 1F0, 1F1 keep       an input waits       workspace of stage 1's B
                     2 × the bytes of a cell   + its bytes          + bytes
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache, cached_property, lru_cache, partial
from itertools import accumulate, pairwise, product
from math import inf
from operator import add, mul
from typing import Any, NamedTuple

import torch

from torchgpipe.planner.layers import Line
from torchgpipe.planner.memory import EARLY, EARLY_AT_FIRST, OUTSIDE, Stage
from torchgpipe.planner.problem import Problem
from torchgpipe.schedule.built_in import fill_drain
from torchgpipe.schedule.by_name import built_in
from torchgpipe.schedule.costs import Costs, Table
from torchgpipe.schedule.language import Schedule
from torchgpipe.schedule.program import Op, Overlap, Skips, operations_of
from torchgpipe.schedule.rewrite import recomputes, with_modes
from torchgpipe.schedule.simulator import Rehearsal

__all__: list[str] = []

#: What cells may keep, the most first.
MODES = ("never", "except_last", "always")


class Timetable(NamedTuple):
    """The instructions of a worker, each with what waits for it."""

    #: The stages from and to which values and gradients come to the worker.
    ways: list[tuple[int, int]]
    #: The instructions, and how many values or gradients wait on each way, before and during each.
    moments: list[tuple[Op, tuple[int, ...], tuple[int, ...]]]


class Part(NamedTuple):
    """The share of a worker in a balance: all that its memory and its modes depend on."""

    worker: int
    #: The layers of each of its stages, from one number up to another.
    ranges: tuple[tuple[int, int], ...]
    #: The bytes of a value, or a gradient, on each way to it.
    sizes: tuple[float, ...]
    #: The pairs of stages, apart from each other, from and to which some values of the model go.
    skips: tuple[tuple[int, int], ...]


class Proof(NamedTuple):
    """The milliseconds of a step that a candidate was trained for, and its memory."""

    time: float
    memory: dict[torch.device, int]


class Setting:
    """A schedule before it has modes, with what its trials share; that of GPipe has no name."""

    def __init__(self, problem: Problem, name: str | None, schedule: Schedule) -> None:
        self.problem, self.name, self.schedule = problem, name, schedule
        self.placement, self.chunks = schedule.placement, schedule.chunks
        #: Whether backward is in halves.
        self.splits = any(op.kind == "W" for op in operations_of(schedule.program))
        workers = range(len(schedule.program))
        #: The stages of each worker.
        self.of_worker = [[j for j, x in enumerate(self.placement) if x == w] for w in workers]
        #: How many instructions were timed, or counted, so far.
        self.effort = 0
        self.cells = cache(lambda mode: recomputes(schedule.program, mode, schedule.chunks))
        #: Makes a partition of the layers from one number up to another.
        self.stage = partial(problem.stage, problem.rows(self.chunks))
        self.durations = cache(lambda *x: self.stage(*x).durations(splits=self.splits))
        # Bounded, since a model with skips has other pairs of stages for nearly each balance.
        self.rehearsal = lru_cache(64)(self._rehearsal)
        self.lines = lru_cache(64)(self._waiting)
        self.peak = lru_cache(4096)(self._peak)
        self._lightest = lru_cache(4096)(self._modes_of)

    def _rehearsal(self, skips: Skips) -> Rehearsal:
        """The program without recomputation, ready to be timed."""
        # To make a rehearsal takes 25 times as long as to time it.
        self.effort += 25 * sum(map(len, self.schedule.program))
        return Rehearsal(self.schedule.program, skips)

    def _waiting(self, skips: Skips) -> list[Timetable]:
        """The instructions of each worker, in the order in which the host issues all of them.

        That order is the same whatever they cost. A value waits from the instruction that makes it
        to the one that uses it. What the next stage of the same worker uses is not counted: that
        comes next, or is part of what the cell keeps.
        """
        there = [*pairwise(range(len(self.placement))), *skips]
        apart = [(a, b) for a, b in there if self.placement[a] != self.placement[b] or b > a + 1]
        lines = [Timetable([], []) for _ in self.of_worker]
        for a, b in (*apart, *((b, a) for a, b in apart)):
            lines[self.placement[b]].ways.append((a, b))
        rehearsal = self.rehearsal(skips)
        start, _ = rehearsal.times(Table(Costs(), self.placement, skips))
        waiting = Counter[tuple[int, int]]()
        for w, op, _ in rehearsal.order(start):
            assert isinstance(op, Op)
            ways = lines[w].ways
            before = tuple([waiting[x] for x in ways])
            # Values go to later stages, gradients to earlier ones.
            for a, b in apart if op.kind != "W" else ():
                source, target = (a, b) if op.kind == "F" else (b, a)
                waiting[source, target] += (op.stage == source) - (op.stage == target)
            lines[w].moments.append((op, before, tuple([waiting[x] for x in ways])))
        return lines

    def _peak(self, part: Part, modes: tuple[str, ...]) -> float:
        """The most memory of a worker at any moment, in bytes."""
        mine = self.of_worker[part.worker]
        stages = {j: self.stage(*x) for j, x in zip(mine, part.ranges)}
        again = {j: self.cells(mode) for j, mode in zip(mine, modes)}
        moments = self.lines(part.skips)[part.worker].moments
        self.effort += 2 * len(moments)
        #: The bytes that all cells keep at the moment, and the peak so far.
        now = most = 0.0
        for (j, kind, i), before, during in moments:
            stage, is_again = stages[j], (j, i) in again[j]
            works = stage.workspaces
            waiting = sum(map(mul, before, part.sizes))
            most = max(most, now + waiting)
            if kind == "F":
                now += stage.stored if is_again else stage.kept
            elif kind in "BI" and is_again:
                now += stage.kept - stage.stored
                most = max(most, now + waiting + works["R"])
            work = works["again" if kind == "F" and is_again else kind]
            most = max(most, now + sum(map(mul, during, part.sizes)) + work)
            if kind != "F":
                now -= stage.pending if kind == "W" else stage.kept
            if kind == "I":
                now += stage.pending
        return most + self._resident(part.worker, [*stages.values()])

    def _resident(self, w: int, stages: Sequence[Stage]) -> float:
        """The memory that is there all the time: weights, the optimizer, inputs and targets."""
        problem, is_last = self.problem, w == self.placement[-1]
        size = sum(x.weights + (1 + problem.state) * x.trainable for x in stages)
        size += problem.input_bytes if w == self.placement[0] else 0.0
        size += problem.target_bytes if is_last else 0.0
        if problem.has_loss:
            return size
        if is_last:
            return size + OUTSIDE * self.chunks * stages[-1].output
        return size + sum(
            (EARLY if j else EARLY_AT_FIRST) * x.gets for j, x in zip(self.of_worker[w], stages)
        )

    def _modes_of(self, part: Part, limit: float) -> tuple[str, ...]:
        """The modes of a worker's stages: of those that fit, what computes the least again.

        If none fit, they are those that keep the least.
        """
        stages = [self.stage(*x) for x in part.ranges]
        least = tuple(["always" if x.stored < x.kept else "never" for x in stages])
        if self.peak(part, least) > limit:
            return least
        again = [
            {x: self.durations(*layers)[3] * [k for k, _ in self.cells(x)].count(j) for x in MODES}
            for j, layers in zip(self.of_worker[part.worker], part.ranges)
        ]
        # All combinations of modes are tried. With three stages or more, ``except_last`` would make
        # them too many.
        every = product(MODES if len(stages) <= 2 else MODES[::2], repeat=len(stages))
        lightest = sorted(every, key=lambda x: sum(map(dict.__getitem__, again, x)))
        return next(x for x in lightest if self.peak(part, x) <= limit)

    def fitted(self, balance: tuple[int, ...], limits: Sequence[float]) -> Trial:
        """The trial of a balance whose modes fit and compute the least again; given ones stay."""
        never = Trial(self, balance)
        if self.problem.modes is not None:
            return Trial(self, balance, self.problem.modes)
        if min(limits) == inf:
            return never
        modes = [*never.modes]
        for mine, part, limit in zip(self.of_worker, never.parts, limits):
            for j, mode in zip(mine, self._lightest(part, limit)):
                modes[j] = mode
        return Trial(self, balance, (*modes,))


class Trial:
    """A setting with the layers and the mode of each partition, simulated when somebody asks.

    Without modes, nothing is computed again.
    """

    def __init__(
        self, setting: Setting, balance: tuple[int, ...], modes: tuple[str, ...] | None = None
    ) -> None:
        self.setting, self.problem, self.balance = setting, setting.problem, balance
        self.modes = ("never",) * len(balance) if modes is None else modes
        #: What tells this trial from others of the same model.
        self.identity = setting.name, setting.chunks, balance, self.modes
        #: What a step has taken, if the trial was trained for one.
        self.proof: Proof | None = None
        #: By how many bytes the fullest device has too little, once this trial is ranked.
        self.excess = 0.0

    @cached_property
    def ranges(self) -> list[tuple[int, int]]:
        """The layers of each partition, the last of which has the loss."""
        ends = [*accumulate(self.balance, initial=0)]
        ends[-1] += self.problem.has_loss
        return [*pairwise(ends)]

    @cached_property
    def arrivals(self) -> list[tuple[int, int, float, float]]:
        """The values that go from one partition to another: their bytes, and those of gradients."""
        ends = [*accumulate(self.balance)]
        return [
            (bisect_right(ends, layer), k, size, gradient)
            for k, x in enumerate(self.ranges)
            for layer, size, gradient in self.setting.stage(*x).arrivals
        ]

    @cached_property
    def skips(self) -> tuple[tuple[int, int], ...]:
        """The pairs of partitions, apart from each other, from and to which some values go."""
        return tuple(sorted({(j, k) for j, k, *_ in self.arrivals if k > j + 1}))

    @cached_property
    def parts(self) -> list[Part]:
        sizes = defaultdict[tuple[int, int], float](float)
        for j, k, size, gradient in self.arrivals:
            sizes[j, k] += size
            sizes[k, j] += gradient
        layers = [tuple([self.ranges[j] for j in mine]) for mine in self.setting.of_worker]
        waiting = [tuple([sizes[x] for x in line.ways]) for line in self.setting.lines(self.skips)]
        return [Part(w, x, y, self.skips) for w, (x, y) in enumerate(zip(layers, waiting))]

    @cached_property
    def memory(self) -> list[float]:
        """The most memory of each worker, in bytes."""
        return [
            self.setting.peak(part, tuple([self.modes[j] for j in mine]))
            for mine, part in zip(self.setting.of_worker, self.parts)
        ]

    def over(self, limits: Sequence[float]) -> float:
        """By how many bytes the fullest worker has too little under some limits; 0 if all fit.

        It is infinite if layers are apart that share a weight.
        """
        # The loss is after the last layer, on the last worker.
        placement = self.setting.placement
        workers = [w for (a, b), w in zip(self.ranges, placement) for _ in range(a, b)]
        if any(workers[a] != workers[b] for a, b in self.problem.ties):
            return inf
        if min(limits) == inf:
            return 0.0
        return max(0.0, *(x - limit for x, limit in zip(self.memory, limits)))

    def rank(self, limits: Sequence[float]) -> tuple[float, float, float]:
        """The place among predictions: what fits, then what is fast, then what needs little."""
        return self.over(limits), self.time, max(self.memory)

    @cached_property
    def again(self) -> frozenset[tuple[int, int]]:
        """The cells that are computed again."""
        modes, cells = self.modes, self.setting.cells
        return frozenset(x for mode in {*modes} for x in cells(mode) if modes[x[0]] == mode)

    @cached_property
    def table(self) -> Table:
        """The costs of its partitions, in milliseconds and bytes."""
        placement, links, count = self.setting.placement, self.problem.links, len(self.balance)
        copy = {way: 0.0 for j in range(1, count) for way in ((j - 1, j), (j, j - 1))}
        #: By stage, the time of the clones of what it sends: of values, and of gradients.
        there, back = ([0.0] * count for _ in range(2))
        for j, k, size, gradient in self.arrivals:
            for clones, a, b, x in ((there, j, k, size), (back, k, j, gradient)):
                w, v = placement[a], placement[b]
                if x and w != v:
                    # Values on one way are copied at the same time, each on a stream of its own.
                    copy[a, b] = max(copy.get((a, b), 0.0), links.get((w, v), Line()).at(x))
                    clones[a] += links.get((w, w), Line()).at(x)
        forward, input, weight, again = zip(*[self.setting.durations(*x) for x in self.ranges])
        stages = [self.setting.stage(*x) for x in self.ranges]
        costs = Costs(
            *([*map(add, forward, there)], [*map(add, input, back)], [*weight], [*again], copy),
            activation=[x.kept for x in stages],
            pending=[x.pending for x in stages],
            checkpoint=[x.stored for x in stages],
        )
        return Table(costs, placement, self.skips)

    @property
    def least(self) -> float:
        """The milliseconds that the busiest worker computes, recomputation aside."""
        times = [sum(self.setting.durations(*x)[:3]) for x in self.ranges]
        return self.setting.chunks * max(sum(times[j] for j in x) for x in self.setting.of_worker)

    @cached_property
    def time(self) -> float:
        """The simulated time of a step, in milliseconds."""
        rehearsal = self.setting.rehearsal(self.skips)
        self.setting.effort += len(rehearsal.steps) + len(self.again)
        return rehearsal.makespan(self.table, self.again)

    @cached_property
    def schedule(self) -> Schedule:
        """The schedule, with its recomputations."""
        base = self.setting.schedule
        program = with_modes(base.program, self.modes, base.chunks)
        return replace(base, program=program, skips=self.skips)

    @property
    def checkpoint(self) -> str | list[str]:
        """The mode of all partitions, or a list with one for each."""
        return self.modes[0] if len({*self.modes}) == 1 else [*self.modes]

    @property
    def devices(self) -> list[torch.device]:
        return [self.problem.places[w] for w in self.setting.placement]


def by_device(places: Iterable[torch.device], sizes: Iterable[float]) -> dict[torch.device, int]:
    """The bytes of each device that are not infinite; those of workers of one device add up."""
    total = Counter[torch.device]()
    for device, size in zip(places, sizes):
        if size < inf:
            total[device] += round(size)
    return {**total}


def settings(problem: Problem, chunks: Iterable[int]) -> Iterator[Setting]:
    """Yield the schedules that the layers of a problem can run under, of some micro-batches."""
    workers = min(len(problem.places), problem.count)
    for m in chunks:
        pairs: Any = built_in(workers, m) if problem.has_loss else [(None, fill_drain(workers, m))]
        for name, schedule in pairs:
            # Nobody can tell beforehand how long two computations take that overlap on a device.
            overlaps = any(isinstance(x, Overlap) for line in schedule.program for x in line)
            if not overlaps and len(schedule.placement) <= problem.count:
                yield Setting(problem, name, schedule)
