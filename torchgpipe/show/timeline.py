"""A timeline: the spans of some steps, with their pictures and shares."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from os import PathLike
from typing import Any

from torchgpipe.checks import checked_path, verify_kind
from torchgpipe.show.bars import EDGES, Bar, Panel, svg
from torchgpipe.show.shares import Shares, by_stream, labels, shares, table
from torchgpipe.show.span import Span, Stream, order

__all__ = ["Timeline", "Advice", "panel", "characters"]


@dataclass(frozen=True)
class Advice:
    """A change that helps.

    Args:
        reason: what takes the time now, with the figure of the step that says so.
        change: the settings to change, such as ``{"chunks": 16}``; empty if it is the code that has
            to change, or if something has to be measured.
        caution: what has to be seen to, such as memory; empty if nothing.
        remedy: what to do in words; empty if settings say it.
    """

    reason: str
    change: Mapping[str, Any]
    caution: str = ""
    remedy: str = ""

    def __str__(self) -> str:
        change = ", ".join(f"{name}={value!r}" for name, value in self.change.items())
        text = f"{self.reason}: {self.remedy or f'try {change}'}"
        return f"{text} ({self.caution})" if self.caution else text


#: What a timeline says in place of advice if no work took any time.
UNTIMED = (
    "nothing took any time, as on virtual accelerators without costs; run the step within "
    "torchgpipe.testing.observe(costs={'addmm': 1, 'mm': 1}), or costs='measured'"
)


@dataclass
class Timeline:
    """The spans of some steps, from measuring, virtual accelerators or a simulation.

    Print it to see the last step: a row for each stream that computes, with time from left to
    right, the shares of each device, and advice if there is any.

    Args:
        spans: the spans, in the order in which they were issued.
        advice: what to change; None if nothing is worth a sentence.
        memory: the most bytes that tensors occupied on each device, by its name.
        host: the bytes of the host's memory that each device has for what cells keep there.
        unit: the unit of time.
        title: a line above its picture.
    """

    spans: Sequence[Span] = field(repr=False)
    memory: Mapping[str, int] = field(default_factory=dict)
    unit: str = "ms"
    advice: Advice | None = field(default=None, repr=False, compare=False)
    title: str = ""
    host: Mapping[str, int] = field(default_factory=dict)

    @property
    def makespan(self) -> float:
        """The time from the start of the first span to the end of the last one."""
        first = min((span.start for span in self.spans), default=0.0)
        return max((span.end for span in self.spans), default=0.0) - first

    @property
    def steps(self) -> list[int]:
        """The numbers of the steps."""
        return sorted({span.step for span in self.spans})

    def step(self, number: int = -1) -> Timeline:
        """The timeline of one step, which begins at 0.

        Args:
            number: the place of the step among all; a negative one counts from the end.

        Raises:
            IndexError: there are fewer steps.
        """
        steps = self.steps
        verify_kind(number, int, "steps are numbered", "number", "pass -1 for the last one")
        if not -len(steps) <= number < len(steps):
            raise IndexError(
                f"there must be a step of this number (number: {number}, steps: {len(steps)}); "
                "run more steps within the trace"
            )
        spans = [span for span in self.spans if span.step == steps[number]]
        first = min(span.start for span in spans)
        moved = [
            replace(
                span,
                start=span.start - first,
                end=span.end - first,
                after=-1,
                issued=None if span.issued is None else span.issued - first,
            )
            for span in spans
        ]
        return replace(self, spans=moved)

    @property
    def shares(self) -> list[Shares]:
        """The shares of the last step's time that each stream computed, waited and so on."""
        return shares(self.step().spans) if self.spans else []

    def __str__(self) -> str:
        if not self.spans:
            return (
                "no cells: no step of a wrapped model ran within the block; call the model, and "
                "loss.backward(), within the with block"
            )
        last = self.step()
        count = len(self.steps)
        head = f"step of {last.makespan:.6g} {self.unit}" + (
            f", the last of {count}" if count > 1 else ""
        )
        parts = [head, characters(last.spans), table(last.shares, self.memory, self.host)]
        if not last.makespan:
            parts.append(UNTIMED)
        elif self.advice:
            parts.append(str(self.advice))
        return "\n\n".join(parts)

    def svg(self, path: str | PathLike[str], *others: Timeline, scale: float | None = None) -> None:
        """Draw the last step into an SVG file, above those of other timelines on the same scale.

        Args:
            path: the file.
            *others: further timelines, such as a simulated one, ``report.timeline``.
            scale: pixels per unit of time; chosen to fit the numbers if None.
        """
        panels = self._panels(others)
        checked_path(path).write_text(svg(panels, scale), encoding="utf-8")

    def _panels(self, others: Sequence[Timeline]) -> list[Panel]:
        """The last step of each timeline that has any."""
        remedy = "pass such as simulate(schedule).timeline"
        for x in others:
            verify_kind(x, Timeline, "a timeline is drawn beside others", "others", remedy)
        shown = [x for x in (self, *others) if x.spans]
        return [panel(x.step().spans, x.unit)._replace(title=x.title) for x in shown]

    def save_trace(self, path: str | PathLike[str]) -> None:
        """Write all steps as a file that https://ui.perfetto.dev and chrome://tracing open."""
        checked_path(path).write_text(to_json(self.spans), encoding="utf-8")


