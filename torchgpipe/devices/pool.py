"""Pools of a device: streams for a wrapper, and memory of the host to copy to."""

from __future__ import annotations

from collections import defaultdict, deque
from typing import NamedTuple

import torch
from torch import Tensor

from torchgpipe.devices.streams import (
    AbstractStream,
    Event,
    current_stream,
    has_streams,
    new_stream,
    wait_for,
)

__all__: list[str] = []


# Memory of the host that a device copies to and from, while both go on computing.
#
# Such memory is pinned: the host need not wait for copies of it. Pinning takes long, so buffers
# are used again, from step to step. They are as large as the next power of two, as PyTorch makes
# them anyway, so that micro-batches of many sizes find some that fit. PyTorch's own pool gives out
# a buffer again only when its last copy is done, so it would make as many again for a host that
# issues the next step before that. Here a buffer is given out at once, and the stream waits.


class HostMemory:
    """The pinned buffers of one device, and its two streams that copy to them and from them."""

    def __init__(self, out: AbstractStream, back: AbstractStream) -> None:
        self.out, self.back = out, back
        #: For each size in bytes, unused buffers, each with an event after its last copy. Threads
        #: take and give buffers at the right end of a deque, for which they need no lock.
        self._free: defaultdict[int, deque[tuple[Tensor, Event | None]]] = defaultdict(deque)
        #: The size in bytes of each buffer, in use or not. Traces and errors tell their sum.
        self.sizes: list[int] = []

    def take(self, size: int) -> Tensor:
        """Take a buffer of so many bytes, or more, for copies by the stream to the host.

        Raises:
            RuntimeError: there is no pinned memory of this size.
        """
        size = 1 << max(0, size - 1).bit_length()
        try:
            memory, event = self._free[size].pop()
        except IndexError:
            memory = self._made(size)
        else:
            if event is not None:
                # guard: the last reader of a buffer
                wait_for(self.out, event)
        return memory

    def give(self, memory: Tensor, event: Event | None) -> None:
        """Give a buffer back, with an event after the last copy from or to it."""
        self._free[len(memory)].append((memory, event))

    def _made(self, size: int) -> Tensor:
        try:
            memory = pinned(size)
        except RuntimeError as error:
            raise RuntimeError(
                "offloading needs pinned memory of the host for all that is there at once (bytes: "
                f"{size}, in use: {sum(self.sizes)}, error: {error}); send less, as by "
                "Offload(share=0.5), or use checkpoint='always' for some partitions"
            ) from error
        self.sizes.append(size)
        return memory


def pinned(size: int) -> Tensor:
    """New pinned memory."""
    return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)


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

    #: The most copy streams that :meth:`lanes` gives to each of its ``count`` users.
    COPIES = 15
    #: The number of different streams PyTorch has for a device (32 for CUDA; assumed for others).
    POOL = 32

    def __init__(self) -> None:
        self._made: dict[torch.device, list[AbstractStream]] = {}
        self._hosts: dict[torch.device, HostMemory] = {}

    def get(self, device: torch.device, partitions: int, *, skips: bool) -> list[PartitionStreams]:
        """Return the streams of each of the partitions that share a device.

        A partition that is alone there computes on the caller's current stream. No copy stream is
        the caller's stream, whose work it would delay.
        """
        computing = self.computing(device, partitions)
        kinds = partitions * (1 + skips)
        copies = self.lanes(device, 0 if partitions == 1 else partitions, kinds, least=2)
        return [
            PartitionStreams(computing[k], copies[k], copies[k - partitions])
            for k in range(partitions)
        ]

    def computing(self, device: torch.device, count: int) -> list[AbstractStream]:
        """Return the stream on which each of some partitions, or workers, of a device computes.

        One that is alone there computes on the caller's current stream, and so in order with what
        the caller gave to that device. Several have the first streams of the pool.
        """
        current = current_stream(device)
        # guard: own streams
        # guard: own streams of workers
        has_several = has_streams(device) and count > 1
        return self.some(device, count) if has_several else [current] * count

    def lanes(
        self, device: torch.device, in_use: int, count: int, least: int
    ) -> list[list[AbstractStream]]:
        """Divide the streams of a device among those that copy, for each to use round-robin.

        Args:
            device: where the streams are.
            in_use: how many streams, from the first, are in use already.
            count: how many users share the rest. With too many users, a stream has several.
            least: the least number of streams that each gets.
        """
        if not has_streams(device):
            return [[current_stream(device)] * self.COPIES] * count
        size = max(least, min(self.COPIES, (self.POOL - 1 - in_use) // count))
        total = min(self.POOL - 1, in_use + count * size)
        streams = self.some(device, total)
        rest = streams[in_use:] or streams[-1:]
        return [[rest[(k * size + turn) % len(rest)] for turn in range(size)] for k in range(count)]

    def host(self, device: torch.device) -> HostMemory:
        """Return the memory of the host that a device copies to and from, on two streams.

        These are of the last ones in the pool, since lanes take the first ones.
        """
        out, back = self.some(device, self.POOL - 1)[-3:-1]
        memory = self._hosts.get(device)
        if memory is None:
            memory = self._hosts[device] = HostMemory(out, back)
        # Each call sets both streams: some() leaves out the caller's current stream, which may be
        # another one in each call.
        memory.out, memory.back = out, back
        return memory

    def some(self, device: torch.device, count: int) -> list[AbstractStream]:
        """Return the first streams of a device without the caller's; on the CPU, its only one."""
        current = current_stream(device)
        if not has_streams(device):
            return [current]
        made = self._made.setdefault(device, [])
        # The caller's current stream may be one of these, since PyTorch gives out its few streams
        # again and again. It may be another one in each step.
        streams = [stream for stream in made if stream != current]
        while len(made) <= count or len(streams) < count:
            stream = new_stream(device)
            made.append(stream)
            streams += [stream] * (stream != current)
        return streams[:count]
