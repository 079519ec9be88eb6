"""The schedule as a value, and as text: our own, and that of torch.distributed.pipelining."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, replace
from itertools import accumulate, chain
from os import PathLike

from torchgpipe.checks import MOST, checked_path, listed, shown, verify, verify_kind
from torchgpipe.schedule.program import (
    Instruction,
    Op,
    Overlap,
    Program,
    operations,
    operations_of,
    together,
)
from torchgpipe.schedule.rewrite import (
    deferred,
    halved,
    overlapped,
    paired,
    recomputed,
    truncated,
)

__all__ = ["Schedule", "parse", "read", "read_csv", "write_csv"]


#: The remedy in Schedule's errors about what is no program, no line, or no instruction.
PARSED = "use parse() to make it from text"


@dataclass(frozen=True)
class Schedule:
    """The worker of each stage, and the instructions of each worker.

    A schedule is immutable: its methods return new schedules. It may contain faults, such as a
    deadlock; :func:`~torchgpipe.schedule.validate` finds them.

    Args:
        placement: stage -> worker (device). Workers are numbered from 0, and each has a stage.
        chunks: the number of micro-batches.
        program: the instructions of each worker, in order.
        skips: the stage that stashes and the stage that pops each skip, in any order. Text and CSV
            files have no skips.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: Placement, chunks and program do not fit each other.
    """

    placement: tuple[int, ...]
    chunks: int
    program: Program
    skips: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "placement", checked_placement(self.placement))
        lines = listed(self.program, "a program has a line for each worker", "program", PARSED)
        program = [
            listed(x, "a line has the instructions of a worker", "line", PARSED) for x in lines
        ]
        object.__setattr__(self, "program", tuple(map(tuple, program)))
        verify(
            type(self.chunks) is int,
            "chunks must be an integer",
            "chunks",
            self.chunks,
            "pass the number of micro-batches",
            TypeError,
        )
        skips = checked_skips(self.skips)
        object.__setattr__(self, "skips", tuple(sorted({(j, k) for j, k in skips})))
        stages = range(len(self.placement))
        wrong = [(j, k) for j, k in self.skips if j not in stages or k not in stages or j >= k]
        if wrong:
            raise ValueError(
                f"a skip must lead from a stage to a later one (skips: {wrong}, stages: "
                f"{len(stages)}); leave out those within a stage"
            )
        workers = set(self.placement)
        if not 1 <= self.chunks <= MOST or not workers or workers != {*range(len(self.program))}:
            raise ValueError(
                f"chunks must be from 1 to {MOST}, and each worker must have a stage and a line "
                f"(chunks: {self.chunks}, workers with stages: {sorted(workers)}, lines: "
                f"{len(self.program)}); add lines, or number the workers without gaps"
            )
        for x in chain(*self.program):
            if not (isinstance(x, (Op, Overlap)) and all(map(_is_op, operations(x)))):
                raise TypeError(
                    "an instruction must be Op(stage, kind, microbatch) with kind F, B, I, W or R, "
                    f"or Overlap(op, op) (instruction: {x!r}); {PARSED}"
                )

    def __str__(self) -> str:
        """The text that :func:`parse` reads, provided that every worker has an instruction."""
        return "\n".join(" ".join(map(str, line)) for line in self.program)

    def split(self) -> Schedule:
        """Return this schedule with each B replaced by I and, right after it, W."""
        return replace(self, program=halved(self.program))

    def defer_weights(self, k: int | Sequence[int]) -> Schedule:
        """Return this schedule with each W moved after the next ``k`` I of its worker.

        If fewer than ``k`` I follow, W moves to the end of the line. A W inside an overlap keeps
        its place, and so does a W that is late enough already.

        Args:
            k: one number for all workers, or one for each worker.

        Raises:
            ValueError: The schedule contains a B, whose weights cannot be deferred, or ``k`` does
                not fit the workers.
        """
        return replace(self, program=deferred(self.program, k))

    def overlap(self, *kinds: str) -> Schedule:
        """Return this schedule with neighbours of a worker paired, where no dependency forbids it.

        Graph stages hide the communication of one computation behind the arithmetic of the other.

        Args:
            *kinds: which kinds may be paired, in any order; by default ``"FB"`` and ``"FI"``.

        Raises:
            ValueError: A pair of kinds is not two of F, B, I, W and R.
        """
        pairs = kinds or ("FB", "FI")
        return replace(self, program=overlapped(self.program, pairs, self.skips))

    def pair(self) -> Schedule:
        """Return this schedule with two micro-batches for each one, computed side by side.

        Raises:
            ValueError: The schedule has overlaps.
        """
        return replace(self, chunks=2 * self.chunks, program=paired(self.program))

    def recompute(
        self,
        stages: int | Iterable[int] | None = None,
        microbatches: int | Iterable[int] | None = None,
    ) -> Schedule:
        """Return this schedule with an R right before the backward of the chosen cells.

        A cell that already has an R keeps it. ``recompute(microbatches=range(chunks - 1))`` is
        GPipe's mode 'except_last'.

        Args:
            stages: one stage or several; all if None.
            microbatches: one micro-batch or several; all if None.

        Raises:
            ValueError: The schedule has no such stage or micro-batch.
        """
        return replace(self, program=recomputed(self.program, stages, microbatches))

    def first(self, chunks: int) -> Schedule:
        """Return this schedule with only its first micro-batches; a valid schedule stays valid.

        Args:
            chunks: the number of micro-batches to keep.

        Raises:
            ValueError: The schedule has fewer micro-batches, or ``chunks`` is below 1.
        """
        if type(chunks) is not int or not 1 <= chunks <= self.chunks:
            raise ValueError(
                "chunks must be between 1 and the schedule's number of micro-batches (chunks: "
                f"{shown(chunks)}, micro-batches: {self.chunks}); make the schedule with more of "
                "them"
            )
        return replace(self, chunks=chunks, program=truncated(self.program, chunks))


def checked_schedule(schedule: Schedule) -> None:
    """Check that a value is a schedule.

    Raises:
        TypeError: it is none.
    """
    verify_kind(
        schedule,
        Schedule,
        "a schedule must be a Schedule",
        "schedule",
        "make one by its name, as in named('1f1b', workers=4, chunks=8), or from text by parse()",
    )


def checked_placement(placement: Sequence[int]) -> tuple[int, ...]:
    """The worker of each stage.

    Raises:
        TypeError: they are no sequence of integers.
    """
    remedy = "pass the worker of each stage, as in [0, 1, 2, 3]"
    workers = listed(placement, "placement must be a sequence of workers", "placement", remedy)
    verify(
        all(type(x) is int for x in workers),
        "placement must be integers",
        "placement",
        placement,
        remedy,
        TypeError,
    )
    return tuple(workers)


def checked_skips(skips: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """The stages that each skip leads from and to.

    Raises:
        TypeError: they are no sequence of pairs.
    """
    rule = "skips must be pairs of stages"
    remedy = "pass the stage that stashes and the stage that pops, as in [(0, 2)]"
    pairs = [*skips] if isinstance(skips, Set) else listed(skips, rule, "skips", remedy)
    verify(all(map(_is_pair, pairs)), rule, "skips", skips, remedy, TypeError)
    return tuple(pairs)


def _is_op(x: object) -> bool:
    return isinstance(x, Op) and x.kind in (*"FBIWR",) and type(x[0]) is type(x[2]) is int


def _is_pair(x: object) -> bool:
    return isinstance(x, Sequence) and [type(stage) for stage in x] == [int, int]


def parse(text: str, placement: Sequence[int], chunks: int) -> Schedule:
    """Read a schedule: one line for each worker, with spaces between its instructions.

    Empty lines are ignored. Text has no skips: add skips with ``dataclasses.replace``.

    Args:
        text: the instructions.
        placement: stage -> worker.
        chunks: the number of micro-batches.

    Raises:
        ValueError: A word is not an instruction (the message says line and column), or the
            arguments do not fit each other, as for :class:`Schedule`.

    Example::

        >>> print(parse("0F0 0F1 0B0 0B1", placement=[0], chunks=2).split())
        0F0 0F1 0I0 0W0 0I1 0W1
    """
    verify_kind(text, str, "a schedule is read from text", "text", "pass such as '0F0 0B0'")
    program = [
        tuple(read(word[0], number, word.start() + 1) for word in re.finditer(r"\S+", line))
        for number, line in enumerate(text.splitlines(), 1)
    ]
    return Schedule(checked_placement(placement), chunks, tuple(x for x in program if x))


_NUMBER = "0|[1-9][0-9]*"
#: For each piece of the text of a computation, or overlap: its pattern, and what errors call it.
_OP = ((_NUMBER, "a stage"), ("[FBIWR]", "F, B, I, W or R"), (_NUMBER, "a micro-batch"))
_OVERLAP = ((r"\(", "("), *_OP, (";", ";"), *_OP, (r"\)", ")"))


def read(word: str, line: int, column: int) -> Instruction:
    """Read one instruction.

    Args:
        word: the text of the instruction, without spaces.
        line: the line of the text, from 1, for the error message.
        column: the column of the first character, from 1, for the error message.

    Raises:
        ValueError: The word is not an instruction.
    """
    at = 0
    for pattern, what in (*(_OVERLAP if word[0] == "(" else _OP), (r"\Z", "a space")):
        match = re.compile(pattern).match(word, at)
        if match is None:
            raise ValueError(
                f"{what} must come next (line: {line}, column: {column + at}, found: "
                f"{word[at:]!r}); write a computation as 2F0 and an overlap as (0F1;3B0)"
            )
        at = match.end()
    ops = [Op(int(j), kind, int(i)) for j, kind, i in re.findall("([0-9]+)([A-Z])([0-9]+)", word)]
    return together(ops)


# Schedules in the CSV files of torch.distributed.pipelining.
#
# A file has one row for each worker (rank) and one column for each time slot. The slot of a worker
# that waits may be empty. An overlap is written as ``(0F1;3B0)OVERLAP_F_B``. The format has no R,
# and contains neither the placement nor the skips. Skips change no instruction. Whoever needs the
# skips adds them to what :func:`read_csv` returns, with
# ``dataclasses.replace(schedule, skips=...)``.


_ENDING = "OVERLAP_F_B"


def write_csv(schedule: Schedule, path: str | PathLike[str]) -> None:
    """Write a file that ``_load_csv(path, format="compute_only")`` reads, without empty slots.

    Args:
        schedule: the schedule.
        path: the file.

    Raises:
        ValueError: The schedule contains an R.
    """
    checked_schedule(schedule)
    path = checked_path(path)
    again = next((op for op in operations_of(schedule.program) if op.kind == "R"), None)
    if again is not None:
        raise ValueError(
            "the format of torch.distributed.pipelining must do without R (instruction: "
            f"{again}); write the schedule before recompute(), and checkpoint within the stages"
        )
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        for line in schedule.program:
            writer.writerow(f"{x}{_ENDING if isinstance(x, Overlap) else ''}" for x in line)


def read_csv(path: str | PathLike[str], placement: Sequence[int], chunks: int) -> Schedule:
    """Read a file that ``_dump_csv(path, format="compute_only")`` has written.

    Args:
        path: the file.
        placement: stage -> worker.
        chunks: the number of micro-batches.

    Raises:
        ValueError: A slot is not an instruction, or is one for communication, which our language
            does not have; or the arguments do not fit each other, as for :class:`Schedule`.
    """
    path = checked_path(path)
    program = []
    with open(path, newline="", encoding="utf-8-sig") as file:
        rows = csv.reader(file)
        for row in rows:
            columns = accumulate((len(slot) + 1 for slot in row), initial=1)
            starts = [x + len(slot) - len(slot.lstrip()) for slot, x in zip(row, columns)]
            words = [(slot.strip(), start) for slot, start in zip(row, starts) if slot.strip()]
            program.append(tuple(_read(word, rows.line_num, start) for word, start in words))
    return Schedule(checked_placement(placement), chunks, tuple(line for line in program if line))


def _read(word: str, line: int, column: int) -> Instruction:
    """Read the instruction of one slot."""
    where = f"(line: {line}, column: {column}, found: {word!r})"
    name = re.search("[0-9](SEND_[FB]|RECV_[FB]|UNSHARD|RESHARD|REDUCE_GRAD|R(?=[0-9]))", word)
    if name and name[1] == "R":
        raise ValueError(
            f"a slot must not contain R, which torch.distributed.pipelining lacks {where}; "
            "leave it out, and call recompute() on the schedule"
        )
    if name:
        raise ValueError(
            f"a slot must not contain {name[1]}: copies follow from the placement {where}; "
            "write the file with format='compute_only'"
        )
    if word.startswith("(") != word.endswith(_ENDING):
        raise ValueError(
            f"an overlap, and nothing else, must end in {_ENDING} {where}; write (0F1;3B0){_ENDING}"
        )
    return read(word.removesuffix(_ENDING), line, column)
