"""A cell: one micro-batch in one partition, and all that it needs.

::

    batch (i, j-1)     skips
         │               │
       Copy            Copy        arrive      what comes from another device
         │               │
       Wait            Wait        compute
         │               │
         └──── layers ───┘                     under checkpointing, what they save is dropped
         ┌───────┴───────┐
       Wait            Wait                    what goes to another device
         │               │
         └── Recompute ──┘                     under checkpointing
         │               │
    batch (i, j)       skips

The layers and Wait belong to the device's compute stream, everything else to the copy stream of
the micro-batch. The autograd engine lets a stream wait whenever it hands a gradient from one
stream to another, so in backward the compute stream waits for a gradient where Wait is, and
nowhere before.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Hashable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

from torch import Tensor, nn

from torchgpipe.checkpoint import Checkpoint, is_recomputing
from torchgpipe.context import Context
from torchgpipe.copy import Copy, Wait
from torchgpipe.dependency import fork, join
from torchgpipe.microbatch import Batch
from torchgpipe.skip.tracker import SkipTracker, use_skip_tracker
from torchgpipe.state import LayersState
from torchgpipe.stream import AbstractStream, use_stream

__all__: list[str] = []


@dataclass(frozen=True)
class Cell:
    """One micro-batch ``i`` in one partition ``j``.

    Args:
        i: the micro-batch.
        j: the partition.
        layers: the partition.
        stream: the stream on which the layers compute.
        copy_stream: the stream on which the micro-batch arrives at the device and leaves it.
        arriving: the parts of the micro-batch that come from another device, and the copy
            stream that they leave it on.
        departing: the parts of the output that go to another device.
        context: the modes of the caller.
        state: what the layers are made of, for a step that checkpoints any micro-batch.
        checkpoint: whether to compute this one under checkpointing.
    """

    i: int
    j: int
    layers: nn.Sequential
    stream: AbstractStream
    copy_stream: AbstractStream
    arriving: Mapping[Hashable, AbstractStream]
    departing: Collection[Hashable]
    context: Context
    state: LayersState | None
    checkpoint: bool

    def arrive(self, batch: Batch) -> Batch:
        """Copies what comes from other devices to this one."""
        if self.arriving:
            with use_stream(self.copy_stream):
                for part, stream in self.arriving.items():
                    batch = batch.map(partial(Copy.apply, stream, self.copy_stream), [part])
        return batch

    def compute(self, batch: Batch) -> Batch:
        """Runs the layers.

        Raises:
            BaseException: what a layer raised, with a note that names the cell.
        """
        checkpoint = None
        with use_stream(self.stream):
            if self.arriving:
                arrive = partial(Wait.apply, self.copy_stream, self.stream)
                batch = batch.map(arrive, self.arriving)
            if self.checkpoint:
                checkpoint = Checkpoint(self._run, self.context, self.stream)
                batch = checkpoint.forward(batch)
            else:
                batch = self._run(batch)
            if self.departing:
                depart = partial(Wait.apply, self.stream, self.copy_stream)
                batch = batch.map(depart, self.departing)
        if checkpoint is not None:
            with use_stream(self.copy_stream):
                batch = checkpoint.attach(batch)
        return batch

    def join(self, batch: Batch, phony: Tensor | None) -> Batch:
        """Has this cell differentiated before the cell that the phony comes from."""
        if phony is None:
            return batch
        with use_stream(self.copy_stream):
            return batch.replace(join(batch.tensors, phony))

    def fork(self, batch: Batch) -> tuple[Batch, Tensor]:
        """Branches off the phony for a cell that is to be differentiated before this one."""
        with use_stream(self.copy_stream):
            tensors, phony = fork(batch.tensors)
        return batch.replace(tensors), phony

    def _run(self, batch: Batch) -> Batch:
        if self.state is not None and _starts_in_place(self.layers):
            # A second run needs the input as it was for the first, and micro-batches may be
            # views of the same memory.
            batch = batch.replace([tensor.clone() for tensor in batch])
        try:
            with self.state.restored() if self.state and is_recomputing() else nullcontext():
                tracker = SkipTracker(batch.skips)
                with use_skip_tracker(tracker):
                    return Batch(self.layers(batch.value), tracker.tensors)
        except BaseException as error:
            add_note(error, f"raised in partition {self.j}, micro-batch {self.i}")
            raise


def _starts_in_place(layer: nn.Module) -> bool:
    """Whether the first layer is one of torch's that can be told to change its input."""
    while isinstance(layer, nn.Sequential) and len(layer):
        layer = layer[0]
    return getattr(layer, "inplace", False) is True


def add_note(error: BaseException, note: str) -> None:
    """Adds a note to an exception; before Python 3.11, as a cause that bears it."""
    if sys.version_info >= (3, 11):
        error.add_note(note)
    else:
        cause = RuntimeError(note)
        cause.__cause__ = error.__cause__
        error.__cause__ = cause
