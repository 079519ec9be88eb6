"""Devices and their streams, for every accelerator that PyTorch knows.

This is the only module that names :mod:`torch.accelerator`, :class:`torch.Stream` and
:class:`torch.Event`. Everything else speaks of an :data:`AbstractStream`, which on a device that
has streams (CUDA and ROCm, XPU, a PrivateUse1 backend) is a :class:`torch.Stream`, and on the
others, where whatever was issued before is done, a :class:`CPUStream`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from time import perf_counter
from types import TracebackType
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

__all__: list[str] = []

#: What is behind the functions of torch.accelerator, which take several times as long.
_C: Any = torch._C

#: Devices whose work is done in the order of the host: there is nothing to wait for.
STREAMLESS = ("cpu", "meta", "mps")

CPU = torch.device("cpu")


@dataclass(frozen=True)
class CPUStream:
    """The one stream of a device that has none: all its operations are no-ops."""

    device: torch.device


AbstractStream: TypeAlias = torch.Stream | CPUStream
Device: TypeAlias = torch.device | int | str


def accelerators() -> list[torch.device]:
    """All accelerators of this process, in the order of their indices; none gives ``[]``."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return []
    return [torch.device(accelerator.type, i) for i in range(torch.accelerator.device_count())]


def device_types() -> tuple[str, ...]:
    """The types of device that this process can compute on: the CPU, and its accelerator's."""
    accelerator = torch.accelerator.current_accelerator()
    return ("cpu",) if accelerator is None else ("cpu", accelerator.type)


def canonical_device(device: Device) -> torch.device:
    """The device as tensors name it: accelerators with an index, the CPU without one."""
    device = torch.device(device)
    if device.type in ("cpu", "meta"):
        return torch.device(device.type)
    if device.index is None:
        return torch.device(device.type, torch.accelerator.current_device_index())
    return device


def has_streams(device: torch.device) -> bool:
    """Whether the host only issues work for the device, and goes on."""
    return device.type not in STREAMLESS


def new_stream(device: torch.device) -> AbstractStream:
    """A stream of the device's pool; after enough of them (32 on CUDA) they alias."""
    if not has_streams(device):
        return CPUStream(device)
    return torch.Stream(device)


def current_stream(device: torch.device) -> AbstractStream:
    """The stream on which this thread issues work for the device."""
    if not has_streams(device):
        return CPUStream(device)
    stream: torch.Stream = _C._accelerator_getStream(canonical_device(device).index)
    return stream


def get_device(stream: AbstractStream) -> torch.device:
    """The device of a stream."""
    return stream.device


class use_stream:
    """Makes a stream, and its device, the current one of this thread within a ``with`` block.

    Unlike :class:`torch.Stream` itself, which keeps what it has to restore in the stream, one
    stream may be used by several threads at once, and within itself.
    """

    def __init__(self, stream: AbstractStream) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        if isinstance(self.stream, torch.Stream):
            self.device_index = _C._accelerator_getDeviceIndex()
            self.previous = _C._accelerator_getStream(self.stream.device_index)
            _C._accelerator_setStream(self.stream)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if isinstance(self.stream, torch.Stream):
            _C._accelerator_setStream(self.previous)
            _C._accelerator_setDeviceIndex(self.device_index)


def current_streams(devices: Iterable[torch.device]) -> list[torch.Stream]:
    """The current streams of accelerators, that of the current device last."""
    indices = [device.index for device in devices if device != CPU and has_streams(device)]
    if not indices:
        return []
    return [*map(_C._accelerator_getStream, [*indices, _C._accelerator_getDeviceIndex()])]


def set_streams(streams: Iterable[torch.Stream]) -> None:
    """Makes streams the current ones of their devices, and the last one's the current device."""
    for stream in streams:
        _C._accelerator_setStream(stream)


def use_device(device: torch.device) -> use_stream:
    """Makes a device the current one of this thread within a ``with`` block."""
    return use_stream(current_stream(device))


