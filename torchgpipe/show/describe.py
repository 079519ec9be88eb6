"""Tables of a wrapped model: its partitions, what they hold, and what steps have measured."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from torchgpipe.show.figures import CellTimes, PlanFigures, StepFigures
from torchgpipe.show.tables import aligned, in_bytes

__all__: list[str] = [
    "Description",
    "DescriptionRow",
]


#: The most names of layers that a row shows. Of more names it shows the first two and the last one.
NAMES = 4


@dataclass(frozen=True)
class DescriptionRow:
    """One partition of a wrapped model, or one device of a device map."""

    name: str | None
    """The number of the partition; None for a device of a device map."""
    layers: tuple[str, ...]
    """The names of its layers, or of the modules that are computed on the device."""
    parameters: int
    """The number of elements of the parameters."""
    bytes: int
    """The size of parameters and buffers."""
    device: str
    """The device that computes them."""
    checkpoint: str
    """The checkpoint mode."""
    forward: float | None = None
    """Seconds of a micro-batch, after a trace."""
    backward: float | None = None
    """Seconds of a micro-batch without its recomputation, after a trace."""
    memory: int | None = None
    """Bytes of the device at its peak, after a trace."""
    recompute: float | None = None
    """Seconds of a micro-batch, after a trace, if it was computed again."""
    planned: int | None = None
    """Bytes of the device at its peak, as a plan had predicted."""
    host: int | None = None
    """Bytes of the host's memory that the device has for what cells keep there, after a trace."""


class DescribedPart(NamedTuple):
    """A partition to be described."""

    name: str | None
    layers: Iterable[str]
    tensors: Iterable[Tensor]
    device: torch.device
    checkpoint: str


def part_of(
    j: int, layers: nn.Module, device: torch.device, checkpoint: str, loss: Any = None
) -> DescribedPart:
    """A partition to be described; a loss after the layers counts if it is a module."""
    after = [loss] if isinstance(loss, nn.Module) else []
    modules = nn.ModuleList([layers, *after])
    names = [*layers._modules, *["loss" for _ in after]]
    return DescribedPart(
        str(j), names, [*modules.parameters(), *modules.buffers()], device, checkpoint
    )


