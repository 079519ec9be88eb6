"""The pool: which streams each partition has."""

from __future__ import annotations

from typing import NamedTuple

import torch

from torchgpipe.devices.host import HostMemory
from torchgpipe.devices.streams import AbstractStream, current_stream, has_streams, new_stream

__all__: list[str] = []


class PartitionStreams(NamedTuple):
    """The streams of one partition."""

    compute: AbstractStream
    """The stream on which the layers compute."""
    values: list[AbstractStream]
    """The copy streams of what passes from partition to partition, used round-robin."""
    skips: list[AbstractStream]
    """The copy streams of skips, used round-robin. Skips and values must not delay each other."""


class StreamPool:
    """The streams of a wrapper, made once for each device.

    Partitions that share a device have streams of their own, so that they overlap. The device's
    pool of streams is divided among them: a shared stream would make one partition wait for the
    other without need.
    """

    #: The most copy streams of one kind that a partition has.
    COPIES = 15
    #: The number of streams in a device's pool, as far as is known (CUDA: 32).
    POOL = 32

    def __init__(self) -> None:
        self._made: dict[torch.device, list[AbstractStream]] = {}
        self._hosts: dict[torch.device, HostMemory] = {}

    def get(self, device: torch.device, partitions: int, *, skips: bool) -> list[PartitionStreams]:
        """Return the streams of each partition on one device.

        A partition that is alone there computes on the caller's current stream. No copy stream is
        the caller's stream, whose work it would delay.

        Args:
            device: where the streams are.
            partitions: how many partitions share the device.
            skips: whether there are skips.
        """
        computing = self.computing(device, partitions)
        kinds = partitions * (1 + skips)
        copies = self.lanes(device, 0 if partitions == 1 else partitions, kinds, least=2)
        return [
            PartitionStreams(computing[k], copies[k], copies[k - partitions])
            for k in range(partitions)
        ]

    def computing(self, device: torch.device, count: int) -> list[AbstractStream]:
        """Return the stream on which each partition, or worker, of a device computes.

        One that is alone there computes on the caller's current stream, and so in order with what
        the caller gave to that device. Several have the first streams of the pool.

        Args:
            device: where the streams are.
            count: how many share the device.
        """
        current = current_stream(device)
        # guard: own streams
        # guard: own streams of workers
        own = has_streams(device) and count > 1
        return self.some(device, count) if own else [current] * count

    def lanes(
        self, device: torch.device, taken: int, count: int, least: int
    ) -> list[list[AbstractStream]]:
        """Divide the streams of a device among those that copy, for each to use round-robin.

        Args:
            device: where the streams are.
            taken: how many streams, from the first, are in use already.
            count: how many users share the rest. With too many users, a stream has several.
            least: the least number of streams that each gets.
        """
        if not has_streams(device):
            return [[current_stream(device)] * self.COPIES] * count
        size = max(least, min(self.COPIES, (self.POOL - 1 - taken) // count))
        total = min(self.POOL - 1, taken + count * size)
        streams = self.some(device, total)
        rest = streams[taken:] or streams[-1:]
        return [[rest[(k * size + turn) % len(rest)] for turn in range(size)] for k in range(count)]

    def begin_step(self) -> None:
        """Let go of memory of the host that steps do not use any more."""
        for host in self._hosts.values():
            host.begin_step()

    def host(self, device: torch.device) -> HostMemory:
        """Return the memory of the host that a device copies to and from, on two streams.

        These are of the last ones in the pool, since lanes take the first ones.
        """
        out, back = self.some(device, self.POOL - 1)[-3:-1]
        found = self._hosts.get(device)
        if found is None:
            found = self._hosts[device] = HostMemory(out, back)
        # Neither may be the caller's current stream, which may be another one in each call.
        found.out, found.back = out, back
        return found

    def some(self, device: torch.device, count: int) -> list[AbstractStream]:
        """Return the first streams of a device without the caller's; on the CPU, its only one."""
        current = current_stream(device)
        if not has_streams(device):
            return [current]
        made = self._made.setdefault(device, [])
        # The caller's current stream may be from the same pool, and another one in the next step.
        streams = [stream for stream in made if stream != current]
        while len(made) <= count or len(streams) < count:
            stream = new_stream(device)
            made.append(stream)
            streams += [stream] * (stream != current)
        return streams[:count]
