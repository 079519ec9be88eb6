"""Costs of each layer at any number of rows: times, and the memory that it keeps.

Layers are measured at two sizes of micro-batch. In between, and beyond, time and memory are taken
to be a constant part and a part per row, which is what kernels do: a launch, and work for each row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from torchgpipe.ambient.nesting import holding
from torchgpipe.ambient.random_numbers import FirstNumbers
from torchgpipe.balance.progress import Progress
from torchgpipe.balance.rounds import LEAST, repeat, undisturbed
from torchgpipe.balance.sandbox import Sandboxes, leaves
from torchgpipe.devices.streams import use_device
from torchgpipe.planner.look import Look, look, sample
from torchgpipe.values.microbatch import VALUE, Batch

__all__ = ["Layer", "Line", "measured"]


@dataclass(frozen=True)
class Line:
    """A number that depends on the rows of a micro-batch: ``constant + slope * rows``."""

    constant: float = 0.0
    slope: float = 0.0

    def at(self, rows: float) -> float:
        """The number for a micro-batch of some rows."""
        return max(0.0, self.constant + self.slope * rows)


def through(first: tuple[int, float], second: tuple[int, float] | None = None) -> Line:
    """The line through two points, of which the constant part is not negative.

    Args:
        first: rows and the number there.
        second: likewise; without it, the number is taken to be proportional to the rows.
    """
    rows, value = first
    if second is None:
        return Line(0.0, value / rows)
    others, other = second
    slope = max(0.0, (value - other) / (rows - others))
    constant = value - slope * rows
    # Noise may make few rows seem to be slower than they are.
    return Line(constant, slope) if constant > 0 else Line(0.0, value / rows)


@dataclass(frozen=True)
class Layer:
    """The costs of a layer, by the rows of a micro-batch.

    Times are in milliseconds, memory in bytes.

    Args:
        name: the name of the layer, and its class.
        forward: the time of the forward.
        input: the time of the backward for its input.
        weight: the time of the rest of its backward.
        again: the time of a second run, up to the last tensor that it saves for backward, if this
            layer is the last one of a partition.
        inner: memory that it keeps for backward, besides its input, its output and its weights.
        pending: memory that it keeps from I until W, its input aside.
        output: memory of its output.
        forward_peak: the most memory during its forward, above that before, with the output.
        backward_peak: likewise during its backward, with the gradient of its output, and while its
            weights have a gradient already.
        parameters: memory of its parameters and buffers.
        trainable: memory of the parameters that get a gradient.
        largest: memory of the largest of them.
        saves_input: whether it keeps its input for backward.
        saves_output: whether it keeps its output.
        depends: whether its output depends on anything that gets a gradient.
    """

    name: str
    forward: Line
    input: Line
    weight: Line
    again: Line
    inner: Line
    pending: Line
    output: Line
    forward_peak: Line
    backward_peak: Line
    parameters: int
    trainable: int
    largest: int
    saves_input: bool
    saves_output: bool
    depends: bool = True

    def time(self, rows: float) -> float:
        """The time of forward and backward."""
        return self.forward.at(rows) + self.input.at(rows) + self.weight.at(rows)


def measured(
    module: nn.Sequential,
    batches: Sequence[Batch],
    device: torch.device,
    *,
    timeout: float = 1.0,
    progress: bool = False,
) -> list[Layer]:
    """Measure the layers of a module with micro-batches of one or two sizes.

    Args:
        module: the layers.
        batches: a micro-batch of each size.
        device: where to measure.
        timeout: the seconds to measure.
        progress: whether to show a progress bar.
    """
    numbers = FirstNumbers(device)

    def run() -> list[Layer]:
        with (
            use_device(device),
            numbers.restored(),
            torch.inference_mode(False),
            torch.enable_grad(),
        ):
            return _measured(module, batches, device, timeout, progress)

    return holding(numbers.locks, run)


def _measured(
    module: nn.Sequential,
    batches: Sequence[Batch],
    device: torch.device,
    timeout: float,
    progress: bool,
) -> list[Layer]:
    def here(*tensors: Tensor) -> list[Tensor]:
        return [x.to(device) for x in tensors]

    sizes = [Sandboxes(module, leaves(x.map(here, [VALUE])), device) for x in batches]
    rows = [_rows(x) for x in batches]
    looks: list[dict[str, Look]] = [{} for _ in sizes]
    times: list[dict[str, list[tuple[float, ...]]]] = [{} for _ in sizes]
    count = len(sizes) * len(module)
    with Progress(progress, "profile", "layer", count * (1 + LEAST)) as bar:

        def see(k: int, title: str, sandbox: Any) -> None:
            looks[k][title] = look(sandbox)
            times[k][title] = []
            bar.step()

        def take(k: int, title: str, sandbox: Any) -> None:
            times[k][title].append(sample(sandbox))
            bar.step()

        def once(visit: Any) -> None:
            for k, sandboxes in enumerate(sizes):
                sandboxes.each(lambda title, sandbox: visit(k, title, sandbox))  # noqa: B023

        once(see)
        repeat(lambda: once(take), timeout, lambda rounds: bar.expect(count * (1 + rounds)))
    found = []
    for title in looks[0]:
        best = [[undisturbed(x) for x in zip(*times[k][title])] for k in range(len(sizes))]
        found.append(_layer(title, rows, [x[title] for x in looks], best))
    return found


def _layer(
    title: str, rows: Sequence[int], looks: Sequence[Look], times: Sequence[Sequence[float]]
) -> Layer:
    def line(values: Sequence[float]) -> Line:
        points = [*zip(rows, values)]
        return through(*points)

    forward, input, backward, again = (line(x) for x in zip(*times))
    first = looks[0]
    return Layer(
        title,
        forward,
        input,
        Line(max(0.0, backward.constant - input.constant), max(0.0, backward.slope - input.slope)),
        again,
        line([x.inner for x in looks]),
        line([x.pending for x in looks]),
        line([x.output for x in looks]),
        line([x.forward_peak for x in looks]),
        line([x.backward_peak for x in looks]),
        first.parameters,
        first.trainable,
        first.largest,
        first.saves_input,
        first.saves_output,
        first.depends,
    )


def _rows(batch: Batch) -> int:
    return next((len(x) for x in batch if x.dim()), 1)
