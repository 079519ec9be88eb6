"""What a benchmark leaves: its result as JSON, and beside it as Markdown and as a picture.

A result is a dict of what was measured, where and how. The module of the benchmark makes a
:class:`Report` of it, which is drawn here: now, or by ``python -m benchmarks render`` later.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.report.machine import ROOT, describe, heading

__all__ = ["Chart", "Report", "Table", "head", "publish", "render", "render_into"]

#: Where results are kept, and the page that has their tables.
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "benchmarks" / "RESULTS.md"

Result = dict[str, Any]


@dataclass(frozen=True)
class Table:
    """Rows of cells. None stands for what was not run, and text is aligned to the left.

    Args:
        head: the names of the columns.
        rows: a cell for each column.
        caption: what stands above it.
    """

    head: Sequence[str]
    rows: Sequence[Sequence[str | int | None]]
    caption: str = ""


@dataclass(frozen=True)
class Chart:
    """Values by label, for each series.

    Args:
        title: what stands above it.
        unit: of the values.
        labels: what stands below the values.
        series: for each of its names, a value for each label, or None.
        lines: whether values are joined by lines; otherwise they are bars side by side.
        limit: where a dashed line across is drawn.
    """

    title: str
    unit: str
    labels: Sequence[str]
    series: Mapping[str, Sequence[float | None]]
    lines: bool = False
    limit: float | None = None


@dataclass(frozen=True)
class Report:
    """What is to be seen of a result.

    Args:
        title: what was measured.
        tables: as Markdown, one below the other.
        charts: in the picture, side by side.
        notes: how to read the tables, below them.
        more: further tables, which the page of all results leaves out.
    """

    title: str
    tables: Sequence[Table]
    charts: Sequence[Chart] = ()
    notes: str = ""
    more: Sequence[Table] = ()


def head(benchmark: str, arguments: Sequence[str], **more: Any) -> Result:
    """What holds for all rows of a result.

    Args:
        benchmark: the name of its module.
        arguments: those of the command.
        more: whatever else there is to know.
    """
    command = " ".join(["python -m benchmarks", benchmark, *arguments])
    return {"benchmark": benchmark, "command": command, "machine": describe(), **more}


def publish(path: Path, head: Result, rows: Sequence[Mapping[str, Any]]) -> None:
    """Writes a result as JSON, a row a line, renders it, and prints the Markdown.

    Args:
        path: the file, which is replaced.
        head: what :func:`head` gave.
        rows: what was measured.
    """
    before, after = json.dumps({**head, "rows": [None]}, indent=1).rsplit("null", 1)
    lines = ",\n  ".join(json.dumps(row) for row in rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{before}{lines}{after}\n", encoding="utf-8")
    print(render(path))


def render(path: Path) -> str:
    """Writes the Markdown and the picture of a result beside it.

    Returns:
        The Markdown.
    """
    result: Result = json.loads(path.read_text(encoding="utf-8"))
    report = report_of(result)
    text = "\n\n".join([f"# {report.title}", body(report, result)]) + "\n"
    path.with_suffix(".md").write_text(text, encoding="utf-8")
    if report.charts:
        draw(report.charts, path.with_suffix(".png"))
    return text


def render_into(page: Path) -> None:
    """Replaces what stands between ``<!-- FILE.json -->`` and ``<!-- end -->`` by its tables.

    Args:
        page: a file of Markdown; the names in it are relative to it.
    """

    def replaced(match: re.Match[str]) -> str:
        result = json.loads((page.parent / match[1]).read_text(encoding="utf-8"))
        return f"<!-- {match[1]} -->\n{body(report_of(result), result, page=True)}\n<!-- end -->"

    text = page.read_text(encoding="utf-8")
    text = re.sub(r"<!-- (\S+\.json) -->\n.*?<!-- end -->", replaced, text, flags=re.DOTALL)
    page.write_text(text, encoding="utf-8")


def report_of(result: Result) -> Report:
    """What the benchmark of a result shows of it."""
    report: Report = import_module(f"benchmarks.suites.{result['benchmark']}").report(result)
    return report


def body(report: Report, result: Result, *, page: bool = False) -> str:
    """The tables, the notes, and where it was measured.

    Args:
        report: of the result.
        result: the result.
        page: whether it is for the page of all results.
    """
    machine = result["machine"]
    where = f"{heading(machine)}, commit {machine['commit']}; `{result['command']}`"
    left_out = [f"Not run: {x}: {reason}" for x, reason in result.get("left_out", {}).items()]
    tables = [*report.tables, *([] if page else report.more)]
    paragraphs = [where, *map(markdown, tables), report.notes, *left_out]
    return "\n\n".join(filter(None, paragraphs))


def markdown(table: Table) -> str:
    """A table, aligned, so that it reads well as it is."""
    cells = [["not run" if x is None else str(x) for x in row] for row in table.rows]
    columns = [*zip(table.head, *cells)]
    # Figures are aligned to the right.
    left = [not all(FIGURE.match(cell) for cell in column[1:]) for column in columns]
    widths = [max(3, *map(len, column)) for column in columns]

    def line(row: Sequence[str]) -> str:
        padded = [x.ljust(w) if side else x.rjust(w) for x, w, side in zip(row, widths, left)]
        return f"| {' | '.join(padded)} |"

    rule = [":" + "-" * (w - 1) if side else "-" * (w - 1) + ":" for w, side in zip(widths, left)]
    lines = [line(table.head), line(rule), *map(line, cells)]
    return "\n".join([*([table.caption, ""] if table.caption else []), *lines])


#: How a cell begins that is a figure, or stands for one.
FIGURE = re.compile(r"[-+±*]*\d|not run$|-?$")


def draw(charts: Sequence[Chart], path: Path) -> None:
    """Draws charts into a picture; without matplotlib, says how to do so later."""
    try:
        from benchmarks.report import picture
    except ImportError:
        print(
            "the picture needs matplotlib: pip install '.[benchmarks]', "
            f"and then python -m benchmarks render {path.with_suffix('.json')}"
        )
        return
    picture.draw(charts, path)
