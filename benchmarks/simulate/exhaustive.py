"""An exhaustive search: every schedule, cut and mode, or a bound that excludes it.

A cut grows stage by stage. It ends as soon as a bound of its time, or of the memory of a worker,
says that nothing that begins so is fast enough and fits. As soon as all stages of a worker are
known, they get the modes with which they may fit. A mode is left out where a faster one may fit,
too, unless that turns out not to fit after all: then the cut is looked at again, with all modes.

What no bound excludes is simulated as the planner does it. The fastest one so far is what others
have to beat.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache, partial
from itertools import pairwise, product
from math import comb, inf
from typing import NamedTuple

import numpy as np

from benchmarks.simulate.bounds import KEEPING, Bounds, Costs, Numbers
from torchgpipe.partition.keeping import Keeping
from torchgpipe.planner.trial import Setting, Trial, Trials, settings

__all__ = ["Searched", "exhausted"]

#: As many cuts are bounded at once, and as many bounds are found before a schedule is given up.
AT_ONCE, MOST = 4096, 4_000_000

#: The ways to send cells to the host, of which there is one bound.
SENDING: tuple[Keeping, ...] = ("offload",)

#: By the number of a mode, those that are as fast at least, and need as much memory.
FASTER = {0: (0,), 1: (0, 1), 2: (0, 1, 2), 3: (0, 3)}


class Searched(NamedTuple):
    """The result of a search.

    Attributes:
        settings: how many there are: schedules, cuts and modes.
        bounded: of how many cuts, or beginnings of one, a bound was found.
        simulated: how many settings were simulated, since no bound excluded them.
        best: the fastest one that fits and beats what was given, if there is one.
        unfinished: the schedules with too many cuts to look at all.
    """

    settings: int
    bounded: int
    simulated: int
    best: Trial | None
    unfinished: list[str]


def exhausted(trials: Trials, chunks: Sequence[int], slowest: float, room: float) -> Searched:
    """Find the fastest of all settings, if it fits and beats some time.

    Args:
        trials: the problem.
        chunks: the numbers of micro-batches.
        slowest: the milliseconds that a step has to stay below.
        room: the bytes of each device.
    """
    costs = cache(partial(Costs, trials))
    ways, count = 3 + len(SENDING), trials.problem.count
    trees: list[Tree] = []
    best: Trial | None = None
    for setting in settings(trials.problem, chunks):
        own = costs(setting.schedule.chunks, setting.splits)
        trees.append(tree := Tree(trials, setting, own, slowest, room))
        best = tree.search() or best
        slowest = tree.slowest
    return Searched(
        sum(comb(count - 1, x.stages - 1) * ways**x.stages for x in trees),
        sum(x.bounded for x in trees),
        sum(x.simulated for x in trees),
        best,
        [f"{x.setting.name} of {x.stages} stages" for x in trees if x.is_cut_short],
    )


class Tree:
    """The cuts and modes of one schedule.

    Args:
        trials: the problem.
        setting: the schedule.
        costs: what partitions take.
        slowest: the time that a step has to stay below.
        room: the bytes of each device.
    """

    def __init__(
        self, trials: Trials, setting: Setting, costs: Costs, slowest: float, room: float
    ) -> None:
        self._trials, self.setting, self._room = trials, setting, room
        self._bounds = Bounds(setting, costs)
        self.slowest, self.stages = slowest, self._bounds.stages
        self.bounded, self.simulated, self.is_cut_short = 0, 0, False
        place = self._bounds.placement
        self._last = {max(j for j, x in enumerate(place) if x == w) for w in place}
        self._best: Trial | None = None
        #: The cuts that were looked at with all modes.
        self._closely: set[tuple[int, ...]] = set()

    def search(self) -> Trial | None:
        """Find the fastest one that fits and beats the time, and make that the time to beat."""
        for ends, modes, bound in self._leaves():
            if bound >= self.slowest:
                continue
            cut = (*map(int, ends),)
            if not self._settles(cut, modes) and cut not in self._closely:
                # What needs less memory may fit.
                self._closely.add(cut)
                for _, lighter, least in self._leaves(cut):
                    if least < self.slowest:
                        self._settles(cut, lighter)
        return self._best

    def _settles(self, cut: Sequence[int], modes: Numbers) -> bool:
        """Simulate a cut with some modes: whether it is too slow, or fits and is the best now."""
        balance = tuple([b - a for a, b in pairwise(cut)])
        ways = [SENDING if k == 3 else (KEEPING[k],) for k in modes]
        settled = True
        for words in product(*ways):
            trial = self._trials.trial(self.setting, balance, words)
            self.simulated += 1
            if trial.time < self.slowest:
                settled = max(trial.memory) <= self._room
                if settled:
                    self._best, self.slowest = trial, trial.time
                elif len(ways) > 1:
                    # Another way to send needs as much memory, or more.
                    break
        return settled

    def _leaves(
        self, only: Sequence[int] | None = None
    ) -> Iterator[tuple[Numbers, Numbers, float]]:
        """Yield the ends of the stages of each whole cut that is left, its modes and its bound.

        Args:
            only: the only cut to look at, then with all modes that may fit.
        """
        first = np.zeros((1, 1), np.intp)
        stack = [(first, first[:, 1:], np.zeros(1, np.float32))]
        while stack:
            ends, modes, bound = stack.pop()
            if ends.shape[1] > self.stages:
                yield from zip(ends, modes, map(float, bound))
                continue
            if self.bounded > MOST:
                self.is_cut_short = True
                return
            is_left = bound < self.slowest
            ends, modes, bound = self._grown(ends[is_left], modes[is_left], only)
            order = np.argsort(bound)
            parts = [order[k : k + AT_ONCE] for k in range(0, len(order), AT_ONCE)]
            # The fastest come first.
            stack += [(ends[x], modes[x], bound[x]) for x in reversed(parts)]

    def _grown(
        self, ends: Numbers, modes: Numbers, only: Sequence[int] | None
    ) -> tuple[Numbers, Numbers, Numbers]:
        """The cuts with one more stage that no bound excludes, and the bounds of their times."""
        bounds, j = self._bounds, ends.shape[1] - 1
        count, left = bounds.costs.count, self.stages - j - 1
        begin = ends[:, -1]
        if only is not None:
            origin, end = np.arange(len(ends)), np.full(len(ends), only[j + 1])
        else:
            ways = count - left - begin if left else np.ones_like(begin)
            origin = np.repeat(np.arange(len(ends)), ways)
            number = np.arange(len(origin)) - np.repeat(np.cumsum(ways) - ways, ways)
            end = begin[origin] + 1 + number if left else np.full(len(origin), count)
        ends = np.concatenate([ends[origin], end[:, None]], 1)
        modes = np.concatenate([modes[origin], np.zeros((len(origin), 1), np.intp)], 1)
        ends, modes = self._within(ends, modes)
        if self._room < inf and j in self._last:
            all_of_them = only is not None
            ends, modes = self._fitting(bounds.placement[j], ends, modes, all_of_them=all_of_them)
        parts = range(0, len(ends), AT_ONCE)
        found = [bounds.time(ends[k : k + AT_ONCE], modes[k : k + AT_ONCE]) for k in parts]
        bound = np.concatenate([np.zeros(0, np.float32), *found])
        is_left = bound < self.slowest
        return ends[is_left], modes[is_left], bound[is_left]

    def _within(self, ends: Numbers, modes: Numbers) -> tuple[Numbers, Numbers]:
        """Leave out what loads a worker too much, or leaves too much to those with more stages."""
        bounds, known = self._bounds, ends.shape[1] - 1
        self.bounded += len(ends)
        free = self.slowest - bounds.loads(ends)
        is_left = (free >= 0).all(1)
        if known < self.stages:
            rest = bounds.costs.of["all"][ends[:, -1], bounds.costs.count]
            is_left &= free[:, [*{*bounds.placement[known:]}]].sum(1) >= rest
        return ends[is_left], modes[is_left]

    def _fitting(
        self, w: int, ends: Numbers, modes: Numbers, *, all_of_them: bool
    ) -> tuple[Numbers, Numbers]:
        """Give the stages of a worker, which all are known, each of the modes that may fit."""
        own = [j for j in range(modes.shape[1]) if self._bounds.placement[j] == w]
        fits: dict[tuple[int, ...], Numbers] = {}
        parts = [(ends[:0], modes[:0])]
        free = self.slowest - self._bounds.loads(ends)[:, w]
        for mode in _combinations(len(own)):
            needless = np.zeros(len(ends), bool)
            for x in () if all_of_them else product(*[FASTER[k] for k in mode]):
                needless |= fits.get(x, False)
            fits[mode] = np.zeros(len(ends), bool)
            again, out = self._bounds.more(ends, dict(zip(own, mode)))
            rest = np.flatnonzero(~needless & (again <= free) & (out < self.slowest))
            self.bounded += len(rest)
            if len(rest):
                most = self._bounds.memory(w, ends[rest], mode)
                fits[mode][rest[most <= self._room]] = True
                changed = modes[fits[mode]]
                changed[:, own] = mode
                parts.append((ends[fits[mode]], changed))
        found, given = zip(*parts)
        return np.concatenate(found), np.concatenate(given)


@cache
def _combinations(count: int) -> list[tuple[int, ...]]:
    """The modes of so many stages, each after those that are faster."""
    every = product(range(len(KEEPING)), repeat=count)
    return sorted(every, key=lambda x: sum(len(FASTER[k]) for k in x))
