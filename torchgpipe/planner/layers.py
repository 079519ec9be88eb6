"""The profile of layers: the times of each at any number of rows, and the memory that it takes.

Both are measured at two sizes of micro-batch. In between, and beyond, a figure is taken to be a
constant part and a part per row, as it is for the time of kernels: a launch, and work for each row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.multiprocessing.reductions import StorageWeakRef

from torchgpipe.autograd.halves import Halves
from torchgpipe.autograd.nodes import enter
from torchgpipe.devices.recorder import Stopwatch
from torchgpipe.devices.streams import has_streams, use_device
from torchgpipe.engine.outcome import LARGE
from torchgpipe.partition.placement import tensors
from torchgpipe.planner.blocks import kind_of
from torchgpipe.planner.meter import Meter, bytes_of, memory_of, size_of, strided
from torchgpipe.planner.sandbox import Sandbox, in_rounds, pooled, undisturbed
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
    """The bytes of the weights of a layer or block."""

    all: int = 0
    #: Of the parameters, and of those that get a gradient.
    parameters: int = 0
    trainable: int = 0
    #: Of those whose gradients wait for the end of a backward, to be added.
    small: int = 0
    #: Of the largest one.
    largest: int = 0


class Taken(NamedTuple):
    """The memory of a layer for a micro-batch of some rows, in bytes."""

    #: What it keeps for backward: of its input, and of what it has made, the output included.
    input: float = 0
    own: float = 0
    #: Its output, what of that nobody keeps, and the gradient of it; skips aside.
    output: float = 0
    loose: float = 0
    gradient: float = 0
    #: The same of skips that it stashes, by their numbers, with their gradients.
    stashed: tuple[tuple[int, float, float], ...] = ()
    #: The numbers of skips that it pops, and what it keeps of each.
    popped: tuple[tuple[int, float], ...] = ()
    #: The most of what it makes in forward at a time; and the most of backward, above what there is
    #: at its beginning, with all gradients that it gets and makes.
    forward: float = 0
    backward: float = 0
    #: What it has made that is there between the halves of backward, and the most during W.
    pending: float = 0
    weight: float = 0
    #: Whether its output is in the memory of its input.
    in_place: bool = False


@dataclass(frozen=True)
class Layer:
    """A layer: its times in milliseconds by the rows of a micro-batch, its weights and memory."""

    name: str
    forward: Line
    #: That of the backward for its input.
    input: Line
    #: That of the rest of its backward, if all of it runs at once.
    weight: Line
    #: That of a recomputation, up to the last tensor that it saves for backward, if this layer is
    #: the last one of a partition.
    again: Line
    #: The time of the rest by itself: more, where a node computes both halves at once.
    late: Line
    weights: Weights
    #: By the rows of the one or two sizes.
    memory: Mapping[int, Taken]

    def time(self, rows: float) -> float:
        """The time of forward and backward."""
        return self.forward.at(rows) + self.input.at(rows) + self.weight.at(rows)

    def taken(self, rows: float) -> Taken:
        """The memory for some rows: on the line through what was seen."""
        (x, before), (y, after) = sorted({0: None, **self.memory}.items())[-2:]
        found: Taken = _between(before, after, (rows - x) / (y - x))
        return found


def _between(x: Any, y: Any, share: float) -> Any:
    """The number, or each of several, on the line from one to another, or from nothing."""
    if isinstance(y, tuple):
        found = [_between(x and x[k], z, share) for k, z in enumerate(y)]
        return Taken(*found) if isinstance(y, Taken) else (*found,)
    # Numbers of skips are on no line.
    if isinstance(y, bool) or (isinstance(y, int) and x in (None, y)):
        return y
    return max(0.0, share * y if x is None else x + share * (y - x))


def measured(
    module: nn.Sequential,
    batches: Mapping[int, Batch],
    device: torch.device,
    *,
    timeout: float | None = 1.0,
    progress: bool = False,
) -> list[Layer]:
    """Measure layers, one by one: the times and the memory that they take.

    A timeout of None takes no times, which are 0 then.

    The batches, by their rows, are of one size or two.
    """
    weights: dict[str, Weights] = {}
    memory: dict[str, dict[int, Taken]] = {}
    kinds: list[object] = []
    numbers: dict[Any, int] = {}
    sizes = [*batches]

    def see(k: int, title: str, sandbox: Sandbox) -> None:
        memory.setdefault(title, {})[sizes[k]] = _taken(sandbox, numbers)
        if not k:
            weights[title] = _weights_of(sandbox.layer)
            given = [(x.shape, x.dtype, x.requires_grad) for x in sandbox.batch]
            trained = [x.requires_grad for x in sandbox.layer.parameters()]
            kinds.append((kind_of(sandbox.layer), *trained, *given))

    few = batches.values()
    times = in_rounds(module, few, see, _sample, device, timeout=timeout, progress=progress)
    found = []
    best = [_best([size[title] or [(0.0,) * 5] for title in weights], kinds) for size in times]
    for (title, own), *each in zip(weights.items(), *best):
        forward, input, backward, again, late = (through(*zip(batches, x)) for x in zip(*each))
        weight = Line(
            max(0.0, backward.constant - input.constant), max(0.0, backward.slope - input.slope)
        )
        found.append(Layer(title, forward, input, weight, again, late, own, memory[title]))
    return found


def _best(
    samples: Sequence[Sequence[tuple[float, ...]]], kinds: Sequence[object]
) -> list[tuple[float, ...]]:
    """The times of each layer, one for layers that nobody can tell apart."""
    return [*zip(*[pooled(kinds, each) for each in zip(*[zip(*own) for own in samples])])]


def _weights_of(layer: nn.Module) -> Weights:
    sizes = [x.nbytes for x in {*layer.parameters()} if x.requires_grad]
    own = bytes_of([x for _, x in tensors(layer)])
    every = sum(x.nbytes for x in layer.parameters())
    small = sum(x for x in sizes if x < LARGE)
    return Weights(own, every, sum(sizes), small, max(sizes, default=0))


def _sample(sandbox: Sandbox) -> tuple[float, ...]:
    """Run a layer twice, and take times.

    Returns:
        Milliseconds of the forward (F), the backward for the input (I), the whole backward (B), the
        recomputation (R), and the backward for the weights (W). A recomputation ends at the last
        tensor that the forward saves, weights aside.
    """
    watch, own = sandbox.stopwatch, {memory_of(x) for x in strided(_state(sandbox))}
    again = only_input = 0.0

    def pack(x: Tensor) -> Tensor:
        nonlocal again
        if x.layout == torch.strided and memory_of(x) not in own:
            again = watch.stop()
        return x.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        halves = _halves(sandbox, watch.start)
    late = None
    if halves is not None:
        watch.start()
        halves.input()
        only_input = watch.stop()
        watch.start()
        halves.weight()
        late = watch.stop()
        del halves
    forward, backward = sandbox.sample()
    only_input, again = min(only_input, backward), min(again, forward)
    late = backward if late is None else late
    return tuple([1000 * x for x in (forward, only_input, backward, again, late)])


def _state(sandbox: Sandbox) -> list[Tensor]:
    return [x for _, x in tensors(sandbox.layer)]


def _halves(sandbox: Sandbox, begin: Callable[[], Any], *, is_whole: bool = False) -> Halves | None:
    """Run a layer forward, and return its backward in halves; None if there is nothing to halve.

    The input is there when forward begins.
    """
    batch = sandbox.input()
    entries = sandbox.entries(batch)
    entered, ends = enter(*entries) if entries else ((), [])
    own = dict(zip(map(id, entries), entered))
    batch = batch.replace([own.get(id(x), x) for x in batch])
    del entries, entered, own
    begin()
    roots = sandbox.roots(sandbox.forward(batch))
    if not roots or not (ends or is_whole):
        return None
    weights = [x for x in sandbox.layer.parameters() if x.requires_grad]
    grads = [torch.ones_like(x) for x in roots]
    return Halves([get_gradient_edge(x) for x in roots], grads, [*ends], weights)


def _taken(sandbox: Sandbox, numbers: dict[Any, int]) -> Taken:
    """See what one run of a layer takes, and one whose backward is in halves.

    Args:
        sandbox: the layer.
        numbers: the numbers of skips so far, which takes those of others.
    """
    before, after = sandbox.batch.skips, sandbox.output.skips
    meter = Meter(_state(sandbox))
    with meter.watching():
        batch = sandbox.input()
        given = {memory_of(x): size_of(x) for x in strided(batch.parts[VALUE])}
        popped = [
            (number, {memory_of(x): size_of(x) for x in strided(batch.parts[key])})
            for key in before
            if key not in after
            for number in [numbers.setdefault(key, len(numbers))]
        ]
        ends = [get_gradient_edge(x) for x in sandbox.entries(batch)]
        section = meter.enter()
        output = sandbox.forward(batch)
        roots, whole = sandbox.roots(output), section.alive
        value = strided(output.parts[VALUE])
        in_place = any(memory_of(x) in given for x in value)
        skips = {key: output.parts[key] for key in after if key not in before}
        stashed = [
            (numbers.setdefault(key, len(numbers)), float(bytes_of(own)), _gradient(own))
            for key, own in skips.items()
        ]
        size, gradient = bytes_of(value), _gradient(value)
        shapes = [(x.shape, x.dtype, x.device) for x in roots]
        edges = [get_gradient_edge(x) for x in roots]
        del output, value, batch, roots
        skips.clear()
        kept = section.alive
        saved = _alive(given)
        taking = tuple([(number, _alive(own)) for number, own in popped])
        forward = float(section.forward)
        weights = [x for x in sandbox.layer.parameters() if x.requires_grad]
        grads = [torch.ones(x, dtype=y, device=z) for x, y, z in shapes]
        meter.backward(edges, grads, [*weights, *ends])
        del grads, edges
    pending, late = _between_halves(sandbox)
    loose = whole - kept
    return Taken(
        *(saved, float(kept), float(size), float(loose), gradient),
        *((*stashed,), taking, forward),
        *(float(section.backward + sum(_bytes(*x) for x in shapes)), pending, late),
        in_place=in_place,
    )


def _alive(sizes: Mapping[StorageWeakRef, int]) -> float:
    """The bytes of what somebody holds."""
    return float(sum(size for memory, size in sizes.items() if not memory.expired()))


def _gradient(values: Sequence[Tensor]) -> float:
    return float(sum(x.nbytes for x in values if x.requires_grad))


def _bytes(shape: torch.Size, dtype: torch.dtype, _: torch.device) -> int:
    return shape.numel() * dtype.itemsize


def _between_halves(sandbox: Sandbox) -> tuple[float, float]:
    """The bytes that a layer keeps from I until W, and the most of W above that."""
    meter = Meter(_state(sandbox))
    with meter.watching():
        halves = _halves(sandbox, meter.enter, is_whole=True)
        if halves is None:
            return 0.0, 0.0
        meter.turn()
        halves.input()
        pending = meter.rest()
        halves.weight()
    sandbox.layer.zero_grad()
    return float(pending), float(meter.sections[0].backward)


def measured_links(
    devices: Sequence[torch.device],
) -> dict[tuple[torch.device, torch.device], Line]:
    """Measure the milliseconds of copies between all pairs of devices, by the bytes.

    Among them is each device with itself: what leaves a compute stream is cloned there.
    """
    found = {}
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
        found[source, target] = through(*points)
    return found
