"""Snapshots of objects that layers read: what they hold, to be compared later."""

from __future__ import annotations

from collections import deque
from functools import partial
from types import FunctionType, ModuleType
from typing import Any

from torch import Tensor, nn

from torchgpipe.values.structure import ATOMS

__all__: list[str] = []

#: How many containers within each other are looked into.
DEPTH = 4

SEQUENCES = (list, tuple, set, frozenset, deque)


def snapshot(value: Any, depth: int = DEPTH) -> Any:
    """Describe a value by numbers, texts and identities, as far as containers reach.

    Tensors count as there or not, whatever is in them. Functions count with what they have closed
    over, and other objects with their attributes.
    """
    kind = type(value)
    if kind in ATOMS:
        # One that is not a number is not equal to itself.
        return kind, value if value == value else None
    if isinstance(value, Tensor):
        return Tensor
    if depth == 0 or isinstance(value, (nn.Module, type, ModuleType)):
        return kind, id(value)
    if isinstance(value, SEQUENCES):
        return kind, *[snapshot(x, depth - 1) for x in value]
    if isinstance(value, dict):
        return kind, *[(key, snapshot(x, depth - 1)) for key, x in value.items()]
    if isinstance(value, partial):
        return kind, snapshot((value.func, value.args, value.keywords), depth - 1)
    if isinstance(value, FunctionType):
        cells = [_content(cell) for cell in value.__closure__ or ()]
        held = cells, value.__defaults__, value.__kwdefaults__
        return kind, id(value.__code__), snapshot(held, depth - 1)
    owned = getattr(value, "__dict__", None)
    return kind, id(value), snapshot(owned, depth - 1) if isinstance(owned, dict) else None


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        # Nothing was put there so far.
        return None
