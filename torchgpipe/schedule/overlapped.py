"""Rewrites that let a worker do two computations at once, of which one may wait for a message."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import pairwise

from torchgpipe.schedule.program import (
    Instruction,
    Op,
    Overlap,
    Program,
    by_stage,
    needs,
    operations,
    operations_of,
)

__all__ = ["overlapped", "paired"]


def paired(program: Program) -> Program:
    """Make two micro-batches of each one, whose computations are done at once.

    Raises:
        ValueError: the program has overlaps already.
    """
    found = next((x for line in program for x in line if isinstance(x, Overlap)), None)
    if found is not None:
        raise ValueError(
            "an overlap is of two computations, so a schedule with overlaps cannot be paired "
            f"(instruction: {found}); pair another schedule, such as '1f1b'"
        )

    def both(op: Op) -> Overlap:
        i = 2 * op.microbatch
        return Overlap(op._replace(microbatch=i), op._replace(microbatch=i + 1))

    return tuple(tuple(both(op) for x in line for op in operations(x)) for line in program)


def overlapped(program: Program, kinds: Iterable[str], skips: Sequence[tuple[int, int]]) -> Program:
    """Pair neighbours of a worker, from left to right, where no dependency forbids it.

    Two neighbours may be paired if the second does not need the first, directly or by way of other
    workers. For the pair waits for all that either of them needs.

    Args:
        program: the instructions of each worker.
        kinds: pairs of kinds, in any order, as ``"FB"``.
        skips: the stages that each skip leads from and to.

    Raises:
        ValueError: a pair is not two of F, B, I, W and R.
    """
    chosen = [*kinds]
    wrong = [x for x in chosen if len(x) != 2 or not set(x) <= set("FBIWR")]
    if wrong:
        raise ValueError(
            "kinds to be paired must be two of F, B, I, W and R "
            f"(kinds: {wrong}); write them as in overlap('FB', 'FI')"
        )
    allowed = {frozenset(x) if x[0] != x[1] else x[0] for x in chosen}
    graph = _Waits(program, skips)
    lines: list[tuple[Instruction, ...]] = []
    for line in program:
        found: list[Instruction] = []
        for x in line:
            last = found[-1] if found else None
            if (
                isinstance(last, Op)
                and isinstance(x, Op)
                and _is_allowed(last, x, allowed)
                and not graph.leads(last, x)
            ):
                graph.join(last, x)
                found[-1] = Overlap(last, x)
            else:
                found.append(x)
        lines.append(tuple(found))
    return tuple(lines)


def _is_allowed(a: Op, b: Op, allowed: Collection[object]) -> bool:
    return (a.kind if a.kind == b.kind else frozenset((a.kind, b.kind))) in allowed


class _Waits:
    """Orders of instructions: by what they need, and by the lines of workers."""

    def __init__(self, program: Program, skips: Sequence[tuple[int, int]]) -> None:
        ops = set(operations_of(program))
        near = by_stage(skips)
        #: For each computation, the number of its instruction.
        self._number: dict[Op, int] = {}
        self._behind: dict[int, set[int]] = {}
        lines = []
        for line in program:
            numbers = []
            for x in line:
                number = len(self._behind)
                self._behind[number] = set()
                self._number.update(dict.fromkeys(operations(x), number))
                numbers.append(number)
            lines.append(numbers)
        for numbers in lines:
            for a, b in pairwise(numbers):
                self._behind[a].add(b)
        for op in ops:
            for other in needs(op, ops, near.get(op.stage, ())):
                if self._number[other] != self._number[op]:
                    self._behind[self._number[other]].add(self._number[op])
        self._needs = {
            op: {self._number[x] for x in needs(op, ops, near.get(op.stage, ()))} for op in ops
        }

    def leads(self, first: Op, second: Op) -> bool:
        """Whether a way leads from one instruction to the next besides their order in the line."""
        start, end = self._number[first], self._number[second]
        if start in self._needs[second]:
            return True
        seen = {start}
        stack = [x for x in self._behind[start] if x != end]
        while stack:
            number = stack.pop()
            if number == end:
                return True
            if number not in seen:
                seen.add(number)
                stack += self._behind[number] - seen
        return False

    def join(self, first: Op, second: Op) -> None:
        """Make one instruction of two."""
        one, other = self._number[first], self._number[second]
        self._number[second] = one
        self._behind[one] = (self._behind[one] | self._behind.pop(other)) - {one, other}
        for found in self._behind.values():
            if other in found:
                found.discard(other)
                found.add(one)
        for wanted in self._needs.values():
            if other in wanted:
                wanted.add(one)
