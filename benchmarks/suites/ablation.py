"""Ablation: a U-Net with parts of the method switched off, one by one and together.

The parts are the dependency (fork and join, which order backward), the copy streams, the portals
(skips go straight from device to device) and the lanes (copies belong to copy streams in autograd's
eyes, too). torchgpipe 0.0.7, which has no lanes, takes part unchanged. The setting is the one of
the torchgpipe paper's ablation: U-Net (5, 64), images of 192 pixels, a mini-batch of 128, n=4, m=8.

With `--device virtual` a step takes virtual time: a layer takes the time that it would on a Tesla
P40, and a seed delays the host's threads at random. With `--device cuda` the U-Net itself trains,
in real time; partitions share GPUs in turn where there are fewer than four.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from itertools import product
from statistics import median
from typing import Any

import torch

from benchmarks.command import add_device, at_least, output, parse, parser
from benchmarks.models.experiments import ABLATION
from benchmarks.progress import progress
from benchmarks.report.files import Result, head, publish
from benchmarks.report.summary import Summary, Table
from benchmarks.rivals.library import Library
from benchmarks.rivals.processes import start
from benchmarks.rivals.switches import switched_off
from benchmarks.rivals.training import Training
from benchmarks.simulate.costs import P40, balance, count
from benchmarks.simulate.critical import MODES
from benchmarks.simulate.standins import StageCosts, Steps, cut
from torchgpipe import testing

Row = dict[str, Any]

#: A rival without such switches.
RIVAL = "0.0.7"

#: Parts to switch off: none, each one, the paper's other two steps, and all.
VARIANTS: tuple[tuple[str, ...], ...] = (
    (),
    ("dependency",),
    ("streams",),
    ("portals",),
    ("lanes",),
    ("portals", "lanes"),
    ("streams", "portals", "lanes"),
    ("dependency", "streams", "portals", "lanes"),
)

#: Published samples per second of torchgpipe 0.0.5, which had no lanes.
PUBLISHED = {
    ("lanes",): 58.477,
    ("portals", "lanes"): 55.191,
    ("streams", "portals", "lanes"): 41.306,
    ("dependency", "streams", "portals", "lanes"): 30.662,
}


def in_virtual_time(
    stages: StageCosts, parts: Sequence[str], mode: str, devices: list[torch.device], seeds: int
) -> Row:
    """Milliseconds of steps without some parts, each with other delays of the host's threads."""
    with switched_off(parts) as wrap:
        steps = Steps(Library(wrap, devices, testing), asdict(stages), ABLATION.m or 1, mode)
        return listed([steps.measure(seed) for seed in range(seeds)])


def listed(steps: Sequence[dict[str, float]]) -> Row:
    """The figures of several steps, as lists."""
    return {key: [step[key] for step in steps] for key in ("ms", "busy")}


def in_real_time(
    cuts: list[int], parts: Sequence[str], mode: str, devices: list[torch.device], steps: int
) -> Row:
    """Milliseconds of steps without some parts, after two warm-up steps; none if out of memory."""
    model, size, batch, m = ABLATION.model, ABLATION.size, ABLATION.batch, ABLATION.m
    with switched_off(parts) as wrap:
        try:
            training = Training(Library(wrap, devices), model, size, batch, cuts, m, mode)
            return {"ms": [1e3 * seconds for seconds in training.seconds(steps + 2)[2:]]}
        except torch.OutOfMemoryError:
            return {"ms": []}


def of_rival(
    stages: StageCosts, modes: Sequence[str], seeds: int
) -> tuple[list[Row], dict[str, str]]:
    """Rows of torchgpipe 0.0.7 in virtual time, or the reason why there are none."""
    rows = []
    with ExitStack() as stack:
        running, left_out = start(stack, [RIVAL], [], "virtual", ABLATION.n)
        for process in running:
            for mode in modes:
                arguments = {"stages": asdict(stages), "m": ABLATION.m, "mode": mode}
                process.make("benchmarks.simulate.standins:Steps", **arguments)
                steps = [process.call("measure", seed=seed) for seed in range(seeds)]
                rows.append({"mode": mode, "off": [RIVAL], **listed(steps)})
    return rows, left_out


