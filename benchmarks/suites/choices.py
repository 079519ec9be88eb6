"""Choices of the planner beside the best that is known, by dry runs.

Seven models, each for several devices and three limits of memory, are planned for with a loss, by
predictions alone and with two candidates proven. What is chosen runs dry, and so does the best
setting that is known to fit. The file has these, and the limits: a search by branch and bound over
all settings found them once. Where cells left for the memory of the host in the best one, which a
plan does not choose, it is the best of three times twelve proven candidates. An eighth model is a
Llama by the map "auto" of `MappedGPipe`::

    python -m benchmarks choices
"""

from __future__ import annotations

import gc
import json
from collections.abc import Sequence
from itertools import product
from typing import Any

import torch

from benchmarks.command import at_least, output, parse, parser
from benchmarks.progress import progress
from benchmarks.report.files import RESULTS, Result, head, publish
from benchmarks.report.summary import Summary, Table
from benchmarks.simulate.choice_models import MODELS
from benchmarks.simulate.choices import measure, measure_map
from torchgpipe import testing

__all__ = ["main", "summarise"]

NAMES = [*MODELS, "Llama"]

#: The number of micro-batches.
CHUNKS = 8

NOTES = """\
Limits: *share* of what the fastest choice took beyond weights, gradients and the state of AdamW;
the first choice has no limit. *Predicted*: by predictions alone, which leave 15 % of the limit.
*Proven*: two candidates are trained for two steps before. *Over the best*: by how much the step of
a dry run is longer than the best that is known to fit. *Of the limit*: the peak of that run.
*Predicted peak*: over that of the run. *Seconds*: of the processor, to choose."""


def main(argv: Sequence[str]) -> None:
    """Measure and publish."""
    reads = parser("choices", __doc__)
    reads.add_argument("--models", nargs="+", choices=NAMES, default=NAMES, help="names")
    reads.add_argument("--n", type=at_least(2), nargs="+", default=[2, 4, 8], help="devices")
    options = parse(reads, argv)
    torch.set_num_threads(1)
    # Before the first backward of the process.
    devices = testing.load(max(options.n))
    # A dry run collects garbage, and looks at all that lives.
    gc.collect()
    gc.freeze()
    path = output(options, "choices")
    rows = json.loads((RESULTS / "choices.json").read_text("utf-8"))["rows"]
    found = {}
    for name, n in progress([*product(options.models, options.n)], "choices", "model"):
        known = [x for x in rows if (x["model"], x["n"]) == (name, n)]
        if name == "Llama":
            found[name, n] = [*measure_map(devices[:n], known, CHUNKS)]
        else:
            found[name, n] = [*measure(name, devices[:n], known, CHUNKS)]
        # Other models keep the rows that the file has.
        done = [y for x in found.values() for y in x]
        rest = [x for x in rows if (x["model"], x["n"]) not in found]
        publish(path, head("choices", argv), [*done, *rest], summarise)


def summarise(result: Result) -> Summary:
    """A line for each choice, and how many are good."""
    rows = [row for row in result["rows"] if "predicted" in row]
    counts = []
    for way, most in ("predicted", 1.1), ("proven", 1.05):
        own = [(row, row[way]) for row in rows if way in row]
        fitting = [(row, x) for row, x in own if x["fits"]]
        near = sum(x["ms"] <= most * (row["best_ms"] or x["ms"]) for row, x in fitting)
        above = sum(x["peak"] > (row["limit"] or x["peak"]) for row, x in fitting)
        missed = sum(row["best_ms"] is not None for row, x in own if not x["fits"])
        counts.append(
            f"{way}: {near} of {len(fitting)} within {most - 1:.0%} of the best, {above} above "
            f"their limit; nothing was said to fit {len(own) - len(fitting)} times, and something "
            f"does {missed} times"
        )
    columns = ["model", "n", "limit", "way", "chosen", "ms", "over the best", "of the limit"]
    columns += ["predicted peak", "seconds"]
    lines = [_line(row, way) for row in rows for way in ("predicted", "proven") if way in row]
    return Summary(
        "Choices of the planner",
        [Table(columns, lines, ". ".join(counts) + ".")],
        NOTES.replace("\n", " "),
    )


def _line(row: dict[str, Any], way: str) -> list[str | None]:
    found = row[way]
    share = "none" if row["share"] is None else f"{row['share']:.0%}"
    figures: list[str | None] = [None] * 5
    if found["fits"]:
        best, limit = row["best_ms"], row["limit"]
        peak = found.get("predicted_peak")
        figures = [
            f"{found['schedule']}, {found['balance']}, {found.get('modes', '')}",
            f"{found['ms']:.1f}",
            None if best is None else f"{found['ms'] / best - 1:.1%}",
            None if limit is None else f"{found['peak'] / limit:.1%}",
            None if peak is None else f"{peak / found['peak'] - 1:+.1%}",
        ]
    return [row["model"], str(row["n"]), share, way, *figures, f"{found['seconds']:.1f}"]
