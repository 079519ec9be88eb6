"""Tables of ``python -m benchmarks speed --device virtual``."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from benchmarks.models.experiments import SPEED
from benchmarks.report.summary import Summary, Table
from benchmarks.simulate.costs import P40

__all__ = ["summarise"]

Row = dict[str, Any]

NOTES = """\
**Virtual time**: no GPU was measured. A layer takes the time of its arithmetic and its memory
traffic at the rates of a {gpu}. A copy takes the time of its bytes over that GPU's link, which
carries any number of copies at once, each at its full rate. The host takes no time. The limit is
the time of a step in which each task starts as soon as its inputs are there. Figures are samples
per second; `plain` is the same layers on one device, without checkpoints. `published` is the
published figure of torchgpipe 0.0.5 on {gpu}s, from its repository, with cuts of its own; its
figure for the plain U-Net was {unet}, and for the plain ResNet-101 {resnet}. Estimates are above
the published figures because kernels and the host take further time, which is not counted here.

Below, the time of a step over the limit: the median (maximum) of {rounds} steps with random delays
of the host's threads; and the same with copies that take no time. Copies matter because 0.0.7 puts
the value and the skips of a micro-batch on one stream, where they wait for each other, and ours on
two. `busy` is the mean share of its time that a device computes, recomputation included; the rest
is the bubble. `pipeline-1` shows the cost of recomputation (`except_last`) and of the wrapper
itself (`never`). Nothing raced."""


def summarise(result: Row) -> Summary:
    """Tables of all experiments."""
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
    return Summary(title, tables[:1], notes, tables[1:])


def rates_of(row: Row, names: Sequence[str]) -> list[str | None]:
    """Cells of the first table: samples per second."""

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


def over_of(row: Row, names: Sequence[str]) -> list[str | None]:
    """Cells of the second table: times over the limit, and shares of time that devices compute."""
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


def middle(row: Row, name: str) -> float | None:
    """Median milliseconds of a rival's steps."""
    found = row["rivals"].get(name)
    return None if found is None else median(found["ms"])
