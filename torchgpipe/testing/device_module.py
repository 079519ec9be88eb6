"""The module ``torch.virtual``: functions that PyTorch looks for in the module of a device type.

Users have the functions of :mod:`torch.accelerator`. This module repeats only those of them that
PyTorch looks for here.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

__all__: list[str] = []

#: A device, its name, its index, or None for the current device.
Device = torch.device | int | str | None

_ops: Any = torch.ops.virtual_accelerator

#: If this were false, ``torch.utils.checkpoint`` would not restore the device's generator.
_initialized = True

#: The default generator of each device. torch.cuda has them by this name.
default_generators: tuple[torch.Generator, ...] = ()


def is_available() -> bool:
    """Whether there are virtual devices: always, since this module comes with them."""
    return True


def is_initialized() -> bool:
    """Whether the devices are initialised: always, since nothing waits for their first use."""
    return True


def device_count() -> int:
    """The number of virtual devices."""
    count: int = _ops.device_count()
    return count


def current_device() -> int:
    """The index of this thread's current device."""
    return torch.accelerator.current_device_index()


def set_device(device: Device) -> None:
    """Make a device this thread's current one."""
    torch.accelerator.set_device_index(_index(device))


class device:
    """Make a device the current one within a ``with`` block."""

    def __init__(self, device: Device) -> None:
        self.index = _index(device)

    def __enter__(self) -> None:
        self.previous = current_device()
        set_device(self.index)

    def __exit__(self, *_: object) -> None:
        set_device(self.previous)


def synchronize(device: Device = None) -> None:
    """Wait for all work that a device was given."""
    torch.accelerator.synchronize(_index(device))


def current_stream(device: Device = None) -> torch.Stream:
    """This thread's current stream of a device; ``torch.distributed.checkpoint`` asks here."""
    return torch.accelerator.current_stream(_index(device))


def stream(stream: torch.Stream) -> torch.Stream:
    """Make a stream the current one within a ``with`` block, as the stream itself does."""
    return stream


def get_rng_state(device: Device = None) -> Tensor:
    """The state of a device's default generator."""
    return _generator(_index(device)).get_state()


def set_rng_state(new_state: Tensor, device: Device = None) -> None:
    """Set the state of a device's default generator."""
    _generator(_index(device)).set_state(new_state)


def get_rng_state_all() -> list[Tensor]:
    """The states of all devices' default generators."""
    return [get_rng_state(i) for i in range(device_count())]


def set_rng_state_all(new_states: Iterable[Tensor]) -> None:
    """Set the states of all devices' default generators."""
    for i, state in enumerate(new_states):
        set_rng_state(state, i)


def manual_seed(seed: int) -> None:
    """Seed the current device's default generator."""
    _generator(current_device()).manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    """Seed all devices' default generators, which ``torch.manual_seed`` does by this function."""
    for generator in default_generators:
        generator.manual_seed(seed)


def seed() -> int:
    """Seed the current device's default generator with a random number, and return that number."""
    return _generator(current_device()).seed()


def initial_seed() -> int:
    """The seed of the current device's default generator."""
    return _generator(current_device()).initial_seed()


def get_amp_supported_dtype() -> list[torch.dtype]:
    """The dtypes that ``torch.autocast`` may cast to."""
    return [torch.float16, torch.bfloat16]


def _is_in_bad_fork() -> bool:
    return False


def _lazy_init() -> None:
    pass


def _generator(index: int) -> torch.Generator:
    generator: torch.Generator = _ops.generator(index)
    return generator


def _index(device: Device) -> int:
    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index
    return current_device() if index is None else index
