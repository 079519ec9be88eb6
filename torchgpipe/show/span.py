"""A span: a piece of work with its times, recorded whole or in parts."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

__all__: list[str] = [
    "COMPUTATIONS",
    "TRIPS",
    "Span",
    "Stream",
    "computation",
    "copy",
    "order",
    "trip",
    "cells",
    "pieces",
]


# Spans of real devices are measured by events, those of virtual devices are exact, and those of
# simulations are computed. All have the type ``Span``, so that they can be drawn side by side.


#: Kinds of computation: F is forward, R recomputation, B backward, I and W its halves for the input
#: and for the weights.
COMPUTATIONS = "FRBIW"
#: The kinds of copies of what a cell keeps for backward: to the host's memory, and back from it.
TRIPS = ("out", "back")


class Stream(NamedTuple):
    """A stream of a device; number 0 is the device's default stream.

    The device is the index of a virtual one, or the name of any other, such as ``cuda:0``. In a
    simulation it is a worker.
    """

    device: int | str
    number: int

    @property
    def device_name(self) -> str:
        """The name of the device."""
        return f"virtual:{self.device}" if isinstance(self.device, int) else self.device

    def __str__(self) -> str:
        return f"stream {self.number} of {self.device_name}"


def order(stream: Stream) -> tuple[list[int | str], int]:
    """The place of a stream in a list: ``cuda:10`` comes after ``cuda:9``."""
    words = re.split(r"(\d+)", stream.device_name)
    return [int(x) if x.isdecimal() else x for x in words], stream.number


@dataclass(frozen=True)
class Span:
    """A piece of work, in milliseconds, or in the unit of a simulation's costs.

    Args:
        stream: the stream that did the work.
        start: when the work started.
        end: when the work ended.
        name: the instruction, as ``0F3``; or the operator; for a busy layer, F, I or W and its own
            name.
        after: the index of the span whose end let this one start; -1 if nothing held it up, or it
            is unknown.
        kind: ``F``, ``R``, ``B``, ``I`` or ``W`` for a computation of a cell, ``copy`` for what
            passes between cells, ``out`` and ``back`` for what a cell keeps in the memory of the
            host; empty for anything else.
        stage: the partition, or the one that a copy leaves; None if the work belongs to no cell.
        microbatch: the number of the micro-batch; None if the work belongs to no cell.
        target: the partition that a copy goes to.
        issued: when the host issued the work, if that is known.
        step: the number of the training step.
        layer: the name in the model of the layer that an operator belongs to; empty if it belongs
            to none, or it is unknown.
        layer_type: the class of the layer.
    """

    stream: Stream
    start: float
    end: float
    name: str
    after: int = -1
    kind: str = ""
    stage: int | None = None
    microbatch: int | None = None
    target: int | None = None
    issued: float | None = None
    step: int = 0
    layer: str = ""
    layer_type: str = ""

    @property
    def cell(self) -> str:
        """The cell, as ``0F3``, or ``0 to 1 3`` for a copy; empty if the work belongs to none.

        A cell leaves for the host as ``0 out 3``, and comes back as ``0 back 3``.
        """
        if self.stage is None:
            return ""
        if self.kind == "copy":
            way = f"from {self.stage}" if self.target is None else f"{self.stage} to {self.target}"
            return f"{way} {self.microbatch}"
        if self.kind in TRIPS:
            return f"{self.stage} {self.kind} {self.microbatch}"
        return f"{self.stage}{self.kind}{self.microbatch}"

    @property
    def title(self) -> str:
        """All that is known of the work: ``0F3 encoder.0 (Linear) addmm``."""
        layer = f"{self.layer} ({self.layer_type})" if self.layer else ""
        words = (self.cell, layer, self.name)
        return " ".join(dict.fromkeys(filter(None, words)))

    def __str__(self) -> str:
        return f"{self.title} on {self.stream} from {self.start:.6g} to {self.end:.6g}"

    @property
    def time(self) -> float:
        """The time that the work took."""
        return self.end - self.start

    @property
    def computes(self) -> bool:
        """Whether this is a computation of a cell."""
        return self.kind in COMPUTATIONS and bool(self.kind)


def computation(stream: Stream, start: float, end: float, op: tuple[int, str, int]) -> Span:
    """The span of a computation of a cell: its stage, its kind, and the micro-batch."""
    stage, kind, i = op
    return Span(stream, start, end, f"{stage}{kind}{i}", kind=kind, stage=stage, microbatch=i)


def copy(stream: Stream, start: float, end: float, source: int, target: int, i: int) -> Span:
    """The span of a copy from one partition to another, which arrives on a stream."""
    name = f"{source} to {target} {i}"
    return Span(stream, start, end, name, kind="copy", stage=source, microbatch=i, target=target)


def trip(stream: Stream, start: float, end: float, way: str, stage: int, i: int) -> Span:
    """The span of a copy of what a cell keeps, ``out`` to the memory of the host, or ``back``."""
    return Span(stream, start, end, f"{stage} {way} {i}", kind=way, stage=stage, microbatch=i)


# Recorded spans become one span for each computation of a cell.
#
# A recomputation may begin within the backward that needs it, at the first missing tensor: its span
# then lies within that of the backward. And a cell under a device map has a span for each of its
# modules. ``pieces`` and ``cells`` take spans in the order in which they were issued.


def pieces(spans: Sequence[Span]) -> list[Span]:
    """Cut recomputation out of the backward around it, and join the parts of one cell."""
    again: dict[tuple[object, ...], list[Span]] = {}
    for span in spans:
        if span.kind == "R":
            again.setdefault(_cell(span), []).append(span)
    parts: list[Span] = []
    for span in spans:
        inner = again.get(_cell(span), []) if span.kind == "B" else []
        parts += _without(span, [x for x in inner if span.start <= x.start and x.end <= span.end])
    return _joined(parts)


def cells(spans: Sequence[Span]) -> list[Span]:
    """Make one span of the operators of each computation, as if the cell had been recorded."""
    devices = {span.stage: span.stream.device for span in spans if span.computes}
    whole = []
    for span in spans:
        stream = span.stream
        if span.target in devices:
            # Virtual devices copy on the sending device. A timeline shows copies where they arrive.
            stream = stream._replace(device=devices[span.target])
        name = span.cell or span.name
        whole.append(replace(span, stream=stream, name=name, after=-1, layer="", layer_type=""))
    return _joined(whole)


def _cell(span: Span) -> tuple[object, ...]:
    return span.stream, span.step, span.stage, span.microbatch


def _without(span: Span, inner: Iterable[Span]) -> list[Span]:
    """The parts of a span that are in none of those within it."""
    rest = []
    start = span.start
    for x in sorted(inner, key=lambda x: x.start):
        if x.start > start:
            rest.append(replace(span, start=start, end=x.start))
        start = max(start, x.end)
    # A span that takes no time is kept, so that each computation has one.
    if span.end > start or start == span.start:
        rest.append(replace(span, start=start))
    return rest


def _joined(spans: Sequence[Span]) -> list[Span]:
    """Make one span of neighbours on a stream that belong to one computation of a cell."""
    last: dict[object, int] = {}
    joined: list[Span] = []
    for span in sorted(spans, key=lambda span: span.start):
        index = last.get(span.stream)
        is_joined = span.computes or span.kind in TRIPS
        if is_joined and index is not None:
            before = joined[index]
            if (before.kind, _cell(before)) == (span.kind, _cell(span)):
                joined[index] = replace(before, end=max(before.end, span.end))
                continue
        if is_joined:
            last[span.stream] = len(joined)
        joined.append(span)
    return joined
