"""The memory of a layer's backward: under autograd, and as a schedule runs it, whole or in halves.

A schedule holds the gradient of a partition's output until the backward of the partition is over.
The gradient of what is between two layers of a partition is freed at its last use. So a layer is
measured both ways.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from torchgpipe.autograd.entrance import Enter
from torchgpipe.autograd.halves import Halves, backward
from torchgpipe.autograd.outcome import LARGE, Sums
from torchgpipe.autograd.phony import get_phony
from torchgpipe.autograd.recompute import Unpack
from torchgpipe.balance.sandbox import Sandbox
from torchgpipe.planner.meter import Meter, storages
from torchgpipe.planner.skips import popped_from
from torchgpipe.skip.namespace import Skip
from torchgpipe.values.microbatch import VALUE, Batch

__all__: list[str] = []

#: How many micro-batches come to have sums of gradients that are changed in place.
SUMMED = 3


class Peak(NamedTuple):
    """The most memory of a backward, above that before, with the gradient of the output.

    Args:
        free: where that gradient is freed at its last use.
        held: where it stays to the end.
    """

    free: Any = 0
    held: Any = 0


NO_PEAK = Peak()


@dataclass(frozen=True)
class Backward:
    """The memory of a layer's backward, in bytes.

    Args:
        adding: the most memory of the first micro-batch of autograd's backward, of the second, and
            of a later one, above that before, with the gradient of the output.
        whole: that of the first B of a schedule, the second, and a later one.
        half: that of I.
        noted: memory of the gradients that I notes for W, that of the output aside.
        notes_output: whether I notes the gradient of the output.
        pending: memory that is kept from I until W, the input aside.
        weight: the most memory of W, above that before.
        passed: memory of the gradients of the input and of what is popped, together.
        holds: the memory that the gradient of each skip that is popped keeps.
    """

    adding: Sequence[Any] = (0,) * SUMMED
    whole: Sequence[Peak] = (NO_PEAK,) * SUMMED
    half: Peak = NO_PEAK
    noted: Any = 0
    notes_output: bool = False
    pending: Any = 0
    weight: Any = 0
    passed: Any = 0
    holds: Mapping[Skip, int] = field(default_factory=dict)


class Root(torch.autograd.Function):
    """A number whose backward makes the gradients of tensors: ``begin, *tensors → number``.

    Nobody else holds the gradients. ``begin`` is called first.
    """

    @staticmethod
    def forward(ctx: Any, begin: Callable[[], None], *tensors: Tensor) -> Tensor:
        ctx.begin = begin
        ctx.metas = [(x.shape, x.dtype, x.device) for x in tensors]
        # The number is real, whatever the tensors are.
        return torch.zeros((), device=tensors[0].device)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        ctx.begin()
        made = [torch.ones(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.metas]
        return (None, *made)


class Cell:
    """The graph of a layer that has run, as a cell of a schedule has it.

    Args:
        sandbox: the layer.
        batch: its input.
        is_held: whether somebody holds the gradients of the output.
    """

    def __init__(self, sandbox: Sandbox, batch: Batch, is_held: bool) -> None:
        # What is popped gets a gradient as the value does.
        skips = popped_from(sandbox)
        arriving = [VALUE, *skips]
        needing = [x for key in arriving for x in batch.parts[key] if x.requires_grad]
        entered: Iterable[Tensor] = ()
        if needing:
            entered = Enter.apply(get_phony(needing[0].device, requires_grad=True), *needing)
        self.inputs = [get_gradient_edge(x) for x in entered]
        #: For each skip that is popped, the inputs that are parts of it.
        self.popped = {
            skip: [k for k, x in enumerate(needing) if any(x is y for y in batch.parts[skip])]
            for skip in skips
        }
        passed = dict(zip(map(id, needing), entered))
        output = sandbox.forward(
            batch.map(lambda *xs: [passed.get(id(x), x) for x in xs], arriving)
        )
        outputs = own_outputs(sandbox, output)
        self.weights = [x for x in sandbox.layer.parameters() if x.requires_grad]
        self.roots: list[GradientEdge] = []
        self.grads: list[Tensor] = []
        if is_held:
            self.roots = [get_gradient_edge(x) for x in outputs]
            self.grads = [torch.ones_like(x) for x in outputs]
        else:
            root = Root.apply(list, *outputs)
            self.roots, self.grads = [get_gradient_edge(root)], [torch.ones_like(root)]

    @property
    def given(self) -> int:
        """The memory of the gradients that backward begins with, if somebody holds them."""
        return sum(x.nbytes for x in self.grads if x.dim())


def look_back(sandbox: Sandbox) -> Backward:
    """Run a layer's backward in all ways that it may come in, and see the memory.

    Args:
        sandbox: the layer. Its output requires a gradient.
    """
    adding = _adding(sandbox)
    whole = [Peak(*x) for x in zip(_whole(sandbox, False), _whole(sandbox, True))]
    found, free = _halves(sandbox, True), _halves(sandbox, False)
    return Backward(
        adding,
        whole,
        Peak(free.half.free, found.half.held),
        found.noted,
        found.notes_output,
        found.pending,
        found.weight,
        *_passed(sandbox),
    )


def _passed(sandbox: Sandbox) -> tuple[int, dict[Skip, int]]:
    """The memory of the gradients that go on: of all together, and of each skip's."""
    cell = Cell(sandbox, sandbox.input(), True)
    if not cell.popped:
        return 0, {}
    grads = backward(cell.roots, cell.grads, cell.inputs)

    def size(numbers: Iterable[int]) -> int:
        found = [grads[k] for k in numbers]
        return sum(storages(x for x in found if x is not None).values())

    return size(range(len(grads))), {skip: size(found) for skip, found in cell.popped.items()}


