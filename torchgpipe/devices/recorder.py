"""The records of a device: when work began and ended, how long it took, what memory is taken."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import inf
from time import perf_counter

import torch

from torchgpipe.devices.streams import AbstractStream, current_stream, has_streams
from torchgpipe.show.span import Span, Stream, pieces

__all__: list[str] = []


class Stopwatch:
    """Measure how long a device works on what is issued between a start and a stop.

    Events of the device's current stream tell the time, or the clock where there are no streams.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = current_stream(device)

    def start(self) -> None:
        """Start, or start again."""
        self._start = _timed(self._stream)

    def stop(self) -> float:
        """Wait for all that was issued since the start, and return the seconds since then."""
        start, end = self._start, _timed(self._stream)
        if isinstance(start, torch.Event) and isinstance(end, torch.Event):
            end.synchronize()
            return float(start.elapsed_time(end)) / 1000
        assert isinstance(start, float)
        assert isinstance(end, float)
        return end - start


def memory_allocated(device: torch.device) -> int | None:
    """The bytes that tensors occupy on a device; None for a device that does not count them."""
    if not has_streams(device):
        return None
    return torch.accelerator.memory_allocated(device)


def forget_peak(device: torch.device) -> None:
    """Reset the peak of the bytes that tensors occupy on a device."""
    if has_streams(device):
        torch.accelerator.reset_peak_memory_stats(device)


def peak_memory(device: torch.device) -> int | None:
    """The peak of the bytes that tensors occupied on a device; None if they are not counted."""
    if not has_streams(device):
        return None
    return torch.accelerator.max_memory_allocated(device)


def memory_total(device: torch.device) -> float:
    """The bytes that a device has: infinity on the host, and if a device does not say."""
    if not has_streams(device):
        return inf
    try:
        return torch.accelerator.get_memory_info(device)[1]
    except RuntimeError:
        return inf


# The recorder: when each piece of work started and ended, on its own stream.
#
# On an accelerator an event is recorded before the work and another one after it, so the host
# does not wait, and the time is that of the device. On a device without streams the clock tells.
#
# Events of different devices cannot be compared. So the times of a device count from its first
# event, and all first events are recorded together, when no device has anything to do. A third
# event, on a stream that does nothing else, tells when the host issued the work.
#
# While a step runs, nothing is done but to read clocks, and to keep the readings. Spans and their
# names are made when the trace ends.


#: The kinds of work whose kept bytes are measured: forward (F) and recomputation (R).
KEEPING = "FR"


@dataclass(eq=False, slots=True)
class Mark:
    """A piece of work whose times are being taken.

    Args:
        kind: its kind, as in :class:`~torchgpipe.show.span.Span`.
        stream: the stream that does it.
        line: the number of its worker, which stands for the stream where there are none.
        stage: the partition, or the one that a copy leaves.
        microbatch: the number of the micro-batch.
        target: the partition that a copy goes to.
    """

    kind: str
    stream: AbstractStream
    line: int
    stage: int
    microbatch: int
    target: int | None = None
    #: The index of the step; if it is -1 when the work begins, that of the step under way.
    step: int = -1
    #: The event recorded before the work, or without streams the time; None before it begins.
    start: torch.Event | float | None = None
    #: For each stream of another device that the work waits for, an event on it (or the time): the
    #: work starts after ``start`` and after all of these events.
    others: Sequence[tuple[AbstractStream, torch.Event | float]] = ()
    end: torch.Event | float | None = None
    issued: torch.Event | None = None
    #: ``in_use`` is the bytes in use on the device before the work, ``kept`` how many more after
    #: it. None if they are not measured: see :data:`KEEPING`.
    in_use: int | None = None
    kept: int | None = None
    #: Whether ``end`` is final: hooks of nodes that are called afterwards do not change it.
    is_over: bool = False


class WorkTimes:
    """The times around a piece of work that is no cell, on one stream."""

    def __init__(self, stream: AbstractStream) -> None:
        self.stream = stream
        self.start = self.stop = _timed(stream)

    def end(self) -> None:
        """Take the time after the work."""
        self.stop = _timed(self.stream)


