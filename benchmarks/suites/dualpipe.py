"""Idle time and activations of DualPipe for V shapes beside the published ones.

On virtual accelerators, where F, I and W of a stage take one unit each, and an overlap of a forward
and a backward as long as the backward. The published formulas are those of the table in the README
of deepseek-ai/DualPipe (DeepSeek-V3, arXiv 2412.19437): for PP stages, 1F1B and ZB1P have PP
devices, and DualPipeV half as many.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.command import at_least, output, parser
from benchmarks.progress import progress
from benchmarks.report.files import Result, head, publish
from benchmarks.report.summary import Summary, Table
from benchmarks.simulate.units import run
from torchgpipe.testing import load

F, B, W = 1, 2, 1

#: For each schedule its name here, the stages of a device, and functions of PP for the published
#: idle time and the published activations, in those of a stage.
PUBLISHED = {
    "1F1B": ("1f1b", 1, lambda pp: (pp - 1) * (F + B), lambda pp: pp),
    "ZB1P": ("zero_bubble_h1", 1, lambda pp: (pp - 1) * (F + B - 2 * W), lambda pp: pp),
    "DualPipeV": (
        *("dualpipe_v", 2),
        *(lambda pp: (pp // 2 - 1) * (max(F, B) + B - 3 * W), lambda pp: pp + 1),
    ),
}


def main(argv: Sequence[str]) -> None:
    """Measure and publish."""
    options = parser("dualpipe", __doc__)
    options.add_argument("--pp", type=at_least(4), nargs="+", default=[8, 16], help="even numbers")
    chosen = options.parse_args(argv)
    torch.set_num_threads(1)
    # Before the first backward of the process.
    devices = load(max(chosen.pp))
    result = head("dualpipe", argv)
    rows: list[dict[str, Any]] = []
    settings = [(pp, title) for pp in chosen.pp for title in PUBLISHED]
    for pp, title in progress(settings, "dualpipe", "setting"):
        name, v, idle, kept = PUBLISHED[title]
        step = run(name, devices[: pp // v], 2 * pp, (v * F, v * (B - W), v * W))
        row = {"pp": pp, "m": 2 * pp, "schedule": title, "devices": pp // v}
        rows.append({**row, "idle": [idle(pp), step.idle], "kept": [kept(pp), v * step.kept]})
    publish(output(chosen, "dualpipe"), result, rows, summarise)


def summarise(result: Result) -> Summary:
    """A line for each schedule and number of stages."""
    lines = [
        [
            *(row["pp"], row["m"], row["schedule"], row["devices"]),
            *[f"{x:g}" for key in ("idle", "kept") for x in row[key]],
        ]
        for row in result["rows"]
    ]
    names = ["idle, published", "ours", "activations, published", "ours"]
    return Summary(
        "DualPipe's activations",
        [Table(["PP", "m", "schedule", "devices", *names], lines)],
        notes="In units of a stage's F, and of its activations for one micro-batch. Idle is the "
        "longest time within a step in which a device computes nothing, as ours are always meant.",
    )
