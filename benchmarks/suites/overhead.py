"""Cost of a cell (partition × micro-batch) on the host, ours and rivals side by side.

The layers are so small that only the host takes time. Each rival runs in a process of its own,
which measures its pipeline and a plain loop over the micro-batches in turn; the processes take
turns too, in rounds, one at a time. The overhead is the time of a pipeline's step beyond that of
the plain loop in the same process, divided by the n · m cells.

With ``--device virtual`` each partition has a virtual accelerator of this checkout, for all rivals,
and the plain loop makes the copies between devices too. The time is still the host's real time,
which includes the virtual accelerators' own bookkeeping.

Figures are microseconds per cell: the difference of the least times, and in brackets the median
over rounds of the differences of medians.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import product
from statistics import median
from typing import Any

import torch

from benchmarks.command import add_device, at_least, output, parser
from benchmarks.progress import progress
from benchmarks.report.files import Result, head, publish
from benchmarks.report.summary import Summary, Table
from benchmarks.rivals.processes import REQUIREMENTS, Running, UnavailableError, add_options, start
from benchmarks.simulate.critical import MODES

KINDS = ("inference", "forward", "training")
RIVALS = ("ours", *REQUIREMENTS)

Row = dict[str, Any]


def parsed(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the options."""
    options = parser("overhead", __doc__)
    options.add_argument(
        "--n", type=at_least(1), nargs="+", default=[1, 2, 4, 8], help="partitions"
    )
    options.add_argument(
        "--m", type=at_least(1), nargs="+", default=[1, 8, 32], help="micro-batches"
    )
    options.add_argument("--modes", nargs="+", choices=MODES, default=MODES, help="checkpoints")
    options.add_argument(
        "--kinds",
        nargs="+",
        choices=KINDS,
        default=KINDS,
        help="without gradients; with them; with a backward too",
    )
    add_device(options, "cpu", "virtual")
    add_options(options, RIVALS)
    options.add_argument(
        "--rounds", type=at_least(1), default=7, help="in which the rivals take turns"
    )
    options.add_argument("--seconds", type=float, default=0.1, help="of a rival in a round")
    return options.parse_args(argv)


def settings(options: argparse.Namespace) -> list[dict[str, Any]]:
    """List the settings to measure; without gradients the mode makes no difference."""
    return [
        {"n": n, "m": m, "kind": kind, "mode": mode}
        for n, m, kind in product(options.n, options.m, options.kinds)
        for mode in (["never"] if kind == "inference" else options.modes)
    ]


def measure(
    running: list[Running], setting: dict[str, Any], rounds: int, seconds: float
) -> tuple[Row, dict[str, str]]:
    """Measure a setting in rounds; also return why a rival has no figures."""
    found: dict[str, list[dict[str, dict[str, float]]]] = {}
    failed: dict[str, str] = {}
    for turn in range(rounds + 1):
        for process in running:
            name = process.rival.name
            if name in failed:
                continue
            try:
                if turn == 0:
                    process.make("benchmarks.rivals.cells:Cells", **setting)
                    process.call("measure", seconds=seconds / 2)
                    found[name] = []
                else:
                    found[name].append(process.call("measure", seconds=seconds))
            except UnavailableError as error:
                failed[name] = error.reason
                found.pop(name, None)
    return {**setting, "rivals": {name: figures(x) for name, x in found.items()}}, failed


def figures(rounds: list[dict[str, dict[str, float]]]) -> dict[str, Any]:
    """Microseconds per cell over all rounds."""
    least = {name: min(x[name]["min"] for x in rounds) for name in ("plain", "pipeline")}
    middle = [x["pipeline"]["median"] - x["plain"]["median"] for x in rounds]
    return {
        "plain_min": least["plain"],
        "plain_median": round(median(x["plain"]["median"] for x in rounds), 3),
        "overhead_min": round(least["pipeline"] - least["plain"], 3),
        "overhead_median": round(median(middle), 3),
    }


def summarise(result: Result) -> Summary:
    """A line for each setting; the ratio is ours over 0.0.7, of least times (of medians)."""
    names = list(result["rivals"])
    rows = []
    for row in result["rows"]:
        rivals = row["rivals"]
        plain = min((x["plain_min"] for x in rivals.values()), default=None)
        cells = [
            "{overhead_min:.1f} ({overhead_median:.1f})".format(**rivals[name])
            if name in rivals
            else None
            for name in names
        ]
        key = [row[x] for x in ("n", "m", "kind", "mode")]
        rows.append([*key, plain and f"{plain:.1f}", *cells, ratio(rivals)])
    columns = ["n", "m", "kind", "mode", "plain", *names, "ours / 0.0.7"]
    device = result["machine"]["device"]
    notes = "Microseconds per cell above the plain loop: least (median); one thread."
    if device == "virtual":
        notes += " Virtual accelerators, and the host's real time."
    return Summary(f"Overhead per cell, {device} devices", [Table(columns, rows)], notes)


def ratio(rivals: dict[str, Any]) -> str | None:
    """Ratio of ours over 0.0.7, where both were measured."""
    if not {"ours", "0.0.7"} <= rivals.keys():
        return None
    least, middle = (
        rivals["ours"][key] / rivals["0.0.7"][key] for key in ("overhead_min", "overhead_median")
    )
    return f"{least:.2f} ({middle:.2f})"


def main(argv: Sequence[str]) -> None:
    """Measure and publish."""
    options = parsed(argv)
    torch.set_num_threads(1)
    result = head("overhead", argv, unit="microseconds per cell")
    result["machine"]["device"] = options.device
    rows = []
    with ExitStack() as stack:
        running, left_out = start(
            stack, options.rivals, options.against, options.device, max(options.n)
        )
        for setting in progress(settings(options), "overhead", "setting"):
            row, failed = measure(running, setting, options.rounds, options.seconds)
            rows.append(row)
            for name, reason in failed.items():
                left_out.setdefault("{} at {kind} {mode}".format(name, **setting), reason)
    rivals = {x.rival.name: x.rival.version for x in running}
    result |= {"rivals": rivals, "left_out": left_out}
    result |= {"rounds": options.rounds, "seconds": options.seconds}
    name = "overhead" if options.device == "cpu" else f"overhead_{options.device}"
    publish(output(options, name), result, rows, summarise)
