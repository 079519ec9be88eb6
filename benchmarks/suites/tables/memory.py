"""Tables of ``python -m benchmarks memory``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.report.summary import Summary, Table

__all__ = ["summarise"]

Row = dict[str, Any]

#: Function of a device's entries that returns bytes.
Figure = Callable[[dict[str, int]], float]


def activations(device: dict[str, int]) -> int:
    """Bytes beyond parameters and gradients."""
    return device["peak"] - device["parameters"] - device["gradients"]


def peak(device: dict[str, int]) -> int:
    """Most bytes at any time."""
    return device["peak"]


def parameters(device: dict[str, int]) -> int:
    """Bytes of parameters."""
    return device["parameters"]


def cell(row: Row, name: str, figure: Figure) -> str | None:
    """Cell with the device that needs most, and in brackets the sum over devices."""
    found = row["rivals"].get(name)
    if found is None:
        return "-"
    if "error" in found:
        return None if found["error"] == "not run" else str(found["error"])
    needed = [figure(device) / 2**20 for device in found["devices"]]
    most = f"{max(needed):.2f}"
    return most if len(needed) == 1 else f"{most} ({sum(needed):.2f})"


def ratio(row: Row) -> str:
    """Ratios of peaks, ours over 0.0.7: of the largest device, and of the sum over devices."""
    ours, theirs = (row["rivals"].get(name, {}).get("devices") for name in ("ours", "0.0.7"))
    if not ours or not theirs:
        return "-"
    pairs = [(max(map(peak, x)), sum(map(peak, x))) for x in (ours, theirs)]
    return " ".join(f"{a / b:.3f}" for a, b in zip(*pairs))


def table(rows: Sequence[Row], caption: str, names: Sequence[str]) -> Table:
    """A line for each setting of one model."""
    columns = ["setting", "n", "m", "parameters"]
    columns += [f"{what} {name}" for what in ("activations", "peak") for name in names]
    lines: list[list[str | int | None]] = []
    for row in rows:
        sizes = [x["devices"] for x in row["rivals"].values() if "devices" in x]
        size = f"{sum(map(parameters, sizes[0])) / 2**20:.2f}" if sizes else None
        line = [row["name"], row["n"], row["m"] or "-", size]
        line += [cell(row, name, figure) for figure in (activations, peak) for name in names]
        lines.append([*line, ratio(row)])
    return Table([*columns, "ours / 0.0.7"], lines, caption)


def summarise(result: dict[str, Any]) -> Summary:
    """Tables of both families."""
    virtual = result["device"] == "virtual"
    tables: list[Table] = []
    more: list[Table] = []
    wrappers = [*result["rivals"]]
    for family in ("experiments", "grid"):
        some = [row for row in result["rows"] if row["family"] == family]
        for model in dict.fromkeys(row["model"]["name"] for row in some):
            rows = [row for row in some if row["model"]["name"] == model]
            size = f"size {rows[0]['size']}, mini-batches of {rows[0]['batch']}"
            names = [x for x in ("plain", *wrappers) if any(x in row["rivals"] for row in rows)]
            if family == "grid":
                caption = f"Modes, partitions and micro-batches of a small {model}: {size}."
            else:
                scaled = ", scaled" if result["scaled"] else ""
                caption = f"The papers' experiments on {model}{scaled}: {size}."
            (more if family == "grid" else tables).append(table(rows, caption, names))
    where = "virtual accelerators" if virtual else "GPUs"
    title = f"Memory of a training step, on {where}"
    if not tables:
        tables, more = more, []
    return Summary(title, tables, notes(result), more)


def notes(result: dict[str, Any]) -> str:
    """Explain how to read the tables."""
    text = (
        "MiB of the device that needs most, and in brackets the sum over devices. Parameters are "
        "those of the whole model. The peak is the most memory that was allocated during the "
        "second step: forward, backward and SGD without momentum, which then drops the gradients. "
        "It includes parameters, buffers and the mini-batch. Activations are the peak less twice "
        "the parameters, once for their gradients, as the torchgpipe paper counts. Before all "
        "gradients are there, activations can take their room, so where most of the memory is "
        "parameters, this figure is too low. The plain model is on one device, with the whole "
        "mini-batch at once. The last column is ours over 0.0.7, of peaks: of the largest device, "
        "and of the sum over devices. How far one device is ahead of another depends on the "
        "host's threads, so with several devices figures may differ a little from run to run. "
        "Under checkpointing, ours holds one more gradient of a linear layer's weight for a "
        "moment: all micro-batches are one backward, in which PyTorch adds gradients that are "
        "views into a new tensor."
    )
    if result["device"] == "virtual":
        text += (
            "\n\nThe allocator of these virtual accelerators counts the bytes of tensors exactly, "
            "as if a tensor's memory were free as soon as the host frees it. It does not count "
            "the workspace of a GPU's libraries. Full size on GPUs was not run here; `python -m "
            "benchmarks memory --device cuda` does it."
        )
    return text
