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

:class:`ScheduledStep` has what computations share: the post, the cells, and the sums.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor, nn

from torchgpipe.ambient import labels
from torchgpipe.ambient.context import Swap, is_in_checkpoint
from torchgpipe.ambient.generators import computing
from torchgpipe.ambient.modes import without_autocast
from torchgpipe.ambient.notes import noted
from torchgpipe.autograd.nodes import drain_queue
from torchgpipe.devices.recorder import Mark
from torchgpipe.devices.streams import AbstractStream, use_stream
from torchgpipe.engine.criterion import Criterion
from torchgpipe.engine.drawing import Draws, StepDraws
from torchgpipe.engine.links import Gradients, Links, Post
from torchgpipe.engine.outcome import Outcome, StepSums, copies_of_weights, in_place_of
from torchgpipe.engine.scheduled_cell import Cell, EagerCell
from torchgpipe.engine.stages import Stages
from torchgpipe.engine.step import Step, compute_with_copies
from torchgpipe.engine.step_plan import StepPlan
from torchgpipe.partition.keeping import policy_of
from torchgpipe.recompute.offload import Offloading, Window
from torchgpipe.schedule.program import Op
from torchgpipe.values.microbatch import VALUE, Batch

__all__: list[str] = []

Result = TypeVar("Result")

NOTHING: AbstractContextManager[None] = nullcontext()

NewCell: TypeAlias = Callable[["Forward"], Cell]


class Cells:
    """The way in which steps make cells, and have them compute; this one is for eager cells."""

    def begin(self, copies: Sequence[Mapping[Tensor, Tensor]]) -> NewCell:
        """Begin a step, and return the function that makes its cells."""
        return eager_cell

    def compute(self, function: Callable[[], None]) -> None:
        """Call a function that has a cell compute."""
        function()

    def overlap(self, one: Computation, other: Computation) -> None:
        """Compute the two computations of an overlap."""
        for run in (one, other):
            run.on(run.stream, run.compute)


@dataclass
class Crew:
    """The parts of a schedule that last from step to step; streams and threads are the wrapper's.

    Args:
        stages: the stages of the wrapper.
        cells: how cells are made; eager ones by default.
        basis: the settings that the crew was made for; other settings need a new one.
        verify: checks weights that a stage uses, and that are not among its own.
        draws: how layers use the CPU's generator, as far as steps have shown.
    """

    stages: Stages
    cells: Cells = field(default_factory=Cells)
    basis: Sequence[Any] = ()
    verify: Callable[[int, Sequence[Tensor]], None] = lambda *_: None
    draws: Draws = field(default_factory=Draws)