def wait_stream(source: AbstractStream, target: AbstractStream) -> None:
    """Work issued on ``source`` from now on starts after all that ``target`` was given so far.

    Where the waiting side is the CPU, the host itself waits.
    """
    if not isinstance(target, torch.Stream):
        return
    if isinstance(source, torch.Stream):
        source.wait_stream(target)
    else:
        target.synchronize()


def wait_all(sources: Iterable[AbstractStream], target: AbstractStream) -> None:
    """:func:`wait_stream` for several streams of an accelerator, by one event."""
    if isinstance(target, torch.Stream):
        event = target.record_event()
        for source in sources:
            assert isinstance(source, torch.Stream)
            source.wait_event(event)


def record_stream(tensor: Tensor, stream: AbstractStream) -> None:
    """Keeps the tensor's memory, once freed, from reuse until ``stream`` is past this point.

    Needed wherever a tensor is used on a stream other than the one it was allocated on.
    """
    if isinstance(stream, torch.Stream) and tensor.device == stream.device:
        # A gradient of an embedding may be sparse, which is two tensors.
        for part in (tensor._indices(), tensor._values()) if tensor.is_sparse else (tensor,):
            part.record_stream(stream)


class Stopwatch:
    """Measures how long a device works on what is issued between a start and a stop.

    By the events of the device's current stream, where it has streams, and by the clock elsewhere.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = current_stream(device)

    def start(self) -> None:
        """Starts, or starts again."""
        if isinstance(self._stream, torch.Stream):
            self._event = torch.Event(self._stream.device, enable_timing=True)
            self._event.record(self._stream)
        else:
            self._time = perf_counter()

    def stop(self) -> float:
        """The seconds since the start, when all that was issued since is done."""
        if not isinstance(self._stream, torch.Stream):
            return perf_counter() - self._time
        event = torch.Event(self._stream.device, enable_timing=True)
        event.record(self._stream)
        event.synchronize()
        return float(self._event.elapsed_time(event)) / 1000


def memory_allocated(device: torch.device) -> int | None:
    """The bytes of an accelerator's memory that tensors occupy; None where nobody counts them."""
    if not has_streams(device):
        return None
    return torch.accelerator.memory_allocated(device)


class PartitionStreams(NamedTuple):
    """The streams of one partition."""

    compute: AbstractStream
    """On which its layers compute."""
    values: list[AbstractStream]
    """On which what passes from partition to partition comes and goes; micro-batches take turns."""
    skips: list[AbstractStream]
    """On which skips come and go, likewise: they must not be in each other's way."""


class Streams:
    """The streams of a wrapper, made once for each device.

    Partitions that share a device have streams of their own, so that they overlap. The pool of the
    device is divided among them; what came from it twice would wait for itself, which takes time
    and changes nothing else.
    """

    #: How many copy streams of one kind a partition has at most.
    COPIES = 15
    #: How many streams the pool of a device has, as far as is known (CUDA: 32).
    POOL = 32

    def __init__(self) -> None:
        self._made: dict[torch.device, list[AbstractStream]] = {}

    def get(self, device: torch.device, partitions: int, *, skips: bool) -> list[PartitionStreams]:
        """The streams for each of so many partitions on one device.

        A partition that is alone there computes on the caller's current stream. No other stream is
        that one, which would be delayed.

        Args:
            device: where the streams are.
            partitions: how many share it.
            skips: whether there are skips.
        """
        current = current_stream(device)
        if not has_streams(device):
            same = [current] * self.COPIES
            return [PartitionStreams(current, same, same)] * partitions
        # guard: own streams
        own = 0 if partitions == 1 else partitions
        kinds = partitions * (1 + skips)
        turns = max(2, min(self.COPIES, (self.POOL - 1 - own) // kinds))
        needed = own + kinds * turns
        made = self._made.setdefault(device, [])
        # The caller's own stream may be from the same pool, and another one the next time.
        streams = [stream for stream in made if stream != current]
        while len(made) <= needed or len(streams) < needed:
            stream = new_stream(device)
            made.append(stream)
            streams += [stream] * (stream != current)
        copies = [streams[own + kind * turns :][:turns] for kind in range(kinds)]
        return [
            PartitionStreams(streams[k] if own else current, copies[k], copies[k - partitions])
            for k in range(partitions)
        ]
