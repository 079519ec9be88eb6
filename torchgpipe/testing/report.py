"""The entries of an observation, and the names of work in them."""

from __future__ import annotations

import ctypes
import itertools
from dataclasses import dataclass, field
from typing import Any

import torch

from torchgpipe.ambient.labels import Label
from torchgpipe.show.span import Span, Stream
from torchgpipe.show.tables import in_gib

__all__: list[str] = [
    "Access",
    "Part",
    "Place",
    "Race",
    "Transfers",
    "Wait",
]


@dataclass(frozen=True)
class Access:
    """One of the two sides of a race.

    Args:
        op: the operator, as PyTorch's dispatcher calls it, or the name of a busy layer. It is
            ``empty`` for allocating the memory, which comes after the stream's work before it.
        stream: the stream on which the operator was issued.
        write: whether the operator writes.
        stack: the Python stack where the operator was issued, innermost last, if stacks were asked
            for. Operators that autograd itself runs in backward have none.
        work: the cell and the layer, such as ``0F3 encoder.0 (Linear)``, where they are known. Of a
            race that happened several times, they are those of the first time.
    """

    op: str
    stream: Stream
    write: bool
    stack: tuple[str, ...] = field(default=(), repr=False)
    work: str = ""

    def __str__(self) -> str:
        verb = "writes" if self.write else "reads"
        stack = "".join(f"\n    {line}" for line in self.stack)
        work = f" in {self.work}" if self.work else ""
        return f"{self.op}{work} {verb} on {self.stream}{stack}"


@dataclass(frozen=True)
class Race:
    """Two accesses to the same memory, neither ordered before the other.

    A tensor is taken to occupy all bytes from its first element to its last one: two sets of
    columns of a matrix overlap, two sets of rows do not.

    Args:
        kind: ``read after write``, ``write after read``, ``write after write``, ``reuse of freed
            memory`` (allocated again while a stream that was not announced by ``record_stream``
            may still use it) or ``memory freed in use`` (the same, and not allocated again yet).
        device: the index of the device whose memory it is, or ``"cpu"`` for pinned memory.
        bytes: the size of the memory.
        first: the access that was issued first.
        second: the access that was not ordered after it; for freed memory, the next allocation.
        count: how often this race happened, between the same operators on the same streams and,
            where stacks are taken, with the same stacks.
    """

    kind: str
    device: int | str
    bytes: int
    first: Access
    second: Access
    count: int = 1

    def __str__(self) -> str:
        where = f"virtual:{self.device}" if isinstance(self.device, int) else "pinned memory"
        return (
            f"{self.kind} ({self.bytes} bytes of {where}, {self.count} times)\n"
            f"  first:  {self.first}\n  second: {self.second}"
        )


@dataclass(frozen=True)
class Wait:
    """A time before a piece of work, in which its stream waited for another stream or the host.

    Args:
        stream: the stream that waited.
        start: when the stream had done the work before.
        end: when the stream went on.
        span: the index of the span that the stream went on with.
        cause: the index of the span that the stream waited for, or that the host waited for before
            it issued the work.
    """

    stream: Stream
    start: float
    end: float
    span: int
    cause: int


@dataclass(frozen=True)
class Transfers:
    """The copies from one device to another: the number of tensors, and of bytes."""

    count: int
    bytes: int


@dataclass(frozen=True)
class Part:
    """The share of an operator in a step on described hardware, all its calls together.

    Args:
        device: the index of the device.
        kind: ``matmul``, ``convolution``, ``attention`` or ``other``.
        op: the operator.
        count: the number of its calls.
        flops: its operations.
        bytes: the bytes that it moved.
        time: seconds.
    """

    device: int
    kind: str
    op: str
    count: int
    flops: float
    bytes: float
    time: float


@dataclass(frozen=True)
class Place:
    """A place in a step: where a device's memory peaked or was exceeded, or an operator failed.

    Args:
        device: the index of the device.
        title: the cell, the layer and the operator, where they are known.
        bytes: what was allocated then, with what the operator asked for.
        op: the operator.
        layer: the name of the layer; empty if it belongs to none, or it is unknown.
        detail: why the operator failed.
    """

    device: int
    title: str
    bytes: int
    op: str
    layer: str = ""
    detail: str = field(default="", repr=False)

    def __str__(self) -> str:
        return f"{self.title} on virtual:{self.device}, {in_gib(self.bytes)}"


def waits_of(spans: list[Span]) -> list[Wait]:
    """Find the times between the spans of each stream, and what each stream waited for.

    The spans are in the order in which they were issued.
    """
    ends: dict[Stream, float] = {}
    waits = []
    for index, span in enumerate(spans):
        before = ends.get(span.stream, 0.0)
        if span.start > before:
            waits.append(Wait(span.stream, before, span.start, index, span.after))
        ends[span.stream] = span.end
    return waits


def critical_path(spans: list[Span]) -> list[int]:
    """Find the spans whose times make the makespan, each after the one that let it start.

    Returns:
        Their indices, from the first to the last.
    """
    if not spans:
        return []
    path = [max(range(len(spans)), key=lambda index: spans[index].end)]
    while spans[path[-1]].after >= 0:
        path.append(spans[path[-1]].after)
    return path[::-1]


# The cell and the layer that a piece of work belongs to.
#
# For each piece of work the C++ library keeps the numbers of two labels: the label of the thread
# that issued the work, and that of the autograd node that ran. A node has the label under which its
# forward was computed. If the thread has a label, as under a schedule, it tells the cell. Otherwise
# the work is the backward of the node's cell.


_ops: Any = torch.ops.virtual_accelerator

#: The kinds of computations in backward: B is a whole one, I its half for the input, W for weights.
_BACKWARD = "BIW"

#: How many fields at the end of a ``Label`` say which layer. The fields before them say which cell.
_OF_LAYER = 2

#: How many bits at the low end of a label's number say which layer. The bits above say which cell.
_BITS = 24


class Numbers(dict[tuple[Any, ...], int]):
    """Numbers from 1, each given where somebody asks for that of something new."""

    def __init__(self) -> None:
        self.named: dict[int, tuple[Any, ...]] = {}
        self._count = itertools.count(1)

    def __missing__(self, key: tuple[Any, ...]) -> int:
        # Two threads may ask for a key at once: both get the same number, and another stays unused.
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
        # A call by address: dispatch modes of the caller would see the call of an operator.
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
        # An unknown number is 0 (no label), or one that a thread has put after the observation to
        # which it belongs had ended.
        layer = self._layers.named.get(number & (1 << _BITS) - 1)
        return None if cell is None or layer is None else Label(*cell, *layer)

    def work(self, thread: int, node: int) -> Label:
        """Tell what a piece of work belongs to.

        Args:
            thread: the number of its thread's label.
            node: the number of the label of the node that ran.
        """
        label, recorded = self._label(thread), self._label(node)
        if label is None:
            return _NOTHING if recorded is None else _backward_of(recorded)
        if recorded is not None and label.kind in _BACKWARD and not label.layer:
            label = label._replace(layer=recorded.layer, layer_type=recorded.layer_type)
        return label


_NOTHING = Label()


def _backward_of(label: Label) -> Label:
    """The work whose node was recorded under a label."""
    if label.kind != "copy":
        return label._replace(kind="B")
    # The backward of a copy takes the gradient from the copy's target to its source.
    return label if label.target is None else label._replace(stage=label.target, target=label.stage)
