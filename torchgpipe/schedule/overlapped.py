"""Rewrites that let a worker do two computations at once, of which one may wait for a message."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import chain, count

from torchgpipe.checks import listed
from torchgpipe.schedule.program import Instruction, Op, Overlap, Program, Skips, operations, walk

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
        found: list[Instruction] = []
        for x, number in zip(line, numbers):
            last = found[-1] if found else None
            if (
                isinstance(last, Op)
                and isinstance(x, Op)
                and frozenset((last.kind, x.kind)) in allowed
                and order.join(number - 1, number)
            ):
                found[-1] = Overlap(last, x)
            else:
                found.append(x)
        lines.append(tuple(found))
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
        #: The instructions that need each instruction, and the next one of its worker.
        self._needing: list[set[int]] = [set() for _ in all_]
        self._next: list[int | None] = [n + 1 for n in range(len(all_))]
        #: The pair that each second instruction has become a part of.
        self._pair: dict[int, int] = {}
        numbers = []
        begin = 0
        for line in program:
            numbers.append(iter(range(begin, begin := begin + len(line))))
            if line:
                self._next[begin - 1] = None
        #: Where each instruction ends if all take the same time, and each worker so far.
        end, free = [0] * len(all_), [0] * len(program)
        # Whoever waits in a deadlock goes on. Such a schedule keeps its deadlock.
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
        # The pair comes after whatever the second one needs, and before what needs the first one.
        between = self._order[begin + 1 : end]
        early = [n for n in between if n not in late]
        self._renumber(begin, [*early, first, *(n for n in between if n in late)])
        return True

    def _renumber(self, begin: int, numbers: list[int]) -> None:
        """Put instructions at consecutive places."""
        self._order[begin : begin + len(numbers)] = numbers
        for place, n in enumerate(numbers, begin):
            self._place[n] = place
