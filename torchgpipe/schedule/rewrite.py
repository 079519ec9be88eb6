"""Rewrites of programs: in another order, in halves, with recomputation, with fewer micro-batches.

Each function rewrites the lines of all workers and returns a new program.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from itertools import pairwise
from numbers import Integral
from typing import Any

from torchgpipe.checks import shown
from torchgpipe.schedule.program import (
    Instruction,
    Op,
    Program,
    operations,
    operations_of,
    together,
)

__all__ = ["checkpointed", "deferred", "fused", "halved", "recomputed", "truncated"]


def halved(program: Program) -> Program:
    """Replace each B by I, and add its W right after the instruction."""

    def halves(instruction: Instruction) -> list[Instruction]:
        weights = [op._replace(kind="W") for op in operations(instruction) if op.kind == "B"]
        ops = [op._replace(kind="I") if op.kind == "B" else op for op in operations(instruction)]
        return [together(ops), *weights]

    return _replaced(program, halves)


def fused(program: Program) -> Program:
    """Replace each I that has a W by B, and remove the W."""
    ops = set(operations_of(program))

    def whole(op: Op) -> Op | None:
        if op.kind == "I" and op._replace(kind="W") in ops:
            return op._replace(kind="B")
        return None if op.kind == "W" and op._replace(kind="I") in ops else op

    return _changed(program, whole)


def truncated(program: Program, chunks: int) -> Program:
    """Remove the computations of all but the first micro-batches."""
    return _changed(program, lambda op: op if op.microbatch < chunks else None)


def deferred(program: Program, k: int | Sequence[int]) -> Program:
    """Move each W after the next ``k`` I of its worker, or to the end of the line."""
    whole = next((op for op in operations_of(program) if op.kind == "B"), None)
    if whole is not None:
        raise ValueError(
            "weights can be deferred only where backward is split into I and W "
            f"(instruction: {whole}); call split() before defer_weights()"
        )
    counts = list(k) if isinstance(k, Iterable) else [k] * len(program)
    natural = all(isinstance(x, Integral) and x >= 0 for x in counts)
    if len(counts) != len(program) or not natural:
        raise ValueError(
            "k must be an integer that is not negative, or one for each worker "
            f"(k: {counts}, workers: {len(program)}); 0 leaves a worker unchanged"
        )
    return tuple(_delayed(line, count) for line, count in zip(program, counts))


def _delayed(line: Sequence[Instruction], k: int) -> tuple[Instruction, ...]:
    """Move the W of one worker."""
    inputs = [op for x in line for op in operations(x) if op.kind == "I"]
    #: The number of I of this worker that must come before each W.
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


def recomputed(
    program: Program,
    stages: int | Iterable[int] | None,
    microbatches: int | Iterable[int] | None,
) -> Program:
    """Add an R before the backward of each chosen cell that has none; None chooses all."""
    ops = set(operations_of(program))
    chosen = []
    for name, numbers, there in (
        ("stages", stages, {op.stage for op in ops}),
        ("microbatches", microbatches, {op.microbatch for op in ops}),
    ):
        some = [*numbers] if isinstance(numbers, Iterable) else [numbers]
        if numbers is not None and not all(type(x) is int and x in there for x in some):
            raise ValueError(
                f"{name} must be in the schedule ({name}: {shown(_sorted(some))}, in the schedule: "
                f"{sorted(there)}); leave out the others"
            )
        chosen.append(there if numbers is None else {*some})

    def again(instruction: Instruction) -> list[Instruction]:
        cells = [op._replace(kind="R") for op in operations(instruction) if op.kind in "BI"]
        wanted = [x for x in cells if x.stage in chosen[0] and x.microbatch in chosen[1]]
        return [*(x for x in wanted if x not in ops), instruction]

    return _replaced(program, again)


def without_recomputation(program: Program) -> Program:
    """Leave all R out: the instructions in a language that has none."""
    lines = []
    for line in program:
        kept = [[op for op in operations(x) if op.kind != "R"] for x in line]
        lines.append(tuple(together(ops) for ops in kept if ops))
    return tuple(lines)


def checkpointed(program: Program, modes: str | Sequence[str], chunks: int) -> Program:
    """Add the R of GPipe's checkpoint modes; a program with an R of its own stays as it is.

    Args:
        program: the instructions of each worker.
        modes: one mode for all stages, or one for each. ``'always'`` recomputes all cells, and
            ``'never'`` none. ``'except_last'`` recomputes all micro-batches but the last, and no
            cell whose backward comes right after its forward, since that would free no memory.
        chunks: the number of micro-batches.
    """
    given = {modes} if isinstance(modes, str) else {*modes}
    assert given <= {"never", "except_last", "always"}
    if given == {"never"} or any(op.kind == "R" for op in operations_of(program)):
        return program
    at_once = {
        (op.stage, op.microbatch)
        for line in program
        for before, after in pairwise(line)
        for op in operations(after)
        if op.kind in "BI" and op._replace(kind="F") in operations(before)
    }

    def is_again(op: Op) -> bool:
        j, _, i = op
        mode = modes if isinstance(modes, str) else modes[j]
        if mode == "except_last":
            return i < chunks - 1 and (j, i) not in at_once
        return mode == "always"

    def again(instruction: Instruction) -> list[Instruction]:
        cells = [op._replace(kind="R") for op in operations(instruction) if op.kind in "BI"]
        return [*filter(is_again, cells), instruction]

    return _replaced(program, again)


def _replaced(program: Program, change: Callable[[Instruction], list[Instruction]]) -> Program:
    """Replace each instruction by the instructions that ``change`` returns for it."""
    return tuple(tuple(x for instruction in line for x in change(instruction)) for line in program)


def _changed(program: Program, change: Callable[[Op], Op | None]) -> Program:
    """Replace each computation by what ``change`` returns for it; None removes the computation."""

    def changed(instruction: Instruction) -> list[Instruction]:
        ops = [op for op in map(change, operations(instruction)) if op is not None]
        return [together(ops)] if ops else []

    return _replaced(program, changed)


def _sorted(values: list[Any]) -> list[Any]:
    """The values in order, if they have one."""
    with suppress(TypeError):
        return sorted(values)
    return values
