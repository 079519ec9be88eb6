"""Rewrites of programs: other orders, halves, recomputation, and two computations at once."""

from __future__ import annotations

import heapq
import re
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, count, pairwise
from numbers import Integral
from typing import Any

from torchgpipe.checks import has_entries, listed, shown
from torchgpipe.schedule.program import (
    Instruction,
    Op,
    Overlap,
    Program,
    Skips,
    operations,
    operations_of,
    together,
    walk,
)

__all__: list[str] = [
    "with_modes",
    "deferred",
    "halved",
    "recomputed",
    "truncated",
    "overlapped",
    "paired",
]


# Rewrites of programs: in another order, in halves, with recomputation, with fewer micro-batches.
#
# Each function rewrites the lines of all workers and returns a new program.


def halved(program: Program) -> Program:
    """Replace each B by I, and add its W right after the instruction."""

    def halves(instruction: Instruction) -> list[Instruction]:
        weights = [op._replace(kind="W") for op in operations(instruction) if op.kind == "B"]
        ops = [op._replace(kind="I") if op.kind == "B" else op for op in operations(instruction)]
        return [together(ops), *weights]

    return _replaced(program, halves)


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
    numbers: Any = k
    counts: list[int] = [*numbers] if has_entries(numbers) else [numbers] * len(program)
    natural = all(isinstance(x, Integral) and x >= 0 for x in counts)
    if len(counts) != len(program) or not natural:
        raise ValueError(
            "k must be an integer that is not negative, or one for each worker "
            f"(k: {counts}, workers: {len(program)}); 0 leaves a worker unchanged"
        )
    return tuple(_delayed(line, count) for line, count in zip(program, counts))


