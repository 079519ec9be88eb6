"""Tables of ``python -m benchmarks speed`` in real time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.report.summary import Summary, Table

__all__ = ["summarise"]

Row = dict[str, Any]
Cell = Callable[[Row, Row], str]

NOTES = """\
Rivals take turns, one step each in a round. Figures are medians (least to most) over rounds, and
ratios are medians of the ratios within a round, since the machine is shared and its speed varies.
The `never` row of `pipeline-1` is the wrapper's own overhead. The bubble is the schedule's,
(n - 1) / (m + n - 1). Utilisation is the speed-up divided by the number of devices."""

ON_CPU = """\
The CPU is one device that all partitions share, so nothing can be gained here: a speed-up below 1
is the cost of small micro-batches, of recomputation and of the pipeline. Cores
and threads of a rival, over all of its processes: {threads}, but at least a thread in each.
Experiments keep the papers' names, with at most as many micro-batches as samples. Their layers are
so small that the host's work shows: under checkpointing, ours looks at each tensor that a layer
saves, because it keeps the graph of the layers, where 0.0.7 makes another graph in backward."""

SHARED = """\
Experiments marked as shared have more partitions than GPUs: partitions that share a GPU compute on
streams of their own there."""


def summarise(result: Row) -> Summary:
    """Tables of throughput, of speed-up and of ours over the others."""
    rows: list[Row] = result["rows"]
    names = [x for x in result["rivals"] if any(x in row["rivals"] for row in rows)]
    others = [x for x in names if x != "baseline"]
    tables = [
        table("Samples per second", result, names, ["batch"], throughput),
        table("Speed-up over baseline (utilisation)", result, others, ["bubble"], speed_up),
    ]
    if "ours" in names:
        rest = [x for x in names if x != "ours"]
        tables.append(table("Throughput of ours, by that of", result, rest, [], ours_over))
    notes = [NOTES]
    if result["device"] == "cpu":
        notes.append(ON_CPU.format(threads=result["threads"]))
    if any(shared(result, row) for row in rows):
        notes.append(SHARED)
    return Summary(
        title=f"Throughput in training ({result['device']})",
        tables=tables,
        notes="\n\n".join(notes),
    )


def table(
    caption: str, result: Row, names: Sequence[str], keys: Sequence[str], cell: Cell
) -> Table:
    """A line for each setting, with a cell for each rival."""
    lines: list[list[str | int | None]] = []
    for row in result["rows"]:
        where = row["experiment"] + (", shared" if shared(result, row) else "")
        line: list[str | int | None] = [where, row["n"], row["m"], row["mode"]]
        line += [f"{row[key]:.0%}" if key == "bubble" else row[key] for key in keys]
        for name in names:
            if name in row["rivals"]:
                line.append(cell(row, row["rivals"][name]))
            else:
                memory = "out of memory" in row["failed"].get(name, "")
                line.append("out of memory" if memory else None)
        lines.append(line)
    return Table(["experiment", "n", "m", "checkpoint", *keys, *names], lines, caption)


def shared(result: Row, row: Row) -> bool:
    """Tell whether partitions share GPUs."""
    return bool(result["device"] == "cuda" and row["devices"] < row["n"])


def throughput(row: Row, found: Row) -> str:
    """A cell of the first table."""
    least, most = min(found["rounds"]), max(found["rounds"])
    return f"{found['throughput']:.3g} ({least:.3g} to {most:.3g})"


def speed_up(row: Row, found: Row) -> str:
    """A cell of the second table."""
    if found["speed_up"] is None:
        return "no baseline"
    return f"{found['speed_up']:.2f} ({found['speed_up'] / row['devices']:.0%})"


def ours_over(row: Row, found: Row) -> str:
    """A cell of the third table."""
    return "ours not run" if found["ours_over"] is None else f"{found['ours_over']:.2f}"