class ScheduledStep(Step):
    """One step of a schedule: what its computations have in common.

    Args:
        crew: what lasts from step to step.
        plan: the plan of the step.
        batches: the micro-batches; each is let go of when it is computed. An empty list if the
            first stage is in another process.
        criterion: the loss of each micro-batch.
        arriving: the copies that the last stage waits for, each with its event.
        post: makes the post of the step.
    """

    #: Gives computations their random numbers and turns at shared generators; set by Executor.
    draws: StepDraws

    def __init__(
        self,
        crew: Crew,
        plan: StepPlan,
        batches: list[Batch],
        criterion: Criterion,
        arriving: Sequence[Any] = (),
        post: Callable[[Step, Links, list[Batch]], Post] = Post,
    ) -> None:
        if torch.is_grad_enabled() and is_in_checkpoint():
            raise RuntimeError(
                "a schedule runs backward within the call, which a checkpoint of PyTorch would "
                "compute again in the middle of that backward; call it outside of checkpoint(), "
                "and pass checkpoint='always' to the wrapper"
            )
        self.crew, self.plan, self.criterion = crew, plan, criterion
        stages = crew.stages
        after = criterion.loss if isinstance(criterion.loss, nn.Module) else None
        joins, again = criterion.outputs is not None, {j for j, _ in plan.again}
        super().__init__(stages, plan.schedule.chunks, again, joins, after)
        #: Whether the caller is within autocast, so that each backward has to switch autocast off.
        self.casts = any(x.enabled for x in self.context.modes.autocast)
        #: For each stage, a dict from its weights on other devices to the copies of them on the
        #: stage's device, with which the layers compute.
        self.copies = copies_of_weights(stages)
        for body, entries, copies in zip(self.bodies, stages.lent, self.copies):
            compute_with_copies(body, entries, partial(in_place_of, copies))
        #: The gradients of the weights and of the caller's tensors, summed over micro-batches.
        self.sums = StepSums(plan, self.modules, batches, self.copies)
        self.new_cell = crew.cells.begin(self.copies)
        #: The cell of each ``(stage, micro-batch)``, from its F to its B or W, which takes it out.
        self.cells: dict[tuple[int, int], Cell] = {}
        self.links = Links(plan, stages, arriving)
        for body, mode in zip(self.bodies, plan.keepings):
            body.policy = policy_of(mode)
        #: For each worker, the cells whose saved tensors are being copied to the host: the device
        #: frees these tensors one instruction later. Empty if the step offloads no cell.
        self.windows = [Window() for _ in plan.devices] if plan.leaving else []
        for j, w in enumerate(plan.schedule.placement) if plan.leaving else ():
            offload = plan.offloads[j]
            if offload is not None:
                leaving = {i for stage, i in plan.leaving if stage == j}
                memory = stages.pool.host(plan.devices[w])
                self.bodies[j].offloading = Offloading(
                    memory, offload, j, leaving, self.links.recorder, self.windows[w]
                )
        #: Keeps the values, skips and gradients that are sent to a stage until it receives them.
        self.post = post(self, self.links, batches)

    def look_for_strays(self, cell: Cell) -> None:
        """Find weights of another module that a layer has used."""
        # guard: strays
        strays = cell.look_for_strays(self.sums.nodes[cell.j])
        if strays:
            known = {*map(id, self.sums.weights[cell.j])}
            # Of an overlap (two computations at once) both cells run before this is called for
            # either. So a weight that both use may be known by now: it must not be added twice.
            # guard: strays met once
            new = [x for x in strays if id(x) not in known]
            self.crew.verify(cell.j, new)
            self.sums.add_strays(cell.j, new)
            cell.weights += strays

    def outcome(self, value: Tensor, divisor: Tensor | None) -> Tensor:
        """The loss of the step, whose backward hands the gradients over."""
        if self.criterion.scale is not None:
            one = self.criterion.scale(torch.ones((), device=value.device, dtype=value.dtype))
            divisor = one if divisor is None else divisor * one
        zeros = self.sums.zeros(self.links, self.post, value.dtype)
        # If no tensor has got a gradient, this zero lets the caller's loss.backward() work.
        zeros = zeros or [torch.zeros_like(value, requires_grad=True)]
        loss: Tensor = Outcome.apply(value, divisor, *zeros)
        return loss


class Computation(noted):
    """One computation of an instruction.

    As a context manager it tells what is computed, in notes on exceptions and by labels.
    """

    #: Once received: for F the input, for B and I the gradients of the output. None for R and W.
    received: Any = None

    def __init__(self, step: ScheduledStep, w: int, op: Op) -> None:
        self.step, self.w, self.op = step, w, op
        self.j, _, self.i = op
        self.stream = step.links.stage_streams[self.j]
        #: Whether the stage computes on its worker's second stream, which only overlaps need.
        self.on_second_stream = self.stream is not step.links.compute[w]
        self.label = None if labels.observer is None else labels.of(op.kind, self.j, self.i)
        self._cell: Cell | None = None

    def __str__(self) -> str:
        """The note on an exception of this computation."""
        return f"raised in {self.op} on {self.step.plan.names[self.w]}"

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
        cells, key = self.step.cells, (self.j, self.i)
        return cells.pop(key) if self.op.kind in "BW" else cells[key]

    @property
    def turn(self) -> AbstractContextManager[Any]:
        """Context manager for the turn of this computation at the generator of its device."""
        return self.step.draws.turns[self.j]

    def numbers(self) -> AbstractContextManager[Any]:
        """Context manager for the random numbers of this computation, within its turn."""
        raise NotImplementedError

    def compute(self) -> None:
        """Compute, with the random numbers of the cell, when the device has its turn."""
        # The turn comes first. In cells.compute(), the thread that has the turn may trace a graph,
        # for which all other threads must have left cells.compute(). If one of them waited in there
        # for the turn, both would wait for ever.
        with self.turn, self.numbers():
            self.step.crew.cells.compute(self._compute)

    def _compute(self) -> None:
        raise NotImplementedError

    def deliver(self) -> None:
        """Send what was computed."""

    def look_for_strays(self) -> None:
        """Find weights of other modules that the layers have used: only F does."""


