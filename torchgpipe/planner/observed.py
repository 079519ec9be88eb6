"""The layers of a traced model: what each takes of its partition, and hands on, and who waits.

Hooks around the forward of each layer take the times of two micro-batches in each step, and are
gone then until the next one: more times would tell little, and each hook takes a while on the host.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from torchgpipe.devices.recorder import Mark, Recorder, WorkTimes
from torchgpipe.devices.streams import current_stream
from torchgpipe.recompute.runs import is_recomputing
from torchgpipe.values.structure import leaves_of

__all__: list[str] = []


@dataclass(frozen=True)
class TracedLayer:
    """The time of a layer's forward, in any unit, and the memory of its output."""

    forward: float
    bytes: int
    device: str = ""
    #: The other devices that it copies from, or to, by itself.
    copied: Sequence[str] = ()


@dataclass(frozen=True)
class HostWait:
    """The milliseconds that the host waits in a forward, and that the device goes on after that."""

    time: float
    #: After the last wait, before the cell ends.
    tail: float


#: The milliseconds by which the second time has to be late, and how many times as late as a quarter
#: of all are.
APART, TIMES = 0.005, 5


class Stray(NamedTuple):
    """A copy that a layer makes, with the other device, and when that was done with it, in ms."""

    layer: int
    device: torch.device
    end: float


