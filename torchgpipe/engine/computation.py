"""The computations of instructions, one class for each kind: receive, compute, and deliver.

::

                receive             compute             deliver
    F           values and skips    layers              values and skips
    R                               layers, again
    B           gradients           the whole backward  gradients
    I           gradients           its input's half    gradients
    W                               its weights' half

A computation receives and delivers on the worker's compute stream, and computes on the stream of
its stage. What it sets in the process while it computes (the state of a generator, autocast) is set
around each piece that runs, and put back before the next piece of anything runs.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from torchgpipe.ambient import labels
from torchgpipe.ambient.context import Swap
from torchgpipe.ambient.generators import computing
from torchgpipe.ambient.modes import without_autocast
from torchgpipe.ambient.notes import noted
from torchgpipe.autograd.nodes import drain_queue
from torchgpipe.devices.recorder import Mark
from torchgpipe.devices.streams import AbstractStream, use_stream
from torchgpipe.engine.scheduled_cell import Cell, Gradients
from torchgpipe.schedule.program import Op
from torchgpipe.values.microbatch import VALUE, Batch

if TYPE_CHECKING:
    from torchgpipe.engine.loop import Executor

__all__: list[str] = []

Result = TypeVar("Result")

NOTHING: AbstractContextManager[None] = nullcontext()


class Computation(noted):
    """One computation of an instruction.

    As a context manager it tells what is computed, in notes on exceptions and by labels.
    """

    #: What its cell is given.
    given: Any = None

    def __init__(self, executor: Executor, w: int, op: Op) -> None:
        self.executor, self.w, self.op = executor, w, op
        self.j, _, self.i = op
        #: The stream that it computes on.
        self.stream = executor.links.stage_streams[self.j]
        #: Whether that is not the worker's compute stream.
        self.is_beside = self.stream is not executor.links.compute[w]
        self.label = None if labels.observer is None else labels.of(op.kind, self.j, self.i)
        self._cell: Cell | None = None

    def __str__(self) -> str:
        """The note on an exception of this computation."""
        return f"raised in {self.op} on {self.executor.plan.names[self.w]}"

    @property
    def mark(self) -> Mark:
        """The mark by which a trace knows the span of this computation."""
        return Mark(self.op.kind, self.stream, self.w, self.j, self.i)

    def on(self, stream: AbstractStream, function: Callable[..., Result], *args: Any) -> Result:
        """Call a function that does a piece of this computation on a stream."""
        with use_stream(stream), self:
            return function(*args)

    def prepare(self) -> None:
        """Do what can be done before anything has come from another process."""
        self._cell = self._find()

    def receive(self) -> None:
        """Take what other workers have sent for this computation; some need nothing."""

    @property
    def cell(self) -> Cell:
        """The cell, which its last computation takes from the step."""
        if self._cell is None:
            self._cell = self._find()
        return self._cell

    def _find(self) -> Cell:
        cells, key = self.executor.cells, (self.j, self.i)
        return cells.pop(key) if self.op.kind in "BW" else cells[key]

    @property
    def turn(self) -> AbstractContextManager[Any]:
        """Context manager for the turn of this computation at the generator of its device."""
        return self.executor.draws.turns[self.j]

    def numbers(self) -> AbstractContextManager[Any]:
        """Context manager for the random numbers of this computation, within its turn."""
        raise NotImplementedError

    def compute(self) -> None:
        """Compute, with the random numbers of the cell, when the device has its turn."""
        # Not the other way round: who has its turn may trace, and waits for all that compute.
        with self.turn, self.numbers():
            self.executor.crew.cells.compute(self._compute)

    def _compute(self) -> None:
        raise NotImplementedError

    def deliver(self) -> None:
        """Send what was computed."""

    def settle(self) -> None:
        """Do the rest, for which no other computation waits."""


class Forward(Computation):
    """F, which makes the cell."""

    given: Batch
    output: Batch

    def __init__(self, executor: Executor, w: int, op: Op) -> None:
        super().__init__(executor, w, op)
        #: Whether the cell has an R.
        self.again = (self.j, self.i) in executor.plan.again
        #: The loss after the layers, if this is the last stage.
        self.criterion = executor.criterion if self.j == executor.plan.last else None

    def receive(self) -> None:
        self.given = self.executor.post.receive(self.j, self.i)
        if self.is_beside:
            self.executor.links.record_on(self.given, self.stream)

    def _find(self) -> Cell:
        return self.executor.new_cell(self)

    def numbers(self) -> AbstractContextManager[Any]:
        return self.executor.draws.of(self.i, self.j)

    def _compute(self) -> None:
        cell = self.cell
        with Swap(computing, number=self.i):
            self.output = cell.forward(self.given)
        if torch.is_grad_enabled():
            self.executor.cells[self.j, self.i] = cell

    def deliver(self) -> None:
        executor, i, j = self.executor, self.i, self.j
        # Whoever held the output would keep it on the device, and have a message copy it.
        output = self.output
        del self.output
        if self.is_beside:
            executor.links.record_on(output, executor.links.compute[self.w])
        if j < executor.plan.last:
            executor.post.send(j, i, output)
        elif executor.links.is_outside[j]:
            executor.links.record_for_caller(executor.criterion.results(i), j)
        del output
        if executor.windows:
            self.cell.offload()

    def settle(self) -> None:
        if torch.is_grad_enabled():
            self.executor.look_for_strays(self.cell)


class Recomputation(Computation):
    """R: run the layers of a checkpointed cell again, for what its backward needs."""

    def numbers(self) -> AbstractContextManager[Any]:
        return self.executor.draws.again()

    def _compute(self) -> None:
        self.cell.recompute()


class BackwardWeight(Computation):
    """W: the half of a backward that computes the gradients of the weights."""

    def numbers(self) -> AbstractContextManager[Any]:
        return self.executor.draws.backward()

    def compute(self) -> None:
        # Not before: the other one of an overlap may make the first sum.
        self.executor.sums.by_worker[self.w].ready()
        kind = self.executor.plan.devices[self.w].type
        try:
            # A layer may leave autocast on.
            casts = self.executor.casts or torch.is_autocast_enabled(kind)
            # guard: autocast in backward
            with without_autocast() if casts else NOTHING:
                super().compute()
        except BaseException:
            drain_queue()
            raise

    def _compute(self) -> None:
        self.executor.sums.by_worker[self.w].add(*self.cell.backward_weight())


class BackwardInput(BackwardWeight):
    """I: the half of a backward that computes the gradients of the input, and sends them."""

    given: Gradients
    inputs: Gradients

    def receive(self) -> None:
        executor, i, j = self.executor, self.i, self.j
        if j < executor.plan.last:
            self.given = executor.post.receive_grads(j, i)
        else:
            self.given = {VALUE: [executor.criterion.grad(i)]}
        for grads in self.given.values() if self.is_beside else ():
            executor.links.record_on(grads, self.stream)

    def _compute(self) -> None:
        self.inputs = self.cell.backward_input(self.given)

    def deliver(self) -> None:
        inputs, links = self.inputs, self.executor.links
        del self.inputs
        for grads in inputs.values() if self.is_beside else ():
            links.record_on(grads, links.compute[self.w])
        self.executor.post.send_grads(self.j, self.i, inputs)


class Backward(BackwardInput):
    """B: a whole backward, I and W at once."""

    def _compute(self) -> None:
        self.inputs, weights, grads = self.cell.backward(self.given)
        self.executor.sums.by_worker[self.w].add(weights, grads)


#: The classes of computations, by kind.
KINDS: dict[str, type[Computation]] = {
    "F": Forward,
    "R": Recomputation,
    "B": Backward,
    "I": BackwardInput,
    "W": BackwardWeight,
}
