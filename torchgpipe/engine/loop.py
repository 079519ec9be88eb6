"""The idea: run the instructions of a schedule, each when what it needs is there.

::

    worker 0   0F0 0F1 0F2 0B0     0F3 0B1 ...         values go down to the next stage,
                 ╲   ╲   ╲  ↑                          skips to the stage that pops them,
    worker 1     1F0 1B0 1F1 1B1 1F2 ...               gradients the same way back

One instruction is one cell's forward, recomputation, backward, or half of a backward, on the
compute stream of its worker. What it computes is sent on at once, and received by the instruction
that needs it. A worker has its instructions in order. On accelerators the caller issues them all,
in the order of their simulated starts, and they wait on their streams. On the CPU, or where they
block the host, each worker has a thread, and an instruction waits there for those that it needs.

Each cell has a graph of its own. Its backward is run here, within the call, and leaves sums of
gradients behind, which the caller hands over when somebody runs backward from the loss.

An executor takes the instructions of one step's plan, and gives each three calls::

    plan ─→ begin       a Computation for an F, R, B, I or W; two for an overlap
            carry_out      receive ───→ compute ───→ deliver
                              ↑            │            │
                              │          cell ─→ sums   │
                            post ←────── links ←────────┘
            end            look for weights of other modules; nobody waits for this

    plan     the instructions of each worker, and what each of them needs      step_plan.py
    post     values, skips and gradients, until their stage receives them      links.py
    links    the lanes on which they are copied from worker to worker          links.py
    cells    for a micro-batch in a stage: F makes one, B or W takes it away   scheduled_cell.py
    sums     the gradients of weights, until backward of the loss              outcome.py

The three are apart since processes that send each other messages do more between them
(``torchgpipe/distributed/runtime.py``): a message arrives after ``begin``, and the results leave
before ``end``. Here :meth:`Executor.perform` makes one call of them. What computations have in
common is a :class:`~torchgpipe.engine.computation.ScheduledStep`. ``docs/glossary.rst`` has the
words: lane, post, sums.

Sources: Narayanan et al., PipeDream (arXiv 2006.09503) for 1F1B; Qi et al., Zero Bubble Pipeline
Parallelism (arXiv 2401.10241) for I and W.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, TypeAlias

from torchgpipe.ambient.generators import holding
from torchgpipe.devices.streams import use_stream, wait_stream
from torchgpipe.engine.computation import KINDS, NOTHING, Computation, ScheduledStep
from torchgpipe.engine.workers import Task
from torchgpipe.schedule.program import Instruction, Op, operations

__all__: list[str] = []

#: The function that performs all instructions of a step. Its argument is a function that prepares
#: the sums of gradients, which it calls before the first backward of the step.
PerformAll: TypeAlias = Callable[[Callable[[], None]], None]


class Executor:
    """The instructions of one step, as they run."""

    def __init__(self, step: ScheduledStep) -> None:
        self.step = step

    def run(self, perform_all: PerformAll | None = None) -> None:
        """Run all instructions.

        Args:
            perform_all: a function that performs them, in place of the caller or its workers.
                It is given a function to call before any backward.
        """
        holding(self.step.numbers.locks, partial(self._run, perform_all or self._perform_all))
        self.step.end_forward()

    def _run(self, perform_all: PerformAll) -> None:
        step = self.step
        if step.stages.recording is not None:
            step.stages.recording.begin_step()
        with ExitStack() as within:
            step.sums.begin(within)
            within.enter_context(step.numbers)
            step.draws = within.enter_context(step.crew.draws.step(step, step.plan))
            step.links.begin()
            try:
                perform_all(partial(step.sums.prepare, within))
            finally:
                step.links.end()

    def _perform_all(self, prepare: Callable[[], None]) -> None:
        prepare()
        plan = self.step.plan
        tasks = [
            Task(number, plan.devices[w], partial(self.perform, w, x), needs, plan.lines[w])
            for number, ((w, x, _), needs) in enumerate(zip(plan.order, plan.needs))
        ]
        self.step.stages.workers.run(tasks, self.step.context)

    def perform(self, w: int, instruction: Instruction) -> None:
        """Run an instruction of a worker: receive, compute, and deliver.

        Raises:
            BaseException: what a layer raised, with a note that names the computation.
        """
        runs = self.begin(w, instruction)
        self.carry_out(w, runs)
        self.end(w, runs)

    def begin(self, w: int, instruction: Instruction) -> list[Computation]:
        """The computations of an instruction: one, or the two of an overlap.

        Cells that come back from the host before it are fetched here.
        """
        step = self.step
        if step.windows:
            for cell in step.plan.fetches.get(instruction, ()):
                step.cells[cell].fetch()
        if isinstance(instruction, Op):
            return [KINDS[instruction.kind](step, w, instruction)]
        return [KINDS[op.kind](step, w, op) for op in operations(instruction)]

    def carry_out(self, w: int, runs: Sequence[Computation]) -> None:
        """Receive, compute, and deliver."""
        if len(runs) > 1 or runs[0].on_second_stream:
            self._carry_out_on_two_streams(w, runs)
            return
        (run,) = runs
        with use_stream(run.stream), run:
            run.receive()
            recording, mark = self.step.stages.recording, self._begun(run)
            with NOTHING if recording is None else recording.looking(mark):
                run.compute()
            self._ended(mark)
            run.deliver()

    def end(self, w: int, runs: Sequence[Computation]) -> None:
        """End an instruction that has delivered: find stray weights, free what was offloaded."""
        for run in runs:
            try:
                run.look_for_strays()
            except BaseException:
                with run:
                    raise
        if self.step.windows:
            self.step.windows[w].passed()

    def _carry_out_on_two_streams(self, w: int, runs: Sequence[Computation]) -> None:
        """Run computations of a worker that has two streams to compute on.

        Each computation receives on the worker's compute stream, computes on the stream of its
        stage, and delivers on the worker's compute stream.

        The two computations of an overlap start and end together. They are on two streams, unless
        they are of one stage, or of two that share weights.
        """
        main = self.step.links.compute[w]
        for run in runs:
            run.on(main, run.receive)
        others = [run.stream for run in runs if run.stream != main]
        for stream in others:
            # guard: start of an overlap
            wait_stream(stream, main)
        marks = [self._begun(run) for run in runs]
        if len(runs) == 2:
            self.step.crew.cells.overlap(*runs)
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
        recorder = self.step.links.recorder
        return None if recorder is None else recorder.begin(run.mark)

    def _ended(self, mark: Any) -> None:
        if self.step.links.recorder is not None:
            self.step.links.recorder.end(mark)
