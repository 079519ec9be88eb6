"""The shares of a step: how much of it a device computed, computed again, copied and waited."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from torchgpipe.show.span import TRIPS, Span, Stream, order
from torchgpipe.show.tables import aligned, as_mib

__all__ = ["Shares", "by_stream", "shares", "table"]

#: The device name of the CPU, where each worker is a thread, and has shares of its own.
CPU = "cpu"


@dataclass(frozen=True)
class Shares:
    """The time of one device in a step, as shares of the step's time.

    Several streams of an accelerator may compute at the same time, and count once. On the CPU each
    worker has shares of its own.

    Args:
        device: the name of the device; with the number of the worker after it, if there are
            several on the CPU.
        busy: forward and backward.
        recompute: computing again, under checkpointing.
        bubble: the rest, in which the device waited.
        copies: the time of all copies that arrive at the device. They are made beside computing,
            and beside each other, so this may be more than the bubble, and more than 1.
        host: the part of the bubble in which the host had not issued the next work yet. None if
            nobody knows, as on the CPU, which is the host.
        away: the time of all copies to the memory of the host and back in the same way.
    """

    device: str
    busy: float
    recompute: float
    bubble: float
    copies: float
    host: float | None
    away: float = 0.0


def by_stream(spans: Sequence[Span]) -> dict[Stream, list[Span]]:
    """The computations of each stream that has any, by their starts."""
    by_start: dict[Stream, list[Span]] = {}
    for span in sorted(spans, key=lambda span: span.start):
        if span.computes:
            by_start.setdefault(span.stream, []).append(span)
    return {stream: by_start[stream] for stream in sorted(by_start, key=order)}


def by_device(spans: Sequence[Span]) -> dict[str, list[Span]]:
    """The computations of each device, by their starts; on the CPU, those of each worker."""
    rows = by_stream(spans)
    names = labels(rows)
    by_name: dict[str, list[Span]] = {}
    for stream, work in rows.items():
        name = names[stream] if stream.device_name == CPU else stream.device_name
        by_name.setdefault(name, []).extend(work)
    return {name: sorted(work, key=lambda span: span.start) for name, work in by_name.items()}


def shares(spans: Sequence[Span]) -> list[Shares]:
    """Find the shares of each device that computes in a step, which begins at 0."""
    end = max(span.end for span in spans) or 1.0
    copied: dict[tuple[str, bool], float] = {}
    for span in spans:
        if span.kind in ("copy", *TRIPS):
            key = span.stream.device_name, span.kind in TRIPS
            copied[key] = copied.get(key, 0.0) + span.time
    all_shares = []
    for name, work in by_device(spans).items():
        recompute = _covered([span for span in work if span.kind == "R"])
        # What one stream computes while another one recomputes counts as recomputation.
        busy = _covered(work) - recompute
        copies, away = (copied.get((work[0].stream.device_name, x), 0.0) for x in (False, True))
        host = _host_bound(work)
        all_shares.append(
            Shares(
                name,
                busy / end,
                recompute / end,
                max(0.0, 1 - (busy + recompute) / end),
                copies / end,
                None if host is None else host / end,
                away / end,
            )
        )
    return all_shares


def _covered(spans: Sequence[Span]) -> float:
    """The time in which there is a span; overlaps of a worker compute at the same time."""
    total, until = 0.0, 0.0
    for span in spans:
        total += max(0.0, span.end - max(span.start, until))
        until = max(until, span.end)
    return total


def _host_bound(spans: Sequence[Span]) -> float | None:
    """The time that a device had nothing to do because the host was late."""
    if any(span.issued is None for span in spans):
        return None
    total, until = 0.0, 0.0
    for span in spans:
        assert span.issued is not None
        total += max(0.0, min(span.start, span.issued) - until)
        until = max(until, span.end)
    return total


def table(devices: Sequence[Shares], memory: Mapping[str, int], host: Mapping[str, int]) -> str:
    """Write the shares of devices as a table, with their memory and the host's, where known."""
    titles = ["device", "busy", "recompute", "bubble", "copies", "host-bound"]
    is_away = any(x.away for x in devices)
    titles += ["offload"] * is_away
    sizes = {title: x for title, x in (("peak MiB", memory), ("host MiB", host)) if x}
    rows = [[*titles, *sizes]]
    for x in devices:
        row = [x.device, *(f"{y:.1%}" for y in (x.busy, x.recompute, x.bubble, x.copies))]
        row.append("-" if x.host is None else f"{x.host:.1%}")
        row += [f"{x.away:.1%}"] * is_away
        for known in sizes.values():
            size = known.get(x.device)
            row.append("-" if size is None else as_mib(size))
        rows.append(row)
    return aligned(rows)


def labels(streams: Collection[Stream]) -> dict[Stream, str]:
    """A name for each stream: its device, and its number where several of one device compute."""
    names = [stream.device_name for stream in streams]
    return {
        stream: stream.device_name
        if names.count(stream.device_name) == 1
        else f"{stream.device_name} ({stream.number})"
        for stream in streams
    }
