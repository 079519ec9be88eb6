"""The profile of layers: the times of each at any number of rows, and the memory that it takes.

Both are measured at two sizes of micro-batch. In between, and beyond, a figure is taken to be a
constant part and a part per row, as it is for the time of kernels: a launch, and work for each row.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, product
from typing import Any, NamedTuple

import torch
from torch import nn

from torchgpipe.ambient.notes import noted
from torchgpipe.devices.recorder import Stopwatch
from torchgpipe.devices.streams import has_streams, use_device
from torchgpipe.engine.outcome import LARGE
from torchgpipe.partition.placement import tensors
from torchgpipe.planner.sandbox import (
    Figures,
    Sandbox,
    bytes_of,
    copied,
    kind_of,
    leaves,
    pooled,
    progress_bar,
    rounds,
    same_numbers,
    undisturbed,
)
from torchgpipe.values.microbatch import Batch

__all__: list[str] = []

#: Bytes that are copied to measure a link, and how often.
SIZES, TIMES = (4 * 2**20, 2**16), 3


@dataclass(frozen=True)
class Line:
    """A number that depends on the rows of a micro-batch: ``constant + slope * rows``."""

    constant: float = 0.0
    slope: float = 0.0

    def at(self, rows: float) -> float:
        """The number for a micro-batch of some rows."""
        return max(0.0, self.constant + self.slope * rows)


def through(first: tuple[int, float], second: tuple[int, float] = (0, 0.0)) -> Line:
    """The line through two points, each of rows and the number there.

    The constant part is not negative, as noise might have it. With one point, the number is taken
    to be proportional to the rows.
    """
    (rows, value), (others, other) = first, second
    slope = max(0.0, (value - other) / (rows - others))
    constant = value - slope * rows
    # Noise may make few rows seem to be slower than they are.
    return Line(constant, slope) if constant > 0 else Line(0.0, value / rows)


class Weights(NamedTuple):
    """The bytes of a layer's parameters and buffers (``all``), and of some of its parameters."""

    all: int = 0
    #: All parameters, and those that get a gradient.
    parameters: int = 0
    trainable: int = 0
    #: The trainable parameters whose gradients wait for the end of a backward, to be added.
    small: int = 0
    #: The largest trainable parameter.
    largest: int = 0


@dataclass(frozen=True)
class Layer:
    """A layer: its weights, and by the rows of a micro-batch its times and memory."""

    name: str
    weights: Weights
    #: The bytes of the skips that it stashes, by their keys, and the keys of those it pops.
    stashed: Mapping[Any, Line]
    popped: Sequence[Any]
    #: A line for each field of ``Figures``.
    lines: Sequence[Line] = ()

    def at(self, rows: float) -> Figures:
        """The times and the memory for a micro-batch of some rows."""
        return Figures(*[x.at(rows) for x in self.lines])

    def time(self, rows: float) -> float:
        """The milliseconds of forward and backward."""
        figures = self.at(rows)
        return figures.forward + figures.backward


def measured(
    module: nn.Sequential,
    batches: Mapping[int, Batch],
    device: torch.device,
    *,
    timeout: float | None = 1.0,
    progress: bool = False,
) -> list[Layer]:
    """Measure layers, one by one: the times and the memory that they take.

    The model may be larger than the device, which has a copy of one layer at a time. The batches
    are micro-batches by their rows, of one size or two. The timeout is the seconds for the times of
    all layers; without one no times are taken, which are 0 then.
    """
    children = [(name, x) for name, x in module._modules.items() if x is not None]
    if not children:
        return []
    share = None if timeout is None else timeout / len(children)
    runs = []
    with (
        same_numbers(device),
        use_device(device),
        torch.inference_mode(False),
        torch.enable_grad(),
        progress_bar(progress, len(children)) as bar,
    ):
        near = [x.replace([y.to(device) for y in x]) for x in batches.values()]
        inputs = dict(zip(batches, map(leaves, near)))
        for name, child in children:
            title = f"{name} ({type(child).__name__})"
            with noted(f"raised while layer {title} was profiled"):
                runs.append(_run(title, copied(child, device), inputs, device, share))
            bar.update()
    layers, kinds, samples = zip(*runs)
    lines = []
    for field in range(len(Figures())):
        # For each size of the micro-batch, a number for each layer.
        by_size = [pooled(kinds, [[x[field] for x in y] for y in size]) for size in zip(*samples)]
        lines.append([through(*zip(inputs, points)) for points in zip(*by_size)])
    return [replace(layer, lines=x) for layer, x in zip(layers, zip(*lines))]


def _run(
    title: str,
    layer: nn.Module,
    inputs: dict[int, Batch],
    device: torch.device,
    timeout: float | None,
) -> tuple[Layer, Hashable, list[list[Figures]]]:
    """Run a layer with micro-batches of each size, and put its outputs in their place.

    Return the layer without its lines, its kind, and for each size the figures of all rounds.
    """
    sandboxes = [Sandbox(layer, x, device) for x in inputs.values()]
    first, memory = sandboxes[0], [x.halved(is_metered=True) for x in sandboxes]
    rounds_of = rounds(
        timeout, lambda: [x.timed(y) for x, y in zip(sandboxes, memory)], chain.from_iterable
    )
    kind = kind_of(layer), *[(x.shape, x.dtype, x.requires_grad) for x in first.batch]
    inputs.update(zip(inputs, [x.output for x in sandboxes]))
    stashed = {
        key: through(*[(rows, float(bytes_of(x.parts[key]))) for rows, x in inputs.items()])
        for key in first.output.skips
        if key not in first.batch.skips
    }
    made = Layer(title, _weights_of(layer), stashed, first.popped)
    return made, kind, [*map(list, zip(*(rounds_of or [memory])))]


def _weights_of(layer: nn.Module) -> Weights:
    sizes = [x.nbytes for x in {*layer.parameters()} if x.requires_grad]
    return Weights(
        bytes_of([x for _, x in tensors(layer)]),
        sum(x.nbytes for x in layer.parameters()),
        sum(sizes),
        sum(x for x in sizes if x < LARGE),
        max(sizes, default=0),
    )


def measured_links(
    devices: Sequence[torch.device],
) -> dict[tuple[torch.device, torch.device], Line]:
    """Measure the milliseconds of copies between all pairs of devices, by the bytes.

    Among them is each device with itself: what leaves a compute stream is cloned there.
    """
    links = {}
    for source, target in product(dict.fromkeys(devices), repeat=2):
        if source == target and not has_streams(source):
            continue
        points = []
        for size in SIZES:
            x, y = (torch.empty(size, dtype=torch.uint8, device=d) for d in (source, target))
            times = []
            # The first copy may set the link up.
            for _ in range(1 + TIMES):
                with use_device(target):
                    watch = Stopwatch(target)
                    watch.start()
                    y.copy_(x, non_blocking=True)
                    times.append(1000 * watch.stop())
            points.append((size, undisturbed(times[1:])))
        links[source, target] = through(*points)
    return links
