"""Markdown of a summary."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from benchmarks.report.machine import heading
from benchmarks.report.summary import Summary, Table

__all__ = ["body", "markdown"]

#: The start of a cell that is a figure, or that stands for one.
FIGURE = re.compile(r"[-+±*]*\d|not run$|-?$")


def body(summary: Summary, result: dict[str, Any], *, page: bool = False) -> str:
    """The machine and the command, the tables, and the notes.

    Args:
        summary: of the result.
        result: what a suite measured.
        page: whether the text is for the page of all results.
    """
    machine = result["machine"]
    where = f"{heading(machine)}, commit {machine['commit']}; `{result['command']}`"
    left_out = [f"Not run: {x}: {reason}" for x, reason in result.get("left_out", {}).items()]
    tables = [*summary.tables, *([] if page else summary.more)]
    paragraphs = [where, *map(markdown, tables), summary.notes, *left_out]
    return "\n\n".join(filter(None, paragraphs))


def markdown(table: Table) -> str:
    """A table whose columns are padded, so that the source reads well too."""
    cells = [["not run" if x is None else str(x) for x in row] for row in table.rows]
    columns = [*zip(table.head, *cells)]
    # Columns of figures are flush right.
    left = [not all(FIGURE.match(cell) for cell in column[1:]) for column in columns]
    widths = [max(3, *map(len, column)) for column in columns]

    def line(row: Sequence[str]) -> str:
        padded = [x.ljust(w) if side else x.rjust(w) for x, w, side in zip(row, widths, left)]
        return f"| {' | '.join(padded)} |"

    rule = [":" + "-" * (w - 1) if side else "-" * (w - 1) + ":" for w, side in zip(widths, left)]
    lines = [line(table.head), line(rule), *map(line, cells)]
    return "\n".join([*([table.caption, ""] if table.caption else []), *lines])
