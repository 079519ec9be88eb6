"""The search: balances, chunks, checkpoints and schedules, simulated under each device's memory.

There are too many to try all. So each schedule, at each number of micro-batches, begins with the
balance whose slowest partition is fastest. Partitions that do not fit are computed again, those
first that free the most memory for their time. The fastest few are then improved, by moving one
layer at a time, as long as that helps, or by all balances if these are few.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, lru_cache
from itertools import accumulate, pairwise
from math import inf
from typing import NamedTuple

import torch

from torchgpipe.planner.cuts import cut, others
from torchgpipe.planner.layers import LayerCosts, Line
from torchgpipe.planner.memory import Issued, LossMemory, issued, peaks, ways
from torchgpipe.planner.record import Sizes
from torchgpipe.planner.stage_memory import Stage
from torchgpipe.schedule.candidates import built_in
from torchgpipe.schedule.costs import Costs, Table
from torchgpipe.schedule.language import Schedule
from torchgpipe.schedule.looped import fill_drain
from torchgpipe.schedule.program import Overlap, Skips
from torchgpipe.schedule.rewrite import checkpointed
from torchgpipe.schedule.simulator import Rehearsal

__all__ = ["Problem", "Search", "Setting", "Trial", "search"]

#: How many instructions are timed, in all trials together, before nothing more is improved. A
#: million take about 0.8 seconds. To count the memory of one takes three times as long, and to find
#: out what it waits for 45 times.
EFFORT = 50_000_000
#: How many times the time of the fastest one a setting may take, with the first balance and nothing
#: computed again, to be improved.
HOPE = 1.5

#: A loss that is not known keeps as much as its input, as differences, and a gradient.
LOSS = LossMemory(2, 2)


@dataclass(frozen=True, eq=False)
class Problem:
    """A model to plan, and the devices to plan it for.

    Args:
        layers: its layers; after them the loss, if the schedule has it inside.
        sizes: the memory that these take.
        has_loss: whether the last layer is the loss.
        batch: the rows of a mini-batch.
        places: the device of each worker.
        memory: the bytes that each worker may use.
        slowness: by which factor each worker is slower than the one that was measured.
        links: the time of a copy between each pair of workers, by the bytes.
        state: memory of the optimizer, for each byte of a parameter that it changes.
        given: memory of the input of a mini-batch.
        targets: memory of the targets of a mini-batch.
        modes: the checkpoint modes, one for all partitions or one for each, if they are given; None
            to search them.
        ties: pairs of layers that share a weight, so they must be on one worker.
    """

    layers: Sequence[LayerCosts]
    sizes: Sizes
    has_loss: bool
    batch: int
    places: Sequence[torch.device]
    memory: Sequence[float]
    slowness: Sequence[float]
    links: dict[tuple[int, int], Line]
    state: float
    given: float
    targets: float
    modes: str | tuple[str, ...] | None = None
    ties: Sequence[tuple[int, int]] = ()

    @property
    def count(self) -> int:
        """The number of layers, without the loss."""
        return len(self.layers) - self.has_loss


@dataclass(frozen=True, eq=False)
class Setting:
    """A schedule before it has modes of checkpointing.

    Args:
        name: its name; None for the order of :class:`~torchgpipe.GPipe`, under autograd.
        schedule: the schedule.
    """

    name: str | None
    schedule: Schedule


@dataclass(frozen=True, eq=False)
class Trial:
    """A setting with a balance and modes, as it was simulated.

    Args:
        problem: what was measured.
        setting: the setting.
        balance: the number of layers of each partition, without the loss.
        modes: the checkpoint mode of each partition.
        schedule: the schedule, with its recomputations.
        costs: the costs of its stages, in milliseconds.
        time: the simulated time of a step, in milliseconds.
        memory: the most memory of each worker, in bytes.
        excess: by how many bytes the fullest worker has too little; 0 if all fit, and infinite if
            layers are apart that share a weight.
    """

    problem: Problem = field(repr=False)
    setting: Setting
    balance: tuple[int, ...]
    modes: Sequence[str]
    schedule: Schedule = field(repr=False)
    costs: Costs = field(repr=False)
    time: float
    memory: Sequence[float]
    excess: float

    @property
    def key(self) -> tuple[float, float, float]:
        """The place in a ranking: what fits, then what is fast, then what needs little."""
        return self.excess, self.time, max(self.memory)

    @property
    def checkpoint(self) -> str | list[str]:
        """The mode of all partitions, or a list with one for each."""
        return self.modes[0] if len({*self.modes}) == 1 else [*self.modes]

    @property
    def devices(self) -> list[torch.device]:
        """The device of each partition."""
        return [self.problem.places[w] for w in self.schedule.placement]

    @cached_property
    def by_device(self) -> dict[torch.device, int]:
        """The most bytes of each device; workers of one device add up."""
        found = dict.fromkeys(self.problem.places[: len(self.memory)], 0)
        for place, size in zip(self.problem.places, self.memory):
            found[place] += round(size)
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
            if len(schedule.placement) <= problem.count and not overlaps:
                yield Setting(name, schedule)


class Durations(NamedTuple):
    """The milliseconds of each kind of computation of a partition."""

    F: float
    I: float  # noqa: E741  # The field's name for it.
    W: float
    R: float


class Search:
    """The search for the best trials of a problem."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.stage = cache(self._stage)
        self.times = cache(self._times)
        self.trial = cache(self._trial)
        self.even = cache(self._even)
        # Each has thousands of instructions.
        self.rehearsal = lru_cache(256)(self._rehearsal)
        self.fastest = cache(self._fastest)
        #: The number of instructions that could have been timed so far.
        self.effort = 0

    # What a partition takes.

    def _stage(self, start: int, stop: int, m: int) -> Stage:
        weights = [x.weights for x in self.problem.layers]
        return Stage(self.problem.sizes.at(self._rows(m)), weights, range(start, stop))

    def _times(self, start: int, stop: int, m: int) -> Durations:
        layers, rows, stage = self.problem.layers, self._rows(m), self.stage(start, stop, m)
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
        return Durations(sum(x.forward.at(rows) for x in own), input, weight, again)

    def _rows(self, m: int) -> int:
        """The rows of the largest micro-batch."""
        return -(-self.problem.batch // m)

    def _each(self, balance: Sequence[int], m: int) -> tuple[list[Stage], list[Durations]]:
        """The memory and the times of each partition."""
        ends = [*accumulate(balance, initial=0)]
        ends[-1] += self.problem.has_loss
        return (
            [self.stage(*x, m) for x in pairwise(ends)],
            [self.times(*x, m) for x in pairwise(ends)],
        )

    # What a setting takes.

    def _rehearsal(
        self, setting: Setting, modes: tuple[str, ...], skips: Skips
    ) -> tuple[Schedule, Rehearsal, Issued]:
        """The schedule of a setting with modes of checkpointing, ready to be timed.

        The last item is what the host issues, in an order that does not depend on what the layers
        cost.
        """
        base = setting.schedule
        program = checkpointed(base.program, modes, base.chunks)
        rehearsal = Rehearsal(program, skips)
        self.effort += 45 * len(rehearsal.steps)
        order = rehearsal.order(rehearsal.times(Table(Costs(), base.placement, skips))[0])
        return replace(base, program=program, skips=tuple(skips)), rehearsal, issued(order)

    def _fastest(self, setting: Setting, balance: tuple[int, ...]) -> float:
        """The time of a setting if nothing is computed again."""
        placement = setting.schedule.placement
        stages, times = self._each(balance, setting.schedule.chunks)
        skips = _skips(stages)
        _, rehearsal, _ = self.rehearsal(setting, ("never",) * len(stages), skips)
        self.effort += len(rehearsal.steps)
        return rehearsal.makespan(Table(self._costs(stages, times, placement), placement, skips))

    def _trial(self, setting: Setting, balance: tuple[int, ...], modes: tuple[str, ...]) -> Trial:
        problem, base = self.problem, setting.schedule
        stages, times = self._each(balance, base.chunks)
        costs = self._costs(stages, times, base.placement)
        schedule, rehearsal, order = self.rehearsal(setting, modes, _skips(stages))
        self.effort += 4 * len(rehearsal.steps)
        time = rehearsal.makespan(Table(costs, base.placement, schedule.skips))
        memory = self.peaks(order, base.placement, base.chunks, balance)
        excess = max(0.0, *(x - limit for x, limit in zip(memory, problem.memory)))
        # The loss is after the last layer, on the last worker.
        own = [w for size, w in zip(balance, base.placement) for _ in range(size)]
        own.append(base.placement[-1])
        if any(own[a] != own[b] for a, b in problem.ties):
            excess = inf
        return Trial(problem, setting, balance, modes, schedule, costs, time, memory, excess)

    def peaks(
        self, order: Issued, placement: Sequence[int], m: int, balance: Sequence[int]
    ) -> list[float]:
        """The most memory of each worker, if the host issues computations in an order."""
        problem = self.problem
        return peaks(
            order,
            placement,
            self._each(balance, m)[0],
            state=problem.state,
            given=problem.given,
            targets=problem.targets,
            is_summed=problem.has_loss,
            loss=None if problem.has_loss else LOSS,
        )

    def _costs(
        self, stages: Sequence[Stage], times: Sequence[Durations], placement: Sequence[int]
    ) -> Costs:
        copy = {way: 0.0 for j in range(1, len(stages)) for way in ((j - 1, j), (j, j - 1))}
        # Each part has a lane of its own: there, and its gradient back.
        for k, arrivals in enumerate(ways(stages)):
            for j, x in arrivals:
                w, v = placement[j], placement[k]
                if w != v:
                    for way, link, size in (((j, k), (w, v), x.size), ((k, j), (v, w), x.gradient)):
                        took = self.problem.links.get(link, Line()).at(size) if size else 0.0
                        copy[way] = max(copy.get(way, 0.0), took)
        slow = [self.problem.slowness[w] for w in placement]
        each = [[s * y for s, y in zip(slow, x)] for x in zip(*times)]
        return Costs(each[0], each[1], each[2], each[3], copy)

    # Which balance and modes are best.

    def begun(self, setting: Setting) -> Trial:
        """The first trial of a setting: the fastest slowest partition."""
        return self.fitted(setting, self.even(setting.schedule.chunks, setting.schedule.placement))

    def _even(self, m: int, placement: tuple[int, ...]) -> tuple[int, ...]:
        """The balance whose slowest partition is fastest."""
        problem, count, rows = self.problem, len(placement), self._rows(m)
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
            if given and given[j] != "never":
                time += again[end] - again[start]
            return time * problem.slowness[w]

        return tuple(cut(problem.count, count, cost))

    def _given(self, count: int) -> tuple[str, ...]:
        """The modes of so many partitions, if they are not to be searched."""
        modes = self.problem.modes
        return (modes,) * count if isinstance(modes, str) else modes or ()

    def fitted(self, setting: Setting, balance: Sequence[int]) -> Trial:
        """Compute again what does not fit, and first what frees the most for its time."""
        stages, times = self._each(balance, setting.schedule.chunks)
        given = self._given(len(stages))
        modes = [*given] or ["never"] * len(stages)
        best = trial = self.trial(setting, tuple(balance), tuple(modes))
        count = 1
        while trial.excess and not given:
            # Some of each worker that has too little memory.
            found: dict[int, list[tuple[float, int]]] = {}
            for j, w in enumerate(setting.schedule.placement):
                less = stages[j].held - sum(x.size for x in stages[j].arrivals if not x.is_kept)
                is_over = trial.memory[w] > self.problem.memory[w]
                if modes[j] == "never" and less > 0 and is_over:
                    found.setdefault(w, []).append((times[j].R / less, j))
            if not found:
                break
            for own in found.values():
                for _, j in sorted(own)[:count]:
                    modes[j] = "always"
            count *= 2
            trial = self.trial(setting, tuple(balance), tuple(modes))
            best = min(best, trial, key=_key)
        return best

    def improved(self, trial: Trial) -> Trial:
        """Change the balance as long as that helps, and compute less again at the end."""
        found: Trial | None = trial
        while found is not None:
            trial = found
            found = next(self._better(trial), None)
        for j, mode in enumerate(trial.modes if self.problem.modes is None else ()):
            if mode == "always" and not trial.excess:
                for other in ("never", "except_last"):
                    modes = (*trial.modes[:j], other, *trial.modes[j + 1 :])
                    less = self.trial(trial.setting, trial.balance, modes)
                    trial = min(trial, less, key=_key)
        return trial

    def _better(self, trial: Trial) -> Iterator[Trial]:
        """Yield trials that are better, with another balance."""
        placement = trial.schedule.placement
        fullest = max(range(len(trial.memory)), key=lambda w: trial.memory[w])
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
                    self.fastest(trial.setting, tuple(balance)) < trial.time
                )
            if is_hopeful:
                found = self.fitted(trial.setting, balance)
                if found.key < trial.key:
                    yield found


def _skips(stages: Sequence[Stage]) -> tuple[tuple[int, int], ...]:
    """The pairs of stages, apart from each other, from and to which some values go."""
    pairs = {(j, k) for k, own in enumerate(ways(stages)) for j, _ in own if k > j + 1}
    return tuple(sorted(pairs))


def _key(trial: Trial) -> tuple[float, float, float]:
    return trial.key


def search(problem: Problem, chunks: Iterable[int]) -> list[Trial]:
    """Find the fastest trials that fit, one for each schedule and number of micro-batches.

    Returns:
        The trials: those that fit before those that do not, the fastest first.
    """
    found = Search(problem)
    begun = [found.begun(x) for x in settings(problem, chunks)]
    best = min(begun, key=_key)
    ranked = []
    for trial in sorted(begun, key=lambda x: (x.excess > 0, x.time)):
        if best.excess or found.fastest(trial.setting, trial.balance) < HOPE * best.time:
            trial = found.improved(trial)
            best = min(best, trial, key=_key)
        ranked.append(trial)
    return sorted([x for x in ranked if x.excess < inf], key=_key)
