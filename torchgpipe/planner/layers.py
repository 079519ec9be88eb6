"""Costs of each layer at any number of rows: times, and the memory that it takes.

Times are measured at two sizes of micro-batch. In between, and beyond, a time is taken to be a
constant part and a part per row, which is what kernels do: a launch, and work for each row. Memory
needs no repetition, and is looked at for more sizes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.multiprocessing.reductions import StorageWeakRef

from torchgpipe import _torch
from torchgpipe.autograd.halves import Halves
from torchgpipe.autograd.nodes import enter, next_number
from torchgpipe.devices.recorder import Stopwatch
from torchgpipe.devices.streams import CPU, has_streams, use_device
from torchgpipe.engine.outcome import LARGE
from torchgpipe.partition.placement import tensors
from torchgpipe.planner.blocks import kind_of
from torchgpipe.planner.memory_tracker import Run, highest, memory_of, size_of, sizes_of
from torchgpipe.planner.record import GIVEN, Halved, Record, Section, Sizes, Value
from torchgpipe.planner.sandbox import Sandbox, brought, in_rounds, pooled, spread, undisturbed
from torchgpipe.planner.stage_memory import Weights
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


@dataclass(frozen=True)
class LayerCosts:
    """The times of a layer in milliseconds, by the rows of a micro-batch, and its weights."""

    name: str
    forward: Line
    #: That of the backward for its input.
    input: Line
    #: That of the rest of its backward, if all of it runs at once.
    weight: Line
    #: That of a recomputation, up to the last tensor that it saves for backward, if this layer is
    #: the last one of a partition.
    again: Line
    weights: Weights
    #: The time to add the gradients of its weights to those of another micro-batch.
    adding: Line = Line()
    #: The time of the rest by itself: more, where a node computes both halves at once.
    late: Line = Line()

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
) -> tuple[list[LayerCosts], Sizes]:
    """Measure layers, one by one: the times and the memory that they take.

    The batches, by their rows, are of the one or two sizes to take times with. The others are of
    each size to look at the memory with, the largest first; what is too large for the device is
    left out.
    """
    looks: dict[int, tuple[Chain, Batch]] = {}
    weights: dict[str, Weights] = {}
    kinds: list[object] = []

    def see(k: int, title: str, sandbox: Sandbox) -> None:
        if k:
            return
        if not weights:
            looks.update({count: (Chain(), brought(x, device)) for count, x in others.items()})
        weights[title] = _weights_of(sandbox.layer)
        kinds.append((kind_of(sandbox.layer), *[(x.shape, x.dtype) for x in sandbox.batch]))
        for rows, (chain, batch) in [*looks.items()]:
            try:
                look = Sandbox(sandbox.layer, batch, device)
                chain.add(look)
                looks[rows] = chain, look.output
            except torch.OutOfMemoryError:
                # A plan with fewer rows may fit all the same.
                del looks[rows]
                if not looks:
                    raise

    few = batches.values()
    times = in_rounds(module, few, see, _sample, device, timeout=timeout, progress=progress)
    found = []
    best = [_best([size[title] for title in weights], kinds) for size in times]
    for (title, own), *each in zip(weights.items(), *best):
        forward, input, backward, again, *rest = (through(*zip(batches, x)) for x in zip(*each))
        weight = Line(
            max(0.0, backward.constant - input.constant), max(0.0, backward.slope - input.slope)
        )
        found.append(LayerCosts(title, forward, input, weight, again, own, *rest))
    return found, Sizes({rows: chain.record for rows, (chain, _) in looks.items()})


def _best(
    samples: Sequence[Sequence[tuple[float, ...]]], kinds: Sequence[object]
) -> list[tuple[float, ...]]:
    """The times of each layer, one for layers that nobody can tell apart."""
    found = []
    for each in zip(*[zip(*own) for own in samples]):
        found.append(pooled(kinds, [*map(undisturbed, each)], [*map(spread, each)])[0])
    return [*zip(*found)]


def _weights_of(layer: nn.Module) -> Weights:
    sizes = [x.nbytes for x in {*layer.parameters()} if x.requires_grad]
    return Weights(
        sum(sizes_of([x for _, x in tensors(layer)]).values()),
        sum(sizes),
        sum(x for x in sizes if x < LARGE),
    )


def _sample(sandbox: Sandbox) -> tuple[float, ...]:
    """Run a layer, and measure six times.

    Returns:
        Milliseconds of the forward (F), the backward for the input (I), the whole backward (B), the
        recomputation (R), adding up gradients of weights, and the backward for the weights (W). A
        recomputation ends at the last tensor that the forward saves, weights aside.
    """
    watch, own = sandbox.stopwatch, sizes_of([x for _, x in tensors(sandbox.layer)])
    again = only_input = 0.0

    def pack(x: Tensor) -> Tensor:
        nonlocal again
        if x.layout == torch.strided and x.untyped_storage().data_ptr() not in own:
            again = watch.stop()
        return x.detach()

    batch, ends = _entered(sandbox, sandbox.input())
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        watch.start()
        output = sandbox.forward(batch)
    roots, late = sandbox.roots(output), None
    weights = [x for x in sandbox.layer.parameters() if x.requires_grad]
    if roots and ends:
        grads = [torch.ones_like(x) for x in roots]
        halves = Halves([get_gradient_edge(x) for x in roots], grads, ends, weights)
        del batch, output, roots, grads
        watch.start()
        halves.input()
        only_input = watch.stop()
        watch.start()
        halves.weight()
        late = watch.stop()
        del halves
    else:
        del batch, output, roots
    adding = 0.0
    if weights:
        sums, terms = ([torch.zeros_like(x) for x in weights] for _ in range(2))
        watch.start()
        _torch.add_each(sums, terms)
        adding = watch.stop()
        del sums, terms
    forward, backward = sandbox.sample()
    only_input, again = min(only_input, backward), min(again, forward)
    late = backward if late is None else late
    return tuple([1000 * x for x in (forward, only_input, backward, again, adding, late)])


def measured_links(
    devices: Sequence[torch.device],
) -> dict[tuple[torch.device, torch.device], Line]:
    """Measure the milliseconds of copies between all pairs of devices, by the bytes.

    Among them is the host, unless it is where the devices have their memory, and each device with
    itself: what leaves a compute stream is cloned there.
    """
    found = {}
    places = [*dict.fromkeys(devices)]
    hosts = [CPU] if all(map(has_streams, places)) else []
    within = [(x, x) for x in places if has_streams(x)]
    for source, target in [*permutations([*places, *hosts], 2), *within]:
        points = []
        near = target if source == CPU else source
        for size in SIZES:
            x, y = (
                torch.empty(size, dtype=torch.uint8, device=d, pin_memory=d == CPU != near)
                for d in (source, target)
            )
            times = []
            # The first copy may set the link up.
            for _ in range(1 + TIMES):
                with use_device(near):
                    watch = Stopwatch(near)
                    watch.start()
                    y.copy_(x, non_blocking=True)
                    times.append(1000 * watch.stop())
            points.append((size, undisturbed(times[1:])))
        found[source, target] = through(*points)
    return found


class Chain:
    """The record of layers, to which they are added one after the other."""

    def __init__(self) -> None:
        self._sections: list[Section] = []
        self._values: dict[int, Value] = {}
        #: The values of what the last layer has handed on, with the layer that each comes from.
        self._handed: dict[StorageWeakRef, tuple[Value, int]] = {}
        self._last: list[tuple[Value, Tensor]] = []

    def add(self, sandbox: Sandbox) -> None:
        """Run the next layer, on what those before it have handed on."""
        k = len(self._sections)
        section = Section("", True, next_number())
        self._sections.append(section)
        layer, before = sandbox.layer, sandbox.batch
        run = Run(layer, self._sections)
        batch = sandbox.input()
        ends: dict[int, GradientEdge] = {}
        #: The skip of each of these, if it is one.
        popped: dict[int, Value | None] = {}
        #: The values of the input, and of the output.
        given: dict[StorageWeakRef, Value] = {}
        for key, own in before.parts.items():
            passes_by = key in sandbox.output.skips
            for x, y in zip(own, batch.parts[key]):
                value, source = self._handed.get(memory_of(x)) or (Value(GIVEN, size_of(x)), GIVEN)
                self._values.setdefault(id(value), value)
                given[memory_of(x)] = value
                run.give(value, y)
                if not passes_by:
                    value.use(k, x, source, is_skip=key is not VALUE)
                    if y.requires_grad:
                        ends[id(y)] = get_gradient_edge(y)
                        popped[id(y)] = value if key is not VALUE else None
        with run.watching():
            with run.saving:
                output = sandbox.forward(batch)
            shared, roots = self._hand_on(k, sandbox, output, run), sandbox.roots(output)
            given |= {memory: value for memory, (value, _) in self._handed.items()}
            run.settle(shared)
            root = run.turn(roots)
            del output, batch, roots
            if ends:
                del y
            weights = [x for x in layer.parameters() if x.requires_grad]
            sizes = run.backward(root, weights, [*ends.values()])
        skips = [(value, size) for value, size in zip(popped.values(), sizes) if value is not None]
        if skips:
            for value, size in skips:
                value.holds[k] = sum(size.values())
            held = {place: x for _, size in skips for place, x in size.items()}
            every = {place: x for size in sizes for place, x in size.items()}
            section.rest = sum(every.values()) - sum(held.values())
        section.halves, late = (Halved(), []) if root is None else halved(sandbox)
        for x in late:
            given[memory_of(x)].late.add(k)

    def _hand_on(self, k: int, sandbox: Sandbox, output: Batch, run: Run) -> set[int]:
        """Take note of what a layer hands on, and of what it has made of that."""
        shared, handed = set(), {}
        self._last = []
        for key, own in sandbox.output.parts.items():
            passes_by = key in sandbox.batch.skips
            for x, y in zip(own, output.parts[key]):
                if x.layout != torch.strided:
                    continue
                piece = run.pieces.get(memory_of(y))
                value = Value(k, size_of(y)) if piece is None else piece.value
                self._values.setdefault(id(value), value)
                shared.add(id(value))
                self._last.append((value, x))
                before = next(
                    (self._handed.get(memory_of(z)) for z in sandbox.batch.parts.get(key, ())), None
                )
                source = before[1] if passes_by and before is not None else k
                handed[memory_of(x)] = value, source
        self._handed = handed
        return shared

    @property
    def record(self) -> Record:
        """The record of all layers, the last of which returns what it hands on."""
        for value, x in self._last:
            value.give(x)
        return Record(self._sections, [*self._values.values()])


def halved(sandbox: Sandbox) -> tuple[Halved, list[Tensor]]:
    """Run the backward of a layer in halves, for its input and for its weights.

    Returns:
        The memory, and the tensors of the sandbox's input and output that W needs.
    """
    run = Run(sandbox.layer, [Section("", True)])
    batch = sandbox.input()
    values: dict[StorageWeakRef, Tensor] = {}
    for x, y in _pairs(sandbox.batch, batch):
        values[memory_of(y)] = x
        run.give(Value(GIVEN, 0), y)
    grad = torch.ones((), device=sandbox.device)
    with run.watching():
        batch, ends = _entered(sandbox, batch)
        output = sandbox.forward(batch)
        for x, y in _pairs(sandbox.output, output):
            values.setdefault(memory_of(y), x)
        root = run.turn(sandbox.roots(output))
        assert root is not None
        assert run.ticks is not None
        weights = [x for x in sandbox.layer.parameters() if x.requires_grad]
        halves = Halves([get_gradient_edge(root)], [grad], ends, weights)
        del batch, output, root, x, y
        before = {*run.pieces}
        halves.input()
        middle, noted = len(run.ticks), {memory_of(x) for x in halves.noted}
        kept = run.alive
        late = [x for memory, x in values.items() if not memory.expired()]
        halves.weight()
    made = [x for at, x in run.pieces.items() if at not in before]
    outputs, others = ([x for x in made if x.is_root is y] for y in (True, False))
    # Where the input needs no gradient, W does all, and begins with those of the outputs.
    first = [x for x in outputs if x.born >= middle]
    for piece in first:
        piece.born, piece.gone = middle, None
    begun = sum(x.size for x in (*kept, *first))
    pending = [x for x in kept if not x.is_root and x.reference not in values]
    return (
        Halved(
            highest(others, range(middle)) + sum(x.size for x in outputs),
            highest(made, range(middle)),
            max(0.0, highest({*kept, *made}, range(middle, len(run.ticks))) - begun),
            sum(x.size for x in pending),
            sum(x.size for x in pending if x.reference in noted),
            any(x.is_root for x in (*kept, *first)),
        ),
        late,
    )


def _entered(sandbox: Sandbox, batch: Batch) -> tuple[Batch, list[GradientEdge]]:
    """An input behind nodes at whose edges the backward for it ends, and these edges."""
    entries = sandbox.entries(batch)
    entered, ends = enter(*entries) if entries else ((), [])
    own = dict(zip(map(id, entries), entered))
    return batch.replace([own.get(id(x), x) for x in batch]), [*ends]


def _pairs(batch: Batch, other: Batch) -> list[tuple[Tensor, Tensor]]:
    """The tensors of two micro-batches that are alike."""
    pairs = [pair for key in batch.parts for pair in zip(batch.parts[key], other.parts[key])]
    return [(x, y) for x, y in pairs if y.layout == torch.strided]
