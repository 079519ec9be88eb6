"""Device time of a cell below which the host is the bottleneck.

One thread feeds all devices, and in backward autograd's threads share the interpreter. While each
device computes a cell, the host must issue a cell for each of the n devices. So from a device time
of n × (host's time of a cell) on, the devices are the bottleneck; below it they wait for the host.
Fill and drain leave the host some more time, so with few micro-batches the true bound is lower.

Both times are those of a whole step, divided by its cells: forward, backward and recomputations.
The host runs ahead of the devices, so time that it gains in one pass makes up for time that it
loses in the other, unless the program waits for the devices in between.

The host's time is real, and ends when backward has returned, without waiting for devices. It has
two parts: the layers' own, which is the time of a loop over the micro-batches on one device, and
the pipeline's. No GPU is needed, but none is measured either. Virtual accelerators have all of a
pipeline's copies, streams and threads, and the bookkeeping of their operators adds as much again to
the CPU's time of an operator. The CPU has neither copies nor streams. So a range is shown, from the
CPU to virtual accelerators. Virtual time cannot check the bound, since the host takes none there.

The models have all their layers, but so few channels and such small images that the CPU spends the
lesser part of the time on computing: twice the samples take at most about a quarter longer.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from itertools import product
from typing import Any

import torch

from benchmarks.command import at_least, output, parser
from benchmarks.models.experiments import RESNET, Model, amoebanetd, build, unet
from benchmarks.progress import progress
from benchmarks.report.files import Result, head, publish
from benchmarks.report.summary import Summary, Table
from benchmarks.rivals.processes import Running, UnavailableError, add_options, start
from benchmarks.simulate.costs import balance
from benchmarks.simulate.critical import MODES

DEVICES = ("cpu", "virtual", "cuda")
KINDS = ("inference", *MODES)
RIVALS = ("ours", "0.0.7")

#: Models by name, and the size of their samples; the tiny layers are a ``Linear`` and a ``Tanh``.
MODELS: dict[str, tuple[Model | None, int]] = {
    "tiny layers": (None, 2),
    "gpt": ({"name": "gpt", "vocabulary": 64, "context": 16, "width": 48}, 16),
    "unet": (unet(5, 2), 64),
    "resnet101": ({**RESNET, "width": 4, "num_classes": 4}, 64),
    "amoebanetd": ({**amoebanetd(18, 8), "num_classes": 4}, 64),
}

Row = dict[str, Any]


def parsed(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the options."""
    options = parser("host_bound", __doc__)
    options.add_argument("--models", nargs="+", choices=MODELS, default=[*MODELS], help="layers")
    options.add_argument("--n", type=at_least(1), nargs="+", default=[2, 4, 8], help="devices")
    options.add_argument("--m", type=at_least(1), default=8, help="micro-batches")
    options.add_argument("--modes", nargs="+", choices=KINDS, default=KINDS, help="checkpoints")
    options.add_argument(
        "--devices", nargs="+", choices=DEVICES, default=DEVICES[:2], help="kinds of devices"
    )
    add_options(options, RIVALS)
    options.set_defaults(rivals=["ours"])
    options.add_argument("--seconds", type=float, default=0.3, help="of a setting, at least")
    options.add_argument("--steps", type=at_least(1), default=2, help="of a setting, at least")
    chosen = options.parse_args(argv)
    if "cuda" in chosen.devices and not torch.cuda.is_available():
        options.error("there must be a GPU that CUDA knows (devices: cuda); take other --devices")
    return chosen


