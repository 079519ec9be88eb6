"""Labels: which cell and which layer a thread computes, for observations of devices.

A driver labels the work of a cell, and a partition each of its layers. Without an observation,
there are no labels.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

from torchgpipe.ambient.context import registered

__all__: list[str] = []


class Label(NamedTuple):
    """The cell and the layer of a piece of work; by default of no cell.

    Args:
        kind: its kind, as in :class:`~torchgpipe.show.span.Span`.
        stage: the partition, or the one that a copy leaves.
        microbatch: the number of the micro-batch.
        target: the partition that a copy goes to; None if that is not known yet.
        layer: the name of the layer in the model; empty for work of the cell besides its layers.
        layer_type: the class of the layer.
    """

    kind: str = ""
    stage: int | None = None
    microbatch: int | None = None
    target: int | None = None
    layer: str = ""
    layer_type: str = ""


class CurrentLabel(threading.local):
    """The label of a thread."""

    label: Label | None = None


current = registered(CurrentLabel())

#: The function that put() calls with each new label, in the label's thread; None without an
#: observation. All threads share it, so that those of autograd and of workers call it, too.
observer: Callable[[Label | None], None] | None = None

_NOTHING: AbstractContextManager[Any] = nullcontext()


def put(label: Label | None) -> Label | None:
    """Give this thread a label, and return the one that it had."""
    outer, current.label = current.label, label
    # Read once, since the observation may end in another thread meanwhile.
    tell = observer
    if tell is not None:
        tell(label)
    return outer


class Labelled:
    """A label of this thread within a ``with`` block."""

    __slots__ = ("_label", "_outer")

    def __init__(self, label: Label) -> None:
        self._label = label

    def __enter__(self) -> None:
        self._outer = put(self._label)

    def __exit__(self, *_: object) -> None:
        put(self._outer)


def of(kind: str, stage: int, microbatch: int, target: int | None = None) -> Label | None:
    """Make the label of a cell or a copy; None without an observation."""
    return None if observer is None else Label(kind, stage, microbatch, target)


def within(label: Label | None) -> AbstractContextManager[Any]:
    """Context manager that gives this thread a label, if there is one."""
    return _NOTHING if label is None else Labelled(label)


def put_layer(name: str, kind: str) -> None:
    """Label the layer that comes next in the cell of this thread, if it has a label."""
    if current.label is not None:
        put(current.label._replace(layer=name, layer_type=kind))
