"""Zero Bubble's bubble rates beside those of our schedules, on virtual accelerators.

The paper (Qi et al., arXiv 2401.10241) measured the times of F, B, W and a copy of four models, and
tells the rate of each schedule at these times. Its B is our I. Both are read from the authors'
repository, sail-sg/zero-bubble-pipeline-parallelism, the comment at the end of
megatron/core/pipeline_parallel/efficiency.py at commit f68d387947.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.command import at_least, output, parser
from benchmarks.progress import progress
from benchmarks.report.files import Result, head, publish
from benchmarks.report.summary import Summary, Table
from benchmarks.simulate.units import run
from torchgpipe.testing import load

SCHEDULES = {"1F1B": "1f1b", "ZB-H1": "zero_bubble_h1", "ZB-H2": "zero_bubble_h2"}

#: Workers, micro-batches, the milliseconds of F, I, W and a copy; the published rates.
PUBLISHED = [
    (8, 24, (18.522, 18.086, 9.337), 0.601, (0.2431, 0.1585, 0.1083)),
    (8, 32, (18.513, 18.086, 9.331), 0.626, (0.1985, 0.1242, 0.0837)),
    (8, 64, (18.546, 18.097, 9.321), 0.762, (0.1240, 0.0674, 0.0444)),
    (8, 24, (29.718, 29.444, 19.927), 0.527, (0.2347, 0.1323, 0.0698)),
    (8, 32, (29.802, 29.428, 19.530), 0.577, (0.1898, 0.1045, 0.0559)),
    (8, 64, (29.935, 29.621, 19.388), 0.535, (0.1091, 0.0554, 0.0294)),
    (16, 48, (11.347, 11.248, 8.132), 0.377, (0.2552, 0.1397, 0.0672)),
    (16, 64, (11.307, 11.254, 8.101), 0.379, (0.2082, 0.1088, 0.0516)),
    (16, 128, (11.325, 11.308, 8.109), 0.378, (0.1251, 0.0576, 0.0266)),
    (32, 96, (10.419, 10.207, 7.715), 0.408, (0.2646, 0.1421, 0.0641)),
    (32, 128, (10.408, 10.204, 7.703), 0.408, (0.2168, 0.1106, 0.0490)),
    (32, 256, (10.402, 10.248, 7.698), 0.460, (0.1352, 0.0594, 0.0257)),
]


def main(argv: Sequence[str]) -> None:
    """Measure and publish."""
    options = parser("zero_bubble", __doc__)
    options.add_argument("--rows", type=at_least(1), default=len(PUBLISHED), help="of the table")
    chosen = options.parse_args(argv)
    torch.set_num_threads(1)
    # Before the first backward of the process.
    devices = load(max(workers for workers, *_ in PUBLISHED[: chosen.rows]))
    rows: list[dict[str, Any]] = []
    result = head("zero_bubble", argv)
    for workers, m, times, copy, published in progress(
        PUBLISHED[: chosen.rows], "zero_bubble", "setting"
    ):
        rows.append({"n": workers, "m": m, "times": [*times, copy], "rates": {}})
        for (title, name), rate in zip(SCHEDULES.items(), published):
            step = run(name, devices[:workers], m, times, copy)
            found = [1 - m * sum(times) / time for time in (step.longest, step.makespan)]
            rows[-1]["rates"][title] = [rate, *[round(x, 4) for x in found]]
    publish(output(chosen, "zero_bubble"), result, rows, summarise)


def summarise(result: Result) -> Summary:
    """A line for each setting, with a published and a found rate for each schedule."""
    names = [x for title in SCHEDULES for x in (f"{title}, published", "ours")]
    lines = [
        [
            *(row["n"], row["m"], *[f"{x:.3f}" for x in row["times"]]),
            *[f"{x:.4f}" for rates in row["rates"].values() for x in rates[:2]],
            f"{row['rates']['ZB-H2'][2]:.4f}",
        ]
        for row in result["rows"]
    ]
    rates = [x for row in result["rows"] for x in row["rates"].values()]
    equal = sum(published == ours for published, ours, _ in rates)
    return Summary(
        "Zero Bubble's bubble rates",
        [Table(["n", "m", "F", "I", "W", "copy", *names, "ZB-H2 over the step"], lines)],
        notes=f"{equal} of {len(rates)} rates are equal to four digits. A rate is the idle share "
        "of the longest span of a worker, from its first computation to its last one "
        "(`Report.longest`). Over the whole step, from the first computation of any worker to the "
        "last one, ZB-H2 may wait longer; the other two do not. Times are virtual milliseconds. "
        "The paper's ZB-1p and ZB-2p are left out: they come from a search of theirs at the "
        "memory of 1F1B, and at twice as much.",
    )