def _adding(sandbox: Sandbox) -> list[int]:
    """The most memory of the first micro-batch of a backward, of the second, and of a later one.

    Autograd adds the gradients of a weight up, before it hands the sum over. The first sum is a new
    tensor, unless nobody else holds the memory of the first gradient.
    """
    found: list[int] = []
    with Meter(sandbox.device) as meter:
        roots = []
        for _ in range(SUMMED):
            batch = sandbox.input()
            needing = [x for x in batch if x.requires_grad]
            # Their gradients are let go of, as those that have gone to another partition are.
            phony = get_phony(sandbox.device, requires_grad=True)
            passed = dict(zip(map(id, needing), Unpack.apply(phony, *needing) if needing else ()))
            output = sandbox.forward(batch.replace([passed.get(id(x), x) for x in batch]))
            roots.append(
                Root.apply(lambda: found.append(meter.restart()), *own_outputs(sandbox, output))
            )
            # From here on only the graph holds what it has saved, as in a step.
            del batch, needing, passed, output
        # Autograd begins with what was recorded last.
        torch.autograd.backward(roots)
        found.append(meter.restart())
    sandbox.layer.zero_grad()
    return found[1:]


def _whole(sandbox: Sandbox, is_held: bool) -> list[int]:
    """The most memory of the first B, of the second, and of a later one."""
    found: list[int] = []
    sums = Sums()
    for _ in range(SUMMED):
        cell = Cell(sandbox, sandbox.input(), is_held)
        with sums.adding_at_once(cell.weights), Meter(sandbox.device) as meter:
            grads = backward(cell.roots, cell.grads, [*cell.inputs, *cell.weights])
        found.append(meter.highest + cell.given)
        sums.add(cell.weights, grads[len(cell.inputs) :])
        del grads
        if all(x.nbytes < LARGE for x in cell.weights):
            # Sums change after backward, and not while it runs.
            return found * SUMMED
    return found


def _halves(sandbox: Sandbox, is_held: bool) -> Backward:
    """The memory of I and W."""
    # What is there before is not counted.
    batch = sandbox.input()
    with Meter(sandbox.device) as whole:
        cell = Cell(sandbox, batch, is_held)
        halves = Halves(cell.roots, cell.grads, cell.inputs, cell.weights)
        given, outputs = cell.given, storages(cell.grads)
        del cell
        with Meter(sandbox.device) as meter:
            inputs = halves.input()
        half = meter.highest + given
        pending = whole.now - sum(x.nbytes for x in inputs if x is not None)
        del inputs
        noted = storages(halves.noted)
    with Meter(sandbox.device) as meter:
        halves.weight()
    return Backward(
        half=Peak(half, half),
        noted=sum(size for place, size in noted.items() if place not in outputs),
        notes_output=bool(outputs.keys() & noted.keys()),
        pending=max(0, pending),
        weight=meter.highest,
    )


def own_outputs(sandbox: Sandbox, output: Batch) -> list[Tensor]:
    """The outputs that backward begins with; skips that pass by the layer have none here."""
    return [
        x
        for key, tensors in output.parts.items()
        if key not in sandbox.batch.skips
        for x in tensors
        if x.requires_grad
    ]
