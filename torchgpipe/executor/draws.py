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

from torchgpipe._torch import checkpoints
from torchgpipe.ambient.defaults import content, default_state, generator_of
from torchgpipe.ambient.nesting import can_see_draws, first_run, nesting, seeing_draws
from torchgpipe.ambient.random_numbers import CellNumbers, StepNumbers
from torchgpipe.ambient.sources import Own, Watched
from torchgpipe.devices.streams import CPU
from torchgpipe.engine.step import Step
from torchgpipe.executor.plan import Plan
from torchgpipe.values.blocks import contextmanager

__all__: list[str] = []


class Draws:
    """The knowledge of how layers use the CPU's default generator."""

    def __init__(self) -> None:
        #: Whether nothing but operators has used it, by kind of step.
        self._plain: dict[Any, bool] = {}
        #: The kinds of steps that have left it changed, though nobody should have used it.
        self._suspected: set[Any] = set()
        self.lock = threading.RLock()

    @contextmanager
    def step(self, step: Step, plan: Plan) -> Iterator[None]:
        """Prepare for a step, and learn from it, in a ``with`` block around it.

        Args:
            step: the step.
            plan: its plan.
        """
        self._step, self.touched = step, False
        counts = Counter(map(generator_of, plan.devices))
        self._has_cpu = CPU in counts
        # Modes of the caller would not see what the kernels do.
        self._sees = self._has_cpu and not step.context.alone and can_see_draws()
        kind = (torch.is_grad_enabled(), *[x.training for x in step.stages.partitions])
        outer = nesting.source
        # guard: steps that are watched
        is_plain = self._plain.get(kind, False)
        #: Whether cells on the CPU have generators of their own, as the cell around has.
        self._free = self._sees and (is_plain or isinstance(outer, Own))
        own = [*map(generator_of, step.stages.devices)]
        in_turns = {x for x, count in counts.items() if count > 1 and x != CPU}
        if self._has_cpu and not self._free:
            in_turns = {*counts}
        #: For each stage, whether its cells take turns.
        self._in_turns = [x in in_turns for x in own]
        #: For each stage, whether its cells have nothing but a generator of their own.
        self._is_own = [self._free and x == CPU for x in own]
        found = content(default_state(CPU)) if self._free else b""
        try:
            with seeing_draws(self._sees):
                yield
            if self._free and content(default_state(CPU)) != found and kind not in self._suspected:
                # So do two checkpoints of PyTorch that have set it at the same time.
                self._suspected.add(kind)
                # guard: layers that set the generator later
                self.touched = True
            self._plain[kind] = self._sees and not self.touched
            if isinstance(outer, Watched):
                outer.touched |= self.touched
        finally:
            del self._step

    def of(self, i: int, j: int) -> AbstractContextManager[Any]:
        """Context manager for the first run of a cell."""
        numbers, device = self._step.numbers, self._step.stages.devices[j]
        if self._is_own[j]:
            return _Forward(numbers, i)
        if self._free:
            return self._turn(j, _Both(numbers.of(i, device), _Forward(numbers, i)))
        watched = Watched() if self._sees else None
        inner: Any = numbers.of(i, device, watched)
        if self._has_cpu and inner.device != CPU:
            inner = _Both(inner, numbers.of(i, CPU, watched))
        # guard: turns of forwards
        return self._turn(j, inner, watched)

    def again(self, i: int, j: int) -> AbstractContextManager[Any]:
        """Context manager for the second run of a cell."""
        if self._free:
            return self._turn(j, _Cell(self._step.numbers, i))
        watched = Watched() if self._sees else None
        return self._turn(j, first_run(self._step.numbers.place(watched)), watched)

    def backward(self, i: int, j: int, is_half: bool) -> AbstractContextManager[Any]:
        """Context manager for the backward of a cell, in which layers may draw, too.

        Args:
            i: the micro-batch.
            j: the stage.
            is_half: whether this is W, which need not come before the backward of other stages.
        """
        if not self._sees:
            return self._turn(j, nullcontext())
        place = (i, j if is_half else 0)
        if self._free:
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
        self._state, self._generator = self.states["cpu"], None

    def __enter__(self) -> None:
        self.outer = nesting.depth, nesting.turn, nesting.source
        nesting.depth, nesting.turn, _ = self.nest
        nesting.source = self

    def __exit__(self, *_: object) -> None:
        nesting.depth, nesting.turn, nesting.source = self.outer


class _Forward(_Cell):
    """Likewise for its first run, after which the micro-batch goes on from there."""

    __slots__ = ()

    def __exit__(self, *_: object) -> None:
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
    """Likewise, where no other cell draws, and where layers may set the default generator.

    What is drawn after that, as in checkpoints, is drawn from there.
    """

    __slots__ = ("watched",)

    def __init__(self, numbers: StepNumbers, place: object) -> None:
        super().__init__(numbers, place)
        self.watched = Watched()

    def begin(self) -> torch.Generator | None:
        if checkpoints.find()[1] is not None:
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
        self, draws: Draws, inner: AbstractContextManager[Any], watched: Watched | None
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
