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
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from torchgpipe.ambient.context import is_in_checkpoint
from torchgpipe.ambient.nesting import holding
from torchgpipe.autograd.hooks import without_hooks
from torchgpipe.autograd.outcome import Sums
from torchgpipe.devices.streams import use_stream, wait_stream
from torchgpipe.engine.stages import Stages
from torchgpipe.engine.step import Step, lend
from torchgpipe.engine.workers import Task
from torchgpipe.executor.cell import Cell, Cells, Gradients
from torchgpipe.executor.computation import KINDS, Computation, overlapped
from torchgpipe.executor.criterion import Criterion
from torchgpipe.executor.draws import Draws
from torchgpipe.executor.links import Links, Sent
from torchgpipe.executor.plan import Plan
from torchgpipe.schedule.program import Instruction, Op, operations
from torchgpipe.skip.parcels import Parcels
from torchgpipe.values.microbatch import VALUE, Batch

__all__: list[str] = []


class Crew:
    """The parts of a schedule that last from step to step; streams and threads are the wrapper's.

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
        self.streams, self.workers = stages.pool, stages.workers
        self.draws = Draws()


class Executor:
    """One step of a schedule.

    Args:
        crew: what lasts from step to step.
        plan: the plan of the step.
        batches: the micro-batches; each is let go of when it is computed. An empty list if the
            first stage is in another process.
        criterion: the loss of each micro-batch.
        arriving: the events of copies that the last stage waits for.
    """

    def __init__(
        self,
        crew: Crew,
        plan: Plan,
        batches: list[Batch],
        criterion: Criterion,
        arriving: Sequence[Any] = (),
    ) -> None:
        self.crew, self.plan, self.criterion, self.arriving = crew, plan, criterion, arriving
        self.stages = stages = crew.stages
        behind = criterion.loss if isinstance(criterion.loss, nn.Module) else None
        #: For each stage, its weights that require a gradient; the last one has those of the loss.
        self.weights: list[list[Tensor]] = [
            [x for x in layers.parameters() if x.requires_grad] for layers in stages.partitions
        ]
        copies = self._copies_of_weights()
        if behind is not None:
            self.weights[-1] += [x for x in behind.parameters() if x.requires_grad]
        #: For each micro-batch, the tensors that came from the caller.
        self.inputs = [[*batch] for batch in batches]
        given = [x for x in chain(*self.inputs) if x.requires_grad]
        self._without_hooks = without_hooks([*chain(*self.weights), *given])
        joins, again = criterion.outputs is not None, {j for j, _ in plan.again}
        self.step = Step(stages, plan.schedule.chunks, again, joins, behind)
        for body, places, own in zip(self.step.bodies, stages.lent, copies):
            lend(body, places, partial(_in_place_of, own))
        self.new_cell = crew.cells.begin()
        recording = stages.recording
        #: Takes the times of instructions, while somebody traces the model.
        self.recorder = None if recording is None else recording.recorder
        self.links = Links(plan, crew.streams, stages.groups, self.recorder)
        self.recording = torch.is_grad_enabled()
        if self.recording and is_in_checkpoint():
            raise RuntimeError(
                "a schedule runs backward within the call, which a checkpoint of PyTorch would "
                "compute again in the middle of that backward; call it outside of checkpoint(), "
                "and pass checkpoint='always' to the wrapper"
            )
        #: The last stage, which the loss is behind.
        self.last = len(stages.partitions) - 1
        #: The cells between F and their last instruction.
        self.cells: dict[tuple[int, int], Cell] = {}
        #: The values that wait for a stage, with their events, by stage and micro-batch.
        self.values: dict[tuple[int, int], tuple[Batch, Any]] = {
            (0, i): (batch, None) for i, batch in enumerate(batches)
        }
        batches.clear()
        #: For each micro-batch, the skips that were stashed and not popped yet.
        self.parcels = [Parcels() for _ in range(plan.schedule.chunks)]
        #: The events of skips that come from another worker.
        self.events: dict[tuple[int, Any], Any] = {}
        #: The gradients that wait for a cell, by stage and micro-batch, for each part.
        self.grads: dict[tuple[int, int], dict[Any, Sent]] = {}
        #: For each worker, the sums of the gradients of its weights.
        self.sums = [Sums() for _ in plan.devices]
        #: For each micro-batch, the gradients of the tensors that came from the caller.
        self.input_grads: list[Sequence[Tensor | None]] = [()] * plan.schedule.chunks

    def _copies_of_weights(self) -> list[dict[Tensor, Tensor]]:
        """Copies, for each stage, of weights that are at home on the device of another one.

        Autograd knows what they are copies of, so their gradients are handed over to that.
        """
        made: dict[tuple[Tensor, torch.device], Tensor] = {}
        found: list[dict[Tensor, Tensor]] = []
        for j, (places, device) in enumerate(zip(self.stages.lent, self.stages.devices)):
            own: dict[Tensor, Tensor] = {}
            for x in [table[name] for table, name in places]:
                if x is not None and x.device != device:
                    if (x, device) not in made:
                        made[x, device] = x.to(device, non_blocking=True)
                    own[x] = made[x, device]
            weights = [own.get(x, x) for x in self.weights[j]]
            self.weights[j] = [x for x in weights if x.requires_grad]
            found.append(own)
        return found

    def run(self) -> None:
        """Run all instructions."""
        tasks = self._tasks()
        self.around(lambda: self.crew.workers.run(tasks, self.step.context))

    def _tasks(self) -> list[Task]:
        plan = self.plan
        return [
            Task(number, plan.devices[w], partial(self.perform, w, x), needs, plan.lines[w])
            for number, ((w, x, _), needs) in enumerate(zip(plan.order, plan.needs))
        ]

    def around(self, run: Callable[[], None]) -> None:
        """Call a function that runs all instructions, with random numbers and streams prepared."""
        holding(self.step.numbers.locks, partial(self._around, run))
        self.step.end_forward()

    def _around(self, run: Callable[[], None]) -> None:
        if self.stages.recording is not None:
            self.stages.recording.begin_step()
        with ExitStack() as within:
            within.enter_context(self._without_hooks)
            within.enter_context(self.step.numbers)
            self.draws = within.enter_context(self.crew.draws.step(self.step, self.plan))
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

    def perform(self, w: int, instruction: Instruction) -> None:
        """Run an instruction of a worker: receive, compute, and deliver.

        Each computation receives on the worker's compute stream, computes on the stream of its
        stage, and delivers on the worker's compute stream.

        The two computations of an overlap start and end together. They are on two streams, unless
        they are of one stage, or of two that share weights.

        Raises:
            BaseException: what a layer raised, with a note that names the computation.
        """
        main = self.links.compute[w]
        runs = [KINDS[op.kind](self, w, op) for op in operations(instruction)]
        if len(runs) == 1 and runs[0].stream == main:
            (run,) = runs
            # Most instructions are one computation, on the worker's compute stream.
            with use_stream(main), run.doing():
                run.receive()
                mark = self._begun(run)
                run.compute()
                self._ended(mark)
                run.deliver()
            return
        for run in runs:
            run.on(main, run.receive)
        others = [run.stream for run in runs if run.stream != main]
        for stream in others:
            # guard: start of an overlap
            wait_stream(stream, main)
        marks = [self._begun(run) for run in runs]
        if len(runs) == 2 and self.crew.cells.interleave:
            one, other = runs
            both = self.links.interleaving(w, (one.stream, other.stream))
            overlapped(one, other, both)
        else:
            for run in runs:
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
        return None if self.recorder is None else self.recorder.begin(run.mark)

    def _ended(self, mark: Any) -> None:
        if self.recorder is not None:
            self.recorder.end(mark)

    def keep(self, cell: Cell) -> None:
        """Keep a cell for its backward."""
        self.cells[cell.j, cell.i] = cell
        # A layer may use weights of another module.
        # guard: strays
        strays = cell.look_for_strays()
        if strays:
            self.met(cell.j, strays)
            cell.weights += strays

    def met(self, j: int, strays: list[Tensor]) -> None:
        """Take weights that a stage uses, and that are not among its own, for its own."""
        # guard: hooks of strays
        self._without_hooks.add(strays)
        self.weights[j] += strays

    def received(self, j: int, i: int) -> Batch:
        """The micro-batch that waits for a stage, beside the skips that the stage pops."""
        batch, event = self.values.pop((j, i))
        self.links.receive(Sent(tuple(batch), event), j)
        popped = self.stages.skip_layout.popped[j]
        batch = self.parcels[i].unpacked(batch, popped)
        for skip in popped:
            self.links.receive(Sent(batch.parts[skip], self.events.pop((i, skip), None)), j)
        return batch

    def send(self, j: int, i: int, output: Batch) -> None:
        """Send an output to the next stage, and its skips to those that pop them."""
        targets: dict[Any, int] = {VALUE: j + 1, **self.stages.skip_layout.stashed[j]}

        def sent(key: Any, *tensors: Tensor) -> list[Tensor]:
            found = self.links.send([x.detach() for x in tensors], j, targets[key], i)
            self.events[i, key] = found.event
            return [
                # This tells the next cell that a gradient is wanted. No gradient comes here.
                y.requires_grad_(x.requires_grad)
                for x, y in zip(tensors, found.tensors)
                if y is not None
            ]

        for key in [*output.parts]:
            output = output.map(partial(sent, key), [key])
        value = self.parcels[i].packed(output)
        self.values[j + 1, i] = value, self.events.pop((i, VALUE), None)

    def incoming(self, j: int, i: int) -> Gradients:
        """The gradients of a cell's output."""
        found: dict[Any, Sequence[Tensor | None]] = {}
        if j == self.last:
            found[VALUE] = [self.criterion.grad(i)]
        for key, sent in self.grads.pop((j, i), {}).items():
            found[key] = self.links.receive(sent, j)
        return found

    def outgoing(self, j: int, i: int, grads: Gradients) -> None:
        """Send the gradients of a cell's input to where its parts came from."""
        sources: dict[Any, int] = {VALUE: j - 1, **self.stages.skip_layout.popped[j]}
        for key, found in grads.items():
            source = sources[key]
            if source < 0:
                self.links.leave(found, j)
                self.input_grads[i] = found
            else:
                arriving = self.grads.setdefault((source, i), {})
                arriving[key] = self.links.send(found, j, source, i)


def _in_place_of(copies: Mapping[Tensor, Tensor], weights: Sequence[Tensor]) -> list[Tensor]:
    return [copies.get(x, x) for x in weights]