class Strays:
    """The times of other devices around the layers of one micro-batch, to find stray copies.

    A stray copy is one between two accelerators that a layer makes by itself, as ``x.to(other)``
    does. PyTorch makes the current streams of both devices wait for each other then. So times are
    taken on the current streams of all other devices. Without such a copy nothing is between the
    two times of a stream, and the second one is when the first one is, or when the host issues it,
    if the device has nothing to do. With one, the layer goes on when the other stream does::

        own stream    ... start | waits           copy | computes   stop | ...
        other stream  ... work of other cells ... start copy stop | ...
    """

    def __init__(self, devices: Iterable[torch.device], recorder: Recorder) -> None:
        self._recorder = recorder
        self._devices = [*dict.fromkeys(devices)]
        #: For each layer, the times of each other device, and that of the host at its end.
        self._seen: dict[int, list[list[WorkTimes]]] = {}
        self._threads: set[int] = set()

    def clear(self) -> None:
        self._seen.clear()
        self._threads.clear()

    def before(self, layer: int, device: torch.device) -> None:
        self._threads.add(threading.get_ident())
        others = [x for x in self._devices if x != device]
        self._seen[layer] = [[self._recorder.before(current_stream(x))] for x in others]

    def after(self, layer: int) -> None:
        for each in self._seen[layer]:
            (times,) = each
            times.end()
            each.append(self._recorder.issued(times.stream.device))

    def found(self) -> Sequence[Stray]:
        """The copies, once the devices are done."""
        if len(self._threads) > 1:
            # What is between the times of a stream may be another thread's.
            return []
        found = []
        for layer, some in self._seen.items():
            # What raises has no time of the host.
            for times, issued in (x for x in some if len(x) == 2):
                start, stop = self._recorder.bounds(times)
                late = stop - max(start, *self._recorder.bounds(issued))
                found.append((late, Stray(layer, times.stream.device, stop)))
        delays = sorted(late for late, _ in found)
        least = max(APART, TIMES * delays[len(delays) // 4]) if delays else 0.0
        return [stray for late, stray in found if late > least]


#: The micro-batches of a step that are timed.
TIMED = 2


class Layers:
    """The layers of a model, each with its device, with hooks until :meth:`stop`."""

    def __init__(
        self, layers: Sequence[tuple[nn.Module, torch.device]], recorder: Recorder
    ) -> None:
        self._recorder = recorder
        self._found = layers
        self._times: dict[int, list[WorkTimes]] = {}
        self._bytes: dict[int, int] = {}
        self.rows = 0
        self._strays = Strays([device for _, device in layers], recorder)
        self._handles: dict[int, list[Any]] = {}
        # A hook cannot tell which of its places a layer is called at.
        if len({id(x) for x, _ in self._found}) == len(self._found):
            recorder.at_steps.append(self._start)

    def _start(self) -> None:
        """Have hooks anew. The last step counts."""
        self.stop()
        self._times.clear()
        self._bytes.clear()
        self._strays.clear()
        for k, (layer, device) in enumerate(self._found):
            before = partial(self._begin, k, device)
            self._handles[k] = [
                layer.register_forward_pre_hook(before, with_kwargs=True),
                layer.register_forward_hook(partial(self._end, k)),
            ]

    def stop(self, layers: Iterable[int] | None = None) -> None:
        """Take the hooks away, by default those of all layers."""
        for k in [*self._handles] if layers is None else layers:
            for handle in self._handles.pop(k, ()):
                handle.remove()

    @property
    def called(self) -> list[int]:
        """The layers in the order of their first calls."""
        return [*self._times]

    def found(self, order: Sequence[int] | None = None) -> list[TracedLayer]:
        """The layers in an order, once the devices are done; none if not all were timed."""
        order = range(len(self._found)) if order is None else order
        if not self._bytes.keys() >= {*order}:
            return []
        strays = self._strays.found()
        return [self._layer(k, [x for x in strays if x.layer == k]) for k in order]

    def _layer(self, k: int, strays: Sequence[Stray]) -> TracedLayer:
        bounds = [*map(self._recorder.bounds, self._times[k])]
        times = [stop - start for start, stop in bounds]
        if strays:
            # What is after the copy, in the micro-batch in which it was looked for, the first one.
            start, stop = bounds[0]
            times.append(max(0.0, stop - max(start, *(x.end for x in strays))))
        others = tuple([str(x.device) for x in strays])
        return TracedLayer(min(times), self._bytes[k], str(self._found[k][1]), others)

    def _begin(self, k: int, device: torch.device, _: nn.Module, args: Any, kwargs: Any) -> None:
        if is_recomputing():
            return
        if k == 0:
            tensors = [x for x in leaves_of((args, kwargs)) if isinstance(x, Tensor)]
            self.rows = max([len(x) for x in tensors if x.dim()], default=0)
        times = self._times.setdefault(k, [])
        if not times:
            self._strays.before(k, device)
        times.append(self._recorder.before(current_stream(device)))

    def _end(self, k: int, _: nn.Module, input: Any, output: Any) -> None:
        if is_recomputing():
            return
        times = self._times[k]
        times[-1].end()
        if len(times) == 1:
            self._strays.after(k)
        if len(times) == TIMED:
            self.stop([k])
        self._bytes[k] = sum(x.nbytes for x in leaves_of(output) if isinstance(x, Tensor))


#: The milliseconds of work, at least, that a device has left when the host begins to wait.
LEFT = 0.005

#: The functions that may wait: those with a number, a list or a shape that depends on values.
NAMES = {"__bool__", "__complex__", "__contains__", "__float__", "__getitem__", "__index__"}
NAMES |= {"__int__", "__setitem__", "allclose", "argwhere", "bincount", "cpu", "equal"}
NAMES |= {"is_nonzero", "item", "masked_select", "nonzero", "numpy", "repeat_interleave", "to"}
NAMES |= {"tolist", "unique", "unique_consecutive"}


class Waits:
    """The waits of the first micro-batch of each stage, of the last step.

    A computation that runs while it is issued takes as long as the host does, and one that the host
    waits for takes the host as long as itself. Times around the cell cannot tell one from the
    other. So the functions that may wait are looked at: the host has waited in one if the device
    had work to do when the function was called, and none when it was done.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        #: The host's time before a call, the device's when it is done, and the host's after it.
        self._seen: dict[int, list[tuple[WorkTimes, WorkTimes, WorkTimes]]] = {}
        recorder.at_steps.append(self._seen.clear)

    def within(self, mark: Mark) -> Looking:
        """A mode that looks at the functions that the layers of a cell call."""
        return Looking(self._recorder, mark.stream.device, self._seen.setdefault(mark.stage, []))

    def found(self, ends: Mapping[int, float]) -> dict[int, HostWait]:
        """The waits by stage, once the devices are done, by the ends of their first forwards."""
        found: dict[int, HostWait] = {}
        for j, samples in self._seen.items():
            waited, last = 0.0, None
            for before, at, after in samples:
                start, end = (self._recorder.bounds(x)[0] for x in (before, after))
                until = self._recorder.bounds(at)[0]
                # What the device had to do then, and whether the host went on before it was done.
                if until > start + LEFT and until <= end + LEFT:
                    waited += end - start
                    last = end
            if last is not None and j in ends:
                found[j] = HostWait(waited, max(0.0, ends[j] - last))
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
        if getattr(func, "__name__", "") not in NAMES:
            return func(*args, **(kwargs or {}))
        before = self._recorder.issued(self._device)
        at = self._recorder.before(current_stream(self._device))
        result = func(*args, **(kwargs or {}))
        self._seen.append((before, at, self._recorder.issued(self._device)))
        return result
