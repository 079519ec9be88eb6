"""Hooks of tensors, which are for gradients as a whole, and not for the parts of a sum."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

__all__: list[str] = []


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
