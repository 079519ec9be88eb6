"""Streams of any accelerator, for torchgpipe 0.0.7, which knows CUDA streams only.

torchgpipe 0.0.7 names :mod:`torch.cuda` in one module. This module replaces that one, with
functions of the same names, so that 0.0.7 runs on virtual accelerators. The functions are as fast
as they can be, so that 0.0.7 looks no slower than it is.
"""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import Tensor


class CPUStreamType:
    """Type of the CPU's only stream."""


#: Stream of the CPU, which works in the order of the host.
CPUStream = CPUStreamType()

AbstractStream: TypeAlias = torch.Stream | CPUStreamType


def new_stream(device: torch.device) -> AbstractStream:
    """Make a stream of a device."""
    return CPUStream if device.type == "cpu" else torch.Stream(device)


def current_stream(device: torch.device) -> AbstractStream:
    """Stream that this thread issues work to."""
    return CPUStream if device.type == "cpu" else torch.accelerator.current_stream(device)


#: It asks for the default stream only where it is the current stream too.
default_stream = current_stream


class use_stream:
    """Make a stream and its device current within a ``with`` block."""

    def __init__(self, stream: AbstractStream | None) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        if isinstance(self.stream, torch.Stream):
            self.index = torch.accelerator.current_device_index()
            self.previous = torch.accelerator.current_stream(self.stream.device)
            torch.accelerator.set_stream(self.stream)

    def __exit__(self, *error: object) -> None:
        if isinstance(self.stream, torch.Stream):
            torch.accelerator.set_stream(self.previous)
            torch.accelerator.set_device_index(self.index)


def use_device(device: torch.device) -> use_stream:
    """Make a device current within a ``with`` block."""
    return use_stream(current_stream(device))


def get_device(stream: AbstractStream) -> torch.device:
    """Device of a stream."""
    return stream.device if isinstance(stream, torch.Stream) else torch.device("cpu")


def wait_stream(source: AbstractStream, target: AbstractStream) -> None:
    """Make the first stream wait for the work that was issued to the second."""
    if isinstance(target, torch.Stream):
        if isinstance(source, torch.Stream):
            source.wait_stream(target)
        else:
            target.synchronize()


def record_stream(tensor: Tensor, stream: AbstractStream) -> None:
    """Keep a tensor's memory until the work that was issued to the stream is done."""
    if isinstance(stream, torch.Stream):
        tensor.record_stream(stream)


def is_cuda(stream: AbstractStream | None) -> bool:
    """Tell whether a stream is an accelerator's."""
    return isinstance(stream, torch.Stream)


def as_cuda(stream: AbstractStream) -> torch.Stream:
    """Narrow the type of a stream that is not the CPU's."""
    assert isinstance(stream, torch.Stream)
    return stream