@dataclass(frozen=True)
class Description:
    """The partitions of a wrapped model as a table, which ``str()`` and ``print()`` show."""

    rows: tuple[DescriptionRow, ...]
    """A row for each partition."""
    parameters: int
    """The number of elements of all parameters, each counted once."""
    bytes: int
    """The size of all parameters and buffers, each counted once."""
    chunks: int
    """The number of micro-batches."""
    title: str = "partition"
    """The name of the first column."""
    schedule: str | None = None
    """The name or the text of the schedule, if there is one."""
    rank: int | None = None
    """The rank of this process, if the others have partitions of their own."""
    measured: float | None = None
    """Seconds of the last step of a trace, if there was one."""
    predicted: float | None = None
    """Seconds of a step as a plan had predicted, if one has these settings."""
    slices: str | None = None
    """The slices of a sequence, and their lengths, if it is divided."""

    @classmethod
    def of(
        cls,
        parts: Iterable[DescribedPart],
        chunks: int,
        title: str = "partition",
        schedule: str | None = None,
        rank: int | None = None,
        figures: StepFigures | None = None,
        prediction: PlanFigures | None = None,
        slices: str | None = None,
    ) -> Description:
        """Describe partitions, also by what a trace has measured and a plan had predicted."""
        rows, together = [], []
        for name, layers, tensors, device, checkpoint in parts:
            listed = [*tensors]
            row = DescriptionRow(name, tuple(layers), *_counted(listed), str(device), checkpoint)
            rows.append(_with(row, figures, prediction))
            together += listed
        return cls(
            tuple(rows),
            *_counted(together),
            chunks,
            title,
            schedule,
            rank,
            None if figures is None else figures.time / 1000,
            None if prediction is None else prediction.time / 1000,
            slices,
        )

    def __str__(self) -> str:
        columns: list[tuple[str, bool, list[str | None]]] = [
            (self.title, True, [row.name for row in self.rows]),
            ("layers", True, [shortened(row.layers) for row in self.rows]),
            ("parameters", False, [f"{row.parameters:,}" for row in self.rows]),
            ("bytes", False, [in_bytes(row.bytes) for row in self.rows]),
            ("device", True, [row.device for row in self.rows]),
            ("checkpoint", True, [row.checkpoint for row in self.rows]),
            ("forward ms", False, [_milliseconds(row.forward) for row in self.rows]),
            ("recompute ms", False, [_milliseconds(row.recompute) for row in self.rows]),
            ("backward ms", False, [_milliseconds(row.backward) for row in self.rows]),
            ("memory", False, [_size(row.memory) for row in self.rows]),
            ("host", False, [_size(row.host) for row in self.rows]),
            ("planned", False, [_size(row.planned) for row in self.rows]),
        ]
        # A column that is empty in all rows is left out, such as measured times before any step.
        known = [column for column in columns if any(x is not None for x in column[2])]
        cells = [[title, *[x or "" for x in texts]] for title, _, texts in known]
        left = {k for k, (_, is_left, _) in enumerate(known) if is_left}
        table = [aligned([*zip(*cells)], left)] if self.rows else []
        return "\n".join([*table, self._total(), *self._step()])

    def _step(self) -> Iterator[str]:
        """A line about the time of a step, if anything is known about it."""
        known = {"measured": self.measured, "predicted": self.predicted}
        words = [f"{_milliseconds(x)} ms {name}" for name, x in known.items() if x is not None]
        if words:
            yield f"step: {', '.join(words)}"

    def _total(self) -> str:
        count = sum(len(row.layers) for row in self.rows)
        settings = {"chunks": self.chunks, "slices": self.slices, "rank": self.rank}
        settings |= {"schedule": self.schedule}
        text = ", ".join(
            # A schedule of instructions has a line for each worker, so it begins on a new line.
            f"{name}:\n{x}" if "\n" in str(x) else f"{name}: {x}"
            for name, x in settings.items()
            if x is not None
        )
        return (
            f"total: {count} layer{'' if count == 1 else 's'}, {self.parameters:,} parameters, "
            f"{in_bytes(self.bytes)}, {text}"
        )


def _with(
    row: DescriptionRow, figures: StepFigures | None, prediction: PlanFigures | None
) -> DescriptionRow:
    """A row with the figures of its partition; one without a name has those of its device."""
    if prediction is not None:
        row = replace(row, planned=prediction.memory.get(row.device))
    if figures is None:
        return row
    times = (
        figures.places.get(row.device) if row.name is None else figures.stages.get(int(row.name))
    )
    mean = times or CellTimes()
    forward, recompute, backward = (
        None if x is None else x / 1000 for x in (mean.forward, mean.recompute, mean.backward)
    )
    memory, host = (known.get(row.device) for known in (figures.memory, figures.host))
    return replace(
        row, forward=forward, recompute=recompute, backward=backward, memory=memory, host=host
    )


def shortened(names: Sequence[str]) -> str:
    """Names in one line; of many the ones in the middle are left out."""
    kept = [*names] if len(names) <= NAMES else [*names[: NAMES - 2], "...", names[-1]]
    return ", ".join(kept)


def _counted(tensors: Iterable[Tensor]) -> tuple[int, int]:
    """The number of elements of parameters, and the bytes of all tensors, each counted once."""
    # A lazy layer's tensors have no size before its first forward.
    made = [x for x in {id(x): x for x in tensors}.values() if not is_lazy(x)]
    count = sum(x.numel() for x in made if isinstance(x, nn.Parameter))
    return count, sum(x.nbytes for x in made)


def _milliseconds(seconds: float | None) -> str | None:
    return None if seconds is None else f"{1000 * seconds:.3f}"


def _size(count: int | None) -> str | None:
    return None if count is None else in_bytes(count)
