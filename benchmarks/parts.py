"""Where the host's time for a cell goes, part by part.

A step on the CPU, where one thread does all of it, runs under Python's profiler. Whatever is
written in C counts for the part that calls it. The profiler makes each call of a Python function
dearer: parts of many small functions look larger than they are.

Run it with ``python -m benchmarks parts``. It writes ``benchmarks/parts.json``.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import torchgpipe
from benchmarks.cells import Cells
from benchmarks.library import Library
from benchmarks.machine import describe, heading
from benchmarks.results import write

PACKAGE = Path(torchgpipe.__file__).parent
MODES = ("inference", "never", "except_last", "always")

#: What the modules of the package are for.
PARTS = {
    "schedule": ("gpipe", "pipeline", "worker", "route", "leftover"),
    "cells, streams": ("cell", "copy", "dependency", "phony", "stream"),
    "micro-batches": ("microbatch", "structure"),
    "checkpoints": ("checkpoint", "slot", "kept"),
    "state of layers": ("state", "sharding"),
    "random numbers": ("rng",),
    "modes, notes, skips": (
        "compiler",
        "context",
        "modes",
        "unwinding",
        "running",
        "note",
        "partition",
        "skip",
        "batchnorm",
    ),
}
ENGINE, LAYERS, REST = "autograd's engine", "layers", "the rest"


def part_of(file: str, name: str) -> str:
    """The part that a function belongs to."""
    if "run_backward" in name:
        return ENGINE
    path = Path(file)
    if PACKAGE in path.parents:
        module = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        return next(part for part, modules in PARTS.items() if module in modules)
    return LAYERS if "torch/nn/" in path.as_posix() else REST


def shares(stats: pstats.Stats) -> dict[str, float]:
    """The seconds that each part takes by itself."""
    seconds: Counter[str] = Counter()
    # Documented, but not in the types of the standard library.
    found: dict[Any, Any] = stats.stats  # type: ignore[attr-defined]
    for (file, _, name), (_, _, own, _, callers) in found.items():
        if file != "~" or part_of(file, name) == ENGINE:
            seconds[part_of(file, name)] += own
        else:
            for (caller, _, caller_name), times in callers.items():
                seconds[part_of(caller, caller_name)] += times[2]
    return dict(seconds)


def measure(mode: str, n: int, m: int, steps: int) -> dict[str, Any]:
    """The microseconds of a cell, without the profiler, and the shares of its parts with it."""
    kind = "inference" if mode == "inference" else "training"
    library = Library(torchgpipe.GPipe, [torch.device("cpu")] * n)
    cells = Cells(library, n, m, "never" if mode == "inference" else mode, kind)
    least = min(cells.step(cells.pipeline) for _ in range(steps))
    profile = cProfile.Profile()
    profile.enable()
    for _ in range(steps):
        cells.step(cells.pipeline)
    profile.disable()
    found = shares(pstats.Stats(profile))
    total = sum(found.values())
    return {
        "mode": mode,
        "cell_us": round(1e6 * least / (n * m), 1),
        "shares": {part: round(found.get(part, 0) / total, 3) for part in columns()},
    }


def columns() -> list[str]:
    """All parts."""
    return [LAYERS, ENGINE, *PARTS, REST]


def main(argv: Sequence[str] | None = None) -> None:
    """Measures, writes the file, and prints a table."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks parts", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--n", type=int, default=4, help="partitions")
    parser.add_argument("--m", type=int, default=32, help="micro-batches")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES, help="checkpoints")
    parser.add_argument("--steps", type=int, default=30, help="of each mode, twice")
    parser.add_argument("--output", type=Path, default=Path(__file__).with_suffix(".json"))
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    rows = [measure(mode, options.n, options.m, options.steps) for mode in options.modes]
    machine = describe()
    write(options.output, {"machine": machine, "n": options.n, "m": options.m}, rows)
    print(f"{heading(machine)}, n={options.n}, m={options.m}")
    print(f"{'microseconds of a cell':24}" + "".join(f"{row['mode']:>14}" for row in rows))
    print(f"{'':24}" + "".join(f"{row['cell_us']:14.1f}" for row in rows))
    for part in columns():
        print(f"{part:24}" + "".join(f"{row['shares'][part]:14.1%}" for row in rows))
