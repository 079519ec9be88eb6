"""Observes what the virtual accelerators are given: its order, and its time."""

from __future__ import annotations

import ctypes
import itertools
import json
import math
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
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

__all__ = ["Observation", "observe"]

_ops: Any = torch.ops.virtual_accelerator

#: What a table of bandwidths calls the host, and what the library does.
CPU, _HOST = "cpu", -1

_Hook = ctypes.CFUNCTYPE(ctypes.c_int64)

#: The hook that the library calls; it must not be collected while it may be called.
_hooks: list[Any] = []


class Observation:
    """What was seen since :func:`observe` began, up to now or to its end.

    Time is virtual, in milliseconds, and begins with the observation.
    """

    def __init__(self) -> None:
        self._stacks: dict[int, tuple[str, ...]] = {}
        self._stack_numbers = itertools.count()
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
            (_name(source), _name(target)): Transfers(count, bytes)
            for source, target, count, bytes in zip(*[iter(numbers)] * 4)
        }

    def save_trace(self, path: str | PathLike[str]) -> None:
        """Writes the timeline as a file that https://ui.perfetto.dev and chrome://tracing open."""
        Path(path).write_text(trace.to_json(self.spans), encoding="utf-8")

    def _access(self, access: dict[str, Any]) -> Access:
        stack = access["stack"]
        return Access(
            access["op"],
            Stream(access["device"], access["stream"]),
            access["write"],
            self._stacks[stack] if stack >= 0 else (),
        )

    def _take_stack(self) -> int:
        number = next(self._stack_numbers)
        # Without this frame.
        frames = traceback.extract_stack()[:-1]
        self._stacks[number] = tuple(
            [f"{f.filename}:{f.lineno} in {f.name}: {f.line}" for f in frames]
        )
        return number


_active = False


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
            them, such as ``"addmm"`` for a linear layer.
        bandwidth: what links carry, in bytes per millisecond, by source and target, each the index
            of a device or ``"cpu"``. Copies over other links take no time. Links are not shared:
            copies on different streams do not slow each other down.
        jitter: a seed. Threads of the host are delayed at random, so that whatever depends on their
            timing shows itself.
        raise_on_race: have the operator raise that is not ordered after another, in backward, too.
        stacks: take the Python stack of each operator, for the report of races. This is slow.

    Raises:
        RuntimeError: no virtual accelerators were loaded, or another observation is under way, or,
            with ``raise_on_race``, there is a race.
        ValueError: a cost is negative, or a bandwidth not positive, or a device is not there.
    """
    global _active
    verify_loaded()
    costs, bandwidth = dict(costs or {}), dict(bandwidth or {})
    _verify(costs, bandwidth, jitter)
    if _active:
        raise RuntimeError(
            "there is one observation at a time; end the other before, or use what it has seen"
        )
    _active = True
    observation = Observation()
    hook = _Hook(observation._take_stack)
    address = ctypes.cast(hook, ctypes.c_void_p).value if stacks else 0
    # Threads may still be about to call it when this one is over.
    _hooks[:] = [*_hooks[-1:], hook]
    _ops.observe(-1 if jitter is None else jitter, raise_on_race, address)
    try:
        for op, cost in costs.items():
            _ops.set_cost(op, cost)
        for (source, target), bytes in bandwidth.items():
            _ops.set_bandwidth(_index(source), _index(target), bytes)
        yield observation
    finally:
        observation._end()
        _ops.observe(-1, False, 0)
        _active = False


def _verify(
    costs: dict[str, float],
    bandwidth: dict[tuple[int | str, int | str], float],
    jitter: int | None,
) -> None:
    for op, cost in costs.items():
        if not 0 <= cost < math.inf:
            raise ValueError(
                f"a cost must be a time in milliseconds (operator: {op!r}, cost: {cost})"
            )
    devices = torch.accelerator.device_count()
    for link, bytes in bandwidth.items():
        for end in link:
            if end != CPU and not (isinstance(end, int) and 0 <= end < devices):
                raise ValueError(
                    "a link leads from one device to another, each an index or 'cpu' (link: "
                    f"{link!r}, devices: {devices})"
                )
        if not bytes > 0:
            raise ValueError(
                "a bandwidth must be positive, in bytes per millisecond (link: "
                f"{link!r}, bandwidth: {bytes}); a link that is not named takes no time"
            )
    if jitter is not None and not 0 <= jitter < 2**31:
        raise ValueError(f"jitter must be None or a seed from 0 to 2**31 - 1 (jitter: {jitter})")


def _index(end: int | str) -> int:
    return _HOST if end == CPU else int(end)


def _name(index: int) -> int | str:
    return CPU if index == _HOST else index
