"""Trials: the time and the memory of a schedule with a balance and checkpoint modes, simulated."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, lru_cache, partial
from itertools import accumulate, pairwise
from math import inf
from operator import add, gt
from typing import Any, NamedTuple

import torch

from torchgpipe.partition.keeping import Keeping, offload_of, recomputed_by
from torchgpipe.planner.layers import Line
from torchgpipe.planner.memory import UNKNOWN, Issued, StepMemory, issued
from torchgpipe.planner.problem import HOST, Problem
from torchgpipe.planner.stage_memory import Stage, may_leave, ways
from torchgpipe.schedule.built_in import fill_drain
from torchgpipe.schedule.candidates import built_in
from torchgpipe.schedule.costs import Costs, Table
from torchgpipe.schedule.language import Schedule
from torchgpipe.schedule.program import Overlap, Skips, operations_of
from torchgpipe.schedule.rewrite import checkpointed, recomputes
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
    modes: tuple[Keeping, ...]

    @property
    def problem(self) -> Problem:
        """The problem, with all that was measured."""
        return self._trials.problem

    @property
    def _table(self) -> Table:
        away = tuple("never" if offload_of(x) is None else x for x in self.modes)
        return self._trials.table(self.setting, self.balance, away)

    @property
    def _words(self) -> tuple[str, ...]:
        return tuple(map(recomputed_by, self.modes))

    @property
    def _skips(self) -> tuple[tuple[int, int], ...]:
        return self._trials.skips(self.balance, self.setting.schedule.chunks)

    @cached_property
    def time(self) -> float:
        """The simulated time of a step, in milliseconds."""
        trials, setting, table = self._trials, self.setting, self._table
        again = trials.again(setting, self._words)
        if again and any(table.ahead):
            rehearsal, again = trials.replayed(setting, self._skips, self._words), frozenset()
        else:
            rehearsal = trials.rehearsal(setting, self._skips)
        trials.effort += len(rehearsal.steps) + len(again)
        return rehearsal.makespan(table, again)

    @cached_property
    def memory(self) -> list[float]:
        """The most memory of each worker, in bytes."""
        return self._peaks()

    def _peaks(self, limits: Sequence[float] = ()) -> list[float]:
        trials, setting = self._trials, self.setting
        order = trials.order(setting, self._skips, self._words)
        trials.effort += 3 * len(order.computations)
        return trials.peaks(order, setting.schedule.placement, self.balance, self.modes, limits)

    @cached_property
    def fits(self) -> bool:
        """Whether all fits. A walk through memory ends where something does not."""
        if "memory" not in vars(self):
            limits = self.problem.memory
            found = self._peaks(limits)
            if any(map(gt, found, limits)):
                return False
            vars(self)["memory"] = found
        return not self.excess

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
        return max(0.0, *(x - limit for x, limit in zip(self.memory, limits)))

    def beats(self, other: Trial) -> bool:
        """Whether it fits, or is nearer to it, or is faster; no more is simulated than needed."""
        if other.fits:
            return self.time < other.time and self.fits
        return self.excess < other.excess

    @property
    def key(self) -> tuple[float, float, float]:
        """The place in a ranking: what fits, then what is fast, then what needs little."""
        return self.excess, self.time, max(self.memory)

    @cached_property
    def schedule(self) -> Schedule:
        """The schedule, with its recomputations."""
        base = self.setting.schedule
        program = checkpointed(base.program, self._words, base.chunks)
        return replace(base, program=program, skips=self._skips)

    @cached_property
    def costs(self) -> Costs:
        """The costs of its stages, in milliseconds."""
        return self._table.costs

    @property
    def checkpoint(self) -> Keeping | list[Keeping]:
        """The mode of all partitions, or a list with one for each."""
        return self.modes[0] if len({*self.modes}) == 1 else [*self.modes]

    @property
    def devices(self) -> list[torch.device]:
        """The device of each partition."""
        return [self.problem.places[w] for w in self.setting.schedule.placement]

    @cached_property
    def by_device(self) -> dict[torch.device, int]:
        """The most bytes of each device."""
        return by_device(self.problem.places, self.memory)


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
        for name, schedule in simulated(workers, m):
            if len(schedule.placement) <= problem.count:
                yield Setting(name, schedule)


def simulated(workers: int, m: int) -> Iterator[tuple[str, Schedule]]:
    """Yield the built-in schedules whose time a simulation tells."""
    for name, schedule in built_in(workers, m):
        # What two computations of one device gain side by side, nobody can tell beforehand.
        if not any(isinstance(x, Overlap) for line in schedule.program for x in line):
            yield name, schedule


class Durations(NamedTuple):
    """The milliseconds of each kind of computation of a partition."""

    F: float
    I: float  # noqa: E741  # The field's name for it.
    W: float
    R: float


class Departure(NamedTuple):
    """The bytes that leave of a cell for the host, and the milliseconds of both copies."""

    away: float = 0.0
    out: float = 0.0
    back: float = 0.0


class Trials:
    """The trials of a problem, whose parts are found once."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.stage = cache(self._stage)
        self.times = cache(self._times)
        self.trial = cache(partial(Trial, self))
        self.skips = cache(self._skips)
        self.movable = cache(self._movable)
        self.cells = cache(self._cells)
        # Each has thousands of instructions.
        self.rehearsal = lru_cache(256)(self._rehearsal)
        self.replayed = lru_cache(64)(self._replayed)
        self.order = lru_cache(256)(self._order)
        self.table = lru_cache(256)(self._table)
        self.fastest = cache(self._fastest)
        #: The number of instructions that could have been timed so far.
        self.effort = 0

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the problem alone, from which all that was found follows."""
        return type(self), (self.problem,)

    # What a partition takes.

    def _stage(self, start: int, stop: int, m: int) -> Stage:
        weights = [x.weights for x in self.problem.layers]
        return Stage(self.problem.sizes.at(self.rows(m)), weights, range(start, stop))

    def _times(self, start: int, stop: int, m: int, splits: bool) -> Durations:
        layers, rows, stage = self.problem.layers, self.rows(m), self.stage(start, stop, m)
        own = layers[start:stop]
        input, weight = (
            sum(x.at(rows) for x in each) for each in zip(*[(x.input, x.weight) for x in own])
        )
        again = 0.0
        if stage.saver is not None:
            # It ends at the last tensor that has to be computed again.
            again = sum(x.forward.at(rows) for x in layers[start : stage.saver])
            again += layers[stage.saver].again.at(rows)
        if not any(x.gradient for x in stage.arrivals):
            input, weight = 0.0, weight + input
        elif splits:
            weight = sum(x.late.at(rows) for x in own)
        # The first micro-batch adds nothing.
        weight += (1 - 1 / m) * sum(x.adding.at(rows) for x in own)
        return Durations(sum(x.forward.at(rows) for x in own), input, weight, again)

    def rows(self, m: int) -> int:
        """The rows of the largest micro-batch."""
        return -(-self.problem.batch // m)

    def stages(self, balance: Sequence[int], m: int) -> list[Stage]:
        """The memory of each partition, the last of which has the loss."""
        return [self.stage(*x, m) for x in self._ends(balance)]

    def each(self, balance: Sequence[int], setting: Setting) -> tuple[list[Stage], list[Durations]]:
        """The memory and the times of each partition under a setting."""
        m = setting.schedule.chunks
        times = [self.times(*x, m, setting.splits) for x in self._ends(balance)]
        return self.stages(balance, m), times

    def _ends(self, balance: Sequence[int]) -> Iterable[tuple[int, int]]:
        ends = [*accumulate(balance, initial=0)]
        ends[-1] += self.problem.has_loss
        return pairwise(ends)

    # What a setting takes.

    def _skips(self, balance: tuple[int, ...], m: int) -> tuple[tuple[int, int], ...]:
        """The pairs of stages, apart from each other, from and to which some values go."""
        pairs = ((j, k) for k, own in enumerate(ways(self.stages(balance, m))) for j, _ in own)
        return tuple(sorted({(j, k) for j, k in pairs if k > j + 1}))

    def _cells(self, setting: Setting, mode: str) -> frozenset[tuple[int, int]]:
        return recomputes(setting.schedule.program, mode, setting.schedule.chunks)

    def again(self, setting: Setting, words: Sequence[str]) -> frozenset[tuple[int, int]]:
        """The cells that are computed again."""
        found = (x for word in {*words} for x in self.cells(setting, word) if words[x[0]] == word)
        return frozenset(found)

    def _rehearsal(self, setting: Setting, skips: Skips) -> Rehearsal:
        """A setting of which nothing is computed again, ready to be timed."""
        self.effort += 25 * sum(map(len, setting.schedule.program))
        return Rehearsal(setting.schedule.program, skips)

    def _replayed(self, setting: Setting, skips: Skips, words: tuple[str, ...]) -> Rehearsal:
        """A setting of which some is computed again, ready to be timed."""
        found, again = self.rehearsal(setting, skips), self.again(setting, words)
        if again:
            found = found.with_again(again)
            self.effort += 10 * len(found.steps)
        return found

    def _order(self, setting: Setting, skips: Skips, words: tuple[str, ...]) -> Issued:
        """The computations as the host issues them, whatever the layers cost."""
        rehearsal = self.replayed(setting, skips, words)
        table = Table(Costs(), setting.schedule.placement, skips)
        self.effort += 10 * len(rehearsal.steps)
        return issued(rehearsal.order(rehearsal.times(table)[0]))

    def _fastest(self, setting: Setting, balance: tuple[int, ...]) -> float:
        """The time of a setting if nothing is computed again."""
        return self.trial(setting, balance, ("never",) * len(balance)).time

    def peaks(
        self,
        order: Issued,
        placement: tuple[int, ...],
        balance: tuple[int, ...],
        modes: Sequence[Keeping],
        limits: Sequence[float] = (),
    ) -> list[float]:
        """The most memory of each worker, if the host issues a step in an order.

        With limits, the walk ends where a worker has more than its own, and peaks miss the rest.
        """
        problem, stages = self.problem, self.stages(balance, order.chunks)
        sent = self.sent(balance, order.chunks, placement, modes)
        step = StepMemory(
            order,
            placement,
            stages,
            state=problem.state,
            given=problem.given,
            targets=problem.targets,
            is_summed=problem.has_loss,
            loss=None if problem.has_loss else UNKNOWN,
            away=[x.away for x in sent],
            ahead=[int(x.away > 0) for x in sent],
        )
        return step.peaks(limits)

    def sent(
        self,
        balance: tuple[int, ...],
        m: int,
        placement: tuple[int, ...],
        modes: Sequence[Keeping],
    ) -> list[Departure]:
        """Count what leaves of a cell of each stage, and how long its copies take."""
        links, found = self.problem.links, []
        for j, (w, mode) in enumerate(zip(placement, modes)):
            offload = offload_of(mode)
            if offload is None or (w, HOST) not in links:
                found.append(Departure())
                continue
            away = offload.share * self.movable(balance, m, placement)[j]
            out, back = (links[way].at(away) for way in ((w, HOST), (HOST, w)))
            found.append(Departure(away, out, back))
        return found

    def _movable(self, balance: tuple[int, ...], m: int, placement: tuple[int, ...]) -> list[float]:
        stages, is_joined = self.stages(balance, m), not self.problem.has_loss
        return may_leave(stages, placement, is_joined=is_joined)

    def _table(
        self, setting: Setting, balance: tuple[int, ...], modes: tuple[Keeping, ...]
    ) -> Table:
        """The costs of a setting whose cells leave as modes say."""
        placement, links = setting.schedule.placement, self.problem.links
        stages, times = self.each(balance, setting)
        sent = self.sent(balance, setting.schedule.chunks, placement, modes)
        if any(x.away for x in sent):
            away, out, back = map(list, zip(*sent))
            # Memory is counted elsewhere, but for that of the host.
            plain = self.table(setting, balance, ("never",) * len(modes))
            return plain.leaving(away, out, back, [1] * len(sent))
        copy = {way: 0.0 for j in range(1, len(stages)) for way in ((j - 1, j), (j, j - 1))}
        #: By stage, the time of the clones of what it sends: of values, and of gradients.
        there, back = ([0.0] * len(stages) for _ in range(2))
        for k, arrivals in enumerate(ways(stages)):
            for j, x in arrivals:
                for clones, a, b, size in ((there, j, k, x.size), (back, k, j, x.gradient)):
                    w, v = placement[a], placement[b]
                    if size and w != v:
                        # Each part has a lane of its own: there, and its gradient back.
                        took = links.get((w, v), Line()).at(size)
                        copy[a, b] = max(copy.get((a, b), 0.0), took)
                        clones[a] += links.get((w, w), Line()).at(size)
        slow = [self.problem.slowness[w] for w in placement]
        each = [[s * y for s, y in zip(slow, x)] for x in zip(*times)]
        forward, input = ([*map(add, *x)] for x in zip(each, (there, back)))
        costs = Costs(forward, input, each[2], each[3], copy)
        return Table(costs, placement, self.skips(balance, setting.schedule.chunks))
