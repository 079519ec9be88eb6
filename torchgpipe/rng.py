"""Random number generators: their states are kept, and restored to repeat a computation."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from torchgpipe.stream import use_device

__all__: list[str] = []

#: The CPU's default generator is one for all threads: one of them at a time turns it back.
_cpu_generator = threading.Lock()


class RNGState:
    """The states of the default generators of the CPU and of a device, as they are now.

    Args:
        device: the device where random numbers are drawn.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.cpu: Tensor | None = torch.get_rng_state()
        self.accelerator: Tensor | None = None
        if device.type not in ("cpu", "meta"):
            with use_device(device):
                self.accelerator = self._module.get_rng_state()

    def forget_unused(self) -> None:
        """Lets go of the CPU's state if no number was drawn from it since it was taken.

        Then restoring leaves the CPU's generator alone, and accelerators that draw from their
        own recompute side by side.
        """
        if self.cpu is not None and torch.equal(self.cpu, torch.get_rng_state()):
            self.cpu = None

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Has the generators in these states within a ``with`` block, and then as before."""
        with nullcontext() if self.cpu is None else _cpu_generator:
            before = RNGState(self.device)
            if self.cpu is None:
                before.cpu = None
            self._set()
            try:
                yield
            finally:
                before._set()

    def _set(self) -> None:
        if self.cpu is not None:
            torch.set_rng_state(self.cpu)
        if self.accelerator is not None:
            with use_device(self.device):
                self._module.set_rng_state(self.accelerator)

    @property
    def _module(self) -> Any:
        # torch.cuda, torch.xpu, ...
        return torch.get_device_module(self.device)
