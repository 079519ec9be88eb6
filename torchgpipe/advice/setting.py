"""Settings: how a model is wrapped, as far as it decides what a step takes."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

from torchgpipe.executor.plan import Choice, chosen, completed
from torchgpipe.partition.arguments import CHECKPOINT_MODES
from torchgpipe.schedule.language import Schedule
from torchgpipe.schedule.looped import fill_drain

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
