"""The stages of a wrapper: its partitions, and all that lasts from step to step."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from torchgpipe.autograd.copy import copy
from torchgpipe.describe.figures import Figures, Prediction
from torchgpipe.devices.pool import StreamPool
from torchgpipe.devices.streams import AbstractStream
from torchgpipe.engine.recorded import Recording
from torchgpipe.engine.workers import Workers
from torchgpipe.partition.lent import Place, places_of
from torchgpipe.partition.placement import groups
from torchgpipe.recompute.buffers import Learned
from torchgpipe.skip.layout import SkipLayout, inspect_skip_layout

__all__: list[str] = []


def _lane(lane: AbstractStream, compute: AbstractStream) -> AbstractStream:
    return lane


class Method(NamedTuple):
    """Parts of the method that benchmarks exchange, to measure what each of them brings.

    Args:
        fence: whether forks and joins hold backward to the order of the schedule.
        copy_streams: whether copies are made on streams of their own.
        owner: of a copy stream and the compute stream of its partition, the one on which autograd
            runs the backward of copies and forks.
        copy: the autograd function that copies from one copy stream to another.
    """

    fence: bool = True
    copy_streams: bool = True
    owner: Callable[[AbstractStream, AbstractStream], AbstractStream] = _lane
    copy: Callable[..., tuple[Tensor, ...]] = copy


class Stages:
    """The partitions of a wrapper with their devices, locks, skips, streams and workers.

    Args:
        partitions: the layers, partition by partition.
        devices: the device of each partition.
        skip_layout: the skips between partitions, if some of these have no layers here, but in
            other processes.
    """

    #: The parts of the method. A benchmark may set others before the first step.
    method = Method()

    def __init__(
        self,
        partitions: Sequence[nn.Sequential],
        devices: Sequence[torch.device],
        skip_layout: SkipLayout | None = None,
    ) -> None:
        # Not a copy: a partition may be replaced between steps.
        self.partitions = partitions
        self.devices = devices
        #: A number for each partition. Partitions with the same one share layers or tensors.
        # guard: groups
        self.groups = groups(self.partitions)
        locks = {group: threading.RLock() for group in self.groups}
        #: For each partition, a lock that is held while the partition computes.
        self.locks = [locks[group] for group in self.groups]
        #: For each partition, the places of tensors that partitions on several devices have.
        places = places_of(dict(zip(self.partitions, devices)))
        self.lent: list[list[Place]] = [places.get(x, []) for x in self.partitions]
        self.skip_layout = skip_layout or inspect_skip_layout(self.partitions)
        self.pool = StreamPool()
        self.workers = Workers(devices)
        #: The buffers that layers change in their forward.
        self.learned: Learned = WeakKeyDictionary()
        #: The spans of steps, while somebody traces the model.
        self.recording: Recording | None = None
        #: The figures of the last step that was traced.
        self.figures: Figures | None = None
        #: The figures that a plan had for a step.
        self.prediction: Prediction | None = None
