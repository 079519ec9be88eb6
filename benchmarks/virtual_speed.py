"""The speed experiments in virtual time: full size, at the rates of a GPU, on virtual accelerators.

The layers' costs are counted on the meta device (:mod:`benchmarks.costs`), and stand-ins for the
partitions take them (:mod:`benchmarks.standins`). What is measured is the pipeline: its order, its
streams and its copies. The host takes no time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

from benchmarks.costs import P40, count
from benchmarks.experiments import Experiment
from benchmarks.report import Chart, Report, Result, Table
from benchmarks.rivals import Running
from benchmarks.standins import cut

__all__ = ["measure", "report"]


def measure(
    running: Sequence[Running], experiment: Experiment, balance: list[int], repeat: int
) -> dict[str, Any]:
    """Milliseconds of virtual time that a step takes, of each rival.

    Args:
        running: the rivals' processes.
        experiment: what they train.
        balance: how many layers each partition has.
        repeat: how many steps are taken, with different delays of the host's threads.
    """
    m = experiment.m or 1
    rows = experiment.batch // m
    costs = count(experiment.model, experiment.size, rows)
    stages = cut(costs, balance, P40.link)
    found: dict[str, Any] = {}
    for process in running:
        process.make("benchmarks.standins:Steps", stages=asdict(stages), m=m, mode=experiment.mode)
        steps = [process.call("measure", seed=seed) for seed in range(repeat)]
        found[process.rival.name] = {
            "ms": [step["makespan"] for step in steps],
            "busy": [sum(step["busy"]) / experiment.n / step["makespan"] for step in steps],
            "races": sum(step["races"] for step in steps),
        }
    return {
        "batch": rows * m,
        "stages": asdict(stages),
        "plain_ms": (sum(costs.forward) + sum(costs.backward)) * m,
        "limit_ms": stages.limit(experiment.mode, m),
        "rivals": found,
    }


def report(result: Result) -> Report:
    """A table of all experiments, and a chart of the speed-ups."""
    names = list(result["rivals"])
    rows = result["rows"]
    columns = ["experiment", "n", "m", "checkpoint", "plain/s"]
    for name in names:
        columns += [f"{name}/s", "speed-up", "busy", "time / limit"]
    columns += ["speed-up at the limit", "published/s"]
    labels = [f"{row['experiment']} {row['mode']}" for row in rows]
    series: dict[str, list[float | None]] = {
        name: [row["plain_ms"] / median(row["rivals"][name]["ms"]) for row in rows]
        for name in names
    }
    series["limit"] = [row["plain_ms"] / row["limit_ms"] for row in rows]
    notes = f"""\
**Virtual time**: no GPU was measured. Layers cost what they would at the rates of a {P40.name}, by
their arithmetic and memory traffic, copies what they would over its link, and the host nothing.
`/s` is samples per second, `plain` the same layers on one device without checkpoints, `speed-up`
over that. `busy` is the share of its time that a device computes, in the mean, recomputation
included; the rest is the bubble. The limit is the step in which each task starts as soon as it may;
over it the median (maximum) of {result["rounds"]} steps with random delays of the host's threads.
`published` is what torchgpipe 0.0.5 was published to reach on {P40.name}s, in its repository."""
    chart = Chart("Speed-up over the plain model, in virtual time", "times", labels, series, True)
    lines = [line(row, names) for row in rows]
    return Report("Speed, in virtual time", [Table(columns, lines)], [chart], notes)


def line(row: Result, names: Sequence[str]) -> list[str | int | None]:
    """A row of the table."""
    cells: list[str | int | None] = [row[key] for key in ("experiment", "n", "m", "mode")]
    cells.append(f"{1e3 * row['batch'] / row['plain_ms']:.1f}")
    for name in names:
        found = row["rivals"][name]
        ms = median(found["ms"])
        cells += [
            f"{1e3 * row['batch'] / ms:.1f}",
            f"{row['plain_ms'] / ms:.2f}",
            f"{median(found['busy']):.1%}",
            f"{ms / row['limit_ms']:.3f} ({max(found['ms']) / row['limit_ms']:.3f})",
        ]
    cells.append(f"{row['plain_ms'] / row['limit_ms']:.2f}")
    return [*cells, f"{row['published']:.1f}" if row["published"] else "-"]
