"""The default generators of devices, and their states.

A cell may draw from another generator than the CPU's default one:
:mod:`torchgpipe.ambient.random_numbers` looks for that one first.
"""

from __future__ import annotations

import ctypes
import os
import threading
from functools import cache

import torch
from torch import Tensor

from torchgpipe.devices.streams import CPU, STREAMLESS

__all__: list[str] = []


#: Held while the state of a generator is read or set. PyTorch locks the generator, and creates a
#: Python object for its state, which may start a garbage collection. Then another thread may run,
#: and wait for the generator's lock while it holds the GIL: a deadlock.
_lock = threading.Lock()

if hasattr(os, "register_at_fork"):
    # The thread that held the lock does not exist in the child.
    os.register_at_fork(after_in_child=lambda: globals().update(_lock=threading.Lock()))


@cache
def generator_of(device: torch.device) -> torch.device:
    """The device whose default generator a device draws from: itself, or the CPU if it has none."""
    has_own = device.type not in ("cpu", "meta") and hasattr(
        torch.get_device_module(device), "get_rng_state"
    )
    return device if has_own else CPU


def default_state(device: torch.device) -> Tensor:
    """The state of a device's default generator."""
    generator = torch.default_generator if device == CPU else _generator(device)
    if generator is not None:
        # guard: one thread at a generator
        with _lock:
            return generator.get_state()
    # torch.mps, ...
    state: Tensor = torch.get_device_module(device).get_rng_state(*_argument(device))
    return state


def set_default_state(device: torch.device, state: Tensor) -> None:
    """Set the state of a device's default generator."""
    generator = torch.default_generator if device == CPU else _generator(device)
    if generator is not None:
        # guard: one thread at a generator
        with _lock:
            generator.set_state(state)
    else:
        torch.get_device_module(device).set_rng_state(state, *_argument(device))


def _generator(device: torch.device) -> torch.Generator | None:
    """The generator object of an accelerator, if its backend exposes it; its methods are faster."""
    # torch.cuda and torch.xpu have generators once they are initialised.
    generators = getattr(torch.get_device_module(device), "default_generators", ())
    return generators[device.index] if device.index < len(generators) else None


def _argument(device: torch.device) -> tuple[torch.device, ...]:
    # A backend without streams has one device, and its functions take no device argument.
    return () if device.type in STREAMLESS else (device,)


def content(state: Tensor) -> bytes:
    """The bytes of a state, for comparisons."""
    # Comparing tensors takes several times as long.
    return ctypes.string_at(state.data_ptr(), state.nbytes)
