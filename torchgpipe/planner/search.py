"""The search: balances, chunks, checkpoints and schedules, simulated under each device's memory.

There are too many to try all. So each schedule, at each number of micro-batches, begins with the
balance whose slowest partition is fastest, and with the modes that fit there: cells keep less,
those first that free the most memory for their time, until all fits, and then some keep more. From
the fastest of these on, one layer is moved at a time, again with the modes that fit, as long as
that helps.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache
from itertools import accumulate
from math import inf
from operator import attrgetter

from torchgpipe.planner.cuts import cut, others
from torchgpipe.planner.problem import Problem
from torchgpipe.planner.trial import Setting, Trial, Trials, settings

__all__: list[str] = []

#: What cells may keep, the most first.
MODES = ("never", "except_last", "always")

#: How many instructions are timed, in all trials together, before nothing more is improved. A
#: million took about 0.8 seconds when this was set. To count the memory of one takes three times as
#: long, and to find out what it waits for 25 times.
EFFORT = 50_000_000

#: How many times the time of the fastest one a setting may take, with its first balance and nothing
#: computed again, to be improved.
HOPE = 1.5


class Search(Trials):
    """The search for the best trials of a problem."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self.even = cache(self._even)

    def begun(self, setting: Setting) -> Trial:
        """The first trial of a setting: the fastest slowest partition, and as much kept as fits."""
        balance = self.even(setting.schedule.chunks, setting.schedule.placement)
        if self.problem.modes is not None:
            return self.trial(setting, balance, self.problem.modes)
        best = self.fitted(self.fastest(setting, balance))
        if "always" in best.modes:
            found = self.fitted(self.trial(setting, balance, ("always",) * len(balance)))
            best = found if found.beats(best) else best
        return best

    def _even(self, m: int, placement: tuple[int, ...]) -> tuple[int, ...]:
        """The balance whose slowest partition is fastest."""
        problem, count, rows = self.problem, len(placement), self.rows(m)
        #: The time of all layers before each, that of their forwards, and their weights' memory.
        times = [*accumulate([x.time(rows) for x in problem.layers], initial=0.0)]
        again = [*accumulate([x.times(rows).forward for x in problem.layers], initial=0.0)]
        own = [x.weights for x in problem.layers]
        each = [x.all + (1 + problem.state) * x.trainable for x in own]
        sizes = [*accumulate(each, initial=0.0)]

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
                return 2 * times[-1] * filled
            is_again = problem.modes is not None and problem.modes[j] != "never"
            return times[end] - times[start] + (again[end] - again[start] if is_again else 0.0)

        return tuple(cut(problem.count, count, cost))

    def fitted(self, trial: Trial, than: Trial | None = None) -> Trial:
        """Keep less until all fits, and then more where that is faster and fits.

        It ends early once the trial cannot become faster than another one that fits. Modes that are
        given stay.
        """
        if self.problem.modes is not None:
            return trial
        count = 1
        while trial.excess and not (than and not than.excess and trial.time >= than.time):
            less = self._less(trial, count)
            if less == trial.modes:
                return trial
            trial, count = self.trial(trial.setting, trial.balance, less), 2 * count
        for j in range(len(trial.modes)) if not trial.excess else ():
            for mode in MODES[: MODES.index(trial.modes[j])]:
                modes = (*trial.modes[:j], mode, *trial.modes[j + 1 :])
                more = self.trial(trial.setting, trial.balance, modes)
                if more.beats(trial):
                    trial = more
                    break
        return trial

    def _less(self, trial: Trial, count: int) -> tuple[str, ...]:
        """The modes of which some, of each worker that has too little memory, keep less."""
        setting, modes = trial.setting, [*trial.modes]
        stages = self.stages(trial.balance, setting.schedule.chunks)
        found: list[list[tuple[float, int]]] = [[] for _ in trial.memory]
        for j, (w, stage) in enumerate(zip(setting.schedule.placement, stages)):
            less = stage.kept - stage.stored
            if less > 0 and modes[j] != "always":
                found[w].append((stage.durations(splits=setting.splits)[3] / less, j))
        for own, size, limit in zip(found, trial.memory, self.problem.memory):
            for _, j in sorted(own)[:count] if size > limit else ():
                modes[j] = "always"
        return tuple(modes)

    def improved(self, trial: Trial) -> Trial:
        """Change the balance as long as that helps, each time with the modes that fit."""
        found: Trial | None = trial
        while found is not None:
            trial = found
            tried = (self.fitted(x, trial) for x in self._beside(trial))
            found = next((x for x in tried if x.beats(trial)), None)
        return trial

    def fastest(self, setting: Setting, balance: tuple[int, ...]) -> Trial:
        """The trial of which nothing is computed again."""
        return self.trial(setting, balance, ("never",) * len(balance))

    def _beside(self, trial: Trial) -> Iterator[Trial]:
        """Yield trials with another balance, of which those that cannot be better are left out."""
        setting, placement = trial.setting, trial.setting.schedule.placement
        fullest = trial.memory.index(max(trial.memory)) if 0 < trial.excess < inf else None
        for balance in map(tuple, others(trial.balance)):
            if self.effort > EFFORT:
                return
            if fullest is not None:
                # Only the fullest worker's loss of a layer makes anything fit.
                pairs = zip(trial.balance, balance, placement)
                is_hopeful = any(y < x for x, y, w in pairs if w == fullest)
            else:
                # Nothing is faster than without recomputation.
                is_hopeful = trial.excess > 0 or (self.fastest(setting, balance).time < trial.time)
            if is_hopeful:
                yield self.trial(setting, balance, trial.modes)


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
