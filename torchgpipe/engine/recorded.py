"""Recorded cells: the spans of a traced model whose backward is ordered by autograd.

Autograd has no instructions that could be timed. So the forward of a cell and its recomputation are
timed around its layers. Its backward begins when the ``grad_fn`` of its output is about to run, and
ends when the ``grad_fn`` of its input is. Hooks of nodes tell both, on the stream of the node: they
change neither the graph nor what it computes.

The inputs of the first cells have no ``grad_fn`` of their own. There, the backward ends with the
node that was recorded first, and the graph of the cell is searched for it.

A hook takes ten microseconds of the host. On the CPU, autograd computes one cell after another, so
a backward ends where the next one begins, and only the first micro-batch, which comes last, needs
hooks that tell its end.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor
from torch.autograd.graph import Node

from torchgpipe.autograd.nodes import before_node, next_number, number_of
from torchgpipe.devices.recorder import Mark, Recorder, copy_mark
from torchgpipe.devices.streams import AbstractStream, has_streams
from torchgpipe.recompute.runs import is_recomputing
from torchgpipe.show.figures import StepFigures

__all__: list[str] = []

#: A cell's compute stream, and the indices of its worker, its stage, and its micro-batch.
Where: TypeAlias = tuple[AbstractStream, int, int, int]


class Holder(Protocol):
    """An object that lasts from step to step, and is asked in each whether to record it."""

    recording: Recording | None
    #: The measured times and bytes of the last step that was recorded; None if there was none.
    figures: StepFigures | None


@runtime_checkable
class Traceable(Protocol):
    """A wrapper whose steps can be recorded."""

    def _traced(self) -> tuple[Holder, Sequence[torch.device]]:
        """The object that holds the recording, and the devices."""


class Recording:
    """The spans of a model, as long as it is traced."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        #: Called with the mark of a forward of micro-batch 0, returns the context manager in which
        #: the layers run. A trace sets a function that finds where layers wait for a device.
        self.within: Callable[[Mark], AbstractContextManager[Any]] = nullcontext
        #: The backward that is under way on the CPU, None without any. It ends when a backward or a
        #: recomputation of another cell begins.
        self._running: Mark | None = None

    def looking(self, mark: Mark) -> AbstractContextManager[Any]:
        """Context manager around the layers of a cell."""
        return nullcontext() if mark.kind != "F" or mark.microbatch else self.within(mark)

    def begin_step(self) -> None:
        """Take note that another step begins."""
        # The first backward of this step must not end the last one of the step before.
        self._running = None
        self.recorder.begin_step()

    def run(
        self,
        run: Callable[..., Any],
        where: Where,
        tensors: Callable[[Any], Iterable[Tensor]],
        value: Any,
        **more: Any,
    ) -> Any:
        """Run layers, in forward or in recomputation, and take the times."""
        if is_recomputing():
            again = Mark("R", *where)
            self._end_running(again)
            self.recorder.begin(again)
            try:
                # When backward has all that it needs, an exception ends the recomputation.
                return run(value, **more)
            finally:
                self.recorder.end(again)
        forward = Mark("F", *where)
        is_ended = forward.microbatch == 0 or has_streams(forward.stream.device)
        before: set[Node | None] = set()
        number = 0
        if is_ended:
            # Backward ends at the nodes of the input. Nodes are kept and not tensors, which the
            # layers release. In the first stage nodes do not tell where a backward ends, since the
            # caller may have made all micro-batches by one node.
            before = {x.grad_fn for x in tensors(value) if x.requires_grad and forward.stage}
            number = next_number()
        self.recorder.begin(forward)
        with self.looking(forward):
            output = run(value, **more)
        self.recorder.end(forward)
        backward = Mark("B", *where)
        backward.step = forward.step
        begin = partial(self._begin, backward, ())
        for x in tensors(output):
            before_node(x, begin)
        if is_ended:
            after = _nodes(tensors(output))
            if after:
                self._end_at(backward, before, after, number)
        return output

    def _end_at(
        self, backward: Mark, before: set[Node | None], after: set[Node], number: int
    ) -> None:
        """End a backward at the nodes of its input, or after the first node of the cell."""
        end = partial(self._end, backward)
        for node in before:
            if node is not None:
                node.register_prehook(end)
        if not before or None in before:
            _first(after, number).register_hook(end)

    def copying(
        self,
        copy: Callable[..., Any],
        lanes: tuple[AbstractStream, AbstractStream],
        stages: tuple[int, int],
        i: int,
    ) -> Callable[..., Any]:
        """Wrap a function that copies tensors, to take the times of copies in both directions."""
        here, there = lanes
        source, target = stages
        if here.device == there.device:
            return copy

        def run(*tensors: Tensor) -> Any:
            going = self.recorder.begin(copy_mark(there, source, target, i), here)
            copies = copy(*tensors)
            self.recorder.end(going)
            back = copy_mark(here, target, source, i)
            back.step = going.step
            for node in _nodes(copies):
                node.register_prehook(partial(self._begin, back, (there,)))
                node.register_hook(partial(self._end, back))
            return copies

        return run

    def _begin(self, mark: Mark, others: Sequence[AbstractStream], *_: Any) -> None:
        # Backward of a cell begins with the first gradient of its outputs. Gradients of the other
        # outputs, and of a second backward through the graph, change nothing.
        if mark.start is None:
            self._end_running(mark)
            self.recorder.begin(mark, *others)
            if not has_streams(mark.stream.device):
                self._running = mark

    def _end(self, mark: Mark, *_: Any) -> None:
        if mark.start is not None and not mark.is_over:
            self.recorder.end(mark)

    def _end_running(self, mark: Mark) -> None:
        """End the backward that was under way on the CPU when something else begins there.

        Recomputation of a cell runs within the backward of the cell, and does not end it.
        """
        running = self._running
        if running is None or has_streams(mark.stream.device):
            return
        its_cell = running.stage, running.microbatch
        if mark.kind == "R" and its_cell == (mark.stage, mark.microbatch):
            return
        self._running = None
        self.recorder.end(running)
        running.is_over = True


def _nodes(tensors: Iterable[Tensor]) -> set[Node]:
    """The nodes behind tensors that have any."""
    return {x.grad_fn for x in tensors if x.grad_fn is not None}


def _first(nodes: Iterable[Node], number: int) -> Node:
    """Find the node of a cell that was recorded first, by a search from the nodes of its output.

    The search goes on from the node with the lowest number, down to that which the next node had
    when the cell began. So it ends soon in residual layers, where it goes along the sum.
    """
    count = itertools.count()
    waiting = [(number_of(x), next(count), x) for x in nodes]
    heapq.heapify(waiting)
    seen = {*nodes}
    first = waiting[0]
    while waiting:
        entry = heapq.heappop(waiting)
        first = min(first, entry)
        if first[0] == number:
            break
        for above, _ in entry[2].next_functions:
            # A node with a lower number belongs to the caller, or to another cell.
            if above is not None and above not in seen and number_of(above) >= number:
                seen.add(above)
                heapq.heappush(waiting, (number_of(above), next(count), above))
    return first[2]
