"""Streams for libraries that know those of CUDA only, on whatever accelerator there is.

It takes the place of a module that torchgpipe 0.0.7 and fairscale's Pipe have, which is where they
name :mod:`torch.cuda`: with it they run on virtual accelerators. The functions bear the names by
which those libraries import them. They are no slower than they need to be, so that a library is not
made to look slow.
"""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import Tensor


class CPUStreamType:
    """The type of the CPU's only stream."""


#: The stream of the CPU, whose work is done in the order of the host.
CPUStream = CPUStreamType()

AbstractStream: TypeAlias = torch.Stream | CPUStreamType


def new_stream(device: torch.device) -> AbstractStream:
    """Another stream of a device."""
    return CPUStream if device.type == "cpu" else torch.Stream(device)


def current_stream(device: torch.device) -> AbstractStream:
    """The stream that this thread issues to."""
    return CPUStream if device.type == "cpu" else torch.accelerator.current_stream(device)


#: A device's default stream is only asked for where it is the current one too.
default_stream = current_stream


class use_stream:
    """Makes a stream and its device the current ones within a ``with`` block."""

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
    """Makes a device the current one within a ``with`` block."""
    return use_stream(current_stream(device))


def get_device(stream: AbstractStream) -> torch.device:
    """The device of a stream."""
    return stream.device if isinstance(stream, torch.Stream) else torch.device("cpu")


def wait_stream(source: AbstractStream, target: AbstractStream) -> None:
    """Lets the first stream wait for what was issued to the second."""
    if isinstance(target, torch.Stream):
        if isinstance(source, torch.Stream):
            source.wait_stream(target)
        else:
            target.synchronize()


def record_stream(tensor: Tensor, stream: AbstractStream) -> None:
    """Keeps a tensor's memory until what was issued to the stream is done."""
    if isinstance(stream, torch.Stream):
        tensor.record_stream(stream)


def is_cuda(stream: AbstractStream | None) -> bool:
    """Whether it is a stream of an accelerator."""
    return isinstance(stream, torch.Stream)


def as_cuda(stream: AbstractStream) -> torch.Stream:
    """The same stream, known not to be the CPU's."""
    assert isinstance(stream, torch.Stream)
    return stream
