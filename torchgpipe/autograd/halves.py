"""The two halves of backward: for the input (I) at once, for the weights (W) when there is time.

A node of autograd's graph can compute the gradient of one of its inputs and not of the others. So I
runs backward to the input alone. On its way it comes to *boundaries*: nodes from which one edge
leads on towards the input, and another one to weights and nothing else::

    output ──→ addmm ──→ gelu ──→ addmm ──→ input
                 │                  │
                 ↓                  ↓
              weights            weights

I notes the gradients that arrive at boundaries. W has each boundary compute the rest from them, and
then runs backward from there to the weights.

The obvious way for W is a backward from each boundary to its own weights, as
torch.distributed.pipelining does. Each of these walks through all nodes between its boundary and
the input, only to find that none of them is needed; and one backward from all boundaries would run
these nodes again. Here W calls the node of a boundary itself, as a function. A node asks the
backward that is under way which of its edges are needed. So W calls all boundaries within a small
backward that needs nothing but the edges to weights.

Not every node can be run in halves:

- A function in Python (:class:`torch.autograd.Function`) computes all its gradients or none. The
  weights that it leads to get their gradients in I, which W hands on. A node with hooks that see
  what it computes (``register_backward_hook``, ``grad_fn.register_hook``) is run in the same way:
  they are called once, with all gradients.
- Compiled layers free what they have saved when they run, and refuse to run in a backward that
  keeps its graph (PyTorch issue 161904). If a cell has one on the way to the input, I is its whole
  backward, and W hands on the gradients of the weights.
- I is also the whole backward of a cell with PyTorch's checkpoints in layers: each half would run
  them again, and selective checkpoints refuse the second time.
- Where nothing that requires a gradient came in, there is nothing to do for I.

Source: Qi et al., Zero Bubble Pipeline Parallelism (arXiv 2401.10241), for the halves.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from functools import cache
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge

from torchgpipe import _torch
from torchgpipe._torch.dynamo import uncompiled
from torchgpipe.autograd.nodes import changes_gradients, note_gradients

__all__: list[str] = []

Node: TypeAlias = Any
#: What a backward computes the gradient of: a tensor, or an edge of a node.
End: TypeAlias = Tensor | GradientEdge

logger = logging.getLogger(__name__)

#: Bits that say where edges of a node lead: to the input of the cell, and to weights.
INPUT, WEIGHT = 1, 2


def backward(
    roots: Sequence[GradientEdge],
    grads: Sequence[Tensor],
    ends: Sequence[End],
    *,
    keep: bool = False,
) -> tuple[Tensor | None, ...]:
    """Run backward in this thread, and return the gradients of ends; None for those not reached.

    No gradient is added to any ``.grad``, and nodes behind the ends do not run.
    """
    if not (roots and ends):
        return (None,) * len(ends)
    with torch.autograd.set_multithreading_enabled(False):
        results: tuple[Tensor | None, ...] = _torch.run_backward(
            tuple(roots), tuple(grads), keep, False, tuple(ends), True, False
        )
    return results


def leaves(
    roots: Iterable[GradientEdge],
    inputs: Node | None,
    weights: Collection[Tensor],
    nodes: set[Node],
) -> list[Tensor]:
    """Find the leaves that a cell's part of autograd's graph leads to, besides its weights.

    Args:
        roots: the edges from which gradients come in.
        inputs: the node that hands gradients to the cell's input, if any is wanted.
        weights: the weights.
        nodes: their nodes, as far as they are known. To this set it adds those that it finds. What
            a weight was computed from is not the cell's.
    """
    seen = {inputs, None, *nodes}
    ends = []
    waiting: list[Any] = [root.node for root in roots]
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        edges = node.next_functions
        waiting += [x for x, _ in edges]
        if not edges:
            ends.append(node)
    strays = []
    known = {id(x) for x in weights} if ends else set()
    for node in ends:
        leaf = getattr(node, "variable", None)
        if id(leaf) in known:
            nodes.add(node)
        elif leaf is not None:
            strays.append(leaf)
    return strays


class Graph:
    """The part of autograd's graph that one cell has made: see :func:`leaves` for the arguments."""

    def __init__(
        self, roots: Iterable[GradientEdge], inputs: Node | None, weights: Iterable[Tensor]
    ) -> None:
        self.weights = {id(x): x for x in weights}
        #: For each node, the bits INPUT and WEIGHT, by what its edges lead to; 0 for neither.
        self.leads: dict[Node, int] = {}
        #: Each node with its edges (``next_functions``); nodes that edges lead to come before it.
        self.nodes: list[tuple[Node, Any]] = []
        self._leaves: dict[Node, int] = {}
        if inputs is not None:
            self.leads[inputs] = INPUT
        for x in self.weights.values():
            if x.grad_fn is not None:
                # This weight is no leaf: it was computed outside of the cell. With a flag in
                # self.leads, its node ends the visit below, as a leaf's node does.
                self.leads[x.grad_fn] = WEIGHT
                self._leaves[x.grad_fn] = id(x)
        for root in roots:
            self._visit(root.node)

    def _visit(self, root: Node) -> None:
        leads = self.leads
        stack: list[tuple[Node, Any]] = [(root, None)]
        while stack:
            node, edges = stack.pop()
            if edges is None:
                if node in leads:
                    continue
                leads[node] = 0
                edges = node.next_functions
                stack.append((node, edges))
                stack += [(x, None) for x, _ in edges if x is not None and x not in leads]
                continue
            flags = 0
            for x, _ in edges:
                if x is not None:
                    flags |= leads[x]
            if not edges:
                flags = self._leaf(node)
            leads[node] = flags
            self.nodes.append((node, edges))

    def _leaf(self, node: Node) -> int:
        leaf = getattr(node, "variable", None)
        if leaf is None:
            return 0
        self.weights.setdefault(id(leaf), leaf)
        self._leaves[node] = id(leaf)
        return WEIGHT

    def below(self, node: Node) -> set[int]:
        """The identities of the weights that a node leads to."""
        weights: set[int] = set()
        seen = {node}
        stack = [node]
        while stack:
            node = stack.pop()
            if node in self._leaves:
                weights.add(self._leaves[node])
                continue
            for x, _ in node.next_functions:
                if x is not None and x not in seen and self.leads.get(x, 0) & WEIGHT:
                    seen.add(x)
                    stack.append(x)
        return weights