class Recorder:
    """The marks of some steps."""

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._devices = [x for x in dict.fromkeys(devices) if has_streams(x)]
        #: For each device, a stream that does no work: its events tell when the host has issued
        #: work. Its priority of -1 keeps it from being one of the streams that partitions use.
        self._timing = {x: torch.Stream(x, priority=-1) for x in self._devices}
        self._marks: list[Mark] = []
        #: The index of the step that is under way, -1 before the first step.
        self.step = -1
        #: For the name of each device, the bytes of the host's pinned memory for its offloading.
        self.host: dict[str, int] = {}
        #: The functions that :meth:`begin_step` calls, as one that forgets the step before.
        self.at_steps: list[Callable[[], None]] = []
        for device in self._devices:
            torch.accelerator.synchronize(device)
        #: The stream of each device that was current when recording began: number 0 in spans.
        self._first = {device: current_stream(device) for device in self._devices}
        self._zero = {device: _timed(stream) for device, stream in self._first.items()}
        self._start = perf_counter()

    def begin_step(self) -> None:
        """Begin the next step: spans that are recorded from here on belong to it."""
        self.step += 1
        for call in self.at_steps:
            call()

    def begin(self, mark: Mark, *others: AbstractStream) -> Mark:
        """Take the time before a piece of work.

        Args:
            mark: the piece of work.
            *others: streams of other devices that the work waits for, as a copy between devices
                does.
        """
        if mark.step < 0:
            mark.step = self.step
        mark.start = _timed(mark.stream)
        if others:
            mark.others = [(stream, _timed(stream)) for stream in others]
        if isinstance(mark.start, torch.Event):
            issued = _timed(self._timing[mark.stream.device])
            assert isinstance(issued, torch.Event)
            mark.issued = issued
        self._marks.append(mark)
        if mark.microbatch == 0 and mark.kind in KEEPING:
            mark.in_use = memory_allocated(mark.stream.device)
        return mark

    def end(self, mark: Mark) -> None:
        """Take the time after a piece of work; of several calls the last one counts."""
        mark.end = _timed(mark.stream)
        if mark.in_use is not None:
            mark.kept = (memory_allocated(mark.stream.device) or 0) - mark.in_use

    def kept(self) -> dict[tuple[str, int], int]:
        """The bytes that F and R of the first micro-batch have kept, by kind and partition.

        A cell of any model is several modules, whose bytes add up.
        """
        sizes: dict[tuple[str, int], int] = {}
        for mark in self._marks:
            if mark.kept is not None and mark.step == self.step:
                key = mark.kind, mark.stage
                sizes[key] = sizes.get(key, 0) + mark.kept
        return sizes

    def before(self, stream: AbstractStream) -> WorkTimes:
        """Take the time before a piece of work that is no cell."""
        return WorkTimes(stream)

    def issued(self, device: torch.device) -> WorkTimes:
        """Record the time at which the host is, by an event on a stream without work."""
        return WorkTimes(self._timing[device])

    def bounds(self, times: WorkTimes) -> tuple[float, float]:
        """The times at which work that is no cell started and ended, once the devices are done."""
        return self._time(times.stream, times.start), self._time(times.stream, times.stop)

    def spans(self) -> list[Span]:
        """Wait for the devices, and return what was recorded, in the order it was issued."""
        for device in self._devices:
            torch.accelerator.synchronize(device)
        numbers: dict[torch.device, dict[AbstractStream, int]] = {}
        spans = []
        for mark in self._marks:
            # Work without an end raised an exception, or is a backward that no gradient came to.
            if mark.start is None or mark.end is None:
                continue
            starts = [(mark.stream, mark.start), *mark.others]
            device = mark.stream.device
            if has_streams(device):
                known = numbers.setdefault(device, {self._first[device]: 0})
                number = known.setdefault(mark.stream, len(known))
            else:
                number = mark.line
            span = Span(
                Stream(str(device), number),
                max(self._time(stream, at) for stream, at in starts),
                self._time(mark.stream, mark.end),
                "",
                kind=mark.kind,
                stage=mark.stage,
                microbatch=mark.microbatch,
                target=mark.target,
                issued=self._time(mark.stream, mark.issued) if mark.issued else None,
                step=mark.step,
            )
            spans.append(replace(span, name=span.cell))
        return pieces(spans)

    def _time(self, stream: AbstractStream, at: torch.Event | float) -> float:
        """Milliseconds since the recorder was made."""
        if isinstance(at, torch.Event):
            zero = self._zero[stream.device]
            assert isinstance(zero, torch.Event)
            return float(zero.elapsed_time(at))
        return 1000 * (at - self._start)


def copy_mark(stream: AbstractStream, source: int, target: int, i: int) -> Mark:
    """A mark of a copy from one partition to another, which arrives on a stream."""
    return Mark("copy", stream, target, source, i, target)


def _timed(stream: AbstractStream) -> torch.Event | float:
    """Record an event on a stream; return the host's time for a device without streams."""
    if not isinstance(stream, torch.Stream):
        return perf_counter()
    event = torch.Event(stream.device, enable_timing=True)
    event.record(stream)
    return event
