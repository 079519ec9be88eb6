"""Programs made of programs: in another order, in halves, or with less kept.

Each rewrite is of what all workers do, and leaves them the same work.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from numbers import Integral
from typing import TypeVar

from torchgpipe.schedule.program import Instruction, Op, Overlap, Program, operations, operations_of

__all__ = ["Rewritten"]

S = TypeVar("S", bound="Rewritten")


class Rewritten:
    """The methods of a schedule that return it rewritten."""

    chunks: int
    program: Program

    def split(self: S) -> S:
        """With each B as an I and, right after it, a W."""
        return _with(self, _split(self.program))

    def fuse(self: S) -> S:
        """With each I and its W as one B, where the I was."""
        return _with(self, _fuse(self.program))

    def defer_weights(self: S, k: int | Sequence[int]) -> S:
        """With each W after ``k`` more I of its worker, or at the end if there are no more.

        A W within an overlap stays there.

        Args:
            k: one number for all workers, or one for each.

        Raises:
            ValueError: there is a B, whose weights cannot come later, or ``k`` does not fit.
        """
        return _with(self, _defer_weights(self.program, k))

    def recompute(
        self: S,
        stages: int | Iterable[int] | None = None,
        microbatches: int | Iterable[int] | None = None,
    ) -> S:
        """With an R right before the backward of the cells of these stages and micro-batches.

        A cell that has an R already keeps that one. ``recompute(microbatches=range(chunks - 1))``
        is GPipe's mode 'except_last'.

        Args:
            stages: one or several; all, if None.
            microbatches: the same.

        Raises:
            ValueError: there is no such stage or micro-batch.
        """
        return _with(self, _recompute(self.program, stages, microbatches))

    def first(self: S, chunks: int) -> S:
        """With the first micro-batches only. What was valid stays so.

        Raises:
            ValueError: there are not so many.
        """
        if not 1 <= chunks <= self.chunks:
            raise ValueError(
                "chunks must be from 1 to those that there are "
                f"(chunks: {chunks}, there are: {self.chunks}); make the schedule for more"
            )
        program = _keep(self.program, lambda op: op if op.microbatch < chunks else None)
        return _with(self, program, chunks=chunks)


def _with(schedule: S, program: Program, **changes: int) -> S:
    changed: S = replace(schedule, program=program, **changes)  # type: ignore[type-var]  # A mixin.
    return changed


def _keep(program: Program, change: Callable[[Op], Op | None]) -> Program:
    """With each computation as ``change`` has it, and without those of which it makes None."""

    def kept(instruction: Instruction) -> list[Instruction]:
        ops = [op for op in map(change, operations(instruction)) if op is not None]
        return [Overlap(*ops)] if len(ops) == 2 else [*ops]

    return tuple(tuple(x for instruction in line for x in kept(instruction)) for line in program)


def _split(program: Program) -> Program:
    def halves(instruction: Instruction) -> list[Instruction]:
        weights = [op._replace(kind="W") for op in operations(instruction) if op.kind == "B"]
        ops = [op._replace(kind="I") if op.kind == "B" else op for op in operations(instruction)]
        return [Overlap(*ops) if len(ops) == 2 else ops[0], *weights]

    return tuple(tuple(x for instruction in line for x in halves(instruction)) for line in program)


def _fuse(program: Program) -> Program:
    ops = set(operations_of(program))

    def whole(op: Op) -> Op | None:
        if op.kind == "I" and op._replace(kind="W") in ops:
            return op._replace(kind="B")
        return None if op.kind == "W" and op._replace(kind="I") in ops else op

    return _keep(program, whole)


def _defer_weights(program: Program, k: int | Sequence[int]) -> Program:
    whole = next((op for op in operations_of(program) if op.kind == "B"), None)
    if whole is not None:
        raise ValueError(
            "weights can come later only where backward is split into I and W "
            f"(instruction: {whole}); call split() before defer_weights()"
        )
    counts = list(k) if isinstance(k, Iterable) else [k] * len(program)
    natural = all(isinstance(x, Integral) and x >= 0 for x in counts)
    if len(counts) != len(program) or not natural:
        raise ValueError(
            "k must be an integer, or one for each worker, and not negative "
            f"(k: {counts}, workers: {len(program)}); 0 leaves a worker as it is"
        )
    return tuple(_deferred(line, count) for line, count in zip(program, counts))


def _deferred(line: Sequence[Instruction], k: int) -> tuple[Instruction, ...]:
    inputs = [op for x in line for op in operations(x) if op.kind == "I"]
    #: For each W, how many I of the worker come before it.
    due = {op._replace(kind="W"): number + k for number, op in enumerate(inputs, 1)}
    late: list[tuple[int, int, Op]] = []
    found: list[Instruction] = []
    count = 0
    for position, x in enumerate(line):
        if isinstance(x, Op) and x.kind == "W":
            heapq.heappush(late, (due.get(x, 0), position, x))
        else:
            found.append(x)
            count += sum(op.kind == "I" for op in operations(x))
        while late and late[0][0] <= count:
            found.append(heapq.heappop(late)[-1])
    return (*found, *(op for _, _, op in sorted(late)))


def _recompute(
    program: Program,
    stages: int | Iterable[int] | None,
    microbatches: int | Iterable[int] | None,
) -> Program:
    ops = set(operations_of(program))
    chosen = []
    for name, numbers, there in (
        ("stages", stages, {op.stage for op in ops}),
        ("microbatches", microbatches, {op.microbatch for op in ops}),
    ):
        some = numbers if isinstance(numbers, Iterable) else [numbers]
        chosen.append(there if numbers is None else {*some})
        if not chosen[-1] <= there:
            raise ValueError(
                f"{name} must be of the schedule ({name}: {sorted(chosen[-1])}, there are: "
                f"{sorted(there)}); leave others out"
            )

    def again(instruction: Instruction) -> list[Instruction]:
        cells = [op._replace(kind="R") for op in operations(instruction) if op.kind in "BI"]
        wanted = [x for x in cells if x.stage in chosen[0] and x.microbatch in chosen[1]]
        return [*(x for x in wanted if x not in ops), instruction]

    return tuple(tuple(x for instruction in line for x in again(instruction)) for line in program)
