"""Generators: the defaults of devices, and what the operators of a cell draw from on the CPU."""

from __future__ import annotations

import ctypes
import os
import threading
from functools import cache
from typing import TypeAlias

import torch
from torch import Tensor

from torchgpipe._torch import generators
from torchgpipe.devices.streams import CPU, STREAMLESS

__all__: list[str] = []


# The default generators of devices, and their states.
#
# A cell may draw from another generator than the CPU's default one:
# :mod:`torchgpipe.ambient.random_numbers` looks for that one first.


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


# Sources: the generators that operators of a cell draw from on the CPU.
#
# All threads share the CPU's default generator. So cells that several threads compute draw from
# generators of their own (:class:`Own`), and none from the default one. That works for operators,
# but not for layers that set or seed the default generator themselves, which shows only when they
# run. So cells first run one at a time: they draw from the default generator, and its state is
# compared before and after each draw (:class:`Watched`).
#
# Checkpoints of PyTorch within layers set the default generator, too. They save the state of the
# cell's generator, and their recomputation gets a generator of its own.


class Own:
    """A generator of its own, made when the cell first draws.

    Args:
        state: the state that it begins with.
    """

    __slots__ = ("_generator", "_state")

    def __init__(self, state: Tensor) -> None:
        self._state: Tensor | None = state
        self._generator: torch.Generator | None = None

    def get_state(self) -> Tensor:
        """The state."""
        if self._generator is not None:
            return self._generator.get_state()
        assert self._state is not None
        return self._state

    def set_state(self, state: Tensor) -> None:
        """Set the state."""
        self._state, self._generator = state, None

    def begin(self) -> torch.Generator | None:
        """Begin a draw; return the generator to use, or None for the default one."""
        if self._generator is None:
            state = self.get_state()
            self._generator = torch.Generator()
            self._generator.set_state(state)
        first, again = generators.find()
        # guard: recomputations of PyTorch's checkpoints
        generator = self._generator if again is None else generators.generator_again(*again)
        for state in first:
            generators.keep(state, generator)
        return generator

    def end(self) -> None:
        """Take note that the draw has ended."""


class Watched:
    """The default generator, in a cell during which no other thread draws."""

    __slots__ = ("_known", "touched")

    def __init__(self) -> None:
        self._known = b""
        #: Whether layers have set or seeded the generator themselves.
        self.touched = False

    def start(self) -> None:
        """Record the state, which only operators should change from here on."""
        self._known = content(default_state(CPU))

    def look(self) -> None:
        """Check whether the state has changed since it was recorded."""
        # guard: layers that set the generator
        self.touched |= content(default_state(CPU)) != self._known

    def get_state(self) -> Tensor:
        """The state."""
        return default_state(CPU)

    def set_state(self, state: Tensor) -> None:
        """Set the state."""
        set_default_state(CPU, state)
        self._known = content(state)

    def begin(self) -> torch.Generator | None:
        """Begin a draw; return the generator to use, or None for the default one."""
        self.look()
        return None

    def end(self) -> None:
        """Take note that the draw has ended."""
        self.start()


class Elsewhere:
    """The default generator, in a thread of autograd's that runs the backward of a cell."""

    def begin(self) -> torch.Generator | None:
        """Begin a draw; return the generator to use, or None for the default one."""
        _, again = generators.find()
        return None if again is None else generators.generator_again(*again)

    def end(self) -> None:
        """Take note that the draw has ended."""


Source: TypeAlias = Own | Watched
