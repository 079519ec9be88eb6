"""The beginning of a cell's graph, for cells whose backward runs by itself."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from torchgpipe._torch.dynamo import uncompiled
from torchgpipe.autograd.phony import get_phony

__all__: list[str] = []


class Enter(torch.autograd.Function):
    """Make tensors the beginning of a graph: ``phony, *tensors → *tensors``.

    PyTorch's own node for this (``DelayedError``) begins in a third of the time, but gives tensors
    new version counters: then no stage would notice that a later one changes its output in place.
    """

    @staticmethod
    def forward(ctx: Any, phony: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple([tensor.detach() for tensor in tensors])

    @staticmethod
    @uncompiled
    def backward(ctx: Any, *grads: Tensor | None) -> NoReturn:
        raise RuntimeError(
            "under a schedule, a gradient must come by the loss, since the stages before this one "
            "have run their backward already (gradient of: a value that a layer has kept, such as "
            "an auxiliary loss); have the layer return it as an output, and add it in the loss "
            "function"
        )


def enter(*tensors: Tensor) -> tuple[tuple[Tensor, ...], list[GradientEdge]]:
    """Make tensors the beginning of a graph.

    Unlike leaves, the tensors that it returns are not kept alive by their graph, and layers may
    change them in place.

    Returns:
        The tensors, and the edges at which backward of the cell ends, with their gradients.
    """
    # What arrives is a leaf, which the graph would keep for the gradient.
    # guard: letting go of what arrives
    detached = [x.detach() for x in tensors]
    found = Enter.apply(get_phony(tensors[0].device, requires_grad=True), *detached)
    return found, [get_gradient_edge(x) for x in found]
