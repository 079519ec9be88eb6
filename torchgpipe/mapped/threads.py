"""Threads: micro-batches of a step on their way at the same time, each course in a thread.

That helps models whose code waits for a device, and only these, so it is the user who asks for it.
The first step is the caller's. It shows whether several threads compute the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from torch import nn

from torchgpipe.ambient.context import Context
from torchgpipe.ambient.defaults import content
from torchgpipe.ambient.random_numbers import get_state
from torchgpipe.devices.streams import CPU, has_streams
from torchgpipe.engine.workers import Task, Workers
from torchgpipe.mapped.step import MappedStep
from torchgpipe.mapped.turns import Turns
from torchgpipe.values.structure import MISSING

__all__: list[str] = []


class Threads:
    """The threads of a wrapper, and the knowledge of whether they may compute a step."""

    def __init__(self) -> None:
        self._workers = Workers([])
        #: Whether several threads compute the same as one, in training and in evaluation.
        self._equal = {True: False, False: False}

    def are_equal(self, training: bool) -> bool:
        """Whether several threads would have computed the last step as one did."""
        return self._equal[training]

    def run(
        self,
        step: MappedStep,
        model: nn.Module,
        count: int,
        course: Callable[[int, Turns | None], None],
    ) -> None:
        """Run the courses of a step in several threads, if they compute the same as one.

        Args:
            step: the step.
            model: the model.
            count: the number of threads.
            course: runs the course of a micro-batch, in the order of turns if it is not alone.

        Raises:
            RuntimeError: forward has set an attribute of a module.
            BaseException: what a course has raised; of several, the first micro-batch's.
        """
        context, numbers = Context(), get_state(CPU)
        buffers = _buffers(model) if count > 1 else {}
        # guard: modes that the caller of a model computes in
        if count > 1 and self._equal[model.training] and not context.alone:
            with unset(model.named_modules()):
                self._divide(step, count, course, context)
        else:
            for i in range(step.m):
                course(i, None)
        # guard: numbers of the CPU in threads
        drawn = content(numbers) != content(get_state(CPU))
        # A buffer that was replaced belongs to one micro-batch, as an attribute does.
        replaced = count > 1 and _differing(buffers, _buffers(model))
        equal = step.is_divisible and not drawn and not replaced
        self._equal[model.training] = equal and all(map(has_streams, step.devices))

    def _divide(
        self,
        step: MappedStep,
        count: int,
        course: Callable[[int, Turns | None], None],
        context: Context,
    ) -> None:
        turns = Turns(step.m)

        def run(i: int) -> None:
            step.take_streams()
            try:
                context.run(course, i, turns)
            except BaseException:
                turns.stop(i)
                raise
            finally:
                turns.end(i)

        device = step.devices[0]
        tasks = [Task(i, device, partial(run, i), line=i % count) for i in range(step.m)]
        try:
            self._workers.run_in_threads(tasks, context)
        finally:
            turns.stop()


class unset:
    """Check that no attribute of a module is set within a ``with`` block.

    A model that keeps something of a micro-batch in itself, such as an auxiliary loss, would find
    what another thread has put there.

    Args:
        modules: the modules by name.

    Raises:
        RuntimeError: an attribute was set.
    """

    def __init__(self, modules: Iterable[tuple[str, nn.Module]]) -> None:
        self._found = [(name, module, _attributes(module)) for name, module in modules]

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for name, module, before in self._found if kind is None else ():
            changed = _differing(before, _attributes(module))
            # guard: attributes of threads
            if changed:
                raise RuntimeError(
                    "while several threads compute micro-batches, forward must not set attributes "
                    f"of modules (module: {name or 'the model'}, set: {changed[:5]}); have "
                    "modules return what they have found, or pass threads=1"
                )


def _attributes(module: nn.Module) -> dict[str, Any]:
    """The attributes and buffers of a module, held so that no other object gets their identity."""
    return {**vars(module), **module._buffers}


def _buffers(model: nn.Module) -> dict[str, Any]:
    """The buffers of a model by name."""
    return dict(model.named_buffers(remove_duplicate=False))


def _differing(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """The names under which two tables hold different objects."""
    return sorted(
        key for key in before | after if before.get(key, MISSING) is not after.get(key, MISSING)
    )
