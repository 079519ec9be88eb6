"""A cell: one micro-batch in one partition, on its way in, through the layers, and out.

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
       fork            fork        branch      under checkpointing: Recompute
         │               │
    batch (i, j)       skips

The layers, Wait and the clone belong to the compute stream of the partition, and Copy and the fork
to a copy stream (lane). Wherever a gradient passes from a node on one stream to a node on another,
autograd makes the second stream wait for the first. So in backward the compute stream waits for a
gradient where the clone is, and nowhere before.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence
from functools import partial

from torch import Tensor

from torchgpipe.ambient import labels
from torchgpipe.ambient.notes import noted
from torchgpipe.autograd.copy import leave, wait
from torchgpipe.autograd.fork_join import join
from torchgpipe.devices.streams import AbstractStream, use_stream
from torchgpipe.engine.lanes import OnTensors, carried
from torchgpipe.engine.step import Fence, PipelineStep
from torchgpipe.recompute.checkpoint import Checkpoint
from torchgpipe.values.microbatch import Batch

__all__: list[str] = []


class Cell:
    """Micro-batch ``i`` in partition ``j`` of a step."""

    __slots__ = ("_checkpoints", "arriving", "body", "departing", "i", "j", "step", "stream")

    def __init__(self, step: PipelineStep, i: int, j: int) -> None:
        self.step, self.i, self.j = step, i, j
        self.body = step.bodies[j]
        self.stream = step.lanes.compute[j]
        #: For each part of the input (the value, or a skip) that comes from another stream: the
        #: index of the partition that sends it, -1 for the caller.
        self.arriving = step.lanes.sources[j]
        #: For each part of the output (the value, or a skip) that goes to another stream: the index
        #: of the partition that gets it; for the caller, the number of partitions.
        self.departing = step.lanes.targets[j]
        self._checkpoints: list[Checkpoint] = []

    def arrive(self, batch: Batch, phonies: Sequence[Tensor] = ()) -> Batch:
        """Copy the parts that come from another stream."""
        recording = self.step.stages.recording
        staying = [part for part in batch.parts if phonies and part not in self.arriving]
        if staying:
            with use_stream(self.stream):
                batch = batch.map(partial(join, phonies), staying)
        for part, k in self.arriving.items():
            lane = self._lane(part)
            source = self.step.lanes.lane(self.i, k, part)
            # guard: lane of Copy
            with use_stream(lane):
                way = (source, lane), (k, self.j), self.i, recording
                batch = batch.map(partial(carried, *way, phonies), [part])
        return batch

    def compute(self, batch: Batch) -> Batch:
        """Run the layers. ``batch`` releases its tensors, so that each is freed after its last use.

        Raises:
            BaseException: what a layer raised, with a note that names the cell.
        """
        step = self.step
        run: Callable[..., Batch] = self.body.run
        recording = step.stages.recording
        if recording is not None:
            run = partial(recording.run, run, (self.stream, self.j, self.j, self.i), iter)
        again = self.i < step.checkpointed[self.j]
        numbers = step.numbers.of(self.i, step.stages.devices[self.j])
        checkpoint = None
        offloading = self.body.offloading
        if again:
            # The checkpoint keeps the context manager until backward. So it gets the text of the
            # note, str(self): with the cell it would keep the whole step in memory.
            within = noted(str(self), labels.of("R", self.j, self.i))
            checkpoint = self.body.checkpoint(run, step.context, self.stream, within)
            run = partial(checkpoint.forward, cell=numbers)
        elif offloading is not None:
            run = partial(offloading.cell(self.stream, self.i).forward, run)
        # guard: letting go of the input
        batch = batch.take()
        with use_stream(self.stream), noted(self):
            for lane, parts in self._by_lane(self.arriving) if self.arriving else ():
                # guard: lane of arriving Wait
                batch = batch.map(partial(wait, lane, self.stream), parts)
            with numbers:
                batch = step.context.run(run, batch)
            clones: dict[int, Tensor] = {}
            for lane, parts in self._by_lane(self.departing) if self.departing else ():
                # guard: lane of leaving Wait
                batch = batch.map(partial(leave, self.stream, lane, clones=clones), parts)
            if offloading is not None:
                offloading.offload()
        if self.departing and checkpoint:
            self._checkpoints.append(checkpoint)
        return batch

    def merge(self, batch: Batch, phonies: Sequence[Tensor]) -> Batch:
        """Make backward start this cell before the cells that produced ``phonies``."""
        joined = partial(join, phonies)
        return self._on_lanes(batch, joined, joined) if phonies else batch

    def branch(self, batch: Batch, fence: Fence, last: bool) -> Batch:
        """Branch phonies off the output, for cells that backward shall come to before this cell.

        The gradients of parts that depart trigger the recomputation.

        Args:
            batch: the output.
            fence: takes the phonies.
            last: whether this is the last micro-batch. Then no such cell is in this partition, and
                parts that stay are left alone.
        """
        departing = partial(fence.fork, self.i, self.j, self._checkpoints)
        staying = None if last else partial(fence.fork, self.i, self.j, ())
        return self._on_lanes(batch, departing, staying)

    def __str__(self) -> str:
        """The note on an exception of the cell."""
        return f"raised in partition {self.j}, micro-batch {self.i}"

    def _on_lanes(self, batch: Batch, departing: OnTensors, staying: OnTensors | None) -> Batch:
        """Apply autograd functions to the output.

        Nodes of parts that depart belong to a lane, and nodes of parts that stay to the compute
        stream, where layers may add to the gradient in place.
        """
        for lane, parts in self._by_lane(self.departing):
            label = labels.of("copy", self.j, self.i)
            # guard: lane of what leaves
            with use_stream(lane), labels.within(label):
                batch = batch.map(departing, parts)
        rest = [part for part in batch.parts if part not in self.departing]
        if rest and staying:
            with use_stream(self.stream):
                batch = batch.map(staying, rest)
        return batch

    def _lane(self, part: Hashable) -> AbstractStream:
        return self.step.lanes.lane(self.i, self.j, part)

    def _by_lane(self, parts: Collection[Hashable]) -> list[tuple[AbstractStream, list[Hashable]]]:
        """Group neighbouring parts that share a lane; return each lane with its parts."""
        groups: list[tuple[AbstractStream, list[Hashable]]] = []
        for part in parts:
            lane = self._lane(part)
            if not groups or groups[-1][0] is not lane:
                groups.append((lane, []))
            groups[-1][1].append(part)
        return groups
