"""Choices of the planner beside the best of all that it could choose, by dry runs.

Seven models, each for several devices and three limits of memory, are planned for by the search of
`torchgpipe.plan`, with a loss. What it chooses runs dry. A search by branch and bound, which shares
nothing with the planner's, looks at all schedules, cuts and modes. What it finds to be faster, and
to fit, runs dry as well. An eighth model is a Llama by the map "auto" of `MappedGPipe`, beside all
maps that may fit, or if they are many, those with one boundary moved by a block::

    python -m benchmarks choices

The file has each model as soon as it is measured. With ``--missing``, those in it are left out.
With ``--again``, the limits are those of the file, whose best settings count, too.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import torch

from benchmarks.command import at_least, output, parse, parser
from benchmarks.progress import progress
from benchmarks.report.files import Result, head, publish
from benchmarks.report.summary import Summary, Table
from benchmarks.simulate.choice_models import MODELS
from benchmarks.simulate.choices import measure, measure_map
from torchgpipe import testing

__all__ = ["main", "summarise"]

NAMES = [*MODELS, "Llama"]

NOTES = """\
Limits: *share* of what the fastest choice takes beyond weights, gradients and the state of AdamW;
the first choice has no limit. *ms*: the step that was chosen, by a dry run. *Over the best*: by how
much it is longer than the best that is known to fit. *Predicted*: the planner's prediction, over
the dry run's. *Of the limit*: the peak of the dry run. *Settings*: schedules, cuts, and five modes
for each partition; of a Llama, the maps. *Simulated*: those of them that no lower bound excluded,
of their time (1.5 % below the simulated time of the choice, or that of the best so far) or of the
memory of one of their devices (the limit, without the planner's margin). *Faster*: the step of the
best of these, by a dry run, if there is one that fits; *none*: all others are excluded. *Open*: how
many schedules needed more than 4 million bounds, or maps that may fit have not run. *Seconds*: of
the processor, to choose. Rows without settings are of before this search, beside a few others."""


def main(argv: Sequence[str]) -> None:
    """Measure and publish."""
    reads = parser("choices", __doc__)
    reads.add_argument("--models", nargs="+", choices=NAMES, default=NAMES, help="names")
    reads.add_argument("--n", type=at_least(2), nargs="+", default=[2, 4, 8], help="devices")
    reads.add_argument("--chunks", type=at_least(1), nargs="+", default=[8], help="micro-batches")
    reads.add_argument("--missing", action="store_true", help="measure what the file has not")
    reads.add_argument("--again", action="store_true", help="choose anew, under the same limits")
    options = parse(reads, argv)
    torch.set_num_threads(1)
    # Before the first backward of the process.
    devices = testing.load(max(options.n))
    # A dry run collects garbage, and looks at all that lives.
    gc.collect()
    gc.freeze()
    path = output(options, "choices")
    found: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for row in json.loads(path.read_text("utf-8"))["rows"] if path.exists() else ():
        found.setdefault((row["model"], row["n"]), []).append(row)
    settings = [
        x for x in product(options.models, options.n) if not (options.missing and x in found)
    ]
    for name, n in progress(settings, "choices", "model"):
        known = found.get((name, n), []) if options.again else []
        found[name, n] = [*measured(name, devices[:n], options.chunks, known)]
        # Other models keep the rows that the file has, and all take hours.
        rows = [
            row for x in product(NAMES, sorted({n for _, n in found})) for row in found.get(x, [])
        ]
        publish(path, head("choices", argv), rows, summarise)


def measured(
    name: str,
    devices: Sequence[torch.device],
    chunks: Sequence[int],
    known: Sequence[dict[str, Any]],
) -> Iterator[dict[str, Any]]:
    """The rows of one model and some devices."""
    if name == "Llama":
        return measure_map(devices, max(chunks))
    return measure(name, devices, chunks, known)


def summarise(result: Result) -> Summary:
    """A line for each choice, and how many are good."""
    rows: list[dict[str, Any]] = result["rows"]
    fitting = [row for row in rows if row["fits"]]
    near = sum(row["ms"] <= 1.03 * row["best_ms"] for row in fitting)
    predicted = [row for row in fitting if row["predicted_peak"] is not None]
    peaks = sum(abs(row["predicted_peak"] / row["peak"] - 1) <= 0.05 for row in predicted)
    limited = [row for row in fitting if row["limit"] is not None]
    above = sum(row["peak"] > row["limit"] for row in limited)
    missed = sum(row["best_ms"] is not None for row in rows if not row["fits"])
    proven = sum("left" in row and not row["left"] for row in rows)
    counts = (
        f"{near} of {len(fitting)} choices are within 3 % of the best, {peaks} of {len(predicted)} "
        f"predicted peaks within 5 %, and {above} of {len(limited)} above their limit. Where "
        f"nothing was said to fit ({len(rows) - len(fitting)} times), something did {missed} "
        f"times. In {proven} of {len(rows)} rows, nothing of all settings is left open."
    )
    columns = ["model", "n", "limit", "chosen", "ms", "over the best", "predicted ms"]
    columns += ["predicted peak", "of the limit", "settings", "simulated", "faster"]
    columns += ["open", "seconds"]
    return Summary(
        "Choices of the planner",
        [Table(columns, [_line(row) for row in rows], counts)],
        NOTES.replace("\n", " "),
    )


def _off(predicted: float | None, found: float) -> str | None:
    return None if predicted is None else f"{predicted / found - 1:+.1%}"


def _line(row: dict[str, Any]) -> list[str | None]:
    chosen = row["chosen"]
    name = f"{chosen['schedule']}, {chosen['balance']}, {chosen['modes']}"
    share = "none" if row["share"] is None else f"{row['share']:.0%}"
    figures: list[str | None] = [None] * 5
    if row["fits"]:
        figures = [
            f"{row['ms']:.1f}",
            f"{row['ms'] / row['best_ms'] - 1:.1%}",
            *[_off(row[f"predicted_{key}"], row[key]) for key in ("ms", "peak")],
            None if row["limit"] is None else f"{row['peak'] / row['limit']:.1%}",
        ]
    others: list[str | None] = [None] * 4
    if "left" in row:
        faster = "none" if row["faster"] is None else f"{row['faster']['ms']:.1f}"
        others = [f"{row['settings']:.1e}", str(row["simulated"]), faster, str(row["left"])]
    counts = [*others, f"{row['seconds']:.1f}"]
    return [row["model"], str(row["n"]), share, name if row["fits"] else None, *figures, *counts]
