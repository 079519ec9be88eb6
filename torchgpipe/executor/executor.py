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

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import chain
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from torchgpipe.ambient import labels
from torchgpipe.ambient.autocast import without_autocast
from torchgpipe.ambient.nesting import holding
from torchgpipe.ambient.notes import noted
from torchgpipe.autograd.ends import drained_after_failure
from torchgpipe.autograd.hooks import without_hooks
from torchgpipe.autograd.outcome import Sums
from torchgpipe.devices.recorder import Mark
from torchgpipe.devices.streams import AbstractStream, use_stream, wait_stream
from torchgpipe.engine.stages import Stages
from torchgpipe.engine.step import Step
from torchgpipe.engine.workers import Task, Workers
from torchgpipe.executor.cell import Cell, Cells, Computation, Gradients, Work, done, hand_on
from torchgpipe.executor.criterion import Criterion
from torchgpipe.executor.draws import Draws
from torchgpipe.executor.links import Links, Sent, Streams
from torchgpipe.executor.plan import Plan
from torchgpipe.schedule.program import Instruction, Op, operations
from torchgpipe.skip.tracker import not_stashed
from torchgpipe.values.microbatch import VALUE, Batch, Part

__all__: list[str] = []


class Crew:
    """The parts that last from step to step: streams, threads, knowledge of random numbers.

    Args:
        stages: the stages of the wrapper.
        cells: how cells are made; eager ones by default.
        basis: what the caller has made them from.
    """

    def __init__(
        self, stages: Stages, cells: Cells | None = None, basis: Sequence[Any] = ()
    ) -> None:
        self.stages, self.basis = stages, basis
        self.cells = cells or Cells()
        self.streams = Streams()
        self.workers = Workers(stages.devices)
        self.draws = Draws()


