"""Random numbers of a step whose cells several threads compute.

A default generator is one for all threads, and several workers may have one device. So their cells
take turns at it: while one computes with the RNG state of its micro-batch, or runs a checkpoint of
PyTorch again in its backward, the others wait. A worker on the CPU shares that device's generator
with all others.

On the CPU a cell blocks its thread, and turns leave nothing of a schedule's overlap. So cells there
take turns only while it is not known whether they draw, and if they do. The first step of each kind
watches the generator, around each computation. If it stayed the same, later steps have no turns. If
it has changed in one of them all the same, nobody knows who has drawn which numbers, and that step
is an error.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from torchgpipe._torch.attributes import modules_of
from torchgpipe.ambient.generators import content, first_run, generator_of, get_state
from torchgpipe.ambient.notes import contextmanager
from torchgpipe.devices.streams import CPU
from torchgpipe.engine.step import Step
from torchgpipe.engine.step_plan import StepPlan

__all__: list[str] = []

NOTHING: AbstractContextManager[None] = nullcontext()


class Draws:
    """The knowledge of whether layers draw on the CPU, which lasts from step to step."""

    def __init__(self) -> None:
        #: For each kind of step seen, whether its layers drew from the CPU's generator. Steps are
        #: of one kind if they have the same grad mode and the same modules in train mode.
        self._known: dict[Any, bool] = {}
        self.lock = threading.RLock()

    @contextmanager
    def step(self, step: Step, plan: StepPlan) -> Iterator[StepDraws]:
        """Prepare for a step, and learn from it, in a ``with`` block around it.

        Raises:
            RuntimeError: layers have drawn in a step without turns.
        """
        counts = Counter(map(generator_of, plan.devices))
        shared = {x for x, count in counts.items() if count > 1}
        if CPU not in counts or len(plan.devices) == 1:
            yield StepDraws(self.lock, step, shared)
            return
        modes = [x.training for layers in step.modules for x in modules_of(layers)]
        kind = (torch.is_grad_enabled(), *modes)
        draws = self._known.get(kind)
        if draws is not False:
            # Workers on accelerators take turns, too: PyTorch's checkpoint() saves and restores the
            # state of the CPU's generator on any device.
            # guard: turns beside the CPU
            step_draws = StepDraws(self.lock, step, {*counts}, is_watched=draws is None)
            yield step_draws
            self._known[kind] = draws or step_draws.drawn
            return
        before = content(get_state(CPU))
        try:
            yield StepDraws(self.lock, step, shared - {CPU}, is_free=True)
        finally:
            # In finally, since a recomputation that draws other random numbers than its forward may
            # raise. If these draws went unnoticed, the next step would raise in the same way.
            # guard: draws without turns
            self._known[kind] = content(get_state(CPU)) != before
        if self._known[kind]:
            raise RuntimeError(
                "layers on the CPU must draw random numbers from the first step on, since those "
                "that draw nothing run at the same time, and no other thread may draw during a "
                f"step (workers: {len(plan.devices)}, on the CPU: {counts[CPU]}); call the step "
                "again: its cells take turns from now on"
            )


class StepDraws:
    """The random numbers of the computations of a step."""

    def __init__(
        self,
        lock: threading.RLock,
        step: Step,
        shared: set[torch.device],
        is_watched: bool = False,
        is_free: bool = False,
    ) -> None:
        self._numbers, self._devices = step.numbers, step.stages.devices
        self._is_watched = is_watched
        generators = [*map(generator_of, self._devices)]
        #: For each stage, the lock that each of its computations holds while it runs, so that
        #: workers take turns at a generator; ``NOTHING`` if the stage needs no turns.
        # guard: turns of computations
        self.turns = [lock if x in shared else NOTHING for x in generators]
        #: Whether each stage is on the CPU and known to draw nothing, so that no generator is set.
        self._is_free = [is_free and x == CPU for x in generators]
        #: Whether a computation has drawn from the CPU's generator; only noticed if ``is_watched``.
        self.drawn = False

    def of(self, i: int, j: int) -> AbstractContextManager[Any]:
        """Context manager for the first run of a cell."""
        if self._is_free[j]:
            return first_run()
        return self._watched(self._numbers.of(i, self._devices[j]))

    def again(self) -> AbstractContextManager[Any]:
        """Context manager for the recomputation of a cell."""
        return first_run()

    def backward(self) -> AbstractContextManager[Any]:
        """Context manager for the backward of a cell."""
        return self._watched(first_run())

    def _watched(self, inner: AbstractContextManager[Any]) -> AbstractContextManager[Any]:
        return self._watching(inner) if self._is_watched else inner

    @contextmanager
    def _watching(self, inner: AbstractContextManager[Any]) -> Iterator[None]:
        with inner:
            before = content(get_state(CPU))
            yield
            self.drawn |= content(get_state(CPU)) != before
