"""The graphs of a stage: one for each kind of micro-batch that comes, and each state of the layers.

A kind is the shapes, strides, dtypes and containers of all tensors, and which of them need a
gradient. So a mini-batch whose last micro-batch is smaller has two. Layers run once on each kind
before they are traced on it, since tensors that they create in their first run, and keep, must not
be fake ones. If a stage cannot be a graph, its cells are eager ones, and a warning says once which
stage that is, and why.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from torchgpipe.ambient.notes import warn
from torchgpipe.engine.computation import Forward, ScheduledStep
from torchgpipe.engine.criterion import Criterion
from torchgpipe.graphs.gate import gate
from torchgpipe.graphs.joint import fakes_of
from torchgpipe.graphs.listing import listing
from torchgpipe.graphs.overlap import cost
from torchgpipe.graphs.parts import Maker, Parts
from torchgpipe.graphs.places import UntraceableError, kinds
from torchgpipe.graphs.slices import RecomputeChoice, Slice
from torchgpipe.graphs.trace import Marks, trace
from torchgpipe.graphs.traced import KINDS, Entry, Settings, StageState, Traced, current_settings
from torchgpipe.recompute.runs import checkpointing
from torchgpipe.schedule.costs import Costs
from torchgpipe.schedule.program import Op
from torchgpipe.skip.tracker import Parcels
from torchgpipe.values.microbatch import Batch
from torchgpipe.values.structure import TUPLE, Structure, flatten

__all__: list[str] = []

#: The most states of its layers (such as train mode, and eval mode) for which a stage keeps graphs.
STATES = 8


class StageGraphs:
    """All graphs of one stage.

    Args:
        j: the stage.
        layers: the layers.
        loss: what runs after them, as a part of the stage; None but for the last stage.
        make: makes a function of a part of a graph.
        recompute: chooses what is computed again under checkpointing.
    """

    def __init__(
        self, j: int, layers: nn.Module, loss: Any, make: Maker, recompute: RecomputeChoice
    ) -> None:
        self._modules = [layers, loss] if isinstance(loss, nn.Module) else [layers]
        self.j = j
        self._make, self._recompute = make, recompute
        self.states: list[StageState] = []
        self._lock = threading.Lock()
        #: Why cells of this stage run eagerly, without a graph: the reasons that were warned of.
        self.reasons: list[str] = []
        #: The graph that was traced last, for :meth:`print`; None if there is none.
        self.last: Traced | None = None

    def begin(self, settings: Settings, copies: Mapping[Tensor, Tensor]) -> StageInStep:
        """Find the state that the layers are in, at the beginning of a step.

        Args:
            settings: what is set in this step.
            copies: copies of weights that the stage computes with in their place.
        """
        with self._lock:
            state = self._current_state()
            state.steps += 1
            return StageInStep(self, state, settings, copies)

    def _current_state(self) -> StageState:
        for state in self.states:
            if state.places.are_current():
                break
        else:
            state = StageState(self._modules)
            if len(self.states) == STATES and all(x.steps == 1 for x in self.states):
                name = state.places.difference(self.states[0].places)
                self.say(f"its attributes are others in each step ({name})")
                # The state changes in each step, so a trace would serve one step only.
                state.is_brief = True
        # The state that was used last comes first, since the next step most often has it, too.
        self.states = [state, *[x for x in self.states if x is not state]][:STATES]
        return state

    def traced(self, now: StageInStep, run: Forward) -> Traced | None:
        """Trace the stage for the micro-batch of an F."""
        criterion, body, marks = run.criterion, run.step.bodies[self.j], Marks()
        more, structure = of_loss(criterion, run.i)

        def compute(batch: Batch, more: Sequence[Tensor]) -> Any:
            rest: list[Any] = [(None, None)]

            def after(output: Batch) -> Batch:
                if criterion is None:
                    return output
                arguments = structure.unflatten(tuple(more))
                args, kwargs = arguments if criterion.arguments[run.i][1] else (arguments, {})
                loss, weight = criterion.compute(output, args, kwargs)
                rest[0] = weight, None if criterion.outputs is None else output.value
                return Batch(loss)

            with checkpointing(marks) if run.again else nullcontext():
                return body.run(batch, after=after), flatten(rest[0])

        try:
            if not now.state.places.are_current():
                raise UntraceableError("its attributes change within a step")
            weights = run.step.sums.weights[self.j]
            with body.lock:
                joint, form = trace(
                    now.state.places, now.tensors, compute, run.received, more, weights, marks
                )
        except UntraceableError as error:
            self.say(str(error))
            return None
        self.last = Traced(Parts(joint, self._make, self._recompute), form, now.state.places)
        return self.last

    def print(self, split: bool = True) -> None:
        """Print the parts of the graph that was traced last.

        Args:
            split: whether the backward is I and W; otherwise it is B.

        Raises:
            ValueError: there is no graph.
        """
        if self.last is None:
            raise ValueError(
                "a stage has a graph once a step, or costs(), has traced it (stage: "
                f"{self.j}, reasons for eager cells: {self.reasons}); "
                f"{'change the layer' if self.reasons else 'run another step of as many rows'}"
            )
        print(listing(self.last.parts, split, self.j))

    def say(self, reason: str) -> None:
        """Warn that cells of this stage are eager ones, if that was not said before."""
        if reason not in self.reasons:
            self.reasons.append(reason)
            warn(
                f"a stage must be traceable to become a graph, and stage {self.j} is not, so it "
                f"runs eagerly ({reason}); change the layer, or pass stages='eager'"
            )


class StageInStep:
    """A stage in one step.

    Args:
        graphs: the graphs of the stage.
        state: the state that the layers are in.
        settings: what is set in this step.
        copies: copies of weights that the stage computes with in their place.
    """

    def __init__(
        self,
        graphs: StageGraphs,
        state: StageState,
        settings: Settings,
        copies: Mapping[Tensor, Tensor],
    ) -> None:
        self.graphs, self.state, self.settings = graphs, state, settings
        #: The stage's parameters and buffers, each replaced by its copy if there is one. Graphs
        #: take them as arguments.
        self.tensors = [copies.get(x, x) for x in state.places.read()]

    def find(self, run: Forward, *, at_once: bool = False) -> tuple[Entry | None, Sequence[Tensor]]:
        """Find the entry of the kind of micro-batch that an F computes.

        Args:
            run: the F.
            at_once: whether to trace before the layers have run.

        Returns:
            The entry of the kind, which has the graph if there is one, or None if the cell is an
            eager one anyway; and the tensors among the further arguments of the loss.
        """
        batch, criterion = run.received, run.criterion
        more, structure = of_loss(criterion, run.i)
        fault = self.settings.fault or self.state.fault
        if batch.shared:
            # A graph clones an input that it changes in place, so the change would not show in
            # another input that shares the memory.
            fault = "tensors that come to it share memory"
        if fault:
            self.graphs.say(fault)
            return None, more
        key = (
            *(run.again, torch.is_grad_enabled(), self.settings, tuple(batch.parts)),
            criterion is not None and criterion.outputs is not None,
            *(_places(batch), kinds(batch), kinds(more)),
        )
        entry = self.state.entry(key, [*batch.structures.values(), structure])
        # guard: layers that keep what they have made
        if entry.is_tried or not (entry.has_run or at_once):
            return entry, more
        if self.state.is_brief and self.state.steps == 1:
            return None, more
        if self.state.count >= KINDS:
            self.graphs.say(f"more than {KINDS} kinds of micro-batches have come to it")
            return None, more
        with gate.tracing():
            # Another thread may have traced this kind while this thread waited for the gate.
            if not entry.is_tried:
                self.state.count += 1
                entry.traced = self.graphs.traced(self, run)
                entry.is_tried = True
        return entry, more


def of_loss(criterion: Criterion | None, i: int) -> tuple[Sequence[Tensor], Structure]:
    """The tensors, and the structure, of the further arguments of a micro-batch's loss."""
    if criterion is None:
        return (), TUPLE
    args, kwargs = criterion.arguments[i]
    # Most losses have no keyword arguments, and a tuple alone takes less time to flatten.
    return flatten((args, kwargs) if kwargs else args)


