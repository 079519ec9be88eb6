"""Trials: the time and the memory of a schedule with a balance and checkpoint modes, simulated."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, lru_cache, partial
from itertools import accumulate, pairwise
from math import inf
from operator import add
from typing import Any

import torch

from torchgpipe.planner.layers import Line
from torchgpipe.planner.memory import EARLY, EARLY_AT_FIRST, OUTSIDE, Stage
from torchgpipe.planner.problem import Problem
from torchgpipe.schedule.built_in import fill_drain
from torchgpipe.schedule.by_name import built_in
from torchgpipe.schedule.costs import Costs, Table
from torchgpipe.schedule.language import Schedule
from torchgpipe.schedule.program import Instruction, Overlap, Skips, operations, operations_of
from torchgpipe.schedule.rewrite import recomputes, with_modes
from torchgpipe.schedule.simulator import Rehearsal

__all__: list[str] = []


@dataclass(frozen=True, eq=False)
class Setting:
    """A schedule before it has modes; that of :class:`~torchgpipe.GPipe` has no name."""

    name: str | None
    schedule: Schedule

    @cached_property
    def splits(self) -> bool:
        """Whether its backward is in halves."""
        return any(op.kind == "W" for op in operations_of(self.schedule.program))


@dataclass(frozen=True, eq=False)
class Trial:
    """A setting with the layers and the mode of each partition, simulated when somebody asks."""

    _trials: Trials = field(repr=False)
    setting: Setting
    balance: tuple[int, ...]
    modes: tuple[str, ...]

    @property
    def problem(self) -> Problem:
        """The problem, with all that was measured."""
        return self._trials.problem

    @property
    def settings(self) -> tuple[Any, ...]:
        """The settings, which tell this trial from others of the same model."""
        return self.setting.name, self.setting.schedule.chunks, self.balance, self.modes

    @cached_property
    def skips(self) -> tuple[tuple[int, int], ...]:
        """The pairs of partitions, apart from each other, from and to which some values go."""
        ways = self._trials.ways(self.balance, self.setting.schedule.chunks)
        return tuple(sorted({(j, k) for j, k, *_ in ways if k > j + 1}))

    @cached_property
    def table(self) -> Table:
        """The costs of its partitions, in milliseconds and bytes."""
        return self._trials.table(self.setting, self.balance, self.skips)

    @cached_property
    def time(self) -> float:
        """The simulated time of a step, in milliseconds."""
        rehearsal = self._trials.rehearsal(self.setting, self.skips)
        again = self._trials.again(self.setting, self.modes)
        self._trials.effort += len(rehearsal.steps) + len(again)
        return rehearsal.makespan(self.table, again)

    @cached_property
    def memory(self) -> list[float]:
        """The most memory of each worker, in bytes."""
        return self._trials.peaks(self)

    @cached_property
    def excess(self) -> float:
        """By how many bytes the fullest worker has too little; 0 if all fit.

        It is infinite if layers are apart that share a weight.
        """
        # The loss is after the last layer, on the last worker.
        placement = self.setting.schedule.placement
        own = [w for size, w in zip(self.balance, placement) for _ in range(size)]
        own.append(placement[-1])
        is_apart = any(own[a] != own[b] for a, b in self.problem.ties)
        return inf if is_apart else self.over(self.problem.memory)

    def over(self, limits: Sequence[float]) -> float:
        """By how many bytes the fullest worker has too little under some limits."""
        if min(limits) == inf:
            return 0.0
        return max(0.0, *(x - limit for x, limit in zip(self.memory, limits)))

    def beats(self, other: Trial) -> bool:
        """Whether it fits, or is nearer to it, or is faster; no more is simulated than needed."""
        if other.excess:
            return self.excess < other.excess
        return self.time < other.time and not self.excess

    @property
    def key(self) -> tuple[float, float, float]:
        """The place in a ranking: what fits, then what is fast, then what needs little."""
        return self.excess, self.time, max(self.memory)

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
        """The device of each partition."""
        return [self.problem.places[w] for w in self.setting.schedule.placement]


def by_device(places: Iterable[torch.device], sizes: Iterable[float]) -> dict[torch.device, int]:
    """The bytes of each device that are not infinite; those of workers of one device add up."""
    found: dict[torch.device, int] = {}
    for place, size in zip(places, sizes):
        if size < inf:
            found[place] = found.get(place, 0) + round(size)
    return found


def settings(problem: Problem, chunks: Iterable[int]) -> Iterator[Setting]:
    """Yield the schedules that the layers of a problem can run under, of some micro-batches."""
    workers = min(len(problem.places), problem.count)
    for m in chunks:
        if not problem.has_loss:
            yield Setting(None, fill_drain(workers, m))
            continue
        for name, schedule in built_in(workers, m):
            # What two computations of one device gain side by side, nobody can tell beforehand.
            overlaps = any(isinstance(x, Overlap) for line in schedule.program for x in line)
            if not overlaps and len(schedule.placement) <= problem.count:
                yield Setting(name, schedule)


class Trials:
    """The trials of a problem, whose parts are found once."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.trial = cache(partial(Trial, self))
        self.stages = cache(self._stages)
        self._bytes = cache(lambda m: [x.bytes(self.rows(m)) for x in problem.layers])
        self._stage = cache(self._stage_of)
        self._cells = cache(self._cells_of)
        # Each has thousands of instructions.
        self.rehearsal = lru_cache(256)(self._rehearsal)
        self.waiting = lru_cache(256)(self._waiting)
        self._program = lru_cache(256)(self._program_of)
        self.table = lru_cache(256)(self._table)
        #: The number of instructions that could have been timed so far.
        self.effort = 0

    def rows(self, m: int) -> int:
        """The rows of the largest micro-batch."""
        return -(-self.problem.batch // m)

    def _stage_of(self, start: int, stop: int, m: int) -> Stage:
        layers, rows, is_summed = self.problem.layers, self.rows(m), self.problem.has_loss
        return Stage(layers, self._bytes(m), rows, range(start, stop), is_summed=is_summed)

    def _stages(self, balance: tuple[int, ...], m: int) -> list[Stage]:
        """The partitions, the last of which has the loss."""
        ends = [*accumulate(balance, initial=0)]
        ends[-1] += self.problem.has_loss
        return [self._stage(*x, m) for x in pairwise(ends)]

    def ways(self, balance: tuple[int, ...], m: int) -> Iterator[tuple[int, int, float, float]]:
        """Yield what goes from one stage to another: the bytes, and those of the gradient."""
        ends = [*accumulate(balance)]
        for k, stage in enumerate(self.stages(balance, m)):
            for layer, size, gradient in stage.arrivals:
                yield bisect_right(ends, layer), k, size, gradient

    def again(self, setting: Setting, modes: Sequence[str]) -> frozenset[tuple[int, int]]:
        """The cells that are computed again."""
        found = (x for y in {*modes} for x in self._cells(setting, y) if modes[x[0]] == y)
        return frozenset(found)

    def _cells_of(self, setting: Setting, mode: str) -> frozenset[tuple[int, int]]:
        return recomputes(setting.schedule.program, mode, setting.schedule.chunks)

    def _rehearsal(self, setting: Setting, skips: Skips) -> Rehearsal:
        """A setting of which nothing is computed again, ready to be timed."""
        self.effort += 25 * sum(map(len, setting.schedule.program))
        return Rehearsal(setting.schedule.program, skips)

    def _waiting(self, setting: Setting, skips: Skips) -> Counter[tuple[int, int]]:
        """Count the most values that wait on each way between stages.

        A value waits from the computation that makes it to the one that uses it, unless that comes
        next on the same worker. All instructions are in the order in which the host issues them,
        whatever they cost.
        """
        rehearsal, placement = self.rehearsal(setting, skips), setting.schedule.placement
        there = [*pairwise(range(len(placement))), *skips]
        now, most = Counter[tuple[int, int]](), Counter[tuple[int, int]]()
        start, _ = rehearsal.times(Table(Costs(), placement, skips))
        for _, instruction, _ in rehearsal.order(start):
            for j, kind, _ in operations(instruction):
                # Values go to later stages, gradients to earlier ones.
                ways = {"F": there, "B": [(k, j) for j, k in there]}
                for a, b in ways.get("B" if kind == "I" else kind, ()):
                    if placement[a] != placement[b] or abs(a - b) > 1:
                        now[a, b] += (a == j) - (b == j)
                        most[a, b] = max(most[a, b], now[a, b])
        return most

    def _program_of(
        self, setting: Setting, again: frozenset[tuple[int, int]]
    ) -> list[list[Instruction]]:
        """The program of a setting, with an R right before the backward of some cells."""

        def added(x: Instruction) -> list[Instruction]:
            cells = [op for op in operations(x) if op.kind in "BI" and op[::2] in again]
            return [*(op._replace(kind="R") for op in cells), x]

        return [[y for x in line for y in added(x)] for line in setting.schedule.program]

    def peaks(self, trial: Trial) -> list[float]:
        """The most memory of each worker."""
        problem, setting, table = self.problem, trial.setting, trial.table
        placement, m = setting.schedule.placement, setting.schedule.chunks
        stages, again = self.stages(trial.balance, m), self.again(setting, trial.modes)
        program = self._program(setting, again)
        self.effort += 3 * sum(map(len, program))
        found = []
        for line in program:
            most = 0.0
            for level, x in zip(table.held(line), line):
                works = (
                    stages[j].workspaces["again" if kind == "F" and (j, i) in again else kind]
                    for j, kind, i in operations(x)
                )
                most = max(most, level + max(works))
            found.append(most)
        for w, stage in zip(placement, stages):
            found[w] += stage.weights + (1 + problem.state) * stage.trainable
        waiting = self.waiting(setting, trial.skips)
        for j, k, size, gradient in self.ways(trial.balance, m):
            found[placement[k]] += waiting[j, k] * size
            found[placement[j]] += waiting[k, j] * gradient
        found[placement[0]] += problem.given
        found[placement[-1]] += problem.targets
        if not problem.has_loss:
            found[placement[-1]] += OUTSIDE * m * stages[-1].output
            for j, (w, stage) in enumerate(zip(placement, stages[:-1])):
                found[w] += (EARLY if j else EARLY_AT_FIRST) * stage.gets
        return found

    def _table(self, setting: Setting, balance: tuple[int, ...], skips: Skips) -> Table:
        """The costs of a setting."""
        placement, links, count = setting.schedule.placement, self.problem.links, len(balance)
        stages = self.stages(balance, setting.schedule.chunks)
        copy = {way: 0.0 for j in range(1, count) for way in ((j - 1, j), (j, j - 1))}
        #: By stage, the time of the clones of what it sends: of values, and of gradients.
        there, back = ([0.0] * count for _ in range(2))
        for j, k, size, gradient in self.ways(balance, setting.schedule.chunks):
            for clones, a, b, x in ((there, j, k, size), (back, k, j, gradient)):
                w, v = placement[a], placement[b]
                if x and w != v:
                    # Each part has a lane of its own: there, and its gradient back.
                    copy[a, b] = max(copy.get((a, b), 0.0), links.get((w, v), Line()).at(x))
                    clones[a] += links.get((w, w), Line()).at(x)
        each = zip(*[x.durations(splits=setting.splits) for x in stages])
        forward, input, weight, again = map(list, each)
        costs = Costs(
            *([*map(add, forward, there)], [*map(add, input, back)], weight, again, copy),
            activation=[x.kept for x in stages],
            pending=[x.pending for x in stages],
            checkpoint=[x.stored for x in stages],
        )
        return Table(costs, placement, skips)