class Boundary:
    """A node from which one edge leads on towards the input, and another one to weights alone."""

    __slots__ = ("edges", "grads", "node")

    def __init__(self, node: Node, edges: list[tuple[int, GradientEdge]]) -> None:
        self.node = node
        #: The edges that lead to weights alone, each after its index in ``node.next_functions``.
        self.edges = edges
        #: The gradients that have arrived at the node, until :meth:`run` computes with them.
        self.grads: list[tuple[Tensor | None, ...]] = []
        # This hook of the node runs last. So it notes the gradients with which the node computes,
        # after other hooks may have changed them.
        note_gradients(node, self.grads.append)

    def run(self) -> list[tuple[GradientEdge, Tensor]]:
        """Compute the gradients of the edges to weights, within a backward that needs these."""
        if not self.grads:
            return []
        result = self.node(*self.grads.pop())
        outputs = result if isinstance(result, tuple) else (result,)
        return [(edge, outputs[k]) for k, edge in self.edges if outputs[k] is not None]


class Halves:
    """The backward of one cell, in two halves."""

    def __init__(
        self,
        roots: Sequence[GradientEdge],
        grads: Sequence[Tensor],
        inputs: Sequence[GradientEdge],
        weights: Sequence[Tensor],
        forget: Callable[[Any], None] = lambda _: None,
        hooked: bool = True,
    ) -> None:
        graph = Graph(roots, inputs[0].node if inputs else None, weights)
        self._graph: Graph | None = graph
        self._roots, self._grads, self._inputs = list(roots), list(grads), inputs
        self._forget, self._hooked = forget, hooked
        #: For the ``id()`` of each weight, the weight.
        self.weights = graph.weights
        #: For the ``id()`` of each weight whose gradient I, the first half, computes: the gradient.
        self._early: dict[int, Tensor | None] = {}
        self._boundaries: list[Boundary] = []

    def input(self) -> tuple[Tensor | None, ...]:
        """Compute the gradients of the input.

        Saved tensors that only this half needed are released.
        """
        graph = self._graph
        assert graph is not None
        self._graph = None
        on_the_way = [(node, edges) for node, edges in graph.nodes if graph.leads[node] & INPUT]
        if any(_is_compiled(node) or is_checkpointed(node) for node, _ in on_the_way):
            _say_whole()
            early = list(graph.weights)
        else:
            early = self._find_boundaries(graph, on_the_way)
        # A root that leads to weights alone waits for W. But all roots take part if I computes the
        # gradients of some weights, since each root may lead to these.
        now = [bool(early) or bool(graph.leads[root.node] & INPUT) for root in self._roots]
        roots = [root for root, due in zip(self._roots, now) if due]
        grads = [grad for grad, due in zip(self._grads, now) if due]
        later = len(early) < len(graph.weights)
        first = [graph.weights[x] for x in early]
        count = len(self._inputs)
        computed = backward(roots, grads, [*self._inputs, *first], keep=later)
        self._early = dict(zip(early, computed[count:]))
        rest = [
            (root, grad)
            for root, grad in zip(self._roots, self._grads)
            if later and graph.leads[root.node] == WEIGHT
        ]
        self._roots, self._grads = [x for x, _ in rest], [x for _, x in rest]
        if later:
            needed = {boundary.node for boundary in self._boundaries}
            # Within a dispatch mode, _let_go() would crash PyTorch at a node that has saved a
            # number, such as the node of x * 2.
            with _torch.without_modes():
                for node, _ in on_the_way:
                    if node not in needed:
                        # guard: what only the input needed
                        _let_go(node, self._forget)
        return computed[:count]

    @property
    def noted(self) -> list[Tensor]:
        """The gradients that I has noted for W."""
        arrived = [x for boundary in self._boundaries for grads in boundary.grads for x in grads]
        return [x for x in (*arrived, *self._early.values()) if x is not None]

    def weight(self) -> dict[int, Tensor | None]:
        """Compute the gradients of the weights; return them by the identities of the weights."""
        late = [(x, weight) for x, weight in self.weights.items() if x not in self._early]
        by_weight, self._early = self._early, {}
        roots, grads = self._roots, self._grads
        self._roots, self._grads = [], []
        if late:
            boundaries, self._boundaries = self._boundaries, []
            arrived = _run(boundaries)
            roots += [edge for edge, _ in arrived]
            grads += [grad for _, grad in arrived]
            del arrived
            ends = [weight for _, weight in late]
            by_weight.update(zip([x for x, _ in late], backward(roots, grads, ends)))
        return by_weight

    def _find_boundaries(self, graph: Graph, on_the_way: Collection[tuple[Node, Any]]) -> list[int]:
        """Find the boundaries; return the weights whose gradients must be computed in I."""
        early: set[int] = set()
        candidates = []
        for node, edges in on_the_way:
            branches = [
                (k, GradientEdge(x, number))
                for k, (x, number) in enumerate(edges)
                if x is not None and graph.leads[x] == WEIGHT
            ]
            if not branches:
                continue
            # guard: hooks of nodes
            if isinstance(node, BackwardCFunction) or (self._hooked and changes_gradients(node)):
                early.update(*(graph.below(edge.node) for _, edge in branches))
            else:
                candidates.append((node, branches))
        if early:
            # Each set in `below` has the weights that one edge, or one root, leads to. If I needs
            # the gradient of one of them, it computes those of all, so that no node runs twice.
            below = [graph.below(edge.node) for _, branches in candidates for _, edge in branches]
            below += [graph.below(x.node) for x in self._roots if graph.leads[x.node] == WEIGHT]
            while reached := [x for x in below if x & early and not x <= early]:
                early.update(*reached)
        for node, branches in candidates:
            if early:
                branches = [
                    (k, edge) for k, edge in branches if not graph.below(edge.node) <= early
                ]
            if branches:
                self._boundaries.append(Boundary(node, branches))
        return [x for x in graph.weights if x in early]


