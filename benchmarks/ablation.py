"""What each part of the method brings: a U-Net with parts switched off, one by one and together.

The parts are the dependency (fork and join, which order backward), the copy streams, the portals
(skips go straight from device to device) and the lanes (copies belong to copy streams in autograd's
eyes, too, which torchgpipe 0.0.7 does not have). The setting is that of the torchgpipe paper's
ablation: U-Net (5, 64), images of 192 pixels, a mini-batch of 128, n=4 and m=8.

With `--device virtual` a step takes virtual time: layers cost what they would on a Tesla P40, and
the host's threads are delayed at random, by a seed. With `--device cuda` the U-Net itself is
trained, in real time; partitions share GPUs in turn where there are fewer than four.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from itertools import product
from statistics import median
from typing import Any

import torch
from torch import nn

from benchmarks.carried import carried
from benchmarks.command import output, parser
from benchmarks.costs import P40, balance, count
from benchmarks.critical import MODES
from benchmarks.experiments import ABLATION
from benchmarks.library import Library
from benchmarks.progress import progress
from benchmarks.report import Chart, Report, Result, Table, head, publish
from benchmarks.standins import Stages, Steps, cut
from benchmarks.switches import switched_off
from benchmarks.training import Training
from torchgpipe import GPipe, testing

#: What is switched off: nothing, each part, the paper's other two steps, and everything.
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

#: Samples per second that torchgpipe 0.0.5 was published to reach, which had no lanes.
PUBLISHED = {
    ("lanes",): 58.477,
    ("portals", "lanes"): 55.191,
    ("streams", "portals", "lanes"): 41.306,
    ("dependency", "streams", "portals", "lanes"): 30.662,
}


def wrap(parts: Sequence[str], layers: nn.Sequential, cuts: list[int], **options: Any) -> GPipe:
    """A wrapper with or without portals."""
    if "portals" in parts:
        layers, cuts = carried(layers, cuts), [1] * len(cuts)
    return GPipe(layers, cuts, **options)


def in_virtual_time(
    stages: Stages, parts: Sequence[str], mode: str, devices: list[torch.device], seeds: int
) -> dict[str, Any]:
    """Milliseconds of steps, each with other delays of the host's threads."""
    library = Library(lambda *a, **options: wrap(parts, *a, **options), devices, testing)
    steps = Steps(library, asdict(stages), ABLATION.m or 1, mode)
    found = [steps.measure(seed) for seed in range(seeds)]
    return {
        "ms": [step["makespan"] for step in found],
        "busy": [sum(step["busy"]) / ABLATION.n / step["makespan"] for step in found],
        "races": sum(step["races"] for step in found),
    }


def in_real_time(
    cuts: list[int], parts: Sequence[str], mode: str, devices: list[torch.device], steps: int
) -> dict[str, Any]:
    """Milliseconds of steps, after two others."""
    library = Library(lambda *a, **options: wrap(parts, *a, **options), devices)
    training = Training(
        library, ABLATION.model, ABLATION.size, ABLATION.batch, cuts, ABLATION.m, mode
    )
    return {"ms": [1e3 * seconds for seconds in training.seconds(steps + 2)[2:]]}


def measure(options: argparse.Namespace) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """A row for each mode and variant, and what else there is to know."""
    m = ABLATION.m or 1
    # Before the costs are counted, which takes a backward.
    if options.device == "virtual":
        devices = testing.load()[: ABLATION.n]
    else:
        gpus = torch.cuda.device_count()
        devices = [torch.device("cuda", j % gpus) for j in range(ABLATION.n)]
    costs = count(ABLATION.model, ABLATION.size, ABLATION.batch // m)
    cuts = balance([a + b for a, b in zip(costs.forward, costs.backward)], ABLATION.n)
    stages = cut(costs, cuts, P40.link)
    rows = []
    for mode, parts in progress([*product(options.modes, VARIANTS)], "ablation", "variant"):
        with switched_off([part for part in parts if part != "portals"]):
            found = (
                in_virtual_time(stages, parts, mode, devices, options.steps)
                if options.device == "virtual"
                else in_real_time(cuts, parts, mode, devices, options.steps)
            )
        rows.append({"mode": mode, "off": parts, **found})
    limits = {mode: stages.limit(mode, m) for mode in options.modes}
    gpu = P40.name if options.device == "virtual" else torch.cuda.get_device_name(0)
    more = {"balance": cuts, "limit_ms": limits, "gpu": gpu, "device": options.device}
    return rows, {**more, "experiment": asdict(ABLATION), "devices": len({*devices})}


def report(result: Result) -> Report:
    """A line for each mode and variant."""
    virtual = result["device"] == "virtual"
    rows, labels = [], [name(parts) for parts in VARIANTS]
    series: dict[str, list[float | None]] = {}
    for row in result["rows"]:
        ms, parts, mode = row["ms"], tuple(row["off"]), row["mode"]
        limit = result["limit_ms"][mode] if virtual else None
        rate = [1e3 * result["experiment"]["batch"] / x for x in ms]
        cells = [mode, name(parts), f"{median(ms):.0f} ({max(ms):.0f})", f"{median(rate):.1f}"]
        if limit:
            cells += [f"{median(ms) / limit:.3f} ({max(ms) / limit:.3f})"]
            cells += [f"{median(row['busy']):.1%}"]
        published = PUBLISHED.get(parts) if mode == "except_last" else None
        rows.append([*cells, f"{published:.1f}" if published else "-"])
        series.setdefault(mode, []).append(median(rate))
    columns = ["mode", "without", "ms", "samples/s"]
    columns += ["time / limit", "busy"] if virtual else []
    notes = (
        "Median (maximum) of steps. `published` is what torchgpipe 0.0.5, which had no lanes, was "
        "published to reach on four Tesla P40, in its repository. "
    )
    if virtual:
        notes = (
            f"**Virtual time**: no GPU was measured. Layers cost what they would on a "
            f"{result['gpu']}, links likewise, and the host nothing, but that its threads are "
            "delayed at random, which orders what nothing else does. The limit is the step in "
            "which each task starts as soon as it may, and `busy` the share of its time that a "
            "device computes, recomputation included. "
        ) + notes
    chart = Chart(f"U-Net (5, 64), n=4, m=8, {result['device']}", "samples/s", labels, series)
    return Report("What each part brings", [Table([*columns, "published"], rows)], [chart], notes)


def name(parts: Sequence[str]) -> str:
    """What is switched off, in a word."""
    return "all four" if len(parts) == 4 else ", ".join(parts) or "nothing"


def main(argv: Sequence[str]) -> None:
    """Measures and publishes."""
    options = parser("ablation", __doc__)
    options.add_argument("--device", choices=("virtual", "cuda"), default="virtual")
    options.add_argument("--modes", nargs="+", choices=MODES, default=MODES, help="checkpoints")
    options.add_argument("--steps", type=int, default=10, help="of each variant")
    chosen = options.parse_args(argv)
    if chosen.device == "cuda" and not torch.cuda.is_available():
        print("not run: there is no CUDA GPU here")
        return
    torch.set_num_threads(1)
    result = head("ablation", argv)
    rows, more = measure(chosen)
    publish(output(chosen, f"ablation_{chosen.device}"), result | more, rows)
