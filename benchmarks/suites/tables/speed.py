"""The tables and charts of ``python -m benchmarks speed``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.report.files import Chart, Report, Table

__all__ = ["report"]

Row = dict[str, Any]
Cell = Callable[[Row, Row], str]

NOTES = """\
Rivals take turns, one step each in a round; figures are medians (least to most) over rounds, and
ratios are medians of the ratios within a round: the machine is shared, and its speed varies. The
`never` row of `pipeline-1` is the wrapper's own overhead. The bubble is that of the schedule,
(n - 1) / (m + n - 1). Utilisation is the speed-up by the number of devices.
torch.distributed.pipelining has a process for each stage, all micro-batches of the same size, and
no checkpoints of its own: where others make them, its stages checkpoint every micro-batch, the last
one too. Gradient accumulation recomputes nothing."""

ON_CPU = """\
The CPU is one device, which all partitions share: nothing can be gained here, and what a speed-up
is below 1 is what small micro-batches (see accumulation), recomputation and the pipeline cost.
Cores and threads of a rival, in all of its processes together: {threads}, but a thread in each.
Experiments keep the papers' names, at no more micro-batches than samples. Their layers are so small
that the host's work shows: under checkpointing, ours looks at each tensor that a layer saves, as it
keeps the graph of the layers, where 0.0.7 makes another one in backward."""

SHARED = """\
Experiments marked as shared have more partitions than GPUs: those that share one compute on streams
of their own there."""


def report(result: Row) -> Report:
    """Makes a report of the result of ``benchmarks.suites.speed``."""
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
    return Report(
        title=f"Throughput in training ({result['device']})",
        tables=tables,
        charts=charts(rows, others),
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
    """Whether partitions share GPUs."""
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


def charts(rows: Sequence[Row], names: Sequence[str]) -> list[Chart]:
    """The speed-ups of each model in each mode."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row["experiment"].partition("/")[0], []).append(row)
    return [
        Chart(
            title=f"{model}: speed-up over baseline",
            unit="times",
            labels=[f"{x['experiment'].partition('/')[2]} {x['mode']}" for x in group],
            series={
                name: [x["rivals"].get(name, {}).get("speed_up") for x in group] for name in names
            },
            limit=1.0,
        )
        for model, group in groups.items()
    ]