@cache
def _say_whole() -> None:
    logger.debug(
        "cells with compiled layers, or with PyTorch's checkpoints, run their whole backward at I, "
        "and leave W nothing"
    )


def _is_compiled(node: Node) -> bool:
    return type(node).__name__ == "CompiledFunctionBackward"


def is_checkpointed(node: Node) -> bool:
    """Whether a checkpoint of PyTorch has packed the first tensor that a node has saved."""
    kind: Any = type(node)
    for name in _saved(kind):
        saved = getattr(node, name)
        if isinstance(saved, tuple):
            saved = saved[0] if saved else None
        # The tensor, or what a hook has packed in its place; None if the node has saved nothing.
        packed = getattr(saved, "data", None)
        if packed is not None:
            return type(packed).__module__ == "torch.utils.checkpoint"
    return False


@cache
def _saved(kind: Any) -> list[str]:
    """The names of the attributes in which nodes of a class hold their saved tensors."""
    return [name for name in dir(kind) if name.startswith("_raw_saved_")]


def _let_go(node: Any, forget: Callable[[Any], None]) -> None:
    """Make a node release the tensors that it has saved."""
    for name in _saved(node.__class__):
        saved = getattr(node, name)
        for item in saved if isinstance(saved, tuple) else (saved,):
            # register_hooks() replaces the saved tensor by what _nothing() returns, None. It raises
            # if nothing is saved there, or if another hook has packed the tensor: forget() lets go
            # of what that hook has made.
            try:
                item.register_hooks(_nothing, _gone)
            except (RuntimeError, AttributeError):
                with suppress(RuntimeError, AttributeError):
                    forget(item.data)


