"""Cost of an instruction of a schedule on the host, beside a cell of GPipe.

The wrapped model is the same, and so are the gradients: GPipe runs a forward and a backward for
each cell (partition × micro-batch), and a schedule runs the instructions F, B or I and W, and R. A
step is timed until the host has issued it. The time is the host's real time, with the layers of the
cells and, on virtual accelerators, their bookkeeping.

Figures are microseconds: least (median).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.command import add_device, at_least, output, parse, parser
from benchmarks.progress import progress
from benchmarks.report.files import Result, head, publish
from benchmarks.report.summary import Summary, Table
from benchmarks.rivals.cells import in_turn
from benchmarks.rivals.scheduled import mean_of_squares
from benchmarks.simulate.critical import MODES
from torchgpipe import GPipe, ScheduledLoss, testing
from torchgpipe.schedule import named
from torchgpipe.schedule.rewrite import checkpointed

SCHEDULES = ("fill_drain", "1f1b", "zbh1")


def tiny() -> nn.Module:
    """Make a stage of one small layer."""
    return nn.Linear(8, 8)


def small() -> nn.Module:
    """Make a stage of twelve small layers."""
    blocks = [(nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8)) for _ in range(4)]
    return nn.Sequential(*[layer for block in blocks for layer in block])


STAGES: dict[str, Callable[[], nn.Module]] = {"1 layer": tiny, "12 layers": small}


def measure(
    devices: Sequence[torch.device], kind: str, mode: str, m: int, seconds: float
) -> dict[str, Any]:
    """Measure microseconds of GPipe's cell, and of each schedule's cell and instruction."""
    n = len(devices)
    torch.manual_seed(0)
    layers = nn.Sequential(*[STAGES[kind]() for _ in devices])
    model = GPipe(layers, [1] * n, devices=devices, chunks=m, checkpoint=mode)
    input = torch.rand(m, 8, device=devices[0])

    def timed(loss: Callable[[Tensor], Tensor]) -> float:
        model.zero_grad()
        start = perf_counter()
        loss(input).backward()
        return perf_counter() - start

    losses: dict[str, Callable[[Tensor], Tensor]] = {"GPipe": lambda x: mean_of_squares(model(x))}
    losses |= {name: ScheduledLoss(model, mean_of_squares, name) for name in SCHEDULES}
    for loss in losses.values():
        timed(loss)
    steps = {name: partial(timed, loss) for name, loss in losses.items()}
    cells = in_turn(steps, seconds, n * m)
    instructions = {
        name: sum(map(len, checkpointed(named(name, n, m).program, mode, m))) / (n * m)
        for name in SCHEDULES
    }
    return {"stage": kind, "mode": mode, "m": m, "cells": cells, "instructions": instructions}


def summarise(result: Result) -> Summary:
    """A line for each setting and schedule."""
    rows = []
    for row in result["rows"]:
        cell = row["cells"]["GPipe"]
        setting = [row["stage"], row["mode"], row["m"], both(cell, 1)]
        for name, count in row["instructions"].items():
            found = row["cells"][name]
            over = [f"{found[x] / count / cell[x]:.2f}" for x in ("min", "median")]
            ratio = f"{over[0]} ({over[1]})"
            rows.append([*setting, name, both(found, 1), f"{count:.2f}", both(found, count), ratio])
    columns = ["stage", "mode", "m", "GPipe's cell", "schedule", "cell", "instructions"]
    columns += ["instruction", "over GPipe's cell"]
    return Summary(
        "What an instruction costs on the host ({device}, n={n})".format(**result),
        [Table(columns, rows)],
        "Microseconds, layers included: least (median). One thread of operators; the host's "
        "real time. Instructions are those of a cell in the mean.",
    )


def both(found: dict[str, float], count: float) -> str:
    """The least and the median microseconds, divided by a count."""
    return f"{found['min'] / count:.0f} ({found['median'] / count:.0f})"


def main(argv: Sequence[str]) -> None:
    """Measure and publish."""
    reads = parser("instructions", __doc__)
    reads.add_argument(
        "--n", type=int, choices=range(1, 9), default=4, metavar="N", help="partitions, at most 8"
    )
    reads.add_argument("--m", type=at_least(1), nargs="+", default=[16], help="micro-batches")
    reads.add_argument("--modes", nargs="+", choices=MODES, default=MODES, help="checkpoints")
    add_device(reads, "virtual", "cpu", "cuda")
    reads.add_argument("--seconds", type=float, default=10.0, help="of a setting")
    options = parse(reads, argv)
    torch.set_num_threads(1)
    count = torch.cuda.device_count()
    devices = {
        # Before the first backward of the process.
        "virtual": lambda: testing.load()[: options.n],
        "cpu": lambda: [torch.device("cpu")] * options.n,
        "cuda": lambda: [torch.device("cuda", k % count) for k in range(options.n)],
    }[options.device]()
    result = head("instructions", argv, device=options.device, n=options.n)
    settings = [*product(STAGES, options.modes, options.m)]
    rows = [
        measure(devices, *setting, options.seconds)
        for setting in progress(settings, "instructions", "setting")
    ]
    publish(output(options, f"instructions_{options.device}"), result, rows, summarise)
