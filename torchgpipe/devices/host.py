"""Memory of the host that a device copies to and from, while both go on computing.

Such memory is pinned: the host need not wait for copies of it. Pinning takes long, so buffers are
reused from step to step. Their sizes are rounded up to a power of two, as PyTorch does anyway, so
that micro-batches of different sizes can use the same ones.
"""

from __future__ import annotations

from collections import defaultdict, deque
from typing import NamedTuple

import torch
from torch import Tensor

from torchgpipe.devices.streams import AbstractStream, Event, wait_for

__all__: list[str] = []


class Buffer(NamedTuple):
    """A piece of pinned memory, and what its next user has to wait for.

    Args:
        memory: the bytes.
        event: an event behind the last copy from or to it; None if there was none.
    """

    memory: Tensor
    event: Event | None


class HostMemory:
    """The pinned buffers of one device, and its two streams that copy to them and from them.

    Args:
        out: the stream that copies to the host.
        back: the one that copies back.
    """

    def __init__(self, out: AbstractStream, back: AbstractStream) -> None:
        self.out, self.back = out, back
        # A deque, since its append and pop are atomic: several threads use it.
        self._free: defaultdict[int, deque[Buffer]] = defaultdict(deque)
        #: The size of each buffer that was made.
        self.sizes: list[int] = []

    @property
    def bytes(self) -> int:
        """The bytes of all buffers, which is the most that was in use at a time."""
        return sum(self.sizes)

    @property
    def free(self) -> int:
        """The bytes of buffers that are not in use."""
        return sum(size * len(buffers) for size, buffers in self._free.items())

    def take(self, size: int) -> Tensor:
        """Take a buffer for copies that the stream to the host is going to make.

        Args:
            size: how many bytes are wanted; the buffer may have more.

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
        """Give a buffer back, with an event behind the last copy from or to it."""
        self._free[len(memory)].append(Buffer(memory, event))

    def _made(self, size: int) -> Tensor:
        try:
            memory = pinned(size)
        except RuntimeError as error:
            raise RuntimeError(
                "offloading needs pinned memory of the host for all that is away at once (bytes: "
                f"{size}, in use: {self.bytes}, error: {error}); send less, as by "
                "Offload(share=0.5), or use checkpoint='always' for some partitions"
            ) from error
        self.sizes.append(size)
        return memory


def pinned(size: int) -> Tensor:
    """New pinned memory."""
    return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)