class Executor:
    """One step of a schedule.

    Attributes:
        quiet: whether no layer is expected to draw random numbers. Several processes agree on it.

    Args:
        crew: what lasts from step to step.
        plan: the plan of the step.
        batches: the micro-batches; each is let go of when it is computed. An empty list if the
            first stage is in another process.
        criterion: the loss of each micro-batch.
        weights: for each stage, its weights that require a gradient; those of the loss belong to
            the last stage.
        without_hooks: the block around the step in which tensors have no hooks.
        arriving: the events of copies that the last stage waits for.
    """

    quiet = False

    def __init__(
        self,
        crew: Crew,
        plan: Plan,
        batches: list[Batch],
        criterion: Criterion,
        weights: Sequence[Sequence[Tensor]],
        without_hooks: without_hooks,
        arriving: Sequence[Any] = (),
    ) -> None:
        self.without_hooks = without_hooks
        self.crew, self.plan, self.criterion, self.arriving = crew, plan, criterion, arriving
        self.stages = stages = crew.stages
        self.weights = [list(x) for x in weights]
        self.step = Step(
            stages,
            plan.schedule.chunks,
            {j for j, _ in plan.again},
            criterion.loss if isinstance(criterion.loss, nn.Module) else None,
        )
        self.new_cell = crew.cells.begin()
        recording = stages.recording
        #: Takes the times of instructions, while somebody traces the model.
        self.recorder = None if recording is None else recording.recorder
        self.links = Links(plan, crew.streams, stages.groups, self.recorder)
        self.recording = torch.is_grad_enabled()
        #: The cells between F and their last instruction.
        self.cells: dict[tuple[int, int], Cell] = {}
        #: The values that wait for a stage, with their events, by stage and micro-batch.
        self.values: dict[tuple[int, int], tuple[Batch, Any]] = {
            (0, i): (batch, None) for i, batch in enumerate(batches)
        }
        batches.clear()
        #: For each micro-batch, the skips that were stashed and not popped yet.
        self.skips: list[dict[Any, tuple[Part, Any]]] = [{} for _ in range(plan.schedule.chunks)]
        #: For each micro-batch, the skips that share memory with another part.
        self.shared: list[set[Any]] = [set() for _ in range(plan.schedule.chunks)]
        #: The gradients that wait for a cell, by stage and micro-batch, for each part.
        self.grads: dict[tuple[int, int], dict[Any, Sent]] = {}
        #: For each worker, the sums of the gradients of its weights.
        self.sums = [Sums() for _ in plan.devices]
        #: For each micro-batch, the gradients of the tensors that came from the caller.
        self.input_grads: list[Sequence[Tensor | None]] = [()] * plan.schedule.chunks

    def run(self) -> None:
        """Run all instructions."""
        tasks = self._tasks()
        self.around(lambda: self.crew.workers.run(tasks, self.step.context))

    def _tasks(self) -> list[Task]:
        line = [self.plan.devices[:w].count(device) for w, device in enumerate(self.plan.devices)]
        place: dict[Op, tuple[int, int]] = {}
        tasks = []
        for number, (w, instruction, edges) in enumerate(self.plan.order):
            for op in operations(instruction):
                place[op] = w, number
            others = [place[source] for source, _ in edges]
            tasks.append(
                Task(
                    number,
                    self.plan.devices[w],
                    partial(self.perform, w, instruction),
                    [other for worker, other in dict.fromkeys(others) if worker != w],
                    line[w],
                )
            )
        return tasks

    def around(self, run: Callable[[], None]) -> None:
        """Call a function that runs all instructions, with random numbers and streams prepared."""
        holding(self.step.numbers.locks, partial(self._around, run))
        self.step.end_forward()

    def _around(self, run: Callable[[], None]) -> None:
        if self.stages.recording is not None:
            self.stages.recording.begin_step()
        with ExitStack() as within:
            within.enter_context(self.step.numbers)
            within.enter_context(self.crew.draws.step(self.step, self.plan, self.quiet))
            for sums, weights in zip(self.sums, self._weights_of_one()):
                within.enter_context(sums.adding_at_once(weights))
            self.links.begin(self.arriving)
            try:
                run()
            finally:
                self.links.end()

    def _weights_of_one(self) -> list[list[Tensor]]:
        """For each worker, the weights that no other worker has."""
        found: list[dict[int, Tensor]] = [{} for _ in self.plan.devices]
        for w, weights in zip(self.plan.schedule.placement, self.weights):
            found[w].update({id(x): x for x in weights})
        count = Counter(chain(*found))
        # Another worker has a thread of its own.
        # guard: sums of weights that workers share
        return [[x for key, x in own.items() if count[key] == 1] for own in found]

    def where(self, w: int, op: Op) -> str:
        """The note on an exception of an instruction."""
        return f"raised in {op} on worker {w}"

    def _doing(self, w: int, op: Op) -> noted:
        """Context manager that tells what is computed, in notes on exceptions and by labels."""
        return noted(self.where(w, op), _label(op))

    def perform(self, w: int, instruction: Instruction) -> None:
        """Run an instruction of a worker: receive, compute, and deliver.

        Each kind of computation is a generator of three parts: it receives on the worker's compute
        stream, computes on the stream of the stage, and delivers on the compute stream.

        The two computations of an overlap start and end together. They are on two streams, unless
        they are of one stage, or of two that share weights.

        Raises:
            BaseException: what a layer raised, with a note that names the computation.
        """
        main = self.links.compute[w]
        ops = operations(instruction)
        if len(ops) == 1 and self.links.home[ops[0].stage] == main:
            self._perform_alone(w, ops[0], main)
            return
        streams = [self.links.home[op.stage] for op in ops]
        runs = [self._kinds[op.kind](self, w, op, stream) for op, stream in zip(ops, streams)]
        for op, run in zip(ops, runs):
            with use_stream(main), self._doing(w, op):
                next(run)
        for stream in streams:
            if stream != main:
                # guard: start of an overlap
                wait_stream(stream, main)
        marks = [self._begun(w, op, stream) for op, stream in zip(ops, streams)]
        self._compute(w, ops, runs, streams)
        self._ended(marks)
        for stream in streams:
            if stream != main:
                # guard: end of an overlap
                wait_stream(main, stream)
        for op, run in zip(ops, runs):
            with use_stream(main), self._doing(w, op):
                next(run, None)

    def _perform_alone(self, w: int, op: Op, stream: AbstractStream) -> None:
        """Run an instruction of one computation, on the worker's compute stream."""
        run = self._kinds[op.kind](self, w, op, stream)
        with use_stream(stream), self._doing(w, op):
            next(run)
            mark = self._begun(w, op, stream)
            work = next(run, None)
            if work is not None:
                hand_on(run, work.run())
            self._ended([mark])
            next(run, None)

    def _begun(self, w: int, op: Op, stream: AbstractStream) -> Any:
        """The mark of a computation that begins here, while somebody traces the model."""
        if self.recorder is None:
            return None
        return self.recorder.begin(Mark(op.kind, stream, w, op.stage, op.microbatch))

    def _ended(self, marks: Sequence[Any]) -> None:
        if self.recorder is not None:
            for mark in marks:
                self.recorder.end(mark)

    def _compute(
        self,
        w: int,
        ops: Sequence[Op],
        runs: Sequence[Computation],
        streams: Sequence[AbstractStream],
    ) -> None:
        """Have the computations of an instruction compute, interleaved if they can be."""
        waiting: dict[int, Work] = {}

        def go_on(k: int, function: Callable[[], Any]) -> Any:
            with use_stream(streams[k]), self._doing(w, ops[k]):
                return function()

        for k, run in enumerate(runs):
            work = go_on(k, partial(next, run, None))
            if work is None:
                continue
            # The other one would draw from a generator that was set for this one.
            # guard: random numbers of an overlap
            if work.is_random:
                result = go_on(k, work.run)
                go_on(k, partial(hand_on, run, result))
            else:
                waiting[k] = work
        found: Sequence[Any] | None = None
        if len(waiting) == 2:
            both = self.links.interleaving(w, (streams[0], streams[1]))
            both.labels = [_label(op) for op in ops]
            found = go_on(0, partial(waiting[0].beside, waiting[1], both))
        results = dict(zip(waiting, found)) if found is not None else {}
        # In reverse, so that the blocks that both have entered are left in order.
        for k in reversed(waiting):
            if found is None:
                results[k] = go_on(k, waiting[k].run)
            go_on(k, partial(hand_on, runs[k], results.pop(k)))

    def _forward(self, w: int, op: Op, stream: AbstractStream) -> Computation:
        j, _, i = op
        batch = self._received(j, i)
        self.links.lend(batch, w, stream)
        yield None
        body = self.step.bodies[j]
        run: Callable[..., Batch] = body.run
        if body.visited:
            run = partial(run, note=f"raised in partition {j}, micro-batch {i}")
        last = j + 1 == len(self.stages.partitions)
        cell = self.new_cell(self.step, i, j, stream, self.weights[j])
        within = noted(self.where(w, op))
        with self.crew.draws.of(i, j):
            output = yield from done(
                cell.forward(
                    batch,
                    run,
                    self.criterion if last else None,
                    again=(j, i) in self.plan.again,
                    within=within,
                )
            )
        del batch
        if self.recording:
            self.cells[j, i] = cell
            # A layer may use weights of another module.
            # guard: strays
            strays = cell.look_for_strays()
            if strays:
                self.met(j, strays)
                cell.weights += strays
        yield None
        self.links.give_back(output, w, stream)
        if not last:
            self._send(j, i, output)
        else:
            self.links.leave(self.criterion.results(i), j)

    def met(self, j: int, strays: list[Tensor]) -> None:
        """Take weights that a stage uses, and that are not among its own, for its own."""
        # guard: hooks of strays
        self.without_hooks.add(strays)
        self.weights[j] += strays

    def _received(self, j: int, i: int) -> Batch:
        """The micro-batch that waits for a stage, beside the skips that the stage pops."""
        batch, event = self.values.pop((j, i))
        self.links.receive(Sent(tuple(batch), event), j)
        popped = {}
        for skip in self.stages.skip_layout.popped[j]:
            part, event = self.skips[i].pop(skip, (None, None))
            if part is None:
                raise not_stashed(skip)
            self.links.receive(Sent(part.tensors, event), j)
            popped[skip] = part
        return batch.with_skips(popped, self.shared[i])

    def _send(self, j: int, i: int, output: Batch) -> None:
        """Send an output to the next stage, and its skips to those that pop them."""
        events: dict[Any, Any] = {}
        targets: dict[Any, int] = {VALUE: j + 1, **self.stages.skip_layout.stashed[j]}

        def sent(key: Any, *tensors: Tensor) -> list[Tensor]:
            found = self.links.send([x.detach() for x in tensors], j, targets[key], i)
            events[key] = found.event
            return [
                # This tells the next cell that a gradient is wanted. No gradient comes here.
                y.requires_grad_(x.requires_grad)
                for x, y in zip(tensors, found.tensors)
                if y is not None
            ]

        for key in [*output.parts]:
            output = output.map(partial(sent, key), [key])
        skips = output.skips
        self.shared[i] |= output.shared
        value = output.with_skips({})
        if len(value) < 2 and not skips and not self.skips[i]:
            # Nothing is left that it could share memory with.
            value.shared = frozenset()
        self.skips[i].update({key: (part, events.get(key)) for key, part in skips.items()})
        self.values[j + 1, i] = value, events.get(VALUE)

    def _recompute(self, w: int, op: Op, stream: AbstractStream) -> Computation:
        cell = self.cells[op.stage, op.microbatch]
        yield None
        with self.crew.draws.again(op.stage):
            cell.recompute()

    def _backward(self, w: int, op: Op, stream: AbstractStream) -> Computation:
        cell = self.cells.pop((op.stage, op.microbatch))
        grads = self._incoming(w, op, stream)
        yield None
        # guard: autocast in backward
        with without_autocast(), drained_after_failure(), self.crew.draws.backward(op.stage):
            inputs, weights, found = yield from done(cell.backward(grads))
            self.sums[w].add(weights, found)
        del cell, grads, weights, found
        yield None
        self._outgoing(w, op, inputs, stream)

    def _input(self, w: int, op: Op, stream: AbstractStream) -> Computation:
        grads = self._incoming(w, op, stream)
        yield None
        # guard: autocast in backward
        with without_autocast(), drained_after_failure(), self.crew.draws.backward(op.stage):
            cell = self.cells[op.stage, op.microbatch]
            inputs = yield from done(cell.backward_input(grads))
        del grads
        yield None
        self._outgoing(w, op, inputs, stream)

    def _weight(self, w: int, op: Op, stream: AbstractStream) -> Computation:
        cell = self.cells.pop((op.stage, op.microbatch))
        yield None
        # guard: autocast in backward
        with without_autocast(), drained_after_failure(), self.crew.draws.backward(op.stage):
            self.sums[w].add(*(yield from done(cell.backward_weight())))

    def _incoming(self, w: int, op: Op, stream: AbstractStream) -> Gradients:
        """The gradients of a cell's output."""
        j, _, i = op
        found: dict[Any, Sequence[Tensor | None]] = {}
        if j + 1 == len(self.stages.partitions):
            found[VALUE] = [self.criterion.grad(i)]
        for key, sent in self.grads.pop((j, i), {}).items():
            found[key] = self.links.receive(sent, j)
        for grads in found.values():
            self.links.lend(grads, w, stream)
        return found

    def _outgoing(self, w: int, op: Op, grads: Gradients, stream: AbstractStream) -> None:
        """Send the gradients of a cell's input to where its parts came from."""
        j, _, i = op
        for found in grads.values():
            self.links.give_back(found, w, stream)
        sources: dict[Any, int] = {VALUE: j - 1, **self.stages.skip_layout.popped[j]}
        for key, found in grads.items():
            source = sources[key]
            if source < 0:
                self.links.leave(found, j)
                self.input_grads[i] = found
            else:
                arriving = self.grads.setdefault((source, i), {})
                arriving[key] = self.links.send(found, j, source, i)

    _kinds: ClassVar = {"F": _forward, "R": _recompute, "B": _backward, "I": _input, "W": _weight}


def _label(op: Op) -> labels.Label | None:
    return labels.of(op.kind, op.stage, op.microbatch)
