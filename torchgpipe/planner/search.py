"""The search: balances, chunks, checkpoints and schedules, simulated under each device's memory.

There are too many to try all. So each schedule, at each number of micro-batches, begins with the
balance whose slowest partition is fastest. Where not all fits, cells keep less: they are computed
again, or leave for the memory of the host, those first that free the most memory for their time,
or all of them, of which some then keep more. From the best of these, one layer is moved at a time,
as long as that helps, or all balances are tried if they are few. At last the fastest are looked at
closely, with all that cells may keep at each balance.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache
from itertools import accumulate
from math import inf
from operator import attrgetter, itemgetter

from torchgpipe.partition.keeping import (
    Keeping,
    keepings_of,
    offload_of,
    recomputed_by,
)
from torchgpipe.planner.cuts import cut, others
from torchgpipe.planner.problem import Problem
from torchgpipe.planner.trial import Departure, Setting, Trial, Trials, settings
from torchgpipe.schedule.trips import trips

__all__: list[str] = []

#: How many instructions are timed, in all trials together, before nothing more is improved. A
#: million took about 0.8 seconds when this was set. To count the memory of one took three times as
#: long, and to find out what it waits for 45 times, or 20 times with other recomputations.
EFFORT = 50_000_000

#: How many times the time of the fastest one a setting may take, with the first balance and nothing
#: computed again, to be improved.
HOPE = 1.5

#: How many times the time of the fastest one a trial may take, to be looked at closely. For an
#: AmoebaNet-D on eight devices, the best one came from a trial that took 7 % more than the fastest.
NEAR = 1.1


class Search(Trials):
    """The search for the best trials of a problem."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self.even = cache(self._even)
        self.leaving = cache(self._leaving)

    def begun(self, setting: Setting) -> Trial:
        """The first trial of a setting: the fastest slowest partition, and as much kept as fits."""
        balance = self.even(setting.schedule.chunks, setting.schedule.placement)
        count = len(balance)
        best = self.trial(setting, balance, self._given(count) or ("never",) * count)
        if best.excess and self.problem.modes is None:
            sends = ["offload"] if self.leaving(setting) else []
            found = [self.lighter(best), self.lighter(best, sends=True)]
            found += [self.trial(setting, balance, (x,) * count) for x in (*sends, "always")]
            for trial in found:
                best = self.keeping_more(trial) if trial.beats(best) else best
        return best

    def _even(self, m: int, placement: tuple[int, ...]) -> tuple[int, ...]:
        """The balance whose slowest partition is fastest."""
        problem, count, rows = self.problem, len(placement), self.rows(m)
        #: The time of all layers before each, that of their forwards, and their weights' memory.
        times = [*accumulate([x.time(rows) for x in problem.layers], initial=0.0)]
        again = [*accumulate([x.forward.at(rows) for x in problem.layers], initial=0.0)]
        own = [x.weights for x in problem.layers]
        each = [x.all + (1 + problem.state) * x.trainable for x in own]
        sizes, given = [*accumulate(each, initial=0.0)], self._given(count)

        def cost(j: int, start: int, stop: int) -> float:
            w, end = placement[j], stop + (problem.has_loss and j == count - 1)
            # Where a worker has several partitions, the other layer may be in another of them.
            if placement.count(w) == 1 and any(
                (start <= a < end) != (start <= b < end) for a, b in problem.ties
            ):
                return inf
            filled = (sizes[end] - sizes[start]) / problem.memory[w]
            if filled > 1:
                # More than whatever fits. If nothing does, the one that needs the least fits first.
                return 2 * times[-1] * max(problem.slowness) * filled
            time = times[end] - times[start]
            if given and recomputed_by(given[j]) != "never":
                time += again[end] - again[start]
            return time * problem.slowness[w]

        return tuple(cut(problem.count, count, cost))

    def _given(self, count: int) -> tuple[Keeping, ...]:
        """The checkpoint modes of ``count`` partitions, if they are given and not searched."""
        return () if self.problem.modes is None else keepings_of(self.problem.modes, count)

    def lighter(self, trial: Trial, *, sends: bool = False) -> Trial:
        """Keep less until all fits, and first of what frees the most memory for its time.

        What cells keep may leave for the host, too. Modes that are given stay.
        """
        placement, count = trial.setting.schedule.placement, 1
        while trial.excess and self.problem.modes is None:
            modes = [*trial.modes]
            for w, (size, limit) in enumerate(zip(trial.memory, self.problem.memory)):
                # Some of each worker that has too little memory.
                own = [j for j, v in enumerate(placement) if v == w and size > limit]
                less = [x for j in own if (x := self._less(trial, j, sends)) is not None]
                for _, j, mode in sorted(less, key=itemgetter(0))[:count]:
                    modes[j] = mode
            if modes == [*trial.modes]:
                break
            count *= 2
            trial = self._with(trial, tuple(modes))
        return trial

    def _less(self, trial: Trial, j: int, sends: bool) -> tuple[float, int, Keeping] | None:
        """The mode of a stage that keeps less, with the time that each freed byte costs."""
        stages, times = self.each(trial.balance, trial.setting)
        less, found = stages[j].kept - stages[j].stored, list[tuple[float, int, Keeping]]()
        if less > 0 and trial.modes[j] != "always":
            found.append((times[j].R / less, j, "always"))
        sent = self._sent(trial, j) if sends and trial.modes[j] == "never" else None
        if sent is not None:
            late = max(0.0, sent.out - times[j].F) + max(0.0, sent.back - times[j].I - times[j].W)
            found.append((late / sent.away, j, "offload"))
        return min(found, key=itemgetter(0), default=None)

    def _sent(self, trial: Trial, j: int) -> Departure | None:
        """The way of the cells of a stage to the host and back, if that may pay."""
        setting, balance = trial.setting, trial.balance
        if j not in self.leaving(setting):
            return None
        m, placement = setting.schedule.chunks, setting.schedule.placement
        slow, (_, times) = self.problem.slowness[placement[j]], self.each(balance, setting)
        sent = self.sent(balance, m, placement, ["never"] * j + ["offload"])[j]
        # What takes longer delays a step by more than it takes to compute all again.
        is_fast = sent.away and max(sent.out, sent.back) <= 2 * slow * times[j].F
        return sent if is_fast else None

    def _leaving(self, setting: Setting) -> frozenset[int]:
        """The stages of which some cells can leave: enough lies between forward and backward."""
        every = [1] * len(setting.schedule.placement)
        return frozenset(x.stage for line in setting.schedule.program for x in trips(line, every))

    def improved(self, trial: Trial, *, closely: bool = False) -> Trial:
        """Change the balance as long as that helps.

        Closely, each balance is tried with all that cells may keep then, and not with these modes.
        """
        found: Trial | None = trial
        while found is not None:
            trial = found if closely else self.keeping_more(found)
            beside = self._beside(trial, closely)
            tried = (self.keeping_more(x, trial) for x in beside) if closely else beside
            found = next((x for x in tried if x.beats(trial)), None)
        return trial

    def keeping_more(self, trial: Trial, than: Trial | None = None) -> Trial:
        """Try other modes for each partition of a trial that fits, where it does not keep all.

        It may end early once the trial cannot become faster than another one, which fits.
        """
        if not trial.fits or self.problem.modes is not None:
            return trial
        for j, mode in enumerate(trial.modes):
            if mode == "never":
                continue
            # Nothing is faster than to keep all: here, and in all partitions from here on.
            before, after = trial.modes[:j], trial.modes[j + 1 :]
            least = self._with(trial, (*before, *("never",) * (1 + len(after))))
            if than is not None and least.time >= than.time:
                break
            more = self._with(trial, (*before, "never", *after))
            if more.beats(trial):
                trial = more
            elif more.time < trial.time:
                lighter = ["offload"] if self._sent(trial, j) is not None else []
                for other in (*lighter, "except_last"):
                    more = self._with(trial, (*before, other, *after))
                    trial = more if more.beats(trial) else trial
        return trial

    def fastest(self, setting: Setting, balance: tuple[int, ...]) -> Trial:
        """The trial of which nothing is computed again."""
        return self.trial(setting, balance, ("never",) * len(balance))

    def _with(self, trial: Trial, modes: tuple[Keeping, ...]) -> Trial:
        return self.trial(trial.setting, trial.balance, modes)

    def _beside(self, trial: Trial, closely: bool) -> Iterator[Trial]:
        """Yield trials with another balance, of which those that cannot be better are left out."""
        setting, placement = trial.setting, trial.setting.schedule.placement
        sends = any(map(offload_of, trial.modes))
        fullest = trial.memory.index(max(trial.memory)) if 0 < trial.excess < inf else 0
        for balance in others(trial.balance):
            if self.effort > EFFORT:
                return
            if 0 < trial.excess < inf:
                # Only the fullest worker's loss of a layer makes anything fit.
                pairs = zip(trial.balance, balance, placement)
                is_hopeful = any(y < x for x, y, w in pairs if w == fullest)
            else:
                # Nothing is faster than without recomputation.
                is_hopeful = trial.excess > 0 or (
                    self.fastest(setting, tuple(balance)).time < trial.time
                )
            if is_hopeful:
                found = self.trial(setting, tuple(balance), trial.modes)
                # To keep less takes no less time.
                if closely or trial.excess or found.time < trial.time:
                    yield self.lighter(found, sends=sends)


