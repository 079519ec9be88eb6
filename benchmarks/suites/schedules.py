"""Throughput of schedules: ours and torch.distributed.pipelining's over one plain thread.

Each contender trains in a process of its own, and they take turns, one at a time:

    plain               the plain model, on micro-batches one after another
    ours-SCHEDULE       ScheduledLoss of this checkout, a thread for each stage on the CPU
    torch-SCHEDULE      torch.distributed.pipelining, a process for each stage

The model is a GPT in two equal stages, whose operators take one thread each. On the CPU there are
also four stages that sleep 20 ms in a forward and 40 ms in a backward: these take no processor, so
their time over the schedule's ideal one, as the simulator tells it, shows what the host adds.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from statistics import median
from typing import Any

from benchmarks import command
from benchmarks.models.experiments import Model
from benchmarks.progress import progress
from benchmarks.report.files import Result, head, publish
from benchmarks.report.machine import cores
from benchmarks.report.summary import Summary, Table
from benchmarks.rivals.processes import Running, UnavailableError, on_cores, start
from torchgpipe.schedule import Costs, named, simulate

#: Schedules of torch.distributed.pipelining with the names of ours.
TORCH = {"fill_drain": "ScheduleGPipe", "1f1b": "Schedule1F1B"}
OURS = ("fill_drain", "1f1b", "zbh1")
CONTENDERS = ("plain", *[f"ours-{x}" for x in OURS], *[f"torch-{x}" for x in TORCH])

#: GPT by device: vocabulary, context, blocks, width, heads. The vocabulary is small, so that the
#: two stages take the same time.
GPT = {"cpu": (64, 128, 8, 192, 4), "cuda": (64, 1024, 24, 2048, 16)}
#: Seconds of a forward that sleeps.
SLEEP = 0.02

Row = dict[str, Any]


def parser() -> argparse.ArgumentParser:
    """Parser of the options."""
    parser = command.parser("schedules", __doc__)
    command.add_device(parser, "cpu", "cuda")
    positive = command.at_least(1)
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=CONTENDERS)
    parser.add_argument("--m", type=positive, nargs="+", default=[8, 32], help="micro-batches")
    parser.add_argument("--rows", type=positive, default=4, help="of a micro-batch")
    parser.add_argument("--rounds", type=positive, default=7, help="in which all take turns")
    return parser


def settings(options: argparse.Namespace) -> list[Row]:
    """List the settings to measure; ``ideal`` has the seconds of a step where they are known."""
    keys = ("vocabulary", "context", "layers", "width", "heads")
    gpt: Model = {"name": "gpt", **dict(zip(keys, GPT[options.device]))}
    found = []
    for m in options.m:
        shared = {"m": m, "batch": m * options.rows, "mode": "never"}
        # A block is two layers. The first stage embeds; the last one has the norm and the head.
        balance = [gpt["layers"] + 1, gpt["layers"] + 2]
        found.append({**shared, "model": gpt, "size": gpt["context"], "balance": balance})
    for m in options.m if options.device == "cpu" else ():
        model = {"name": "sleeping", "layers": 4, "seconds": SLEEP}
        costs = Costs(F=SLEEP, I=SLEEP, W=SLEEP)
        ideal = {name: simulate(named(name, 4, m), costs).makespan for name in TORCH}
        shared = {"m": m, "batch": m, "mode": "never", "size": 1, "balance": [1] * 4}
        found.append({**shared, "model": model, "ideal": ideal})
    return found


def task(name: str, setting: Row) -> tuple[str, dict[str, Any]]:
    """Class that trains in the process of a contender, and its arguments."""
    arguments = {key: setting[key] for key in ("model", "size", "batch", "balance", "m", "mode")}
    kind, _, schedule = name.partition("-")
    if kind == "plain":
        return "benchmarks.rivals.plain:Accumulation", arguments
    if kind == "ours":
        return "benchmarks.rivals.scheduled:Scheduled", {**arguments, "schedule": schedule}
    return "benchmarks.rivals.stages:Stages", {**arguments, "schedule": TORCH[schedule]}


def takes_part(name: str, setting: Row) -> bool:
    """Whether a contender is measured at a setting: a layer that sleeps has no halves."""
    return "ideal" not in setting or name.partition("-")[2] in setting["ideal"]


def measure(running: Iterable[Running], setting: Row, rounds: int) -> Row:
    """Measure seconds of each contender's steps, in rounds; also return why some have none."""
    seconds: dict[str, list[float]] = {}
    failed: dict[str, str] = {}
    for turn in range(rounds):
        for process in running:
            name = process.rival.name
            if name in failed or not takes_part(name, setting):
                continue
            try:
                if turn == 0:
                    subject, arguments = task(name, setting)
                    process.make(subject, **arguments)
                    process.call("seconds", steps=2)
                seconds.setdefault(name, []).extend(process.call("seconds", steps=1))
            except UnavailableError as error:
                failed[name] = error.reason
                seconds.pop(name, None)
    return {**setting, "seconds": seconds, "failed": failed}


def summarise(result: Result) -> Summary:
    """A table of throughput over the plain thread, and one of sleeping stages over the ideal."""
    faster, longer = [], []
    for row in result["rows"]:
        plain = row["seconds"].get("plain")
        for name, times in row["seconds"].items():
            milliseconds = f"{min(times) * 1e3:.0f} ({median(times) * 1e3:.0f})"
            if "ideal" in row:
                ideal = row["ideal"][name.partition("-")[2]]
                ratios = f"{min(times) / ideal:.3f} ({median(times) / ideal:.3f})"
                longer.append([len(row["balance"]), row["m"], name, milliseconds, ratios])
            elif plain:
                over = f"{min(plain) / min(times):.2f} ({median(plain) / median(times):.2f})"
                faster.append([len(row["balance"]), row["m"], name, milliseconds, over])
    tables = [Table(["n", "m", "contender", "ms", "over plain"], faster, "GPT in two stages:")]
    if longer:
        columns = ["n", "m", "contender", "ms", "over ideal"]
        tables.append(Table(columns, longer, "Stages that sleep, with what sleeping adds itself:"))
    return Summary(
        f"Throughput of schedules ({result['device']})",
        tables,
        "A step: the least time (the median), and ratios of these.",
    )


def main(argv: Sequence[str]) -> None:
    """Measure and publish."""
    options = command.parse(parser(), argv)
    result = head("schedules", argv, device=options.device)
    rows = []
    with ExitStack() as stack:
        with on_cores(cores()):
            running, left_out = start(stack, options.contenders, [], options.device, 4)
        for setting in progress(settings(options), "schedules", "setting"):
            rows.append(measure(running, setting, options.rounds))
            for name, reason in rows[-1]["failed"].items():
                left_out[f"{name} at {setting['model']['name']}, m={setting['m']}"] = reason
    result |= {"rivals": {x.rival.name: x.rival.version for x in running}, "left_out": left_out}
    publish(command.output(options, f"schedules_{options.device}"), result, rows, summarise)
