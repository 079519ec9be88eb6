"""Costs of each layer at any number of rows: times, and the memory that it takes.

Times are measured at two sizes of micro-batch. In between, and beyond, a time is taken to be a
constant part and a part per row, which is what kernels do: a launch, and work for each row. Memory
needs no repetition, and is looked at for more sizes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from torchgpipe.autograd.outcome import LARGE
from torchgpipe.devices.measures import Stopwatch
from torchgpipe.partition.placement import tensors
from torchgpipe.planner.halved import own_outputs
from torchgpipe.planner.lines import Line, Sizes, through
from torchgpipe.planner.memory_tracker import MemoryTracker
from torchgpipe.planner.rounds import undisturbed
from torchgpipe.planner.sandbox import Sandbox, Sandboxes, in_rounds, leaves
from torchgpipe.planner.stages import Weights
from torchgpipe.values.microbatch import VALUE, Batch

__all__ = ["Layer", "measured"]


@dataclass(frozen=True)
class Layer:
    """The times of a layer, by the rows of a micro-batch, and its weights.

    Args:
        name: the name of the layer, and its class.
        forward: the milliseconds of the forward.
        input: those of the backward for its input.
        weight: those of the rest of its backward.
        again: those of a second run, up to the last tensor that it saves for backward, if this
            layer is the last one of a partition.
        weights: the memory of its weights.
    """

    name: str
    forward: Line
    input: Line
    weight: Line
    again: Line
    weights: Weights

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
) -> tuple[list[Layer], Sizes]:
    """Measure layers, one by one.

    Args:
        module: the layers.
        batches: by its rows, a micro-batch of each of the one or two sizes to take times with.
        others: likewise of each size to look at the memory with, the largest first. What is too
            large for the device is left out.
        device: where to measure.
        timeout: the seconds to measure.
        progress: whether to show a progress bar.

    Returns:
        The layers, and the memory that they take.
    """
    looks: dict[int, tuple[MemoryTracker, Batch]] = {}
    weights: dict[str, Weights] = {}

    def brought(batch: Batch) -> Batch:
        return leaves(batch.map(lambda *xs: [x.to(device) for x in xs], [VALUE]))

    def make() -> list[Sandboxes]:
        looks.update({count: (MemoryTracker(), brought(x)) for count, x in others.items()})
        return [Sandboxes(module, brought(x), device) for x in batches.values()]

    def see(k: int, title: str, sandbox: Sandbox) -> None:
        if k == 0:
            _look(looks, sandbox.layer, device)
            weights[title] = _weights_of(sandbox.layer)

    times = in_rounds(make, see, _sample, device, timeout=timeout, progress=progress)
    found = []
    for title in weights:
        best = [[undisturbed(x) for x in zip(*own[title])] for own in times]
        found.append(_layer(title, [*batches], weights[title], best))
    return found, Sizes({rows: tracker.layers() for rows, (tracker, _) in looks.items()})


def _look(
    looks: dict[int, tuple[MemoryTracker, Batch]], layer: nn.Module, device: torch.device
) -> None:
    """Look at the next layer, which is on the device, with several sizes of micro-batch."""
    for rows, (tracker, batch) in [*looks.items()]:
        try:
            sandbox = Sandbox(layer, batch, device)
            tracker.layer(sandbox)
        except torch.OutOfMemoryError:
            # A plan with fewer rows may fit all the same.
            del looks[rows]
            if not looks:
                raise
            continue
        looks[rows] = tracker, sandbox.output


def _weights_of(layer: nn.Module) -> Weights:
    own = {
        x.untyped_storage().data_ptr(): x for _, x in tensors(layer) if x.layout == torch.strided
    }
    sizes = [x.nbytes for x in {*layer.parameters()} if x.requires_grad]
    return Weights(
        sum(x.untyped_storage().nbytes() for x in own.values()),
        sum(sizes),
        sum(x for x in sizes if x < LARGE),
        max(sizes, default=0),
    )


def _layer(
    title: str, rows: Sequence[int], weights: Weights, times: Sequence[Sequence[float]]
) -> Layer:
    forward, input, backward, again = (through(*zip(rows, x)) for x in zip(*times))
    weight = Line(
        max(0.0, backward.constant - input.constant), max(0.0, backward.slope - input.slope)
    )
    return Layer(title, forward, input, weight, again, weights)


def _sample(sandbox: Sandbox) -> tuple[float, float, float, float]:
    """Run a layer, and return milliseconds: forward, backward for its input, backward, again.

    ``again`` is the time up to the last tensor that the forward saves, weights aside: a second run
    under checkpointing ends there.
    """
    watch, until = sandbox.stopwatch, Stopwatch(sandbox.device)
    weights = [x for _, x in tensors(sandbox.layer) if x.layout == torch.strided]
    own = {x.untyped_storage().data_ptr() for x in weights}
    last: list[float] = [0.0]

    def pack(x: Tensor) -> Tensor:
        if x.layout == torch.strided and x.untyped_storage().data_ptr() not in own:
            last[0] = until.stop()
        return x.detach()

    batch = sandbox.input()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        until.start()
        output = sandbox.forward(batch)
    del output
    batch = sandbox.input()
    arriving = [VALUE, *[x for x in batch.skips if x not in sandbox.output.skips]]
    entries = [x for key in arriving for x in batch.parts[key] if x.requires_grad]
    watch.start()
    output = sandbox.forward(batch)
    forward = watch.stop()
    outputs = own_outputs(sandbox, output)
    own_input = backward = 0.0
    if outputs:
        gradients = [torch.ones_like(x) for x in outputs]
        if entries:
            watch.start()
            torch.autograd.grad(outputs, entries, gradients, retain_graph=True, allow_unused=True)
            own_input = watch.stop()
        watch.start()
        torch.autograd.backward(outputs, gradients)
        backward = watch.stop()
    sandbox.layer.zero_grad()
    own_input, again = min(own_input, backward), min(last[0], forward)
    return 1000 * forward, 1000 * own_input, 1000 * backward, 1000 * again
