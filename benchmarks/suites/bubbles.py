"""Time, bubble and memory of schedules at equal work, in virtual time.

The model is the Transformer of ``examples/schedules.py``, on four virtual accelerators. A matrix
product takes 1 ms of virtual time, forward and backward, and nothing else takes any. The bubble is
the share of a step in which a device computes nothing, of the device where it is largest. Beside it
stand the bubble that the simulator tells, and the published one: of GPipe (Huang et al., arXiv
1811.06965), 1F1B and interleaved 1F1B (Narayanan et al., arXiv 2104.04473), ZB-H1 (Qi et al., arXiv
2401.10241), ZB-V (Qi et al., arXiv 2405.15362) and DualPipe for V (DeepSeek-AI, arXiv 2412.19437).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.command import at_least, output, parser
from benchmarks.progress import progress
from benchmarks.report.files import Result, head, publish
from benchmarks.report.summary import Summary, Table
from examples import schedules as example
from torchgpipe import testing

P = example.WORKERS

#: Milliseconds of a forward through a device's layers; a block has four matrix products.
FORWARD = 4.0 * example.BLOCKS / P

#: Published idle time of a device in a step, in forwards through its layers; the two halves of a
#: backward take as long as a forward each. Two stages of DualPipe for V overlap, here for free.
IDLE = {
    "fill_drain": 3 * (P - 1),
    "1f1b": 3 * (P - 1),
    "zero_bubble_h1": P - 1,
    "interleaved": 3 * (P - 1) / 2,
    "zero_bubble_v": (P - 1) / 2,
    "dualpipe_v": (P - 1) / 2,
}


def main(argv: Sequence[str]) -> None:
    """Measure and publish."""
    options = parser("bubbles", __doc__)
    options.add_argument("--m", type=at_least(1), nargs="+", default=[8, 16, 32])
    chosen = options.parse_args(argv)
    torch.set_num_threads(1)
    # Before the first backward of the process.
    testing.load(P)
    result = head("bubbles", argv, n=P)
    rows: list[dict[str, Any]] = []
    settings = [(m, name) for m in chosen.m for name in example.PLACES]
    for m, name in progress(settings, "bubbles", "setting"):
        step = example.step(name, example.blocks(), example.samples(m), m, "never")
        time = step.seen.makespan
        rows.append({"m": m, "schedule": name, "ms": time, "bubble": step.bubble, "mib": step.mib})
        rows[-1]["simulated"] = example.simulated(name, m)
        rows[-1]["published"] = IDLE[name] * FORWARD / time
    publish(output(chosen, "bubbles"), result, rows, summarise)


def summarise(result: Result) -> Summary:
    """A line for each schedule."""
    shares = ("bubble", "simulated", "published")
    lines = [
        [
            *(row["m"], row["schedule"], f"{row['ms']:.0f}"),
            *[f"{row[share]:.1%}" for share in shares],
            f"{row['mib']:.1f}",
        ]
        for row in result["rows"]
    ]
    return Summary(
        "Bubbles and memory of schedules, in virtual time",
        [Table(["m", "schedule", "ms", *shares, "MiB"], lines)],
        "Virtual time and memory of a step, at equal work. The bubble is that of the device that "
        "is idle longest, and the memory, beyond weights, that of the fullest one. Published: the "
        "idle time that the paper of the schedule tells, over the same time. Interleaved 1F1B and "
        "the V shapes have two stages of half the size on each device. `dualpipe_v` runs pairs of "
        "stages side by side, which costs nothing on virtual accelerators.",
    )
