"""Schedules as values and as text."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from torchgpipe.schedule.picture import Drawn
from torchgpipe.schedule.program import Instruction, Op, Overlap, Program, operations
from torchgpipe.schedule.rewrite import Rewritten

__all__ = ["Schedule", "parse", "read"]


@dataclass(frozen=True)
class Schedule(Drawn, Rewritten):
    """What runs when, perhaps with faults, which :func:`~torchgpipe.schedule.validate` finds.

    Args:
        placement: stage -> worker (device). Workers are numbered from 0, and each has a stage.
        chunks: the number of micro-batches.
        program: the instructions of each worker, in order.

    Raises:
        TypeError, ValueError: something is of another type, or the numbers do not fit each other.
    """

    placement: tuple[int, ...]
    chunks: int
    program: Program

    def __post_init__(self) -> None:
        object.__setattr__(self, "placement", tuple(self.placement))
        object.__setattr__(self, "program", tuple(map(tuple, self.program)))
        if not all(type(x) is int for x in (*self.placement, self.chunks)):
            raise TypeError(
                "placement and chunks must be of integers "
                f"(placement: {self.placement}, chunks: {self.chunks!r}); pass ints"
            )
        workers = set(self.placement)
        if self.chunks < 1 or not workers or workers != {*range(len(self.program))}:
            raise ValueError(
                "there must be a micro-batch, and for each worker, from 0 on, a stage and a line "
                f"(chunks: {self.chunks}, workers with stages: {sorted(workers)}, lines: "
                f"{len(self.program)}); add lines, or number the workers without gaps"
            )
        for x in chain(*self.program):
            if not (isinstance(x, (Op, Overlap)) and all(map(_is_op, operations(x)))):
                raise TypeError(
                    "instructions must be Op(stage, kind, microbatch), of the kinds F, B, I, W and "
                    f"R, or Overlap(op, op) (instruction: {x!r}); parse() makes them of text"
                )

    @property
    def text(self) -> str:
        """The text that :func:`parse` reads, if every worker has an instruction."""
        return "\n".join(" ".join(map(str, line)) for line in self.program)


def _is_op(x: object) -> bool:
    return isinstance(x, Op) and x.kind in (*"FBIWR",) and type(x[0]) is type(x[2]) is int


def parse(text: str, placement: Sequence[int], chunks: int) -> Schedule:
    """Reads a schedule: a line for each worker, with spaces between its instructions.

    Empty lines do not count. Placement and chunks are those of :class:`Schedule`.

    Raises:
        ValueError: a word is not in the language (line and column are named), or as of Schedule.

    Example::

        >>> print(parse("0F0 0F1 0B0 0B1", placement=[0], chunks=2))
        time      0                   5
        worker 0  0F0 0F1 0B0---- 0B1----
    """
    program = [
        tuple(read(word[0], number, word.start() + 1) for word in re.finditer(r"\S+", line))
        for number, line in enumerate(text.splitlines(), 1)
    ]
    return Schedule(tuple(placement), chunks, tuple(line for line in program if line))


_NUMBER = "0|[1-9][0-9]*"
#: What a computation is made of, and what is missing where that is not found.
_OP = ((_NUMBER, "a stage"), ("[FBIWR]", "F, B, I, W or R"), (_NUMBER, "a micro-batch"))
_OVERLAP = ((r"\(", "("), *_OP, (";", ";"), *_OP, (r"\)", ")"))


def read(word: str, line: int, column: int) -> Instruction:
    """One instruction, or a ValueError. Line and column, from 1, are of its first character."""
    at = 0
    for pattern, what in (*(_OVERLAP if word[0] == "(" else _OP), (r"\Z", "a space")):
        match = re.compile(pattern).match(word, at)
        if match is None:
            raise ValueError(
                f"{what} must stand here (line: {line}, column: {column + at}, found: "
                f"{word[at:]!r}); write an instruction as 2F0, two that overlap as (0F1;3B0)"
            )
        at = match.end()
    ops = [Op(int(j), kind, int(i)) for j, kind, i in re.findall("([0-9]+)([A-Z])([0-9]+)", word)]
    return Overlap(*ops) if len(ops) == 2 else ops[0]
