"""The profile of layers: the times of each at any number of rows, and the memory that it takes.

Both are measured at two sizes of micro-batch. In between, and beyond, a figure is taken to be a
constant part and a part per row, as it is for the time of kernels: a launch, and work for each row.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Any, NamedTuple

import torch
from torch import nn

from torchgpipe.ambient.notes import noted
from torchgpipe.devices.recorder import Stopwatch
from torchgpipe.devices.streams import has_streams, use_device
from torchgpipe.engine.outcome import LARGE
from torchgpipe.partition.placement import tensors
from torchgpipe.planner.meter import bytes_of
from torchgpipe.planner.sandbox import (
    Bytes,
    Sandbox,
    Timings,
    copied,
    kind_of,
    leaves,
    pooled,
    progress_bar,
    rounds,
    same_numbers,
    undisturbed,
)
from torchgpipe.values.microbatch import VALUE, Batch

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


def through(first: tuple[int, float], second: tuple[int, float] | None = None) -> Line:
    """The line through two points, each of rows and the number there.

    The constant part is not negative, as noise might have it. With one point, the number is taken
    to be proportional to the rows.
    """
    rows, value = first
    others, other = second or (0, 0.0)
    slope = max(0.0, (value - other) / (rows - others))
    constant = value - slope * rows
    # Noise may make few rows seem to be slower than they are.
    return Line(constant, slope) if constant > 0 else Line(0.0, value / rows)


class Weights(NamedTuple):
    """The bytes of the weights of a layer."""

    all: int = 0
    #: Of the parameters, and of those that get a gradient.
    parameters: int = 0
    trainable: int = 0
    #: Of those whose gradients wait for the end of a backward, to be added.
    small: int = 0
    #: Of the largest one.
    largest: int = 0


@dataclass(frozen=True)
class Layer:
    """A layer: its weights, and by the rows of a micro-batch its times and memory."""

    name: str
    weights: Weights
    #: The lines of the figures, in their order.
    seconds: Sequence[Line]
    sizes: Sequence[Line]
    #: The bytes of the skips that it stashes, by their numbers, and the numbers of those it pops.
    stashed: Mapping[int, Line]
    popped: Sequence[int]

    def times(self, rows: float) -> Timings:
        """Milliseconds for a micro-batch of some rows."""
        return Timings(*[1000 * x.at(rows) for x in self.seconds])

    def bytes(self, rows: float) -> Bytes:
        """The memory for a micro-batch of some rows."""
        return Bytes(*[x.at(rows) for x in self.sizes])

    def time(self, rows: float) -> float:
        """The milliseconds of forward and backward."""
        times = self.times(rows)
        return times.forward + times.backward


class Runs(NamedTuple):
    """The figures of the runs of a layer, in lists by the size of the micro-batch."""

    #: Layers of the same kind get the same times, as far as noise explains their difference.
    kind: object
    weights: Weights
    rounds: list[list[Timings]]
    memory: list[Bytes]
    #: The memory of skips that it stashes, by their keys, and the keys of those that it pops.
    stashed: dict[Any, list[float]]
    popped: list[Any]


def measured(
    module: nn.Sequential,
    batches: Mapping[int, Batch],
    device: torch.device,
    *,
    timeout: float | None = 1.0,
    progress: bool = False,
) -> list[Layer]:
    """Measure layers, one by one: the times and the memory that they take.

    The model may be larger than the device, which has a copy of one layer at a time.

    Args:
        module: the layers.
        batches: micro-batches, by their rows, of one size or two.
        device: where to measure.
        timeout: the seconds to take times of all layers; None takes no times, which are 0 then.
        progress: whether to show a progress bar.
    """
    children = module._modules.items()
    layers = {f"{name} ({type(x).__name__})": x for name, x in children if x is not None}
    share = None if timeout is None else timeout / len(layers)
    runs: list[Runs] = []
    with (
        same_numbers(device),
        use_device(device),
        torch.inference_mode(False),
        torch.enable_grad(),
        progress_bar(progress, len(layers)) as bar,
    ):
        near = [x.map(lambda *xs: [y.to(device) for y in xs], [VALUE]) for x in batches.values()]
        inputs = [*map(leaves, near)]
        for title, layer in layers.items():
            with noted(f"raised while layer {title} was profiled"):
                seen, inputs = _run(copied(layer, device), inputs, device, share)
            runs.append(seen)
            bar.update()
    kinds = [x.kind for x in runs]
    # By size and figure, and then by layer.
    seconds = [
        [pooled(kinds, x) for x in zip(*[zip(*samples) for samples in size])]
        for size in zip(*[x.rounds for x in runs])
    ]
    numbers = {key: k for k, key in enumerate(key for x in runs for key in x.stashed)}

    def lines(points: Iterable[Sequence[float]]) -> list[Line]:
        return [through(*zip(batches, x)) for x in zip(*points)]

    return [
        Layer(
            *(title, x.weights),
            lines([[times[k] for times in size] for size in seconds]),
            lines(x.memory),
            {numbers[key]: through(*zip(batches, sizes)) for key, sizes in x.stashed.items()},
            [numbers[key] for key in x.popped],
        )
        for k, (title, x) in enumerate(zip(layers, runs))
    ]


def _run(
    layer: nn.Module, inputs: Sequence[Batch], device: torch.device, timeout: float | None
) -> tuple[Runs, list[Batch]]:
    """Run a layer with micro-batches of each size; return the outputs, too."""
    sandboxes = [Sandbox(layer, x, device) for x in inputs]
    first, memory = sandboxes[0], [x.bytes() for x in sandboxes]
    samples: list[list[Timings]] = [[] for _ in inputs]
    for _ in rounds(timeout):
        for sandbox, times in zip(sandboxes, samples):
            times.append(sandbox.timings())
    kind = kind_of(layer), *[(x.shape, x.dtype, x.requires_grad) for x in first.batch]
    skips = {
        key: [float(bytes_of(x.output.parts[key])) for x in sandboxes] for key in first.stashed
    }
    samples = [x or [Timings()] for x in samples]
    runs = Runs(kind, _weights_of(layer), samples, memory, skips, first.popped)
    return runs, [x.output for x in sandboxes]


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
    places = [*dict.fromkeys(devices)]
    within = [(x, x) for x in places if has_streams(x)]
    for source, target in [*permutations(places, 2), *within]:
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
