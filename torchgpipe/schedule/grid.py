"""Pictures of programs: one row for each worker, with time from left to right.

A computation that a deadlock blocks has no times, so the picture leaves it out and says below the
rows which instruction the worker never reaches.
"""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from typing import NamedTuple

from torchgpipe.checks import checked_path
from torchgpipe.schedule.program import (
    Instruction,
    Op,
    Program,
    operations,
    operations_of,
    timetable,
)
from torchgpipe.show.bars import Bar, BarRow, Panel, svg

__all__: list[str] = ["Times", "characters", "unit_times", "write_svg"]


#: The start of each computation, and its end.
Times = tuple[Mapping[Op, float], Mapping[Op, float]]


def unit_times(program: Program) -> Times:
    """Return the times if B takes two units and everything else takes one.

    Copies take no time here, so skips would change nothing: what a skip waits for, the value that
    goes through the stages in between waits for, too.
    """

    def duration(instruction: Instruction) -> float:
        return sum(2 if op.kind == "B" else 1 for op in operations(instruction))

    return timetable(program, duration, lambda edge: 0)


class _Bar(NamedTuple):
    """One instruction in the picture."""

    instruction: Instruction
    begin: float
    end: float


def _bars(program: Program, times: Times) -> list[list[_Bar]]:
    """Return the bars of each worker, for the instructions that have times."""
    start, end = times
    firsts = [[(x, operations(x)[0]) for x in line] for line in program]
    return [[_Bar(x, start[op], end[op]) for x, op in line if op in start] for line in firsts]


def _never(program: Program, times: Times) -> list[str]:
    """Return a line for each worker that a deadlock blocks, with the instruction it waits at."""
    blocked = ((w, x) for w, line in enumerate(program) for x in line)
    heads = {w: x for w, x in reversed([*blocked]) if operations(x)[0] not in times[0]}
    return [f"worker {w} never comes to {x}" for w, x in sorted(heads.items())]


def characters(program: Program) -> str:
    """Draw the program in characters: ``-`` continues an instruction, ``.`` is a wait.

    Only the times of :func:`unit_times` fit into columns, so this picture takes no others.
    """
    times = unit_times(program)
    lines = _bars(program, times)
    #: Characters per unit of time: enough for the text of every instruction.
    unit = max(
        (-(-len(f"{x} ") // int(end - begin)) for line in lines for x, begin, end in line),
        default=1,
    )
    stop = int(max(times[1].values(), default=0))
    margin = len(f"worker {len(program) - 1}  ")
    rows = ["time".ljust(margin) + "".join(str(t).ljust(5 * unit) for t in range(0, stop, 5))]
    for w, line in enumerate(lines):
        row = f"worker {w}".ljust(margin)
        now = 0
        for instruction, begin, end in line:
            row += ".".ljust(unit) * int(begin - now)
            rest = "-" if end - begin > 1 else " "
            row += f"{str(instruction).ljust(int(end - begin) * unit - 1, rest)} "
            now = int(end)
        rows.append(row + ".".ljust(unit) * (stop - now))
    return "\n".join(row.rstrip() for row in rows + _never(program, times))


def write_svg(
    path: str | PathLike[str], program: Program, times: Times, scale: float | None = None
) -> None:
    """Draw the program into an SVG file, with a bar for each computation.

    The number on a bar is its micro-batch. Later stages of a worker are lighter. The two
    computations of an overlap share the height of their row. The tooltip of a bar has the
    instruction and its times.

    Args:
        path: the file.
        program: the instructions of each worker.
        times: the start and the end of each computation.
        scale: pixels per unit of time; chosen to fit the numbers if None.
    """
    checked_path(path).write_text(_svg(program, times, scale), encoding="utf-8")


def _svg(program: Program, times: Times, scale: float | None) -> str:
    lines = _bars(program, times)
    rows = []
    for w, line in enumerate(lines):
        stages = sorted({op.stage for x in program[w] for op in operations(x)})
        bars = []
        for instruction, begin, end in line:
            ops = operations(instruction)
            tip = f"{instruction} from {float(begin):g} to {float(end):g}"
            for k, op in enumerate(ops):
                tone = stages.index(op.stage) / len(stages)
                label = str(op.microbatch)
                bars.append(Bar(begin, end, op.kind, label, tip, tone, (k, len(ops))))
        rows.append(BarRow(f"worker {w}", bars))
    stop = float(max(times[1].values(), default=0))
    is_toned = len({op.stage for op in operations_of(program)}) > len(program)
    panel = Panel(rows, stop, notes=_never(program, times), is_toned=is_toned)
    return svg([panel], scale)
