"""The search: for each schedule, the balance and the modes that are fastest, and fit into memory.

There are too many balances to try all. So each schedule, at each number of micro-batches, begins
with the balance whose slowest partition is fastest. From there one layer at a time is moved, as
long as that helps. Each balance has the modes that fit and compute the least again
(``Setting.fitted``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from math import inf

from torchgpipe.planner.cuts import cut, others
from torchgpipe.planner.problem import Problem
from torchgpipe.planner.trial import Setting, Trial, settings

__all__: list[str] = []

#: The search of a schedule ends when the simulator has gone through so many instructions. A million
#: took about a second when this was set.
EFFORT = 1_000_000

#: A schedule is not searched if its step with the first balance, recomputation aside, takes more
#: than this many times the fastest step so far.
HOPE = 1.5


def search(problem: Problem, chunks: Iterable[int], limits: Sequence[float]) -> list[Trial]:
    """Find the best trial of each schedule and number of micro-batches, under predicted peaks.

    Those that fit come before those that do not, the fastest first.
    """
    begun = [x.fitted(_even(x), limits) for x in settings(problem, chunks)]
    best = min(begun, key=lambda x: x.rank(limits))
    trials = []
    for trial in sorted(begun, key=lambda x: (x.over(limits) > 0, x.time)):
        if best.over(limits) or Trial(trial.setting, trial.balance).time < HOPE * best.time:
            trial = _improved(trial, limits)
            best = min(best, trial, key=lambda x: x.rank(limits))
        trials.append(trial)
    trials = sorted([x for x in trials if x.over(limits) < inf], key=lambda x: x.rank(limits))
    if not trials:
        a, b = problem.ties[0]
        raise ValueError(
            "layers that share a weight must be on one device, and no plan has them so, since each "
            f"partition has a device of its own (layers: {a} and {b}); pass a balance and devices "
            "by hand, such as devices=[0, 1, 0] with the last layers on the device of the first "
            f"ones{'' if problem.has_loss else ', or plan with a loss, for schedules that do so'}"
        )
    return trials


def search_again(trial: Trial, limits: Sequence[float]) -> Trial:
    """Search the setting of a trial under other limits, from the trial's balance and its first."""
    setting = trial.setting
    if min(limits) == inf:
        return trial
    starts = {trial.balance, _even(setting)}
    trials = [_improved(setting.fitted(x, limits), limits) for x in sorted(starts)]
    return min(trials, key=lambda x: x.rank(limits))


def _even(setting: Setting) -> tuple[int, ...]:
    """The balance whose slowest partition is fastest."""
    problem, placement = setting.problem, setting.placement
    count, rows = len(placement), problem.rows(setting.chunks)
    # Sums over the first k layers, so that a range of layers costs a subtraction.
    times = [*accumulate([x.time(rows) for x in problem.layers], initial=0.0)]
    forwards = [*accumulate([x.at(rows).forward for x in problem.layers], initial=0.0)]
    weights = [x.weights.all + (1 + problem.state) * x.weights.trainable for x in problem.layers]
    sizes = [*accumulate(weights, initial=0.0)]

    def cost(j: int, start: int, stop: int) -> float:
        w, end = placement[j], stop + (problem.has_loss and j == count - 1)
        # Layers that share a weight must be on one worker. A worker with several partitions may
        # have the two layers in different ones, so this is for workers with one partition.
        if placement.count(w) == 1 and any(
            (start <= a < end) != (start <= b < end) for a, b in problem.ties
        ):
            return inf
        filled = (sizes[end] - sizes[start]) / problem.memory[w]
        if filled > 1:
            # The weights alone do not fit. This costs more than any partition that fits, and the
            # more they need, the more it costs.
            return 2 * times[-1] * filled
        is_again = problem.modes is not None and problem.modes[j] != "never"
        return times[end] - times[start] + (forwards[end] - forwards[start] if is_again else 0.0)

    return tuple(cut(problem.count, count, cost))


def _improved(trial: Trial, limits: Sequence[float]) -> Trial:
    """Change the balance as long as that helps, each time with the modes that fit."""
    setting = trial.setting
    most = setting.effort + EFFORT
    better: Trial | None = trial
    while better is not None and setting.effort < most:
        trial = better
        better = next((x for x in _near(trial, limits) if _is_better(x, trial, limits)), None)
    return trial


def _near(trial: Trial, limits: Sequence[float]) -> Iterator[Trial]:
    """Yield trials with another balance, but for those that cannot be better."""
    for balance in map(tuple, others(trial.balance)):
        # No step takes less than its busiest worker computes.
        if trial.over(limits) or Trial(trial.setting, balance).least < trial.time:
            yield trial.setting.fitted(balance, limits)


def _is_better(trial: Trial, than: Trial, limits: Sequence[float]) -> bool:
    """Whether a trial fits, or is nearer to it, or is faster; it is timed only if need be."""
    if over := than.over(limits):
        return trial.over(limits) < over
    return not trial.over(limits) and trial.time < than.time
