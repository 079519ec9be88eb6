"""A cell whose stage is a graph: it runs neither autograd nor the layers.

Autograd keeps the tensors that an eager cell saves for backward. This cell keeps the values that
one part of the graph hands to the next itself. So two parts can be prepared before either runs, and
then be interleaved.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torchgpipe.ambient.generators import holding
from torchgpipe.ambient.modes import without_autocast
from torchgpipe.ambient.random_numbers import FirstNumbers
from torchgpipe.autograd.versions import version_of
from torchgpipe.devices.streams import get_device
from torchgpipe.engine.computation import Cells, Computation, Forward, NewCell, eager_cell
from torchgpipe.engine.links import Gradients
from torchgpipe.engine.scheduled_cell import Cell
from torchgpipe.graphs.gate import gate
from torchgpipe.graphs.overlap import Interleaving, interleaved
from torchgpipe.graphs.parts import BackwardParts, Part, Parts, copy_with_strides, laid_out
from torchgpipe.graphs.stage import StageGraphs, StageInStep
from torchgpipe.graphs.traced import Entry, Traced, current_settings
from torchgpipe.values.microbatch import Batch

__all__: list[str] = []


class GraphCell(Cell):
    """A cell that is computed by a graph.

    Args:
        stage: the graphs of the stage, in this step.
        traced: the graph.
        more: the tensors among the further arguments of the loss.
        *of_cell: the arguments of :class:`~torchgpipe.engine.scheduled_cell.Cell`.
    """

    __slots__ = (
        *("_arguments", "_begun", "_first", "_late", "_more", "_places"),
        *("_shared", "_stage", "_traced"),
    )

    def __init__(
        self, stage: StageInStep, traced: Traced, more: Sequence[Tensor], *of_cell: Any
    ) -> None:
        super().__init__(*of_cell)
        self._stage, self._traced, self._more = stage, traced, more
        #: What :meth:`begin` has prepared for F, B, I or W to compute; None if it has not.
        self._begun: PartCall | None = None
        #: The part of the graph that R or W will compute, with its arguments. F (for R) or I (for
        #: W) collects the arguments already, so that all other tensors are freed.
        self._late: tuple[Part, list[Any]] | None = None
        #: For each role of arguments of the backward (``state``, ``saved`` or ``tangent``), the
        #: arguments. Until the backward begins, only those of ``saved`` are here.
        self._arguments: dict[str, Sequence[Any]] = {}
        #: Tensors of the backward that others might change in place, each with its version counter
        #: after the forward: if that has changed, the backward raises an error.
        self._shared: list[tuple[Tensor, int]] = []
        #: For the value and each skip that the cell gets, the indices of its tensors among all
        #: tensors of the micro-batch. By these, ``_by_part`` sorts the gradients.
        self._places: Mapping[Any, Sequence[int]] = {}
        #: The RNG states from before the forward, for R; None if R draws no random numbers.
        self._first: FirstNumbers | None = None

    def forward(self, batch: Batch) -> Any:
        return self._end(self._begun or self._forward(batch))

    def backward(self, grads: Gradients) -> Any:
        return self._end(self._begun or self._backward(grads))

    def backward_input(self, grads: Gradients) -> Any:
        return self._end(self._begun or self._backward_input(grads))

    def backward_weight(self) -> Any:
        return self._end(self._begun or self._backward_weight())

    def begin(self, kind: str, argument: Any) -> PartCall | None:
        """Prepare a computation, which the next call of its method ends.

        Args:
            kind: its kind: F, B, I or W, or another one, for which nothing is prepared.
            argument: the argument of that method, which releases its tensors now.

        Returns:
            The prepared part; None if there is none.
        """
        begin: dict[str, Callable[[Any], PartCall]] = {
            "F": self._forward,
            "B": self._backward,
            "I": self._backward_input,
            "W": self._backward_weight,
        }
        if kind in begin:
            self._begun = begin[kind](argument)
        return self._begun

    def _end(self, work: PartCall) -> Any:
        self._begun = None
        return work.finish(self, work.compute() if work.results is None else work.results)

    def _forward(self, batch: Batch) -> PartCall:
        stage, parts, recorded = self._stage, self._traced.parts, torch.is_grad_enabled()
        arguments = {"state": stage.tensors, "input": [*batch], "more": self._more}
        self._more = ()
        if recorded:
            self._places = _places(batch)
        part = parts.forward
        if recorded and self.again:
            part = parts.first
            self._first, state = self._before(parts)
            self._late = parts.again, parts.again.reserve({**arguments, "state": state}, "kept")
        values = _of_its_own(parts, part, part.arguments(arguments))
        # ``values`` alone holds the input from here on, so that the part can free it.
        batch.take()
        return PartCall(stage, part, values, GraphCell._forwarded)

    def _forwarded(self, results: Sequence[Any]) -> Batch:
        count = len(self._traced.form.needs_grad)
        if self._late is None:
            self._keep(results[count:])
        else:
            if self._first is not None:
                self._first.end_first_run()
            again, values = self._late
            again.add(values, "kept", results[count:])
        return self._output(results[:count])

    def _keep(self, saved: Sequence[Any]) -> None:
        self._arguments = {"saved": saved}
        traced, state = self._traced, self._stage.tensors
        shared = [saved[k] for k in traced.parts.exposed] + [state[k] for k in traced.lasting]
        self._shared = [(x, version_of(x)) for x in shared]

    def _before(self, parts: Parts) -> tuple[FirstNumbers | None, Sequence[Tensor]]:
        """The RNG states, and the parameters and buffers, that recomputation starts from."""
        numbers = FirstNumbers(get_device(self.stream)) if parts.again.is_random else None
        state = [*self._stage.tensors]
        with torch.no_grad():
            for k in parts.changed_again:
                # guard: buffers of before the first run of a graph
                state[k] = copy_with_strides(state[k], state[k].stride())
        return numbers, state

    def _output(self, tensors: Sequence[Tensor]) -> Batch:
        form, criterion = self._traced.form, self.criterion
        outputs = [*map(_with_grad, tensors, form.needs_grad)]
        output = form.output(outputs, form.shared)
        if criterion is not None:
            places, structure = form.rest
            further = form.fixed or structure.unflatten(tuple([outputs[k] for k in places]))
            weight, value = further
            (loss,) = output
            criterion.take(
                self.i, loss, weight, None if criterion.outputs is None else Batch(value)
            )
        return output

    def recompute(self) -> None:
        if self._late is None:
            # No recomputation: forward has kept what backward needs.
            return
        (part, values), self._late = self._late, None
        numbers, self._first = self._first, None
        values = _of_its_own(self._traced.parts, part, values)
        work = PartCall(self._stage, part, values, GraphCell._keep)
        if numbers is None:
            self._end(work)
            return

        def again() -> None:
            # guard: random numbers of a graph
            with numbers.restored():
                self._end(work)

        holding(numbers.locks, again)

    def _backward(self, grads: Gradients) -> PartCall:
        parts = self._begin_backward(grads)
        count = len(parts.joint.input_grads)

        def finish(cell: GraphCell, results: Sequence[Any]) -> Any:
            return cell._by_part(results), cell.weights, results[count:]

        return PartCall(self._stage, parts.backward, self._arguments_of(parts.backward), finish)

    def _backward_input(self, grads: Gradients) -> PartCall:
        parts = self._begin_backward(grads)
        late = parts.weight
        rest = late.reserve(self._arguments, "live")
        count = len(parts.joint.input_grads)

        def finish(cell: GraphCell, results: Sequence[Any]) -> Gradients:
            late.add(rest, "live", results[count:])
            cell._late = late, rest
            return cell._by_part(results)

        return PartCall(self._stage, parts.input, self._arguments_of(parts.input), finish)

    def _backward_weight(self, _: None = None) -> PartCall:
        assert self._late is not None
        (part, values), self._late = self._late, None
        return PartCall(self._stage, part, values, lambda cell, results: (cell.weights, results))

    def _arguments_of(self, part: Part) -> list[Any]:
        """Move the arguments of a part into a list, which alone holds them from here on."""
        arguments, self._arguments = self._arguments, {}
        return part.arguments(arguments)

    def _begin_backward(self, grads: Gradients) -> BackwardParts:
        """Find the parts for these gradients, and set the arguments of the next part."""
        traced = self._traced
        tangents: list[Tensor | None] = [None] * len(traced.form.needs_grad)
        for key, some in grads.items():
            for k, grad in zip(dict.fromkeys(traced.form.parts[key]), some):
                known = tangents[k]
                tangents[k] = grad if known is None or grad is None else known + grad
        grads.clear()
        parts = traced.with_grads(tangents)
        shared, self._shared = self._shared, []
        for x, version in shared:
            if version_of(x) != version:
                raise RuntimeError(
                    "a stage must not change in place what another stage needs for its backward "
                    f"(stage: {self.j}, shape: {tuple(x.shape)}); clone it first"
                )
        self._arguments = {
            "state": self._stage.tensors,
            "saved": self._arguments["saved"],
            "tangent": [*map(_as_traced, tangents, parts.joint.tangents)],
        }
        return parts

    def _by_part(self, grads: Sequence[Tensor | None]) -> Gradients:
        return {key: [grads[k] for k in places] for key, places in self._places.items()}


@dataclass(eq=False)
class PartCall:
    """A part of a graph with its arguments.

    Args:
        stage: the graphs of the stage, in this step.
        part: the part.
        values: its arguments.
        finish: takes the cell and what the part returns; returns what the cell's method returns.
        results: what the part has returned, if it was computed beside another one.
    """

    stage: StageInStep
    part: Part
    values: list[Any]
    finish: Callable[[GraphCell, Sequence[Any]], Any]
    results: Sequence[Any] | None = None

    def compute(self) -> Sequence[Any]:
        """Run the part; return what it returns."""
        with torch.no_grad(), self._without_casts():
            return self.part.function(self.values)

    def compute_beside(self, other: PartCall, streams: Interleaving) -> None:
        """Run the part and another one interleaved, if one of them communicates."""
        # Interleaved parts would both draw from one RNG state. So if either draws, nothing is done
        # here, and each part is computed later by itself, with the RNG state of its own cell.
        # guard: random numbers of an overlap
        if self.part.is_random or other.part.is_random:
            return
        function = interleaved(self.part, other.part)
        if function is not None:
            with torch.no_grad(), self._without_casts(), gate:
                self.results, other.results = function(self.values, other.values, streams)

    def _without_casts(self) -> AbstractContextManager[None]:
        # Autocast's casts are operators of the graph. With autocast on they would be done twice.
        # guard: autocast around a graph
        return without_autocast() if self.stage.settings.casts else nullcontext()


class GraphCells(Cells):
    """Cells that are graphs, and eager cells for stages that cannot be traced."""

    def __init__(self, graphs: Sequence[StageGraphs]) -> None:
        self.graphs = graphs

    def begin(self, copies: Sequence[Mapping[Tensor, Tensor]]) -> NewCell:
        settings = current_settings()
        stages = [graphs.begin(settings, weights) for graphs, weights in zip(self.graphs, copies)]
        return partial(_cell, stages)

    def compute(self, function: Callable[[], None]) -> None:
        # guard: computing beside a trace
        with gate:
            function()

    def overlap(self, one: Computation, other: Computation) -> None:
        first, second = [run.on(run.stream, _begun, run) for run in (one, other)]
        if first is not None and second is not None:
            streams = Interleaving(
                (one.stream, other.stream),
                one.step.links.communicating[one.w],
                (one.label, other.label),
            )
            one.on(one.stream, first.compute_beside, second, streams)
        super().overlap(one, other)


def _begun(run: Computation) -> PartCall | None:
    """Begin a computation if a graph computes it."""
    with run.turn, run.numbers():
        cell = run.cell
        return cell.begin(run.op.kind, run.received) if isinstance(cell, GraphCell) else None


def _cell(stages: Sequence[StageInStep], run: Forward) -> Cell:
    """The cell of an F: a graph, or an eager one."""
    stage = stages[run.j]
    entry, more = stage.find(run)
    if entry is not None and entry.traced is not None:
        return GraphCell(stage, entry.traced, more, *run.of_cell)
    cell = eager_cell(run)
    if entry is not None and not entry.has_run:
        cell.run = partial(_first_run, entry, cell.run)
    return cell


def _first_run(entry: Entry, run: Callable[..., Batch], batch: Batch, **options: Any) -> Batch:
    """Run the layers for the first time on a kind of micro-batch, and note that they have."""
    output = run(batch, **options)
    entry.has_run = True
    return output


def _of_its_own(parts: Parts, part: Part, values: list[Any]) -> list[Any]:
    """The arguments of a forward, with clones of the inputs that it changes in place.

    The stage before may need the originals, and so may recomputation.
    """
    for k, node in enumerate(part.slice.inputs) if parts.changed_inputs else ():
        if node in parts.changed_inputs:
            with torch.no_grad():
                values[k] = copy_with_strides(values[k], values[k].stride())
    return values


def _places(batch: Batch) -> Mapping[Any, Sequence[int]]:
    index = {id(x): k for k, x in enumerate(batch)}
    return {
        key: [*dict.fromkeys([index[id(x)] for x in part])] for key, part in batch.parts.items()
    }


def _with_grad(tensor: Tensor, needed: bool) -> Tensor:
    """Set ``requires_grad`` of an output, which tells the next stage to return a gradient."""
    # detach(), since the tensor may also be an input, whose requires_grad must not change.
    return tensor.detach().requires_grad_(needed)


def _as_traced(grad: Tensor | None, tangent: Any) -> Tensor | None:
    """A gradient with the strides that the graph was traced with, which views in it rely on."""
    if grad is None or tangent is None:
        return grad
    expected: Tensor = tangent.meta["val"]
    if grad.dtype != expected.dtype:
        grad = grad.to(expected.dtype)
    return laid_out(grad.resolve_conj().resolve_neg(), expected.stride())
