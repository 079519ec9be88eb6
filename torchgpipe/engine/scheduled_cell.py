"""A cell of a schedule: one micro-batch in one stage, and what each instruction does to it.

::

    F   input ── enter ── layers ── output        the cell keeps the edges at both ends of its graph
    R                     layers, again           what was dropped is computed again
    B   input ←── layers ←── output               gradients of the input, and of the weights
    I   input ←── layers ←── output               of the input alone
    W             layers                          of the weights, from what I has noted

Each cell has a graph of its own, since its backward runs when the schedule says so. Its input is
detached from the graph of the stage before. ``enter`` makes it the output of a node, whose edges
tell autograd where the gradient of the input is wanted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from torchgpipe.ambient.context import Context
from torchgpipe.autograd.halves import Halves, backward, leaves
from torchgpipe.autograd.nodes import count_hooks, enter
from torchgpipe.devices.streams import AbstractStream
from torchgpipe.engine.body import NOTHING, Body
from torchgpipe.engine.criterion import Criterion
from torchgpipe.engine.links import Gradients
from torchgpipe.recompute.checkpoint import Checkpoint
from torchgpipe.recompute.offload import Offloaded
from torchgpipe.recompute.slots import Slot
from torchgpipe.recompute.storage import View
from torchgpipe.values.microbatch import Batch

__all__: list[str] = []


class Cell:
    """Micro-batch ``i`` in stage ``j`` of a step, from its F until it is done.

    The stream of the stage is current whenever a method is called. What a method is given lets go
    of its tensors, which are freed at their last use.

    Args:
        i: the micro-batch.
        j: the stage.
        stream: the stream of the stage.
        weights: the weights of the stage that require a gradient.
        again: whether the cell has an R.
        criterion: the loss after the layers, if this is the last stage.
    """

    __slots__ = ("again", "criterion", "i", "j", "stream", "weights")

    def __init__(
        self,
        i: int,
        j: int,
        stream: AbstractStream,
        weights: Sequence[Tensor],
        again: bool,
        criterion: Criterion | None,
    ) -> None:
        self.i, self.j, self.stream = i, j, stream
        self.again, self.criterion = again, criterion
        self.weights = [*weights]

    def forward(self, batch: Batch) -> Batch:
        """Run the layers (F)."""
        raise NotImplementedError

    def look_for_strays(self, nodes: set[Any]) -> list[Tensor]:
        """Find leaves that the cell has used, and that are not among its weights.

        Such are the parameters of another module that a layer or the loss refers to.

        Args:
            nodes: the nodes of its weights in autograd's graph, as far as other cells have met
                them; this one adds its own.
        """
        return []

    def recompute(self) -> None:
        """Compute again what was dropped (R)."""
        raise NotImplementedError

    def offload(self) -> None:
        """Let what backward needs leave for the host, if it does, once the output was sent."""

    def fetch(self) -> None:
        """Bring back from the host what :meth:`offload` has sent there."""

    def backward(
        self, grads: Gradients
    ) -> tuple[Gradients, Sequence[Tensor], Sequence[Tensor | None]]:
        """Compute the gradients of input and weights (B), and let go of all else.

        Returns:
            The gradients of the input; the weights, and their gradients.
        """
        raise NotImplementedError

    def backward_input(self, grads: Gradients) -> Gradients:
        """Compute the gradients of the input (I), and let go of what W does not need."""
        raise NotImplementedError

    def backward_weight(self) -> tuple[Sequence[Tensor], Sequence[Tensor | None]]:
        """Compute the gradients of the weights (W), and let go of all else."""
        raise NotImplementedError


class EagerCell(Cell):
    """A cell that runs the layers, and autograd, which keeps what backward needs.

    Args:
        body: the layers of the stage.
        context: the modes of the caller.
        *of_cell: the arguments of :class:`Cell`.
    """

    __slots__ = (
        *("_body", "_checkpoint", "_context", "_halves", "_hooks", "_inputs", "_offloaded"),
        *("_outputs", "run"),
    )

    def __init__(self, body: Body, context: Context, *of_cell: Any) -> None:
        super().__init__(*of_cell)
        # A cell that held the step would keep a failed step in memory, since steps hold cells.
        self._body, self._context = body, context
        #: Runs the layers on a micro-batch, and in the last stage the loss.
        self.run: Callable[..., Batch] = body.run
        if self.criterion is not None:
            self.run = partial(self.run, after=self.criterion.after(self.i))
        #: For each part (the value, or a skip), its tensors' edges in autograd's graph: ``_inputs``
        #: where backward ends, ``_outputs`` where it begins. None for a tensor without a gradient.
        self._inputs: dict[Any, list[GradientEdge | None]] = {}
        self._outputs: dict[Any, list[GradientEdge | None]] = {}
        self._checkpoint: Checkpoint | None = None
        self._offloaded: Offloaded | None = None
        self._halves: Halves | None = None
        #: The number of hooks of nodes that the process had registered when the cell was made. If
        #: it is greater when I begins, I has to look for hooks in the cell's graph.
        self._hooks = count_hooks()

    def forward(self, batch: Batch) -> Batch:
        batch = self._enter(batch.take())
        run, context, body = self.run, self._context, self._body
        if self.again:
            # NOTHING in place of a note on errors: the computation of R adds that note itself.
            self._checkpoint = body.checkpoint(run, context, self.stream, NOTHING)
            run = self._checkpoint.forward
        elif body.offloading is not None and body.offloading.sends(self.i):
            run = partial(body.offloading.cell(self.stream, self.i).forward, run)
        output = context.run(run, batch)
        if torch.is_grad_enabled():
            for key, part in output.parts.items():
                self._outputs[key] = edges = []
                for x in part if len(part) == 1 else {id(x): x for x in part}.values():
                    edges.append(get_gradient_edge(x) if x.requires_grad else None)
        return output

    def _enter(self, batch: Batch) -> Batch:
        """Make the input the beginning of a graph."""
        needing = [*filter(_requires_grad, batch)] if torch.is_grad_enabled() else []
        if not needing:
            return batch.replace([x.detach() for x in batch])
        outputs, ends = enter(*needing)
        edges = dict(zip(map(id, needing), ends))
        for key, part in batch.parts.items():
            self._inputs[key] = [edges.get(x) for x in dict.fromkeys(map(id, part))]
        entered = iter(outputs)
        return batch.replace([next(entered) if x.requires_grad else x.detach() for x in batch])

    def look_for_strays(self, nodes: set[Any]) -> list[Tensor]:
        edges = [edge for part in self._outputs.values() for edge in part if edge is not None]
        node = next((e.node for part in self._inputs.values() for e in part if e is not None), None)
        return leaves(edges, node, self.weights, nodes)

    def recompute(self) -> None:
        checkpoint, self._checkpoint = self._checkpoint, None
        assert checkpoint is not None
        checkpoint.recompute()

    def offload(self) -> None:
        offloading = self._body.offloading
        if offloading is not None:
            self._offloaded = offloading.offload()

    def fetch(self) -> None:
        if self._offloaded is not None:
            self._offloaded.fetch()

    def backward(
        self, grads: Gradients
    ) -> tuple[Gradients, Sequence[Tensor], Sequence[Tensor | None]]:
        roots, root_grads = self._roots(grads)
        inputs, self._inputs = self._inputs, {}
        edges = [edge for part in inputs.values() for edge in part if edge is not None]
        results = backward(roots, root_grads, [*edges, *self.weights])
        return _by_part(inputs, results), self.weights, results[len(edges) :]

    def backward_input(self, grads: Gradients) -> Gradients:
        roots, root_grads = self._roots(grads)
        inputs, self._inputs = self._inputs, {}
        edges = [edge for part in inputs.values() for edge in part if edge is not None]
        hooked = count_hooks() != self._hooks
        self._halves = Halves(roots, root_grads, edges, self.weights, _forget, hooked)
        return _by_part(inputs, self._halves.input())

    def backward_weight(self) -> tuple[Sequence[Tensor], Sequence[Tensor | None]]:
        halves, self._halves = self._halves, None
        assert halves is not None
        by_weight = halves.weight()
        return [halves.weights[x] for x in by_weight], list(by_weight.values())

    def _roots(self, grads: Gradients) -> tuple[list[GradientEdge], list[Tensor]]:
        outputs, self._outputs = self._outputs, {}
        edges, root_grads = [], []
        for key, part in grads.items():
            for edge, grad in zip(outputs[key], part):
                if edge is not None and grad is not None:
                    edges.append(edge)
                    root_grads.append(grad)
        grads.clear()
        return edges, root_grads


_requires_grad = attrgetter("requires_grad")


def _by_part(
    parts: dict[Any, list[GradientEdge | None]], grads: Sequence[Tensor | None]
) -> Gradients:
    rest = iter(grads)
    by_part: Gradients = {}
    for key, edges in parts.items():
        by_part[key] = [None if edge is None else next(rest) for edge in edges]
    return by_part


def _forget(saved: Any) -> None:
    """Empty a slot, or a view. What hooks of the caller have saved is the caller's."""
    if isinstance(saved, Slot | View):
        saved.empty()
