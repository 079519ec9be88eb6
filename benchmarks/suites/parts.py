"""Shares of the host's time for a cell, part by part.

Python's profiler watches a step on the CPU, where one thread does all the work. With ``--device
virtual`` it watches a forward with gradients on virtual accelerators, since autograd runs backward
in threads of its own there. A function in C counts for the part that calls it. The profiler makes
each call of a Python function dearer, so parts of many small functions look larger than they are.
"""

from __future__ import annotations

import cProfile
import gc
import pstats
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import torchgpipe
from benchmarks.command import add_device, at_least, output, parser
from benchmarks.progress import progress
from benchmarks.report.files import Result, head, publish
from benchmarks.report.summary import Summary, Table
from benchmarks.rivals.cells import Cells
from benchmarks.rivals.library import Library
from torchgpipe import testing

PACKAGE = Path(torchgpipe.__file__).parent
MODES = ("inference", "never", "except_last", "always")

#: Rooms of the package that each part consists of.
PARTS = {
    "wrapper": ("gpipe", "batchnorm", "checks", "partition"),
    "engine": ("engine",),
    "autograd functions": ("autograd",),
    "streams": ("devices",),
    "micro-batches, skips": ("values", "skip"),
    "recomputation": ("recompute",),
    "what a thread has set": ("ambient", "_torch"),
}
ENGINE, LAYERS, REST = "autograd's engine", "layers", "the rest"


def part_of(file: str, name: str) -> str:
    """Name of the part that a function belongs to."""
    if "run_backward" in name:
        return ENGINE
    path = Path(file)
    if PACKAGE in path.parents:
        module = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        return next(part for part, modules in PARTS.items() if module in modules)
    return LAYERS if "torch/nn/" in path.as_posix() else REST


def shares(stats: pstats.Stats) -> dict[str, float]:
    """Seconds that each part takes by itself."""
    seconds: Counter[str] = Counter()
    # Python documents `stats`, but its types leave it out.
    found: dict[Any, Any] = stats.stats  # type: ignore[attr-defined]
    for (file, _, name), (_, _, own, _, callers) in found.items():
        if file != "~" or part_of(file, name) == ENGINE:
            seconds[part_of(file, name)] += own
        else:
            for (caller, _, caller_name), times in callers.items():
                seconds[part_of(caller, caller_name)] += times[2]
    return dict(seconds)


def measure(devices: list[torch.device], mode: str, m: int, steps: int) -> dict[str, Any]:
    """Measure a cell's microseconds without the profiler, and the shares of its parts with it."""
    n = len(devices)
    recorded = "training" if devices[0].type == "cpu" else "forward"
    kind = "inference" if mode == "inference" else recorded
    library = Library(torchgpipe.GPipe, devices)
    cells = Cells(library, n, m, "never" if mode == "inference" else mode, kind)
    least = min(cells.step(cells.pipeline) for _ in range(steps))
    profile = cProfile.Profile()
    # The collector calls functions of whoever has left garbage.
    gc.collect()
    gc.disable()
    try:
        profile.enable()
        for _ in range(steps):
            cells.step(cells.pipeline)
        profile.disable()
    finally:
        gc.enable()
    found = shares(pstats.Stats(profile))
    total = sum(found.values())
    return {
        "mode": mode,
        "cell_us": round(1e6 * least / (n * m), 1),
        "shares": {part: round(found.get(part, 0) / total, 6) for part in columns()},
    }


def columns() -> list[str]:
    """Names of all parts."""
    return [LAYERS, ENGINE, *PARTS, REST]


def summarise(result: Result) -> Summary:
    """A column for each mode."""
    rows = result["rows"]
    modes = [row["mode"] for row in rows]
    # The parts that the package had when the result was measured.
    parts = [*rows[0]["shares"]]
    lines = [[part, *[f"{row['shares'][part]:.1%}" for row in rows]] for part in parts]
    lines.append(["µs per cell", *[f"{row['cell_us']:.1f}" for row in rows]])
    return Summary(
        "Where a cell's time on the host goes",
        [Table(["part", *modes], lines)],
        "{place}, n={n}, m={m}. Shares under Python's profiler, which makes parts of many small "
        "functions look larger; microseconds without it, layers included.".format(**result),
    )


def main(argv: Sequence[str]) -> None:
    """Measure and publish."""
    options = parser("parts", __doc__)
    options.add_argument("--n", type=at_least(1), default=4, help="partitions")
    options.add_argument("--m", type=at_least(1), default=32, help="micro-batches")
    options.add_argument("--modes", nargs="+", choices=MODES, default=MODES, help="checkpoints")
    add_device(options, "cpu", "virtual")
    options.add_argument("--steps", type=at_least(1), default=30, help="of each mode, twice")
    chosen = options.parse_args(argv)
    torch.set_num_threads(1)
    n, virtual = chosen.n, chosen.device == "virtual"
    devices = testing.load()[:n] if virtual else [torch.device("cpu")] * n
    place = "Virtual accelerators, forward" if virtual else "CPU"
    result = head("parts", argv, n=n, m=chosen.m, place=place)
    modes = progress(chosen.modes, "parts", "mode")
    rows = [measure(devices, mode, chosen.m, chosen.steps) for mode in modes]
    name = "parts_virtual" if virtual else "parts"
    publish(output(chosen, name), result, rows, summarise)
