"""What is ``torch.virtual``: the functions that PyTorch looks for in the module of a device type.

Of what :mod:`torch.accelerator` has, only that is repeated here which PyTorch looks for here.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

__all__: list[str] = []

#: What a device is given as: by its name, its index, or None for the current one.
Device = torch.device | int | str | None

_ops: Any = torch.ops.virtual_accelerator

#: Without it, ``torch.utils.checkpoint`` passes the device's generator by.
_initialized = True

#: That of each device, as torch.cuda has them.
default_generators: tuple[torch.Generator, ...] = ()


def is_available() -> bool:
    """Yes."""
    return True


def is_initialized() -> bool:
    """Yes: there is nothing that would be initialised when it is first used."""
    return True


def device_count() -> int:
    """How many devices there are."""
    count: int = _ops.device_count()
    return count


def current_device() -> int:
    """The index of this thread's current device."""
    return torch.accelerator.current_device_index()


def set_device(device: Device) -> None:
    """Makes a device this thread's current one."""
    torch.accelerator.set_device_index(_index(device))


class device:
    """Makes a device the current one within a ``with`` block."""

    def __init__(self, device: Device) -> None:
        self.index = _index(device)

    def __enter__(self) -> None:
        self.previous = current_device()
        set_device(self.index)

    def __exit__(self, *_: object) -> None:
        set_device(self.previous)


def synchronize(device: Device = None) -> None:
    """Waits for all that a device was given."""
    torch.accelerator.synchronize(_index(device))


def current_stream(device: Device = None) -> torch.Stream:
    """This thread's current stream of a device; ``torch.distributed.checkpoint`` asks here."""
    return torch.accelerator.current_stream(_index(device))


def stream(stream: torch.Stream) -> torch.Stream:
    """Makes a stream the current one within a ``with`` block, as the stream itself does."""
    return stream


def get_rng_state(device: Device = None) -> Tensor:
    """The state of a device's default generator."""
    return _generator(_index(device)).get_state()


def set_rng_state(new_state: Tensor, device: Device = None) -> None:
    """Sets the state of a device's default generator."""
    _generator(_index(device)).set_state(new_state)


def get_rng_state_all() -> list[Tensor]:
    """The states of all devices' default generators."""
    return [get_rng_state(i) for i in range(device_count())]


def set_rng_state_all(new_states: Iterable[Tensor]) -> None:
    """Sets the states of all devices' default generators."""
    for i, state in enumerate(new_states):
        set_rng_state(state, i)


def manual_seed(seed: int) -> None:
    """Seeds the current device's default generator."""
    _generator(current_device()).manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    """Seeds all devices' default generators; ``torch.manual_seed`` does it, too."""
    for generator in default_generators:
        generator.manual_seed(seed)


def seed() -> int:
    """Seeds the current device's default generator with a random number, which it returns."""
    return _generator(current_device()).seed()


def initial_seed() -> int:
    """What the current device's default generator was seeded with."""
    return _generator(current_device()).initial_seed()


def get_amp_supported_dtype() -> list[torch.dtype]:
    """What ``torch.autocast`` may cast to."""
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
