"""Notes on exceptions of backward, where a layer has brought a ``torch.autograd.Function``.

The node of such a function is a Python object, and autograd looks its ``apply`` up by name. So an
attribute of that name stands between the node and what its backward raises. Nodes of C++ look
nothing up, and what they raise stays without a note.

Visiting each node of each cell would take the host long. So the cells of the first step in which a
partition, or a module of a device map, has a graph are visited, and those of later steps only if
one of these had such a node.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node

from torchgpipe.ambient.notes import add_note, is_noted, layer
from torchgpipe.values import trees

__all__: list[str] = []

#: Whether partitions bring Python nodes, each in training and in evaluation.
learned: weakref.WeakKeyDictionary[nn.Module, dict[bool, bool]] = weakref.WeakKeyDictionary()


class Visit:
    """Visit the nodes that layers add to the graph, within a ``with`` block.

    Args:
        layers: the partition, or a module of a device map.
        inputs: the tensors that it gets, skips included.
        stashed: a function that returns what layers have stashed so far.
        note: what to say of the cell.
    """

    def __init__(
        self,
        layers: nn.Module,
        inputs: Iterable[Tensor],
        stashed: Callable[[], Iterable[Any]],
        note: str,
    ) -> None:
        self.layers, self.stashed, self.note = layers, stashed, note
        #: Nodes at which the layer that runs next begins. Others are not kept, since a node keeps
        #: what it has saved, also if the layers have detached what comes behind it.
        self.known: set[Node] = {x.grad_fn for x in inputs if x.grad_fn is not None}
        #: Nodes that made the parameters and buffers.
        self.outside: set[Node] = set()
        self.recorded = self.found = False

    def __enter__(self) -> None:
        self.outer, layer.visit = layer.visit, self.visit

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        layer.visit = self.outer
        # A traceback holds this object.
        self.known, self.outside = set(), set()
        if kind is None and self.recorded:
            known = learned.setdefault(self.layers, {})
            training = self.layers.training
            known[training] = known.get(training, False) or self.found

    def visit(self, *outputs: Any) -> None:
        """Visit the nodes of the layer that has just run, or of layers compiled as one."""
        tensors = [x for value in (*outputs, *self.stashed()) for x in _tensors(value)]
        waiting = [x.grad_fn for x in tensors if x.grad_fn is not None]
        if waiting and not self.recorded:
            self.recorded = True
            # Under torch.func.functional_call, parameters may be results of the caller's functions.
            for x in (*self.layers.parameters(), *self.layers.buffers()):
                if x.grad_fn is not None:
                    self.outside.add(x.grad_fn)
        name = f", layer {layer.name} ({layer.kind})" if layer.name else ""
        text = f"{self.note}{name}, in its backward"
        ends = {*waiting}
        seen = self.known | self.outside
        while waiting:
            node = waiting.pop()
            if node in seen:
                continue
            seen.add(node)
            if isinstance(node, BackwardCFunction):
                self.found = True
                # guard: the note of the first cell
                if "apply" in vars(node):
                    continue
                node.apply = _noting(weakref.ref(node), text)
            waiting += [following for following, _ in node.next_functions if following is not None]
        if tensors:
            self.known = ends


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [x for x in trees.leaves_of(value) if isinstance(x, Tensor)]


def is_worth_a_visit(layers: nn.Module) -> bool:
    """Whether a partition has brought Python nodes, or nobody knows yet."""
    return learned.get(layers, {}).get(layers.training, True)


def _noting(node: Callable[[], Any], text: str) -> Callable[..., Any]:
    """The ``apply`` of a node, with a note on what it raises.

    The function must not hold the node, since the node holds the function.
    """

    def apply(*grads: Any) -> Any:
        this = node()
        try:
            return type(this).apply(this, *grads)
        except BaseException as error:
            # An exception that takes no notes stays without one, and one of a second run has its.
            with suppress(Exception):
                if not is_noted(error):
                    add_note(error, text)
            raise

    return apply
