"""Turns: the order in which courses of several threads come to the stages.

A model may make the host wait for a device, as ``.item()`` does. A host of one thread then begins
no other micro-batch. So courses may have a thread each. On every stage they still come one after
the other, as under one thread: a micro-batch comes to a stage when the one before it has left it
for good. A course on its way between two stages holds neither, so no two wait for each other.

A device is one course's at a time, even where it has several stages: its generator of random
numbers is one, and so is a module that several stages call.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeAlias

import torch

from torchgpipe.autograd.sequence import next_number, number_from

__all__: list[str] = []


#: A stage: its device, and which visit of the device it is.
Place: TypeAlias = tuple[torch.device, int]


class Abandoned(BaseException):
    """An earlier micro-batch has failed, so this one goes no further. Only threads see it."""


class Turns:
    """The turns of the courses of a step.

    Args:
        m: the number of micro-batches.
    """

    def __init__(self, m: int) -> None:
        #: The stages that each micro-batch has left for good.
        self._left: list[set[Place]] = [set() for _ in range(m)]
        self._over = [False] * m
        #: The micro-batch on each device.
        self._holders: dict[torch.device, int] = {}
        #: The stage of each micro-batch.
        self._stages: list[Place | None] = [None] * m
        #: The sequence number of autograd's next node when a micro-batch has left a stage.
        self._numbers: dict[Place, int] = {}
        #: The first micro-batch that has failed.
        self._failed = m
        # Reentrant: a thread that has its lock may take it again.
        self._changed = threading.Condition()

    def come(self, i: int, stage: Place) -> None:
        """Wait until micro-batch ``i``, which leaves its stage, may come to another one.

        Raises:
            Abandoned: a micro-batch before this one has failed.
        """

        def is_next() -> bool:
            # guard: turns on a stage
            follows = i == 0 or self._over[i - 1] or stage in self._left[i - 1]
            # guard: turns on a device
            return follows and stage[0] not in self._holders

        with self._changed:
            self._free(i)
            self._wait(i, is_next)
            self._holders[stage[0]] = i
            self._stages[i] = stage
        # guard: order of nodes
        number_from(self._numbers.get(stage, 0))

    def leave(self, i: int) -> None:
        """Let the next micro-batch come to the stage of ``i``, which has sent its results on."""
        with self._changed:
            self._free(i)
            stage = self._stages[i]
            if stage is not None:
                self._left[i].add(stage)
                self._numbers[stage] = next_number()

    def wait_for_end_before(self, i: int) -> None:
        """Wait until the micro-batch before ``i`` is over; ``i`` computes no more.

        Raises:
            Abandoned: a micro-batch before this one has failed.
        """
        with self._changed:
            # The micro-batch before may have to come back to this device.
            self._free(i)
            self._wait(i, lambda: i == 0 or self._over[i - 1])

    def end(self, i: int) -> None:
        """Take note that a micro-batch is over."""
        with self._changed:
            self.leave(i)
            self._over[i] = True

    def stop(self, i: int = -1) -> None:
        """Stop all micro-batches after ``i``, which has failed."""
        with self._changed:
            # guard: errors of the first micro-batch
            self._failed = min(self._failed, i)
            self._changed.notify_all()

    def _wait(self, i: int, condition: Callable[[], bool]) -> None:
        self._changed.wait_for(lambda: i > self._failed or condition())
        if i > self._failed:
            raise Abandoned

    def _free(self, i: int) -> None:
        for device in [device for device, k in self._holders.items() if k == i]:
            del self._holders[device]
        self._changed.notify_all()
