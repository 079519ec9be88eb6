"""Random number generators: their states are kept, and restored to repeat a computation."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from torchgpipe.stream import use_device

__all__: list[str] = []

#: The CPU's default generator is one for all threads: one of them at a time turns it back.
_cpu_generator = threading.RLock()

#: The default generators: that of the CPU, and that of the device where it is another.
CPU, DEVICE = "cpu", "device"


class RNGState:
    """The states of the default generators of the CPU and of a device, before a computation.

    Args:
        device: the device where random numbers are drawn.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.before = self._get([CPU] if device.type in ("cpu", "meta") else [CPU, DEVICE])
        self.after: dict[str, Tensor] = {}

    def settle(self) -> None:
        """Takes note of the states after the computation.

        Generators that it has not drawn from will be left alone. So accelerators that draw from
        their own recompute side by side.
        """
        after = self._get(self.before)
        self.after = {
            name: state
            for name, state in after.items()
            if not torch.equal(state, self.before[name])
        }
        self.before = {name: self.before[name] for name in self.after}

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Has the generators as before the computation within a ``with`` block, then as now.

        Raises:
            RuntimeError: the block drew other numbers than the computation.
        """
        with _cpu_generator if CPU in self.before else nullcontext():
            now = self._get(self.before)
            self._set(self.before)
            try:
                yield
                again = self._get(self.after)
            finally:
                self._set(now)
        for name, state in again.items():
            # Where nothing was drawn, it was another thread that drew before.
            if not any(torch.equal(state, other[name]) for other in (self.before, self.after)):
                raise RuntimeError(
                    "a recomputation must draw the same random numbers as the forward (generator: "
                    f"{self.device if name == DEVICE else CPU}); while layers draw from it, no "
                    "other thread may: let layers on an accelerator draw from the accelerator's "
                    "generator, or use checkpoint='never'"
                )

    def _get(self, names: Iterable[str]) -> dict[str, Tensor]:
        return {name: self._call(name, "get_rng_state") for name in names}

    def _set(self, states: dict[str, Tensor]) -> None:
        for name, state in states.items():
            self._call(name, "set_rng_state", state)

    def _call(self, name: str, function: str, *arguments: Tensor) -> Any:
        if name == CPU:
            return getattr(torch, function)(*arguments)
        with use_device(self.device):
            # torch.cuda, torch.xpu, ...
            return getattr(torch.get_device_module(self.device), function)(*arguments)