def _delayed(line: Sequence[Instruction], k: int) -> tuple[Instruction, ...]:
    """Delay each W of one worker until ``k`` more I have come after its own I."""
    inputs = [op for x in line for op in operations(x) if op.kind == "I"]
    #: For each W, how many I of the line must come before it: those up to its own, and ``k`` more.
    due = {op._replace(kind="W"): number + k for number, op in enumerate(inputs, 1)}
    late: list[tuple[int, int, Op]] = []
    rewritten: list[Instruction] = []
    count = 0
    for position, x in enumerate(line):
        if isinstance(x, Op) and x.kind == "W":
            heapq.heappush(late, (due.get(x, 0), position, x))
        else:
            rewritten.append(x)
            count += sum(op.kind == "I" for op in operations(x))
        while late and late[0][0] <= count:
            rewritten.append(heapq.heappop(late)[-1])
    return (*rewritten, *(op for _, _, op in sorted(late)))


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
        some = [*numbers] if has_entries(numbers) else [numbers]
        if numbers is not None and not all(type(x) is int and x in there for x in some):
            raise ValueError(
                f"{name} must be in the schedule ({name}: {shown(some)}, in the schedule: "
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
    return _changed(program, lambda op: None if op.kind == "R" else op)


def with_modes(program: Program, modes: str | Sequence[str], chunks: int) -> Program:
    """Add the R of GPipe's checkpoint modes; a program with an R of its own stays as it is.

    Args:
        program: the instructions of each worker.
        modes: one mode for all stages, or one for each. ``'always'`` recomputes all cells, and
            ``'never'`` none. ``'except_last'`` recomputes all micro-batches but the last, and no
            cell whose backward comes right after its forward, since that would free no memory.
        chunks: the number of micro-batches.
    """
    cells = recomputes(program, modes, chunks)

    def again(instruction: Instruction) -> list[Instruction]:
        due = [(j, i) for j, kind, i in operations(instruction) if kind in "BI"]
        return [*(Op(j, "R", i) for j, i in due if (j, i) in cells), instruction]

    return _replaced(program, again) if cells else program


def recomputes(
    program: Program, modes: str | Sequence[str], chunks: int
) -> frozenset[tuple[int, int]]:
    """The stages and micro-batches of the R that :func:`with_modes` adds."""
    used = {modes} if isinstance(modes, str) else {*modes}
    assert used <= {"never", "except_last", "always"}
    if used == {"never"} or any(op.kind == "R" for op in operations_of(program)):
        return frozenset()
    at_once = {
        (op.stage, op.microbatch)
        for line in program
        for before, after in pairwise(line)
        for op in operations(after)
        if op.kind in "BI" and Op(op.stage, "F", op.microbatch) in operations(before)
    }

    def is_again(j: int, i: int) -> bool:
        mode = modes if isinstance(modes, str) else modes[j]
        if mode == "except_last":
            return i < chunks - 1 and (j, i) not in at_once
        return mode == "always"

    cells = ((j, i) for j, kind, i in operations_of(program) if kind in "BI")
    return frozenset(x for x in cells if is_again(*x))


def _replaced(program: Program, change: Callable[[Instruction], list[Instruction]]) -> Program:
    """Replace each instruction by the instructions that ``change`` returns for it."""
    return tuple(tuple(x for instruction in line for x in change(instruction)) for line in program)


def _changed(program: Program, change: Callable[[Op], Op | None]) -> Program:
    """Replace each computation by what ``change`` returns for it; None removes the computation."""

    def changed(instruction: Instruction) -> list[Instruction]:
        ops = [op for op in map(change, operations(instruction)) if op is not None]
        return [together(ops)] if ops else []

    return _replaced(program, changed)


# Rewrites that let a worker do two computations at once: one can wait while the other computes.


def paired(program: Program) -> Program:
    """Make two micro-batches of each one, whose computations are done at once.

    Raises:
        ValueError: the program has overlaps already.
    """
    overlap = next((x for line in program for x in line if isinstance(x, Overlap)), None)
    if overlap is not None:
        raise ValueError(
            "an overlap is of two computations, so a schedule with overlaps cannot be paired "
            f"(instruction: {overlap}); pair another schedule, such as '1f1b'"
        )

    def both(op: Op) -> Overlap:
        i = 2 * op.microbatch
        return Overlap(op._replace(microbatch=i), op._replace(microbatch=i + 1))

    return tuple(tuple(both(op) for x in line for op in operations(x)) for line in program)


def overlapped(program: Program, kinds: Iterable[str], skips: Skips) -> Program:
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
    chosen = listed(kinds, "kinds must be pairs of words", "kinds", "write them as overlap('FB')")
    wrong = [x for x in chosen if not (isinstance(x, str) and re.fullmatch("[FBIWR]{2}", x))]
    if wrong:
        raise ValueError(
            "kinds to be paired must be two of F, B, I, W and R "
            f"(kinds: {wrong}); write them as in overlap('FB', 'FI')"
        )
    allowed = {frozenset(x) for x in chosen}
    order = _Order(program, skips)
    numbers = count()
    lines: list[tuple[Instruction, ...]] = []
    for line in program:
        paired_line: list[Instruction] = []
        for x, number in zip(line, numbers):
            last = paired_line[-1] if paired_line else None
            if (
                isinstance(last, Op)
                and isinstance(x, Op)
                and frozenset((last.kind, x.kind)) in allowed
                and order.join(number - 1, number)
            ):
                paired_line[-1] = Overlap(last, x)
            else:
                paired_line.append(x)
        lines.append(tuple(paired_line))
    return tuple(lines)


class _Order:
    """All instructions, each after those that it waits for.

    Instructions have numbers, in the order of the lines. A way from one instruction to another only
    leads over instructions between the two in this order. So a search for a way is short, since
    neighbours of a line are close to each other. Contracting two instructions changes the order
    between them alone.

    Source: Pearce and Kelly, A dynamic topological sort algorithm for directed acyclic graphs,
    2006.
    """

    def __init__(self, program: Program, skips: Skips) -> None:
        all_ = [*chain(*program)]
        number = {op: n for n, x in enumerate(all_) for op in operations(x)}
        #: For each instruction (by its number), the numbers of the instructions that need it.
        self._needing: list[set[int]] = [set() for _ in all_]
        #: For each instruction, the number of its worker's next instruction; None for the last.
        self._next: list[int | None] = [n + 1 for n in range(len(all_))]
        #: For the second instruction of each pair, the number of the first, which stands for both.
        self._pair: dict[int, int] = {}
        numbers = []
        begin = 0
        for line in program:
            numbers.append(iter(range(begin, begin := begin + len(line))))
            if line:
                self._next[begin - 1] = None
        #: `end`: when each instruction ends, and `free`: when each worker is free, if every
        #: instruction takes one unit of time. Until join() changes it, the order is that of `end`.
        end, free = [0] * len(all_), [0] * len(program)
        # In a deadlock, the waiting worker with the smallest number goes on. The rewritten program
        # has the same deadlock, and validate() finds it.
        for w, _, edges in walk(program, lambda waiting: min(waiting), skips):
            n = next(numbers[w])
            needed = [number[op] for op, _ in edges]
            for other in needed:
                self._needing[other].add(n)
            end[n] = free[w] = max([free[w], *(end[other] for other in needed)]) + 1
        self._order = sorted(range(len(all_)), key=end.__getitem__)
        self._place = [0] * len(all_)
        self._renumber(0, self._order)

    def join(self, first: int, second: int) -> bool:
        """Make a pair of two neighbours, unless a way leads from one to the other.

        The order in the line is no such way, but a need is.

        Returns:
            Whether the two are a pair now.
        """
        begin, end = self._place[first], self._place[second]
        late: set[int] = set()
        stack: list[int | None] = [*self._needing[first]]
        while stack:
            x = stack.pop()
            if x is None:
                continue
            n = self._pair.get(x, x)
            if n == second:
                return False
            if n not in late and self._place[n] < end:
                late.add(n)
                stack += [*self._needing[n], self._next[n]]
        self._pair[second] = first
        self._needing[first] |= self._needing[second]
        self._next[first] = self._next[second]
        # The pair is put after what its second instruction needs, and before what needs its first.
        between = self._order[begin + 1 : end]
        early = [n for n in between if n not in late]
        self._renumber(begin, [*early, first, *(n for n in between if n in late)])
        return True

    def _renumber(self, begin: int, numbers: list[int]) -> None:
        """Put instructions at consecutive places."""
        self._order[begin : begin + len(numbers)] = numbers
        for position, n in enumerate(numbers, begin):
            self._place[n] = position
