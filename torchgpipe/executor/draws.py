"""Random numbers of a step whose cells several threads compute.

A device's generator is one for all threads. So while layers draw from it, one cell of the device at
a time may exchange its state. No backward may run meanwhile: checkpoints of PyTorch within layers
exchange it there. Most models draw none, or have one worker for each device, and their cells must
not wait for each other. Whether layers draw is only known when they have run. So the first step is
computed with cells one at a time. If it has drawn nothing, later steps leave the generator alone,
until layers change between training and evaluation or in an attribute, or a step has drawn after
all. In such a step cells draw side by side: their numbers are not those of the seed. They keep what
they have saved then, since no recomputation could draw the same.

A stage on an accelerator may draw from the CPU's generator, too. Where other stages are on the CPU,
their cells exchange the state of that generator. So the first step is computed one cell at a time
there as well, and tells which stages on accelerators draw from it. The others never look at it in
later steps: what they would find there is the work of another thread.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, TypeAlias

from torch import nn

from torchgpipe.ambient.nesting import first_run
from torchgpipe.ambient.random_numbers import (
    CellNumbers,
    apart,
    content,
    generator_of,
    side_by_side,
)
from torchgpipe.devices.streams import CPU
from torchgpipe.engine.step import Step
from torchgpipe.executor.plan import Plan
from torchgpipe.values.blocks import contextmanager

__all__: list[str] = []


#: Whether a layer trains, and the plain values among its attributes.
Flags: TypeAlias = tuple[Any, ...]

PLAIN = {bool, int, float, str, type(None)}


def flags_of(layers: Iterable[nn.Module]) -> list[Flags]:
    """Find what decides whether layers draw: in which mode they are, and their attributes.

    All plain values count, since nobody knows the names of probabilities, switches and counters.
    Layers of PyTorch's that draw for some data alone have flags that are equal to no others.
    """
    return [
        (
            *[value for value in x.__dict__.values() if type(value) in PLAIN],
            *([object()] if type(x) is nn.RReLU and x.training else []),
        )
        for some in layers
        for x in some.modules()
    ]


class Draws:
    """The knowledge of whether layers draw random numbers."""

    def __init__(self) -> None:
        #: The flags of all layers when a step has drawn no numbers.
        self._quiet: list[Flags] | None = None
        #: The flags of all layers in the step before.
        self._known: list[Flags] | None = None
        #: The stages on accelerators that have drawn from the CPU's generator then.
        self._strays: set[int] = set()
        self._lock = threading.RLock()

    @contextmanager
    def step(self, step: Step, plan: Plan, quiet: bool) -> Iterator[None]:
        """Prepare for a step, and learn from it, in a ``with`` block around it.

        Args:
            step: the step.
            plan: its plan.
            quiet: whether no layer is expected to draw, as all processes have agreed.
        """
        self._step = step
        counts = Counter(map(generator_of, plan.devices))
        #: The generators of several workers.
        self._shared = {generator for generator, count in counts.items() if count > 1}
        self._several = frozenset(self._shared)
        others: set[int] = set()
        if CPU in counts and len(counts) > 1:
            self._shared.add(CPU)
            own = map(generator_of, step.stages.devices)
            others = {j for j, generator in enumerate(own) if generator != CPU}
        flags = flags_of(step.stages.partitions) if self._shared else []
        #: Whether the last step drew nothing, and no layer has changed what may make it draw. Then
        #: cells leave the generator alone, and may run at the same time.
        # guard: quiet steps
        self._free = quiet or (bool(self._shared) and flags == self._quiet)
        #: The stages on accelerators that leave the CPU's generator to others.
        self._apart = others - self._strays if flags == self._known else set()
        #: The other stages on accelerators, and those among them that draw from the CPU's.
        self._beside, self._found = others - self._apart, set[int]()
        if quiet:
            # Cells leave all generators alone, not only those that several workers share.
            self._shared = {*counts}
        try:
            yield
            for generator in self._shared if self._free else ():
                step.numbers.look(generator)
            self._quiet = None if step.numbers.drawn else flags
            if not self._free:
                self._known, self._strays = flags, self._found
        finally:
            del self._step

    def of(self, i: int, j: int) -> AbstractContextManager[Any]:
        """Context manager for the first run of a cell."""
        shared, device = self._is_shared(j), self._step.stages.devices[j]
        if shared and self._free:
            # guard: numbers that nobody expected
            kind = side_by_side if generator_of(device) in self._several else first_run
            return kind(self._step.numbers.nest)
        numbers = self._step.numbers.of(i, device)
        if j in self._beside:
            inner = _Both(numbers, self._step.numbers.of(i, CPU), partial(self._found.add, j))
            # guard: turns beside the CPU
            return _Turn(self._lock, inner)
        if j in self._apart:
            # guard: the generator of others
            return apart(numbers)
        # guard: turns of forwards
        return _Turn(self._lock, numbers) if shared else numbers

    def again(self, j: int) -> AbstractContextManager[Any]:
        """Context manager for the second run of a cell."""
        run = first_run(self._step.numbers.nest)
        return _Turn(self._lock, run) if self._is_shared(j) and not self._free else run

    def backward(self, j: int) -> AbstractContextManager[Any]:
        """Context manager for the backward of a cell, in which PyTorch's checkpoints may run."""
        # These set the generator to what it was in their forward, for a time.
        alone = self._free or not self._is_shared(j)
        # guard: turns of backwards
        return nullcontext() if alone else _Turn(self._lock, nullcontext())

    def _is_shared(self, j: int) -> bool:
        return j in self._beside or generator_of(self._step.stages.devices[j]) in self._shared


class _Both:
    """The random numbers of a cell on an accelerator: those of the device, and the CPU's.

    Args:
        own: those of the device.
        cpu: the CPU's.
        then: a function to call if the cell has drawn from the CPU's.
    """

    def __init__(self, own: CellNumbers, cpu: CellNumbers, then: Callable[[], None]) -> None:
        self.own, self.cpu, self.then = own, cpu, then

    def __enter__(self) -> None:
        self.own.__enter__()
        self.cpu.__enter__()
        self.before = content(self.cpu.state)

    def __exit__(self, *exception: Any) -> None:
        self.cpu.__exit__(*exception)
        self.own.__exit__(*exception)
        if content(self.cpu.state) != self.before:
            self.then()


class _Turn:
    """A context manager entered while a lock is held."""

    def __init__(self, lock: threading.RLock, inner: AbstractContextManager[Any]) -> None:
        self.lock, self.inner = lock, inner

    def __enter__(self) -> None:
        self.lock.acquire()
        try:
            self.inner.__enter__()
        except BaseException:
            self.lock.release()
            raise

    def __exit__(self, *exception: Any) -> None:
        try:
            self.inner.__exit__(*exception)
        finally:
            self.lock.release()
