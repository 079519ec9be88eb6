"""The default generators of devices, and their locks."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from functools import cache
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor

from torchgpipe.ambient.context import Swap, registered
from torchgpipe.devices.streams import CPU, STREAMLESS

__all__: list[str] = []


#: Held while the state of a generator is read or set. PyTorch locks the generator, and creates a
#: Python object for its state, which may start a garbage collection. Then another thread may run,
#: and wait for the generator's lock while it holds the GIL: a deadlock.
_lock = threading.Lock()

if hasattr(os, "register_at_fork"):
    # The thread that held the lock does not exist in the child, so nobody would release it.
    os.register_at_fork(after_in_child=lambda: globals().update(_lock=threading.Lock()))


@cache
def generator_of(device: torch.device) -> torch.device:
    """The device whose default generator a device draws from: itself, or the CPU if it has none."""
    has_own = device.type not in ("cpu", "meta") and hasattr(
        torch.get_device_module(device), "get_rng_state"
    )
    return device if has_own else CPU


def get_state(device: torch.device) -> Tensor:
    """The state of a device's default generator."""
    # Each cell calls this, so for speed the CPU's generator is found without _generator().
    generator = torch.default_generator if device == CPU else _generator(device)
    if generator is not None:
        # guard: one thread at a generator
        with _lock:
            return generator.get_state()
    # Such backends as torch.mps have no generator object.
    state: Tensor = torch.get_device_module(device).get_rng_state(*_argument(device))
    return state


def set_state(device: torch.device, state: Tensor) -> None:
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
    # Before torch.cuda and torch.xpu are initialised, their list of generators is empty.
    generators = getattr(torch.get_device_module(device), "default_generators", ())
    return generators[device.index] if device.index < len(generators) else None


def _argument(device: torch.device) -> tuple[torch.device, ...]:
    # A backend without streams has one device, and its functions take no device argument.
    return () if device.type in STREAMLESS else (device,)


def content(state: Tensor) -> bytes:
    """The bytes of a state, for comparisons."""
    # To compare tensors takes several times as long as to compare bytes.
    return ctypes.string_at(state.data_ptr(), state.nbytes)


# The locks of generators.
#
# All threads share a device's default generator, so only one step at a time may set its state: a
# step holds the locks of its generators, and so does a recomputation in backward whose cell has
# drawn. A worker that computes a cell takes none: the thread of the step holds them, and waits for
# the worker.


Lock: TypeAlias = AbstractContextManager[Any]
Result = TypeVar("Result")


class Computing(threading.local):
    """The cell that a thread computes, in forward or in recomputation."""

    #: Whether the thread computes a cell, and so takes no locks of generators: its step has them.
    within = False
    #: The index of the cell's micro-batch, by which OncePerMiniBatch sorts what layers give. Only
    #: schedules set it: without a schedule, the values come in the order of the micro-batches.
    number = 0


computing = registered(Computing())


def is_within_cell() -> bool:
    """Whether this thread computes a cell."""
    return computing.within


def first_run() -> Swap:
    """Context manager that makes this thread compute a cell of a step."""
    return Swap(computing, within=True)


#: For each device, the lock of its default generator, which steps and recomputations hold.
_locks: dict[torch.device, threading.RLock] = {}


def _begin_child() -> None:
    # Threads that held locks, or computed cells, do not exist in the child: reset both.
    _locks.clear()
    computing.within = False


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_child)


def locks_of(devices: Iterable[torch.device]) -> list[Lock]:
    """The locks of generators, in one order, so that no two threads wait for each other."""
    # To take locks within a cell is a deadlock: the thread that holds them waits for the cell.
    # guard: no locks within a cell
    if computing.within:
        return []
    # setdefault() is one atomic call, also without the GIL: two threads must get the same lock.
    return [_locks.setdefault(x, threading.RLock()) for x in sorted(devices, key=str)]


def holding(locks: Sequence[Lock], function: Callable[[], Result]) -> Result:
    """Call a function while locks are held.

    Each lock is taken by a ``with`` statement of its own: Ctrl-C can come anywhere in Python, and
    between such a statement and its lock there is no Python.
    """
    if not locks:
        return function()
    # guard: locks after a failure
    with locks[0]:
        return holding(locks[1:], function)
