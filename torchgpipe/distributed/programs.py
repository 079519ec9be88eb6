"""Programs: the schedule of a step, the runtime that goes through it, and our part of it."""

from __future__ import annotations

from collections.abc import Sequence

from torchgpipe.distributed.mail import Mail
from torchgpipe.distributed.runtime import Runtime
from torchgpipe.executor.plan import Choice, Plan, again_in, chosen, completed
from torchgpipe.partition.arguments import Modes
from torchgpipe.schedule.language import Schedule
from torchgpipe.skip.layout import SkipLayout

__all__: list[str] = []


class Programs:
    """The programs of a pipeline, each made once.

    Args:
        choice: the schedule, its name, or a function of the numbers of workers and micro-batches.
        layout: the skips between stages.
        mail: the messages of this process.
    """

    def __init__(self, choice: Choice, layout: SkipLayout, mail: Mail) -> None:
        self._choice, self._mail = choice, mail
        self._skips = layout.pairs
        self._made: dict[tuple[int, bool, Modes], tuple[Runtime, Plan]] = {}

    def get(self, m: int, recorded: bool, modes: Modes) -> tuple[Runtime, Plan]:
        """The program of steps.

        Args:
            m: the number of micro-batches.
            recorded: whether backward runs.
            modes: which micro-batches are checkpointed.
        """
        key = m, recorded, modes if recorded else "never"
        if key not in self._made:
            placement = self._mail.routes.placement
            found = fitting(self._choice, len(placement), max(placement) + 1, m)
            schedule = completed(found, key[2], self._skips, forward=False)
            # For the executor, the stages of this process are those of its only worker.
            line = schedule.program[self._mail.routes.rank]
            own = Schedule((0,) * len(placement), m, (line,))
            plan = Plan(own, (self._mail.device,), (), again_in(own))
            self._made[key] = Runtime(schedule, self._mail, recorded), plan
        return self._made[key]


def fitting(choice: Choice, stages: int, size: int, m: int) -> Schedule:
    """Make the schedule of steps.

    Args:
        choice: the schedule, its name, or a function of the numbers of workers and micro-batches.
        stages: the number of stages.
        size: the number of processes.
        m: the number of micro-batches.

    Raises:
        TypeError: the choice is none of these.
        ValueError: the schedule does not fit.
    """
    if isinstance(choice, Schedule):
        found = choice.first(m) if m < choice.chunks else choice
    else:
        found = chosen(choice, stages, [size], m)
    placement: Sequence[int] = found.placement
    if len(placement) != stages or len(found.program) != size or found.chunks != m:
        raise ValueError(
            "a schedule must fit the model and the group: as many stages as the balance has "
            "numbers, a worker for each process, and as many micro-batches "
            f"(workers of the stages: {[*placement]}, stages: {stages}, processes: {size}, "
            f"micro-batches of the schedule: {found.chunks}, of the mini-batch: {m}); give the "
            "balance a number for each stage, start as many processes as the schedule has workers, "
            "or choose another schedule"
        )
    return found