def measure(options: argparse.Namespace) -> tuple[list[Row], dict[str, Any]]:
    """A row for each mode and variant, and the entries that hold for all of them."""
    m = ABLATION.m or 1
    # Virtual accelerators must be loaded before the first backward, and counting costs runs one.
    if options.device == "virtual":
        devices = testing.load()[: ABLATION.n]
    else:
        gpus = torch.cuda.device_count()
        devices = [torch.device("cuda", j % gpus) for j in range(ABLATION.n)]
    costs = count(ABLATION.model, ABLATION.size, ABLATION.batch // m)
    cuts = balance([a + b for a, b in zip(costs.forward, costs.backward)], ABLATION.n)
    stages = cut(costs, cuts, P40.link)
    rows: list[Row] = []
    left_out: dict[str, str] = {}
    for mode, parts in progress([*product(options.modes, VARIANTS)], "ablation", "variant"):
        found = (
            in_virtual_time(stages, parts, mode, devices, options.steps)
            if options.device == "virtual"
            else in_real_time(cuts, parts, mode, devices, options.steps)
        )
        rows.append({"mode": mode, "off": parts, **found})
    if options.device == "virtual" and not options.ours_alone:
        more, left_out = of_rival(stages, options.modes, options.steps)
        rows = [row for mode in options.modes for row in [*rows, *more] if row["mode"] == mode]
    return rows, {
        "balance": cuts,
        "limit_ms": {mode: stages.limit(mode, m) for mode in options.modes},
        "device": options.device,
        "experiment": asdict(ABLATION),
        "devices": len({*devices}),
        "left_out": left_out,
    }


def summarise(result: Result) -> Summary:
    """A line for each mode and variant."""
    virtual = result["device"] == "virtual"
    rows = [line(row, result) for row in result["rows"]]
    columns = ["mode", "without", "ms", "samples/s"]
    columns += ["time / limit", "busy"] if virtual else []
    notes = (
        "Median (maximum) of steps. `published` is the published figure of torchgpipe 0.0.5, which "
        "had no lanes, on four Tesla P40, from its repository, with cuts of its own. Without "
        "lanes, ours resembles 0.0.7 but is not the same; the last row of each mode is 0.0.7."
    )
    if virtual:
        notes = (
            f"**Virtual time**: no GPU was measured. Layers and copies take the time that they "
            f"would on a {P40.name}; a link carries any number of copies at once. The host takes "
            "no time, but its threads are delayed at random, which decides the order of whatever "
            "nothing else orders. The limit is the time of a step in which each task starts as "
            "soon as its inputs are there, and `busy` the share of its time that a device "
            "computes, recomputation included. Nothing raced. "
        ) + notes
    return Summary("What each part brings", [Table([*columns, "published"], rows)], notes)


def line(row: Row, result: Result) -> list[str | int | None]:
    """A line of the table."""
    ms, off, mode = row["ms"], tuple(row["off"]), row["mode"]
    if not ms:
        return [mode, name(off), "out of memory", "-", "-"]
    rate = 1e3 * result["experiment"]["batch"] / median(ms)
    cells: list[str | int | None] = [mode, name(off), f"{median(ms):.0f} ({max(ms):.0f})"]
    cells.append(f"{rate:.1f}")
    if result["device"] == "virtual":
        limit = result["limit_ms"][mode]
        cells.append(f"{median(ms) / limit:.3f} ({max(ms) / limit:.3f})")
        cells.append(f"{median(row['busy']):.1%}")
    published = PUBLISHED.get(off) if mode == "except_last" else None
    return [*cells, f"{published:.1f}" if published else "-"]


def name(parts: Sequence[str]) -> str:
    """The parts that are switched off, in a word."""
    if [*parts] == [RIVAL]:
        return f"({RIVAL} itself)"
    return "all four" if len(parts) == 4 else ", ".join(parts) or "nothing"


def main(argv: Sequence[str]) -> None:
    """Measure and publish."""
    options = parser("ablation", __doc__)
    add_device(options, "virtual", "cuda")
    options.add_argument("--modes", nargs="+", choices=MODES, default=MODES, help="checkpoints")
    options.add_argument("--steps", type=at_least(1), default=10, help="of each variant")
    options.add_argument("--ours-alone", action="store_true", help="leave 0.0.7 out")
    chosen = parse(options, argv)
    torch.set_num_threads(1)
    result = head("ablation", argv)
    rows, more = measure(chosen)
    publish(output(chosen, f"ablation_{chosen.device}"), result | more, rows, summarise)
