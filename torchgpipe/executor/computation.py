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

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from torchgpipe.ambient import labels
from torchgpipe.ambient.autocast import without_autocast
from torchgpipe.ambient.notes import noted
from torchgpipe.autograd.ends import drained_after_failure
from torchgpipe.devices.recorder import Mark
from torchgpipe.devices.streams import AbstractStream, use_stream
from torchgpipe.executor.cell import Cell, Gradients, Work, done
from torchgpipe.executor.interleaving import Interleaving
from torchgpipe.schedule.program import Op
from torchgpipe.values.microbatch import VALUE, Batch

if TYPE_CHECKING:
    from torchgpipe.executor.executor import Executor

__all__: list[str] = []

Result = TypeVar("Result")

NOTHING: AbstractContextManager[None] = nullcontext()


class Computation:
    """One computation of an instruction.

    Args:
        executor: the step.
        w: the worker.
        op: what is computed.
    """

    def __init__(self, executor: Executor, w: int, op: Op) -> None:
        self.executor, self.w, self.op = executor, w, op
        self.j, _, self.i = op
        #: The stream that it computes on.
        self.stream = executor.links.home[self.j]

    def __str__(self) -> str:
        """The note on an exception of it."""
        return f"raised in {self.op} on {self.executor.plan.names[self.w]}"

    @property
    def label(self) -> labels.Label | None:
        """The label of its work, if somebody observes it."""
        return labels.of(self.op.kind, self.j, self.i)

    @property
    def mark(self) -> Mark:
        """The mark of its span in a trace."""
        return Mark(self.op.kind, self.stream, self.w, self.j, self.i)

    def doing(self) -> noted:
        """Context manager that tells what is computed, in notes on exceptions and by labels."""
        return noted(self, self.label)

    def on(self, stream: AbstractStream, function: Callable[..., Result], *args: Any) -> Result:
        """Call a function that does a piece of this computation on a stream."""
        with use_stream(stream), self.doing():
            return function(*args)

    def receive(self) -> None:
        """Take what was sent."""

    def compute(self) -> None:
        """Compute."""
        self.within(self._compute)

    def _compute(self) -> None:
        self.settle(done(self.begin()))

    def begin(self) -> Any:
        """Have the cell compute, or say which work it has: what its method returns."""
        raise NotImplementedError

    def settle(self, found: Any) -> None:
        """Take what the cell has computed."""

    def within(self, function: Callable[..., Result], *args: Any) -> Result:
        """Call a function that computes, with what this computation needs set."""
        with self._around():
            return function(*args)

    def _around(self) -> AbstractContextManager[Any]:
        raise NotImplementedError

    def deliver(self) -> None:
        """Send what was computed."""


class Forward(Computation):
    """F."""

    batch: Batch
    output: Batch
    cell: Cell

    def receive(self) -> None:
        self.batch = self.executor.post.receive(self.j, self.i)
        self.executor.links.lend(self.batch, self.w, self.stream)

    def _around(self) -> AbstractContextManager[Any]:
        return self.executor.draws.of(self.i, self.j)

    def begin(self) -> Any:
        executor, i, j = self.executor, self.i, self.j
        body = executor.step.bodies[j]
        run: Callable[..., Batch] = body.run
        if body.visited:
            run = partial(run, note=f"raised in partition {j}, micro-batch {i}")
        again = (j, i) in executor.plan.again
        self.cell = executor.new_cell(executor.step, i, j, self.stream, executor.sums.weights[j])
        return self.cell.forward(
            self.batch,
            run,
            executor.criterion if j == executor.plan.last else None,
            again=again,
            # What the checkpoint holds, it must not hold this.
            within=noted(str(self)) if again else NOTHING,
        )

    def settle(self, found: Batch) -> None:
        self.output = found
        if torch.is_grad_enabled():
            self.executor.keep(self.cell)

    def deliver(self) -> None:
        executor, i, j = self.executor, self.i, self.j
        executor.links.give_back(self.output, self.w, self.stream)
        if j < executor.plan.last:
            executor.post.send(j, i, self.output)
        else:
            executor.links.leave(executor.criterion.results(i), j)


