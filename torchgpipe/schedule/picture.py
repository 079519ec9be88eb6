"""Pictures of programs: one row for each worker, with time from left to right.

A computation that a deadlock blocks has no times, so the picture leaves it out and says below the
rows which instruction the worker never reaches.
"""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from math import floor, log10
from os import PathLike
from pathlib import Path
from typing import NamedTuple

from torchgpipe.schedule.program import (
    Instruction,
    Op,
    Program,
    operations,
    operations_of,
    timetable,
)

__all__ = ["Times", "characters", "unit_times", "write_svg"]

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


#: The color of each kind, and its name in the legend.
_KINDS = {
    "F": ("#4c9be8", "forward"),
    "B": ("#5fb760", "backward"),
    "I": ("#3fb3a3", "backward for the input"),
    "W": ("#e8b93f", "backward for the weights"),
    "R": ("#a8a4b5", "recompute"),
}
#: Pixels: the average bar, a row, the margin for worker names, a line of text, between two ticks.
_BAR, _ROW, _MARGIN, _LINE, _TICK = 26, 26, 66, 20, 100


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
    Path(path).write_text(_svg(program, times, scale), encoding="utf-8")


def _svg(program: Program, times: Times, scale: float | None) -> str:
    lines = _bars(program, times)
    bars = [bar for line in lines for bar in line]
    stop = float(max(times[1].values(), default=0))
    # In any unit of time, the average bar is wide enough for its number.
    scale = scale or _BAR * len(bars) / (float(sum(bar.end - bar.begin for bar in bars)) or 1) or 1
    body: list[str] = []
    for w, line in enumerate(lines):
        y = _LINE + w * _ROW
        body += [_text(4, y + 17, f"worker {w}"), _rect(_MARGIN, y + 1, stop * scale, _ROW - 2)]
        stages = sorted({op.stage for x in program[w] for op in operations(x)})
        for instruction, begin, end in line:
            ops = operations(instruction)
            height = (_ROW - 2) / len(ops)
            for k, op in enumerate(ops):
                x, width = _MARGIN + float(begin) * scale, float(end - begin) * scale
                color = _lighter(_KINDS[op.kind][0], stages.index(op.stage) / len(stages))
                tip = f"{instruction} from {float(begin):g} to {float(end):g}"
                body.append(_rect(x, y + 1 + k * height, width, height, color, tip))
                middle = y + 1 + (k + 0.5) * height + 4
                body.append(_text(x + width / 2, middle, str(op.microbatch), "middle"))
    y = _LINE + len(lines) * _ROW + 16
    step = _step(_TICK / scale)
    ticks = [k * step for k in range(int(stop / step) + 1)]
    body += [_text(_MARGIN + t * scale, 14, f"{t:g}") for t in ticks if stop - t >= step / 2]
    body.append(_text(_MARGIN + stop * scale, 14, f"{stop:g}", "end"))
    right: float = _MARGIN
    for kind, (color, name) in _KINDS.items():
        if any(op.kind == kind for op in operations_of(program)):
            body += [_rect(right, y - 10, 12, 12, color), _text(right + 16, y, f"{kind} {name}")]
            right += 32 + 6 * len(f"{kind} {name}")
    body += [_rect(right, y - 10, 12, 12), _text(right + 16, y, "waits")]
    right += 62
    if len({op.stage for op in operations_of(program)}) > len(program):
        body.append(_text(right, y, "lighter: later stages of a worker"))
        right += 200
    for line_ in _never(program, times):
        y += _LINE
        body.append(_text(_MARGIN, y, line_))
    size = f'width="{max(right, _MARGIN + stop * scale + 8):.0f}" height="{y + 10:.0f}"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size}>',
            '<rect width="100%" height="100%" fill="white"/>',
            '<g font-family="sans-serif" font-size="11">',
            *body,
            "</g>",
            "</svg>\n",
        ]
    )


def _step(least: float) -> float:
    """Return the smallest 1, 2 or 5 times a power of ten that is not below ``least``."""
    power = 10.0 ** floor(log10(least))
    return next(x * power for x in (1, 2, 5, 10) if x * power >= least)


def _text(x: float, y: float, words: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


def _rect(
    x: float, y: float, width: float, height: float, color: str = "#eeeeee", tip: str = ""
) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
    title = f"<title>{escape(tip)}</title>" if tip else ""
    edge = ' stroke="white"' if tip else ""
    return f'<rect {place} fill="{color}"{edge}>{title}</rect>'


def _lighter(color: str, share: float) -> str:
    """Mix a color with a share of white."""
    parts = (int(color[k : k + 2], 16) for k in (1, 3, 5))
    return "#" + "".join(f"{round(part + (255 - part) * share):02x}" for part in parts)