class Forward(Computation):
    """F, which makes the cell."""

    received: Batch
    output: Batch

    def __init__(self, step: ScheduledStep, w: int, op: Op) -> None:
        super().__init__(step, w, op)
        #: Whether the cell is checkpointed: the schedule has an R that runs its layers again.
        self.again = (self.j, self.i) in step.plan.again
        #: Computes the loss after the layers of the last stage; None in all other stages.
        self.criterion = step.criterion if self.j == step.plan.last else None

    def receive(self) -> None:
        self.received = self.step.post.receive(self.j, self.i)
        if self.on_second_stream:
            self.step.links.record_on(self.received, self.stream)

    def _find(self) -> Cell:
        return self.step.new_cell(self)

    @property
    def of_cell(self) -> tuple[Any, ...]:
        """Arguments of :class:`Cell`, of which cells of any kind are made."""
        weights = self.step.sums.weights[self.j]
        return self.i, self.j, self.stream, weights, self.again, self.criterion

    def numbers(self) -> AbstractContextManager[Any]:
        return self.step.draws.of(self.i, self.j)

    def _compute(self) -> None:
        cell = self.cell
        with Swap(computing, number=self.i):
            self.output = cell.forward(self.received)
        if torch.is_grad_enabled():
            self.step.cells[self.j, self.i] = cell

    def deliver(self) -> None:
        step, i, j = self.step, self.i, self.j
        # This object must not keep the output in memory. Also, a ``Pipe`` sends the memory of a
        # tensor as it is if nothing else holds the tensor, and has to send a clone otherwise.
        output = self.output
        del self.output
        if self.on_second_stream:
            step.links.record_on(output, step.links.compute[self.w])
        if j < step.plan.last:
            step.post.send(j, i, output)
        elif step.links.has_own_stream[j]:
            step.links.record_for_caller(step.criterion.results(i), j)
        del output
        if step.windows:
            self.cell.offload()

    def look_for_strays(self) -> None:
        if torch.is_grad_enabled():
            self.step.look_for_strays(self.cell)


def eager_cell(run: Forward) -> EagerCell:
    """The cell of an F, eager."""
    step = run.step
    return EagerCell(step.bodies[run.j], step.context, *run.of_cell)


class Recomputation(Computation):
    """R: run the layers of a checkpointed cell again, for what its backward needs."""

    def numbers(self) -> AbstractContextManager[Any]:
        return self.step.draws.again()

    def _compute(self) -> None:
        self.cell.recompute()


class BackwardWeight(Computation):
    """W: the half of a backward that computes the gradients of the weights."""

    def numbers(self) -> AbstractContextManager[Any]:
        return self.step.draws.backward()

    def compute(self) -> None:
        # ready() registers hooks for sums that exist. In receive() it would be too early: in an
        # overlap, both computations receive before the first one computes, and makes sums.
        self.step.sums.by_worker[self.w].ready()
        kind = self.step.plan.devices[self.w].type
        try:
            # Though the caller has autocast off, a layer may have switched it on and left it on.
            casts = self.step.casts or torch.is_autocast_enabled(kind)
            # guard: autocast in backward
            with without_autocast() if casts else NOTHING:
                super().compute()
        except BaseException:
            drain_queue()
            raise

    def _compute(self) -> None:
        self.step.sums.by_worker[self.w].add(*self.cell.backward_weight())


class BackwardInput(BackwardWeight):
    """I: the half of a backward that computes the gradients of the input, and sends them."""

    received: Gradients
    inputs: Gradients

    def receive(self) -> None:
        step, i, j = self.step, self.i, self.j
        if j < step.plan.last:
            self.received = step.post.receive_grads(j, i)
        else:
            self.received = {VALUE: [step.criterion.grad(i)]}
        for grads in self.received.values() if self.on_second_stream else ():
            step.links.record_on(grads, self.stream)

    def _compute(self) -> None:
        self.inputs = self.cell.backward_input(self.received)

    def deliver(self) -> None:
        inputs, links = self.inputs, self.step.links
        del self.inputs
        for grads in inputs.values() if self.on_second_stream else ():
            links.record_on(grads, links.compute[self.w])
        self.step.post.send_grads(self.j, self.i, inputs)


class Backward(BackwardInput):
    """B: a whole backward, I and W at once."""

    def _compute(self) -> None:
        self.inputs, weights, grads = self.cell.backward(self.received)
        self.step.sums.by_worker[self.w].add(weights, grads)


KINDS: dict[str, type[Computation]] = {
    "F": Forward,
    "R": Recomputation,
    "B": Backward,
    "I": BackwardInput,
    "W": BackwardWeight,
}
