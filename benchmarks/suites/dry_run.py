"""Published memory and speed-ups of torchgpipe 0.0.5, predicted by dry runs beside them.

Each row trains a model of the paper at full size, with the published balance, on virtual
accelerators that compute shapes alone (`torchgpipe.testing.dry_run`). The hardware is a Tesla P40
by the rates of its data sheet, and nothing is calibrated. Memory is what the allocator reserves on
all devices together, as the published figures are. A speed-up is that over the model's first row.

The published figures and settings are those of kakaobrain/torchgpipe 0.0.7 (`docs/benchmarks.rst`
and `benchmarks/*/main.py`).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks import command
from benchmarks.alone import alone, warmed
from benchmarks.models.experiments import MEMORY, SPEED, Experiment, build, samples
from benchmarks.progress import progress
from benchmarks.report.files import Result, head, publish
from benchmarks.report.summary import Summary, Table
from torchgpipe import GPipe
from torchgpipe.testing import Prediction, dry_run

__all__ = ["main", "summarise"]

GIB = 2**30
HARDWARE = "p40-24gb"

#: The most micro-batches of a row. A row with more has so many of the same size.
MOST = 256

#: The published balances: layers of a U-Net or a ResNet, cells of an AmoebaNet-D.
BALANCES = {
    "memory": {
        "unet": [
            [505],
            [526, 551],
            [472, 54, 36, 515],
            [800, 140, 62, 36, 36, 36, 36, 987],
        ],
        "amoebanetd": [[24], [16, 8], [16, 12, 7, 7], [23, 16, 11, 6, 6, 5, 5, 6]],
    },
    "speed": {
        "unet": [
            [241],
            [104, 137],
            [30, 66, 84, 61],
            [16, 27, 31, 44, 22, 57, 27, 17],
        ],
        "resnet101": [
            [370],
            [135, 235],
            [44, 92, 124, 110],
            [26, 22, 33, 44, 44, 66, 66, 69],
        ],
        "amoebanetd": [
            *([7, 17], [9, 15], [9, 15]),
            *([3, 4, 5, 12], [3, 6, 7, 8], [3, 6, 7, 8]),
            *([2, 2, 2, 2, 2, 3, 4, 7], [2, 2, 2, 3, 3, 4, 4, 4], [2, 2, 2, 3, 3, 4, 4, 4]),
        ],
    },
}

#: Published GiB. That of an AmoebaNet-D is the sum of its model and its activations; its baseline
#: did not fit.
PUBLISHED: dict[str, list[float | None]] = {
    "unet": [20.3, 20.5, 43.4, 79.1, 154.1],
    "amoebanetd": [None, 0.91 + 3.57, 3.39 + 6.07, 6.91 + 11.80, 10.83 + 20.62],
}

#: A kind of figure, a model, an experiment, its balance and the published figure.
Setting = tuple[str, str, Experiment, list[int] | None, float | None]


def settings(chosen: Sequence[str], most: int) -> list[Setting]:
    """List the rows of some kinds of figures, with at most so many devices."""
    found: list[Setting] = []
    for kind, models in (("memory", MEMORY), ("speed", SPEED)):
        for model, experiments in models.items() if kind in chosen else ():
            plain: list[list[int] | None] = [None for x in experiments if x.m is None]
            balances = [*plain, *BALANCES[kind][model]]
            memory = PUBLISHED.get(model, [])
            speed = [x.published for x in experiments]
            figures: list[float | None] = memory if kind == "memory" else speed
            rows = zip(experiments, balances, figures)
            found += [
                (kind, model, x, balance, figure) for x, balance, figure in rows if x.n <= most
            ]
    return found


def layers_of(model: nn.Sequential, cells: list[int]) -> list[int]:
    """A balance in layers, of one in an AmoebaNet-D's cells: the stem, the cells, the end."""
    names = [name for name, _ in model.named_children()]
    ends = ("relu", "pool", "flatten", "classify")
    owners = [x.split("_")[0] if "_" in x else "end" if x in ends else "begin" for x in names]
    lengths = [len([*group]) for _, group in groupby(owners)]
    assert len(lengths) == sum(cells), "as many cells as the published model has"
    return [sum(lengths[sum(cells[:j]) : sum(cells[: j + 1])]) for j in range(len(cells))]


def maker(
    kind: str, model: str, experiment: Experiment, balance: list[int] | None
) -> Callable[[list[torch.device]], Callable[[], None]]:
    """A function that makes a step as the published benchmark has it."""

    def make(devices: list[torch.device]) -> Callable[[], None]:
        layers = build(experiment.model)
        if balance is None:
            wrapped: nn.Module = layers.to(devices[0])
            first = last = devices[0]
        else:
            cut = layers_of(layers, balance) if model == "amoebanetd" else balance
            pipeline = GPipe(
                layers, cut, devices=devices, chunks=experiment.m or 1, checkpoint=experiment.mode
            )
            wrapped, first, last = pipeline, pipeline.devices[0], pipeline.devices[-1]
        # PyTorch of that time took one parameter after another; all at once need more memory.
        optimizer: torch.optim.Optimizer
        if (kind, model) == ("memory", "amoebanetd"):
            optimizer = torch.optim.RMSprop(wrapped.parameters(), foreach=False)
        else:
            optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
        input = samples(experiment.model, experiment.size, experiment.batch, first)
        if model == "unet":
            target = torch.rand(len(input), 1, *input.shape[2:], device=last)
            loss: Any = F.binary_cross_entropy_with_logits
        else:
            target = torch.randint(1000, (len(input),), device=last)
            loss = F.cross_entropy

        m = experiment.m or 1

        def step(few: int) -> None:
            if isinstance(wrapped, GPipe):
                wrapped.chunks = few
            rows = len(input) * few // m
            loss(wrapped(input[:rows]), target[:rows]).backward()
            optimizer.step()
            # The published benchmarks of memory keep their gradients. Where some are there already,
            # ours needs room for a second set, since it adds up those of a mini-batch first.
            optimizer.zero_grad()

        return warmed(step, m)

    return make


