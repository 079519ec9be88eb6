"""Tables of trainings, plain and under GPipe: losses, weights and accuracies."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import copysign, inf, sqrt
from statistics import mean, stdev
from typing import Any

from benchmarks.report.summary import Summary, Table

__all__ = ["Row", "summarise"]

#: Accuracies count as the same if their means differ by at most as many standard errors.
NOISE = 2

Row = dict[str, Any]


def same(row: Row, rows: Sequence[Row]) -> str:
    """Tell whether a training ended bit for bit like the first one under GPipe."""
    keys = ("part", "deferred", "seed")
    like = [x for x in rows if x["n"] and all(x[key] == row[key] for key in keys)]
    if row["n"] in (None, like[0]["n"]):
        return ""
    return "yes" if row["digests"] == like[0]["digests"] else "no"


def groups(rows: Sequence[Row], part: str) -> dict[str, list[Row]]:
    """Rows of each variant, in the order of seeds."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        if row["part"] == part:
            found.setdefault(row["variant"], []).append(row)
    return found


def compared(values: Sequence[float], plain: Sequence[float]) -> tuple[str, str, str]:
    """Difference of the means, Welch's t, and whether the difference is noise."""
    difference = mean(values) - mean(plain)
    if len(values) < 2:
        return f"{difference:+.2f}", "", ""
    error = standard_error(values, plain)
    t = difference / error if error else copysign(inf, difference) if difference else 0.0
    return f"{difference:+.2f}", f"{t:+.2f}", "yes" if abs(t) <= NOISE else "no"


def standard_error(values: Sequence[float], plain: Sequence[float]) -> float:
    """Standard error of the difference of two means."""
    return sqrt(stdev(values) ** 2 / len(values) + stdev(plain) ** 2 / len(plain))


def exact_table(rows: Sequence[Row]) -> Table:
    """Differences from the plain training, without batch normalisation."""
    first = next(x["n"] for x in rows if x["n"])
    return Table(
        (
            "training",
            "accuracy, %",
            "losses differ by",
            "weights differ by",
            f"as n = {first}, bit for bit",
        ),
        [
            (
                row["variant"],
                f"{row['accuracy']:.2f}",
                *(
                    f"{row[x]:.1e}" if row["n"] else ""
                    for x in ("loss_difference", "weight_difference")
                ),
                same(row, rows),
            )
            for row in rows
            if row["part"] == "exact"
        ],
        "Without batch normalisation, in double precision:",
    )


def batch_tables(rows: Sequence[Row]) -> Iterator[Table]:
    """Accuracies with batch normalisation: means, and each seed's."""
    found = groups(rows, "batch")
    accuracies = {name: [x["accuracy"] for x in group] for name, group in found.items()}
    first = next(x["n"] for x in rows if x["n"])
    lines = []
    for name, values in accuracies.items():
        spread = f" ± {stdev(values):.2f}" if len(values) > 1 else ""
        of_each = {same(x, rows) for x in found[name]}
        lines.append(
            (
                name,
                f"{mean(values):.2f}{spread}",
                *(("", "", "") if name == "plain" else compared(values, accuracies["plain"])),
                f"{mean(x['last_loss'] for x in found[name]):.5f}",
                "no" if "no" in of_each else of_each.pop(),
            )
        )
    columns = ("training", "accuracy, %", "difference", "t", "within noise", "last loss")
    yield Table(
        (*columns, f"as n = {first}, bit for bit"),
        lines,
        "With batch normalisation, in single precision, mean ± standard deviation over seeds:",
    )
    yield Table(
        ("accuracy, %", *(f"seed {x['seed']}" for x in found["plain"])),
        [(name, *(f"{x:.2f}" for x in values)) for name, values in accuracies.items()],
        "Of each seed:",
    )


#: A sentence on the devices, by the option ``--device``.
DEVICES = {
    "cpu": "All partitions share one device, the CPU: nothing is copied between them.",
    "virtual": "Each partition has a virtual accelerator of its own, which computes what the CPU "
    "does, on streams and with copies as on GPUs.",
}

NOTES = f"""\
With the same seed, all trainings start from the same weights and see the same mini-batches.
Differences are relative: of losses the largest one at any step, and of weights the largest one of
any tensor, over the tensor's largest value. Sums over micro-batches have another order, so some
rounding is expected.

With batch normalisation, a micro-batch is normalised by its own statistics. This differs from
training on whole mini-batches, and is as good if it reaches the same accuracy. "Within noise" means
that the means differ by at most {NOISE} times the standard error of their difference; t is the
ratio of the two (Welch's). Deferred batch normalisation changes the running statistics, which
evaluation uses, but not the training of the parameters. The last loss is the mean of the last
epoch, on the training images, with the statistics of micro-batches. These statistics vary more with
fewer images in a micro-batch, and the loss then ends higher: on the digits, with 96, 48, 24, 12 and
6 images, it rose each time, for each of three seeds."""


def where(result: dict[str, Any]) -> str:
    """A sentence on the devices of the partitions."""
    kind = result["device"]
    return DEVICES.get(kind) or (
        f"Partitions are on devices of {kind}, and share them where there are more partitions "
        f"(devices: {result['devices']})."
    )


def summarise(result: dict[str, Any]) -> Summary:
    """Tables of both comparisons."""
    rows = result["rows"]
    exact = [exact_table(rows)] if result["exact_epochs"] else []
    data = result["images"]
    what = (
        f"{result['model']} on {data['name']}, {data['classes']} classes, {data['train']} images "
        f"to train and {data['test']} to test on; {result['epochs']} epochs of mini-batches of "
        f"{result['batch']}, under GPipe in {result['chunks']} micro-batches. {where(result)}"
    )
    notes = f"{what}\n\n{NOTES}"
    found = [[x["accuracy"] for x in group] for group in groups(rows, "batch").values()]
    if len(found[0]) > 1:
        seen = NOISE * max(standard_error(x, found[0]) for x in found)
        notes += f" With {len(found[0])} seeds, a difference of {seen:.2f} points would show."
    return Summary(
        "Transparency: training under GPipe, and without",
        [*exact, *batch_tables(rows)],
        notes,
    )
