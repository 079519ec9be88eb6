"""Tensors that a mapped model is called with, or returns: their devices, and their versions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchgpipe.devices.streams import has_streams

__all__: list[str] = []


class Near:
    """Copy tensors that the caller has on the CPU to a device, each once.

    Later, each such copy would make the host wait for all work that the device has by then.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._moved: dict[int, tuple[Tensor, Tensor]] = {}

    def all_of(self, *tensors: Tensor) -> list[Tensor]:
        """The tensors, on the device if they are on the CPU, and the device is an accelerator."""
        if not has_streams(self._device):
            return [*tensors]
        for x in tensors:
            if x.device.type == "cpu" and id(x) not in self._moved:
                self._moved[id(x)] = x, x.to(self._device)
        return [self._moved[id(x)][1] if id(x) in self._moved else x for x in tensors]


def own_versions(whole: set[int], *tensors: Tensor) -> list[Tensor]:
    """Give tensors version counters of their own, except those that every micro-batch gets."""
    return [x if x.requires_grad or id(x) in whole else x.data for x in tensors]


def on_device(device: torch.device | None, value: Any) -> Any:
    """Move a tensor to a device, unless it is still to be computed; keep other values."""
    return value.to(device) if isinstance(value, Tensor) and not value.is_meta else value
