"""A summary: the tables, charts and notes that a suite makes of its result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

__all__ = ["Chart", "Summary", "Table"]


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
class Chart:
    """Values by label, for each series.

    Args:
        title: a line above the chart.
        unit: of the values.
        labels: texts below the values.
        series: for each name, a value or None for each label.
        lines: whether lines join the values; otherwise they are bars side by side.
        limit: height of a dashed line across the chart.
    """

    title: str
    unit: str
    labels: Sequence[str]
    series: Mapping[str, Sequence[float | None]]
    lines: bool = False
    limit: float | None = None


@dataclass(frozen=True)
class Summary:
    """Everything that a reader sees of a result.

    Args:
        title: the heading.
        tables: one below the other, as Markdown.
        charts: side by side, in one picture.
        notes: how to read the tables, below them.
        more: further tables, which the page of all results leaves out.
    """

    title: str
    tables: Sequence[Table]
    charts: Sequence[Chart] = ()
    notes: str = ""
    more: Sequence[Table] = ()
