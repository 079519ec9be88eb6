"""The waits of a traced step that have a name: layers that copy, and functions that ask a device.

Hooks around layers take times of one micro-batch in each step, and are gone then until the next
one. Functions are looked at in the first micro-batch of each stage.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from torchgpipe.devices.recorder import Mark, Recorder, WorkTimes
from torchgpipe.devices.streams import current_stream
from torchgpipe.recompute.runs import is_recomputing

__all__: list[str] = []

#: The milliseconds by which the second time has to be late, and how many times as late as a quarter
#: of all are.
APART, TIMES = 0.005, 5

#: The milliseconds of work, at least, that a device has left when the host begins to wait.
LEFT = 0.005

#: The functions that may wait: those with a number, a list or a shape that depends on values.
NAMES = {"__bool__", "__complex__", "__contains__", "__float__", "__getitem__", "__index__"}
NAMES |= {"__int__", "__setitem__", "allclose", "argwhere", "bincount", "cpu", "equal"}
NAMES |= {"is_nonzero", "item", "masked_select", "nonzero", "numpy", "repeat_interleave", "to"}
NAMES |= {"tolist", "unique", "unique_consecutive"}


class Stray(NamedTuple):
    """A layer that copies from or to other devices by itself, and the milliseconds it waits."""

    layer: int
    device: torch.device
    others: tuple[torch.device, ...]
    time: float


class Strays:
    """The times around the layers of one micro-batch, on all devices, to find stray copies.

    A stray copy is one between two accelerators that a layer makes by itself, as ``x.to(other)``
    does. PyTorch makes the current streams of both devices wait for each other then. So times are
    taken on the current streams of all devices. Without such a copy nothing is between the two
    times of another stream, and the second one is when the first one is, or when the host issues
    it, if the device has nothing to do. With one, the layer goes on when the other stream does::

        own stream    ... start | waits           copy | computes   stop | ...
        other stream  ... work of other cells ... start copy stop | ...
    """

    def __init__(
        self, layers: Sequence[tuple[nn.Module, torch.device]], recorder: Recorder
    ) -> None:
        self._recorder, self._layers = recorder, layers
        self._devices = [*dict.fromkeys(device for _, device in layers)]
        #: For each layer, its own times and those of each other device, and that of the host then.
        self._seen: dict[int, tuple[list[WorkTimes], list[WorkTimes]]] = {}
        self._threads: set[int] = set()
        self._handles: dict[int, list[Any]] = {}
        # A hook cannot tell which of its places a layer is called at.
        if len({id(x) for x, _ in layers}) == len(layers) and len(self._devices) > 1:
            recorder.at_steps.append(self._start)

    def _start(self) -> None:
        """Have hooks anew. The last step counts."""
        self.stop()
        self._seen.clear()
        self._threads.clear()
        for k, (layer, device) in enumerate(self._layers):
            self._handles[k] = [
                layer.register_forward_pre_hook(partial(self._before, k, device)),
                layer.register_forward_hook(partial(self._after, k)),
            ]

    def stop(self) -> None:
        """Take the hooks away."""
        for k in [*self._handles]:
            self._remove(k)

    def _remove(self, k: int) -> None:
        for handle in self._handles.pop(k, ()):
            handle.remove()

    def _before(self, k: int, device: torch.device, *_: Any) -> None:
        if not is_recomputing():
            self._threads.add(threading.get_ident())
            places = [device, *[x for x in self._devices if x != device]]
            self._seen[k] = [self._recorder.before(current_stream(x)) for x in places], []

    def _after(self, k: int, *_: Any) -> None:
        if not is_recomputing():
            self._remove(k)
            times, issued = self._seen[k]
            for each in times:
                each.end()
                issued.append(self._recorder.issued(each.stream.device))

    def found(self) -> list[Stray]:
        """The copies, once the devices are done."""
        if len(self._threads) > 1:
            # What is between the times of a stream may be another thread's.
            return []
        found = []
        # What raises has no time of the host.
        for k, (times, issued) in ((k, x) for k, x in self._seen.items() if x[1]):
            begin, _ = self._recorder.bounds(times[0])
            for other, host in zip(times[1:], issued[1:]):
                start, stop = self._recorder.bounds(other)
                late = stop - max(start, *self._recorder.bounds(host))
                found.append((late, k, other.stream.device, max(0.0, stop - begin)))
        delays = sorted(x[0] for x in found)
        least = max(APART, TIMES * delays[len(delays) // 4]) if delays else 0.0
        strays = []
        for k in dict.fromkeys(k for late, k, *_ in found if late > least):
            own = [(device, time) for late, n, device, time in found if n == k and late > least]
            others = tuple([device for device, _ in own])
            strays.append(Stray(k, self._layers[k][1], others, max(time for _, time in own)))
        return strays


class Wait(NamedTuple):
    """The milliseconds that the host waits in the forward of a stage, and the last function."""

    time: float
    name: str


class Waits:
    """The waits of the first micro-batch of each stage, of the last step.

    A computation that runs while it is issued takes as long as the host does, and one that the host
    waits for takes the host as long as itself. Times around the cell cannot tell one from the
    other. So the functions that may wait are looked at: the host has waited in one if the device
    had work to do when the function was called, and none when it was done.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        #: The function, the host's time before it, the device's when it is done, and the host's.
        self._seen: dict[int, list[tuple[str, WorkTimes, WorkTimes, WorkTimes]]] = {}
        recorder.at_steps.append(self._seen.clear)

    def within(self, mark: Mark) -> Looking:
        """A mode that looks at the functions that the layers of a cell call."""
        return Looking(self._recorder, mark.stream.device, self._seen.setdefault(mark.stage, []))

    def found(self) -> Mapping[int, Wait]:
        """The waits by stage, once the devices are done."""
        found: dict[int, Wait] = {}
        for j, samples in self._seen.items():
            for name, before, at, after in samples:
                start, end = (self._recorder.bounds(x)[0] for x in (before, after))
                until = self._recorder.bounds(at)[0]
                # What the device had to do then, and whether the host went on before it was done.
                if until > start + LEFT and until <= end + LEFT:
                    known = found[j].time if j in found else 0.0
                    found[j] = Wait(known + end - start, name)
        return found


class Looking(TorchFunctionMode):
    """The mode of one call of layers."""

    def __init__(self, recorder: Recorder, device: torch.device, seen: list[Any]) -> None:
        super().__init__()
        self._recorder, self._device, self._seen = recorder, device, seen

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
        self._seen.append((name, before, at, self._recorder.issued(self._device)))
        return result
