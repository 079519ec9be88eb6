"""Stray copies: what a layer copies between two accelerators by itself, as ``x.to(other)`` does.

PyTorch makes the current streams of both devices wait for each other then. So, around a layer,
times are taken on the current streams of all other devices. Without such a copy nothing is between
the two times of a stream, and the second one is when the first one is, or when the host issues it,
if the device has nothing to do. With one, the layer goes on when the other stream does::

    own stream    ... start | waits           copy | computes   stop | ...
    other stream  ... work of other cells ... start copy stop | ...
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from torchgpipe.devices.recorder import Recorder, WorkTimes
from torchgpipe.devices.streams import current_stream

__all__: list[str] = []

#: The milliseconds by which the second time has to be late, as even a small copy makes it, and how
#: many times as late as a quarter of all are.
APART, TIMES = 0.005, 5


class Stray(NamedTuple):
    """A copy that a layer makes.

    Args:
        layer: the number of the layer.
        device: the other device.
        end: when the other device was done with it, in milliseconds.
    """

    layer: int
    device: torch.device
    end: float


class Strays:
    """The times of other devices around the layers of one micro-batch.

    Args:
        devices: the device of each partition.
        recorder: takes the times.
    """

    def __init__(self, devices: Iterable[torch.device], recorder: Recorder) -> None:
        self._recorder = recorder
        self._devices = [*dict.fromkeys(devices)]
        #: For each layer, the times of each other device, and that of the host at its end.
        self._seen: dict[int, list[list[WorkTimes]]] = {}
        self._threads: set[int] = set()

    def clear(self) -> None:
        """Forget what was seen."""
        self._seen.clear()
        self._threads.clear()

    def before(self, layer: int, device: torch.device) -> None:
        """Take the times before a layer that runs on a device."""
        self._threads.add(threading.get_ident())
        others = [current_stream(x) for x in self._devices if x != device]
        self._seen[layer] = [[self._recorder.before(stream)] for stream in others]

    def after(self, layer: int) -> None:
        """Take the times behind a layer."""
        for each in self._seen[layer]:
            (times,) = each
            times.end()
            each.append(self._recorder.issued(times.stream.device))

    def found(self) -> Sequence[Stray]:
        """The copies, once the devices are done.

        There are none if several threads have issued the layers: what is between the times of a
        stream may be another thread's then.
        """
        if len(self._threads) > 1:
            return []
        found = []
        for layer, some in self._seen.items():
            # A layer that raises has no time of the host.
            for times, issued in (x for x in some if len(x) == 2):
                start, stop = self._recorder.bounds(times)
                late = stop - max(start, *self._recorder.bounds(issued))
                found.append((late, Stray(layer, times.stream.device, stop)))
        delays = sorted(late for late, _ in found)
        least = max(APART, TIMES * delays[len(delays) // 4]) if delays else 0.0
        return [stray for late, stray in found if late > least]
