"""Memory of each device in training: the plain model, ours and torchgpipe 0.0.7 side by side.

The settings are the papers' experiments, in which the model grows with the devices, and a grid of
modes, partitions and micro-batches over small models. All rivals have the same balance, by the
memory that `benchmarks/simulate/costs.py` counts without running the model. Each rival trains by
SGD in a process of its own. Only the second step counts, since the first one allocates whatever
stays; each step drops its gradients.

On virtual accelerators (`--device virtual`, the default) the experiments are scaled: as many
layers, with fewer channels, smaller images and fewer samples. Their tensors are real, and so are
their bytes. With `--device cuda` they run at full size. An experiment that needs more GPUs than
there are does not run, and one that does not fit is marked; the baselines and `pipeline-1` take one
GPU.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict
from typing import Any

import torch

from benchmarks import command
from benchmarks.models import experiments
from benchmarks.models.experiments import MEMORY, SCALE, Experiment, unet
from benchmarks.progress import progress
from benchmarks.report.files import head, publish
from benchmarks.rivals.processes import Running, UnavailableError, add_options, start
from benchmarks.simulate import costs
from benchmarks.simulate.critical import MODES
from benchmarks.suites.tables.memory import summarise

__all__ = ["main", "summarise"]

RIVALS = ("plain", "ours", "0.0.7")

#: Models of the grid, each as its plain training.
GRID = {
    "unet": Experiment("plain", unet(2, 8), 64, 32),
    "gpt": Experiment(
        "plain",
        {"name": "gpt", "vocabulary": 512, "context": 64, "layers": 8, "width": 64, "heads": 4},
        64,
        32,
    ),
}

Row = dict[str, Any]

#: Family, experiment, and rivals to measure.
Setting = tuple[str, Experiment, Sequence[str]]


def parser() -> argparse.ArgumentParser:
    """Parser of the options."""
    parser = command.parser("memory", __doc__)
    command.add_device(parser, "virtual", "cuda")
    parser.add_argument(
        "--experiments",
        nargs="*",
        choices=MEMORY,
        default=[*MEMORY],
        help="models of the papers' experiments",
    )
    command.add_scale(parser)
    parser.add_argument("--grid", nargs="*", choices=GRID, default=[*GRID], help="small models")
    positive = command.at_least(1)
    for name, default, help in (("n", [1, 4, 8], "partitions"), ("m", [1, 4, 16], "micro-batches")):
        parser.add_argument(
            f"--{name}", type=positive, nargs="+", default=default, help=f"{help} of the small ones"
        )
    parser.add_argument(
        "--modes", nargs="+", choices=MODES, default=MODES, help="checkpoints of the small ones"
    )
    add_options(parser, RIVALS)
    return parser


def settings(options: argparse.Namespace) -> list[Setting]:
    """List the settings to measure."""
    scale = options.scale or (None if options.device == "cuda" else SCALE)
    wrappers = [name for name in (*options.rivals, *options.against) if name != "plain"]
    found: list[Setting] = []
    for name in options.experiments:
        for experiment in MEMORY[name]:
            setting = experiments.scaled(experiment, *scale) if scale else experiment
            rivals = ["plain", *wrappers] if setting.m else ["plain"]
            found.append(("experiments", setting, rivals))
    for name in options.grid:
        plain = GRID[name]
        found.append(("grid", plain, ["plain"]))
        for n in options.n:
            for m in options.m:
                for mode in options.modes:
                    setting = Experiment(mode, plain.model, plain.size, plain.batch, n, m, mode)
                    found.append(("grid", setting, wrappers))
    return [
        (family, setting, [name for name in rivals if name in (*options.rivals, *wrappers)])
        for family, setting, rivals in found
    ]


def cut(setting: Experiment) -> list[int]:
    """Balance by bytes: parameters, their gradients, and one micro-batch's saved tensors."""
    found = costs.count(setting.model, setting.size, -(-setting.batch // (setting.m or 1)))
    needed = [2 * x + saved for x, saved in zip(found.parameters, found.saved)]
    return costs.balance(needed, setting.n)


def measure(process: Running, setting: Experiment, balance: list[int] | None) -> Row:
    """Memory of a rival, device by device, or the reason why there is none."""
    try:
        process.make(
            "benchmarks.rivals.training:Training",
            model=setting.model,
            size=setting.size,
            batch=setting.batch,
            balance=balance,
            m=setting.m,
            mode=setting.mode,
        )
        return {"devices": process.call("memory")}
    except UnavailableError as error:
        if "OutOfMemoryError" in str(error):
            return {"error": "out of memory"}
        return {"error": "not run", "reason": error.reason}
    finally:
        # The next rival needs the GPU's memory.
        with suppress(UnavailableError):
            process.drop()


def rows(
    options: argparse.Namespace, chosen: Sequence[Setting], running: dict[str, Running]
) -> Iterator[Row]:
    """Measure a row for each setting."""
    available = torch.cuda.device_count() if options.device == "cuda" else sys.maxsize
    for family, setting, rivals in progress(chosen, "memory", "setting"):
        balance = cut(setting)
        found: dict[str, Row] = {}
        for name in rivals:
            process = running.get("ours" if name == "plain" else name)
            if process is None:
                continue
            if name != "plain" and setting.n > available:
                reason = f"{setting.n} GPUs are needed (there are {available})"
                found[name] = {"error": "not run", "reason": reason}
            else:
                found[name] = measure(process, setting, None if name == "plain" else balance)
        yield {"family": family, **asdict(setting), "balance": balance, "rivals": found}


def main(argv: Sequence[str]) -> None:
    """Measure and publish."""
    reads = parser()
    options = command.parse(reads, argv)
    chosen = settings(options)
    if not chosen:
        reads.error("there is nothing to measure; name --experiments, or models of the --grid")
    torch.set_num_threads(1)
    # The process of ours trains the plain model too.
    names = [*dict.fromkeys("ours" if name == "plain" else name for name in options.rivals)]
    count = max(setting.n for _, setting, _ in chosen)
    with ExitStack() as stack:
        started, left_out = start(stack, names, options.against, options.device, count)
        running = {process.rival.name: process for process in started}
        options.against = [name for name in running if name not in names]
        found = list(rows(options, chosen, running))
    for row in found:
        for name, figures in row["rivals"].items():
            if "reason" in figures:
                setting = f"{row['model']['name']} {row['name']}, n={row['n']}, m={row['m']}"
                left_out.setdefault(f"{name} at {setting}", figures["reason"])
    more = {
        "device": options.device,
        "scaled": bool(options.scale) or options.device != "cuda",
        "rivals": {name: process.rival.version for name, process in running.items()},
        "left_out": left_out,
    }
    path = command.output(options, f"memory_{options.device}")
    publish(path, head("memory", argv, **more), found, summarise)
