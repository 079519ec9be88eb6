"""Devices and their streams, for every accelerator that PyTorch knows.

Only this room names :mod:`torch.accelerator`, :class:`torch.Stream` and :class:`torch.Event`.
Everything else speaks of an :data:`AbstractStream`. On a device that has streams (CUDA and ROCm,
XPU, a PrivateUse1 backend) that is a :class:`torch.Stream`. On the others, where all work that was
issued before is done, it is a :class:`CPUStream`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

import torch
from torch import Tensor

from torchgpipe import _torch

__all__: list[str] = []

#: Types of device that do all work in the order of the host, and so need no streams.
STREAMLESS = ("cpu", "meta", "mps")

CPU = torch.device("cpu")


class CPUStream:
    """The one stream of a device without streams; all operations on it do nothing."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CPUStream) and self.device == other.device

    def __hash__(self) -> int:
        return hash(self.device)

    def __repr__(self) -> str:
        return f"<CPUStream of {self.device}>"


AbstractStream: TypeAlias = torch.Stream | CPUStream
Event: TypeAlias = torch.Event
Device: TypeAlias = torch.device | int | str


def current_device() -> torch.device:
    """The current accelerator of this thread, or the CPU if there is none."""
    kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if kind is None:
        return CPU
    return torch.device(kind.type, torch.accelerator.current_device_index())


def accelerators() -> list[torch.device]:
    """All accelerators of this process, in the order of their indices; ``[]`` without any."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return []
    return [torch.device(accelerator.type, i) for i in range(torch.accelerator.device_count())]


def device_types() -> tuple[str, ...]:
    """The types of device that this process can compute on, the CPU first."""
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
    """Whether the host issues work for the device and goes on before that work is done."""
    return device.type not in STREAMLESS


def new_stream(device: torch.device) -> AbstractStream:
    """A stream from the device's pool, which hands out the same ones again (on CUDA after 32)."""
    if not has_streams(device):
        return CPUStream(device)
    return torch.Stream(device)


def current_stream(device: torch.device) -> AbstractStream:
    """The stream on which this thread issues work for the device."""
    if not has_streams(device):
        return CPUStream(device)
    stream: torch.Stream = _torch.get_stream(canonical_device(device).index)
    return stream


def is_current(stream: AbstractStream) -> bool:
    """Whether this thread issues work for the device of a stream on that stream."""
    # Called for each tensor that layers save: current_stream() would take several times as long.
    return not isinstance(stream, torch.Stream) or stream == _torch.get_stream(stream.device_index)


def get_device(stream: AbstractStream) -> torch.device:
    """The device of a stream."""
    return stream.device


class use_stream:
    """Make a stream and its device the current ones of this thread within a ``with`` block.

    :class:`torch.Stream` is a context manager, too, but stores in the stream what it has to
    restore. With this class several threads may use one stream at a time, and nest it.
    """

    def __init__(self, stream: AbstractStream) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        if isinstance(self.stream, torch.Stream):
            self.device_index = _torch.get_device_index()
            self.previous = _torch.get_stream(self.stream.device_index)
            _torch.set_stream(self.stream)

    def __exit__(self, *_: object) -> None:
        if isinstance(self.stream, torch.Stream):
            _torch.set_stream(self.previous)
            _torch.set_device_index(self.device_index)


def current_streams(devices: Iterable[torch.device]) -> list[torch.Stream]:
    """The current stream of each accelerator, that of the current device last."""
    indices = [device.index for device in devices if device != CPU and has_streams(device)]
    if not indices:
        return []
    return [*map(_torch.get_stream, [*indices, _torch.get_device_index()])]


def set_streams(streams: Iterable[torch.Stream]) -> None:
    """Make each stream the current one of its device, and the device of the last one current."""
    for stream in streams:
        _torch.set_stream(stream)


def make_current(stream: AbstractStream) -> None:
    """Make a stream the current one of its device, and leave the current device as it is."""
    if isinstance(stream, torch.Stream):
        index = _torch.get_device_index()
        _torch.set_stream(stream)
        _torch.set_device_index(index)


def use_device(device: torch.device) -> use_stream:
    """Make a device the current one of this thread within a ``with`` block."""
    return use_stream(current_stream(device))


def wait_stream(source: AbstractStream, target: AbstractStream) -> None:
    """Make ``source`` wait for all work that ``target`` was given so far.

    Where ``source`` is of the CPU, the host itself waits.
    """
    if not isinstance(target, torch.Stream):
        return
    if isinstance(source, torch.Stream):
        source.wait_stream(target)
    else:
        target.synchronize()


def wait_all(sources: Iterable[AbstractStream], target: AbstractStream) -> None:
    """Make streams of an accelerator wait for all work that ``target`` was given, by one event."""
    if isinstance(target, torch.Stream):
        event = target.record_event()
        for source in sources:
            assert isinstance(source, torch.Stream)
            source.wait_event(event)


def record(stream: AbstractStream) -> torch.Event | None:
    """An event after all work that the stream was given so far; None for a streamless device."""
    return stream.record_event() if isinstance(stream, torch.Stream) else None


def wait_for(stream: AbstractStream, event: torch.Event) -> None:
    """Make a stream wait for an event; where it is of the CPU, the host itself waits."""
    if isinstance(stream, torch.Stream):
        stream.wait_event(event)
    else:
        event.synchronize()


def record_stream(tensor: Tensor, stream: AbstractStream) -> None:
    """Keep the tensor's memory, once freed, from being reused before ``stream`` is past this point.

    That is needed wherever a tensor is used on another stream than the one it was allocated on.
    """
    if isinstance(stream, torch.Stream) and tensor.device == stream.device:
        # If a tensor has a conjugate or negative bit, PyTorch would record the stream for a clone,
        # and free the clone twice. So it gets a view of the same memory without the bit.
        if tensor.is_conj():
            tensor = tensor.conj()
        if tensor.is_neg():
            tensor = tensor._neg_view()
        try:
            tensor.record_stream(stream)
        except RuntimeError:
            # A sparse tensor, such as the gradient of an embedding, has its memory in two tensors.
            if tensor.is_sparse:
                record_all((tensor._indices(), tensor._values()), stream)
            # A tensor within torch.vmap wraps another tensor, which has the memory.
            elif _torch.is_wrapped(tensor):
                record_stream(_torch.unwrapped(tensor), stream)
            else:
                raise


def record_all(tensors: Iterable[Tensor | None], stream: AbstractStream) -> None:
    """Do as :func:`record_stream` does, for each tensor that is there."""
    for tensor in tensors if isinstance(stream, torch.Stream) else ():
        if tensor is not None:
            record_stream(tensor, stream)