def _places(batch: Batch) -> tuple[Any, ...]:
    """For each part, the indices of its tensors among those of the micro-batch."""
    if len(batch.parts) == 1 == len(batch.tensors):
        return (len(batch.parts[None]),)
    index = {id(x): k for k, x in enumerate(batch)}
    return tuple(tuple([index[id(x)] for x in part]) for part in batch.parts.values())


def traced_all(step: ScheduledStep, graphs: Sequence[StageGraphs]) -> list[Traced]:
    """Trace all stages for the first micro-batch of a step, without running any of them.

    Args:
        step: a step that does not run.
        graphs: the graphs of each stage.

    Raises:
        ValueError: a stage cannot be a graph.
    """
    batch, _ = step.post.values[0, 0]
    parcels = Parcels()
    traced = []
    last = len(graphs) - 1
    layout = step.stages.skip_layout
    settings = current_settings()
    for j, stage in enumerate(graphs):
        batch = parcels.unpacked(batch, layout.popped[j])
        run = Forward(step, step.plan.schedule.placement[j], Op(j, "F", 0))
        run.received = batch
        entry, _ = stage.begin(settings, step.copies[j]).find(run, at_once=True)
        if entry is None or entry.traced is None:
            raise ValueError(
                "the costs of a stage are those of its graph, and one is eager (stage: "
                f"{j}, reasons: {stage.reasons}); measure it, or change the layer"
            )
        traced.append(entry.traced)
        if j < last:
            batch = parcels.packed(_like(entry.traced, step.stages.devices[j + 1]))
    return traced


def costs_of(traced: Sequence[Traced]) -> Costs:
    """The costs of stages: times as numbers of operations, and memory in bytes.

    Fake tensors know their sizes, and which of them share a storage. Memory that a kernel takes for
    itself, as convolutions do on a GPU, is not counted.
    """
    parts = [x.parts for x in traced]

    def times(slices: Sequence[Slice]) -> list[float]:
        return [sum(map(cost, x.nodes)) for x in slices]

    return Costs(
        F=times([x.forward.slice for x in parts]),
        I=times([x.input.slice for x in parts]),
        W=times([x.weight.slice for x in parts]),
        R=times([x.again.slice for x in parts]),
        activation=[x.bytes_of(x.saved) for x in parts],
        pending=[x.bytes_of(x.weight.slice.inputs) for x in parts],
        # A checkpoint also holds copies of the buffers that R changes.
        checkpoint=[
            x.bytes_of(x.kept)
            + x.joint.bytes_of(y for k in x.changed_again for y in fakes_of(x.joint.state[k]))
            for x in parts
        ],
    )


def _like(traced: Traced, device: torch.device) -> Batch:
    """Make an output of a stage, with uninitialised values, on the device of the next one."""
    tensors = []
    for node, needed in zip(traced.parts.joint.outputs, traced.form.needs_grad):
        x = node.meta["val"]
        output = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)
        tensors.append(output.requires_grad_(needed))
    return traced.form.output(tensors, frozenset())
