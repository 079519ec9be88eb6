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
from collections.abc import Collection, Hashable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from types import TracebackType

from torch import Tensor, nn

from torchgpipe.checkpoint import Checkpoint, is_recomputing
from torchgpipe.context import Context
from torchgpipe.copy import Copy, Wait
from torchgpipe.dependency import fork, join
from torchgpipe.microbatch import Batch
from torchgpipe.skip.tracker import SkipTracker, use_skip_tracker
from torchgpipe.state import LayersState, version_of
from torchgpipe.stream import AbstractStream, use_stream

__all__: list[str] = []


@dataclass(slots=True)
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
        with use_stream(self.stream), self.named:
            if self.arriving:
                arrive = partial(Wait.apply, self.copy_stream, self.stream)
                batch = batch.map(arrive, self.arriving)
            if self.checkpoint:
                checkpoint = Checkpoint(self._run, self.context, self.stream, self.named)
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

    def join(self, batch: Batch, phonies: Sequence[Tensor]) -> Batch:
        """Has this cell differentiated before those that the phonies come from."""
        with use_stream(self.copy_stream):
            for phony in phonies:
                batch = batch.replace(join(batch.tensors, phony))
        return batch

    def fork(self, batch: Batch) -> tuple[Batch, Tensor]:
        """Branches off the phony for a cell that is to be differentiated before this one."""
        with use_stream(self.copy_stream):
            tensors, phony = fork(batch.tensors)
        return batch.replace(tensors), phony

    @property
    def named(self) -> Named:
        """Names this cell in exceptions."""
        return Named(f"raised in partition {self.j}, micro-batch {self.i}")

    def _run(self, batch: Batch) -> Batch:
        if (self.state or self.j == 0) and _starts_in_place(self.layers):
            # A second run needs the input as it was for the first, and micro-batches may be
            # views of the same memory, which is the caller's.
            batch = batch if batch.shares_memory else batch.replace([x.clone() for x in batch])
        versions = [version_of(x) for x in batch] if batch.shares_memory else None
        tracker = SkipTracker(batch.skips)
        again = self.state.restored() if self.state and is_recomputing() else nullcontext()
        with again, use_skip_tracker(tracker):
            output = Batch(self.layers(batch.value), tracker.tensors)
        if versions is not None and versions != [version_of(x) for x in batch]:
            raise RuntimeError(
                "tensors that pass between partitions must not share memory where the next "
                f"partition changes one in place (shapes: {[tuple(x.shape) for x in batch]}); "
                "clone one of them, or move the split so that both layers are in one partition"
            )
        return output


def _starts_in_place(layer: nn.Module) -> bool:
    """Whether the first layer is one of torch's that can be told to change its input."""
    while isinstance(layer, nn.Sequential) and len(layer):
        layer = layer[0]
    return getattr(layer, "inplace", False) is True


class Named:
    """Adds a note to what is raised within a ``with`` block, and lets it pass."""

    def __init__(self, note: str) -> None:
        self.note = note

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None:
            # An exception that takes none comes without.
            with suppress(Exception):
                add_note(error, self.note)


def add_note(error: BaseException, note: str) -> None:
    """Adds a note to an exception, once; before Python 3.11, as a cause that bears it."""
    if sys.version_info >= (3, 11):
        if note not in getattr(error, "__notes__", ()):
            error.add_note(note)
    elif getattr(error.__cause__, "args", None) != (note,):
        cause = RuntimeError(note)
        # What would have been shown as the reason still is.
        cause.__cause__ = error.__cause__
        cause.__context__ = error.__context__
        cause.__suppress_context__ = error.__suppress_context__
        error.__cause__ = cause
