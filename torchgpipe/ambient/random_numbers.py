"""RNG states: each micro-batch carries its own, and recomputation restores them.

Every accelerator has a default generator of its own, and the CPU has one for all threads. Results
must not depend on where a partition sits: a micro-batch must continue its random sequence from one
partition to the next. So it carries an RNG state along, one for each type of device::

                    partition 0      partition 1

    caller ─┬─ 0 ─── state ─────────── state ─────→ caller
            ├─ 1 ─── state ─────────── state
            └─ 2 ─── state ─────────── state

The first micro-batch begins with the caller's RNG state, as if it were the only one. Each other
micro-batch begins with a seed of its own, which is computed from the caller's state.

Backward does not set RNG states: to set one takes the host about 6 µs, more than 1 % of a small
cell, and few functions draw random numbers in backward.

:mod:`torchgpipe.ambient.generators` has the locks, since all threads share a generator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from hashlib import blake2b

import torch
from torch import Tensor

from torchgpipe.ambient.context import Swap
from torchgpipe.ambient.generators import (
    Lock,
    computing,
    content,
    first_run,
    generator_of,
    get_state,
    locks_of,
    set_state,
)
from torchgpipe.devices.streams import CPU

__all__: list[str] = []


class StepNumbers:
    """The RNG states of the micro-batches of a step, within a ``with`` block.

    After the block, the generator of the first device of each type has the state in which the first
    micro-batch has left it. Other generators get back the state from before the block; after an
    exception, all of them do.
    """

    def __init__(self, devices: Sequence[torch.device], m: int) -> None:
        self._m = m
        self._devices = list(dict.fromkeys(map(generator_of, devices)))
        #: For each type of device, the step's first device of that type. Its generator has the
        #: caller's RNG state before the step, and gets the caller's new state after it.
        self._first_devices: dict[str, torch.device] = {}
        for device in self._devices:
            self._first_devices.setdefault(device.type, device)

    @property
    def locks(self) -> list[Lock]:
        """The locks to hold within the block."""
        # guard: locks of a step
        return locks_of(self._devices)

    def __enter__(self) -> None:
        self._before = _get(self._devices)
        # The states ask a _Beginnings. If they asked `self`, they and `self` would refer to each
        # other, and only Python's garbage collector would free them.
        self._begin = _Beginnings(self._first_devices, self._before)
        self._first: list[dict[str, Tensor]] = [
            _States(partial(self._begin.of, i)) for i in range(self._m)
        ]
        #: For each micro-batch, its present RNG states by type of device, each made when asked for.
        self.states: list[dict[str, Tensor]] = [_States(first.__getitem__) for first in self._first]
        #: The micro-batches that drew random numbers here before go_on() replaced their states by
        #: those from another process, so that has_drawn() cannot compare the states.
        self._drew: set[int] = set()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # guard: generators are put back
        for device in self._devices:
            # guard: generators are put back after an exception
            is_first = kind is None and device == self._first_devices[device.type]
            set_state(device, self._last(device) if is_first else self._before[device])

    def of(self, i: int, device: torch.device) -> CellNumbers:
        """Context manager that installs the RNG state of micro-batch ``i`` on a device."""
        return CellNumbers(self.states[i], generator_of(device))

    @property
    def drawn(self) -> bool:
        """Whether a cell has drawn from any of the generators."""
        # A state that `states` lacks was never asked for, so no cell has drawn from its generator.
        return bool(self._drew) or (any(self.states) and any(map(self.has_drawn, range(self._m))))

    def has_drawn(self, i: int) -> bool:
        """Whether a cell of micro-batch ``i`` has drawn from any of the generators here."""
        first = self._first[i]
        return i in self._drew or any(_differ(x, first[kind]) for kind, x in self.states[i].items())

    def go_on(self, i: int, states: dict[str, Tensor]) -> None:
        """Take micro-batch ``i`` over from another process, with its states by type of device."""
        if self.has_drawn(i):
            self._drew.add(i)
        self._first[i], self.states[i] = states, dict(states)

    def all_of(self, i: int) -> dict[str, Tensor]:
        """The present RNG states of micro-batch ``i``, by type of device."""
        return {kind: self.states[i][kind] for kind in self._first_devices}

    def after(self) -> dict[str, Tensor]:
        """RNG states for the next step, by type of device, which no micro-batch has used."""
        return {kind: self._begin.of(self._m, kind) for kind in self._first_devices}

    def set_for_caller(self, states: Mapping[str, Tensor]) -> None:
        """Set the generators that the caller sees, by type of device, after the block."""
        for kind, device in self._first_devices.items():
            set_state(device, states[kind])

    def _last(self, device: torch.device) -> Tensor:
        """The state that the caller continues with."""
        kind, before = device.type, self._before[device]
        if kind in self.states[0] and _differ(self.states[0][kind], before):
            return self.states[0][kind]
        drawn = any(
            kind in state and _differ(first[kind], state[kind])
            for first, state in zip(self._first, self.states)
        )
        # If only later micro-batches have drawn, the caller gets a state that no micro-batch has
        # used. Otherwise the next step would draw the same numbers.
        # guard: seeds of steps
        return self._begin.of(self._m, kind) if drawn else before


class _States(dict[str, Tensor]):
    """The RNG states of a micro-batch by type of device, each made when somebody asks for it.

    Few layers draw on the CPU, and it takes the host 10 µs to make a state.
    """

    def __init__(self, make: Callable[[str], Tensor]) -> None:
        self._make = make

    def __missing__(self, kind: str) -> Tensor:
        state = self[kind] = self._make(kind)
        return state


class _Beginnings:
    """The RNG states that micro-batches begin with."""

    def __init__(
        self, first_devices: Mapping[str, torch.device], callers: Mapping[torch.device, Tensor]
    ) -> None:
        self._first_devices, self._callers = first_devices, callers
        #: For each device, a number made of the caller's RNG state. The seed of micro-batch ``i``,
        #: from 1 on, is this number plus ``i``.
        self._seeds: dict[torch.device, int] = {}

    def of(self, i: int, kind: str) -> Tensor:
        """The state that micro-batch ``i`` begins with on a type of device."""
        device = self._first_devices[kind]
        if i == 0:
            return self._callers[device]
        if device not in self._seeds:
            digest = blake2b(content(self._callers[device]), digest_size=8).digest()
            self._seeds[device] = int.from_bytes(digest, "little")
        # guard: seeds of micro-batches
        seed = (self._seeds[device] + i) % 2**64
        return torch.Generator(device).manual_seed(seed).get_state()


class CellNumbers(Swap):
    """Set the RNG state of a micro-batch within a ``with`` block, and save the new one after it."""

    __slots__ = ("after", "device", "kind", "states")

    def __init__(self, states: dict[str, Tensor], device: torch.device) -> None:
        # Each cell runs this, so Swap is named here and below, which is faster than super().
        Swap.__init__(self, computing, within=True)
        self.states = states
        self.device = device
        self.kind = device.type
        #: The RNG state at the end of the block, if FirstNumbers has read it already, so that
        #: __exit__() need not; None otherwise.
        self.after: Tensor | None = None

    def __enter__(self) -> None:
        Swap.__enter__(self)
        # guard: numbers go on
        # guard: numbers by type of device
        set_state(self.device, self.states[self.kind])

    def __exit__(self, *_: object) -> None:
        after = get_state(self.device) if self.after is None else self.after
        # guard: numbers are taken along
        # guard: numbers by type of device
        self.states[self.kind] = after
        Swap.__exit__(self)

    @property
    def state(self) -> Tensor:
        """The state of the micro-batch."""
        return self.states[self.kind]


class FirstNumbers:
    """The RNG states from before the forward of a cell, for its recomputation.

    They are those of the CPU, and of the device if it has a generator of its own.
    """

    __slots__ = ("after", "before")

    def __init__(self, device: torch.device, cell: CellNumbers | None = None) -> None:
        device = generator_of(device)
        # `cell` has the state already. To read it anew takes the host a microsecond or more.
        self.before = {device: get_state(device) if cell is None else cell.state}
        if device != CPU:
            self.before[CPU] = get_state(CPU)
        self.after: dict[torch.device, Tensor] = {}

    def end_first_run(self, cell: CellNumbers | None = None) -> None:
        """Take note of the states after the first run.

        Recomputation leaves a generator alone that the forward has not drawn from. So accelerators
        that draw from their own generators recompute at the same time.
        """
        states, self.before = self.before, {}
        for device, before in states.items():
            after = get_state(device)
            if _differ(after, before):
                self.before[device], self.after[device] = before, after
        if cell is not None:
            cell.after = self.after.get(cell.device, cell.state)

    @property
    def drawn(self) -> bool:
        """Whether the first run has drawn from any of them."""
        return bool(self.after)

    @property
    def locks(self) -> list[Lock]:
        """The locks to hold while the generators are :meth:`restored`."""
        # guard: locks of a recomputation
        return locks_of([CPU]) if CPU in self.before else []

    def restored(self) -> Swap:
        """Set the generators to the states before the first run within a ``with`` block.

        Raises:
            RuntimeError: the block drew other numbers than the first run.
        """
        return RestoredNumbers(self) if self.before else first_run()


class RestoredNumbers(Swap):
    """The generators as they were before a first run, within a ``with`` block."""

    __slots__ = ("first", "now")

    def __init__(self, first: FirstNumbers) -> None:
        Swap.__init__(self, computing, within=True)
        self.first = first

    def __enter__(self) -> None:
        self.now = _get(self.first.before)
        _set(self.first.before)
        Swap.__enter__(self)

    def __exit__(self, *exception: object) -> None:
        Swap.__exit__(self)
        first = self.first
        again = _get(first.after)
        _set(self.now)
        for device, drawn in again.items() if exception[0] is None else ():
            # If another thread drew during the forward, and the cell has drawn in neither run, the
            # recomputation ends in the state `before`, which is right, too.
            known = (first.before[device], first.after[device])
            if not any(content(drawn) == content(other) for other in known):
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


def _differ(one: Tensor, other: Tensor) -> bool:
    return one is not other and content(one) != content(other)
