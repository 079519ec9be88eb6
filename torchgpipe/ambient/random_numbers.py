"""Random number generators: their states are carried from device to device, and restored.

Every accelerator has a default generator of its own, and the CPU has one for all threads. Where a
partition sits must not matter: the numbers that a micro-batch draws go on, in the next partition,
where they were left in the one before. So a micro-batch brings the state of its generator along,
one for each type of device::

                    partition 0      partition 1

    caller ─┬─ 0 ─── state ─────────── state ─────→ caller
            ├─ 1 ─── state ─────────── state
            └─ 2 ─── state ─────────── state

The first micro-batch goes on with the caller's numbers, as if there were no other. The others begin
with numbers of their own, by a seed that the caller's state gives.

Whoever exchanges the state of a generator holds its lock: the outermost step; or a recomputation,
if its cell has drawn from the generator, or has run a step of another wrapper that exchanges it.
What is within these, also on threads of autograd, takes no lock until they are over.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cache
from hashlib import blake2b
from types import TracebackType
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor

from torchgpipe.ambient.running import Turn, running
from torchgpipe.devices.streams import STREAMLESS

__all__: list[str] = []

CPU = torch.device("cpu")

Lock: TypeAlias = AbstractContextManager[Any]
Result = TypeVar("Result")

#: A generator is one for all threads: one at a time may turn it back, or exchange its state. The
#: outermost step, or recomputation, holds the locks.
_locks: defaultdict[torch.device, threading.RLock] = defaultdict(threading.RLock)


if hasattr(os, "register_at_fork"):
    # Whoever held them is not there in the child.
    os.register_at_fork(after_in_child=_locks.clear)


def _locks_of(devices: Iterable[torch.device]) -> list[Lock]:
    """The locks of generators, in one order, so that no two wait for each other."""
    # Within a cell, the thread that holds them waits for this one.
    # guard: no locks within a cell
    return [] if running.depth else [_locks[device] for device in sorted(devices, key=str)]


def holding(locks: Sequence[Lock], function: Callable[[], Result]) -> Result:
    """Calls a function while locks are held.

    Each is taken by a ``with`` statement of its own: Ctrl-C can come anywhere in Python, and
    between that and the lock there is none.
    """
    if not locks:
        return function()
    # guard: locks after a failure
    with locks[0]:
        return holding(locks[1:], function)


@cache
def generator_of(device: torch.device) -> torch.device:
    """The device whose default generator is drawn from on a device: the CPU, if it has none."""
    has_own = device.type not in ("cpu", "meta") and hasattr(
        torch.get_device_module(device), "get_rng_state"
    )
    return device if has_own else CPU


def get_state(device: torch.device) -> Tensor:
    """The state of a device's default generator."""
    generator = _generator(device)
    if generator is not None:
        return generator.get_state()
    # torch.mps, ...
    state: Tensor = torch.get_device_module(device).get_rng_state(*_which(device))
    return state


def set_state(device: torch.device, state: Tensor) -> None:
    """Sets the state of a device's default generator."""
    generator = _generator(device)
    if generator is not None:
        generator.set_state(state)
    else:
        torch.get_device_module(device).set_rng_state(state, *_which(device))


def _generator(device: torch.device) -> torch.Generator | None:
    """The generator itself, which takes less time, where there is a way to it."""
    if device == CPU:
        return torch.default_generator
    # torch.cuda and torch.xpu have them, once they have begun.
    generators = getattr(torch.get_device_module(device), "default_generators", ())
    return generators[device.index] if device.index < len(generators) else None


def _which(device: torch.device) -> tuple[torch.device, ...]:
    # Of what has no streams there is but one.
    return () if device.type in STREAMLESS else (device,)


class Draws:
    """The random numbers that the micro-batches of a step draw, within a ``with`` block.

    After it the caller's generators are where the first micro-batch left them: that of the first
    device of each type. Those of the others are left alone; after an exception, all are.

    Args:
        devices: the device of each partition.
        m: the number of micro-batches.
    """

    def __init__(self, devices: Sequence[torch.device], m: int) -> None:
        self._m = m
        self._devices = list(dict.fromkeys(map(generator_of, devices)))
        #: Where the numbers of each type come from.
        self._home: dict[str, torch.device] = {}
        for device in self._devices:
            self._home.setdefault(device.type, device)

    @property
    def locks(self) -> list[Lock]:
        """What to hold meanwhile."""
        # guard: locks of a step
        return _locks_of(self._devices)

    def __enter__(self) -> None:
        self._depth, self._turn = running.depth, running.turn or Turn()
        if self._depth:
            for device in self._devices:
                running.steps[device] = running.steps.get(device, 0) + 1
        self._found = _get(self._devices)
        self._seeds = {
            device: int.from_bytes(blake2b(_bytes(state), digest_size=8).digest(), "little")
            for device, state in self._found.items()
            if self._m > 1
        }
        self._seeded = {device: torch.Generator(device) for device in self._seeds}
        self._first = [
            {kind: self._state(device, i) for kind, device in self._home.items()}
            for i in range(self._m)
        ]
        #: Of each micro-batch, by type of device.
        self.states = [dict(states) for states in self._first]

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # guard: generators are put back
        for device in self._devices:
            # guard: generators are put back after an exception
            is_home = error is None and device == self._home[device.type]
            set_state(device, self._last(device) if is_home else self._found[device])
        self._turn.over = not self._depth

    def of(self, i: int, device: torch.device) -> Carried:
        """Has what micro-batch ``i`` draws on a device go on where it was left."""
        return Carried(self.states[i], generator_of(device), self._depth + 1, self._turn)

    def _state(self, device: torch.device, i: int) -> Tensor:
        """With what micro-batch ``i`` begins."""
        if i == 0:
            return self._found[device]
        # guard: seeds of micro-batches
        seed = (self._seeds[device] + i) % 2**64
        return self._seeded[device].manual_seed(seed).get_state()

    def _last(self, device: torch.device) -> Tensor:
        """With what the caller goes on."""
        kind, found = device.type, self._found[device]
        if _bytes(self.states[0][kind]) != _bytes(found):
            return self.states[0][kind]
        drawn = any(
            _bytes(first[kind]) != _bytes(state[kind])
            for first, state in zip(self._first, self.states)
        )
        # The next step must not draw the same ones.
        # guard: seeds of steps
        return self._state(device, self._m) if drawn else found


