"""Hooks of a node of the graph, and the number by which autograd chooses it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node

from torchgpipe import _torch

__all__: list[str] = []


# Hooks: tensor hooks must see whole gradients only, and a trace uses hooks to take times.


_lock = threading.Lock()
#: How many hooks :func:`note_gradients` has registered.
_own = 0


def count_hooks() -> int:
    """Count the hooks that others have registered so far, in the whole process."""
    with _lock:
        # A count of all handles, which takes less time than to look at the hooks of a node.
        return int(_torch.count_handles()) - _own


def note_gradients(node: Any, note: Callable[[Any], None]) -> None:
    """Call a function with the gradients that arrive at a node, after all hooks of others."""
    global _own
    with _lock:
        node.register_prehook(note)
        _own += 1


def changes_gradients(node: Any) -> bool:
    """Whether a node has hooks that see, and may change, the gradients that it computes.

    No attribute of a node shows them. But a handle of a further hook refers to the dict of all.
    """
    handle = node.register_hook(_ignore)
    table = handle.hooks_dict_ref()
    handle.remove()
    return bool(table)


def _ignore(*_: Any) -> None:
    """Do nothing."""


def before_node(tensor: Tensor, hook: Callable[..., None]) -> None:
    """Call a function each time the ``grad_fn`` of a tensor, if any, is about to run.

    This is a hook of the tensor, since one of the node takes twice as long on the host. It is also
    called if a backward ends at the tensor.
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
    # The node holds the dict of hooks; the tensor itself shows none to its users.
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


# The sequence numbers of nodes, by which autograd chooses among nodes that are ready.
#
# Backward runs the one with the highest number first: what was recorded last. But each thread
# counts for itself. Where several threads record, one after another, a thread must go on where
# the one before it has stopped.


def next_number() -> int:
    """The sequence number of the node that this thread records next."""
    number: int = _torch.next_node()
    return number


def number_of(node: Node) -> int:
    """The sequence number of a node."""
    number: int = node._sequence_nr()
    return number


def number_from(first: int) -> None:
    """Let the nodes that this thread records from now on have numbers from ``first`` on.

    Only recording a node counts the number up, so unused nodes are recorded (a microsecond each).
    """
    missing = first - next_number()
    if missing > 0 and torch.is_grad_enabled():
        leaf = torch.empty((), device="cpu", requires_grad=True)
        for _ in range(missing):
            leaf.view(())
