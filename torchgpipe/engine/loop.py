"""The idea: run the instructions of a schedule, each when what it needs is there.

::

    worker 0   0F0 0F1 0F2 0B0     0F3 0B1 ...         values go down to the next stage,
                 ╲   ╲   ╲  ↑                          skips to the stage that pops them,
    worker 1     1F0 1B0 1F1 1B1 1F2 ...               gradients the same way back

One instruction is one cell's forward, recomputation, backward, or half of a backward, on the
compute stream of its worker. What it computes is sent on at once, and received by the instruction
that needs it. A worker has its instructions in order. Whoever issues them, the caller in the order
of their simulated starts or a thread for each worker, the streams do the same work in the same
order.

Each cell has a graph of its own. Its backward is run here, within the call, and leaves sums of
gradients behind, which the caller hands over when somebody runs backward from the loss.

Sources: Narayanan et al., PipeDream (arXiv 2006.09503) for 1F1B; Qi et al., Zero Bubble Pipeline
Parallelism (arXiv 2401.10241) for I and W.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from torchgpipe.ambient.context import is_in_checkpoint
from torchgpipe.ambient.generators import holding
from torchgpipe.devices.streams import use_stream, wait_stream
from torchgpipe.engine.computation import KINDS, NOTHING, Computation
from torchgpipe.engine.criterion import Criterion
from torchgpipe.engine.drawing import Draws
from torchgpipe.engine.links import Links, Post
from torchgpipe.engine.outcome import Outcome, StepSums, copies_of_weights, in_place_of
from torchgpipe.engine.scheduled_cell import Cell, Cells
from torchgpipe.engine.stages import Stages
from torchgpipe.engine.step import Step, lend
from torchgpipe.engine.step_plan import StepPlan
from torchgpipe.engine.workers import Task
from torchgpipe.partition.keeping import policy_of
from torchgpipe.recompute.offload import Offloading, Window
from torchgpipe.schedule.program import Instruction, Op, operations
from torchgpipe.values.microbatch import Batch

__all__: list[str] = []

#: Performs all instructions, and calls a function before any backward.
PerformAll: TypeAlias = Callable[[Callable[[], None]], None]


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


class Executor:
    """One step of a schedule.

    Args:
        crew: what lasts from step to step.
        plan: the plan of the step.
        batches: the micro-batches; each is let go of when it is computed. An empty list if the
            first stage is in another process.
        criterion: the loss of each micro-batch.
        arriving: the copies that the last stage waits for, each with its event.
        post: makes the post of the step.
    """

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
        self.step = Step(stages, plan.schedule.chunks, again, joins, after)
        #: Whether the caller is within autocast, which backward must not be.
        self.casts = any(x.enabled for x in self.step.context.modes.autocast)
        #: For each stage, copies of weights that it computes with in their place.
        self.copies = copies_of_weights(stages)
        for body, places, own in zip(self.step.bodies, stages.lent, self.copies):
            lend(body, places, partial(in_place_of, own))
        #: What gradients are summed for.
        self.sums = StepSums(plan, self.step.modules, batches, self.copies)
        self.new_cell = crew.cells.begin(self.copies)
        #: The cells between F and their last instruction.
        self.cells: dict[tuple[int, int], Cell] = {}
        self.links = Links(plan, stages, arriving)
        for body, mode in zip(self.step.bodies, plan.keepings):
            body.policy = policy_of(mode)
        #: For each worker, the cells that leave for the host; empty if none do.
        self.windows = [Window() for _ in plan.devices] if plan.leaving else []
        for j, w in enumerate(plan.schedule.placement) if plan.leaving else ():
            offload = plan.offloads[j]
            if offload is not None:
                leaving = {i for stage, i in plan.leaving if stage == j}
                memory = stages.pool.host(plan.devices[w])
                found = Offloading(
                    memory, offload, j, leaving, self.links.recorder, self.windows[w]
                )
                self.step.bodies[j].offloading = found
        #: What is on its way from stage to stage.
        self.post = post(self.step, self.links, batches)

    def run(self, perform_all: PerformAll | None = None) -> None:
        """Run all instructions.

        Args:
            perform_all: a function that performs them, in place of the caller or its workers.
                It is given a function to call before any backward.
        """
        holding(self.step.numbers.locks, partial(self._run, perform_all or self._perform_all))
        self.step.end_forward()

    def _run(self, perform_all: PerformAll) -> None:
        if self.crew.stages.recording is not None:
            self.crew.stages.recording.begin_step()
        with ExitStack() as within:
            self.sums.begin(within)
            within.enter_context(self.step.numbers)
            self.draws = within.enter_context(self.crew.draws.step(self.step, self.plan))
            self.links.begin()
            try:
                perform_all(partial(self.sums.prepare, within))
            finally:
                self.links.end()

    def _perform_all(self, prepare: Callable[[], None]) -> None:
        prepare()
        plan = self.plan
        tasks = [
            Task(number, plan.devices[w], partial(self.perform, w, x), needs, plan.lines[w])
            for number, ((w, x, _), needs) in enumerate(zip(plan.order, plan.needs))
        ]
        self.crew.stages.workers.run(tasks, self.step.context)

    def perform(self, w: int, instruction: Instruction) -> None:
        """Run an instruction of a worker: receive, compute, and deliver.

        Raises:
            BaseException: what a layer raised, with a note that names the computation.
        """
        runs = self.begin(w, instruction)
        self.carry_out(w, runs)
        self.settle(w, runs)

    def begin(self, w: int, instruction: Instruction) -> list[Computation]:
        """The computations of an instruction of a worker."""
        if self.windows:
            for cell in self.plan.fetches.get(instruction, ()):
                self.cells[cell].fetch()
        if isinstance(instruction, Op):
            return [KINDS[instruction.kind](self, w, instruction)]
        return [KINDS[op.kind](self, w, op) for op in operations(instruction)]

    def carry_out(self, w: int, runs: Sequence[Computation]) -> None:
        """Receive, compute, and deliver."""
        if len(runs) > 1 or runs[0].is_beside:
            self._perform_beside(w, runs)
            return
        (run,) = runs
        with use_stream(run.stream), run:
            run.receive()
            recording, mark = self.crew.stages.recording, self._begun(run)
            with NOTHING if recording is None else recording.looking(mark):
                run.compute()
            self._ended(mark)
            run.deliver()

    def settle(self, w: int, runs: Sequence[Computation]) -> None:
        """End an instruction of a worker, once it has delivered."""
        for run in runs:
            try:
                run.settle()
            except BaseException:
                with run:
                    raise
        if self.windows:
            self.windows[w].passed()

    def _perform_beside(self, w: int, runs: Sequence[Computation]) -> None:
        """Run computations of a worker that has two streams to compute on.

        Each computation receives on the worker's compute stream, computes on the stream of its
        stage, and delivers on the worker's compute stream.

        The two computations of an overlap start and end together. They are on two streams, unless
        they are of one stage, or of two that share weights.
        """
        main = self.links.compute[w]
        for run in runs:
            run.on(main, run.receive)
        others = [run.stream for run in runs if run.stream != main]
        for stream in others:
            # guard: start of an overlap
            wait_stream(stream, main)
        marks = [self._begun(run) for run in runs]
        if len(runs) == 2:
            self.crew.cells.beside(*runs)
        else:
            (run,) = runs
            run.on(run.stream, run.compute)
        for mark in marks:
            self._ended(mark)
        for stream in others:
            # guard: end of an overlap
            wait_stream(main, stream)
        for run in runs:
            run.on(main, run.deliver)

    def _begun(self, run: Computation) -> Any:
        """The mark of a computation that begins here, while somebody traces the model."""
        recorder = self.links.recorder
        return None if recorder is None else recorder.begin(run.mark)

    def _ended(self, mark: Any) -> None:
        if self.links.recorder is not None:
            self.links.recorder.end(mark)

    def look_for_strays(self, cell: Cell) -> None:
        """Find weights of another module that a layer has used."""
        # guard: strays
        strays = cell.look_for_strays(self.sums.nodes[cell.j])
        if strays:
            known = {*map(id, self.sums.weights[cell.j])}
            # Two cells of an overlap have run before either is looked at.
            # guard: strays met once
            met = [x for x in strays if id(x) not in known]
            self.crew.verify(cell.j, met)
            self.sums.met(cell.j, met)
            cell.weights += strays

    def outcome(self, value: Tensor, divisor: Tensor | None) -> Tensor:
        """The loss of the step, whose backward hands the gradients over."""
        if self.criterion.scale is not None:
            one = self.criterion.scale(torch.ones((), device=value.device, dtype=value.dtype))
            divisor = one if divisor is None else divisor * one
        zeros = self.sums.zeros(self.links, self.post, value.dtype)
        # What requires a gradient may have got none, and the loss has a backward all the same.
        zeros = zeros or [torch.zeros_like(value, requires_grad=True)]
        loss: Tensor = Outcome.apply(value, divisor, *zeros)
        return loss