def panel(spans: Sequence[Span], unit: str) -> Panel:
    """Arrange the spans of a step, which begins at 0, in a row for each stream that computes.

    A copy is drawn at the lower edge of the first row of the device where it arrives, and one to
    the memory of the host or back at the upper edge.
    """
    end = max(span.end for span in spans)
    rows = by_stream(spans)
    names = labels(rows)
    of_device: dict[str, list[Bar]] = {}
    bars_of: dict[str, list[Bar]] = {}
    is_toned = False
    for stream, computations in rows.items():
        stages = sorted({span.stage for span in computations if span.stage is not None})
        is_toned |= len(stages) > 1
        bars = [
            Bar(
                span.start,
                span.end,
                span.kind,
                str(span.microbatch),
                _tip(span, unit),
                stages.index(span.stage) / len(stages) if span.stage is not None else 0,
                part,
            )
            for span, part in _parts([span for span in computations if span.time])
        ]
        bars_of[names[stream]] = bars
        of_device.setdefault(stream.device_name, bars)
    for span in spans:
        if span.kind in EDGES and span.stream.device_name in of_device:
            bar = Bar(span.start, span.end, span.kind, "", _tip(span, unit))
            of_device[span.stream.device_name].append(bar)
    return Panel(bars_of, end, is_toned=is_toned)


def _parts(spans: Sequence[Span]) -> Iterator[tuple[Span, tuple[int, int]]]:
    """Yield spans by their starts, with the part of the row that each takes.

    The two computations of an overlap share the height.
    """
    for k, span in enumerate(spans):
        if k and spans[k - 1].end > span.start:
            yield span, (1, 2)
        elif k + 1 < len(spans) and span.end > spans[k + 1].start:
            yield span, (0, 2)
        else:
            yield span, (0, 1)


def _tip(span: Span, unit: str) -> str:
    return f"{span.title} from {span.start:.6g} to {span.end:.6g} {unit}".rstrip()


#: The width, in characters, of each row of a printed timeline without the row's name.
WIDTH = 96


def characters(spans: Sequence[Span]) -> str:
    """Draw a row for each stream that computes: ``F3--`` is a forward, ``.`` is a wait.

    A computation is as wide as its time, rounded to columns, and one column at least. Its kind is
    repeated where there is no room for the number of its micro-batch. Of several that begin in one
    column, the last one is seen. The spans are those of one step, which begins at 0.
    """
    end = max(span.end for span in spans) or 1.0
    rows = by_stream(spans)
    names = labels(rows)
    margin = max(map(len, names.values())) + 2
    lines = ["time".ljust(margin) + _ruler(end)]
    for stream, computations in rows.items():
        row = ["."] * WIDTH
        for span in computations:
            start, stop = (round(x / end * WIDTH) for x in (span.start, span.end))
            start = min(start, WIDTH - 1)
            stop = max(stop, start + 1)
            row[start:stop] = _word(span, stop - start)
        lines.append(names[stream].ljust(margin) + "".join(row))
    return "\n".join(lines)


def _word(span: Span, width: int) -> str:
    label = f"{span.kind}{span.microbatch}"
    if width > len(label):
        return label.ljust(width - 1, "-") + " "
    return span.kind * width


def _ruler(end: float) -> str:
    """Write the time at every quarter of the picture."""
    row = ""
    for quarter in range(4):
        row = row.ljust(quarter * WIDTH // 4) + f"{end * quarter / 4:.4g}"
    return f"{row.ljust(WIDTH)}{end:.6g}"


# The timeline in the format of Chrome's tracing tool, which Perfetto opens, too.
#
# Source: Trace Event Format, https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU


def to_json(spans: Sequence[Span]) -> str:
    """Write spans as JSON: devices as processes, streams as threads, waits as arrows."""
    return json.dumps({"traceEvents": _events(spans), "displayTimeUnit": "ms"})


def _events(spans: Sequence[Span]) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = []
    streams = dict.fromkeys(sorted([x.stream for x in spans], key=order))
    numbers = {name: k for k, name in enumerate(dict.fromkeys(x.device_name for x in streams))}

    def ids(stream: Stream) -> dict[str, int]:
        return {"pid": numbers[stream.device_name], "tid": stream.number}

    for name, number in numbers.items():
        events.append({"ph": "M", "name": "process_name", "pid": number, "args": {"name": name}})
    for stream in streams:
        name_ = {"name": f"stream {stream.number}"}
        events.append({"ph": "M", "name": "thread_name", **ids(stream), "args": name_})
    # The end of each stream's last span so far: a span that starts later has waited for another.
    ends: dict[Stream, float] = {}
    for index, span in enumerate(spans):
        events.append(
            {
                "ph": "X",
                "name": span.title,
                "cat": span.kind or "work",
                **ids(span.stream),
                "ts": _micro(span.start),
                "dur": _micro(span.time),
                "args": _arguments(span),
            }
        )
        if span.after >= 0 and span.start > ends.get(span.stream, 0.0):
            cause = spans[span.after]
            arrow = {"name": "wait", "cat": "wait", "id": index}
            # A viewer draws an arrow from the span that runs when the arrow starts. When ``cause``
            # ends it runs no more, so the arrow starts a nanosecond before.
            end = _micro(cause.end) - 0.001
            events.append({"ph": "s", **arrow, **ids(cause.stream), "ts": end})
            here = {**ids(span.stream), "ts": _micro(span.start)}
            events.append({"ph": "f", "bp": "e", **arrow, **here})
        ends[span.stream] = span.end
    return events


def _arguments(span: Span) -> dict[str, Any]:
    if span.stage is None:
        return {}
    arguments = {"partition": span.stage, "micro-batch": span.microbatch, "step": span.step}
    return arguments | ({"layer": span.layer, "class": span.layer_type} if span.layer else {})


def _micro(milliseconds: float) -> float:
    return milliseconds * 1000
