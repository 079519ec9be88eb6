"""Files of schedules as torch.distributed.pipelining reads and writes them.

A row for each worker (rank), a column for each slot; where a worker waits, a slot may be empty.
Overlaps are ``(0F1;3B0)OVERLAP_F_B``. There is no R, and the file does not say where stages are.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence
from itertools import accumulate
from os import PathLike

from torchgpipe.schedule.language import Schedule, read
from torchgpipe.schedule.program import Instruction, Overlap, operations_of

__all__ = ["read_csv", "write_csv"]

_OVERLAP = "OVERLAP_F_B"


def write_csv(schedule: Schedule, path: str | PathLike[str]) -> None:
    """Writes a file that ``_load_csv(path, format="compute_only")`` reads, without empty slots.

    Raises:
        ValueError: there is an R.
    """
    again = next((op for op in operations_of(schedule.program) if op.kind == "R"), None)
    if again is not None:
        raise ValueError(
            f"torch.distributed.pipelining has no R (instruction: {again}); write the schedule "
            "before recompute(), and checkpoint within the stages"
        )
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        for line in schedule.program:
            writer.writerow(f"{x}{_OVERLAP if isinstance(x, Overlap) else ''}" for x in line)


def read_csv(path: str | PathLike[str], placement: Sequence[int], chunks: int) -> Schedule:
    """Reads a file that ``_dump_csv(path, format="compute_only")`` has written.

    Args:
        path: the file.
        placement: stage -> worker, as in :class:`Schedule`.
        chunks: the number of micro-batches.

    Raises:
        ValueError: a slot is no instruction, or one for communication, which is none here; or as in
            :class:`Schedule`.
    """
    program = []
    with open(path, newline="", encoding="utf-8-sig") as file:
        rows = csv.reader(file)
        for row in rows:
            columns = accumulate((len(slot) + 1 for slot in row), initial=1)
            starts = [x + len(slot) - len(slot.lstrip()) for slot, x in zip(row, columns)]
            words = [(slot.strip(), start) for slot, start in zip(row, starts) if slot.strip()]
            program.append(tuple(_read(word, rows.line_num, start) for word, start in words))
    return Schedule(tuple(placement), chunks, tuple(line for line in program if line))


def _read(word: str, line: int, column: int) -> Instruction:
    """The instruction of a slot."""
    place = f"(line: {line}, column: {column}, found: {word!r})"
    name = re.search("[0-9](SEND_[FB]|RECV_[FB]|UNSHARD|RESHARD|REDUCE_GRAD|R(?=[0-9]))", word)
    if name and name[1] == "R":
        raise ValueError(
            f"torch.distributed.pipelining has no R {place}; leave it out here, and use recompute()"
        )
    if name:
        raise ValueError(
            f"{name[1]} is no instruction: what is sent where follows from the placement {place}; "
            "leave it out, as a file written with format='compute_only' does"
        )
    if word.startswith("(") != word.endswith(_OVERLAP):
        raise ValueError(
            f"what overlaps, and only that, must end in {_OVERLAP} {place}; "
            f"write (0F1;3B0){_OVERLAP}"
        )
    return read(word.removesuffix(_OVERLAP), line, column)
