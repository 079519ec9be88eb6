"""The graphs of a stage: one for each kind of micro-batch that comes, and each state of the layers.

A kind is the shapes, strides, dtypes and containers of all tensors, and which of them need a
gradient. So a mini-batch whose last micro-batch is smaller has two. If a stage cannot be a graph,
its cells are eager ones, and a warning says once which stage that is, and why.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from os import PathLike
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchgpipe.ambient.context import current_hooks
from torchgpipe.ambient.notes import warn
from torchgpipe.devices.streams import device_types
from torchgpipe.engine.body import Body
from torchgpipe.executor.criterion import Criterion
from torchgpipe.graphs.overlap import Overlaps
from torchgpipe.graphs.parts import Maker, Parts
from torchgpipe.graphs.picture import text, write_svg
from torchgpipe.graphs.places import Places, UntraceableError, has_hooks, kinds
from torchgpipe.graphs.recompute import Choice, everything
from torchgpipe.graphs.slices import function_of
from torchgpipe.graphs.trace import Form, trace
from torchgpipe.values.microbatch import Batch
from torchgpipe.values.structure import TUPLE, Structure, flatten

__all__: list[str] = []

#: The number of states of the layers, such as training and evaluation, whose graphs are kept.
STATES = 8

#: The number of kinds of micro-batches, in each state, that become graphs.
KINDS = 32

#: Tracing puts other tensors in the places of weights, and PyTorch's tracer is not for several
#: threads.
_tracing = threading.RLock()


class Traced:
    """A graph with all that is needed to take its arguments apart, and put its results together.

    Args:
        parts: the parts of the graph.
        form: the output.
        trace: traces the stage once more, for gradients of fewer outputs.
    """

    def __init__(self, parts: Parts, form: Form, trace: Callable[[Sequence[bool]], Parts]) -> None:
        self.parts, self.form, self._trace = parts, form, trace
        whole = tuple(form.needs_grad)
        #: The parts for gradients of some outputs, and which of the saved values they take.
        self._known = {whole: (parts, [*range(len(parts.saved))])}

    def with_grads(self, grads: Sequence[Tensor | None]) -> tuple[Parts, Sequence[int]]:
        """The parts for a backward that has these gradients of the outputs, and no others.

        Zeros in their place would not do: a weight that no gradient comes to has none, and
        the derivative of a square root of 0, for one, makes NaN of 0.
        """
        key = tuple([x is not None and needed for x, needed in zip(grads, self.form.needs_grad)])
        found = self._known.get(key)
        if found is None:
            try:
                with _tracing:
                    parts = self._trace(key)
            except UntraceableError as error:
                raise RuntimeError(
                    "a stage that is a graph must be traceable for gradients of some of its "
                    f"outputs, too (reason: {error}); use stages='eager'"
                ) from error
            place = {x.name: k for k, x in enumerate(self.parts.saved)}
            # A backward from fewer outputs needs no more of the forward than one from all.
            found = self._known[key] = parts, [place[x.name] for x in parts.saved]
        return found


class Entry(NamedTuple):
    """One kind of micro-batch.

    Args:
        structures: the structures of its parts, and that of the loss's further arguments.
        traced: the graph; None for eager cells.
    """

    structures: list[Structure]
    traced: Traced | None


class State:
    """The layers of a stage in one state.

    Args:
        modules: the layers, and the loss if it is a module.
        others: the loss if it is none.
    """

    def __init__(self, modules: Sequence[nn.Module], others: Sequence[Any]) -> None:
        self.modules = modules
        self.hooks = has_hooks(modules)
        self.places = Places(modules, others)
        self.entries: dict[Any, list[Entry]] = {}
        #: The number of kinds of micro-batches, and whether the layers have run in this state.
        self.count, self.has_run = 0, False

    def is_current(self) -> bool:
        """Whether the layers are in this state."""
        return self.places.are_current() and has_hooks(self.modules) == self.hooks


class StageGraphs:
    """All graphs of one stage.

    Args:
        j: the stage.
        modules: the layers, and the loss if it is a module.
        overlaps: interleaved functions of parts of this stage and others.
        make: makes a function of a part of a graph.
        recompute: chooses what is computed again under checkpointing.
        others: objects that decide what is computed, as a loss that is no module.
    """

    def __init__(
        self,
        j: int,
        modules: Sequence[nn.Module],
        overlaps: Overlaps,
        make: Maker = function_of,
        recompute: Choice = everything,
        others: Sequence[Any] = (),
    ) -> None:
        self._others = others
        self.j, self._modules, self.overlaps = j, modules, overlaps
        self._make, self._recompute = make, recompute
        self._states: list[State] = []
        #: Why cells of this stage are eager ones, each reason once.
        self.reasons: list[str] = []
        #: The graph that was used last.
        self.last: Traced | None = None
        #: The parameters and buffers, as they are in this step.
        self.state: list[Tensor] = []

    def begin(self) -> None:
        """Look at the layers, at the beginning of a step."""
        for state in self._states:
            if state.is_current():
                break
        else:
            state = State(self._modules, self._others)
        # The one that was used last is looked at first.
        self._states = [state, *[x for x in self._states if x is not state]][:STATES]
        self.state = state.places.read()
        #: The types of device whose operators autocast has cast.
        self.casts = [kind for kind in device_types() if torch.is_autocast_enabled(kind)]
        dtypes = [(kind, torch.get_autocast_dtype(kind)) for kind in self.casts]
        self._settings = torch.get_default_dtype(), *dtypes

    def find(
        self,
        body: Body,
        batch: Batch,
        criterion: Criterion | None,
        i: int,
        weights: Sequence[Tensor],
        again: bool,
        *,
        at_once: bool = False,
    ) -> tuple[Traced | None, Sequence[Tensor]]:
        """Find the graph for a micro-batch.

        Args:
            body: runs the layers.
            batch: the micro-batch.
            criterion: the loss behind the layers, if this is the last stage.
            i: the number of the micro-batch.
            weights: the weights of the stage that require a gradient.
            again: whether the cell has an R.
            at_once: whether to trace before the layers have run.

        Returns:
            The graph, or None if the cell is an eager one; and the tensors among the further
            arguments of the loss.
        """
        more, structure = _of_loss(criterion, i)
        if batch.shared:
            # A graph would not see changes in place.
            self._say("tensors that come to it share memory")
            return None, more
        if current_hooks() is not None:
            self._say("hooks for saved tensors are active")
            return None, more
        structures = [*batch.structures.values(), structure]
        key = (
            *(again, torch.is_grad_enabled(), self._settings, tuple(batch.parts)),
            *(_places(batch), kinds(batch), kinds(more)),
        )
        state = self._states[0]
        entries = state.entries.setdefault(key, [])
        for entry in entries:
            if all(a.equals(b) for a, b in zip(entry.structures, structures)):
                return entry.traced, more
        if not (state.has_run or at_once):
            # What layers make once, and keep, must not be made of fake tensors.
            # guard: layers that keep what they have made
            state.has_run = True
            return None, more
        if state.count == KINDS:
            self._say(f"more than {KINDS} kinds of micro-batches have come to it")
            return None, more
        state.count += 1
        with _tracing, body.lock:
            traced = self._traced(body, batch, criterion, i, weights, more)
        entries.append(Entry(structures, traced))
        self.last = traced or self.last
        return traced, more

    def _traced(
        self,
        body: Body,
        batch: Batch,
        criterion: Criterion | None,
        i: int,
        weights: Sequence[Tensor],
        more: Sequence[Tensor],
    ) -> Traced | None:
        structure = _of_loss(criterion, i)[1]
        loss = keyed = None
        if criterion is not None:
            # Whoever traces again later must not hold this step.
            loss = Criterion(criterion.loss, [], [], None, criterion.outputs is not None)
            keyed = bool(criterion.arguments[i][1])

        def run(batch: Batch, more: Sequence[Tensor]) -> Any:
            if loss is None:
                return body.run(batch), flatten((None, None))
            given = structure.unflatten(tuple(more))
            args, kwargs = given if keyed else (given, {})
            return _with_loss(body, batch, loss, args, kwargs)

        state, recorded = self._states[0], torch.is_grad_enabled()

        def parts(needs_grad: Sequence[bool] | None = None) -> tuple[Parts, Form]:
            joint, form = trace(
                *(state.places, run, batch, more, weights), recorded=recorded, roots=needs_grad
            )
            return Parts(joint, self._make, self._recompute), form

        try:
            if state.hooks:
                raise UntraceableError("its modules have hooks")
            if not state.is_current():
                raise UntraceableError("its attributes change within a step")
            made, form = parts()
        except UntraceableError as error:
            self._say(str(error))
            return None
        batch, more = made.joint.like(batch, more)
        return Traced(made, form, lambda needs_grad: parts(needs_grad)[0])

    def print(self, split: bool = True) -> None:
        """Print the parts of the graph that was traced last.

        Args:
            split: whether the backward is I and W; otherwise it is B.

        Raises:
            ValueError: there is no graph.
        """
        print(text(self._last().parts, split, self.j))

    def svg(self, path: str | PathLike[str], split: bool = True) -> None:
        """Draw the parts of the graph that was traced last into an SVG file.

        Args:
            path: the file.
            split: whether the backward is I and W; otherwise it is B.

        Raises:
            ValueError: there is no graph.
        """
        write_svg(path, self._last().parts, split, self.j)

    def _last(self) -> Traced:
        if self.last is None:
            raise ValueError(
                "a stage has a graph once a step, or costs(), has traced it (stage: "
                f"{self.j}, reasons for eager cells: {self.reasons}); run two micro-batches first"
            )
        return self.last

    def _say(self, reason: str) -> None:
        if reason not in self.reasons:
            self.reasons.append(reason)
            warn(
                f"a stage must be traceable to become a graph, and stage {self.j} is not, so it "
                f"runs eagerly ({reason}); change the layer, or pass stages='eager'"
            )


def _with_loss(
    body: Body, batch: Batch, criterion: Criterion, args: Any, kwargs: Any
) -> tuple[Batch, tuple[Sequence[Tensor], Structure]]:
    """Run the layers and the loss; return the loss, then its weight and the output."""
    rest: list[Any] = []

    def behind(output: Batch) -> Batch:
        loss, weight = criterion.compute(output, args, kwargs)
        rest.append((weight, output.value if criterion.outputs is not None else None))
        return Batch(loss)

    output = body.run(batch, behind=behind)
    return output, flatten(rest[0])


def _of_loss(criterion: Criterion | None, i: int) -> tuple[Sequence[Tensor], Structure]:
    """The tensors, and the structure, of the further arguments of a micro-batch's loss."""
    if criterion is None:
        return (), TUPLE
    args, kwargs = criterion.arguments[i]
    # Most often a tuple of tensors, which takes less time.
    return flatten((args, kwargs) if kwargs else args)


def _places(batch: Batch) -> tuple[Any, ...]:
    """For each part, the places of its tensors among those of the micro-batch."""
    if len(batch.parts) == 1 == len(batch.tensors):
        return (len(batch.parts[None]),)
    place = {id(x): k for k, x in enumerate(batch)}
    return tuple(tuple([place[id(x)] for x in part]) for part in batch.parts.values())
