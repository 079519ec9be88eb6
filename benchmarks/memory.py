"""What each device needs in training: the plain model, ours and torchgpipe 0.0.7 side by side.

Measured are the papers' experiments, in which the model grows with the devices, and a grid of
modes, partitions and micro-batches over small models. Every model is cut by memory, as counted
without running it (`benchmarks/costs.py`), in the same way for all rivals. Each rival trains it by
SGD in a process of its own. The second step counts, when whatever stays has been allocated;
gradients are dropped after each.

On virtual accelerators (`--device virtual`, the default) the experiments are scaled: the layers
stay as many, with fewer channels, smaller images and fewer samples. Their tensors are real, and so
are their bytes. With `--device cuda` they run at full size. What needs more GPUs than there are is
not run, and what does not fit is marked so; the baselines and `pipeline-1` take one GPU.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any

import torch

from benchmarks import command, costs, experiments
from benchmarks.experiments import MEMORY, Experiment, unet
from benchmarks.progress import progress
from benchmarks.report import Chart, Report, Table, head, publish
from benchmarks.rivals import Running, UnavailableError, add_options, start

RIVALS = ("plain", "0.0.7", "ours")
MODES = ("never", "except_last", "always")

#: On virtual accelerators: what channels are divided by, pixels, and samples.
SCALE = (16, 64, 8)

#: The models of the grid, each trained plainly.
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

#: Bytes, of what is known of a device.
Figure = Callable[[dict[str, int]], float]


def parser() -> argparse.ArgumentParser:
    """The options."""
    parser = command.parser("memory", __doc__)
    parser.add_argument("--device", choices=("virtual", "cuda"), default="virtual")
    parser.add_argument(
        "--experiments", nargs="*", choices=MEMORY, default=[*MEMORY], help="of the papers"
    )
    parser.add_argument(
        "--scale",
        type=int,
        nargs=3,
        metavar=("DIVISOR", "PIXELS", "SAMPLES"),
        help="that of the experiments (default: full size on GPUs, otherwise "
        f"{' '.join(map(str, SCALE))})",
    )
    parser.add_argument("--grid", nargs="*", choices=GRID, default=[*GRID], help="its models")
    parser.add_argument("--n", type=int, nargs="+", default=[1, 4, 8], help="its partitions")
    parser.add_argument("--m", type=int, nargs="+", default=[1, 4, 16], help="its micro-batches")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES, help="its checkpoints")
    add_options(parser, RIVALS)
    return parser


def settings(options: argparse.Namespace) -> list[tuple[str, Experiment, Sequence[str]]]:
    """Whatever is measured: of which family, what, and by which rivals."""
    scale = options.scale or (None if options.device == "cuda" else SCALE)
    wrappers = [name for name in (*options.rivals, *options.against) if name != "plain"]
    found: list[tuple[str, Experiment, Sequence[str]]] = []
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
    """A balance of parameters, their gradients, and what one micro-batch saves for backward."""
    found = costs.count(setting.model, setting.size, -(-setting.batch // (setting.m or 1)))
    needed = [2 * x + saved for x, saved in zip(found.parameters, found.saved)]
    return costs.balance(needed, setting.n)


def measure(process: Running, setting: Experiment, balance: list[int] | None) -> Row:
    """What a rival needs, device by device, or why it is not known."""
    try:
        process.make(
            "benchmarks.training:Training",
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
        lines = [x for x in str(error).splitlines() if not x.startswith("raised in ")]
        return {"error": "not run", "reason": lines[-1]}


def rows(options: argparse.Namespace, running: dict[str, Running]) -> Iterator[Row]:
    """A row for each setting."""
    available = torch.cuda.device_count() if options.device == "cuda" else sys.maxsize
    for family, setting, rivals in progress(settings(options), "memory", "setting"):
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
    """Measures, prints the tables, and writes the files."""
    options = parser().parse_args(argv)
    torch.set_num_threads(1)
    # The plain model is in the process of ours.
    names = dict.fromkeys("ours" if name == "plain" else name for name in options.rivals)
    counts = [setting.n for _, setting, _ in settings(options)]
    asked = {**vars(options), "rivals": [*names], "n": counts}
    with ExitStack() as stack:
        started, left_out = start(argparse.Namespace(**asked), stack)
        running = {process.rival.name: process for process in started}
        options.against = [name for name in running if name not in names]
        found = list(rows(options, running))
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
    publish(path, head("memory", argv, **more), found)


def activations(device: dict[str, int]) -> int:
    """What a device needs beyond parameters and gradients."""
    return device["peak"] - device["parameters"] - device["gradients"]


def peak(device: dict[str, int]) -> int:
    """What a device needs."""
    return device["peak"]


def parameters(device: dict[str, int]) -> int:
    """What its parameters take."""
    return device["parameters"]


def mebibytes(row: Row, name: str, figure: Figure) -> float | None:
    """The figure of the device that needs most of it, or None if it was not measured."""
    devices = row["rivals"].get(name, {}).get("devices")
    return max(map(figure, devices)) / 2**20 if devices else None


def cell(row: Row, name: str, figure: Figure) -> str | None:
    """The device that needs most, and all of them together in brackets."""
    found = row["rivals"].get(name)
    if found is None:
        return "-"
    if "error" in found:
        return None if found["error"] == "not run" else str(found["error"])
    needed = [figure(device) / 2**20 for device in found["devices"]]
    most = f"{max(needed):.2f}"
    return most if len(needed) == 1 else f"{most} ({sum(needed):.2f})"


def ratio(row: Row) -> str:
    """The peak of ours by that of 0.0.7: the largest device's, and all together."""
    ours, theirs = (row["rivals"].get(name, {}).get("devices") for name in ("ours", "0.0.7"))
    if not ours or not theirs:
        return "-"
    pairs = [(max(map(peak, x)), sum(map(peak, x))) for x in (ours, theirs)]
    return " ".join(f"{a / b:.3f}" for a, b in zip(*pairs))


