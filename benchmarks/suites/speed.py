"""The papers' speed experiments: training throughput, ours and rivals side by side.

The models are AmoebaNet-D, U-Net and ResNet-101, cut into n partitions, with m micro-batches. Each
rival trains the same model with the same balance in a process of its own. They take turns, one at a
time:

    baseline            the plain model on one device, with a mini-batch of its own
    ours                this checkout
    0.0.7               torchgpipe of PyPI

With --device cuda, models have the papers' sizes, and partitions share GPUs if there are fewer of
these; with cpu, models are smaller. With virtual, layers of the papers' sizes take the virtual time
that they would take on a Tesla P40, and the plain model takes no part.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

import torch

from benchmarks import command
from benchmarks.models import experiments
from benchmarks.models.experiments import SCALE, SPEED, Experiment
from benchmarks.progress import progress
from benchmarks.report.files import Result, head, publish
from benchmarks.report.machine import cores
from benchmarks.report.summary import Summary
from benchmarks.rivals.processes import Running, UnavailableError, add_options, on_cores, start
from benchmarks.simulate import costs
from benchmarks.simulate import virtual_speed as in_virtual_time
from benchmarks.suites.tables import speed, virtual_speed

__all__ = ["main", "summarise"]

RIVALS = ("ours", "0.0.7")

Row = dict[str, Any]


def summarise(result: Result) -> Summary:
    """Tables of a result in real or virtual time."""
    if result["device"] == "virtual":
        return virtual_speed.summarise(result)
    return speed.summarise(result)


def parser() -> argparse.ArgumentParser:
    """Parser of the options."""
    parser = command.parser("speed", __doc__)
    command.add_device(parser, "cpu", "cuda", "virtual")
    parser.add_argument(
        "--experiments",
        nargs="+",
        choices=[*SPEED, *[f"{model}/{x.name}" for model in SPEED for x in SPEED[model] if x.m]],
        metavar="MODEL[/NAME]",
        help="such as unet, or amoebanetd/n2m4 (default: all)",
    )
    parser.add_argument(
        "--modes",
        nargs="+",
        choices=("paper", "never"),
        default=["paper", "never"],
        help="checkpoints as in the paper, and none",
    )
    command.add_scale(parser)
    positive = command.at_least(1)
    parser.add_argument(
        "--threads",
        type=positive,
        default=cores(),
        help="of a rival, on as many cores, which its processes share",
    )
    parser.add_argument("--rounds", type=positive, default=5, help="in which the rivals take turns")
    add_options(parser, RIVALS)
    return parser


@dataclass(frozen=True)
class Setting:
    """An experiment at the size to measure.

    Args:
        model: name in :data:`SPEED`.
        experiment: for the pipelines.
        baseline: for the plain model.
        balance: number of layers in each partition.
    """

    model: str
    experiment: Experiment
    baseline: Experiment
    balance: list[int]


def settings(options: argparse.Namespace) -> list[Setting]:
    """List the settings to measure."""
    scale = options.scale or (SCALE if options.device == "cpu" else None)
    counted: dict[str, list[float]] = {}
    found = []
    for model, listed in SPEED.items():
        plain, *pipelines = with_baseline(listed)
        for experiment in pipelines:
            names = {model, f"{model}/{experiment.name}"}
            if options.experiments and not names & {*options.experiments}:
                continue
            baseline = plain
            if scale:
                baseline, experiment = (experiments.scaled(x, *scale) for x in (plain, experiment))
            # The costs of layers do not depend on the number of partitions.
            key = f"{model} {experiment.batch // (experiment.m or 1)}"
            if key not in counted:
                counted[key] = layer_costs(experiment)
            balance = costs.balance(counted[key], experiment.n)
            modes = {
                "paper": experiment,
                "never": replace(experiment, mode="never", published=None),
            }
            found += [Setting(model, modes[mode], baseline, balance) for mode in options.modes]
    return found


def with_baseline(listed: Sequence[Experiment]) -> list[Experiment]:
    """Put a missing baseline in front of experiments; it has the samples of one device."""
    first = listed[0]
    if first.m is None:
        return [*listed]
    return [replace(first, name="baseline", batch=first.batch // first.n, n=1, m=None), *listed]


def layer_costs(experiment: Experiment) -> list[float]:
    """Milliseconds of each layer for a micro-batch, which give all rivals' balance."""
    micro_batch = experiment.batch // (experiment.m or 1)
    found = costs.count(experiment.model, experiment.size, micro_batch)
    return [x + y for x, y in zip(found.forward, found.backward)]


