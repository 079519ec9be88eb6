"""The timeline in the format of Chrome's tracing tool, which Perfetto opens, too.

Source: Trace Event Format, https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from torchgpipe.show.span import Span, Stream, order

__all__: list[str] = []


def to_json(spans: Sequence[Span]) -> str:
    """Write spans as JSON: devices as processes, streams as threads, waits as arrows."""
    return json.dumps({"traceEvents": _events(spans), "displayTimeUnit": "ms"})


def _events(spans: Sequence[Span]) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = []
    streams = dict.fromkeys(sorted([x.stream for x in spans], key=order))
    numbers = {place: k for k, place in enumerate(dict.fromkeys(x.place for x in streams))}

    def place(stream: Stream) -> dict[str, int]:
        return {"pid": numbers[stream.place], "tid": stream.number}

    for name, number in numbers.items():
        events.append({"ph": "M", "name": "process_name", "pid": number, "args": {"name": name}})
    for stream in streams:
        name_ = {"name": f"stream {stream.number}"}
        events.append({"ph": "M", "name": "thread_name", **place(stream), "args": name_})
    #: When each stream has done the work so far.
    ends: dict[Stream, float] = {}
    for index, span in enumerate(spans):
        events.append(
            {
                "ph": "X",
                "name": span.title,
                "cat": span.kind or "work",
                **place(span.stream),
                "ts": _micro(span.start),
                "dur": _micro(span.time),
                "args": _arguments(span),
            }
        )
        if span.after >= 0 and span.start > ends.get(span.stream, 0.0):
            cause = spans[span.after]
            arrow = {"name": "wait", "cat": "wait", "id": index}
            # An arrow starts at a slice that lasts at that time, so a nanosecond before its end.
            end = _micro(cause.end) - 0.001
            events.append({"ph": "s", **arrow, **place(cause.stream), "ts": end})
            here = {**place(span.stream), "ts": _micro(span.start)}
            events.append({"ph": "f", "bp": "e", **arrow, **here})
        ends[span.stream] = span.end
    return events


def _arguments(span: Span) -> dict[str, Any]:
    if span.stage is None:
        return {}
    found = {"partition": span.stage, "micro-batch": span.microbatch, "step": span.step}
    return found | ({"layer": span.layer, "class": span.layer_type} if span.layer else {})


def _micro(milliseconds: float) -> float:
    return milliseconds * 1000
