"""What a barrier costs: steps whose stages take times that vary, over their critical path.

Each cell blocks the thread that issues it for a time of its own, on virtual accelerators. The times
are drawn anew for each seed: constant, uniform within 50 % of the mean, or exponential; a backward
takes twice as long as a forward on average, a recomputation as long as its forward. Printed is what
a pass takes over the critical path of its dependency graph, the median and the maximum over seeds.
A step is a forward and a backward, which starts when the forward has returned.

As it is the host that is blocked, a cell is recomputed when its gradient has come, and the critical
path is that of such a step. The last columns hold the same steps against the path of one that
recomputes without waiting for gradients, as devices with streams do.
"""

from __future__ import annotations

import argparse
import os
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.blocking import KINDS, draw
from benchmarks.critical import Times, backward_path, forward_path
from benchmarks.machine import describe, heading
from benchmarks.progress import progress
from benchmarks.results import write
from benchmarks.rivals import Running, add_options, start

MODES = ("never", "except_last", "always")
PASSES = ("forward", "backward", "step", "ahead")
RIVALS = ("ours", "0.0.7")

Row = dict[str, Any]


def parser() -> argparse.ArgumentParser:
    """The options."""
    assert __doc__
    parser = argparse.ArgumentParser(
        "python -m benchmarks varying", description=__doc__.splitlines()[0]
    )
    parser.set_defaults(device="virtual")
    parser.add_argument("--n", type=int, nargs="+", default=[4], help="partitions")
    parser.add_argument("--m", type=int, nargs="+", default=[8, 32], help="micro-batches")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS, help="of times")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES, help="checkpoints")
    parser.add_argument("--mean", type=float, default=40.0, help="of a forward, in milliseconds")
    parser.add_argument("--seeds", type=int, default=5, help="how many times times are drawn")
    add_options(parser, RIVALS)
    parser.add_argument("--output", type=Path, default=Path(__file__).with_suffix(".json"))
    return parser


def drawn(kind: str, m: int, n: int, seed: int, mean: float) -> tuple[Times, Times]:
    """Seconds of each forward and backward, the same in every mode."""
    numbers = random.Random(f"{kind} {m} {n} {seed}")
    return draw(kind, mean, m, n, numbers), draw(kind, 2 * mean, m, n, numbers)


def paths(mode: str, forward: Times, backward: Times) -> dict[str, float]:
    """The critical path of each pass; ``ahead`` is a step that does not wait to recompute."""
    m = len(forward)
    stop = {"never": 0, "except_last": m - 1, "always": m}[mode]
    again = [[time * (i < stop) for time in row] for i, row in enumerate(forward)]
    first, then = forward_path(forward), backward_path(backward, again)
    ahead = first + backward_path(backward, again, ahead=True)
    return {"forward": first, "backward": then, "step": first + then, "ahead": ahead}


def ratios(best: dict[str, float], forward: float, backward: float) -> dict[str, float]:
    """What each pass took, over its critical path."""
    step = forward + backward
    found = {"forward": forward, "backward": backward, "step": step, "ahead": step}
    return {name: round(found[name] / best[name], 4) for name in PASSES}


@contextmanager
def one_core() -> Iterator[None]:
    """Keeps processes that are started within a ``with`` block on a core, where that is possible.

    Sleeping takes none, and threads hand over Python's lock sooner on one.
    """
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, [max(cores)])
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


def measure(running: Sequence[Running], options: argparse.Namespace) -> Iterator[Row]:
    """A row for each setting: seconds of forward and backward, and the ratios, of each rival."""
    settings = list(
        product(options.n, options.kinds, options.m, options.modes, range(options.seeds))
    )
    for n, kind, m, mode, seed in progress(settings, "varying", "step"):
        forward, backward = drawn(kind, m, n, seed, options.mean / 1e3)
        best = paths(mode, forward, backward)
        row: Row = {"n": n, "m": m, "kind": kind, "mode": mode, "seed": seed, "paths": best}
        row["rivals"] = {}
        # In turn, so that what disturbs the machine disturbs all of them.
        for process in running:
            times = {"forward": forward, "backward": backward}
            process.make("benchmarks.blocking:Blocks", mode=mode, **times)
            seconds = process.call("seconds")
            found = {"seconds": seconds, "ratios": ratios(best, *seconds)}
            row["rivals"][process.rival.name] = found
        yield row


def table(rows: Sequence[Row]) -> str:
    """A line for each setting and rival: of each pass the median and the maximum over seeds."""
    lines = [f"{'n':>2} {'m':>3} {'times':12}{'mode':12}{'rival':12}"]
    lines[0] += "".join(f"{name:>15}" for name in PASSES)
    groups: dict[str, list[dict[str, float]]] = {}
    for row in rows:
        for name, found in row["rivals"].items():
            key = "{n:>2} {m:>3} {kind:12}{mode:12}".format(**row) + f"{name[-11:]:12}"
            groups.setdefault(key, []).append(found["ratios"])
    for line, group in groups.items():
        for name in PASSES:
            values = [found[name] for found in group]
            line += f"  {median(values):6.3f} {max(values):6.3f}"
        lines.append(line)
    return "\n".join(lines)


def overslept(mean: float) -> float:
    """By how many milliseconds a sleep of so many is too long, in the median."""
    times = []
    for _ in range(20):
        start = time.perf_counter()
        time.sleep(mean / 1e3)
        times.append((time.perf_counter() - start) * 1e3 - mean)
    return median(times)


def main(argv: Sequence[str] | None = None) -> None:
    """Measures, prints a table, and writes the file."""
    options = parser().parse_args(argv)
    torch.set_num_threads(1)
    machine = describe()
    with ExitStack() as stack:
        with one_core():
            running, left_out = start(options, stack)
        rows = list(measure(running, options))
    head = {
        "benchmark": "varying",
        "unit": "time over the critical path",
        "machine": {**machine, "device": "virtual", "overslept_ms": overslept(options.mean)},
        "rivals": {x.rival.name: x.rival.version for x in running},
        "left_out": left_out,
        "mean_ms": options.mean,
    }
    write(options.output, head, rows)
    print(f"{heading(machine)}, virtual devices, each process on one core")
    print(f"Times over critical paths: median and maximum of {options.seeds} seeds; ", end="")
    print(f"a forward takes {options.mean:g} ms in the mean\n")
    print(table(rows))
    for name, reason in left_out.items():
        print(f"\nleft out: {name}: {reason.splitlines()[-1]}")