def arguments_of(name: str, setting: Setting) -> dict[str, Any]:
    """The arguments of a training in the process of a rival."""
    experiment = setting.baseline if name == "baseline" else setting.experiment
    arguments: dict[str, Any] = {
        key: getattr(experiment, key) for key in ("model", "size", "batch")
    }
    if name != "baseline":
        arguments |= {"balance": setting.balance, "m": experiment.m or 1, "mode": experiment.mode}
    return arguments


def measure(running: Iterable[Running], setting: Setting, options: argparse.Namespace) -> Row:
    """Measure samples per second of each rival in each round; also return why some have none."""
    # A GPU has no room for the models of all rivals at once.
    alone = options.device == "cuda"
    found: dict[str, list[float]] = {}
    failed: dict[str, str] = {}
    for turn in range(options.rounds):
        for process in running:
            name = process.rival.name
            if name in failed:
                continue
            arguments = arguments_of(name, setting)
            try:
                if alone or turn == 0:
                    process.make("benchmarks.rivals.training:Training", **arguments)
                    process.call("seconds", steps=1)
                (seconds,) = process.call("seconds", steps=1)
                found.setdefault(name, []).append(round(arguments["batch"] / seconds, 4))
            except UnavailableError as error:
                memory = "OutOfMemoryError" in str(error)
                failed[name] = "out of memory" if memory else error.reason
                found.pop(name, None)
            if alone:
                with suppress(UnavailableError):  # The error was noted above.
                    process.drop()
    return {**described(setting, options.device), "rivals": figures(found), "failed": failed}


def described(setting: Setting, device: str) -> Row:
    """A setting as entries of the JSON."""
    n, m = setting.experiment.n, setting.experiment.m or 1
    return {
        **asdict(setting.experiment),
        "experiment": f"{setting.model}/{setting.experiment.name}",
        "balance": setting.balance,
        "devices": min(n, torch.cuda.device_count()) if device == "cuda" else 1,
        "bubble": round((n - 1) / (m + n - 1), 4),
    }


def figures(found: dict[str, list[float]]) -> dict[str, Row]:
    """Medians of rates, and of ratios within a round, which hold although rounds vary."""

    def over(rates: list[float], others: list[float] | None) -> float | None:
        return round(median(x / y for x, y in zip(rates, others)), 4) if others else None

    return {
        name: {
            "throughput": round(median(rates), 4),
            "speed_up": over(rates, found.get("baseline")),
            "ours_over": over(found["ours"], rates) if "ours" in found else None,
            "rounds": rates,
        }
        for name, rates in found.items()
    }


def rows(options: argparse.Namespace, chosen: Sequence[Setting]) -> tuple[list[Row], Row]:
    """Measure the rows, and the entries that hold for all of them."""
    names = [*(["baseline"] if options.device != "virtual" else []), *options.rivals]
    count = max(setting.experiment.n for setting in chosen)
    found = []
    with ExitStack() as stack:
        with on_cores(options.threads):
            running, left_out = start(
                stack, names, options.against, options.device, count, options.threads
            )
        for setting in progress(chosen, "speed", "setting"):
            if options.device == "virtual":
                row = in_virtual_time.measure(
                    running, setting.experiment, setting.balance, options.rounds
                )
                found.append({**described(setting, "virtual"), **row})
            else:
                found.append(measure(running, setting, options))
            for name, reason in found[-1]["failed"].items():
                left_out[f"{name} at {found[-1]['experiment']} ({found[-1]['mode']})"] = reason
    return found, {
        "rivals": {x.rival.name: x.rival.version for x in running},
        "left_out": left_out,
        "threads": options.threads,
        "rounds": options.rounds,
    }


def main(argv: Sequence[str]) -> None:
    """Measure and publish."""
    options = command.parse(parser(), argv)
    result = head("speed", argv, device=options.device)
    found, more = rows(options, settings(options))
    publish(command.output(options, f"speed_{options.device}"), result | more, found, summarise)
