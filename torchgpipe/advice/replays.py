"""Replays of a traced step in other settings, and whether these can be believed.

A replay of the step as it was must take the time that was measured. Otherwise something is going on
that the replay knows nothing of, and no advice is better than a wrong one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

from torchgpipe.advice.figures import Figures
from torchgpipe.advice.memory import most
from torchgpipe.advice.replay import Host, replayed
from torchgpipe.advice.setting import Setting
from torchgpipe.schedule.costs import Table
from torchgpipe.schedule.language import Schedule
from torchgpipe.schedule.rehearsal import Step
from torchgpipe.schedule.simulator import in_order

__all__: list[str] = []

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


class Replays:
    """Replays of a traced step in other settings.

    Args:
        traced: the step.
    """

    def __init__(self, traced: Traced) -> None:
        self.traced = traced
        self._host = Host(traced.figures.host, by_autograd=traced.setting.schedule is None)
        self._order = cache(in_order)
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
        return replayed(self._order(schedule), table, self._host)

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
        known = self.traced.excess(setting, schedule, self._order(schedule))
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
        ends = [sum(setting.balance[:j]) for j in range(len(setting.balance))]
        inputs = [scale * figures.layers[k - 1].bytes if k and figures.layers else 0 for k in ends]
        kept = {j: scale * size for j, size in traced.kept.items()}
        return most(self._order(schedule), traced.places, kept, inputs)

    def gain(self, setting: Setting) -> float:
        """The share of the step's time that a setting saves.

        It is 0 if there is no such step, or if it is known not to fit into the memory.
        """
        time = self.time(setting)
        if time is None or self.now is None or self.excess(setting):
            return 0.0
        return (self.now - time) / self.traced.makespan
