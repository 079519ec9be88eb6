"""The waits of a traced step that have a name: functions that ask a device, or copy between two.

The functions that may wait are looked at in the first micro-batch of each stage, in each step.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from torchgpipe.devices.recorder import Recorder
from torchgpipe.devices.streams import current_stream, has_streams
from torchgpipe.values.structure import leaves_of

__all__: list[str] = []

#: The milliseconds of work, at least, that a device has left when the host begins to wait.
LEFT = 0.005

#: The functions that may wait: those that copy, and those with a number, a list or a shape that
#: depends on values.
NAMES = {"__bool__", "__complex__", "__contains__", "__float__", "__getitem__", "__index__"}
NAMES |= {"__int__", "__setitem__", "allclose", "argwhere", "bincount", "copy_", "cpu", "cuda"}
NAMES |= {"equal", "is_nonzero", "item", "masked_select", "nonzero", "numpy", "repeat_interleave"}
NAMES |= {"to", "tolist", "unique", "unique_consecutive"}


class Wait(NamedTuple):
    """A function in the forward of a stage, and the milliseconds of waiting for it."""

    name: str
    time: float
    device: torch.device
    #: The other devices that it copies from or to, which wait, too; without them the host waits.
    others: tuple[torch.device, ...]


class Looking(TorchFunctionMode):
    """The mode of one call of layers, which adds to ``waits`` a function for each call it sees.

    That function returns the wait, or None if there was none, once the devices are done.

    A computation that runs while it is issued takes as long as the host does, and one that the host
    waits for takes the host as long as itself. Times around the cell cannot tell one from the
    other. So the functions that may wait are looked at: the host has waited in one if the device
    had work to do when the function was called, and none when it returned.

    PyTorch's own copy between two accelerators makes the current streams of both wait for each
    other: the device's stream is late by that, and by the copy::

        own stream    ... before | waits      copy | after, computes ...
        other stream  ... work of other cells  copy | ...
    """

    def __init__(
        self, recorder: Recorder, device: torch.device, waits: list[Callable[[], Wait | None]]
    ) -> None:
        super().__init__()
        self._recorder, self._device, self._waits = recorder, device, waits

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name not in NAMES:
            return func(*args, **(kwargs or {}))
        before = self._recorder.issued(self._device)
        at = self._recorder.before(current_stream(self._device))
        result = func(*args, **(kwargs or {}))
        at.end()
        tensors = [x for x in leaves_of((args, result)) if isinstance(x, Tensor)]
        places = dict.fromkeys(x.device for x in tensors if has_streams(x.device))
        others = tuple([x for x in places if x != self._device])
        after = self._recorder.issued(self._device)
        name = f".{name}() in {_line()}"

        def wait() -> Wait | None:
            start, end = (self._recorder.bounds(x)[0] for x in (before, after))
            until, stop = self._recorder.bounds(at)
            if others:
                return Wait(name, stop - until, self._device, others)
            is_wait = until > start + LEFT and until <= end + LEFT
            return Wait(name, end - start, self._device, ()) if is_wait else None

        self._waits.append(wait)
        return result


def _line() -> str:
    """The line of the model's code that called a function of PyTorch's."""
    frame = sys._getframe(2)
    while frame.f_back and frame.f_globals.get("__name__", "").startswith("torch."):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}, line {frame.f_lineno}"
