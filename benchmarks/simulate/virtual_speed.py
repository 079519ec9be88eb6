"""The speed experiments in virtual time: full size, at the rates of a GPU, on virtual accelerators.

The layers' costs are counted on the meta device (:mod:`benchmarks.simulate.costs`), and stand-ins
for the partitions take them (:mod:`benchmarks.simulate.standins`). What is measured is the
pipeline: its order, its streams and its copies. The host takes no time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

from benchmarks.models.experiments import SPEED, Experiment
from benchmarks.report.files import Chart, Report, Result, Table
from benchmarks.rivals.processes import Running, UnavailableError
from benchmarks.simulate.costs import P40, count
from benchmarks.simulate.standins import cut

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
    arguments = {"stages": asdict(stages), "m": m, "mode": experiment.mode}
    found: dict[str, Any] = {}
    failed: dict[str, str] = {}
    for process in running:
        name = process.rival.name
        try:
            process.make("benchmarks.simulate.standins:Steps", **arguments)
            steps = [process.call("measure", seed=seed) for seed in range(repeat)]
            free = [process.call("measure", seed=seed, free=True) for seed in range(repeat)]
            found[name] = {key: [step[key] for step in steps] for key in ("ms", "busy")}
            found[name]["free_ms"] = [step["ms"] for step in free]
        except UnavailableError as error:
            failed[name] = error.reason
    return {
        "batch": rows * m,
        "stages": asdict(stages),
        "plain_ms": (sum(costs.forward) + sum(costs.backward)) * m,
        "limit_ms": stages.limit(experiment.mode, m),
        "free_limit_ms": stages.limit(experiment.mode, m, free=True),
        "rivals": found,
        "failed": failed,
    }


NOTES = """\
**Virtual time**: no GPU was measured. Layers cost what they would at the rates of a {gpu}, by their
arithmetic and memory traffic, copies what they would over its link, which carries any number of
them at once, each at its full rate, and the host nothing. The limit is the step in which each task
starts as soon as it may. Figures are samples per second; `plain` is the same layers on one device,
without checkpoints. `published` is what torchgpipe 0.0.5 was published to reach on {gpu}s, in its
repository, with cuts of its own; for the plain U-Net it was {unet}, and {resnet} for the plain
ResNet-101. What is beyond that is what kernels take besides arithmetic and traffic, and the host.

Below, what a step takes over the limit: the median (maximum) of {rounds} steps with random delays
of the host's threads; also with copies that take no time, as 0.0.7 has the value and the skips of a
micro-batch on one stream, where they wait for each other, and ours on two. `busy` is the share of
its time that a device computes, in the mean, recomputation included; the rest is the bubble.
`pipeline-1` is what recomputation costs (`except_last`), and the wrapper itself (`never`). Nothing
raced."""


def report(result: Result) -> Report:
    """Tables of all experiments, and charts of the speed-ups."""
    names, rows = list(result["rivals"]), result["rows"]
    keys = ["experiment", "n", "m", "mode"]
    rates = ["plain", "limit", *names, "ours / 0.0.7", "speed-up", "published"]
    over = [f"{name}{what}" for name in names for what in (" / limit", ", free copies", ", busy")]
    tables = [
        Table([*keys, *rates], [[*[row[x] for x in keys], *rates_of(row, names)] for row in rows]),
        Table([*keys, *over], [[*[row[x] for x in keys], *over_of(row, names)] for row in rows]),
    ]
    unet, resnet = (SPEED[model][0].published for model in ("unet", "resnet101"))
    notes = NOTES.format(gpu=P40.name, rounds=result["rounds"], unet=unet, resnet=resnet)
    title = "Speed, in virtual time"
    return Report(title, tables[:1], charts(rows, names), notes, tables[1:])


def rates_of(row: Result, names: Sequence[str]) -> list[str | None]:
    """Samples per second."""

    def rate(ms: float | None) -> float | None:
        return ms and 1e3 * row["batch"] / ms

    found = {name: rate(middle(row, name)) for name in names}
    ours, theirs = found.get("ours"), found.get("0.0.7")
    figures = [rate(row["plain_ms"]), rate(row["limit_ms"]), *found.values()]
    return [
        *[None if x is None else f"{x:.1f}" for x in figures],
        f"{ours / theirs:.3f}" if ours and theirs else "-",
        f"{ours * row['plain_ms'] / row['batch'] / 1e3:.2f}" if ours else "-",
        f"{row['published']:.1f}" if row["published"] else "-",
    ]


def over_of(row: Result, names: Sequence[str]) -> list[str | None]:
    """Times over the limit, and how busy devices are."""
    cells: list[str | None] = []
    for name in names:
        found = row["rivals"].get(name)
        if found is None:
            cells += [None] * 3
            continue
        for key, limit in (("ms", row["limit_ms"]), ("free_ms", row["free_limit_ms"])):
            cells.append(f"{median(found[key]) / limit:.3f} ({max(found[key]) / limit:.3f})")
        cells.append(f"{median(found['busy']):.1%}")
    return cells


def middle(row: Result, name: str) -> float | None:
    """The median of a rival's steps."""
    found = row["rivals"].get(name)
    return None if found is None else median(found["ms"])


def charts(rows: Sequence[Result], names: Sequence[str]) -> list[Chart]:
    """The speed-ups of each model."""
    groups: dict[str, list[Result]] = {}
    for row in rows:
        groups.setdefault(row["experiment"].partition("/")[0], []).append(row)
    found = []
    for model, group in groups.items():
        series: dict[str, list[float | None]] = {
            name: [row["plain_ms"] / ms if (ms := middle(row, name)) else None for row in group]
            for name in names
        }
        series["limit"] = [row["plain_ms"] / row["limit_ms"] for row in group]
        labels = [f"{row['experiment'].partition('/')[2]} {row['mode']}" for row in group]
        found.append(Chart(f"{model}: speed-up, in virtual time", "over plain", labels, series))
    return found
