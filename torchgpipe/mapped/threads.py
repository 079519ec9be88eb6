"""Threads for the courses of a step, and the order in which these come to the stages."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import nn

from torchgpipe.ambient.context import Context
from torchgpipe.ambient.generators import content, get_state
from torchgpipe.ambient.notes import contextmanager
from torchgpipe.autograd.nodes import next_number, number_from
from torchgpipe.devices.streams import CPU, has_streams
from torchgpipe.engine.workers import Task, Workers
from torchgpipe.mapped.step import MappedStep
from torchgpipe.values.structure import MISSING

__all__: list[str] = []


# A course is the way of one micro-batch through the model, which may make the host wait for a
# device, as ``.item()`` does. One host thread then begins no other micro-batch, so each course may
# have a thread. Stages still compute micro-batches in order: micro-batch i comes to a stage when
# micro-batch i - 1 has left it for good. Between two stages a course holds neither of them, so no
# two courses wait for each other.
#
# A device serves one course at a time, even if it has several stages, since these share its random
# number generator, and may share a module.


#: The key of a stage: its device, and the index of its visit of this device.
VisitKey: TypeAlias = tuple[torch.device, int]


class Abandoned(BaseException):
    """An earlier micro-batch has failed, so this one goes no further. Only threads see it."""


class Turns:
    """The turns of the courses of a step."""

    def __init__(self, m: int) -> None:
        #: The stages that each micro-batch has left for good: the next micro-batch may come there.
        self._left: list[set[VisitKey]] = [set() for _ in range(m)]
        self._over = [False] * m
        #: For each device that a micro-batch holds alone: the index of this micro-batch.
        self._holders: dict[torch.device, int] = {}
        #: For each micro-batch, the stage that it came to last; None before its first stage.
        self._stages: list[VisitKey | None] = [None] * m
        #: For each stage, autograd's next sequence number when a micro-batch left it. The next
        #: micro-batch numbers its nodes from there: backward runs nodes with higher numbers first.
        self._numbers: dict[VisitKey, int] = {}
        #: The lowest index of a failed micro-batch: ``m`` if none has failed, -1 to stop them all.
        self._failed = m
        # A Condition's lock is reentrant, so end() can call leave() while it holds the lock.
        self._changed = threading.Condition()

    def come(self, i: int, stage: VisitKey) -> None:
        """Wait until micro-batch ``i``, which leaves its stage, may come to another one.

        Raises:
            Abandoned: a micro-batch before this one has failed.
        """

        def is_next() -> bool:
            # guard: turns on a stage
            follows = i == 0 or self._over[i - 1] or stage in self._left[i - 1]
            # guard: turns on a device
            return follows and stage[0] not in self._holders

        with self._changed:
            self._free(i)
            self._wait(i, is_next)
            self._holders[stage[0]] = i
            self._stages[i] = stage
        # guard: order of nodes
        number_from(self._numbers.get(stage, 0))

    def leave(self, i: int) -> None:
        """Let the next micro-batch come to the stage of ``i``, which has sent its results on."""
        with self._changed:
            self._free(i)
            stage = self._stages[i]
            if stage is not None:
                self._left[i].add(stage)
                self._numbers[stage] = next_number()

    def wait_for_end_before(self, i: int) -> None:
        """Wait until the micro-batch before ``i`` is over; ``i`` computes no more.

        Raises:
            Abandoned: a micro-batch before this one has failed.
        """
        with self._changed:
            # Micro-batch i gives its device up, since i - 1 may have to come back to it.
            self._free(i)
            self._wait(i, lambda: i == 0 or self._over[i - 1])

    def end(self, i: int) -> None:
        """Take note that a micro-batch is over."""
        with self._changed:
            self.leave(i)
            self._over[i] = True

    def stop(self, i: int = -1) -> None:
        """Stop all micro-batches after ``i``, which has failed."""
        with self._changed:
            # guard: errors of the first micro-batch
            self._failed = min(self._failed, i)
            self._changed.notify_all()

    def _wait(self, i: int, condition: Callable[[], bool]) -> None:
        self._changed.wait_for(lambda: i > self._failed or condition())
        if i > self._failed:
            raise Abandoned

    def _free(self, i: int) -> None:
        for device in [device for device, k in self._holders.items() if k == i]:
            del self._holders[device]
        self._changed.notify_all()


# Several threads help only models whose code waits for a device, so users ask for them. The first
# step runs in the caller's thread alone. It shows whether several threads would compute the same.


class Threads:
    """The threads of a wrapper, and the knowledge of whether they may compute a step."""

    def __init__(self) -> None:
        self._workers = Workers([])
        #: For training (True) and evaluation mode: whether several threads compute what one does.
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
        # A buffer that forward replaces is of one micro-batch: other threads would find it, too.
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


@contextmanager
def unset(modules: Iterable[tuple[str, nn.Module]]) -> Iterator[None]:
    """Check that no attribute of a module is set within a ``with`` block.

    A model that keeps something of a micro-batch in itself, such as an auxiliary loss, would find
    what another thread has put there.

    Raises:
        RuntimeError: an attribute was set.
    """
    attributes = [(name, module, _attributes(module)) for name, module in modules]
    yield
    for name, module, before in attributes:
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
    return dict(model.named_buffers(remove_duplicate=False))


def _differing(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    return sorted(
        key for key in before | after if before.get(key, MISSING) is not after.get(key, MISSING)
    )
