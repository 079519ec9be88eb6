"""Idle time and activations of V-shaped schedules beside the published ones.

On virtual accelerators, where F, I and W of a worker's stages take one unit each. The published
figures (Qi et al., Pipeline Parallelism with Controllable Memory, arXiv 2405.15362) are those of
the table in the README of the authors' repository, sail-sg/zero-bubble-pipeline-parallelism, and
the counts of activations those of their Hugging Face space of the paper's name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks.command import at_least, output, parser
from benchmarks.progress import progress
from benchmarks.report.files import Result, head, publish
from benchmarks.report.summary import Summary, Table
from benchmarks.simulate.units import run
from torchgpipe.testing import load

#: For each schedule its name here, the published idle time over 1F1B's, the published activations
#: over 1F1B's, and how many micro-batches they are for n workers, if that is published.
PUBLISHED: dict[str, tuple[str, str, str, Callable[[int], int] | None]] = {
    "1F1B": ("1f1b", "1", "1", lambda n: n),
    "ZB1P": ("zero_bubble_h1", "1/3", "1", None),
    "ZB2P": ("zero_bubble_h2", "0", "2", None),
    "ZBV": ("zero_bubble_v", "0", "1", lambda n: n),
    "V-Half": ("v_half", "1/2", "1/2", lambda n: (n + 2) // 2),
    "V-Min": ("v_min", "2/3", "1/3", lambda n: (n + 4) // 3),
}


def main(argv: Sequence[str]) -> None:
    """Measure and publish."""
    options = parser("controllable_memory", __doc__)
    options.add_argument("--n", type=at_least(2), nargs="+", default=[4, 8, 16], help="workers")
    chosen = options.parse_args(argv)
    torch.set_num_threads(1)
    # Before the first backward of the process.
    devices = load(max(chosen.n))
    result = head("controllable_memory", argv)
    rows: list[dict[str, Any]] = []
    settings = [(n, title) for n in chosen.n for title in PUBLISHED]
    for n, title in progress(settings, "controllable_memory", "setting"):
        step = run(PUBLISHED[title][0], devices[:n], 4 * n, (1, 1, 1))
        spans = {"longest": step.longest, "step": step.makespan, "kept": step.kept}
        rows.append({"n": n, "m": 4 * n, "schedule": title, **spans})
    publish(output(chosen, "controllable_memory"), result, rows, summarise)


def summarise(result: Result) -> Summary:
    """A line for each schedule and number of workers."""
    lines: list[list[str | int]] = []
    for row in result["rows"]:
        _, idle, share, count = PUBLISHED[row["schedule"]]
        (one,) = [x for x in result["rows"] if (x["n"], x["schedule"]) == (row["n"], "1F1B")]
        work = 3 * row["m"]
        waits = [(row[x] - work) / (one[x] - work) for x in ("longest", "step")]
        lines.append(
            [
                *(row["n"], row["m"], row["schedule"], idle, *[f"{x:.2f}" for x in waits]),
                *(share, f"{row['kept'] / one['kept']:.2f}"),
                *(str(count(row["n"])) if count else "-", f"{row['kept']:g}"),
            ]
        )
    waits_of = ["idle / 1F1B's, published", "ours", "over the step"]
    kept_by = ["memory / 1F1B's, published", "ours", "micro-batches, published", "ours"]
    return Summary(
        "Controllable memory",
        [Table(["n", "m", "schedule", *waits_of, *kept_by], lines)],
        notes="Idle is the longest span of a worker less its work, as in the paper; the next "
        "column takes the whole step instead. The published shares are limits for many workers. "
        "Ours agree, except that ZB2P keeps one micro-batch less than twice 1F1B's, V-Min of 8 "
        "workers one less than published, and that V-Half waits 0.56 to 0.58 of 1F1B's time "
        "instead of 1/2. Memory is that of activations on the fullest worker, which virtual "
        "accelerators counted.",
    )
