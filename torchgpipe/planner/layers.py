"""Costs of each layer at any number of rows: times, and the memory that it keeps.

Times are measured at two sizes of micro-batch. In between, and beyond, a time is taken to be a
constant part and a part per row, which is what kernels do: a launch, and work for each row. Memory
needs no repetition, and is looked at for more sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from torchgpipe.ambient.nesting import holding
from torchgpipe.ambient.random_numbers import FirstNumbers
from torchgpipe.balance.progress import Progress
from torchgpipe.balance.rounds import LEAST, repeat, undisturbed
from torchgpipe.balance.sandbox import Sandbox, Sandboxes, leaves
from torchgpipe.devices.streams import use_device
from torchgpipe.planner.backward import SUMMED, Backward, Peak
from torchgpipe.planner.lines import Curve, Line, through
from torchgpipe.planner.look import Look, look, sample
from torchgpipe.values.microbatch import VALUE, Batch

__all__ = ["Layer", "measured"]


@dataclass(frozen=True)
class Layer:
    """The costs of a layer, by the rows of a micro-batch.

    Args:
        name: the name of the layer, and its class.
        forward: the milliseconds of the forward.
        input: those of the backward for its input.
        weight: those of the rest of its backward.
        again: those of a second run, up to the last tensor that it saves for backward, if this
            layer is the last one of a partition.
        memory: its memory.
    """

    name: str
    forward: Line
    input: Line
    weight: Line
    again: Line
    memory: Look

    def time(self, rows: float) -> float:
        """The time of forward and backward."""
        return self.forward.at(rows) + self.input.at(rows) + self.weight.at(rows)


def measured(
    module: nn.Sequential,
    batches: Mapping[int, Batch],
    others: Mapping[int, Batch],
    device: torch.device,
    *,
    timeout: float = 1.0,
    progress: bool = False,
) -> list[Layer]:
    """Measure layers, one by one.

    Args:
        module: the layers.
        batches: by its rows, a micro-batch of each of the one or two sizes to take times with.
        others: likewise of each size to look at the memory with, the largest first. What is too
            large for the device is left out.
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
            return _measured(module, batches, others, device, timeout, progress)

    return holding(numbers.locks, run)


def _measured(
    module: nn.Sequential,
    batches: Mapping[int, Batch],
    others: Mapping[int, Batch],
    device: torch.device,
    timeout: float,
    progress: bool,
) -> list[Layer]:
    def here(*tensors: Tensor) -> list[Tensor]:
        return [x.to(device) for x in tensors]

    def brought(batch: Batch) -> Batch:
        return leaves(batch.map(here, [VALUE]))

    sizes = [Sandboxes(module, brought(x), device) for x in batches.values()]
    rows = [*batches]
    looks = Looks({count: brought(x) for count, x in others.items()}, device)
    times: list[dict[str, list[tuple[float, ...]]]] = [{} for _ in sizes]
    count = len(sizes) * len(module)
    with Progress(progress, "profile", "layer", count * (1 + LEAST)) as bar:

        def see(k: int, title: str, sandbox: Sandbox) -> None:
            if k == 0:
                looks.see(title, sandbox.layer)
            times[k][title] = []
            bar.step()

        def take(k: int, title: str, sandbox: Sandbox) -> None:
            times[k][title].append(sample(sandbox))
            bar.step()

        def once(visit: Callable[[int, str, Sandbox], None]) -> None:
            for k, sandboxes in enumerate(sizes):
                sandboxes.each(lambda title, sandbox: visit(k, title, sandbox))  # noqa: B023

        once(see)
        repeat(lambda: once(take), timeout, lambda rounds: bar.expect(count * (1 + rounds)))
    found = []
    for title in times[0]:
        best = [[undisturbed(x) for x in zip(*times[k][title])] for k in range(len(sizes))]
        found.append(_layer(title, rows, looks.memory(title), best))
    return found


class Looks:
    """The memory of layers, looked at with several sizes of micro-batch.

    Args:
        inputs: the input of the first layer, by its rows, the largest first.
        device: where to look.
    """

    def __init__(self, inputs: dict[int, Batch], device: torch.device) -> None:
        self._inputs = inputs
        self._device = device
        self._found: dict[tuple[int, str], Look] = {}

    def see(self, title: str, layer: nn.Module) -> None:
        """Look at the next layer, which is on the device."""
        for rows, batch in [*self._inputs.items()]:
            try:
                sandbox = Sandbox(layer, batch, self._device)
                self._found[rows, title] = look(sandbox)
            except torch.OutOfMemoryError:
                # A plan with fewer rows may fit all the same.
                del self._inputs[rows]
                if not self._inputs:
                    raise
                continue
            self._inputs[rows] = sandbox.output

    def memory(self, title: str) -> Look:
        """The memory of a layer, with curves by its rows."""
        looks = {rows: self._found[rows, title] for rows in self._inputs}
        (first, *_) = looks.values()

        def curve(get: Callable[[Look], int]) -> Curve:
            return Curve([(rows, get(x)) for rows, x in looks.items()])

        def peak(get: Callable[[Backward], Peak]) -> Peak:
            return Peak(
                curve(lambda x: get(x.backward).free), curve(lambda x: get(x.backward).held)
            )

        return replace(
            first,
            inner=curve(lambda x: x.inner),
            output=curve(lambda x: x.output),
            forward=curve(lambda x: x.forward),
            again=curve(lambda x: x.again),
            backward=Backward(
                [curve(partial(_adding, k)) for k in range(SUMMED)],
                [peak(partial(_whole, k)) for k in range(SUMMED)],
                peak(lambda x: x.half),
                curve(lambda x: x.backward.noted),
                first.backward.notes_output,
                curve(lambda x: x.backward.pending),
                curve(lambda x: x.backward.weight),
                curve(lambda x: x.backward.passed),
            ),
            # curve() calls each function at once, while the key is the same.
            stashed={
                key: skip._replace(
                    size=curve(lambda x: x.stashed[key].size),  # noqa: B023
                    gradient=curve(lambda x: x.stashed[key].gradient),  # noqa: B023
                )
                for key, skip in first.stashed.items()
            },
            popped={
                key: skip._replace(
                    size=curve(lambda x: x.popped[key].size),  # noqa: B023
                    gradient=curve(lambda x: x.popped[key].gradient),  # noqa: B023
                    holds=curve(lambda x: x.popped[key].holds),  # noqa: B023
                )
                for key, skip in first.popped.items()
            },
        )


def _layer(
    title: str, rows: Sequence[int], memory: Look, times: Sequence[Sequence[float]]
) -> Layer:
    forward, input, backward, again = (through(*zip(rows, x)) for x in zip(*times))
    weight = Line(
        max(0.0, backward.constant - input.constant), max(0.0, backward.slope - input.slope)
    )
    return Layer(title, forward, input, weight, again, memory)


def _adding(k: int, found: Look) -> int:
    size: int = found.backward.adding[k]
    return size


def _whole(k: int, backward: Backward) -> Peak:
    return backward.whole[k]
