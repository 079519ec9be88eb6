"""What a cell (partition × micro-batch) costs above the plain layers, ours and rivals side by side.

The layers are trivially small, so that the host is all that takes time. Each rival runs in a
process of its own, which measures its pipeline and a plain loop over the micro-batches in turn; the
processes take turns too, in rounds, one at a time. The overhead is what a step of the pipeline
takes beyond one of the plain loop in that process, by n · m cells.

With ``--device virtual`` each partition has a virtual accelerator (those of this checkout for all
rivals), and the plain loop makes the copies between them too. It is still the host's real time,
with what the virtual accelerators' own bookkeeping takes.

It prints a table, and writes ``benchmarks/overhead.json`` (or ``overhead_virtual.json``). Figures
are microseconds per cell: the difference of the least times that were seen, and in brackets the
median of the rounds' differences of medians.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.machine import describe, heading
from benchmarks.progress import progress
from benchmarks.results import write
from benchmarks.rivals import REQUIREMENTS, Running, UnavailableError, add_options, start

MODES = ("never", "except_last", "always")
KINDS = ("inference", "forward", "training")
RIVALS = ("ours", *REQUIREMENTS)

Row = dict[str, Any]


def parser() -> argparse.ArgumentParser:
    """The options."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks overhead", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--n", type=int, nargs="+", default=[1, 2, 4, 8], help="partitions")
    parser.add_argument("--m", type=int, nargs="+", default=[1, 8, 32], help="micro-batches")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES, help="checkpoints")
    parser.add_argument(
        "--kinds",
        nargs="+",
        choices=KINDS,
        default=KINDS,
        help="without gradients; with them; with a backward too",
    )
    parser.add_argument("--device", choices=("cpu", "virtual"), default="cpu")
    add_options(parser, RIVALS)
    parser.add_argument("--rounds", type=int, default=7, help="that the rivals take turns in")
    parser.add_argument("--seconds", type=float, default=0.1, help="of a rival in a round")
    parser.add_argument("--output", type=Path, help="default: beside this module")
    return parser


def settings(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Whatever is measured; without gradients the mode makes no difference."""
    return [
        {"n": n, "m": m, "kind": kind, "mode": mode}
        for n, m, kind in product(options.n, options.m, options.kinds)
        for mode in (["never"] if kind == "inference" else options.modes)
    ]


def measure(
    running: list[Running], setting: dict[str, Any], rounds: int, seconds: float
) -> tuple[Row, dict[str, str]]:
    """One setting, in rounds; also why a rival has no figures for it."""
    found: dict[str, list[dict[str, dict[str, float]]]] = {}
    failed: dict[str, str] = {}
    for turn in range(rounds + 1):
        for process in running:
            name = process.rival.name
            if name in failed:
                continue
            try:
                if turn == 0:
                    process.make("benchmarks.cells:Cells", **setting)
                    process.call("measure", seconds=seconds / 2)
                    found[name] = []
                else:
                    found[name].append(process.call("measure", seconds=seconds))
            except UnavailableError as error:
                failed[name] = str(error)
                found.pop(name, None)
    return {**setting, "rivals": {name: summary(x) for name, x in found.items()}}, failed


def summary(rounds: list[dict[str, dict[str, float]]]) -> dict[str, Any]:
    """Microseconds per cell of all rounds together, and what each round found."""
    least = {name: min(x[name]["min"] for x in rounds) for name in ("plain", "pipeline")}
    middle = [x["pipeline"]["median"] - x["plain"]["median"] for x in rounds]
    return {
        "plain_min": least["plain"],
        "plain_median": round(median(x["plain"]["median"] for x in rounds), 3),
        "overhead_min": round(least["pipeline"] - least["plain"], 3),
        "overhead_median": round(median(middle), 3),
        "rounds": rounds,
    }


def table(rows: list[Row], names: list[str]) -> str:
    """A line for each setting; the ratio is that of ours to 0.0.7, of least times (medians)."""
    head = f"{'n':>2} {'m':>3} {'kind':10} {'mode':12}{'plain':>8}"
    lines = [head + "".join(f"{name[-18:]:>19}" for name in names) + f"{'ours / 0.0.7':>15}"]
    for row in rows:
        rivals = row["rivals"]
        line = "{n:>2} {m:>3} {kind:10} {mode:12}".format(**row)
        line += f"{min(x['plain_min'] for x in rivals.values()):8.1f}" if rivals else f"{'-':>8}"
        for name in names:
            cell = "-"
            if name in rivals:
                cell = "{overhead_min:.1f} ({overhead_median:.1f})".format(**rivals[name])
            line += f"{cell:>19}"
        lines.append(line + f"{ratio(rivals):>15}")
    return "\n".join(lines)


def ratio(rivals: dict[str, Any]) -> str:
    """Ours by 0.0.7, where both were measured."""
    if not {"ours", "0.0.7"} <= rivals.keys():
        return "-"
    least, middle = (
        rivals["ours"][key] / rivals["0.0.7"][key] for key in ("overhead_min", "overhead_median")
    )
    return f"{least:.2f} ({middle:.2f})"


def main(argv: Sequence[str] | None = None) -> None:
    """Measures, prints a table, and writes the file."""
    options = parser().parse_args(argv)
    torch.set_num_threads(1)
    machine = describe()
    rows = []
    with ExitStack() as stack:
        running, left_out = start(options, stack)
        for setting in progress(settings(options), "overhead", "setting"):
            row, failed = measure(running, setting, options.rounds, options.seconds)
            rows.append(row)
            for name, reason in failed.items():
                left_out.setdefault("{} at {kind} {mode}".format(name, **setting), reason)
    rivals = [x.rival for x in running]
    head = {
        "benchmark": "overhead",
        "unit": "microseconds per cell",
        "machine": {**machine, "device": options.device},
        "rivals": {x.name: x.version for x in rivals},
        "left_out": left_out,
        "rounds": options.rounds,
        "seconds": options.seconds,
    }
    name = "overhead.json" if options.device == "cpu" else f"overhead_{options.device}.json"
    write(options.output or Path(__file__).with_name(name), head, rows)
    print(f"{heading(machine)}, {options.device} devices, one thread")
    print("Microseconds per cell above the plain loop: least (median)\n")
    print(table(rows, [x.name for x in rivals]))
    for name, reason in left_out.items():
        print(f"\nleft out: {name}: {reason.splitlines()[-1]}")
