"""A cell: one micro-batch in one partition, and all that it needs.

::

    batch (i, j-1)
         │
       Copy            arrive      if partition j-1 sits on another device
         │
       Wait            compute
         │
      layers                       under checkpointing, what they save is dropped
         │
       Wait                        if partition j+1 sits on another device
         │
     Recompute                     under checkpointing
         │
    batch (i, j)

The layers and Wait belong to the device's compute stream, everything else to the copy stream of
the micro-batch. The autograd engine lets a stream wait whenever it hands a gradient from one
stream to another, so in backward the compute stream waits for a gradient where Wait is, and
nowhere before.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from dataclasses import dataclass

from torch import Tensor, nn

from torchgpipe.checkpoint import Checkpoint, is_recomputing
from torchgpipe.context import Context
from torchgpipe.copy import Copy, Wait
from torchgpipe.dependency import fork, join
from torchgpipe.microbatch import Batch
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
        prev_stream: the copy stream that it leaves the previous device on, or None if the
            previous partition sits on the same device.
        departs: whether the next partition sits on another device.
        context: the modes of the caller.
        state: what the layers are made of, for a step that checkpoints any micro-batch.
        checkpoint: whether to compute this one under checkpointing.
    """

    i: int
    j: int
    layers: nn.Sequential
    stream: AbstractStream
    copy_stream: AbstractStream
    prev_stream: AbstractStream | None
    departs: bool
    context: Context
    state: LayersState | None
    checkpoint: bool

    def arrive(self, batch: Batch) -> Batch:
        """Copies the output of the previous partition to this one's device."""
        if self.prev_stream is None:
            return batch
        with use_stream(self.copy_stream):
            return batch.replace(Copy.apply(self.prev_stream, self.copy_stream, *batch))

    def compute(self, batch: Batch) -> Batch:
        """Runs the layers.

        Raises:
            BaseException: what a layer raised, with a note that names the cell.
        """
        checkpoint = None
        with use_stream(self.stream):
            if self.prev_stream is not None:
                batch = batch.replace(Wait.apply(self.copy_stream, self.stream, *batch))
            if self.checkpoint:
                checkpoint = Checkpoint(self._run, self.context, self.stream)
                batch = checkpoint.forward(batch)
            else:
                batch = self._run(batch)
            if self.departs:
                batch = batch.replace(Wait.apply(self.stream, self.copy_stream, *batch))
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
                return batch.call(self.layers)
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
