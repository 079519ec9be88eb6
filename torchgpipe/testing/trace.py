"""The timeline in the format of Chrome's tracing tool, which Perfetto opens, too.

Source: Trace Event Format, https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

import json
from typing import Any

from torchgpipe.testing.report import Span, waits_of

__all__: list[str] = []


def to_json(spans: list[Span]) -> str:
    """Write spans as JSON: devices as processes, streams as threads, waits as arrows."""
    return json.dumps({"traceEvents": _events(spans), "displayTimeUnit": "ms"})


def _events(spans: list[Span]) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = []
    for device in sorted({span.stream.device for span in spans}):
        events.append(
            {
                "ph": "M",
                "name": "process_name",
                "pid": device,
                "args": {"name": f"virtual:{device}"},
            }
        )
    for stream in sorted({span.stream for span in spans}):
        name = {"name": f"stream {stream.number}"}
        events.append({"ph": "M", "name": "thread_name", **_place(stream), "args": name})
    for span in spans:
        events.append(
            {
                "ph": "X",
                "name": span.name,
                "cat": "work",
                **_place(span.stream),
                "ts": _micro(span.start),
                "dur": _micro(span.end - span.start),
            }
        )
    for wait in waits_of(spans):
        if wait.cause >= 0:
            cause = spans[wait.cause]
            arrow = {"name": "wait", "cat": "wait", "id": wait.span}
            # An arrow starts at a slice that lasts at that time, so a nanosecond before its end.
            end = _micro(cause.end) - 0.001
            events.append({"ph": "s", **arrow, **_place(cause.stream), "ts": end})
            events.append(
                {"ph": "f", "bp": "e", **arrow, **_place(wait.stream), "ts": _micro(wait.end)}
            )
    return events


def _place(stream: Any) -> dict[str, int]:
    return {"pid": stream.device, "tid": stream.number}


def _micro(milliseconds: float) -> float:
    return milliseconds * 1000
