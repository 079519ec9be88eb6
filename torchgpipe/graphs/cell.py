"""A cell whose stage is a graph: it does without autograd, and without layers.

What an eager cell has autograd keep, this one keeps itself: the values that one part of the graph
hands to the next.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torchgpipe.ambient.autocast import without_autocast
from torchgpipe.ambient.nesting import holding
from torchgpipe.ambient.random_numbers import FirstNumbers
from torchgpipe.autograd.versions import version_of
from torchgpipe.devices.streams import AbstractStream, get_device
from torchgpipe.engine.step import Step
from torchgpipe.executor.cell import Cell, Cells, Gradients, NewCell, Run, Work, done
from torchgpipe.executor.criterion import Criterion
from torchgpipe.executor.interleaving import Interleaving
from torchgpipe.graphs.gate import gate
from torchgpipe.graphs.parts import Given, Part, Parts
from torchgpipe.graphs.settings import current_settings
from torchgpipe.graphs.stage import StageGraphs, StageInStep
from torchgpipe.graphs.strides import copied, laid_out
from torchgpipe.graphs.traced import Traced
from torchgpipe.values.microbatch import Batch

__all__: list[str] = []


class GraphCell(Cell):
    """Micro-batch ``i`` in stage ``j``, computed by a graph if there is one.

    Args:
        graphs: the graphs of the stage, in this step.
        *args: the arguments of :class:`~torchgpipe.executor.cell.Cell`.
    """

    __slots__ = (
        *("_again", "_given", "_graphs", "_late", "_places"),
        *("_shared", "_traced", "_versions"),
    )

    def __init__(self, graphs: StageInStep, *args: Any) -> None:
        super().__init__(*args)
        self._graphs = graphs
        self._traced: Traced | None = None
        #: W, and its arguments.
        self._late: tuple[Part, list[Any]] | None = None
        #: What the next part is given, by roles.
        self._given: dict[str, Sequence[Any]] = {}
        #: What the backward needs as it is now, and somebody else has, too; with its versions.
        self._shared: list[Tensor] = []
        self._versions: list[int] = []
        #: For each part of the input, the places of its tensors, each tensor once.
        self._places: Mapping[Any, Sequence[int]] = {}
        #: The generators, and what buffers held, before the first run.
        self._again: tuple[FirstNumbers | None, Sequence[Tensor]] | None = None

    def forward(
        self,
        batch: Batch,
        run: Run,
        criterion: Criterion | None,
        *,
        again: bool,
        within: AbstractContextManager[None],
    ) -> Batch | Work:
        graphs, recorded = self._graphs, torch.is_grad_enabled()
        body = self.step.bodies[self.j]
        traced, more = graphs.find(body, batch, criterion, self.i, self.weights, again)
        self._traced = traced
        if traced is None:
            with gate.computing:
                output = super().forward(batch, run, criterion, again=again, within=within)
            graphs.has_run()
            return output
        parts = traced.parts
        given = {"state": graphs.tensors, "input": [*batch], "more": more}
        if recorded:
            self._places = _places(batch)
        part = parts.forward if recorded else parts.evaluation
        if recorded and again:
            part = parts.first
            self._again = self._before(parts)
            kept: list[Any] = [None] * len(parts.kept)
            for place, (role, k) in parts.kept_arguments:
                kept[place] = given[role][k]
            self._given = {"kept": kept}
        values = _of_its_own(parts, part, given)
        # From here on the list alone has the input, if it is not needed again.
        batch.take()
        given.clear()
        return GraphWork(graphs, part, values, partial(self._forwarded, traced, criterion))

    def _forwarded(
        self, traced: Traced, criterion: Criterion | None, found: Sequence[Any]
    ) -> Batch:
        if self._again is not None and self._again[0] is not None:
            self._again[0].settle()
        count = len(traced.form.needs_grad)
        if self._again is None:
            self._keep(traced, found[count:])
        else:
            kept: Any = self._given["kept"]
            places = [k for k, x in enumerate(kept) if x is None]
            for k, x in zip(places, found[count:]):
                kept[k] = x
        return self._output(found[:count], traced, criterion)

    def _keep(self, traced: Traced, saved: Sequence[Any]) -> None:
        self._given = {"saved": saved}
        state = self._graphs.tensors
        shared = [saved[k] for k in traced.parts.exposed] + [state[k] for k in traced.lasting]
        self._shared, self._versions = shared, [*map(version_of, shared)]

    def _before(self, parts: Parts) -> tuple[FirstNumbers | None, Sequence[Tensor]]:
        """The state that a second run needs: that of before the first."""
        numbers = FirstNumbers(get_device(self.stream)) if parts.again.is_random else None
        state = [*self._graphs.tensors]
        with torch.no_grad():
            for k in parts.changed_again:
                # guard: buffers of before the first run of a graph
                state[k] = copied(state[k], state[k].stride())
        return numbers, state

    def _output(
        self, tensors: Sequence[Tensor], traced: Traced, criterion: Criterion | None
    ) -> Batch:
        form = traced.form
        outputs = [*map(_with_grad, tensors, form.needs_grad)]
        output = Batch.of(
            {key: tuple([outputs[k] for k in places]) for key, places in form.parts.items()},
            form.structures,
            form.shared,
        )
        if criterion is not None:
            places, structure = form.rest
            found = form.fixed or structure.unflatten(tuple([outputs[k] for k in places]))
            weight, value = found
            (loss,) = output
            criterion.take(
                self.i, loss, weight, None if criterion.outputs is None else Batch(value)
            )
        return output

    def look_for_strays(self) -> list[Tensor]:
        return [] if self._traced else super().look_for_strays()

    def recompute(self) -> None:
        if self._traced is None:
            # guard: recomputation beside a trace
            with gate.computing:
                super().recompute()
            return
        if self._again is None:
            # What backward needs was kept.
            return
        (numbers, state), self._again = self._again, None
        part = self._traced.parts.again
        values = _of_its_own(self._traced.parts, part, {**self._given, "state": state})
        self._given = {}
        del state
        work = GraphWork(self._graphs, part, values, self._recomputed)
        if numbers is None:
            done(work)
            return

        def again() -> None:
            # guard: random numbers of a graph
            with numbers.restored():
                done(work)

        holding(numbers.locks, again)

    def _recomputed(self, found: Sequence[Any]) -> None:
        assert self._traced is not None
        self._keep(self._traced, found)

    def backward(
        self, grads: Gradients
    ) -> tuple[Gradients, Sequence[Tensor], Sequence[Tensor | None]] | Work:
        parts = self._begin_backward(grads)
        if parts is None:
            # Checkpoints of PyTorch's compute layers in backward, too.
            # guard: backward beside a trace
            with gate.computing:
                return super().backward(grads)
        count = len(parts.joint.input_grads)

        def finish(found: Sequence[Any]) -> Any:
            return self._by_part(found), self.weights, found[count:]

        return GraphWork(self._graphs, parts.backward, self._taken(parts.backward), finish)

    def backward_input(self, grads: Gradients) -> Gradients | Work:
        parts = self._begin_backward(grads)
        if parts is None:
            # guard: backward beside a trace
            with gate.computing:
                return super().backward_input(grads)
        late, given = parts.weight, self._given
        # What only the input needs must be free once it was used.
        rest = [None if role == "live" else given[role][k] for role, k in late.sources]
        count = len(parts.joint.input_grads)

        def finish(found: Sequence[Any]) -> Gradients:
            for place, (role, k) in enumerate(late.sources):
                if role == "live":
                    rest[place] = found[count + k]
            self._late = late, rest
            return self._by_part(found)

        return GraphWork(self._graphs, parts.input, self._taken(parts.input), finish)

    def backward_weight(self) -> tuple[Sequence[Tensor], Sequence[Tensor | None]] | Work:
        if self._traced is None:
            # guard: backward beside a trace
            with gate.computing:
                return super().backward_weight()
        assert self._late is not None
        (part, values), self._late = self._late, None
        return GraphWork(self._graphs, part, values, lambda found: (self.weights, found))

    def _taken(self, part: Part) -> list[Any]:
        """The arguments of a part, which the list alone has from here on."""
        given, self._given = self._given, {}
        return part.arguments(given)

    def _begin_backward(self, grads: Gradients) -> Parts | None:
        """The parts for these gradients, which the next part is given; None for an eager cell."""
        traced = self._traced
        if traced is None:
            return None
        tangents: list[Tensor | None] = [None] * len(traced.form.needs_grad)
        for key, some in grads.items():
            for k, grad in zip(dict.fromkeys(traced.form.parts[key]), some):
                known = tangents[k]
                tangents[k] = grad if known is None or grad is None else known + grad
        parts, saved = traced.with_grads(tangents)
        given, shared = self._given["saved"], self._shared
        self._shared = []
        for x, version in zip(shared, self._versions):
            if version_of(x) != version:
                raise RuntimeError(
                    "a stage must not change in place what another stage needs for its backward "
                    f"(stage: {self.j}, shape: {tuple(x.shape)}); clone it first"
                )
        self._given = {
            "state": self._graphs.tensors,
            "saved": [given[k] for k in saved],
            "tangent": [*map(_as_traced, tangents, parts.joint.tangents)],
        }
        return parts

    def _by_part(self, grads: Sequence[Tensor | None]) -> Gradients:
        return {key: [grads[k] for k in places] for key, places in self._places.items()}


class GraphWork(Work):
    """A part of a graph with its arguments.

    Args:
        graphs: the graphs of the stage, in this step.
        part: the part.
        values: its arguments.
        finish: takes what the part returns; returns what the cell's method returns.
    """

    def __init__(
        self,
        graphs: StageInStep,
        part: Part,
        values: list[Any],
        finish: Callable[[Sequence[Any]], Any],
    ) -> None:
        self.graphs, self.part, self.values, self.finish = graphs, part, values, finish

    @property
    def is_random(self) -> bool:
        return self.part.is_random

    def run(self) -> Sequence[Any]:
        with torch.no_grad(), self._without_casts(), gate.computing:
            return self.part.function(self.values)

    def beside(self, other: Work, streams: Interleaving) -> tuple[Any, Any] | None:
        if not isinstance(other, GraphWork):
            return None
        function = self.graphs.graphs.overlaps.get(self.part, other.part)
        if function is None:
            return None
        with torch.no_grad(), self._without_casts(), gate.computing:
            return function(self.values, other.values, streams)

    def _without_casts(self) -> AbstractContextManager[None]:
        # The graph has the casts of autocast in it.
        # guard: autocast around a graph
        return without_autocast() if self.graphs.settings.casts else nullcontext()


class GraphCells(Cells):
    """Cells that are graphs.

    Args:
        graphs: the graphs of each stage.
    """

    interleave = True

    def __init__(self, graphs: Sequence[StageGraphs]) -> None:
        self.graphs = graphs

    def begin(self) -> NewCell:
        settings = current_settings()
        stages = [graphs.begin(settings) for graphs in self.graphs]

        def new(
            step: Step, i: int, j: int, stream: AbstractStream, weights: Sequence[Tensor]
        ) -> Cell:
            return GraphCell(stages[j], step, i, j, stream, weights)

        return new


def _of_its_own(parts: Parts, part: Part, given: Given) -> list[Any]:
    """The arguments of a forward, with clones of the inputs that it changes in place.

    The stage before may need them, and so may a second run.
    """
    values = part.arguments(given)
    if parts.changed_inputs:
        with torch.no_grad():
            for k, node in enumerate(part.slice.inputs):
                if node in parts.changed_inputs:
                    values[k] = copied(values[k], values[k].stride())
    return values


def _places(batch: Batch) -> Mapping[Any, Sequence[int]]:
    place = {id(x): k for k, x in enumerate(batch)}
    return {
        key: [*dict.fromkeys([place[id(x)] for x in part])] for key, part in batch.parts.items()
    }


def _with_grad(tensor: Tensor, needed: bool) -> Tensor:
    """A tensor that tells the next stage whether a gradient of it is wanted."""
    if tensor.requires_grad == needed:
        return tensor
    # It may be an input of the graph, which somebody else has, too.
    return tensor.detach().requires_grad_(needed)


def _as_traced(grad: Tensor | None, tangent: Any) -> Tensor | None:
    """A gradient with the strides that the graph was traced with, which views in it rely on."""
    if grad is None or tangent is None:
        return grad
    expected: Tensor = tangent.meta["val"]
    if grad.dtype != expected.dtype:
        grad = grad.to(expected.dtype)
    return laid_out(grad, expected.stride())
