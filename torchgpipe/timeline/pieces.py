"""Pieces: recorded spans of parts of a cell become one span for each computation.

A backward may begin before recomputation, which then starts at the first missing tensor, so one
span lies within the other. And a cell under a device map is several modules, each of which was
recorded.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from torchgpipe.timeline.span import TRIPS, Span

__all__ = ["cells", "pieces"]


def pieces(spans: Sequence[Span]) -> list[Span]:
    """Cut recomputation out of the backward around it, and join the parts of one cell.

    Args:
        spans: the spans, in the order in which they were issued.
    """
    again: dict[tuple[object, ...], list[Span]] = {}
    for span in spans:
        if span.kind == "R":
            again.setdefault(_cell(span), []).append(span)
    found: list[Span] = []
    for span in spans:
        inner = again.get(_cell(span), []) if span.kind == "B" else []
        found += _without(span, [x for x in inner if span.start <= x.start and x.end <= span.end])
    return _joined(found)


def cells(spans: Sequence[Span]) -> list[Span]:
    """Make one span of the operators of each computation, as if the cell had been recorded.

    Args:
        spans: the spans of operators, in the order in which they were issued.
    """
    places = {span.stage: span.stream.device for span in spans if span.computes}
    found = []
    for span in spans:
        stream = span.stream
        if span.target in places:
            # The sending device makes a copy, but a timeline shows it on the receiving device.
            stream = stream._replace(device=places[span.target])
        name = span.cell or span.name
        found.append(replace(span, stream=stream, name=name, after=-1, layer="", layer_type=""))
    return _joined(found)


def _cell(span: Span) -> tuple[object, ...]:
    return span.stream, span.step, span.stage, span.microbatch


def _without(span: Span, inner: Iterable[Span]) -> list[Span]:
    """The parts of a span that are in none of those within it."""
    found = []
    start = span.start
    for x in sorted(inner, key=lambda x: x.start):
        if x.start > start:
            found.append(replace(span, start=start, end=x.start))
        start = max(start, x.end)
    # The whole span may take no time, and is kept then.
    if span.end > start or start == span.start:
        found.append(replace(span, start=start))
    return found


def _joined(spans: Sequence[Span]) -> list[Span]:
    """Make one span of neighbours on a stream that belong to one computation of a cell."""
    last: dict[object, int] = {}
    found: list[Span] = []
    for span in sorted(spans, key=lambda span: span.start):
        place = last.get(span.stream)
        is_joined = span.computes or span.kind in TRIPS
        if is_joined and place is not None:
            before = found[place]
            if (before.kind, _cell(before)) == (span.kind, _cell(span)):
                found[place] = replace(before, end=max(before.end, span.end))
                continue
        if is_joined:
            last[span.stream] = len(found)
        found.append(span)
    return found
