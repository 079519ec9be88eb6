"""Observations: the races, the timeline and the transfers of virtual accelerators."""

from __future__ import annotations

import ctypes
import itertools
import json
import linecache
import struct
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from os import PathLike
from types import CodeType
from typing import Any

import torch

from torchgpipe.ambient import labels
from torchgpipe.checks import checked_flag, checked_path, verify_kind
from torchgpipe.show.span import Span, Stream, cells
from torchgpipe.show.timeline import Timeline, to_json
from torchgpipe.testing.hardware import (
    MEASURED,
    Hardware,
    Link,
    name_of,
    put_hardware,
    put_links,
    table_of,
    verify_settings,
)
from torchgpipe.testing.loading import verify_loaded
from torchgpipe.testing.report import (
    Access,
    Naming,
    Part,
    Place,
    Race,
    Transfers,
    Wait,
    critical_path,
    waits_of,
)

__all__ = ["Observation", "observe"]

_ops: Any = torch.ops.virtual_accelerator

#: The functions of the compiled library whose results an observation keeps when it ends.
_RESULTS = ("races", "spans", "names", "traffic", "makespan", "parts", "troubles")

#: The binary form of a span in the library: start, end, the index of the span that let it start,
#: the numbers of the labels of its thread and its autograd node, the device, the stream, and the
#: index of its name.
_SPAN = struct.Struct("=ddqqqhhi")

_Hook = ctypes.CFUNCTYPE(ctypes.c_int64)

#: The functions that the library calls to take Python stacks, in the present observation and the
#: last one. This list keeps them alive, since a thread may still call the last one's.
_hooks: list[Any] = []


class Observation:
    """The record of all work since :func:`observe` began, up to now or to the end of its block.

    Time is virtual, in milliseconds, and begins with the observation.
    """

    def __init__(self) -> None:
        self._stacks: dict[int, tuple[tuple[CodeType, int], ...]] = {}
        self._stack_numbers: dict[tuple[tuple[CodeType, int], ...], int] = {}
        self._last: dict[str, Any] | None = None
        self._naming = Naming()

    def _get(self, name: str) -> Any:
        return getattr(_ops, name)() if self._last is None else self._last[name]

    def _end(self) -> None:
        self._last = {name: self._get(name) for name in _RESULTS}

    @property
    def makespan(self) -> float:
        """The time when the last stream has done all its work."""
        makespan: float = self._get("makespan")
        return makespan

    @property
    def races(self) -> list[Race]:
        """All pairs of accesses to the same memory that nothing orders. There should be none."""
        return [
            Race(
                **{
                    **race,
                    "device": name_of(race["device"]),
                    "first": self._access(race["first"]),
                    "second": self._access(race["second"]),
                }
            )
            for race in json.loads(self._get("races"))
        ]

    @property
    def spans(self) -> list[Span]:
        """All work that took time, in the order in which it was issued.

        Each span is an operator. What a wrapper computes also has its kind, partition, micro-batch
        and layer.
        """
        names, buffer = self._get("names"), self._get("spans")
        records = _SPAN.iter_unpack(ctypes.string_at(buffer.data_ptr(), buffer.nbytes))
        return [
            Span(
                Stream(device, stream),
                *(start, end, names[name], after),
                **self._naming.work(thread, node)._asdict(),
            )
            for start, end, after, thread, node, device, stream, name in records
        ]

    @property
    def timeline(self) -> Timeline:
        """The timeline of the cells, to be printed or drawn; empty if no wrapper computed any."""
        spans = self.spans
        return Timeline(cells(spans) if any(span.computes for span in spans) else [])

    @property
    def waits(self) -> list[Wait]:
        """The times in which streams waited, each with the work that was waited for."""
        return waits_of(self.spans)

    @property
    def critical_path(self) -> list[Span]:
        """The chain of spans that the makespan consists of, each waiting for the one before it."""
        spans = self.spans
        return [spans[index] for index in critical_path(spans)]

    @property
    def busy(self) -> dict[Stream, float]:
        """The time that each stream worked, of streams that did any work."""
        busy: dict[Stream, float] = {}
        for span in self.spans:
            busy[span.stream] = busy.get(span.stream, 0.0) + span.end - span.start
        return busy

    @property
    def idle(self) -> dict[Stream, float]:
        """The time that each stream did not work, of streams that did any work."""
        makespan = self.makespan
        return {stream: makespan - busy for stream, busy in self.busy.items()}

    @property
    def transfers(self) -> dict[tuple[int | str, int | str], Transfers]:
        """The copies between devices, by source and target: indices of devices, or ``"cpu"``."""
        numbers = self._get("traffic")
        return {
            (name_of(source), name_of(target)): Transfers(count, bytes)
            for source, target, count, bytes in zip(*[iter(numbers)] * 4)
        }

    def save_trace(self, path: str | PathLike[str]) -> None:
        """Write the timeline as a file that https://ui.perfetto.dev and chrome://tracing open."""
        checked_path(path).write_text(to_json(self.spans), encoding="utf-8")

    @property
    def parts(self) -> list[Part]:
        """The time of all calls of each operator on each device, for described hardware."""
        return [
            Part(device, kind, op, count, flops, bytes, time / 1e3)
            for device, kind, op, count, flops, bytes, time in json.loads(self._get("parts"))
        ]

    def _places(self) -> tuple[Place | None, Place | None]:
        """The first allocation that did not fit, and the first operator that failed."""
        first, second = (
            [self._place(x) for x in places] for places in json.loads(self._get("troubles"))
        )
        return next(iter(first), None), next(iter(second), None)

    def _place(self, place: dict[str, Any]) -> Place:
        device, op = place["device"], place["op"]
        work = self._naming.work(*place["labels"])
        title = Span(Stream(device, 0), 0, 0, op, **work._asdict()).title
        return Place(device, title, place["bytes"], op, work.layer, place["detail"])

    def _access(self, access: dict[str, Any]) -> Access:
        # An operator that began before this observation has no stack, and is shown without.
        stack = self._stacks.get(access["stack"], ())
        stream = Stream(access["device"], access["stream"])
        work = self._naming.work(*access["labels"])
        return Access(
            access["op"],
            stream,
            access["write"],
            tuple([_line(code, number) for code, number in stack]),
            Span(stream, 0, 0, "", **work._asdict()).title,
        )

    def _take_stack(self) -> int:
        frames = []
        frame = sys._getframe().f_back
        while frame is not None:
            frames.append((frame.f_code, frame.f_lineno))
            frame = frame.f_back
        stack = tuple(frames[::-1])
        # Most operators are issued at the same places again, so each stack is kept once.
        number = self._stack_numbers.get(stack)
        if number is None:
            number = self._stack_numbers[stack] = next(_counter)
            self._stacks[number] = stack
        return number


