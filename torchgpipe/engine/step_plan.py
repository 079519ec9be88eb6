"""Plans: the schedule of a step, made for a model and checked against it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain
from typing import Any, TypeAlias

import torch
from torch.nn import Module

from torchgpipe.checks import verify, verify_kind
from torchgpipe.devices.streams import has_streams
from torchgpipe.partition.keeping import (
    Keeping,
    Keepings,
    Offload,
    choosing,
    keepings_of,
    offload_of,
    recomputed_by,
)
from torchgpipe.schedule.by_name import named
from torchgpipe.schedule.language import Schedule
from torchgpipe.schedule.program import (
    Edge,
    Instruction,
    Op,
    Overlap,
    Program,
    operations,
    operations_of,
)
from torchgpipe.schedule.rewrite import with_modes
from torchgpipe.schedule.simulator import in_order, verify_valid
from torchgpipe.schedule.trips import trips

__all__: list[str] = []


#: What a user may pass as a schedule: its name, a function that makes it for a number of workers
#: and a number of micro-batches, or the schedule itself.
Choice: TypeAlias = str | Callable[[int, int], Schedule] | Schedule


def title_of(choice: Choice) -> str:
    """A schedule in a few words: its name, or that of the function that makes it."""
    if isinstance(choice, Schedule):
        return f"{len(choice.program)} workers, {choice.chunks} micro-batches"
    if isinstance(choice, partial):
        return title_of(choice.func)
    name = choice if isinstance(choice, str) else getattr(choice, "__name__", None)
    return name or type(choice).__name__


def text_of(choice: Choice) -> str:
    """The text of a schedule, or the name of what makes it."""
    return str(choice) if isinstance(choice, Schedule) else title_of(choice)


@dataclass(frozen=True)
class StepPlan:
    """The schedule of a step.

    Args:
        schedule: the schedule, with an R for each cell that is computed under checkpointing.
        devices: the device of each worker.
        order: all instructions in the order of their simulated starts, each with its worker and
            the edges that lead to it.
        names: the name of each worker in notes on exceptions.
        keepings: for each stage, the mode that says what cells keep; empty if words say all.
    """

    schedule: Schedule
    devices: tuple[torch.device, ...]
    order: Sequence[tuple[int, Instruction, Sequence[Edge]]]
    names: Sequence[str]
    keepings: Sequence[Keeping] = ()

    # All properties below are cached, since a plan serves for many steps.
    @cached_property
    def again(self) -> frozenset[tuple[int, int]]:
        """The cells ``(stage, micro-batch)`` with an R."""
        ops = operations_of(self.schedule.program)
        return frozenset((op.stage, op.microbatch) for op in ops if op.kind == "R")

    @cached_property
    def offloads(self) -> list[Offload | None]:
        """For each stage, what leaves for the host, if anything does."""
        # What a stage on the CPU keeps is in the memory of the host already.
        return [
            offload_of(mode) if has_streams(self.devices[w]) else None
            for mode, w in zip(self.keepings, self.schedule.placement)
        ]

    @cached_property
    def leaving(self) -> dict[tuple[int, int], Instruction]:
        """The cells that leave for the host, each with the instruction before which it comes back.

        The rule for both is that of :mod:`~torchgpipe.schedule.trips`.
        """
        prefetch = [int(offload is not None) for offload in self.offloads]
        lines = self.schedule.program if any(prefetch) else ()
        trips_of = [(line, trips(line, prefetch)) for line in lines]
        return {(x.stage, x.microbatch): line[x.back] for line, cells in trips_of for x in cells}

    @cached_property
    def fetches(self) -> dict[Instruction, list[tuple[int, int]]]:
        """The offloaded cells to copy back from the host before each instruction."""
        fetches: dict[Instruction, list[tuple[int, int]]] = {}
        for cell, instruction in self.leaving.items():
            fetches.setdefault(instruction, []).append(cell)
        return fetches

    @cached_property
    def counts(self) -> Counter[torch.device]:
        """The number of workers on each device."""
        return Counter(self.devices)

    @cached_property
    def overlaps(self) -> bool:
        """Whether a worker computes two things at a time."""
        return any(isinstance(x, Overlap) for line in self.schedule.program for x in line)

    @cached_property
    def last(self) -> int:
        """The last stage, which the loss is after."""
        return len(self.schedule.placement) - 1

    @cached_property
    def lines(self) -> list[int]:
        """For each worker, how many workers of the same device come before it."""
        return [self.devices[:w].count(device) for w, device in enumerate(self.devices)]

    @cached_property
    def needs(self) -> list[list[int]]:
        """For each instruction, the numbers of those of other workers that it needs."""
        numbers: dict[Op, tuple[int, int]] = {}
        needs = []
        for number, (w, instruction, edges) in enumerate(self.order):
            numbers.update(dict.fromkeys(operations(instruction), (w, number)))
            sources = dict.fromkeys([numbers[source] for source, _ in edges])
            needs.append([other for worker, other in sources if worker != w])
        return needs


def plan(
    choice: Choice,
    devices: Sequence[torch.device],
    m: int,
    modes: Keepings,
    skips: Sequence[tuple[int, int]],
    *,
    forward: bool,
) -> StepPlan:
    """Make the schedule of a step.

    Raises:
        TypeError: the choice is none of these.
        ValueError: the schedule has faults, or does not fit the model.
    """
    keepings = keepings_of(modes, len(devices))
    words = tuple(map(recomputed_by, keepings))
    schedule = completed(_fitting(choice, devices, m), words, skips, forward=forward)
    of_worker = dict(zip(schedule.placement, devices))
    return StepPlan(
        schedule,
        tuple(of_worker[w] for w in range(len(schedule.program))),
        in_order(schedule),
        [f"worker {w}" for w in range(len(schedule.program))],
        () if forward else choosing(keepings),
    )


def completed(
    schedule: Schedule, modes: Sequence[str], skips: Sequence[tuple[int, int]], *, forward: bool
) -> Schedule:
    """Add a model's skips and the R of checkpoint modes, or leave all but forward out.

    Raises:
        ValueError: the schedule has faults.
    """
    schedule = replace(schedule, skips=tuple(skips))
    verify_valid(schedule)
    program: Program
    if forward:
        program = tuple(
            tuple(op for op in operations_of((line,)) if op.kind == "F")
            for line in schedule.program
        )
    else:
        program = with_modes(schedule.program, modes, schedule.chunks)
    return replace(schedule, program=program)


def _fitting(choice: Choice, devices: Sequence[torch.device], m: int) -> Schedule:
    # Each device has a worker. But if all stages are on one device, as on the CPU, any number of
    # workers will do that divides the number of stages, so all are tried, the largest first.
    count, stages = len({*devices}), len(devices)
    counts = [count] if count > 1 else [w for w in range(stages, 0, -1) if stages % w == 0]
    return _checked(chosen(choice, stages, counts, m), devices, m)


def chosen(choice: Choice, stages: int, counts: Sequence[int], m: int) -> Schedule:
    """Make a schedule, by a name or a function with as many stages as the model if it can.

    Args:
        choice: the name, the function of the numbers of workers and micro-batches, or a schedule,
            of which a shorter step takes the first micro-batches.
        stages: the number of stages of the model.
        counts: the numbers of workers to try.
        m: the number of micro-batches.

    Raises:
        TypeError: the choice is none of these.
        ValueError: there is no such schedule.
    """
    if isinstance(choice, Schedule):
        return choice.first(m) if m < choice.chunks else choice
    verify_choice(choice)
    tries = _tries(choice, stages, counts, m)
    first = next(tries)
    # If no schedule has as many stages as the model, _checked() raises an error about the first.
    return next((x for x in chain([first], tries) if len(x.placement) == stages), first)


def verify_choice(choice: Any) -> None:
    """Check that a value is a schedule, the name of one, or a function that makes one.

    Raises:
        TypeError: it is none of these.
    """
    verify(
        isinstance(choice, str | Schedule) or (callable(choice) and not isinstance(choice, Module)),
        "schedule must be a name, a function of the numbers of workers and micro-batches, or a "
        "Schedule",
        "schedule",
        choice,
        "use '1f1b', for one",
        TypeError,
    )


def _made(choice: Callable[[int, int], Schedule], workers: int, m: int) -> Schedule:
    """Make a schedule by a function, and check that it is one."""
    schedule = choice(workers, m)
    verify_kind(
        schedule,
        Schedule,
        "the function of a schedule must return a Schedule",
        "returned",
        "return one, as torchgpipe.schedule.one_f_one_b does",
    )
    return schedule


def _tries(choice: Any, stages: int, counts: Sequence[int], m: int) -> Iterator[Schedule]:
    """Yield schedules, of which one may have as many stages as the model."""
    for workers in counts:
        if not isinstance(choice, str):
            yield _made(choice, workers, m)
            continue
        yield named(choice, workers, m)
        for name, divisor in (("stages_per_worker", workers), ("waves", 2 * workers)):
            if stages % divisor == 0:
                try:
                    schedule = named(choice, workers, m, **{name: stages // divisor})
                except TypeError:
                    # The schedule of this name has no such parameter.
                    continue
                yield schedule


def _checked(schedule: Schedule, devices: Sequence[torch.device], m: int) -> Schedule:
    placement = schedule.placement
    of_worker: dict[int, torch.device] = {}
    fits = len(placement) == len(devices) and schedule.chunks == m
    for worker, device in zip(placement, devices):
        fits &= of_worker.setdefault(worker, device) == device
    if not fits:
        raise ValueError(
            "a schedule must fit the model: as many stages as partitions, those of one worker on "
            "one device, and as many micro-batches "
            f"(workers of the stages: {[*placement]}, devices of the partitions: "
            f"{[str(x) for x in devices]}, micro-batches of the schedule: {schedule.chunks}, of "
            f"the mini-batch: {m}); give GPipe the devices in the order of the workers, as in "
            "devices=[0, 1, 1, 0] for a V, or choose another schedule"
        )
    return schedule
