"""A summary: the tables and notes that a suite makes of its result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Summary", "Table"]


@dataclass(frozen=True)
class Table:
    """Rows of cells; None stands for a figure that was not measured.

    Args:
        head: names of the columns.
        rows: a cell for each column.
        caption: a line above the table.
    """

    head: Sequence[str]
    rows: Sequence[Sequence[str | int | None]]
    caption: str = ""


@dataclass(frozen=True)
class Summary:
    """Everything that a reader sees of a result.

    Args:
        title: the heading.
        tables: one below the other, as Markdown.
        notes: how to read the tables, below them.
        more: further tables, which the page of all results leaves out.
    """

    title: str
    tables: Sequence[Table]
    notes: str = ""
    more: Sequence[Table] = ()
