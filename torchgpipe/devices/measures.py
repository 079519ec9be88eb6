"""The time that a device takes, and the memory that tensors occupy on it."""

from __future__ import annotations

from math import inf
from time import perf_counter

import torch

from torchgpipe.devices.streams import current_stream, has_streams

__all__: list[str] = []


class Stopwatch:
    """Measure how long a device works on what is issued between a start and a stop.

    Events of the device's current stream tell the time, or the clock where there are no streams.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = current_stream(device)

    def start(self) -> None:
        """Start, or start again."""
        if isinstance(self._stream, torch.Stream):
            self._event = torch.Event(self._stream.device, enable_timing=True)
            self._event.record(self._stream)
        else:
            self._time = perf_counter()

    def stop(self) -> float:
        """Wait for all that was issued since the start, and return the seconds since then."""
        if not isinstance(self._stream, torch.Stream):
            return perf_counter() - self._time
        event = torch.Event(self._stream.device, enable_timing=True)
        event.record(self._stream)
        event.synchronize()
        return float(self._event.elapsed_time(event)) / 1000


def memory_allocated(device: torch.device) -> int | None:
    """The bytes that tensors occupy on a device; None for a device that does not count them."""
    if not has_streams(device):
        return None
    return torch.accelerator.memory_allocated(device)


def forget_peak(device: torch.device) -> None:
    """Reset the peak of the bytes that tensors occupy on a device."""
    if has_streams(device):
        torch.accelerator.reset_peak_memory_stats(device)


def peak_memory(device: torch.device) -> int | None:
    """The peak of the bytes that tensors occupied on a device; None if they are not counted."""
    if not has_streams(device):
        return None
    return torch.accelerator.max_memory_allocated(device)


def memory_free(device: torch.device) -> float:
    """The bytes that are free on a device: infinity on the host, and 0 if a device does not say."""
    if not has_streams(device):
        return inf
    # PyTorch 2.9 cannot tell, nor can every backend.
    try:
        return torch.accelerator.get_memory_info(device)[0]
    except (AttributeError, RuntimeError):
        return 0


def memory_total(device: torch.device) -> float:
    """The bytes that a device has: infinity on the host, and if a device does not say."""
    if not has_streams(device):
        return inf
    try:
        return torch.accelerator.get_memory_info(device)[1]
    except (AttributeError, RuntimeError):
        return inf


def model_of(device: torch.device) -> str:
    """The name of a device's model, the same for devices that are alike; its type without one."""
    properties = getattr(torch.get_device_module(device), "get_device_properties", None)
    if properties is None:
        return device.type
    return str(getattr(properties(device), "name", device.type))
