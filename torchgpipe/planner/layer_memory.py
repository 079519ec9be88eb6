"""The memory of layers, recorded one by one, so that a model may be larger than the device.

Each runs on a copy of what those before it have handed on: forward and backward, and then once more
with its backward in halves.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.multiprocessing.reductions import StorageWeakRef

from torchgpipe.autograd.halves import Halves
from torchgpipe.autograd.nodes import enter, next_number
from torchgpipe.planner.memory_tracker import Run, highest, memory_of, size_of
from torchgpipe.planner.record import GIVEN, Halved, Record, Section, Value
from torchgpipe.planner.sandbox import Sandbox
from torchgpipe.values.microbatch import VALUE, Batch

__all__ = ["Chain"]


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
    """Run the backward of a layer in halves: for its input, and then for its weights.

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
        needing = sandbox.entries(batch)
        entered, ends = enter(*needing) if needing else ((), [])
        own = dict(zip(map(id, needing), entered))
        batch = batch.replace([own.get(id(x), x) for x in batch])
        output = sandbox.forward(batch)
        for x, y in _pairs(sandbox.output, output):
            values.setdefault(memory_of(y), x)
        root = run.turn(sandbox.roots(output))
        assert root is not None
        assert run.ticks is not None
        weights = [x for x in sandbox.layer.parameters() if x.requires_grad]
        halves = Halves([get_gradient_edge(root)], [grad], ends, weights)
        del batch, needing, entered, own, output, root, x, y
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


def _pairs(batch: Batch, other: Batch) -> list[tuple[Tensor, Tensor]]:
    """The tensors of two micro-batches that are alike."""
    pairs = [pair for key in batch.parts for pair in zip(batch.parts[key], other.parts[key])]
    return [(x, y) for x, y in pairs if y.layout == torch.strided]
