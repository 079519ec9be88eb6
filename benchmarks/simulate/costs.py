"""Costs of the layers of a model, counted on the meta device, which computes nothing.

An operator takes the time of its arithmetic plus the time of its memory traffic, at the rates of a
GPU. This estimate tells cheap layers from costly ones, and models of the same size from one
another. An operator in backward counts for the layer whose forward recorded it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from benchmarks.models.experiments import Model, build, samples
from torchgpipe.balance.blockpartition import solve
from torchgpipe.skip.tracker import Skip, current_skip_tracker, skips

__all__ = ["P40", "Costs", "Gpu", "balance", "count"]


@dataclass(frozen=True)
class Gpu:
    """Rates of a GPU.

    Args:
        name: of the GPU.
        flops: floating point operations per millisecond.
        memory: bytes per millisecond to or from its memory.
        link: bytes per millisecond from one GPU to another.
    """

    name: str
    flops: float
    memory: float
    link: float


#: The torchgpipe paper's GPU: single precision, PCI Express 3.0 with 16 lanes.
P40 = Gpu("Tesla P40", 11.76e9, 346e6, 12e6)


@dataclass
class Costs:
    """Costs of each layer for a micro-batch.

    Args:
        forward: milliseconds of forward.
        backward: milliseconds of backward.
        parameters: bytes of parameters.
        saved: bytes that the layer saves for backward.
        outputs: bytes that go to the next layer.
        skips: source layer, target layer and bytes of each skip.
    """

    forward: list[float] = field(default_factory=list)
    backward: list[float] = field(default_factory=list)
    parameters: list[int] = field(default_factory=list)
    saved: list[int] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)
    skips: list[tuple[int, int, int]] = field(default_factory=list)


class Counter(TorchDispatchMode):
    """Dispatch mode that adds up the times of operators, layer by layer.

    Args:
        gpu: with the rates.
        layers: number of layers.
    """

    def __init__(self, gpu: Gpu, layers: int) -> None:
        super().__init__()
        self.gpu = gpu
        self.forward = [0.0] * layers
        self.backward = [0.0] * layers
        #: Number of the node that autograd would record first in each layer.
        self.begins: list[int] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        node = torch._C._current_autograd_node()
        if node is None:
            self.forward[len(self.begins) - 1] += self.time(func, args, kwargs or {}, output)
        else:
            layer = bisect_right(self.begins, node._sequence_nr()) - 1
            self.backward[layer] += self.time(func, args, kwargs or {}, output)
        return output

    def time(self, func: Any, args: Any, kwargs: Any, output: Any) -> float:
        """Milliseconds of an operator."""
        if func.is_view or func in FREE:
            return 0.0
        formula = flop_registry.get(func.overloadpacket)
        flops = formula(*args, **kwargs, out_val=output) if formula else 0
        tensors = [x for x in tree_leaves((args, kwargs, output)) if isinstance(x, Tensor)]
        traffic = sum(map(nbytes, tensors))
        return flops / self.gpu.flops + traffic / self.gpu.memory


_aten = torch.ops.aten

#: Operators that neither compute nor move data.
FREE = {
    _aten.empty.memory_format,
    _aten.empty_like.default,
    _aten.detach.default,
    _aten._unsafe_view.default,
}


def nbytes(tensor: Tensor) -> int:
    """Bytes of the elements of a tensor."""
    return tensor.numel() * tensor.element_size()


def count(model: Model, size: int, batch: int, gpu: Gpu = P40) -> Costs:
    """Count the costs of a model's layers for a micro-batch.

    Args:
        model: to count.
        size: of a sample.
        batch: samples in the micro-batch.
        gpu: with the rates.
    """
    with torch.device("meta"):
        layers = build(model)
        input = samples(model, size, batch, "meta")
    costs = Costs(parameters=[sum(map(nbytes, layer.parameters())) for layer in layers])
    counter = Counter(gpu, len(layers))
    stays = chain(layers.parameters(), layers.buffers())
    kept = {x.untyped_storage()._cdata for x in stays}
    # Memory that several layers save counts once.
    alive: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in kept:
            kept.add(storage._cdata)
            alive.append(tensor)
            costs.saved[-1] += storage.nbytes()
        return tensor

    sources: dict[Skip, tuple[int, Tensor]] = {}
    value = input
    with counter, torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        for layer in layers:
            counter.begins.append(torch._C._autograd._get_sequence_nr())
            costs.saved.append(0)
            value = layer(value)
            leaves = [x for x in tree_leaves(value) if isinstance(x, Tensor)]
            costs.outputs.append(sum(map(nbytes, leaves)))
            stashed, popped = ends(layer)
            stashes = current_skip_tracker().values
            sources.update({skip: (len(costs.saved) - 1, stashes[skip]) for skip in stashed})
            for skip in popped:
                source, stash = sources.pop(skip)
                costs.skips.append((source, len(costs.saved) - 1, nbytes(stash)))
        torch.autograd.backward(value, torch.empty_like(value))
    costs.forward, costs.backward = counter.forward, counter.backward
    return costs


def ends(layer: nn.Module) -> tuple[list[Skip], list[Skip]]:
    """Skips that a layer stashes for others, and skips of others that it pops."""
    found = [skips(module) for module in layer.modules()]
    stashed = [x for names, _ in found for x in names]
    popped = [x for _, names in found for x in names]
    return [x for x in stashed if x not in popped], [x for x in popped if x not in stashed]


def balance(costs: Sequence[float], n: int) -> list[int]:
    """Balance of ``n`` partitions whose costliest one is as cheap as possible."""
    return [len(block) for block in solve(costs, n)]
