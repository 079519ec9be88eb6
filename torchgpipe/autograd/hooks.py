"""Hooks: those of tensors are for gradients as a whole, and those of a trace for its clocks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

__all__: list[str] = []


def before_node(tensor: Tensor, hook: Callable[..., None]) -> None:
    """Call a function each time when the node behind a tensor, if any, is about to run.

    A hook of the node does the same, and takes twice as long on the host. This one is also called
    if a backward ends in front of the node.
    """
    node = tensor.grad_fn
    if node is None:
        return
    register = getattr(node, "_register_hook_dict", None)
    if register is None or type(tensor) is not Tensor or tensor._backward_hooks is not None:
        node.register_prehook(hook)
        return
    tensor._backward_hooks = {0: hook}
    register(tensor)
    # The node holds the table, and whoever gets the tensor finds it without hooks.
    tensor._backward_hooks = None


class without_hooks:
    """Keep hooks of tensors from being called within a ``with`` block.

    Autograd calls the hooks of a tensor with each gradient that it computes. Within a step there is
    one for each micro-batch. The sum passes through the same hooks when it is handed over.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self.tensors = tensors
        #: The tables that were emptied, and what was in them.
        self.found: list[tuple[dict[int, Any], dict[int, Any]]] = []

    def __enter__(self) -> without_hooks:
        self.add(self.tensors)
        return self

    def add(self, tensors: Iterable[Tensor]) -> None:
        """Do the same for further tensors."""
        for x in tensors:
            table = x._backward_hooks
            if table:
                self.found.append((table, dict(table)))
                # In place, since autograd holds the table.
                table.clear()

    def __exit__(self, *_: object) -> None:
        for table, found in reversed(self.found):
            added = dict(table)
            table.clear()
            table.update(found | added)
