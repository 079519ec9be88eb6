"""A look at one layer at one size of micro-batch: what it keeps, and the times of its parts."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks

from torchgpipe.autograd.entrance import Enter
from torchgpipe.autograd.halves import Halves
from torchgpipe.autograd.phony import get_phony
from torchgpipe.balance.sandbox import Sandbox
from torchgpipe.balance.storages import LiveStorages
from torchgpipe.devices.measures import (
    Stopwatch,
    forget_peak,
    memory_allocated,
    peak_memory,
)
from torchgpipe.partition.placement import tensors
from torchgpipe.values.microbatch import VALUE, Batch

__all__ = ["Look", "look", "sample"]

T = TypeVar("T")


@dataclass(frozen=True)
class Look:
    """The memory of a layer, in bytes, as :class:`~torchgpipe.planner.layers.Layer` has it."""

    inner: int
    pending: int
    output: int
    forward_peak: int
    backward_peak: int
    parameters: int
    trainable: int
    largest: int
    saves_input: bool
    saves_output: bool
    depends: bool


def look(sandbox: Sandbox) -> Look:
    """Run a layer forward and backward, and see what it keeps in between."""
    batch = sandbox.input()
    saved: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        if x.layout == torch.strided and x.numel():
            saved[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        # An output that its own node holds, with the node that it holds, would never be freed.
        return x.detach()

    incoming = _storages(batch)
    with saved_tensors_hooks(pack, lambda x: x):
        forward_peak, output = _peak(sandbox, lambda: sandbox.forward(batch))
    outgoing = _storages(output.parts[VALUE])
    own = _storages(x for _, x in tensors(sandbox.layer))
    inner = saved.keys() - incoming.keys() - outgoing.keys() - own.keys()
    outputs = own_outputs(sandbox, output)
    depends, size = bool(outputs), sum(outgoing.values())
    backward_peak = 0
    if depends:
        Root.apply(*outputs).backward()
        del outputs, output
        output = sandbox.forward(sandbox.input())
        # From here on only the graph holds what it has saved, as in a step. And weights have a
        # gradient, to which another one is added.
        root = Root.apply(*own_outputs(sandbox, output))
        del output
        backward_peak, _ = _peak(sandbox, root.backward)
    sandbox.layer.zero_grad()
    weights = {*sandbox.layer.parameters()}
    return Look(
        inner=sum(saved[x] for x in inner),
        pending=_pending(sandbox) if depends else 0,
        output=size,
        forward_peak=forward_peak,
        backward_peak=backward_peak,
        parameters=sum(own.values()),
        trainable=sum(x.nbytes for x in weights if x.requires_grad),
        largest=max((x.nbytes for x in weights if x.requires_grad), default=0),
        saves_input=bool(saved.keys() & incoming.keys()),
        saves_output=bool(saved.keys() & (outgoing.keys() - incoming.keys())),
        depends=depends,
    )


class Root(torch.autograd.Function):
    """A number whose backward makes the gradients of tensors, which nobody else holds."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> Tensor:
        ctx.metas = [(x.shape, x.dtype, x.device) for x in tensors]
        return tensors[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        return tuple(
            [torch.ones(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.metas]
        )


def _pending(sandbox: Sandbox) -> int:
    """The memory that a layer keeps from I until W, its input aside."""
    batch = sandbox.input()
    needing = [x for x in batch.parts[VALUE] if x.requires_grad]
    before = memory_allocated(sandbox.device)
    with LiveStorages() if before is None else nullcontext() as storages:
        entered: Iterable[Tensor] = ()
        if needing:
            entered = Enter.apply(get_phony(needing[0].device, requires_grad=True), *needing)
        edges = [get_gradient_edge(x) for x in entered]
        passed = iter(entered)
        output = sandbox.forward(
            batch.map(lambda *xs: [next(passed) if x.requires_grad else x for x in xs], [VALUE])
        )
        del entered
        roots = own_outputs(sandbox, output)
        gradients = [torch.ones_like(x) for x in roots]
        weights = [x for x in sandbox.layer.parameters() if x.requires_grad]
        halves = Halves([get_gradient_edge(x) for x in roots], gradients, edges, weights)
        del output, roots, gradients
        found = halves.input()
        now = memory_allocated(sandbox.device)
        kept = sum(storages.sizes()) if storages is not None else (now or 0) - (before or 0)
        kept -= sum(x.nbytes for x in found if x is not None)
        halves.weight()
    return max(0, kept)


def sample(sandbox: Sandbox) -> tuple[float, float, float, float]:
    """Run a layer, and return milliseconds: forward, backward for its input, backward, again.

    ``again`` is the time up to the last tensor that the forward saves, weights aside: a second run
    under checkpointing ends there.
    """
    watch, until = sandbox.stopwatch, Stopwatch(sandbox.device)
    own = _storages(x for _, x in tensors(sandbox.layer))
    last: list[float] = [0.0]

    def pack(x: Tensor) -> Tensor:
        if x.layout == torch.strided and x.untyped_storage().data_ptr() not in own:
            last[0] = until.stop()
        return x.detach()

    batch = sandbox.input()
    with saved_tensors_hooks(pack, lambda x: x):
        until.start()
        output = sandbox.forward(batch)
    del output
    batch = sandbox.input()
    entries = [x for x in batch.parts[VALUE] if x.requires_grad]
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


def own_outputs(sandbox: Sandbox, output: Batch) -> list[Tensor]:
    """The outputs that backward begins with; skips that pass by the layer have none here."""
    return [
        x
        for key, tensors in output.parts.items()
        if key not in sandbox.batch.skips
        for x in tensors
        if x.requires_grad
    ]


def _storages(values: Iterable[Tensor]) -> dict[int, int]:
    """The addresses of the memory of tensors, with its bytes."""
    storages = [x.untyped_storage() for x in values if x.layout == torch.strided and x.numel()]
    return {x.data_ptr(): x.nbytes() for x in storages}


def _peak(sandbox: Sandbox, run: Callable[[], T]) -> tuple[int, T]:
    """Call a function, and return the most memory that it has used at a time, and its result."""
    before = memory_allocated(sandbox.device)
    if before is None:
        with LiveStorages() as storages:
            result = run()
        return storages.highest, result
    forget_peak(sandbox.device)
    result = run()
    return max(0, (peak_memory(sandbox.device) or 0) - before), result
