"""Cost of a barrier: steps of stages with varying times, over their critical path.

Each cell blocks the thread that issues it for a time of its own, on virtual accelerators. Each seed
draws the times anew: constant, uniform within 50 % of the mean, or exponential. A backward takes
twice as long as a forward on average, and a recomputation as long as its forward. The tables show
the time of a pass over the critical path of its dependency graph: the median and the maximum over
seeds. A step is a forward and a backward, which starts when the forward has returned.

Since cells block the host, a cell is recomputed after its gradient has come, and the critical path
takes that into account. The last column compares the same steps with the path of a step that
recomputes without waiting for gradients, as devices with streams do.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import product
from statistics import median
from typing import Any

import torch

from benchmarks.command import at_least, output, parser
from benchmarks.progress import progress
from benchmarks.report.files import Result, head, publish
from benchmarks.report.summary import Summary, Table
from benchmarks.rivals.processes import Running, add_options, on_cores, start
from benchmarks.simulate.blocking import KINDS, draw
from benchmarks.simulate.critical import MODES, Times, backward_path, forward_path, recomputed

PASSES = ("forward", "backward", "step", "ahead")
RIVALS = ("ours", "0.0.7")

Row = dict[str, Any]


def parsed(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the options."""
    options = parser("varying", __doc__)
    options.add_argument("--n", type=at_least(1), nargs="+", default=[4], help="partitions")
    options.add_argument("--m", type=at_least(1), nargs="+", default=[8, 32], help="micro-batches")
    options.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS, help="of times")
    options.add_argument("--modes", nargs="+", choices=MODES, default=MODES, help="checkpoints")
    options.add_argument("--mean", type=float, default=40.0, help="of a forward, in milliseconds")
    options.add_argument(
        "--seeds", type=at_least(1), default=5, help="number of draws of the times"
    )
    add_options(options, RIVALS)
    return options.parse_args(argv)


def drawn(kind: str, m: int, n: int, seed: int, mean: float) -> tuple[Times, Times]:
    """Draw seconds of each forward and backward, the same in every mode."""
    numbers = random.Random(f"{kind} {m} {n} {seed}")
    return draw(kind, mean, m, n, numbers), draw(kind, 2 * mean, m, n, numbers)


def paths(mode: str, forward: Times, backward: Times) -> dict[str, float]:
    """Critical path of each pass; ``ahead`` is a step that recomputes without waiting."""
    m = len(forward)
    stop = recomputed(mode, m)
    again = [[time * (i < stop) for time in row] for i, row in enumerate(forward)]
    first, then = forward_path(forward), backward_path(backward, again)
    ahead = first + backward_path(backward, again, ahead=True)
    return {"forward": first, "backward": then, "step": first + then, "ahead": ahead}


def ratios(best: dict[str, float], forward: float, backward: float) -> dict[str, float]:
    """Time of each pass over its critical path."""
    step = forward + backward
    found = {"forward": forward, "backward": backward, "step": step, "ahead": step}
    return {name: round(found[name] / best[name], 4) for name in PASSES}


def measure(running: Sequence[Running], options: argparse.Namespace) -> Iterator[Row]:
    """Measure each setting: each rival's seconds of forward and backward, and its ratios."""
    settings = list(
        product(options.n, options.kinds, options.m, options.modes, range(options.seeds))
    )
    for n, kind, m, mode, seed in progress(settings, "varying", "step"):
        forward, backward = drawn(kind, m, n, seed, options.mean / 1e3)
        best = paths(mode, forward, backward)
        row: Row = {"n": n, "m": m, "kind": kind, "mode": mode, "seed": seed, "paths": best}
        row["rivals"] = {}
        # Rivals take turns, so that a disturbance of the machine hits all alike.
        for process in running:
            times = {"forward": forward, "backward": backward}
            process.make("benchmarks.simulate.blocking:Blocks", mode=mode, **times)
            seconds = process.call("seconds")
            found = {"seconds": seconds, "ratios": ratios(best, *seconds)}
            row["rivals"][process.rival.name] = found
        yield row


def summarise(result: Result) -> Summary:
    """A line for each setting and rival: median and maximum over seeds of each pass."""
    groups: dict[tuple[str, ...], list[dict[str, float]]] = {}
    for row in result["rows"]:
        for name, found in row["rivals"].items():
            key = tuple(str(row[x]) for x in ("n", "m", "kind", "mode"))
            groups.setdefault((*key, name), []).append(found["ratios"])
    rows = []
    for setting, group in groups.items():
        values = [[found[name] for found in group] for name in PASSES]
        rows.append([*setting, *[f"{median(x):.3f} ({max(x):.3f})" for x in values]])
    notes = (
        "Time over the critical path: the median (maximum) over seeds. Real time of stages that "
        f"sleep, {result['mean_ms']:g} ms for a forward in the mean; virtual accelerators, each "
        "process on one core. `ahead` is a step over the path of one that recomputes without "
        "waiting for gradients."
    )
    columns = ["n", "m", "times", "mode", "rival", *PASSES]
    return Summary("Stages whose times vary", [Table(columns, rows)], notes)


def overslept(mean: float) -> float:
    """Median milliseconds by which a sleep of ``mean`` milliseconds is too long."""
    times = []
    for _ in range(20):
        start = time.perf_counter()
        time.sleep(mean / 1e3)
        times.append((time.perf_counter() - start) * 1e3 - mean)
    return median(times)


def main(argv: Sequence[str]) -> None:
    """Measure and publish."""
    options = parsed(argv)
    torch.set_num_threads(1)
    result = head("varying", argv, unit="time over the critical path", mean_ms=options.mean)
    result["machine"] |= {"device": "virtual", "overslept_ms": overslept(options.mean)}
    with ExitStack() as stack:
        with on_cores(1):
            running, left_out = start(
                stack, options.rivals, options.against, "virtual", max(options.n)
            )
        rows = list(measure(running, options))
    result |= {"rivals": {x.rival.name: x.rival.version for x in running}, "left_out": left_out}
    publish(output(options, "varying"), result, rows, summarise)