def search(problem: Problem, chunks: Iterable[int]) -> list[Trial]:
    """Find the fastest trials that fit, one for each schedule and number of micro-batches.

    Returns:
        The trials: those that fit before those that do not, the fastest first.

    Raises:
        ValueError: no trial keeps layers together that share a weight.
    """
    found = Search(problem)
    begun = [found.begun(x) for x in settings(problem, chunks)]
    best = min(begun, key=attrgetter("key"))
    ranked = []
    for trial in sorted(begun, key=lambda x: (x.excess > 0, x.time)):
        if best.excess or found.fastest(trial.setting, trial.balance).time < HOPE * best.time:
            trial = found.improved(trial)
            best = min(best, trial, key=attrgetter("key"))
        ranked.append(trial)
    if not best.excess:
        # Compared with the fastest one before: others may become as much faster as it does.
        ranked = [
            found.improved(x, closely=True) if x.time < NEAR * best.time and not x.excess else x
            for x in sorted(ranked, key=attrgetter("key"))
        ]
    trials = sorted([x for x in ranked if x.excess < inf], key=attrgetter("key"))
    if not trials:
        a, b = problem.ties[0]
        raise ValueError(
            "layers that share a weight must be on one device, and no plan has them so, since each "
            f"partition has a device of its own (layers: {a} and {b}); pass a balance and devices "
            "by hand, such as devices=[0, 1, 0] with the last layers on the device of the first "
            f"ones{'' if problem.has_loss else ', or plan with a loss, for schedules that do so'}"
        )
    return trials
