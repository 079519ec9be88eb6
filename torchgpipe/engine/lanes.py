"""Routes: on which streams micro-batches come to the partitions, and leave them.

::

    caller ─→ lane ─→ partition ─→ lane ─→ lane ─→ partition ─→ lane ─→ caller
              └───── device 0 ──────┘      └───── device 1 ──────┘

A partition that is alone on its device computes on the caller's stream there, so what the caller
gave to that device is in order with it. Partitions that share a device compute on streams of their
own, so that they overlap, unless they share layers. To them the caller is another place: inputs
come from its stream, outputs go back to it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from torchgpipe._torch.dynamo import uncompiled
from torchgpipe.autograd.copy import copy
from torchgpipe.autograd.fork_join import needs_backward, pass_on
from torchgpipe.devices.streams import (
    AbstractStream,
    Streams,
    current_stream,
    get_device,
    record_stream,
    use_stream,
    wait_all,
    wait_stream,
)
from torchgpipe.skip.layout import SkipLayout
from torchgpipe.values.microbatch import VALUE, Batch

__all__: list[str] = []


class Routes:
    """The routes of one step.

    Args:
        partitions: the layers, partition by partition.
        devices: the device of each partition.
        groups: a number for each partition. Those with the same one share layers or tensors, and
            on one device they share their streams.
        skip_layout: which skips lead past partitions.
        streams: where the streams of the devices come from.
    """

    def __init__(
        self,
        partitions: Sequence[nn.Module],
        devices: Sequence[torch.device],
        groups: Sequence[int],
        skip_layout: SkipLayout,
        streams: Streams,
    ) -> None:
        n = len(devices)
        self._partitions = partitions
        homes = list(zip(devices, groups))
        counts = Counter([device for device, _ in set(homes)])
        has_skips = any(skip_layout.popped)
        made = {
            device: iter(streams.get(device, count, skips=has_skips))
            for device, count in counts.items()
        }
        of_home = {home: next(made[home[0]]) for home in dict.fromkeys(homes)}
        self._streams = [of_home[home] for home in homes]
        #: The caller's stream for the device of each partition.
        self._outside = [current_stream(device) for device in devices]
        #: On which stream each partition computes.
        self.compute = [streams.compute for streams in self._streams]
        #: For each partition, the parts of a micro-batch that come from another stream, or go to
        #: one, and the partition there. Backward takes them the other way round: first the skips,
        #: of which those of the partitions next to this one will be needed first.
        self.sources = [
            # guard: skips first
            # guard: near skips first
            self._elsewhere(j, {VALUE: j - 1, **by_partition(skip_layout.popped[j])})
            for j in range(n)
        ]
        self.targets = [
            self._elsewhere(j, {VALUE: j + 1, **skip_layout.stashed[j]}) for j in range(n)
        ]
        #: The other streams that are in use on each device, by the caller's there.
        self._beside: dict[AbstractStream, set[AbstractStream]] = {}
        for j, (compute, values, skips) in enumerate(self._streams):
            if self.sources[j] or self.targets[j]:
                # guard: copies after the caller
                used = {compute, *values, *skips} - {self._outside[j]}
                self._beside.setdefault(self._outside[j], set()).update(used)
        #: By how many micro-batches neighbours on a stream differ at least.
        turns = min(len(streams.values) for streams in self._streams)
        #: By so many, a partition is never ahead of one that is next to it.
        self.lead = turns - 1
        #: For each partition, those that it must not be ahead of by the lead.
        self.held_by = [
            [k for k in dict.fromkeys(self.targets[j].values()) if k < n and k - j < self.lead]
            for j in range(n)
        ]
        #: For each cell ``(i, j)``, the cells ``(i + di, k)`` on other devices that it needs.
        self._needs = [
            [(di, k) for di, k in self._offsets(j, turns) if devices[k] != devices[j]]
            for j in range(n)
        ]

    def _elsewhere(self, j: int, parts: dict[Any, int]) -> dict[Any, int]:
        # Before the first partition, and after the last one, is the caller.
        places = [self._outside[0], *self.compute, self._outside[-1]]
        return {part: k for part, k in parts.items() if places[k + 1] != self.compute[j]}

    def _offsets(self, j: int, turns: int) -> Iterator[tuple[int, int]]:
        """What the cells of a partition need: what comes to them, and free streams to send it on.

        Where a skip goes so far that its streams are in use again by then, for micro-batches that
        are computed at the same time, all whose skips take them do so in the order of the clock
        cycles.
        """
        if j:
            yield 0, j - 1
        for k in self.targets[j].values():
            if k < len(self.compute):
                # guard: lead in forward
                yield -max(self.lead, k - j + 1), k
        for part, source in self.sources[j].items():
            if part is not VALUE:
                for k in (source, *self.targets[source].values()):
                    if max(j, k) - source >= turns:
                        yield j - k - (k > j), k

    def needs(self, i: int, j: int, m: int) -> list[tuple[int, int]]:
        """The cells on other devices that must have been computed before a cell is."""
        return [(min(i + di, m - 1), k) for di, k in self._needs[j] if i + di >= 0]

    def lane(self, i: int, k: int, part: Hashable) -> AbstractStream:
        """On which stream a part of micro-batch ``i`` comes to a partition and leaves it."""
        if k < 0:
            return self._outside[0]
        streams = self._streams[k]
        # guard: a lane for skips
        copies = streams.values if part is VALUE else streams.skips
        # guard: lanes in turns
        # guard: lanes beside computing
        return copies[i % len(copies)]

    def wait_for_caller(self) -> None:
        """Orders what is computed from now on after the caller.

        The caller changes gradients of parameters, or uses them and frees them. Their memory is
        that of a partition's streams; of a copy stream where it is the gradient that has arrived.
        """
        for caller, streams in self._beside.items():
            wait_all(streams, caller)

    def have_caller_wait(self) -> None:
        """Orders what the caller does from now on, on its current streams, after partitions."""
        for own in {*self.compute} - {*self._outside}:
            wait_stream(current_stream(get_device(own)), own)

    @uncompiled
    def end_backward(self) -> None:
        """Leaves gradients to the caller: they are in memory of a partition's streams."""
        self.have_caller_wait()
        for layers, own, caller in zip(self._partitions, self.compute, self._outside):
            if own != caller:
                for parameter in layers.parameters():
                    # guard: recording gradients
                    if parameter.grad is not None:
                        record_stream(parameter.grad, current_stream(get_device(own)))

    def back_to_caller(self, batches: Sequence[Batch]) -> list[Batch]:
        """Hands the outputs of the last partition over to the caller."""
        # guard: back to the caller
        if VALUE in self.targets[-1]:
            n, caller = len(self.compute), self._outside[-1]
            with use_stream(caller):
                batches = [
                    batch.map(partial(copy, self.lane(i, n - 1, VALUE), caller), [VALUE])
                    for i, batch in enumerate(batches)
                ]
        outputs = tuple([tensor for batch in batches for tensor in batch])
        if {*self.compute} != {*self._outside} and needs_backward(outputs):
            entered = iter(Enter.apply(self, *outputs))
            batches = [batch.replace([next(entered) for _ in batch]) for batch in batches]
        return list(batches)


class Enter(torch.autograd.Function):
    """Passes outputs on, and orders their backward: ``routes, *tensors → *tensors``.

    It comes after the caller, which may have used the gradients of another one since the forward,
    and before what the caller does next, which may change weights that have no gradient. For those
    that have one, the autograd engine would see to it.
    """

    @staticmethod
    def forward(ctx: Any, routes: Routes, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.routes = routes
        return pass_on(ctx, tensors)

    @staticmethod
    @uncompiled
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        # guard: backward after the caller
        ctx.routes.wait_for_caller()
        # When all of this backward is done.
        # guard: backward before the caller
        Variable._execution_engine.queue_callback(ctx.routes.end_backward)
        return (None, *grads)


def by_partition(parts: dict[Any, int]) -> dict[Any, int]:
    """The parts in the order of the partitions that they lead to."""
    return dict(sorted(parts.items(), key=lambda item: item[1]))