def table(rows: Sequence[Row], caption: str, names: Sequence[str]) -> Table:
    """Settings of one model, a line each."""
    columns = ["setting", "n", "m", "parameters"]
    columns += [f"{what} {name}" for what in ("activations", "peak") for name in names]
    lines: list[list[str | int | None]] = []
    for row in rows:
        sizes = [x["devices"] for x in row["rivals"].values() if "devices" in x]
        size = f"{sum(map(parameters, sizes[0])) / 2**20:.2f}" if sizes else None
        line = [row["name"], row["n"], row["m"] or "-", size]
        line += [cell(row, name, figure) for figure in (activations, peak) for name in names]
        lines.append([*line, ratio(row)])
    return Table([*columns, "ours / 0.0.7"], lines, caption)


def grid_charts(model: str, rows: Sequence[Row], names: Sequence[str]) -> Iterator[Chart]:
    """Activations of the largest device against micro-batches, and against partitions."""
    plain = next((mebibytes(x, "plain", activations) for x in rows if not x["m"]), None)
    wrapped = [row for row in rows if row["m"]]
    for key, other in [("m", "n"), ("n", "m")] if wrapped else []:
        fixed = max(row[other] for row in wrapped)
        found = [row for row in wrapped if row[other] == fixed]
        labels = sorted({row[key] for row in found})
        series = {}
        for name in names:
            for mode in dict.fromkeys(row["mode"] for row in found):
                points = {row[key]: row for row in found if row["mode"] == mode}
                values = [mebibytes(points[x], name, activations) for x in labels]
                series[f"{name}, {mode}"] = values
        title = f"{model}, {other} = {fixed}: activations against {key} (dashed: plain)"
        yield Chart(title, "MiB, largest device", [*map(str, labels)], series, True, plain)


def report(result: dict[str, Any]) -> Report:
    """The tables and charts of a result."""
    virtual = result["device"] == "virtual"
    tables: list[Table] = []
    charts: list[Chart] = []
    wrappers = [*result["rivals"]]
    for family in ("experiments", "grid"):
        some = [row for row in result["rows"] if row["family"] == family]
        for model in dict.fromkeys(row["model"]["name"] for row in some):
            rows = [row for row in some if row["model"]["name"] == model]
            size = f"size {rows[0]['size']}, mini-batches of {rows[0]['batch']}"
            names = [x for x in ("plain", *wrappers) if any(x in row["rivals"] for row in rows)]
            if family == "grid":
                charts += grid_charts(model, rows, [x for x in names if x != "plain"])
                caption = f"Modes, partitions and micro-batches of a small {model}: {size}."
            else:
                labels = [row["name"] for row in rows]
                series = {x: [mebibytes(row, x, peak) for row in rows] for x in names}
                title = f"{model}, the papers' experiments: peak"
                charts.append(Chart(title, "MiB, largest device", labels, series))
                scaled = ", scaled" if result["scaled"] else ""
                caption = f"The papers' experiments on {model}{scaled}: {size}."
            tables.append(table(rows, caption, names))
    where = "virtual accelerators" if virtual else "GPUs"
    return Report(f"Memory of a training step, on {where}", tables, charts, notes(result))


def notes(result: dict[str, Any]) -> str:
    """How to read the tables."""
    text = (
        "MiB of the device that needs most, and in brackets of all devices together. Parameters "
        "are those of the whole model. The peak is the most that was allocated during the second "
        "step: forward, backward, SGD without momentum, and gradients dropped. It includes "
        "parameters, buffers and the mini-batch. Activations are the peak less the parameters and "
        "less once more as much for their gradients, as the torchgpipe paper counts; while not "
        "all gradients are there, activations take their room, so where parameters are most of "
        "the memory this is less than the activations of that moment. The plain model is on one "
        "device, with the whole mini-batch at once. The last column is ours by 0.0.7, of peaks: "
        "the largest device, and all together. How far one device is ahead of another depends on "
        "the host's threads, so where there are several, figures may differ a little from run to "
        "run."
    )
    if result["device"] == "virtual":
        text += (
            "\n\nThese are virtual accelerators, whose allocator counts the bytes of the tensors "
            "exactly, as if each were freed when the host frees it; what a GPU's libraries take as "
            "workspace is not in it. Full size on GPUs: not run here; `python -m benchmarks memory "
            "--device cuda` does it."
        )
    return text