class Recomputation(Computation):
    """R."""

    def _around(self) -> AbstractContextManager[Any]:
        return self.executor.draws.again(self.i, self.j)

    def begin(self) -> Any:
        return self.executor.cells[self.j, self.i].recompute()


class BackwardWeight(Computation):
    """W."""

    def within(self, function: Callable[..., Result], *args: Any) -> Result:
        # guard: autocast in backward
        with without_autocast(), drained_after_failure(), self._around():
            return function(*args)

    def _around(self) -> AbstractContextManager[Any]:
        return self.executor.draws.backward(self.i, self.j, self.op.kind == "W")

    def begin(self) -> Any:
        return self._last_of_cell().backward_weight()

    def settle(self, found: Any) -> None:
        self.executor.sums.by_worker[self.w].add(*found)

    def _last_of_cell(self) -> Cell:
        """The cell, which nobody else has from here on."""
        return self.executor.cells.pop((self.j, self.i))


class BackwardInput(BackwardWeight):
    """I."""

    grads: Gradients
    inputs: Gradients

    def receive(self) -> None:
        executor, i, j = self.executor, self.i, self.j
        if j < executor.plan.last:
            self.grads = executor.post.receive_grads(j, i)
        else:
            self.grads = {VALUE: [executor.criterion.grad(i)]}
        for grads in self.grads.values():
            self.executor.links.lend(grads, self.w, self.stream)

    def begin(self) -> Any:
        return self.executor.cells[self.j, self.i].backward_input(self._taken())

    def settle(self, found: Any) -> None:
        self.inputs = found

    def _taken(self) -> Gradients:
        """The gradients, which nobody else has from here on."""
        grads = self.grads
        del self.grads
        return grads

    def deliver(self) -> None:
        for grads in self.inputs.values():
            self.executor.links.give_back(grads, self.w, self.stream)
        self.executor.post.send_grads(self.j, self.i, self.inputs)


class Backward(BackwardInput):
    """B."""

    def begin(self) -> Any:
        return self._last_of_cell().backward(self._taken())

    def settle(self, found: Any) -> None:
        self.inputs, weights, grads = found
        self.executor.sums.by_worker[self.w].add(weights, grads)


#: The classes of computations, by kind.
KINDS: dict[str, type[Computation]] = {
    "F": Forward,
    "R": Recomputation,
    "B": Backward,
    "I": BackwardInput,
    "W": BackwardWeight,
}


def overlapped(one: Computation, other: Computation, both: Interleaving) -> None:
    """Have two computations compute, interleaved if both have work that draws no random numbers.

    Args:
        one: the first.
        other: the second.
        both: their streams.
    """
    waiting: list[tuple[Computation, Work]] = []
    for run in (one, other):
        work = run.on(run.stream, run.within, _begun, run)
        if work is not None:
            waiting.append((run, work))
    found: Sequence[Any] | None = None
    if len(waiting) == 2:
        (_, first), (_, second) = waiting
        both.labels = [one.label, other.label]
        # Each with what it needs set, around both.
        found = one.on(
            *(one.stream, one.within, other.within),
            *(partial(first.beside, second, both),),
        )
    for k, (run, work) in enumerate(waiting):
        results = None if found is None else found[k]
        run.on(run.stream, run.within, _ended, run, work, results)


def _begun(run: Computation) -> Work | None:
    """Begin a computation; return its work if that may be done beside other work."""
    found = run.begin()
    # The other one would draw from a generator that was set for this one.
    # guard: random numbers of an overlap
    if isinstance(found, Work) and not found.is_random:
        return found
    run.settle(done(found))
    return None


def _ended(run: Computation, work: Work, results: Any) -> None:
    """End a computation, whose work may have been done already."""
    run.settle(done(work) if results is None else work.finish(results))
