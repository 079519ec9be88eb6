"""The default generators of devices, and which of nested wrappers holds their locks."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from functools import cache
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor

from torchgpipe.ambient.context import registered
from torchgpipe.devices.streams import CPU, STREAMLESS

__all__: list[str] = []


# The default generators of devices, and their states.


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


def get_state(device: torch.device) -> Tensor:
    """The state of a device's default generator."""
    # Cells ask often, and a call takes time in each of them.
    generator = torch.default_generator if device == CPU else _generator(device)
    if generator is not None:
        # guard: one thread at a generator
        with _lock:
            return generator.get_state()
    # torch.mps, ...
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


# Nested wrappers: which of them holds the locks of the random number generators.
#
# All threads share a device's default generator, so only one step at a time may set its state. The
# outermost step holds the lock. In backward, the outermost recomputation holds it, if its cell has
# drawn from the generator, or has run a step of another wrapper that sets it. Everything that runs
# within them, also on threads of autograd, takes no lock: it would wait for a thread that waits for
# it.
#
# ::
#
#     thread of the caller         depth   turn
#     ────────────────────         ─────   ────
#     step of the outer wrapper      0     begins: holds the locks
#       cell                         1     │
#         step of an inner wrapper   1     │ takes none
#           cell                     2     │
#     end of the outer step          0     over


Lock: TypeAlias = AbstractContextManager[Any]
Result = TypeVar("Result")


class Turn:
    """An outermost step or recomputation, which holds the locks of the generators that it uses."""

    over = False


class Nesting(threading.local):
    """The level of a thread in nested wrappers."""

    #: The number of cells that this thread computes, one within the other.
    depth = 0
    #: The outermost step, or recomputation, that this thread computes for.
    turn: Turn | None = None
    #: The micro-batch of a schedule, which may have any order.
    number = 0

    def __init__(self) -> None:
        #: The number of steps that were run within a cell, by device of the generators they use.
        self.steps: dict[torch.device, int] = {}


nesting = registered(Nesting())


def is_within_cell() -> bool:
    """Whether this thread computes a cell."""
    return nesting.depth > 0


class Nest(NamedTuple):
    """The nesting of the cells of one step: their depth, and their turn."""

    depth: int
    turn: Turn


def begin_step(devices: Iterable[torch.device]) -> Nest:
    """Begin a step that sets the RNG states of devices; return the nesting of its cells."""
    if nesting.depth:
        for device in devices:
            nesting.steps[device] = nesting.steps.get(device, 0) + 1
    return Nest(nesting.depth + 1, nesting.turn or Turn())


def end_step(nest: Nest) -> None:
    """End a step. The locks of an outermost one are about to be released."""
    nest.turn.over = nest.depth == 1


class first_run:
    """Make this thread compute a cell of a step within a ``with`` block."""

    __slots__ = ("nest", "outer")

    def __init__(self, nest: Nest) -> None:
        self.nest = nest

    def __enter__(self) -> None:
        self.outer = nesting.depth, nesting.turn
        nesting.depth, nesting.turn = self.nest

    def __exit__(self, *_: object) -> None:
        nesting.depth, nesting.turn = self.outer


class recomputation:
    """Recompute a cell in this thread within a ``with`` block; within no other, begin a turn."""

    __slots__ = ("outer",)

    def __enter__(self) -> None:
        self.outer = nesting.turn
        nesting.turn = self.outer or Turn()
        nesting.depth += 1

    def __exit__(self, *_: object) -> None:
        nesting.depth -= 1
        if self.outer is None and nesting.turn is not None:
            nesting.turn.over = True
        nesting.turn = self.outer


class Around:
    """The turn around the first run of a cell, and the steps that ran within that run."""

    __slots__ = ("_steps", "exchanged", "turn")

    def __init__(self) -> None:
        #: The turn, if the cell is within another cell. It may hold the locks in the recomputation.
        self.turn = nesting.turn if nesting.depth > 1 else None
        #: The devices whose RNG states were set by steps within the first run.
        self.exchanged: Sequence[torch.device] = ()
        self._steps = dict(nesting.steps)

    def settle(self) -> None:
        """Take note of the steps, at the end of the first run."""
        if nesting.steps:
            steps = nesting.steps.items()
            self.exchanged = [device for device, k in steps if k != self._steps.get(device)]

    def locks(self, drawn: Iterable[torch.device]) -> list[Lock]:
        """The locks to hold in the recomputation.

        Args:
            drawn: the devices whose generator the cell itself has drawn from.
        """
        # guard: locks of a recomputation around a step
        devices = {*self.exchanged, *drawn}
        return locks_of(devices) if devices and (not self.turn or self.turn.over) else []


#: A lock for each generator. Only an outermost step, or recomputation, holds them.
_locks: dict[torch.device, threading.RLock] = {}


if hasattr(os, "register_at_fork"):
    # The thread that held a lock does not exist in the child.
    os.register_at_fork(after_in_child=_locks.clear)


def locks_of(devices: Iterable[torch.device]) -> list[Lock]:
    """The locks of generators, in one order, so that no two threads wait for each other."""
    # A thread that holds the locks waits for the cell that this thread computes.
    # guard: no locks within a cell
    if nesting.depth:
        return []
    # In one call, also without the interpreter's lock: two threads must get the same one.
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
