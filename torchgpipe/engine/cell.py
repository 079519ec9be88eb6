"""A cell: one micro-batch in one partition, and all that it needs.

::

    batch (i, j-1)     skips
         │               │
       Copy            Copy        arrive      what comes from another stream
         │               │
       Wait            Wait        compute
         │               │
         └──── layers ───┘                     under checkpointing, what they save is dropped
         ┌───────┴───────┐
       clone           clone                   what goes to another stream
         │               │
       fork            fork        fork        under checkpointing: Recompute
         │               │
    batch (i, j)       skips

The layers, Wait and the clone belong to the compute stream of the partition, Copy and the fork to
the copy stream of the micro-batch. The autograd engine lets a stream wait whenever it hands a
gradient from one stream to another, so in backward the compute stream waits for a gradient where
the clone is, and nowhere before.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

from torch import Tensor, nn

from torchgpipe.ambient.context import Context
from torchgpipe.ambient.notes import Named
from torchgpipe.autograd.copy import copy, leave, wait
from torchgpipe.autograd.fork_join import fork, join
from torchgpipe.devices.streams import AbstractStream, use_stream
from torchgpipe.recompute.checkpoint import Checkpoint, is_recomputing
from torchgpipe.recompute.layers import LayersState, counter_of, version_of
from torchgpipe.skip.tracker import SkipTracker, use_skip_tracker
from torchgpipe.values.microbatch import VALUE, Batch

__all__: list[str] = []

Function: TypeAlias = Callable[..., tuple[Tensor, ...]]
Fork: TypeAlias = Callable[[tuple[Tensor, ...]], tuple[tuple[Tensor, ...], Tensor]]


@dataclass(slots=True)
class Cell:
    """One micro-batch ``i`` in one partition ``j``.

    Args:
        i: the micro-batch.
        j: the partition.
        layers: the partition.
        stream: the stream on which the layers compute.
        lanes: the copy streams on which the parts that follow arrive and leave.
        arriving: the parts of the micro-batch that come from another compute stream, and the copy
            stream that they leave it on.
        departing: the parts of the output that go to another compute stream.
        context: what the caller has set.
        lock: of the layers: another thread may compute them, or have exchanged their state.
        numbers: has the layers draw the random numbers of the micro-batch within it.
        state: what the layers are made of, for a step that checkpoints any micro-batch.
        checkpoint: whether to compute this one under checkpointing.
        starts_in_place: whether the first layer changes its input.
    """

    i: int
    j: int
    layers: nn.Sequential
    stream: AbstractStream
    lanes: Mapping[Hashable, AbstractStream]
    arriving: Mapping[Hashable, AbstractStream]
    departing: Collection[Hashable]
    context: Context
    lock: AbstractContextManager[Any]
    numbers: AbstractContextManager[None]
    state: LayersState | None
    checkpoint: bool
    starts_in_place: bool
    checkpointed: Checkpoint | None = field(default=None, init=False)

    def arrive(self, batch: Batch, phonies: Sequence[Tensor] = ()) -> Batch:
        """Fetches what comes from elsewhere.

        Args:
            batch: the input.
            phonies: what was branched off cells that are to be differentiated after this one.
        """
        staying = [part for part in batch.parts if phonies and part not in self.arriving]
        if staying:
            with use_stream(self.stream):
                batch = batch.map(lambda *tensors: join(tensors, *phonies), staying)
        for part, stream in self.arriving.items():
            lane = self.lanes[part]
            # guard: lane of Copy
            with use_stream(lane):
                batch = batch.map(partial(copy, stream, lane, phonies=phonies), [part])
        return batch

    def compute(self, batch: Batch) -> Batch:
        """Runs the layers. The micro-batch that is given is let go of.

        Raises:
            BaseException: what a layer raised, with a note that names the cell.
        """
        checkpoint = None
        # guard: letting go of the input
        batch = batch.take()
        with use_stream(self.stream), self.named:
            for lane, parts in self._by_lane(self.arriving):
                # guard: lane of arriving Wait
                batch = batch.map(partial(wait, lane, self.stream), parts)
            if self.checkpoint:
                assert self.state is not None
                checkpoint = Checkpoint(
                    self._run,
                    self.context,
                    self.stream,
                    self.named,
                    self.state.lasting,
                    self.state.always_calls,
                )
            with self.numbers:
                run = checkpoint.forward if checkpoint else self._run
                batch = self.context.run(run, batch)
            left: dict[int, Tensor] = {}
            for lane, parts in self._by_lane(self.departing):
                # guard: lane of leaving Wait
                batch = batch.map(partial(leave, self.stream, lane, left=left), parts)
        if self.departing:
            self.checkpointed = checkpoint
        return batch

    def join(self, batch: Batch, phonies: Sequence[Tensor]) -> Batch:
        """Has this cell begin to be differentiated before those that the phonies come from.

        Args:
            batch: the output.
            phonies: what :meth:`fork` branched off there.
        """
        if not phonies:
            return batch

        def merge(*tensors: Tensor) -> tuple[Tensor, ...]:
            return join(tensors, *phonies)

        return self._on_lanes(batch, merge, merge)

    def fork(self, batch: Batch, last: bool) -> tuple[Batch, list[Tensor]]:
        """Branches phonies off the output, for cells to be differentiated before this one.

        What departs has its gradient trigger the recomputation.

        Args:
            batch: the output.
            last: whether there are no such cells in this partition. What stays is left alone then.
        """
        phonies = []

        def branch(fork: Fork, *tensors: Tensor) -> tuple[Tensor, ...]:
            tensors, phony = fork(tensors)
            phonies.append(phony)
            return tensors

        # It refers to this cell.
        checkpoint, self.checkpointed = self.checkpointed, None
        recompute = checkpoint.fork if checkpoint else fork
        staying = None if last else partial(branch, fork)
        return self._on_lanes(batch, partial(branch, recompute), staying), phonies

    def _on_lanes(self, batch: Batch, departing: Function, staying: Function | None) -> Batch:
        """Applies autograd functions: what departs belongs to its copy stream.

        What stays belongs to the compute stream, where layers may add to its gradient in place.
        """
        for lane, parts in self._by_lane(self.departing):
            # guard: lane of what leaves
            with use_stream(lane):
                batch = batch.map(departing, parts)
        rest = [part for part in batch.parts if part not in self.departing]
        if rest and staying:
            with use_stream(self.stream):
                batch = batch.map(staying, rest)
        return batch

    def _by_lane(self, parts: Collection[Hashable]) -> list[tuple[AbstractStream, list[Hashable]]]:
        lanes: list[tuple[AbstractStream, list[Hashable]]] = []
        for part in parts:
            if not lanes or lanes[-1][0] is not self.lanes[part]:
                lanes.append((self.lanes[part], []))
            lanes[-1][1].append(part)
        return lanes

    @property
    def named(self) -> Named:
        """Names this cell in exceptions."""
        return Named(f"raised in partition {self.j}, micro-batch {self.i}")

    def _run(self, batch: Batch) -> Batch:
        # Once they share memory, parts may be on different devices, where they no longer do.
        # guard: letting go of what is watched
        counters = [counter_of(x) for part in batch.shared for x in batch.parts.get(part, ())]
        versions = [version_of(x) for x in counters]
        if self.starts_in_place:
            if VALUE not in batch.shared:
                if self.state or self.j == 0:
                    # A second run needs the input as it was for the first, and micro-batches may
                    # be views of the same memory, which is the caller's.
                    batch = batch.take().map(lambda *xs: [x.clone() for x in xs], [VALUE])
            elif -1 in versions:
                # Inference tensors do not count what is done to them.
                raise _changed(batch)
        # From here on a skip is held by the tracker, until it is popped.
        tracker = SkipTracker(batch.skips)
        value = batch.take().with_skips({})
        again = self.state.restored() if self.state and is_recomputing() else nullcontext()
        # guard: a partition at a time
        with self.lock, again, use_skip_tracker(tracker):
            output = value.call(self.layers).with_skips(tracker.values)
        if versions != [version_of(x) for x in counters]:
            raise _changed(value)
        if VALUE in value.shared and output.aliases(value):
            output.shared |= {VALUE}
        return output


def _changed(batch: Batch) -> RuntimeError:
    return RuntimeError(
        "what passes between partitions, skips included, must not be views of one tensor where a "
        f"later partition changes one in place (shapes: {[tuple(x.shape) for x in batch]}); clone "
        "one of them, or what is stashed, or have both layers in one partition"
    )


def starts_in_place(layer: nn.Module) -> bool:
    """Whether the first layer is one of torch's that was told to change its input."""
    while isinstance(layer, nn.Sequential) and layer._modules:
        # Indexing takes long.
        layer = next(iter(layer._modules.values()))
    return getattr(layer, "inplace", False) is True
