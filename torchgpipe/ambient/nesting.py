"""Nested wrappers: which of them holds the locks of the random number generators.

All threads share a device's default generator, so only one step at a time may set its state. The
outermost step holds the lock. In backward, the outermost recomputation holds it, if its cell has
drawn from the generator, or has run a step of another wrapper that sets it. Everything that runs
within them, also on threads of autograd, takes no lock: it would wait for a thread that waits for
it.

::

    thread of the caller         depth   turn
    ────────────────────         ─────   ────
    step of the outer wrapper      0     begins: holds the locks
      cell                         1     │
        step of an inner wrapper   1     │ takes none
          cell                     2     │
    end of the outer step          0     over
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch

from torchgpipe._torch.generators import can_see, seeing
from torchgpipe.ambient.context import registered
from torchgpipe.ambient.sources import Elsewhere, Source
from torchgpipe.values.managers import contextmanager

__all__: list[str] = []

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
    #: Whether random draws of this thread are intercepted.
    sees = False
    #: The generator that the cell draws from on the CPU, if it is not the default one.
    source: Source | None = None

    def __init__(self) -> None:
        #: The number of steps that were run within a cell, by device of the generators they use.
        self.steps: dict[torch.device, int] = {}


nesting = registered(Nesting())


_ELSEWHERE = Elsewhere()


def _source() -> Source | Elsewhere:
    # Draws are intercepted on threads of autograd, too, where no source is set.
    return nesting.source or _ELSEWHERE


def can_see_draws() -> bool:
    """Whether this PyTorch lets random draws of operators be intercepted."""
    return can_see(_source)


@contextmanager
def seeing_draws(sees: bool) -> Iterator[None]:
    """Intercept random draws of this thread within a ``with`` block, and those of its backward."""
    if not sees:
        yield
        return
    outer, nesting.sees = nesting.sees, True
    try:
        with seeing():
            yield
    finally:
        nesting.sees = outer


def is_within_cell() -> bool:
    """Whether this thread computes a cell."""
    return nesting.depth > 0


class Nest(NamedTuple):
    """The nesting of the cells of one step: their depth, their turn and their generator."""

    depth: int
    turn: Turn
    source: Source | None = None


def begin_step(devices: Iterable[torch.device]) -> Nest:
    """Begin a step that sets the RNG states of devices; return the nesting of its cells."""
    if nesting.depth:
        for device in devices:
            nesting.steps[device] = nesting.steps.get(device, 0) + 1
    return Nest(nesting.depth + 1, nesting.turn or Turn(), nesting.source)


def end_step(nest: Nest) -> None:
    """End a step. The locks of an outermost one are about to be released."""
    nest.turn.over = nest.depth == 1


class first_run:
    """Make this thread compute a cell of a step within a ``with`` block."""

    __slots__ = ("nest", "outer")

    def __init__(self, nest: Nest) -> None:
        self.nest = nest

    def __enter__(self) -> None:
        self.outer = nesting.depth, nesting.turn, nesting.source
        nesting.depth, nesting.turn, nesting.source = self.nest

    def __exit__(self, *_: object) -> None:
        nesting.depth, nesting.turn, nesting.source = self.outer


class recomputation:
    """Recompute a cell in this thread within a ``with`` block; if it is outermost, it is a turn."""

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
