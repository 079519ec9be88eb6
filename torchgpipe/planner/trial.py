"""Trials: the time and the memory of a schedule with a balance and checkpoint modes, simulated."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, lru_cache, partial
from itertools import accumulate, pairwise
from math import inf
from operator import add
from typing import Any, NamedTuple, TypeAlias

import torch

from torchgpipe.partition.keeping import Keeping, offload_of, recomputed_by
from torchgpipe.planner.layers import Line
from torchgpipe.planner.memory import EARLY, EARLY_AT_FIRST, OUTSIDE, Stage
from torchgpipe.planner.problem import HOST, Problem
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
    modes: tuple[Keeping, ...]

    @property
    def problem(self) -> Problem:
        """The problem, with all that was measured."""
        return self._trials.problem

    @property
    def _words(self) -> tuple[str, ...]:
        return tuple(map(recomputed_by, self.modes))

    @property
    def _skips(self) -> tuple[tuple[int, int], ...]:
        return self._trials.skips(self.balance, self.setting.schedule.chunks)

    @cached_property
    def _table(self) -> Table:
        return self._trials.table(self.setting, self.balance, self.modes)

    @cached_property
    def time(self) -> float:
        """The simulated time of a step, in milliseconds."""
        trials, setting, table = self._trials, self.setting, self._table
        again = trials.again(setting, self._words)
        if again and any(table.prefetch):
            rehearsal, again = trials.replayed(setting, self._skips, self._words), frozenset()
        else:
            rehearsal = trials.rehearsal(setting, self._skips)
        trials.effort += len(rehearsal.steps) + len(again)
        return rehearsal.makespan(table, again)

    @cached_property
    def memory(self) -> list[float]:
        """The most memory of each worker, in bytes."""
        return self._trials.peaks(self)

    @property
    def fits(self) -> bool:
        """Whether all fits."""
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
        if not self.problem.is_limited:
            return 0.0
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
        program = with_modes(base.program, self._words, base.chunks)
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
        for name, schedule in built_in(workers, m):
            # What two computations of one device gain side by side, nobody can tell beforehand.
            overlaps = any(isinstance(x, Overlap) for line in schedule.program for x in line)
            if not overlaps and len(schedule.placement) <= problem.count:
                yield Setting(name, schedule)


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


#: A computation with its stage, as far as memory goes: its kind, or ``'again'`` for a forward whose
#: cell is computed again.
Work: TypeAlias = tuple[str, int]

#: An instruction, its computations, and how many values wait then for each way to its worker.
Moment: TypeAlias = tuple[Instruction, Sequence[Work], Sequence[tuple[tuple[int, int], int]]]


class Trials:
    """The trials of a problem, whose parts are found once."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.taken = cache(lambda rows: [x.taken(rows) for x in problem.layers])
        self.stage = cache(self._stage)
        self.times = cache(self._times)
        self.trial = cache(partial(Trial, self))
        self.skips = cache(self._skips)
        self.cells = cache(self._cells)
        # Each has thousands of instructions.
        self.rehearsal = lru_cache(256)(self._rehearsal)
        self.replayed = lru_cache(64)(self._replayed)
        self.moments = lru_cache(256)(self._moments)
        self.table = lru_cache(256)(self._table)
        #: The number of instructions that could have been timed so far.
        self.effort = 0

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the problem alone, from which all that was found follows."""
        return type(self), (self.problem,)

    # What a partition takes.

    def _stage(self, start: int, stop: int, m: int) -> Stage:
        weights = [x.weights for x in self.problem.layers]
        taken, is_summed = self.taken(self.rows(m)), self.problem.has_loss
        return Stage(taken, weights, range(start, stop), is_summed=is_summed)

    def _times(self, start: int, stop: int, m: int, splits: bool) -> Durations:
        rows, own = self.rows(m), self.problem.layers[start:stop]
        forward, input, weight = (
            sum(x.at(rows) for x in each)
            for each in zip(*[(x.forward, x.input, x.weight) for x in own])
        )
        # A recomputation ends at the last tensor that backward needs.
        again = forward - own[-1].forward.at(rows) + own[-1].again.at(rows)
        if not self.stage(start, stop, m).gives_back:
            input, weight = 0.0, weight + input
        elif splits:
            weight = sum(x.late.at(rows) for x in own)
        return Durations(forward, input, weight, again)

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

    def ways(self, balance: Sequence[int], m: int) -> Iterator[tuple[int, int, float, float]]:
        """Yield what goes from one stage to another: the bytes, and those of the gradient."""
        ends = [stop for _, stop in self._ends(balance)]
        for k, stage in enumerate(self.stages(balance, m)):
            for layer, size, gradient in stage.arrivals:
                yield bisect_right(ends, layer), k, size, gradient

    # What a setting takes.

    def _skips(self, balance: tuple[int, ...], m: int) -> tuple[tuple[int, int], ...]:
        """The pairs of stages, apart from each other, from and to which some values go."""
        return tuple(sorted({(j, k) for j, k, *_ in self.ways(balance, m) if k > j + 1}))

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

    def _moments(
        self, setting: Setting, skips: Skips, words: tuple[str, ...]
    ) -> list[list[Moment]]:
        """The instructions of each worker, as the host issues all of them, whatever they cost."""
        rehearsal, placement = self.replayed(setting, skips, words), setting.schedule.placement
        again = self.again(setting, words)
        table = Table(Costs(), placement, skips)
        self.effort += 10 * len(rehearsal.steps)
        there = [*pairwise(range(len(placement))), *skips]
        pairs = [x for a, b in there if placement[a] != placement[b] for x in ((a, b), (b, a))]
        #: What has arrived on each way, and waits for the computation that uses it.
        waiting = dict.fromkeys(pairs, 0)
        lines: list[list[Any]] = [[] for _ in rehearsal.program]

        def now(w: int) -> list[tuple[tuple[int, int], int]]:
            return [(x, n) for x, n in waiting.items() if n and placement[x[1]] == w]

        for w, instruction, _ in rehearsal.order(rehearsal.times(table)[0]):
            if lines[w]:
                lines[w][-1][2] = now(w)
            works = []
            for j, kind, i in operations(instruction):
                works.append(("again" if kind == "F" and (j, i) in again else kind, j))
                # Values go to later stages, gradients to earlier ones.
                ahead = {"F": 1, "B": -1, "I": -1}.get(kind, 0)
                for a, b in pairs:
                    if ahead and (b - a) * ahead > 0:
                        waiting[a, b] += (a == j) - (b == j)
            lines[w].append([instruction, works, ()])
        for w, line in enumerate(lines):
            line[-1][2] = now(w)
        return lines

    def peaks(self, trial: Trial) -> list[float]:
        """The most memory of each worker."""
        problem, setting, balance = self.problem, trial.setting, trial.balance
        placement, m = setting.schedule.placement, setting.schedule.chunks
        stages, table = self.stages(balance, m), trial._table
        moments = self.moments(setting, trial._skips, trial._words)
        self.effort += 3 * sum(map(len, moments))
        sizes: dict[tuple[int, int], float] = {}
        for j, k, size, gradient in self.ways(balance, m):
            sizes[j, k] = sizes.get((j, k), 0.0) + size
            sizes[k, j] = sizes.get((k, j), 0.0) + gradient
        found = []
        works = [x.workspaces for x in stages]
        for w, line in enumerate(moments):
            own = [x for x, v in zip(stages, placement) if v == w]
            most = 0.0
            for level, (_, kinds, waiting) in zip(table.held([x for x, *_ in line]), line):
                level += sum(n * sizes[x] for x, n in waiting)
                most = max(most, level + max(works[j][kind] for kind, j in kinds))
            found.append(most + sum(x.weights + (1 + problem.state) * x.trainable for x in own))
        found[placement[0]] += problem.given
        found[placement[-1]] += problem.targets
        if not problem.has_loss:
            found[placement[-1]] += OUTSIDE * m * stages[-1].output
            for j, (w, stage) in enumerate(zip(placement, stages[:-1])):
                found[w] += (EARLY if j else EARLY_AT_FIRST) * stage.gets
        return found

    def sent(
        self,
        balance: tuple[int, ...],
        m: int,
        placement: tuple[int, ...],
        modes: Sequence[Keeping],
    ) -> list[Departure]:
        """Count what leaves of a cell of each stage, and how long its copies take."""
        links, found = self.problem.links, []
        for w, stage, mode in zip(placement, self.stages(balance, m), modes):
            offload = offload_of(mode)
            if offload is None or (w, HOST) not in links:
                found.append(Departure())
                continue
            away = offload.share * stage.kept
            out, back = (links[way].at(away) for way in ((w, HOST), (HOST, w)))
            found.append(Departure(away, out, back))
        return found

    def _table(
        self, setting: Setting, balance: tuple[int, ...], modes: tuple[Keeping, ...]
    ) -> Table:
        """The costs of a setting whose cells leave as modes say."""
        placement, m = setting.schedule.placement, setting.schedule.chunks
        links, count = self.problem.links, len(modes)
        if any(map(offload_of, modes)):
            plain = self.table(setting, balance, ("never",) * count)
            away, out, back = map(list, zip(*self.sent(balance, m, placement, modes)))
            return plain.leaving(away, out, back, [1] * count)
        if {*modes} != {"never"}:
            return self.table(setting, balance, ("never",) * count)
        stages, times = self.each(balance, setting)
        copy = {way: 0.0 for j in range(1, count) for way in ((j - 1, j), (j, j - 1))}
        #: By stage, the time of the clones of what it sends: of values, and of gradients.
        there, back = ([0.0] * count for _ in range(2))
        for j, k, size, gradient in self.ways(balance, m):
            for clones, a, b, x in ((there, j, k, size), (back, k, j, gradient)):
                w, v = placement[a], placement[b]
                if x and w != v:
                    # Each part has a lane of its own: there, and its gradient back.
                    copy[a, b] = max(copy.get((a, b), 0.0), links.get((w, v), Line()).at(x))
                    clones[a] += links.get((w, w), Line()).at(x)
        slow = [self.problem.slowness[w] for w in placement]
        each = [[s * y for s, y in zip(slow, x)] for x in zip(*times)]
        forward, input = ([*map(add, *x)] for x in zip(each, (there, back)))
        costs = Costs(
            *(forward, input, each[2], each[3], copy),
            activation=[x.kept for x in stages],
            pending=[x.pending for x in stages],
            checkpoint=[x.stored for x in stages],
        )
        return Table(costs, placement, self.skips(balance, m))
