"""Random numbers of a step whose cells several threads compute.

A device's generator is one for all threads. On the CPU, cells draw from generators of their own, so
threads compute them side by side. That is right for layers that draw by operators. It is not for
layers that set the default generator, or seed it, as layers with checkpoints of their own may do.
Only layers that have run show that. So cells of the first step have the default generator, one at a
time, and are watched. If nothing but operators has used it, later steps leave it alone. The same
goes for the first step that trains, and the first with a backward.

An operator on an accelerator cannot have another generator. Where several workers have one
accelerator, its cells always take turns.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from torchgpipe._torch import draws
from torchgpipe.ambient.generators import (
    Own,
    Watched,
    can_see_draws,
    content,
    default_state,
    first_run,
    generator_of,
    nesting,
    seeing_draws,
)
from torchgpipe.ambient.notes import contextmanager
from torchgpipe.ambient.random_numbers import CellNumbers, StepNumbers
from torchgpipe.devices.streams import CPU
from torchgpipe.engine.step import Step
from torchgpipe.engine.step_plan import StepPlan

__all__: list[str] = []


class Draws:
    """The knowledge of how layers use the CPU's default generator."""

    def __init__(self) -> None:
        #: Whether nothing but operators has used it, by kind of step.
        self.plain: dict[Any, bool] = {}
        #: How often a kind of step has left it changed, though nobody should have used it.
        self.changed: Counter[Any] = Counter()
        #: Whether cells of the latest step had generators of their own.
        self.is_free = False
        self.lock = threading.RLock()

    @contextmanager
    def step(self, step: Step, plan: StepPlan) -> Iterator[StepDraws]:
        """Prepare for a step, and learn from it, in a ``with`` block around it.

        Args:
            step: the step.
            plan: its plan.
        """
        outer = nesting.source
        kind = (torch.is_grad_enabled(), *[x.training for x in step.stages.partitions])
        # guard: steps that are watched
        is_plain = self.plain.get(kind, False)
        found = StepDraws(self.lock, step, plan, is_plain or isinstance(outer, Own))
        self.is_free = found.free
        before = content(default_state(CPU)) if found.free else b""
        with seeing_draws(found.sees):
            yield found
        if found.free and content(default_state(CPU)) != before:
            self.changed[kind] += 1
            # guard: layers that set the generator later
            found.touched = True
        # Two checkpoints of PyTorch that set it at the same time leave it changed, too. So one sign
        # is no proof, and a second one is taken for one.
        self.plain[kind] = found.sees and not found.touched and self.changed[kind] < 2
        if isinstance(outer, Watched):
            outer.touched |= found.touched


class StepDraws:
    """The generators that the cells of one step draw from.

    Args:
        lock: the lock that a cell holds while it has its turn.
        step: the step.
        plan: its plan.
        is_plain: whether nothing but operators is expected to use the CPU's default generator.
    """

    def __init__(self, lock: threading.RLock, step: Step, plan: StepPlan, is_plain: bool) -> None:
        self.lock, self._step = lock, step
        #: Whether a cell has used the default generator in another way than by operators.
        self.touched = False
        counts = Counter(map(generator_of, plan.devices))
        self._has_cpu = CPU in counts
        #: Whether draws are seen. Modes of the caller would not see what the kernels do.
        self.sees = self._has_cpu and not step.context.alone and can_see_draws()
        #: Whether cells on the CPU have generators of their own, as the cell around has.
        self.free = self.sees and is_plain
        places = [*map(generator_of, step.stages.devices)]
        in_turns = {x for x, count in counts.items() if count > 1 and x != CPU}
        if self._has_cpu and not self.free:
            in_turns = {*counts}
        #: For each stage, whether its cells take turns.
        self._in_turns = [x in in_turns for x in places]
        #: For each stage, whether its cells have nothing but a generator of their own.
        self._is_own = [self.free and x == CPU for x in places]

    def of(self, i: int, j: int) -> AbstractContextManager[Any]:
        """Context manager for the first run of a cell."""
        numbers, device = self._step.numbers, self._step.stages.devices[j]
        if self._is_own[j]:
            return _Forward(numbers, i)
        if self.free:
            return self._turn(j, _Both(numbers.of(i, device), _Forward(numbers, i)))
        watched = Watched() if self.sees else None
        inner: Any = numbers.of(i, device, watched)
        if self._has_cpu and inner.device != CPU:
            inner = _Both(inner, numbers.of(i, CPU, watched))
        # guard: turns of forwards
        return self._turn(j, inner, watched)

    def again(self, i: int, j: int) -> AbstractContextManager[Any]:
        """Context manager for the recomputation of a cell."""
        if self.free:
            return self._turn(j, _Cell(self._step.numbers, i))
        watched = Watched() if self.sees else None
        return self._turn(j, first_run(self._step.numbers.place(watched)), watched)

    def backward(self, i: int, j: int, is_half: bool) -> AbstractContextManager[Any]:
        """Context manager for the backward of a cell, in which layers may draw, too.

        Args:
            i: the micro-batch.
            j: the stage.
            is_half: whether this is W, which need not come before the backward of other stages.
        """
        if not self.sees:
            return self._turn(j, nullcontext())
        place = (i, j if is_half else 0)
        if self._is_own[j]:
            return _Backward(self._step.numbers, place)
        if self.free:
            return self._turn(j, _Backward(self._step.numbers, place))
        backward = _WatchedBackward(self._step.numbers, place)
        # guard: turns of backwards
        return self._turn(j, backward, backward.watched)

    def _turn(
        self, j: int, inner: AbstractContextManager[Any], watched: Watched | None = None
    ) -> AbstractContextManager[Any]:
        return _Turn(self, inner, watched) if self._in_turns[j] else inner


