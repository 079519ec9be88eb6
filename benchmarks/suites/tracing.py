"""Time that a trace adds to a step, and what it leaves.

Three contenders train the same model in turns, one step each, in one process:

    without    a model that was never traced
    within     each step within ``with trace(model)``
    after      a model that was traced before, and is not any more

The time is that of processors, in all threads of the process: a trace makes them work more and wait
no longer, and neighbours on the machine do not count then. Operators take one thread each. Under
``GPipe`` the caller computes everything, and a ``ScheduledLoss`` has a thread for each of the two
partitions. The models are a GPT, whose cells take milliseconds, and layers so tiny that only the
host takes time: these show the microseconds that a trace adds to a cell (a micro-batch in a
partition, forward and backward). On accelerators the host is ahead of them, so what a trace adds is
hidden behind their work as long as the host has time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from time import process_time
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import command
from benchmarks.models import gpt
from benchmarks.progress import progress
from benchmarks.report.files import Result, head, publish
from benchmarks.report.summary import Summary, Table
from torchgpipe import GPipe, ScheduledLoss, trace

CONTENDERS = ("without", "within", "after")
WRAPPERS = ("GPipe", "ScheduledLoss")
MODELS = ("gpt", "tiny")

#: The GPT's vocabulary, context, blocks, width and heads.
GPT = (64, 64, 4, 128, 4)

Row = dict[str, Any]
Step = Callable[[], None]


def made(model: str, rows: int) -> tuple[nn.Sequential, Tensor, list[int]]:
    """A model, an input of some rows, and the balance of two partitions."""
    if model == "tiny":
        return nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)]), torch.rand(rows, 4), [2, 2]
    vocabulary, context, layers, *_ = GPT
    # A block is two layers. The first partition embeds; the last one has the norm and the head.
    balance = [layers + 1, layers + 2]
    return gpt(*GPT), torch.randint(vocabulary, (rows, context)), balance


def mean_of_squares(output: Tensor) -> Tensor:
    """The loss."""
    return output.square().mean()


def trained(wrapper: str, model: str, m: int, rows: int, mode: str) -> tuple[nn.Module, Step]:
    """A wrapped model, and a call that makes a step of training."""
    torch.manual_seed(0)
    layers, input, balance = made(model, m * rows)
    pipeline = GPipe(layers, balance, devices=["cpu"] * 2, chunks=m, checkpoint=mode)
    optimizer = torch.optim.SGD(pipeline.parameters(), lr=1e-6)
    training = pipeline if wrapper == "GPipe" else ScheduledLoss(pipeline, mean_of_squares)

    def step() -> None:
        output = training(input)
        (output if training is not pipeline else mean_of_squares(output)).backward()
        optimizer.step()
        optimizer.zero_grad()

    return training, step


def timed(step: Step) -> float:
    """Seconds that processors work on a step, whatever else the machine has to do."""
    start = process_time()
    step()
    return process_time() - start


def traced(model: nn.Module, step: Step) -> float:
    """Seconds of a step within a trace, whose beginning and end are not counted."""
    with trace(model):
        return timed(step)


def measure(setting: Row, rounds: int) -> Row:
    """Measure the seconds of each contender's steps, in turns."""
    calls: dict[str, Callable[[], float]] = {}
    for name in CONTENDERS:
        model, step = trained(**setting)
        calls[name] = partial(traced, model, step) if name == "within" else partial(timed, step)
        step()
        if name == "after":
            traced(model, step)
    seconds: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    for turn in range(rounds):
        # Each of them comes after each other one as often.
        for k in range(len(CONTENDERS)):
            name = CONTENDERS[(turn + k if turn % 2 else turn - k) % len(CONTENDERS)]
            seconds[name].append(calls[name]())
    return {**setting, **figures(seconds)}


def figures(seconds: dict[str, list[float]]) -> Row:
    """The least and the median time, their ratios to a step without a trace, and what it adds."""
    base = seconds["without"]
    ratios = {
        name: [min(own) / min(base), median(x / y for x, y in zip(own, base))]
        for name, own in seconds.items()
        if name != "without"
    }
    added = median(x - y for x, y in zip(seconds["within"], base))
    return {"without": [min(base), median(base)], "ratios": ratios, "added": added}


def summarise(result: Result) -> Summary:
    """Ratios of the least times and of the times in a round, and the microseconds of a cell."""
    found = []
    for row in result["rows"]:
        line: list[str | int | None] = [row["model"], row["wrapper"], row["mode"], row["m"]]
        least, middle = (1e3 * x for x in row["without"])
        line.append(f"{least:.2f} ({middle:.2f})")
        for name in CONTENDERS[1:]:
            least, middle = row["ratios"][name]
            line.append(f"{least:.3f} ({middle:.3f})")
        line.append(f"{1e6 * row['added'] / (2 * row['m']):.0f}")
        found.append(line)
    columns = ["model", "wrapper", "mode", "m", "without, ms", *CONTENDERS[1:], "µs per cell"]
    return Summary(
        "What a trace costs",
        [Table(columns, found)],
        "Two partitions on the CPU. Processor time of a step without a trace: the least (the "
        "median). The others are ratios to it: of the least times (the median of the ratios in a "
        "round). `after` is a model that was traced before. The last column is what a trace adds "
        "to a cell, the median of rounds.",
    )


def main(argv: Sequence[str]) -> None:
    """Measure and publish."""
    parser = command.parser("tracing", __doc__)
    positive = command.at_least(1)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--m", type=positive, default=8, help="micro-batches")
    parser.add_argument("--rows", type=positive, default=4, help="of a micro-batch")
    parser.add_argument("--rounds", type=positive, default=40, help="in which all take turns")
    options = command.parse(parser, argv)
    torch.set_num_threads(1)
    settings = [
        {"model": model, "wrapper": wrapper, "mode": mode, "m": options.m, "rows": options.rows}
        for model in options.models
        for wrapper in WRAPPERS
        for mode in ("never", "except_last")
    ]
    rows = [
        measure(setting, options.rounds * (10 if setting["model"] == "tiny" else 1))
        for setting in progress(settings, "tracing", "setting")
    ]
    result = head("tracing", argv, rounds=options.rounds)
    publish(command.output(options, "tracing"), result, rows, summarise)
