"""Notes on exceptions that a layer's ``torch.autograd.Function`` raises in backward.

The node of such a function is a Python object, and autograd looks its ``apply`` up by name. So an
attribute of that name can wrap the backward, and add a note to its exceptions. Nodes of C++ look
nothing up, and their exceptions get no note.

To visit all nodes of all cells would take much host time. So the graph of a partition, or of a
module of a device map, is visited in its first step, and in later steps only if such a node was
found then.
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

#: Whether the graph of each partition has Python nodes, in training and in evaluation.
learned: weakref.WeakKeyDictionary[nn.Module, dict[bool, bool]] = weakref.WeakKeyDictionary()


class Visit:
    """Visit the nodes that layers add to the graph, within a ``with`` block.

    Args:
        layers: the partition, or a module of a device map.
        inputs: the tensors that it gets, skips included.
        stashed: a function that returns what layers have stashed so far.
        note: a text that names the cell.
    """

    def __init__(
        self,
        layers: nn.Module,
        inputs: Iterable[Tensor],
        stashed: Callable[[], Iterable[Any]],
        note: str,
    ) -> None:
        self.layers, self.stashed, self.note = layers, stashed, note
        #: The nodes where the graph of the next layer begins. No others are held, since a node
        #: holds its saved tensors, even if later layers have detached its output.
        self.known: set[Node] = {x.grad_fn for x in inputs if x.grad_fn is not None}
        #: Nodes that made the parameters and buffers.
        self.outside: set[Node] = set()
        self.recorded = self.found = False

    def __enter__(self) -> None:
        self.outer, layer.visit = layer.visit, self.visit

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        layer.visit = self.outer
        # A traceback may hold this object, which must not hold the graph then.
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
    """Whether the graph of a partition had Python nodes, or was not visited so far."""
    return learned.get(layers, {}).get(layers.training, True)


def _noting(node: Callable[[], Any], text: str) -> Callable[..., Any]:
    """Wrap the ``apply`` of a node, to add a note to its exceptions.

    The wrapper must not refer to the node, since the node refers to the wrapper.
    """

    def apply(*grads: Any) -> Any:
        this = node()
        try:
            return type(this).apply(this, *grads)
        except BaseException as error:
            # Some exceptions take no note, and one of a recomputation has its note already.
            with suppress(Exception):
                if not is_noted(error):
                    add_note(error, text)
            raise

    return apply
