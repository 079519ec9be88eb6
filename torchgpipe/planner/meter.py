"""A meter: the most memory that is taken on a device at a time."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from torchgpipe.balance.storages import LiveStorages
from torchgpipe.devices.measures import forget_peak, memory_allocated, peak_memory

__all__: list[str] = []


class Meter:
    """The memory that is taken on a device within a ``with`` block, above that before.

    Args:
        device: the device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        before = memory_allocated(device)
        self._storages = LiveStorages() if before is None else None
        self._before = before or 0
        self._start = 0

    def __enter__(self) -> Meter:
        if self._storages is not None:
            self._storages.__enter__()
        forget_peak(self._device)
        return self

    def __exit__(self, *exception: Any) -> None:
        if self._storages is not None:
            self._storages.__exit__(*exception)

    @property
    def now(self) -> int:
        """The bytes that are taken now."""
        if self._storages is not None:
            return sum(self._storages.sizes())
        return max(0, (memory_allocated(self._device) or 0) - self._before)

    def restart(self) -> int:
        """Return the most bytes that were taken since the last restart, above those at that time.

        From here on :attr:`highest` counts anew.
        """
        found = self.highest - self._start
        self._start = self.now
        if self._storages is not None:
            self._storages.highest = self._start
        forget_peak(self._device)
        return found

    @property
    def highest(self) -> int:
        """The most bytes that were taken at a time."""
        if self._storages is not None:
            return self._storages.highest
        return max(0, (peak_memory(self._device) or 0) - self._before)


def storages(values: Iterable[Tensor]) -> dict[int, int]:
    """The addresses of the memory of tensors, with its bytes."""
    found = [x.untyped_storage() for x in values if x.layout == torch.strided and x.numel()]
    return {x.data_ptr(): x.nbytes() for x in found}