class Carried:
    """Exchanges the state of a generator for that of a micro-batch within a ``with`` block.

    Args:
        states: those of the micro-batch, by type of device.
        device: whose generator it is.
        depth: within how many cells this is, itself included.
        turn: what is around all of these.
    """

    __slots__ = ("depth", "device", "kind", "outer", "states", "turn")

    def __init__(
        self, states: dict[str, Tensor], device: torch.device, depth: int, turn: Turn
    ) -> None:
        self.states = states
        self.depth, self.turn = depth, turn
        self.device = device
        self.kind = device.type

    def __enter__(self) -> None:
        self.outer = running.depth, running.turn
        running.depth, running.turn = self.depth, self.turn
        # guard: numbers go on
        # guard: numbers by type of device
        set_state(self.device, self.states[self.kind])

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # guard: numbers are taken along
        # guard: numbers by type of device
        self.states[self.kind] = get_state(self.device)
        running.depth, running.turn = self.outer


class RNGState:
    """The states of the generators that a computation may draw from, before it.

    These are that of the CPU, and that of the device where it is another.

    Args:
        device: where it computes.
    """

    __slots__ = ("_steps", "after", "around", "before", "exchanged")

    def __init__(self, device: torch.device) -> None:
        self.before = _get(dict.fromkeys([CPU, generator_of(device)]))
        #: What may hold the locks until the computation was repeated.
        self.around = running.turn if running.depth > 1 else None
        self.after: dict[torch.device, Tensor] = {}
        #: The devices that steps within the computation exchanged the numbers of.
        self.exchanged: Sequence[torch.device] = ()
        self._steps = dict(running.steps)

    def settle(self) -> None:
        """Takes note of the states after the computation.

        Generators that it has not drawn from will be left alone. So accelerators that draw from
        their own recompute side by side.
        """
        after = _get(self.before)
        self.after = {
            device: state
            for device, state in after.items()
            if _bytes(state) != _bytes(self.before[device])
        }
        self.before = {device: self.before[device] for device in self.after}
        if running.steps:
            steps = running.steps.items()
            self.exchanged = [device for device, k in steps if k != self._steps.get(device)]

    @property
    def drawn(self) -> bool:
        """Whether the computation has drawn from any of them."""
        return bool(self.after)

    @property
    def locks(self) -> list[Lock]:
        """What to hold while the generators are :meth:`restored`."""
        if not (self.before or self.exchanged) or (self.around and not self.around.over):
            return []
        # guard: locks of a recomputation around a step
        return _locks_of({*self.exchanged, *self.before.keys() & {CPU}})

    def restored(self) -> Restored:
        """Has the generators as before the computation within a ``with`` block, then as now.

        Raises:
            RuntimeError: the block drew other numbers than the computation.
        """
        return Restored(self)


class Restored:
    """Generators as they were, within a ``with`` block."""

    def __init__(self, state: RNGState) -> None:
        self.state = state

    def __enter__(self) -> None:
        self.now = _get(self.state.before)
        _set(self.state.before)
        self.outer = running.turn
        running.turn = self.outer or Turn()
        running.depth += 1

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        state = self.state
        running.depth -= 1
        if self.outer is None and running.turn is not None:
            running.turn.over = True
        running.turn = self.outer
        again = _get(state.after)
        _set(self.now)
        for device, drawn in again.items() if kind is None else ():
            # Where nothing was drawn, it was another thread that drew before.
            known = (state.before[device], state.after[device])
            if not any(_bytes(drawn) == _bytes(other) for other in known):
                raise RuntimeError(
                    "a recomputation must draw the same random numbers as the forward (generator: "
                    f"{device}); while layers draw from it, no other thread may: let layers on an "
                    "accelerator draw from the accelerator's generator, or use checkpoint='never'"
                )


def _get(devices: Iterable[torch.device]) -> dict[torch.device, Tensor]:
    return {device: get_state(device) for device in devices}


def _set(states: Mapping[torch.device, Tensor]) -> None:
    for device, state in states.items():
        set_state(device, state)


def _bytes(state: Tensor) -> bytes:
    # Comparing tensors takes several times as long.
    return ctypes.string_at(state.data_ptr(), state.nbytes)