def row_of(setting: Setting) -> dict[str, Any]:
    """Run a row dry."""
    kind, model, experiment, balance, published = setting
    if experiment.m and experiment.m > MOST:
        rows = -(-experiment.batch // experiment.m)
        experiment = replace(experiment, m=MOST, batch=MOST * rows)
    torch.set_num_threads(1)
    found: Prediction = dry_run(maker(kind, model, experiment, balance), experiment.n, HARDWARE)
    return {
        "kind": kind,
        "model": model,
        "name": experiment.name,
        "n": experiment.n,
        "m": experiment.m,
        "batch": experiment.batch,
        "reserved": [*found.reserved],
        "allocated": [*found.allocated],
        "fits": found.fits,
        "seconds": found.time,
        "published": published,
    }


def parser() -> argparse.ArgumentParser:
    """Parser of the options."""
    parser = command.parser("dry_run", __doc__)
    kinds = [*BALANCES]
    parser.add_argument("--kinds", nargs="+", choices=kinds, default=kinds, help="of figures")
    parser.add_argument(
        "--models", nargs="+", choices=[*SPEED], default=[*SPEED], help="of the papers"
    )
    parser.add_argument(
        "--most", type=command.at_least(1), default=8, help="devices of the largest row"
    )
    return parser


def main(argv: Sequence[str]) -> None:
    """Predict and publish."""
    options = parser().parse_args(argv)
    chosen = [x for x in settings(options.kinds, options.most) if x[1] in options.models]
    rows = [alone(row_of, setting) for setting in progress(chosen, "dry_run", "row")]
    path = command.output(options, "dry_run")
    publish(path, head("dry_run", argv, hardware=HARDWARE), rows, summarise)


def compared(rows: Sequence[dict[str, Any]]) -> list[tuple[dict[str, Any], float, float | None]]:
    """The predicted and the published figure of each row: GiB, or the speed-up over the first."""
    first: dict[str, dict[str, Any]] = {}
    found = []
    for row in rows:
        if row["kind"] == "memory":
            found.append((row, sum(row["reserved"]) / GIB, row["published"]))
            continue
        base = first.setdefault(row["model"], row)
        rate = row["batch"] / row["seconds"] / (base["batch"] / base["seconds"])
        found.append((row, rate, row["published"] / base["published"]))
    return found


def summarise(result: Result) -> Summary:
    """A table of memory and one of speed-ups."""
    lines: dict[str, list[list[Any]]] = {"memory": [], "speed": []}
    shares = []
    for row, predicted, published in compared(result["rows"]):
        off = None if published is None else predicted / published - 1
        text = "did not fit" if published is None else f"{published:.3g}"
        lines[row["kind"]].append(
            [
                *(row["model"], row["name"], row["n"], row["m"] or "-"),
                *(f"{predicted:.3g}", text, "-" if off is None else f"{off:+.1%}"),
                "yes" if row["fits"] else "no",
                *(f"{row['processor']:.0f}", f"{row['rss'] / GIB:.2f}"),
            ]
        )
        if off:
            shares.append((row["kind"], abs(off)))
    near = {
        kind: f"{sum(x <= 0.1 for x in found)} of {len(found)}"
        for kind in lines
        if (found := [x for of, x in shares if of == kind])
    }
    columns = ["model", "experiment", "n", "m"]
    more = ["published", "off", "fits", "CPU s", "laptop GiB"]
    tables = [
        Table([*columns, unit, *more], lines[kind])
        for kind, unit in (("memory", "predicted GiB"), ("speed", "predicted speed-up"))
        if lines[kind]
    ]
    counts = ", ".join(f"{kind} {count}" for kind, count in near.items())
    return Summary(
        "Published tables, predicted by dry runs",
        tables,
        "Predicted and not measured, on virtual accelerators of the kind "
        f"{result['hardware']}, by its data sheet. Within 10 % of the published figure: {counts}. "
        "The step of memory drops its gradients, where the published one keeps them, and RMSprop "
        "takes one parameter after another, as at the time; with kept gradients, pipelines are "
        "predicted 20 to 42 % above. "
        f"Rows of more than {MOST} micro-batches take {MOST} of the same size. `fits` tells "
        "whether the prediction fits the GPU. The published GPUs ran cuDNN, whose workspaces are "
        "in no prediction, and torchgpipe 0.0.5, which let copies wait for computation.",
    )
