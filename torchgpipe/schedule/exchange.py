"""Schedules in the CSV files of torch.distributed.pipelining.

A file has one row for each worker (rank) and one column for each time slot. The slot of a worker
that waits may be empty. An overlap is written as ``(0F1;3B0)OVERLAP_F_B``. The format has no R, and
contains neither the placement nor the skips. Skips change no instruction. Whoever needs the skips
adds them to what :func:`read_csv` returns, with ``dataclasses.replace(schedule, skips=...)``.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence
from itertools import accumulate
from os import PathLike

from torchgpipe.checks import checked_path
from torchgpipe.schedule.language import Schedule, checked_placement, checked_schedule, read
from torchgpipe.schedule.program import Instruction, Overlap, operations_of

__all__ = ["read_csv", "write_csv"]

_OVERLAP = "OVERLAP_F_B"


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
            writer.writerow(f"{x}{_OVERLAP if isinstance(x, Overlap) else ''}" for x in line)


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
    place = f"(line: {line}, column: {column}, found: {word!r})"
    name = re.search("[0-9](SEND_[FB]|RECV_[FB]|UNSHARD|RESHARD|REDUCE_GRAD|R(?=[0-9]))", word)
    if name and name[1] == "R":
        raise ValueError(
            f"a slot must not contain R, which torch.distributed.pipelining lacks {place}; "
            "leave it out, and call recompute() on the schedule"
        )
    if name:
        raise ValueError(
            f"a slot must not contain {name[1]}: copies follow from the placement {place}; "
            "write the file with format='compute_only'"
        )
    if word.startswith("(") != word.endswith(_OVERLAP):
        raise ValueError(
            f"an overlap, and nothing else, must end in {_OVERLAP} {place}; "
            f"write (0F1;3B0){_OVERLAP}"
        )
    return read(word.removesuffix(_OVERLAP), line, column)
