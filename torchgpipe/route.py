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
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from torchgpipe.copy import Copy
from torchgpipe.microbatch import VALUE, Batch
from torchgpipe.skip.layout import SkipLayout
from torchgpipe.stream import AbstractStream, Streams, current_stream, use_stream, wait_stream

__all__: list[str] = []


class Routes:
    """The routes of one step.

    Args:
        devices: the device of each partition.
        groups: a number for each partition. Those with the same one share layers or tensors, and
            on one device they share their streams.
        skip_layout: which skips lead past partitions.
        streams: where the streams of the devices come from.
    """

    def __init__(
        self,
        devices: Sequence[torch.device],
        groups: Sequence[int],
        skip_layout: SkipLayout,
        streams: Streams,
    ) -> None:
        n = len(devices)
        homes = list(zip(devices, groups))
        counts = Counter([device for device, _ in set(homes)])
        skips = any(skip_layout.popped)
        made = {
            device: iter(streams.get(device, count, skips=skips))
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
            self._elsewhere(j, {VALUE: j - 1, **by_partition(skip_layout.popped[j])})
            for j in range(n)
        ]
        self.targets = [
            self._elsewhere(j, {VALUE: j + 1, **skip_layout.stashed[j]}) for j in range(n)
        ]
        #: By how many micro-batches neighbours on a stream differ at least.
        self.turns = min(len(streams.values) for streams in self._streams)

    def _elsewhere(self, j: int, parts: dict[Any, int]) -> dict[Any, int]:
        # Before the first partition, and after the last one, is the caller.
        places = [self._outside[0], *self.compute, self._outside[-1]]
        return {part: k for part, k in parts.items() if places[k + 1] != self.compute[j]}

    def lane(self, i: int, k: int, part: Hashable) -> AbstractStream:
        """On which stream a part of micro-batch ``i`` comes to a partition and leaves it."""
        if k < 0:
            return self._outside[0]
        streams = self._streams[k]
        copies = streams.values if part is VALUE else streams.skips
        return copies[i % len(copies)]

    @contextmanager
    def within_caller(self) -> Iterator[None]:
        """Orders what partitions compute within a ``with`` block after, and before, the caller.

        The caller may have changed parameters, and will change them, or read buffers.
        """
        apart = [(own, caller) for own, caller in zip(self.compute, self._outside) if own != caller]
        for own, caller in apart:
            wait_stream(own, caller)
        try:
            yield
        finally:
            for own, caller in apart:
                wait_stream(caller, own)

    def back_to_caller(self, i: int, batch: Batch) -> Batch:
        """Hands the output of the last partition over to the caller."""
        if VALUE not in self.targets[-1]:
            return batch
        lane, caller = self.lane(i, len(self.compute) - 1, VALUE), self._outside[-1]
        with use_stream(caller):
            return batch.map(partial(Copy.apply, lane, caller), [VALUE])


def by_partition(parts: dict[Any, int]) -> dict[Any, int]:
    """The parts in the order of the partitions that they lead to."""
    return dict(sorted(parts.items(), key=lambda item: item[1]))
