"""Stages that are graphs: what an instruction costs the host, and what overlaps hide.

The first table is the host's real time on one CPU, where one thread issues everything. Steps with
eager stages and with graphs alternate, and so does a stage that computes nothing: what is beyond it
is the stage's own.

The second table is virtual time. Forward of a worker takes 1, and backward 2, of which a planted
communication takes 20 %, which needs none of the device's arithmetic. ``hidden`` is the share of
all communication by which the step is shorter than if nothing were hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.command import at_least, output, parse, parser
from benchmarks.progress import progress
from benchmarks.report.files import Result, head, publish
from benchmarks.report.summary import Summary, Table
from benchmarks.rivals.cells import in_turn
from benchmarks.simulate.exchange import Exchange
from torchgpipe import GPipe, ScheduledLoss, testing
from torchgpipe.schedule import Schedule, named
from torchgpipe.schedule.rewrite import with_modes
from torchgpipe.testing import Busy, observe

WIDTH = 8
#: The share of communication.
SHARE = 0.2


def linear(count: int) -> nn.Module:
    """Make a stage of small layers."""
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(count)])


STAGES: dict[str, Callable[[], nn.Module]] = {
    "nothing": nn.Identity,
    "1 linear layer": partial(linear, 1),
    "8 linear layers": partial(linear, 8),
}


def mean_of_squares(output: Tensor) -> Tensor:
    """The loss."""
    return output.square().mean()


def training_of(kind: str, stages: str, schedule: str, mode: str, m: int) -> ScheduledLoss:
    """Make a scheduled loss over one stage on the CPU."""
    torch.manual_seed(0)
    layers = nn.Sequential(STAGES[kind]())
    model = GPipe(layers, [1], devices=["cpu"], chunks=m, checkpoint=mode)
    return ScheduledLoss(model, mean_of_squares, schedule, stages=stages)


def host(schedule: str, mode: str, m: int, seconds: float) -> dict[str, Any]:
    """Measure the microseconds of an instruction, for each stage, eager and as a graph."""
    ways = {
        (kind, stages): training_of(kind, stages, schedule, mode, m)
        for kind in STAGES
        for stages in ("eager", "graph")
    }
    input = torch.rand(m, WIDTH).requires_grad_()

    def timed(training: ScheduledLoss) -> float:
        training.model.zero_grad()
        start = perf_counter()
        training(input).backward()
        return perf_counter() - start

    steps = {f"{kind}, {stages}": partial(timed, way) for (kind, stages), way in ways.items()}
    for step in steps.values():
        step()
    count = sum(map(len, with_modes(named(schedule, 1, m).program, mode, m)))
    found = in_turn(steps, seconds, count)
    return {"table": "host", "schedule": schedule, "mode": mode, "m": m, "found": found}


def stage(communicates: bool, stages: int) -> nn.Module:
    """Make one of a worker's stages, whose forward takes 1 for all, and backward 2."""
    own = (1 - SHARE) / 2 / stages
    share = SHARE / stages if communicates else 0
    return nn.Sequential(
        Busy(own, own, own, features=WIDTH),
        Exchange(share, 2 * share),
        Busy(own, own, own, features=WIDTH),
    )


def makespan(devices: Sequence[torch.device], schedule: Schedule, communicates: bool) -> float:
    """The virtual time of a step."""
    placement = schedule.placement
    stages = len(placement) // len(schedule.program)
    layers = nn.Sequential(*[stage(communicates, stages) for _ in placement])
    where = [devices[w] for w in placement]
    m = schedule.chunks
    model = GPipe(layers, [1] * len(where), devices=where, chunks=m, checkpoint="never")
    training = ScheduledLoss(model, mean_of_squares, schedule, stages="graph")
    input = torch.rand(m, WIDTH, device=where[0])
    training(input)
    with observe(raise_on_race=True) as seen:
        training(input)
    return seen.makespan


SCHEDULES: dict[str, Callable[[int, int], Schedule]] = {
    "1F1B": partial(named, "1f1b"),
    "interleaved 1F1B": partial(named, "interleaved"),
    "ZB-V": partial(named, "zbv"),
    "DualPipeV, F beside B": partial(named, "dualpipe_v"),
    "1F1B of pairs, F beside F, B beside B": lambda n, m: named("1f1b", n, m // 2).pair(),
}


def overlaps(devices: Sequence[torch.device], name: str, m: int) -> dict[str, Any]:
    """Measure a schedule with and without its communication."""
    schedule = SCHEDULES[name](len(devices), m)
    times = [makespan(devices, schedule, communicates) for communicates in (True, False)]
    # Three units of a micro-batch on a worker.
    hidden = 1 - (times[0] - times[1]) / (3 * SHARE * m)
    return {"table": "overlaps", "schedule": name, "m": m, "times": times, "hidden": hidden}


def summarise(result: Result) -> Summary:
    """A table of the host's time, and one of virtual time."""
    host_rows, virtual_rows = [], []
    for row in result["rows"]:
        if row["table"] == "overlaps":
            cells = [f"{x:.1f}" for x in row["times"]]
            hidden = f"{100 * max(row['hidden'], 0):.0f} %"
            virtual_rows.append([row["schedule"], row["m"], *cells, hidden])
            continue
        found = row["found"]
        nothing = found["nothing, eager"]["min"]
        for kind in STAGES:
            eager, graph = (found[f"{kind}, {x}"] for x in ("eager", "graph"))
            beyond = [x["min"] - nothing for x in (eager, graph)]
            share = "-" if kind == "nothing" else f"{beyond[1] / beyond[0]:.2f}"
            setting = [row["schedule"], row["mode"], kind]
            times = [f"{x['min']:.0f} ({x['median']:.0f})" for x in (eager, graph)]
            ratio = f"{graph['min'] / eager['min']:.2f}"
            host_rows.append([*setting, *times, ratio, share])
    columns = ["schedule", "mode", "stage", "eager", "graph", "graph / eager", "beyond nothing"]
    times = ["schedule", "m", "with communication", "without", "hidden"]
    return Summary(
        "Stages as graphs: the host's time, and overlaps",
        [
            Table(columns, host_rows, "Microseconds of an instruction, least (median), CPU:"),
            Table(times, virtual_rows, "Virtual time of a step on {n} devices:".format(**result)),
        ],
        "The host's time is real, with the kernels of the layers, one thread of operators; steps "
        "alternate. `beyond nothing`: the ratio of what is beyond a stage that computes nothing. "
        "Virtual time: no GPU was measured.",
    )


def main(argv: Sequence[str]) -> None:
    """Measure and publish."""
    reads = parser("graphs", __doc__)
    reads.add_argument("--n", type=int, choices=range(1, 9), default=4, metavar="N", help="devices")
    reads.add_argument("--m", type=at_least(2), nargs="+", default=[16, 64], help="micro-batches")
    reads.add_argument("--seconds", type=float, default=10.0, help="of a setting of the host")
    options = parse(reads, argv)
    torch.set_num_threads(1)
    # Before the first backward of the process.
    devices = testing.load()[: options.n]
    result = head("graphs", argv, n=options.n)
    settings: list[Callable[[], dict[str, Any]]] = [
        partial(host, schedule, mode, 16, options.seconds)
        for schedule in ("1f1b", "zbh1")
        for mode in ("never", "always")
    ]
    settings += [partial(overlaps, devices, name, m) for name in SCHEDULES for m in options.m]
    rows = [setting() for setting in progress(settings, "graphs", "setting")]
    publish(output(options, "graphs"), result, rows, summarise)
