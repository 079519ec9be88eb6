"""Replays of a traced step in other settings, and whether these can be believed.

A replay of the step as it was must take the time that was measured. Otherwise something is going on
that the replay knows nothing of, and no advice is better than a wrong one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate

from torchgpipe.advice.figures import Figures
from torchgpipe.advice.modules import Modules
from torchgpipe.advice.replay import Host, replayed
from torchgpipe.executor.plan import Choice, chosen, completed
from torchgpipe.partition.keeping import CHECKPOINT_MODES
from torchgpipe.planner.memory import issued, peaks
from torchgpipe.planner.stages import known
from torchgpipe.schedule.costs import Table
from torchgpipe.schedule.language import Schedule
from torchgpipe.schedule.looped import fill_drain
from torchgpipe.schedule.program import operations
from torchgpipe.schedule.rehearsal import Step
from torchgpipe.schedule.simulator import in_order

__all__: list[str] = []


@dataclass(frozen=True)
class Setting:
    """The way in which a model is wrapped.

    Args:
        balance: the layers of each partition.
        placement: the worker of each partition.
        chunks: the micro-batches of a step.
        modes: the checkpoint mode of each partition.
        schedule: the choice of a :class:`~torchgpipe.ScheduledLoss`; None for the order of
            :class:`~torchgpipe.GPipe`.
        skips: the partitions that each skip leads from and to.
        threads: the threads of a :class:`~torchgpipe.MappedGPipe`, whose host issues the forward of
            one micro-batch behind another; 0 for other wrappers.
    """

    balance: tuple[int, ...]
    placement: tuple[int, ...]
    chunks: int
    modes: tuple[str, ...]
    schedule: Choice | None
    skips: tuple[tuple[int, int], ...]
    threads: int = 0

    def made(self) -> Schedule | None:
        """The schedule of a step, with its recomputations; None if the choice has none.

        Copies to the host, and back, have no instructions that could be replayed.
        """
        if not {*self.modes} <= {*CHECKPOINT_MODES}:
            return None
        schedule = self._chosen()
        if schedule is None or schedule.chunks != self.chunks:
            return None
        if schedule.placement != self.placement:
            return None
        return completed(schedule, self.modes, self.skips, forward=False)

    def _chosen(self) -> Schedule | None:
        workers = max(self.placement) + 1
        if self.schedule is None:
            return fill_drain(workers, self.chunks)
        if isinstance(self.schedule, Schedule):
            return self.schedule
        # Some schedules need a number of micro-batches that their workers divide.
        with suppress(ValueError):
            return chosen(self.schedule, len(self.placement), [workers], self.chunks)
        return None


#: By which factor several threads take longer to issue, since they take the interpreter from each
#: other. It was measured for small layers on four devices.
THREADED = 2

#: What a replay may be above the time that was measured, and below, as shares of it. What is below
#: is taken for something that stays as it is, such as a loss behind the layers.
ABOVE, BELOW = 0.05, 0.3


@dataclass(frozen=True)
class Traced:
    """The last step of a trace.

    Args:
        setting: how the model is wrapped.
        figures: what the parts of the step took.
        makespan: the time of the step, in milliseconds.
        bubble: the share of it in which devices waited, on average.
        late: the share of it in which they waited for the host.
        again: the share of it in which they computed again.
        slowest: the name of the device that computes longest.
        longer: by which share it computes longer than the mean.
        memory: how much of which device is in use; empty if nobody knows.
        excess: the bytes by which a device has too little memory for a setting, with its schedule
            and the order in which the host issues that; None if the model was not planned.
        kept: the bytes that a cell of each partition keeps for its backward, as far as known.
        in_use: the most bytes of each device, by its name.
        places: the name of the device of each partition.
        total: the bytes that each device has, by its name.
        modules: the modules of a device map; None for layers.
        divisible: whether several threads may issue the forward.
    """

    setting: Setting
    figures: Figures
    makespan: float
    bubble: float
    late: float
    again: float
    slowest: str
    longer: float
    memory: str
    excess: Callable[[Setting, Schedule, Sequence[Step]], float | None]
    kept: Mapping[int, float]
    in_use: Mapping[str, int]
    places: Sequence[str]
    total: Mapping[str, float]
    modules: Modules | None = None
    divisible: bool = False

    @property
    def waited(self) -> float:
        """The share of the step in which the host waits for devices in forward."""
        figures = self.figures
        return figures.chunks * sum(x.time for x in figures.waits.values()) / self.makespan


class Replays:
    """Replays of a traced step in other settings.

    Args:
        traced: the step.
    """

    def __init__(self, traced: Traced) -> None:
        self.traced = traced
        self._order = cache(_issued)
        #: The time of the setting that was traced, if it can be replayed.
        self.now = self.time(traced.setting)

    @property
    def are_right(self) -> bool:
        """Whether a replay of the step as it was takes the time that was measured."""
        return self.now is not None and -ABOVE <= 1 - self.now / self.traced.makespan <= BELOW

    def time(self, setting: Setting, *, copies: bool = True) -> float | None:
        """The time of a step, in milliseconds; None if there is no schedule for it.

        Args:
            setting: the setting.
            copies: whether copies take time.
        """
        schedule = setting.made()
        if schedule is None:
            return None
        costs = self.traced.figures.costs(setting.balance, setting.chunks)
        table = Table(replace(costs, copy=0), schedule.placement, schedule.skips)
        if copies and isinstance(costs.copy, dict):
            # What was not copied took no time.
            table.copy |= {x: costs.copy.get(x, 0.0) for x in table.copy}
        return replayed(self._order(schedule, setting.threads), table, self._host(setting))

    def _host(self, setting: Setting) -> Host:
        figures, before = self.traced.figures, self.traced.setting.threads
        threads = max(1, setting.threads)
        longer = THREADED if threads > 1 >= before > 0 else 1
        time = {x: y * (longer if x[0] == "F" else 1) for x, y in figures.host.items()}
        scale = figures.chunks / setting.chunks
        tails = {j: scale * x.tail for j, x in figures.waits.items()}
        return Host(time, setting.schedule is None, threads, tails)

    @property
    def without_strays(self) -> float | None:
        """The share of the step's time that goes into copies that layers make by themselves.

        None if there are none, or nobody can tell.
        """
        traced = self.traced
        if not any(layer.copied for layer in traced.figures.layers):
            return None
        without = Replays(replace(traced, figures=traced.figures.without_strays))
        return None if without.now is None else 1 - without.now / traced.makespan

    def excess(self, setting: Setting) -> float | None:
        """The bytes by which the memory is too small for a setting; None if nobody knows."""
        schedule = setting.made()
        if schedule is None:
            return None
        known = self.traced.excess(setting, schedule, self._order(schedule, setting.threads))
        return self._estimated(setting) if known is None else known

    def _estimated(self, setting: Setting) -> float | None:
        """Likewise without a plan: an estimate is good enough to say no, but not to say yes."""
        traced = self.traced
        if setting.balance != traced.setting.balance or len(traced.kept) < len(setting.balance):
            return None
        before, behind = self._most(traced.setting), self._most(setting)
        excess = max(
            size + behind[name] - before[name] - traced.total[name]
            for name, size in traced.in_use.items()
        )
        return excess if excess > 0 else None

    def _most(self, setting: Setting) -> Mapping[str, float]:
        traced, schedule = self.traced, setting.made()
        assert schedule is not None
        figures = traced.figures
        scale = figures.chunks / setting.chunks
        ends = [0, *accumulate(setting.balance)]
        # Each module of a map keeps its arguments.
        inner = ends[1:] if setting.threads else [k + 1 for k in ends]
        given = [0, *(x.bytes for x in figures.layers)]
        inputs = [scale * sum(given[a:b]) for a, b in zip(ends, inner[: len(ends) - 1])]
        stages = [known(j, scale * traced.kept[j], x) for j, x in enumerate(inputs)]
        # Cells keep activations from F, or from R, until their backward, and only their input from
        # F until R. The difference between two settings is added to what was measured.
        names = [*dict.fromkeys(traced.places)]
        placement = [names.index(x) for x in traced.places]
        order = self._order(schedule, setting.threads)
        steps = [(placement[operations(x)[0].stage], x, edges) for _, x, edges in order]
        found = peaks(
            issued(steps), placement, stages, state=0.0, given=0.0, is_summed=True, loss=None
        )
        return dict(zip(names, found))

    def gain(self, setting: Setting) -> float:
        """The share of the step's time that a setting saves.

        It is 0 if there is no such step, or if it is known not to fit into the memory.
        """
        modules = self.traced.modules
        if modules and setting.balance != modules.balance and not modules.allows(setting.balance):
            return 0.0
        time = self.time(setting)
        if time is None or self.now is None or self.excess(setting):
            return 0.0
        return (self.now - time) / self.traced.makespan


def _issued(schedule: Schedule, threads: int) -> Sequence[Step]:
    """The instructions of a schedule as the host issues them, which has some threads for a map."""
    found = in_order(schedule)
    if not threads:
        return found
    # The model's forward is called for one micro-batch, and then for the next one.
    forward: list[tuple[int, int, int]] = []
    behind: list[Step] = []
    for k, step in enumerate(found):
        op = operations(step[1])[0]
        if op.kind == "F":
            forward.append((op.microbatch, op.stage, k))
        else:
            behind.append(step)
    return [*(found[k] for *_, k in sorted(forward)), *behind]
