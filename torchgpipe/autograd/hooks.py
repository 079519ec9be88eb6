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
        tables = {id(x): x._backward_hooks for x in tensors if x._backward_hooks}
        self.tables: list[dict[int, Any]] = list(tables.values())

    def __enter__(self) -> None:
        self.found = [dict(table) for table in self.tables]
        for table in self.tables:
            # In place, since autograd holds the table.
            table.clear()

    def __exit__(self, *_: object) -> None:
        for table, found in zip(self.tables, self.found):
            added = dict(table)
            table.clear()
            table.update(found | added)
