"""Names of work: the numbers that the library has for labels, and what labels say of a span.

The library knows the label of the thread that issued a piece of work, and that of the node of
autograd's graph that ran. A node was recorded in forward, so the backward of its cell is under way,
unless the thread says which half of it, as a schedule does.
"""

from __future__ import annotations

import ctypes
import itertools
from typing import Any, NamedTuple

import torch

from torchgpipe.ambient.labels import Label

__all__: list[str] = []

_ops: Any = torch.ops.virtual_accelerator

#: The backward of a cell as a whole, and its halves.
_BACKWARD = "BIW"

#: The last fields of a label are those of the layer, and the others those of the cell.
_OF_LAYER = 2

#: The bits of a layer's number within that of a label.
_BITS = 24


class Work(NamedTuple):
    """The cell and the layer of a piece of work, as a span has them; by default of no cell."""

    kind: str = ""
    stage: int | None = None
    microbatch: int | None = None
    target: int | None = None
    layer: str = ""
    layer_type: str = ""


class Numbers(dict[tuple[Any, ...], int]):
    """Numbers from 1, each given where somebody asks for that of something new."""

    def __init__(self) -> None:
        self.named: dict[int, tuple[Any, ...]] = {}
        self._count = itertools.count(1)

    def __missing__(self, key: tuple[Any, ...]) -> int:
        # Another thread may come in between, and numbers must stay apart.
        number = next(self._count)
        self.named[number] = key
        return self.setdefault(key, number)


class Naming:
    """The labels of an observation, by number; 0 is for none.

    A step has very many labels, one for each layer in each cell. So a number is made of that of the
    cell and that of the layer, and no label is kept.
    """

    def __init__(self) -> None:
        self._cells = Numbers()
        self._layers = Numbers()
        # PyTorch's operators are seen by modes of the caller, and this function is not.
        self._put = ctypes.PYFUNCTYPE(None, ctypes.c_int64)(_ops.label_address())

    def put(self, label: Label | None) -> None:
        """Tell the library the label of this thread."""
        number = 0
        if label is not None:
            number = self._cells[label[:-_OF_LAYER]] << _BITS
            number |= self._layers[label[-_OF_LAYER:]]
        self._put(number)

    def _label(self, number: int) -> Label | None:
        cell = self._cells.named.get(number >> _BITS)
        # A thread that began to tell in an earlier observation may have told a number of that one.
        layer = self._layers.named.get(number & (1 << _BITS) - 1)
        return None if cell is None or layer is None else Label(*cell, *layer)

    def work(self, own: int, node: int) -> Work:
        """Tell what a piece of work belongs to.

        Args:
            own: the number of its thread's label.
            node: the number of the label of the node that ran.
        """
        label, recorded = self._label(own), self._label(node)
        if label is None:
            return _NOTHING if recorded is None else _backward_of(recorded)
        if recorded is not None and label.kind in _BACKWARD and not label.layer:
            label = label._replace(layer=recorded.layer, layer_type=recorded.layer_type)
        return Work(*label)


_NOTHING = Work()


def _backward_of(label: Label) -> Work:
    """The work whose node was recorded under a label."""
    work = Work(*label)
    if label.kind != "copy":
        return work._replace(kind="B")
    # A gradient goes back.
    return work if label.target is None else work._replace(stage=label.target, target=label.stage)
