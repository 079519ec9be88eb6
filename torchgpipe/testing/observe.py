"""Observes what the virtual accelerators are given: its order, and its time."""

from __future__ import annotations

import ctypes
import itertools
import json
import linecache
import math
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

__all__ = ["Observation", "observe"]

_ops: Any = torch.ops.virtual_accelerator

#: What a table of bandwidths calls the host, and what the library does.
CPU, _HOST = "cpu", -1

_Hook = ctypes.CFUNCTYPE(ctypes.c_int64)

#: Operators that get to the device in another way than through the fallback, which counts costs.
_OWN = {
    *("copy", "empty", "empty_strided", "set", "record_stream", "native_dropout"),
    *("_copy_from", "_copy_from_and_resize", "_local_scalar_dense", "_efficientzerotensor"),
    *("_fused_sdp_choice", "_thnn_fused_lstm_cell", "_thnn_fused_lstm_cell_backward_impl"),
    *("_thnn_fused_gru_cell", "_thnn_fused_gru_cell_backward"),
}

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
            (_name(source), _name(target)): Transfers(count, bytes)
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
    _verify(costs, bandwidth, jitter)
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
            _ops.set_bandwidth(_index(source), _index(target), bytes)
        yield observation
    finally:
        observation._end()
        _ops.observe(False, -1, False, 0)
        _observing.release()


def _verify(
    costs: dict[str, float],
    bandwidth: dict[tuple[int | str, int | str], float],
    jitter: int | None,
) -> None:
    for op, cost in costs.items():
        if not (isinstance(op, str) and _reaches_a_device(op)):
            raise ValueError(
                "a cost belongs to an operator that PyTorch's dispatcher gives to a device, and "
                f"that is not made of others (operator: {op!r}, cost: {cost}); a linear layer, for "
                "one, is 'addmm', and a convolution 'convolution'"
            )
        if not (_is_number(cost) and 0 <= cost < math.inf):
            raise ValueError(
                f"a cost must be a time in milliseconds (operator: {op!r}, cost: {cost!r}); leave "
                "out what takes no time"
            )
    devices = torch.accelerator.device_count()
    for link, bytes in bandwidth.items():
        if not (isinstance(link, tuple) and len(link) == 2 and all(_is_end(x) for x in link)):
            raise ValueError(
                "a link leads from one device to another, each an index or 'cpu' (link: "
                f"{link!r}, devices: {devices}); name it by a pair, such as (0, 1)"
            )
        if not (_is_number(bytes) and bytes > 0):
            raise ValueError(
                "a bandwidth must be positive, in bytes per millisecond (link: "
                f"{link!r}, bandwidth: {bytes!r}); leave out a link that takes no time"
            )
    if jitter is not None and not (isinstance(jitter, int) and 0 <= jitter < 2**31):
        raise ValueError(
            f"jitter must be None or a seed from 0 to 2**31 - 1 (jitter: {jitter!r}); use 0 for a "
            "start, and then others"
        )


def _reaches_a_device(op: str) -> bool:
    name = (op if "::" in op else f"aten::{op}").rstrip("_")
    if name.removeprefix("aten::") in _OWN:
        return name == "aten::copy"
    known = set(torch._C._dispatch_get_all_op_names())
    # In place, out of place, or into an output that is given: one computes by another.
    overloads = [
        f"{schema.name}.{schema.overload_name}".rstrip(".")
        for form in (name, f"{name}_")
        for schema in torch._C._jit_get_schemas_for_operator(form)
    ]
    return any(not _is_composite(overload) for overload in overloads if overload in known)


def _is_composite(name: str) -> bool:
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    return has(name, "CompositeImplicitAutograd") or (
        has(name, "CompositeExplicitAutograd") and not has(name, "PrivateUse1")
    )


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float))


def _is_end(value: object) -> bool:
    devices = torch.accelerator.device_count()
    return value == CPU or (isinstance(value, int) and 0 <= value < devices)


def _index(end: int | str) -> int:
    return _HOST if end == CPU else int(end)


def _name(index: int) -> int | str:
    return CPU if index == _HOST else index
