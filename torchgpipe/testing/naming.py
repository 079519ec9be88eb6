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


class Work(NamedTuple):
    """The cell and the layer of a piece of work, as a span has them; by default of no cell."""

    kind: str = ""
    stage: int | None = None
    microbatch: int | None = None
    target: int | None = None
    layer: str = ""
    layer_type: str = ""


class Naming:
    """The labels of an observation, by number; 0 is for none."""

    def __init__(self) -> None:
        self._labels: dict[int, Label] = {}
        self._numbers: dict[Label | None, int] = {None: 0}
        self._count = itertools.count(1)
        # PyTorch's operators are seen by modes of the caller, and this function is not.
        self._put = ctypes.PYFUNCTYPE(None, ctypes.c_int64)(_ops.label_address())

    def put(self, label: Label | None) -> None:
        """Tell the library the label of this thread."""
        number = self._numbers.get(label)
        if number is None:
            # Another thread may come in between, and numbers must stay apart.
            number = next(self._count)
            assert label is not None
            self._labels[number] = label
            number = self._numbers.setdefault(label, number)
        self._put(number)

    def work(self, own: int, node: int) -> Work:
        """Tell what a piece of work belongs to.

        Args:
            own: the number of its thread's label.
            node: the number of the label of the node that ran.
        """
        label, recorded = self._labels.get(own), self._labels.get(node)
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