def _line(code: CodeType, number: int) -> str:
    text = linecache.getline(code.co_filename, number).strip()
    return f"{code.co_filename}:{number} in {code.co_name}: {text}"


#: Numbers Python stacks, in all observations of the process, so that a stack of one observation is
#: never taken for a stack of another.
_counter = itertools.count()

#: Held while an observation is under way, so that no other one begins.
_observing = threading.Lock()


@contextmanager
def observe(
    *,
    costs: Mapping[str, float] | Hardware | str | None = None,
    host: float = 0.0,
    bandwidth: Mapping[Link, float] | None = None,
    jitter: int | None = None,
    raise_on_race: bool = False,
    stacks: bool = False,
) -> Iterator[Observation]:
    """Observe the virtual accelerators within a ``with`` block.

    ::

        with observe(costs={"addmm": 2.0}, jitter=0) as seen:
            model(input).sum().backward()
        assert not seen.races
        print(seen.makespan)

    All work that was issued before the block is done when it begins. Operators take no time, except
    those in ``costs``, copies over links in ``bandwidth``, and :class:`Busy` layers.

    Args:
        costs: the milliseconds that operators take, by the names that PyTorch's dispatcher has for
            them, such as ``"addmm"`` for a linear layer. ``"add"`` stands for ``"add_"``, too. Or
            ``"measured"``: each operator takes the time that its thread takes of the CPU to compute
            it, so that any model has a timeline. These times vary from run to run. Or a
            :class:`Hardware`: each operator and copy takes the time that its rates predict, and the
            operators of a layer share a span.
        host: the milliseconds that the host takes to issue a piece of work. Each of the host's
            threads issues its own.
        bandwidth: the bytes per millisecond that links carry, by source and target, each the index
            of a device or ``"cpu"``. Copies over other links take the cost of ``"copy"``. Several
            copies over a link do not slow each other down, unless devices share it: over
            ``((0, 1), "cpu")``, as after one switch, goes one copy at a time. Of two, the one that
            was issued later takes the time that is left.
        jitter: a seed, by which the host's threads are delayed at random. So behaviour that depends
            on their timing shows itself. By default nothing delays them.
        raise_on_race: whether the second operator of a race raises an error, in backward, too.
        stacks: whether to take the Python stack of each operator, to report it with races. This is
            slow.

    Raises:
        RuntimeError: no virtual accelerators were loaded, or another observation is under way, or,
            with ``raise_on_race``, there is a race.
        ValueError: a cost is negative, or that of no operator; a bandwidth is not positive; there
            is no such device; or the seed is out of range.
    """
    verify_loaded()
    rule, remedy = "bandwidth is a table of links", "pass such as {(0, 1): 1e6}"
    verify_kind(bandwidth, (Mapping, type(None)), rule, "bandwidth", remedy)
    raise_on_race = checked_flag(raise_on_race, "raise_on_race")
    stacks = checked_flag(stacks, "stacks")
    bandwidth = dict(bandwidth or {})
    table = table_of(costs)
    verify_settings(table, bandwidth, jitter, host)
    if not _observing.acquire(blocking=False):
        remedy = "end the other one before, or use its results"
        if _ops.is_hollow():
            remedy = "a dry run is one, so leave observe() out, or run without the dry run"
        raise RuntimeError(f"there can be one observation at a time; {remedy}")
    observation = Observation()
    try:
        hook = _Hook(observation._take_stack)
        address = ctypes.cast(hook, ctypes.c_void_p).value if stacks else 0
        # A thread may still be about to call the last observation's hook, which is kept, too.
        _hooks[:] = [*_hooks[-1:], hook]
        _ops.observe(True, -1 if jitter is None else jitter, raise_on_race, address)
        _ops.set_issue(host, host)
        if costs == MEASURED:
            _ops.set_measured()
        if isinstance(costs, Hardware):
            put_hardware(costs)
        for op, cost in table.items():
            # PyTorch may call ``add_`` in place of ``add``: a cost counts for both, by one name.
            _ops.set_cost(op.removeprefix("aten::").rstrip("_"), cost)
        put_links(bandwidth)
        labels.observer = observation._naming.put
        yield observation
    finally:
        labels.observer = None
        observation._end()
        _ops.observe(False, -1, False, 0)
        _observing.release()
