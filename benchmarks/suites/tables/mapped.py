"""The table of virtual times of ``python -m benchmarks mapped``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.report.summary import Summary, Table
from benchmarks.simulate.mapped import M

__all__ = ["steps"]

WAYS = ("device map", "device map, in a loop", "MappedGPipe", "GPipe")

NOTES = f"""\
**Virtual time** of a step with m={M}, in milliseconds; from the least to the greatest of several
steps where they differ. The loop computes one micro-batch after another under Accelerate's hooks;
nothing holds its backward to an order, and its time varies from step to step. Neither device map
has checkpoints. GPipe has the Llama's layers in an `nn.Sequential` that was written by hand. The
limit is the critical path of equal stages with F = R = 1 and B = 2."""


def steps(rows: Sequence[dict[str, Any]]) -> Summary:
    """A line for each model and mode."""
    lines = [
        [
            *(row["model"], row["mode"]),
            *[spread(row["ms"].get(way, [])) for way in WAYS],
            "-" if row["limit"] is None else f"{row['limit']:.0f}",
        ]
        for row in rows
    ]
    return Summary(
        "Models under a device map, in virtual time",
        [Table(["model", "mode", *WAYS, "limit"], lines, "Milliseconds of virtual time:")],
        NOTES.replace("\n", " "),
    )


def spread(times: Sequence[float]) -> str:
    """The least and the greatest time, once if they are equal."""
    return " to ".join(dict.fromkeys(f"{x(times):.0f}" for x in (min, max))) if times else "-"