def measure(
    running: dict[str, list[Running]], options: argparse.Namespace, left_out: dict[str, str]
) -> Iterator[Row]:
    """Measure each setting, for each kind of device and each rival."""
    settings = [*product(options.models, options.n, options.modes)]
    for name, n, mode in progress(settings, "host_bound", "setting"):
        model, size = MODELS[name]
        arguments = {"model": model, "size": size, "m": options.m, "mode": mode}
        arguments["balance"] = balance([1] * (len(build(model)) if model else n), n)
        for device, processes in running.items():
            row: Row = {"model": name, "n": n, "mode": mode, "device": device, "rivals": {}}
            for process in processes:
                rival = process.rival.name
                try:
                    process.make("benchmarks.rivals.host:Host", **arguments)
                    row["rivals"][rival] = process.call(
                        "measure", seconds=options.seconds, least=options.steps
                    )
                except UnavailableError as error:
                    left_out[f"{rival} on {device} at {name}, n={n}, {mode}"] = error.reason
            yield row


def bound(n: int, figures: dict[str, dict[str, float]]) -> float:
    """Milliseconds of device time from which on the devices are the bottleneck."""
    return n * figures["pipeline"]["min"] / 1e3


def shown(milliseconds: float) -> str:
    """Two digits, or those of an integer."""
    return f"{milliseconds:.0f}" if milliseconds >= 10 else f"{milliseconds:.2g}"


def spread(bounds: Iterable[float]) -> str | None:
    """The least to the greatest bound of several kinds of devices, or None without any."""
    found = sorted(bounds)
    return " to ".join(map(shown, dict.fromkeys((found[0], found[-1])))) if found else None


def summarise(result: Result) -> Summary:
    """Bounds of each model and number of devices; the figures of each setting are in ``more``."""
    bounds: dict[tuple[str, int, str], dict[str, float]] = {}
    for row in result["rows"]:
        found = bounds.setdefault((row["model"], row["n"], row["mode"]), {})
        if "ours" in row["rivals"]:
            found[row["device"]] = bound(row["n"], row["rivals"]["ours"])
    models = [*dict.fromkeys(model for model, _, _ in bounds)]
    sizes = [*dict.fromkeys(n for _, n, _ in bounds)]
    modes = [*dict.fromkeys(mode for _, _, mode in bounds)]
    devices = [*dict.fromkeys(row["device"] for row in result["rows"])]
    lines: list[list[str | int | None]] = [
        [model, n, *[spread(bounds[model, n, x].values()) for x in modes]]
        for model, n in product(models, sizes)
    ]
    notes = (
        f"Milliseconds of device time per cell, on {' and '.join(devices)}; m={result['m']}. With "
        "less the host is the bottleneck. A figure is n times the host's real time of a cell in a "
        "whole step: forward, backward and recomputation (`inference`: a forward). The models have "
        "few channels and small images, so that the CPU computes for the lesser part of that time."
    )
    return Summary(
        "From which cell size on the host is the bottleneck",
        [Table(["model", "n", *modes], lines)],
        notes,
        [Table(["model", "n", "mode", "device", "rival", *FIGURES], figures(result["rows"]))],
    )


FIGURES = ("µs per cell", "layers' own", "bound, ms")


def figures(rows: Sequence[Row]) -> list[list[str | int | None]]:
    """A line for each setting, device and rival: least times of the host, and the bound."""
    return [
        [
            *[row[key] for key in ("model", "n", "mode", "device")],
            rival,
            *[f"{found[name]['min']:.0f}" for name in ("pipeline", "plain")],
            shown(bound(row["n"], found)),
        ]
        for row in rows
        for rival, found in row["rivals"].items()
    ]


def main(argv: Sequence[str]) -> None:
    """Measure and publish."""
    options = parsed(argv)
    torch.set_num_threads(1)
    result = head("host_bound", argv, unit="microseconds per cell", m=options.m)
    left_out: dict[str, str] = {}
    running = {}
    with ExitStack() as stack:
        for device in options.devices:
            running[device], missing = start(
                stack, options.rivals, options.against, device, max(options.n)
            )
            left_out |= {f"{name} on {device}": reason for name, reason in missing.items()}
        rows = list(measure(running, options, left_out))
    result |= {"left_out": left_out}
    publish(output(options, "host_bound"), result, rows, summarise)
