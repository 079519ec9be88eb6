"""Observes what the virtual accelerators are given: its order, and its time."""

from __future__ import annotations

import ctypes
import itertools
import json
import linecache
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from types import CodeType
from typing import Any

import torch

from torchgpipe.testing import trace
from torchgpipe.testing.loading import verify_loaded
from torchgpipe.testing.report import (
    Access,
    Race,
    Span,
    Stream,
    Transfers,
    Wait,
    critical_path,
    waits_of,
)
from torchgpipe.testing.settings import index_of, name_of, verify_settings

__all__ = ["Observation", "observe"]

_ops: Any = torch.ops.virtual_accelerator

_Hook = ctypes.CFUNCTYPE(ctypes.c_int64)

#: The hook that the library calls; it must not be collected while it may be called.
_hooks: list[Any] = []


class Observation:
    """What was seen since :func:`observe` began, up to now or to its end.

    Time is virtual, in milliseconds, and begins with the observation.
    """

    def __init__(self) -> None:
        self._stacks: dict[int, tuple[tuple[CodeType, int], ...]] = {}
        self._stack_numbers: dict[tuple[tuple[CodeType, int], ...], int] = {}
        self._last: dict[str, Any] | None = None

    def _get(self, name: str) -> Any:
        return getattr(_ops, name)() if self._last is None else self._last[name]

    def _end(self) -> None:
        self._last = {name: self._get(name) for name in ("races", "spans", "traffic", "makespan")}

    @property
    def makespan(self) -> float:
        """When the last stream has done all it was given."""
        makespan: float = self._get("makespan")
        return makespan

    @property
    def races(self) -> list[Race]:
        """Accesses to the same memory that nothing orders. There should be none."""
        return [
            Race(
                **{
                    **race,
                    "first": self._access(race["first"]),
                    "second": self._access(race["second"]),
                }
            )
            for race in json.loads(self._get("races"))
        ]

    @property
    def spans(self) -> list[Span]:
        """All work that took time, in the order in which it was issued."""
        return [
            Span(Stream(span.pop("device"), span.pop("stream")), **span)
            for span in json.loads(self._get("spans"))
        ]

    @property
    def waits(self) -> list[Wait]:
        """The times in which streams waited for others, and for what there."""
        return waits_of(self.spans)

    @property
    def critical_path(self) -> list[Span]:
        """The spans that the makespan is made of: to make any of them shorter makes it shorter."""
        spans = self.spans
        return [spans[index] for index in critical_path(spans)]

    @property
    def busy(self) -> dict[Stream, float]:
        """How long each stream that did anything was at work; it was idle for the rest."""
        busy: dict[Stream, float] = {}
        for span in self.spans:
            busy[span.stream] = busy.get(span.stream, 0.0) + span.end - span.start
        return busy

    @property
    def idle(self) -> dict[Stream, float]:
        """How long each stream that did anything was not at work."""
        makespan = self.makespan
        return {stream: makespan - busy for stream, busy in self.busy.items()}

    @property
    def transfers(self) -> dict[tuple[int | str, int | str], Transfers]:
        """What was copied, by source and target: indices of devices, or ``"cpu"``."""
        numbers = self._get("traffic")
        return {
            (name_of(source), name_of(target)): Transfers(count, bytes)
            for source, target, count, bytes in zip(*[iter(numbers)] * 4)
        }

    def save_trace(self, path: str | PathLike[str]) -> None:
        """Writes the timeline as a file that https://ui.perfetto.dev and chrome://tracing open."""
        Path(path).write_text(trace.to_json(self.spans), encoding="utf-8")

    def _access(self, access: dict[str, Any]) -> Access:
        # An operator that began before this observation has a stack in another one, or none.
        stack = self._stacks.get(access["stack"], ())
        return Access(
            access["op"],
            Stream(access["device"], access["stream"]),
            access["write"],
            tuple([_line(code, number) for code, number in stack]),
        )

    def _take_stack(self) -> int:
        frames = []
        frame = sys._getframe().f_back
        while frame is not None:
            frames.append((frame.f_code, frame.f_lineno))
            frame = frame.f_back
        stack = tuple(frames[::-1])
        # Most operators are issued where others were: each stack is kept once.
        number = self._stack_numbers.get(stack)
        if number is None:
            number = self._stack_numbers[stack] = next(_counter)
            self._stacks[number] = stack
        return number


def _line(code: CodeType, number: int) -> str:
    text = linecache.getline(code.co_filename, number).strip()
    return f"{code.co_filename}:{number} in {code.co_name}: {text}"


#: Numbers stacks, for all observations.
_counter = itertools.count()

#: Held by the observation that is under way.
_observing = threading.Lock()


@contextmanager
def observe(
    *,
    costs: Mapping[str, float] | None = None,
    bandwidth: Mapping[tuple[int | str, int | str], float] | None = None,
    jitter: int | None = None,
    raise_on_race: bool = False,
    stacks: bool = False,
) -> Iterator[Observation]:
    """Observes the virtual accelerators within a ``with`` block.

    ::

        with observe(costs={"addmm": 2.0}, jitter=0) as seen:
            model(input).sum().backward()
        assert not seen.races
        print(seen.makespan)

    Whatever was issued before is done when it begins. Everything takes no time but what ``costs``
    and ``bandwidth`` say, and :class:`Busy` layers.

    Args:
        costs: what operators take, in milliseconds, by the names that PyTorch's dispatcher has for
            them, such as ``"addmm"`` for a linear layer. ``"add"`` is ``"add_"``, too.
        bandwidth: what links carry, in bytes per millisecond, by source and target, each the index
            of a device or ``"cpu"``. Copies over other links take what ``costs`` has for
            ``"copy"``. Links are not shared: copies on different streams do not slow each other
            down.
        jitter: a seed. Threads of the host are delayed at random, so that whatever depends on their
            timing shows itself.
        raise_on_race: have the operator raise that is not ordered after another, in backward, too.
        stacks: take the Python stack of each operator, for the report of races. This is slow.

    Raises:
        RuntimeError: no virtual accelerators were loaded, or another observation is under way, or,
            with ``raise_on_race``, there is a race.
        ValueError: a cost is negative or no operator's, a bandwidth not positive, a device not
            there, or the seed none.
    """
    verify_loaded()
    costs, bandwidth = dict(costs or {}), dict(bandwidth or {})
    verify_settings(costs, bandwidth, jitter)
    if not _observing.acquire(blocking=False):
        raise RuntimeError(
            "there is one observation at a time; end the other before, or use what it has seen"
        )
    observation = Observation()
    try:
        hook = _Hook(observation._take_stack)
        address = ctypes.cast(hook, ctypes.c_void_p).value if stacks else 0
        # Threads may still be about to call it when this one is over.
        _hooks[:] = [*_hooks[-1:], hook]
        _ops.observe(True, -1 if jitter is None else jitter, raise_on_race, address)
        for op, cost in costs.items():
            # What computes in place, and what does not, may reach the device as one.
            _ops.set_cost(op.removeprefix("aten::").rstrip("_"), cost)
        for (source, target), bytes in bandwidth.items():
            _ops.set_bandwidth(index_of(source), index_of(target), bytes)
        yield observation
    finally:
        observation._end()
        _ops.observe(False, -1, False, 0)
        _observing.release()
