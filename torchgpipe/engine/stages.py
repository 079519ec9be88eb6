"""The stages of a wrapper: its partitions, and all that lasts from step to step."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from torchgpipe.devices.pool import StreamPool
from torchgpipe.devices.streams import CPU
from torchgpipe.engine.recorded import Recording
from torchgpipe.engine.workers import Workers
from torchgpipe.engine.wrapper import Wrapper
from torchgpipe.partition.keeping import words_of
from torchgpipe.partition.placement import TableEntry, groups, places_of
from torchgpipe.recompute.buffers import Learned
from torchgpipe.show.describe import Description, part_of
from torchgpipe.show.figures import PlanFigures, StepFigures
from torchgpipe.skip.tracker import SkipLayout, inspect_skip_layout

__all__: list[str] = []


class Stages:
    """The partitions of a wrapper with their devices, locks, skips, streams and workers.

    Args:
        partitions: the layers, partition by partition.
        devices: the device of each partition.
        skip_layout: the skips between partitions, if some of these have no layers here, but in
            other processes.
    """

    def __init__(
        self,
        partitions: Sequence[nn.Sequential],
        devices: Sequence[torch.device],
        skip_layout: SkipLayout | None = None,
    ) -> None:
        # The list itself and no copy, since a partition may be replaced in it between steps.
        self.partitions = partitions
        self.devices = devices
        #: The lowest index in each partition's group, whose members share layers or tensors.
        # guard: groups
        self.groups = groups(self.partitions)
        locks = {group: threading.RLock() for group in self.groups}
        #: For each partition, the lock of its group, held while a partition of the group computes.
        self.locks = [locks[group] for group in self.groups]
        #: For each partition, the dict entries in which its modules hold tensors of another device,
        #: or parameters that another device uses. Copies stand there while layers run.
        self.lent: list[list[TableEntry]] = [
            entries or [] for entries in places_of(zip(self.partitions, devices))
        ]
        self.skip_layout = skip_layout or inspect_skip_layout(self.partitions)
        self.pool = StreamPool()
        self.workers = Workers(devices)
        #: For each module, whether its forward changes a buffer, by the buffer's name and the
        #: module's training flag. Recomputations need copies of buffers that change.
        self.learned: Learned = WeakKeyDictionary()
        #: Records the spans of steps while the model is traced; None otherwise.
        self.recording: Recording | None = None
        #: The measured times and bytes of the last step that was traced; None if there was none.
        self.figures: StepFigures | None = None
        #: The time and memory that a plan has predicted for a step; None without a plan.
        self.prediction: PlanFigures | None = None

    def predict(
        self,
        time: float,
        memory: Mapping[torch.device, int],
        settings: Wrapper,
        schedule: str | None = None,
    ) -> None:
        """Take note of what a plan has predicted."""
        # A plan assumes that partitions compute at the same time, which several on the CPU do not.
        if [*self.devices].count(CPU) > 1:
            return
        sizes = {str(device): size for device, size in memory.items()}
        modes = words_of(settings.checkpoint, len(self.devices))
        self.prediction = PlanFigures(time, sizes, settings.chunks, modes, schedule)

    def describe(
        self,
        settings: Wrapper,
        loss: Any = None,
        schedule: str | None = None,
        rank: int | None = None,
    ) -> Description:
        """Describe the partitions, and a step as it was measured and predicted."""
        modes = words_of(settings.checkpoint, len(self.devices))
        plan = self.prediction
        if plan and not plan.holds(settings.chunks, modes, schedule):
            plan = None
        parts = [
            part_of(j, *x, loss if j == len(modes) - 1 else None)
            for j, x in enumerate(zip(self.partitions, self.devices, modes))
            if rank is None or len(x[0])
        ]
        title = "partition" if rank is None else "stage"
        return Description.of(parts, settings.chunks, title, schedule, rank, self.figures, plan)


def stages_of(model: Any) -> Stages:
    """The stages of a :class:`~torchgpipe.GPipe`, for what runs or judges it from outside."""
    stages: Stages = model._stages
    return stages
