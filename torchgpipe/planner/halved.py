"""The memory of a layer's backward in halves: for its input, and for its weights."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.multiprocessing.reductions import StorageWeakRef

from torchgpipe.autograd.entrance import enter
from torchgpipe.autograd.halves import Halves
from torchgpipe.planner.sandbox import Sandbox
from torchgpipe.planner.storages import LiveStorages
from torchgpipe.values.microbatch import VALUE, Batch

__all__ = ["Halved", "Root", "halved"]


class Halved(NamedTuple):
    """The memory of a backward in halves, in bytes.

    Attributes:
        held: the most during I, above what was kept for it, with the gradients of the outputs,
            which stay.
        free: likewise if these go with their last use.
        weight: the most during W, above that before.
        pending: what is kept from I until W, values and gradients of the outputs aside.
        noted: the other gradients among it.
        notes_output: whether those of the outputs are kept until W, too.
    """

    held: float = 0
    free: float = 0
    weight: float = 0
    pending: float = 0
    noted: float = 0
    notes_output: bool = False


class Root(torch.autograd.Function):
    """A number whose backward makes the gradients of tensors, and nobody else holds them."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> Tensor:
        ctx.metas = [(x.shape, x.dtype, x.device) for x in tensors]
        # The number is real, whatever the tensors are.
        return torch.zeros((), device=tensors[0].device)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return tuple(
            [torch.ones(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.metas]
        )


def halved(sandbox: Sandbox) -> tuple[Halved, list[Tensor]]:
    """Run the backward of a layer in halves, and see the memory.

    Returns:
        The memory, and the tensors of the sandbox's input and output that W needs.
    """
    free = _first_half(sandbox, sandbox.input(), is_held=False).most
    # What is there before is not counted.
    batch = sandbox.input()
    with LiveStorages() as whole:
        half = _first_half(sandbox, batch, is_held=True)
        del batch
        whole.highest = now = sum(whole.sizes())
        late = [value for memory, value in half.values.items() if not memory.expired()]
        noted = sizes_of(half.halves.noted)
        half.halves.weight()
    outputs = sum(size for place, size in half.given.items() if place in noted)
    return (
        Halved(
            half.most,
            free,
            whole.highest - now,
            now - outputs - sum(size for _, size in late),
            sum(size for place, size in noted.items() if place not in half.given),
            bool(outputs),
        ),
        [x for x, _ in late],
    )


class _Half(NamedTuple):
    """The first half of a backward.

    Attributes:
        most: the most memory.
        halves: the second half.
        given: the memory of the gradients of the outputs.
        values: for the memory of the input and of the output the tensor of the sandbox, and the
            bytes that the layer has made.
    """

    most: float
    halves: Halves
    given: dict[int, int]
    values: dict[StorageWeakRef, tuple[Tensor, int]]


def _first_half(sandbox: Sandbox, batch: Batch, *, is_held: bool) -> _Half:
    """Run a layer forward, as the cell of a schedule, and the first half of its backward."""
    values = {_memory(y): (x, 0) for x, y in _pairs(sandbox.batch, batch)}
    batch, ends = _entered(sandbox, batch)
    output = sandbox.forward(batch)
    for x, y in _pairs(sandbox.output, output):
        values.setdefault(_memory(y), (x, y.untyped_storage().nbytes()))
    outputs = own_outputs(sandbox, output)
    roots = outputs if is_held else [Root.apply(*outputs)]
    grads = [torch.ones_like(x) for x in roots]
    weights = [x for x in sandbox.layer.parameters() if x.requires_grad]
    halves = Halves([get_gradient_edge(x) for x in roots], grads, ends, weights)
    given = sizes_of(grads) if is_held else {}
    del batch, output, outputs, roots, grads, y
    with LiveStorages() as storages:
        halves.input()
    return _Half(storages.highest + sum(given.values()), halves, given, values)


def _pairs(batch: Batch, other: Batch) -> list[tuple[Tensor, Tensor]]:
    """The tensors of two micro-batches that are alike."""
    pairs = [pair for key in batch.parts for pair in zip(batch.parts[key], other.parts[key])]
    return [(x, y) for x, y in pairs if y.layout == torch.strided]


def _memory(tensor: Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())


def _entered(sandbox: Sandbox, batch: Batch) -> tuple[Batch, list[GradientEdge]]:
    """The input as the beginning of a graph, and its edges; what is popped gets a gradient, too."""
    arriving = [VALUE, *[x for x in batch.skips if x not in sandbox.output.skips]]
    needing = [x for key in arriving for x in batch.parts[key] if x.requires_grad]
    if not needing:
        return batch, []
    entered, edges = enter(*needing)
    passed = dict(zip(map(id, needing), entered))
    found = batch.map(lambda *xs: [passed.get(id(x), x) for x in xs], arriving)
    return found, edges


def own_outputs(sandbox: Sandbox, output: Batch) -> list[Tensor]:
    """The outputs that backward begins with; skips that pass by the layer have none here."""
    return [
        x
        for key, own in output.parts.items()
        if key not in sandbox.batch.skips
        for x in own
        if x.requires_grad
    ]


def sizes_of(values: Iterable[Tensor]) -> dict[int, int]:
    """The addresses of the memory of tensors, with its bytes."""
    found = [x.untyped_storage() for x in values if x.layout == torch.strided and x.numel()]
    return {x.data_ptr(): x.nbytes() for x in found}
