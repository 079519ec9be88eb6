"""Public projects' models by the device map "auto": gradients, and how far devices overlap.

Small models, rebuilt from the papers of the projects, train for a step of eight micro-batches on
virtual accelerators, as they are: `MappedGPipe(model, "auto", sample=...)`. Their gradients, of
weights and of inputs, are compared with those of the plain model on the CPU, one micro-batch after
another. Times are virtual, of an accelerator that computes 1 Gflop/s and moves 10 GB/s, and copies
take none::

    python -m benchmarks projects
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import torch

from benchmarks.command import at_least, output, parse, parser
from benchmarks.models.projects import PROJECTS
from benchmarks.progress import progress
from benchmarks.report.files import Result, head, publish
from benchmarks.report.summary import Summary, Table
from benchmarks.simulate.critical import MODES
from benchmarks.simulate.projects import M, measure
from torchgpipe import testing

__all__ = ["main", "summarise"]

NOTES = f"""\
One step of {M} micro-batches, by the map that "auto" chose. *Modules*: how many modules of the map
each device has. *Error*: the greatest difference of a gradient from the plain model's, over the
greatest number in that gradient (or a thousandth of the greatest in all, if that is more), of all
checkpoint modes. *Races*: of all steps. The ratio is the makespan over the time that the busiest
device computes, without checkpoints: stages that are equally long have (m+n-1)/m. *Speed-up*: the
time of the plain model on one device over the makespan; at best n divided by the ratio. A model
whose code waits for a device (*waits*) is computed by n threads. Streams of one device do not hold
each other up in virtual time, so where a model comes back to its devices the ratio may be less."""


def summarise(result: Result) -> Summary:
    """A line for each model."""
    rows: list[dict[str, Any]] = result["rows"]
    counts = sorted({row["n"] for row in rows})
    even = {n: (M + n - 1) / M for n in counts}
    lines: list[list[str]] = []
    names = [*dict.fromkeys(row["model"] for row in rows)]
    for name in names:
        own = [row for row in rows if row["model"] == name]
        shown = []
        for n in counts:
            (row,) = [x for x in own if x["n"] == n and x["mode"] == "never"]
            ratio = row["ms"] / row["busiest"]
            shown += [f"{ratio:.3f}", f"{row['one'] / row['ms']:.2f}"]
        about = PROJECTS[name].about + ", waits" * PROJECTS[name].waits
        error, races = max(x["error"] for x in own), sum(x["races"] for x in own)
        placed = " ".join(map(str, row["places"]))
        lines.append([name, about, placed, f"{error:.0e}", str(races), *shown])
    columns = [f"{what}, n={n}" for n in counts for what in ("ratio", "speed-up")]
    limits = [x for n in counts for x in (f"{even[n]:.3f}", f"{n / even[n]:.2f}")]
    lines.append(["stages that are equally long", "", "", "", "", *limits])
    title = 'Public projects\' models by the device map "auto"'
    return Summary(
        title,
        [
            Table(
                [
                    "model",
                    "what is special",
                    f"modules, n={counts[-1]}",
                    "error",
                    "races",
                    *columns,
                ],
                lines,
            )
        ],
        NOTES.replace("\n", " "),
    )


def main(argv: Sequence[str]) -> None:
    """Measure and publish."""
    reads = parser("projects", __doc__)
    reads.add_argument("--models", nargs="+", choices=PROJECTS, default=[*PROJECTS], help="names")
    reads.add_argument("--n", type=at_least(2), nargs="+", default=[2, 4], help="devices")
    reads.add_argument("--modes", nargs="+", choices=MODES, default=[*MODES], help="checkpoints")
    options = parse(reads, argv)
    torch.set_num_threads(1)
    # Before the first backward of the process.
    devices = testing.load(max(options.n))
    settings = [*product(options.models, options.n)]
    rows = [
        row
        for name, n in progress(settings, "projects", "setting")
        for row in measure(name, devices[:n], options.modes)
    ]
    publish(output(options, "projects"), head("projects", argv), rows, summarise)