class _Cell(Own):
    """A generator of its own for a cell of a micro-batch, within a ``with`` block.

    Args:
        numbers: the random numbers of the step.
        i: the micro-batch.
    """

    __slots__ = ("nest", "outer", "states")

    def __init__(self, numbers: StepNumbers, i: int) -> None:
        # Not super(), which takes longer.
        self.nest, self.states = numbers.nest, numbers.states[i]
        self._state = self._generator = None

    def __enter__(self) -> None:
        self.outer = nesting.depth, nesting.turn, nesting.source
        nesting.depth, nesting.turn, _ = self.nest
        nesting.source = self

    def __exit__(self, *_: object) -> None:
        nesting.depth, nesting.turn, nesting.source = self.outer

    def get_state(self) -> Tensor:
        if self._state is None:
            self._state = self.states["cpu"]
        return super().get_state()


class _Forward(_Cell):
    """The same for its first run, after which the micro-batch goes on from there."""

    __slots__ = ()

    def __exit__(self, *_: object) -> None:
        if self._generator is not None or self._state is not None:
            # guard: numbers of a generator of its own
            self.states["cpu"] = self.get_state()
        nesting.depth, nesting.turn, nesting.source = self.outer


class _Backward(Own):
    """A generator of its own for the backward of a cell, within a ``with`` block.

    Args:
        numbers: the random numbers of the step.
        place: the backward, or the part of one, that this one goes on with.
    """

    __slots__ = ("numbers", "outer", "place")

    def __init__(self, numbers: StepNumbers, place: object) -> None:
        # Not super(), which takes longer.
        self.numbers, self.place = numbers, place
        self._generator = self._state = None

    def __enter__(self) -> None:
        self.outer, nesting.source = nesting.source, self

    def __exit__(self, *_: object) -> None:
        nesting.source = self.outer
        # guard: numbers of backward
        if self._generator is not None:
            self.numbers.in_backward[self.place] = self._generator.get_state()

    def get_state(self) -> Tensor:
        if self._state is None:
            self._state = self.numbers.state_in_backward(self.place)
        return super().get_state()


class _WatchedBackward(_Backward):
    """The same, where no other cell draws, and where layers may set the default generator.

    What is drawn after that, as in checkpoints, is drawn from there.
    """

    __slots__ = ("watched",)

    def __init__(self, numbers: StepNumbers, place: object) -> None:
        super().__init__(numbers, place)
        self.watched = Watched()

    def begin(self) -> torch.Generator | None:
        if draws.find()[1] is not None:
            return None
        self.watched.look()
        return None if self.watched.touched else super().begin()


class _Both:
    """The random numbers of a cell on an accelerator: those of the device, and the CPU's."""

    def __init__(self, own: CellNumbers, cpu: CellNumbers | _Forward) -> None:
        self.own, self.cpu = own, cpu

    def __enter__(self) -> None:
        self.own.__enter__()
        self.cpu.__enter__()

    def __exit__(self, *exception: object) -> None:
        self.cpu.__exit__(*exception)
        self.own.__exit__(*exception)


class _Turn:
    """A context manager entered while no other cell has a turn."""

    def __init__(
        self, draws: StepDraws, inner: AbstractContextManager[Any], watched: Watched | None
    ) -> None:
        self.draws, self.inner, self.watched = draws, inner, watched

    def __enter__(self) -> None:
        self.draws.lock.acquire()
        try:
            if self.watched is not None:
                self.watched.start()
            self.inner.__enter__()
        except BaseException:
            self.draws.lock.release()
            raise

    def __exit__(self, *exception: Any) -> None:
        try:
            self.inner.__exit__(*exception)
            if self.watched is not None:
                self.watched.look()
                self.draws.touched |= self.watched.touched
        finally:
            self.draws.lock.release()
