"""Replays of a traced step in other settings, and whether these can be believed.

A replay of the step as it was must take the time that was measured. Otherwise something is going on
that the replay knows nothing of, and no advice is better than a wrong one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

from torchgpipe.advice.figures import Figures
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
            and the order in which the host issues that; None if nobody knows.
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
        return self.traced.excess(setting, schedule, self._order(schedule))

    def gain(self, setting: Setting) -> float:
        """The share of the step's time that a setting saves.

        It is 0 if there is no such step, or if it is known not to fit into the memory.
        """
        time = self.time(setting)
        if time is None or self.now is None or self.excess(setting):
            return 0.0
        return (self.now - time) / self.traced.makespan