@uncompiled
def _nothing(_: Tensor) -> None:
    """Pack nothing."""


def gone() -> RuntimeError:
    """The error for a backward through what I has let go of."""
    return RuntimeError(
        "what a layer has saved for its input's gradient was let go of once that was computed, and "
        "something asks for it again; use a schedule that does not split backward into I and W"
    )


@uncompiled
def _gone(_: None) -> Tensor:
    raise gone()


class Within(torch.autograd.Function):
    """A node that calls a function in its backward: ``calls, tensor → tensor``."""

    @staticmethod
    def forward(ctx: Any, calls: list[Callable[[], None]], tensor: Tensor) -> Tensor:
        ctx.calls = calls
        return tensor.clone()

    @staticmethod
    @uncompiled
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        ctx.calls.pop()()
        return None, grad


def _run(boundaries: Sequence[Boundary]) -> list[tuple[GradientEdge, Tensor]]:
    """Run boundaries in a backward of their own, which computes gradients of weights alone."""
    if not boundaries:
        return []
    arrived: list[tuple[GradientEdge, Tensor]] = []

    def run() -> None:
        for boundary in boundaries:
            arrived.extend(boundary.run())

    start = torch.zeros((), device="cpu", requires_grad=True)
    with torch.enable_grad():
        within = Within.apply([run], start)
    edges = [edge for boundary in boundaries for _, edge in boundary.edges]
    root = torch.autograd.graph.get_gradient_edge(within)
    # The node of `within` is on the CPU, so autograd makes no stream current for it: the boundaries
    # run on the stream that the caller has made current.
    backward([root], [torch.ones((), device="cpu")], [start, *edges])
    return arrived
