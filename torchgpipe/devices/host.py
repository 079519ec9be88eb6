"""Memory of the host that a device copies to and from, while both go on computing.

Such memory is pinned: the host need not wait for copies of it. Pinning takes long, so buffers are
used again, from step to step. They are as large as the next power of two, as PyTorch makes them
anyway, so that micro-batches of many sizes find some that fit. What steps do not use any more goes
back to PyTorch, which has a pool of its own. That one alone would not do: it gives out no memory
whose last copy is still to come, and so as much again to a host that is a step ahead.
"""

from __future__ import annotations

from collections import defaultdict, deque
from typing import NamedTuple

import torch
from torch import Tensor

from torchgpipe.devices.streams import AbstractStream, Event, wait_for

__all__: list[str] = []


#: The number of steps after which a buffer that none of them has used is let go of.
UNUSED = 4


class Buffer(NamedTuple):
    """A piece of pinned memory that nobody uses, and what its next user has to wait for.

    Args:
        memory: the bytes.
        event: an event behind the last copy from or to it; None if there was none.
        step: the number of the last step that has used it.
    """

    memory: Tensor
    event: Event | None
    step: int


class HostMemory:
    """The pinned buffers of one device, and its two streams that copy to them and from them.

    Args:
        out: the stream that copies to the host.
        back: the one that copies back.
    """

    def __init__(self, out: AbstractStream, back: AbstractStream) -> None:
        self.out, self.back = out, back
        #: The buffers that nobody uses, by size, the one that was used last at the right. A deque
        #: takes and gives in one step, since several threads do.
        self._free: defaultdict[int, deque[Buffer]] = defaultdict(deque)
        self._steps = 0
        #: The bytes of each buffer that there is.
        self.sizes: list[int] = []

    def begin_step(self) -> None:
        """Let go of buffers that some steps have not used."""
        self._steps += 1
        for size, buffers in [*self._free.items()]:
            while buffers and buffers[0].step < self._steps - UNUSED:
                buffers.popleft()
                self.sizes.remove(size)

    def take(self, size: int) -> Tensor:
        """Take a buffer for copies that the stream to the host is going to make.

        Args:
            size: how many bytes are wanted; the buffer may have more.

        Raises:
            RuntimeError: there is no pinned memory of this size.
        """
        size = 1 << max(0, size - 1).bit_length()
        try:
            memory, event, _ = self._free[size].pop()
        except IndexError:
            memory = self._made(size)
        else:
            if event is not None:
                # guard: the last reader of a buffer
                wait_for(self.out, event)
        return memory

    def give(self, memory: Tensor, event: Event | None) -> None:
        """Give a buffer back, with an event behind the last copy from or to it."""
        self._free[len(memory)].append(Buffer(memory, event, self._steps))

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
